"""Memory for prompts that are forked: `forked_sizes` is enough whatever the lengths and forks, and no more than that.

Only the integers are run, no model: what is taken and shared does not depend on numbers.
"""

from functools import partial

import jax
import numpy as np
import pytest

from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.models.cache import begin, commit, fork, forked_sizes, init_cache, make_launch, raise_exhausted
from jaxbuf.models.config import RECURRENCE
from tests.models.test_cache import CONFIG

pytestmark = pytest.mark.slow

PROMPTS, SLOTS, TIME = 3, 8, 3
TOKENS = {"prompt_tokens": 16, "new_tokens": 16}
ALL = np.arange(1, SLOTS + 1, dtype=np.int32)
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def new_cache(limit, again=False, **fewer):
    sizes = {"slots": SLOTS, "limit": limit, "max_pending": TIME, "page_size": 4}
    pools = forked_sizes(**sizes, prompts=PROMPTS, **TOKENS, again=again)
    pools = {name: count - fewer.get(name, 0) for name, count in pools.items()}
    return init_cache(CONFIG, **sizes, **pools, capacity=sum(TOKENS.values()))


@_jit
def prefill(cache, slots, lengths):
    return begin(cache, make_launch(cache, slots, lengths, TOKENS["prompt_tokens"], keep=0))[1]


@_jit
def step(cache, lengths, accepted):
    return commit(begin(cache, make_launch(cache, ALL, lengths, TIME))[1], accepted)


fork = _jit(fork)


def run(cache, lengths, groups, draw=None, sources=None):
    """Prompts are read and forked, and each slot takes what it can, one token at a time.

    Args:
      draw: (tokens left of each slot) -> how many it reads and commits in a step.
      sources: () -> the slots that all slots are forked from after a step.
    """
    readers = np.array([1 + groups.index(prompt) for prompt in range(PROMPTS)], np.int32)
    cache = prefill(cache, readers, lengths)
    cache = fork(cache, readers[groups], ALL)
    added = np.zeros(SLOTS, np.int32)
    while (added < TOKENS["new_tokens"]).any():
        left = TOKENS["new_tokens"] - added
        read, accepted = (np.minimum(1, left),) * 2 if draw is None else draw(left)
        cache, added = step(cache, read.astype(np.int32), accepted.astype(np.int32)), added + accepted
        if sources is not None:
            source = sources().astype(np.int32)
            cache, added = fork(cache, source, ALL), added[source - 1]
    raise_exhausted(cache)
    np.testing.assert_array_equal(cache.sequences.committed[1:], lengths[groups] + TOKENS["new_tokens"])
    return cache


def draw_case(rng):
    lengths = rng.integers(1, TOKENS["prompt_tokens"] + 1, PROMPTS).astype(np.int32)
    return lengths, sorted([0, 1, 2, *rng.integers(0, PROMPTS, SLOTS - PROMPTS).tolist()])


def test_samples_never_run_out_and_all_is_given_back(rng):
    def draw(left):
        read = np.minimum(rng.integers(0, TIME + 1, SLOTS), left)
        return read, rng.integers(0, read + 1)

    for limit in (1, 5, 16):
        for _ in range(4):
            check_left(run(new_cache(limit), *draw_case(rng), draw))


def test_beams_never_run_out_and_all_is_given_back(rng):
    for limit in (1, 5, 16):
        for _ in range(4):
            lengths, groups = draw_case(rng)

            def sources(groups=groups):
                """Each of its own prompt's slots, or all of them in another order."""
                source = ALL.copy()
                for prompt in range(PROMPTS):
                    mine = np.flatnonzero(np.array(groups) == prompt)
                    source[mine] = 1 + (rng.choice(mine, mine.size) if rng.random() < 0.5 else np.roll(mine, 1))
                return source

            check_left(run(new_cache(limit, again=True), lengths, groups, sources=sources))


def check_left(cache):
    cursor = cache.shared[RECURRENCE].cursor
    held, states = np.unique(np.asarray(cursor.checkpoint_of)[1:]).size, cursor.sharing.states
    assert int(states.left) == states.owners.shape[0] - 1 - held


def fewer_run_out(limit, name, *case, again=False, **more):
    run(new_cache(limit, again), *case, **more)
    with pytest.raises(PoolExhausted, match=f"the pool of {name} ran out: 1 more needed"):
        run(new_cache(limit, again, **{name: 1}), *case, **more)


@pytest.mark.exhaustive
def test_samples_need_every_row_and_page():
    """All prompts have several slots that fold together, and end one token before a page does."""
    case = np.full(PROMPTS, 15, np.int32), [0, 0, 0, 1, 1, 1, 2, 2]
    for limit in (1, 5):
        for name in ("states", "pages"):
            fewer_run_out(limit, name, *case)


@pytest.mark.exhaustive
def test_beams_need_every_row_and_page():
    """Beams that all trade places, and pairs that share a checkpoint and fold together."""
    case = np.full(PROMPTS, 15, np.int32), [0, 0, 0, 0, 1, 1, 2, 2]
    trade, pair = np.array([2, 1, 4, 3, 6, 5, 8, 7]), np.array([1, 1, 3, 3, 5, 5, 7, 7])
    fewer_run_out(5, "pages", *case, again=True, sources=lambda: trade)
    fewer_run_out(1, "states", *case, again=True, sources=lambda: pair)
