"""Sums of gates and decayed keys, in `extend` on a GPU with a decay a channel."""

import functools
import itertools
from collections.abc import Callable

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


def each_new(lane: Lane, item: Item, visit: Callable[[Array | int, Sum], None]) -> None:
    """Visits the new tokens, one after the other.

    Args:
      item: The item.
      visit: Takes a token's number, and the sum of the gates on its path, its own included.
    """

    def gate(t, j):
        return gate_on_path(lane, t, j, lane.sum_new(item, j, PER_THREAD))

    start = nothing((DIM,), PER_THREAD)

    def step(t, since):
        """`since` is the sum of the token before."""
        if lane.call.tree:
            since = lax.fori_loop(0, t, lambda j, sum: plus(sum, gate(t, j)), start)
        since = plus(since, gate(t, t))
        visit(t, since)
        return since

    if lane.one_token:
        step(0, start)
    else:
        lax.fori_loop(0, lane.call.time, step, start)


def sums_since_commit(lane: Lane, gates: list[Sum]) -> list[Sum]:
    """For each new token the sum of the gates on its path, its own included, from the gates of all of them."""
    if not lane.call.tree:
        return [*itertools.accumulate(gates, plus)]
    paths = [[gate_on_path(lane, t, j, gates[j]) for j in range(t + 1)] for t in range(len(gates))]
    return [functools.reduce(plus, path) for path in paths]


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
