"""The gated norm against a float64 definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.gated_norm import gated_norm

SHAPE, EPS = (2, 3, 4, 6), 1e-6


def definition(out, z, weight, activation="silu"):
    out, z, weight = (np.asarray(x, np.float64) for x in (out, z, weight))
    normal = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + EPS) * weight
    gate = (z if activation == "silu" else 1) / (1 + np.exp(-z))
    return (normal * gate.reshape(out.shape)).reshape(z.shape)


def new_arrays(rng, dtype):
    flat = (*SHAPE[:2], SHAPE[2] * SHAPE[3])
    return [
        jnp.asarray(scale * rng.standard_normal(x), dtype) for scale, x in ((0.1, SHAPE), (4, flat), (1, SHAPE[3:]))
    ]


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gated_norm_is_the_definition(rng, activation):
    arrays = new_arrays(rng, jnp.float32)
    found = gated_norm(*arrays, eps=EPS, activation=activation)
    np.testing.assert_allclose(found, definition(*arrays, activation), rtol=1e-5, atol=1e-6)


def test_half_precision_is_rounded_after_the_norm_and_after_the_gate(rng):
    arrays = new_arrays(rng, jnp.bfloat16)
    found = gated_norm(*arrays, eps=EPS)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), definition(*arrays), rtol=2**-7, atol=1e-5)


def test_shapes_that_do_not_fit_are_an_error_that_shows_them(rng):
    out, z, weight = new_arrays(rng, jnp.float32)
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 6\), \(2, 3, 24\) and \(5,\)"):
        gated_norm(out, z, weight[:5], eps=EPS)
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 6\), \(2, 3, 23\) and \(6,\)"):
        gated_norm(out, z[..., :23], weight, eps=EPS)
    with pytest.raises(ValueError, match="activation must be 'silu' or 'sigmoid', got 'relu'"):
        gated_norm(out, z, weight, eps=EPS, activation="relu")
