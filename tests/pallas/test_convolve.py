"""The kernel of the convolution alone on GPUs: it lowers at the real sizes, and computes what the XLA path computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.convolution import extend_ring, init_ring
from tests.gpu import around_checks

MAX_PENDING = 8


def new_ring(channels, rows, dtype, max_pending=MAX_PENDING, width=4):
    return init_ring(slots=rows, channels=channels, width=width, max_pending=max_pending, dtype=dtype)


@pytest.mark.parametrize("family", around_checks.CONVOLUTIONS)
def test_the_kernel_lowers_for_cuda_at_the_real_sizes(family):
    channels, time, dtype, tree, biased, parts = around_checks.CONVOLUTIONS[family]
    rows, dtype = 64, jnp.dtype(dtype)
    ring = jax.eval_shape(lambda: new_ring(channels, rows, dtype, max(MAX_PENDING, time)))
    shapes = (channels, 4), (channels,), (rows, time, channels)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    shapes = (rows,), (rows,), (rows,), ring.shape[:2], (rows, time)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def step(ring, weight, bias, x, slots, start, lengths, order, parents):
        where = {"slots": slots, "start": start, "lengths": lengths}
        where |= {"order": order, "parents": parents} if tree else {}
        bias = bias if biased else None
        return extend_ring(ring, weight, x, **where, bias=bias, activation="silu", parts=parts, target="H100")

    traced = jax.jit(step, donate_argnums=0).trace(ring, *arrays, *integers)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == 1
    # The ring, behind the parts, in place.
    assert f"output_operand_alias<output_tuple_indices = [{max(1, len(parts))}]" in lowered


@pytest.mark.parametrize(
    "channels, time, dtype, tree, biased, parts",
    [
        (1280, 3, "bfloat16", False, True, ()),  # blocks of 1024 channels, the second of which begins at 256
        (1280, 3, "bfloat16", False, True, (1024, 128, 128)),
        (640, 4, "float32", True, True, (320, 320)),
        (202, 4, "bfloat16", True, False, ()),  # a thread has two bytes
        pytest.param(256, 16, "float32", True, False, (101, 155), marks=pytest.mark.slow),
    ],
)
def test_the_kernel_is_the_xla_path_over_ragged_steps(rng, channels, time, dtype, tree, biased, parts):
    case = {"interpreted": (channels, time, dtype, tree, biased, parts)}
    around_checks.check_convolutions(rng, case, rows=4, steps=3, interpret=True)


@pytest.mark.parametrize("width", [2, 3])
def test_fewer_taps(rng, width):
    ring, one = new_ring(256, 1, jnp.float32, 2, width), jnp.ones(1, jnp.int32)
    ring = jnp.asarray(rng.standard_normal(ring.shape), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((256, width)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((1, 2, 256)), jnp.float32)
    where = {"slots": one, "start": 7 * one, "lengths": 2 * one}
    found = extend_ring(ring, weight, x, **where, implementation="gpu", interpret=True)
    expected = extend_ring(ring, weight, x, **where, implementation="xla")
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_numbers_in_bfloat16_differ_by_the_roundings_of_silu_alone(rng):
    channels, one = 256, jnp.ones(1, jnp.int32)
    ring = jnp.asarray(rng.standard_normal(new_ring(channels, 1, jnp.bfloat16).shape), jnp.bfloat16)
    weight, x = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((channels, 4), (1, 8, channels)))
    where = {"slots": one, "start": 7 * one, "lengths": 8 * one, "activation": "silu"}
    found, _ = extend_ring(ring, weight, x, **where, implementation="gpu", interpret=True)
    expected, _ = extend_ring(ring, weight, x, **where, implementation="xla")
    assert found.dtype == expected.dtype
    # XLA rounds the sigmoid and its product, the kernel the product: three roundings by up to 2**-8 each.
    found, expected = (np.asarray(a, np.float32) for a in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize(
    "channels, time, width, ring, reason",
    [
        (96, 1, 4, "float32", "at least 128 channels, got 96"),
        (128, 1, 5, "float32", "a convolution of width 2 to 4, got 5"),
        (128, MAX_PENDING + 1, 4, "float32", "1 to 8 tokens at once, got 9"),
        (128, 1, 4, "bfloat16", "a ring of the inputs' dtype float32, got bfloat16"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error_that_says_why(rng, channels, time, width, ring, reason):
    weight, x = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((channels, width), (1, time, channels))
    )
    where = {name: jnp.ones(1, jnp.int32) for name in ("slots", "start", "lengths")}
    ring = new_ring(channels, 1, jnp.dtype(ring), width=width)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this convolve: it needs {reason}'):
        extend_ring(ring, weight, x, **where, implementation="gpu", target="H100")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_bias_reaches_no_token_that_is_not_real(rng, platform):
    ring, rows = new_ring(128, 3, jnp.float32), jnp.arange(3, dtype=jnp.int32)
    weight, x = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((128, 4), (3, 2, 128)))
    where = {"slots": rows, "start": 0 * rows, "lengths": jnp.array([2, 1, 2]), "order": None}
    bias = jnp.asarray(rng.standard_normal(128), jnp.float32)
    for how in ({"implementation": "xla"}, {"implementation": platform, "interpret": True}):
        y, _ = extend_ring(ring, weight, x, **where, bias=bias, activation="silu", **how)
        assert not np.any(np.asarray(y)[[0, 0, 1], [0, 1, 1]])
        plain = np.asarray(extend_ring(ring, weight, x, **where, implementation="xla")[0]) + np.asarray(bias)
        np.testing.assert_allclose(y[2], (plain / (1 + np.exp(-plain)))[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"parts": (100, 29)}, r"parts must be numbers from 1 whose sum is channels \(128\), got \(100, 29\)"),
        ({"bias": jnp.zeros(4)}, r"bias must have shape \(128,\), got \(4,\)"),
        ({"activation": "relu"}, "activation must be"),
    ],
)
def test_a_bias_or_an_activation_that_does_not_fit(more, words):
    one = jnp.ones(1, jnp.int32)
    where = {"slots": one, "start": one, "lengths": one}
    with pytest.raises(ValueError, match=words):
        extend_ring(new_ring(128, 1, jnp.float32), jnp.zeros((128, 4)), jnp.zeros((1, 1, 128)), **where, **more)
