"""The kernel of `prepare`, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.prepare import gpu
from jaxbuf.pallas.prepare.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call, *, key_dim: int, value_dim: int, width: int, tree: bool) -> str | None:
    """Whether the GPU kernel serves a call.

    Args:
      call: The call.
      key_dim, value_dim: As in `RecurrenceSpec`.
      width: Taps of the convolution.
      tree: Whether a token may follow another than the one before it.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    most = min(gpu.MOST_TOKENS, call.ring - gpu.WIDTH + 1)
    needs = (
        ((key_dim, value_dim) == (gpu.DIM, gpu.DIM), f"key_dim and value_dim {gpu.DIM}, got {key_dim}, {value_dim}"),
        (call.key_heads % gpu.HEADS == 0, f"key heads in fours, got {call.key_heads}"),
        (width == gpu.WIDTH, f"a convolution of width {gpu.WIDTH}, got {width}"),
        (not tree, "tokens in sequence, got order or parents"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
        (call.dtype in (jnp.float32, jnp.bfloat16), f"float32 or bfloat16 inputs, got {call.dtype.name}"),
        (call.stored == call.dtype, f"a ring of the inputs' dtype {call.dtype.name}, got {call.stored.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
