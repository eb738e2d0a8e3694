"""Products of `extend` on a GPU: which thread has what of them, and float32 as pairs of bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.lanes import EVERY, relabel

type Array = jax.Array

LEFT, RIGHT, PRODUCT = (
    layout(jnp.bfloat16, m_warps=1) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
TALL_LEFT, TALL_RIGHT, TALL = (
    layout(jnp.bfloat16, m_warps=4) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# Left, right and sum of a product with the state, of which a thread reads sixteen bytes at once. Its columns are taken
# in another order than a product's, by left and right; its rows, by left and sum, in one in which no two of the threads
# that read at the same time meet in a bank.
_Tiling = plgpu.Tiling
STATE_LEFT = plgpu.Layout.TILED(_Tiling(((64, 16), (16, 16), (8, 16), (4, 4))), (-8,), (-2, -4, -3), -1)
STATE_RIGHT = plgpu.Layout.TILED(_Tiling(((8, 16), (4,))), (plgpu.Replicated(4),), (-3, -2), -1)
STATE = plgpu.Layout.TILED(_Tiling(((64, 8), (16, 8), (8, 8), (4, 2))), (-8,), (-2, -4, -3), -1)
# A row or column of the state, by its length: one number a thread, or two in four threads each.
VECTORS = {128: EVERY, 64: TALL.reduce(1)}
ZERO = np.float32(0)


def zeros(dims: tuple[int, ...], layout) -> Array:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), layout)


def spread(x: Array, dims: tuple[int, ...], axis: int, layout) -> Array:
    """x, along that axis, as an array of those sizes."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)


def count(dims: tuple[int, ...], axis: int, layout) -> Array:
    """0, 1, 2, ... along that axis."""
    return plgpu.broadcasted_iota(jnp.int32, dims, axis, layout=layout)


def multiply(total: Array, a: list[Array], b: list[Array], interpret: bool) -> Array:
    """total + a b, over all halves."""
    for x in a:
        for y in b:
            if interpret:  # the interpreter knows no mma
                total += jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32), precision="highest")
            else:
                total = plgpu.mma(total, x, y)
    return total


def multiply_state(total: Array, left: Array, right: list[Array], interpret: bool) -> Array:
    """total [n, m], `STATE`, + left [n, length], `STATE_LEFT`, · right [m, length]ᵀ, `STATE_RIGHT`, over all halves."""
    if interpret:
        return multiply(total, [left], [x.T for x in right], interpret)
    # Sixteen columns, four a thread, are two groups of eight of a product, two a thread.
    left = relabel(left, STATE_LEFT, TALL_LEFT, left.shape, lambda i, j: (*i[:2], 0, j, i[4], 0, 0, 0, 0))
    for x in right:
        x = relabel(x, STATE_RIGHT, TALL_RIGHT, x.shape[::-1], lambda i, j: (i[1], i[0], j, 0, 0, 0, 0, 0))
        total = relabel(total, STATE, TALL, total.shape, lambda i, j: i[:9])
        total = relabel(plgpu.mma(total, left, x), TALL, STATE, total.shape, lambda i, j: (*i, 0))
    return total


def cut(x: Array) -> list[Array]:
    """bfloat16 arrays that sum to x: itself, or two halves with 2^-16 left out."""
    if x.dtype == jnp.bfloat16:
        return [x]
    # Cut off by its bits: a conversion there and back takes the slow units.
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def join(halves: list[Array]) -> Array:
    """What `cut` cut, float32."""
    parts = [x.astype(jnp.float32) for x in halves]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros: selected, because what x was read from may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
