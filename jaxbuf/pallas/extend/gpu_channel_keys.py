"""Sums of gates and decayed keys, in `extend` on a GPU with a decay a channel."""

import jax.numpy as jnp
from jax import lax

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_channel_lane import Entry, Lane
from jaxbuf.pallas.extend.gpu_channel_sums import Sum, cut_gate, factor, minus, nothing, plus
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.threads import PER_THREAD, load, store


def new_gate(lane: Lane, item: Item, t: Array | int) -> Sum:
    return cut_gate(lane.interpret, load(lane.arrays.log_decay.at[item.row, t, item.head], PER_THREAD))


def since_commit(lane: Lane, item: Item, t: Array | int) -> Sum:
    """The sum of the gates of the new tokens on token t's path, its own included."""
    if isinstance(t, int):
        return new_gate(lane, item, 0)
    return lax.fori_loop(0, t + 1, lambda j, sum: add_on_path(lane, item, t, j, sum), nothing())


def add_on_path(lane: Lane, item: Item, t: Array, j: Array, sum: Sum) -> Sum:
    """The sum with new token j's gate added, if that token is on token t's path."""
    found = plus(sum, new_gate(lane, item, j))
    if not lane.call.tree:
        return found
    there = (lax.shift_right_logical(lane.path(t), j) & 1) > 0
    return [jnp.where(jnp.broadcast_to(there, x.shape), x, y) for x, y in zip(found, sum, strict=True)]


def sum_gates(lane: Lane, item: Item, first: list[Entry] | None) -> Sum:
    """The sum of all entries' gates."""

    def add(_, chunk, total):
        for entry in chunk:
            total = plus(total, cut_gate(lane.interpret, entry.gate))
        return total

    return lane.each_chunk(item, first, add, nothing())


def sum_behind(lane: Lane, chunk: list[Entry], left: Sum) -> list[Sum]:
    """For each entry of a chunk the sum of the gates behind it, where `left` is that of the chunk's and of those
    behind the chunk."""
    found = []
    for entry in chunk:
        left = minus(left, cut_gate(lane.interpret, entry.gate))
        found.append(left)
    return found


def decay_keys(lane: Lane, chunk: list[Entry], behind: list[Sum], more: Sum | None) -> None:
    """Writes a chunk's keys to shared memory, each with the decay of the gates behind it and of `more`."""
    synchronize(lane.interpret)  # All threads are done with what was there.
    for i, (entry, sum) in enumerate(zip(chunk, behind, strict=True)):
        decay = factor(lane.interpret, sum if more is None else plus(sum, more))
        store(lane.numbers.at[i, lane.channels], entry.key.astype(jnp.float32) * decay)
    synchronize(lane.interpret)
