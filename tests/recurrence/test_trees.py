"""Trees of pending tokens in the recurrence and in the convolution's ring: each equals its branches run alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.tree import ancestors, path_first, permute
from jaxbuf.recurrence import buffered
from jaxbuf.recurrence.convolution import extend_ring, init_ring, init_ring_order
from tests.recurrence import definition
from tests.recurrence.families import inputs as inputs_of
from tests.recurrence.test_convolution import convolve
from tests.recurrence.twin import ROWS, SHARED, TIME, Twin, commit, extend, path_to, random_parents, read

GDN, SLOTS = "Gated DeltaNet", np.arange(1, ROWS + 1, dtype=np.int32)
CHAIN = np.broadcast_to(np.arange(-1, TIME - 1, dtype=np.int32), (ROWS, TIME))


@pytest.fixture
def twin(rng):
    """Slots in every form: recurrent, buffered, KV-only, and one that is empty."""
    twin = Twin(GDN, rng, **SHARED)
    return twin.prefill(SLOTS, [7, 9, 12, 0], [0, 4, 12, 0])


def stored(cache, step):
    """The entries that a launch wrote, in its tokens' order."""
    block, offset = np.divmod(np.asarray(step.append), cache.pool.keys.shape[1])
    return [np.asarray(getattr(cache.pool, name))[block, offset] for name in ("keys", "updates", "gates")]


def test_a_chain_of_parents_is_no_tree(twin, rng):
    """The same bits as without parents, whatever is committed of it."""
    inputs, full = inputs_of(rng, GDN, ROWS, TIME), np.full(ROWS, TIME, np.int32)
    step, _ = jax.jit(buffered.begin, static_argnums=3)(twin.cache.cursor, SLOTS, full, TIME)
    plain, straight = extend(twin.spec, twin.cache, *inputs, slots=SLOTS, lengths=full, parents=None)
    out, tree = extend(twin.spec, twin.cache, *inputs, slots=SLOTS, lengths=full, parents=CHAIN)
    chex.assert_trees_all_equal((out, stored(tree, step)), (plain, stored(straight, step)))
    accepted = rng.integers(0, TIME + 1, ROWS).astype(np.int32)
    chex.assert_trees_all_equal(
        commit(tree, accepted, slots=SLOTS, path=CHAIN + 1).cursor,
        commit(straight, accepted, slots=SLOTS, path=None).cursor,
    )


def test_zero_drafts_is_a_plain_step(twin, rng):
    inputs, one = inputs_of(rng, GDN, ROWS, TIME), np.ones(ROWS, np.int32)
    out, cache = extend(twin.spec, twin.cache, *inputs, slots=SLOTS, lengths=one, parents=random_parents(rng))
    first = [None if x is None else x[:, :1] for x in inputs]
    plain, expected = extend(twin.spec, twin.cache, *first, slots=SLOTS, lengths=one, parents=None)
    assert definition.error(out[:, :1], plain) < 1e-6
    np.testing.assert_array_equal(out[:, 1:], 0.0)
    cache, expected = (commit(c, one, slots=SLOTS, path=None) for c in (cache, expected))
    states = read(twin.spec, expected, np.arange(7, dtype=np.int32))
    assert definition.error(read(twin.spec, cache, np.arange(7, dtype=np.int32)), states) < 1e-6


def test_a_rejected_branch_leaves_no_trace(twin, rng):
    """After every path of one tree, the committed state is that path's, whatever the other branches hold."""
    inputs, full = inputs_of(rng, GDN, ROWS, TIME), np.full(ROWS, TIME, np.int32)
    parents = random_parents(rng)
    others = [np.array(x) for x in inputs]
    paths = [path_to(parents[row], TIME - 1) for row in range(ROWS)]
    for row, path in enumerate(paths):
        for x in others:
            off_path = np.setdiff1d(np.arange(TIME), path)
            x[row, off_path] = x[row, rng.permutation(off_path)] * np.float32(0.5)
    accepted = np.array([len(path) for path in paths], np.int32)
    padded = np.array([path + [0] * (TIME - len(path)) for path in paths], np.int32)
    found = []
    for tokens in (inputs, others):
        out, cache = extend(twin.spec, twin.cache, *tokens, slots=SLOTS, lengths=full, parents=parents)
        cache = commit(cache, accepted, slots=SLOTS, path=padded)
        found.append((np.asarray(out[:, -1]), np.asarray(read(twin.spec, cache, np.arange(7, dtype=np.int32)))))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_ancestors_are_the_path_to_the_root(rng):
    for time in (1, 7, 16):
        parents = random_parents(rng, 3, time)
        reach = np.asarray(jax.jit(ancestors)(parents))
        for row in range(3):
            for node in range(time):
                assert np.flatnonzero(reach[row, node]).tolist() == path_to(parents[row], node)


