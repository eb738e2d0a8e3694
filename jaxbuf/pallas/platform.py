"""What this process runs on, and whether implementation="auto" may take kernels."""

import contextlib
from collections.abc import Iterator

import jax

_wanted = True  # False inside `without_kernels`


def has_hopper() -> bool:
    """Whether implementation="auto" takes the GPU kernels: on an NVIDIA Hopper GPU (H100, H200)."""
    return _wanted and jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """A context in which implementation="auto" takes no kernel.

    What was compiled before is compiled again inside, and once more behind it: all of jax's caches are cleared.
    """
    global _wanted
    before, _wanted = _wanted, False
    jax.clear_caches()
    try:
        yield
    finally:
        _wanted = before
        jax.clear_caches()
