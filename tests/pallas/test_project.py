"""The kernel of `project` and its kin: it lowers for its platform at the real sizes, and computes the products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.projections import (
    Summands,
    gated_project,
    product_or_summands,
    product_slices,
    project,
    project_rows,
    squared_relu_project,
)
from jaxbuf.models.projections import summed as summed_up
from jaxbuf.pallas.project import Call, gpu

# Nemotron-3-Nano-4B: z, what the convolution reads, and the steps of a Mamba-2 layer; and its MLP.
ROWS, NEMOTRON_MLP, NEMOTRON_HIDDEN = (7680, 9728, 96), 12544, 3136
# Qwen3.5-4B: q | k | v, the output norm's gate, decay and write strength of a recurrent layer.
SIZES, KEPT = (8192, 4096, 32, 32), (False, False, True, True)


def new_arrays(rng, rows, time, inputs, outputs, dtype):
    """x, and weights that give numbers of size 1."""
    x = jnp.asarray(rng.standard_normal((rows, time, inputs)), dtype)
    return x, [jnp.asarray(inputs**-0.5 * rng.standard_normal((n, inputs)), dtype) for n in outputs]


def products_of(x, weights):
    x, *weights = (np.asarray(a, np.float64) for a in (x, *weights))
    return [x @ w.T for w in weights]


@pytest.mark.parametrize("tokens", [1, 256])
def test_the_gpu_kernels_lower_for_cuda_at_the_real_sizes(tokens):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), tokens, 1, 2560, (*SIZES, 9216), jnp.bfloat16))

    def both(x, weights):
        *first, gate = weights
        return project(x, first, float32=KEPT, target="H100"), gated_project(x, gate, gate, target="H100")

    text = jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize("tokens", [1, 256])
def test_the_gpu_kernel_of_one_weight_and_of_squares_lowers_for_cuda_at_the_real_sizes(tokens):
    outputs = sum(ROWS), NEMOTRON_MLP
    arrays = jax.eval_shape(
        lambda: new_arrays(np.random.default_rng(0), tokens, 1, NEMOTRON_HIDDEN, outputs, jnp.bfloat16)
    )

    def both(x, weights):
        rows = project_rows(x, weights[0], ROWS, float32=(False, False, True), target="H100")
        return rows, squared_relu_project(x, weights[1], target="H100")

    text = jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize("tokens", [1, 128])
@pytest.mark.parametrize("inputs", [4096, 9216])
def test_the_gpu_kernel_in_slices_lowers_for_cuda_at_the_real_sizes(tokens, inputs):
    x, (weight,) = jax.eval_shape(
        lambda: new_arrays(np.random.default_rng(0), tokens, 1, inputs, (2560,), jnp.bfloat16)
    )
    traced = jax.jit(lambda x, weight: product_or_summands(x, weight, target="H100")).trace(x, weight)
    assert isinstance(traced.out_info, Summands)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


def test_of_more_tokens_the_librarys_product_leaves_slices(rng):
    x, (weight,) = new_arrays(rng, 130, 1, 512, (40,), jnp.bfloat16)
    traced = jax.jit(lambda x, weight: product_or_summands(x, weight, target="H100")).trace(x, weight)
    assert isinstance(traced.out_info, Summands) and traced.out_info.numbers.shape == (4, 130, 1, 40)
    assert "@mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    (expected,) = products_of(x, [weight])
    summed = np.sum(np.asarray(product_slices(x, weight, 4), np.float64), axis=0)
    np.testing.assert_allclose(summed, expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("rows, time", [(1, 1), (35, 2)])
def test_the_gpu_kernel_multiplies_slices(rng, monkeypatch, rows, time):
    monkeypatch.setattr(gpu, "PROCESSORS", 4)
    x, weights = new_arrays(rng, rows, time, 256, (40,), jnp.bfloat16)
    found = product_or_summands(x, *weights, implementation="gpu", interpret=True)
    assert isinstance(found, Summands) and found.numbers.shape == (gpu.slices_of(rows * time, 256, 40), rows, time, 40)
    (expected,) = products_of(x, weights)
    summed = np.sum(np.asarray(found.numbers, np.float64), axis=0)
    np.testing.assert_allclose(summed, expected, rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(np.asarray(found.total(), np.float64), expected, rtol=2**-8, atol=4e-6)
    whole = product_or_summands(x, *weights, implementation="xla")
    np.testing.assert_allclose(np.asarray(whole, np.float64), expected, rtol=2**-8, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows, time, products", [(1, 1, (1, 1)), (35, 2, (2, 1)), (43, 3, (2, 2))])
def test_the_gpu_kernel_multiplies_with_every_weight(rng, monkeypatch, rows, time, products):
    """By one warpgroup, two, and two that multiply twice; a weight of whole tiles, and two that end within one."""
    monkeypatch.setattr(gpu, "PROCESSORS", 2)
    x, weights = new_arrays(rng, rows, time, 128, (72, 8, 40), jnp.bfloat16)
    call = Call(rows * time, 128, (72, 8, 40), (), x.dtype)
    schedule = gpu.arrange(call)
    assert (schedule.warpgroups, schedule.products) == products and schedule.tiles == (3, 1, 2)
    found = project(x, weights, float32=(False, True, False), implementation="gpu", interpret=True)
    assert [y.dtype for y in found] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    for y, expected, bound in zip(found, products_of(x, weights), (2**-8, 1e-6, 2**-8), strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=bound, atol=4e-6)


def test_the_gpu_kernel_gates(rng, monkeypatch):
    monkeypatch.setattr(gpu, "PROCESSORS", 2)
    x, weights = new_arrays(rng, 9, 2, 128, (40, 40), jnp.float16)
    gate, up = products_of(x, weights)
    found = gated_project(x, *weights, implementation="gpu", interpret=True)
    np.testing.assert_allclose(np.asarray(found, np.float64), gate / (1 + np.exp(-gate)) * up, rtol=2**-11, atol=4e-6)


@pytest.mark.parametrize("implementation", ["gpu", "xla"])
def test_the_rows_of_one_weight_are_multiplied_as_several_are(rng, monkeypatch, implementation):
    """One tile ends within the next product's rows, and one below the weight's last row."""
    monkeypatch.setattr(gpu, "PROCESSORS", 2)
    sizes, kept = (72, 40, 8), (False, False, True)
    x, (weight,) = new_arrays(rng, 9, 2, 128, (sum(sizes),), jnp.bfloat16)
    how = {"implementation": implementation, "interpret": implementation == "gpu"}
    found = project_rows(x, weight, sizes, float32=kept, **how)
    assert [y.dtype for y in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    expected = np.split(products_of(x, [weight])[0], np.cumsum(sizes[:2]), axis=-1)
    for y, wide, bound in zip(found, expected, (2**-8, 2**-8, 1e-6), strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float64), wide, rtol=bound, atol=4e-6)


def test_the_gpu_kernel_squares(rng, monkeypatch):
    monkeypatch.setattr(gpu, "PROCESSORS", 2)
    x, weights = new_arrays(rng, 9, 2, 128, (40,), jnp.float16)
    expected = np.square(np.maximum(products_of(x, weights)[0], 0))
    found = squared_relu_project(x, *weights, implementation="gpu", interpret=True)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-11, atol=4e-6)
    rounded = squared_relu_project(x, *weights, implementation="xla")
    np.testing.assert_allclose(np.asarray(rounded, np.float64), expected, rtol=2**-9, atol=4e-6)


@pytest.mark.slow
def test_the_gpu_kernels_have_the_gradients_of_the_products(rng):
    x, weights = new_arrays(rng, 2, 2, 64, (16, 16), jnp.bfloat16)

    def summed(x, weights, **how):
        first, second = project(x, weights, **how)
        third = summed_up(product_or_summands(jnp.tile(x, (1, 1, 4)), jnp.tile(weights[0], (1, 4)), **how))
        fourth, fifth = project_rows(x, jnp.concatenate(weights), (16, 16), float32=(True, False), **how)
        squared = squared_relu_project(x, weights[0], **how) + fourth.astype(x.dtype) * fifth
        return jnp.sum((first * second + gated_project(x, *weights, **how) + third + squared).astype(jnp.float32))

    found = jax.grad(summed, (0, 1))(x, weights, implementation="gpu", interpret=True)
    expected = jax.grad(summed, (0, 1))(x, weights, implementation="xla")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-6 * np.abs(b).max())


@pytest.mark.parametrize(
    "tokens, inputs, outputs, dtype, reason",
    [
        (257, 64, 8, "bfloat16", r"rows · time in \[1, 256\], got 257"),
        (1, 96, 8, "bfloat16", "in, the numbers of a row, in 64s, got 96"),
        (1, 64, 12, "bfloat16", "out, the rows of each weight, in eights, got 12"),
        (1, 64, 8, "float32", "x and weights in bfloat16 or float16, got float32"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, tokens, inputs, outputs, dtype, reason):
    x, weights = new_arrays(rng, tokens, 1, inputs, (outputs,), dtype)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this project: it needs {reason}'):
        project(x, weights, implementation="gpu", target="H100")


def test_what_does_not_fit_is_an_error_that_names_it(rng):
    x, (weight, other) = new_arrays(rng, 1, 1, 64, (8, 16), jnp.float32)
    with pytest.raises(
        ValueError, match=r"weights \[out, in\] of its dtype, got float32 \(1, 1, 64\) and float32 \(64, 8\)"
    ):
        project(x, [weight.T])
    with pytest.raises(ValueError, match="float32 must say something of each of the 1 weights, got 2 values"):
        project(x, [weight], float32=(True, False))
    with pytest.raises(ValueError, match=r"gate and up must have one shape, got \(8, 64\) and \(16, 64\)"):
        gated_project(x, weight, other)
    with pytest.raises(ValueError, match=r"sizes must be the rows of each product, 8 together, got \(4, 2\)"):
        project_rows(x, weight, (4, 2))
    with pytest.raises(ValueError, match="float32 must say something of each of the 2 sizes, got 1 values"):
        project_rows(x, weight, (4, 4), float32=(True,))
