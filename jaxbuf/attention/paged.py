"""A paged key/value cache for softmax layers, and attention over it.

Keys and values lie in a pool of pages, one pool a layer; a table, shared by all layers, says which pages hold a slot's
tokens. Nothing here assumes an order of the pages or that a page has one owner: two slots share a page when both of
their rows of the table name it.

The caller counts the committed tokens of each slot. It rejects drafts by passing a smaller `start` next time; what lies
past it is dead. Dead keys and values are selected away, not multiplied by zero, so a NaN left there reaches nobody.

Trees of tokens, shared pages and forks are integers too: see `pages.py`.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_sizes, checked_slots
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import OnlineSoftmax, check_heads, in_blocks, split_heads
from jaxbuf.attention.pages import places
from jaxbuf.axes import Array, Bool, Float, Int, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.pallas.dispatch import ask
from jaxbuf.target import Target

BLOCK = 128  # tokens whose scores exist at once: of the keys (in whole pages), and of the queries


class TokenPages(Protocol):
    """Pages of a layer's tokens: whatever is kept of a token is read as a key and a value.

    Attributes:
      page_size: Tokens of a page.
      kv_heads, key_dim, value_dim: Heads of keys and values, and the numbers of a head's key and of its value.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    def pages(self, page: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """The keys and values [rows, n, page_size, kv_heads, key_dim or value_dim] of some pages."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer.

    Attributes:
      keys, values: Page 0 is null, it is never read and never written. The token's axis is not one of the two that
        hardware tiles, so that a single token can be written in place.
    """

    keys: Float[Array, "pages page_size kv_heads head_dim"]
    values: Float[Array, "pages page_size kv_heads head_dim"]

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def key_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    def pages(self, page: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """As in `TokenPages`."""
        return self.keys[page], self.values[page]

    def tokens(self, index: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """As in `jaxbuf.attention.chunk.Tokens`."""
        return as_tokens(self.keys)[index], as_tokens(self.values)[index]


def init_table(*, slots: int, capacity: int, page_size: int = 16) -> Int32[Array, "{slots}+1 max_pages"]:
    """Returns the table of slots that each own the pages for `capacity` tokens.

    Entry i of a row is the page of the slot's positions i · page_size and on; 0 where there is none. Row 0 is the null
    slot, which has no page. The capacity is rounded up to whole pages; the pool needs 1 + slots · max_pages pages.

    Raises:
      ValueError: A size below 1 or not a whole number, or more tokens than int32 can number.
    """
    check_sizes(slots=slots, capacity=capacity, page_size=page_size)
    check_places(1 + slots * -(-capacity // page_size), page_size)
    pages = -(-capacity // page_size)
    table = 1 + np.arange(-1, slots, dtype=np.int32)[:, None] * pages + np.arange(pages, dtype=np.int32)
    return jnp.asarray(np.maximum(table, 0))  # the null slot's row would be below 1


def init_kv(*, pages: int, kv_heads: int, head_dim: int, dtype: jnp.dtype, page_size: int = 16) -> PagedKV:
    """Returns an empty pool of `pages` pages, the null page among them, each of `page_size` tokens.

    A token has `kv_heads` keys and values of `head_dim` numbers, which have the dtype that is given.

    Raises:
      ValueError: A size below 1 or not a whole number, or more tokens than int32 can number.
    """
    check_sizes(pages=pages, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    check_places(pages, page_size)
    shape = (pages, page_size, kv_heads, head_dim)
    return PagedKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(
    kv: PagedKV,
    table: Int32[Array, "slots max_pages"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    *,
    slots: Int[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots max_pending"] | None = None,
    implementation: str = "auto",
    target: Target | str | None = None,
) -> PagedKV:
    """Writes the keys and values of positions start .. start + lengths - 1 of each row's slot.

    Args:
      kv: The layer's pool; nothing else in it changes.
      table: What falls on a null page, or past the table's end, is dropped.
      k, v: Rounded to the pool's dtype.
      slots: Physical slots; the null slot 0 writes nothing. No other slot twice: under jit it is not specified which
        row's tokens the slot's pages then hold, and no other slot's change.
      start: The committed tokens of each row's slot.
      lengths: How many of the time positions are real.
      order: The places of each slot's next tokens, from `pages.init_order`; None: position p lies at place p.
      implementation: "auto" or "xla": there is no kernel yet.
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Raises:
      ValueError: A shape or dtype does not fit, or no such implementation or target; or, where slots are known, one is
        out of range or repeated. Under jit a slot out of range is a null one.
    """
    ask("append", implementation, target, (k,))
    rows, time = k.shape[:2]
    _check_token(kv, k.shape[2:])
    check_integers(rows, slots=slots, start=start, lengths=lengths)
    slots = checked_slots(slots, table.shape[0], once=True)
    at = token_places(table, kv.page_size, time, slots=slots, start=start, lengths=lengths, order=order)
    return PagedKV(write_tokens(kv.keys, at, k), write_tokens(kv.values, at, v))


def token_places(
    table: Int32[Array, "slots max_pages"],
    page_size: int,
    time: int,
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots max_pending"] | None = None,
) -> Int32[Array, "rows {time}"]:
    """Where a launch's new tokens lie in a pool: page · page_size + place, past every pool where they lie nowhere.

    Args:
      table, slots, start, lengths, order: As in `append`; the slots are checked.
      page_size: Tokens of a page.
      time: Tokens of each row.
    """
    offsets = jnp.arange(time, dtype=jnp.int32)[None]
    positions = places(order, slots, start, time)
    index = jnp.clip(positions // page_size, 0, table.shape[1] - 1)
    page = jnp.where((slots > 0)[:, None], table[slots[:, None], index], 0)
    inside = (positions >= 0) & (positions < table.shape[1] * page_size)
    real = (offsets < lengths[:, None]) & inside & (page > 0)
    return jnp.where(real, page * page_size + positions % page_size, NOWHERE)


def write_tokens(
    pool: Float[Array, "pages page_size *n"], at: Int32[Array, "rows time"], new: Float[Array, "rows time *n"]
) -> Float[Array, "pages page_size *n"]:
    """The pool with new tokens, rounded to its dtype, at places from `token_places`."""
    size = pool.shape[1]
    return pool.at[at // size, at % size].set(new.astype(pool.dtype), mode="drop")


def as_tokens(pool: Float[Array, "pages page_size *n"]) -> Float[Array, "_ *n"]:
    """A pool as the list of its tokens."""
    return pool.reshape(-1, *pool.shape[2:])


def fork[Layer](layer: Layer, copies: tuple[Int32[Array, "rows n"], Int32[Array, "rows n"]]) -> Layer:
    """One layer's part of a fork: pages copies[0] of each of its arrays are copied to copies[1] (past the pool: not),
    all read before any is written."""
    read, written = copies
    return jax.tree.map(lambda x: x.at[written].set(x[read], mode="drop"), layer)


def attend(
    q: Float[Array, "rows time heads head_dim"],
    kv: TokenPages,
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"] | None = None,
    order: Int32[Array, "slots max_pending"] | None = None,
    ancestors: Bool[Array, "rows time time"] | None = None,
    read: Bool[Array, "rows kv_heads time max_pages"] | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    target: Target | str | None = None,
) -> Float[Array, "rows time heads value_dim"]:
    """Softmax attention of each row's queries over its slot's tokens up to and including the query's own.

    The pages are read in blocks, as many as the longest row needs, and summed by an online softmax: the work follows
    the tokens that are there, the memory is linear in time, and what a row gives does not depend on the other rows.

    A NaN or infinity in v of one of the launch's tokens reaches the outputs of the row's other tokens in the same
    launch, earlier ones and other branches of a tree among them: they weigh it with zero. It reaches no other row, and,
    once the token is rejected, nothing in later launches.

    Args:
      q: Queries of positions start .. start + time - 1, whose keys were appended.
      kv: The layer's pool; heads must be a multiple of its kv_heads, head h reads kv head h // (heads // kv_heads).
      table: The pages of each slot.
      slots: Physical slots; the null slot 0 gives zeros, and so does one out of range under jit.
      start: The committed tokens of each row's slot.
      lengths: How many of the queries are real; None: all. The others give finite values.
      order: As in `append`.
      ancestors: For a tree: at (i, j) whether query i sees the key of query j, its own included; all see what was
        committed. None: each sees those before.
      read: The pages of its slot that each query reads, of those that hold what it sees, for at most BLOCK tokens. All
        are fetched, and what is not read is masked. None: all.
      scale: The scores q · k are multiplied with it; None: head_dim ** -0.5.
      implementation, target: As in `append`.

    Returns:
      The outputs in q's dtype, as wide as the pool's values; scores, softmax and sums in float32.

    Raises:
      ValueError: heads is not a multiple of kv_heads, a shape or dtype does not fit, no such implementation or target,
        or (where slots are known) one is out of range.

    Source: the online softmax is Milakov and Gimelshein (2018), algorithm 3; pages as in PagedAttention (2023).
    """
    ask("attend", implementation, target, (q,))
    rows, time = q.shape[:2]
    lengths = jnp.full_like(start, time) if lengths is None else lengths
    _check_token(kv, (kv.kv_heads, q.shape[3]))
    check_integers(rows, slots=slots, start=start, lengths=lengths)
    slots = checked_slots(slots, table.shape[0])
    factor = q.shape[3] ** -0.5 if scale is None else scale
    # What lies past the launch's own tokens is stale: it must not count as live, or its NaN would be weighed with zero.
    lengths = jnp.minimum(lengths, time)
    check_ancestors(ancestors, rows, time)
    grouped = split_heads(q, kv.kv_heads)
    end = jnp.minimum(start + lengths, table.shape[1] * kv.page_size)
    end = jnp.where((slots > 0) & (lengths > 0), end, 0)  # where nothing is asked, nothing is read
    row = _Row(table[slots], start, end, None if order is None else order[slots], ancestors, read)
    if time <= BLOCK or ancestors is not None or read is not None:
        return _attend_block(grouped, kv, row, start, factor)
    query = start[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
    return in_blocks(lambda q, query: _attend_block(q, kv, row, query[:, 0], factor), BLOCK, grouped, query)


class _Row(NamedTuple):
    """What each row's queries may see: positions below `end` of the slot whose first new token has position `start`.

    table int32 [rows, max_pages]; start, end int32 [rows]; order int32 [rows, max_pending] or None; ancestors bool
    [rows, time, time] or None, as in `attend`; read bool [rows, kv_heads, time, max_pages], the pages that each query
    reads, or None: all.
    """

    table: Array
    start: Array
    end: Array
    order: Array | None
    ancestors: Array | None
    read: Array | None = None

    def positions(self, place: Array) -> Array:
        """int32 [1 or rows, span]: the position of the token at each place (int32 [span]).

        With an order, all committed tokens give start - 1.
        """
        place = place[None]
        if self.order is None:
            return place
        listed = self.order.shape[1]
        offset = jnp.arange(listed, dtype=jnp.int32)[None, None]
        found = jnp.max(jnp.where(place[..., None] == self.order[:, None], offset, -1), axis=2)
        start = self.start[:, None]
        return jnp.where(found >= 0, start + found, jnp.where(place < start + listed, start - 1, place))

    def reach(self, last: Array) -> Array:
        """int32 [rows]: places from there on hold nothing that a query at a position below `last` sees."""
        seen = jnp.minimum(self.end, last)
        if self.order is None:
            return seen
        return jnp.where(self.end > 0, jnp.maximum(seen, self.start + self.order.shape[1]), 0)

    def visible(self, position: Array, query: Array) -> Array:
        """bool [rows, time, span]: which keys at `position` (int32 [1 or rows, span]) each `query` position sees."""
        if self.ancestors is None:
            return position[:, None] <= query[..., None]
        rows, time = query.shape
        offset = position - self.start[:, None]
        on_path = jnp.broadcast_to(jnp.clip(offset, 0, time - 1)[:, None], (rows, time, offset.shape[1]))
        return (offset < 0)[:, None] | jnp.take_along_axis(self.ancestors, on_path, axis=2)


def _attend_block(q: Array, kv: TokenPages, row: _Row, first: Array, scale: float) -> Array:
    """One block of queries over all keys that any of them sees.

    q [rows, time, kv_heads, group, head_dim], positions from `first` (int32 [rows]) on. The result is [rows, time,
    heads, value_dim] in q's dtype.
    """
    rows, time, kv_heads, group, _ = q.shape
    page_size = kv.page_size
    pages = max(1, BLOCK // page_size)  # of one block
    span = pages * page_size
    rest = -row.table.shape[1] % pages
    table = jnp.pad(row.table, ((0, 0), (0, rest)))
    read = None if row.read is None else jnp.pad(row.read, ((0, 0), (0, 0), (0, 0), (0, rest)))
    query = first[:, None] + jnp.arange(time, dtype=jnp.int32)[None]

    def add_block(i, softmax):
        page = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = (x.reshape(rows, span, kv_heads, x.shape[-1]).astype(q.dtype) for x in kv.pages(page))
        position = row.positions(i * span + jnp.arange(span, dtype=jnp.int32))
        live = (position < row.end[:, None]) & (jnp.repeat(page, page_size, axis=1) > 0)
        visible = (live[:, None] & row.visible(position, query))[:, None, None]
        if read is not None:
            chosen = jax.lax.dynamic_slice_in_dim(read, i * pages, pages, axis=3)
            visible = visible & jnp.repeat(chosen, page_size, axis=3)[:, :, None]
        v = jnp.where(live[..., None, None], v, jnp.zeros((), v.dtype))
        return softmax.add(contract("btkgd,bskd->bkgts", q, k) * scale, visible, v)

    reach = jnp.minimum(jnp.max(row.reach(first + time)), table.shape[1] * page_size)
    empty = OnlineSoftmax.empty(rows, kv_heads, group, time, kv.value_dim)
    return jax.lax.fori_loop(0, (reach + span - 1) // span, add_block, empty).result()[0].astype(q.dtype)


def check_places(pages: int, page_size: int) -> None:
    """Raises a ValueError unless int32 numbers all tokens of so many pages."""
    if pages * page_size > np.iinfo(np.int32).max:
        raise ValueError(f"pages ({pages}) of {page_size} tokens must be fewer: int32 numbers all of their tokens")


def check_launch(
    q: Array, k: Array, v: Array, kv: PagedKV, *, ancestors: Array | None = None, **integers: Array
) -> None:
    """Raises a ValueError unless queries, keys and values fit the pool and one another, and so do the integers."""
    rows, time = q.shape[:2]
    check_heads(q, kv.keys.shape[2])
    for name, x, token in (
        ("q", q, q.shape[2:3] + kv.keys.shape[3:]),
        ("k", k, kv.keys.shape[2:]),
        ("v", v, k.shape[2:]),
    ):
        if x.shape != (rows, time, *token):
            raise ValueError(f"{name} must have shape {(rows, time, *token)}, got {x.shape}")
    _check_token(kv, k.shape[2:])
    check_integers(rows, **integers)
    check_ancestors(ancestors, rows, time)


def check_ancestors(ancestors: Array | None, rows: int, time: int) -> None:
    """Raises a ValueError unless ancestors are None, or bool [rows, time, time]."""
    if ancestors is not None and (ancestors.shape != (rows, time, time) or ancestors.dtype != jnp.bool_):
        raise ValueError(f"ancestors must be bool {(rows, time, time)}, got {ancestors.dtype} {ancestors.shape}")


def _check_token(kv: TokenPages, token: tuple[int, ...]) -> None:
    held = kv.kv_heads, kv.key_dim
    if token != held:
        raise ValueError(f"(kv_heads, head_dim) must be the pool's {held}, got {token}")


def check_integers(rows: int, **integers: Array) -> None:
    """Raises a ValueError that names the first of slots, start and lengths that is not an integer a row."""
    for name, value in integers.items():
        if value.shape != (rows,):
            raise ValueError(f"{name} must have shape ({rows},), one a row, got {value.shape}")
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be int32 [{rows}], got {value.dtype}")
