"""The kernel of `norm_and_rotate`, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.norm_and_rotate import gpu
from jaxbuf.pallas.norm_and_rotate.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call) -> str | None:
    """Whether the GPU kernel serves a call.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    dims = ", ".join(map(str, gpu.HEAD_DIMS[:-1])) + f" or {gpu.HEAD_DIMS[-1]}"
    needs = (
        (call.dtype in (jnp.bfloat16, jnp.float16), f"queries in bfloat16 or float16, got {call.dtype.name}"),
        (call.head_dim in gpu.HEAD_DIMS, f"a head_dim of {dims}, got {call.head_dim}"),
        (
            2 * call.half <= call.head_dim and call.half >= gpu.PIECE and call.half & (call.half - 1) == 0,
            f"an angle for 8, 16, 32 ... pairs of channels of {call.head_dim}, got {call.half}",
        ),
        (call.width % gpu.PIECE == 0, f"heads of queries in multiples of {gpu.PIECE} numbers, got {call.width}"),
        (call.tokens >= 1, f"rows · time at least 1, got {call.tokens}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
