"""What the Mosaic GPU kernels share: each says for every array which thread holds what of it."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

type Array = jax.Array

# Layouts are given and barriers written out: inferring them takes minutes for the larger kernels.
COMPILER = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
THREADS = 128  # of a warpgroup
WARP = 32
EVERY = plgpu.Layout.TCGEN05_TMEM_NATIVE(4).reduce(1)  # of THREADS numbers, one in each thread


def load(ref, layout):
    """The array of a reference in global or shared memory, spread over the threads as `layout` says."""
    return plgpu.load(ref, layout=layout, optimized=False)


def load_every(ref, i: int, n: int, interpret: bool) -> Array:
    """Number i of the n that each thread has of the first THREADS · n of a reference: [THREADS], `EVERY`."""
    if interpret:  # it cannot write to a reference in another shape
        return ref[pl.ds(0, THREADS * n)].reshape(THREADS, n)[:, i]
    return load(ref.at[pl.ds(0, THREADS * n)].reshape(THREADS, n).at[:, i], EVERY)


def store_every(x: Array, ref, i: int, n: int, interpret: bool) -> None:
    """Writes what `load_every` reads."""
    there = pl.ds(0, THREADS * n)
    if interpret:
        ref[there] = ref[there].reshape(THREADS, n).at[:, i].set(x).reshape(-1)
    else:
        ref.at[there].reshape(THREADS, n)[:, i] = x


def vectors_layout(length: int, dtype):
    """Of vectors [n, length]: a thread holds sixteen bytes of one, or of several."""
    part = 16 // np.dtype(dtype).itemsize
    vectors = 32 * part // length  # that a warp holds
    if vectors == 1:
        tiling, warps, lanes = plgpu.Tiling(((4, length), (part,))), (-3,), (-2,)
    else:
        tiling, warps, lanes = plgpu.Tiling(((4 * vectors, length), (vectors, part))), (-4,), (-2, -3)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=lanes, vector_dim=-1)


def gather_vectors(ref, positions: Array, layout, interpret: bool) -> Array:
    """Vectors of a reference in global memory; each thread asks for what it holds of them.

    Args:
      ref: [m, length].
      positions: int32 [n], in layout.reduce(1).
      layout: Of the result, from `vectors_layout`.
      interpret: In Pallas' interpreter, which knows no threads.

    Returns:
      [n, length].
    """
    if interpret:
        return jnp.take(ref[...], positions, axis=0)
    dims = positions.shape[0], ref.shape[-1]

    def load_vectors(_, ref, positions):
        tiled = layout.to_mgpu()
        kind = ir.VectorType.get((tiled.vector_length,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(tiled.registers_shape(dims), object)
        places, each = tiled.thread_idxs(dims), positions.registers.flat
        for (i, _), (_, column), at in zip(np.ndenumerate(registers), places, each, strict=True):
            registers[i] = vector.load(kind, ref, [_index(at), column])
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(dims, ref.dtype, layout=layout)
    return _inline(load_vectors, (plgpu.RefType(), layout.reduce(1)), out)(ref, positions)


def copy_vectors(ref, positions: Array, layout, target, interpret: bool) -> None:
    """Starts to copy vectors of a reference in global memory to shared memory; `wait_for_copies` says when they are in.

    Args:
      ref: [m, length], 2-byte numbers.
      positions: int32 [n], in layout.reduce(1); where one is 0, zeros are written.
      layout: Says which thread copies what, from `vectors_layout`.
      target: [n, length] in shared memory.
      interpret: In Pallas' interpreter.
    """
    if interpret:
        vectors = jnp.take(ref[...], positions, axis=0)
        target[...] = jnp.where(positions[:, None] > 0, vectors, jnp.zeros_like(vectors))
        return
    dims = positions.shape[0], ref.shape[-1]

    def copy(_, ref, positions, target):
        i32, tiled = ir.IntegerType.get_signless(32), layout.to_mgpu()
        sources, targets = _Rows(ref), _Rows(target)
        for (row, column), at in zip(tiled.thread_idxs(dims), positions.registers.flat, strict=True):
            at = _index(at)
            lives = arith.cmpi(arith.CmpIPredicate.ne, at, _number(0))
            length = arith.select(lives, arith.constant(i32, 16), arith.constant(i32, 0))  # the rest becomes zeros
            operands = [targets.point(row, column), sources.point(at, column), length]
            text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,~{memory}", has_side_effects=True)

    _inline(copy, (plgpu.RefType(), layout.reduce(1), plgpu.RefType()), None)(ref, positions, target)


def end_copies(interpret: bool) -> None:
    """The copies that this thread has started since the last call are a group, which `wait_for_copies` counts."""
    _command("cp.async.commit_group;", interpret)


def wait_for_copies(groups: int, interpret: bool) -> None:
    """Waits until all but the last `groups` groups of this thread's copies are in shared memory."""
    _command(f"cp.async.wait_group {groups};", interpret)


