"""Instructions that the Mosaic GPU kernels share: barriers, waits, atomics, and sums over a warp.

Functions with `interpret` compute the same in Pallas' GPU interpreter, or do nothing there, as `threads` says.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from jaxbuf.axes import Array
from jaxbuf.pallas.threads import PER_THREAD, THREADS, WARP, inline_mlir


def end_copies(interpret: bool) -> None:
    """Closes a group: the copies that this thread has started since the last call. `wait_for_copies` counts groups."""
    _command("cp.async.commit_group;", interpret)


def wait_for_copies(groups: int, interpret: bool) -> None:
    """Waits until this thread's copies have arrived in shared memory, except those of its last `groups` groups."""
    _command(f"cp.async.wait_group {groups};", interpret)


def show_copies(interpret: bool) -> None:
    """Makes what this thread wrote to shared memory, copies that it waited for included, seen by the tensor cores of
    those who wait for it."""
    _command("fence.proxy.async.shared::cta;", interpret)


def synchronize_warp(interpret: bool) -> None:
    """Waits for all threads of the warp; each then sees what the others wrote to shared memory."""
    _command("bar.warp.sync 0xffffffff;", interpret)


def _command(text: str, interpret: bool) -> None:
    """Runs one instruction without operands."""

    def run(_):
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)

    if not interpret:
        inline_mlir(run, (), None)()


def prefetch(ref, interpret: bool) -> None:
    """Starts to bring a contiguous array in global memory, of a multiple of sixteen bytes, to the L2 cache."""

    def run(_, ref):
        kind = ir.MemRefType(ref.type)
        length = int(np.prod(kind.shape)) * mgpu.utils.bitwidth(kind.element_type) // 8
        text = f"{{.reg .pred p; setp.eq.s32 p, $1, 0; @p cp.async.bulk.prefetch.L2.global [$0], {length};}}"
        operands = [mgpu.utils.memref_ptr(ref), _thread()]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "l,r,~{memory}", has_side_effects=True)

    if not interpret:
        inline_mlir(run, (plgpu.RefType(),), None)(ref)


def settle(positions: Sequence[tuple[Array, object]], interpret: bool) -> None:
    """Waits until the loads of positions have arrived; no later load starts before.

    The assembler has six counters for all loads on their way. Without this, a thread that needs a position which it
    asked for long ago may wait for loads that it asked for a moment ago, because they share a counter.

    Args:
      positions: int32 arrays that were loaded from global memory, each with its layout.
      interpret: Whether this runs in Pallas' interpreter.
    """

    def wait(_, *arrays):
        combined = functools.reduce(arith.ori, (vector.extract(x, [], [0]) for a in arrays for x in a.registers.flat))
        # The comparison needs all positions. It never traps, for none is negative.
        text = "{.reg .pred p; setp.eq.s32 p, $0, -1; @p trap;}"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [combined], text, "r,~{memory}", has_side_effects=True)

    if not interpret:
        arrays, layouts = zip(*positions, strict=True)
        inline_mlir(wait, layouts, None)(*arrays)


def round_now(x: Array, layout, interpret: bool) -> Array:
    """x float32 [n], in `layout`, rounded at this point: otherwise a product in x would be fused with a later sum."""
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

    return inline_mlir(move, (layout,), plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout))(x)


