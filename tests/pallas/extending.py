"""What the kernels of `extend` must compute, on any platform: what the XLA path computes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.recurrence import RecurrenceSpec, buffered
from tests.gpu import checks
from tests.gpu.checks import new_inputs
from tests.recurrence.twin import path_to, random_parents

SMALL = RecurrenceSpec(heads=4, key_heads=2, key_dim=128, value_dim=128)
NARROW = RecurrenceSpec(heads=3, key_heads=1, key_dim=64, value_dim=64)
# Without the delta rule: heads in stacks of two, and heads that can't be.
STACKED = RecurrenceSpec(heads=4, key_heads=2, key_dim=64, value_dim=64, delta=False)
ODD = RecurrenceSpec(heads=3, key_heads=1, key_dim=64, value_dim=64, delta=False)
# Heads of 80 values, in windows of which some have rows of two or three heads; and of 256, in windows of 128.
WINDOWS = RecurrenceSpec(heads=8, key_heads=2, key_dim=64, value_dim=80, delta=False)
WINDOWS_DELTA = dataclasses.replace(WINDOWS, key_heads=1, heads=4, delta=True)
WIDE = RecurrenceSpec(heads=2, key_heads=1, key_dim=64, value_dim=256)
# Keys of 256 numbers: heads of 128 values in windows of 64, heads of 64, and windows with rows of two heads.
LARGE = RecurrenceSpec(heads=2, key_heads=1, key_dim=256, value_dim=128, delta=False)
LARGE_DELTA = RecurrenceSpec(heads=2, key_heads=1, key_dim=256, value_dim=64)
LARGE_WINDOWS = RecurrenceSpec(heads=4, key_heads=1, key_dim=256, value_dim=80, delta=False)
NO_DECAY = dataclasses.replace(ODD, decay="none")
DELTA_NET, LINEAR = (dataclasses.replace(spec, decay="none") for spec in (NARROW, STACKED))
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=128, decay="channel")
GLA = RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=128, decay="channel", delta=False)
SLOTS = 2
REJECTED = np.array([[False, False, True]])  # of three tokens


def poisoned(cache):
    """A memory in which everything that no slot has written is NaN."""
    return buffered.BufferedState(cache.cursor, jax.tree.map(checks.spoiled, cache.pool))


def extend_by(platform, spec, cache, inputs, **rows):
    """By the platform's kernel, in the interpreter."""
    return buffered.extend(spec, cache, *inputs, **rows, implementation=platform, interpret=True)


def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.abs(found - expected).max() / np.abs(expected).max()


def state_bound(state, bound):
    """Nearly equal states may have high halves that differ: outputs then do, too, but not the sums of both halves."""
    return min(bound, checks.KEPT.get(state, bound))


def check_ragged(platform, rng, spec, state, entry, limit, bound):
    """Ragged steps, of which some fold, among NaN."""
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
        out, cache = extend_by(platform, spec, cache, inputs, **rows)
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


def check_recurrent(platform, rng, spec, state, entry, limit, bound):
    """Steps of one token on a short ring, and a forced fold."""
    entry = jnp.dtype(entry)
    cache = buffered.init(spec, slots=SLOTS, limit=limit, max_pending=1, state_dtype=state, entry_dtype=entry)
    cache, slots = poisoned(cache), jnp.array([2, 1])
    for lengths in ([1, 1], [1, 0], [0, 1], *[[1, 1]] * limit):
        inputs = new_inputs(rng, spec, 2, 1, jnp.float32)
        lengths = jnp.array(lengths)
        expected, reference = buffered.extend(spec, cache, *inputs, slots=slots, lengths=lengths, implementation="xla")
        out, cache = extend_by(platform, spec, cache, inputs, slots=slots, lengths=lengths)
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
    found = buffered.fold(spec, cache, slots=slots, implementation=platform, interpret=True)
    assert error(*(np.asarray(x.pool.checkpoints[1:], np.float32) for x in (found, expected))) < bound


