"""What the entries of an item add to its outputs, in `extend` on a GPU with a decay a channel; and new tokens to each
other's."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_channel_keys import add_on_path, decay_keys, since_commit, sum_behind
from jaxbuf.pallas.extend.gpu_channel_lane import DIM, PART, ROWS, WARPS, Entry, Lane, Short
from jaxbuf.pallas.extend.gpu_channel_state import fold
from jaxbuf.pallas.extend.gpu_channel_sums import Sum, cut_gate, factor, nothing, plus
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.extend.gpu_products import spread, where, zeros
from jaxbuf.pallas.extend.gpu_schedule import CHUNK
from jaxbuf.pallas.instructions import synchronize, wait_for_copies
from jaxbuf.pallas.threads import PER_THREAD, load, store


def multiply_keys(lane: Lane, probes: list[Array], t: Array | int, start: int, n: int) -> None:
    """Writes the products of the probes of token t with n decayed keys, from number `start` on, to `weights`."""
    places = pl.ds(start, n)
    keys = load(lane.numbers.at[places, lane.channels], ROWS)
    for i, probe in enumerate(probes):
        if i or lane.call.delta:  # Without the delta rule nothing is recalled.
            products = keys * spread(probe.astype(jnp.float32), keys.shape, 1, ROWS)
            store(lane.weights.at[i * lane.call.time + t, places], jnp.sum(products, axis=1))


def multiply_chunk(lane: Lane, item: Item, t: Array | int) -> None:
    """`multiply_keys` of a chunk, for probes that are loaded now."""
    multiply_keys(lane, lane.load_probes(item, t), t, 0, CHUNK)


def add_short(lane: Lane, item: Item, loaded: Short) -> list[Array]:
    """All of the steps before the state is multiplied, for one token on a short ring.

    Returns:
      As `add_entries`.
    """
    call, interpret = lane.call, lane.interpret
    wait_for_copies(0, interpret)
    ours = [x.astype(jnp.float32) for x in (loaded.key, loaded.query)]
    since = cut_gate(lane.interpret, loaded.gate)
    synchronize(interpret)  # All threads are done with the item before.
    store(lane.numbers.at[lane.places, lane.channels], ours[0])
    # A fold decays the entries up to the last of them.
    sum = [where(~item.folds, x) for x in since]
    starts = range(0, lane.places, PART)
    for start in reversed(starts):

        def decay_part(sum, start=start):
            for i in reversed(range(start, start + PART)):
                key = load(lane.keys.at[i, lane.channels], PER_THREAD).astype(jnp.float32)
                store(lane.numbers.at[i, lane.channels], key * factor(lane.interpret, sum))
                sum = plus(sum, cut_gate(lane.interpret, load(lane.gates.at[i, lane.channels], PER_THREAD)))
            return sum

        # Folds add all places.
        sum = lax.cond(item.folds | (item.live > start), decay_part, lambda sum: sum, sum)
    synchronize(interpret)
    pl.when(item.folds)(functools.partial(fold, lane, item, None, sum))

    alive = [~item.folds & (item.live > start) for start in starts]
    for start, some in zip(starts, alive, strict=True):
        pl.when(some)(functools.partial(multiply_keys, lane, loaded.probes, 0, start, PART))
    multiply_keys(lane, loaded.probes, 0, lane.places, WARPS)
    synchronize(interpret)
    # A folded state is that up to the last entry.
    decay = factor(
        lane.interpret,
        [jnp.where(jnp.broadcast_to(item.folds, x.shape), y, x) for x, y in zip(sum, since, strict=True)],
    )
    for i, probe in enumerate(ours):
        store(lane.numbers.at[i, lane.channels], probe * decay)

    def add_part(added, start):
        added = [*added]
        for i in range(start, start + PART):
            update = load(lane.updates.at[i, lane.channels], PER_THREAD).astype(jnp.float32)
            if not call.delta:
                update = lane.strength(item, i) * update
            for j in (0, 1) if call.delta else (1,):
                added[j] = added[j] + lane.weights[j, i] * update
        return added

    added = [zeros((DIM,), PER_THREAD)] * 2
    for start, some in zip(starts, alive, strict=True):
        added = lax.cond(some, functools.partial(add_part, start=start), lambda added: added, added)
    synchronize(interpret)
    return added


def add_entries(lane: Lane, item: Item, first: list[Entry] | None, total: Sum) -> list[Array]:
    """What the entries add to each probe's product with the state; zeros if the item folds."""
    call = lane.call

    def add_chunk(c, chunk, carry):
        added, left = carry
        behind = sum_behind(lane, chunk, left)

        def weigh(t):
            decay_keys(lane, chunk, behind, since_commit(lane, item, t))
            multiply_chunk(lane, item, t)

        lane.each_token(weigh)
        synchronize(lane.interpret)
        added = [*added]
        for i, entry in enumerate(chunk):
            update = entry.update.astype(jnp.float32)
            update = update if entry.strength is None else entry.strength * update
            for j in range(0 if call.delta else call.time, 2 * call.time):
                added[j] = added[j] + lane.weights[j, i] * update
        return added, behind[-1]

    empty = [zeros((DIM,), PER_THREAD)] * (2 * call.time), total
    return lax.cond(
        item.folds | (item.live == 0),
        lambda: empty[0],
        lambda: lane.each_chunk(item, first, add_chunk, empty)[0],
    )


def weigh_new(lane: Lane, item: Item) -> None:
    """Writes the products of each token's probes with the decayed keys of the tokens up to it to `weights`.

    In a tree, those of tokens that are not on the path are not used; they might be infinite.
    """
    key_head = item.head // lane.call.heads_per_key

    def weigh(t):
        synchronize(lane.interpret)  # All threads are done with the keys before, and with the entries' weights.

        def decay_key(i, since):
            s = t - i
            key = load(lane.arrays.k.at[item.row, s, key_head], PER_THREAD).astype(jnp.float32)
            store(lane.numbers.at[s, lane.channels], key * factor(lane.interpret, since))
            return since if lane.one_token else add_on_path(lane, item, t, s, since)

        if lane.one_token:
            decay_key(0, nothing())
        else:
            lax.fori_loop(0, t + 1, decay_key, nothing())
        synchronize(lane.interpret)
        multiply_chunk(lane, item, t)

    lane.each_token(weigh)
