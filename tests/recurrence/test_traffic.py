"""Counted bytes: those of the real arrays, of the cursor's own schedule, and of the paper's tables and equations."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf.recurrence
from jaxbuf.recurrence import RecurrenceSpec, buffered, kvbuffer_model, traffic
from jaxbuf.recurrence.traffic import best_limit, buffered_step_bytes, checkpoint_bytes, crossover, entry_bytes


def gdn(heads: int, key_heads: int = 16) -> RecurrenceSpec:
    return RecurrenceSpec(heads, key_heads, 128, 128)


MAMBA2 = RecurrenceSpec(128, 8, 128, 64, decay="head", delta=False)
KDA = RecurrenceSpec(32, 32, 128, 128, decay="channel", delta=True)
FAMILIES = [
    RecurrenceSpec(heads, key_heads, key_dim, value_dim, decay, delta)
    for decay in ("none", "head", "channel")
    for delta in (False, True)
    for heads, key_heads, key_dim, value_dim in [(6, 2, 24, 10)]
]


def tree_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def one_head(d: int) -> RecurrenceSpec:
    """The paper's linear attention: no gates (with the delta rule, no beta is kept either)."""
    return RecurrenceSpec(1, 1, d, d, decay="none", delta=True)


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: f"{spec.decay}-{spec.delta}")
def test_counted_bytes_are_those_of_the_arrays(spec, rng):
    for state_dtype, entry_dtype in (("float32", "bfloat16"), ("bfloat16", "float32")):
        limit, max_pending, slots = (int(n) for n in rng.integers(1, 40, 3))
        block_size = int(rng.choice([1, 8, 16]))
        sizes = {"slots": slots, "limit": limit, "max_pending": max_pending, "block_size": block_size}
        dtypes = {"state_dtype": jnp.dtype(state_dtype), "entry_dtype": jnp.dtype(entry_dtype)}
        state = jax.eval_shape(lambda sizes=sizes, dtypes=dtypes: buffered.init(spec, **sizes, **dtypes))
        assert traffic.ring_entries(limit, max_pending, block_size) == state.cursor.ring
        assert traffic.pool_bytes(spec, **sizes, **dtypes) == tree_bytes(state.pool)
        assert checkpoint_bytes(spec, state_dtype) * (slots + 1) == tree_bytes(state.pool.checkpoints)


@pytest.mark.parametrize(
    ("spec", "entries"), [(gdn(32), 188), (gdn(16), 143), (gdn(48), 210), (KDA, 76), (MAMBA2, 238)]
)
def test_a_slot_stays_kv_only_up_to_the_entries_that_cost_a_buffered_step(spec, entries):
    assert crossover(spec) == entries
    assert jaxbuf.recurrence.crossover is crossover
    buffered_step = buffered_step_bytes(spec, 16)
    assert traffic.kv_only_step_bytes(spec, entries - 1) < buffered_step < traffic.kv_only_step_bytes(spec, entries + 1)
    assert crossover(spec, "bfloat16") == pytest.approx(entries / 2, rel=0.12)  # the entries' part is not halved
    assert crossover(spec, jnp.float32, jnp.float32) < entries


def test_mamba_2_crosses_at_244_entries_if_a_head_stored_one_gate():
    one_gate = entry_bytes(MAMBA2) - 4 * MAMBA2.heads
    assert round(checkpoint_bytes(MAMBA2) * (1 + 1 / 16) / one_gate + 17 / 2) == 244
    assert crossover(MAMBA2) / 244 == pytest.approx(1, abs=0.03)


