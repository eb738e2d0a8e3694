"""`recurrent` and `chunked` against the float64 definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec, chunked, recurrent
from tests.recurrence import definition

GDN = RecurrenceSpec(heads=6, key_heads=2, key_dim=32, value_dim=24)
SPECS = [
    GDN,
    RecurrenceSpec(heads=4, key_heads=4, key_dim=16, value_dim=32),
    RecurrenceSpec(heads=4, key_heads=2, key_dim=16, value_dim=16, decay="head", delta=False),
    RecurrenceSpec(heads=4, key_heads=1, key_dim=16, value_dim=24, decay="none", delta=True),
]
LENGTHS = np.array([150, 1, 77, 0], np.int32)

run_recurrent = jax.jit(recurrent, static_argnums=0)
run_chunked = jax.jit(chunked, static_argnums=0, static_argnames=("chunk_size", "return_updates"))


@pytest.fixture(params=SPECS, ids=lambda s: f"h{s.heads}k{s.key_heads}d{s.key_dim}x{s.value_dim}-{s.decay}-{s.delta}")
def case(request, rng):
    spec = request.param
    state = rng.standard_normal((4, *spec.state_shape)).astype(np.float32)
    inputs = definition.inputs(rng, spec, 4, 150)
    return spec, state, inputs, definition.run_batch(spec, state, *inputs, LENGTHS)


def test_recurrent_is_the_definition(case):
    spec, state, inputs, (out, last, _) = case
    actual, final = run_recurrent(spec, state, *inputs, lengths=LENGTHS)
    assert definition.error(actual, out) < 2e-5
    assert definition.error(final, last) < 2e-5


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunked_is_the_definition(case, chunk_size):
    spec, state, inputs, (out, last, updates) = case
    options = {"chunk_size": chunk_size, "lengths": LENGTHS, "return_updates": True}
    actual, final, u = run_chunked(spec, state, *inputs, **options)
    assert definition.error(actual, out) < 1e-4
    assert definition.error(final, last) < 1e-4
    assert definition.error(u, updates) < 1e-4


def test_positions_past_the_length_are_selected_away(rng):
    inputs = [np.array(x) for x in definition.inputs(rng, GDN, 4, 150)]
    clean = run_chunked(GDN, None, *inputs, lengths=LENGTHS)
    for x in inputs:
        for row, length in enumerate(LENGTHS):
            x[row, length:] = np.nan
    for form in (run_recurrent, run_chunked):
        poisoned = form(GDN, None, *inputs, lengths=LENGTHS)
        for a, b in zip(poisoned, clean, strict=True):
            assert definition.error(a, np.asarray(b)) < 1e-5


def test_chunked_has_the_recurrent_forms_gradients(rng):
    inputs = definition.inputs(rng, GDN, 2, 70)
    cotangent = jnp.asarray(rng.standard_normal(inputs[2].shape), jnp.float32)
    lengths = jnp.array([70, 33], jnp.int32)

    @partial(jax.jit, static_argnums=0)
    def gradients(form, inputs):
        return jax.grad(lambda x: jnp.sum(form(GDN, None, *x, lengths=lengths)[0] * cotangent))(inputs)

    small = partial(chunked, chunk_size=16)
    for actual, expected in zip(gradients(small, inputs), gradients(recurrent, inputs), strict=True):
        assert definition.error(actual, expected) < 1e-4


def test_strong_decay_stays_finite(rng):
    q, k, v, _, beta = definition.inputs(rng, GDN, 4, 150)
    log_decay = np.full(beta.shape, -20.0, np.float32)
    log_decay[:, ::7] = -1e-3
    out, last, _ = definition.run_batch(GDN, None, q, k, v, log_decay, beta)
    actual, final = run_chunked(GDN, None, q, k, v, log_decay, beta)
    assert definition.error(actual, out) < 1e-4
    assert definition.error(final, last) < 1e-4


def test_a_call_that_does_not_fit_is_an_error_that_names_the_argument(rng):
    q, k, v, log_decay, beta = definition.inputs(rng, GDN, 2, 3)
    with pytest.raises(ValueError, match=r"heads \(6\) must be a multiple of key_heads \(4\)"):
        RecurrenceSpec(6, 4, 8, 8)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 3, 2, 32\), got \(2, 2, 2, 32\)"):
        chunked(GDN, None, q, k[:, :2], v, log_decay, beta)
    with pytest.raises(ValueError, match="log_decay must be float32"):
        recurrent(GDN, None, q, k, v, jnp.asarray(log_decay, jnp.bfloat16), beta)
    with pytest.raises(ValueError, match="log_decay must be f32"):
        recurrent(GDN, None, q, k, v, None, beta)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        chunked(GDN, None, q, k, v, log_decay, beta, chunk_size=0)
    with pytest.raises(ValueError, match='implementation="gpu" has no kernel for chunked yet'):
        chunked(GDN, None, q, k, v, log_decay, beta, implementation="gpu")
