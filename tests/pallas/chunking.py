"""What the tests of the kernels of `chunked` share."""

import jax.numpy as jnp
import numpy as np

from tests.recurrence import definition

ROWS, TIME = 4, 40
LENGTHS = np.array([TIME, 0, 21, 16], np.int32)


def inputs(rng, spec, rows=ROWS, time=TIME, dtype=jnp.float32, **settings):
    """State, q, k, v, log_decay and beta."""
    state = rng.standard_normal((rows, *spec.state_shape)).astype(np.float32)
    q, k, v, *gates = definition.inputs(rng, spec, rows, time, **settings)
    return [jnp.asarray(state), *(jnp.asarray(x, dtype) for x in (q, k, v)), *gates]


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def spoil(x, lengths):
    """NaN in what is past a row's length."""
    if x is None:
        return None
    x = np.array(x)
    for row, length in enumerate(lengths):
        x[row, length:] = np.nan
    return x
