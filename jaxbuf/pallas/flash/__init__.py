"""Flash attention of whole sequences, and of chunks of prompts: cuDNN's kernel, and what it can serve.

It is no kernel of ours, but asked for like one: `jaxbuf.attention.flash.flash` is the function that it is a faster
version of.
"""

import jax.numpy as jnp
import numpy as np

from jaxbuf.pallas.flash import gpu
from jaxbuf.pallas.flash.call import Call

__all__ = ["Call", "gpu", "supports"]

WIDE = ("Hopper",)  # generations whose heads may have up to 256 numbers; those of the others up to 128


def supports(call: Call, *, k: np.dtype, v: np.dtype) -> str | None:
    """Whether cuDNN serves a call whose keys and values have these dtypes.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    most, dtypes = 256 if call.generation in WIDE else 128, (jnp.bfloat16, jnp.float16)
    inputs = ", ".join(np.dtype(x).name for x in (call.dtype, k, v))
    same = call.dtype == k == v
    head_dim = f"head_dim a multiple of 8, at most {most} on {call.generation} GPUs, got {call.head_dim}"
    needs = (
        (call.dtype in dtypes and same, f"q, k and v in bfloat16 or float16, all in one, got {inputs}"),
        (call.head_dim % 8 == 0 and 0 < call.head_dim <= most, head_dim),
        (call.time > 0 and call.keys > 0, f"queries and keys, got {call.time} and {call.keys} tokens"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
