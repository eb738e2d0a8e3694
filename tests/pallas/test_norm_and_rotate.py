"""The kernel of `norm_and_rotate`: it lowers for its platform at the real sizes, and computes what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.layers import Norm
from jaxbuf.models.norm_and_rotate import norm_and_rotate

NORM = Norm(1e-6, offset=1.0)
# Heads of queries and keys, their numbers, of how many the queries are the first, and how many are turned.
QWEN3_5, LLAMA, SHORT = (16, 4, 256, 512, 64), (32, 8, 128, 128, 128), (4, 1, 64, 64, 32)


def new_arrays(rng, rows, time, sizes, dtype, *, one_row=False):
    """Queries, keys, angles and weights."""
    heads, kv_heads, head_dim, width, dim = sizes
    q, k = ((rows, time, heads, width), (rows, time, kv_heads, head_dim))
    positions = jnp.asarray(rng.integers(0, 4096, (1 if one_row else rows, time)), jnp.int32)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in (q, k, (head_dim,), (head_dim,))]
    return *arrays[:2], Rotary(dim, 1e4).angles(positions), tuple(arrays[2:])


def defined(x, angles, weight, norm, dtype):
    """Of float64 numbers: the norm, rounded as XLA rounds it, and the turned channels."""
    x, (cos, sin) = np.asarray(x, np.float64), (np.asarray(a, np.float64) for a in angles)
    if weight is not None:
        root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + norm.eps)
        x = np.asarray(jnp.asarray(x / root * (norm.offset + np.asarray(weight, np.float64)), dtype), np.float64)
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@pytest.mark.parametrize("sizes", [QWEN3_5, LLAMA, SHORT])
@pytest.mark.parametrize("rows", [1, 256])
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(sizes, rows):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), rows, 1, sizes, jnp.bfloat16))

    def both(q, k, angles, weights):
        plain = norm_and_rotate(q, k, angles, target="H100")
        return norm_and_rotate(q, k, angles, NORM, weights, target="H100"), plain

    text = jax.jit(both).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize("norm", [NORM, None])
@pytest.mark.parametrize("sizes, dtype", [(QWEN3_5, "bfloat16"), (LLAMA, "float16"), (SHORT, "bfloat16")])
def test_the_gpu_kernel_norms_and_turns(rng, sizes, dtype, norm):
    """Within two roundings of float64: the norm's may be another one next to a tie. A block has more vectors than are
    left for it, and of SHORT more than there are."""
    one_row = norm is None
    q, k, angles, weights = new_arrays(rng, 3, 2, sizes, dtype, one_row=one_row)
    found = norm_and_rotate(q, k, angles, norm, weights if norm else (), implementation="gpu", interpret=True)
    expected = norm_and_rotate(q, k, angles, norm, weights if norm else (), implementation="xla")
    head_dim, step = sizes[2], float(jnp.finfo(dtype).eps)
    for x, given, xla, weight in zip(found, (q, k), expected, weights, strict=True):
        assert (x.dtype, x.shape) == (xla.dtype, xla.shape)
        exact = defined(given[..., :head_dim], angles, weight if norm else None, NORM, dtype)
        sizes_of = np.abs(exact) + np.sqrt(np.mean(exact**2, axis=-1, keepdims=True))
        for one in (x, xla):
            assert np.max(np.abs(np.asarray(one, np.float64) - exact) / sizes_of) <= step


def test_the_gpu_kernel_has_the_gradient_of_the_xla_path(rng):
    q, k, angles, weights = new_arrays(rng, 2, 2, SHORT, jnp.float16)
    directions = [jnp.asarray(rng.standard_normal(x.shape), jnp.float16) for x in (q, k)]

    def gradients(**how):
        def summed(arrays):
            both = norm_and_rotate(*arrays[:2], angles, NORM, arrays[2], **how)
            return sum(jnp.vdot(*(a.astype(jnp.float32) for a in pair)) for pair in zip(both, directions, strict=True))

        return jax.grad(summed)((q, k, weights))

    found, expected = gradients(implementation="gpu", interpret=True), gradients(implementation="xla")
    for kernel, xla in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        kernel, xla = (np.asarray(a, np.float32) for a in (kernel, xla))
        np.testing.assert_allclose(kernel, xla, rtol=0, atol=2e-3 * np.abs(xla).max())


@pytest.mark.parametrize(
    "sizes, dtype, reason",
    [
        ((4, 2, 96, 96, 64), "bfloat16", "a head_dim of 64, 128 or 256, got 96"),
        ((4, 2, 128, 128, 96), "bfloat16", r"an angle for 8, 16, 32 ... pairs of channels of 128, got 48"),
        ((4, 2, 128, 132, 128), "bfloat16", "heads of queries in multiples of 8 numbers, got 132"),
        (LLAMA, "float32", "queries in bfloat16 or float16, got float32"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, sizes, dtype, reason):
    q, k, angles, _ = new_arrays(rng, 1, 1, sizes, dtype)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this norm_and_rotate: it needs {reason}'):
        norm_and_rotate(q, k, angles, implementation="gpu", target="H100")


def test_what_does_not_fit_is_an_error_that_names_it(rng):
    q, k, angles, weights = new_arrays(rng, 1, 2, SHORT, "float32")
    with pytest.raises(ValueError, match=r"with at least k's numbers in q, got float32 \(1, 2, 4, 32\) and float32"):
        norm_and_rotate(q[..., :32], k, angles)
    with pytest.raises(ValueError, match=r"weights must be two of \[64\] with a norm, and none without, got none"):
        norm_and_rotate(q, k, angles, NORM)
    with pytest.raises(ValueError, match=r"and none without, got \(64,\) and \(64,\)"):
        norm_and_rotate(q, k, angles, None, weights)
