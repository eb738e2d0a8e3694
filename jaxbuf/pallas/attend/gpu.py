"""`append_and_attend` on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

Every worker reads an equal share of the blocks of all items, so that a batch takes as long as its bytes whatever the
rows' lengths. One warpgroup of a worker brings the pages of block after block to shared memory, through a ring of tiles
(a block's keys, then its values), and appends the new tokens. One or two others multiply, each for 64 queries: with the
keys of a block on the tensor cores, an online softmax, and the weights with the values. Blocks that hold committed
tokens alone are not masked. In the others, what is dead is selected away, in the scores and in the values' shared
memory. (Blocks of all heads of fewer places, so that pages are read from end to end, are not faster: 150 us where these
take 136, 128 rows of 1,024 tokens with 4 heads of 256. A fifth of the workers end 15 us before the others. But it is
not faster, either, to keep a tenth of the blocks back and to deal them to workers that end first: in another run 133 to
135 us where equal shares take 134. Memory is busy all the same.)

New tokens are not read from the pages. They are a block of their own behind an item's last one, from the launch's
inputs.

A worker that has read all of an item writes its outputs. Of an item that workers share each writes what it found (sums,
weights, the largest scores), and a second kernel joins these.

Floor: (keys and values of the committed tokens + k, v, their appends + q + out) / read bandwidth.

Precision: products of 2-byte operands with float32 sums; the softmax is in float32, and its weights are two summands of
the pages' dtype for the second product. Where at most 32 queries read the same keys the second summands are rows of the
same tile, which would be empty (`jaxbuf.pallas.attend.gpu_rows`); else another product multiplies them with the values.
In bfloat16 the outputs of random keys and values are off by 1.7e-3 of their norm, as exact outputs are that are
rounded.
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
    FIRST_HEAD,
    FIRST_ROW,
    KEYS,
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
    join_segments,
    multiply_keys,
    share,
    spread,
    summands,
    vector_layout,
    weigh,
)
from jaxbuf.pallas.attend.gpu_rows import GROUP, HALF, PITCH, REAL_ROWS, as_tile, multiply_rows, real_rows, sum_pairs
from jaxbuf.pallas.threads import COMPILER, load, store, store_wide

PROCESSORS = 132  # of an H100 or H200
HEAD_DIMS = 64, 128, 256
MOST_RING_TILES = 10
APPENDED = 8  # tokens that are appended at once


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is arranged on a multiprocessor.

    Attributes:
      workers: How many there are.
      query_buffers: Segments whose queries each worker has at once.
      ring: Tiles of each worker's ring.
      registers: Of each thread that multiplies, and of each that brings; None: as the compiler has it.
    """

    workers: int
    query_buffers: int
    ring: int
    registers: tuple[int, int] | None

    @property
    def all_workers(self) -> int:
        return PROCESSORS * self.workers


def arrange(call: Call) -> Schedule:
    # Where heads are short, a worker alone waits for its products too often.
    workers = 2 if call.head_dim < 256 and call.tiles == 1 else 1
    row = call.head_dim * call.dtype.itemsize
    room, buffer = SHARED_MEMORY // workers, call.tiles * TILE * row
    query_buffers = 2 if room - 2 * buffer >= 5 * KEYS * row else 1
    ring = min(MOST_RING_TILES, (room - query_buffers * buffer) // (KEYS * row))
    registers = {2: None, 3: (216, 72), 4: (208, 40)}[workers * (call.tiles + 1)]
    return Schedule(workers, query_buffers, ring, registers)


def append_and_attend(
    call: Call,
    integers: Integers,
    pages: tuple[Array, Array],
    q: Array,
    k: Array,
    v: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, Array]]:
    """`jaxbuf.attention.paged_launch.append_and_attend`; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtype.
      integers: Of the launch.
      pages: Keys and values as in `PagedKV`. They are written in place.
      q: [rows, time, heads, head_dim].
      k, v: [rows, time, kv_heads, head_dim].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, time, heads, head_dim], and the pages.
    """
    flat = pages[0].shape[0], call.page_size, call.kv_heads * call.head_dim
    refs = [jax.new_ref(x.reshape(flat)) for x in pages]
    inputs = [jnp.swapaxes(x.reshape(call.rows, call.time, call.kv_heads, -1, call.head_dim), 1, 2) for x in (q, k, v)]
    inputs = [item_rows(x.reshape(call.items, -1, call.head_dim), interpret) for x in inputs]
    order = () if integers.order is None else (integers.order,)
    given = integers.table, integers.rows, integers.append, integers.visible, integers.workers, *order, *inputs
    out, parts, sums = _attend_blocks(call, interpret)(*given, *refs)
    out = jax.new_ref(out)
    join_segments(
        arrange(call).all_workers,
        call.queries,
        call.head_dim,
        call.dtype,
        lambda item, first, worker: item + worker,
        interpret,
    )(integers.joins, parts, sums, out)
    out = jax.freeze(out).reshape(call.rows, call.kv_heads, call.time, call.group, call.head_dim)
    out = jnp.swapaxes(out, 1, 2).reshape(call.rows, call.time, call.heads, call.head_dim)
    keys, values = (jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, pages, strict=True))
    return out, (keys, values)


