"""The kernel of `append_and_attend`, and what it can serve."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.pallas.attend import gpu
from jaxbuf.pallas.attend.call import MOST_TILES, TILE, Call, Integers

__all__ = ["Call", "Integers", "gpu", "supports"]


def supports(call: Call, *, q: np.dtype, k: np.dtype, v: np.dtype) -> str | None:
    """Whether the GPU kernel serves a call whose inputs have these dtypes.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    most, group, dtypes = gpu.MOST_TOKENS, call.group, (jnp.bfloat16, jnp.float16)
    inputs = ", ".join(np.dtype(x).name for x in (q, k, v))
    needs = (
        (call.dtype in dtypes, f"pages in bfloat16 or float16, got {call.dtype.name}"),
        (all(x == call.dtype for x in (q, k, v)), f"q, k and v in the pages' {call.dtype.name}, got {inputs}"),
        (call.head_dim in gpu.HEAD_DIMS, f"head_dim 64, 128 or 256, got {call.head_dim}"),
        (call.page_size in gpu.PAGE_SIZES, f"pages of 8, 16, 32 or 64, got {call.page_size}"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
        (call.tiles <= MOST_TILES, f"tokens · heads / kv_heads at most {MOST_TILES * TILE}, got {call.time} · {group}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
