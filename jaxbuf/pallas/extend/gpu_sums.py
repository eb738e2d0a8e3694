"""Sums of gates in `extend` on a GPU: an entry's decay is the sum of the gates of all entries behind it.

With one new token, its gate is added, too: the decays then reach up to the new token, not to the last committed one.

The bits of a sum must not depend on how many entries a row has, or T tokens at once would not store the bits that they
store one by one. Few gates are added one after the other, from old to new. Many are cut into two parts whose sums are
exact, so that any order gives the same bits. Decays and gates are lists of these parts, one or two.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_lane import Lane
from jaxbuf.pallas.extend.gpu_products import ZERO, count, zeros
from jaxbuf.pallas.extend.gpu_schedule import CHUNK
from jaxbuf.pallas.instructions import publish_warps, sum_later, synchronize
from jaxbuf.pallas.threads import PER_THREAD, THREADS, WARP, load, load_per_thread, store, store_per_thread

# Gates below LEAST_GATE are replaced by it: the exponential of either is 0. To add HIGH to a number and subtract it
# again rounds the number to a multiple of 2^-13; with LOW, of 2^-27. So sums of first parts are exact down to -2^11,
# and sums of the second parts of 2^10 gates are exact.
LEAST_GATE, HIGH, LOW = (np.float32(x) for x in (-128, 1.5 * 2**10, 1.5 * 2**-4))


def sum_decays(lane: Lane, live: Array, gates: list[list[Array]] | None) -> list[list[Array]]:
    """Overwrites the gates of an item's entries with the decay since each entry, or with its exponential.

    Args:
      lane: Its `decays` hold the gates; second parts are written to its `decays_low`.
      live: The item's live entries.
      gates: With one new token its gates, one for each head of a stack, in parts: they are added to every decay, and
        exponentials are written. Else None.

    Returns:
      For each head of a stack the sum of all gates of entries, in parts.
    """
    of_head = gates or [None] * lane.call.stacked
    if not lane.schedule.sums_exactly:
        return _sum_in_order(lane, live, of_head)
    return [_sum_exactly(lane, live, i, gate) for i, gate in enumerate(of_head)]


def parts(lane: Lane, gate: Array) -> list[Array]:
    """A gate, in as many parts as the lane's decays have."""
    return _split(gate, lane.interpret) if lane.schedule.sums_exactly else [gate]


def load_decays(lane: Lane, entry: Array | int, n: int, layout, i: Array | int = 0) -> list[Array]:
    """Loads the decays since n entries of head i of a stack, in parts: not with one new token, for then exponentials
    are stored."""
    refs = [lane.decays, lane.decays_low] if lane.schedule.sums_exactly else [lane.decays]
    return [load(ref.at[i, pl.ds(entry, n)], layout) for ref in refs]


def load_strengths(lane: Lane, entry: Array | int, n: int, layout, i: Array | int = 0) -> Array | None:
    """What the updates of n entries are multiplied with besides; None with the delta rule, which has done it."""
    return None if lane.strengths is None else load(lane.strengths.at[i, pl.ds(entry, n)], layout)


def load_factors(lane: Lane, entry: Array | int, n: int, layout, i: Array | int = 0) -> Array:
    """The exponentials of the decays since n entries of head i of a stack, times the entries' betas without the delta
    rule; with one new token up to it, unless the item folds."""
    if lane.schedule.one_token:
        found = load(lane.decays.at[i, pl.ds(entry, n)], layout)
    else:
        found = factor(load_decays(lane, entry, n, layout, i))
    strengths = load_strengths(lane, entry, n, layout, i)
    return found if strengths is None else found * strengths


def factor(decay: Sequence) -> Array:
    """The exponential of a decay that is given in parts."""
    return jnp.exp(functools.reduce(jnp.add, decay))


def sum_path(start: list[Array], gates: Sequence, paths: Sequence | None) -> list[list[Array]]:
    """For each new token: a decay, in parts, with the gates of the tokens on its path added, the first one's first.

    Args:
      start: The decay, in parts.
      gates: Each new token's gate, in parts.
      paths: In a tree the tokens' paths; None: each token follows the one before.
    """
    if paths is None:
        sums = [start]
        for gate in gates:
            sums.append([x + y for x, y in zip(sums[-1], gate, strict=True)])
        return sums[1:]
    found = []
    for t in range(len(gates)):
        sum = start
        for j, gate in enumerate(gates[: t + 1]):
            sum = [on_path(paths, t, j, x + y, x) for x, y in zip(sum, gate, strict=True)]
        found.append(sum)
    return found


def on_path(paths: Sequence | None, t: int, j: int, there: Array, elsewhere: Array) -> Array:
    """`there` if token j is on token t's path, or if there is no tree; else `elsewhere`."""
    if paths is None or j == t:
        return there
    flag = (paths[t] & (1 << j)) != 0
    return jnp.where(jnp.broadcast_to(flag, there.shape) if there.ndim else flag, there, elsewhere)