def check_more_than_the_limit(platform, rng, spec, state, bound):
    """A step of a row that holds as many entries as its ring has places for, and of one that may read all of its own:
    the first folds."""
    dtypes = {"state_dtype": state, "entry_dtype": jnp.float32}
    cache, rows = poisoned(buffered.init(spec, slots=SLOTS, limit=6, max_pending=4, **dtypes)), jnp.array([1, 2])
    most = cache.cursor.ring - cache.cursor.max_pending
    assert most > cache.cursor.room >= 6
    for keep in ([0, 6 - 3], [most, 6 - 3]):  # on a checkpoint, in the end
        prompts, keep = new_inputs(rng, spec, 2, most + 1, jnp.float32), jnp.array(keep)
        _, cache = buffered.prefill(spec, cache, *prompts, slots=rows, keep=keep)
    assert cache.cursor.length.tolist() == [0, most, 3]
    inputs = new_inputs(rng, spec, 2, 3, jnp.float32)
    expected, reference = buffered.extend(spec, cache, *inputs, slots=rows, implementation="xla")
    out, after = extend_by(platform, spec, cache, inputs, slots=rows)
    assert error(out, expected) < bound
    states = [buffered.read(spec, buffered.commit(x, jnp.array([2, 3]), slots=rows), rows) for x in (after, reference)]
    assert error(*states) < state_bound(state, bound)
    assert after.cursor.length.tolist() == [0, 0, 3]


def check_long_ring(platform, rng, limit, held, time, pending):
    """A step and a forced fold of rows that hold many entries and few."""
    cache, rows = poisoned(buffered.init(NARROW, slots=SLOTS, limit=limit, max_pending=pending)), jnp.array([1, 2])
    while (missing := held - int(cache.cursor.length[1])) > 0:
        lengths = jnp.array([min(pending, missing), 1])
        inputs = new_inputs(rng, NARROW, 2, pending, jnp.bfloat16)
        _, cache = buffered.extend(NARROW, cache, *inputs, slots=rows, lengths=lengths)
        cache = buffered.commit(cache, lengths, slots=rows)
    inputs = new_inputs(rng, NARROW, 2, time, jnp.bfloat16)
    expected, reference = buffered.extend(NARROW, cache, *inputs, slots=rows, implementation="xla")
    out, after = extend_by(platform, NARROW, cache, inputs, slots=rows)
    assert error(out, expected) < 1e-2
    taken = (buffered.commit(x, jnp.array([1, 1]), slots=rows) for x in (after, reference))
    states = [buffered.read(NARROW, x, rows) for x in taken]
    assert error(*states) < 1e-2
    folded = buffered.fold(NARROW, cache, slots=rows, implementation=platform, interpret=True)
    assert error(buffered.read(NARROW, folded, rows), buffered.read(NARROW, cache, rows)) < 1e-4
    assert int(folded.cursor.folded[1]) == held


def check_rejected_drafts(platform, rng):
    """A kernel's next step, which folds, gives the bits that it gives after finite drafts."""
    clean = buffered.init(NARROW, slots=1, limit=4, max_pending=3)
    one, lengths = jnp.array([1]), jnp.array([2])
    drafts, tokens = (new_inputs(rng, NARROW, 1, 3, jnp.bfloat16) for _ in range(2))
    found = []
    for cache, spoiled in ((clean, drafts), (poisoned(clean), [checks.spoil(rng, x, REJECTED) for x in drafts])):
        _, cache = extend_by(platform, NARROW, cache, spoiled, slots=one)
        cache = buffered.commit(cache, lengths, slots=one)
        out, cache = extend_by(platform, NARROW, cache, tokens, slots=one)
        assert int(cache.cursor.folded[1]) == 2
        found.append((np.asarray(out), np.asarray(buffered.read(NARROW, cache, one))))
    for sick, expected in zip(*reversed(found), strict=True):
        assert np.isfinite(expected).all() and sick.tobytes() == expected.tobytes()


def check_null_slot(platform, rng):
    """Zeros come out, and nothing is written."""
    cache = poisoned(buffered.init(SMALL, slots=SLOTS, limit=4, max_pending=4))
    inputs = new_inputs(rng, SMALL, 2, 3, jnp.float32)
    out, after = extend_by(platform, SMALL, cache, inputs, slots=jnp.array([0, 0]))
    np.testing.assert_array_equal(out, 0)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(after.pool))


