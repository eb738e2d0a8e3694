"""The kernel of `gated_norm`, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.gated_norm import gpu
from jaxbuf.pallas.gated_norm.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call, *, value_dim: int) -> str | None:
    """Whether the GPU kernel serves a call whose heads have `value_dim` numbers.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (
        (value_dim == gpu.DIM, f"value_dim {gpu.DIM}, got {value_dim}"),
        (call.heads % gpu.HEADS == 0, f"rows · time · heads in fours, got {call.heads}"),
        (call.out in (jnp.float32, jnp.bfloat16), f"out in float32 or bfloat16, got {call.out.name}"),
        (call.z in (jnp.float32, jnp.bfloat16), f"z in float32 or bfloat16, got {call.z.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
