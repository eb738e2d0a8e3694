"""Folds of `extend` on a GPU: an item's entries are added to its checkpoint in shared memory, which is copied back."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_lane import Item, Lane
from jaxbuf.pallas.extend.gpu_products import (
    TALL,
    TALL_LEFT,
    TALL_RIGHT,
    ZERO,
    by_row,
    count,
    cut,
    join,
    multiply,
    split,
    spread,
    to_int8,
    where,
)
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK
from jaxbuf.pallas.extend.gpu_sums import factor, load_factors
from jaxbuf.pallas.instructions import end_copies, synchronize, synchronize_warp, wait_for_copies
from jaxbuf.pallas.threads import load, store


def fold(lane: Lane, item: Item, totals: list[list[Array]], read_band: Callable[[Array], None]) -> None:
    """Makes the state in shared memory: checkpoint · exp(total) + Σ exp(decay since the entry) · update ⊗ key.

    Entries are added chunk after chunk, or all chunks that are in shared memory at once. As soon as a band is made, its
    copy to global memory starts. A checkpoint that is not split lies in shared memory as a whole, and each chunk is
    added to all bands. Of a split one there is shared memory for the halves of one band: all chunks are added to it,
    its high half is multiplied with the probes, and then the next band is fetched. With keys of 256 numbers there is
    none for low halves, which are loaded from global memory.

    Args:
      lane: Its `decays` hold the entries' decays, or their exponentials.
      item: The item that is served. It folds, so it has at least one entry.
      totals: For each head of a stack the sum of the entries' gates, in parts. A head of a stack is a band, but if
        stacks are windows: then a band has rows of several heads.
      read_band: Multiplies a band of a folded split state with the probes; its shared memory is `Lane.halves`' first.
    """
    if lane.arrays.low is None:

        def add(c, chunks_in_memory, last):
            weigh = functools.partial(_weigh, lane, totals, c, chunks_in_memory)
            same = weigh(0) if len(totals) == 1 else None

            def add_to(i):
                decay, steps = same or weigh(i)
                rows, state, barrier = lane.band(i)
                waits = lane.and_own(item.has_checkpoint & jnp.equal(c, 0), item.head, i)
                pl.when(waits)(lambda: plgpu.barrier_wait(barrier))
                _add(lane, item, c, i, decay, steps, [state], [state])
                plgpu.commit_smem()  # The copy below reads what was stored.
                stored = lane.arrays.checkpoints.at[(item.fold_to, *lane.place(item.head, rows))]
                stores = lane.and_own(jnp.asarray(last), item.head, i)
                pl.when(stores)(lambda: plgpu.copy_smem_to_gmem(state, stored))

            lane.each_band(add_to)

        _each_chunk(lane, item, add, begun=False)
        return

    halves, bands = lane.halves(), len(lane.schedule.bands)

    def fold_band(i):
        rows = pl.ds(i * BAND, BAND)

        @pl.when(item.has_checkpoint)
        def _():
            for _, _, barrier in halves:
                plgpu.barrier_wait(barrier)

        def add(c, chunks_in_memory, _):
            decay, steps = _weigh(lane, totals, c, chunks_in_memory, i)
            parts = [target for _, target, _ in halves]
            before, after = [*parts], [*parts]
            if lane.schedule.low_in_registers:
                low = lane.arrays.low
                assert low is not None
                place = lane.place(item.head, rows)
                checkpoint = jnp.where(jnp.equal(c, 0), item.checkpoint, item.fold_to)
                before.append(low.at[(checkpoint, *place)])
                after.append(low.at[(item.fold_to, *place)])
            _add(lane, item, c, i, decay, steps, before, after)

        _each_chunk(lane, item, add, begun=i > 0)
        plgpu.commit_smem()  # The copies below read what was stored.

        @pl.when(lane.and_own(jnp.asarray(True), item.head, i))
        def _():
            place = item.fold_to, *lane.place(item.head, rows)
            for source, target, _ in halves:
                plgpu.copy_smem_to_gmem(target, source.at[place])
            if lane.low_scales is not None and lane.arrays.low_scales is not None:
                store(lane.arrays.low_scales.at[place], load(lane.low_scales.at[rows], TALL.reduce(1)))

        read_band(i)

        @pl.when(i + 1 < bands)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            synchronize(lane.interpret)

            @pl.when(item.has_checkpoint)
            def _():
                for half in halves:
                    lane.fetch_half(half, item.checkpoint, item.head, pl.ds((i + 1) * BAND, BAND))

    lax.fori_loop(0, bands, lambda i, _: fold_band(i), None)


def _each_chunk(lane: Lane, item: Item, add: Callable, begun: Array | bool) -> None:
    """Brings an item's chunks to shared memory, one after the other or several at once.

    Args:
      lane, item: The lane, and its item.
      add: Called with the number of the first chunk that is in shared memory; where each lies, its first entry and its
        length; and whether none follow.
      begun: Whether this is not the first time, so that the first chunk may have been overwritten by later ones.
    """
    schedule, interpret = lane.schedule, lane.interpret
    stages, later_size = schedule.stages, schedule.later_size

    def wait_for_readers():
        # With a split checkpoint, for all threads to be done with the chunk before. The others' `add` waits for them.
        if lane.arrays.low is not None:
            synchronize(interpret)

    def bring_chunk(c):
        # A chunk is not asked for earlier: the code behind the fold, which every item runs, would have to wait for
        # loads that are on their way when the fold ends.
        chunk = lane.gather_chunk(item.line, item.head, c)
        wait_for_readers()
        lane.write_chunk(chunk)
        synchronize(interpret)

    def bring_later(j):
        wait_for_readers()
        lane.copy(item.head, CHUNK + j * later_size, lane.later_chunk(0))
        end_copies(interpret)
        wait_for_copies(0, interpret)
        synchronize(interpret)

    def add_chunk(c, _):
        add(c, [(lane.first_chunk, c * CHUNK, CHUNK)], c + 1 == chunks)
        pl.when(c + 1 < chunks)(lambda: bring_chunk(c + 1))

    def add_later(j, _):
        bring_later(j)
        add(j + 1, [(lane.later_chunk(0), CHUNK + j * later_size, later_size)], j + 1 == chunks)

    if not stages:
        chunks = pl.cdiv(item.live, CHUNK)
        if begun is not False and lane.call.max_live > CHUNK:
            pl.when(begun & (chunks > 1))(lambda: bring_chunk(0))
        lax.fori_loop(0, chunks, add_chunk, None)
        return
    chunks = pl.cdiv(item.live - CHUNK, later_size)  # later chunks
    loops = lane.call.max_live > CHUNK + stages * later_size
    if begun is not False and loops:
        pl.when(begun & (chunks > stages))(lambda: bring_later(0))
    wait_for_copies(0, interpret)
    synchronize(interpret)
    staged = [(lane.later_chunk(i), CHUNK + i * later_size, later_size) for i in range(stages)]
    add(0, [(lane.first_chunk, 0, CHUNK), *staged], chunks <= stages)
    if loops:
        lax.fori_loop(stages, chunks, add_later, None)


def _weigh(lane: Lane, totals: list[list[Array]], c: Array | int, chunks_in_memory: list, band: Array | int):
    """What a band is multiplied with before chunks are added, and in which steps: chunk, first entry, and weights for
    each head that the band has rows of."""
    heads: list[Array | int] = [*range(len(totals))]
    if len(totals) > 1 and not lane.call.head_values:
        heads = [band]
        totals = [[jnp.where(jnp.equal(band, 0), x, y) for x, y in zip(*totals, strict=True)]]
    decays = [jnp.where(jnp.equal(c, 0), factor(total), np.float32(1)) for total in totals]
    decay, steps = _by_row(lane, decays, band, (BAND,), TALL.reduce(1)), []
    for chunk, entry, n in chunks_in_memory:
        for i in range(0, n, CHUNK):
            start = min(i, n - CHUNK)  # The last step of a chunk may take some entries again, with weight 0.
            steps.append((chunk, start, [_load_weights(lane, entry + start, i - start, head) for head in heads]))
    return decay, steps


def _by_row(lane: Lane, numbers: list[Array], band: Array | int, dims: tuple[int, ...], layout) -> Array:
    """`by_row` of the heads that a band has rows of."""
    return by_row(numbers, lane.first_rows - band * BAND, lane.call.head_rows, dims, layout)


def _add(
    lane: Lane, item: Item, c: Array | int, band: Array | int, decay: Array, steps: list, before: list, after: list
) -> None:
    """Adds chunks of entries to a band of the state.

    Args:
      lane, item: The lane, and its item.
      c: Number of the first chunk; with chunk 0, the state is zeros if there is no checkpoint.
      band: Its number.
      decay, steps: From `_weigh`.
      before, after: Where the band lies; or its high half, and its low half.
    """
    interpret, rows = lane.interpret, pl.ds(band * BAND, BAND)
    updates, rests = [], []
    for chunk, start, weights in steps:
        refs = [x.at[pl.ds(chunk.updates + start, CHUNK), rows].transpose((1, 0)) for x in chunk.planes]
        update = join([load(x, TALL_LEFT) for x in refs])
        spreads = [spread(weight, update.shape, 1, TALL_LEFT) for weight in weights]
        updates.append(cut(update * _by_row(lane, spreads, band, update.shape, TALL_LEFT)))
    scales = None if lane.low_scales is None else lane.low_scales.at[rows]
    scale = None if scales is None else load(scales, TALL.reduce(1))
    for columns in lane.schedule.state_strips:
        old = [load(part.at[:, columns], TALL).astype(jnp.float32) for part in before]
        strips = [part.at[:, columns] for part in after]
        if scale is not None:
            old[1] = old[1] * spread(scale, old[1].shape, 0, TALL)
        decays = spread(decay, old[0].shape, 0, TALL) if decay.ndim else decay
        new = where(item.has_checkpoint | jnp.not_equal(c, 0), join(old) * decays)
        for (chunk, start, _), update in zip(steps, updates, strict=True):
            keys = [load(x.at[pl.ds(chunk.keys + start, CHUNK), columns], TALL_RIGHT) for x in chunk.planes]
            new = multiply(new, update, keys, interpret)
        if scales is None:
            for strip, part in zip(strips, split(new, [x.dtype for x in strips], interpret), strict=True):
                store(strip, part)
        else:
            high, rest = split(new, [lane.call.state, jnp.float32], interpret)
            store(strips[0], high)
            rests.append((strips[1], rest))
    if scales is not None:
        _store_scaled(scales, rests, interpret)


def _store_scaled(scales, rests: list, interpret: bool) -> None:
    """Stores what the high halves of a band leave as int8, and the scales of its rows: a row's largest number is 127.

    Args:
      scales: Where the scales of the band's rows lie in shared memory.
      rests: For each strip of the band where its low half lies, and what is left, in layout `TALL`.
      interpret: Whether this runs in Pallas' interpreter.
    """
    largest = [jnp.max(jnp.abs(rest), axis=1) for _, rest in rests]
    scale = functools.reduce(jnp.maximum, largest) * np.float32(1 / 127)
    inverse = jnp.where(scale > 0, 1 / scale, ZERO)
    for strip, rest in rests:
        store(strip, to_int8(rest, spread(inverse, rest.shape, 0, TALL), interpret))
    synchronize_warp(interpret)  # Four threads of a warp have read the scale that each of them writes.
    store(scales, scale)


def _load_weights(lane: Lane, entry: Array, skipped: int, head: Array | int) -> Array:
    """Loads the weights of CHUNK entries from `entry` on, for a head of a stack; 0 for the first `skipped` of them."""
    weight = load_factors(lane, entry, CHUNK, TALL_LEFT.reduce(0), head)
    index = count((CHUNK,), 0, TALL_LEFT.reduce(0))
    return jnp.where(index < skipped, ZERO, weight) if skipped else weight
