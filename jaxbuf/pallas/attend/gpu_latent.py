"""`append_and_attend_latent` on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

To absorbed queries a token's latent is key and value, so a block is brought to shared memory once and multiplied twice.
A float32 output of 64 queries and 512 numbers fills the registers of two warpgroups, so the values' columns are divided
among two. The first one multiplies queries and keys, computes the softmax, and adds up the first half; it leaves the
weights in shared memory for the second one, which adds up the other half meanwhile. (Both computing the scores would be
half as much work again for the tensor cores, which are busy two thirds of the time as it is.) A third warpgroup brings
the pages of block after block, and appends the new tokens.

New tokens are not read from the pages. They are a block of their own before an item's first one, from the launch's
inputs: it is multiplied while the first pages are on their way. Where a row has one new token and few queries, the
token lies between the queries, so that it takes no block's place: all are for pages from the start.

An item is a row. More than 64 queries (tokens times heads) are tiles of 64, which the workers of a group read the same
blocks for at the same time, so that the L2 cache has them for all but the first. Groups read equal shares of the blocks
of all rows, as the workers of `jaxbuf.pallas.attend.gpu` do; what several have of a row, a second kernel joins.

Floor: the larger of (latents of the committed tokens + new ones, their appends + q + out) / read bandwidth, and the
products' time, 2 · queries · (latent + rank) operations a token.

Precision: as there, up to 32 queries. Of more, the weights are rounded to the pages' dtype: there is no shared memory
for their second summands. In bfloat16 these outputs are off by 2.1e-3 of their norm.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import (
    BLOCKS,
    CLEAN,
    COUNT,
    END,
    FIRST_BLOCK,
    FIRST_ROW,
    KEYS,
    REAL,
    SEGMENTS,
    TILE,
    Call,
    Integers,
)
from jaxbuf.pallas.attend.gpu_parts import (
    MASKED,
    SHARED_MEMORY,
    WGMMA,
    Kind,
    Sight,
    add_values,
    block_pages,
    clear,
    filled,
    index,
    join_segments,
    multiply_keys,
    share,
    spread,
    summands,
    weigh,
)
from jaxbuf.pallas.attend.gpu_rows import GROUP, HALF, PITCH, REAL_ROWS, as_tile, multiply_rows, real_rows, sum_pairs
from jaxbuf.pallas.threads import COMPILER, load, store, store_vectors, store_wide

PROCESSORS = 132  # of an H100 or H200
MOST_QUERIES = 2048
RANKS, MOST_LATENT = (128, 256, 512), 576
MOST_RING_TILES = 4
REGISTERS = 216, 72  # of each thread that multiplies, and of each that brings
WEIGH, FOLLOW, BRING = range(3)  # warpgroups


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a call is arranged.

    Attributes:
      call: The call; its head_dim is the numbers of a latent.
      rank: Values are the first so many of them.
      scale: The scores q · k are multiplied with it.
      groups: Of workers, a worker for each tile of queries.
    """

    call: Call
    rank: int
    scale: float
    groups: int

    @property
    def half(self) -> int:
        """Columns of the values that a warpgroup adds up."""
        return self.rank // 2

    @property
    def spaced(self) -> bool:
        """Whether there are so few queries that each thread has one (`jaxbuf.pallas.attend.gpu_rows`)."""
        return self.call.queries <= REAL_ROWS

    @property
    def queries(self) -> int:
        """Queries of a tile, real or padded."""
        return REAL_ROWS if self.spaced else TILE

    @property
    def layout(self):
        """The layout of an array of a tile's queries and a block's keys."""
        return HALF if self.spaced else WGMMA

    @property
    def between(self) -> bool:
        """Whether new tokens lie between the queries, behind the first group of them.

        They are multiplied with all that lies there, of which some may be NaN: the queries of another token.
        """
        return self.spaced and self.call.time == 1

    @property
    def ring(self) -> int:
        """Blocks that are in shared memory at once."""
        row = self.call.head_dim * self.call.dtype.itemsize
        others = TILE * row + TILE * KEYS * self.call.dtype.itemsize + TILE * 4
        return min(MOST_RING_TILES, (SHARED_MEMORY - others) // (KEYS * row))


def arrange(call: Call, *, rank: int, scale: float) -> Arrangement:
    """How a call is arranged; arguments as in `Arrangement`."""
    return Arrangement(call, rank, scale, max(1, PROCESSORS // call.tiles))


def append_and_attend(
    plan: Arrangement, integers: Integers, pages: Array, q: Array, latents: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """The kernel of `jaxbuf.attention.latent.append_and_attend_latent`, for queries that were absorbed.

    Args:
      plan: How the call is arranged.
      integers: Of the launch. What a group begins with and how much it reads are in units: unit 0 of a row is its new
        tokens, unit j its block j - 1.
      pages: As in `LatentPages`. They are written in place.
      q: [rows, time, heads, latent].
      latents: The new tokens', [rows, time, latent].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, time, heads, rank], and the pages.
    """
    call, rank = plan.call, plan.rank
    pool = jax.new_ref(pages.reshape(-1, call.head_dim))
    q = q.reshape(call.rows, call.queries, call.head_dim)
    if plan.between:
        real = integers.rows[:, REAL] > 0
        asked = real | (integers.rows[:, END] > 0)  # The others see nothing, whatever their queries are.
        q, token = (jnp.where(some[:, None, None], x, 0) for some, x in ((asked, q), (real, latents)))
        q = jnp.concatenate([_pad(q, REAL_ROWS), _pad(token, GROUP)], axis=1)
    else:
        q = _pad(q, call.tiles * plan.queries)
    latents = _pad(latents, -(-call.time // 8) * 8)
    order = () if integers.order is None else (integers.order,)
    given = integers.table, integers.rows, integers.append, integers.visible, integers.workers, *order, q, latents
    out, parts, sums = _attend_latents(plan, interpret)(*given, pool)
    out = jax.new_ref(out)
    join_segments(plan.groups, call.queries, rank, call.dtype, _join_place, interpret)(integers.joins, parts, sums, out)
    out = jax.freeze(out).reshape(call.rows, call.time, call.heads, rank)
    return out, jax.freeze(pool).reshape(pages.shape)


def _pad(x: Array, n: int) -> Array:
    """x [rows, m, latent] with zeros behind: [rows, n, latent]."""
    return jnp.pad(x, ((0, 0), (0, n - x.shape[1]), (0, 0)))


def _part(group: Array, begins: Array) -> Array:
    """Where a group writes what it found of a row that it shares: of the row whose first unit it reads, or of the one
    that another group has begun. There is at most one of each."""
    return 2 * group + begins.astype(jnp.int32)


def _join_place(item: Array, first: Array, group: Array) -> Array:
    return _part(group, group == first)


class Segment(NamedTuple):
    """What a worker reads of a row: `count` units from `first` on, the last of which is its unit `until - 1`; `alone`:
    that is all of them."""

    row: Array
    first: Array
    until: Array
    alone: Array


class Memory(NamedTuple):
    """Shared memory: blocks [ring, KEYS, latent], queries [TILE, latent], and for the warpgroup that follows the
    weights [TILE, KEYS] of a block and what its sums are multiplied with [TILE]. Barriers open when a block or the
    queries of a segment are there (`full`), when they were used (`free`), when the weights are there (`told`), and when
    these were used (`heard`)."""

    blocks: Any
    queries: Any
    weights: Any
    factors: Any
    full: Any
    free: Any
    queries_full: Any
    queries_free: Any
    told: Any
    heard: Any


@dataclasses.dataclass(frozen=True)
class Worker:
    """What a worker's warpgroups go by.

    Attributes:
      plan: How the call is arranged.
      memory: The shared memory.
      group: Which part of all blocks it reads.
      tile: Which queries it has.
      interpret: Whether this runs in Pallas' interpreter.
    """

    plan: Arrangement
    memory: Memory
    group: Array
    tile: Array
    interpret: bool

    def block(self, number: Array):
        """Block `number` of all that the worker brings: its shared memory, and its barriers full and free."""
        at = lax.rem(number, np.int32(self.plan.ring))
        return self.memory.blocks.at[at], self.memory.full.at[at], self.memory.free.at[at]

    def multiply(self, out: Array, factors: Array) -> Array:
        """What a warpgroup has added up, multiplied with a factor for each query."""
        if self.plan.spaced:
            return multiply_rows(out, factors, self.interpret, others=True)
        return out * spread(factors, 0, out.shape)

    def write(self, out: Array, first_column: int, segment: Segment, outs, parts) -> None:
        """Writes what a warpgroup has added up of a segment, from a column on."""
        first_query, column, layout = self.tile * TILE, np.int32(first_column), self.plan.layout
        if self.plan.spaced:
            out = sum_pairs(out, self.interpret)

        @pl.when(segment.alone)
        def _():
            result = out.astype(self.plan.call.dtype)
            store_wide(result, layout, outs.at[segment.row], first_query, column, self.interpret)

        @pl.when(~segment.alone)
        def _():
            at = _part(self.group, segment.first == 0)
            store_wide(out, layout, parts.at[at], first_query, column, self.interpret)


def _attend_latents(plan: Arrangement, interpret: bool):
    call = plan.call
    # The type checker takes them for abstract, and some of Pallas' names for private.
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

    def attend_latents(table, rows, append, visible, shares, *rest):  # A profile shows this name.
        order, (q, new, pool, out, parts, sums, *memory) = (rest[0], rest[1:]) if call.listed else (None, rest)
        warpgroup, number = lax.axis_index("warpgroup"), lax.axis_index("block")
        group, tile = lax.div(number, np.int32(call.tiles)), lax.rem(number, np.int32(call.tiles))
        worker = Worker(plan, Memory(*memory), group, tile, interpret)
        integers = table, rows, order, visible

        def each_segment(function: Callable[[Segment, Any], Any]) -> Any:
            """Calls a function with each segment, and with how many blocks were brought before, and how many units and
            segments there were."""

            def step(_, carry):
                row, first, left, state = carry
                units = rows[row, BLOCKS] + 1
                count = jnp.minimum(left, units - first)
                state = function(Segment(row, first, first + count, count == units), state)
                return row + 1, jnp.int32(0), left - count, state

            begin = shares[group, FIRST_ROW], shares[group, FIRST_BLOCK], shares[group, COUNT]
            state = (jnp.int32(0),) * 3
            return lax.fori_loop(0, shares[group, SEGMENTS], step, (*begin, state))[-1]

        def set_registers(which: int, action) -> None:
            if not interpret:
                plgpu.set_max_registers(REGISTERS[which], action=action)

        @pl.when(warpgroup == WEIGH)
        def _():
            set_registers(0, "increase")
            _await_last(worker, *each_segment(functools.partial(_weigh, worker, integers, (out, parts, sums))))

        @pl.when(warpgroup == FOLLOW)
        def _():
            set_registers(0, "increase")
            each_segment(functools.partial(_follow, worker, integers, (out, parts)))

        @pl.when(warpgroup == BRING)
        def _():
            set_registers(1, "decrease")
            bring = functools.partial(_bring, worker, (table, append), (q, new), pool)
            _await_used(worker, *each_segment(bring))

    blocks = plgpu.SMEM((plan.ring, KEYS, call.head_dim), call.dtype, transforms=transforms)
    return plgpu.kernel(
        attend_latents,
        out_type=(
            jax.ShapeDtypeStruct((call.rows, call.queries, plan.rank), call.dtype),
            jax.ShapeDtypeStruct((2 * plan.groups, call.queries, plan.rank), jnp.float32),
            jax.ShapeDtypeStruct((2 * plan.groups, 2, call.tiles * TILE), jnp.float32),
        ),
        grid=(plan.groups * call.tiles,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            blocks,
            plgpu.SMEM((TILE, call.head_dim), call.dtype, transforms=transforms),
            plgpu.SMEM((TILE, KEYS), call.dtype, transforms=transforms),
            plgpu.SMEM((plan.queries,), jnp.float32),
            plgpu.Barrier(num_arrivals=call.block_pages, num_barriers=plan.ring),
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.ring),
            plgpu.Barrier(num_arrivals=REAL_ROWS // GROUP + int(plan.between) if plan.spaced else 1),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _bring(worker: Worker, integers, inputs, pool, segment: Segment, state):
    """Brings the queries and blocks of a segment to shared memory, and appends the row's new tokens if it begins here.

    The state is as in `each_segment`.
    """
    plan, memory, (table, append), (q, new) = worker.plan, worker.memory, integers, inputs
    call, (block, units, number) = plan.call, state
    row, begins, first = segment.row, segment.first == 0, jnp.maximum(segment.first, 1)

    def pages_of(unit: Array) -> tuple[Array, ...]:
        return tuple(block_pages(call, table, row, jnp.maximum(unit - 1, 0)))

    def await_free(block, free) -> None:
        pl.when(block >= plan.ring)(lambda: plgpu.barrier_wait(free))

    pages = pages_of(first)  # on their way before anything is waited for

    if not plan.between:

        @pl.when(begins)
        def _():
            target, full, free = worker.block(block)
            await_free(block, free)
            plgpu.copy_gmem_to_smem(new.at[row], target.at[pl.ds(0, new.shape[1])], full)
            for _ in range(call.block_pages - 1):  # The barrier counts the copies of pages.
                plgpu.barrier_arrive(full)

    pl.when(number >= 1)(lambda: plgpu.barrier_wait(memory.queries_free))
    if plan.spaced:
        groups = [(start, start // GROUP * PITCH) for start in range(0, REAL_ROWS, GROUP)]
        groups += [(REAL_ROWS, GROUP)] * plan.between
        for start, place in groups:
            source, target = q.at[row, pl.ds(start, GROUP)], memory.queries.at[pl.ds(place, GROUP)]
            plgpu.copy_gmem_to_smem(source, target, memory.queries_full)
    else:
        source = q.at[row, pl.ds(worker.tile * TILE, TILE)]
        plgpu.copy_gmem_to_smem(source, memory.queries, memory.queries_full)

    def bring_block(unit, carry):
        block, pages = carry
        target, full, free = worker.block(block)
        await_free(block, free)
        for i, page in enumerate(pages):
            source = pool.at[pl.ds(page * call.page_size, call.page_size)]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(i * call.page_size, call.page_size)], full)
        return block + 1, pages_of(jnp.minimum(unit + 1, segment.until - 1))

    block = block if plan.between else block + begins.astype(jnp.int32)
    block, _ = lax.fori_loop(first, segment.until, bring_block, (block, pages))

    @pl.when(begins & (worker.tile == 0))
    def _():
        store_vectors(new.at[row], pool, [append[row, t] for t in range(call.time)], worker.interpret)

    return block, units, number + 1


def _await_used(worker: Worker, blocks: Array, _, segments: Array) -> None:
    """Waits until everything that was brought was used."""

    def wait(i, _):
        plgpu.barrier_wait(worker.block(i)[2])

    lax.fori_loop(jnp.maximum(blocks - worker.plan.ring, 0), blocks, wait, None)
    pl.when(segments >= 1)(lambda: plgpu.barrier_wait(worker.memory.queries_free))


def _await_last(worker: Worker, _, units: Array, segments: Array) -> None:
    """Waits until the last weights and factors were used."""
    pl.when(units + segments > 0)(lambda: plgpu.barrier_wait(worker.memory.heard))


def _units(segment: Segment, clean: Array) -> tuple[tuple[Kind, Any, Any], ...]:
    """The units of a segment, from one on and before another, of each kind; `clean`: the row's CLEAN."""
    first, new = jnp.maximum(segment.first, 1), jnp.minimum(segment.until, 1)
    masked = jnp.clip(clean + 1, first, jnp.maximum(segment.until, first))
    return (Kind.NEW, segment.first, new), (Kind.CLEAN, first, masked), (Kind.MASKED, masked, segment.until)


def _weigh(worker: Worker, integers, found, segment: Segment, state):
    """Computes the weights of a segment's blocks, and adds up the first half of the values' columns.

    The state is as in `each_segment`.
    """
    plan, memory, rows, (block, units, number) = worker.plan, worker.memory, integers[1], state
    call, half, interpret, row = plan.call, plan.half, worker.interpret, segment.row
    size, layout = (plan.queries,), plan.layout.reduce(1)
    scale = np.float32(plan.scale * math.log2(math.e))
    sight = _sight(worker, integers, row)
    sight = dataclasses.replace(sight, seen=sight.load_seen())  # Behind the copies of pages that takes some 3 us.
    plgpu.barrier_wait(memory.queries_full)

    def tell(factors: Array, weights: Array | None, count: Array) -> None:
        """Leaves something for the warpgroup that follows; `count`: how often it was told something before."""
        pl.when(count > 0)(lambda: plgpu.barrier_wait(memory.heard))
        store(memory.factors, factors)
        if weights is not None:
            store(memory.weights, weights)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.told)

    def add_block(kind: Kind, unit, carry):
        highest, total, out, block, units = carry
        between = plan.between and kind is Kind.NEW
        # From row 0, which the compiler does not know: it would compute the addresses of all parts of the queries once,
        # and then spill them.
        queries = memory.queries.at[pl.ds(jnp.minimum(units, 0) * TILE, TILE)]
        place: tuple[Any, Any, Any] = (queries, None, None) if between else worker.block(block)
        latents, full, free = place
        values = latents.at[:, pl.ds(0, half)]
        if not between:
            plgpu.barrier_wait(full)
        scores = multiply_keys(queries, latents, interpret)
        scores = (real_rows(scores, interpret) if plan.spaced else scores) * scale
        if not between:
            pl.when(unit + 1 == segment.until)(lambda: plgpu.barrier_arrive(memory.queries_free))
        used = None if kind is Kind.CLEAN else sight.is_used(kind, unit - 1)
        weights, kept, highest, total = weigh(scores, used, highest, total, plan.layout)
        weights = as_tile(*summands(weights, call.dtype), interpret) if plan.spaced else weights.astype(call.dtype)
        tell(kept, weights, units + number)
        out = worker.multiply(out, kept)
        if kind is not Kind.CLEAN:
            clear(values, live(kind, unit))
        out = add_values(out, (weights,), values, interpret)
        if between:
            pl.when(unit + 1 == segment.until)(lambda: plgpu.barrier_arrive(memory.queries_free))
            return highest, total, out, block, units + 1
        plgpu.barrier_arrive(free)
        return highest, total, out, block + 1, units + 1

    live = functools.partial(_is_live, plan, sight)
    none = filled(MASKED, size, layout), filled(0, size, layout), filled(0, (TILE, half), WGMMA)
    carry = *none, block, units
    for kind, begin, until in _units(segment, rows[row, CLEAN]):
        carry = lax.fori_loop(begin, until, functools.partial(add_block, kind), carry)
    highest, total, out, block, units = carry
    factor = jnp.where(segment.alone, share(total, layout), filled(1, size, layout))
    tell(factor, None, units + number)
    outs, parts, sums = found
    worker.write(worker.multiply(out, factor), 0, segment, outs, parts)

    @pl.when(~segment.alone)
    def _():
        at, queries = _part(worker.group, segment.first == 0), pl.ds(worker.tile * TILE, plan.queries)
        store(sums.at[at, 0, queries], highest)
        store(sums.at[at, 1, queries], total)

    return block, units, number + 1


def _follow(worker: Worker, integers, found, segment: Segment, state):
    """Adds up the second half of the values' columns of a segment, with the weights that the first warpgroup leaves.

    The state is as in `each_segment`.
    """
    plan, memory, rows, (block, units, number) = worker.plan, worker.memory, integers[1], state
    half, row, dims = plan.half, segment.row, (TILE, plan.half)
    sight = _sight(worker, integers, row)
    plgpu.barrier_wait(memory.queries_full)

    def hear() -> Array:
        plgpu.barrier_wait(memory.told)
        return load(memory.factors, plan.layout.reduce(1))

    def add_block(kind: Kind, unit, carry):
        out, block = carry
        between = plan.between and kind is Kind.NEW
        place: tuple[Any, Any, Any] = (memory.queries, None, None) if between else worker.block(block)
        latents, full, free = place
        values = latents.at[:, pl.ds(half, half)]
        if not between:
            plgpu.barrier_wait(full)
        if kind is not Kind.CLEAN:  # Scores of dead keys are selected away: they may be multiplied meanwhile.
            clear(values, _is_live(plan, sight, kind, unit))
        out = worker.multiply(out, hear())
        out = add_values(out, (memory.weights,), values, worker.interpret)
        plgpu.barrier_arrive(memory.heard)
        if between:
            return out, block
        plgpu.barrier_arrive(free)
        return out, block + 1

    carry = filled(0, dims, WGMMA), block
    for kind, begin, until in _units(segment, rows[row, CLEAN]):
        carry = lax.fori_loop(begin, until, functools.partial(add_block, kind), carry)
        if kind is Kind.NEW:
            plgpu.barrier_arrive(memory.queries_free)
    out, block = carry
    out = worker.multiply(out, hear())
    plgpu.barrier_arrive(memory.heard)
    worker.write(out, half, segment, *found)
    return block, units, number + 1


def _sight(worker: Worker, integers, row: Array) -> Sight:
    (table, rows, order, visible), plan = integers, worker.plan
    place = worker.tile * TILE, GROUP if plan.between else 0, plan.queries, plan.layout
    return Sight(plan.call, table, rows, order, visible, row, rows[row, END], *place)


def _is_live(plan: Arrangement, sight: Sight, kind: Kind, unit: Array) -> Array:
    """bool [64, 64]: which keys of a unit may be multiplied with a weight of zero; along the first axis."""
    if plan.between and kind is Kind.NEW:  # Whatever is neither a query nor the token was never written.
        return (lax.rem(index(0), np.int32(PITCH)) < GROUP) | (index(0) < 2 * GROUP)
    return sight.is_live(0, kind, unit - 1)
