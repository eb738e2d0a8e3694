"""The kernels of `gated_norm`, and what they can serve."""

import importlib
from typing import Any

import jax.numpy as jnp

from jaxbuf.pallas.gated_norm.call import Call

__all__ = ["Call", "gpu", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A platform's kernel is imported when it is asked for: each imports that platform's part of Pallas."""
    if name in ("gpu", "tpu"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(call: Call, *, value_dim: int, platform: str = "gpu") -> str | None:
    """Whether a platform's kernel serves a call whose heads have `value_dim` numbers.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (
        *(_gpu_needs(call, value_dim) if platform == "gpu" else _tpu_needs(value_dim)),
        (call.out in (jnp.float32, jnp.bfloat16), f"out in float32 or bfloat16, got {call.out.name}"),
        (call.z in (jnp.float32, jnp.bfloat16), f"z in float32 or bfloat16, got {call.z.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)


def _gpu_needs(call: Call, value_dim: int) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.gated_norm import gpu

    return (
        (value_dim == gpu.DIM, f"value_dim {gpu.DIM}, got {value_dim}"),
        (call.heads % gpu.HEADS == 0, f"rows · time · heads in fours, got {call.heads}"),
    )


def _tpu_needs(value_dim: int) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.gated_norm import tpu

    return ((value_dim % tpu.LANES == 0, f"a value_dim that is a multiple of {tpu.LANES}, got {value_dim}"),)
