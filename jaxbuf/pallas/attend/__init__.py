"""The kernels of `append_and_attend`, and of `append_and_attend_latent` on TPUs, and what they can serve."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbuf.pallas.attend import tpu_call
from jaxbuf.pallas.attend.call import MOST_TILES, TILE, Call, Integers

__all__ = ["Call", "Integers", "gpu", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A platform's kernel is imported when it is asked for: each imports that platform's part of Pallas."""
    if name in ("gpu", "tpu"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(
    call: Call,
    *,
    q: np.dtype,
    k: np.dtype,
    v: np.dtype,
    platform: str = "gpu",
    generation: str = "",
    rank: int | None = None,
) -> str | None:
    """Whether a platform's kernel serves a call whose inputs have these dtypes.

    Args:
      call: The call.
      q, k, v: The dtypes.
      platform: "gpu" or "tpu".
      generation: Of a TPU, whose memory decides; as in `jaxbuf.target.Target`.
      rank: Values are the first so many numbers of the keys, which a TPU's kernel serves; None: they have their pages.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    inputs = ", ".join(np.dtype(x).name for x in (q, k, v))
    needs = (
        _gpu_needs(call) if platform == "gpu" else tpu_call.needs(call, tpu_call.arrange(call, generation, rank=rank))
    )
    same = all(x == call.dtype for x in (q, k, v)), f"q, k and v in the pages' {call.dtype.name}, got {inputs}"
    return next((f"it needs {need}" for met, need in (*needs, same) if not met), None)


def _gpu_needs(call: Call) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.attend import gpu, gpu_parts

    most, group, dtypes = gpu_parts.MOST_TOKENS, call.group, (jnp.bfloat16, jnp.float16)
    return (
        (call.dtype in dtypes, f"pages in bfloat16 or float16, got {call.dtype.name}"),
        (call.head_dim in gpu.HEAD_DIMS, f"head_dim 64, 128 or 256, got {call.head_dim}"),
        (call.page_size in gpu_parts.PAGE_SIZES, f"pages of 8, 16, 32 or 64, got {call.page_size}"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
        (call.tiles <= MOST_TILES, f"tokens · heads / kv_heads at most {MOST_TILES * TILE}, got {call.time} · {group}"),
    )
