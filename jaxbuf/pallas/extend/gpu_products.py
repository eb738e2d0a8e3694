"""Products on the tensor cores, for `extend` on a GPU: their layouts, and float32 operands as two bfloat16 halves."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.threads import PER_THREAD, relabel

# The layouts of left side, right side and result of a product, whose columns the four warps share: 8 of 32 for each.
LEFT, RIGHT, PRODUCT = (
    layout(jnp.bfloat16, m_warps=1) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# The same for a product whose rows the four warps share: 16 rows of 64 for each.
TALL_LEFT, TALL_RIGHT, TALL = (
    layout(jnp.bfloat16, m_warps=4) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# The same for a product with the state, of which a thread reads sixteen bytes at once. Left and right side hold the
# columns in another order than a TALL product does; left side and result hold the rows in an order in which no two
# threads that read at the same time read from the same bank.
_Tiling = plgpu.Tiling
STATE_LEFT = plgpu.Layout.TILED(_Tiling(((64, 16), (16, 16), (8, 16), (4, 4))), (-8,), (-2, -4, -3), -1)
STATE_RIGHT = plgpu.Layout.TILED(_Tiling(((8, 16), (4,))), (plgpu.Replicated(4),), (-3, -2), -1)
STATE = plgpu.Layout.TILED(_Tiling(((64, 8), (16, 8), (8, 8), (4, 2))), (-8,), (-2, -4, -3), -1)
# The layout of a row or column of the state, by its length: two numbers or one in each thread, or the same two in four
# threads.
_PAIRS = plgpu.Layout.TILED(_Tiling(((256,), (64,), (2,))), (-3,), (-2,), -1)
VECTORS = {256: _PAIRS, 128: PER_THREAD, 64: TALL.reduce(1)}
ZERO = np.float32(0)
WHOLE = np.float32(1.5 * 2**23)


def zeros(dims: tuple[int, ...], layout) -> Array:
    """float32 zeros."""
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), layout)


def spread(x: Array, dims: tuple[int, ...], axis: int, layout) -> Array:
    """x [dims[axis]], repeated along the other axes: an array [dims]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)


def count(dims: tuple[int, ...], axis: int, layout) -> Array:
    """int32 [dims]: 0, 1, 2, ... along the axis."""
    return plgpu.broadcasted_iota(jnp.int32, dims, axis, layout=layout)


def by_row(numbers: Sequence[Array], first_rows: Array | int, rows: int, dims: tuple[int, ...], layout) -> Array:
    """What the rows of an array [dims] in a layout are multiplied with: the first number before row `first_rows`, the
    second one in the next `rows`, and so on. The numbers are scalars or [dims]. If there is one alone, it is that."""
    *others, found = numbers
    for i, number in reversed(list(enumerate(others))):
        found = jnp.where(count(dims, 0, layout) < first_rows + i * rows, number, found)
    return found


def multiply(total: Array, a: list[Array], b: list[Array], interpret: bool) -> Array:
    """total + a b, where a and b are the sums of their halves."""
    for x in a:
        for y in b:
            if interpret:  # The interpreter does not know the instruction.
                total += jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32), precision="highest")
            else:
                total = plgpu.mma(total, x, y)
    return total


def multiply_state(total: Array, left: Array, right: list[Array], interpret: bool) -> Array:
    """total + left · rightᵀ, where right is the sum of its halves.

    Args:
      total: float32 [n, m], in layout `STATE`.
      left: bfloat16 [n, length], in layout `STATE_LEFT`.
      right: bfloat16 [m, length] each, in layout `STATE_RIGHT`.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        return multiply(total, [left], [x.T for x in right], interpret)
    # Here a thread holds four of sixteen columns. For the product they count as two of each of two groups of eight.
    left = relabel(left, STATE_LEFT, TALL_LEFT, left.shape, lambda i, j: (*i[:2], 0, j, i[4], 0, 0, 0, 0))
    for x in right:
        x = relabel(x, STATE_RIGHT, TALL_RIGHT, x.shape[::-1], lambda i, j: (i[1], i[0], j, 0, 0, 0, 0, 0))
        total = relabel(total, STATE, TALL, total.shape, lambda i, j: i[:9])
        total = relabel(plgpu.mma(total, left, x), TALL, STATE, total.shape, lambda i, j: (*i, 0))
    return total


def cut(x: Array) -> list[Array]:
    """bfloat16 arrays whose sum is x: x itself, or the high and the low half of float32, which lose 2^-16 of it."""
    if x.dtype == jnp.bfloat16:
        return [x]
    # The high half is made by clearing bits: conversions to bfloat16 and back take the slow units.
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def join(halves: list[Array]) -> Array:
    """The float32 sum of what `cut` returned."""
    parts = [x.astype(jnp.float32) for x in halves]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def split(x: Array, dtypes: Sequence, interpret: bool) -> list[Array]:
    """float32 x in parts: rounded to the first dtype, what that left rounded to the second, and so on."""
    parts = [x.astype(dtypes[0])]
    for before, dtype in itertools.pairwise(dtypes):
        rounded = parts[-1].astype(jnp.float32)
        if interpret:  # XLA may drop a conversion there and back.
            limits = jnp.finfo(before)
            rounded = lax.reduce_precision(x, limits.nexp, limits.nmant)
        x = x - rounded
        parts.append(x.astype(dtype))
    return parts


def to_int8(x: Array, inverse: Array, interpret: bool) -> Array:
    """int8 of float32 x · inverse, rounded to whole numbers; it must be within [-127.5, 127.5]."""
    x = x * inverse
    # To add 1.5 · 2^23 and to subtract it again rounds to a whole number. XLA would simplify that.
    return (jnp.round(x) if interpret else (x + WHOLE) - WHOLE).astype(jnp.int8)


def where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros. They are selected, not multiplied: x may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
