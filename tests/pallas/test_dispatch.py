"""The table of kernels names what is there."""

import importlib

import pytest

from jaxbuf.pallas.dispatch import KERNELS, asks_kernel, check_implementation, takes_call


@pytest.mark.parametrize("operation", KERNELS)
def test_every_kernel_is_where_the_table_says_and_says_what_it_needs(operation):
    for platform, kernel in KERNELS[operation].items():
        package = importlib.import_module(kernel.package)
        assert package.Call and package.supports and getattr(package, platform)
        assert asks_kernel(operation, platform) == platform
        assert kernel.generation in ("NVIDIA Hopper",)


def test_a_call_goes_to_the_kernel_of_the_platform_or_says_why_not(monkeypatch):
    assert asks_kernel("extend", "xla") is None
    assert asks_kernel("extend", "auto") is None, "the tests run without a GPU"
    assert asks_kernel("chunked", "auto") is None
    assert takes_call("extend", "gpu", None) and not takes_call("extend", "auto", "it needs more")
    with pytest.raises(ValueError, match='implementation="gpu" can not serve this extend: it needs more'):
        takes_call("extend", "gpu", "it needs more")
    with pytest.raises(
        ValueError, match='implementation="tpu" has no kernel for extend yet, expected "auto", "xla" or'
    ):
        check_implementation("extend", "tpu")
    with pytest.raises(ValueError, match='implementation must be one of "auto", "xla", got \'fast\''):
        check_implementation("prefill", "fast")
