"""What the entries of an item add to its outputs, in `extend` on a GPU: chunk after chunk.

Chunks behind the first come one at a time through the registers, to its place; or past them, `Shape.stages` at once,
where there is shared memory for that.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.pallas.extend.gpu_lane import Item, Lane
from jaxbuf.pallas.extend.gpu_products import (
    LEFT,
    PRODUCT,
    RIGHT,
    VECTORS,
    ZERO,
    count,
    join,
    multiply,
    pick,
    spread,
    where,
    zeros,
)
from jaxbuf.pallas.extend.gpu_shape import CHUNK, GROUP, WIDE
from jaxbuf.pallas.lanes import EVERY, THREADS, end_copies, load, publish, synchronize, wait_for_copies

type Array = jax.Array


def sum_decays(lane: Lane, live: Array) -> Array:
    """The gates of an item's entries become, in place, the sums of those behind each, from old to new; all of them.

    Entry n is in thread n mod THREADS, block n // THREADS: it takes all gates of later blocks, and those after it of
    its own.
    """
    index, sums, total = count((THREADS,), 0, EVERY), [], ZERO

    def add_gates(block, c, carry):
        (*before, sum), total = carry
        for i in range(CHUNK):
            gate = lane.sums[c * CHUNK + i]
            before = [x + gate for x in before]
            sum = sum + jnp.where(index < (c * CHUNK + i) - block * THREADS, gate, ZERO)
            total = total + gate
        return [*before, sum], total

    for block in range(lane.shape.columns // THREADS):
        start, end = (jnp.minimum(pl.cdiv(live, CHUNK), (block + i) * THREADS // CHUNK) for i in range(2))
        begun = [*sums, zeros((THREADS,), EVERY)], total
        if block == 0:
            start, begun = 1, add_gates(0, 0, begun)
        sums, total = lax.fori_loop(start, end, functools.partial(add_gates, block), begun)
    synchronize(lane.interpret)  # all have read the gates
    for i, x in enumerate(sums):
        lane.sums[pl.ds(THREADS * i, THREADS)] = x
    synchronize(lane.interpret)
    return jnp.asarray(total)


def add_all(lane: Lane, item: Item, gates: list[Array], number: Array | None) -> list[Array]:
    """Sums the entries' parts of what the new keys recall and of the outputs; multiplies the new tokens' pairs.

    Args:
      lane, item: It is served; `sums` has the decays.
      gates: Of the new tokens.
      number: Which item was drawn, to be published; None: it was dealt.

    Returns:
      2 T vectors [value_dim]; zeros where the item folds.
    """
    shape, interpret = lane.shape, lane.interpret
    stages, wide = shape.stages, shape.wide
    loops = shape.room > CHUNK + WIDE  # an item may have more later chunks than one
    add = functools.partial(_add_chunk, lane, item, gates)

    def add_staged(c, carry):
        added, found = carry
        next_found = lax.cond(c + 1 < chunks, lambda: lane.gather_chunk(item.place, item.head, c + 1), lambda: found)
        synchronize(interpret)  # all are done with the chunk before
        lane.stage(found)
        synchronize(interpret)
        return add(c * CHUNK, lane.first, added), next_found

    def add_later(j, added):
        positions = lane.locate_later(item.place, jnp.minimum(j + stages, chunks - 1)) if loops else []
        wait_for_copies(stages - 1, interpret)
        synchronize(interpret)
        there = lane.later(lax.rem(j, stages))
        added = add(CHUNK + j * wide, there, added)
        if loops:
            synchronize(interpret)  # all are done with it
            pl.when(j + stages < chunks)(lambda: lane.copy(item.head, positions, there))
            end_copies(interpret)
        return added

    empty = zeros((shape.value_dim,), VECTORS[shape.value_dim])
    added = add(0, lane.first, [empty] * (2 * shape.time), number)
    if stages:
        chunks = jnp.where(item.folds, 0, pl.cdiv(item.live - CHUNK, wide))
        if loops:
            added = lax.fori_loop(0, chunks, add_later, added)
        else:
            added = lax.cond(chunks > 0, lambda: add_later(0, added), lambda: added)
    elif shape.room > CHUNK:
        chunks = jnp.where(item.folds, 1, pl.cdiv(item.live, CHUNK))

        def add_others():
            return lax.fori_loop(1, chunks, add_staged, (added, lane.gather_chunk(item.place, item.head, 1)))[0]

        added = lax.cond(chunks > 1, add_others, lambda: added)
    return [where(~item.folds, x) for x in added] if shape.frugal else added


def _add_chunk(
    lane: Lane, item: Item, gates: list[Array], entry: Array | int, there, added: list[Array], number=None
) -> list[Array]:
    """Adds the entries of a chunk, from `entry` on; behind those in the place of the first lie the new keys."""
    shape = lane.shape
    refs, start, first_update = there
    first = there is lane.first
    n, length = 2 * CHUNK, CHUNK if first else shape.wide
    right = [load(x.at[pl.ds(start, n), pl.ds(0, shape.key_dim)].transpose((1, 0)), RIGHT) for x in refs]
    columns = pl.ds(shape.span - CHUNK if first else 0, n)
    token = count((n,), 0, PRODUCT.reduce(0)) - (CHUNK if first else n)  # new keys count from 0
    since = jnp.where(token < 0, load(lane.sums.at[pl.ds(entry, n)], PRODUCT.reduce(0)), ZERO)
    decays = []
    for t, gate in enumerate(gates):
        since = since + jnp.where(token < t, gate, ZERO)
        decays.append(jnp.exp(since))
    for tile in shape.tiles:
        left = [load(x.at[pl.ds(CHUNK + tile, CHUNK), pl.ds(0, shape.key_dim)], LEFT) for x in lane.planes]
        matches = multiply(zeros((CHUNK, n), PRODUCT), left, right, lane.interpret)
        pairs = range(tile, min(tile + CHUNK, 2 * shape.time))
        if shape.frugal:
            for i in pairs:
                lane.products[i, columns] = pick(matches, i - tile, 0, PRODUCT) * decays[i % shape.time]
            continue
        decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
        for i in pairs:
            its_decay = spread(decays[i % shape.time], decay.shape, 1, PRODUCT)
            decay = jnp.where(line == i - tile, its_decay, decay)
        lane.products[pl.ds(tile, CHUNK), columns] = matches * decay
    if number is not None:
        publish(number, lane.sums.at[shape.columns])
    synchronize(lane.interpret)

    def add_group(group, added):
        for i in group:
            rows = [x.at[first_update + i, pl.ds(0, shape.value_dim)] for x in refs]
            update = join([load(row, VECTORS[shape.value_dim]) for row in rows])
            added = [x + lane.products[j, columns.start + i] * update for j, x in enumerate(added)]
        return added

    if shape.frugal:
        return add_group(range(length), added)
    for i in range(0, length, GROUP):  # the work of several tokens is worth a branch
        some, group = ~item.folds & (item.live > entry + i), range(i, i + GROUP)
        added = lax.cond(some, functools.partial(add_group, group), lambda added: added, added)
    return added
