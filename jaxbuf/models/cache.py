"""The memory of a whole model: one cursor and one table of pages, and the arrays of every layer."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_sizes, checked_fork, checked_slots, distinct_slots, first_rows
from jaxbuf.attention import paged
from jaxbuf.attention.paged import PagedKV, init_table
from jaxbuf.attention.pages import (
    advance_order,
    fork_pages,
    init_order,
    places,
    release_pages,
    reserve_pages,
)
from jaxbuf.memory.ownership import NOWHERE, Ownership, clear_flag, init_ownership, raise_missing
from jaxbuf.models.config import RECURRENCE, ModelConfig
from jaxbuf.recurrence import Cursor, buffered
from jaxbuf.recurrence.convolution import init_ring_order
from jaxbuf.recurrence.cursor import checked_limits
from jaxbuf.recurrence.recurrent_plan import RecurrentCache
from jaxbuf.recurrence.shared_rows import raise_missing_rows
from jaxbuf.recurrence.spec import check_rows
from jaxbuf.recurrence.traffic import ring_entries
from jaxbuf.recurrence.tree import path_first, permute

type Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the memories of all mixers are made from; see `init_cache`.

    Attributes:
      cursor: The integers of the recurrent layers, and with them slots, rings and max_pending; None without such
        layers.
      pages, page_size: Pages of a softmax layer, the null page among them, and their tokens.
      dtype: Of keys and values and of the convolution's inputs.
      entry_dtype, state_dtype: Of the recurrence's entries and states.
    """

    cursor: Cursor | None
    pages: int
    page_size: int
    dtype: jnp.dtype
    entry_dtype: jnp.dtype
    state_dtype: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Memory of a whole model: donate it to the jitted function that changes it.

    Attributes:
      cursor: Shared by all layers; `cursor.position` (int32 [slots + 1]) counts each slot's committed tokens.
      table: int32 [slots + 1, max_pages], the pages of each slot, shared by all softmax layers; 0 where there is none.
      layers: The memory of each mixer, layer after layer: a RecurrentCache or a PagedKV.
      page_order: int32 [slots + 1, max_pending], where the next tokens of each slot lie in its pages; None without
        trees.
      ring_order: int32 [slots + 1, ring], the rows of the convolutions' rings; None without trees or convolutions.
      pages: Who owns the pages that slots take when they need them; None: every slot has its own for good.
    """

    cursor: Cursor
    table: Array
    layers: tuple[RecurrentCache | PagedKV, ...]
    page_order: Array | None = None
    ring_order: Array | None = None
    pages: Ownership | None = None


def init_cache(
    config: ModelConfig,
    *,
    slots: int,
    capacity: int,
    limit: int | Array = 16,
    max_pending: int = 8,
    block_size: int = 8,
    page_size: int = 16,
    trees: bool = False,
    states: int | None = None,
    blocks: int | None = None,
    pages: int | None = None,
    dtype: jnp.dtype = jnp.float32,
    entry_dtype: jnp.dtype | None = None,
    state_dtype: object = jnp.float32,
) -> Cache:
    """An empty cache. Requests have the physical slots 1 to `slots`; slot 0 is null.

    Args:
      config: The model's.
      slots: Requests at once.
      capacity: Tokens that a softmax layer holds for each, rounded up to whole pages (with trees, after adding the
        max_pending - 1 places that a tree may leave open).
      limit: As in `buffered.init`, of any size: a slot's entries are never more than its tokens, so that a limit above
        capacity + max_pending is that number, and the ring is no longer than that needs.
      max_pending, block_size: Of the buffered recurrence, see `buffered.init`.
      page_size: Tokens of one page of the softmax layers.
      trees: Whether `extend` takes `parents`: keeps the index lists that trees need in the softmax layers and the
        convolutions.
      states, blocks, pages: How many checkpoint rows, blocks and pages the slots take from when they need one, and
        share after a `fork`, see `buffered.init`. With one of them given, the others' defaults are what all slots could
        use at once. None for all: every slot has its own for good, nothing can run out, and a fork copies.
      dtype: Of keys and values and of the convolution's inputs: the compute dtype.
      entry_dtype: Of the recurrence's buffered entries; None: dtype.
      state_dtype: Of the recurrent states: a dtype, "split" or "split8", see `init_pool`.

    Raises:
      ValueError: A size below 1 or not a whole number, or as in `buffered.init`.
    """
    check_sizes(slots=slots, capacity=capacity, max_pending=max_pending, page_size=page_size)
    given = {"states": states, "blocks": blocks, "pages": pages}
    check_sizes(**{name: count for name, count in given.items() if count is not None})
    limits = checked_limits(limit, slots, longest=capacity + max_pending)
    table = init_table(slots=slots, capacity=capacity + (max_pending - 1 if trees else 0), page_size=page_size)
    own, ownership = slots * table.shape[1], None
    if any(count is not None for count in (states, blocks, pages)):
        states = slots + slots // 2 if states is None else states
        spare = slots // 2 * (-(-max_pending // page_size) + 1)  # what is shared until its owners have their own
        ownership = init_ownership(1 + (own + spare if pages is None else pages))
        own, table = ownership.owners.shape[0] - 1, jnp.zeros_like(table)
    sizes = {"limit": limits, "max_pending": max_pending, "block_size": block_size}
    cursor = buffered.init_cursor(slots=slots, **sizes, states=states, blocks=blocks)
    entry_dtype = dtype if entry_dtype is None else entry_dtype
    layers = Sizes(cursor, 1 + own, page_size, dtype, entry_dtype, state_dtype)
    widths = {mixer.width for mixer in config.mixers if mixer.kind == RECURRENCE}
    if len(widths) > 1:
        raise ValueError(f"the convolutions of all layers must have as many taps, got {sorted(widths)}")
    lists = {"slots": slots, "max_pending": max_pending}
    return Cache(
        cursor=cursor,
        table=table,
        layers=tuple(mixer.memory(layers) for mixer in config.mixers),
        page_order=init_order(**lists) if trees else None,
        ring_order=init_ring_order(width=widths.pop(), **lists) if trees and widths else None,
        pages=ownership,
    )


def forked_sizes(
    *,
    slots: int,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    limit: int = 16,
    max_pending: int = 8,
    block_size: int = 8,
    page_size: int = 16,
    trees: bool = False,
    again: bool = False,
) -> dict[str, int]:
    """The `states`, `blocks` and `pages` with which `init_cache` makes a memory that can't run out, for prompts that
    are read once, with keep=0, and forked to all slots.

    Args:
      slots: Of all prompts together.
      prompts: How many are read, each into one of the slots.
      prompt_tokens, new_tokens: The most that a prompt has, and the most that each slot adds to it.
      limit, max_pending, block_size, page_size, trees: As `init_cache` is given them.
      again: Whether slots are forked later on, too, all of them at once at worst (beams).

    Raises:
      ValueError: A size below 1 (new_tokens below 0) or not a whole number.
    """
    check_sizes(slots=slots, prompts=prompts, prompt_tokens=prompt_tokens, page_size=page_size)
    check_sizes(new_tokens=new_tokens, least=0)
    longest = prompt_tokens + new_tokens + max_pending
    limits = checked_limits(limit, slots, longest=longest)
    width = ring_entries(int(limits.max()), max_pending, block_size) // block_size
    # Prefill leaves one checkpoint a prompt. A slot's first fold needs a row of its own, and where slots fold together
    # what they share is given back only after it: then each of their groups, of two slots or more, has one row more.
    groups = slots // 2 if again else min(prompts, slots // 2)
    # Prefill leaves no entry, so a ring fills with its own blocks. A fork copies the two that are partly alive, one at
    # each end, before it gives back what the target had.
    blocks = slots * (width + (min(width, 2) if again else 0))
    # Full pages of a prompt are shared. The page that it ends in, and those after it, are each slot's own: most of them
    # where `rest` or more of its tokens are on that last page, the most pages in all if it is as long as can be, too.
    added = new_tokens + (max_pending - 1 if trees else 0)
    own, whole = -(-(page_size - 1 + added) // page_size), -(-(prompt_tokens + added) // page_size)
    rest = page_size * (own - 1) - added + 1
    shared = max(prompt_tokens - rest, 0) // page_size
    # A later fork copies the last page of each slot before it gives back what the target had.
    pages = min(prompts * shared + slots * own, slots * whole) + (slots if again else 0)
    return {"states": slots + groups, "blocks": blocks, "pages": pages}


def commit(cache: Cache, accepted: Array, *, slots: Array | None = None, path: Array | None = None) -> Cache:
    """Makes the first `accepted` (int32 [rows]) pending tokens of each slot real; only integers move.

    Args:
      cache: After `extend`.
      accepted: int32 [rows], how many, in [0, pending].
      slots: int32 [rows], physical slots, none but 0 twice (under jit the first row of a slot counts); None: all in
        order.
      path: int32 [rows, n], for a tree: the accepted nodes from the root to a leaf, of which the first `accepted`
        count.

    Raises:
      ValueError: `accepted`, `path` or a slot is out of range, or a slot is repeated, where that is known; or a path,
        and the cache has no trees.
    """
    slots = all_slots(cache) if slots is None else distinct_slots(slots, cache.table.shape[0])
    if cache.page_order is None:
        if path is not None:
            raise ValueError("path needs a cache made with trees=True, got one without")
        return dataclasses.replace(cache, cursor=buffered.commit_cursor(cache.cursor, accepted, slots))
    start = cache.cursor.position[slots]
    cursor = buffered.commit_cursor(cache.cursor, accepted, slots, path)
    accepted, ring_order, permutation = cursor.position[slots] - start, cache.ring_order, None
    if path is not None:
        permutation = path_first(jnp.asarray(path), accepted, cursor.max_pending)
        ring_order = None if ring_order is None else permute(ring_order, slots, start, permutation)
    page_order = advance_order(cache.page_order, slots, start, accepted, permutation)
    return dataclasses.replace(cache, cursor=cursor, ring_order=ring_order, page_order=page_order)


def fork(cache: Cache, source: Array, target: Array) -> Cache:
    """Makes each target slot hold what its source committed (beams, several samples of one prompt).

    Checkpoints, full blocks and full pages are shared, if the cache was made for it (see `init_cache`); what both slots
    will write to is copied: partly filled blocks and pages, and the convolutions' rings.

    Args:
      cache: Without pending tokens in the targets that are still wanted: they are dropped.
      source, target: int32 [rows], or one number, as in `buffered.fork`.

    Raises:
      ValueError: The two do not fit, or (where that is known) a slot is out of range or a target is repeated.
      PoolExhausted: Blocks or pages ran out, where that is known; inside jit nothing is changed but a flag that
        `raise_exhausted` finds.
    """
    source, target = jnp.atleast_1d(jnp.asarray(source)), jnp.atleast_1d(jnp.asarray(target))
    if source.shape == (1,):
        source = jnp.broadcast_to(source, target.shape)
    source, target = checked_fork(source, target, cache.table.shape[0])
    kv = next((layer for layer in cache.layers if isinstance(layer, PagedKV)), None)
    table, pages, served = cache.table, cache.pages, jnp.asarray(True)
    nothing = jnp.zeros((source.shape[0], 0), jnp.int32)
    copied = nothing, nothing
    if kv is not None:
        served, copied, table, pages = fork_pages(
            cache.pages,
            cache.table,
            cache.page_order,
            source=source,
            target=target,
            length=cache.cursor.position[source],
            page_size=kv.keys.shape[1],
        )
    copies, cursor = buffered.fork_cursor(cache.cursor, source, jnp.where(served, target, 0))
    if cursor.sharing is not None:
        there = (cursor.sharing.states.lacking == 0) & (cursor.sharing.blocks.lacking == 0)
        served = served & there
        if pages is not None and cache.pages is not None:
            table = jnp.where(there, table, cache.table)
            pages = jax.tree.map(lambda new, old: jnp.where(there, new, old), pages, cache.pages)
            copied = copied[0], jnp.where(there, copied[1], NOWHERE)
    target = jnp.where(served & (target > 0), target, NOWHERE)

    def fork_slots(x):
        return x.at[target].set(x[source], mode="drop")

    def fork_layer(layer):
        if isinstance(layer, PagedKV):
            return paged.fork(layer, copied)
        return RecurrentCache(buffered.fork_pool(layer.pool, copies), fork_slots(layer.ring))

    return Cache(
        cursor=cursor,
        table=table,
        layers=tuple(fork_layer(layer) for layer in cache.layers),
        page_order=None if cache.page_order is None else fork_slots(cache.page_order),
        ring_order=None if cache.ring_order is None else fork_slots(cache.ring_order),
        pages=pages,
    )


def reset(cache: Cache, slots: Array) -> Cache:
    """Empties slots (int32 [rows]) for their next owner; only integers move. Shared rows, blocks and pages are given
    back, and launches that rested because some were lacking are served again. A slot that is there several times is
    emptied once.

    Raises:
      ValueError: A slot is out of range, where that is known.
    """
    slots = first_rows(checked_slots(slots, cache.table.shape[0]))
    table, pages, order = cache.table, cache.pages, cache.page_order
    cursor = buffered.reset_cursor(cache.cursor, slots)
    if pages is not None:
        table, pages = release_pages(pages, table, slots)
        pages = clear_flag(pages)
    if order is not None:
        fresh = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=jnp.int32)[None], (slots.shape[0], order.shape[1]))
        order = order.at[jnp.where(slots > 0, slots, NOWHERE)].set(fresh, mode="drop")
    return dataclasses.replace(cache, cursor=cursor, table=table, pages=pages, page_order=order)


def raise_exhausted(cache: Cache) -> None:
    """Raises if checkpoint rows, blocks or pages ran out in an earlier launch; see `buffered.raise_exhausted`.

    Raises:
      PoolExhausted: Says which, how many there are, how many were missing, and what to raise.
    """
    raise_missing_rows(cache.cursor.sharing)
    raise_missing(pages=cache.pages)


def take_pages(cache: Cache, slots: Array, lengths: Array, time: int) -> tuple[Cache, Array]:
    """The cache with pages for the next tokens of each row, and the rows' lengths: zeros if pages ran out.

    Args:
      cache: Of the model.
      slots: int32 [rows], no slot but 0 twice (under jit the first row of a slot counts).
      lengths: int32 [rows], real tokens of each row.
      time: The most tokens of a row.

    Raises:
      ValueError: slots or lengths do not fit, or (where that is known) a slot is out of range or repeated.
      PoolExhausted: Pages ran out, where that is known.
    """
    rows, lengths = checked_slots(slots, cache.table.shape[0], once=True), jnp.asarray(lengths)
    check_rows("lengths", lengths, rows.shape[0])
    kv = next((layer for layer in cache.layers if isinstance(layer, PagedKV)), None)
    if cache.pages is None or kv is None:
        return cache, lengths
    place = places(cache.page_order, rows, cache.cursor.position[rows], time)
    served, table, pages = reserve_pages(
        cache.pages, cache.table, place, slots=slots, lengths=lengths, page_size=kv.keys.shape[1]
    )
    return dataclasses.replace(cache, table=table, pages=pages), jnp.where(served, lengths, 0)


def all_slots(cache: Cache) -> Array:
    """int32 [slots]: every physical slot but the null one, in order."""
    # An array of numpy is known under jit, too: no decoding step has to look for slots that are there twice.
    return cast(Array, np.arange(1, cache.cursor.length.shape[0], dtype=np.int32))
