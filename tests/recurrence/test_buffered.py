"""The buffered memory: any schedule of calls gives what the float64 recurrence gives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec, buffered, chunked, recurrent
from tests.compiling import MANY_STEPS
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES
from tests.serving.program import made_in_loops, written_in_loops

GDN = RecurrenceSpec(heads=6, key_heads=2, key_dim=32, value_dim=24)
MAX_PENDING = 8
KV_ONLY = 200
SLOTS = 5  # one shape for most tests: compiling is what costs

extend = jax.jit(buffered.extend, static_argnums=0)
prefill = jax.jit(buffered.prefill, static_argnums=0, static_argnames="chunk_size")
commit = jax.jit(buffered.commit)
fold = jax.jit(buffered.fold, static_argnums=0)
read = jax.jit(buffered.read, static_argnums=0)
reset = jax.jit(buffered.reset)


def memory(limits, dtype=jnp.float32, spec=GDN):
    """Five empty slots; the last one's limit keeps it KV-only and gives every test the same ring."""
    return buffered.init(spec, slots=SLOTS, limit=np.array(limits), max_pending=MAX_PENDING, entry_dtype=dtype)


def ints(*values):
    return jnp.array(values, jnp.int32)


def window(inputs, start, stop):
    return [None if x is None else jnp.asarray(x[:, start:stop]) for x in inputs]


def poison(cache, slot):
    """Fills everything slot owns with NaN, as a diverged earlier owner would have left it."""
    row, blocks = int(cache.cursor.fold_to[slot]), np.asarray(cache.cursor.block_table[slot])
    pool = cache.pool
    pool = dataclasses.replace(
        pool,
        checkpoints=pool.checkpoints.at[row].set(jnp.nan),
        keys=pool.keys.at[blocks].set(jnp.nan),
        updates=pool.updates.at[blocks].set(jnp.nan),
        gates=pool.gates.at[blocks].set(jnp.nan),
    )
    return dataclasses.replace(cache, pool=pool)


@pytest.mark.parametrize("repetition", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_schedule_equals_the_recurrence(rng, repetition):
    """Random T, ragged rows, partial acceptance, forced folds, prefills that keep entries, reused poisoned slots."""
    spec, slots = GDN, SLOTS
    cache = memory([1, 16, 32, 16, KV_ONLY])
    states = np.zeros((slots + 1, *spec.state_shape))
    tokens = np.zeros(slots + 1, int)
    worst = 0.0
    for _ in range(60):
        rows = np.concatenate([[0], rng.permutation(np.arange(1, slots + 1))[:4]]).astype(np.int32)
        rng.shuffle(rows)
        for slot in np.flatnonzero((rng.random(slots + 1) < 0.06) | (tokens > KV_ONLY - 30)):
            cache = reset(poison(cache, slot) if slot else cache, ints(slot))
            states[slot], tokens[slot] = 0, 0
        action = rng.random()
        if action < 0.1:
            cache = fold(spec, cache, slots=jnp.asarray(rows))
        elif action < 0.2:
            lengths, keep = rng.integers(0, 20, 5).astype(np.int32), rng.integers(0, 12, 5).astype(np.int32)
            inputs = definition.inputs(rng, spec, 5, 20)
            out, cache = prefill(spec, cache, *inputs, slots=rows, lengths=lengths, keep=keep)
            lengths = np.where(rows > 0, lengths, 0)
            expected, after, _ = definition.run_batch(spec, states[rows], *inputs, lengths)
            worst = max(worst, definition.error(out, expected))
            states[rows], tokens[rows] = after, tokens[rows] + lengths
        else:
            time = int(rng.integers(1, MAX_PENDING + 1))
            lengths = rng.integers(0, time + 1, 5).astype(np.int32)
            inputs = definition.inputs(rng, spec, 5, time)
            out, cache = extend(spec, cache, *inputs, slots=rows, lengths=lengths)
            lengths = np.where(rows > 0, lengths, 0)
            expected, _, _ = definition.run_batch(spec, states[rows], *inputs, lengths)
            worst = max(worst, definition.error(out, expected))
            accepted = rng.integers(0, lengths + 1).astype(np.int32)
            cache = commit(cache, accepted, slots=rows)
            states[rows] = definition.run_batch(spec, states[rows], *inputs, accepted)[1]
            tokens[rows] += accepted
        assert (np.asarray(cache.cursor.position)[1:] == tokens[1:]).all()
        states[0] = 0
        worst = max(worst, definition.error(read(spec, cache, ints(*range(slots + 1))), states))
        assert worst < 1e-4
    assert (np.asarray(cache.pool.checkpoints[0]) == 0).all() and (np.asarray(cache.pool.keys[0]) == 0).all()


def test_limit_one_holds_the_recurrent_state_and_kv_only_never_reads_one(rng):
    cache = poison(memory([1, 16, 16, 32, KV_ONLY]), 5)
    no_checkpoint = cache.cursor.checkpoint_of.at[5].set(0)
    cache = dataclasses.replace(cache, cursor=dataclasses.replace(cache.cursor, checkpoint_of=no_checkpoint))
    inputs, slots, one = definition.inputs(rng, GDN, SLOTS, 40), ints(1, 2, 3, 4, 5), ints(1, 1, 1, 1, 1)
    out, state, _ = definition.run_batch(GDN, None, *inputs)
    folds = np.zeros(SLOTS, int)
    for t in range(40):
        before = np.asarray(cache.cursor.folded)
        step, cache = extend(GDN, cache, *window(inputs, t, t + 1), slots=slots)
        assert definition.error(step[:, 0], out[:, t]) < 1e-4
        folds += (np.asarray(cache.cursor.folded) > before)[1:]
        cache = commit(cache, one, slots=slots)
    assert folds.tolist() == [39, 2, 2, 1, 0]
    assert np.asarray(cache.cursor.folded).tolist() == [0, 39, 32, 32, 32, 0]
    assert definition.error(read(GDN, cache, slots), state) < 1e-4
    assert np.isnan(np.asarray(cache.pool.checkpoints[5])).all()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4, 16])
