"""Trees and forks through every memory of a model: always the plain forward over what each slot committed."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.models import decoder
from jaxbuf.models.cache import forked_sizes
from jaxbuf.models.config import ATTENTION, RECURRENCE
from jaxbuf.models.families.qwen3_5 import Config
from tests.tiny import SIZES, abstract, random_model

CONFIG = Config(
    **SIZES,
    layer_types=("linear_attention", "full_attention"),
    # A head's output is tiny where a query happens to be across all keys. Divided by its root mean square, its rounding
    # error would be amplified a thousand times, which exceeds any tolerance for one random model in some hundred.
    rms_norm_eps=1e-2,
).model()
SLOTS, PENDING, TIME = 3, 5, 64
ALL = np.arange(1, SLOTS + 1, dtype=np.int32)
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward, prefill, extend = _jit(decoder.forward), _jit(decoder.prefill), _jit(decoder.extend)
commit, fork, reset = _jit(decoder.commit), _jit(decoder.fork), _jit(decoder.reset)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def new_cache(**sizes):
    return decoder.init_cache(
        CONFIG, slots=SLOTS, capacity=TIME, limit=np.array([1, 8, 16]), max_pending=PENDING, page_size=4, **sizes
    )


def last_hidden(model, sequences):
    """The plain forward's last hidden state of every sequence."""
    padded, lengths = np.zeros((SLOTS * PENDING, TIME), np.int32), np.zeros(SLOTS * PENDING, np.int32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)], lengths[row] = sequence, len(sequence)
    hidden = np.asarray(forward(model, padded, lengths=lengths))
    return hidden[np.arange(len(sequences)), lengths[: len(sequences)] - 1]


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


@pytest.mark.parametrize("sizes", [{"states": 3, "blocks": 9, "pages": 16}, {}], ids=["shared", "own"])
@pytest.mark.slow
def test_trees_and_forks_equal_their_branches_alone(model, rng, sizes):
    cache = new_cache(trees=True, **sizes)
    history = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (0, 3, 9, 6)]
    prompts, lengths = np.zeros((SLOTS, 12), np.int32), np.array([3, 9, 6], np.int32)
    for row, tokens in enumerate(history[1:]):
        prompts[row, : len(tokens)] = tokens
    _, cache = prefill(model, cache, prompts, lengths=lengths)
    history[0] = []
    for step in range(16):
        tokens = rng.integers(0, CONFIG.vocab_size, (SLOTS, PENDING), dtype=np.int32)
        parents = np.array([[rng.integers(-1, max(i, 0)) if i else -1 for i in range(PENDING)] for _ in ALL], np.int32)
        paths = [[path_to(parents[row], node) for node in range(PENDING)] for row in range(SLOTS)]
        hidden, cache = extend(model, cache, tokens, parents=parents)
        if is_exhausted(cache):
            with pytest.raises(PoolExhausted):
                decoder.raise_exhausted(cache)
            slot = int(np.argmax([len(tokens) for tokens in history]))
            cache, history[slot] = reset(cache, np.array([slot], np.int32)), []
            continue
        alone = [history[row + 1] + tokens[row, path].tolist() for row in range(SLOTS) for path in paths[row]]
        np.testing.assert_allclose(np.reshape(hidden, (len(alone), -1)), last_hidden(model, alone), atol=2e-4)
        chosen = [
            path[: rng.integers(0, len(path) + 1)] for path in (paths[row][rng.integers(0, 5)] for row in range(3))
        ]
        padded = np.array([path + [0] * (PENDING - len(path)) for path in chosen], np.int32)
        cache = commit(cache, np.array([len(path) for path in chosen], np.int32), path=padded)
        for row, path in enumerate(chosen):
            history[row + 1] += tokens[row, path].tolist()
        if step % 4 == 2:
            source, target = rng.permutation(ALL)[:2]
            cache = fork(cache, source[None], target[None])
            if not is_exhausted(cache):
                history[target] = list(history[source])
        np.testing.assert_array_equal(cache.sequences.committed, [len(tokens) for tokens in history])
    cache = reset(cache, ALL)
    if sizes:
        for owned in pools_of(cache):
            assert int(owned.left) == owned.owners.shape[0] - 1


def pools_of(cache):
    """What slots share: checkpoint rows, blocks, pages."""
    sharing, pages = cache.shared[RECURRENCE].cursor.sharing, cache.shared[ATTENTION].owners
    return () if sharing is None else (sharing.states, sharing.blocks, pages)


def is_exhausted(cache):
    return any(int(owned.lacking) for owned in pools_of(cache))


