"""`recurrent` and `chunked` against the float64 definition, for every family."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec, chunked, recurrent
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES, inputs, worst_row

BATCH, TIME = 8, 150
LENGTHS = np.array([TIME] * 4 + [77, 1, 0, 128], np.int32)
FAST = [(name, 16) for name in FAMILIES] + [("Gated DeltaNet", 64), ("KDA", 64)]
SLOW = [pytest.param(name, 64, marks=pytest.mark.slow) for name in FAMILIES if (name, 64) not in FAST]

run_recurrent = jax.jit(recurrent, static_argnums=0)


@partial(jax.jit, static_argnums=0, static_argnames="chunk_size")
def run_chunked(spec, state, *arguments, lengths=None, chunk_size):
    return chunked(spec, state, *arguments, lengths=lengths, chunk_size=chunk_size, return_updates=True)


def initial_state(rng, spec, batch=BATCH):
    return rng.standard_normal((batch, *spec.state_shape)).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_recurrent_is_the_definition(family, rng):
    spec = FAMILIES[family]
    state, arguments = initial_state(rng, spec), inputs(rng, family, BATCH, TIME)
    out, last, _ = definition.run_batch(spec, state, *arguments, LENGTHS)
    actual, final = run_recurrent(spec, state, *arguments, lengths=LENGTHS)
    assert worst_row(actual, out) < 2e-5
    assert worst_row(final, last) < 2e-5


@pytest.mark.parametrize(("family", "chunk_size"), FAST + SLOW)
def test_chunked_is_the_definition(family, chunk_size, rng):
    spec = FAMILIES[family]
    state, arguments = initial_state(rng, spec), inputs(rng, family, BATCH, TIME)
    out, last, updates = definition.run_batch(spec, state, *arguments, LENGTHS)
    actual, final, u = run_chunked(spec, state, *arguments, lengths=LENGTHS, chunk_size=chunk_size)
    assert worst_row(actual, out) < 1e-4
    assert worst_row(final, last) < 1e-4
    assert worst_row(u, updates) < 1e-4


@pytest.mark.parametrize("family", ["Gated DeltaNet", "KDA"])
def test_a_log_decay_of_minus_infinity_forgets_everything(family, rng):
    """As at the start of a document that was packed behind another."""
    spec, start = FAMILIES[family], 70
    state, arguments = initial_state(rng, spec), inputs(rng, family, BATCH, TIME)
    arguments[3][:, start] = -np.inf
    out, last, _ = definition.run_batch(spec, None, *(x[:, start:] for x in arguments), LENGTHS - start)
    rows = start < LENGTHS
    for form in (run_recurrent, partial(run_chunked, chunk_size=64)):
        actual, final, *_ = form(spec, state, *arguments, lengths=LENGTHS)
        assert worst_row(actual[rows, start:], out[rows]) < 1e-4
        assert worst_row(final[rows], last[rows]) < 1e-4


def test_positions_past_the_length_are_selected_away(rng):
    spec = FAMILIES["KDA"]
    state, arguments = initial_state(rng, spec), [np.array(x) for x in inputs(rng, "KDA", BATCH, TIME)]
    clean = run_chunked(spec, state, *arguments, lengths=LENGTHS, chunk_size=64)[:2]
    for x in arguments:
        for row, length in enumerate(LENGTHS):
            x[row, length:] = np.nan
    for form in (run_recurrent, partial(run_chunked, chunk_size=64)):
        poisoned = form(spec, state, *arguments, lengths=LENGTHS)[:2]
        for a, b in zip(poisoned, clean, strict=True):
            assert definition.error(a, np.asarray(b)) < 1e-5


def test_a_sequence_of_several_segments_carries_its_state(rng):
    """Also with one head a key, and in half precision: keys are used as rounded, and only the output is rounded."""
    spec, time = RecurrenceSpec(heads=3, key_heads=3, key_dim=8, value_dim=16), 1100
    lengths = np.array([time, 1025, 700], np.int32)
    q, k, v, log_decay, beta = definition.inputs(rng, spec, 3, time, mean_log_decay=-0.02)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    out, last, _ = definition.run_batch(spec, None, q, k, v, log_decay, beta, lengths)
    actual, final, _ = run_chunked(spec, None, q, k, v, log_decay, beta, lengths=lengths, chunk_size=64)
    assert actual.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    assert definition.error(actual, out) < 2**-8
    assert definition.error(final, last) < 1e-4


@pytest.mark.parametrize("family", ["Mamba-2", "GLA", "KDA"])
@pytest.mark.parametrize(
    "chunk_size", [pytest.param(n, marks=pytest.mark.slow if n == 5 else pytest.mark.exhaustive) for n in (1, 5, 200)]
)
def test_any_chunk_size_gives_the_same_numbers(family, chunk_size, rng):
    spec = FAMILIES[family]
    arguments = inputs(rng, family, 4, 21)
    expected = run_recurrent(spec, None, *arguments)
    actual = run_chunked(spec, None, *arguments, chunk_size=chunk_size)[:2]
    for a, e in zip(actual, expected, strict=True):
        assert worst_row(a, np.asarray(e)) < 1e-5


@pytest.mark.parametrize("form", [recurrent, chunked])
def test_no_tokens_change_nothing(form, rng):
    spec = FAMILIES["KDA"]
    state = initial_state(rng, spec, 2)
    out, final = form(spec, state, *inputs(rng, "KDA", 2, 0))
    assert out.shape == (2, 0, spec.heads, spec.value_dim)
    np.testing.assert_array_equal(final, state)


def test_a_call_that_does_not_fit_is_an_error_that_names_the_argument(rng):
    spec = RecurrenceSpec(heads=6, key_heads=2, key_dim=32, value_dim=24)
    q, k, v, log_decay, beta = definition.inputs(rng, spec, 2, 3)
    with pytest.raises(ValueError, match=r"heads \(6\) must be a multiple of key_heads \(4\)"):
        RecurrenceSpec(6, 4, 8, 8)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 3, 2, 32\), got \(2, 2, 2, 32\)"):
        chunked(spec, None, q, k[:, :2], v, log_decay, beta)
    with pytest.raises(ValueError, match="v must be an array of floating-point numbers, got int32"):
        recurrent(spec, None, q, k, jnp.asarray(v, jnp.int32), log_decay, beta)
    with pytest.raises(ValueError, match="q must be an array of floating-point numbers, got list"):
        recurrent(spec, None, [q], k, v, log_decay, beta)
    with pytest.raises(ValueError, match='implementation must be one of "auto", "xla", "gpu", "tpu", got \'cuda\''):
        chunked(spec, None, q, k, v, log_decay, beta, implementation="cuda")
    with pytest.raises(ValueError, match="log_decay must be float32"):
        recurrent(spec, None, q, k, v, jnp.asarray(log_decay, jnp.bfloat16), beta)
    with pytest.raises(ValueError, match="log_decay must be f32"):
        recurrent(spec, None, q, k, v, None, beta)
    with pytest.raises(ValueError, match=r"log_decay must have shape \(2, 3, 4, 16\), got \(2, 3, 6\)"):
        chunked(FAMILIES["KDA"], None, q[..., :16], k[..., :16], v[:, :, :4], log_decay, beta[:, :, :4])
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        chunked(spec, None, q, k, v, log_decay, beta, chunk_size=0)
    with pytest.raises(ValueError, match='implementation="gpu" has no kernel for chunked yet'):
        chunked(spec, None, q, k, v, log_decay, beta, implementation="gpu")