def _sum_in_order(lane: Lane, live: Array, gates: Sequence) -> list[list[Array]]:
    """`sum_decays` for at most THREADS entries: one for each thread, which adds the gates behind it from old to new."""
    index = count((THREADS,), 0, PER_THREAD)

    def add_gates(c, carry):
        found = []
        for head, (sum, total) in enumerate(carry):
            for i in range(CHUNK):
                gate = lane.decays[head, c * CHUNK + i]
                sum = sum + jnp.where(index < c * CHUNK + i, gate, ZERO)
                total = total + gate
            found.append((sum, total))
        return found

    begun = add_gates(0, [(zeros((THREADS,), PER_THREAD), ZERO)] * len(gates))
    sums = lax.fori_loop(1, pl.cdiv(live, CHUNK), add_gates, begun)
    synchronize(lane.interpret)  # All threads have read the gates.
    for head, ((sum, _), gate) in enumerate(zip(sums, gates, strict=True)):
        store(lane.decays.at[head, pl.ds(0, THREADS)], _add_new_gate([sum], gate)[0])
    synchronize(lane.interpret)
    return [[jnp.asarray(total)] for _, total in sums]


def _add_new_gate(decay: list[Array], gate: list[Array] | None) -> list[Array]:
    """If there is a new token's gate, the exponentials of the decays with this gate added; else the decays."""
    return [factor([x + y for x, y in zip(decay, gate, strict=True)])] if gate else decay


def _sum_exactly(lane: Lane, live: Array, head: int, gate: list[Array] | None) -> list[Array]:
    """`sum_decays` for any number of entries, padded to a multiple of THREADS, of one head of a stack.

    The last chunk is padded, too, and all of it must be within that multiple. It is: later chunks end at CHUNK more
    than a multiple of MAX_LATER_CHUNK.
    """
    counts = range(1, lane.schedule.padded_entries // THREADS + 1)
    sums = [functools.partial(_sum_per_thread, lane, live, head, gate, n) for n in counts]
    return lax.switch(jnp.clip((live + CHUNK - 1) // THREADS, 0, len(sums) - 1), sums)


def _sum_per_thread(lane: Lane, live: Array, head: int, gate: list[Array] | None, n: int) -> list[Array]:
    """`_sum_exactly` with n entries in a row for each thread: it sums within threads, within warps, then over warps."""
    assert lane.decays_low is not None
    decays, decays_low, warps = lane.decays.at[head], lane.decays_low.at[head], THREADS // WARP
    index = count((THREADS,), 0, PER_THREAD)
    # For each entry of a thread, the last one first: the sum of those behind it in the thread, in parts.
    later = [[zeros((THREADS,), PER_THREAD)] * 2]
    for i in reversed(range(n)):
        own = jnp.where(index * n + i < live, load_per_thread(decays, i, n, lane.interpret), ZERO)
        later.append([x + y for x, y in zip(later[-1], _split(own, lane.interpret), strict=True)])
    totals = later.pop()
    found = sum_later(totals, lane.interpret)
    starts = [lane.decays_low.shape[-1] - (2 - i) * warps for i in range(2)]
    for start, sum in zip(starts, found, strict=True):
        publish_warps(sum, decays_low.at[pl.ds(start, warps)], lane.interpret)
    synchronize(lane.interpret)
    others, whole = [], []  # For each part: the sum over all threads behind a thread, and the sum over all entries.
    for start, sum, own in zip(starts, found, totals, strict=True):
        of_warps = [decays_low[start + warp] for warp in range(warps)]
        rest = [jnp.where(index < WARP * warp, of_warps[warp], ZERO) for warp in range(1, warps)]
        others.append(functools.reduce(jnp.add, rest, sum - own))
        whole.append(functools.reduce(jnp.add, of_warps))
    for i, sums in enumerate(reversed(later)):
        sums = _add_new_gate([x + y for x, y in zip(sums, others, strict=True)], gate)
        for ref, sum in zip((decays, decays_low), sums, strict=False):
            store_per_thread(sum, ref, i, n, lane.interpret)
    synchronize(lane.interpret)
    return whole


def _split(gate: Array, interpret: bool) -> list[Array]:
    """Two parts of a gate. The sums of either part are exact, down to sums whose exponential is 0 anyway."""

    def rounded(x, to):
        # In the interpreter, XLA would simplify x + to - to to x.
        return (lax.optimization_barrier(x + to) if interpret else x + to) - to

    gate = jnp.maximum(gate, LEAST_GATE)
    high = rounded(gate, HIGH)
    return [high, rounded(gate - high, LOW)]
