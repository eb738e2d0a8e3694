"""Lists of admitted keys where each slot has pages of its own: when these are full, the keys of the lowest gates leave.

A slot's pages in a layer are for all its heads: a head that keeps much takes what others leave. What stays depends on
the slot's own text, and on how it came in launches, and not on who else is served.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxbuf.attention.gated_lists import add_pages, admit, count_pages, pages_needed
from jaxbuf.attention.gated_pages import Budget, GatedKV
from jaxbuf.axes import Array, Bool, Float, Float32, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.memory.sequences import put

SPARE = 16  # when keys have to leave, one of so many pages is made free beyond need: it takes a pass over all of them


def admit_within(
    kv: GatedKV,
    slots: Int32[Array, "rows"],
    k: Float[Array, "rows n kv_heads head_dim"],
    v: Float[Array, "rows n kv_heads head_dim"],
    gates: Float32[Array, "rows n kv_heads"],
    admitted: Bool[Array, "rows n kv_heads"],
) -> GatedKV:
    """Appends the keys that are admitted to their lists, and drops some where pages do not suffice.

    A slot that lacks pages drops as few keys as leave it at most pages - pages // 16, of all its heads together: those
    of the lowest gates, among them new ones; of equal gates the ones that come first on their lists, and of those the
    ones of the first heads.

    Args:
      kv: With a budget.
      slots: No slot but 0 twice.
      k, v, gates: Of the tokens, in their order.
      admitted: Which of them each head admits.
    """
    budget = _budget(kv)
    held = kv.counts[slots]
    more = jnp.sum(admitted, axis=1, dtype=jnp.int32)
    more = jnp.where(slots[:, None] > 0, more, 0)
    full = jnp.sum(count_pages(held + more, kv.page_size), axis=1) > budget.pages
    fits = admitted & ~full[:, None, None]
    kv = add_pages(kv, slots, _new_pages(kv, slots, jnp.where(full[:, None], 0, more), k.shape[1]))
    kv = admit(kv, slots, k, v, gates, fits)

    def select_row(row: Array, kv: GatedKV) -> GatedKV:
        def of(kv: GatedKV) -> GatedKV:
            return _select(kv, slots[row], New(k[row], v[row], gates[row], admitted[row]))

        return jax.lax.cond(full[row], of, lambda kv: kv, kv)

    def select_rows(kv: GatedKV) -> GatedKV:
        return jax.lax.fori_loop(0, slots.shape[0], select_row, kv)

    return jax.lax.cond(jnp.any(full), select_rows, lambda kv: kv, kv)


class New(NamedTuple):
    """The tokens of one row that want to be on its lists: as in `admit_within`, without rows."""

    k: Float[Array, "n kv_heads head_dim"]
    v: Float[Array, "n kv_heads head_dim"]
    gates: Float32[Array, "n kv_heads"]
    admitted: Bool[Array, "n kv_heads"]


def raised_thresholds(layers: Sequence[GatedKV], threshold: Float32[Array, "slots"]) -> Float32[Array, "slots"]:
    """Of each slot the threshold, or the lowest gate that stayed where keys had to leave, whichever is higher."""
    floors = jnp.stack([_budget(layer).floor for layer in layers])
    return jnp.maximum(threshold, jnp.max(floors, axis=0))


def fork_within(kv: GatedKV, source: Int32[Array, "rows"], target: Int32[Array, "rows"]) -> GatedKV:
    """Copies the sources' lists to the targets' own pages; rows whose target is 0 are left out."""
    budget = _budget(kv)
    held = count_pages(kv.counts[source], kv.page_size)
    first, lists = _in_a_row(kv, held, target)
    column = jnp.arange(kv.lists.shape[2], dtype=jnp.int32)[None, None]
    place = jnp.where(column < held[..., None], first[..., None] + column, NOWHERE)
    row = jnp.arange(source.shape[0], dtype=jnp.int32)[:, None, None]
    read = jnp.zeros((source.shape[0], budget.pages), jnp.int32)
    read = read.at[row, place].set(kv.lists[source], mode="drop")
    page = jnp.arange(budget.pages, dtype=jnp.int32)[None]
    copied = (page < jnp.sum(held, axis=1)[:, None]) & (target > 0)[:, None]
    written = jnp.where(copied, _first_page(budget, target)[:, None] + page, NOWHERE)
    pools = {name: getattr(kv, name) for name in ("admitted_keys", "admitted_values", "admitted_gates")}
    return dataclasses.replace(
        kv,
        **{name: pool.at[written].set(pool[read], mode="drop") for name, pool in pools.items()},
        lists=put(kv.lists, target, lists),
        counts=put(kv.counts, target, kv.counts[source]),
        budget=dataclasses.replace(
            budget,
            dropped=put(budget.dropped, target, budget.dropped[source]),
            floor=put(budget.floor, target, budget.floor[source]),
        ),
    )


def forget_dropped(kv: GatedKV, slots: Int32[Array, "rows"]) -> GatedKV:
    """A layer in which these slots have dropped nothing yet; one without a budget stays as it is."""
    if kv.budget is None:
        return kv
    budget = dataclasses.replace(
        kv.budget,
        dropped=put(kv.budget.dropped, slots, jnp.zeros_like(kv.budget.dropped[slots])),
        floor=put(kv.budget.floor, slots, jnp.zeros_like(kv.budget.floor[slots])),
    )
    return dataclasses.replace(kv, budget=budget)


def _new_pages(
    kv: GatedKV, slots: Int32[Array, "rows"], more: Int32[Array, "rows kv_heads"], most: int
) -> Int32[Array, "rows kv_heads n"]:
    """For each list the pages that `more` keys, at most `most`, need: of the slot's own those that no list has."""
    budget = _budget(kv)
    rows, columns = slots.shape[0], kv.lists.shape[2]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    held = count_pages(kv.counts[slots], kv.page_size)
    used = jnp.arange(columns, dtype=jnp.int32)[None, None] < held[..., None]
    own = jnp.where(used, kv.lists[slots] - _first_page(budget, slots)[:, None, None], NOWHERE)
    free = jnp.ones((rows, budget.pages), bool).at[row[..., None], own].set(False, mode="drop")
    number = jnp.where(free, jnp.cumsum(free, axis=1, dtype=jnp.int32) - 1, NOWHERE)
    page = _first_page(budget, slots)[:, None] + jnp.arange(budget.pages, dtype=jnp.int32)[None]
    free_pages = jnp.zeros((rows, budget.pages), jnp.int32).at[row, number].set(page, mode="drop")
    needed = pages_needed(kv.counts[slots], more, kv.page_size)
    index = jnp.arange(-(-most // kv.page_size) + 1, dtype=jnp.int32)[None, None]
    which = (jnp.cumsum(needed, axis=1, dtype=jnp.int32) - needed)[..., None] + index
    taken = free_pages[row[..., None], jnp.minimum(which, budget.pages - 1)]
    return jnp.where(index < needed[..., None], taken, 0)


def _select(kv: GatedKV, slot: Int32[Array, ""], new: New) -> GatedKV:
    """Lays the pages of one slot anew: with the keys of the highest gates, of its lists and of the new ones."""
    budget, size = _budget(kv), kv.page_size
    heads, columns = kv.lists.shape[1:]
    places = columns * size
    lists, counts = kv.lists[slot], kv.counts[slot]
    listed = jnp.arange(places, dtype=jnp.int32)[None] < counts[:, None]
    # Candidates of a head, [kv_heads, n]: what its list holds, and behind it the new tokens.
    valid = jnp.concatenate([listed, new.admitted.T], axis=1)
    gates = jnp.concatenate([kv.admitted_gates[lists].reshape(heads, places), new.gates.T], axis=1)
    rank = _ranks(gates, valid)
    goal = budget.pages - budget.pages // SPARE

    def pages_without(dropped: Array) -> Array:
        left = jnp.sum(valid & (rank >= dropped), axis=1, dtype=jnp.int32)
        return jnp.sum(count_pages(left, size))

    kept = valid & (rank >= _fewest(pages_without, goal, valid.size))
    left = jnp.sum(kept, axis=1, dtype=jnp.int32)
    first, in_a_row = _in_a_row(kv, count_pages(left, size)[None], slot[None])
    place = first[0][:, None] * size + jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(kept, place, NOWHERE)
    # Where each place of the slot's pages gets its key from: a place of the pool, or behind them a new token.
    old = (lists[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]).reshape(heads, places)
    pool, count = kv.admitted_gates.size, new.gates.shape[0]
    fresh = jnp.arange(heads, dtype=jnp.int32)[:, None] + heads * jnp.arange(count, dtype=jnp.int32)[None]
    source = jnp.concatenate([old, pool + fresh], axis=1)
    chosen = jnp.full(budget.pages * size, NOWHERE, jnp.int32).at[place].set(source, mode="drop")
    start = _first_page(budget, slot)

    def chosen_of(held: Array, given: Array) -> Array:
        ending = held.shape[2:]
        there = (chosen < NOWHERE).reshape(-1, *(1,) * len(ending))
        before = held.reshape(-1, *ending)[jnp.where(chosen < pool, chosen, 0)]
        after = given.reshape(-1, *ending)[jnp.clip(chosen - pool, 0, heads * count - 1)]
        is_new = (chosen >= pool).reshape(there.shape)
        numbers = jnp.where(is_new, after.astype(held.dtype), before)
        return jnp.where(there, numbers, jnp.zeros((), held.dtype)).reshape(-1, size, *ending)

    pools = kv.admitted_keys, kv.admitted_values, kv.admitted_gates
    numbers = tuple(map(chosen_of, pools, (new.k, new.v, new.gates)))
    # All is read before something is written: fused with the reads, the writes would take a copy of the pool.
    numbers, in_a_row, left = jax.lax.optimization_barrier((numbers, in_a_row, left))
    laid = [
        jax.lax.dynamic_update_slice_in_dim(held, new, start, axis=0) for held, new in zip(pools, numbers, strict=True)
    ]

    floor = jnp.min(jnp.where(kept, gates, jnp.inf))
    highest_dropped = jnp.max(jnp.where(valid & ~kept, gates, -jnp.inf))
    floor = jnp.where(jnp.any(kept), floor, jnp.nextafter(highest_dropped, jnp.float32(jnp.inf)))
    dropped = jnp.sum(valid & ~kept, axis=1, dtype=jnp.int32)
    return dataclasses.replace(
        kv,
        admitted_keys=laid[0],
        admitted_values=laid[1],
        admitted_gates=laid[2],
        lists=kv.lists.at[slot].set(in_a_row[0]),
        counts=kv.counts.at[slot].set(left),
        budget=dataclasses.replace(
            budget, dropped=budget.dropped.at[slot].add(dropped), floor=budget.floor.at[slot].max(floor)
        ),
    )


def _ranks(gates: Float32[Array, "kv_heads n"], valid: Bool[Array, "kv_heads n"]) -> Int32[Array, "kv_heads n"]:
    """The place of each candidate in the order in which they leave; those that are not valid come last."""
    heads, count = gates.shape
    order = jnp.argsort(jnp.where(valid, gates, jnp.inf).T.reshape(-1), stable=True)
    rank = jnp.zeros(heads * count, jnp.int32).at[order].set(jnp.arange(heads * count, dtype=jnp.int32))
    return rank.reshape(count, heads).T


def _fewest(pages_without: Callable[[Array], Array], goal: int, most: int) -> Int32[Array, ""]:
    """The fewest of `most` keys at least without which at most `goal` pages are needed."""

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # low do not suffice, high do
        middle = (low + high) // 2
        enough = pages_without(middle) <= goal
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    bounds = jnp.zeros((), jnp.int32), jnp.asarray(most, jnp.int32)
    return jax.lax.fori_loop(0, most.bit_length(), halve, bounds)[1]


def _in_a_row(
    kv: GatedKV, held: Int32[Array, "rows kv_heads"], slots: Int32[Array, "rows"]
) -> tuple[Int32[Array, "rows kv_heads"], Int32[Array, "rows kv_heads max_pages"]]:
    """Lists of `held` pages each, one after another on their slots' own: the number of each one's first of the slot's
    pages, and the lists."""
    first = jnp.cumsum(held, axis=1, dtype=jnp.int32) - held
    column = jnp.arange(kv.lists.shape[2], dtype=jnp.int32)[None, None]
    page = _first_page(_budget(kv), slots)[:, None, None] + first[..., None] + column
    return first, jnp.where(column < held[..., None], page, 0)


def _first_page(budget: Budget, slots: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    return 1 + jnp.maximum(slots - 1, 0) * budget.pages


def _budget(kv: GatedKV) -> Budget:
    assert kv.budget is not None
    return kv.budget
