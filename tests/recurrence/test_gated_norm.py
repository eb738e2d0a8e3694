"""The gated norms against float64 definitions."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.gated_norm import gated_norm, grouped_norm

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


def definition_of_groups(out, z, weight, groups, form):
    out, z, weight = (np.asarray(x, np.float64) for x in (out, z, weight))
    gate, flat = z / (1 + np.exp(-z)), out.reshape(z.shape)
    if form == "gated":
        flat = flat * gate
    grouped = flat.reshape(*z.shape[:2], groups, -1)
    normal = grouped / np.sqrt(np.mean(grouped * grouped, axis=-1, keepdims=True) + EPS)
    normal = normal.reshape(z.shape) * weight
    return normal if form == "gated" else normal * gate


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("form", ["gated", "gated after"])
def test_the_grouped_norm_is_the_definition(rng, form, groups, dtype, bound):
    out, z, _ = new_arrays(rng, jnp.dtype(dtype))
    weight = jnp.asarray(rng.standard_normal(z.shape[2]), dtype)
    found = grouped_norm(out, z, weight, groups=groups, eps=EPS, form=form)
    assert found.dtype == jnp.dtype(dtype)  # and is rounded once
    expected = definition_of_groups(out, z, weight, groups, form)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=bound, atol=1e-6)


def test_a_group_on_several_devices_has_their_average(rng):
    """Both halves of a group, each with the mean of squares of the two."""
    out, z, _ = new_arrays(rng, jnp.float32)
    weight = jnp.asarray(rng.standard_normal(z.shape[2]), jnp.float32)
    how, half = {"groups": 1, "eps": EPS, "form": "gated after"}, z.shape[2] // 2
    expected = grouped_norm(out, z, weight, **how)
    halves = [(out[:, :, :2], z[..., :half], weight[:half]), (out[:, :, 2:], z[..., half:], weight[half:])]
    squares = []
    for arrays in halves:
        grouped_norm(*arrays, **how, average=lambda x: squares.append(x) or x)
    found = [grouped_norm(*arrays, **how, average=lambda _: (squares[0] + squares[1]) / 2) for arrays in halves]
    np.testing.assert_allclose(jnp.concatenate(found, axis=2), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="it needs groups that lie on one device each"):
        grouped_norm(*halves[0], **how, average=lambda x: x, implementation="gpu", target="H100")


def test_a_multiple_of_the_values_is_added_first(rng):
    out, z, _ = new_arrays(rng, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(z.shape[2]), jnp.bfloat16)
    D, values = jnp.asarray(rng.standard_normal(4), jnp.float32), jnp.asarray(rng.standard_normal(SHAPE), jnp.bfloat16)
    how = {"groups": 2, "eps": EPS, "form": "gated"}
    found = grouped_norm(out, z, weight, **how, skip=(D, values))
    added = out + (D[None, None, :, None] * values.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found, grouped_norm(added, z, weight, **how))
    with pytest.raises(ValueError, match=r"skip must be D \[heads\] and values \(2, 3, 4, 6\), got \(3,\)"):
        grouped_norm(out, z, weight, **how, skip=(D[:3], values))


def test_groups_that_do_not_fit(rng):
    out, z, weight = new_arrays(rng, jnp.float32)
    how = {"groups": 1, "eps": EPS, "form": "gated"}
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 6\), \(2, 3, 24\) and \(6,\)"):
        grouped_norm(out, z, weight, **how)
    weight = jnp.ones(24)
    with pytest.raises(ValueError, match=r"groups must divide the heads \(4\), got 3"):
        grouped_norm(out, z, weight, **how | {"groups": 3})
    with pytest.raises(ValueError, match="form must be 'gated' or 'gated after', got 'head'"):
        grouped_norm(out, z, weight, **how | {"form": "head"})