def test_no_call_changes_the_shape_of_a_cache():
    """Whatever comes out goes in again: loops on the device carry it."""
    model = abstract(CONFIG)
    tokens, rows = jax.ShapeDtypeStruct((SLOTS, PENDING), jnp.int32), jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    for sizes in ({}, {"trees": True}, {"trees": True, "pages": 9}):
        cache = jax.eval_shape(partial(new_cache, **sizes))
        parents = tokens if sizes else None
        after = [
            jax.eval_shape(decoder.prefill, model, cache, tokens)[1],
            jax.eval_shape(lambda *x: decoder.extend(*x[:3], parents=x[3]), model, cache, tokens, parents)[1],
            jax.eval_shape(lambda *x: decoder.commit(*x[:2], path=x[2]), cache, rows, parents),
            jax.eval_shape(decoder.fork, cache, rows, rows),
            jax.eval_shape(decoder.reset, cache, rows),
        ]
        for each in after:
            assert jax.tree.structure(each) == jax.tree.structure(cache)
            assert jax.tree.leaves(each) == jax.tree.leaves(cache)


@pytest.mark.slow
def test_a_launch_serves_the_first_row_of_a_slot(model, rng):
    """Compiled; every other row of it, and one of a slot that does not exist, is as a row of the null slot."""
    cache = new_cache(trees=True, states=3, blocks=9, pages=16)
    tokens, lengths = rng.integers(0, CONFIG.vocab_size, (SLOTS, PENDING), dtype=np.int32), np.int32([3, 5, 99])
    for launch in (prefill, extend):
        first = launch(model, cache, tokens, slots=np.int32([2, 0, 0]), lengths=lengths)
        for slots in ([2, 2, 99], [2, -1, 2]):
            found = launch(model, cache, tokens, slots=np.int32(slots), lengths=lengths)
            chex.assert_trees_all_equal(found[1], first[1])
            np.testing.assert_array_equal(found[0][0, :3], first[0][0, :3])
        cache = first[1]


def test_a_limit_beyond_the_capacity_makes_no_larger_ring():
    """A limit of 10**9 took 16 GB; a request that is not longer than the capacity folds as little with a small ring."""
    sizes = {"slots": 2, "capacity": 40, "max_pending": 4}
    rings = {}
    for limit in (8, 40, 44, 45, 10**9, 2**31, 2**70):
        cache = jax.eval_shape(lambda limit=limit: decoder.init_cache(CONFIG, **sizes, limit=limit))
        rings[limit] = cache.shared[RECURRENCE].cursor.ring
        assert cache.layers[0].pool.keys.shape[:2] == (1 + 2 * rings[limit] // 8, 8)
    assert list(rings.values()) == [16, 48, 48, 48, 48, 48, 48]
    cache = decoder.init_cache(CONFIG, **sizes, limit=np.array([7, 10**9]))
    assert cache.shared[RECURRENCE].cursor.limit.tolist() == [1, 7, 44], (
        "40 committed tokens and 4 pending ones fold nothing yet"
    )
    prompts = {"slots": 2, "prompts": 1, "prompt_tokens": 30, "new_tokens": 10, "max_pending": 4}
    assert forked_sizes(**prompts, limit=10**9) == forked_sizes(**prompts, limit=44)
    with pytest.raises(ValueError, match="limit must be at most 1048576, got 3000004"):
        decoder.init_cache(CONFIG, **(sizes | {"capacity": 3 * 10**6}), limit=10**9)


@pytest.mark.parametrize("wrong", [1.5, True, "16", 0])
@pytest.mark.parametrize(
    "name", ["slots", "capacity", "limit", "max_pending", "block_size", "page_size", "states", "blocks", "pages"]
)
def test_sizes_of_a_cache_are_whole_numbers(name, wrong):
    sizes = {"slots": 2, "capacity": 40} | {name: wrong}
    expected = "at least" if wrong == 0 else "a whole number, got"
    with pytest.raises(ValueError, match=f"{name} must be {expected}"):
        decoder.init_cache(CONFIG, **sizes)


def test_a_cache_without_trees_says_so(model):
    cache, tokens = new_cache(), np.zeros((SLOTS, 2), np.int32)
    with pytest.raises(ValueError, match="parents need a cache made with trees=True"):
        decoder.extend(model, cache, tokens, parents=np.full((SLOTS, 2), -1, np.int32))
    with pytest.raises(ValueError, match="path needs a cache made with trees=True"):
        decoder.commit(cache, np.zeros(SLOTS, np.int32), path=tokens)
