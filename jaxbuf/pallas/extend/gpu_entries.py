"""What the entries of an item add to its outputs, in `extend` on a GPU: chunk after chunk.

Chunks behind the first come one at a time through the registers, to its place; or past them, `Shape.stages` at once,
where there is shared memory for that. Products of keys are weights of updates, which are added one by one, a thread a
number; or, if tokens only come one by one and an item may have many entries, a chunk at once on the tensor cores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.pallas.extend.gpu_lane import Item, Lane
from jaxbuf.pallas.extend.gpu_products import (
    LEFT,
    PRODUCT,
    RIGHT,
    TALL,
    TALL_LEFT,
    TALL_RIGHT,
    VECTORS,
    ZERO,
    count,
    cut,
    join,
    multiply,
    spread,
    where,
    zeros,
)
from jaxbuf.pallas.extend.gpu_shape import CHUNK, GROUP, TILE, WIDE, Shape
from jaxbuf.pallas.extend.gpu_sums import factor, load_decays, load_factors
from jaxbuf.pallas.lanes import end_copies, load, store_rows, synchronize, wait_for_copies

type Array = jax.Array


def add_all(lane: Lane, item: Item, gates: list[list[Array]]) -> list[Array]:
    """Sums the entries' parts of what the new keys recall and of the outputs; multiplies the new tokens' pairs.

    Args:
      lane, item: It is served; `sums` has the decays, or their factors.
      gates: Of the new tokens, in parts.

    Returns:
      2 T vectors [value_dim]; zeros where the item folds.
    """
    shape, interpret = lane.shape, lane.interpret
    stages, wide = shape.stages, shape.wide
    loops = shape.room > CHUNK + WIDE  # an item may have more later chunks than one
    # For all chunks, if there are registers.
    left = [_load_left(lane, 0, part) for part in _parts(shape)] if shape.frugal and loops else None
    if shape.multiplies:
        return _multiply_all(lane, item, gates, left)
    add = functools.partial(_add_chunk, lane, item, gates, left)

    def add_staged(c, carry):
        added, found = carry
        next_found = lax.cond(c + 1 < chunks, lambda: lane.gather_chunk(item.place, item.head, c + 1), lambda: found)
        synchronize(interpret)  # all are done with the chunk before
        lane.stage(found)
        synchronize(interpret)
        return add(c * CHUNK, lane.first, added), next_found

    def add_later(j, added):
        wait_for_copies(stages - 1, interpret)
        synchronize(interpret)
        added = add(CHUNK + j * wide, lane.later(lax.rem(j, stages)), added)
        if loops:
            synchronize(interpret)  # all are done with it
            pl.when(j + stages < chunks)(lambda: lane.copy_later(item.head, j + stages))
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
    """Parts of the columns of a key: a sum for each, because products that follow one another wait for each other."""
    n = shape.key_dim // (4 if shape.multiplies else 2)
    return [pl.ds(start, n) for start in range(0, shape.key_dim, n)]


def _load_left(lane: Lane, tile: int, part) -> list[Array]:
    """New keys and queries from pair `tile` on, some columns, as a left side of a product with keys."""
    return [load(x.at[pl.ds(CHUNK + tile, CHUNK), part], LEFT) for x in lane.planes]


def _match(lane: Lane, gates: list[list[Array]], left: list | None, entry: Array | int, there):
    """Products of new keys and queries with a chunk's keys, and the tokens' decays since: of each tile of pairs.

    Behind the entries of a chunk in the place of the first lie the new keys.
    """
    shape = lane.shape
    refs, start, _ = there
    n, parts = 2 * CHUNK, _parts(shape)
    right = [[load(x.at[pl.ds(start, n), part].transpose((1, 0)), RIGHT) for x in refs] for part in parts]
    token = count((n,), 0, PRODUCT.reduce(0)) - (CHUNK if there is lane.first else n)  # new keys count from 0
    decays = []
    if shape.frugal:
        decays.append(jnp.where(token < 0, load_factors(lane, entry, n, PRODUCT.reduce(0)), np.float32(1)))
    else:
        since = [jnp.where(token < 0, x, ZERO) for x in load_decays(lane, entry, n, PRODUCT.reduce(0))]
        for t, gate in enumerate(gates):
            since = [x + jnp.where(token < t, y, ZERO) for x, y in zip(since, gate, strict=True)]
            decays.append(factor(since))
    for tile in shape.tiles:
        sums = []
        for i, part in enumerate(parts):
            its_left = left[i] if left else _load_left(lane, tile, part)
            sums.append(multiply(zeros((CHUNK, n), PRODUCT), its_left, right[i], lane.interpret))
        while len(sums) > 1:
            sums = [x + y for x, y in zip(sums[::2], sums[1::2], strict=True)]
        (matches,) = sums
        if shape.frugal:
            yield tile, matches * spread(decays[0], matches.shape, 1, PRODUCT)
            continue
        decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
        for i in range(tile, min(tile + CHUNK, 2 * shape.time)):
            its_decay = spread(decays[i % shape.time], decay.shape, 1, PRODUCT)
            decay = jnp.where(line == i - tile, its_decay, decay)
        yield tile, matches * decay


def _add_chunk(
    lane: Lane, item: Item, gates: list[list[Array]], left: list | None, entry: Array | int, there, added: list[Array]
) -> list[Array]:
    """Adds the entries of a chunk, from `entry` on, one by one."""
    shape = lane.shape
    refs, _, first_update = there
    first = there is lane.first
    length, columns = CHUNK if first else shape.wide, pl.ds(shape.span - CHUNK if first else 0, 2 * CHUNK)
    for tile, products in _match(lane, gates, left, entry, there):
        if shape.frugal:
            store_rows(products, PRODUCT, 0, lane.products.at[:, columns], lane.interpret)
        else:
            lane.products[pl.ds(tile, CHUNK), columns] = products
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


def _multiply_all(lane: Lane, item: Item, gates: list[list[Array]], left: list | None) -> list[Array]:
    """`add_all` for one token, on the tensor cores."""
    shape, interpret = lane.shape, lane.interpret
    stages, wide = shape.stages, shape.wide
    chunks = jnp.where(item.folds, 0, pl.cdiv(item.live - CHUNK, wide))

    def multiply_later(j, sums):
        wait_for_copies(stages - 1, interpret)
        synchronize(interpret)
        there = lane.later(lax.rem(j, stages))
        _write_weights(lane, gates, left, CHUNK + j * wide, there)
        synchronize(interpret)
        operands = _load_chunk(lane, there, wide)
        synchronize(interpret)  # all are done with it
        # Behind these loads and before the next ones: what is asked for later waits for the copies to be on their way.
        pl.when(j + stages < chunks)(lambda: lane.copy_later(item.head, j + stages))
        end_copies(interpret)
        return _multiply_chunk(*operands, sums, interpret)

    _write_weights(lane, gates, left, 0, lane.first)
    synchronize(interpret)
    # Of each half of the outputs two sums: products that follow one another would wait for each other.
    sums = [zeros((TILE, 8), TALL)] * (2 * len(shape.halves))
    sums = _multiply_chunk(*_load_chunk(lane, lane.first, CHUNK), sums, interpret)
    sums = lax.fori_loop(0, chunks, multiply_later, sums)
    for half, high, low in zip(shape.halves, sums[::2], sums[1::2], strict=True):
        store_rows(high + low, TALL, 1, lane.reads.at[:, half], interpret)
    synchronize(interpret)
    return [where(~item.folds, load(lane.reads.at[i], VECTORS[shape.value_dim])) for i in range(2)]


def _write_weights(lane: Lane, gates: list[list[Array]], left: list | None, entry: Array | int, there) -> None:
    """Writes the weights of a chunk's entries, as halves, over the keys of the first chunk; those of the new keys too.

    Rows 0 and 1 are what the new key recalls and what the query reads; the other half's stand in the rows from 8 on.
    """
    first, interpret = there is lane.first, lane.interpret
    for _, products in _match(lane, gates, left, entry, there):
        if first:
            columns = pl.ds(lane.shape.span - CHUNK, 2 * CHUNK)
            store_rows(products, PRODUCT, 0, lane.products.at[:, columns], interpret)
            synchronize(interpret)  # all are done with the keys
        for i, half in enumerate(cut(products)):
            here = lane.planes[0].at[pl.ds(8 * i, 2), pl.ds(0, products.shape[1])]
            store_rows(half, PRODUCT, 0, here, interpret)


def _load_chunk(lane: Lane, there, n: int) -> tuple[list[Array], list[Array]]:
    """A chunk's n updates, by halves of their columns, and its weights, by halves of their bits."""
    (ref,), _, first_update = there
    updates = [ref.at[pl.ds(first_update, n), half].transpose((1, 0)) for half in lane.shape.halves]
    weights = [lane.planes[0].at[pl.ds(8 * i, 8), pl.ds(0, n)].transpose((1, 0)) for i in range(2)]
    return [load(x, TALL_LEFT) for x in updates], [load(x, TALL_RIGHT) for x in weights]


def _multiply_chunk(updates: list[Array], weights: list[Array], sums: list[Array], interpret: bool) -> list[Array]:
    """Adds a chunk of entries on the tensor cores.

    Args:
      sums: [TILE, 8], `TALL`: of each half of the outputs two, of the weights' halves; the first columns are what
        `_write_weights` has as rows.
    """
    pairs = [(x, y) for x in updates for y in weights]
    return [multiply(sum, [x], [y], interpret) for sum, (x, y) in zip(sums, pairs, strict=True)]