def test_a_slot_folds_exactly_when_the_new_tokens_would_exceed_its_limit(rng, limit):
    cursor = buffered.init_cursor(slots=1, limit=limit, max_pending=MAX_PENDING)
    length = folded = 0
    for _ in range(60):
        time = int(rng.integers(1, MAX_PENDING + 1))
        new = int(rng.integers(0, time + 1))
        step, cursor = buffered.begin(cursor, ints(1), ints(new), time)
        folds = new > 0 and length > 0 and length + new > limit
        if folds:
            folded, length = folded + length, 0
        assert bool(step.folds[0]) == folds
        written = np.asarray(step.append[0])[:new]
        assert not set(written) & set(np.asarray(step.now.entries[0])[: int(step.now.live[0])]), "wrote what is read"
        accepted = int(rng.integers(0, new + 1))
        assert int(cursor.pending[1]) == new
        cursor = buffered.commit_cursor(cursor, ints(accepted), ints(1))
        length += accepted
        assert (int(cursor.folded[1]), int(cursor.length[1])) == (folded, length)


def families(*fast):
    """All of them, the others than `fast` in the slow suite or by hand: each compiles its own programs."""
    slow, by_hand = pytest.mark.slow, pytest.mark.exhaustive
    return [
        name if name in fast else pytest.param(name, marks=slow if name in ("Mamba-2", "KDA") else by_hand)
        for name in FAMILIES
    ]


@pytest.mark.parametrize("family", families("Gated DeltaNet"))
def test_tokens_at_once_store_the_same_bits_as_one_by_one(rng, family):
    spec, rows, one = FAMILIES[family], ints(1, 2, 3, 4, 5), ints(1, 1, 1, 1, 1)
    for _ in range(8):
        cache = memory([16, 16, 16, 16, KV_ONLY], jnp.bfloat16, spec)
        state = jnp.asarray(rng.standard_normal((SLOTS, *spec.state_shape)), jnp.float32)
        cache = buffered.load(cache, state, ints(9, 9, 9, 9, 9), rows)
        inputs = definition.inputs(rng, spec, SLOTS, 16)
        for t in range(int(rng.integers(0, 10))):
            _, cache = extend(spec, cache, *window(inputs, t, t + 1), slots=rows)
            cache = commit(cache, one, slots=rows)
        inputs = window(inputs, 11, 16)
        _, at_once = extend(spec, cache, *inputs, slots=rows)
        one_by_one = cache
        for t in range(5):
            _, one_by_one = extend(spec, one_by_one, *window(inputs, t, t + 1), slots=rows)
            one_by_one = commit(one_by_one, one, slots=rows)
        assert at_once.pool.updates.dtype == jnp.bfloat16
        for name in ("keys", "updates", "gates"):
            a, b = (np.asarray(getattr(c.pool, name)) for c in (at_once, one_by_one))
            assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("family", families("Gated DeltaNet"))
