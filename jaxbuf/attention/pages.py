"""The integers of the softmax layers' pages: where the next tokens go, who owns which page, what a fork copies.

A committed token may lie at any place of its slot, because attention does not depend on the order of its keys. So when
the accepted path of a tree leaves gaps, no token is moved: later tokens fill the gaps. Each slot keeps the list of the
max_pending places that its next tokens will take; every other place before the list's last holds a committed token.

A slot out of range, or in two rows of a function that changes a slot, is an error where the values are known. Under jit
the first row of a slot counts, and its later rows and those of a slot that does not exist are rows of the null slot.
"""

import jax.numpy as jnp

from jaxbuf.arguments import checked_fork, checked_slots, distinct_slots, first_rows
from jaxbuf.axes import Array, Bool, Int, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.ownership import (
    NOWHERE,
    Ownership,
    clear_flag,
    flag_missing,
    is_shared,
    raise_missing,
    release_rows,
    share_rows,
    short_of,
    take_rows,
)


def init_order(*, slots: int, max_pending: int) -> Int32[Array, "{slots}+1 {max_pending}"]:
    """Returns the lists of empty slots: entry i is the place of the i-th next token.

    They rise; a slot with `start` committed tokens has the place start + i in entry i, unless a tree left gaps.
    """
    return jnp.broadcast_to(jnp.arange(max_pending, dtype=jnp.int32)[None], (slots + 1, max_pending))


def places(
    order: Int32[Array, "slots max_pending"] | None, slots: Int32[Array, "rows"], start: Int32[Array, "rows"], time: int
) -> Int32[Array, "rows {time}"]:
    """Where the next tokens of each slot lie in its pages.

    Args:
      order: From `init_order`; None: token p lies at place p.
      slots, start: The physical slot of each row and its committed tokens.
      time: How many tokens.
    """
    offset = jnp.arange(time, dtype=jnp.int32)[None]
    ahead = start[:, None] + offset
    if order is None:
        return ahead
    listed = order.shape[1]
    inside = jnp.broadcast_to(jnp.minimum(offset, listed - 1), ahead.shape)
    return jnp.where(offset < listed, jnp.take_along_axis(order[slots], inside, axis=1), ahead)


def advance_order(
    order: Int32[Array, "slots max_pending"],
    slots: Int[Array, "rows"],
    start: Int32[Array, "rows"],
    accepted: Int32[Array, "rows"],
    permutation: Int32[Array, "rows max_pending"] | None = None,
) -> Int32[Array, "slots max_pending"]:
    """The lists after the first `accepted` of the next tokens were committed.

    Args:
      order: From `init_order`.
      slots, start, accepted: Of each row; `start` counts what was committed before.
      permutation: The accepted tokens first and the others in their order; None: the accepted tokens are already first.

    Raises:
      ValueError: slots do not fit, or (where they are known) one is out of range or repeated.
    """
    slots = distinct_slots(slots, order.shape[0])
    rows, index = order[slots], jnp.arange(order.shape[1], dtype=jnp.int32)[None]
    if permutation is not None:
        rows = jnp.take_along_axis(rows, permutation, axis=1)
    ahead = index + accepted[:, None]
    kept = jnp.take_along_axis(rows, jnp.minimum(ahead, order.shape[1] - 1), axis=1)
    new = jnp.where(ahead < order.shape[1], kept, start[:, None] + ahead)
    return order.at[jnp.where(slots > 0, slots, NOWHERE)].set(new, mode="drop")


