"""Folds of `extend` on a GPU: an item's entries are added to its checkpoint in shared memory, which is copied back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.gpu_lane import Item, Lane
from jaxbuf.pallas.extend.gpu_products import (
    TALL,
    TALL_LEFT,
    TALL_RIGHT,
    ZERO,
    count,
    cut,
    join,
    multiply,
    split,
    spread,
    to_int8,
    where,
)
from jaxbuf.pallas.extend.gpu_schedule import CHUNK
from jaxbuf.pallas.extend.gpu_sums import factor, load_factors
from jaxbuf.pallas.instructions import end_copies, synchronize, wait_for_copies
from jaxbuf.pallas.threads import load

type Array = jax.Array


def fold(lane: Lane, item: Item, total: list[Array]) -> None:
    """Makes the state in shared memory: checkpoint · exp(total) + Σ exp(decay since the entry) · update ⊗ key.

    Entries are added chunk after chunk, or all chunks that are in shared memory at once. While the last are added, the
    copy of each finished band to global memory starts.

    Args:
      lane: Its `decays` hold the entries' decays, or their exponentials.
      item: The item that is served. It folds, so it has at least one entry.
      total: The sum of the entries' gates, in parts.
    """
    schedule, interpret = lane.schedule, lane.interpret
    stages, later_size = schedule.stages, schedule.later_size

    def add(c, chunks_in_memory, last):
        """Adds chunks that are in shared memory.

        Args:
          c: Number of the first of them; with chunk 0, the checkpoint is waited for and decays.
          chunks_in_memory: For each chunk where it lies, its first entry and its length.
          last: Whether none follow.
        """
        begins = jnp.equal(c, 0)
        decay = jnp.where(begins, factor(total), np.float32(1))
        steps = []
        for chunk, entry, n in chunks_in_memory:
            for i in range(0, n, CHUNK):
                start = min(i, n - CHUNK)  # The last step of a chunk may take some entries again, with weight 0.
                steps.append((chunk, start, _load_weights(lane, entry + start, i - start)))

        def add_to(i):
            band, state, barrier = lane.band(i)
            halves, scale = [(state, barrier, lane.arrays.checkpoints)], None
            if lane.arrays.low is not None:
                halves.append((*lane.low_band(i), lane.arrays.low))
            if lane.arrays.low_scales is not None:  # Behind the first chunks, those that were written with them count.
                row = jnp.where(begins, item.checkpoint, item.fold_to)
                scale = load(lane.arrays.low_scales.at[row, item.head, band], TALL.reduce(1))

            @pl.when(item.has_checkpoint & begins)
            def _():
                for _, arrived, _ in halves:
                    plgpu.barrier_wait(arrived)

            updates = []
            for chunk, start, weight in steps:
                refs = [x.at[pl.ds(chunk.updates + start, CHUNK), band].transpose((1, 0)) for x in chunk.planes]
                update = join([load(x, TALL_LEFT) for x in refs])
                updates.append(cut(update * spread(weight, update.shape, 1, TALL_LEFT)))
            rests = []
            for columns in schedule.state_strips:
                strips = [half.at[:, columns] for half, _, _ in halves]
                old = [load(strip, TALL).astype(jnp.float32) for strip in strips]
                if scale is not None:
                    old[1] = old[1] * spread(scale, old[1].shape, 0, TALL)
                new = where(item.has_checkpoint | ~begins, join(old) * decay)
                for (chunk, start, _), update in zip(steps, updates, strict=True):
                    keys = [load(x.at[pl.ds(chunk.keys + start, CHUNK), columns], TALL_RIGHT) for x in chunk.planes]
                    new = multiply(new, update, keys, interpret)
                if scale is None:
                    for strip, half in zip(strips, split(new, [x.dtype for x in strips], interpret), strict=True):
                        strip[...] = half
                else:
                    strips[0][...], rest = split(new, [lane.call.state, jnp.float32], interpret)
                    rests.append((strips[1], rest))
            if rests:
                _store_scaled(lane, item, band, rests)
            plgpu.commit_smem()  # The copies below read what was stored.

            @pl.when(last)
            def _():
                for half, _, target in halves:
                    plgpu.copy_smem_to_gmem(half, target.at[item.fold_to, item.head, band])

        lane.each_band(add_to)

    def fold_chunk(c, _):
        add(c, [(lane.first_chunk, c * CHUNK, CHUNK)], c + 1 == chunks)

        @pl.when(c + 1 < chunks)
        def _():
            # The next chunk is not asked for earlier: the code behind the fold, which every item runs, would have to
            # wait for loads that are on their way when the fold ends.
            lane.write_chunk(lane.gather_chunk(item.line, item.head, c + 1))
            synchronize(interpret)

    def fold_later(j, _):
        lane.copy(item.head, CHUNK + j * later_size, lane.later_chunk(0))
        end_copies(interpret)
        wait_for_copies(0, interpret)
        synchronize(interpret)
        add(j + 1, [(lane.later_chunk(0), CHUNK + j * later_size, later_size)], j + 1 == chunks)

    if not stages:
        chunks = pl.cdiv(item.live, CHUNK)
        lax.fori_loop(0, chunks, fold_chunk, None)
        return
    chunks = pl.cdiv(item.live - CHUNK, later_size)  # later chunks
    wait_for_copies(0, interpret)
    synchronize(interpret)
    staged = [(lane.later_chunk(i), CHUNK + i * later_size, later_size) for i in range(stages)]
    add(0, [(lane.first_chunk, 0, CHUNK), *staged], chunks <= stages)
    if lane.call.max_live > CHUNK + stages * later_size:
        lax.fori_loop(stages, chunks, fold_later, None)


def _store_scaled(lane: Lane, item: Item, band, rests: list) -> None:
    """Stores what the high halves of a band leave as int8, and the scales of its rows: a row's largest number is 127.

    Args:
      lane, item: The lane, and its item.
      band: The band's rows.
      rests: For each strip of the band where its low half lies in shared memory, and what is left, in layout `TALL`.
    """
    scale_ref = lane.arrays.low_scales
    assert scale_ref is not None
    largest = [jnp.max(jnp.abs(rest), axis=1) for _, rest in rests]
    scale = functools.reduce(jnp.maximum, largest) * np.float32(1 / 127)
    inverse = jnp.where(scale > 0, 1 / scale, ZERO)
    for strip, rest in rests:
        strip[...] = to_int8(rest, spread(inverse, rest.shape, 0, TALL), lane.interpret)
    scale_ref[item.fold_to, item.head, band] = scale


def _load_weights(lane: Lane, entry: Array, skipped: int) -> Array:
    """Loads the weights of CHUNK entries from `entry` on; 0 for the first `skipped` of them."""
    weight = load_factors(lane, entry, CHUNK, TALL_LEFT.reduce(0))
    index = count((CHUNK,), 0, TALL_LEFT.reduce(0))
    return jnp.where(index < skipped, ZERO, weight) if skipped else weight
