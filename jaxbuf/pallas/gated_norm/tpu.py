"""`gated_norm` on TPUs: Pallas Mosaic TPU.

A program computes some tokens of a launch, one head after another: of the recurrence's output a head's numbers are read
with a stride, of the gate and the result they are a slice of lanes.

Floor: (out + z + result) / read bandwidth.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.gated_norm.call import Call

LANES = 128
BLOCK_BYTES = 2**20  # of a block's gates, in float32
TOKENS = 16  # a block's tokens are a multiple of it, unless there are fewer


def gated_norm(call: Call, out: Array, z: Array, weight: Array, *, interpret: Any = False) -> Array:
    """`jaxbuf.recurrence.gated_norm.gated_norm`; `supports` says for which sizes.

    Args:
      call: The call's size and dtypes.
      out: [rows, T, heads, value_dim] in call.out.
      z: [rows, T, heads · value_dim] in call.z.
      weight: [value_dim].
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      [rows, T, heads · value_dim] in call.z.
    """
    heads, dim = out.shape[2:]
    tokens = out.shape[0] * out.shape[1]
    block = max(TOKENS, BLOCK_BYTES // (4 * heads * dim) // TOKENS * TOKENS)
    block = min(block, -(-tokens // 8) * 8)

    def gated_norm_tokens(out_ref, z_ref, weight_ref, result_ref):  # A profile shows this name.
        scale = weight_ref[...].astype(jnp.float32)
        for head in range(heads):
            lanes = pl.ds(head * dim, dim)
            x, gate = out_ref[:, head].astype(jnp.float32), z_ref[:, lanes].astype(jnp.float32)
            mean = jnp.sum(x * x, axis=1, keepdims=True) * np.float32(1 / dim)
            normal = (x * lax.rsqrt(mean + np.float32(call.eps)) * scale).astype(call.out).astype(jnp.float32)
            sigmoid = 1 / (1 + jnp.exp(-gate))
            gate = sigmoid if call.activation == "sigmoid" else gate * sigmoid
            result_ref[:, lanes] = (normal * gate).astype(call.z)

    width = heads * dim
    wide = pl.BlockSpec((block, width), lambda i: (i, 0))
    found = pl.pallas_call(
        gated_norm_tokens,
        grid=(pl.cdiv(tokens, block),),
        in_specs=[
            pl.BlockSpec((block, heads, dim), lambda i: (i, 0, 0)),
            wide,
            pl.BlockSpec((1, dim), lambda i: (0, 0)),
        ],
        out_specs=wide,
        out_shape=jax.ShapeDtypeStruct((tokens, width), call.z),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,)),
        interpret=interpret,
    )(out.reshape(tokens, heads, dim), z.reshape(tokens, width), weight[None])
    return found.reshape(z.shape)
