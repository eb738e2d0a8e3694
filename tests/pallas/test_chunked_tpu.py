"""The TPU kernel of `chunked` and `prefill` computes, in Pallas' interpreter, what the XLA path computes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.chunked import Call, supports, tpu_layout
from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked
from tests.pallas.chunking import LENGTHS, ROWS, error, inputs, spoil
from tests.recurrence import definition

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
GDN = RecurrenceSpec(heads=2, key_heads=1, key_dim=64, value_dim=64)
KDA = dataclasses.replace(GDN, decay="channel", key_heads=2)
GLA = dataclasses.replace(KDA, delta=False)
MAMBA = dataclasses.replace(GDN, delta=False)
NEMOTRON = dataclasses.replace(MAMBA, heads=3, value_dim=80)
DELTA_NET, LINEAR = (dataclasses.replace(spec, decay="none") for spec in (GDN, MAMBA))
by_kernel = partial(chunked, implementation="tpu", interpret=True)


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 16 tokens, so that a few tokens are several chunks. A program depends on its sizes alone: tests that use it
    share none with others."""
    monkeypatch.setattr(tpu_layout, "MOST_CHUNK", 16)


def check(spec, arrays, lengths, **how):
    """The kernel against the definition, and against XLA's path."""
    clean = [None if x is None else np.asarray(x, np.float64) for x in arrays]
    exact = definition.run_batch(spec, *clean, lengths)
    spoiled = [arrays[0], *(spoil(x, lengths) for x in arrays[1:])]
    found = by_kernel(spec, *spoiled, lengths=lengths, return_updates=True, **how)
    expected = chunked(spec, *spoiled, lengths=lengths, return_updates=True, implementation="xla")
    for actual, xla, defined in zip(found, expected, exact, strict=True):
        assert error(actual, xla) < 1e-5
        assert definition.error(actual, defined) < 1e-5
    for actual in (found[0], found[2]):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(actual[row, length:], 0)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(GDN, id="Gated DeltaNet"),
        pytest.param(KDA, id="KDA"),
        pytest.param(GLA, id="GLA", marks=exhaustive),
        pytest.param(MAMBA, id="Mamba-2", marks=slow),
        pytest.param(NEMOTRON, id="Nemotron", marks=exhaustive),
        pytest.param(DELTA_NET, id="DeltaNet", marks=exhaustive),
        pytest.param(LINEAR, id="linear attention", marks=slow),
    ],
)
def test_the_kernel_is_the_definition_over_ragged_rows(rng, small_chunks, spec):
    """One that fills its chunks, one without a token, two that end in a chunk and at its end; what lies behind is NaN,
    and a token of every row forgets everything."""
    arrays = inputs(rng, spec)
    if arrays[4] is not None:
        arrays[4][:, 7] = -np.inf
    check(spec, arrays, LENGTHS)


@slow
@pytest.mark.parametrize("spec", [GDN, pytest.param(KDA, marks=exhaustive)])
def test_whole_chunks_are_the_definition_too(rng, spec):
    check(spec, inputs(rng, spec, 2, 150, mean_log_decay=-0.05), np.array([150, 129], np.int32))


@slow
def test_a_row_whose_heads_do_not_fit_at_once_is_served_in_blocks_of_heads(rng, small_chunks, monkeypatch):
    """Groups of two heads, whose keys begin and end within vectors where one group stands alone."""
    monkeypatch.setattr(tpu_layout.Layout, "vmem", lambda layout: 0 if layout.blocks == 2 else 2**40)
    spec = dataclasses.replace(GDN, heads=8, key_heads=4)
    check(spec, inputs(rng, spec), LENGTHS)
    spec = dataclasses.replace(MAMBA, heads=4, key_dim=128)  # a group is cut
    check(spec, inputs(rng, spec), LENGTHS)


@slow
@pytest.mark.parametrize("spec", [GDN, pytest.param(KDA, marks=exhaustive)])
def test_bfloat16_inputs_are_used_as_rounded_and_only_outputs_are_rounded(rng, spec):
    arrays = inputs(rng, spec, 2, 130, jnp.bfloat16, mean_log_decay=-0.02)
    lengths = np.array([130, 127], np.int32)
    exact = definition.run_batch(spec, *arrays, lengths)
    out, state, updates = by_kernel(spec, *arrays, lengths=lengths, return_updates=True)
    assert out.dtype == jnp.bfloat16 and state.dtype == updates.dtype == jnp.float32
    assert definition.error(out, exact[0]) < 2**-8
    assert definition.error(state, exact[1]) < 2e-5 and definition.error(updates, exact[2]) < 2e-5


@slow
@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-4)])
def test_what_is_recalled_undampened_is_solved_as_exactly(rng, dtype, bound):
    """Nearly equal keys, write strengths near 2 and no decay: the hardest systems that occur."""
    state, q, k, v, _, beta = inputs(rng, DELTA_NET, 2, 128)
    k = k[:, :1] + 0.05 * k
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    arrays = [state, *(x.astype(dtype) for x in (q, 0.98 * k, v)), None, np.float32(1.9) + np.float32(0.1) * beta]
    exact = definition.run_batch(DELTA_NET, *arrays)
    found = by_kernel(DELTA_NET, *arrays, return_updates=True)
    assert definition.error(found[1], exact[1]) < bound and definition.error(found[2], exact[2]) < bound