def test_the_bytes_of_a_step_are_those_of_the_cursors_schedule():
    """A fold cycle of the real cursor, counted step by step, has the mean that the formula gives."""
    spec = gdn(4, 2)
    cases = [(1, 1, 1), (16, 1, 1), (7, 1, 1), (16, 5, 3), (16, 5, 5), (32, 5, 1), (3, 5, 2)]
    limits, tokens, accepted = (np.array(column, np.int32) for column in zip(*cases, strict=True))
    steps = math.lcm(*(traffic.fold_cycle(*(int(n) for n in case)) for case in cases))
    cursor = buffered.init_cursor(slots=len(cases), limit=limits, max_pending=5)
    slots = jnp.arange(1, len(cases) + 1, dtype=jnp.int32)
    cursor = buffered.commit_cursor(buffered.begin(cursor, slots, jnp.asarray(accepted), 5)[1], accepted, slots)
    cursor = dataclasses.replace(cursor, folded=jnp.full(len(cases) + 1, 100, jnp.int32))

    def one(cursor, _):
        step, cursor = buffered.begin(cursor, slots, jnp.asarray(tokens), 5)
        counted = step.before.has_checkpoint, step.folds, step.before.live, step.lengths
        return buffered.commit_cursor(cursor, jnp.asarray(accepted), slots), counted

    counted = jax.jit(lambda cursor: jax.lax.scan(one, cursor, None, length=steps)[1])(cursor)
    reads, folds, live, appended = (np.asarray(x, np.float64).mean(axis=0) for x in counted)
    names = ("checkpoint_reads", "folds", "live_entries", "appended")
    for row, (limit, drafts, kept) in enumerate(cases):
        work = dict(zip(names, (float(x[row]) for x in (reads, folds, live, appended)), strict=True))
        expected = traffic.state_traffic(spec, **work)
        assert buffered_step_bytes(spec, limit, tokens=drafts, accepted=kept) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spec", [gdn(32), MAMBA2, KDA])
def test_no_limit_moves_fewer_bytes_than_the_best(spec):
    for tokens, accepted, state_dtype in (
        (1, 1, "float32"),
        (1, 1, "bfloat16"),
        (5, 3, "float32"),
        (9, 8.5, "float32"),
    ):
        sizes = {"tokens": tokens, "accepted": accepted, "state_dtype": state_dtype}
        costs = [buffered_step_bytes(spec, limit, **sizes) for limit in range(1, 300)]
        assert best_limit(spec, **sizes) == 1 + int(np.argmin(costs))
    flat = [buffered_step_bytes(gdn(32), limit) for limit in (16, 24)]
    assert max(flat) / buffered_step_bytes(gdn(32), best_limit(gdn(32))) < 1.01


def test_limit_1_is_the_recurrent_form_with_the_entry_on_its_way():
    spec = gdn(32)
    assert buffered_step_bytes(spec, 1) == traffic.snapshot_step_bytes(spec) + 2 * entry_bytes(spec)
    # What DESIGN and the benchmarks call the byte ratio of the recurrent step and limit 16.
    tokens = traffic.token_bytes(spec)
    assert (traffic.snapshot_step_bytes(spec) + tokens) / (buffered_step_bytes(spec, 16) + tokens) == pytest.approx(
        1.78, abs=0.005
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: crossover(gdn(32), limit=0), r"limit must be at least 1, got 0"),
        (lambda: traffic.fold_cycle(16, 5, 6), r"accepted must be in \[1, tokens \(5\)\], got 6"),
        (lambda: traffic.fold_cycle(16, 5, 0), r"accepted must be in \[1, tokens \(5\)\], got 0"),
        (lambda: traffic.ring_entries(16, 0), r"max_pending must be at least 1, got 0"),
    ],
)
def test_a_size_out_of_range_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The paper. Its formulas are written out again here as they are printed.


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("m", [2, 8, 23, 32])
def test_equations_of_linear_attention(d, m):
    length = m + 50
    assert kvbuffer_model.chunkwise_speedup(d, m) == pytest.approx(4 * (d + 1) / (2 * d + 4 * d / m + m + 7))  # eq. 6
    assert kvbuffer_model.verify_speedup(d, m) == pytest.approx(((m + 1) * d + 2 * m) / (3 * d + 4 * m))  # eq. 9
    expected = (d + 2 * d / m + m / 2 + 7 / 2) / (length + 2)
    assert kvbuffer_model.kv_only_speedup(length, d, m) == pytest.approx(expected)  # eq. 10
    assert kvbuffer_model.update_intensity(d, m) == pytest.approx(m / (4 + 2 * m / d))
    expected = (2 * m * d**2 + 2 * m * (m + 1) * d) / (4 * d**2 + 12 * m * d)
    assert kvbuffer_model.output_intensity(d, m) == pytest.approx(expected)
    assert kvbuffer_model.kv_only_intensity(length) == pytest.approx(length / (length + 2))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("m", [2, 8, 23, 32])
