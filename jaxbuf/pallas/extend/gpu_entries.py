"""What the entries of an item add to its outputs, in `extend` on a GPU: chunk after chunk.

Later chunks are brought in one of two ways. Without stages, one chunk at a time is loaded into registers and written
over the first chunk. With stages, `Schedule.stages` chunks at a time are copied straight to shared memory of their own.

The product of a probe and an entry's key, times the entry's decay, is the weight of the entry's update. Updates are
added one by one, by a thread for each number of the output. If tokens always come one by one and an item can have many
entries, they are added on the tensor cores instead, a chunk at once (`Schedule.adds_on_tensor_cores`).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import Call
from jaxbuf.pallas.extend.gpu_lane import ChunkMemory, Item, Lane
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
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, MAX_LATER_CHUNK, SKIPPED_TOGETHER
from jaxbuf.pallas.extend.gpu_sums import factor, load_decays, load_factors, load_strengths, sum_path
from jaxbuf.pallas.instructions import end_copies, synchronize, wait_for_copies
from jaxbuf.pallas.threads import THREADS, load, store, store_rows


def add_all(lane: Lane, item: Item, gates: list[list[list[Array]]], paths: list[Array] | None) -> list[Array | None]:
    """Sums the entries' part of what each probe reads, and multiplies the probes with the new keys.

    Args:
      lane: Its `decays` hold the entries' decays, or their exponentials. `products` then has the products of probes and
        new keys.
      item: The item that is served.
      gates: For each head of a stack the new tokens' gates, each in parts.
      paths: In a tree the new tokens' paths.

    Returns:
      2 T vectors [value_dim], one for each probe: the new keys' recalls, which are None without the delta rule, then
      the queries' outputs; zeros if the item folds.
    """
    call, schedule, interpret = lane.call, lane.schedule, lane.interpret
    stages, later_size = schedule.stages, schedule.later_size
    loops = call.max_live > CHUNK + MAX_LATER_CHUNK  # An item may have several later chunks.
    # With one token there are registers for the left side, which is then loaded once for all chunks; not for that of
    # keys of 256 numbers in two planes.
    fits = schedule.one_token and schedule.planes * call.key_dim <= 2 * THREADS
    left = [_load_left(lane, 0, strip) for strip in schedule.key_strips] if fits and loops else None
    if schedule.adds_on_tensor_cores:
        return _without_recalls(call, _add_all_on_tensor_cores(lane, item, gates, left))
    add = functools.partial(_add_chunk, lane, item, gates, paths, left)

    def add_loaded(c, carry):
        added, loaded = carry
        next_loaded = lax.cond(c + 1 < chunks, lambda: lane.gather_chunk(item.line, item.head, c + 1), lambda: loaded)
        synchronize(interpret)  # All threads are done with the chunk before.
        lane.write_chunk(loaded)
        synchronize(interpret)
        return add(c * CHUNK, lane.first_chunk, added), next_loaded

    def add_later(j, added):
        wait_for_copies(stages - 1, interpret)
        synchronize(interpret)
        added = add(CHUNK + j * later_size, lane.later_chunk(lax.rem(j, stages)), added)
        if loops:
            synchronize(interpret)  # All threads are done with this chunk.
            pl.when(j + stages < chunks)(lambda: lane.copy_later(item.head, j + stages))
            end_copies(interpret)
        return added

    empty = zeros((call.value_dim,), VECTORS[call.value_dim])
    added = add(0, lane.first_chunk, _without_recalls(call, [empty] * (2 * call.time)))
    if stages:
        chunks = jnp.where(item.folds, 0, pl.cdiv(item.live - CHUNK, later_size))
        if loops:
            added = lax.fori_loop(0, chunks, add_later, added)
        else:
            added = lax.cond(chunks > 0, lambda: add_later(0, added), lambda: added)
    elif call.max_live > CHUNK:
        chunks = jnp.where(item.folds, 1, pl.cdiv(item.live, CHUNK))

        def add_others():
            return lax.fori_loop(1, chunks, add_loaded, (added, lane.gather_chunk(item.line, item.head, 1)))[0]

        added = lax.cond(chunks > 1, add_others, lambda: added)
    return [x if x is None else where(~item.folds, x) for x in added] if schedule.one_token else added


def _without_recalls(call: Call, added: list[Array]) -> list[Array | None]:
    """Without the delta rule nothing is recalled."""
    return [*added] if call.delta else [None] * call.time + added[call.time :]


def _load_left(lane: Lane, first_probe: int, strip) -> list[Array]:
    """Loads a strip of CHUNK probes as the left side of a product with keys."""
    return [load(plane.at[pl.ds(CHUNK + first_probe, CHUNK), strip], LEFT) for plane in lane.planes]


def _weigh(
    lane: Lane,
    gates: list[list[list[Array]]],
    paths: list[Array] | None,
    left: list | None,
    entry: Array | int,
    chunk: ChunkMemory,
):
    """Multiplies the probes with a chunk's keys, and each product with the entry's decay up to the probe's token.

    The rows behind the keys of the first chunk are the probes, of which the first are the new keys: they are multiplied
    and decay like entries.

    Args:
      lane: The lane.
      gates: For each head of a stack the new tokens' gates, each in parts.
      paths: In a tree the new tokens' paths. The weights of a new token that is not on a probe's are not used.
      left: The left sides, if they have been loaded.
      entry: The chunk's first entry.
      chunk: Where the chunk lies.

    Yields:
      For each of `Schedule.probe_starts`: it, and for each head of a stack the weights float32 [CHUNK probes,
      2 · CHUNK entries], `PRODUCT`.
    """
    call, schedule = lane.call, lane.schedule
    planes, start, _ = chunk
    n, strips = 2 * CHUNK, schedule.key_strips
    right = [[load(x.at[pl.ds(start, n), strip].transpose((1, 0)), RIGHT) for x in planes] for strip in strips]
    # The new token of each column; below 0 for entries.
    token = count((n,), 0, PRODUCT.reduce(0)) - (CHUNK if chunk is lane.first_chunk else n)
    decays = []  # of each head, up to each token
    for head, of_head in enumerate(gates):
        if schedule.one_token:
            factors = load_factors(lane, entry, n, PRODUCT.reduce(0), head)
            decays.append([jnp.where(token < 0, factors, np.float32(1))])
            continue
        since = [jnp.where(token < 0, x, ZERO) for x in load_decays(lane, entry, n, PRODUCT.reduce(0), head)]
        strengths = load_strengths(lane, entry, n, PRODUCT.reduce(0), head)
        # A new token's own gate is not behind it.
        behind = [[jnp.where(token < t, x, ZERO) for x in gate] for t, gate in enumerate(of_head)]
        found = [factor(x) for x in sum_path(since, behind, paths)]
        if strengths is not None:
            found = [x * jnp.where(token < 0, strengths, np.float32(1)) for x in found]
        decays.append(found)
    for first_probe in schedule.probe_starts:
        sums = []
        for i, strip in enumerate(strips):
            strip_left = left[i] if left else _load_left(lane, first_probe, strip)
            sums.append(multiply(zeros((CHUNK, n), PRODUCT), strip_left, right[i], lane.interpret))
        while len(sums) > 1:
            sums = [x + y for x, y in zip(sums[::2], sums[1::2], strict=True)]
        (products,) = sums
        if schedule.one_token:
            yield first_probe, [products * spread(x, products.shape, 1, PRODUCT) for (x,) in decays]
            continue
        weights, index = [], count(products.shape, 0, PRODUCT)
        for of_head in decays:
            decay = jnp.ones_like(products)
            for i in range(first_probe, min(first_probe + CHUNK, 2 * call.time)):
                probe_decay = spread(of_head[i % call.time], decay.shape, 1, PRODUCT)
                decay = jnp.where(index == i - first_probe, probe_decay, decay)
            weights.append(products * decay)
        yield first_probe, weights


def _add_chunk(
    lane: Lane,
    item: Item,
    gates: list[list[list[Array]]],
    paths: list[Array] | None,
    left: list | None,
    entry: Array | int,
    chunk: ChunkMemory,
    added: list[Array | None],
) -> list[Array | None]:
    """Adds the entries of a chunk, whose first is `entry`, one by one."""
    call, schedule = lane.call, lane.schedule
    planes, _, first_update = chunk
    first = chunk is lane.first_chunk
    length = CHUNK if first else schedule.later_size
    columns = pl.ds(schedule.entry_columns - CHUNK if first else 0, 2 * CHUNK)
    for first_probe, every in _weigh(lane, gates, paths, left, entry, chunk):
        for head, weights in enumerate(every):
            top = head * schedule.product_rows
            if schedule.one_token:
                rows = lane.products.at[pl.ds(top, schedule.product_rows), columns]
                store_rows(weights, PRODUCT, 0, rows, lane.interpret)
            else:
                store(lane.products.at[pl.ds(top + first_probe, CHUNK), columns], weights)
    synchronize(lane.interpret)

    def add_group(group, added):
        for i in group:
            rows = [plane.at[first_update + i, pl.ds(0, call.value_dim)] for plane in planes]
            update = join([load(row, VECTORS[call.value_dim]) for row in rows])
            added = [x if x is None else x + weight(lane, j, columns.start + i) * update for j, x in enumerate(added)]
        return added

    if schedule.one_token:
        return add_group(range(length), added)
    for i in range(0, length, SKIPPED_TOGETHER):  # With several tokens, the work that is skipped is worth a branch.
        some, group = ~item.folds & (item.live > entry + i), range(i, i + SKIPPED_TOGETHER)
        added = lax.cond(some, functools.partial(add_group, group), lambda added: added, added)
    return added


def weight(lane: Lane, probe: int, column: Array | int) -> Array:
    """What an update, or a new one, is multiplied with for a probe: a number, or [value_dim] with stacks."""
    tops = range(0, lane.call.stacked * lane.schedule.product_rows, lane.schedule.product_rows)
    return lane.by_row([lane.products[top + probe, column] for top in tops])


def _add_all_on_tensor_cores(lane: Lane, item: Item, gates: list[list[list[Array]]], left: list | None) -> list[Array]:
    """`add_all` for one new token, whose updates are added on the tensor cores."""
    schedule, interpret = lane.schedule, lane.interpret
    stages, later_size = schedule.stages, schedule.later_size
    chunks = jnp.where(item.folds, 0, pl.cdiv(item.live - CHUNK, later_size))

    def add_later(j, sums):
        wait_for_copies(stages - 1, interpret)
        synchronize(interpret)
        chunk = lane.later_chunk(lax.rem(j, stages))
        _write_weights(lane, gates, left, CHUNK + j * later_size, chunk)
        synchronize(interpret)
        operands = _load_chunk(lane, chunk, later_size)
        synchronize(interpret)  # All threads are done with this chunk.
        # The next copies start behind these loads and before the next ones: a load that is asked for afterwards waits
        # until the copies are on their way.
        pl.when(j + stages < chunks)(lambda: lane.copy_later(item.head, j + stages))
        end_copies(interpret)
        return _multiply_chunk(*operands, sums, interpret)

    _write_weights(lane, gates, left, 0, lane.first_chunk)
    synchronize(interpret)
    # Each band of the outputs has two sums, because products into one sum wait for each other.
    sums = [zeros((BAND, 8), TALL)] * (2 * len(schedule.bands))
    sums = _multiply_chunk(*_load_chunk(lane, lane.first_chunk, CHUNK), sums, interpret)
    sums = lax.fori_loop(0, chunks, add_later, sums)
    for band, high, low in zip(schedule.bands, sums[::2], sums[1::2], strict=True):
        store_rows(high + low, TALL, 1, lane.reads.at[:, band], interpret)
    synchronize(interpret)
    return [where(~item.folds, load(lane.reads.at[i], VECTORS[lane.call.value_dim])) for i in range(2)]


def _write_weights(
    lane: Lane, gates: list[list[list[Array]]], left: list | None, entry: Array | int, chunk: ChunkMemory
) -> None:
    """Writes the weights of a chunk's entries to shared memory, and with the first chunk those of the new key.

    The entries' weights are written as bfloat16 halves, over the keys of the first chunk. Rows 0 and 1 have the high
    halves of the new key's and of the query's weights, rows 8 and 9 the low halves.
    """
    interpret = lane.interpret
    for _, (weights,) in _weigh(lane, gates, None, left, entry, chunk):
        if chunk is lane.first_chunk:
            columns = pl.ds(lane.schedule.entry_columns - CHUNK, 2 * CHUNK)
            store_rows(weights, PRODUCT, 0, lane.products.at[:, columns], interpret)
            synchronize(interpret)  # All threads are done with the first chunk's keys.
        for i, half in enumerate(cut(weights)):
            target = lane.planes[0].at[pl.ds(8 * i, 2), pl.ds(0, weights.shape[1])]
            store_rows(half, PRODUCT, 0, target, interpret)


def _load_chunk(lane: Lane, chunk: ChunkMemory, n: int) -> tuple[list[Array], list[Array]]:
    """Loads a chunk's n updates, in bands of their numbers, and its weights, the high halves and the low halves."""
    (ref,), _, first_update = chunk
    updates = [ref.at[pl.ds(first_update, n), band].transpose((1, 0)) for band in lane.schedule.bands]
    weights = [lane.planes[0].at[pl.ds(8 * i, 8), pl.ds(0, n)].transpose((1, 0)) for i in range(2)]
    return [load(x, TALL_LEFT) for x in updates], [load(x, TALL_RIGHT) for x in weights]


def _multiply_chunk(updates: list[Array], weights: list[Array], sums: list[Array], interpret: bool) -> list[Array]:
    """Adds a chunk's entries to the outputs on the tensor cores.

    Args:
      updates, weights: From `_load_chunk`.
      sums: float32 [BAND, 8], in layout `TALL`. Each band of the outputs has two: one for the weights' high halves, one
        for the low. Columns 0 and 1 are the new key's and the query's.
      interpret: Whether this runs in Pallas' interpreter.
    """
    operands = [(x, y) for x in updates for y in weights]
    return [multiply(sum, [x], [y], interpret) for sum, (x, y) in zip(sums, operands, strict=True)]