def sum_later(arrays: list[Array], interpret: bool) -> list[Array]:
    """Suffix sums within each warp, added up as a tree.

    Args:
      arrays: float32 [THREADS], in layout `PER_THREAD`.
      interpret: Whether this runs in Pallas' interpreter.

    Returns:
      The same arrays, with each thread's number replaced by its sum with the numbers of the later threads of its warp.
    """
    if interpret:
        return [jnp.cumsum(x.reshape(-1, WARP)[:, ::-1], axis=1)[:, ::-1].reshape(-1) for x in arrays]

    def add(_, *arrays):
        # One piece of assembly for all arrays: the assembler keeps the order of shuffles, so that those of one array
        # after the other would each wait for the one before.
        numbered = range(len(arrays))
        lines = [".reg .pred p;", f".reg .f32 t<{len(arrays)}>;", ".reg .u32 lane;", "mov.u32 lane, %laneid;"]
        lines += [f"mov.f32 ${i}, ${len(arrays) + i};" for i in numbered]
        for step in (1, 2, 4, 8, 16):
            lines += [f"setp.lt.u32 p, lane, {WARP - step};"]
            lines += [f"shfl.sync.down.b32 t{i}, ${i}, {step}, 31, 0xffffffff;" for i in numbered]
            lines += [f"@p add.f32 ${i}, ${i}, t{i};" for i in numbered]
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

    kinds = [plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=PER_THREAD) for x in arrays]
    return inline_mlir(add, (PER_THREAD,) * len(arrays), kinds)(*arrays)


def publish_warps(x: Array, ref, interpret: bool) -> None:
    """Writes the number of each warp's first thread to shared memory.

    Args:
      x: float32 [THREADS], in layout `PER_THREAD`.
      ref: [THREADS / WARP] in shared memory.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        ref[...] = x[::WARP]
        return

    def write(_, x, ref):
        i32 = ir.IntegerType.get_signless(32)
        number, thread = vector.extract(x.registers.flat[0], [], [0]), _thread()
        warp = arith.divui(thread, arith.constant(i32, WARP))
        pointer = mgpu.utils.memref_ptr(ref)
        pointer = llvm.getelementptr(pointer.type, pointer, [warp], [-(2**31)], number.type, [])
        in_warp = arith.remui(thread, arith.constant(i32, WARP))
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.f32 [$0], $1;}"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [pointer, number, in_warp], text, "r,f,r,~{memory}", has_side_effects=True
        )

    inline_mlir(write, (PER_THREAD, plgpu.RefType()), None)(x, ref)


def synchronize(interpret: bool) -> None:
    """Waits for all threads of the warpgroup; each then sees what the others wrote to shared memory.

    Before the copy engine reads shared memory, `plgpu.commit_smem` is needed instead: it also waits for every load and
    store that is on its way.
    """
    if interpret:
        plgpu.commit_smem()
        return

    def wait(_):
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        text = f"bar.sync $0, {THREADS};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [barrier], text, "r,~{memory}", has_side_effects=True)

    inline_mlir(wait, (), None)()


def count_up(counter) -> Array:
    """Adds 1 to a counter, int32 [1] in global memory.

    Returns:
      int32 [THREADS] in layout `PER_THREAD`: the counter before, in the first thread; 0 in the others.
    """

    def add(_, counter):
        i32, layout = ir.IntegerType.get_signless(32), PER_THREAD.to_mgpu()
        # An atomic increment, not an addition: the assembler would combine additions of all threads of a warp into one,
        # and they would wait for it right here.
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p atom.global.inc.u32 $0, [$1], 0x7fffffff;}"
        operands = [mgpu.utils.memref_ptr(counter), _thread()]
        number = llvm.inline_asm(i32, operands, text, "=r,l,r", has_side_effects=True)
        registers = np.full(layout.registers_shape((THREADS,)), None, object)
        registers.flat[0] = vector.broadcast(ir.VectorType.get((1,), i32), number)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    out = plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=PER_THREAD)
    return inline_mlir(add, (plgpu.RefType(),), out)(counter)


def publish(number: Array, ref) -> None:
    """Writes the first thread's number to shared memory.

    Args:
      number: int32 [THREADS], in layout `PER_THREAD`.
      ref: One word of shared memory.
    """

    def write(_, number, ref):
        word = vector.extract(number.registers.flat[0], [], [0])
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.b32 [$0], $1;}"
        operands = [mgpu.utils.memref_ptr(ref), word, _thread()]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,r", has_side_effects=True)

    inline_mlir(write, (PER_THREAD, plgpu.RefType()), None)(number, ref)


def _thread():
    """The number of this thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, THREADS))
