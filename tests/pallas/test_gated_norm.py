"""The kernels of `gated_norm`: they lower for their platform at the real sizes, and compute what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.gated_norm import gated_norm
from tests.pallas.attending import LATE


def new_arrays(rng, rows, time, heads, dtype, dim=128):
    shapes = (rows, time, heads, dim), (rows, time, heads * dim), (dim,)
    return [jnp.asarray(scale * rng.standard_normal(x), dtype) for scale, x in zip((0.1, 4, 1), shapes, strict=True)]


@pytest.mark.parametrize("rows, time, dtype", [(1, 1, "bfloat16"), (256, 5, "float32")])
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(rows, time, dtype):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), rows, time, 32, jnp.dtype(dtype)))
    traced = jax.jit(lambda *arrays: gated_norm(*arrays, eps=1e-6, target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    "dtype, bound, activation",
    [(jnp.float32, 1e-5, "silu"), (jnp.float32, 1e-5, "sigmoid"), (jnp.bfloat16, 2**-6, "silu")],
)
@pytest.mark.parametrize("platform, how", [("gpu", True), ("tpu", True), ("tpu", LATE)])
def test_a_kernel_is_the_xla_path(rng, platform, how, dtype, bound, activation):
    arrays = new_arrays(rng, 3, 2, 4, dtype)
    norm = {"eps": 1e-6, "activation": activation}
    found = gated_norm(*arrays, **norm, implementation=platform, interpret=how)
    expected = gated_norm(*arrays, **norm, implementation="xla")
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), rtol=bound, atol=1e-6)
    if dtype == jnp.bfloat16:
        # Both round the same two numbers. Where one lies halfway, sums of another order decide (one in 40,000 numbers):
        # then an ulp, 2**-7, after the norm can be two after the gate. What rounded elsewhere would differ everywhere.
        assert np.mean(np.asarray(found != expected)) < 0.01


def test_heads_that_do_not_fill_lanes_are_xlas_on_a_tpu(rng):
    arrays = new_arrays(rng, 1, 1, 4, jnp.float32, 80)
    reason = "a value_dim that is a multiple of 128, got 80"
    with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this gated_norm: it needs {reason}'):
        gated_norm(*arrays, eps=1e-6, implementation="tpu", target="v6e")


@pytest.mark.parametrize(
    "heads, dim, reason",
    [(4, 64, "value_dim 128, got 64"), (3, 128, "rows · time · heads in fours, got 3")],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, heads, dim, reason):
    arrays = new_arrays(rng, 1, 1, heads, jnp.float32, dim)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this gated_norm: it needs {reason}'):
        gated_norm(*arrays, eps=1e-6, implementation="gpu", target="H100")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_kernel_has_the_gradient_of_the_xla_path(rng, platform):
    """Of the output, the gate and the scale, for a random direction."""
    arrays = new_arrays(rng, 3, 2, 4, jnp.float32)
    direction = jnp.asarray(rng.standard_normal(arrays[1].shape), jnp.float32)

    def gradients(**how):
        return jax.grad(lambda arrays: jnp.vdot(gated_norm(*arrays, eps=1e-6, **how), direction))(arrays)

    found, expected = gradients(implementation=platform, interpret=True), gradients(implementation="xla")
    for kernel, xla in zip(found, expected, strict=True):
        np.testing.assert_allclose(kernel, xla, rtol=0, atol=1e-5 * np.abs(xla).max())
