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


def store_products(
    keys: list[Array], probes: list[list[Array]], ref, first, row_step: int, probe_step: int, interpret: bool
) -> None:
    """Writes the products of keys with probes to shared memory, for one or several tokens.

    The order in which the numbers of a product are added does not depend on how many keys, probes and tokens there are.

    Args:
      keys: For each token the keys, float32 [n, DIM], in layout `ROWS`; n is 4 or 8.
      probes: For each token one or two probes, float32 [DIM], in layout `ROWS.reduce(0)`.
      ref: float32 [m, DIM] in shared memory, its numbers counted row by row.
      first: A scalar: where the first product of the first token is written; that of the next token is behind it.
      row_step, probe_step: How far behind a product those of the next key and of the next probe are.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        for t, (some, of_token) in enumerate(zip(keys, probes, strict=True)):
            products = jnp.sum(some[:, None] * jnp.stack(of_token)[None], axis=2)
            rows, columns = (jnp.arange(n, dtype=jnp.int32) for n in products.shape)
            at = first + t + row_step * rows[:, None] + probe_step * columns[None]
            ref[...] = ref[...].reshape(-1).at[at].set(products).reshape(ref.shape)
        return
    each = len(probes[0])

    def write(_, ref, first, *arrays):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def number(value):
            return arith.constant(i32, value)

        def numbers(register):
            return [vector.extract(register, [], [i]) for i in range(4)]

        def product(a, b):
            total = arith.mulf(a[0], b[0])
            for x, y in zip(a[1:], b[1:], strict=True):
                total = math.fma(x, y, total)
            return total

        thread = mgpu.utils.thread_idx()
        tokens = []  # of each: its products, which every thread has a part of
        for i in range(0, len(arrays), 1 + each):
            right = [numbers(x.registers.flat[0]) for x in arrays[i + 1 : i + 1 + each]]
            tokens.append([product(numbers(x), y) for x in arrays[i].registers.flat for y in right])
        # Threads at a distance exchange halves of their products: afterwards each has half of them, the sums of both;
        # or, of a single one, both have the sum. The assembler keeps the order of shuffles: those of all tokens at one
        # distance come first, so that none waits.
        distance, neighbours = WARP // 2, WARP // len(tokens[0])
        while distance:
            upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, number(distance)), number(0))
            half, single = len(tokens[0]) // 2, len(tokens[0]) == 1
            kept, given = [], []
            for products in tokens:
                low, high = (products, products) if single else (products[:half], products[half:])
                given.append([x if single else arith.select(upper, x, y) for x, y in zip(low, high, strict=True)])
                kept.append([x if single else arith.select(upper, y, x) for x, y in zip(low, high, strict=True)])
            given = [[mgpu.utils.shfl_bfly(x, distance) for x in products] for products in given]
            tokens = [[arith.addf(x, y) for x, y in zip(*pair, strict=True)] for pair in zip(kept, given, strict=True)]
            distance //= 2
        # Which of the warp's products a thread has: of its keys in turn, of each with the first and the second probe.
        index = arith.divui(arith.remui(thread, number(WARP)), number(neighbours))
        key, probe = (f(index, number(each)) for f in (arith.divui, arith.remui))
        warp = arith.remui(arith.divui(thread, number(WARP)), number(WARPS))
        row = arith.addi(arith.muli(key, number(WARPS)), warp)
        at = arith.addi(arith.muli(row, number(row_step)), arith.muli(probe, number(probe_step)))
        at = arith.extui(ir.IntegerType.get_signless(64), arith.addi(at, first.registers.flat[0]))
        start = mgpu.utils.memref_ptr(ref)
        pointer = llvm.getelementptr(start.type, start, [at], [-(2**31)], f32, [])
        writes = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, number(neighbours)), number(0))
        writes = arith.extui(i32, writes)
        for t, (value,) in enumerate(tokens):
            place = llvm.getelementptr(start.type, pointer, [], [t], f32, [])
            text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.shared.f32 [$1], $2;}"
            operands = [writes, place, value]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,f,~{memory}", has_side_effects=True)

    vectors = ROWS.reduce(0)
    given = [(some, *of_token) for some, of_token in zip(keys, probes, strict=True)]
    layouts = (ROWS, *[vectors] * each) * len(given)
    arrays = [x for of_token in given for x in of_token]
    inline_mlir(write, (plgpu.RefType(), plgpu.Layout.WG_SPLAT, *layouts), None)(
        ref, jnp.asarray(first, jnp.int32), *arrays
    )


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
