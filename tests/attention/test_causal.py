"""Causal attention without a cache, against a float64 loop over queries."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention import flash
from jaxbuf.attention.causal import causal_attention
from tests.attention.definition import attention

HEADS, KV_HEADS, HEAD_DIM, TIME = 6, 2, 16, 60


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


def test_half_precision_is_summed_in_float32(inputs):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs)
    expected = np.stack([attention(*row) for row in zip(q, k, v, strict=True)])
    out = causal_attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_gradients_in_blocks_are_those_of_the_definition(rng, dtype, bound):
    """Of three blocks of queries, the last of them with fewer, and of a row that is shorter than the others."""
    time, lengths = 41, np.array([41, 20], np.int32)
    q, k, v, ct = (jnp.asarray(rng.standard_normal((2, time, n, 8)), dtype) for n in (4, 2, 2, 4))
    live = np.arange(time)[None] < lengths[:, None]
    ct = jnp.where(live[..., None, None], ct, 0)

    def definition(q, k, v):
        with jax.enable_x64():
            q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
            weigh = jnp.asarray(np.asarray(ct, np.float64))

            def weighed(q, k, v):
                k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
                scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.float64(8))
                seen = np.tril(np.ones((time, time), bool))[None] & live[:, None]
                weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
                return jnp.sum(jnp.einsum("bhts,bshd->bthd", weights, v) * weigh)

            return [np.asarray(x) for x in jax.grad(weighed, argnums=(0, 1, 2))(q, k, v)]

    def weighed(q, k, v):
        return jnp.sum((causal_attention(q, k, v, lengths=lengths) * ct).astype(jnp.float32))

    wanted = definition(q, k, v)
    poisoned = [jnp.where(live[..., None, None], x, jnp.nan) for x in (k, v)]
    with mock.patch.object(flash, "QUERIES", 16):
        found = jax.grad(weighed, argnums=(0, 1, 2))(q, *poisoned)
    for x, y in zip(found, wanted, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
        assert error <= bound, error


def test_memory_is_linear_in_time():
    """Of the gradient, too: what is kept of 4,096 tokens is far less than their scores."""

    def needs(time):
        q, k = (jax.ShapeDtypeStruct((1, time, heads, 8), jnp.float32) for heads in (4, 2))
        run = jax.jit(jax.grad(lambda *x: jnp.sum(causal_attention(*x)), argnums=(0, 1, 2)))
        return run.lower(q, k, k).compile().memory_analysis().temp_size_in_bytes

    short, long = needs(1024), needs(4096)
    assert long < 5 * short and long < 4 * 4 * 4096**2


def test_heads_that_do_not_divide(inputs):
    q, k, v = inputs
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        causal_attention(q[:, :, :5], k, v)
