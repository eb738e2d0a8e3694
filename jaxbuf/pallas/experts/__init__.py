"""The kernel of a layer's routed experts, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.experts import gpu
from jaxbuf.pallas.experts.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call) -> str | None:
    """Whether the GPU kernel serves a product.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (
        (call.dtype in (jnp.bfloat16, jnp.float16), f"x and weights in bfloat16 or float16, got {call.dtype.name}"),
        (call.rows >= 1, f"rows, got {call.rows}"),
        (call.inputs % gpu.STEP == 0, f"in, the numbers of a row, in {gpu.STEP}s, got {call.inputs}"),
        (call.outputs % 8 == 0, f"out, the rows of an expert's weight, in eights, got {call.outputs}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
