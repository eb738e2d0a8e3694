"""The memory of softmax layers as a kind among others: one table of pages, and each layer's own pages, in which it
keeps keys and values or latents."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.attention import paged
from jaxbuf.attention.attention_plan import LaunchedAttention, WholeAttention
from jaxbuf.attention.paged import init_table
from jaxbuf.attention.pages import (
    advance_order,
    claim_fork,
    claim_pages,
    fork_pages,
    init_order,
    note_missing,
    places,
    release_pages,
    shared_tokens,
    take_pages,
    touched_pages,
)
from jaxbuf.axes import Array, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.kind import Sizes
from jaxbuf.memory.ownership import Ownership, clear_flag, init_ownership, raise_missing
from jaxbuf.memory.sequences import Commit, Launch, put
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTable:
    """What all softmax layers share.

    Attributes:
      table: The pages of each slot; 0 where there is none.
      order: Where the next tokens of each slot lie in its pages; None without trees.
      owners: Who owns the pages that slots take when they need them; None: every slot has its own for good.
      pages: How many there are in each layer, the null page among them (static).
      page_size: Tokens of a page (static).
    """

    table: Int32[Array, "slots max_pages"]
    order: Int32[Array, "slots max_pending"] | None
    owners: Ownership | None
    pages: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})


def init_pages(
    *,
    slots: int,
    capacity: int,
    page_size: int,
    max_pending: int = 1,
    trees: bool = False,
    pages: int | None = None,
    shares: bool = False,
) -> PageTable:
    """The pages of empty slots.

    Args:
      slots: How many there are, beside the null slot.
      capacity: Tokens of each, rounded up to whole pages (with trees, after adding the max_pending - 1 places that a
        tree may leave open).
      page_size: Tokens of a page.
      max_pending: Tokens of one launch.
      trees: Whether launches have parents.
      pages: How many slots take from; None: what all could use at once.
      shares: Whether slots take pages when they need them, and share them after a fork.
    """
    table = init_table(slots=slots, capacity=capacity + (max_pending - 1 if trees else 0), page_size=page_size)
    number, owners = slots * table.shape[1], None
    if shares:
        spare = slots // 2 * (-(-max_pending // page_size) + 1)  # what is shared until its owners have their own
        number = number + spare if pages is None else pages
        owners, table = init_ownership(1 + number), jnp.zeros_like(table)
    order = init_order(slots=slots, max_pending=max_pending) if trees else None
    return PageTable(table, order, owners, 1 + number, page_size)


class PagedMemory:
    """The kind: see `jaxbuf.memory.kind.MemoryKind`."""

    def init(self, mixers: Sequence[Any], sizes: Sizes) -> PageTable:
        names = "slots", "capacity", "page_size", "max_pending", "trees", "pages", "shares"
        return init_pages(**{name: getattr(sizes, name) for name in names})

    def head_axes(self, layer: Any) -> Any:
        return jax.tree.map(lambda _: 2, layer)

    def claim(self, shared: PageTable, layers: Sequence[Any], launch: Launch) -> tuple[Claim, ...]:
        return () if shared.owners is None else (claim_pages(shared.owners, shared.table, *_where(shared, launch)),)

    def claim_fork(
        self, shared: PageTable, layers: Sequence[Any], source: Array, target: Array, committed: Array
    ) -> tuple[Claim, ...]:
        if shared.owners is None:
            return ()
        given = {"source": source, "target": target, "length": committed, "page_size": shared.page_size}
        return (claim_fork(shared.owners, shared.table, shared.order, **given),)

    def fewest_tokens(self, shared: PageTable, slots: Array, *, alone: bool) -> Array:
        if shared.owners is None or not alone:
            return jnp.zeros_like(slots)
        return shared_tokens(shared.owners, shared.table, slots, shared.page_size)

    def note_missing(self, shared: PageTable, missing: Sequence[Array]) -> PageTable:
        if shared.owners is None:
            return shared
        return dataclasses.replace(shared, owners=note_missing(shared.owners, *missing))

    def raise_missing(self, shared: PageTable) -> None:
        raise_missing(pages=shared.owners)

    def whole(self, time: int, lengths: Array | None, chunk_size: int, target: Target | None) -> WholeAttention:
        return WholeAttention(time, lengths, target)

    def begin(
        self, shared: PageTable, layers: Sequence[Any], launch: Launch
    ) -> tuple[LaunchedAttention, PageTable, tuple[Any, ...]]:
        if shared.owners is not None:
            table, owners = take_pages(shared.owners, shared.table, *_where(shared, launch))
            shared = dataclasses.replace(shared, table=table, owners=owners)
        plan, order = LaunchedAttention(launch, shared.table, shared.order), shared.order
        if launch.commits and order is not None:
            order = advance_order(order, launch.slots, launch.start, launch.lengths)
        return plan, dataclasses.replace(shared, order=order), tuple(layers)

    def commit(self, shared: PageTable, done: Commit) -> PageTable:
        if shared.order is None:
            return shared
        order = advance_order(shared.order, done.slots, done.start, done.accepted, done.permutation)
        return dataclasses.replace(shared, order=order)

    def rollback(self, shared: PageTable, slots: Array, count: Array) -> PageTable:
        return shared

    def fork(
        self, shared: PageTable, layers: Sequence[Any], source: Array, target: Array, committed: Array
    ) -> tuple[PageTable, tuple[Any, ...]]:
        given = {"source": source, "target": target, "length": committed, "page_size": shared.page_size}
        _, copied, table, owners = fork_pages(shared.owners, shared.table, shared.order, **given)
        order = shared.order
        if order is not None:
            order = put(order, target, order[source])
        shared = dataclasses.replace(shared, table=table, owners=owners, order=order)
        return shared, tuple(paged.fork(layer, copied) for layer in layers)

    def reset(self, shared: PageTable, layers: Sequence[Any], slots: Array) -> tuple[PageTable, tuple[Any, ...]]:
        table, owners, order = shared.table, shared.owners, shared.order
        if owners is not None:
            table, owners = release_pages(owners, table, slots)
            owners = clear_flag(owners)
        if order is not None:
            order = put(order, slots, init_order(slots=slots.shape[0], max_pending=order.shape[1])[1:])
        return dataclasses.replace(shared, table=table, owners=owners, order=order), tuple(layers)


def _where(shared: PageTable, launch: Launch) -> tuple[Array, Array]:
    """A launch's slots, and which pages of each it writes: bool [rows, max_pages]."""
    place = places(shared.order, launch.slots, launch.start, launch.time)
    sizes = {"pages": shared.table.shape[1], "page_size": shared.page_size}
    return launch.slots, touched_pages(place, slots=launch.slots, lengths=launch.lengths, **sizes)
