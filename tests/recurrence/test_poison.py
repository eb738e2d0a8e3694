"""NaN and infinity in whatever was never committed: the memory keeps the bits that it has without them.

Two memories go through one schedule. In one of them everything is not finite that may be: tokens past a row's length,
tokens that are rejected, entries that are dead, the null block and the null row, and all of one slot.
"""

import jax
import numpy as np
import pytest

from jaxbuf.recurrence import chunked, recurrent
from tests.recurrence.families import FAMILIES
from tests.recurrence.families import inputs as inputs_of
from tests.recurrence.twin import (
    PROMPT,
    ROWS,
    SLOTS,
    TIME,
    Twin,
    commit,
    entries_of,
    extend,
    fold,
    path_to,
    prefill,
    random_parents,
    read,
)

GDN = "Gated DeltaNet"
SICK = 2  # a slot that is given nothing but NaN and infinity
EVERYONE = np.arange(SLOTS + 1, dtype=np.int32)
HEALTHY = np.delete(EVERYONE[1:], SICK - 1)


def spoil(rng, arrays, where):
    """The arrays [rows, time, ...] with NaN and infinities in the tokens `where` (bool [rows, time])."""
    values = [np.nan, np.inf, -np.inf]

    def spoiled(x):
        bad = rng.choice(np.array(values, x.dtype), x.shape)
        return np.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), bad, x)

    return [None if x is None else spoiled(x) for x in arrays]


def spoil_dead(rng, cache):
    """NaN and infinities in every entry and checkpoint that no slot has committed."""
    cursor, pool = cache.cursor, cache.pool
    entries, length, folded = (np.asarray(x) for x in (entries_of(cursor), cursor.length, cursor.folded))
    live = np.concatenate([entries[slot, : length[slot]] for slot in EVERYONE])
    dead = ~np.isin(np.arange(pool.keys.shape[0] * pool.keys.shape[1]), live).reshape(pool.keys.shape[:2])
    rows = ~np.isin(np.arange(pool.checkpoints.shape[0]), np.asarray(cursor.checkpoint_of)[folded > 0])
    keys, updates, gates = spoil(rng, [np.asarray(x) for x in (pool.keys, pool.updates, pool.gates)], dead)
    (checkpoints,) = spoil(rng, [np.asarray(pool.checkpoints)[:, None]], rows[:, None])
    spoiled = type(pool)(checkpoints[:, 0], keys, updates, gates)
    return type(cache)(cursor, jax.tree.map(lambda new, old: jax.numpy.asarray(new, old.dtype), spoiled, pool))


def bits(x, rows):
    return np.asarray(x)[rows].tobytes()


def assert_alike(clean, sick):
    """What the healthy slots have committed, and their states, are the same bits; all of them are finite."""
    contents = [twin.contents() for twin in (clean, sick)]
    states = [np.asarray(read(twin.spec, twin.cache, EVERYONE))[HEALTHY] for twin in (clean, sick)]
    assert all(contents[0][slot] == contents[1][slot] for slot in HEALTHY)
    assert np.isfinite(states[0]).all() and states[0].tobytes() == states[1].tobytes()


BY_HAND = pytest.mark.exhaustive
OTHERS = [
    pytest.param(name, True, marks=pytest.mark.slow if name in ("Mamba-2", "KDA") else BY_HAND)
    for name in FAMILIES
    if name != GDN
]


@pytest.mark.slow
@pytest.mark.parametrize("family, tree", [(GDN, False), (GDN, True), *OTHERS])
def test_what_is_not_finite_and_not_committed_changes_no_bit(rng, family, tree):
    clean, sick = (Twin(family, rng) for _ in range(2))
    spec, zero = clean.spec, np.zeros(ROWS, np.int32)
    for step in range(14):
        slots = rng.permutation(EVERYONE)[:ROWS]
        index, ill = np.arange(max(TIME, PROMPT))[None], (slots == SICK)[:, None]
        if step % 5 == 0:
            inputs, lengths = inputs_of(rng, family, ROWS, PROMPT), rng.integers(0, PROMPT + 1, ROWS, dtype=np.int32)
            rows = {"slots": slots, "lengths": lengths, "keep": rng.integers(0, 9, ROWS, dtype=np.int32)}
            (expected, clean.cache), (out, sick.cache) = (
                prefill(spec, cache, *x, **rows)
                for cache, x in (
                    (clean.cache, inputs),
                    (spoil_dead(rng, sick.cache), spoil(rng, inputs, ill | (index[:, :PROMPT] >= lengths[:, None]))),
                )
            )
            assert bits(out, slots != SICK) == bits(expected, slots != SICK)
            assert_alike(clean, sick)
            continue
        # A launch whose rejected tokens are not finite: what the others give in it is nobody's promise.
        lengths = rng.integers(0, TIME + 1, ROWS, dtype=np.int32)
        parents = random_parents(rng) if tree else np.tile(np.arange(-1, TIME - 1, dtype=np.int32), (ROWS, 1))
        accepted, paths, taken = zero.copy(), np.zeros((ROWS, TIME), np.int32), np.zeros((ROWS, TIME), bool)
        for row in np.flatnonzero((lengths > 0) & (slots > 0)):
            path = path_to(parents[row], rng.integers(0, lengths[row]))
            accepted[row] = rng.integers(0, len(path) + 1)
            paths[row, : len(path)] = path
            taken[row, path[: accepted[row]]] = True
        inputs, shape = inputs_of(rng, family, ROWS, TIME), parents if tree else None
        rows = {"slots": slots, "lengths": lengths, "parents": shape}
        _, clean.cache = extend(spec, clean.cache, *inputs, **rows)
        _, sick.cache = extend(spec, spoil_dead(rng, sick.cache), *spoil(rng, inputs, ill | ~taken), **rows)
        for twin in (clean, sick):
            twin.cache = commit(twin.cache, accepted, slots=slots, path=paths if tree else None)
        assert_alike(clean, sick)
        # The next launch, which may fold what was accepted: only what is past the lengths is not finite.
        inputs = inputs_of(rng, family, ROWS, TIME)
        tails = spoil(rng, inputs, ill | (index[:, :TIME] >= lengths[:, None]))
        expected, _ = extend(spec, clean.cache, *inputs, **rows)
        out, _ = extend(spec, spoil_dead(rng, sick.cache), *tails, **rows)
        assert bits(out, slots != SICK) == bits(expected, slots != SICK)
        if step % 5 == 4:
            clean.cache, sick.cache = (fold(spec, twin.cache, slots=slots) for twin in (clean, sick))
            assert_alike(clean, sick)
    assert np.isnan(np.asarray(read(spec, sick.cache, EVERYONE))[SICK]).any(), "nothing was poisoned"


@pytest.mark.parametrize("family", [GDN, *(pytest.param(name, marks=pytest.mark.slow) for name in ("Mamba-2", "GLA"))])
def test_what_lies_past_a_length_changes_no_bit_of_a_sequence(rng, family):
    spec, inputs = FAMILIES[family], inputs_of(rng, family, 4, 40)
    state, lengths = rng.standard_normal((4, *spec.state_shape)).astype(np.float32), np.int32([0, 7, 16, 33])
    tails = spoil(rng, inputs, np.arange(40)[None] >= lengths[:, None])
    for form in (chunked, recurrent):
        run = jax.jit(lambda *x, form=form: form(spec, *x, lengths=lengths))
        for found, expected in zip(run(state, *tails), run(state, *inputs), strict=True):
            assert np.isfinite(expected).all() and bits(found, slice(None)) == bits(expected, slice(None))
