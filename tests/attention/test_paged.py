"""Paged attention against a float64 loop over queries: pages in any order, with NaN wherever nothing live lies."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxbuf.attention.paged import PagedKV, append, attend, init_kv, init_table
from tests.attention.definition import attention

ROWS, HEADS, KV_HEADS, HEAD_DIM = 5, 6, 2, 16
PAGE_SIZE, MAX_PAGES, TIME = 16, 20, 310  # 320 tokens: two and a half blocks of keys
PAGES = 1 + ROWS * MAX_PAGES + 7  # some that nobody owns
PREFILL, PENDING = 200, 5  # the two launches that are compiled; prefill has two blocks of queries


@jax.jit
def run_step(kv, table, q, k, v, slots, start, lengths):
    kv = append(kv, table, k, v, slots=slots, start=start, lengths=lengths)
    return attend(q, kv, table, slots=slots, start=start, lengths=lengths), kv


@pytest.fixture
def inputs(rng):
    def draw(heads):
        return rng.standard_normal((ROWS, TIME, heads, HEAD_DIM)).astype(np.float32)

    return 2.0 * draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


@pytest.fixture
def table(rng):
    """Each slot's pages are anywhere in the pool."""
    owned = rng.permutation(np.arange(1, PAGES, dtype=np.int32))[: ROWS * MAX_PAGES]
    return np.concatenate([np.zeros((1, MAX_PAGES), np.int32), owned.reshape(ROWS, MAX_PAGES)])


@pytest.fixture
def slots(rng):
    return rng.permutation(np.arange(1, ROWS + 1, dtype=np.int32))


