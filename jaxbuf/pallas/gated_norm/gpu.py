"""`gated_norm` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves four heads, a warp each; a thread has four neighbouring channels.

Floor: (out + z + result) / read bandwidth, which a launch's own 2 to 3 us exceed below some 256 rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.lanes import COMPILER, load

type Array = jax.Array

HEADS = 4  # of a block: one a warp
DIM = 128  # channels of a head: four a thread

CHANNELS = plgpu.Layout.TILED(plgpu.Tiling(((HEADS, DIM), (4,))), (-3,), (-2,), -1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of one kernel.

    Attributes:
      heads: Of all rows and tokens together.
      eps: Of the norm.
      dtype, gate: Of the recurrence's output, and of z and the result.
    """

    heads: int
    eps: float
    dtype: np.dtype
    gate: np.dtype


def gated_norm(shape: Shape, out: Array, z: Array, weight: Array, *, interpret: bool = False) -> Array:
    """`jaxbuf.recurrence.gated_norm.gated_norm`; `supports` says for which sizes.

    Args:
      shape: Static.
      out: [rows, T, heads, 128] in shape.dtype.
      z: [rows, T, heads · 128] in shape.gate.
      weight: [128].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      z's shape, in shape.gate.
    """
    flat = shape.heads, DIM
    return _kernel(shape, interpret)(out.reshape(flat), z.reshape(flat), weight).reshape(z.shape)


def _kernel(shape: Shape, interpret: bool):
    def gated_norm_heads(out_ref, z_ref, weight_ref, result_ref):  # a profile shows this name
        heads = pl.ds(HEADS * lax.axis_index("heads"), HEADS)
        x = load(out_ref.at[heads], CHANNELS).astype(jnp.float32)
        z = load(z_ref.at[heads], CHANNELS).astype(jnp.float32)
        weight = load(weight_ref, CHANNELS.reduce(0)).astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1) * np.float32(1 / DIM)
        x = x * _spread(lax.rsqrt(mean + np.float32(shape.eps)), 0) * _spread(weight, 1)
        root = lax.rsqrt(np.float32(1) + jnp.exp(-z))  # its square is the sigmoid; a division takes ten instructions
        gate = z * (root * root)
        result_ref[heads] = (x.astype(shape.dtype).astype(jnp.float32) * gate).astype(shape.gate)

    return plgpu.kernel(
        gated_norm_heads,
        out_type=jax.ShapeDtypeStruct((shape.heads, DIM), shape.gate),
        grid=(shape.heads // HEADS,),
        grid_names=("heads",),
        compiler_params=COMPILER,  # and no barrier: no thread reads what another wrote
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _spread(x: Array, axis: int) -> Array:
    """[4] (axis 0) or [128] (axis 1) to [4, 128]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (HEADS, DIM), [axis]), CHANNELS)
