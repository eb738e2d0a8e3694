"""Sums of products of matrices on a Hopper GPU's tensor cores, whose instructions run beside what follows them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxbuf.axes import Array
from jaxbuf.pallas.threads import inline_mlir

WGMMA, ACC = plgpu.Layout.WGMMA, plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
ROW, COLUMN = WGMMA.reduce(0), WGMMA.reduce(1)  # of numbers along a matrix' row, and along its column


class Sum:
    """A matrix of a warpgroup, to which products are added; none has ended before the sum is read.

    Attributes:
      ref: On a GPU registers that instructions write; in Pallas' interpreter, which does not know them, None.
      value: In the interpreter the sum.
    """

    def __init__(self, ref: Any, dims: tuple[int, int]):
        self.ref, self.value = ref, jnp.zeros(dims, jnp.float32)

    def begin(self, value: Array) -> None:
        """The sum begins with a float32 matrix in layout `WGMMA`; without this, with zeros."""
        if self.ref is None:
            self.value = value
        else:
            self.ref[...] = value

    def add(self, left: Sequence[Any], right: Sequence[Any]) -> None:
        """Adds the product of two matrices that are the sums of their parts, without that of both smallest parts if
        each has several.

        Args:
          left: References in shared memory, or arrays in layout `WGMMA`, [64, n]; the largest part first.
          right: References [n, m].
        """
        for i, x in enumerate(left):
            for y in right[: max(len(left), len(right)) - i]:
                if self.ref is None:
                    factors = (z[...].astype(jnp.float32) for z in (x, y))
                    self.value += jnp.dot(*factors, precision="highest")
                else:
                    plgpu.wgmma(self.ref, x, y)

    def read(self, behind: int = 0) -> Array:
        """The sum, once its products have ended, of which `behind` others were begun behind them."""
        return self.value if self.ref is None else plgpu.wgmma_accumulator_load(self.ref, wait_n=behind)


def products(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many products `Sum.add` begins."""
    return sum(len(right[: max(len(left), len(right)) - i]) for i in range(len(left)))


def with_sums(function: Callable, dims: Sequence[tuple[int, int]], interpret: bool) -> Any:
    """What a function returns that is given a Sum of each of the dims."""
    if interpret:
        return function(*(Sum(None, each) for each in dims))

    def given(*refs):
        return function(*(Sum(ref, each) for ref, each in zip(refs, dims, strict=True)))

    return pl.run_scoped(given, *[ACC(each, jnp.float32) for each in dims])


def halves(x: Array, interpret: bool) -> list[Array]:
    """Two bfloat16 arrays whose sum is float32 x, but for 2^-18 of it; the first one is x rounded, so that the product
    of two second ones, which `Sum.add` leaves out, is as small.

    Args:
      x: In layout `WGMMA`.
      interpret: Whether this runs in Pallas' interpreter, or as a program of XLA, which may leave out conversions there
        and back.
    """
    if interpret:
        bits = lax.bitcast_convert_type(x, jnp.int32)
        high = lax.bitcast_convert_type((bits + np.int32(2**15)) & np.int32(-(2**16)), jnp.float32)
        return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]

    def split(_, x):
        # Two numbers are rounded by one instruction, and each is then in the upper bits of where float32 has it.
        i32, f32, b16 = ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.BF16Type.get()
        pair, word, rounded = (ir.VectorType.get((n,), kind) for n, kind in ((2, f32), (1, i32), (2, b16)))
        parts = [np.empty_like(x.registers) for _ in range(2)]
        for i, numbers in np.ndenumerate(x.registers):
            high = arith.truncf(rounded, numbers)
            bits = vector.extract(vector.bitcast(word, high), [], [0])
            shifted = arith.shli(bits, arith.constant(i32, 16))
            masked = arith.andi(bits, arith.constant(i32, -(2**16)))
            wide = vector.from_elements(pair, [arith.bitcast(f32, each) for each in (shifted, masked)])
            parts[0][i], parts[1][i] = high, arith.truncf(rounded, arith.subf(numbers, wide))
        return [mgpu.FragmentedArray(_registers=part, _layout=x.layout, _is_signed=None) for part in parts]

    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=WGMMA)
    return inline_mlir(split, (WGMMA,), [kind, kind])(x)


def turned(ref):
    """The transpose of a matrix in memory."""
    return ref.transpose((1, 0))
