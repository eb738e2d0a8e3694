"""The kernels of `gated_norm` and `grouped_norm`, and what they can serve."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxbuf.pallas.gated_norm.call import Call

__all__ = ["Call", "gpu", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A platform's kernel is imported when it is asked for: each imports that platform's part of Pallas."""
    if name in ("gpu", "tpu"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(call: Call, *, platform: str = "gpu") -> str | None:
    """Whether a platform's kernel serves a call.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    dtypes = (
        (call.out in (jnp.float32, jnp.bfloat16), f"out in float32 or bfloat16, got {call.out.name}"),
        (call.z in (jnp.float32, jnp.bfloat16), f"z in float32 or bfloat16, got {call.z.name}"),
    )
    needs = itertools.chain(dtypes, _gpu_needs(call) if platform == "gpu" else _tpu_needs(call))
    return next((f"it needs {need}" for met, need in needs if not met), None)


def _gpu_needs(call: Call) -> Iterator[tuple[bool, str]]:
    from jaxbuf.pallas.gated_norm import gpu

    lengths = (gpu.SHORTEST, gpu.SHORT), (gpu.MIDDLE, gpu.MIDDLEST), (gpu.LONG, gpu.LONGEST)
    fits = any(call.dim % step == 0 and 0 < call.dim <= most for step, most in lengths)
    in_steps = ", ".join(f"of {step} up to {most}" for step, most in lengths)
    many, each = ("heads", "value_dim") if call.form == "head" else ("groups", "channels of a group")
    yield fits, f"{each} in multiples {in_steps}, got {call.dim}"
    together, _ = gpu.share(call)
    yield call.vectors >= together, f"rows · time · {many} at least {together} for {call.dim}, got {call.vectors}"
    in_blocks = call.groups == 1 or not together or call.groups % together == 0
    if call.values is not None:
        yield call.values in (jnp.float32, jnp.bfloat16), f"values in float32 or bfloat16, got {call.values.name}"
        yield call.value_dim % gpu.PIECE == 0, f"value_dim in multiples of {gpu.PIECE}, got {call.value_dim}"
    yield in_blocks, f"one group of {call.dim}, or a multiple of {together}, got {call.groups}"


def _tpu_needs(call: Call) -> Iterator[tuple[bool, str]]:
    from jaxbuf.pallas.gated_norm import tpu

    yield call.form == "head", "a norm of each head, not of groups of channels"
    yield call.dim % tpu.LANES == 0, f"a value_dim that is a multiple of {tpu.LANES}, got {call.dim}"
