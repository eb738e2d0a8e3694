"""What the Mosaic GPU kernels share: loads, stores and copies of arrays whose numbers are spread over threads.

A layout says which thread holds which numbers of an array in its registers. The kernels give the layout of every array
themselves. A `reference` is an array in global or shared memory. Functions with `interpret` compute the same in Pallas'
GPU interpreter, which has neither threads nor instructions.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from jaxbuf.axes import Array

# The kernels give every layout and wait at every barrier themselves: inferring them takes minutes for the larger ones.
COMPILER = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
THREADS = 128  # threads of a warpgroup
WARP = 32  # threads of a warp
AT_ONCE = 4  # vectors that are loaded before the first of them is stored
PER_THREAD = plgpu.Layout.TCGEN05_TMEM_NATIVE(4).reduce(1)  # The layout of THREADS numbers, one in each thread.
# The layout of vectors [n, m] of which a warp has one, and a thread single numbers.
NUMBERS = plgpu.Layout.TILED(plgpu.Tiling(((4, WARP), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref, layout):
    """Loads a reference in global or shared memory into registers, in `layout`."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, x: Array) -> None:
    """Writes registers to a reference in global or shared memory."""
    if hasattr(plgpu, "store"):  # since jax 0.12, where an assignment refuses what is not written in whole sectors
        plgpu.store(ref, x, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = x


def store_from(x: Array, ref, first: Array, interpret: bool) -> None:
    """Writes numbers to global memory: all, or the second half of them.

    Args:
      x: [THREADS] in layout `PER_THREAD`.
      ref: [THREADS] in global memory.
      first: A scalar, the first that is written: 0 or THREADS / 2.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        half = THREADS // 2
        ref[pl.ds(half, half)] = x[half:]

        @pl.when(first == 0)
        def _():
            ref[pl.ds(0, half)] = x[:half]

        return

    def write(_, x, ref, first):
        i32, ((thread,),) = ir.IntegerType.get_signless(32), x.layout.thread_idxs((THREADS,))
        first = arith.index_cast(ir.IndexType.get(), first.registers.flat[0])
        stores = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.uge, thread, first))
        bits = mgpu.utils.bitwidth(x.mlir_dtype)
        kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(bits))
        number = vector.extract(vector.bitcast(kind, x.registers.flat[0]), [], [0])
        text = f"{{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.b{bits} [$1], $2;}}"
        constraints = f"r,l,{'r' if bits == 32 else 'h'},~{{memory}}"
        place, start = arith.index_cast(ir.IntegerType.get_signless(64), thread), mgpu.utils.memref_ptr(ref)
        pointer = llvm.getelementptr(start.type, start, [place], [-(2**31)], x.mlir_dtype, [])
        operands = [stores, pointer, number]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    inline_mlir(write, (PER_THREAD, plgpu.RefType(), plgpu.Layout.WG_SPLAT), None)(x, ref, first)


def load_per_thread(ref, i: int, n: int, interpret: bool) -> Array:
    """Loads one number for each thread from the first THREADS · n of a reference, of which each thread has n in a row.

    Returns:
      [THREADS] in layout `PER_THREAD`: number t · n + i of the reference for thread t.
    """
    if interpret:  # The interpreter cannot write to a reference in another shape, so none is reshaped.
        return ref[pl.ds(0, THREADS * n)].reshape(THREADS, n)[:, i]
    return load(ref.at[pl.ds(0, THREADS * n)].reshape(THREADS, n).at[:, i], PER_THREAD)


def store_per_thread(x: Array, ref, i: int, n: int, interpret: bool) -> None:
    """Writes x [THREADS], in layout `PER_THREAD`, to where `load_per_thread` reads it."""
    numbers = pl.ds(0, THREADS * n)
    if interpret:
        ref[numbers] = ref[numbers].reshape(THREADS, n).at[:, i].set(x).reshape(-1)
    else:
        store(ref.at[numbers].reshape(THREADS, n).at[:, i], x)


def vectors_layout(length: int, dtype):
    """The layout of vectors [n, length] in which a thread holds sixteen bytes, or several times as many, of one vector;
    or sixteen bytes of each of several."""
    piece = 16 // np.dtype(dtype).itemsize
    vectors = WARP * piece // length  # that a warp holds at once
    if vectors <= 1:
        tiling, warps, threads = plgpu.Tiling(((4, WARP * piece), (piece,))), (-3,), (-2,)
    else:
        tiling, warps, threads = plgpu.Tiling(((4 * vectors, length), (vectors, piece))), (-4,), (-2, -3)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=threads, vector_dim=-1)


def gather_vectors(ref, positions: Array, layout, interpret: bool, length: int | None = None) -> Array:
    """Loads vectors of a reference in global memory; each thread loads the numbers that it holds of them.

    Args:
      ref: [m, n].
      positions: int32 [count], in layout.reduce(1): which vectors.
      layout: The result's layout, from `vectors_layout`.
      interpret: Whether this runs in Pallas' interpreter.
      length: Of the result's vectors: they are repeated until they have so many numbers. None: n.

    Returns:
      [count, length].
    """
    n = ref.shape[-1]
    length = n if length is None else length
    if interpret:
        return jnp.tile(jnp.take(ref[...], positions, axis=0), (1, -(-length // n)))[:, :length]
    dims = positions.shape[0], length

    def load_vectors(_, ref, positions):
        tiled = layout.to_mgpu()
        kind = ir.VectorType.get((tiled.vector_length,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(tiled.registers_shape(dims), object)
        pieces, rows = registers.size // positions.registers.size, positions.registers.flat
        for i, (at, (_, column)) in enumerate(zip(np.ndindex(registers.shape), tiled.thread_idxs(dims), strict=True)):
            inside = column if length == n else arith.remui(column, _number(n))
            registers[at] = vector.load(kind, ref, [as_index(rows[i // pieces]), inside])
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(dims, ref.dtype, layout=layout)
    return inline_mlir(load_vectors, (plgpu.RefType(), layout.reduce(1)), out)(ref, positions)


def scatter_vectors(x: Array, ref, positions: Array, layout, interpret: bool) -> None:
    """Writes vectors to where `gather_vectors` reads them. Equal vectors may have the same position.

    Args:
      x: [n, length], in `layout`.
      ref: [m, length] in global memory.
      positions: int32 [n], in layout.reduce(1).
      layout: x's.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        for i in range(x.shape[0]):
            ref[positions[i]] = x[i]
        return

    def write(_, x, ref, positions):
        pieces, rows = x.registers.size // positions.registers.size, positions.registers.flat
        for i, (numbers, (_, column)) in enumerate(zip(x.registers.flat, x.layout.thread_idxs(x.shape), strict=True)):
            vector.store(numbers, ref, [as_index(rows[i // pieces]), column])

    inline_mlir(write, (layout, plgpu.RefType(), layout.reduce(1)), None)(x, ref, positions)


def exchange(x: Array, distance: int, layout, interpret: bool) -> Array:
    """Each thread gets what the thread of its warp has whose number differs in the bit `distance`.

    Args:
      x: float32 [n, length], in `layout`; threads that hold neighbouring numbers of a vector are neighbours.
      distance: A power of two, less than the threads that hold a vector.
      layout: From `vectors_layout`, of two-byte numbers.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        pairs = x.reshape(x.shape[0], -1, 2, distance * 8)
        return jnp.concatenate([pairs[:, :, 1:], pairs[:, :, :1]], axis=2).reshape(x.shape)

    def swap(_, x):
        registers = np.empty_like(x.registers)
        for i, numbers in np.ndenumerate(x.registers):
            kind, found = ir.VectorType(numbers.type), numbers
            for j in range(kind.shape[0]):
                number = mgpu.utils.shfl_bfly(vector.extract(numbers, [], [j]), distance)
                found = vector.insert(number, found, [], [j])
            registers[i] = found
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return inline_mlir(swap, (layout,), plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))(x)


def copy_vectors(ref, positions: Array, layout, target, interpret: bool) -> None:
    """Starts to copy vectors from global memory to shared memory; `wait_for_copies` waits until they have arrived.

    Args:
      ref: [m, length] in global memory.
      positions: int32 [n], in layout.reduce(1): which vectors. Zeros are written for those whose position is 0.
      layout: From `vectors_layout`, or `NUMBERS` of four-byte numbers if vectors do not begin at a multiple of sixteen
        bytes; a thread copies the numbers that it would hold in this layout.
      target: [n, length] in shared memory.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        vectors = jnp.take(ref[...], positions, axis=0)
        target[...] = jnp.where(positions[:, None] > 0, vectors, jnp.zeros_like(vectors))
        return
    dims = positions.shape[0], ref.shape[-1]

    def copy(_, ref, positions, target):
        i32, tiled = ir.IntegerType.get_signless(32), layout.to_mgpu()
        sources, targets = _Rows(ref), _Rows(target)
        size = tiled.vector_length * mgpu.utils.bitwidth(ir.MemRefType(ref.type).element_type) // 8
        kept = "cg" if size == 16 else "ca"  # Sixteen bytes need not stay in the L1 cache, fewer must.
        places = [*tiled.thread_idxs(dims)]
        pieces = len(places) // positions.registers.size  # of a vector, that a thread copies
        for i, (row, column) in enumerate(places):
            at = as_index(positions.registers.flat[i // pieces])
            exists = arith.cmpi(arith.CmpIPredicate.ne, at, _number(0))
            # Of the bytes that are written, those that are not read become zeros.
            length = arith.select(exists, arith.constant(i32, size), arith.constant(i32, 0))
            operands = [targets.point(row, column), sources.point(at, column), length]
            text = f"cp.async.{kept}.shared.global [$0], [$1], {size}, $2;"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    inline_mlir(copy, (plgpu.RefType(), layout.reduce(1), plgpu.RefType()), None)(ref, positions, target)


def copy_numbers(ref, positions: Array, column: Array, target, interpret: bool) -> None:
    """Starts to copy a number for each thread from global memory to shared memory, as `copy_vectors`.

    Args:
      ref: [m, n] in global memory, of four-byte numbers.
      positions: int32 [THREADS], in layout `PER_THREAD`: of which row each thread copies a number.
      column: A scalar: which number of the row.
      target: [THREADS] in shared memory.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        target[...] = jnp.take(ref[...], positions, axis=0)[:, column]
        return

    def copy(_, ref, positions, column, target):
        ((thread,),) = positions.layout.thread_idxs((THREADS,))
        pointer = mgpu.utils.memref_ptr(target)
        kind = ir.MemRefType(target.type).element_type
        thread = arith.index_cast(ir.IntegerType.get_signless(64), thread)
        target = llvm.getelementptr(pointer.type, pointer, [thread], [-(2**31)], kind, [])
        row = as_index(positions.registers.flat[0])
        column = arith.index_cast(ir.IndexType.get(), column.registers.flat[0])
        text = "cp.async.ca.shared.global [$0], [$1], 4;"
        operands = [target, _Rows(ref).point(row, column)]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,~{memory}", has_side_effects=True)

    arguments = plgpu.RefType(), PER_THREAD, plgpu.Layout.WG_SPLAT, plgpu.RefType()
    inline_mlir(copy, arguments, None)(ref, positions, column, target)


def copy_vector(ref, target, first: int, interpret: bool) -> int:
    """Starts to copy a vector from global memory to shared memory, as `copy_vectors`, sixteen bytes by a thread.

    Args:
      ref: [length] in global memory, of at most sixteen bytes a thread; it begins at a multiple of sixteen bytes.
      target: [length] in shared memory.
      first: The number of the first of the threads that copy. Behind the last thread comes the first one.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      The number behind that of the last one.
    """
    size, numbers = 16, 16 // ref.dtype.itemsize
    pieces = ref.shape[0] // numbers
    assert pieces * numbers == ref.shape[0] and pieces <= THREADS, ref.shape
    end = (first + pieces) % THREADS
    if interpret:
        target[...] = ref[...]
        return end

    def copy(_, ref, target):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        thread = arith.addi(mgpu.utils.thread_idx(), arith.constant(i32, THREADS - first))
        piece = arith.remui(thread, arith.constant(i32, THREADS))
        start = arith.extui(i64, arith.muli(piece, arith.constant(i32, numbers)))
        kind, pointers = ir.MemRefType(ref.type).element_type, [mgpu.utils.memref_ptr(x) for x in (target, ref)]
        places = [llvm.getelementptr(x.type, x, [start], [-(2**31)], kind, []) for x in pointers]
        text = f"{{.reg .pred p; setp.lt.u32 p, $2, {pieces}; @p cp.async.cg.shared.global [$0], [$1], {size};}}"
        operands = [*places, piece]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    inline_mlir(copy, (plgpu.RefType(), plgpu.RefType()), None)(ref, target)
    return end


def copy_tile_rows(ref, rows: list[Array], column: Array, target, slot: Array, transforms, interpret: bool) -> None:
    """Starts to copy 128 bytes of each of some rows from global memory to a piece in shared memory, as the tensor cores
    read it. A warpgroup copies sixteen rows at once, eight threads each of them.

    Args:
      ref: [n, m] in global memory, of two bytes a number; rows begin at a multiple of sixteen bytes.
      rows: int32 [THREADS] each, in layout `PER_THREAD`: which row each thread copies a part of, thread t row
        16 · i + t / 8 of the piece with rows[i]; below 0: none.
      column: A scalar: the first of the 64 numbers of a row that are copied.
      target: [pieces, 8 · k, 64] in shared memory, with `transforms`.
      slot: A scalar: which piece.
      transforms: Tiles of eight rows and 64 numbers, swizzled over 128 bytes.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        each = jnp.stack([some[::8] for some in rows]).reshape(-1)[: target.shape[1]]
        found = jnp.take(ref[:, pl.ds(column, 64)], jnp.maximum(each, 0), axis=0)
        target[slot, pl.ds(0, each.shape[0])] = found
        return
    size = 128 * target.shape[1]  # bytes of a piece

    def copy(_, ref, column, target, slot, *rows):
        i32 = ir.IntegerType.get_signless(32)

        def constant(value):
            return arith.constant(i32, value)

        thread = arith.remui(mgpu.utils.thread_idx(), constant(THREADS))
        row, part = arith.divui(thread, constant(8)), arith.remui(thread, constant(8))
        # Of a tile's row i, the sixteen bytes that would be at place j are at place j xor i.
        place = arith.xori(part, arith.remui(row, constant(8)))
        begin = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target))
        slot = arith.muli(slot.registers.flat[0], constant(size))
        begin = arith.addi(
            arith.addi(begin, slot), arith.addi(arith.muli(row, constant(128)), arith.muli(place, constant(16)))
        )
        sources, column = _Rows(ref), arith.index_cast(ir.IndexType.get(), column.registers.flat[0])
        number = arith.addi(column, arith.index_cast(ir.IndexType.get(), arith.muli(part, constant(8))))
        for i, some in enumerate(rows):
            (register,) = some.registers.flat
            wanted = vector.extract(register, [], [0])
            source = sources.point(arith.index_cast(ir.IndexType.get(), wanted), number)
            text = "{.reg .pred p; setp.ge.s32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16;}"
            operands = [arith.addi(begin, constant(2048 * i)), source, wanted]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    scalar, whole = plgpu.Layout.WG_SPLAT, plgpu.RefType(transforms)
    arguments = plgpu.RefType(), scalar, whole, scalar, *[PER_THREAD] * len(rows)
    inline_mlir(copy, arguments, None)(ref, column, target, slot, *rows)


def gather_numbers(ref, positions: Array, interpret: bool) -> Array:
    """Loads the numbers at `positions`, one for each thread.

    Args:
      ref: [m] in global memory, float32 or int32.
      positions: int32 [THREADS], in layout `PER_THREAD`.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      [THREADS] in layout `PER_THREAD`.
    """
    if interpret:
        return jnp.take(ref[...], positions, axis=0)
    signed = True if ref.dtype == jnp.int32 else None

    def load_numbers(_, ref, positions):
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(positions.registers.shape, object)
        for i, at in np.ndenumerate(positions.registers):
            registers[i] = vector.load(kind, ref, [as_index(at)])
        return mgpu.FragmentedArray(_registers=registers, _layout=positions.layout, _is_signed=signed)

    out = plgpu.ShapeDtypeStruct(positions.shape, ref.dtype, layout=PER_THREAD)
    return inline_mlir(load_numbers, (plgpu.RefType(), PER_THREAD), out)(ref, positions)


def load_lanes(ref, row, column: int, fill: float, interpret: bool) -> Array:
    """Loads neighbouring numbers of four rows, a row for each warp and a number for each of its threads.

    Args:
      ref: [n, m] in global memory, float32.
      row: A scalar: of the first warp; warps for whose rows there is no room have the last one.
      column: Of the first thread.
      fill: What threads have that are behind a row's end.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      [4, WARP] in layout `NUMBERS`.
    """
    n, m = ref.shape
    dims, columns = (THREADS // WARP, WARP), min(WARP, m - column)
    if interpret:
        rows = jnp.minimum(row + jnp.arange(dims[0], dtype=jnp.int32), n - 1)
        found = jnp.take(ref[...], rows, axis=0)[:, column : column + columns]
        return jnp.pad(found, ((0, 0), (0, WARP - columns)), constant_values=fill)

    def load_numbers(_, ref, row):
        tiled, kind = NUMBERS.to_mgpu(), ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        ((warp, lane),) = tiled.thread_idxs(dims)
        row = arith.minui(arith.addi(arith.index_cast(ir.IndexType.get(), row.registers.flat[0]), warp), _number(n - 1))
        number = arith.addi(arith.minui(lane, _number(columns - 1)), _number(column))
        numbers = vector.load(kind, ref, [row, number])
        if columns < WARP:
            element = ir.FloatAttr.get(kind.element_type, fill)
            other = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, element))
            inside = arith.cmpi(arith.CmpIPredicate.ult, lane, _number(columns))
            numbers = arith.select(inside, numbers, other)
        registers = np.full(tiled.registers_shape(dims), numbers, object)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(dims, ref.dtype, layout=NUMBERS)
    return inline_mlir(load_numbers, (plgpu.RefType(), plgpu.Layout.WG_SPLAT), out)(ref, row)


def store_lanes(x: Array, ref, row, interpret: bool) -> None:
    """Writes the first numbers of each warp to a row.

    Args:
      x: [4, WARP] in layout `NUMBERS`, float32 or int32.
      ref: [n, m] in global memory, m at most WARP.
      row: A scalar: of the first warp; warps for whose rows there is no room write none.
      interpret: Whether this runs in Pallas' interpreter.
    """
    n, m = ref.shape
    if interpret:

        def write_row(i, _):
            ref[row + i] = lax.dynamic_index_in_dim(x, i, keepdims=False)[:m]

        lax.fori_loop(0, jnp.minimum(x.shape[0], n - row), write_row, None)
        return

    def write(_, x, ref, row):
        i32 = ir.IntegerType.get_signless(32)
        ((warp, lane),) = x.layout.thread_idxs(x.shape)
        row = arith.addi(arith.index_cast(ir.IndexType.get(), row.registers.flat[0]), warp)
        inside = [arith.cmpi(arith.CmpIPredicate.ult, i, _number(size)) for i, size in ((row, n), (lane, m))]
        (numbers,) = x.registers.flat
        number = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), numbers), [], [0])
        text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.b32 [$1], $2;}"
        operands = [arith.extui(i32, arith.andi(*inside)), _Rows(ref).point(row, lane), number]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    inline_mlir(write, (NUMBERS, plgpu.RefType(), plgpu.Layout.WG_SPLAT), None)(x, ref, row)


