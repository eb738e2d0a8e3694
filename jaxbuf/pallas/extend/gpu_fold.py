"""Folds of `extend` on a GPU: the entries are added to a checkpoint in shared memory, which goes back to the pool."""

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
    spread,
    where,
)
from jaxbuf.pallas.extend.gpu_shape import CHUNK
from jaxbuf.pallas.extend.gpu_sums import factor, load_factors
from jaxbuf.pallas.lanes import end_copies, load, synchronize, wait_for_copies

type Array = jax.Array


def fold(lane: Lane, item: Item, total: list[Array]) -> None:
    """state · decay + Σ weight · u ⊗ k: chunk after chunk, or all that are in shared memory at once.

    Args:
      lane, item: It is served; `sums` has the decays, or their factors.
      total: Sum of the entries' gates, in parts.
    """
    shape, interpret = lane.shape, lane.interpret
    stages, wide = shape.stages, shape.wide

    def add(c, sources, last):
        """Adds chunks in shared memory, from chunk c on: where each is, its first entry, its length."""
        begins = jnp.equal(c, 0)
        decay = jnp.where(begins, factor(total), np.float32(1))
        steps = []
        for source, entry, n in sources:
            for i in range(0, n, CHUNK):
                start = min(i, n - CHUNK)  # the last takes some a second time
                steps.append((*source, start, _load_weights(lane, entry + start, i - start)))

        def add_to(i):
            half, state, barrier = lane.half(i)
            pl.when(item.has_checkpoint & begins)(lambda: plgpu.barrier_wait(barrier))

            updates = []
            for refs, _, start, j, weight in steps:
                here = [x.at[pl.ds(start + j, CHUNK), half].transpose((1, 0)) for x in refs]
                update = join([load(x, TALL_LEFT) for x in here])
                updates.append(cut(update * spread(weight, update.shape, 1, TALL_LEFT)))
            for columns in shape.parts:
                there = state.at[:, columns]
                new = where(item.has_checkpoint | ~begins, load(there, TALL).astype(jnp.float32) * decay)
                for (refs, start, _, j, _), update in zip(steps, updates, strict=True):
                    keys = [load(x.at[pl.ds(start + j, CHUNK), columns], TALL_RIGHT) for x in refs]
                    new = multiply(new, update, keys, interpret)
                there[...] = new.astype(shape.state)
            plgpu.commit_smem()  # for the copy to the pool

            @pl.when(last)
            def _():
                plgpu.copy_smem_to_gmem(state, lane.arrays.checkpoints.at[item.fold_to, item.head, half])

        lane.each_half(add_to)

    def fold_chunk(c, _):
        add(c, [(lane.first, c * CHUNK, CHUNK)], c + 1 == chunks)

        @pl.when(c + 1 < chunks)
        def _():
            # Not asked for ahead: what is on its way when the fold ends would be waited for by all others.
            lane.stage(lane.gather_chunk(item.place, item.head, c + 1))
            synchronize(interpret)

    def fold_later(j, _):
        lane.copy(item.head, CHUNK + j * wide, lane.later(0))
        end_copies(interpret)
        wait_for_copies(0, interpret)
        synchronize(interpret)
        add(j + 1, [(lane.later(0), CHUNK + j * wide, wide)], j + 1 == chunks)

    # What folds has at least one entry: the checkpoint is waited for, and goes back.
    if not stages:
        chunks = pl.cdiv(item.live, CHUNK)
        lax.fori_loop(0, chunks, fold_chunk, None)
        return
    chunks = pl.cdiv(item.live - CHUNK, wide)  # later ones
    wait_for_copies(0, interpret)
    synchronize(interpret)
    staged = [(lane.later(i), CHUNK + i * wide, wide) for i in range(stages)]
    add(0, [(lane.first, 0, CHUNK), *staged], chunks <= stages)
    if shape.room > CHUNK + stages * wide:
        lax.fori_loop(stages, chunks, fold_later, None)


def _load_weights(lane: Lane, entry: Array, skipped: int) -> Array:
    """Weights of a chunk of entries; of those skipped, 0."""
    weight = load_factors(lane, entry, CHUNK, TALL_LEFT.reduce(0))
    index = count((CHUNK,), 0, TALL_LEFT.reduce(0))
    return jnp.where(index < skipped, ZERO, weight) if skipped else weight
