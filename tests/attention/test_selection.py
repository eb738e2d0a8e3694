"""Quest over whole sequences, query by query in float64: over all keys, and over those that gates admit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.gated import attend_sequence
from jaxbuf.attention.selection import (
    Quest,
    attend_selected_sequence,
    page_bounds,
    page_scores,
    selected_pages,
)

ROWS, TIME, HEADS, KV_HEADS, HEAD_DIM = 2, 90, 4, 2, 8
LENGTHS = np.array([90, 37], np.int32)


@pytest.fixture
def arrays(rng):
    q, k, v = (rng.standard_normal((ROWS, TIME, n, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    return 2 * q, k, v, rng.uniform(size=(ROWS, TIME, KV_HEADS)).astype(np.float32)


def highest_products(queries, keys):
    """What Quest thinks a query's product with one of the keys may be, of the best of a group's queries."""
    low, high = keys.min(0), keys.max(0)
    return max(sum(max(q[d] * low[d], q[d] * high[d]) for d in range(HEAD_DIM)) for q in queries)


def definition(q, k, v, quest, gates=None, window=0, threshold=0.0):
    """Of one row, and the most keys that any query read of a head's list or pages."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group, most = np.zeros_like(q), HEADS // KV_HEADS, 0
    for i in range(len(q)):
        for of in range(KV_HEADS):
            mine = slice(of * group, (of + 1) * group)
            near = list(range(max(0, i - window + 1), i + 1)) if window else []
            far = [j for j in range(i - window + 1) if gates is None or gates[j, of] >= threshold]
            pages = [far[n : n + quest.page_size] for n in range(0, len(far), quest.page_size)]
            chosen = [p for p in pages if len(p) < quest.page_size or p[-1] > i - max(window, quest.behind)]
            others = [p for p in pages if p not in chosen]
            room = max(quest.budget - len(near), 0) // quest.page_size - len(chosen)
            if i < quest.prompt:
                room = len(others)
            others.sort(key=lambda p: -highest_products(q[i, mine], k[p, of]))
            chosen += others[: max(room, 0)]
            most = max(most, sum(map(len, chosen)) + len(near))
            read = near + [j for p in chosen for j in p]
            for head in range(mine.start, mine.stop):
                scores = k[read, of] @ q[i, head] / np.sqrt(HEAD_DIM)
                weights = np.exp(scores - scores.max())
                out[i, head] = weights @ v[read, of] / weights.sum()
    return out, most


@pytest.mark.parametrize(
    "quest", [Quest(12, 4), pytest.param(Quest(24, 4, behind=6, prompt=20), marks=pytest.mark.exhaustive)]
)
def test_a_query_reads_its_newest_pages_and_the_best_of_the_others(arrays, quest):
    found = np.asarray(attend_selected_sequence(*arrays[:3], quest, lengths=LENGTHS))
    for row, length in enumerate(LENGTHS):
        expected, most = definition(*(x[row, :length] for x in arrays[:3]), quest)
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-5)
        assert most <= max(quest.budget, quest.prompt)
        assert not found[row, length:].any()


@pytest.mark.parametrize(
    "quest, window",
    [pytest.param(Quest(16, 4), 5, marks=pytest.mark.exhaustive), (Quest(20, 3, behind=9, prompt=30), 7)],
)
def test_with_gates_it_reads_the_window_and_the_best_pages_of_what_was_admitted(arrays, quest, window):
    gates = arrays[3]
    found = attend_selected_sequence(
        *arrays[:3], quest, gates=gates, window=window, threshold=np.array([0.4, 0.1], np.float32), lengths=LENGTHS
    )
    for row, (length, threshold) in enumerate(zip(LENGTHS, (0.4, 0.1), strict=True)):
        given = [x[row, :length] for x in arrays]
        expected, most = definition(*given[:3], quest, given[3], window, np.float32(threshold))
        np.testing.assert_allclose(np.asarray(found)[row, :length], expected, atol=1e-5)
        assert most <= max(quest.budget, quest.prompt)


def test_a_budget_for_everything_is_attention_without_selection(arrays):
    q, k, v, gates = arrays
    whole = attend_selected_sequence(q, k, v, Quest(96, 4))
    np.testing.assert_allclose(whole, causal_attention(q, k, v), atol=1e-5)
    gated = attend_selected_sequence(q, k, v, Quest(120, 4), gates=gates, window=5, threshold=0.5)
    np.testing.assert_allclose(gated, attend_sequence(q, k, v, gates, window=5, threshold=0.5), atol=1e-5)


def test_bounds_are_never_below_a_product_and_equal_scores_prefer_earlier_pages(rng):
    keys = rng.standard_normal((1, 2, 5, 4, HEAD_DIM)).astype(np.float32)
    q = rng.standard_normal((1, 3, HEADS, HEAD_DIM)).astype(np.float32)
    scores = np.asarray(page_scores(jnp.asarray(q), *page_bounds(jnp.asarray(keys))))
    products = np.einsum("tkgd,kpsd->ktpgs", q[0].reshape(3, 2, 2, HEAD_DIM), keys[0]).max((3, 4))
    assert (scores[0] >= products - 1e-5).all()
    expected = highest_products(q[0, 1, 2:].astype(np.float64), keys[0, 1, 3].astype(np.float64))
    assert scores[0, 1, 1, 3] == pytest.approx(expected, rel=1e-5)

    scores, bounded = jnp.array([[1.0, 3.0, 3.0, 2.0, 9.0]]), jnp.array([[True, True, True, True, False]])
    for count, chosen in ((-1, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])):
        found = selected_pages(scores, bounded, jnp.array([count], jnp.int32))
        assert np.flatnonzero(found[0]).tolist() == chosen


def test_what_is_past_a_length_reaches_nobody_and_what_does_not_fit_is_named(arrays):
    dead = np.arange(TIME)[None] >= LENGTHS[:, None]
    poisoned = [np.where(dead.reshape(dead.shape + (1,) * (x.ndim - 2)), np.nan, x) for x in arrays]
    how = {"window": 5, "threshold": 0.5, "lengths": LENGTHS}
    expected = np.asarray(attend_selected_sequence(*arrays[:3], Quest(16, 4), gates=arrays[3], **how))
    assert np.array_equal(attend_selected_sequence(*poisoned[:3], Quest(16, 4), gates=poisoned[3], **how), expected)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        attend_selected_sequence(*arrays[:3], Quest(16, 4), window=0)
    with pytest.raises(ValueError, match="behind must be at least 1, got 0"):
        Quest(16, behind=0)
