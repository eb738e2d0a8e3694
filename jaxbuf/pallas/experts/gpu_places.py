"""Where the rows of experts lie, which visits they have, and their sums, on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

One block counts the rows of each expert in shared memory: what a row finds counted is its place in its expert's group.
In which order a group's rows lie is not specified, and no result depends on it. XLA, which would sort them, launches a
dozen kernels of 2 us each (`gpu.arrange_rows` and `gpu.plan_visits`, which say what is computed).

Floor: numbers of experts and all results / what one multiprocessor reads and writes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import llvm, nvvm

from jaxbuf.axes import Array
from jaxbuf.pallas.experts import gpu
from jaxbuf.pallas.threads import COMPILER, THREADS, WARP, inline_mlir, load, store

MOST_EXPERTS = 1024  # Each has a thread.
MOST_WARPGROUPS = 8
MOST_OUTPUTS = 16384  # numbers of a row: what a block's registers hold
LOADED = 2**14  # numbers that a block loads at once
EACH = 8  # rows that a thread loads at once


@dataclasses.dataclass(frozen=True)
class Rows:
    """How many there are.

    Attributes:
      rows: Experts of all tokens.
      experts: That are here.
      chosen: Experts of a token.
    """

    rows: int
    experts: int
    chosen: int

    @property
    def aligned(self) -> int:
        return gpu.aligned_rows(self.rows, self.experts)

    @property
    def visits(self) -> int:
        return gpu.most_visits(self.rows, self.experts)


def place_rows(chosen: Array, experts: int, *, interpret: bool = False) -> tuple[Array, Array, Array, Array]:
    """Where the rows of each expert lie, one group behind the other.

    Args:
      chosen: int32 [tokens, chosen], the experts; those that are not in [0, experts) are in no group.
      experts: How many have a group.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      int32 [rows] the place of each row, of those in no group one behind all rows; int32 [aligned rows] the token of
      each place, 0 where there is none; and what `gpu.plan_visits` returns.
    """
    rows = Rows(chosen.size, experts, chosen.shape[1])
    if experts > MOST_EXPERTS:
        return _defined(rows, chosen.reshape(-1))
    places, sources, visits, used = _kernel(rows, interpret)(chosen.reshape(-1))
    return places, sources, visits.reshape(-1, 3), used


def _defined(rows: Rows, by_expert: Array) -> tuple[Array, Array, Array, Array]:
    """What the kernel computes, as XLA does."""
    places, groups = gpu.arrange_rows(by_expert, rows.experts)
    tokens = jnp.arange(rows.rows, dtype=jnp.int32) // rows.chosen
    sources = jnp.zeros(rows.aligned, jnp.int32).at[places].set(tokens, mode="drop")
    return places, sources, *gpu.plan_visits(groups, rows.rows)


def _kernel(rows: Rows, interpret: bool):
    wanted = max(-(-rows.experts // THREADS), -(-rows.rows // (EACH * THREADS)))
    warpgroups = 1 if interpret else min(wanted, MOST_WARPGROUPS)
    threads = warpgroups * THREADS

    def place_experts(chosen, places, sources, visits, used, *memory):
        if interpret:  # The interpreter has no threads.
            found = _defined(rows, chosen[...])
            for ref, x in zip((places, sources, visits, used), found, strict=True):
                ref[...] = x.reshape(-1)
            return
        *numbers, barrier = memory
        refs = (chosen, places, sources, visits, used, *numbers)
        for phase in (_clear, _count, _sum_in_warps, _lay_out, _place):
            if phase is not _clear:  # All threads have ended the one before.
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)
            inline_mlir(_phase(phase, rows, threads), [plgpu.RefType()] * len(refs), None)(*refs)

    outs = rows.rows, rows.aligned, 3 * rows.visits, 1
    # Of each expert its count, first row and first visit; of each warp, and in the end of all, rows and visits.
    numbers = [plgpu.SMEM((n,), jnp.int32) for n in (*[rows.experts] * 3, 2 * (MOST_EXPERTS // WARP + 1))]
    return plgpu.kernel(
        place_experts,
        out_type=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in outs],
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[*numbers, plgpu.Barrier(num_arrivals=warpgroups)],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def sums(outputs: int) -> bool:
    """Whether `sum_rows` serves rows of so many numbers."""
    return outputs % (2 * THREADS) == 0 and outputs <= MOST_OUTPUTS


def sum_rows(each: Array, places: Array, weights: Array, *, everywhere: bool, interpret: bool = False) -> Array:
    """The weighted sum of each token's rows; `sums` says of which sizes.

    Args:
      each: [aligned rows, outputs].
      places: int32 [rows], of each token its rows; those of no group, behind all rows, count as zero.
      weights: float32 [tokens, chosen].
      everywhere: Whether all rows are in groups.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [tokens, outputs], summed in float32.
    """
    return _summing(each.shape, weights.shape, each.dtype, everywhere, interpret)(places, weights, each)


def _summing(dims: tuple[int, ...], shape: tuple[int, ...], dtype, everywhere: bool, interpret: bool):
    (rows, outputs), (tokens, chosen) = dims, shape
    vector = next(n for n in (8, 4, 2) if outputs % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((outputs,), vector)
    at_once = max(1, LOADED // outputs)  # rows

    def sum_experts(places, weights, each, out):
        token = lax.axis_index("token")
        total = plgpu.layout_cast(jnp.zeros(outputs, jnp.float32), layout)
        for begin in range(0, chosen, at_once):
            some = range(begin, min(chosen, begin + at_once))
            found = [places[token * np.int32(chosen) + np.int32(i)] for i in some]
            shares = [weights[token, i] for i in some]
            if everywhere:
                loaded = [load(each.at[place], layout) for place in found]
                for row, share in zip(loaded, shares, strict=True):
                    total = total + row.astype(jnp.float32) * share
                continue
            for place, share in zip(found, shares, strict=True):

                def add(_, total, place=place, share=share):
                    return total + load(each.at[place], layout).astype(jnp.float32) * share

                total = lax.fori_loop(0, jnp.where(place < rows, np.int32(1), np.int32(0)), add, total)
        store(out.at[token], total.astype(dtype))

    return plgpu.kernel(
        sum_experts,
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=COMPILER,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _phase(phase, rows: Rows, threads: int):
    """A phase as `inline_mlir` wants it."""

    def run(_, *refs):
        phase(rows, threads, mgpu.utils.thread_idx(), *map(_Numbers, refs))

    return run


class _Numbers:
    """int32 in global or shared memory, which a thread reads and writes one by one."""

    def __init__(self, ref):
        self._start = mgpu.utils.memref_ptr(ref)

    def at(self, i):
        """A pointer."""
        i = arith.extui(ir.IntegerType.get_signless(64), i)
        return llvm.getelementptr(self._start.type, self._start, [i], [-(2**31)], _int32(), [])

    def __getitem__(self, i):
        return llvm.load(_int32(), self.at(i))

    def __setitem__(self, i, number) -> None:
        llvm.store(number, self.at(i))


def _clear(rows: Rows, threads: int, thread, chosen, places, sources, visits, used, counts, *_) -> None:
    """Before anything is counted."""
    del threads, chosen, places, sources, visits, used
    with mgpu.utils.when(_below(thread, rows.experts)):
        counts[thread] = _number(0)


def _count(rows: Rows, threads: int, thread, chosen, places, sources, visits, used, counts, *_) -> None:
    """Counts the rows of each expert; each row keeps what was counted before."""
    del sources, visits, used

    def count(numbers) -> None:
        inside = [arith.minui(i, _number(rows.rows - 1)) for i in numbers]
        experts = [chosen[i] for i in inside]
        counted = []
        for i, expert in zip(numbers, experts, strict=True):
            counts_it = _flag(arith.andi(_below(i, rows.rows), _below(expert, rows.experts)))
            target = counts.at(arith.minui(expert, _number(rows.experts - 1)))
            text = "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p atom.shared.add.u32 $0, [$1], 1;}"
            operands, constraints = [target, counts_it], "=&r,r,r,~{memory}"
            counted.append(llvm.inline_asm(_int32(), operands, text, constraints, has_side_effects=True))
        for i, at, number in zip(numbers, inside, counted, strict=True):
            text = "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1;}"
            operands = [places.at(at), number, _flag(_below(i, rows.rows))]
            llvm.inline_asm(_nothing(), operands, text, "l,r,r,~{memory}", has_side_effects=True)

    _each(thread, threads, rows.rows, count)


def _sum_in_warps(
    rows: Rows, threads: int, thread, chosen, places, sources, visits, used, counts, firsts, before, totals
) -> None:
    """Of each expert, rows and visits of those in front of it in its warp; of each warp, those of all."""
    del threads, chosen, places, sources, visits, used
    there = _below(thread, rows.experts)
    count = arith.select(there, counts[arith.minui(thread, _number(rows.experts - 1))], _number(0))
    lane, warp = arith.remui(thread, _number(WARP)), arith.divui(thread, _number(WARP))
    mine = _aligned(count), _visits(rows, count)
    sums = list(mine)
    for distance in (1, 2, 4, 8, 16):
        enough = arith.cmpi(arith.CmpIPredicate.uge, lane, _number(distance))
        for i, total in enumerate(sums):
            other = nvvm.shfl_sync(_number(-1), total, _number(distance), _number(0), nvvm.ShflKind.up)
            sums[i] = arith.addi(total, arith.select(enough, other, _number(0)))
    with mgpu.utils.when(there):
        for ref, total, own in zip((firsts, before), sums, mine, strict=True):
            ref[thread] = arith.subi(total, own)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _number(WARP - 1))):
        for i, total in enumerate(sums):
            totals[arith.addi(arith.muli(warp, _number(2)), _number(i))] = total


def _lay_out(
    rows: Rows, threads: int, thread, chosen, places, sources, visits, used, counts, firsts, before, totals
) -> None:
    """The group of each expert: its first row, its visits, and what its last rows have that are of no token."""
    del threads, chosen, places
    with mgpu.utils.when(_below(thread, rows.experts)):
        warp, zero = arith.divui(thread, _number(WARP)), _number(0)
        loop = scf.ForOp(zero, warp, _number(1), [firsts[thread], before[thread]])
        with ir.InsertionPoint(loop.body):
            at = arith.muli(loop.induction_variable, _number(2))
            found = [
                arith.addi(total, totals[arith.addi(at, _number(i))]) for i, total in enumerate(loop.inner_iter_args)
            ]
            scf.yield_(found)
        first, visit = loop.results
        firsts[thread] = first
        count = counts[thread]
        end, number = arith.addi(first, _aligned(count)), _visits(rows, count)
        visited = _number(gpu.visited_rows(rows.rows, rows.experts))
        with _loop(zero, number, _number(1)) as i:
            begin = arith.addi(first, arith.muli(i, visited))
            last = arith.minui(arith.addi(begin, visited), end)
            at = arith.muli(arith.addi(visit, i), _number(3))
            for j, value in enumerate((thread, begin, last)):
                visits[arith.addi(at, _number(j))] = value
        with _loop(arith.addi(first, count), end, _number(1)) as i:
            sources[i] = zero
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _number(rows.experts - 1))):
            total = arith.addi(visit, number)
            used[zero] = total
            for i, value in enumerate((end, total)):
                totals[_number(2 * (MOST_EXPERTS // WARP) + i)] = value


def _place(
    rows: Rows, threads: int, thread, chosen, places, sources, visits, used, counts, firsts, before, totals
) -> None:
    """The place of each row; and zeros behind all groups and visits."""
    del used, counts, before

    def place(numbers) -> None:
        inside = [arith.minui(i, _number(rows.rows - 1)) for i in numbers]
        found = [(chosen[i], places[i]) for i in inside]
        for i, at, (expert, rank) in zip(numbers, inside, found, strict=True):
            there = _below(i, rows.rows)
            grouped = _below(expert, rows.experts)
            first = firsts[arith.minui(expert, _number(rows.experts - 1))]
            where = arith.select(grouped, arith.addi(first, rank), _number(rows.aligned))
            token = arith.divui(i, _number(rows.chosen))
            target = sources.at(arith.minui(where, _number(rows.aligned - 1)))
            text = (
                "{.reg .pred p, q; setp.ne.s32 p, $4, 0; setp.ne.s32 q, $5, 0;"
                " @p st.global.b32 [$0], $2; @q st.global.b32 [$1], $3;}"
            )
            operands = [places.at(at), target, where, token, _flag(there), _flag(arith.andi(there, grouped))]
            llvm.inline_asm(_nothing(), operands, text, "l,l,r,r,r,r,~{memory}", has_side_effects=True)

    _each(thread, threads, rows.rows, place)
    ends = [totals[_number(2 * (MOST_EXPERTS // WARP) + i)] for i in range(2)]
    for ref, end, most in zip((sources, visits), ends, (rows.aligned, 3 * rows.visits), strict=True):
        end = arith.muli(end, _number(3)) if ref is visits else end
        with _loop(arith.addi(end, thread), _number(most), _number(threads)) as i:
            ref[i] = _number(0)


def _each(thread, threads: int, number: int, function) -> None:
    """Calls it with EACH of a thread's numbers at once, of [0, number) and, to be left out, some beyond."""
    with _loop(thread, _number(number), _number(EACH * threads)) as i:
        function([arith.addi(i, _number(j * threads)) for j in range(EACH)])


