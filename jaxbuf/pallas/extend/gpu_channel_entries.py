"""What the entries of an item add to its outputs, in `extend` on a GPU with a decay a channel; and new tokens to each
other's."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_channel_keys import decay_keys, each_new, gate_on_path, sum_behind, sums_since_commit
from jaxbuf.pallas.extend.gpu_channel_lane import PART, Entry, Lane
from jaxbuf.pallas.extend.gpu_channel_state import fold
from jaxbuf.pallas.extend.gpu_channel_sums import Sum, Wide, cut, factor, nothing, plus
from jaxbuf.pallas.extend.gpu_channel_weights import DIM, ROWS, WARPS
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.extend.gpu_products import count, spread, where, zeros
from jaxbuf.pallas.extend.gpu_schedule import CHUNK
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.threads import PER_THREAD, load, store


def add_short(lane: Lane, item: Item) -> list[Array]:
    """All of the steps before the state is multiplied, for an item on a short ring.

    Returns:
      As `add_entries`.
    """
    starts = range(0, lane.places, PART)
    alive = [~item.folds & (item.live > start) for start in starts]

    def fold_parts():
        total = nothing((DIM,), PER_THREAD)
        if lane.more:
            total = lax.cond(lane.has_more(item), functools.partial(_decay_more, lane, item), lambda: total)
        for start in reversed(starts):
            total = _decay_part(lane, start, total, folds=True)
        synchronize(lane.interpret)
        fold(lane, item, total)
        return nothing((DIM,), PER_THREAD)

    def sum_parts():
        total = nothing((DIM,), PER_THREAD)
        for start, some in zip(reversed(starts), reversed(alive), strict=True):
            decay = functools.partial(_decay_part, lane, start, folds=False)
            total = lax.cond(some, decay, lambda total: total, total)
        synchronize(lane.interpret)
        return total

    total = lax.cond(item.folds, fold_parts, sum_parts)  # of the gates since the state
    _weigh_short(lane, item, [*zip(starts, alive, strict=True)])
    synchronize(lane.interpret)
    decay_probes(lane, item, total)

    def add_part(added, start):
        for i in range(start, start + PART):
            strength = None if lane.call.delta else lane.strength(item, i)
            added = _add_update(lane, added, i, load(lane.updates.at[i, lane.channels], PER_THREAD), strength)
        return added

    added = [zeros((DIM,), PER_THREAD)] * (2 * lane.call.time)
    for start, some in zip(starts, alive, strict=True):
        added = lax.cond(some, functools.partial(add_part, start=start), lambda added: added, added)
    synchronize(lane.interpret)
    return added


def _decay_more(lane: Lane, item: Item) -> Sum:
    """Writes the keys of entries that a short ring has no places for, decayed; returns the sum of their gates."""
    total, arrays, key_head = nothing((DIM,), PER_THREAD), lane.arrays, item.head // lane.call.heads_per_key
    for row, (at, alive) in reversed([*enumerate(lane.locate_more(item), lane.decay_row + 1)]):
        key = where(alive, load(arrays.keys.at[at, key_head], PER_THREAD)).astype(jnp.float32)
        store(lane.numbers.at[row, lane.channels], key * factor(total))
        total = plus(total, cut(where(alive, load(arrays.gates.at[at, item.head, lane.channels], PER_THREAD))))
    return total


def _decay_part(lane: Lane, start: int, behind: Sum, *, folds: bool) -> Sum:
    """Overwrites the gates of a part of a short ring's entries with the sums of the gates behind them; or, for a fold,
    with their keys, decayed.

    Args:
      behind: The sum of the gates behind the part.

    Returns:
      The sum with the part's gates.
    """
    # All loads come first: the assembler takes none past a store.
    places = [lane.gates.at[i, lane.channels] for i in range(start, start + PART)]
    gates = [load(place, PER_THREAD) for place in places]
    keys = [load(lane.keys.at[i, lane.channels], PER_THREAD) for i in range(start, start + PART)] if folds else gates
    for place, gate, key in reversed([*zip(places, gates, keys, strict=True)]):
        if folds:
            store(place, key.astype(jnp.float32) * factor(behind))
        else:
            store(place, lax.bitcast_convert_type(behind, jnp.float32))
        behind = plus(behind, cut(gate))
    return behind


def _weigh_short(lane: Lane, item: Item, parts: list[tuple[int, Array]]) -> None:
    """Writes the weights of a short ring's entries, where a part of them is alive; and of the new tokens, for each
    other. The tokens do not wait for each other: instructions for all of them stand one behind the other."""
    tokens, layout = range(lane.call.time), ROWS.reduce(0)
    gates = [lane.sum_new(item, t, layout) for t in tokens]
    since = sums_since_commit(lane, gates)
    probes = [lane.load_probes(item, t) for t in tokens]

    def weigh_part(start):
        rows = pl.ds(start, PART)
        behind = lax.bitcast_convert_type(load(lane.gates.at[rows, lane.channels], ROWS), jnp.int32)
        keys = load(lane.keys.at[rows, lane.channels], ROWS).astype(jnp.float32)
        decays = [factor(plus(behind, spread(gate, keys.shape, 1, ROWS))) for gate in since]
        lane.weigh(start, [keys * decay for decay in decays], probes, 0)

    if lane.one_token:
        for start, some in parts:
            pl.when(some)(functools.partial(weigh_part, start))
    else:
        count_alive = where(~item.folds, pl.cdiv(item.live, PART))
        lax.fori_loop(0, count_alive, lambda i, _: weigh_part(i * PART), None)
    for first in range(0, lane.call.time, WARPS):
        _weigh_new_short(lane, first, gates, probes)


def _weigh_new_short(lane: Lane, first: int, gates: list[Sum], probes: list[list[Array]]) -> None:
    """Writes the weights of as many new tokens as there are warps, from the first one on, for those that are not before
    it. Weights of a token for one before it, or for one that it is not on the path of, are anything."""
    keys = load(lane.probes.at[pl.ds(first, WARPS)], ROWS).astype(jnp.float32)
    token = count(keys.shape, 0, ROWS) + first

    def add(t, j, behind):
        gate = spread(gate_on_path(lane, t, j, gates[j]), keys.shape, 1, ROWS)
        return jnp.where(token < j, plus(behind, gate), behind)

    behind, decayed = nothing(keys.shape, ROWS), []
    for t in range(first, lane.call.time):
        if lane.call.tree:
            behind = nothing(keys.shape, ROWS)
            for j in range(first + 1, t + 1):
                behind = add(t, j, behind)
        elif t > first:
            behind = add(t, t, behind)
        decayed.append(keys if t == first else keys * factor(behind))
    lane.weigh(lane.first_new + first, decayed, probes[first:], first)


def decay_probes(lane: Lane, item: Item, total: Sum) -> None:
    """Writes the probes to shared memory, with the decay since the state, of which `total` is that of the entries."""

    def decay(t, since):
        factors = factor(plus(total, since))
        return [load(probe, PER_THREAD).astype(jnp.float32) * factors for probe in lane.new_probes(item, t)]

    def write(t, probes):
        for i, probe in enumerate(probes):
            store(lane.numbers.at[i * lane.call.time + t, lane.channels], probe)

    if lane.short:  # All loads come first, as in `_decay_part`.
        since = sums_since_commit(lane, [lane.sum_new(item, t, PER_THREAD) for t in range(lane.call.time)])
        for t, probes in enumerate([decay(t, sum) for t, sum in enumerate(since)]):
            write(t, probes)
        return

    def visit(t, since):
        write(t, decay(t, since))

    each_new(lane, item, visit)


def _add_update(lane: Lane, added: list[Array], i: int, update: Array, strength: Array | None) -> list[Array]:
    """What is added to each probe's product with the state, with the update of an entry, times its weights."""
    update = update.astype(jnp.float32)
    update = update if strength is None else strength * update
    weights = lane.load_weights(i)
    return [x if w is None else x + w * update for x, w in zip(added, weights, strict=True)]


