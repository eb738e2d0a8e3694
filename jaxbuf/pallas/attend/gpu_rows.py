"""Tiles of 64 queries of which at most 32 are real, as the tensor cores multiply 64 at least.

A warp has sixteen rows of a tile, and a thread two, eight rows apart. The real queries are the first eight rows of each
warp, so that every thread has one, and computes softmax and sums of that one alone. The other rows hold anything; or of
weights what rounding them has left over, so that they are multiplied with values as if they had twice the bits.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith, vector

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import TILE
from jaxbuf.pallas.attend.gpu_parts import WGMMA
from jaxbuf.pallas.threads import inline_mlir

REAL_ROWS = 32  # of a tile
GROUP, PITCH = 8, 16  # real rows that are neighbours, and from the first of them to the next group
# The layout of the real rows: WGMMA without the other rows' registers.
HALF = plgpu.Layout.TILED(
    plgpu.Tiling(((REAL_ROWS, 8), (GROUP, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def real_rows(x: Array, interpret: bool) -> Array:
    """The real rows [32, n], in layout `HALF`, of x [64, n] in layout WGMMA."""
    dims = REAL_ROWS, x.shape[1]
    if interpret:
        return x.reshape(-1, PITCH, x.shape[1])[:, :GROUP].reshape(dims)

    def take(_, x):
        layout = HALF.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        registers.flat = _both(x.registers)[0].flat
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(take, (WGMMA,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=HALF))(x)


def sum_pairs(x: Array, interpret: bool) -> Array:
    """[32, n], in layout `HALF`: the real rows of float32 x [64, n], in layout WGMMA, each with the other row of its
    thread added."""
    dims = REAL_ROWS, x.shape[1]
    if interpret:
        return jnp.sum(x.reshape(-1, 2, GROUP, x.shape[1]), axis=1).reshape(dims)

    def add(_, x):
        layout = HALF.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        pairs = zip(*(rows.flat for rows in _both(x.registers)), strict=True)
        registers.flat = [arith.addf(real, other) for real, other in pairs]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(add, (WGMMA,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=HALF))(x)


def as_tile(real: Array, others: Array, interpret: bool) -> Array:
    """[64, n] in layout WGMMA, of its real rows and the others, [32, n] in layout `HALF` each."""
    dims = TILE, real.shape[1]
    if interpret:
        rows = [x.reshape(-1, GROUP, real.shape[1]) for x in (real, others)]
        return jnp.concatenate(rows, axis=1).reshape(dims)

    def place(_, *given):
        layout = WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        for rows, x in zip(_both(registers), given, strict=True):
            rows[...] = x.registers.reshape(rows.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(place, (HALF, HALF), plgpu.ShapeDtypeStruct(dims, real.dtype, layout=WGMMA))(real, others)


def multiply_rows(x: Array, factors: Array, interpret: bool, *, others: bool = False) -> Array:
    """x [64, n], in layout WGMMA, whose real rows are multiplied with factors [32] in layout `HALF`.reduce(1); with
    `others` the other row of each thread is multiplied with the same factor."""
    if interpret:
        wide = jnp.broadcast_to(factors[:, None], (REAL_ROWS, x.shape[1]))
        return x * as_tile(wide, wide if others else jnp.ones_like(wide), interpret)

    def multiply(_, x, factors):
        registers = x.registers.copy()
        (factor,) = factors.registers.flat
        found = registers if others else _both(registers)[0]
        for i, numbers in np.ndenumerate(found):
            found[i] = arith.mulf(numbers, vector.broadcast(numbers.type, vector.extract(factor, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=WGMMA)
    return inline_mlir(multiply, (WGMMA, HALF.reduce(1)), out)(x, factors)


def _both(registers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those registers of an array in layout WGMMA that hold real rows, and the others: views."""
    return registers[:, :, :, :, :1], registers[:, :, :, :, 1:]
