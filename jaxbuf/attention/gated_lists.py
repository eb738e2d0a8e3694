"""The lists of write-gated attention: of each slot and head the keys that were admitted, on pages of their own.

A list is a slot's and head's row of `GatedKV.lists`: pages in the order of their tokens, filled from the first on. Who
owns which page is kept for all layers at once, see `GatedTable.admitted`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxbuf.attention.gated_pages import GatedKV, GatedTable, Moves, put_rows
from jaxbuf.axes import Array, Bool, Float, Float32, Int32
from jaxbuf.memory.ownership import NOWHERE, Ownership, release_rows, share_rows, take_rows
from jaxbuf.memory.sequences import put


def admissions(
    kv: GatedKV, moves: Moves, threshold: Float32[Array, "rows"]
) -> Bool[Array, "rows max_pending kv_heads"]:
    """Which of the tokens that leave the local pages each head admits."""
    gates = kv.gates.reshape(-1, kv.gates.shape[2])[moves.token]
    return moves.leaves[..., None] & (gates >= threshold[:, None, None])


def pages_needed(held: Int32[Array, "*n"], more: Int32[Array, "*n"], page_size: int) -> Int32[Array, "*n"]:
    """How many pages lists with `held` keys need to take in `more`, beside those that their keys are on."""
    return count_pages(held + more, page_size) - count_pages(held, page_size)


def take_pages(
    owners: Ownership, needed: Int32[Array, "layers rows kv_heads"], most: int
) -> tuple[Int32[Array, "layers rows kv_heads _"], Ownership]:
    """As many free pages of each layer for each list as it needs, at most `most`, zeros behind; enough are free."""
    wanted = jnp.arange(most, dtype=jnp.int32)[None, None, None] < needed[..., None]
    return jax.vmap(take_rows)(owners, wanted)


def add_pages(kv: GatedKV, slots: Int32[Array, "rows"], taken: Int32[Array, "rows kv_heads n"]) -> GatedKV:
    """Puts pages (0: none) behind those that each list's keys are on."""
    head = jnp.arange(taken.shape[1], dtype=jnp.int32)[None, :, None]
    index = jnp.arange(taken.shape[2], dtype=jnp.int32)[None, None]
    column = count_pages(kv.counts[slots], kv.page_size)[..., None] + index
    at = slots[:, None, None], head, jnp.where(taken > 0, column, NOWHERE)
    return dataclasses.replace(kv, lists=kv.lists.at[at].set(taken, mode="drop"))


def admit(
    kv: GatedKV,
    slots: Int32[Array, "rows"],
    k: Float[Array, "rows n kv_heads head_dim"],
    v: Float[Array, "rows n kv_heads head_dim"],
    gates: Float32[Array, "rows n kv_heads"],
    admitted: Bool[Array, "rows n kv_heads"],
) -> GatedKV:
    """Appends the keys that are admitted to their lists, which have pages for them, see `add_pages`."""
    size, heads = kv.page_size, kv.counts.shape[1]
    number = jnp.cumsum(admitted, axis=1, dtype=jnp.int32)
    index = kv.counts[slots][:, None] + number - 1
    head = jnp.arange(heads, dtype=jnp.int32)[None, None]
    column = jnp.clip(index // size, 0, kv.lists.shape[2] - 1)
    page = kv.lists[slots[:, None, None], head, column]
    page = jnp.where(admitted & (slots > 0)[:, None, None] & (page > 0), page, NOWHERE)
    at = page, index % size

    def added(pool, new):
        return pool.at[at].set(new.astype(pool.dtype), mode="drop")

    return dataclasses.replace(
        kv,
        admitted_keys=added(kv.admitted_keys, k),
        admitted_values=added(kv.admitted_values, v),
        admitted_gates=added(kv.admitted_gates, gates),
        counts=put(kv.counts, slots, kv.counts[slots] + number[:, -1]),
    )


def pages_between(
    lists: Int32[Array, "*n max_pages"], first: Int32[Array, "*n"], end: Int32[Array, "*n"]
) -> Int32[Array, "*n max_pages"]:
    """The pages of lists from place `first` up to `end`; 0 elsewhere."""
    column = jnp.arange(lists.shape[-1], dtype=jnp.int32).reshape((1,) * first.ndim + lists.shape[-1:])
    return jnp.where((column >= first[..., None]) & (column < end[..., None]), lists, 0)


def count_pages(counts: Int32[Array, "*n"], page_size: int) -> Int32[Array, "*n"]:
    """How many pages so many keys are on."""
    return -(-counts // page_size)


def partial_lists(kv: GatedKV, source: Int32[Array, "rows"], target: Int32[Array, "rows"]) -> Bool[Array, "rows heads"]:
    """Which lists end in a page that is not full: a fork copies that."""
    return (kv.counts[source] % kv.page_size > 0) & (target > 0)[:, None]


class ForkedLists(NamedTuple):
    """What a fork gives the targets' lists.

    Attributes:
      lists: int32 [rows, kv_heads, max_pages], their pages.
      read, written: int32 [rows, kv_heads], the pages that are copied; past the pool where none is.
    """

    lists: Array
    read: Array
    written: Array


def fork_owners(
    shared: GatedTable, layers: Sequence[GatedKV], source: Int32[Array, "rows"], target: Int32[Array, "rows"]
) -> tuple[ForkedLists, GatedTable]:
    """Shares full pages of the sources' lists with the targets, and takes one for each list that ends in another.

    Returns:
      As `fork_lists` needs it, with the layers first; and what is shared.
    """
    theirs, counts = (jnp.stack([getattr(layer, name)[source] for layer in layers]) for name in ("lists", "counts"))
    partial = jnp.stack([partial_lists(layer, source, target) for layer in layers])
    size, columns = layers[0].page_size, theirs.shape[3]
    real = (target > 0)[None, :, None]
    column, none = jnp.arange(columns, dtype=jnp.int32)[None, None, None], jnp.zeros_like(counts)
    whole = pages_between(theirs, none, jnp.where(real, counts // size, 0))
    mine = jnp.stack([layer.lists[target] for layer in layers])
    replaced = pages_between(mine, none, jnp.where(real, shared.owned[:, target], 0))
    owners = jax.vmap(release_rows)(jax.vmap(share_rows)(shared.admitted, whole), replaced)
    taken, owners = jax.vmap(take_rows)(owners, partial)
    last = jnp.minimum(counts // size, columns - 1)[..., None]
    read = jnp.take_along_axis(theirs, last, axis=3)[..., 0]
    lists = jnp.where((column == last) & partial[..., None], taken[..., None], whole)
    owned = put_rows(shared.owned, target, count_pages(counts, size))
    return ForkedLists(lists, read, jnp.where(partial, taken, NOWHERE)), dataclasses.replace(
        shared, admitted=owners, owned=owned
    )


def fork_lists(kv: GatedKV, new: ForkedLists, source: Int32[Array, "rows"], target: Int32[Array, "rows"]) -> GatedKV:
    """A layer whose targets have what `fork_owners` gave them."""

    def copied(pool):
        return pool.at[new.written].set(pool[new.read], mode="drop")

    return dataclasses.replace(
        kv,
        admitted_keys=copied(kv.admitted_keys),
        admitted_values=copied(kv.admitted_values),
        admitted_gates=copied(kv.admitted_gates),
        lists=put(kv.lists, target, new.lists),
        counts=put(kv.counts, target, kv.counts[source]),
    )