def _command(text: str, interpret: bool) -> None:
    def run(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)

    if not interpret:
        _inline(run, (), None)()


def gather_numbers(ref, positions: Array, interpret: bool) -> Array:
    """Numbers of a reference [m] in global memory, float32 or int32, at positions int32 [THREADS], both `EVERY`."""
    if interpret:
        return jnp.take(ref[...], positions, axis=0)
    signed = True if ref.dtype == jnp.int32 else None

    def load_numbers(_, ref, positions):
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(positions.registers.shape, object)
        for i, at in np.ndenumerate(positions.registers):
            registers[i] = vector.load(kind, ref, [_index(at)])
        return mgpu.FragmentedArray(_registers=registers, _layout=positions.layout, _is_signed=signed)

    out = plgpu.ShapeDtypeStruct(positions.shape, ref.dtype, layout=EVERY)
    return _inline(load_numbers, (plgpu.RefType(), EVERY), out)(ref, positions)


def settle(positions: Sequence[tuple[Array, object]], interpret: bool) -> None:
    """Waits until positions, int32 arrays and their layouts, are there; no load that follows is asked for before.

    The assembler has six counters for all loads on their way: who needs a position that was asked for long ago may
    otherwise wait for loads that were asked for a moment ago, which share its counter.
    """

    def wait(_, *arrays):
        every = functools.reduce(arith.ori, (vector.extract(x, [], [0]) for a in arrays for x in a.registers.flat))
        text = "{.reg .pred p; setp.eq.s32 p, $0, -1; @p trap;}"  # needs them all; no position is negative
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [every], text, "r,~{memory}", has_side_effects=True)

    if not interpret:
        arrays, layouts = zip(*positions, strict=True)
        _inline(wait, layouts, None)(*arrays)


def select_positive(x: Array, positions: Array, layout, interpret: bool) -> Array:
    """The vectors x [n, length], in layout, whose positions are above 0, and zeros for the others."""
    if interpret:
        return jnp.where(positions[:, None] > 0, x, jnp.zeros_like(x))

    def select(_, x, positions):
        registers = np.empty_like(x.registers)
        for (i, vectors), at in zip(np.ndenumerate(x.registers), positions.registers.flat, strict=True):
            zero = ir.FloatAttr.get(ir.VectorType(vectors.type).element_type, 0.0)
            zeros = arith.constant(vectors.type, ir.DenseElementsAttr.get_splat(vectors.type, zero))
            lives = arith.cmpi(arith.CmpIPredicate.ne, _index(at), arith.constant(ir.IndexType.get(), 0))
            registers[i] = arith.select(lives, vectors, zeros)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    return _inline(select, (layout, layout.reduce(1)), out)(x, positions)


