"""The GPU kernel of `chunked` and `prefill` computes, in Pallas' interpreter, what the definition says."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.chunked import gpu
from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked
from jaxbuf.recurrence.chunked import kernel_call
from tests.pallas.chunking import error, inputs, spoil
from tests.pallas.own_process import lines_of
from tests.pallas.walking import CASES
from tests.recurrence import definition

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
GDN = RecurrenceSpec(heads=2, key_heads=1, key_dim=64, value_dim=64)
MAMBA = dataclasses.replace(GDN, delta=False)
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=64, decay="channel")
GLA = dataclasses.replace(KDA, key_heads=1, value_dim=128, delta=False)
LINEAR = dataclasses.replace(MAMBA, decay="none")
ROWS, TIME = 3, 150
LENGTHS = np.array([TIME, 0, 70], np.int32)
by_kernel = partial(chunked, implementation="gpu", interpret=True)


def check(spec, arrays, lengths=LENGTHS, bound=2e-5):
    """Outputs are off by their rounding; states and updates are those of float32, for inputs as they are rounded."""
    exact = definition.run_batch(spec, *(None if x is None else np.asarray(x, np.float64) for x in arrays), lengths)
    spoiled = [arrays[0], *(spoil(x, lengths) for x in arrays[1:])]
    out, state, updates = by_kernel(spec, *spoiled, lengths=lengths, return_updates=True)
    assert out.dtype == jnp.bfloat16 and state.dtype == updates.dtype == jnp.float32
    assert definition.error(out, exact[0]) < 2**-8
    assert definition.error(state, exact[1]) < bound and definition.error(updates, exact[2]) < bound
    for x in (out, updates):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(np.asarray(x[row, length:], np.float32), 0)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(GDN, id="Gated DeltaNet"),
        pytest.param(dataclasses.replace(GDN, heads=3, key_heads=3), id="a head a key head", marks=slow),
        pytest.param(dataclasses.replace(GDN, heads=6, key_heads=1), id="groups in two rounds", marks=exhaustive),
        pytest.param(dataclasses.replace(GDN, key_dim=128, value_dim=128), id="128 by 128", marks=slow),
        pytest.param(MAMBA, id="Mamba-2", marks=slow),
        pytest.param(dataclasses.replace(MAMBA, heads=8, key_heads=2, value_dim=80), id="Nemotron-3", marks=slow),
        pytest.param(dataclasses.replace(GDN, heads=4, key_heads=2, value_dim=80), id="values of 80", marks=exhaustive),
        pytest.param(LINEAR, id="linear attention", marks=exhaustive),
        pytest.param(KDA, id="Kimi Delta Attention", marks=slow),
        pytest.param(dataclasses.replace(KDA, key_heads=1, value_dim=80, heads=4), id="and of 80", marks=exhaustive),
        pytest.param(GLA, id="gated linear attention", marks=slow),
    ],
)
def test_the_kernel_is_the_definition_over_ragged_rows(rng, spec):
    """One that ends in its third chunk, one without a token, one that ends in the second; what lies behind is NaN, and
    a token of every row forgets everything."""
    arrays = inputs(rng, spec, ROWS, TIME, jnp.bfloat16, mean_log_decay=-0.05)
    if arrays[4] is not None:
        arrays[4][:, 7] = -np.inf
    check(spec, arrays)


@slow
@pytest.mark.parametrize("spec", [pytest.param(GDN, id="GDN"), pytest.param(KDA, id="KDA")])
@pytest.mark.parametrize("mean", [-5.0, -0.001])
def test_strong_and_weak_decays_are_computed_as_exactly(rng, mean, spec):
    check(spec, inputs(rng, spec, ROWS, TIME, jnp.bfloat16, mean_log_decay=mean))


@slow
@pytest.mark.parametrize("spec", [pytest.param(GDN, id="GDN"), pytest.param(KDA, id="KDA")])
def test_what_is_recalled_and_hardly_dampened_is_solved_too(rng, spec):
    """Nearly equal keys, write strengths near 2, a weak decay: the hardest systems that are served. They make errors of
    2^-18 a hundred times larger."""
    state, q, k, v, log_decay, beta = inputs(rng, spec, 2, 128)
    k = k[:, :1] + 0.05 * k
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    bfloat16 = [x.astype(jnp.bfloat16) for x in (q, 0.98 * k, v)]
    arrays = [state, *bfloat16, np.full_like(log_decay, -1e-3), np.float32(1.9) + np.float32(0.1) * beta]
    check(spec, arrays, np.array([128, 100], np.int32), bound=1e-3)


@slow
def test_a_state_that_is_absent_is_zeros_and_write_strengths_are_one(rng):
    _, q, k, v, log_decay, _ = inputs(rng, MAMBA, ROWS, 70, jnp.bfloat16)
    exact = definition.run_batch(MAMBA, None, *(np.asarray(x, np.float64) for x in (q, k, v, log_decay)), None)
    out, state = by_kernel(MAMBA, None, q, k, v, log_decay)
    assert definition.error(out, exact[0]) < 2**-8 and definition.error(state, exact[1]) < 2e-5


@pytest.mark.parametrize(
    "spec, keep",
    [
        pytest.param(GDN, [5, 7, 0, 16], id="Gated DeltaNet", marks=slow),
        pytest.param(GDN, 0, id="nothing stays an entry", marks=slow),
        pytest.param(MAMBA, [5, 7, 0, 16], id="Mamba-2", marks=slow),
        pytest.param(KDA, [5, 7, 0, 16], id="Kimi Delta Attention", marks=slow),
        pytest.param(GLA, [5, 7, 0, 16], id="gated linear attention", marks=slow),
    ],
)
def test_prefill_by_the_kernel_leaves_the_memory_that_the_xla_path_leaves(rng, spec, keep):
    """Prompts are cut within a chunk, at its end, and not at all; rows continue what they held."""
    rows, time = 4, 140
    arrays = inputs(rng, spec, rows, time, jnp.bfloat16)[1:]
    cache = buffered.init(spec, slots=rows, limit=16, max_pending=4, entry_dtype=jnp.bfloat16)
    where = {"slots": np.arange(1, rows + 1, dtype=np.int32)}
    before = np.array([4, 0, 2, 0], np.int32)
    _, cache = buffered.prefill(spec, cache, *arrays, **where, lengths=before, keep=3, implementation="xla")
    where |= {"lengths": np.array([140, 71, 0, 16], np.int32), "keep": np.array(keep, np.int32) if keep else 0}
    expected, reference = buffered.prefill(spec, cache, *arrays, **where, implementation="xla")
    out, after = buffered.prefill(spec, cache, *arrays, **where, implementation="gpu", interpret=True)
    assert error(out, expected) < 2**-7
    for name in ("keys", "gates"):
        np.testing.assert_array_equal(*(np.asarray(getattr(x.pool, name), np.float32) for x in (after, reference)))
    assert error(after.pool.updates, reference.pool.updates) < 2**-7  # one may lie between two bfloat16 numbers
    assert error(after.pool.checkpoints[1:], reference.pool.checkpoints[1:]) < 2e-5
    assert int(after.cursor.folded.max()) > 0


@slow
@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize(
    "spec", [pytest.param(GDN, id="Gated DeltaNet"), pytest.param(GLA, id="GLA", marks=exhaustive)]
)
def test_a_prompt_of_rows_that_are_said_to_be_empty_is_the_same(rng, spec, implementation):
    rows, time = 2, 70
    arrays = inputs(rng, spec, rows, time, jnp.bfloat16)[1:]
    cache = buffered.init(spec, slots=rows, limit=16, max_pending=4, entry_dtype=jnp.bfloat16)
    slots, lengths, keep = (np.array(x, np.int32) for x in ([1, 2], [70, 33], [5, 0]))
    step, _ = buffered.begin_prefill(cache.cursor, slots, lengths, keep, time=time)
    how = {"implementation": implementation, "interpret": implementation == "gpu"}
    found, expected = (
        buffered.prefill_pool(spec, cache.pool, dataclasses.replace(step, empty=empty), *arrays, **how)
        for empty in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@slow
def test_windows_of_a_head_share_a_block_where_there_are_many_heads():
    assert len(lines_of("tests/pallas/walking.py")) == len(CASES)


@slow
@pytest.mark.parametrize("spec", [pytest.param(KDA, id="KDA"), pytest.param(GLA, id="GLA", marks=exhaustive)])
def test_chunks_whose_pairs_take_too_much_memory_are_solved_one_after_another(rng, monkeypatch, spec):
    """Rows end, and are cut, in different ones of them."""
    monkeypatch.setattr(gpu, "MOST_SOLVED", 8)  # two chunks of two rows and heads
    check(spec, inputs(rng, spec, 2, 270, jnp.bfloat16, mean_log_decay=-0.05), np.array([270, 100], np.int32))
    arrays = inputs(rng, spec, 3, 270, jnp.bfloat16, mean_log_decay=-0.05)
    lengths, cut = np.array([270, 150, 0], np.int32), np.array([190, 140, 0], np.int32)
    call = kernel_call(spec, *arrays[1:4], arrays[5], updates=80, cut=True)
    wide = [None if x is None else np.asarray(x, np.float64) for x in arrays]
    _, expected, _ = definition.run_batch(spec, *wide, cut)
    exact, _, added = definition.run_batch(spec, *wide, lengths)
    out, state, updates = gpu.solve(call, *arrays, jnp.asarray(lengths), jnp.asarray(cut), interpret=True)
    assert definition.error(out, exact) < 2**-8 and definition.error(state, expected) < 2e-5
    for row, first in enumerate(np.asarray(gpu.first_update(call, cut))):
        tokens = slice(cut[row] - first, lengths[row] - first)
        assert definition.error(updates[row, tokens], added[row, cut[row] : lengths[row]]) < 2e-5


@slow
def test_the_kernel_has_the_gradient_of_the_xla_path(rng):
    arrays = inputs(rng, GDN, 2, 70, jnp.bfloat16)
    direction = jnp.asarray(rng.standard_normal(arrays[3].shape), jnp.float32)

    def gradients(**how):
        def loss(*given):
            return jnp.vdot(chunked(GDN, *given, **how)[0].astype(jnp.float32), direction)

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4, 5))(*arrays)

    found, expected = gradients(implementation="gpu", interpret=True), gradients(implementation="xla")
    for actual, xla in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(xla, np.float32))


@pytest.mark.parametrize(
    "changes, dtype, reason",
    [
        ({"key_dim": 256}, jnp.bfloat16, "a key_dim of 64 or 128, got 256"),
        (
            {"value_dim": 72},
            jnp.bfloat16,
            "a value_dim that is a multiple of 16, got 72",
        ),
        ({"decay": "channel"}, jnp.bfloat16, "a key_dim of 128 for a decay a key channel, got 64"),
        ({"decay": "none"}, jnp.bfloat16, "a decay with the delta rule, got none"),
        ({}, jnp.float32, "q, k and v in bfloat16, got float32, float32, float32"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error_that_says_why(changes, dtype, reason):
    spec = dataclasses.replace(GDN, **changes)
    arrays = jax.eval_shape(lambda: inputs(np.random.default_rng(0), spec, 1, 8, dtype)[1:])
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this chunked: it needs {reason}'):
        jax.eval_shape(partial(chunked, spec, None, implementation="gpu", target="H100"), *arrays)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(RecurrenceSpec(32, 16, 128, 128), id="Qwen3.5-4B"),
        pytest.param(RecurrenceSpec(128, 8, 128, 64, delta=False), id="Nemotron-H-8B", marks=slow),
        pytest.param(RecurrenceSpec(96, 8, 128, 80, delta=False), id="Nemotron-3-Nano-4B", marks=slow),
        pytest.param(RecurrenceSpec(32, 32, 128, 128, decay="channel"), id="Kimi-Linear-48B", marks=slow),
        pytest.param(RecurrenceSpec(16, 16, 128, 256), id="values of 256", marks=slow),
        pytest.param(RecurrenceSpec(16, 16, 128, 256, decay="channel", delta=False), id="and gated linear", marks=slow),
    ],
)
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=slow)])
def test_a_hopper_gpu_gets_both_kernels_by_itself_at_real_sizes(spec, rows):
    """They lower for CUDA. With few rows each window of a head's values has a block of its own."""
    arrays = jax.eval_shape(lambda: inputs(np.random.default_rng(0), spec, rows, 1024, jnp.bfloat16))
    traced = jax.jit(partial(chunked, spec, target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2
    assert str(jax.jit(partial(chunked, spec, target="cpu")).trace(*arrays).jaxpr).count("pallas_call") == 0