def test_equations_of_gated_deltanet(d, m):
    length = m + 50
    chunkwise = 4 * d**2 + 8 * d**2 / m + 2 * m * d + 14 * d + m + 7
    found = kvbuffer_model.chunkwise_speedup(d, m, gdn=True)
    assert found == pytest.approx((8 * d**2 + 8 * d + 4) / chunkwise)  # eq. 17
    assert found == pytest.approx(4 * (d + 1) / (2 * d + 4 * d / m + m + 7), rel=0.01)
    found = kvbuffer_model.verify_speedup(d, m, gdn=True)
    expected = (4 * (m + 1) * d**2 + 8 * m * d + 4 * m) / (12 * d**2 + 16 * m * d + 8 * m)
    assert found == pytest.approx(expected)  # eq. 18
    assert found == pytest.approx(((m + 1) * d + 2 * m) / (3 * d + 4 * m), rel=0.01)
    found = kvbuffer_model.kv_only_speedup(length, d, m, gdn=True)
    assert found == pytest.approx(chunkwise / (4 * length * d + 8 * d + 2 * length + 4))  # eq. 19
    assert found == pytest.approx((d + 2 * d / m + m / 2 + 7 / 2) / (length + 2), rel=0.01)


def test_numbers_that_the_paper_prints():
    d = 128
    assert kvbuffer_model.best_chunk(d) == pytest.approx(22.63, abs=0.005)
    speedups = [kvbuffer_model.chunkwise_speedup(d, m) for m in range(1, 200)]
    assert 1 + int(np.argmax(speedups)) in (22, 23)
    assert checkpoint_bytes(gdn(32)) == 2 * 2**20  # "2MB in Qwen3-Next Gated DeltaNet Layer"
    assert kvbuffer_model.verify_speedup(d, 2, gdn=True) == pytest.approx(
        1, abs=0.02
    )  # "approximately the same runtime"
    assert kvbuffer_model.verify_speedup(10**6, 8) == pytest.approx(3, abs=1e-3)  # (m + 1) / 3
    assert kvbuffer_model.verify_speedup(d, 8, gdn=True) == pytest.approx(2.78, abs=0.05)  # what they measured
    assert kvbuffer_model.snapshot_storage(d, 4) / kvbuffer_model.recurrent_storage(d) == 5  # "by 5x"
    # "an additional 384MB": 4 drafts in all 48 layers; the 36 that are linear have 288 MiB.
    assert 4 * 48 * checkpoint_bytes(gdn(32)) == 384 * 2**20
    m = kvbuffer_model.best_chunk(d)
    simplified = [(d + m + 7 / 2) / (length + 2) for length in (1, d)]
    found = [kvbuffer_model.chunkwise_access(d, m) / kvbuffer_model.kv_only_access(length, d) for length in (1, d)]
    assert found == pytest.approx(simplified)
    assert found[0] > found[1] > 1  # "more efficient when the context length L < d"


@pytest.mark.parametrize("d", [64, 128])
def test_the_papers_tables_are_our_counts_where_its_folds_are_a_kernel_of_their_own(d):
    spec, m = one_head(d), 16
    state, token = checkpoint_bytes(spec), traffic.token_bytes(spec) - 4  # less our beta in float32, which it has not
    assert kvbuffer_model.recurrent_storage(d) == state
    assert kvbuffer_model.kv_only_storage(m, d) == m * entry_bytes(spec)
    assert kvbuffer_model.chunkwise_storage(d, m) == state + m * entry_bytes(spec)
    assert kvbuffer_model.snapshot_storage(d, 4) == 5 * state
    assert kvbuffer_model.recurrent_access(d) == traffic.snapshot_step_bytes(spec) + token
    # A flush reads the state once more, every m steps; what it reads of the buffer our step has found there.
    assert kvbuffer_model.chunkwise_access(d, m) == buffered_step_bytes(spec, m) + token + state / m
    assert kvbuffer_model.kv_only_access(m, d) == traffic.kv_only_step_bytes(spec, m - 1) + token
    assert kvbuffer_model.recurrent_verify_access(d, m) == traffic.snapshot_step_bytes(spec, m) + m * token
    folding = buffered_step_bytes(spec, 1, tokens=m, accepted=m)
    assert kvbuffer_model.parallel_verify_access(d, m) == folding + m * token + state
    assert best_limit(spec) == pytest.approx(kvbuffer_model.best_chunk(d) / math.sqrt(2), abs=1)


def test_a_buffered_decay_is_two_bytes_in_the_paper_and_four_here():
    d, m = 128, 16
    spec = RecurrenceSpec(1, 1, d, d)
    assert entry_bytes(spec) - entry_bytes(one_head(d)) == 4
    extra = kvbuffer_model.chunkwise_storage(d, m, gdn=True) - kvbuffer_model.chunkwise_storage(d, m)
    assert extra == 2 * m
