"""Bit masks of tokens: every set comes back, whatever the size of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.token_masks import has_tokens, only, pack_mask, unpack_mask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 259])
def test_a_set_of_tokens_comes_back(rng, vocab):
    sets = rng.random((5, vocab)) < 0.5
    sets[0], sets[1] = True, False  # bit 31 is the sign
    mask = pack_mask(sets)
    assert mask.dtype == np.int32 and mask.shape == (5, -(-vocab // 32))
    np.testing.assert_array_equal(jax.jit(unpack_mask, static_argnums=1)(jnp.asarray(mask), vocab), sets)
    tokens = rng.integers(0, vocab, (5, 40)).astype(np.int32)
    np.testing.assert_array_equal(has_tokens(jnp.asarray(mask), tokens), np.take_along_axis(sets, tokens, axis=1))
    outside = np.array([[-1, vocab, 32 * mask.shape[1], 2**31 - 1, -(2**31)]] * 5, np.int32)
    assert not has_tokens(jnp.asarray(mask), jnp.asarray(outside)).any()
    logits = rng.standard_normal((5, 3, vocab)).astype(np.float32)
    expected = np.where(sets[:, None], logits, -np.inf)
    np.testing.assert_array_equal(only(jnp.asarray(mask), jnp.asarray(logits)), expected)
