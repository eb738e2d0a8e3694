"""What compiles for TPUs needs libtpu, which only `scripts/test --portability` installs."""

import pytest

from tests.portability.topologies import HAS_COMPILER, WITHOUT_COMPILER


def pytest_runtest_setup(item):
    # Raised in one place, so that pytest's summary has one line for all of them.
    if not HAS_COMPILER and item.get_closest_marker("tpu_compiler"):
        pytest.skip(WITHOUT_COMPILER)
