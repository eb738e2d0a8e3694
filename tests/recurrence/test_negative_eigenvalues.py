"""beta near 2 without decay: a step reflects the state, nothing contracts it, and so no error is ever forgotten."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked, recurrent
from tests.compiling import MANY_STEPS
from tests.recurrence import definition

SPEC = RecurrenceSpec(heads=4, key_heads=2, key_dim=32, value_dim=32, decay="none")
STEPS, WINDOW = 4096, 512

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sequence():
    """Correlated keys of bfloat16's precision, and beta uniform in [1.9, 2] but for the last head's, which is 2."""
    rng = np.random.default_rng()
    q, k, v, _, _ = definition.inputs(rng, SPEC, 1, STEPS)
    for t in range(1, STEPS):
        k[:, t] = 0.9 * k[:, t - 1] + np.sqrt(1 - 0.9**2) * k[:, t]
    k = np.asarray(jnp.asarray(k / np.linalg.norm(k, axis=-1, keepdims=True), jnp.bfloat16), np.float32)
    beta = rng.uniform(1.9, 2.0, (1, STEPS, SPEC.heads)).astype(np.float32)
    beta[..., -1] = 2.0
    arguments = q, k, v, None, beta
    return arguments, definition.run_batch(SPEC, None, *arguments)[0][0]


@partial(jax.jit, static_argnums=0, compiler_options=MANY_STEPS)
def decode(entry_dtype, q, k, v, log_decay, beta):
    """The outputs of the buffered form, one token at a time with folds."""
    slot = one = jnp.ones(1, jnp.int32)
    cache = buffered.init(SPEC, slots=1, limit=16, max_pending=1, entry_dtype=entry_dtype)

    def token(cache, inputs):
        q, k, v, beta = (x[None, None] for x in inputs)
        out, cache = buffered.extend(SPEC, cache, q, k, v, log_decay, beta, slots=slot)
        return buffered.commit(cache, one, slots=slot), out[0]

    return jnp.moveaxis(jax.lax.scan(token, cache, (q[0], k[0], v[0], beta[0]))[1], 0, 1)


def errors(actual, expected):
    """Relative errors [windows, heads]: the mean over each window's steps."""
    actual, expected = np.asarray(actual[0], np.float64), np.asarray(expected, np.float64)
    step = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return step.reshape(-1, WINDOW, SPEC.heads).mean(axis=1)


@pytest.mark.parametrize("form", ["recurrent", "chunked", "buffered"])
def test_float32_stays_within_the_tolerance(form, sequence):
    arguments, out = sequence
    if form == "buffered":
        actual = decode(jnp.float32, *arguments)
    else:
        run = recurrent if form == "recurrent" else chunked
        actual = jax.jit(run, static_argnums=0, compiler_options=MANY_STEPS)(SPEC, None, *arguments)[0]
    print(f"{form}: {errors(actual, out).max():.1e}")
    assert errors(actual, out).max() < (2e-5 if form == "recurrent" else 1e-4)


def test_bfloat16_entries_drift_as_the_documentation_says(sequence):
    arguments, out = sequence
    found = errors(decode(jnp.bfloat16, *arguments), out)
    print("\n".join(" ".join(f"{x:.1e}" for x in row) for row in found[[0, 1, 3, 7]]))
    near, reflected = found[:, :-1], found[:, -1]
    assert near.max() < 2e-2
    assert near[-1].max() < 1.25 * near[3].max()
    assert 1.5 * reflected[0] < reflected[-1] < 5e-2
