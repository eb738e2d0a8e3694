"""Slots that are there twice or do not exist, in every function of a model's memory that takes slots.

Only the integers are run, and what a fork copies, no model: who owns what does not depend on numbers.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.models import decoder
from jaxbuf.models.cache import begin, commit, fork, init_cache, make_launch, reset
from jaxbuf.models.config import ATTENTION, RECURRENCE
from jaxbuf.models.mtp import fork_mtp, init_mtp
from tests.models.test_cache import CONFIG, is_exhausted, pools_of
from tests.recurrence.twin import assert_owned
from tests.tiny import changed, random_model

SLOTS, ROWS, PENDING, PROMPT, PAGE_SIZE = 4, 3, 4, 10, 4
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def read_prompts(cache, slots, lengths, keep):
    return begin(cache, make_launch(cache, slots, lengths, PROMPT, keep=keep))[1]


def read_tokens(cache, slots, lengths, parents):
    return begin(cache, make_launch(cache, slots, lengths, PENDING, parents=parents))[1]


CALLS = {
    "prefill": read_prompts,
    "extend": read_tokens,
    "commit": lambda cache, slots, accepted, path: commit(cache, accepted, slots=slots, path=path),
    "fork": lambda cache, target, source: fork(cache, source, target),
    "reset": reset,
}
COMPILED = {name: _jit(call) for name, call in CALLS.items()}


def new_cache(rng, sizes):
    """All numbers are drawn, so that whatever is written where it should not be is seen."""
    cache = init_cache(
        CONFIG,
        slots=SLOTS,
        capacity=24,
        limit=np.array([1, 5, 8, 40]),
        max_pending=PENDING,
        block_size=4,
        page_size=PAGE_SIZE,
        trees=True,
        **sizes,
    )
    layers = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache.layers)
    return dataclasses.replace(cache, layers=layers)


def first_rows(slots):
    """Each slot in its first row, 0 elsewhere."""
    rows = [slot if 0 < slot <= SLOTS and slot not in slots[:row] else 0 for row, slot in enumerate(slots.tolist())]
    return np.array(rows, np.int32)


def draw(rng, name):
    """The slots that a call changes, and its other arguments."""
    slots = rng.choice([-1, 0, 1, 1, 2, 2, 3, SLOTS, SLOTS + 1, 99], ROWS).astype(np.int32)
    numbers = {"prefill": PROMPT, "extend": PENDING, "commit": PENDING}
    if name == "reset":
        return (slots[:1] if rng.random() < 0.5 else slots[:2].repeat(2),)
    if name == "fork":
        source = rng.integers(0, SLOTS + 1, ROWS).astype(np.int32)
        return slots, np.where(rng.random(ROWS) < 0.1, 99, source).astype(np.int32)
    lengths = rng.integers(-1, numbers[name] + 2, ROWS).astype(np.int32)
    if name == "prefill":
        return slots, lengths, rng.integers(0, 9, ROWS).astype(np.int32)
    nodes = np.stack([[rng.integers(-1, max(i, 0)) if i else -1 for i in range(PENDING)] for _ in range(ROWS)])
    if name == "extend":
        return slots, lengths, nodes.astype(np.int32)
    return slots, lengths, np.sort(rng.permuted(np.tile(np.arange(PENDING, dtype=np.int32), (ROWS, 1)), axis=1)[:, :3])


def held(cache, slot):
    """The bits of all that a slot has: its integers, and whatever these refer to in every layer."""
    recurrent, pages = cache.shared[RECURRENCE], cache.shared[ATTENTION]
    cursor, rows = recurrent.cursor, [pages.table[slot], pages.order[slot], recurrent.ring_order[slot]]
    rows += [cache.sequences.committed[slot], cache.sequences.pending[slot]]
    fields = "checkpoint_of", "block_table", "order", "origin", "length", "pending", "limit", "folded"
    rows += [getattr(cursor, name)[slot] for name in fields]
    for kind, layer in zip(cache.kinds, cache.layers, strict=True):
        if kind == ATTENTION:
            rows += [x[pages.table[slot]] for x in (layer.keys, layer.values)]
        else:
            pool = layer.pool
            rows += [pool.checkpoints[cursor.checkpoint_of[slot]], layer.ring[slot]]
            rows += [x[cursor.block_table[slot]] for x in (pool.keys, pool.updates, pool.gates)]
    return [np.asarray(x).tobytes() for x in rows]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def assert_owners(cache):
    """Each row, block and page has as many owners as slots refer to it; the others are free, once."""
    cursor = cache.shared[RECURRENCE].cursor
    tables = cursor.checkpoint_of, cursor.block_table, cache.shared[ATTENTION].table
    for owned, table in zip(pools_of(cache), tables, strict=False):
        assert_owned(owned, np.asarray(table)[1:])


SHARED = {"states": 3, "blocks": 9, "pages": 10}  # they run out now and then


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SHARED, {}], ids=["shared", "own"])
def test_compiled_calls_serve_the_first_row_of_a_slot_and_harm_no_other(rng, sizes):
    cache = new_cache(rng, sizes)
    for _ in range(80):
        name = rng.choice(list(CALLS), p=[0.2, 0.25, 0.2, 0.2, 0.15])
        slots, *others = draw(rng, name)
        before, cache = cache, COMPILED[name](cache, slots, *others)
        assert_owners(cache)
        if name == "fork":
            left_out = (others[0] < 1) | (others[0] > SLOTS) | (others[0] == slots)
            first = first_rows(np.where(left_out, 0, slots).astype(np.int32))
        else:
            first = first_rows(slots)
        assert bits(COMPILED[name](before, first, *others)) == bits(cache), f"{name} of {slots} is not that of {first}"
        now, then = jax.device_get((cache, before))
        for slot in np.setdiff1d(np.arange(1, SLOTS + 1), first):
            assert held(now, slot) == held(then, slot), f"{name} of {slots} changed slot {slot}"
        if is_exhausted(cache):
            cache = COMPILED["reset"](cache, rng.integers(1, SLOTS + 1, 1, dtype=np.int32))
            assert_owners(cache)
            assert not is_exhausted(cache)


@pytest.mark.exhaustive  # one operation at a time
def test_calls_that_are_not_compiled_refuse_repeated_slots_or_are_the_compiled_ones(rng):
    cache, refused = new_cache(rng, SHARED), 0
    for _ in range(40):
        name = rng.choice(list(CALLS), p=[0.2, 0.25, 0.2, 0.2, 0.15])
        slots, *others = draw(rng, name)
        slots = np.where(rng.random(slots.shape) < 0.3, 0, np.clip(slots, 0, SLOTS)).astype(np.int32)
        if name == "fork":
            others = [np.clip(others[0], 0, SLOTS)]
            written = slots[(others[0] > 0) & (others[0] != slots)]
        else:
            written = slots
        if name in ("prefill", "extend"):
            others[0] = np.clip(others[0], 0, PROMPT if name == "prefill" else PENDING)
        if name == "commit":
            others = [np.minimum(np.maximum(others[0], 0), np.asarray(cache.sequences.pending)[slots]), None]
        repeated = np.unique(written[written > 0]).size < (written > 0).sum() and name != "reset"
        compiled = COMPILED[name](cache, slots, *others)
        if repeated:
            with pytest.raises(ValueError, match="must have each slot once, got slot"):
                CALLS[name](cache, slots, *others)
            refused += 1
        elif is_exhausted(compiled):
            with pytest.raises(PoolExhausted):
                CALLS[name](cache, slots, *others)
        else:
            assert bits(CALLS[name](cache, slots, *others)) == bits(compiled), name
        cache = compiled
        assert_owners(cache)
        if is_exhausted(cache):
            cache = COMPILED["reset"](cache, rng.integers(1, SLOTS + 1, 1, dtype=np.int32))
    assert refused > 0


def test_calls_refuse_slots_that_are_known_to_be_repeated(rng):
    cache, twice, two = new_cache(rng, SHARED), np.int32([2, 3, 2]), np.int32([2, 2, 2])
    tree, path = np.full((ROWS, PENDING), -1, np.int32), np.zeros((ROWS, 1), np.int32)
    arguments = {"prefill": (two, two), "extend": (two, tree), "commit": (0 * two, path)}
    for name, others in arguments.items():
        with pytest.raises(ValueError, match="slots must have each slot once, got slot 2 in 2 rows"):
            CALLS[name](cache, twice, *others)
    with pytest.raises(ValueError, match="target must have each slot once, got slot 2 in 2 rows"):
        CALLS["fork"](cache, twice, np.int32([1, 1, 3]))
    with pytest.raises(ValueError, match=r"slots must be in \[0, 4\], got 99 at row 0"):
        reset(cache, np.int32([99]))
    model = jax.eval_shape(lambda: random_model(CONFIG))
    for call in (decoder.prefill, decoder.extend):
        with pytest.raises(ValueError, match="slots must have each slot once, got slot 2 in 2 rows"):
            call(model, cache, tree, slots=twice)
        with pytest.raises(ValueError, match=r"tokens must be int32 \[rows, T\], got float32 \(3, 4\)"):
            call(model, cache, tree.astype(np.float32), slots=twice)


def test_a_fork_of_the_mtp_layers_memory_writes_no_slot_but_its_targets(rng):
    config = changed(CONFIG, mtp_num_hidden_layers=1)
    memory = init_mtp(config, slots=SLOTS, capacity=8, page_size=PAGE_SIZE)
    memory = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), memory.kv)
    memory = dataclasses.replace(init_mtp(config, slots=SLOTS, capacity=8, page_size=PAGE_SIZE), kv=memory)
    source, target = np.int32([3, 2, 1, 99, -1]), np.int32([1, 1, 99, 2, 2])
    with pytest.raises(ValueError, match=r"source must be in \[0, 4\], got 99 at row 3"):
        fork_mtp(memory, source, target)
    with pytest.raises(ValueError, match="target must have each slot once, got slot 1 in 2 rows"):
        fork_mtp(memory, source[:2], target[:2])
    found = jax.jit(fork_mtp)(memory, source, target)
    expected = fork_mtp(memory, np.int32([3]), np.int32([1]))
    assert bits(found) == bits(expected) != bits(memory)