def round_now(x: Array, layout, interpret: bool) -> Array:
    """x float32 [n], in layout, rounded here: a product would be fused with a sum that follows."""
    if interpret:
        return x

    def move(_, x):
        registers = np.empty_like(x.registers)
        for i, numbers in np.ndenumerate(x.registers):
            for j in range(ir.VectorType(numbers.type).shape[0]):
                number = vector.extract(numbers, [], [j])
                number = llvm.inline_asm(number.type, [number], "mov.b32 $0, $1;", "=f,f")
                numbers = vector.insert(number, numbers, [], [j])
            registers[i] = numbers
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return _inline(move, (layout,), plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))(x)


def sum_later(arrays: list[Array], interpret: bool) -> list[Array]:
    """Of arrays float32 [THREADS], `EVERY`: each number and those of later threads of its warp, summed as a tree."""
    if interpret:
        return [jnp.cumsum(x.reshape(-1, WARP)[:, ::-1], axis=1)[:, ::-1].reshape(-1) for x in arrays]

    def add(_, *arrays):
        # All at once: the assembler leaves shuffles in their order, and each would wait for the one before.
        every = range(len(arrays))
        lines = [".reg .pred p;", f".reg .f32 t<{len(arrays)}>;", ".reg .u32 lane;", "mov.u32 lane, %laneid;"]
        lines += [f"mov.f32 ${i}, ${len(arrays) + i};" for i in every]
        for step in (1, 2, 4, 8, 16):
            lines += [f"setp.lt.u32 p, lane, {WARP - step};"]
            lines += [f"shfl.sync.down.b32 t{i}, ${i}, {step}, 31, 0xffffffff;" for i in every]
            lines += [f"@p add.f32 ${i}, ${i}, t{i};" for i in every]
        numbers = [vector.extract(x.registers.flat[0], [], [0]) for x in arrays]
        kind = llvm.StructType.get_literal([number.type for number in numbers])
        constraints = ",".join(["=&f"] * len(arrays) + ["f"] * len(arrays))
        text = "{" + " ".join(lines) + "}"
        found = llvm.inline_asm(kind, numbers, text, constraints, has_side_effects=True)
        sums = []
        for i, x in enumerate(arrays):
            number = llvm.extractvalue(numbers[i].type, found, [i])
            registers = np.full_like(x.registers, vector.broadcast(ir.VectorType.get((1,), number.type), number))
            sums.append(mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None))
        return sums

    kinds = [plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=EVERY) for x in arrays]
    return _inline(add, (EVERY,) * len(arrays), kinds)(*arrays)


def publish_warps(x: Array, ref, interpret: bool) -> None:
    """Writes what the first thread of each warp has of float32 [THREADS], `EVERY`, to shared memory [warps]."""
    if interpret:
        ref[...] = x[::WARP]
        return

    def write(_, x, ref):
        i32 = ir.IntegerType.get_signless(32)
        number, thread = vector.extract(x.registers.flat[0], [], [0]), _thread()
        warp = arith.divui(thread, arith.constant(i32, WARP))
        place = mgpu.utils.memref_ptr(ref)
        place = llvm.getelementptr(place.type, place, [warp], [-(2**31)], number.type, [])
        lane = arith.remui(thread, arith.constant(i32, WARP))
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.f32 [$0], $1;}"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [place, number, lane], text, "r,f,r,~{memory}", has_side_effects=True
        )

    _inline(write, (EVERY, plgpu.RefType()), None)(x, ref)


