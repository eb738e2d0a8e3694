"""The kernel of `add_and_norm`, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.add_and_norm import gpu
from jaxbuf.pallas.add_and_norm.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call) -> str | None:
    """Whether the GPU kernel serves a call.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (
        (call.dtype in (jnp.bfloat16, jnp.float16), f"numbers in bfloat16 or float16, got {call.dtype.name}"),
        (call.hidden % 8 == 0, f"hidden, the numbers of a token, in eights, got {call.hidden}"),
        (gpu.LEAST <= call.hidden <= gpu.MOST, f"hidden in [{gpu.LEAST}, {gpu.MOST}], got {call.hidden}"),
        (call.tokens >= 1, f"rows · time at least 1, got {call.tokens}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
