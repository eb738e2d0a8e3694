"""The state of an item, in `extend` on a GPU with a decay a channel: folds, and products with the probes."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_channel_keys import decay_keys, sum_behind
from jaxbuf.pallas.extend.gpu_channel_lane import BANDS, FOLDED_AT_ONCE, GROUP, PART, Entry, Lane
from jaxbuf.pallas.extend.gpu_channel_sums import Sum, Wide, factor
from jaxbuf.pallas.extend.gpu_channel_weights import DIM
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.extend.gpu_products import (
    STATE,
    STATE_LEFT,
    STATE_RIGHT,
    TALL,
    ZERO,
    cut,
    multiply_state,
    split,
    spread,
    to_int8,
    where,
    zeros,
)
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.threads import load, store, store_rows

# The layout of a strip of a split state while it is folded: a thread has eight numbers in a row, so that it loads and
# stores sixteen bytes of either half at once.
SPLIT = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 8))), (-4,), (-2, -3), -1)


def fold(lane: Lane, item: Item, total: Sum, first: list[Entry] | None = None, left: Wide | None = None) -> None:
    """Makes the state in shared memory, checkpoint · exp(total) + Σ update ⊗ decayed key; starts to copy it.

    Args:
      item: The item.
      total: The sum of all gates.
      first, left: None of a short ring, whose keys have been decayed. Else its first chunk, if that is loaded, and the
        sum of all gates as one that gates can be taken away from.
    """
    # The checkpoint's decay, for the columns that each thread has of it.
    store(lane.numbers.at[lane.decay_row, lane.channels], factor(total))
    synchronize(lane.interpret)
    if lane.arrays.low is None:
        _fold_whole(lane, item, first, left)
    else:
        lane.each_band(functools.partial(_fold_split, lane, item, first, left))
    plgpu.commit_smem()  # The copies below read what was stored.
    for band in range(BANDS):
        stored = lane.arrays.checkpoints.at[item.fold_to, item.head, pl.ds(band * BAND, BAND)]
        plgpu.copy_smem_to_gmem(lane.state.at[band], stored)


def _fold_whole(lane: Lane, item: Item, first: list[Entry] | None, left: Wide | None) -> None:
    """`fold` of a state that is not split: entries that are added at once are added to both bands in shared memory."""
    decays = [load(lane.numbers.at[lane.decay_row, strip], TALL.reduce(0)) for strip in lane.strips()]

    def add_some(load_updates, betas, keys, begins):
        """Adds entries, whose keys are rows of a reference; the first ones to what the checkpoint has become."""

        def add_to(band):
            pl.when(item.has_checkpoint & begins)(lambda: plgpu.barrier_wait(lane.barrier(band)))
            updates = [x.astype(jnp.float32) for x in load_updates(pl.ds(band * BAND, BAND))]
            if not lane.call.delta:
                updates = [x * y for x, y in zip(betas, updates, strict=True)]
            for strip, decay in zip(lane.strips(), decays, strict=True):
                part = lane.state.at[band, :, strip]
                new = load(part, TALL).astype(jnp.float32)
                decayed = where(item.has_checkpoint, new * spread(decay, new.shape, 1, TALL))
                new = jnp.where(jnp.broadcast_to(begins, new.shape), decayed, new)
                for i, update in enumerate(updates):
                    key = load(keys.at[i, strip], TALL.reduce(0))
                    new = new + spread(update, new.shape, 0, TALL) * spread(key, new.shape, 1, TALL)
                store(part, new.astype(lane.call.state))

        lane.each_band(add_to)

    def add_loaded(c, chunk, left):
        positions, alive = lane.positions(item, c), [entry.alive for entry in chunk]
        behind, left = sum_behind(chunk, left)
        decay_keys(lane, chunk, behind, None)

        def load_updates(rows):
            refs = [lane.arrays.updates.at[at, item.head, rows] for at in positions]
            return [where(some, load(ref, TALL.reduce(1))) for some, ref in zip(alive, refs, strict=True)]

        add_some(load_updates, [entry.strength for entry in chunk], lane.numbers, jnp.equal(c, 0))
        return left

    def add_short(start, n):
        places = [start + i for i in range(n)]
        betas = [] if lane.call.delta else [lane.strength(item, i) for i in places]

        def load_updates(rows):
            return [load(lane.updates.at[i, rows], TALL.reduce(1)) for i in places]

        add_some(load_updates, betas, lane.gates.at[pl.ds(start, n)], jnp.equal(start, 0))

    if not lane.short:
        lane.each_chunk(item, first, add_loaded, left)
    elif lane.places <= FOLDED_AT_ONCE:
        add_short(0, lane.places)
    else:
        lax.fori_loop(0, lane.places // CHUNK, lambda c, _: add_short(c * CHUNK, CHUNK), None)

    def add_more():
        found = _more_updates(lane, item)
        keys = lane.numbers.at[pl.ds(lane.decay_row + 1, len(lane.more))]
        betas = [] if lane.call.delta else [strength for strength, _ in found]

        def load_more(rows):
            return [load_update(rows, TALL.reduce(1)) for _, load_update in found]

        add_some(load_more, betas, keys, jnp.bool_(False))

    if lane.more:
        pl.when(lane.has_more(item))(add_more)


def _more_updates(lane: Lane, item: Item) -> list[tuple[Array | None, Callable]]:
    """Of the entries that a short ring has no places for: without the delta rule the beta of each, and a function that
    loads rows of its update in a layout."""
    arrays, found = lane.arrays, []
    for at, alive in lane.locate_more(item):

        def load_update(rows, layout, at=at, alive=alive):
            return where(alive, load(arrays.updates.at[at, item.head, rows], layout))

        strength = None if lane.call.delta else jnp.where(alive, arrays.gates[at, item.head, DIM], ZERO)
        found.append((strength, load_update))
    return found


def _fold_split(lane: Lane, item: Item, first: list[Entry] | None, left: Wide | None, band: Array | int) -> None:
    """`fold` of one band of a split state, which is in registers until all entries have been added.

    Its high half lies in shared memory, before and after. Its low half has none: each thread loads its numbers from
    global memory, where `Lane.fetch` has brought them to the L2 cache, and stores them there.
    """
    call, arrays, rows = lane.call, lane.arrays, pl.ds(band * BAND, BAND)
    low, low_scales, strips = arrays.low, arrays.low_scales, lane.strips()
    assert low is not None
    rests = [load(low.at[item.checkpoint, item.head, rows, strip], SPLIT) for strip in strips]
    scale = None if low_scales is None else load(low_scales.at[item.checkpoint, item.head, rows], SPLIT.reduce(1))
    pl.when(item.has_checkpoint)(lambda: plgpu.barrier_wait(lane.barrier(band)))
    state = []
    for strip, rest in zip(strips, rests, strict=True):
        rest = rest.astype(jnp.float32)
        rest = rest if scale is None else rest * spread(scale, rest.shape, 0, SPLIT)
        old = load(lane.state.at[band, :, strip], SPLIT).astype(jnp.float32) + rest
        decay = load(lane.numbers.at[lane.decay_row, strip], SPLIT.reduce(0))
        state.append(where(item.has_checkpoint, old * spread(decay, old.shape, 1, SPLIT)))

    def add(state, keys, i, update, strength):
        update = update.astype(jnp.float32)
        update = update if strength is None else strength * update
        loaded = [load(keys.at[i, strip], SPLIT.reduce(0)) for strip in strips]
        return [
            x + spread(update, x.shape, 0, SPLIT) * spread(key, x.shape, 1, SPLIT)
            for x, key in zip(state, loaded, strict=True)
        ]

    def add_chunk(c, chunk, carry):
        state, left = carry
        positions, (behind, left) = lane.positions(item, c), sum_behind(chunk, left)
        decay_keys(lane, chunk, behind, None)
        for i, (entry, at) in enumerate(zip(chunk, positions, strict=True)):
            update = where(entry.alive, load(arrays.updates.at[at, item.head, rows], SPLIT.reduce(1)))
            state = add(state, lane.numbers, i, update, entry.strength)
        return state, left

    def add_part(c, state):
        for i in range(PART):
            place = c * PART + i
            update = load(lane.updates.at[place, rows], SPLIT.reduce(1))
            state = add(state, lane.gates, place, update, None if call.delta else lane.strength(item, place))
        return state

    if not lane.short:
        state, _ = lane.each_chunk(item, first, add_chunk, (state, left))
    elif lane.places <= FOLDED_AT_ONCE:
        for c in range(lane.places // PART):
            state = add_part(c, state)
    else:
        state = lax.fori_loop(0, lane.places // PART, add_part, state)

    def add_more(state):
        for row, (strength, load_update) in enumerate(_more_updates(lane, item), lane.decay_row + 1):
            state = add(state, lane.numbers, row, load_update(rows, SPLIT.reduce(1)), strength)
        return state

    if lane.more:
        state = lax.cond(lane.has_more(item), add_more, lambda state: state, state)
    kept = jnp.float32 if low_scales is not None else low.dtype
    halves = [split(x, [call.state, kept], lane.interpret) for x in state]
    if low_scales is not None:  # A row's largest number is 127.
        largest = [jnp.max(jnp.abs(rest), axis=1) for _, rest in halves]
        scale = functools.reduce(jnp.maximum, largest) * np.float32(1 / 127)
        inverse = jnp.where(scale > 0, 1 / scale, ZERO)
        halves = [(high, to_int8(x, spread(inverse, x.shape, 0, SPLIT), lane.interpret)) for high, x in halves]
        store(low_scales.at[item.fold_to, item.head, rows], scale)
    for strip, (high, rest) in zip(strips, halves, strict=True):
        store(lane.state.at[band, :, strip], high)
        store(low.at[item.fold_to, item.head, rows, strip], rest)


def read_state(lane: Lane, item: Item, following: Array) -> None:
    """Overwrites the decayed probes with what each reads from the state; starts to copy that of the item that follows,
    whose words are kept, band by band."""
    probes = 2 * lane.call.time
    starts = range(0, probes, GROUP)

    def read_band(band, found):
        """Returns the products of the band before, and its own."""
        pl.when(item.has_checkpoint & ~item.folds)(lambda: plgpu.barrier_wait(lane.barrier(band)))
        # Several sums each, because products into one sum wait for each other.
        sums = [[zeros((BAND, GROUP), STATE)] * 4 for _ in starts]
        for strip in lane.strips():
            left = cut(load(lane.state.at[band, :, strip], STATE_LEFT))
            for i, start in enumerate(starts):
                right = cut(load(lane.numbers.at[pl.ds(start, GROUP), strip], STATE_RIGHT))
                for part in left:
                    sums[i] = [*sums[i][1:], multiply_state(sums[i][0], part, right, lane.interpret)]
        pl.when(item.folds & jnp.equal(band, 0))(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        synchronize(lane.interpret)  # All threads have read the band, and after the last one the probes.
        pl.when(following < lane.call.items)(lambda: lane.fetch(following, band))
        return [*found[1:], [functools.reduce(jnp.add, x) for x in sums]]

    # A loop, as the code of several bands in a row would be fetched more slowly than it runs.
    found = lax.fori_loop(0, BANDS, read_band, [[zeros((BAND, GROUP), STATE)] * len(starts)] * BANDS)
    for band, products in enumerate(found):
        for start, product in zip(starts, products, strict=True):
            n = min(GROUP, probes - start)
            target = lane.numbers.at[pl.ds(start, n), pl.ds(band * BAND, BAND)]
            store_rows(product, STATE, 1, target, lane.interpret)
