"""The products of `jaxbuf.models.experts.mixture` on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

Rows of x lie sorted by expert, and the rows of a group, which have one expert, begin at a multiple of ALIGNED. A visit
is of up to so many rows of a group; an expert without rows has none, so that its weights are not read. A block for each
multiprocessor takes its share of all tiles, those of a visit's weight and of the next ones: while it multiplies and
writes one, it brings the next one. A warpgroup of the block brings pieces of the visit's rows and of the tile to
a ring in shared memory; up to three others multiply them on the tensor cores, 64 rows each. A visit of fewer rows than
theirs brings and multiplies those 64 that it has some of: with 128 rows an expert in the mean, as of 4,096 tokens, most
experts have one visit, and their weights are brought once.

Where rows lie and which of them a visit has is computed before (`gpu_places`). The first product gathers its rows: the
warpgroup that brings the weights with the tensor memory accelerator copies the rows itself, sixteen bytes a thread, so
that no copy of x in the order of experts is written and read. A piece of rows is announced LATER pieces after its
copies began, when they have most likely ended.

jax.experimental.pallas.ops.gpu.ragged_dot_mgpu, a kernel for few and large groups, gives each group a tile even if it
is empty, which then reads the weight of an expert that no token chose, and it searches all groups in every block.

Floor: (weights of the experts that have rows + x + results) / read bandwidth, or, of many rows,
2 · rows · inputs · weight rows / rate of products. How near it comes is in benchmarks/experts.json.

Precision: products of 2-byte operands with float32 sums, rounded once; the gate, and the square of relu, are computed
from unrounded sums.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.experts.call import Call
from jaxbuf.pallas.instructions import end_copies, show_copies, wait_for_copies
from jaxbuf.pallas.project.gpu import (
    MOST_STEPS,
    MOST_SUMS,
    PROCESSORS,
    REGISTERS,
    SHARED_MEMORY,
    STEP,
    TILE,
    WGMMA,
    Memory,
    multiply,
    result,
)
from jaxbuf.pallas.threads import (
    COMPILER,
    PER_THREAD,
    THREADS,
    copy_tile_rows,
    gather_numbers,
    store_inside,
    store_wide,
)

ALIGNED = 8  # Rows: shared memory has them in eights.
MOST_VISITED = 3 * TILE  # rows of a visit
LATER = 2  # pieces whose gathered rows are on their way; two fewer than the ring has, at most
SIXTEEN = 16  # rows that a warpgroup gathers at once
BLOCKS = PROCESSORS  # at most; each takes several tiles
MOST_AT_ONCE = 192  # rows of a weight that an instruction of one of three warpgroups multiplies
MOST_COMPARED = 4096  # rows of which all pairs are compared, rather than sorted


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is arranged.

    Attributes:
      visited: Rows of a visit, at most.
      visits: The most that there can be.
      rows: Of a tile of a weight: of each of the two, where there is a gate.
      tiles: Of a weight.
      ring: Pieces of the ring.
    """

    visited: int
    visits: int
    rows: int
    tiles: int
    ring: int
    products: int = 1

    @property
    def warpgroups(self) -> int:
        """Of a block, that multiply."""
        return -(-self.visited // TILE)


def visited_rows(rows: int, experts: int) -> int:
    """Rows of a visit, at most: a power of two or MOST_VISITED, about twice what an expert has in the mean."""
    visited = ALIGNED
    while visited < min(MOST_VISITED, 2 * rows / experts):
        visited *= 2
    return min(visited, MOST_VISITED)


def most_visits(rows: int, experts: int) -> int:
    """How many visits there can be, of groups that together have so many rows before they are aligned."""
    most = min(rows, experts)  # groups; each has one visit, and one more for so many rows beyond the first
    return most + (rows - most) // visited_rows(rows, experts)


def aligned_rows(rows: int, experts: int) -> int:
    """Rows of x once all groups are aligned, and so many more that a visit which begins with the last ends there."""
    most = rows + (ALIGNED - 1) * min(rows, experts)
    return -(-most // ALIGNED) * ALIGNED + visited_rows(rows, experts) - ALIGNED


def arrange(call: Call) -> Schedule:
    visited, visits = visited_rows(call.rows, call.experts), most_visits(call.rows, call.experts)
    parts, warpgroups = 2 if call.gated else 1, -(-visited // TILE)

    def cost(rows: int) -> int:
        """Rows of weights and of x that the busiest multiprocessor reads, and what it does besides, in rows."""
        return -(-visits * (call.outputs // rows) // PROCESSORS) * (parts * rows + visited + 8)

    most = min(256, MOST_SUMS * THREADS // TILE) // parts  # wgmma has 256 columns at most
    # Three warpgroups multiply tiles of more rows than MOST_AT_ONCE in halves.
    whole = most if warpgroups < 3 else MOST_AT_ONCE
    found = [n for n in range(8, most + 1, 8) if call.outputs % n == 0 and (n <= whole or n % 16 == 0)]
    rows = min(found, key=cost)
    room = SHARED_MEMORY // (2 * STEP * (warpgroups * TILE + parts * rows))
    return Schedule(visited, visits, rows, call.outputs // rows, min(MOST_STEPS, room))


def arrange_rows(by_expert: Array, experts: int) -> tuple[Array, Array]:
    """Where the rows of each expert lie, one group behind the other.

    A count over all pairs of rows is one kernel, where a sort of few rows is many.

    Args:
      by_expert: int32 [rows], the expert of each; those that are not in [0, experts) are in no group.
      experts: How many have a group.

    Returns:
      int32 [rows] the place of each row, of those in no group one behind all rows; and int32 [experts] the rows of each
      group, aligned.
    """
    rows, expert = by_expert.shape[0], jnp.arange(experts, dtype=jnp.int32)
    here = (by_expert >= 0) & (by_expert < experts)
    counts = jnp.sum(by_expert[:, None] == expert[None], axis=0, dtype=jnp.int32)
    groups = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
    if rows <= MOST_COMPARED:
        earlier = (by_expert[:, None] == by_expert[None]) & jnp.tri(rows, k=-1, dtype=bool)
        rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    else:
        order = jnp.argsort(by_expert, stable=True).astype(jnp.int32)
        sorted_expert = by_expert[order]
        begins = _sums_before(counts) + jnp.sum(by_expert < 0, dtype=jnp.int32)
        place = jnp.arange(rows, dtype=jnp.int32) - begins.at[sorted_expert].get(mode="clip")
        rank = jnp.zeros_like(order).at[order].set(place)
    first = _sums_before(groups).at[by_expert].get(mode="clip")
    return jnp.where(here, first + rank, np.int32(aligned_rows(rows, experts))), groups


def _sums_before(x: Array) -> Array:
    """The sum of all numbers in front of each."""
    return jnp.sum(jnp.where(jnp.tri(x.shape[0], k=-1, dtype=bool), x[None], 0), axis=1, dtype=jnp.int32)


def plan_visits(groups: Array, rows: int) -> tuple[Array, Array]:
    """Which rows of which expert each visit has.

    Args:
      groups: int32 [experts], rows of each, aligned, one group behind the other.
      rows: Of all groups before they were aligned.

    Returns:
      int32 [visits, 3] the expert, the first row and the one behind the last, zeros for visits without rows, which come
      after all others; and int32 [1] how many have rows.
    """
    experts = groups.shape[0]
    visited, begins = np.int32(visited_rows(rows, experts)), _sums_before(groups)
    each = (groups + visited - 1) // visited
    before = _sums_before(each)  # visits of the experts in front
    number = jnp.arange(most_visits(rows, experts), dtype=jnp.int32)
    expert = jnp.sum((before + each)[None] <= number[:, None], axis=1, dtype=jnp.int32)
    there, expert = expert < experts, jnp.minimum(expert, experts - 1)
    first = begins[expert] + visited * (number - before[expert])
    found = jnp.stack([expert, first, jnp.minimum(first + visited, (begins + groups)[expert])], axis=1)
    return jnp.where(there[:, None], found, 0), jnp.sum(each, keepdims=True, dtype=jnp.int32)


def multiply_groups(
    call: Call,
    x: Array,
    weights: Array,
    visits: Array,
    used: Array,
    *,
    sources: Array | None = None,
    squared: bool = False,
    interpret: bool = False,
) -> Array:
    """Each row of x times its expert's weight; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtype.
      x: [aligned_rows(rows, experts), inputs], or with sources [n, inputs].
      weights: [experts, outputs, inputs], gated [experts, 2 · outputs, inputs].
      visits, used: From `plan_visits`.
      sources: int32 [aligned rows], which row of x each one is; None: x has them one behind the other.
      squared: Whether the square of relu follows.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [aligned rows, outputs]; rows of no group are not specified.
    """
    rows = x.shape[0] if sources is None else sources.shape[0]
    given = () if sources is None else (sources,)
    return _kernel(call, arrange(call), rows, sources is not None, squared, interpret)(visits, used, x, weights, *given)


def _kernel(call: Call, schedule: Schedule, aligned: int, gathers: bool, squared: bool, interpret: bool):
    parts, steps, warpgroups = 2 if call.gated else 1, call.inputs // STEP, schedule.warpgroups
    # The compiler gives no instruction more registers than each thread has in the beginning, here 128.
    halves = 2 if warpgroups > 2 and parts * schedule.rows > MOST_AT_ONCE and not call.gated else 1
    product = dataclasses.replace(schedule, rows=schedule.rows // halves)
    blocks = min(BLOCKS, schedule.visits * schedule.tiles)
    transforms = plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

    def multiply_experts(visits, used, x, weights, *refs):
        *sources, out = refs[: 1 + gathers]
        memory, role, block = Memory(*refs[1 + gathers :]), lax.axis_index("warpgroup"), lax.axis_index("block")
        count = lax.div(used[0] * np.int32(schedule.tiles) - block + np.int32(blocks - 1), np.int32(blocks))

        def tile(i):
            """The block's i-th tile: its first row, and expert, first and last row of the visit."""
            number = block + i * np.int32(blocks)
            visit = lax.div(number, np.int32(schedule.tiles))
            row = (number - visit * np.int32(schedule.tiles)) * np.int32(schedule.rows)
            return row, *(visits[visit, j] for j in range(3))

        def set_registers(which: int, action) -> None:
            if (registers := REGISTERS[warpgroups]) and not interpret:
                plgpu.set_max_registers(registers[which], action=action)

        @pl.when(role < warpgroups)
        def _():
            set_registers(0, "increase")

            def multiply_tile(i, _):
                (row, _, first, end), before = tile(i), i * np.int32(steps)
                mine = first + role * TILE

                @pl.when(mine < end)
                def _():
                    (sums,) = multiply(product, memory, role, steps, max(parts, halves), interpret, before)
                    for half in range(halves):
                        found = result(sums if call.gated else sums[half : half + 1], squared).astype(out.dtype)
                        store = store_wide if product.rows % 32 == 0 else store_inside
                        store(found, WGMMA, out, mine, row + half * product.rows, interpret, end=end)

                if warpgroups > 1:
                    pl.when(mine >= end)(lambda: _pass(schedule, memory, before, steps))

            lax.fori_loop(0, count, multiply_tile, None)

        @pl.when(role == warpgroups)
        def _():
            set_registers(1, "decrease")

            def bring_tile(i, _):
                row, expert, first, end = tile(i)
                if gathers:
                    rows = _sources(schedule, sources[0], first, end, interpret)
                    bring_rows = functools.partial(_gather_rows, memory, x, rows, transforms, interpret)
                else:
                    bring_rows = functools.partial(_bring_rows, schedule, memory, x, first, end)
                _bring(call, schedule, memory, weights.at[expert], row, i * np.int32(steps), steps, bring_rows)

            lax.fori_loop(0, count, bring_tile, None)
            pieces, ring = count * np.int32(steps), np.int32(schedule.ring)
            if gathers:
                wait_for_copies(0, interpret)
                show_copies(interpret)

                def arrive(i, _):
                    plgpu.barrier_arrive(memory.full.at[lax.rem(i, ring)])

                lax.fori_loop(jnp.maximum(pieces - LATER, 0), pieces, arrive, None)

            def wait(i, _):
                plgpu.barrier_wait(memory.free.at[lax.rem(i, ring)])

            lax.fori_loop(jnp.maximum(pieces - ring, 0), pieces, wait, None)

    # A profile shows this name, and kernels of other weights have others.
    multiply_experts.__name__ = f"multiply_experts_{call.outputs}_by_{call.inputs}"
    return plgpu.kernel(
        multiply_experts,
        out_type=jax.ShapeDtypeStruct((aligned, call.outputs), call.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((schedule.ring, warpgroups * TILE, STEP), call.dtype, transforms=transforms),
            plgpu.SMEM((schedule.ring, parts * schedule.rows, STEP), call.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=parts + (1 if gathers else warpgroups), num_barriers=schedule.ring),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=schedule.ring),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _pass(schedule: Schedule, memory: Memory, before: Array, steps: int) -> None:
    """Lets go of all pieces of a tile: what a warpgroup does that has no rows of a visit."""

    def let_go(i, _):
        at = lax.rem(before + i, np.int32(schedule.ring))
        plgpu.barrier_wait(memory.full.at[at])
        plgpu.barrier_arrive(memory.free.at[at])

    lax.fori_loop(0, steps, let_go, None)


def _bring(
    call: Call,
    schedule: Schedule,
    memory: Memory,
    weight,
    row: Array,
    before: Array,
    steps: int,
    bring_rows: Callable[..., None],
) -> None:
    """Brings all pieces of a tile, which begins at `row` of the weight, and of a visit's rows.

    Args:
      call, schedule, memory: The product and the block's.
      weight: The expert's.
      row: Of the weight.
      before: How many pieces of other tiles the block brought earlier.
      steps: How many pieces there are.
      bring_rows: Brings a piece of the visit's rows: given the ring, its number there, its place, and its columns.
    """
    ring = np.int32(schedule.ring)

    def bring_piece(i, _):
        at, columns = lax.rem(before + i, ring), pl.ds(i * STEP, STEP)
        full = memory.full.at[at]
        pl.when(before + i >= ring)(lambda: plgpu.barrier_wait(memory.free.at[at]))
        for part in range(2 if call.gated else 1):
            piece = weight.at[pl.ds(part * call.outputs + row, schedule.rows), columns]
            plgpu.copy_gmem_to_smem(piece, memory.weights.at[at, pl.ds(part * schedule.rows, schedule.rows)], full)
        bring_rows(ring, before + i, at, i * STEP)

    lax.fori_loop(0, steps, bring_piece, None)


def _bring_rows(schedule: Schedule, memory: Memory, x, first: Array, end: Array, ring, number, at, column) -> None:
    """A piece of the rows of x from `first` on: those of the warpgroups that have some in front of `end`.

    The last ones may be rows of the next group: nothing of their products is written.
    """
    del ring, number
    some, full = min(schedule.visited, TILE), memory.full.at[at]
    for begin in range(0, schedule.visited, TILE):

        def bring(begin=begin):
            source = x.at[pl.ds(first + begin, some), pl.ds(column, STEP)]
            plgpu.copy_gmem_to_smem(source, memory.tokens.at[at, pl.ds(begin, some)], full)

        if begin == 0:
            bring()
        else:
            pl.when(first + begin < end)(bring)
            pl.when(first + begin >= end)(lambda: plgpu.barrier_arrive(full))


def _sources(schedule: Schedule, sources, first: Array, end: Array, interpret: bool) -> list[Array]:
    """Of which row of x each thread copies parts, for every sixteen rows of a visit; -1 behind its end."""
    mine = lax.div(plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=PER_THREAD), np.int32(THREADS // SIXTEEN))
    found = []
    for begin in range(0, schedule.visited, SIXTEEN):
        place = mine + (first + np.int32(begin))
        token = gather_numbers(sources, jnp.minimum(place, np.int32(sources.shape[0] - 1)), interpret)
        found.append(jnp.where(place < end, token, np.int32(-1)))
    return found


def _gather_rows(memory: Memory, x, rows: list[Array], transforms, interpret: bool, ring, number, at, column) -> None:
    """Starts to copy a piece of some rows of x; those of the piece LATER ones earlier are there."""
    copy_tile_rows(x, rows, column, memory.tokens, at, transforms, interpret)
    end_copies(interpret)

    @pl.when(number >= LATER)
    def _():
        wait_for_copies(LATER, interpret)
        show_copies(interpret)
        plgpu.barrier_arrive(memory.full.at[lax.rem(number - LATER, ring)])
