"""Forked slots share what they do not write, diverge, and give everything back; running out comes before any write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.recurrence import buffered
from tests.recurrence.families import inputs as inputs_of
from tests.recurrence.twin import PROMPT, ROWS, SHARED, SLOTS, TIME, Twin, extend, fork, prefill, reset

GDN, FIRST = "Gated DeltaNet", np.arange(1, ROWS + 1, dtype=np.int32)
EACH = np.arange(1, SLOTS + 1, dtype=np.int32)
FORM = {"recurrent": 1, "buffered": 16, "KV-only": 40}


def only(length):
    """Row 0 has that many tokens, the others none."""
    return np.array([length, 0, 0, 0], np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORM)
def test_forks_share_and_diverge_without_touching_each_other(rng, form):
    """The twin asserts after every call that no other slot changed a bit and that nothing shared was written."""
    twin = Twin(GDN, rng, limits=[FORM[form]] * 5 + [40], **SHARED)
    keep = {"recurrent": 1, "buffered": 10, "KV-only": 12}[form]
    twin.prefill(FIRST, only(12), only(keep))
    twin.fork([1, 1, 1], [2, 3, 4])
    sharing, cursor = twin.cache.cursor.sharing, twin.cache.cursor
    full = keep // 8  # blocks of 8 entries: the whole ones are shared, the started one is everybody's own
    assert np.sort(np.asarray(sharing.blocks.owners))[-3:].tolist() == [1, 1, 4 if full else 1]
    assert int(sharing.blocks.left) == 20 - full - 4
    if form == "KV-only":
        assert int(sharing.states.left) == 5 and not cursor.checkpoint_of.any(), "nobody needs a checkpoint"
    else:
        assert int(sharing.states.left) == 4 and sharing.states.owners[cursor.checkpoint_of[1]] == 4
    for _ in range(4 if form == "KV-only" else 12):
        twin.extend(FIRST, np.full(ROWS, TIME))
    sharing, cursor = twin.cache.cursor.sharing, twin.cache.cursor
    if form == "KV-only":
        assert int(sharing.blocks.owners.max()) == 4, "nothing was folded, so the full block is everybody's still"
    else:
        assert np.unique(np.asarray(cursor.checkpoint_of)[1:5]).size == 4
        assert int(sharing.blocks.owners.max()) == 1
    twin.reset(EACH)
    assert int(twin.cache.cursor.sharing.states.left) == 5 and int(twin.cache.cursor.sharing.blocks.left) == 20


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"blocks": 60}, {"states": 60}])
def test_what_is_not_given_is_enough_for_all_slots_at_once(given):
    """Slots in pairs, each pair with one checkpoint and full blocks of both, that all fold and write in one launch."""
    cursor = buffered.init_cursor(slots=6, limit=12, max_pending=4, block_size=4, **given)
    sources, targets, everybody = jnp.array([1, 3, 5]), jnp.array([2, 4, 6]), jnp.arange(1, 7, dtype=jnp.int32)
    _, cursor = buffered.begin_prefill(cursor, sources, jnp.full(3, 20), 12)
    _, cursor = buffered.fork_cursor(cursor, sources, targets)
    for _ in range(12):
        _, cursor = buffered.begin(cursor, everybody, jnp.full(6, 4), 4)
        cursor = buffered.commit_cursor(cursor, jnp.full(6, 3), everybody)
    assert np.unique(np.asarray(cursor.checkpoint_of)[1:]).size == 6


def test_a_ring_that_wraps_into_a_shared_block_takes_another(rng):
    """A prompt that is kept comes to lie where the dead entries are that the fork still reads."""
    twin = Twin(GDN, rng, limits=[40] * SLOTS, **SHARED)
    twin.prefill(FIRST, only(PROMPT), only(PROMPT))
    twin.fork([1], [2])
    twin.prefill(FIRST, only(PROMPT), only(PROMPT))
    first, second = np.asarray(twin.cache.cursor.block_table)[1:3]
    assert first[0] != second[0] > 0
    twin.extend(FIRST, np.full(ROWS, TIME))


def test_beams_trade_places(rng):
    """Every beam continues another one, all read before any is written; one of them dies."""
    twin = Twin(GDN, rng, **SHARED)
    twin.prefill(FIRST, [12, 9, 12, 3], [3, 9, 12, 0])
    for source in ([2, 1, 1, 3], [4, 3, 2, 1]):
        twin.fork(source, FIRST)
        twin.extend(FIRST, np.full(ROWS, TIME))


def test_a_fork_takes_the_limit_and_drops_what_was_pending(rng):
    twin = Twin(GDN, rng, **SHARED)
    inputs = inputs_of(rng, GDN, ROWS, TIME)
    _, cache = extend(twin.spec, twin.cache, *inputs, slots=FIRST, lengths=np.full(ROWS, TIME, np.int32))
    cache = fork(cache, np.array([5, 0, 1], np.int32), np.array([1, 2, 3], np.int32))
    assert np.asarray(cache.cursor.pending).tolist() == [0, 0, TIME, 0, TIME, 0, 0], "a row with slot 0 is left out"
    assert np.asarray(cache.cursor.limit)[[1, 2, 3]].tolist() == [40, 5, 1]


@pytest.mark.parametrize("empty", [reset, buffered.reset], ids=["compiled", "not compiled"])
def test_a_slot_that_is_emptied_twice_takes_nothing_from_those_that_share_its_row(rng, empty):
    """The row went to the next slot that needed one, and slot 2 read that slot's state."""
    twin = Twin(GDN, rng, **SHARED)
    twin.prefill(FIRST, only(12), only(0))
    twin.fork([1], [2])
    twin.cache, twin.states[1], twin.tokens[1] = empty(twin.cache, np.array([1, 1], np.int32)), 0, 0
    twin.prefill(np.array([3, 0, 0, 0], np.int32), only(12), only(0))