def touched_pages(
    place: Int32[Array, "rows time"],
    *,
    slots: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    pages: int,
    page_size: int,
) -> Bool[Array, "rows {pages}"]:
    """On which of its pages each row's next tokens lie.

    Args:
      place: From `places`.
      slots, lengths: The slot of each row, and how many of its tokens are real.
      pages: The most of a slot.
      page_size: Tokens of a page.
    """
    rows, time = place.shape
    real = (jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None]) & (slots > 0)[:, None]
    page = jnp.where(real & (place >= 0), place // page_size, NOWHERE)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((rows, pages), bool).at[row, page].set(True, mode="drop")


def claim_pages(
    owners: Ownership,
    table: Int32[Array, "slots max_pages"],
    slots: Int32[Array, "rows"],
    touched: Bool[Array, "rows max_pages"],
) -> Claim:
    """The pages that each row needs for its next tokens, beside those that it has for itself.

    Args:
      owners: Who owns them.
      table: The pages of each slot.
      slots: Of each row.
      touched: From `touched_pages`.
    """
    return Claim(jnp.sum(_wanted(owners, table[slots], touched), axis=1, dtype=jnp.int32), owners.left)


def take_pages(
    owners: Ownership,
    table: Int32[Array, "slots max_pages"],
    slots: Int32[Array, "rows"],
    touched: Bool[Array, "rows max_pages"],
) -> tuple[Int32[Array, "slots max_pages"], Ownership]:
    """The table and the pages after each row took what it needs, see `claim_pages`; enough are free."""
    old = table[slots]
    wanted = _wanted(owners, old, touched)
    taken, owners = take_rows(owners, wanted)
    owners = release_rows(owners, jnp.where(wanted, old, 0))
    return _put(table, slots, jnp.where(wanted, taken, old)), owners


def shared_tokens(
    owners: Ownership, table: Int32[Array, "slots max_pages"], slots: Int32[Array, "rows"], page_size: int
) -> Int32[Array, "rows"]:
    """The first tokens of each slot up to the end of the last page that another slot owns, too.

    Args:
      owners: Who owns the pages.
      table: Of slots whose token p lies at place p: without trees.
      slots: Of each row.
      page_size: Tokens of a page.
    """
    end = page_size * jnp.arange(1, table.shape[1] + 1, dtype=jnp.int32)[None]
    return jnp.max(jnp.where(is_shared(owners, table[slots]), end, 0), axis=1)


def note_missing(owners: Ownership, missing: Int32[Array, ""]) -> Ownership:
    """The pages with a note of how many were missing.

    Raises:
      PoolExhausted: Some were, where that is known.
    """
    raise_missing(pages=flag_missing(clear_flag(owners), missing))
    return flag_missing(owners, missing)


def _wanted(owners: Ownership, old: Array, touched: Array) -> Array:
    return touched & ((old == 0) | is_shared(owners, old))


def release_pages(
    pages: Ownership, table: Int32[Array, "slots max_pages"], slots: Int[Array, "rows"]
) -> tuple[Int32[Array, "slots max_pages"], Ownership]:
    """The table and the pages after `slots` gave back all of theirs; one that is there twice, once.

    Raises:
      ValueError: slots do not fit, or (where they are known) one is out of range.
    """
    slots = first_rows(checked_slots(slots, table.shape[0]))
    old = jnp.where((slots > 0)[:, None], table[slots], 0)
    return _put(table, slots, jnp.zeros_like(old)), release_rows(pages, old)


def claim_fork(
    owners: Ownership,
    table: Int32[Array, "slots max_pages"],
    order: Int32[Array, "slots max_pending"] | None,
    *,
    source: Int32[Array, "rows"],
    target: Int32[Array, "rows"],
    length: Int32[Array, "rows"],
    page_size: int,
) -> Claim:
    """The pages that a fork takes for each row; arguments as in `fork_pages`."""
    alive = _alive(table, order, source, target, length, page_size)
    return Claim(jnp.sum((alive > 0) & (alive < page_size), axis=1, dtype=jnp.int32), owners.left)


def fork_pages(
    pages: Ownership | None,
    table: Int32[Array, "slots max_pages"],
    order: Int32[Array, "slots max_pending"] | None,
    *,
    source: Int[Array, "rows"],
    target: Int[Array, "rows"],
    length: Int32[Array, "rows"],
    page_size: int,
) -> tuple[
    Bool[Array, ""],
    tuple[Int32[Array, "rows n"], Int32[Array, "rows n"]],
    Int32[Array, "slots max_pages"],
    Ownership | None,
]:
    """Makes the tables of the target slots hold what the sources committed, and decides which pages are copied for it.

    Full pages are shared; the others, to which both will append, are copied to free ones, so that no launch has to copy
    later. Without `pages` every slot has its own, and all are copied to the target's.

    Args:
      pages: Who owns them; None: every slot has its own for good.
      table: The pages of each slot.
      order: From `init_order`, or None.
      source, target: A row with a 0, or whose source is its target, is left out. No target twice; under jit the first
        row of a target counts.
      length: The tokens that the source committed.
      page_size: Tokens of a page.

    Returns:
      served: False where too few pages are free. Then nothing has changed but the note of what is missing.
      copies: Pages read and written (past the pool where nothing is copied).
      table, pages: As they are now.

    Raises:
      ValueError: The two do not fit each other, or (where they are known) a slot is out of range or a target repeated.
      PoolExhausted: Pages do not suffice, where that is known.
    """
    source, target = checked_fork(source, target, table.shape[0])
    real, theirs = (target > 0)[:, None], table[source]
    alive = _alive(table, order, source, target, length, page_size)
    if pages is None:
        mine = table[target]
        written = jnp.where((alive > 0) & (mine > 0), mine, NOWHERE)
        return jnp.asarray(True), (theirs, written), table, None
    partial = (alive > 0) & (alive < page_size)
    whole = jnp.where(alive == page_size, theirs, 0)
    missing = short_of(pages, partial)
    pages, served = note_missing(pages, missing), missing == 0
    partial = partial & served
    pages = share_rows(pages, jnp.where(served, whole, 0))
    taken, pages = take_rows(pages, partial)
    pages = release_rows(pages, jnp.where(real & served, table[target], 0))
    new = jnp.where(served, jnp.where(partial, taken, whole), table[target])
    # At most one page for each place that is not taken yet, and the one that the committed tokens end in.
    count = min(table.shape[1], 1 + (0 if order is None else order.shape[1]))
    first = jnp.argsort(~partial, axis=1)[:, :count]
    written = jnp.where(jnp.take_along_axis(partial, first, axis=1), jnp.take_along_axis(new, first, axis=1), NOWHERE)
    return served, (jnp.take_along_axis(theirs, first, axis=1), written), _put(table, target, new), pages


def _put(table: Array, slots: Array, new: Array) -> Array:
    return table.at[jnp.where(slots > 0, slots, NOWHERE)].set(new, mode="drop")


def _alive(table: Array, order: Array | None, source: Array, target: Array, length: Array, page_size: int) -> Array:
    """int32 [rows, max_pages]: how many committed tokens are on each page of the sources whose target is not 0."""
    index = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    listed = length[:, None] if order is None else order[source]
    end = listed if order is None else length[:, None] + order.shape[1]
    free = jnp.zeros((source.shape[0], table.shape[1]), jnp.int32)  # places of each page that hold nothing committed
    row = jnp.arange(source.shape[0], dtype=jnp.int32)[:, None]
    if order is not None:
        free = free.at[row, listed // page_size].add(1, mode="drop")
    alive = jnp.clip(end - index * page_size, 0, page_size) - free
    return jnp.where((target > 0)[:, None] & (table[source] > 0), alive, 0)