class _loop:
    """A loop from one number to another, with a step; the body is what stands in the `with` block."""

    def __init__(self, begin, end, step):
        self._loop = scf.ForOp(begin, end, step)
        self._point: Any = ir.InsertionPoint(self._loop.body)

    def __enter__(self):
        self._point.__enter__()
        return self._loop.induction_variable

    def __exit__(self, *error):
        if error[0] is None:
            scf.yield_([])
        return self._point.__exit__(*error)


def _aligned(count):
    """Rows of a group, aligned."""
    return arith.andi(arith.addi(count, _number(gpu.ALIGNED - 1)), _number(-gpu.ALIGNED))


def _visits(rows: Rows, count):
    """How many visits so many rows have."""
    visited = gpu.visited_rows(rows.rows, rows.experts)
    return arith.divui(arith.addi(_aligned(count), _number(visited - 1)), _number(visited))


def _below(number, limit: int):
    """Whether a number is in [0, limit)."""
    return arith.cmpi(arith.CmpIPredicate.ult, number, _number(limit))


def _flag(condition):
    return arith.extui(_int32(), condition)


def _int32():
    return ir.IntegerType.get_signless(32)


def _nothing():
    return ir.Type.parse("!llvm.void")


def _number(value: int):
    return arith.constant(_int32(), value)
