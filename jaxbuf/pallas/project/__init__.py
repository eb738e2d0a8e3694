"""The kernel of `project` and its kin, and what it can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.project import gpu
from jaxbuf.pallas.project.call import Call

__all__ = ["Call", "gpu", "supports"]


def supports(call: Call) -> str | None:
    """Whether the GPU kernel serves a call.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    sizes = ", ".join(map(str, call.outputs))
    needs = (
        (call.dtype in (jnp.bfloat16, jnp.float16), f"x and weights in bfloat16 or float16, got {call.dtype.name}"),
        (1 <= call.tokens <= gpu.MOST_TOKENS, f"rows · time in [1, {gpu.MOST_TOKENS}], got {call.tokens}"),
        (
            call.inputs % (gpu.STEP * call.slices) == 0,
            f"in, the numbers of a row, in {gpu.STEP * call.slices}s, got {call.inputs}",
        ),
        (all(n % 8 == 0 for n in call.outputs), f"out, the rows of each weight, in eights, got {sizes}"),
        (all(d in (call.dtype, jnp.float32) for d in call.dtypes), "results in float32 or in the dtype of x"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
