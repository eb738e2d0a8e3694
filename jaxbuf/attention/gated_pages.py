"""The pages of write-gated attention: one sliding list a slot of its latest tokens, and a list a slot and head of the
keys that were admitted before those.

The latest tokens of a slot, with their gates, lie on its local pages, at places which all layers share. Tokens before
the slot's frontier have left them: those that a head admitted were appended to its list, the others are gone. The
frontier is moved by launches, never by a commit: it stays max_pending tokens behind the window, so that neither a draft
nor a rollback of so many tokens takes back what was admitted.

Places on local pages are filled in any order. A place holds the position of its token, and is live where that lies
between the frontier and the committed tokens; so a rejected token, in a tree or not, leaves a place that the next
launch fills first, and nothing is moved. Pages without a live token are given back.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.paged import check_places
from jaxbuf.axes import Array, Bool, Float, Float32, Int32
from jaxbuf.memory.ownership import (
    NOWHERE,
    Ownership,
    init_ownership,
    is_shared,
    release_rows,
    share_rows,
    take_rows,
)
from jaxbuf.memory.sequences import put

WhenFull = Literal["rest", "evict", "raise"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedTable:
    """What all layers share.

    Attributes:
      table: The local pages of each slot, in any order; 0 where there is none.
      position: Of the token at each place of these pages; -1 where there was none.
      latest: The places of each slot's pending tokens; past all places where there are fewer. None without trees.
      frontier: Tokens before have left the local pages.
      threshold: Of each slot: a head admits the keys whose gates reach it.
      owned: How many pages each layer's list of the slot has, of those that it names, the first ones.
      surplus: Whether a list of the slot may have pages that it does not need.
      owners: Of the local pages. There are as many as all slots can ever need.
      admitted: Of each layer's pages of admitted keys: every array has the layers first.
      window, max_pending, page_size, capacity, when_full: As in `init_gated_table` (static).
      initial_threshold: Of slots that were emptied (static).
    """

    table: Int32[Array, "slots local_columns"]
    position: Int32[Array, "slots local_places"]
    latest: Int32[Array, "slots max_pending"] | None
    frontier: Int32[Array, "slots"]
    threshold: Float32[Array, "slots"]
    owned: Int32[Array, "layers slots kv_heads"]
    surplus: Bool[Array, "slots"]
    owners: Ownership
    admitted: Ownership
    window: int = dataclasses.field(metadata={"static": True})
    max_pending: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    capacity: int | None = dataclasses.field(metadata={"static": True})
    when_full: WhenFull = dataclasses.field(metadata={"static": True})
    initial_threshold: float = dataclasses.field(metadata={"static": True})

    @property
    def budget(self) -> int | None:
        """The pages of admitted keys that are each slot's own in a layer; None where slots share all of them."""
        if self.when_full == "rest":
            return None
        return (self.admitted.owners.shape[1] - 1) // (self.table.shape[0] - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Budget:
    """What a layer remembers where each slot has pages of its own, and keys leave when these are full.

    Attributes:
      dropped: How many keys each list admitted and had to let go.
      floor: The lowest gate of those that stayed, of all heads, the highest such number so far; 0 at first.
      pages: Of each slot, for all heads together: slot s has those from 1 + (s - 1) · pages on (static).
    """

    dropped: Int32[Array, "slots kv_heads"]
    floor: Float32[Array, "slots"]
    pages: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedKV:
    """One layer's memory. Pages 0 are null: they are never read and never written.

    Attributes:
      keys, values, gates: On local pages.
      admitted_keys, admitted_values, admitted_gates: On pages of one head each.
      number: Which of the layers with such a memory it is, from 0 on.
      lists: The pages of each slot's and head's admitted keys, in the order of their tokens: the first ones, as many as
        it owns. What stands behind is left from before.
      counts: How many keys each of them holds.
      budget: None where slots share the pages.
    """

    keys: Float[Array, "local_pages page_size kv_heads head_dim"]
    values: Float[Array, "local_pages page_size kv_heads head_dim"]
    gates: Float32[Array, "local_pages page_size kv_heads"]
    admitted_keys: Float[Array, "pages page_size head_dim"]
    admitted_values: Float[Array, "pages page_size head_dim"]
    admitted_gates: Float32[Array, "pages page_size"]
    number: Int32[Array, ""]
    lists: Int32[Array, "slots kv_heads max_pages"]
    counts: Int32[Array, "slots kv_heads"]
    budget: Budget | None

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


