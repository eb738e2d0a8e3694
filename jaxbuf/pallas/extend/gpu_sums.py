"""Sums of decays in `extend` on a GPU: from each entry to the last committed token, or to the one that comes.

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
from jaxbuf.pallas.lanes import (
    EVERY,
    THREADS,
    WARP,
    load,
    load_every,
    publish_warps,
    store_every,
    sum_later,
    synchronize,
)

type Array = jax.Array

# A gate below the first is as good as it: its exponential is 0. To add one of the others and take it away rounds to a
# multiple of 2^-13, or 2^-27. So sums of high parts are exact down to -2^11, and those of the rest of 2^10 gates are.
LEAST_GATE, HIGH, LOW = (np.float32(x) for x in (-128, 1.5 * 2**10, 1.5 * 2**-4))


def sum_decays(lane: Lane, live: Array, gate: list[Array] | None) -> list[Array]:
    """The gates of an item's entries become, in place, the decay since each: in one part or two, or as a factor.

    Args:
      lane, live: Where they are, and how many.
      gate: If one token comes, its gate, in parts: decays are then up to it, and factors.

    Returns:
      The sum of all gates, in parts.
    """
    return _sum_exactly(lane, live, gate) if lane.shape.exact else [_sum_in_order(lane, live, gate)]


def parts(lane: Lane, gate: Array) -> list[Array]:
    """A gate, in as many parts as `sum_decays` has."""
    return _split(gate, lane.interpret) if lane.shape.exact else [gate]


def load_decays(lane: Lane, entry: Array | int, n: int, layout) -> list[Array]:
    """Decays since n entries, in parts: not if they are factors."""
    refs = [lane.sums, lane.lows] if lane.shape.exact else [lane.sums]
    return [load(ref.at[pl.ds(entry, n)], layout) for ref in refs]


def load_factors(lane: Lane, entry: Array | int, n: int, layout) -> Array:
    """exp of decays since n entries; up to the new token, if one comes and the item does not fold."""
    if lane.shape.frugal:
        return load(lane.sums.at[pl.ds(entry, n)], layout)
    return factor(load_decays(lane, entry, n, layout))


def factor(decay: Sequence) -> Array:
    """exp of a decay in parts."""
    return jnp.exp(functools.reduce(jnp.add, decay))


def _sum_in_order(lane: Lane, live: Array, gate: list[Array] | None) -> Array:
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
    lane.sums[pl.ds(0, THREADS)] = _until([sum], gate)[0]
    synchronize(lane.interpret)
    return jnp.asarray(total)


def _until(decay: list[Array], gate: list[Array] | None) -> list[Array]:
    """Decays with a new token's gate, as factors, if there is one."""
    return [factor([x + y for x, y in zip(decay, gate, strict=True)])] if gate else decay


def _sum_exactly(lane: Lane, live: Array, gate: list[Array] | None) -> list[Array]:
    """Of whole blocks of THREADS entries, in which all of the last chunk is: those behind the first end at CHUNK more
    than a multiple of WIDE."""
    blocks = range(1, lane.shape.columns // THREADS + 1)
    sums = [functools.partial(_sum_blocks, lane, live, gate, n) for n in blocks]
    return lax.switch(jnp.clip((live + CHUNK - 1) // THREADS, 0, len(sums) - 1), sums)


def _sum_blocks(lane: Lane, live: Array, gate: list[Array] | None, blocks: int) -> list[Array]:
    """So many entries that follow one another in each thread: within threads, within warps, over them."""
    lows, warps = lane.lows, THREADS // WARP
    assert lows is not None
    index = count((THREADS,), 0, EVERY)
    later = [[zeros((THREADS,), EVERY)] * 2]  # of an entry, what follows it in its thread, in parts; the last one first
    for i in reversed(range(blocks)):
        own = jnp.where(index * blocks + i < live, load_every(lane.sums, i, blocks, lane.interpret), ZERO)
        later.append([x + y for x, y in zip(later[-1], _split(own, lane.interpret), strict=True)])
    totals = later.pop()
    found = sum_later(totals, lane.interpret)
    starts = [lows.shape[0] - (2 - i) * warps for i in range(2)]
    for start, sum in zip(starts, found, strict=True):
        publish_warps(sum, lows.at[pl.ds(start, warps)], lane.interpret)
    synchronize(lane.interpret)
    others, every = [], []
    for start, sum, own in zip(starts, found, totals, strict=True):
        of_warps = [lows[start + warp] for warp in range(warps)]
        rest = [jnp.where(index < WARP * warp, of_warps[warp], ZERO) for warp in range(1, warps)]
        others.append(functools.reduce(jnp.add, rest, sum - own))
        every.append(functools.reduce(jnp.add, of_warps))
    for i, sums in enumerate(reversed(later)):
        sums = _until([x + y for x, y in zip(sums, others, strict=True)], gate)
        for ref, sum in zip((lane.sums, lows), sums, strict=False):
            store_every(sum, ref, i, blocks, lane.interpret)
    synchronize(lane.interpret)
    return every


def _split(gate: Array, interpret: bool) -> list[Array]:
    """Two parts of a gate, whose sums with others are exact where they are not below the exponent's range."""

    def rounded(x, to):
        # XLA, which runs the interpreter, would make one of the two.
        return (lax.optimization_barrier(x + to) if interpret else x + to) - to

    gate = jnp.maximum(gate, LEAST_GATE)
    high = rounded(gate, HIGH)
    return [high, rounded(gate - high, LOW)]
