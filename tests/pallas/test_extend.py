"""The kernels of `extend`: they lower for their platform at the real sizes, and compute what the XLA path computes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.extend import gpu_schedule
from jaxbuf.recurrence import RecurrenceSpec, buffered
from tests.gpu import checks
from tests.gpu.checks import new_inputs
from tests.recurrence.twin import path_to, random_parents

SMALL = RecurrenceSpec(heads=4, key_heads=2, key_dim=128, value_dim=128)
NARROW = RecurrenceSpec(heads=3, key_heads=1, key_dim=64, value_dim=64)
# Without the delta rule: heads in stacks of two, and heads that can't be.
STACKED = RecurrenceSpec(heads=4, key_heads=2, key_dim=64, value_dim=64, delta=False)
ODD = RecurrenceSpec(heads=3, key_heads=1, key_dim=64, value_dim=64, delta=False)
NO_DECAY = dataclasses.replace(ODD, decay="none")
DELTA_NET, LINEAR = (dataclasses.replace(spec, decay="none") for spec in (NARROW, STACKED))
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=128, decay="channel")
GLA = RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=128, decay="channel", delta=False)
KIMI = dataclasses.replace(KDA, heads=32, key_heads=32)
MAMBA = RecurrenceSpec(heads=128, key_heads=8, key_dim=128, value_dim=64, delta=False)
QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
SLOTS = 2
REJECTED = np.array([[False, False, True]])  # of three tokens


def poisoned(cache):
    """A memory in which everything that no slot has written is NaN."""
    return buffered.BufferedState(cache.cursor, jax.tree.map(checks.spoiled, cache.pool))


def extend_on_gpu(spec, cache, inputs, **rows):
    return buffered.extend(spec, cache, *inputs, **rows, implementation="gpu", interpret=True)


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "time, limit, max_pending, state, entry",
    [
        (1, 1, 1, "float32", "bfloat16"),
        (1, 16, 8, "float32", "bfloat16"),
        (5, 32, 8, "float32", "bfloat16"),
        pytest.param(9, 32, 16, "float32", "bfloat16", marks=pytest.mark.exhaustive),
        (1, 256, 8, "float32", "bfloat16"),
        pytest.param(1, 256, 1, "float32", "bfloat16", marks=pytest.mark.exhaustive),
        (1, 16, 8, "bfloat16", "bfloat16"),
        pytest.param(5, 32, 8, "float32", "float32", marks=pytest.mark.exhaustive),
        (1, 1, 1, "split", "bfloat16"),
        pytest.param(1, 16, 8, "split", "bfloat16", marks=pytest.mark.exhaustive),
        (5, 32, 8, "split", "bfloat16"),
        (1, 256, 8, "split", "bfloat16"),
        (1, 1, 1, "split8", "bfloat16"),
        (1, 16, 8, "split8", "bfloat16"),
        (5, 32, 8, "split8", "bfloat16"),
        pytest.param(1, 256, 8, "split8", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(time, limit, max_pending, state, entry):
    dtypes = {"state_dtype": state, "entry_dtype": jnp.dtype(entry)}
    assert "mosaic_gpu" in lowered(QWEN, time, limit=limit, max_pending=max_pending, **dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("time, state", [(1, "float32"), (5, "split")])
def test_the_gpu_kernel_lowers_for_mamba_2s_heads(time, state):
    assert "mosaic_gpu" in lowered(MAMBA, time, limit=32, max_pending=8, state_dtype=state)


def test_the_gpu_kernel_lowers_for_narrow_heads_with_a_later_chunk_of_any_length():
    assert "mosaic_gpu" in lowered(NARROW, 1, limit=40, max_pending=8)  # 40 entries: 24 behind the first chunk


@pytest.mark.parametrize("spec, time", [(QWEN, 8), pytest.param(MAMBA, 16, marks=pytest.mark.exhaustive)])
def test_the_gpu_kernel_lowers_for_trees(spec, time):
    assert "mosaic_gpu" in lowered(spec, time, limit=32, max_pending=16, parents=jnp.full((128, time), -1))


@pytest.mark.parametrize(
    "time, limit, max_pending, state",
    [
        (1, 1, 1, "float32"),
        (1, 16, 8, "float32"),
        pytest.param(5, 32, 8, "bfloat16", marks=pytest.mark.slow),
        pytest.param(1, 256, 8, "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_lowers_for_a_decay_a_channel(time, limit, max_pending, state):
    assert "mosaic_gpu" in lowered(KIMI, time, limit=limit, max_pending=max_pending, state_dtype=state)


@pytest.mark.parametrize("limit, max_pending", [(1, 1), (16, 8)])
def test_the_gpu_kernel_lowers_without_a_decay(limit, max_pending):
    spec = dataclasses.replace(QWEN, decay="none")
    assert "mosaic_gpu" in lowered(spec, 1, limit=limit, max_pending=max_pending)


def lowered(spec, time: int, rows: int = 128, parents=None, **sizes) -> str:
    """A step's program for CUDA."""
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=rows, **sizes))
    inputs = jax.eval_shape(lambda: new_inputs(np.random.default_rng(0), spec, rows, time, jnp.bfloat16))

    def step(cache, *inputs):
        slots = jnp.arange(1, rows + 1, dtype=jnp.int32)
        return buffered.extend(spec, cache, *inputs, slots=slots, parents=parents, target="H100")

    return jax.jit(step, donate_argnums=0).trace(cache, *inputs).lower(lowering_platforms=("cuda",)).as_text()


