"""The kernels of a layer's routed experts, and what they can serve.

`Call` describes one of the two products, `supports` says whether a platform's kernel serves it. On GPUs the kernel is
ours (`gpu.multiply_groups`, and of a few tokens `gpu_few`), on TPUs it is JAX's Megablox (`tpu.multiply_groups`). On
GPUs `choose` has the router's choice, and `gpu_places` what is around the products.
"""

import jax.numpy as jnp

from jaxbuf.pallas.experts.call import Call

__all__ = ["Call", "supports"]

STEP = 64  # numbers of a row that the GPU kernel multiplies at once
LANES = 128  # numbers of a tile's row on a TPU


def supports(call: Call, *, platform: str = "gpu") -> str | None:
    """Whether a platform's kernel serves a product.

    Args:
      call: The product.
      platform: "gpu" or "tpu".

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    if platform == "tpu":
        needs = (
            (call.dtype == jnp.bfloat16, f"x and weights in bfloat16, got {call.dtype.name}"),
            (call.rows >= 1, f"rows, got {call.rows}"),
            (call.inputs % LANES == 0, f"in, the numbers of a row, in {LANES}s, got {call.inputs}"),
            (call.outputs % LANES == 0, f"out, the rows of an expert's weight, in {LANES}s, got {call.outputs}"),
        )
    else:
        needs = (
            (call.dtype in (jnp.bfloat16, jnp.float16), f"x and weights in bfloat16 or float16, got {call.dtype.name}"),
            (call.rows >= 1, f"rows, got {call.rows}"),
            (call.inputs % STEP == 0, f"in, the numbers of a row, in {STEP}s, got {call.inputs}"),
            (call.outputs % 8 == 0, f"out, the rows of an expert's weight, in eights, got {call.outputs}"),
        )
    return next((f"it needs {need}" for met, need in needs if not met), None)