def reduce_lanes(x: Array, kind: str, interpret: bool) -> Array:
    """The largest or smallest number of each warp's threads, or their sum, for all of them.

    Args:
      x: [4, WARP] in layout `NUMBERS`; int32 for "max" and "min", float32 for "sum".
      kind: "max", "min" or "sum".
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        reduce = {"max": jnp.max, "min": jnp.min, "sum": jnp.sum}[kind]
        return jnp.broadcast_to(reduce(x, axis=1, keepdims=True), x.shape)

    def reduce_registers(_, x):
        i32, (numbers,) = ir.IntegerType.get_signless(32), x.registers.flat
        if kind == "sum":
            for distance in (1, 2, 4, 8, 16):
                numbers = arith.addf(numbers, mgpu.utils.shfl_bfly(numbers, distance))
        else:
            number = vector.extract(numbers, [], [0])
            text = f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;"
            number = llvm.inline_asm(i32, [number], text, "=r,r", has_side_effects=True)
            numbers = vector.broadcast(numbers.type, number)
        registers, signed = np.full(x.registers.shape, numbers, object), None if kind == "sum" else True
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=signed)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=NUMBERS)
    return inline_mlir(reduce_registers, (NUMBERS,), out)(x)


def load_columns(ref, columns: int, layout, interpret: bool) -> list[Array]:
    """Loads a matrix [n, columns] as its columns; each thread loads its rows, sixteen bytes at once.

    Args:
      ref: [n · columns] in global memory, row by row.
      columns: How many columns it has.
      layout: The layout of a column [n].
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      The columns, [n] each.
    """
    n = ref.shape[0] // columns
    if interpret:
        matrix = ref[...].reshape(n, columns)
        return [matrix[:, column] for column in range(columns)]

    def load_rows(_, ref):
        tiled, kind = layout.to_mgpu(), ir.MemRefType(ref.type).element_type
        numbers = tiled.vector_length * columns  # in the rows of a register
        piece = math.gcd(numbers, 16 * 8 // mgpu.utils.bitwidth(kind))
        registers = [np.empty(tiled.registers_shape((n,)), object) for _ in range(columns)]
        start = mgpu.utils.memref_ptr(ref)
        for (i, _), (row,) in zip(np.ndenumerate(registers[0]), tiled.thread_idxs((n,)), strict=True):
            number = arith.index_cast(ir.IntegerType.get_signless(64), arith.muli(row, _number(columns)))
            at = llvm.getelementptr(start.type, start, [number], [-(2**31)], kind, [])
            pieces = []
            for j in range(0, numbers, piece):
                pointer = llvm.getelementptr(start.type, at, [], [j], kind, [])
                pieces.append(llvm.load(ir.VectorType.get((piece,), kind), pointer))
            for column, found in enumerate(registers):
                each = [divmod(j * columns + column, piece) for j in range(tiled.vector_length)]
                each = [vector.extract(pieces[j], [], [k]) for j, k in each]
                found[i] = vector.broadcast(ir.VectorType.get((tiled.vector_length,), kind), each[0])
                for j, number in enumerate(each):
                    found[i] = vector.insert(number, found[i], [], [j])
        return [mgpu.FragmentedArray(_registers=found, _layout=tiled, _is_signed=None) for found in registers]

    out = [plgpu.ShapeDtypeStruct((n,), ref.dtype, layout=layout)] * columns
    return inline_mlir(load_rows, (plgpu.RefType(),), out)(ref)


def load_repeated(ref, times: int, layout, interpret: bool) -> Array:
    """Loads numbers, each of which stands for `times` neighbours.

    Args:
      ref: float32 [..., m] in global memory.
      times: How often each number stands in the result; a multiple of the neighbours that a thread has.
      layout: The result's layout.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      [..., m · times].
    """
    if interpret:
        return jnp.repeat(ref[...], times, axis=-1)
    dims = *ref.shape[:-1], ref.shape[-1] * times

    def load_numbers(_, ref):
        tiled, kind = layout.to_mgpu(), ir.MemRefType(ref.type).element_type
        registers = np.empty(tiled.registers_shape(dims), object)
        filled = tiled.registers_element_type(kind)
        for (i, _), (*rows, column) in zip(np.ndenumerate(registers), tiled.thread_idxs(dims), strict=True):
            place = [*rows, arith.divui(column, _number(times))]
            number = vector.extract(vector.load(ir.VectorType.get((1,), kind), ref, place), [], [0])
            registers[i] = vector.broadcast(filled, number)
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return inline_mlir(load_numbers, (plgpu.RefType(),), plgpu.ShapeDtypeStruct(dims, ref.dtype, layout=layout))(ref)


def store_parts(x: Array, layout, refs, first, interpret: bool) -> None:
    """Writes neighbouring numbers to arrays in global memory that count on from one to the next.

    Args:
      x: [n], in `layout`; a thread's neighbours belong to the same array.
      layout: x's layout.
      refs: Several references, [m] each with an m of its own.
      first: A scalar: the number of x's first element, counted from the first array's beginning.
      interpret: Whether this runs in Pallas' interpreter.
    """
    starts = [0, *itertools.accumulate(ref.shape[0] for ref in refs)]
    if interpret:
        for ref, start in zip(refs, starts, strict=False):
            place = jnp.arange(ref.shape[0], dtype=jnp.int32) + start - first
            inside = (place >= 0) & (place < x.shape[0])
            ref[...] = jnp.where(inside, jnp.take(x, jnp.clip(place, 0, x.shape[0] - 1), axis=0), ref[...])
        return

    def write(_, x, *given):
        *targets, first = given
        i64 = ir.IntegerType.get_signless(64)
        first = arith.index_cast(ir.IndexType.get(), first.registers.flat[0])
        bases = [mgpu.utils.memref_ptr(target) for target in targets]
        for (number,), numbers in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
            number, pointer = arith.addi(first, number), None
            for place in reversed(range(len(bases))):
                within = arith.index_cast(i64, arith.subi(number, _number(starts[place])))
                own = llvm.getelementptr(bases[place].type, bases[place], [within], [-(2**31)], x.mlir_dtype, [])
                before = arith.cmpi(arith.CmpIPredicate.ult, number, _number(starts[place + 1]))
                pointer = own if pointer is None else llvm.select(before, own, pointer)
            llvm.store(numbers, pointer)

    inline_mlir(write, (layout, *[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT), None)(x, *refs, first)


def select_positive(x: Array, positions: Array, layout, interpret: bool) -> Array:
    """x [n, length], in `layout`, with zeros for the vectors whose position is 0.

    They are selected, not multiplied: what lies at position 0 may be NaN.
    """
    if interpret:
        return jnp.where(positions[:, None] > 0, x, jnp.zeros_like(x))

    def select(_, x, positions):
        registers = np.empty_like(x.registers)
        pieces = x.registers.size // positions.registers.size  # of a vector, that a thread has
        for n, (i, vectors) in enumerate(np.ndenumerate(x.registers)):
            at = positions.registers.flat[n // pieces]
            zero = ir.FloatAttr.get(ir.VectorType(vectors.type).element_type, 0.0)
            zeros = arith.constant(vectors.type, ir.DenseElementsAttr.get_splat(vectors.type, zero))
            exists = arith.cmpi(arith.CmpIPredicate.ne, as_index(at), arith.constant(ir.IndexType.get(), 0))
            registers[i] = arith.select(exists, vectors, zeros)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return inline_mlir(select, (layout, layout.reduce(1)), out)(x, positions)


def relabel(x: Array, source, target, dims: tuple[int, ...], target_index) -> Array:
    """Declares the registers of x to be those of an array in another layout; no number moves to another thread.

    Args:
      x: An array in layout `source`.
      source, target: The layouts. A register of the source holds the numbers of one or several of the target.
      dims: The result's shape.
      target_index: Takes the index of a register of x and which piece of it; returns the index of the target's register
        that this piece becomes.

    Returns:
      [dims] in layout `target`.
    """

    def move(_, x):
        layout = target.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        length = layout.vector_length
        for i, numbers in np.ndenumerate(x.registers):
            for j in range(x.layout.vector_length // length):
                kind = ir.VectorType.get((length,), ir.VectorType(numbers.type).element_type)
                piece = vector.extract_strided_slice(kind, numbers, [j * length], [length], [1])
                registers[target_index(i, j)] = piece
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return inline_mlir(move, (source,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=target))(x)


def store_rows(x: Array, layout, axis: int, ref, interpret: bool) -> None:
    """Writes the first n rows or columns of a product to shared memory.

    Args:
      x: The product, in `layout`; float32, or bfloat16 with axis 0.
      layout: x's layout.
      axis: 0 to write rows, 1 to write columns, each of them as a row of `ref`.
      ref: [n, x's other length] in shared memory. n is even, and at most 8.
      interpret: Whether this runs in Pallas' interpreter.
    """
    n, packs = ref.shape[0], x.dtype == jnp.bfloat16
    if interpret:
        ref[...] = x[:n] if axis == 0 else x[:, :n].T
        return

    def write(_, x, ref):
        i32, target = ir.IntegerType.get_signless(32), _Rows(ref)
        for ((*_, lower, _, _, _, _), numbers), index in zip(
            np.ndenumerate(x.registers), x.layout.thread_idxs(x.shape), strict=True
        ):
            if axis == 0 and lower:  # This register is of the ninth row or one behind it.
                continue
            row, column = index
            stores = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, index[axis], _number(n)))
            pair, kind = [vector.extract(numbers, [], [i]) for i in range(2)], "f"
            if packs:
                pair, kind = [vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), numbers), [], [0])], "r"
                points, text = [target.point(row, column)], "@p st.shared.b32 [$1], $2;"
            elif axis == 0:
                points, text = [target.point(row, column)], "@p st.shared.v2.f32 [$1], {$2, $3};"
            else:
                points = [target.point(arith.addi(column, _number(i)), row) for i in range(2)]
                text = "@p st.shared.f32 [$1], $3; @p st.shared.f32 [$2], $4;"
            text = f"{{.reg .pred p; setp.ne.s32 p, $0, 0; {text}}}"
            constraints = ",".join(["r"] * (1 + len(points)) + [kind] * len(pair)) + ",~{memory}"
            operands = [stores, *points, *pair]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    inline_mlir(write, (layout, plgpu.RefType()), None)(x, ref)


def store_inside(x: Array, layout, ref, first, first_column, interpret: bool, *, begin=None, end=None) -> None:
    """Writes those numbers of an array to global memory for which there is room.

    Args:
      x: [64, length] of float32 or of two bytes each, in `layout`, where a thread holds pairs of neighbouring columns.
      layout: x's layout.
      ref: [n, m] in global memory, m even. Number (i, j) of x is number (first + i, first_column + j) there.
      first, first_column: Scalars; first_column is even. first may be negative.
      interpret: Whether this runs in Pallas' interpreter.
      begin: A scalar: no row in front of it is written. None: 0.
      end: A scalar at most n: no row from it on is written. None: n.
    """
    n, m = ref.shape
    begin = jnp.int32(0) if begin is None else begin
    end = jnp.int32(n) if end is None else end
    if interpret:
        width = min(x.shape[1], m)
        # Where less room is left than that, what was written before is written again.
        left = jnp.minimum(first_column, m - width)

        def write_row(i, _):
            row = jnp.roll(lax.dynamic_index_in_dim(x, i, keepdims=False), first_column - left)[:width]
            held = ref[first + i, pl.ds(left, width)]
            ref[first + i, pl.ds(left, width)] = jnp.where(jnp.arange(width) < first_column - left, held, row)

        lax.fori_loop(jnp.maximum(begin - first, 0), jnp.minimum(x.shape[0], end - first), write_row, None)
        return

    def write(_, x, ref, *scalars):
        i32, target = ir.IntegerType.get_signless(32), _Rows(ref)
        *firsts, begin, end = [arith.index_cast(ir.IndexType.get(), scalar.registers.flat[0]) for scalar in scalars]
        # Unsigned, what lies in front of the beginning is far behind the end.
        begins, sizes = (begin, _number(0)), (arith.subi(end, begin), _number(m))
        for place, numbers in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
            place = [arith.addi(at, first) for at, first in zip(place, firsts, strict=True)]
            inside = [
                arith.cmpi(arith.CmpIPredicate.ult, arith.subi(at, start), size)
                for at, start, size in zip(place, begins, sizes, strict=True)
            ]
            stores = arith.extui(i32, arith.andi(*inside))
            if mgpu.utils.bitwidth(x.mlir_dtype) == 32:
                pair, kinds = [vector.extract(numbers, [], [i]) for i in range(2)], "f,f"
                text = "@p st.global.v2.f32 [$1], {$2, $3};"
            else:
                pair, kinds = [vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), numbers), [], [0])], "r"
                text = "@p st.global.b32 [$1], $2;"
            text = f"{{.reg .pred p; setp.ne.s32 p, $0, 0; {text}}}"
            operands = [stores, target.point(*place), *pair]
            constraints = f"r,l,{kinds},~{{memory}}"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    scalar = plgpu.Layout.WG_SPLAT
    arguments = layout, plgpu.RefType(), *[scalar] * 4
    inline_mlir(write, arguments, None)(x, ref, first, first_column, begin, end)


def store_wide(x: Array, layout, ref, first, first_column, interpret: bool, *, end=None) -> None:
    """As `store_inside`, in sixteen bytes a thread: threads of a row, each of which has two of every eight neighbouring
    columns, exchange them until each has sixteen bytes that are neighbours.

    Args:
      x: [n, length] of float32 or of two bytes each; length in multiples of 32.
      ref: [n, m] in global memory, m a multiple of 8 and at least first_column + length.
      first_column: A scalar, a multiple of 8.
      layout: That of the tensor cores' results, [64, length], or of every other eight rows of them, [32, length].
      first, interpret, end: As in `store_inside`.
    """
    if interpret:
        store_inside(x, layout, ref, first, first_column, interpret, end=end)
        return
    end = jnp.int32(ref.shape[0]) if end is None else end

    def write(_, x, ref, *scalars):
        i32, target = ir.IntegerType.get_signless(32), _Rows(ref)
        first, first_column, end = [arith.index_cast(ir.IndexType.get(), s.registers.flat[0]) for s in scalars]
        thread, places = mgpu.utils.thread_idx(), [*x.layout.thread_idxs(x.shape)]
        words = mgpu.utils.bitwidth(x.mlir_dtype) // 16  # of a register, which has two numbers
        registers = [vector.bitcast(ir.VectorType.get((words,), i32), n) for n in x.registers.flat]
        registers = [[vector.extract(n, [], [i]) for i in range(words)] for n in registers]
        together = 4 // words  # threads that exchange registers, and how many each
        distances = [distance for distance in (1, 2) if distance < together]
        bits = [
            arith.cmpi(arith.CmpIPredicate.ne, arith.andi(thread, arith.constant(i32, bit)), arith.constant(i32, 0))
            for bit in distances
        ]

        def times(columns: int, mask: int):
            """Columns times the number that those bits of the thread's number make which are in the mask."""
            number = arith.andi(thread, arith.constant(i32, mask))
            return arith.muli(arith.index_cast(ir.IndexType.get(), number), _number(columns))

        # Of several times eight columns, a thread has some of those of its number among the threads that exchange: all
        # eight, or the first or last four.
        inside = times(8, together - 1)
        if words == 2:
            inside = arith.addi(inside, times(2, 2))
        # Of a thread's registers, neighbours are eight rows apart if it has several rows, and the others eight columns.
        rows = len(registers) * 8 // x.shape[1]
        for begin in range(0, len(registers), together * rows):
            for which in range(rows):
                numbers = registers[begin + which : begin + together * rows : rows]
                for distance, bit in zip(distances, bits, strict=True):
                    for i in range(together):
                        if not i & distance:
                            pair = numbers[i], numbers[i + distance]
                            numbers[i], numbers[i + distance] = _exchange(*pair, bit, distance)
                row = arith.addi(places[begin + which][0], first)
                stores = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, row, end))
                column = arith.addi(arith.addi(first_column, _number(begin // rows * 8)), inside)
                text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5};}"
                operands = [stores, target.point(row, column), *itertools.chain(*numbers)]
                constraints = "r,l,r,r,r,r,~{memory}"
                llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    scalar = plgpu.Layout.WG_SPLAT
    inline_mlir(write, (layout, plgpu.RefType(), scalar, scalar, scalar), None)(x, ref, first, first_column, end)


def _exchange(low: list, high: list, bit, distance: int) -> tuple[list, list]:
    """Two registers, as words, in place of which a thread has both its own and its partner's low ones, or both high
    ones.

    Args:
      low, high: The thread's.
      bit: Whether it is the one of the two threads that gets the high ones.
      distance: From a thread's number to its partner's, a power of two.
    """
    found = [mgpu.utils.shfl_bfly(arith.select(bit, *words), distance) for words in zip(low, high, strict=True)]
    first = [arith.select(bit, new, mine) for mine, new in zip(low, found, strict=True)]
    second = [arith.select(bit, mine, new) for mine, new in zip(high, found, strict=True)]
    return first, second


def store_sum(x: Array, layout, ref, row, first_column, interpret: bool) -> None:
    """Writes the sum of the first sixteen rows of an array to a row in global memory.

    Args:
      x: float32 [64, length] in `layout`, that of the tensor cores' results: the first of the four warps has the first
        sixteen rows, a thread pairs of neighbouring columns, of rows that are eight apart.
      layout: x's layout.
      ref: [n, m] in global memory, of float32 or of two bytes each, m at least first_column + length.
      row, first_column: Scalars: where the sums are written; first_column is even.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        ref[row, pl.ds(first_column, x.shape[1])] = jnp.sum(x[:16], axis=0).astype(ref.dtype)
        return

    def write(_, x, ref, row, first_column):
        i32, target = ir.IntegerType.get_signless(32), _Rows(ref)
        row, first_column = (arith.index_cast(ir.IndexType.get(), n.registers.flat[0]) for n in (row, first_column))
        thread = arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, THREADS))
        stores = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, thread, arith.constant(i32, 4)))
        places = [*x.layout.thread_idxs(x.shape)][::2]  # of rows eight apart, the upper ones
        for (_, column), (upper, lower) in zip(places, x.registers.reshape(-1, 2), strict=True):
            total = arith.addf(upper, lower)
            for distance in (4, 8, 16):  # Eight lanes, four apart, have the same columns of eight rows.
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            pair = [vector.extract(total, [], [i]) for i in range(2)]
            if mgpu.utils.bitwidth(ir.MemRefType(ref.type).element_type) == 32:
                kinds, text = "f,f", "@p st.global.v2.f32 [$1], {$2, $3};"
            else:
                kind = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
                rounded = arith.truncf(kind, total)
                pair = [vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), rounded), [], [0])]
                kinds, text = "r", "@p st.global.b32 [$1], $2;"
            text = f"{{.reg .pred p; setp.ne.s32 p, $0, 0; {text}}}"
            operands = [stores, target.point(row, arith.addi(column, first_column)), *pair]
            constraints = f"r,l,{kinds},~{{memory}}"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    scalar = plgpu.Layout.WG_SPLAT
    inline_mlir(write, (layout, plgpu.RefType(), scalar, scalar), None)(x, ref, row, first_column)


def store_vectors(source, target, places: list[Array], interpret: bool) -> None:
    """Copies vectors from one array in global memory to another, whichever of them have a place there.

    Args:
      source: [n, length], of two bytes a number; at most THREADS pieces of sixteen bytes a vector.
      target: [m, length].
      places: Of each of the first vectors of the source, its number in the target; below 0: it is not copied. Scalars.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        for i, place in enumerate(places):

            @pl.when(place >= 0)
            def _(i=i, place=place):
                target[place] = source[i]

        return

    def copy(_, source, target, *places):
        i32, piece = ir.IntegerType.get_signless(32), 8
        thread = arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, THREADS))
        pieces = ir.MemRefType(source.type).shape[1] // piece
        has_one = arith.cmpi(arith.CmpIPredicate.ult, thread, arith.constant(i32, pieces))
        column = arith.muli(arith.index_cast(ir.IndexType.get(), thread), _number(piece))
        sources, targets = _Rows(source), _Rows(target)
        words = llvm.StructType.get_literal([i32] * 4)
        places = [place.registers.flat[0] for place in places]
        for begin in range(0, len(places), AT_ONCE):
            some, found = places[begin : begin + AT_ONCE], []
            for i, place in enumerate(some):
                exists = arith.cmpi(arith.CmpIPredicate.sge, place, arith.constant(i32, 0))
                copies = arith.extui(i32, arith.andi(exists, has_one))
                text = "{.reg .pred p; setp.ne.s32 p, $5, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}"
                operands = [sources.point(_number(begin + i), column), copies]
                constraints = "=&r,=&r,=&r,=&r,l,r,~{memory}"
                found.append((copies, llvm.inline_asm(words, operands, text, constraints, has_side_effects=True)))
            for place, (copies, numbers) in zip(some, found, strict=True):
                numbers = [llvm.extractvalue(i32, numbers, [i]) for i in range(4)]
                at = targets.point(arith.index_cast(ir.IndexType.get(), place), column)
                text = "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5};}"
                operands, constraints = [copies, at, *numbers], "r,l,r,r,r,r,~{memory}"
                llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    scalars = (plgpu.Layout.WG_SPLAT,) * len(places)
    inline_mlir(copy, (plgpu.RefType(), plgpu.RefType(), *scalars), None)(source, target, *places)


