"""`gated_norm` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves four heads, each with one warp. A thread has four neighbouring channels of its head.

Floor: (out + z + result) / read bandwidth. Below some 256 rows, the 2 to 3 us that any launch takes are more.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.gated_norm.call import Call
from jaxbuf.pallas.threads import COMPILER, load, store

HEADS = 4  # heads that a block serves, one with each warp
DIM = 128  # channels of a head, four for each thread

CHANNELS = plgpu.Layout.TILED(plgpu.Tiling(((HEADS, DIM), (4,))), (-3,), (-2,), -1)


def gated_norm(call: Call, out: Array, z: Array, weight: Array, *, interpret: bool = False) -> Array:
    """`jaxbuf.recurrence.gated_norm.gated_norm`; `supports` says for which sizes.

    Args:
      call: The call's size and dtypes.
      out: [rows, T, heads, 128] in call.out.
      z: [rows, T, heads · 128] in call.z.
      weight: [128].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [rows, T, heads · 128] in call.z.
    """
    flat = call.heads, DIM
    return _kernel(call, interpret)(out.reshape(flat), z.reshape(flat), weight).reshape(z.shape)


def _kernel(call: Call, interpret: bool):
    def gated_norm_heads(out_ref, z_ref, weight_ref, result_ref):  # A profile shows this name.
        heads = pl.ds(HEADS * lax.axis_index("heads"), HEADS)
        x = load(out_ref.at[heads], CHANNELS).astype(jnp.float32)
        z = load(z_ref.at[heads], CHANNELS).astype(jnp.float32)
        weight = load(weight_ref, CHANNELS.reduce(0)).astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1) * np.float32(1 / DIM)
        x = x * _spread(lax.rsqrt(mean + np.float32(call.eps)), 0) * _spread(weight, 1)
        root = lax.rsqrt(np.float32(1) + jnp.exp(-z))  # Its square is the sigmoid. A division takes ten instructions.
        gate = root * root if call.activation == "sigmoid" else z * (root * root)
        store(result_ref.at[heads], (x.astype(call.out).astype(jnp.float32) * gate).astype(call.z))

    return plgpu.kernel(
        gated_norm_heads,
        out_type=jax.ShapeDtypeStruct((call.heads, DIM), call.z),
        grid=(call.heads // HEADS,),
        grid_names=("heads",),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _spread(x: Array, axis: int) -> Array:
    """[HEADS] (axis 0) or [DIM] (axis 1), repeated along the other axis: [HEADS, DIM]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (HEADS, DIM), [axis]), CHANNELS)