def nan_pool():
    """Never zero-filled: what was not written is NaN, in the null page too."""
    return PagedKV(*(np.full((PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.nan, np.float32) for _ in range(2)))


def launch(inputs, start, time):
    """The inputs of positions start .. start + time - 1 of each row (the last one repeated past the end)."""
    offsets = np.minimum(start[:, None] + np.arange(time), inputs[0].shape[1] - 1)[..., None, None]
    return [np.take_along_axis(x, offsets, axis=1) for x in inputs]


def int32(*values):
    return np.array(values, np.int32)


def flat(table, slot, positions):
    """Where positions of a slot lie in the pool, seen as a list of tokens."""
    return table[slot, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


def written(kv, table, slots, k, v, start, lengths):
    """What `append` should leave, token by token."""
    keys, values = (np.array(x).reshape(-1, KV_HEADS, HEAD_DIM) for x in (kv.keys, kv.values))
    for row, slot in enumerate(slots):
        for time in range(lengths[row]):
            place = flat(table, slot, start[row] + time)
            keys[place], values[place] = k[row, time], v[row, time]
    return PagedKV(keys.reshape(kv.keys.shape), values.reshape(kv.values.shape))


def test_random_schedules(inputs, table, slots, rng):
    """Prefill and pending tokens, accepted in part; each step, whatever is not committed is NaN before it."""
    expected = np.stack([attention(*row) for row in zip(*inputs, strict=True)])
    position, kv = np.zeros(ROWS, np.int32), nan_pool()
    for time in [PREFILL, 5, 5, 5, PREFILL, 5, 5, 5, PREFILL, 5, 5]:
        committed = nan_pool()
        for row, slot in enumerate(slots):
            live = flat(table, slot, np.arange(position[row]))
            for old, new in ((kv.keys, committed.keys), (kv.values, committed.values)):
                tokens = np.asarray(old).reshape(-1, KV_HEADS, HEAD_DIM)
                new.reshape(-1, KV_HEADS, HEAD_DIM)[live] = tokens[live]
        lengths = np.minimum(rng.integers(0, time + 1, ROWS), TIME - position).astype(np.int32)
        q, k, v = launch(inputs, position, time)
        dead = np.arange(time)[None] >= lengths[:, None]
        k[dead] = v[dead] = np.nan
        out, kv = run_step(committed, table, q, k, v, slots, position, lengths)
        chex.assert_trees_all_equal(kv, written(committed, table, slots, k, v, position, lengths))
        assert np.isfinite(out).all()
        for row in range(ROWS):
            real = slice(position[row], position[row] + lengths[row])
            np.testing.assert_allclose(out[row, : lengths[row]], expected[row, real], atol=1e-5)
        position += rng.integers(0, lengths + 1, dtype=np.int32)


@pytest.mark.parametrize("length", [15, 16, 17, 127, 128, 129, 200])
def test_lengths_around_pages_and_blocks(inputs, table, slots, length):
    expected = np.stack([attention(*(x[:PREFILL] for x in row)) for row in zip(*inputs, strict=True)])
    lengths = int32(length, 1, length - 1, 0, length)
    first, then = launch(inputs, np.zeros(ROWS, np.int32), PREFILL), launch(inputs, lengths, PENDING)
    out, kv = run_step(nan_pool(), table, *first, slots, np.zeros(ROWS, np.int32), lengths)
    for row in range(ROWS):
        np.testing.assert_allclose(out[row, : lengths[row]], expected[row, : lengths[row]], atol=1e-5)
    out, _ = run_step(kv, table, *then, slots, lengths, int32(1, 1, 1, 1, 1))
    for row in range(ROWS):
        last = attention(*(x[row, : lengths[row] + 1] for x in inputs))[-1]
        np.testing.assert_allclose(out[row, 0], last, atol=1e-5)


def test_one_by_one_gives_what_prefill_gives(inputs, table, slots):
    zero, many = np.zeros(ROWS, np.int32), np.full(ROWS, 35, np.int32)
    together, filled = run_step(nan_pool(), table, *launch(inputs, zero, PREFILL), slots, zero, many)
    kv = nan_pool()
    for position in range(35):
        start = zero + np.int32(position)
        out, kv = run_step(kv, table, *launch(inputs, start, PENDING), slots, start, zero + np.int32(1))
        np.testing.assert_allclose(out[:, 0], together[:, position], atol=1e-5)
    chex.assert_trees_all_equal(kv, filled)


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_rejected_tokens_leave_no_trace(inputs, table, slots, rng, value):
    """After a rollback, the same tokens give the same bits as without the rejected ones, whatever these were."""
    zero, start = np.zeros(ROWS, np.int32), rng.integers(1, PREFILL + 1, ROWS, dtype=np.int32)
    _, kv = run_step(nan_pool(), table, *launch(inputs, zero, PREFILL), slots, zero, start)
    real, drafts = launch(inputs, start, PENDING), launch([value * x[:, ::-1] for x in inputs], start, PENDING)
    lengths = np.full(ROWS, 3, np.int32)
    expected, _ = run_step(kv, table, *real, slots, start, lengths)
    _, kv = run_step(kv, table, *drafts, slots, start, np.full(ROWS, PENDING, np.int32))
    out, _ = run_step(kv, table, *real, slots, start, lengths)
    np.testing.assert_array_equal(out[:, :3], expected[:, :3])


@pytest.mark.parametrize("time", [PENDING, PREFILL])
def test_no_row_depends_on_the_others(inputs, table, slots, rng, time):
    """Bit for bit: other lengths, other contents, null slots beside it."""
    zero, start = np.zeros(ROWS, np.int32), int32(40, 100, 7, 60, 99)
    _, kv = run_step(nan_pool(), table, *launch(inputs, zero, PREFILL), slots, zero, start)
    lengths = np.full(ROWS, time, np.int32)
    q, k, v = launch(inputs, start, time)
    alone, _ = run_step(kv, table, q, k, v, np.where(np.arange(ROWS) == 2, slots, 0), start, lengths)
    for _ in range(3):
        q, k, v = (np.where((np.arange(ROWS) == 2)[:, None, None, None], x, rng.permutation(x)) for x in (q, k, v))
        others = rng.integers(0, time + 1, ROWS, dtype=np.int32)
        others[2] = time
        out, _ = run_step(kv, table, q, k, v, slots, np.where(np.arange(ROWS) == 2, start, 2 * start), others)
        np.testing.assert_array_equal(out[2], alone[2])
        assert np.abs(out[2]).max() > 0


def test_slots_may_share_pages(inputs, table):
    """The second slot reads the first one's first pages: a common prefix of whole pages."""
    table[2, :3] = table[1, :3]
    shared = [np.stack([x[0], np.concatenate([x[0, :48], x[1, 48:]]), *x[2:]]) for x in inputs]
    slots, zero = int32(1, 2, 0, 0, 0), np.zeros(ROWS, np.int32)
    _, kv = run_step(nan_pool(), table, *launch(shared, zero, PREFILL), slots, zero, int32(48, 0, 0, 0, 0))
    start, lengths = np.full(ROWS, 48, np.int32), np.full(ROWS, PENDING, np.int32)
    out, _ = run_step(kv, table, *launch(shared, start, PENDING), slots, start, lengths)
    for row in range(2):
        expected = attention(*(x[row, : 48 + PENDING] for x in shared))[48:]
        np.testing.assert_allclose(out[row], expected, atol=1e-5)


def test_null_slot_reads_zeros_and_writes_nothing(inputs, table):
    table[0] = table[4]  # whatever its row says
    slots, zero = int32(0, 2, 0, 3, 0), np.zeros(ROWS, np.int32)
    q, k, v = launch(inputs, zero, PENDING)
    out, kv = run_step(nan_pool(), table, q, k, v, slots, zero, np.full(ROWS, PENDING, np.int32))
    np.testing.assert_array_equal(out[slots == 0], 0.0)
    assert (np.abs(out[slots > 0]).max(axis=(1, 2, 3)) > 0).all()
    chex.assert_trees_all_equal(kv, written(nan_pool(), table, slots, k, v, zero, np.where(slots > 0, PENDING, 0)))


def test_what_has_no_page_is_dropped(inputs, table, slots):
    """Past the end of a table, and in a slot that owns fewer pages than the table is wide."""
    table[slots[1], 2:] = 0
    capacity = np.full(ROWS, MAX_PAGES * PAGE_SIZE, np.int32)
    capacity[1] = 2 * PAGE_SIZE
    start = capacity - np.int32(2)
    longer = [np.concatenate([x, x[:, :20]], axis=1) for x in inputs]  # as many tokens as there is room for, and more
    kv = written(nan_pool(), table, slots, longer[1], longer[2], np.zeros(ROWS, np.int32), start)
    q, k, v = launch(longer, start, PENDING)
    out, after = run_step(kv, table, q, k, v, slots, start, np.full(ROWS, PENDING, np.int32))
    chex.assert_trees_all_equal(after, written(kv, table, slots, k, v, start, np.full(ROWS, 2)))
    assert np.isfinite(out).all()
    for row in range(ROWS):
        expected = attention(*(x[row, : capacity[row]] for x in longer))[-2:]
        np.testing.assert_allclose(out[row, :2], expected, atol=1e-5)


def test_half_precision_is_summed_in_float32(inputs, table, slots):
    q, k, v = (jnp.asarray(x[:, :PREFILL], jnp.bfloat16) for x in inputs)
    expected = np.stack([attention(*row) for row in zip(q, k, v, strict=True)])
    kv = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), nan_pool())
    out, _ = run_step(kv, table, q, k, v, slots, np.zeros(ROWS, np.int32), np.full(ROWS, PREFILL, np.int32))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03)


