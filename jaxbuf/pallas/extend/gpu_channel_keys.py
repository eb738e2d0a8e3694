"""Sums of gates and decayed keys, in `extend` on a GPU with a decay a channel."""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_channel_lane import DIM, Entry, Lane
from jaxbuf.pallas.extend.gpu_channel_sums import (
    Sum,
    Wide,
    cut_wide,
    factor,
    minus_wide,
    narrow,
    nothing,
    plus,
    plus_wide,
)
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.extend.gpu_products import where
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.threads import PER_THREAD, store


def each_new(
    lane: Lane, item: Item, layout, visit: Callable[..., Sequence[Array]], carry: Sequence[Array] = ()
) -> None:
    """Visits the new tokens, one after the other.

    Args:
      item: The item.
      layout: Of a token's gates [DIM].
      visit: Takes a token's number, the sum of the gates on its path, its own included, and its own; and what it
        returned for the token before.
      carry: What it takes for the first token.
    """

    def step(t, carry):
        since, *own = carry
        gate = lane.sum_new(item, t, layout)
        since = since_commit(lane, item, t, layout) if lane.call.tree else plus(since, gate)
        return since, *visit(t, since, gate, *own)

    start = nothing((DIM,), layout), *carry
    if lane.short:  # The instructions for several tokens overlap.
        functools.reduce(lambda carry, t: step(t, carry), range(lane.call.time), start)
    elif lane.one_token:
        step(0, start)
    else:
        lax.fori_loop(0, lane.call.time, step, start)


def since_commit(lane: Lane, item: Item, t: Array | int, layout) -> Sum:
    """The sum of the gates on token t's path, its own included."""

    def add(j, sum):
        return plus(sum, gate_on_path(lane, t, j, lane.sum_new(item, j, layout)))

    if isinstance(t, int):
        return functools.reduce(lambda sum, j: add(j, sum), range(t + 1), nothing((DIM,), layout))
    return lax.fori_loop(0, t + 1, add, nothing((DIM,), layout))


def gate_on_path(lane: Lane, t: Array | int, j: Array | int, gate: Sum) -> Sum:
    """New token j's gate if that token, at most t, is on token t's path; else 0."""
    if not lane.call.tree:
        return gate
    return where((lax.shift_right_logical(lane.path(t), j) & 1) > 0, gate)


def sum_gates(lane: Lane, item: Item, first: list[Entry] | None) -> Wide:
    """The sum of all entries' gates."""

    def add(_, chunk, total):
        for entry in chunk:
            total = plus_wide(total, cut_wide(entry.gate))
        return total

    return lane.each_chunk(item, first, add, [nothing((DIM,), PER_THREAD)] * 2)


def sum_behind(chunk: list[Entry], left: Wide) -> tuple[list[Sum], Wide]:
    """For each entry of a chunk the sum of the gates behind it, where `left` is that of the chunk's and of those
    behind the chunk; and the sum of these."""
    found = []
    for entry in chunk:
        left = minus_wide(left, cut_wide(entry.gate))
        found.append(narrow(left))
    return found, left


def decay_keys(lane: Lane, chunk: list[Entry], behind: list[Sum], more: Sum | None) -> None:
    """Writes a chunk's keys to shared memory, each with the decay of the gates behind it and of `more`."""
    synchronize(lane.interpret)  # All threads are done with what was there.
    for i, (entry, sum) in enumerate(zip(chunk, behind, strict=True)):
        decay = factor(sum if more is None else plus(sum, more))
        store(lane.numbers.at[i, lane.channels], entry.key.astype(jnp.float32) * decay)
    synchronize(lane.interpret)