def test_bf16_entries_replay_to_the_state_and_are_within_an_ulp(rng, family):
    """The stored entries are the whole truth: nothing is lost between what was stored and what the memory holds."""
    spec, steps, rows = FAMILIES[family], 4096, ints(1, 2)
    cache = buffered.init(spec, slots=2, limit=16)
    inputs = definition.inputs(rng, spec, 2, steps, mean_log_decay=-0.02)
    by_time = [None if x is None else jnp.moveaxis(jnp.asarray(x), 1, 0) for x in inputs]

    @partial(jax.jit, compiler_options=MANY_STEPS)
    def decode(cache, inputs):
        def token(cache, inputs):
            position, _ = buffered.begin(cache.cursor, rows, ints(1, 1), 1)
            inputs = (None if x is None else x[:, None] for x in inputs)
            _, cache = buffered.extend(spec, cache, *inputs, slots=rows)
            pools = cache.pool.keys, cache.pool.updates
            stored = [x.reshape(-1, *x.shape[2:])[position.append[:, 0]] for x in pools]
            return buffered.commit(cache, ints(1, 1), slots=rows), stored

        return jax.lax.scan(token, cache, inputs)

    cache, (keys, updates) = decode(cache, by_time)
    keys, updates = np.asarray(keys, np.float64), np.asarray(updates, np.float64)
    _, _, values, log_decay, strength = (None if x is None else np.asarray(x, np.float64) for x in by_time)
    keys = np.repeat(keys, spec.heads // spec.key_heads, axis=2)
    decay = np.ones((steps, 1, 1, 1, 1)) if log_decay is None else np.exp(log_decay)
    decay = decay[:, :, :, None, None] if spec.decay == "head" else decay.reshape(*decay.shape[:3], 1, -1)
    state, worst = np.zeros((2, *spec.state_shape)), 0.0
    for t in range(steps):
        state, exact, size, written = state * decay[t], values[t], np.abs(values[t]), updates[t]
        if spec.delta:
            exact = strength[t][..., None] * (exact - np.einsum("nhvd,nhd->nhv", state, keys[t]))
            # Where v and what is recalled cancel, u is smaller than the fp32 rounding of either: it adds to the ulp.
            size = size + np.einsum("nhvd,nhd->nhv", np.abs(state), np.abs(keys[t]))
        else:
            written = strength[t][..., None] * written
        ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
        # The state keeps the rounding of the steps that it remembers: as random as a walk, it grows with their root.
        remembered = t + 1 if spec.decay == "none" else min(t + 1, 50)  # 50 is -1 / mean_log_decay
        rounding = np.finfo(np.float32).eps * np.sqrt(remembered)
        worst = max(worst, (np.abs(updates[t] - exact) / (ulp + rounding * size)).max())
        state = state + written[..., None] * keys[t][:, :, None]
    assert worst <= 1.0
    assert definition.error(read(spec, cache, rows), state) < 2e-5


def test_a_fold_writes_the_row_it_is_told_and_no_other(rng):
    """A checkpoint that another slot also reads is never written: `fold_to` names the row instead."""
    cache, rows, one = memory([4, 4, 16, 16, KV_ONLY]), ints(1, 2, 0, 0, 0), ints(1, 1, 0, 0, 0)
    state = jnp.asarray(rng.standard_normal((1, *GDN.state_shape)), jnp.float32)
    cache = buffered.load(cache, state, ints(7), ints(1))
    cursor = cache.cursor
    shared = dataclasses.replace(
        cursor,
        checkpoint_of=cursor.checkpoint_of.at[2].set(1),
        folded=cursor.folded.at[2].set(7),
        fold_to=cursor.fold_to.at[1].set(3),
    )
    cache = dataclasses.replace(cache, cursor=shared)
    inputs = definition.inputs(rng, GDN, SLOTS, 12)
    out, after, _ = definition.run_batch(GDN, np.repeat(state, SLOTS, 0), *inputs)
    untouched = np.asarray(cache.pool.checkpoints[1]).tobytes()
    for t in range(12):
        step, cache = extend(GDN, cache, *window(inputs, t, t + 1), slots=rows)
        assert definition.error(step[:2, 0], out[:2, t]) < 1e-4
        assert (np.asarray(step[2:]) == 0).all()
        cache = commit(cache, one, slots=rows)
    assert np.asarray(cache.cursor.checkpoint_of)[1:3].tolist() == [3, 2]
    assert np.asarray(cache.pool.checkpoints[1]).tobytes() == untouched
    assert definition.error(read(GDN, cache, ints(1, 2)), after[:2]) < 1e-4


def test_null_rows_and_blocks_are_neither_read_nor_written(rng):
    """A KV-only slot needs no checkpoint row, and blocks only as far as its entries reach."""
    cache = memory([16, 16, 16, 16, KV_ONLY])
    cursor, pool = cache.cursor, cache.pool
    cursor = dataclasses.replace(
        cursor,
        checkpoint_of=cursor.checkpoint_of.at[5].set(0),
        fold_to=cursor.fold_to.at[5].set(0),
        block_table=cursor.block_table.at[5, 2:].set(0),
    )
    nan = {"checkpoints": pool.checkpoints.at[0].set(jnp.nan)}
    nan |= {name: getattr(pool, name).at[0].set(jnp.nan) for name in ("keys", "updates", "gates")}
    cache = buffered.BufferedState(cursor, dataclasses.replace(pool, **nan))
    inputs, slots = definition.inputs(rng, GDN, SLOTS, 16), ints(1, 0, 3, 4, 5)
    out, state, _ = definition.run_batch(GDN, None, *inputs)
    out[1], state[1] = 0, 0
    for t in range(16):
        step, cache = extend(GDN, cache, *window(inputs, t, t + 1), slots=slots)
        assert definition.error(step[:, 0], out[:, t]) < 1e-4
        cache = commit(cache, ints(1, 0, 1, 1, 1), slots=slots)
    assert definition.error(read(GDN, cache, slots), state) < 1e-4
    for name in nan:
        assert np.isnan(np.asarray(getattr(cache.pool, name)[0])).all(), name


def test_slots_outside_a_call_keep_every_bit(rng):
    cache = memory([4, 4, 4, 4, KV_ONLY])
    inputs = definition.inputs(rng, GDN, SLOTS, 20)
    keep = ints(2, 2, 2, 2, 9)
    _, cache = prefill(GDN, cache, *inputs, slots=ints(1, 2, 3, 4, 5), lengths=ints(6, 5, 4, 20, 9), keep=keep)

    def bits(slot):
        blocks, row = np.asarray(cache.cursor.block_table[slot]), int(cache.cursor.checkpoint_of[slot])
        pool = cache.pool
        arrays = pool.checkpoints[row], pool.keys[blocks], pool.updates[blocks], pool.gates[blocks]
        return [np.asarray(x).tobytes() for x in arrays]

    before = bits(2), bits(5)
    for t in range(6):
        _, cache = extend(GDN, cache, *window(inputs, t, t + 1), slots=ints(1, 3, 4, 0, 0))
        cache = commit(cache, ints(1, 1, 1, 0, 0), slots=ints(1, 3, 4, 0, 0))
    assert (bits(2), bits(5)) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{}, {"states": 40, "blocks": 150}, {"state_dtype": "split8"}],
    ids=["own rows", "shared rows", "split states"],
)
def test_a_decoding_loop_copies_no_pool(sizes):
    """Asserted from the HLO: what the carried arrays change by is written where they lie."""
    spec, slots, one = RecurrenceSpec(8, 4, key_dim=32, value_dim=64), jnp.arange(1, 9), jnp.ones(8, jnp.int32)
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=32, entry_dtype=jnp.float32, **sizes))
    inputs = [jnp.asarray(x) for x in definition.inputs(np.random.default_rng(0), spec, 8, 1)]

    def run(cache, inputs):
        def step(_, carry):
            out, cache = buffered.extend(spec, carry[1], *inputs, slots=slots)
            return carry[0] + out, buffered.commit(cache, one, slots=slots)

        return jax.lax.fori_loop(0, 9, step, (jnp.zeros_like(inputs[2]), cache))

    hlo = jax.jit(run, donate_argnums=0).lower(cache, inputs).compile().as_text()
    assert written_in_loops(hlo, spec.state_shape) == []
    assert made_in_loops(hlo, cache.pool.keys.size) == []