def left(cache, **counts):
    """The cache as if only so many rows were free."""
    pools = cache.cursor.sharing
    few = {name: dataclasses.replace(getattr(pools, name), left=jnp.int32(count)) for name, count in counts.items()}
    return dataclasses.replace(
        cache, cursor=dataclasses.replace(cache.cursor, sharing=dataclasses.replace(pools, **few))
    )


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


MESSAGE = r"of blocks ran out: 1 more needed, it has 20; nothing was written there\. Make it with blocks=21 or more"


@pytest.mark.slow  # one operation at a time
def test_outside_jit_the_launch_itself_raises(rng):
    cursor, six = left(Twin(GDN, rng, **SHARED).cache, blocks=3).cursor, jnp.full(ROWS, TIME)
    with pytest.raises(PoolExhausted, match=MESSAGE):
        buffered.begin(cursor, jnp.asarray(FIRST), six, TIME)
    with pytest.raises(PoolExhausted, match=MESSAGE):
        buffered.begin_prefill(cursor, jnp.asarray(FIRST), six, six)


def test_what_runs_out_is_said_before_anything_is_written(rng):
    twin = Twin(GDN, rng, **SHARED)
    inputs, full = inputs_of(rng, GDN, ROWS, TIME), np.full(ROWS, TIME, np.int32)
    cache = left(twin.cache, blocks=3)
    out, after = extend(twin.spec, cache, *inputs, slots=FIRST, lengths=full, parents=None)
    three, first = extend(twin.spec, cache, *inputs, slots=FIRST, lengths=full * (FIRST < 4), parents=None)
    np.testing.assert_array_equal(out, three)
    assert not np.asarray(out)[3].any() and np.asarray(out)[2].any()
    assert bits(after.pool) == bits(first.pool), "the fourth row has nothing written"
    assert after.cursor.pending.tolist() == [0, TIME, TIME, TIME, 0, 0, 0]
    with pytest.raises(PoolExhausted, match=MESSAGE):
        buffered.raise_exhausted(after)
    later = extend(twin.spec, after, *inputs, slots=FIRST, lengths=full, parents=None)[1]
    assert later.cursor.pending.tolist() == after.cursor.pending.tolist(), "it rests until something is given back"
    later = reset(later, np.array([1], np.int32))
    buffered.raise_exhausted(later)
    out, served = extend(twin.spec, later, *inputs, slots=FIRST, lengths=full * (FIRST > 1), parents=None)
    assert np.abs(out[3, 0]).max() > 0 and served.cursor.pending.tolist() == [0, 0, TIME, TIME, TIME, 0, 0]


def test_checkpoint_rows_and_forks_run_out_as_blocks_do(rng):
    twin = Twin(GDN, rng, **SHARED)
    twin.prefill(FIRST, [5, 5, 0, 0], [0, 3, 0, 0])
    inputs = inputs_of(rng, GDN, ROWS, PROMPT)
    none = left(twin.cache, states=0, blocks=0)
    third = np.array([3, 0, 0, 0], np.int32)
    state, one = np.zeros((ROWS, *twin.spec.state_shape), np.float32), np.ones(ROWS, np.int32)
    calls = {
        "states": lambda: prefill(twin.spec, none, *inputs, slots=third, lengths=one, keep=0 * one)[1],
        "states ": lambda: jax.jit(buffered.load)(none, state, one, third),
        "blocks": lambda: fork(none, 2 * one, third),
    }
    for name, call in calls.items():
        after = call()
        with pytest.raises(PoolExhausted, match=rf"the pool of {name.strip()} ran out: 1 more needed"):
            buffered.raise_exhausted(after)
        assert bits(after.pool) == bits(none.pool)
        for field in ("checkpoint_of", "fold_to", "block_table", "length", "folded", "order"):
            np.testing.assert_array_equal(getattr(after.cursor, field), getattr(none.cursor, field))


def test_a_loaded_state_takes_a_row_and_gives_it_back(rng):
    twin, load = Twin(GDN, rng, **SHARED), jax.jit(buffered.load)
    state = rng.standard_normal((1, *twin.spec.state_shape)).astype(np.float32)
    one, cache = np.ones(1, np.int32), twin.cache
    for slot in (2, 2, 3):
        held = load(cache, state, one, slot * one)
        assert int(held.cursor.sharing.states.left) == 4 and int(held.cursor.position[slot]) == 1
        np.testing.assert_array_equal(held.pool.checkpoints[held.cursor.checkpoint_of[slot]], state[0])
        cache = load(held, state, 0 * one, slot * one)
        assert int(cache.cursor.sharing.states.left) == 5, "no token needs no row"
