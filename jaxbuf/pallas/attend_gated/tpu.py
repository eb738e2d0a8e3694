"""`attend_gated` on TPUs: Pallas Mosaic TPU.

The local pages and new tokens of a row are computed as `append_and_attend` computes pages, but for what is seen: that
comes as masks, which the launch makes of positions, gates and threshold. Before them come the row's lists, head after
head, in blocks of one head's keys. All blocks are one sequence, through which copies run ahead of what is computed. A
block of a list is computed with the queries of its head's group; those of the group's other heads do not see it.

Of a list the keys that it holds are copied, in whole tiles of eight; of local pages those that hold a token that is
live, whole. Nothing is written but the outputs.

Floor: (keys and values of the lists and of live local tokens + k, v, q, out) / read bandwidth; masks and tables are one
to two hundredths of that.
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
from jaxbuf.pallas.attend.tpu import OUTPUTS, Arrays, Core, Memory, Unit, act, by_groups, by_tokens, pages_of
from jaxbuf.pallas.attend.tpu_append import NoAppends
from jaxbuf.pallas.attend.tpu_call import (
    COUNT,
    END_ROW,
    FIRST_ROW,
    LANES,
    SHARE_FIELDS,
    Arrangement,
    Integers,
    vmem_limit,
)
from jaxbuf.pallas.attend.tpu_pages import HeadTiles, each_piece
from jaxbuf.pallas.attend.tpu_softmax import Softmax, has_bit, index
from jaxbuf.pallas.attend_gated.tpu_arrange import GatedArrangement, GatedIntegers


def attend_gated(
    plan: GatedArrangement,
    integers: Integers,
    gated: GatedIntegers,
    local: tuple[Array, Array],
    admitted: tuple[Array, Array],
    q: Array,
    new: tuple[Array, Array],
    *,
    interpret: Any = False,
) -> Array:
    """`jaxbuf.attention.gated_kernel.attend_gated`; `supports` says for which sizes.

    Args:
      plan: The call, and how it is arranged.
      integers: Of the launch, with the local pages that hold live tokens as pages of its slots; BLOCKS counts those of
        lists, too.
      gated: The others.
      local, admitted: Keys and values on local pages and on lists' pages, as in `GatedKV`.
      q: [rows, time, heads, head_dim].
      new: Keys and values of the new tokens, [rows, time, kv_heads, head_dim].
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      out [rows, time, heads, head_dim].
    """
    pages, lists = pages_of(plan.local, interpret), HeadTiles(plan.listed)
    given = *(pages.inputs(x) for x in new), *(pages.stored(x) for x in local), *(x[:, None] for x in admitted)
    if not interpret:
        # XLA scatters keys into them before, and would bring a whole pool into a large VMEM for it, and take it back.
        given = *given[:2], *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in given[2:])
    out = _kernel(plan, pages, lists, interpret)(*integers, *gated, by_groups(plan.local, q), *given)
    return by_tokens(plan.local, out)


class Lists(NamedTuple):
    """What a core has for lists and masks, beside `Memory`.

    Attributes:
      counts: int32 [rows · kv_heads], in scalar memory.
      table, seen, there: In the chip's memory, as in `GatedIntegers`.
      pools: Keys and values of lists.
      buffers: For each of these, of `depth` units.
      chunks: int32 [depth + 1, 1, LANES], in scalar memory: pages of the lists of so many units.
      masks, tokens: [depth, groups, columns · packed] and [depth, 1, columns], of local units.
      arrivals: Semaphores of the chunks.
    """

    counts: Any
    table: Any
    seen: Any
    there: Any
    pools: Sequence[Any]
    buffers: Sequence[Any]
    chunks: Any
    masks: Any
    tokens: Any
    arrivals: Any


def _kernel(plan: GatedArrangement, pages: Any, lists: HeadTiles, interpret: Any) -> Callable[..., Any]:
    local, listed = plan.local, plan.listed
    call, depth, scalars = local.call, local.depth, len(Integers._fields) - 1

    def attend_gated_rows(*refs):  # A profile shows this name.
        scalar, counts, refs = refs[:scalars], refs[scalars], refs[scalars + 1 :]
        table, page_lists, seen, there, q, k, v, *refs = refs
        pools, list_pools, out, refs = refs[:2], refs[2:4], refs[4], refs[5:]
        buffers, list_buffers, (queries, outs, tables, *refs) = refs[:2], refs[2:4], refs[4:]
        softmax, (blocks, rows, results, arrivals, chunks, masks, tokens, chunk_arrivals) = Softmax(*refs[:3]), refs[3:]
        integers = Integers(*scalar, table)  # pyright: ignore[reportCallIssue]
        share = pl.program_id(0) * SHARE_FIELDS
        first, end, units = (integers.shares[share + field] for field in (FIRST_ROW, END_ROW, COUNT))
        arrays, appends = Arrays(table, q, out, (k, v), pools), NoAppends(local, integers, (), (), ())
        memory = Memory(buffers, queries, outs, tables, softmax, blocks, rows, results, arrivals)
        more = Lists(counts, page_lists, seen, there, list_pools, list_buffers, chunks, masks, tokens, chunk_arrivals)
        _GatedCore(local, pages, integers, arrays, memory, appends, first, end, units, more, listed, lists).run()

    pool = pl.BlockSpec(memory_space=pltpu.HBM)
    of_row = local.groups, local.queries
    scratch = [
        *[pages.buffer()] * 2,
        *[pltpu.VMEM((depth, 1, listed.span, call.head_dim), call.dtype)] * 2,
        pltpu.VMEM((depth, *of_row, call.head_dim), call.dtype),
        pltpu.VMEM((OUTPUTS, *of_row, call.head_dim), call.dtype),
        pltpu.SMEM((depth + 1, local.chunks, LANES), jnp.int32),
        *Softmax.scratch(*of_row, call.head_dim),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((OUTPUTS,)),
        pltpu.SemaphoreType.DMA((depth + 1,)),
        pltpu.SMEM((depth + 1, 1, LANES), jnp.int32),
        pltpu.VMEM((depth, local.groups, local.columns * local.packed), jnp.int32),
        pltpu.VMEM((depth, 1, local.columns), jnp.int32),
        pltpu.SemaphoreType.DMA((depth + 1,)),
    ]

    def run(*given: Array) -> Any:
        integers, gated, rest = given[:scalars], given[scalars + 1 : scalars + 5], given[scalars + 5 :]
        table = given[scalars]
        return pl.pallas_call(
            attend_gated_rows,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=scalars + 1,
                grid=(local.workers,),
                in_specs=[pool] * 11,
                out_specs=pool,
                scratch_shapes=scratch,
            ),
            out_shape=jax.ShapeDtypeStruct((call.rows, *of_row, call.head_dim), call.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=(pltpu.PARALLEL,), vmem_limit_bytes=vmem_limit(plan.vmem, local.generation)
            ),
            interpret=interpret,
        )(*integers, gated[0], table, *gated[1:], *rest)

    return run


class Listed(NamedTuple):
    """A block of a list: its key head, its number in the list, and how many keys it has."""

    head: Array
    block: Array
    count: Array


@dataclasses.dataclass(frozen=True)
class _GatedCore(Core):
    """A core at work.

    Attributes:
      lists: What it has for lists and masks.
      listed, list_pages: How lists are arranged, and read.
    """

    lists: Lists
    listed: Arrangement
    list_pages: HeadTiles

    def run(self) -> None:
        first = Unit(jnp.int32(0), self.first_row, jnp.int32(0))
        pl.when(self.units > 0)(lambda: self.copy_chunk(first, True))
        super().run()

    def length(self, row: Array, head: int) -> Array:
        """The keys of a list."""
        return self.lists.counts[row * self.plan.call.kv_heads + head]

    def list_blocks(self, row: Array) -> Array:
        """The blocks of all lists of a row."""
        return sum(
            (-(-self.length(row, head) // self.listed.span) for head in range(self.plan.call.kv_heads)), jnp.int32(0)
        )

    def of_list(self, unit: Unit) -> Listed:
        """Which block of which list a unit is; of a local unit what is meaningless."""
        head, block = jnp.int32(0), unit.block
        for each in range(self.plan.call.kv_heads - 1):
            its = -(-self.length(unit.row, each) // self.listed.span)
            behind = (head == each) & (block >= its)
            head, block = jnp.where(behind, each + 1, head), jnp.where(behind, block - its, block)
        length = self.lists.counts[unit.row * self.plan.call.kv_heads + head]
        return Listed(head, block, jnp.clip(length - block * self.listed.span, 0, self.listed.span))

    def is_listed(self, unit: Unit) -> Array:
        return unit.block < self.list_blocks(unit.row)

    def block_of(self, unit: Unit) -> Array:
        return unit.block - self.list_blocks(unit.row)

    def fetch(self, unit: Unit) -> tuple[Array, Array]:
        found = super().fetch(unit)
        following = Unit(unit.number + 1, *found)
        pl.when(following.number < self.units)(lambda: self.copy_chunk(following, True))
        return found

    def copy_chunk(self, unit: Unit, start: bool) -> None:
        """Brings the pages of a list's block, with those beside them."""
        place = lax.rem(unit.number, np.int32(self.plan.depth + 1))

        @pl.when(self.is_listed(unit))
        def _():
            which = self.of_list(unit)
            row = unit.row * self.plan.call.kv_heads + which.head
            chunk = which.block * (self.listed.span // self.plan.call.page_size) // LANES
            there = self.lists.table.at[row, pl.ds(chunk, 1)]
            act(pltpu.make_async_copy(there, self.lists.chunks.at[place], self.lists.arrivals.at[place]), start)

    def copy_block(self, unit: Unit, start: bool) -> None:
        if start:
            self.copy_chunk(unit, False)
        listed = self.is_listed(unit)
        pl.when(listed)(lambda: self._copy_listed(unit, start))

        @pl.when(~listed)
        def _():
            super(_GatedCore, self).copy_block(unit, start)
            place, block = lax.rem(unit.number, np.int32(self.plan.depth)), self.block_of(unit)
            for whole, part in ((self.lists.seen, self.lists.masks), (self.lists.there, self.lists.tokens)):
                source = whole.at[unit.row, block]
                act(pltpu.make_async_copy(source, part.at[place], self.memory.blocks.at[place]), start)

    def _copy_listed(self, unit: Unit, start: bool) -> None:
        place, size = lax.rem(unit.number, np.int32(self.plan.depth)), self.plan.call.page_size
        chunk, semaphore = lax.rem(unit.number, np.int32(self.plan.depth + 1)), self.memory.blocks.at[place]
        which = self.of_list(unit)
        ahead = lax.rem(which.block * (self.listed.span // size), np.int32(LANES))

        def copy(i, first, count):
            page = self.lists.chunks[chunk, 0, ahead + i] if start else jnp.int32(0)
            for pool, buffer in zip(self.lists.pools, self.lists.buffers, strict=True):
                source = self.list_pages.of_page(pool, page, first, count)
                for each in self.list_pages.copies(source, buffer.at[place], i * size + first, count, semaphore):
                    act(each, start)

        each_piece(size, self.list_pages.least, which.count, copy)

    def attend(self, unit: Unit, last: Array) -> None:
        listed = self.is_listed(unit)
        pl.when(listed)(lambda: self._attend_listed(unit))
        pl.when(~listed)(lambda: self._attend_local(unit))

    def _attend_listed(self, unit: Unit) -> None:
        plan, span = self.plan, self.listed.span
        place, row = lax.rem(unit.number, np.int32(plan.depth)), lax.rem(unit.row, np.int32(plan.depth))
        which = self.of_list(unit)
        group, among = which.head // plan.packed, lax.rem(which.head, np.int32(plan.packed))
        keys, values = self.lists.buffers
        live = index((1, span), 1) < which.count
        seen = live & (index((plan.queries, 1), 0) // plan.call.queries == among)
        found = self.list_pages.rows(values.at[place], 0, span, partial(lax.gt, which.count))
        q = self.memory.queries[row, group]
        self.memory.softmax.add(group, q, keys[place, 0], found, seen, plan.scale)

    def _attend_local(self, unit: Unit) -> None:
        place, columns = lax.rem(unit.number, np.int32(self.plan.depth)), self.plan.columns
        query = self.query_tokens()
        # A vector along lanes is turned to one along sublanes, of which a tile has eight.
        tokens = jnp.transpose(jnp.broadcast_to(self.lists.tokens[place], (8, columns)))[:, :1]

        def seen(group: int) -> Array:
            return has_bit(self.lists.masks[place, pl.ds(group, 1)], query)

        self.add(unit, columns, seen, lambda _: tokens > 0)