def test_errors_name_the_argument(rng):
    cache = buffered.init(GDN, slots=2, limit=16, max_pending=4)
    inputs = definition.inputs(rng, GDN, 1, 5)
    with pytest.raises(ValueError, match=r"time \(5 tokens at once\) must be at most max_pending \(4\)"):
        buffered.extend(GDN, cache, *inputs, slots=ints(1))
    with pytest.raises(ValueError, match="time must be at least 1 token, got 0"):
        buffered.extend(GDN, cache, *window(inputs, 0, 0), slots=ints(1))
    with pytest.raises(ValueError, match=r"slots must be int32 \[1\], one number a row, got int32 \(2,\)"):
        buffered.extend(GDN, cache, *window(inputs, 0, 1), slots=ints(1, 2))
    with pytest.raises(ValueError, match=r"checkpoints of the memory must be \[..., 6, 24, 16\] for this spec, got"):
        other = dataclasses.replace(GDN, key_dim=16)
        buffered.extend(other, cache, *definition.inputs(rng, other, 1, 1), slots=ints(1))
    with pytest.raises(ValueError, match="entry_dtype must be a dtype of floating-point numbers, got int32"):
        buffered.init(GDN, slots=2, entry_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"slots must be in \[0, 2\], got 3 at row 0"):
        buffered.extend(GDN, cache, *window(inputs, 0, 1), slots=ints(3))
    twice = [jnp.concatenate([x, x, x, x]) for x in window(inputs, 0, 1)]
    with pytest.raises(ValueError, match="slots must have each slot once, got slot 2 in 2 rows"):
        buffered.extend(GDN, cache, *twice, slots=ints(2, 0, 2, 0))
    with pytest.raises(ValueError, match="slots must have each slot once, got slot 1 in 2 rows"):
        buffered.commit(cache, ints(0, 0), slots=ints(1, 1))
    with pytest.raises(ValueError, match=r"accepted must be in \[0, 0\], got 1"):
        buffered.commit(cache, ints(1), slots=ints(1))
    with pytest.raises(ValueError, match=r"keep must be in \[0, 20\]"):
        buffered.prefill(GDN, cache, *inputs, slots=ints(1), keep=21)
    with pytest.raises(ValueError, match=r"limit must be at least 1, got 0"):
        buffered.init(GDN, slots=2, limit=0)
    with pytest.raises(ValueError, match=r"limit must be one number or int32 \[2\]"):
        buffered.init(GDN, slots=2, limit=np.array([1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"state must have shape \(1, 6, 24, 32\)"):
        buffered.load(cache, jnp.zeros((1, 6, 32, 24)), ints(3), ints(1))


@pytest.mark.parametrize("state", [np.zeros((1, 6, 32, 24), np.float32), np.zeros((1, 6, 24, 32), np.int32), [0.0]])
def test_a_state_of_another_shape_or_dtype_is_refused(rng, state):
    """Also one with as many numbers."""
    inputs, cache = definition.inputs(rng, GDN, 1, 3), buffered.init(GDN, slots=2)
    message = r"state must (have shape \(1, 6, 24, 32\), got|be an array of floating-point numbers, got (int32|list))"
    for form in (recurrent, chunked):
        with pytest.raises(ValueError, match=message):
            form(GDN, state, *inputs)
    with pytest.raises(ValueError, match=message):
        buffered.load(cache, state, ints(3), ints(1))


SIZES = {"slots": 2, "limit": 16, "max_pending": 4, "block_size": 8, "states": 3, "blocks": 9}


@pytest.mark.parametrize("wrong", [1.5, True, "16", 2**31, 10**30, 0, -1, np.float32(2)])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers_within_bounds(name, wrong):
    """Refused before anything as large is made: a limit of 10**9 took 16 GB."""
    number = {0: "at least 1", -1: "at least 1", 2**31: "at most", 10**30: "at most"}
    expected = "a whole number, got" if isinstance(wrong, bool) else number.get(wrong, "a whole number, got")
    with pytest.raises(ValueError, match=f"{name} must be {expected}"):
        buffered.init(GDN, **(SIZES | {name: wrong}))


def test_a_ring_is_bounded():
    with pytest.raises(ValueError, match="limit must be at most 1048576, got 1000000000"):
        buffered.init(GDN, slots=1, limit=10**9)
    with pytest.raises(ValueError, match=r"slots \(10000\) with rings of 1048584 entries must be fewer: int32 numbers"):
        buffered.init_cursor(slots=10_000, limit=2**20, max_pending=4)
    with pytest.raises(ValueError, match=r"limit must be whole numbers, got float64 \(2,\)"):
        buffered.init(GDN, slots=2, limit=np.array([1.0, 16.0]))


def test_a_limit_that_the_ring_was_not_made_for_folds_before_entries_are_overwritten():
    """Callers may write `limit`; the threshold is then what the ring has room for."""
    cursor = buffered.init_cursor(slots=1, limit=4, max_pending=MAX_PENDING)
    cursor = dataclasses.replace(cursor, limit=jnp.full_like(cursor.limit, 10**9))
    for _ in range(5):
        step, cursor = buffered.begin(cursor, ints(1), ints(5), 5)
        written = set(np.asarray(step.append[0]))
        assert len(written) == 5 and not written & set(np.asarray(step.before.entries[0])[: int(step.before.live[0])])
        cursor = buffered.commit_cursor(cursor, ints(5), ints(1))
    assert (int(cursor.folded[1]), int(cursor.length[1])) == (20, 5)


def test_integers_are_integers(rng):
    cache, inputs = buffered.init(GDN, slots=2), definition.inputs(rng, GDN, 1, 3)
    calls = {
        "slots": lambda x: buffered.extend(GDN, cache, *inputs, slots=x),
        "lengths": lambda x: buffered.extend(GDN, cache, *inputs, slots=ints(1), lengths=x),
        "accepted": lambda x: buffered.commit(cache, x, slots=ints(1)),
        "keep": lambda x: buffered.prefill(GDN, cache, *inputs, slots=ints(1), keep=x),
        "tokens": lambda x: buffered.load(cache, jnp.zeros((1, *GDN.state_shape)), x, ints(1)),
        "lengths ": lambda x: chunked(GDN, None, *inputs, lengths=x),
    }
    for name, call in calls.items():
        for wrong in (np.ones(1, np.float32), np.ones(1, bool)):
            with pytest.raises(ValueError, match=f"{name.strip()} must be int32 .*got (float32|bool)"):
                call(wrong)
    for wrong in (1.5, True):
        with pytest.raises(ValueError, match=r"keep must be int32 \[1\], one number a row"):
            calls["keep"](wrong)
        with pytest.raises(ValueError, match=f"chunk_size must be a whole number, got {wrong}"):
            buffered.prefill(GDN, cache, *inputs, slots=ints(1), chunk_size=wrong)
        with pytest.raises(ValueError, match=f"chunk_size must be a whole number, got {wrong}"):
            chunked(GDN, None, *inputs, chunk_size=wrong)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        chunked(GDN, None, *inputs, chunk_size=0)
    with pytest.raises(ValueError, match=r"lengths must be in \[0, 3\], got 4 at row 0"):
        buffered.prefill(GDN, cache, *inputs, slots=ints(1), lengths=ints(4))
    with pytest.raises(ValueError, match=r"heads must be a whole number, got 4\.0"):
        dataclasses.replace(GDN, heads=4.0)


def test_what_is_not_compiled_refuses_repeated_slots(rng):
    cache, inputs = buffered.init(GDN, slots=3, states=3, blocks=9), definition.inputs(rng, GDN, 3, 2)
    twice, state = ints(2, 1, 2), jnp.zeros((3, *GDN.state_shape))
    calls = [
        lambda: buffered.prefill(GDN, cache, *inputs, slots=twice),
        lambda: buffered.fold(GDN, cache, slots=twice),
        lambda: buffered.load(cache, state, ints(1, 1, 1), twice),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="slots must have each slot once, got slot 2 in 2 rows"):
            call()
    with pytest.raises(ValueError, match="target must have each slot once, got slot 2 in 2 rows"):
        buffered.fork(cache, ints(1, 3, 3), twice)
    with pytest.raises(ValueError, match=r"slots must be in \[0, 3\], got -1 at row 0"):
        buffered.reset(cache, ints(-1))