def test_the_convolution_follows_each_branch(rng):
    """Random trees and accepted paths: always the convolution of what each slot committed and of the branch."""
    width, channels, pending = 4, 5, TIME
    weight = rng.standard_normal((channels, width)).astype(np.float32)
    ring = init_ring(slots=ROWS, channels=channels, width=width, max_pending=pending, dtype=jnp.float32)
    ring = ring.at[:].set(jnp.nan)
    order = init_ring_order(slots=ROWS, width=width, max_pending=pending)
    history = [np.zeros((0, channels), np.float32) for _ in SLOTS]
    launch, move = jax.jit(extend_ring), jax.jit(permute)
    for _ in range(20):
        x, parents = rng.standard_normal((ROWS, TIME, channels)).astype(np.float32), random_parents(rng)
        lengths = rng.integers(0, TIME + 1, ROWS).astype(np.int32)
        start = np.array([len(rows) for rows in history], np.int32)
        where = {"slots": SLOTS, "start": start, "lengths": lengths, "order": order, "parents": parents}
        y, ring = launch(ring, weight, x, **where)
        paths = np.zeros((ROWS, TIME), np.int32)
        accepted = np.zeros(ROWS, np.int32)
        for row in range(ROWS):
            for node in range(lengths[row]):
                path = path_to(parents[row], node)
                expected = convolve(np.concatenate([history[row], x[row, path]]), weight)[-1]
                np.testing.assert_allclose(y[row, node], expected, atol=1e-5)
            np.testing.assert_array_equal(y[row, lengths[row] :], 0.0)
            if lengths[row]:
                path = path_to(parents[row], rng.integers(0, lengths[row]))
                accepted[row] = rng.integers(0, len(path) + 1)
                paths[row, : len(path)] = path
                history[row] = np.concatenate([history[row], x[row, path[: accepted[row]]]])
        order = move(order, SLOTS, start, path_first(jnp.asarray(paths), jnp.asarray(accepted), pending))


def test_errors_name_the_node():
    slots, three = jnp.array([1, 2]), jnp.array([3, 3])
    cursor = buffered.init_cursor(slots=2, max_pending=TIME)

    def launch(parents):
        return buffered.begin(cursor, slots, three, 3, jnp.asarray(parents))[1]

    with pytest.raises(ValueError, match=r"parents must be int32 \[2, 3\], got int32 \(1, 3\)"):
        launch(np.array([[-1, 0, 1]], np.int32))
    with pytest.raises(ValueError, match=r"parents\[:, 1\] must be in \[-1, 0\], got 1 at row 1"):
        launch(np.array([[-1, 0, 1], [-1, 1, 0]], np.int32))
    after = launch(np.array([[-1, 0, 1], [-1, 0, 0]], np.int32))
    two = jnp.array([2, 2])
    with pytest.raises(ValueError, match=r"path must rise within \[0, 2\], got \[1, 0\] at row 1"):
        buffered.commit_cursor(after, two, slots, jnp.array([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match=r"path must rise within \[0, 2\], got \[0, 3\] at row 0"):
        buffered.commit_cursor(after, two, slots, jnp.array([[0, 3], [0, 1]]))
    with pytest.raises(ValueError, match=r"accepted must be at most path's width \(1\), got 2 at row 0"):
        buffered.commit_cursor(after, two, slots, jnp.array([[0], [0]]))
    with pytest.raises(ValueError, match=r"path must be int32 \[2, at most 6\], got int32 \(2, 7\)"):
        buffered.commit_cursor(after, two, slots, jnp.zeros((2, 7), jnp.int32))
