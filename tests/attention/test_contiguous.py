"""Softmax attention, with and without its cache, against a float64 loop over queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.contiguous import KVCache, append, attend, causal_attention, init_kv

HEADS, KV_HEADS, HEAD_DIM, CAPACITY, TIME = 6, 2, 16, 64, 60


@jax.jit
def run_step(cache, q, k, v, slots, start, lengths):
    cache = append(cache, k, v, slots=slots, start=start, lengths=lengths)
    return attend(q, cache, slots=slots, start=start, lengths=lengths), cache


def attention(q, k, v):
    """float64 [time, heads, head_dim]: each query over the keys up to its own position."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for time in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[: time + 1, head // group], v[: time + 1, head // group]
            scores = keys @ q[time, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[time, head] = weights @ values / weights.sum()
    return out


@pytest.fixture
def inputs(rng):
    def draw(heads):
        return rng.standard_normal((5, TIME, heads, HEAD_DIM)).astype(np.float32)

    return 2.0 * draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def test_causal_attention_is_the_definition(inputs):
    expected = np.stack([attention(*row) for row in zip(*inputs, strict=True)])
    np.testing.assert_allclose(causal_attention(*inputs), expected, atol=1e-5)


def test_nothing_past_a_length_is_seen(inputs):
    q, k, v = inputs
    lengths = np.array([60, 1, 33, 0, 59], np.int32)
    expected = np.stack([attention(*row) for row in zip(*inputs, strict=True)])
    dead = np.arange(TIME)[None] >= lengths[:, None]
    k, v = k.copy(), v.copy()
    k[dead] = v[dead] = np.nan
    out = np.asarray(causal_attention(q, k, v, lengths=lengths))
    assert np.isfinite(out).all()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], expected[row, :length], atol=1e-5)


@pytest.mark.parametrize("in_order", [False, True], ids=["slots", "all slots in order"])
def test_cache_under_random_schedules(inputs, rng, in_order):
    """Prefill, pending tokens, partial acceptance, with NaN in every row past the committed ones."""
    rows = inputs[0].shape[0]
    expected = np.stack([attention(*row) for row in zip(*inputs, strict=True)])
    cache = init_kv(slots=rows, capacity=CAPACITY, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)
    slots = None if in_order else rng.permutation(np.arange(1, rows + 1)).astype(np.int32)
    index = np.arange(rows) if in_order else slots - 1
    position = np.zeros(rows, np.int64)
    for time in [25, 5, 1, 5, 5, 1, 1, 5, 25, 5]:
        stale = np.arange(CAPACITY)[None] >= position[:, None]
        keys, values = np.array(cache.keys), np.array(cache.values)
        for row in range(rows):
            keys[index[row]][:, stale[row]] = values[index[row]][:, stale[row]] = np.nan
        lengths = np.minimum(rng.integers(0, time + 1, rows), TIME - position)
        offsets = np.minimum(position[:, None] + np.arange(time), TIME - 1)[..., None, None]
        q, k, v = (np.take_along_axis(x, offsets, axis=1) for x in inputs)
        dead = np.arange(time)[None] >= lengths[:, None]
        k[dead] = v[dead] = np.nan
        out, cache = run_step(
            KVCache(jnp.asarray(keys), jnp.asarray(values)),
            q,
            k,
            v,
            slots,
            position.astype(np.int32),
            lengths.astype(np.int32),
        )
        assert np.isfinite(out).all()
        for row in range(rows):
            real = slice(position[row], position[row] + lengths[row])
            np.testing.assert_allclose(out[row, : lengths[row]], expected[row, real], atol=1e-5)
        position += rng.integers(0, lengths + 1)


def test_null_slot_reads_zeros_and_writes_nothing(inputs, rng):
    shape = (3, KV_HEADS, CAPACITY, HEAD_DIM)
    cache = KVCache(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2)))
    slots, start = np.array([0, 2, 0, 3, 0], np.int32), np.full(5, 9, np.int32)
    q, k, v = (x[:, :5] for x in inputs)
    out, after = run_step(cache, q, k, v, slots, start, np.full(5, 5, np.int32))
    np.testing.assert_array_equal(out[slots == 0], 0.0)
    assert np.abs(out[slots > 0]).max() > 0
    for old, new, written in ((cache.keys, after.keys, k), (cache.values, after.values, v)):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(new[1, :, 9:14], np.swapaxes(written[1], 0, 1))
        np.testing.assert_array_equal(new[1, :, 14:], old[1, :, 14:])


def test_positions_past_the_capacity_are_dropped(inputs):
    cache = init_kv(slots=5, capacity=CAPACITY, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)
    q, k, v = (x[:, :5] for x in inputs)
    start = np.full(5, CAPACITY - 2, np.int32)
    _, cache = run_step(cache, q, k, v, None, start, np.full(5, 5, np.int32))
    np.testing.assert_array_equal(cache.keys[:, :, -2:], np.swapaxes(k[:, :2], 1, 2))
    np.testing.assert_array_equal(cache.keys[:, :, :-2], 0.0)


def test_half_precision_is_summed_in_float32(inputs):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs)
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    expected = np.stack([attention(*row) for row in zip(*exact, strict=True)])
    out = causal_attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03)


def test_heads_that_do_not_divide(inputs):
    q, k, v = inputs
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        causal_attention(q[:, :, :5], k, v)


def test_rows_that_are_not_all_slots(inputs):
    cache = init_kv(slots=4, capacity=CAPACITY, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"rows \(5\) must be the cache's slots \(4\)"):
        attend(inputs[0][:, :1], cache, start=jnp.zeros(5, jnp.int32))


@pytest.mark.parametrize("name", ["slots", "capacity", "kv_heads", "head_dim"])
def test_sizes_that_make_no_cache(name):
    sizes = {"slots": 1, "capacity": 1, "kv_heads": 1, "head_dim": 1}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        init_kv(**(sizes | {name: 0}), dtype=jnp.float32)