def state_bound(state, bound):
    """Nearly equal states may have high halves that differ: outputs then do, too, but not the sums of both halves."""
    return min(bound, checks.KEPT.get(state, bound))


@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        (NARROW, "split", "bfloat16", 4, 1e-2),
        pytest.param(NARROW, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split8", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, "split8", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        (STACKED, "float32", "bfloat16", 4, 1e-2),
        pytest.param(STACKED, "split", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "split8", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(ODD, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(DELTA_NET, "float32", "float32", 4, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(LINEAR, "split", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(KDA, "float32", "float32", 18, 1e-4, marks=pytest.mark.slow),
        pytest.param(KDA, "bfloat16", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(GLA, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(GLA, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_is_the_xla_path_over_ragged_steps_and_folds(rng, monkeypatch, spec, state, entry, limit, bound):
    # Two processors: every block then serves two heads at a time, and more than one after the other.
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    dtypes = {"state_dtype": state, "entry_dtype": jnp.dtype(entry)}
    cache = poisoned(buffered.init(spec, slots=SLOTS, limit=limit, max_pending=4, **dtypes))
    both = jnp.array([1, 2])
    for _ in range((limit - 1) // 3 if limit > 16 else 0):  # more live entries than the kernel takes at once
        _, cache = buffered.extend(spec, cache, *new_inputs(rng, spec, 2, 3, jnp.float32), slots=both)
        cache = buffered.commit(cache, jnp.array([3, 3]), slots=both)
    for lengths, accepted in (([1, 3], [1, 2]), ([3, 0], [3, 0]), ([2, 3], [1, 3])):
        inputs = new_inputs(rng, spec, 2, 3, jnp.float32)
        rows = {"slots": both, "lengths": jnp.array(lengths)}
        expected, reference = buffered.extend(spec, cache, *inputs, **rows, implementation="xla")
        out, cache = extend_on_gpu(spec, cache, inputs, **rows)
        assert error(out, expected) < bound
        for name in ("keys", "gates"):
            found, expected = (np.asarray(getattr(x.pool, name), np.float32) for x in (cache, reference))
            np.testing.assert_array_equal(found, expected)
        # A new update may lie between two numbers of its dtype, and be rounded to the other one. So that the states
        # show what the folds did, the same updates are read on top of both.
        written = np.nan_to_num([np.asarray(x.pool.updates, np.float32) for x in (cache, reference)])
        assert error(*written) < bound
        pool = dataclasses.replace(reference.pool, updates=cache.pool.updates)
        reference = dataclasses.replace(reference, pool=pool)
        cache, reference = (buffered.commit(x, jnp.array(accepted), slots=rows["slots"]) for x in (cache, reference))
        held = buffered.read(spec, cache, rows["slots"])
        assert error(held, buffered.read(spec, reference, rows["slots"])) < state_bound(state, bound)
    assert int(cache.cursor.folded.max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        (SMALL, "float32", "float32", 1, 1e-5),
        (NARROW, "bfloat16", "bfloat16", 5, 1e-2),
        pytest.param(ODD, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param(NO_DECAY, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        (DELTA_NET, "float32", "float32", 1, 1e-5),
        (KDA, "float32", "float32", 2, 1e-5),
        pytest.param(GLA, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split", "float32", 2, 2e-3, marks=pytest.mark.slow),
        pytest.param(SMALL, "split8", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
    ],
)
def test_the_recurrent_step_is_the_xla_path(rng, spec, state, entry, limit, bound):
    entry = jnp.dtype(entry)
    cache = buffered.init(spec, slots=SLOTS, limit=limit, max_pending=1, state_dtype=state, entry_dtype=entry)
    cache, slots = poisoned(cache), jnp.array([2, 1])
    for lengths in ([1, 1], [1, 0], [0, 1], *[[1, 1]] * limit):
        inputs = new_inputs(rng, spec, 2, 1, jnp.float32)
        lengths = jnp.array(lengths)
        expected, reference = buffered.extend(spec, cache, *inputs, slots=slots, lengths=lengths, implementation="xla")
        out, cache = extend_on_gpu(spec, cache, inputs, slots=slots, lengths=lengths)
        assert error(out, expected) < bound
        for name in ("keys", "gates"):
            found, expected = (np.asarray(getattr(x.pool, name), np.float32) for x in (cache, reference))
            np.testing.assert_array_equal(found, expected)
        cache, reference = (buffered.commit(x, lengths, slots=slots) for x in (cache, reference))
        states = [buffered.read(spec, x, slots) for x in (cache, reference)]
        assert error(*states) < state_bound(state, bound)
        if state in checks.KEPT and int(cache.cursor.folded.max()):
            assert np.nanmax(np.abs(np.asarray(cache.pool.low[1:], np.float32))) > 0, "the low half vanished"
    assert (cache.cursor.folded[1:] > 0).all()
    slots = jnp.array([1, 0])
    expected = buffered.fold(spec, cache, slots=slots, implementation="xla")
    found = buffered.fold(spec, cache, slots=slots, implementation="gpu", interpret=True)
    assert error(*(np.asarray(x.pool.checkpoints[1:], np.float32) for x in (found, expected))) < bound


@pytest.mark.parametrize(
    "limit, held, time, pending",  # rings of 56, 72, 120 and 152
    [
        pytest.param(40, 30, 3, 16, marks=pytest.mark.exhaustive),
        pytest.param(56, 54, 1, 16, marks=pytest.mark.exhaustive),
        pytest.param(100, 97, 1, 16, marks=pytest.mark.exhaustive),
        pytest.param(150, 141, 1, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_later_chunks_of_entries_are_read_and_folded_as_by_the_xla_path(rng, monkeypatch, limit, held, time, pending):
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    cache, rows = poisoned(buffered.init(NARROW, slots=SLOTS, limit=limit, max_pending=pending)), jnp.array([1, 2])
    while (missing := held - int(cache.cursor.length[1])) > 0:
        lengths = jnp.array([min(pending, missing), 1])
        inputs = new_inputs(rng, NARROW, 2, pending, jnp.bfloat16)
        _, cache = buffered.extend(NARROW, cache, *inputs, slots=rows, lengths=lengths)
        cache = buffered.commit(cache, lengths, slots=rows)
    inputs = new_inputs(rng, NARROW, 2, time, jnp.bfloat16)
    expected, reference = buffered.extend(NARROW, cache, *inputs, slots=rows, implementation="xla")
    out, after = extend_on_gpu(NARROW, cache, inputs, slots=rows)
    assert error(out, expected) < 1e-2
    taken = (buffered.commit(x, jnp.array([1, 1]), slots=rows) for x in (after, reference))
    states = [buffered.read(NARROW, x, rows) for x in taken]
    assert error(*states) < 1e-2
    folded = buffered.fold(NARROW, cache, slots=rows, implementation="gpu", interpret=True)
    assert error(buffered.read(NARROW, folded, rows), buffered.read(NARROW, cache, rows)) < 1e-4
    assert int(folded.cursor.folded[1]) == held


@pytest.mark.slow
def test_rejected_drafts_that_are_not_finite_change_no_bit(rng):
    """A kernel's next step, which folds, gives the bits that it gives after finite drafts."""
    clean = buffered.init(NARROW, slots=1, limit=4, max_pending=3)
    one, lengths = jnp.array([1]), jnp.array([2])
    drafts, tokens = (new_inputs(rng, NARROW, 1, 3, jnp.bfloat16) for _ in range(2))
    found = []
    for cache, spoiled in ((clean, drafts), (poisoned(clean), [checks.spoil(rng, x, REJECTED) for x in drafts])):
        _, cache = extend_on_gpu(NARROW, cache, spoiled, slots=one)
        cache = buffered.commit(cache, lengths, slots=one)
        out, cache = extend_on_gpu(NARROW, cache, tokens, slots=one)
        assert int(cache.cursor.folded[1]) == 2
        found.append((np.asarray(out), np.asarray(buffered.read(NARROW, cache, one))))
    for sick, expected in zip(*reversed(found), strict=True):
        assert np.isfinite(expected).all() and sick.tobytes() == expected.tobytes()


@pytest.mark.exhaustive
def test_rejected_drafts_that_are_not_finite_change_no_bit_of_recurrent_steps(rng):
    checks.check_rejected(rng, 1, 1, spec=NARROW, implementation="gpu", interpret=True, steps=6, rows=SLOTS)


@pytest.mark.slow
def test_the_null_slot_gives_zeros_and_writes_nothing(rng):
    cache = poisoned(buffered.init(SMALL, slots=SLOTS, limit=4, max_pending=4))
    inputs = new_inputs(rng, SMALL, 2, 3, jnp.float32)
    out, after = extend_on_gpu(SMALL, cache, inputs, slots=jnp.array([0, 0]))
    np.testing.assert_array_equal(out, 0)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(after.pool))


@pytest.mark.slow
def test_a_forced_fold_by_the_kernel_is_that_of_the_xla_path(rng):
    cache, rows = poisoned(buffered.init(NARROW, slots=SLOTS, limit=32, max_pending=3)), jnp.array([1, 2])
    for accepted in ([3, 3], [3, 1]):
        _, cache = buffered.extend(NARROW, cache, *new_inputs(rng, NARROW, 2, 3, jnp.float32), slots=rows)
        cache = buffered.commit(cache, jnp.array(accepted), slots=rows)
    for slots in (jnp.array([1, 0]), jnp.array([2, 1])):  # the second time, slot 1 has nothing to fold
        expected = buffered.fold(NARROW, cache, slots=slots, implementation="xla")
        cache = buffered.fold(NARROW, cache, slots=slots, implementation="gpu", interpret=True)
        assert error(buffered.read(NARROW, cache, slots), buffered.read(NARROW, expected, slots)) < 1e-4
        for name in ("keys", "updates", "gates"):
            found, same = (np.asarray(getattr(x.pool, name), np.float32) for x in (cache, expected))
            np.testing.assert_array_equal(found, same)
    assert np.isnan(cache.pool.checkpoints[0]).all()


@pytest.mark.exhaustive
def test_the_gpu_kernel_follows_forks_and_the_order_that_a_tree_left(rng):
    cache = buffered.init(NARROW, slots=3, limit=16, max_pending=3, states=3, blocks=12, entry_dtype=jnp.float32)
    inputs = new_inputs(rng, NARROW, 1, 3, jnp.float32)
    parents = jnp.array([[-1, -1, 1]])
    _, cache = buffered.extend(NARROW, cache, *inputs, slots=jnp.array([1]), parents=parents)
    cache = buffered.commit(cache, jnp.array([2]), slots=jnp.array([1]), path=jnp.array([[1, 2, 0]]))
    cache = buffered.fork(cache, 1, jnp.array([2]))
    inputs = new_inputs(rng, NARROW, 2, 3, jnp.float32)
    expected, reference = buffered.extend(NARROW, cache, *inputs, slots=jnp.array([1, 2]), implementation="xla")
    out, cache = extend_on_gpu(NARROW, cache, inputs, slots=jnp.array([1, 2]))
    assert error(out, expected) < 1e-4
    assert error(cache.pool.updates, reference.pool.updates) < 1e-4


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(NARROW, marks=pytest.mark.slow),
        pytest.param(LINEAR, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, marks=pytest.mark.exhaustive),
        pytest.param(KDA, marks=pytest.mark.exhaustive),
        pytest.param(DELTA_NET, marks=pytest.mark.exhaustive),
    ],
)
def test_trees_are_those_of_the_xla_path(rng, monkeypatch, spec):
    """Of random trees, whose committed paths fold; what is not on a path may be NaN."""
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    time, rows = 4, {"slots": jnp.array([1, 2])}
    cache = poisoned(buffered.init(spec, slots=SLOTS, limit=5, max_pending=time, entry_dtype=jnp.float32))
    for _ in range(3):
        parents, lengths = random_parents(rng, SLOTS, time), np.array([time, rng.integers(1, time + 1)])
        paths = [path_to(parents[row], length - 1) for row, length in enumerate(lengths)]
        on_path = np.array([np.isin(np.arange(time), path) for path in paths])
        inputs = new_inputs(rng, spec, 2, time, jnp.float32)
        inputs = [x if x is None else checks.spoil(rng, x, ~on_path) for x in inputs]
        rows |= {"lengths": jnp.asarray(lengths, jnp.int32), "parents": jnp.asarray(parents)}
        expected, reference = buffered.extend(spec, cache, *inputs, **rows, implementation="xla")
        out, cache = extend_on_gpu(spec, cache, inputs, **rows)
        last = np.arange(SLOTS), lengths - 1
        assert np.isfinite(expected[last]).all() and error(out[last], expected[last]) < 1e-4
        accepted = {"accepted": jnp.array([len(path) for path in paths]), "slots": rows["slots"]}
        accepted["path"] = jnp.array([path + [0] * (time - len(path)) for path in paths])
        cache, reference = (buffered.commit(x, **accepted) for x in (cache, reference))
        assert error(buffered.read(spec, cache, rows["slots"]), buffered.read(spec, reference, rows["slots"])) < 1e-4
    assert int(cache.cursor.folded.max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SMALL, pytest.param(KDA, marks=pytest.mark.exhaustive)])
def test_tokens_at_once_and_one_by_one_store_the_same_bits(rng, spec):
    start = buffered.init(spec, slots=SLOTS, limit=16, max_pending=4)
    rows = {"slots": jnp.array([1, 2])}
    _, start = extend_on_gpu(spec, start, new_inputs(rng, spec, 2, 3, jnp.bfloat16), **rows)
    start = buffered.commit(start, jnp.array([3, 2]), **rows)
    inputs = new_inputs(rng, spec, 2, 3, jnp.bfloat16)
    _, at_once = extend_on_gpu(spec, start, inputs, **rows)
    at_once = buffered.commit(at_once, jnp.array([3, 3]), **rows)
    one_by_one = start
    for t in range(3):
        _, one_by_one = extend_on_gpu(spec, one_by_one, [x[:, t : t + 1] for x in inputs], **rows)
        one_by_one = buffered.commit(one_by_one, jnp.array([1, 1]), **rows)
    chex.assert_trees_all_equal(at_once.pool, one_by_one.pool)


@pytest.mark.parametrize(
    "spec, limit, reason",
    [
        (RecurrenceSpec(4, 2, key_dim=32, value_dim=64), 4, "key_dim and value_dim 64 or 128, got 32 and 64"),
        (
            RecurrenceSpec(4, 2, key_dim=64, value_dim=64, decay="channel"),
            4,
            "128 for a decay a channel, got 64 and 64",
        ),
        (NARROW, 2000, "a ring of at most 1024 entries, got 2008"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, spec, limit, reason):
    cache = buffered.init(spec, slots=1, limit=limit, max_pending=4)
    *vectors, log_decay, beta = new_inputs(rng, spec, 1, 1, jnp.bfloat16)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this extend: .*{reason}'):
        buffered.extend(
            spec,
            cache,
            *vectors,
            log_decay,
            beta,
            slots=jnp.array([1]),
            implementation="gpu",
            target="H100",
        )
