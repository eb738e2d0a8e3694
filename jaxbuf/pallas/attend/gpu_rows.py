"""Tiles of 64 queries of which at most 32 are real, as the tensor cores multiply 64 at least.

A warp has sixteen rows of a tile, and a thread two, eight rows apart. The real queries are the first eight rows of each
warp, so that every thread has one, and computes softmax and sums of that one alone. The other rows hold anything; or of
weights what rounding them has left over, so that they are multiplied with values as if they had twice the bits.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import TILE
from jaxbuf.pallas.attend.gpu_parts import WGMMA, summands
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
        registers.flat = _real(x.registers).flat
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(take, (WGMMA,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=HALF))(x)


def as_pairs(x: Array, dtype, interpret: bool) -> Array:
    """The `summands` of float32 x [32, n], in layout `HALF`: the rounded numbers in the real rows of [64, n], in layout
    WGMMA, and the rests in the others."""
    rounded, rest = summands(x, dtype)
    dims = TILE, x.shape[1]
    if interpret:
        pairs = (y.reshape(-1, GROUP, x.shape[1]) for y in (rounded, rest))
        return jnp.concatenate(list(pairs), axis=1).reshape(dims)

    def place(_, rounded, rest):
        layout = WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        for rows, y in zip(_both(registers), (rounded, rest), strict=True):
            rows[...] = y.registers.reshape(rows.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(dims, dtype, layout=WGMMA)
    return inline_mlir(place, (HALF, HALF), out)(rounded, rest)


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


def as_tile(x: Array, interpret: bool) -> Array:
    """x [32, n], in layout `HALF`, as the real rows of [64, n] in layout WGMMA; the others are zeros."""
    dims = TILE, x.shape[1]
    if interpret:
        x = x.reshape(-1, GROUP, x.shape[1])
        return jnp.concatenate([x, jnp.zeros_like(x)], axis=1).reshape(dims)

    def place(_, x):
        layout = WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        kind = ir.VectorType(x.registers.flat[0].type)
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
        registers[...] = arith.constant(kind, zero)
        _real(registers)[...] = x.registers.reshape(_real(registers).shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(place, (HALF,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=WGMMA))(x)


def multiply_rows(x: Array, factors: Array, interpret: bool) -> Array:
    """x [64, n], in layout WGMMA, whose real rows are multiplied with factors [32] in layout `HALF`.reduce(1)."""
    if interpret:
        return x * as_tile(jnp.broadcast_to(factors[:, None], (REAL_ROWS, x.shape[1])), interpret)

    def multiply(_, x, factors):
        registers = x.registers.copy()
        (factor,) = factors.registers.flat
        found = _real(registers)
        for i, numbers in np.ndenumerate(found):
            found[i] = arith.mulf(numbers, vector.broadcast(numbers.type, vector.extract(factor, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=WGMMA)
    return inline_mlir(multiply, (WGMMA, HALF.reduce(1)), out)(x, factors)


def multiply_pairs(x: Array, factors: Array, interpret: bool) -> Array:
    """x [64, n], in layout WGMMA; a real row and the other one of its threads are multiplied with the same factor, of
    factors [32] in layout `HALF`.reduce(1)."""
    if interpret:
        factors = jnp.repeat(factors.reshape(-1, 1, GROUP), 2, axis=1).reshape(TILE, 1)
        return x * jnp.broadcast_to(factors, x.shape)

    def multiply(_, x, factors):
        registers = x.registers.copy()
        (factor,) = factors.registers.flat
        for i, numbers in np.ndenumerate(registers):
            registers[i] = arith.mulf(numbers, vector.broadcast(numbers.type, vector.extract(factor, [], [0])))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=WGMMA)
    return inline_mlir(multiply, (WGMMA, HALF.reduce(1)), out)(x, factors)


def _both(registers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those registers of an array in layout WGMMA that hold real rows, and the others: views."""
    return _real(registers), registers[:, :, :, :, 1:]


def _real(registers: np.ndarray) -> np.ndarray:
    """Those registers of an array in layout WGMMA that hold real rows: a view."""
    return registers[:, :, :, :, :1]
