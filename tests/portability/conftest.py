"""What compiles for TPUs needs libtpu, which only `scripts/test --portability` installs."""

import pytest

from jaxbuf.tpu_compiler import HAS_COMPILER

WITHOUT_COMPILER = "needs the TPU compiler (libtpu): scripts/test --portability installs it and runs these"


def pytest_runtest_setup(item):
    # Raised in one place, so that pytest's summary has one line for all of them.
    if not HAS_COMPILER and item.get_closest_marker("tpu_compiler"):
        pytest.skip(WITHOUT_COMPILER)