def local_columns(*, window: int, max_pending: int, page_size: int, trees: bool) -> int:
    """The most local pages of a slot.

    After a launch window + 2 · max_pending - 1 tokens are live at most. They lie on pages in a row, of which the first
    may be left in part and the last be filled in part. In a tree, up to max_pending - 1 places of earlier pages may be
    open, and as many old pages be kept by a place that was filled late.
    """
    gaps = max_pending - 1 if trees else 0
    return -(-(window + 2 * max_pending - 1 + gaps) // page_size) + 1 + gaps


def init_gated_table(
    *,
    slots: int,
    layers: int,
    kv_heads: int,
    window: int,
    max_pending: int,
    pages: int,
    page_size: int = 16,
    trees: bool = False,
    capacity: int | None = None,
    threshold: float = 0.0,
    when_full: WhenFull = "rest",
) -> GatedTable:
    """The table of empty slots 1 to `slots`, and of the null slot.

    Args:
      slots: Beside the null slot.
      layers, kv_heads: How many have such a memory, and the heads of keys and values of each.
      window: The latest tokens that a query sees whatever their gates are, itself among them.
      max_pending: Tokens of one launch.
      pages: Of admitted keys in each layer, beside the null page.
      page_size: Tokens of a page.
      trees: Whether launches have parents.
      capacity: The most tokens of a slot; None: as many as one head could keep if it had all pages.
      threshold: Of every slot, at first.
      when_full: What happens where pages do not suffice. "rest": slots share them, and a row that lacks some is not
        served. With the others each slot has an equal share of each layer's pages for good, and where the keys of its
        heads need more, those of the lowest gates leave: "evict" does no more, "raise" also raises the slot's threshold
        to the lowest gate that stayed, in whichever layer that is highest.

    Raises:
      ValueError: A size is below 1 or not a whole number; when_full is another; or pages are fewer than the slots and
        each has its own.
    """
    if when_full not in get_args(WhenFull):
        raise ValueError(f"when_full must be one of {', '.join(get_args(WhenFull))}, got {when_full!r}")
    check_sizes(
        slots=slots, kv_heads=kv_heads, window=window, max_pending=max_pending, pages=pages, page_size=page_size
    )
    if capacity is not None:
        check_sizes(capacity=capacity)
    if when_full != "rest":
        if pages < slots:
            raise ValueError(f"pages must be at least slots ({slots}) where each has its own, got {pages}")
        each = pages // slots
        if capacity is not None:
            each = min(each, kv_heads * -(-capacity // page_size))
        pages = slots * each
    columns = local_columns(window=window, max_pending=max_pending, page_size=page_size, trees=trees)
    count = slots + 1
    return GatedTable(
        table=jnp.zeros((count, columns), jnp.int32),
        position=jnp.full((count, columns * page_size), -1, jnp.int32),
        latest=jnp.full((count, max_pending), NOWHERE, jnp.int32) if trees else None,
        frontier=jnp.zeros(count, jnp.int32),
        threshold=jnp.full(count, threshold, jnp.float32),
        owned=jnp.zeros((layers, count, kv_heads), jnp.int32),
        surplus=jnp.zeros(count, bool),
        owners=init_ownership(1 + slots * columns),
        admitted=jax.tree.map(lambda x: jnp.stack([x] * layers), init_ownership(1 + pages)),
        window=window,
        max_pending=max_pending,
        page_size=page_size,
        capacity=capacity,
        when_full=when_full,
        initial_threshold=threshold,
    )


def init_gated_kv(table: GatedTable, *, head_dim: int, dtype: jnp.dtype, number: int = 0) -> GatedKV:
    """One layer's empty memory.

    Args:
      table: What the layers share.
      number: Which of them it is, from 0 on.
      head_dim: Of keys and values.
      dtype: Of keys and values.

    Raises:
      ValueError: A size is below 1 or not a whole number, or there are more tokens than int32 can number.
    """
    check_sizes(head_dim=head_dim)
    pages, local, size = table.admitted.owners.shape[1], table.owners.owners.shape[0], table.page_size
    check_places(pages, size)
    check_places(local, size)
    slots, kv_heads = table.table.shape[0], table.owned.shape[2]
    columns, budget = pages - 1, None
    if table.budget is not None:
        columns = table.budget
        dropped = jnp.zeros((slots, kv_heads), jnp.int32)
        budget = Budget(dropped, jnp.zeros(slots, jnp.float32), table.budget)
    elif table.capacity is not None:
        columns = min(columns, -(-table.capacity // size))
    near, far = (local, size, kv_heads, head_dim), (pages, size, head_dim)
    return GatedKV(
        keys=jnp.zeros(near, dtype),
        values=jnp.zeros(near, dtype),
        gates=jnp.zeros(near[:3], jnp.float32),
        admitted_keys=jnp.zeros(far, dtype),
        admitted_values=jnp.zeros(far, dtype),
        admitted_gates=jnp.zeros(far[:2], jnp.float32),
        number=jnp.asarray(number, jnp.int32),
        lists=jnp.zeros((slots, kv_heads, columns), jnp.int32),
        counts=jnp.zeros((slots, kv_heads), jnp.int32),
        budget=budget,
    )


class Moves(NamedTuple):
    """Which tokens a launch moves from the local pages, before it reads anything.

    Attributes:
      frontier: int32 [rows], once they have left.
      token: int32 [rows, max_pending], where they lie in the local pools: page · page_size + place in it.
      leaves: bool [rows, max_pending], which of the entries are tokens that leave.
    """

    frontier: Array
    token: Array
    leaves: Array


def find_moves(
    shared: GatedTable, slots: Int32[Array, "rows"], start: Int32[Array, "rows"], served: Bool[Array, "rows"]
) -> Moves:
    """The tokens that leave the local pages when a launch begins on slots that committed `start` tokens."""
    old = shared.frontier[slots]
    behind = jnp.maximum(old, start - shared.max_pending - shared.window + 1)
    frontier = jnp.where(served, behind, old)
    wanted = old[:, None] + jnp.arange(shared.max_pending, dtype=jnp.int32)[None]
    leaves = wanted < frontier[:, None]
    held = shared.position[slots]
    found = leaves[:, :, None] & (held[:, None] == wanted[:, :, None])
    place = jnp.argmax(found, axis=2).astype(jnp.int32)
    return Moves(frontier, tokens_at(shared.table[slots], place, shared.page_size), leaves)


def tokens_at(
    table: Int32[Array, "rows local_columns"], place: Int32[Array, "rows n"], page_size: int
) -> Int32[Array, "rows n"]:
    """Where places of each row's pages lie in the pools: page · page_size + place in the page."""
    page = jnp.take_along_axis(table, jnp.clip(place // page_size, 0, table.shape[1] - 1), axis=1)
    return page * page_size + place % page_size


class Places(NamedTuple):
    """Where a launch's tokens are written.

    Attributes:
      source: int32 [rows, n], which of the row's new tokens.
      token: int32 [rows, n], where it goes in the local pools; past them where there is none.
    """

    source: Array
    token: Array


def place_tokens(
    shared: GatedTable,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    position: Int32[Array, "#rows time"],
    frontier: Int32[Array, "rows"],
    *,
    commits: bool,
) -> tuple[Places, GatedTable]:
    """Gives the new tokens of a launch places on local pages, and gives back the pages that nobody needs after it.

    Args:
      shared: Before the launch.
      slots, start, lengths: Of the launch.
      position: Of its tokens.
      frontier: Of each row after the launch; new tokens before it get no place.
      commits: Whether the launch commits its tokens.

    Returns:
      The places, and what is shared: the pages as they are after the launch, which may write on what it has read.
    """
    size, time = shared.page_size, position.shape[1]
    table, held = shared.table[slots], shared.position[slots]
    rows, columns = table.shape
    real = (slots > 0)[:, None]
    live = (held >= frontier[:, None]) & (held < start[:, None])
    kept = jnp.any(live.reshape(rows, columns, size), axis=2) & (table > 0)
    owners = release_rows(shared.owners, jnp.where(real & ~kept, table, 0))
    table = jnp.where(kept, table, 0)
    first = jnp.maximum(frontier, start)
    count = jnp.maximum(start + lengths - first, 0)
    # Places of kept pages that hold nothing committed come first, then those of pages that are taken.
    writable = jnp.repeat(kept & ~is_shared(owners, table), size, axis=1)
    is_open = writable & ((held < 0) | (held >= start[:, None]))
    number = jnp.sum(is_open, axis=1, dtype=jnp.int32)
    more = -(-jnp.maximum(count - number, 0) // size)
    empty = real & (table == 0)
    wanted = empty & (jnp.cumsum(empty, axis=1, dtype=jnp.int32) <= more[:, None])
    taken, owners = take_rows(owners, wanted)
    table = jnp.where(wanted, taken, table)
    added = jnp.repeat(wanted, size, axis=1)
    index = jnp.where(is_open, jnp.cumsum(is_open, axis=1, dtype=jnp.int32) - 1, NOWHERE)
    index = jnp.where(added, number[:, None] + jnp.cumsum(added, axis=1, dtype=jnp.int32) - 1, index)
    # place[r, i]: of the i-th token that is kept.
    most = min(time, shared.window + shared.max_pending - 1) if time > shared.max_pending else time
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    everywhere = jnp.broadcast_to(jnp.arange(columns * size, dtype=jnp.int32)[None], held.shape)
    place = jnp.full((rows, most), NOWHERE, jnp.int32).at[row, index].set(everywhere, mode="drop")
    token = jnp.arange(most, dtype=jnp.int32)[None]
    written = token < count[:, None]
    place = jnp.where(written, place, NOWHERE)
    source = jnp.minimum(first[:, None] - start[:, None] + token, time - 1)
    held = jnp.where(jnp.repeat(kept, size, axis=1) & (held < start[:, None]), held, -1)
    new = jnp.take_along_axis(jnp.broadcast_to(position, (rows, time)), source, axis=1)
    held = held.at[row, place].set(new, mode="drop")
    shared = dataclasses.replace(
        shared, table=put(shared.table, slots, table), position=put(shared.position, slots, held), owners=owners
    )
    if shared.latest is not None:
        width = shared.max_pending
        latest = jnp.full_like(place, NOWHERE) if commits else place
        latest = latest[:, :width]
        latest = jnp.pad(latest, ((0, 0), (0, width - latest.shape[1])), constant_values=NOWHERE)
        shared = dataclasses.replace(shared, latest=put(shared.latest, slots, latest))
    at = jnp.where(written, tokens_at(table, jnp.where(written, place, 0), size), NOWHERE)
    return Places(source, at), shared


def forget_rejected(
    shared: GatedTable,
    slots: Int32[Array, "rows"],
    accepted: Int32[Array, "rows"],
    permutation: Int32[Array, "rows max_pending"] | None,
) -> GatedTable:
    """Opens the places of the tokens of a tree that a commit did not accept: two of one depth have one position."""
    if shared.latest is None:
        return shared
    latest = shared.latest[slots]
    if permutation is not None:
        latest = jnp.take_along_axis(latest, permutation, axis=1)
    node = jnp.arange(shared.max_pending, dtype=jnp.int32)[None]
    rejected = jnp.where(node < accepted[:, None], NOWHERE, latest)
    row = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    held = shared.position[slots].at[row, rejected].set(-1, mode="drop")
    return dataclasses.replace(_without_latest(shared, slots), position=put(shared.position, slots, held))


def fork_table(
    shared: GatedTable,
    source: Int32[Array, "rows"],
    target: Int32[Array, "rows"],
    committed: Int32[Array, "rows"],
) -> tuple[tuple[Int32[Array, "rows local_columns"], Int32[Array, "rows local_columns"]], GatedTable]:
    """Gives each target the local pages of its source: full ones are shared, those with an open place are copied.

    Returns:
      The pages that are read and written (past the pool where nothing is copied), and what is shared.
    """
    size = shared.page_size
    table, held = shared.table[source], shared.position[source]
    real = (target > 0)[:, None]
    held = jnp.where((held >= shared.frontier[source][:, None]) & (held < committed[:, None]), held, -1)
    older = (shared.position[source] >= 0) & (shared.position[source] < shared.frontier[source][:, None])
    by_page = held.reshape(*table.shape, size)
    alive = jnp.any(by_page >= 0, axis=2) & (table > 0) & real
    is_open = jnp.any((by_page < 0) & ~older.reshape(by_page.shape), axis=2)
    partial, whole = alive & is_open, jnp.where(alive & ~is_open, table, 0)
    owners = share_rows(shared.owners, whole)
    owners = release_rows(owners, jnp.where(real, shared.table[target], 0))
    taken, owners = take_rows(owners, partial)
    held = jnp.where(jnp.repeat(alive, size, axis=1), held, -1)
    shared = dataclasses.replace(
        _without_latest(shared, target),
        table=put(shared.table, target, jnp.where(partial, taken, whole)),
        position=put(shared.position, target, held),
        frontier=put(shared.frontier, target, shared.frontier[source]),
        threshold=put(shared.threshold, target, shared.threshold[source]),
        owners=owners,
    )
    return (table, jnp.where(partial, taken, NOWHERE)), shared


def reset_table(shared: GatedTable, slots: Int32[Array, "rows"]) -> GatedTable:
    """Empties slots, each there once, and gives their local pages back."""
    real = (slots > 0)[:, None]
    zero = jnp.zeros_like(slots)
    columns, places = shared.table.shape[1], shared.position.shape[1]
    return dataclasses.replace(
        _without_latest(shared, slots),
        owners=release_rows(shared.owners, jnp.where(real, shared.table[slots], 0)),
        table=put(shared.table, slots, jnp.zeros((slots.shape[0], columns), jnp.int32)),
        position=put(shared.position, slots, jnp.full((slots.shape[0], places), -1, jnp.int32)),
        frontier=put(shared.frontier, slots, zero),
        threshold=put(shared.threshold, slots, jnp.full(slots.shape, shared.initial_threshold, jnp.float32)),
        owned=put_rows(shared.owned, slots, jnp.zeros_like(shared.owned[:, slots])),
        surplus=put(shared.surplus, slots, jnp.zeros_like(slots, bool)),
    )


def put_rows(
    owned: Int32[Array, "layers slots kv_heads"], slots: Int32[Array, "rows"], new: Int32[Array, "layers rows kv_heads"]
) -> Int32[Array, "layers slots kv_heads"]:
    """Writes per-row values of every layer to their slots; the null slot's are dropped."""
    return owned.at[:, jnp.where(slots > 0, slots, NOWHERE)].set(new, mode="drop")


def _without_latest(shared: GatedTable, slots: Int32[Array, "rows"]) -> GatedTable:
    """No pending token of these slots has a place any more."""
    if shared.latest is None:
        return shared
    none = jnp.full((slots.shape[0], shared.latest.shape[1]), NOWHERE, jnp.int32)
    return dataclasses.replace(shared, latest=put(shared.latest, slots, none))
