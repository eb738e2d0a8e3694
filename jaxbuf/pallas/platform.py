"""What this process runs on, and whether its kernels are wanted."""

import contextlib
from collections.abc import Iterator

import jax

_wanted = True


def has_hopper() -> bool:
    """Whether implementation="auto" takes the kernels in `gpu.py`: on an NVIDIA Hopper GPU (H100, H200)."""
    return _wanted and jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inside it implementation="auto" takes no kernel. Compiled functions are forgotten before and after."""
    global _wanted
    before, _wanted = _wanted, False
    jax.clear_caches()
    try:
        yield
    finally:
        _wanted = before
        jax.clear_caches()
