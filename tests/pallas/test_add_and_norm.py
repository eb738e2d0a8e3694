"""The kernel of `add_and_norm`: it lowers for its platform at the real sizes, and computes what XLA computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.layers import Norm
from jaxbuf.models.projections import Summands
from jaxbuf.models.residual import add_and_norm

NORM = Norm(1e-6, offset=1.0)


def new_arrays(rng, rows, time, hidden, dtype):
    shapes = (rows, time, hidden), (rows, time, hidden), (hidden,)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("tokens, hidden", [(1, 2560), (256, 4096), (256, 3136)])
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(tokens, hidden):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), tokens, 1, hidden, jnp.bfloat16))
    traced = jax.jit(lambda *arrays: add_and_norm(*arrays, NORM, target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize("how", [{"target": "H100"}, {"implementation": "gpu", "interpret": True}])
def test_the_gpu_kernel_sums_summands_up(rng, how):
    """As XLA does, which it does first; and it lowers so."""
    x, _, weight = new_arrays(rng, 3, 2, 512, "bfloat16")
    y = Summands(jnp.asarray(rng.standard_normal((3, *x.shape)), jnp.float32), x.dtype)
    if "target" in how:
        traced = jax.jit(lambda x, y, weight: add_and_norm(x, y, weight, NORM, **how)).trace(x, y, weight)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1
        return
    found = add_and_norm(x, y, weight, NORM, **how)
    for one, other in zip(found, add_and_norm(x, y.total(), weight, NORM, **how), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0], add_and_norm(x, y, weight, NORM, implementation="xla")[0])


@pytest.mark.parametrize(
    "hidden, dtype, bound", [(512, "bfloat16", 2**-8), (512, "float16", 2**-11), (584, "bfloat16", 2**-8)]
)
def test_the_gpu_kernel_adds_and_norms(rng, hidden, dtype, bound):
    """The sum is XLA's bit for bit; the norm is that of the rounded sum, within one rounding. Of 584 numbers a second
    piece has 184 that the first has, too."""
    x, y, weight = new_arrays(rng, 3, 2, hidden, dtype)
    total, found = add_and_norm(x, y, weight, NORM, implementation="gpu", interpret=True)
    expected, _ = add_and_norm(x, y, weight, NORM, implementation="xla")
    np.testing.assert_array_equal(total, expected)
    wide = np.asarray(total, np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * (1 + np.asarray(weight, np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), normed, rtol=bound, atol=1e-6)


def test_the_gpu_kernel_has_the_gradient_of_the_xla_path(rng):
    arrays = new_arrays(rng, 2, 2, 256, jnp.float16)
    directions = [jnp.asarray(rng.standard_normal(arrays[0].shape), jnp.float16) for _ in range(2)]

    def gradients(**how):
        def summed(arrays):
            both = add_and_norm(*arrays, NORM, **how)
            return sum(jnp.vdot(*(a.astype(jnp.float32) for a in pair)) for pair in zip(both, directions, strict=True))

        return jax.grad(summed)(arrays)

    found, expected = gradients(implementation="gpu", interpret=True), gradients(implementation="xla")
    for kernel, xla in zip(found, expected, strict=True):
        kernel, xla = (np.asarray(a, np.float32) for a in (kernel, xla))
        np.testing.assert_allclose(kernel, xla, rtol=0, atol=2e-3 * np.abs(xla).max())


@pytest.mark.parametrize(
    "hidden, dtype, reason",
    [
        (260, "bfloat16", "hidden, the numbers of a token, in eights, got 260"),
        (248, "bfloat16", r"hidden in \[256, 16384\], got 248"),
        (256, "float32", "numbers in bfloat16 or float16, got float32"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, hidden, dtype, reason):
    arrays = new_arrays(rng, 1, 1, hidden, dtype)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this add_and_norm: it needs {reason}'):
        add_and_norm(*arrays, NORM, implementation="gpu", target="H100")


def test_what_does_not_fit_is_an_error_that_names_it(rng):
    x, y, weight = new_arrays(rng, 1, 2, 16, "float32")
    with pytest.raises(ValueError, match=r"of one dtype and weight \[hidden\], got float32 \(1, 2, 16\), float16"):
        add_and_norm(x, y.astype(jnp.float16), weight, NORM)
