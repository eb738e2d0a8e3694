"""The inverse of a chunk's triangular system against float64."""

import jax
import numpy as np
import pytest

from jaxbuf.recurrence.chunked import unit_lower_inverse
from tests.recurrence import definition

SIZES = (1, 2, 16, 64, 128)
invert = jax.jit(unit_lower_inverse)


def exact(matrix):
    size = matrix.shape[-1]
    return np.linalg.inv(np.eye(size) + np.tril(matrix.astype(np.float64), -1))


def system(rng, kind, size, key_dim=16):
    """beta_t (k_t · k_s), as DeltaNet's without decay: the hardest, for nothing dampens what it recalls."""
    keys = rng.standard_normal((3, size, key_dim))
    if kind == "correlated":
        keys = np.cumsum(keys, axis=1)
    if kind == "equal":
        keys[:] = keys[:, :1]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    beta = rng.uniform(0, 1, (3, size, 1)) if kind == "iid" else rng.uniform(1.9, 2.0, (3, size, 1))
    return (beta * keys @ keys.swapaxes(1, 2)).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["iid", "correlated", "equal"])
def test_is_the_inverse_of_the_systems_that_occur(kind, size, rng):
    matrix = system(rng, kind, size)
    matrix[:, *np.triu_indices(size)] = np.nan  # only what is below the diagonal is read
    assert definition.error(invert(matrix), exact(matrix)) < 5e-7 * size


def test_has_the_derivative_of_an_inverse(rng):
    """Of the inverse that it gives: its own error is bounded above, and a derivative has up to twice that."""
    matrix, tangent = (system(rng, "correlated", 64) for _ in range(2))
    inverse, actual = jax.jit(lambda x, dx: jax.jvp(unit_lower_inverse, (x,), (dx,)))(matrix, tangent)
    assert definition.error(inverse, exact(matrix)) < 5e-7 * 64
    inverse = np.asarray(inverse, np.float64)
    assert definition.error(actual, -inverse @ np.tril(tangent.astype(np.float64), -1) @ inverse) < 1e-5
