"""The kernels of `gated_norm`: they lower for their platform at the real sizes, and compute what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.gated_norm import gated_norm, grouped_norm
from tests.gpu import around_checks
from tests.pallas.attending import LATE


def new_arrays(rng, rows, time, heads, dtype, dim=128):
    shapes = (rows, time, heads, dim), (rows, time, heads * dim), (dim,)
    return [jnp.asarray(scale * rng.standard_normal(x), dtype) for scale, x in zip((0.1, 4, 1), shapes, strict=True)]


def new_groups(rng, rows, time, heads, dtype, dim):
    """As `new_arrays`, with a weight for each channel; and D and values."""
    out, z, _ = new_arrays(rng, rows, time, heads, dtype, dim)
    D, values = jnp.asarray(rng.standard_normal(heads), jnp.float32), jnp.asarray(rng.standard_normal(out.shape), dtype)
    return (out, z, jnp.asarray(rng.standard_normal(heads * dim), dtype)), (D, values)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("rows, time, dtype", [(1, 1, "bfloat16"), (256, 5, "float32")])
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(rows, time, dtype, dim):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), rows, time, 32, jnp.dtype(dtype), dim))
    traced = jax.jit(lambda *arrays: gated_norm(*arrays, eps=1e-6, target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize("family", around_checks.GROUPED)
@pytest.mark.parametrize("rows, time, dtype", [(1, 1, "bfloat16"), (256, 5, "float32")])
def test_the_gpu_kernel_of_groups_lowers_for_cuda_at_the_real_sizes(rows, time, dtype, family):
    heads, dim, groups = around_checks.GROUPED[family]
    arrays = jax.eval_shape(lambda: new_groups(np.random.default_rng(0), rows, time, heads, jnp.dtype(dtype), dim))
    how = {"groups": groups, "eps": 1e-5, "form": "gated", "target": "H100"}
    traced = jax.jit(lambda arrays, skip: grouped_norm(*arrays, **how, skip=skip)).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-7)])
@pytest.mark.parametrize(
    "rows, time, heads, dim",
    [(3, 2, 4, 64), (1, 1, 5, 64), (2, 2, 7, 80), (5, 1, 3, 256), (1, 3, 9, 128)],  # the last block begins earlier
)
def test_the_gpu_kernel_of_all_heads_is_the_xla_path(rng, rows, time, heads, dim, dtype, bound):
    arrays = new_arrays(rng, rows, time, heads, dtype, dim)
    found = gated_norm(*arrays, eps=1e-6, implementation="gpu", interpret=True)
    expected = gated_norm(*arrays, eps=1e-6, implementation="xla")
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), rtol=2 * bound, atol=1e-6)
    if dtype == jnp.bfloat16:
        assert np.mean(np.asarray(found != expected)) < 0.01  # as below


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-7)])
@pytest.mark.parametrize("form, skips", [("gated", False), ("gated after", True)])
@pytest.mark.parametrize(
    "rows, time, heads, dim, groups",
    [
        (2, 1, 96, 80, 8),  # warps that have groups of 960
        (5, 1, 12, 80, 1),  # the last block begins earlier
        (1, 2, 24, 64, 1),  # a block that has a group of 1536
        (2, 1, 64, 64, 8),  # of 512
        (1, 1, 8, 64, 4),  # of 128
    ],
)
def test_the_gpu_kernel_of_groups_is_the_xla_path(rng, rows, time, heads, dim, groups, form, skips, dtype, bound):
    arrays, skip = new_groups(rng, rows, time, heads, dtype, dim)
    how = {"groups": groups, "eps": 1e-5, "form": form, "skip": skip if skips else None}
    found = grouped_norm(*arrays, **how, implementation="gpu", interpret=True)
    expected = grouped_norm(*arrays, **how, implementation="xla")
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # Both round once: where sums of another order decide, by an ulp.
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, expected)), rtol=bound, atol=1e-6)
    if dtype == jnp.bfloat16:
        assert np.mean(np.asarray(found != expected)) < 0.01


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
    [
        (4, 72, "value_dim in multiples of 16 up to 256, of 64 up to 1024, of 512 up to 8192, got 72"),
        (3, 128, "rows · time · heads at least 4 for 128, got 3"),
        (12, 80, "rows · time · heads at least 16 for 80, got 12"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, heads, dim, reason):
    arrays = new_arrays(rng, 1, 1, heads, jnp.float32, dim)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this gated_norm: it needs {reason}'):
        gated_norm(*arrays, eps=1e-6, implementation="gpu", target="H100")


@pytest.mark.parametrize(
    "heads, dim, groups, platform, reason",
    [
        (1, 8, 1, "gpu", "channels of a group in multiples of 16 up to 256"),
        (24, 80, 2, "gpu", "rows · time · groups at least 4 for 960, got 2"),
        (4, 128, 4, "tpu", "a norm of each head, not of groups of channels"),
    ],
)
def test_which_groups_no_kernel_serves(rng, heads, dim, groups, platform, reason):
    arrays, _ = new_groups(rng, 1, 1, heads, jnp.float32, dim)
    how = {"groups": groups, "eps": 1e-5, "form": "gated", "target": {"gpu": "H100", "tpu": "v6e"}[platform]}
    with pytest.raises(
        ValueError, match=f'implementation="{platform}" can not serve this gated_norm: it needs {reason}'
    ):
        grouped_norm(*arrays, **how, implementation=platform)


def test_the_kernel_of_groups_has_the_gradient_of_the_xla_path(rng):
    given = new_groups(rng, 3, 2, 4, jnp.float32, 128)
    arrays, _ = given
    direction = jnp.asarray(rng.standard_normal(arrays[1].shape), jnp.float32)
    how = {"groups": 4, "eps": 1e-5, "form": "gated"}

    def gradients(**by):
        def weighed(given):
            arrays, skip = given
            return jnp.vdot(grouped_norm(*arrays, **how, **by, skip=skip), direction)

        return jax.tree.leaves(jax.grad(weighed)(given))

    found, expected = gradients(implementation="gpu", interpret=True), gradients(implementation="xla")
    for kernel, xla in zip(found, expected, strict=True):
        np.testing.assert_allclose(kernel, xla, rtol=0, atol=1e-5 * np.abs(xla).max())


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
