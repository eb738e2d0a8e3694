"""Soft gates of whole heads: a mixture of full and streaming attention, against a dense definition in float64."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention import gated_sequence
from jaxbuf.attention.gated_sequence import attend_mixture

ROWS, TIME, HEADS, KV_HEADS, HEAD_DIM = 2, 45, 4, 2, 8
LENGTHS = np.array([45, 20], np.int32)
WINDOW, SINKS = 6, 3


@pytest.fixture(autouse=True)
def blocks_that_are_small():
    with mock.patch.object(gated_sequence, "BLOCK", 32):
        yield


@pytest.fixture
def arrays(rng):
    q, k, v = (rng.standard_normal((ROWS, TIME, n, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    alpha = np.broadcast_to(rng.uniform(size=(1, 1, KV_HEADS)), (ROWS, TIME, KV_HEADS)).astype(np.float32)
    return 2 * q, k, v, alpha


def dense(q, k, v, gates):
    """With biases of queries times keys, differentiable by JAX itself."""
    group = HEADS // KV_HEADS
    k, v, gates = (jnp.repeat(x, group, axis=2) for x in (k, v, gates))
    query, key = np.arange(TIME)[:, None], np.arange(TIME)[None]
    causal = (key <= query)[None, None]
    near = causal & ((query - key < WINDOW) | (key < SINKS))[None, None]
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(HEAD_DIM)
    full, streaming = (
        jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v)
        for seen in (causal, near)
    )
    live = (np.arange(TIME)[None] < LENGTHS[:, None])[..., None, None]
    return jnp.where(live, gates[..., None] * full + (1 - gates[..., None]) * streaming, 0)


def both(function, given):
    """The outputs, and the gradients of their sum weighed by `given`."""

    def weighed(*x):
        out = function(*x)
        return jnp.sum(out * given), out

    def run(*x):
        gradients, out = jax.grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)(*x)
        return out, gradients

    return jax.jit(run)


def test_outputs_and_gradients_are_those_of_the_dense_mixture(arrays, rng):
    given = rng.standard_normal((ROWS, TIME, HEADS, HEAD_DIM)).astype(np.float32)
    with jax.enable_x64():
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        expected, of_dense = both(dense, given.astype(np.float64))(*wide)
        expected, of_dense = np.asarray(expected), [np.asarray(x) for x in of_dense]

    def mixed(*x):
        return attend_mixture(*x, window=WINDOW, sinks=SINKS, lengths=LENGTHS)

    out, gradients = both(mixed, given)(*arrays)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for x, y in zip(gradients, of_dense, strict=True):
        assert np.abs(np.asarray(x, np.float64) - y).max() <= 1e-4 * max(1, np.abs(y).max())


def test_what_is_past_a_length_reaches_nobody(arrays):
    dead = np.arange(TIME)[None] >= LENGTHS[:, None]
    poisoned = [np.where(dead.reshape(dead.shape + (1,) * (x.ndim - 2)), np.nan, x) for x in arrays]
    expected = np.asarray(attend_mixture(*arrays, window=WINDOW, sinks=SINKS, lengths=LENGTHS))
    assert np.array_equal(attend_mixture(*poisoned, window=WINDOW, sinks=SINKS, lengths=LENGTHS), expected)
    with pytest.raises(ValueError, match="sinks must be at least 0, got -1"):
        attend_mixture(*arrays, window=WINDOW, sinks=-1)