def add_entries(lane: Lane, item: Item, first: list[Entry] | None, total: Wide) -> list[Array]:
    """What the entries add to each probe's product with the state; zeros if the item folds."""

    def add_chunk(c, chunk, carry):
        added, left = carry
        behind, left = sum_behind(chunk, left)

        def visit(t, since):
            decay_keys(lane, chunk, behind, since)
            _weigh_chunk(lane, item, t)

        each_new(lane, item, visit)
        synchronize(lane.interpret)
        for i, entry in enumerate(chunk):
            added = _add_update(lane, added, i, entry.update, entry.strength)
        return added, left

    empty = [zeros((DIM,), PER_THREAD)] * (2 * lane.call.time), total
    return lax.cond(
        item.folds | (item.live == 0),
        lambda: empty[0],
        lambda: lane.each_chunk(item, first, add_chunk, empty)[0],
    )


def _weigh_chunk(lane: Lane, item: Item, t: Array | int) -> None:
    """Writes the weights of the keys in `numbers` for token t."""
    probes = lane.load_probes(item, t)
    for start in range(0, CHUNK, 2 * WARPS):
        lane.weigh(start, [load(lane.numbers.at[pl.ds(start, 2 * WARPS), lane.channels], ROWS)], [probes], t)


def weigh_new(lane: Lane, item: Item) -> None:
    """Writes the weights of the new tokens for each other.

    In a tree, those of tokens that are not on the path are not used; they might be infinite.
    """

    def weigh(t):
        synchronize(lane.interpret)  # All threads are done with the keys before, and with the entries' weights.

        def decay_key(i, since):
            s = t - i
            key = load(lane.new_probes(item, s)[0], PER_THREAD).astype(jnp.float32)
            store(lane.numbers.at[s, lane.channels], key * factor(since))
            return plus(since, gate_on_path(lane, t, s, lane.sum_new(item, s, PER_THREAD)))

        lax.fori_loop(0, t + 1, decay_key, nothing((DIM,), PER_THREAD))
        synchronize(lane.interpret)
        _weigh_chunk(lane, item, t)

    lane.each_token(weigh)
    synchronize(lane.interpret)