def relabel(x: Array, source, target, dims: tuple[int, ...], place) -> Array:
    """The numbers that each thread has of x, in layout `source`, as those of an array [dims] in layout `target`.

    Args:
      place: From the index of a register in x, and which part of it, to the index of the target's register.
    """

    def move(_, x):
        layout = target.to_mgpu()
        registers = np.empty(layout.registers_shape(dims), object)
        length = layout.vector_length
        for i, numbers in np.ndenumerate(x.registers):
            for j in range(x.layout.vector_length // length):
                kind = ir.VectorType.get((length,), ir.VectorType(numbers.type).element_type)
                part = vector.extract_strided_slice(kind, numbers, [j * length], [length], [1])
                registers[place(i, j)] = part
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return _inline(move, (source,), plgpu.ShapeDtypeStruct(dims, x.dtype, layout=target))(x)


def store_rows(x: Array, layout, axis: int, ref, interpret: bool) -> None:
    """Writes the first rows (axis 0) or columns (axis 1; float32) of a product to shared memory [n, its other length].

    n is even, and at most 8.
    """
    n, packs = ref.shape[0], x.dtype == jnp.bfloat16
    if interpret:
        ref[...] = x[:n] if axis == 0 else x[:, :n].T
        return

    def write(_, x, ref):
        i32, target = ir.IntegerType.get_signless(32), _Rows(ref)
        for ((*_, lower, _, _, _, _), numbers), place in zip(
            np.ndenumerate(x.registers), x.layout.thread_idxs(x.shape), strict=True
        ):
            if axis == 0 and lower:  # the ninth row and those behind it
                continue
            row, column = place
            stores = arith.extui(i32, arith.cmpi(arith.CmpIPredicate.ult, place[axis], _number(n)))
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

    _inline(write, (layout, plgpu.RefType()), None)(x, ref)


def synchronize(interpret: bool) -> None:
    """Waits for all threads of the warpgroup; each then sees what the others wrote to shared memory.

    `plgpu.commit_smem` is for what the copy engine reads: it also waits for every load and store that is on its way.
    """
    if interpret:
        plgpu.commit_smem()
        return

    def wait(_):
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        text = f"bar.sync $0, {THREADS};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [barrier], text, "r,~{memory}", has_side_effects=True)

    _inline(wait, (), None)()


def count_up(counter) -> Array:
    """Adds 1 to an int32 [1] in global memory; the first thread gets what it was: int32 [THREADS], `EVERY`."""

    def add(_, counter):
        i32, layout = ir.IntegerType.get_signless(32), EVERY.to_mgpu()
        # No addition, of which the assembler would make one for all threads of a warp: they would wait for it at once.
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p atom.global.inc.u32 $0, [$1], 0x7fffffff;}"
        operands = [mgpu.utils.memref_ptr(counter), _thread()]
        number = llvm.inline_asm(i32, operands, text, "=r,l,r", has_side_effects=True)
        registers = np.full(layout.registers_shape((THREADS,)), None, object)
        registers.flat[0] = vector.broadcast(ir.VectorType.get((1,), i32), number)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    out = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=EVERY)
    return _inline(add, (plgpu.RefType(),), out)(counter)


def publish(number: Array, ref) -> None:
    """Writes what the first thread has of int32 [THREADS] to a word of shared memory."""

    def write(_, number, ref):
        word = vector.extract(number.registers.flat[0], [], [0])
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.b32 [$0], $1;}"
        operands = [mgpu.utils.memref_ptr(ref), word, _thread()]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,r", has_side_effects=True)

    _inline(write, (EVERY, plgpu.RefType()), None)(number, ref)


def _inline(function, arguments, result):
    """A function over registers and references, called from a kernel."""
    # Its annotations say that it returns a function of the same arguments, the context among them.
    decorate = plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    return decorate(function)  # pyright: ignore[reportReturnType]


class _Rows:
    """Pointers into a reference [n, length]."""

    def __init__(self, ref):
        kind = ir.MemRefType(ref.type)
        self._start, self._kind, (self._pitch, _) = (
            mgpu.utils.memref_ptr(ref),
            kind.element_type,
            kind.get_strides_and_offset()[0],
        )

    def point(self, row, column):
        number = arith.addi(arith.muli(row, _number(self._pitch)), column)
        number = arith.index_cast(ir.IntegerType.get_signless(64), number)
        dynamic = [-(2**31)]
        return llvm.getelementptr(self._start.type, self._start, [number], dynamic, self._kind, [])


def _number(value: int):
    return arith.constant(ir.IndexType.get(), value)


def _thread():
    """The number of this thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, THREADS))


def _index(register):
    """A register of one int32, as an index."""
    return arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [0]))
