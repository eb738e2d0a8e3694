"""Causal attention without a cache, against a float64 loop over queries."""

import jax.numpy as jnp
import numpy as np
import pytest

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


def test_heads_that_do_not_divide(inputs):
    q, k, v = inputs
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        causal_attention(q[:, :, :5], k, v)
