"""Write-gated attention over whole sequences, against a definition in float64, and its gradients against autodiff."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention import gated_sequence
from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.gated import FLOOR, attend_sequence

ROWS, TIME, HEADS, KV_HEADS, HEAD_DIM = 3, 75, 4, 2, 8
LENGTHS = np.array([75, 40, 1], np.int32)


@pytest.fixture(autouse=True)
def blocks_that_are_small():
    """Three blocks, of which the last is not full."""
    with mock.patch.object(gated_sequence, "BLOCK", 32):
        yield


@pytest.fixture
def arrays(rng):
    def draw(heads):
        return rng.standard_normal((ROWS, TIME, heads, HEAD_DIM)).astype(np.float32)

    gates = rng.uniform(size=(ROWS, TIME, KV_HEADS)).astype(np.float32)
    gates[rng.uniform(size=gates.shape) < 0.2] = 0.0  # below the floor
    return 2 * draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), gates


def definition(q, k, v, gates, window, threshold=None, soft="bias"):
    """Query by query, of one row in float64; `threshold` is a number."""
    q, k, v, gates = (np.asarray(x, np.float64) for x in (q, k, v, gates))
    out, group = np.zeros_like(q), q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            of = head // group
            scores, seen = k[: i + 1, of] @ q[i, head] / np.sqrt(q.shape[-1]), np.ones(i + 1, bool)
            shares = np.ones(i + 1)
            for j in range(i + 1):
                if i - j < window:
                    continue
                if threshold is None and soft == "share":
                    shares[j] = gates[j, of]
                elif threshold is None:
                    scores[j] += np.log(max(gates[j, of], FLOOR))
                else:
                    seen[j] = gates[j, of] >= threshold
            weights = np.where(seen, np.exp(scores - scores[seen].max()), 0)
            out[i, head] = (shares * weights) @ v[: i + 1, of] / weights.sum()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 20, 300])
@pytest.mark.parametrize("threshold, soft", [(None, "bias"), (None, "share"), (0.5, "bias")])
def test_a_query_sees_what_is_near_and_what_its_gate_admits(arrays, window, threshold, soft):
    how = {"window": window, "threshold": threshold}
    found = np.asarray(attend_sequence(*arrays, **how, lengths=LENGTHS, soft=soft))
    for row, length in enumerate(LENGTHS):
        expected = definition(*(x[row, :length] for x in arrays), window, threshold, soft)
        np.testing.assert_allclose(found[row, :length], expected, atol=1e-5)
        assert not found[row, length:].any()


def test_a_threshold_for_each_row_from_everything_to_nothing(arrays):
    """At 0 and below all is seen; above 1 the window alone, as if every gate were closed."""
    limits = np.array([0.0, 0.4, 1.5], np.float32)
    found = np.asarray(attend_sequence(*arrays, window=7, threshold=limits))
    np.testing.assert_allclose(found[0], causal_attention(*(x[:1] for x in arrays[:3]))[0], atol=1e-5)
    for row, limit in enumerate(limits):
        np.testing.assert_allclose(found[row], definition(*(x[row] for x in arrays), 7, limit), atol=1e-5)


def test_what_is_past_a_length_reaches_nobody(arrays):
    expected = np.asarray(attend_sequence(*arrays, window=5, lengths=LENGTHS))
    dead = np.arange(TIME)[None] >= LENGTHS[:, None]
    poisoned = [np.where(dead.reshape(dead.shape + (1,) * (x.ndim - 2)), np.nan, x) for x in arrays]
    assert np.array_equal(attend_sequence(*poisoned, window=5, lengths=LENGTHS), expected)
    given = jax.grad(lambda *x: attend_sequence(*x, window=5, lengths=LENGTHS).sum(), argnums=(0, 1, 2, 3))(*poisoned)
    assert all(np.isfinite(x).all() and not np.asarray(x)[dead].any() for x in given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "window, threshold, soft, dtype, bound",
    [
        (1, None, "bias", "float32", 1e-4),
        (20, None, "bias", "float32", 1e-4),
        (20, None, "share", "float32", 1e-4),
        (20, 0.5, "bias", "float32", 1e-4),
        (20, None, "bias", "bfloat16", 0.03),
    ],
)
def test_gradients_are_those_of_the_dense_definition(arrays, rng, window, threshold, soft, dtype, bound):
    q, k, v, gates = arrays
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    given = jnp.asarray(rng.standard_normal(q.shape), dtype)
    given = jnp.where(np.arange(TIME)[None, :, None, None] < LENGTHS[:, None, None, None], given, 0)

    def dense(q, k, v, gates):
        k, v, gates = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v, gates))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(HEAD_DIM)
        distance = (np.arange(TIME)[:, None] - np.arange(TIME)[None])[None, None]
        gates = jnp.moveaxis(gates, 1, 2)[:, :, None]
        if threshold is None and soft == "bias":
            scores = scores + jnp.where(distance >= window, jnp.log(jnp.maximum(gates, FLOOR)), 0)
        seen = jnp.ones_like(gates, bool) if threshold is None else (gates >= threshold) | (distance < window)
        real = np.arange(TIME)[None] < LENGTHS[:, None]
        seen = seen & (distance >= 0) & real[:, None, None] & real[:, None, :, None]
        weights = jax.nn.softmax(jnp.where(seen | np.eye(TIME, dtype=bool)[None, None], scores, -jnp.inf), axis=-1)
        if soft == "share":
            weights = weights * jnp.where(distance >= window, gates, 1)
        return jnp.sum(jnp.einsum("bhts,bshd->bthd", weights, v) * np.asarray(given, np.float64))

    with jax.enable_x64():
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, gates)]
        expected = [np.asarray(x) for x in jax.grad(dense, argnums=(0, 1, 2, 3))(*wide)]

    def weighed(q, k, v, gates):
        out = attend_sequence(q, k, v, gates, window=window, threshold=threshold, lengths=LENGTHS, soft=soft)
        return jnp.sum((out * given).astype(jnp.float32))

    found = jax.grad(weighed, argnums=(0, 1, 2, 3))(q, k, v, jnp.asarray(gates))
    for x, y in zip(found, expected, strict=True):
        assert np.abs(np.asarray(x, np.float64) - y).max() <= bound * max(1, np.abs(y).max())
    assert np.any(expected[3]) == (threshold is None)


def test_memory_is_linear_in_time_with_gradients():
    """What a program takes beside its arguments and results, at 1k and at 8k tokens."""

    def taken(time):
        q, k = (jax.ShapeDtypeStruct((1, time, heads, 16), jnp.float32) for heads in (4, 2))
        gates = jax.ShapeDtypeStruct((1, time, 2), jnp.float32)

        def loss(*x):
            return attend_sequence(*x, window=64).sum()

        with mock.patch.object(gated_sequence, "BLOCK", 128):
            program = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, k, gates).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert taken(8192) < 10 * taken(1024)
    assert taken(8192) < 8192 * 8192 * 4 / 4  # of one head's bias, a quarter


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"gates": np.zeros((ROWS, TIME, HEADS), np.float32)}, r"gates must have shape \(3, 75, 2\), got \(3, 75, 4\)"),
        ({"gates": jnp.zeros((ROWS, TIME, KV_HEADS), jnp.bfloat16)}, "gates must be float32, got bfloat16"),
        (
            {"threshold": np.zeros(2, np.float32)},
            r"threshold must be a number or f32 \[3\], one a row, got shape \(2,\)",
        ),
        ({"lengths": np.zeros(3, np.float32)}, r"lengths must be int32 \[3\]"),
        ({"k": np.zeros((ROWS, TIME, 3, HEAD_DIM), np.float32)}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"v": np.zeros((ROWS, TIME, 1, HEAD_DIM), np.float32)}, r"v must have shape \(3, 75, 2, 8\), got"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(arrays, changes, message):
    given = dict(zip(("q", "k", "v", "gates"), arrays, strict=True)) | {"window": 5} | changes
    with pytest.raises(ValueError, match=message):
        attend_sequence(**given)