def inline_mlir(function, arguments, result):
    """Makes a kernel able to call a function that is written in MLIR.

    Args:
      arguments: The layouts of the function's array arguments; `plgpu.RefType()` for references. Before them the
        function gets the lowering's context.
      result: Shape, dtype and layout of what it returns, or None.
    """
    # By its annotations, `inline_mgpu` returns a function that takes the context, too; it does not.
    decorate = plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    return decorate(function)  # pyright: ignore[reportReturnType]


class _Rows:
    """Makes pointers to the elements of a reference [n, length]."""

    def __init__(self, ref):
        kind = ir.MemRefType(ref.type)
        self._start, self._kind, (self._pitch, _) = (
            mgpu.utils.memref_ptr(ref),
            kind.element_type,
            kind.get_strides_and_offset()[0],
        )

    def point(self, row, column):
        """A pointer to an element."""
        number = arith.addi(arith.muli(row, _number(self._pitch)), column)
        number = arith.index_cast(ir.IntegerType.get_signless(64), number)
        dynamic = [-(2**31)]
        return llvm.getelementptr(self._start.type, self._start, [number], dynamic, self._kind, [])


def _number(value: int):
    """A constant, as an index."""
    return arith.constant(ir.IndexType.get(), value)


def as_index(register):
    """The int32 that a register holds, as an index."""
    return arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [0]))