def in_eights(n: int) -> int:
    """Rows that are brought for n of them: tiles in shared memory have rows by eight."""
    return -(-n // 8) * 8


def pitch(n: int) -> int:
    """How far items of n rows lie apart in global memory. A copy to tiles brings no rows from beyond the eighth of the
    tile that it begins in, unless it begins with a tile: so an item either begins with one or lies within one."""
    return n if 8 % n == 0 else in_eights(n)


def groups(call: Call) -> int:
    """How many groups of eight queries an item's tile has, spaced as `jaxbuf.pallas.attend.gpu_rows` says; 0 if more
    than 32 queries lie one below the other."""
    return in_eights(call.queries) // GROUP if call.queries <= REAL_ROWS else 0


def item_rows(x: Array, interpret: bool) -> Array:
    """The rows of all items [items, n, head_dim], one below the other, `pitch(n)` apart. Most lie so already.

    Behind an item's rows a copy brings those of the items behind, or zeros; nothing of what comes of them is used.
    """
    _, n, head_dim = x.shape
    if pitch(n) > n:
        x = jnp.pad(x, ((0, 0), (0, pitch(n) - n), (0, 0)))
    rows = x.reshape(-1, head_dim)
    below = -rows.shape[0] % 8 if rows.shape[0] > 8 else 0  # to whole tiles
    if interpret:  # There a slice that reaches below the last row would begin earlier.
        below += in_eights(n)
    return jnp.pad(rows, ((0, below), (0, 0))) if below else rows


class Segment(NamedTuple):
    """What a worker reads of an item: `count` blocks from `first` on. `ends`: the item's last one is among them."""

    row: Array
    head: Array
    first: Array
    count: Array
    ends: Array


class Memory(NamedTuple):
    """The workers' shared memory: tiles [n, KEYS, head_dim], queries [m, tiles · TILE, head_dim], and barriers that
    open when a tile or the queries of a segment are there (`full`), when they were used (`free`), and when the dead
    values of a tile were cleared."""

    tiles: Any
    queries: Any
    full: Any
    free: Any
    queries_full: Any
    queries_free: Any
    cleared: Any


@dataclasses.dataclass(frozen=True)
class Worker:
    """A worker's number, and its part of its multiprocessor's shared memory.

    Attributes:
      call, schedule: The call, and how it is arranged.
      memory: Of the multiprocessor.
      number: Among all workers.
      place: Among those of the multiprocessor.
    """

    call: Call
    schedule: Schedule
    memory: Memory
    number: Array
    place: Array

    def tile(self, number: Array):
        """Tile `number` of all that the worker brings: its shared memory, and its barriers full, free and cleared."""
        ring, memory = self.schedule.ring, self.memory
        at = self.place * ring + lax.rem(number, np.int32(ring))
        return memory.tiles.at[at], memory.full.at[at], memory.free.at[at], memory.cleared.at[at]

    def queries(self, number: Array):
        """The queries of the worker's segment `number`: their shared memory, and the barriers full and free."""
        buffers, memory = self.schedule.query_buffers, self.memory
        at = self.place * buffers + lax.rem(number, np.int32(buffers))
        return memory.queries.at[at], memory.queries_full.at[at], memory.queries_free.at[at]

    def wait_for_all(self, tiles: Array, segments: Array) -> None:
        """Waits until everything that was brought was used."""
        sizes = (self.tile, tiles, self.schedule.ring), (self.queries, segments, self.schedule.query_buffers)
        for place, number, size in sizes:

            def wait(i, _, place=place):
                plgpu.barrier_wait(place(i)[2])

            lax.fori_loop(jnp.maximum(number - size, 0), number, wait, None)


def _attend_blocks(call: Call, interpret: bool):
    schedule = arrange(call)
    warpgroups = call.tiles + 1  # of a worker
    # The type checker takes them for abstract, and some of Pallas' names for private.
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    tiles, buffers = schedule.workers * schedule.ring, schedule.workers * schedule.query_buffers
    segments = call.items + schedule.all_workers

    def attend_blocks(table, rows, append, visible, shares, *rest):  # A profile shows this name.
        order, (q, k, v, keys, values, out, parts, sums, *memory) = (rest[0], rest[1:]) if call.listed else (None, rest)
        warpgroup = lax.axis_index("warpgroup")
        place, role = lax.div(warpgroup, np.int32(warpgroups)), lax.rem(warpgroup, np.int32(warpgroups))
        number = lax.axis_index("block") * schedule.workers + place
        worker = Worker(call, schedule, Memory(*memory), number, place)

        def each_segment(function: Callable[[Segment, Any], Any]) -> Any:
            def step(_, carry):
                row, head, first, left, state = carry
                blocks = rows[row, BLOCKS]
                count = jnp.minimum(left, blocks - first)
                state = function(Segment(row, head, first, count, first + count == blocks), state)
                wraps = head + 1 == call.kv_heads
                row, head = jnp.where(wraps, row + 1, row), jnp.where(wraps, 0, head + 1)
                return row, head, jnp.int32(0), left - count, state

            begin = tuple(shares[number, field] for field in (FIRST_ROW, FIRST_HEAD, FIRST_BLOCK, COUNT))
            state = jnp.int32(0), jnp.int32(0)  # tiles and segments until now
            return lax.fori_loop(0, shares[number, SEGMENTS], step, (*begin, state))[-1]

        def set_registers(which: int, action) -> None:
            if schedule.registers and not interpret:
                plgpu.set_max_registers(schedule.registers[which], action=action)

        @pl.when(role < call.tiles)
        def _():
            set_registers(0, "increase")
            integers = table, rows, order, visible
            compute = functools.partial(_compute, worker, role, integers, (out, parts, sums), interpret)
            each_segment(compute)

        @pl.when(role == call.tiles)
        def _():
            set_registers(1, "decrease")
            bring = functools.partial(_bring, worker, (table, append), (q, k, v), (keys, values))
            worker.wait_for_all(*each_segment(bring))

    return plgpu.kernel(
        attend_blocks,
        out_type=(
            jax.ShapeDtypeStruct((call.items, call.queries, call.head_dim), call.dtype),
            jax.ShapeDtypeStruct((segments, call.queries, call.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((segments, 2, call.tiles * TILE), jnp.float32),
        ),
        grid=(PROCESSORS,),
        grid_names=("block",),
        num_threads=schedule.workers * warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((tiles, KEYS, call.head_dim), call.dtype, transforms=transforms),
            plgpu.SMEM((buffers, call.tiles * TILE, call.head_dim), call.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=call.block_pages, num_barriers=tiles),
            plgpu.Barrier(num_arrivals=call.tiles, num_barriers=tiles),
            plgpu.Barrier(num_arrivals=groups(call) or 1, num_barriers=buffers),
            plgpu.Barrier(num_arrivals=call.tiles, num_barriers=buffers),
            plgpu.Barrier(num_barriers=tiles),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _bring(worker: Worker, integers, inputs, pools, segment: Segment, state):
    """Brings the queries and blocks of a segment to shared memory, and appends the item's new tokens in its last one.

    The state is how many tiles and how many segments there were before.
    """
    call, (table, append), (q, k, v), (tile, number) = worker.call, integers, inputs, state
    row, head = segment.row, segment.head
    target, full, free = worker.queries(number)
    pl.when(number >= worker.schedule.query_buffers)(lambda: plgpu.barrier_wait(free))
    item, column = row * call.kv_heads + head, head * call.head_dim
    first, rows = item * pitch(call.queries), GROUP if groups(call) else in_eights(call.queries)
    for group in range(groups(call) or 1):
        source = q.at[pl.ds(first + group * GROUP, rows)]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(group * PITCH, rows)], full)

    def bring_block(j, tile):
        pages, size = block_pages(call, table, row, segment.first + j), call.page_size
        for offset, pool in enumerate(pools):
            target, full, free, _ = worker.tile(tile + offset)
            pl.when(tile + offset >= worker.schedule.ring)(functools.partial(plgpu.barrier_wait, free))
            for i, page in enumerate(pages):
                source = pool.at[page, :, pl.ds(column, call.head_dim)]
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(i * size, size)], full)
        return tile + len(pools)

    tile = lax.fori_loop(0, segment.count, bring_block, tile)

    def append_some(i, _):
        """Appends some of the new tokens' keys and values: all are on their way before the first arrives."""
        tokens = [i * APPENDED + t for t in range(min(APPENDED, call.time))]
        kept = [jnp.minimum(t, call.time - 1) for t in tokens]
        places = [append[row, t] for t in kept]
        found = [[load(x.at[item * pitch(call.time) + t], vector_layout(call.head_dim)) for x in (k, v)] for t in kept]
        for t, place, pair in zip(tokens, places, found, strict=True):
            page, inside = (op(place, np.int32(call.page_size)) for op in (lax.div, lax.rem))

            @pl.when((place >= 0) & (t < call.time))
            def _(page=page, inside=inside, pair=pair):
                for pool, x in zip(pools, pair, strict=True):
                    store(pool.at[page, inside, pl.ds(column, call.head_dim)], x)

    @pl.when(segment.ends)
    def _():
        for offset, new in enumerate((k, v)):
            target, full, free, _ = worker.tile(tile + offset)
            pl.when(tile + offset >= worker.schedule.ring)(functools.partial(plgpu.barrier_wait, free))
            rows = in_eights(call.time)
            source = new.at[pl.ds(item * pitch(call.time), rows)]
            for _ in range(call.block_pages):  # The barrier counts copies: as many as of pages, all the same.
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, rows)], full)
        lax.fori_loop(0, -(-call.time // APPENDED), append_some, None)

    return tile + 2 * segment.ends.astype(jnp.int32), number + 1


def _compute(worker: Worker, role, integers, found, interpret: bool, segment: Segment, state):
    """Attends to the blocks of a segment, and in an item's last one to its new tokens, with the queries of a tile.

    The state is as in `_bring`; role: which tile.
    """
    call, (table, rows, order, visible), (tile, number) = worker.call, integers, state
    row = segment.row
    scale = np.float32(call.head_dim**-0.5 * math.log2(math.e))
    out_dims, end, clean = (TILE, call.head_dim), rows[row, END], rows[row, CLEAN]
    spaced = groups(call) > 0
    size, layout = (REAL_ROWS, HALF) if spaced else (TILE, WGMMA)
    of_queries = layout.reduce(1)
    sight = Sight(call, table, rows, order, visible, row, end, role * TILE, queries=size, layout=layout)
    all_queries, queries_full, queries_free = worker.queries(number)
    queries = all_queries.at[pl.ds(role * TILE, TILE)]
    plgpu.barrier_wait(queries_full)

    def add_block(kind: Kind, j, carry):
        highest, total, out, tile = carry
        block = segment.first + j
        keys, full, free, _ = worker.tile(tile)
        plgpu.barrier_wait(full)
        scores = multiply_keys(queries, keys, interpret)
        scores = (real_rows(scores, interpret) if spaced else scores) * scale
        plgpu.barrier_arrive(free)
        used = None if kind is Kind.CLEAN else sight.is_used(kind, block)
        weights, kept, highest, total = weigh(scores, used, highest, total, layout)
        weights = summands(weights, call.dtype)
        if spaced:
            weights, out = (as_tile(*weights, interpret),), multiply_rows(out, kept, interpret, others=True)
        else:
            out = out * spread(kept, 0, out_dims)
        values, full, free, cleared = worker.tile(tile + 1)
        plgpu.barrier_wait(full)
        if kind is not Kind.CLEAN:

            @pl.when(role == 0)
            def _():
                clear(values, sight.is_live(0, kind, block))
                if call.tiles > 1:
                    plgpu.barrier_arrive(cleared)

            if call.tiles > 1:
                pl.when(role > 0)(lambda: plgpu.barrier_wait(cleared))
        out = add_values(out, weights, values, interpret)
        plgpu.barrier_arrive(free)
        return highest, total, out, tile + 2

    carry = filled(MASKED, (size,), of_queries), filled(0, (size,), of_queries), filled(0, out_dims, WGMMA), tile
    masked_from = jnp.clip(clean - segment.first, 0, segment.count)
    new = segment.ends.astype(jnp.int32)
    loops = (Kind.CLEAN, 0, masked_from), (Kind.MASKED, masked_from, segment.count), (Kind.NEW, 0, new)
    for kind, begin, until in loops:
        carry = lax.fori_loop(begin, until, functools.partial(add_block, kind), carry)
    highest, total, out, tile = carry
    out = sum_pairs(out, interpret) if spaced else out
    outs, parts, all_sums = found
    item = row * call.kv_heads + segment.head
    alone = segment.ends & (segment.first == 0)

    @pl.when(alone)
    def _():
        result = (out * spread(share(total, of_queries), 0, out.shape, layout)).astype(call.dtype)
        store_wide(result, layout, outs.at[item], role * TILE, np.int32(0), interpret)

    @pl.when(~alone)
    def _():
        at = item + worker.number
        store_wide(out, layout, parts.at[at], role * TILE, np.int32(0), interpret)
        store(all_sums.at[at, 0, pl.ds(role * TILE, size)], highest)
        store(all_sums.at[at, 1, pl.ds(role * TILE, size)], total)

    plgpu.barrier_arrive(queries_free)
    return tile, number + 1