def largest_made(jaxpr):
    """The size of the largest array that any equation gives, inner ones included."""
    made = [out.aval.size for equation in jaxpr.eqns for out in equation.outvars]
    inner = [largest_made(each) for equation in jaxpr.eqns for each in jaxprs_in_params(equation.params)]
    return max(made + inner, default=0)


def test_nothing_as_large_as_the_cache_is_made():
    """The loop closes over the pools, and the memory of a prefill is linear in its time, whatever the capacity is."""
    table = init_table(slots=ROWS, capacity=2**14)
    pool = jax.ShapeDtypeStruct((1 + ROWS * table.shape[1], PAGE_SIZE, KV_HEADS, HEAD_DIM), jnp.float32)
    row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    @jax.make_jaxpr
    def program(q, kv, slots, start):
        return attend(q, kv, table, slots=slots, start=start)

    def largest(time):
        q = jax.ShapeDtypeStruct((ROWS, time, HEADS, HEAD_DIM), jnp.float32)
        return largest_made(program(q, PagedKV(pool, pool), row, row).jaxpr)

    assert largest(1) == ROWS * 128 * KV_HEADS * HEAD_DIM, "one block of keys"
    assert largest(1024) == ROWS * 1024 * HEADS * HEAD_DIM, "the output"
    assert largest(4096) == ROWS * 4096 * HEADS * HEAD_DIM < pool.size


def test_tables_own_their_pages():
    table = np.asarray(init_table(slots=3, capacity=33))
    np.testing.assert_array_equal(table, [[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]])


@pytest.mark.parametrize("name", ["slots", "capacity", "page_size"])
def test_sizes_that_make_no_table(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        init_table(**({"slots": 1, "capacity": 1, "page_size": 1} | {name: 0}))


@pytest.mark.parametrize("name", ["pages", "kv_heads", "head_dim", "page_size"])
def test_sizes_that_make_no_pool(name):
    sizes = {"pages": 1, "kv_heads": 1, "head_dim": 1, "page_size": 1}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        init_kv(**(sizes | {name: 0}), dtype=jnp.float32)


def test_what_does_not_fit_is_named(inputs, table, slots):
    q, k, v = launch(inputs, np.zeros(ROWS, np.int32), PENDING)
    kv, where = nan_pool(), {"slots": slots, "start": slots, "lengths": slots}
    with pytest.raises(ValueError, match=r"heads \(5\) must be a multiple of kv_heads \(2\)"):
        attend(q[:, :, :5], kv, table, **where)
    with pytest.raises(ValueError, match=r"start must have shape \(5,\), one a row, got \(4,\)"):
        attend(q, kv, table, **(where | {"start": slots[:4]}))
    with pytest.raises(ValueError, match=r"slots must have shape \(4,\), one a row, got \(5,\)"):
        append(kv, table, k[:4], v[:4], **where)
    with pytest.raises(ValueError, match=r"\(kv_heads, head_dim\) must be the pool's \(2, 16\), got \(1, 16\)"):
        append(kv, table, k[:, :, :1], v[:, :, :1], **where)
