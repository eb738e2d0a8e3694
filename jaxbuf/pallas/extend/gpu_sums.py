"""Sums of decays in `extend` on a GPU: from each entry to the last committed token.

An order of summation must not depend on how many entries a slot has, or T tokens at once would not store the bits that
they store one by one. Few gates are added one after the other, from old to new; many in two parts whose sums are exact,
so that any order will do.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.pallas.extend.gpu_lane import Lane
from jaxbuf.pallas.extend.gpu_products import ZERO, count, zeros
from jaxbuf.pallas.extend.gpu_shape import CHUNK
from jaxbuf.pallas.lanes import EVERY, THREADS, WARP, load, publish_warps, sum_later, synchronize

type Array = jax.Array

# A gate below the first is as good as it: its exponential is 0. To add one of the others and take it away rounds to a
# multiple of 2^-13, or 2^-27. So sums of high parts are exact down to -2^11, and those of the rest of 2^10 gates are.
LEAST_GATE, HIGH, LOW = (np.float32(x) for x in (-128, 1.5 * 2**10, 1.5 * 2**-4))


def sum_decays(lane: Lane, live: Array) -> list[Array]:
    """The gates of an item's entries become, in place, the sums of those behind each; all of them, in one or two parts.

    Entry n is in thread n mod THREADS.
    """
    return _sum_exactly(lane, live) if lane.shape.exact else [_sum_in_order(lane, live)]


def parts(lane: Lane, gate: Array) -> list[Array]:
    """A gate, in as many parts as `sum_decays` has."""
    return _split(gate, lane.interpret) if lane.shape.exact else [gate]


def load_decays(lane: Lane, entry: Array | int, n: int, layout) -> list[Array]:
    """Decays since n entries, in parts."""
    refs = [lane.sums, lane.lows] if lane.shape.exact else [lane.sums]
    return [load(ref, layout) for ref in [ref.at[pl.ds(entry, n)] for ref in refs]]


def factor(decay: Sequence) -> Array:
    """exp of a decay in parts."""
    return jnp.exp(functools.reduce(jnp.add, decay))


def _sum_in_order(lane: Lane, live: Array) -> Array:
    """Of at most THREADS entries."""
    index = count((THREADS,), 0, EVERY)

    def add_gates(c, carry):
        sum, total = carry
        for i in range(CHUNK):
            gate = lane.sums[c * CHUNK + i]
            sum = sum + jnp.where(index < c * CHUNK + i, gate, ZERO)
            total = total + gate
        return sum, total

    begun = add_gates(0, (zeros((THREADS,), EVERY), ZERO))
    sum, total = lax.fori_loop(1, pl.cdiv(live, CHUNK), add_gates, begun)
    synchronize(lane.interpret)  # all have read the gates
    lane.sums[pl.ds(0, THREADS)] = sum
    synchronize(lane.interpret)
    return jnp.asarray(total)


def _sum_exactly(lane: Lane, live: Array) -> list[Array]:
    """Within warps, and then over them."""
    index, lows = count((THREADS,), 0, EVERY), lane.lows
    assert lows is not None
    blocks, warps = lane.shape.columns // THREADS, THREADS // WARP
    starts = [lane.shape.columns, lane.shape.columns + blocks * warps]  # of the warps' sums
    own = []
    for start in range(0, lane.shape.columns, THREADS):
        gate = load(lane.sums.at[pl.ds(start, THREADS)], EVERY)
        own += _split(jnp.where(index < live - start, gate, ZERO), lane.interpret)
    found = sum_later(own, lane.interpret)  # of each block both parts
    for i, sum in enumerate(found):
        start = starts[i % 2] + warps * (i // 2)
        publish_warps(sum, lows.at[pl.ds(start, warps)], lane.interpret)
    synchronize(lane.interpret)
    totals = [jnp.asarray(ZERO)] * 2
    for block in reversed(range(blocks)):
        for i, ref in enumerate((lane.sums, lows)):
            sum = found[2 * block + i] - own[2 * block + i] + totals[i]
            for warp in reversed(range(warps)):
                other = lows[starts[i] + warps * block + warp]
                sum = sum + jnp.where(index < WARP * warp, other, ZERO)
                totals[i] = totals[i] + other
            ref[pl.ds(THREADS * block, THREADS)] = sum
    synchronize(lane.interpret)
    return totals


def _split(gate: Array, interpret: bool) -> list[Array]:
    """Two parts of a gate, whose sums with others are exact where they are not below the exponent's range."""

    def rounded(x, to):
        # XLA, which runs the interpreter, would make one of the two.
        return (lax.optimization_barrier(x + to) if interpret else x + to) - to

    gate = jnp.maximum(gate, LEAST_GATE)
    high = rounded(gate, HIGH)
    return [high, rounded(gate - high, LOW)]
