"""`append_and_attend` on TPUs: Pallas Mosaic TPU.

A core computes whole rows, one block of pages after another. While it computes a block, the next ones are on their way
to VMEM, those of the following rows, too, so that bandwidth is used between rows as within them. Of a row's last page
the live part is copied alone. A row's new tokens come from the launch's inputs: they lie behind the places of its last
block. They are appended to their pages once all pages of the row are there, and arrive while later rows are computed.
How pages lie in the chip's memory, and what this means, is in `tpu_pages`.

Two cores of one device (v4, v5p) have an equal share of the blocks each, in whole rows.

Floor: (keys and values of the committed tokens + k, v, their appends + q + out) / read bandwidth. Beside it k and v are
read a second time, from where they are appended.

Precision: products of two-byte operands, or of float32 in full, with float32 sums; the softmax is in float32, and its
weights are rounded to the pages' dtype for the second product.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.tpu_append import TileAppends, TokenAppends
from jaxbuf.pallas.attend.tpu_call import (
    BLOCKS,
    CLEAN,
    COUNT,
    END,
    END_ROW,
    FIRST_ROW,
    HOLES,
    LANES,
    REAL,
    ROW_FIELDS,
    SHARE_FIELDS,
    Arrangement,
    Integers,
    vmem_limit,
)
from jaxbuf.pallas.attend.tpu_pages import HeadTiles, TokenTiles, each_piece
from jaxbuf.pallas.attend.tpu_softmax import Softmax, has_bit, index

OUTPUTS = 2  # rows whose outputs are in VMEM at once


def append_and_attend(
    plan: Arrangement,
    integers: Integers,
    pools: tuple[Array, ...],
    q: Array,
    new: tuple[Array, ...],
    *,
    interpret: Any = False,
) -> tuple[Array, tuple[Array, ...]]:
    """`jaxbuf.attention.paged_launch.append_and_attend`; `supports` says for which sizes.

    Args:
      plan: The call, and how it is arranged.
      integers: Of the launch.
      pools: Pages of keys and of values as in `PagedKV`, or where these are one those of keys. They are written in
        place.
      q: [rows, time, heads, head_dim].
      new: For each pool, [rows, time, kv_heads, head_dim].
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      out [rows, time, heads, value_dim], and the pools.
    """
    pages = pages_of(plan, interpret)
    given = *(pages.inputs(x) for x in new), *(pages.stored(x) for x in pools)
    out, *pools_after = _kernel(plan, pages, interpret)(*integers, by_groups(plan, q), *given)
    return by_tokens(plan, out), tuple(pages.stored(x) for x in pools_after)


def by_groups(plan: Arrangement, q: Array) -> Array:
    """Queries [rows, time, heads, head_dim] as the kernel has them: [rows, groups, queries, head_dim]."""
    call, queries = plan.call, plan.packed * plan.call.queries
    split = call.rows, call.time, plan.groups, plan.packed, call.group, call.head_dim
    grouped = jnp.transpose(q.reshape(split), (0, 2, 3, 1, 4, 5))
    grouped = grouped.reshape(call.rows, plan.groups, queries, call.head_dim)
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, plan.queries - queries), (0, 0)))


def by_tokens(plan: Arrangement, out: Array) -> Array:
    """What the kernel gives, [rows, groups, queries, value_dim], as [rows, time, heads, value_dim]."""
    call = plan.call
    out = out[:, :, : plan.packed * call.queries]
    out = out.reshape(call.rows, plan.groups, plan.packed, call.time, call.group, plan.value_dim)
    return jnp.transpose(out, (0, 3, 1, 2, 4, 5)).reshape(call.rows, call.time, call.heads, plan.value_dim)


def pages_of(plan: Arrangement, interpret: Any) -> TokenTiles | HeadTiles:
    """How the pages of a call lie in memory."""
    return TokenTiles(plan, bool(interpret)) if plan.token_tiles else HeadTiles(plan)


class Unit(NamedTuple):
    """A block of a row, and the place of its buffers: units are numbered in the order of a worker."""

    number: Array
    row: Array
    block: Array


class Memory(NamedTuple):
    """What a core works with: buffers of blocks, of their rows' queries, outputs and tables; sums; semaphores.

    Attributes:
      buffers: Of `depth` units, for each pool.
      queries: [depth, groups, queries, head_dim], of so many rows.
      outs: [OUTPUTS, groups, queries, value_dim].
      tables: int32 [depth + 1, chunks, LANES], in scalar memory.
      softmax: Of the row that is computed.
      blocks, rows, results, lists: Semaphores for each of these buffers.
    """

    buffers: Sequence[Any]
    queries: Any
    outs: Any
    tables: Any
    softmax: Softmax
    blocks: Any
    rows: Any
    results: Any
    lists: Any


class Arrays(NamedTuple):
    """The launch's arrays in the chip's memory: as the kernel sees them, q and out by groups."""

    table: Any
    q: Any
    out: Any
    new: Sequence[Any]
    pools: Sequence[Any]


def _kernel(plan: Arrangement, pages: TokenTiles | HeadTiles, interpret: Any) -> Callable[..., Any]:
    call, depth, pools = plan.call, plan.depth, plan.pools
    appends = TokenAppends if plan.token_tiles else TileAppends
    scalars = len(Integers._fields) - 1  # the table lies in the chip's memory

    def append_and_attend_rows(*refs):  # A profile shows this name.
        integers, (q, *refs) = Integers(*refs[: scalars + 1]), refs[scalars + 1 :]
        new, refs = refs[:pools], refs[2 * pools :]  # the pools that are read are those that are written
        (out, *written), refs = refs[: pools + 1], refs[pools + 1 :]
        buffers, (queries, outs, tables, *refs) = refs[:pools], refs[pools:]
        softmax, (blocks, rows, results, lists, *rest) = Softmax(*refs[:3]), refs[3:]
        memory = Memory(buffers, queries, outs, tables, softmax, blocks, rows, results, lists)
        share = pl.program_id(0) * SHARE_FIELDS
        its = (integers.shares[share + field] for field in (FIRST_ROW, END_ROW, COUNT))
        arrays = Arrays(integers.table, q, out, new, written)
        Core(plan, pages, integers, arrays, memory, appends(plan, integers, new, written, rest), *its).run()

    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    of_row = plan.groups, plan.queries
    scratch = [
        *[pages.buffer()] * pools,
        pltpu.VMEM((depth, *of_row, call.head_dim), call.dtype),
        pltpu.VMEM((OUTPUTS, *of_row, plan.value_dim), call.dtype),
        pltpu.SMEM((depth + 1, plan.chunks, LANES), jnp.int32),
        *Softmax.scratch(*of_row, plan.value_dim),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((OUTPUTS,)),
        pltpu.SemaphoreType.DMA((depth + 1,)),
        *appends.scratch(plan),
    ]

    def run(*given: Array) -> Any:
        return pl.pallas_call(
            append_and_attend_rows,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=scalars,
                grid=(plan.workers,),
                in_specs=[pool] * (2 + 2 * pools),
                out_specs=[pool] * (1 + pools),
                scratch_shapes=scratch,
            ),
            out_shape=[
                jax.ShapeDtypeStruct((call.rows, *of_row, plan.value_dim), call.dtype),
                # Declared to lie in HBM, or XLA moves small pools to a faster memory and back in every launch.
                *(pltpu.HBM(x.shape, x.dtype) for x in given[-pools:]),
            ],
            input_output_aliases={len(given) - pools + i: 1 + i for i in range(pools)},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(pltpu.PARALLEL,), vmem_limit_bytes=vmem_limit(plan.vmem, plan.generation)
            ),
            interpret=interpret,
        )(*given)

    return run


@dataclasses.dataclass(frozen=True)
class Core:
    """A core at work.

    Attributes:
      plan: How the call is arranged.
      pages: How pages are read.
      integers, arrays, memory, appends: Of the launch.
      first_row, end_row: Its rows.
      units: How many blocks they have.
    """

    plan: Arrangement
    pages: TokenTiles | HeadTiles
    integers: Integers
    arrays: Arrays
    memory: Memory
    appends: TokenAppends
    first_row: Array
    end_row: Array
    units: Array

    def run(self) -> None:
        """Computes all rows of this worker."""
        self.appends.clear()
        pl.when(self.units > 0)(lambda: self.copy_table(self.first_row, True))
        lead = self.plan.depth - 1  # units that are fetched before the first one is computed

        def step(number, carry):
            (row, block), ahead = carry
            ahead = self.fetch(Unit(number, *ahead))
            unit = Unit(number - lead, row, block)
            ready = unit.number >= 0
            pl.when(ready)(lambda: self.compute(unit))
            row, block = self.following(unit)
            return (jnp.where(ready, row, unit.row), jnp.where(ready, block, unit.block)), ahead

        start = self.first_row, jnp.int32(0)
        (row, _), _ = lax.fori_loop(0, jnp.where(self.units > 0, self.units + lead, 0), step, (start, start))
        self.appends.finish()
        for back in range(OUTPUTS, 0, -1):
            pl.when(row - back >= self.first_row)(lambda back=back: self.copy_out(row - back, False))

    def field(self, row: Array, field: int) -> Array:
        return self.integers.rows[row * ROW_FIELDS + field]

    def following(self, unit: Unit) -> tuple[Array, Array]:
        """The row and block of the next unit."""
        ends = unit.block + 1 == self.field(unit.row, BLOCKS)
        return jnp.where(ends, unit.row + 1, unit.row), jnp.where(ends, 0, unit.block + 1)

    def is_last(self, unit: Unit) -> Array:
        return unit.block + 1 == self.field(unit.row, BLOCKS)

    def fetch(self, unit: Unit) -> tuple[Array, Array]:
        """Starts to bring what a unit needs, if there is such a unit; returns the row and block of the next one."""
        real = unit.number < self.units

        @pl.when(real)
        def _():
            @pl.when(unit.block == 0)
            def _():
                self.copy_table(unit.row, False)
                pl.when(unit.row + 1 < self.end_row)(lambda: self.copy_table(unit.row + 1, True))
                self.copy_queries(unit.row, True)

            self.copy_block(unit, True)
            pl.when(self.is_last(unit))(lambda: self.appends.fetch(unit.row))

        # Beyond the last unit there is no row whose fields could be read.
        row = jnp.where(real, unit.row, self.first_row)
        next_row, next_block = self.following(Unit(unit.number, row, unit.block))
        return jnp.where(real, next_row, unit.row), jnp.where(real, next_block, unit.block)

    def copy_table(self, row: Array, start: bool) -> None:
        """Brings the table of a row, as far as it is used."""
        place = lax.rem(row, np.int32(self.plan.depth + 1))
        pages = -(-self.field(row, END) // self.plan.call.page_size)

        def chunk(i, _):
            there, here = self.arrays.table.at[row, pl.ds(i, 1)], self.memory.tables.at[place, pl.ds(i, 1)]
            act(pltpu.make_async_copy(there, here, self.memory.lists.at[place]), start)

        lax.fori_loop(0, -(-pages // LANES), chunk, None)

    def copy_queries(self, row: Array, start: bool) -> None:
        place = lax.rem(row, np.int32(self.plan.depth))
        copy = pltpu.make_async_copy(self.arrays.q.at[row], self.memory.queries.at[place], self.memory.rows.at[place])
        act(copy, start)

    def copy_out(self, row: Array, start: bool) -> None:
        place = lax.rem(row, np.int32(OUTPUTS))
        copy = pltpu.make_async_copy(self.memory.outs.at[place], self.arrays.out.at[row], self.memory.results.at[place])
        act(copy, start)

    def page(self, row: Array, number: Array) -> Array:
        """The page that holds the tokens with this number of a row."""
        place = lax.rem(row, np.int32(self.plan.depth + 1))
        return self.memory.tables[place, number // LANES, number % LANES]

    def block_of(self, unit: Unit) -> Array:
        """Which block of its row's table a unit is."""
        return unit.block

    def live_tokens(self, unit: Unit) -> Array:
        """How many places of the unit lie before END."""
        return jnp.clip(self.field(unit.row, END) - self.block_of(unit) * self.plan.span, 0, self.plan.span)

    def copy_block(self, unit: Unit, start: bool) -> None:
        """Brings the live part of a block's pages, and to a row's last block its new tokens."""
        place, size = lax.rem(unit.number, np.int32(self.plan.depth)), self.plan.call.page_size
        both = list(zip(self.arrays.pools, self.memory.buffers, strict=True))
        semaphore = self.memory.blocks.at[place]
        ahead = self.block_of(unit) * (self.plan.span // size)

        def copy(i, first, count):
            page = self.page(unit.row, ahead + i) if start else jnp.int32(0)
            for pool, buffer in both:
                source = self.pages.of_page(pool, page, first, count)
                for each in self.pages.copies(source, buffer.at[place], i * size + first, count, semaphore):
                    act(each, start)

        each_piece(size, self.pages.least, self.live_tokens(unit), copy)

        @pl.when(self.is_last(unit))
        def _():
            for new, buffer in zip(self.arrays.new, self.memory.buffers, strict=True):
                source, count = self.pages.new_tokens(new, unit.row)
                for each in self.pages.copies(source, buffer.at[place], self.plan.span, count, semaphore):
                    act(each, start)

    def compute(self, unit: Unit) -> None:
        """Attends to a block; behind a row's last one its outputs and new tokens are written."""
        pl.when(unit.block == 0)(lambda: self.copy_queries(unit.row, False))
        pl.when(unit.block == 0)(self.memory.softmax.clear)
        self.copy_block(unit, False)
        last = self.is_last(unit)
        self.attend(unit, last)

        @pl.when(last)
        def _():
            self.appends.finish()
            place = lax.rem(unit.number, np.int32(self.plan.depth))
            self.appends.start(unit.row, [buffer.at[place] for buffer in self.memory.buffers])
            pl.when(unit.row - self.first_row >= OUTPUTS)(lambda: self.copy_out(unit.row - OUTPUTS, False))
            place = lax.rem(unit.row, np.int32(OUTPUTS))
            for group in range(self.plan.groups):
                self.memory.outs[place, group] = self.memory.softmax.result(group).astype(self.plan.call.dtype)
            self.copy_out(unit.row, True)

    def attend(self, unit: Unit, last: Array) -> None:
        """Adds a block, which is there, to the sums."""
        clean = (unit.block < self.field(unit.row, CLEAN)) & ~last
        pl.when(clean)(lambda: self.add(unit, self.plan.span, None, None))

        @pl.when(~clean)
        def _():
            visible = self.visible(unit, last)
            self.add(unit, self.plan.columns, lambda _: visible, partial(self.live, unit, last))

    def add(
        self,
        unit: Unit,
        count: int,
        seen: Callable[[int], Array] | None,
        live: Callable[[Array], Array] | None,
    ) -> None:
        """Adds the first tokens of a unit's buffers to all groups.

        Args:
          unit: Which.
          count: Tokens.
          seen: Of a group, bool [queries or 1, count · packed], which its queries see; None: all.
          live: bool, of the numbers of tokens: those that are there; None: all.
        """
        plan = self.plan
        place, row = lax.rem(unit.number, np.int32(plan.depth)), lax.rem(unit.row, np.int32(plan.depth))
        buffers, own = [buffer.at[place] for buffer in self.memory.buffers], self.own_heads(count)
        for group in range(plan.groups):
            keys = self.pages.rows(buffers[0], group, count)
            values = self.pages.rows(buffers[-1], group, count, live)
            which = own if seen is None else seen(group) if own is None else seen(group) & own
            q = self.memory.queries[row, group]
            self.memory.softmax.add(group, q, keys, values[:, : plan.value_dim], which, plan.scale)

    def own_heads(self, count: int) -> Array | None:
        """bool [queries, count · packed]: which keys are of a query's own key head; None: all."""
        plan = self.plan
        if plan.packed == 1:
            return None
        shape = plan.queries, count * plan.packed
        return lax.rem(index(shape, 1), np.int32(plan.packed)) == index(shape, 0) // plan.call.queries

    def live(self, unit: Unit, last: Array, token: Array) -> Array:
        """bool, like `token`, the numbers of tokens in a unit's buffer: whether something is there."""
        plan, row = self.plan, unit.row
        place = unit.block * plan.span + token
        committed = (token < plan.span) & (place < self.field(row, END))
        for i in range(plan.call.listed):
            committed &= place != self.integers.order[row * plan.call.listed + i]
        size = plan.call.page_size
        pages = plan.span // size

        def without(i, gone):
            missing = self.page(row, unit.block * pages + i) == 0
            return jnp.where((token // size == i) & missing, 1, gone)

        some = jnp.where(self.field(row, HOLES) > 0, -(-self.live_tokens(unit) // size), 0)
        gone = lax.fori_loop(0, some, without, jnp.zeros(token.shape, jnp.int32))
        real = jnp.where(last, self.field(row, REAL), 0)
        return (committed & (gone == 0)) | has_bit(real, token - plan.span)

    def query_tokens(self) -> Array:
        """int32 [queries, 1]: which of the row's new tokens each query of a group is."""
        call = self.plan.call
        return lax.rem(index((self.plan.queries, 1), 0) // call.group, np.int32(call.time))

    def visible(self, unit: Unit, last: Array) -> Array:
        """bool [queries or 1, columns · packed]: which tokens of a unit's buffer each query sees."""
        plan, call = self.plan, self.plan.call
        width = plan.columns * plan.packed
        live = self.live(unit, last, index((1, width), 1) // plan.packed)
        if call.time == 1:
            return live
        query = self.query_tokens()
        bits = jnp.zeros((plan.queries, 1), jnp.int32)
        for t in range(call.time):
            bits = jnp.where(query == t, self.integers.visible[unit.row * call.time + t], bits)
        token = index((plan.queries, width), 1) // plan.packed
        return live & ((token < plan.span) | has_bit(bits, token - plan.span))


def act(copy: Any, start: bool) -> None:
    """Starts a copy, or waits for one of its shape."""
    (copy.start if start else copy.wait)()
