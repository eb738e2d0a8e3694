"""The integers that kernels of attention over pages go by: where a launch's tokens lie, and who sees them."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxbuf.attention.pages import places
from jaxbuf.axes import Array, Bool, Int32
from jaxbuf.pallas.attend.call import KEYS, TILE, Call
from jaxbuf.pallas.attend.call import Integers as GpuIntegers
from jaxbuf.pallas.attend.tpu_call import LANES, SUBLANES, Arrangement, Integers


class LaunchPlaces(NamedTuple):
    """Where the tokens of a launch lie.

    Attributes:
      pages: int32 [rows, max_pages], of each row's slot; 0 where there is none.
      order: int32 [rows, listed], places before `end` where nothing is committed; None without trees.
      start: int32 [rows], the committed tokens of each row that is asked for something; else 0.
      end: int32 [rows]; from this place on, nothing is committed.
      first_open: int32 [rows], the first place where nothing is committed, or whose page is not there.
      append: int32 [rows, time], where each new token goes: page · page_size + place in the page; -1: nowhere.
      real: bool [rows, time], which new tokens are appended.
      visible: int32 [rows, time]: bit j of new token t says whether it sees new token j.
    """

    pages: Array
    order: Array | None
    start: Array
    end: Array
    first_open: Array
    append: Array
    real: Array
    visible: Array


def launch_places(
    call: Call,
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots max_pending"] | None,
    ancestors: Bool[Array, "rows time time"] | None,
) -> LaunchPlaces:
    """Where the tokens of a launch lie.

    Args:
      call: The call.
      table, slots, start, lengths, order, ancestors: As in `jaxbuf.attention.paged_launch.append_and_attend`.
    """
    time, page_size, capacity = call.time, call.page_size, table.shape[1] * call.page_size
    asked = (slots > 0) & (lengths > 0)
    pages = jnp.where(asked[:, None], table[slots], 0)
    listed = None if order is None else order[slots]
    end = jnp.where(asked, jnp.minimum(start + call.listed, capacity), 0)
    first_open = jnp.where(asked, end if listed is None else jnp.minimum(jnp.min(listed, axis=1), end), 0)
    index = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    first_open = jnp.minimum(first_open, page_size * jnp.min(jnp.where(pages > 0, table.shape[1], index), axis=1))

    # Where the new tokens go, and who sees them.
    offset = jnp.arange(time, dtype=jnp.int32)[None]
    place = places(order, slots, start, time)
    inside = (place >= 0) & (place < capacity)
    page = jnp.take_along_axis(pages, jnp.clip(place // page_size, 0, table.shape[1] - 1), axis=1)
    real = (offset < lengths[:, None]) & inside & (page > 0)
    append = jnp.where(real, page * page_size + place % page_size, -1)
    sees = jnp.tril(jnp.ones((time, time), bool))[None] if ancestors is None else ancestors
    visible = jnp.sum(jnp.where(sees & real[:, None], 1 << offset[:, None], 0), axis=2, dtype=jnp.int32)
    return LaunchPlaces(pages, listed, jnp.where(asked, start, 0), end, first_open, append, real, visible)


def bits_of(flags: Bool[Array, "rows time"]) -> Int32[Array, "rows"]:
    """Numbers of which bit t is flag t."""
    bit = 1 << jnp.arange(flags.shape[1], dtype=jnp.int32)[None]
    return jnp.sum(jnp.where(flags, bit, 0), axis=1, dtype=jnp.int32)


def tpu_integers(plan: Arrangement, where: LaunchPlaces) -> Integers:
    """What the TPU kernel goes by.

    Args:
      plan: The call, and how it is arranged.
      where: From `launch_places`.
    """
    page_size, rows, end = plan.call.page_size, where.end.shape[0], where.end
    if where.order is not None:
        # The last places of a list may lie behind all that is committed: they are not read. A listed place has
        # committed tokens behind it if fewer than all lie before it.
        order = where.order
        before = order - jnp.sum(order[:, None] < order[:, :, None], axis=2, dtype=jnp.int32)
        inside = jnp.sum(before < where.start[:, None], axis=1, dtype=jnp.int32)
        end = jnp.minimum(where.start + inside, end)
    column = jnp.arange(where.pages.shape[1], dtype=jnp.int32)[None] * page_size
    holes = jnp.any((where.pages == 0) & (column < end[:, None]), axis=1)
    blocks = jnp.maximum(-(-end // plan.span), 1)
    clean = where.first_open // plan.span
    fields = jnp.stack([blocks, clean, end, bits_of(where.real), holes.astype(jnp.int32)], axis=1)

    pages = jnp.pad(where.pages, ((0, 0), (0, plan.chunks * LANES - where.pages.shape[1])))
    order = jnp.zeros(1, jnp.int32) if where.order is None else where.order.reshape(-1)
    # Of new tokens that are written together, the first one's number stands for all.
    tile = jnp.where(where.append >= 0, where.append // SUBLANES, -1)
    homes = jnp.argmax(tile[:, None] == tile[:, :, None], axis=2).astype(jnp.int32)
    return Integers(
        rows=fields.reshape(-1),
        append=where.append.reshape(-1),
        homes=homes.reshape(-1),
        visible=where.visible.reshape(-1),
        shares=divide_rows(blocks, plan.workers),
        order=order,
        table=pages.reshape(rows, plan.chunks, LANES),
    )


def divide_rows(blocks: Int32[Array, "rows"], workers: int) -> Int32[Array, "_"]:
    """Gives each worker whole rows, with as equal a number of blocks as these allow: `shares` of `Integers`.

    Args:
      blocks: Of each row.
      workers: How many there are.
    """
    until = jnp.cumsum(blocks, dtype=jnp.int32)
    wanted = (until[-1] // workers) * jnp.arange(1, workers, dtype=jnp.int32)
    inner = jnp.sum(until[None] <= wanted[:, None], axis=1, dtype=jnp.int32)
    cut = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, blocks.shape[0], jnp.int32)])
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), until])[cut]
    return jnp.stack([cut[:-1], cut[1:], before[1:] - before[:-1]], axis=1).reshape(-1)


def gpu_integers(call: Call, workers: int, where: LaunchPlaces, *, units: bool = False) -> GpuIntegers:
    """What a GPU kernel goes by.

    Args:
      call: The call.
      workers: How many there are.
      where: From `launch_places`.
      units: Whether the new tokens of an item are counted as a block, and every worker but the last has as many: where
        rows are equally long, fewer of them are shared then.
    """
    pages, listed, _, end, first_open, append, real, visible = where
    blocks = jnp.maximum(-(-end // KEYS), 1)
    visible = jnp.repeat(visible, call.group, axis=1)
    visible = jnp.pad(visible, ((0, 0), (0, call.tiles * TILE - call.queries)))
    shares, joins = divide_blocks(blocks + int(units), call.kv_heads, workers, alike=units)
    pages = jnp.pad(pages, ((0, 0), (0, call.padded_pages - pages.shape[1])))
    fields = jnp.stack([blocks, first_open // KEYS, end, bits_of(real)], axis=1)
    return GpuIntegers(fields, pages, listed, append, visible, shares, joins)


def divide_blocks(
    blocks: Int32[Array, "rows"], heads: int, workers: int, *, alike: bool = False
) -> tuple[Array, Array]:
    """Divides the blocks of all items, in order, among workers; fewer workers than there are, if so many blocks.

    Args:
      blocks: Of each row for each head, at least 1.
      heads: Of keys.
      workers: How many there are.
      alike: Whether all have as many as those that have most, but for the last ones, which have what is left; else the
        numbers differ by one at most.

    Returns:
      `workers` and `joins` of `Integers`.
    """
    rows = blocks.shape[0]
    until = heads * jnp.cumsum(blocks, dtype=jnp.int32)
    total, begin = until[-1], until - heads * blocks
    busy = jnp.minimum(total, workers)
    # floor(i · total / busy), without numbers beyond int32.
    each, more = (-(-total // workers), jnp.int32(0)) if alike else (total // busy, total % busy)
    cut = jnp.minimum(jnp.arange(workers + 1, dtype=jnp.int32), busy)
    cut = jnp.minimum(cut * each + jnp.minimum(cut, more), total)  # the first `more` workers have one more

    def find(unit):
        """The row, head and block of a unit."""
        # Every unit is compared with every row: a bisection is a loop of launches.
        row = jnp.searchsorted(until, unit, side="right", method="compare_all")
        row = jnp.minimum(row.astype(jnp.int32), rows - 1)
        inside = unit - begin[row]
        return row, inside // blocks[row], inside % blocks[row]

    count = cut[1:] - cut[:-1]
    (row, head, block), (last_row, last_head, _) = find(cut[:-1]), find(cut[1:] - 1)
    segments = jnp.where(count > 0, (last_row - row) * heads + last_head - head + 1, 0)
    shares = jnp.stack([jnp.where(count > 0, x, 0) for x in (row, head, block, count, segments)], axis=1)

    def worker_of(unit):
        large = more * (each + 1)  # units of the workers that have one more
        return jnp.where(unit < large, unit // (each + 1), more + (unit - large) // jnp.maximum(each, 1))

    # The item that each worker begins with, if another one began it.
    first = begin[row] + head * blocks[row]
    begun_by, ended_by = worker_of(first), worker_of(first + blocks[row] - 1)
    second = (count > 0) & (block > 0) & (begun_by == jnp.arange(workers, dtype=jnp.int32) - 1)
    joins = jnp.stack([jnp.where(second, row * heads + head, -1), begun_by, ended_by], axis=1)
    return shares, joins