def gradients(spec, arrays, directions, **how):
    present = [n for n, x in enumerate(arrays) if x is not None]

    def loss(*given):
        complete = [None] * len(arrays)
        for n, x in zip(present, given, strict=True):
            complete[n] = x
        found = chunked(spec, *complete, lengths=LENGTHS, return_updates=True, **how)
        return sum(jnp.vdot(x, y) for x, y in zip(found, directions, strict=True))

    return jax.grad(loss, argnums=tuple(range(len(present))))(*(arrays[n] for n in present))


@slow
def test_the_kernel_has_the_gradient_of_the_xla_path(rng, small_chunks):
    """Of outputs, states and updates, by all arguments."""
    arrays = inputs(rng, MAMBA, time=34)
    shapes = [arrays[3].shape, arrays[0].shape, arrays[3].shape]
    directions = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    found = gradients(MAMBA, arrays, directions, implementation="tpu", interpret=True)
    expected = gradients(MAMBA, arrays, directions, implementation="xla")
    assert len(found) == 6
    for actual, xla in zip(found, expected, strict=True):
        assert np.abs(xla).max() > 0 and error(actual, xla) < 1e-5


@pytest.mark.parametrize(
    "spec, keep, entry",
    [
        pytest.param(GDN, [5, 7, 0, 12], "float32"),
        pytest.param(GDN, 0, "bfloat16", marks=exhaustive),
        pytest.param(KDA, [12, 12, 3, 1], "bfloat16", marks=slow),
        pytest.param(MAMBA, [5, 7, 0, 12], "float32", marks=exhaustive),
    ],
)
def test_prefill_by_the_kernel_leaves_the_memory_that_the_xla_path_leaves(rng, small_chunks, spec, keep, entry):
    """Prompts are cut within a chunk, at its ends, and not at all; rows continue what they held."""
    dtype = jnp.dtype(entry)
    arrays = inputs(rng, spec, ROWS, 37, dtype)[1:]
    cache = buffered.init(spec, slots=ROWS, limit=16, max_pending=4, entry_dtype=dtype)
    where = {"slots": np.arange(1, ROWS + 1, dtype=np.int32)}
    before = np.array([4, 0, 2, 0], np.int32)
    _, cache = buffered.prefill(spec, cache, *arrays, **where, lengths=before, keep=3, implementation="xla")
    where |= {"lengths": np.array([37, 23, 0, 12], np.int32), "keep": np.array(keep, np.int32) if keep else 0}
    expected, reference = buffered.prefill(spec, cache, *arrays, **where, implementation="xla")
    out, after = buffered.prefill(spec, cache, *arrays, **where, implementation="tpu", interpret=True)
    rounding = 0 if dtype == jnp.float32 else 2**-7  # an update may lie between two numbers of its dtype
    assert error(out, expected) < 1e-5 + rounding
    for name in ("keys", "gates"):
        np.testing.assert_array_equal(*(np.asarray(getattr(x.pool, name), np.float32) for x in (after, reference)))
    assert error(after.pool.updates, reference.pool.updates) < 1e-5 + rounding
    assert error(after.pool.checkpoints[1:], reference.pool.checkpoints[1:]) < 2e-5
    assert int(after.cursor.folded.max()) > 0


@slow
def test_a_state_that_is_absent_is_zeros_and_write_strengths_are_one(rng, small_chunks):
    _, q, k, v, log_decay, _ = inputs(rng, GDN, time=35)
    found = by_kernel(GDN, None, q, k, v, log_decay)
    expected = chunked(GDN, None, q, k, v, log_decay, implementation="xla")
    for actual, xla in zip(found, expected, strict=True):
        assert error(actual, xla) < 1e-5


@pytest.mark.parametrize(
    "changes, time, reason",
    [
        ({"key_dim": 80}, 8, "a key_dim that is a multiple of 64, got 80"),
        ({"value_dim": 24}, 8, "a value_dim that is a multiple of 16, got 24"),
        ({}, 0, "rows and tokens, got 4 rows of 0"),
        ({"heads": 31, "key_heads": 31}, 8, "at most 24 heads whose numbers together fill vectors of 128, got 31"),
        ({"value_dim": 2**15, "key_dim": 512}, 8, r"at most \d+ bytes of VMEM, got \d+ with 1 of 2 heads at once"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error_that_says_why(changes, time, reason):
    spec = dataclasses.replace(GDN, **changes)
    arrays = jax.eval_shape(
        lambda: [jnp.asarray(x) for x in definition.inputs(np.random.default_rng(0), spec, 4, time)]
    )
    with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this chunked: it needs {reason}'):
        jax.eval_shape(partial(chunked, spec, None, implementation="tpu", target="v6e"), *arrays)


def test_dtypes_that_the_kernel_does_not_know_are_named():
    sizes = {"rows": 1, "time": 8, "heads": 2, "key_heads": 1, "key_dim": 64, "value_dim": 64}
    half = jnp.dtype("float16")
    reason = supports(Call(**sizes, q=half, k=half, v=half), generation="v6e")
    assert reason == "it needs q, k and v in float32 or bfloat16, got float16, float16, float16"


def test_a_v6e_gets_the_kernel_by_itself_and_others_do_not(rng):
    arrays = [x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(rng, GDN)]

    def kernels(target):
        traced = jax.jit(partial(chunked, GDN, target=target)).trace(*arrays)
        return str(traced.jaxpr).count("pallas_call")

    assert kernels("v6e") == 1 and kernels("H100") == kernels("cpu") == 0
