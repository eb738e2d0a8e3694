"""Products of probes with decayed keys, for `extend` on a GPU with a decay a channel: a warp makes them for the vectors
that it has, and every thread reads all of them."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, math, vector
from jaxlib.mlir.dialects import llvm

from jaxbuf.axes import Array
from jaxbuf.pallas.threads import PER_THREAD, THREADS, WARP, inline_mlir, vectors_layout

DIM = THREADS  # of keys: a thread has four numbers of each of its warp's
ROWS = vectors_layout(DIM, jnp.float32)  # of keys [n, DIM]: a warp has all of a key, four numbers a thread
WARPS = THREADS // WARP


def store_products(keys: Array, probes: list[Array], ref, first, row_step: int, probe_step: int, interpret: bool):
    """Writes the product of each key with each probe to shared memory.

    The order in which the numbers of a product are added does not depend on how many keys and probes there are.

    Args:
      keys: float32 [n, DIM], in layout `ROWS`; n is 4 or 8.
      probes: One or two float32 [DIM], in layout `ROWS.reduce(0)`.
      ref: float32 [m, DIM] in shared memory, its numbers counted row by row.
      first: A scalar: where the first product is written.
      row_step, probe_step: How far behind it those of the next key and of the next probe are.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        products = jnp.sum(keys[:, None] * jnp.stack(probes)[None], axis=2)
        rows, columns = (jnp.arange(n, dtype=jnp.int32) for n in products.shape)
        at = first + row_step * rows[:, None] + probe_step * columns[None]
        ref[...] = ref[...].reshape(-1).at[at].set(products).reshape(ref.shape)
        return

    def write(_, ref, first, keys, *probes):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def number(value):
            return arith.constant(i32, value)

        def bit(value):
            return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, number(value)), number(0))

        def numbers(register):
            return [vector.extract(register, [], [i]) for i in range(4)]

        def product(a, b):
            total = arith.mulf(a[0], b[0])
            for x, y in zip(a[1:], b[1:], strict=True):
                total = math.fma(x, y, total)
            return total

        thread = mgpu.utils.thread_idx()
        right = [numbers(probe.registers.flat[0]) for probe in probes]
        values = [product(numbers(key), probe) for key in keys.registers.flat for probe in right]
        count, distance = len(values), WARP // 2
        # Threads at a distance exchange halves of the values: afterwards each has half of them, the sums of both.
        while len(values) > 1:
            half, upper = len(values) // 2, bit(distance)
            pairs = [*zip(values[:half], values[half:], strict=True)]
            given = [mgpu.utils.shfl_bfly(arith.select(upper, x, y), distance) for x, y in pairs]
            values = [arith.addf(arith.select(upper, y, x), z) for (x, y), z in zip(pairs, given, strict=True)]
            distance //= 2
        (value,) = values
        each = 2 * distance  # neighbours that have the same value
        while distance:
            value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
            distance //= 2
        # Which of the warp's values a thread has: of its keys in turn, of each with the first and the second probe.
        index = arith.divui(arith.remui(thread, number(WARP)), number(each))
        key, probe = (f(index, number(len(probes))) for f in (arith.divui, arith.remui))
        warp = arith.remui(arith.divui(thread, number(WARP)), number(WARPS))
        row = arith.addi(arith.muli(key, number(WARPS)), warp)
        at = arith.addi(arith.muli(row, number(row_step)), arith.muli(probe, number(probe_step)))
        at = arith.addi(at, first.registers.flat[0])
        start = mgpu.utils.memref_ptr(ref)
        at = arith.extui(ir.IntegerType.get_signless(64), at)
        pointer = llvm.getelementptr(start.type, start, [at], [-(2**31)], f32, [])
        writes = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, number(each)), number(0))
        text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.shared.f32 [$1], $2;}"
        operands = [arith.extui(i32, writes), pointer, value]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,f,~{memory}", has_side_effects=True)
        assert count * each == WARP

    vectors = ROWS.reduce(0)
    arguments = plgpu.RefType(), plgpu.Layout.WG_SPLAT, ROWS, *[vectors] * len(probes)
    inline_mlir(write, arguments, None)(ref, jnp.asarray(first, jnp.int32), keys, *probes)


def load_numbers(ref, first, count: int, interpret: bool) -> list[Array]:
    """Loads neighbouring numbers from shared memory, each of them into all threads.

    Args:
      ref: float32 [m, DIM] in shared memory, its numbers counted row by row.
      first: A scalar: where the first of them lies; a multiple of 4, or of `count` where that is 2.
      count: How many: 2, or a multiple of 4.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      For each number [DIM], in layout `PER_THREAD`.
    """
    if interpret:
        found = lax.dynamic_slice_in_dim(ref[...].reshape(-1), first, count)
        return [jnp.broadcast_to(found[i], (DIM,)) for i in range(count)]
    size = min(count, 4)

    def read(_, ref, first):
        f32, start = ir.F32Type.get(), mgpu.utils.memref_ptr(ref)
        at = arith.extui(ir.IntegerType.get_signless(64), first.registers.flat[0])
        pointer, found = llvm.getelementptr(start.type, start, [at], [-(2**31)], f32, []), []
        for i in range(0, count, size):
            piece = llvm.getelementptr(start.type, pointer, [], [i], f32, [])
            words = llvm.load(ir.VectorType.get((size,), f32), piece, alignment=4 * size)
            found += [vector.extract(words, [], [j]) for j in range(size)]
        layout, kind = PER_THREAD.to_mgpu(), ir.VectorType.get((1,), f32)
        arrays = []
        for x in found:
            registers = np.full(layout.registers_shape((DIM,)), vector.broadcast(kind, x), object)
            arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return arrays

    out = [plgpu.ShapeDtypeStruct((DIM,), jnp.float32, layout=PER_THREAD)] * count
    return inline_mlir(read, (plgpu.RefType(), plgpu.Layout.WG_SPLAT), out)(ref, jnp.asarray(first, jnp.int32))