def check_forced_fold(platform, rng):
    """Of rows that hold entries, of one that holds none, and of the null slot."""
    cache, rows = poisoned(buffered.init(NARROW, slots=SLOTS, limit=32, max_pending=3)), jnp.array([1, 2])
    for accepted in ([3, 3], [3, 1]):
        _, cache = buffered.extend(NARROW, cache, *new_inputs(rng, NARROW, 2, 3, jnp.float32), slots=rows)
        cache = buffered.commit(cache, jnp.array(accepted), slots=rows)
    for slots in (jnp.array([1, 0]), jnp.array([2, 1])):  # the second time, slot 1 has nothing to fold
        expected = buffered.fold(NARROW, cache, slots=slots, implementation="xla")
        cache = buffered.fold(NARROW, cache, slots=slots, implementation=platform, interpret=True)
        assert error(buffered.read(NARROW, cache, slots), buffered.read(NARROW, expected, slots)) < 1e-4
        for name in ("keys", "updates", "gates"):
            found, same = (np.asarray(getattr(x.pool, name), np.float32) for x in (cache, expected))
            np.testing.assert_array_equal(found, same)
    assert np.isnan(cache.pool.checkpoints[0]).all()


def check_forks(platform, rng):
    """Shared blocks, in the order that a tree left."""
    cache = buffered.init(NARROW, slots=3, limit=16, max_pending=3, states=3, blocks=12, entry_dtype=jnp.float32)
    inputs = new_inputs(rng, NARROW, 1, 3, jnp.float32)
    parents = jnp.array([[-1, -1, 1]])
    _, cache = buffered.extend(NARROW, cache, *inputs, slots=jnp.array([1]), parents=parents)
    cache = buffered.commit(cache, jnp.array([2]), slots=jnp.array([1]), path=jnp.array([[1, 2, 0]]))
    cache = buffered.fork(cache, 1, jnp.array([2]))
    inputs = new_inputs(rng, NARROW, 2, 3, jnp.float32)
    expected, reference = buffered.extend(NARROW, cache, *inputs, slots=jnp.array([1, 2]), implementation="xla")
    out, cache = extend_by(platform, NARROW, cache, inputs, slots=jnp.array([1, 2]))
    assert error(out, expected) < 1e-4
    assert error(cache.pool.updates, reference.pool.updates) < 1e-4


def check_trees(platform, rng, spec):
    """Of random trees, whose committed paths fold; what is not on a path may be NaN."""
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
        out, cache = extend_by(platform, spec, cache, inputs, **rows)
        last = np.arange(SLOTS), lengths - 1
        assert np.isfinite(expected[last]).all() and error(out[last], expected[last]) < 1e-4
        accepted = {"accepted": jnp.array([len(path) for path in paths]), "slots": rows["slots"]}
        accepted["path"] = jnp.array([path + [0] * (time - len(path)) for path in paths])
        cache, reference = (buffered.commit(x, **accepted) for x in (cache, reference))
        assert error(buffered.read(spec, cache, rows["slots"]), buffered.read(spec, reference, rows["slots"])) < 1e-4
    assert int(cache.cursor.folded.max()) > 0


def check_at_once(platform, rng, spec):
    """Three tokens at once and one by one store the same bits."""
    start = buffered.init(spec, slots=SLOTS, limit=16, max_pending=4)
    rows = {"slots": jnp.array([1, 2])}
    _, start = extend_by(platform, spec, start, new_inputs(rng, spec, 2, 3, jnp.bfloat16), **rows)
    start = buffered.commit(start, jnp.array([3, 2]), **rows)
    inputs = new_inputs(rng, spec, 2, 3, jnp.bfloat16)
    _, at_once = extend_by(platform, spec, start, inputs, **rows)
    at_once = buffered.commit(at_once, jnp.array([3, 3]), **rows)
    one_by_one = start
    for t in range(3):
        _, one_by_one = extend_by(platform, spec, one_by_one, [x[:, t : t + 1] for x in inputs], **rows)
        one_by_one = buffered.commit(one_by_one, jnp.array([1, 1]), **rows)
    chex.assert_trees_all_equal(at_once.pool, one_by_one.pool)
