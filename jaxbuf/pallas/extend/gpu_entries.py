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
    spread,
    where,
    zeros,
)
from jaxbuf.pallas.extend.gpu_shape import CHUNK, GROUP, WIDE, Shape
from jaxbuf.pallas.extend.gpu_sums import factor, load_decays
from jaxbuf.pallas.lanes import end_copies, load, store_rows, synchronize, wait_for_copies

type Array = jax.Array


def add_all(lane: Lane, item: Item, gates: list[list[Array]]) -> list[Array]:
    """Sums the entries' parts of what the new keys recall and of the outputs; multiplies the new tokens' pairs.

    Args:
      lane, item: It is served; `sums` has the decays.
      gates: Of the new tokens, in parts.

    Returns:
      2 T vectors [value_dim]; zeros where the item folds.
    """
    shape, interpret = lane.shape, lane.interpret
    stages, wide = shape.stages, shape.wide
    loops = shape.room > CHUNK + WIDE  # an item may have more later chunks than one
    # For all chunks, if there are registers.
    left = [_load_left(lane, 0, part) for part in _parts(shape)] if shape.frugal and loops else None
    add = functools.partial(_add_chunk, lane, item, gates, left)

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
    added = add(0, lane.first, [empty] * (2 * shape.time))
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


def _parts(shape: Shape) -> list:
    """Halves of the columns of a key."""
    half = shape.key_dim // 2
    return [pl.ds(i * half, half) for i in range(2)]


def _load_left(lane: Lane, tile: int, part) -> list[Array]:
    """New keys and queries from pair `tile` on, some columns, as a left side of a product with keys."""
    return [load(x.at[pl.ds(CHUNK + tile, CHUNK), part], LEFT) for x in lane.planes]


def _add_chunk(
    lane: Lane, item: Item, gates: list[list[Array]], left: list | None, entry: Array | int, there, added: list[Array]
) -> list[Array]:
    """Adds the entries of a chunk, from `entry` on; behind those in the place of the first lie the new keys."""
    shape = lane.shape
    refs, start, first_update = there
    first = there is lane.first
    n, length = 2 * CHUNK, CHUNK if first else shape.wide
    parts = _parts(shape)
    right = [[load(x.at[pl.ds(start, n), part].transpose((1, 0)), RIGHT) for x in refs] for part in parts]
    columns = pl.ds(shape.span - CHUNK if first else 0, n)
    token = count((n,), 0, PRODUCT.reduce(0)) - (CHUNK if first else n)  # new keys count from 0
    since = [jnp.where(token < 0, x, ZERO) for x in load_decays(lane, entry, n, PRODUCT.reduce(0))]
    decays = []
    for t, gate in enumerate(gates):
        since = [x + jnp.where(token < t, y, ZERO) for x, y in zip(since, gate, strict=True)]
        decays.append(factor(since))
    for tile in shape.tiles:
        # Two sums: products that follow one another would wait for each other.
        sums = []
        for i, part in enumerate(parts):
            its_left = left[i] if left else _load_left(lane, tile, part)
            sums.append(multiply(zeros((CHUNK, n), PRODUCT), its_left, right[i], lane.interpret))
        matches = sums[0] + sums[1]
        pairs = range(tile, min(tile + CHUNK, 2 * shape.time))
        if shape.frugal:
            matches = matches * spread(decays[0], matches.shape, 1, PRODUCT)
            store_rows(matches, PRODUCT, 0, lane.products.at[:, columns], lane.interpret)
            continue
        decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
        for i in pairs:
            its_decay = spread(decays[i % shape.time], decay.shape, 1, PRODUCT)
            decay = jnp.where(line == i - tile, its_decay, decay)
        lane.products[pl.ds(tile, CHUNK), columns] = matches * decay
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
