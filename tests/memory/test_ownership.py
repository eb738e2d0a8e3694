"""Owners of a pool's rows against a plain list of them."""

import jax
import numpy as np
import pytest

from jaxbuf.memory.ownership import init_ownership, is_shared, release_rows, share_rows, short_of, take_rows

take, share, release = jax.jit(take_rows), jax.jit(share_rows), jax.jit(release_rows)


def test_rows_are_taken_shared_and_given_back(rng):
    rows, count = 12, 5
    pool, owned = init_ownership(rows), []  # one entry an owner
    for _ in range(200):
        wanted = rng.random(count) < 0.5
        free = set(range(1, rows)) - set(owned)
        assert int(short_of(pool, wanted)) == max(0, wanted.sum() - len(free))
        if int(short_of(pool, wanted)) == 0:
            taken, pool = take(pool, wanted)
            taken = np.asarray(taken)
            assert (taken[~wanted] == 0).all() and set(taken[wanted]) <= free
            assert len(set(taken[wanted])) == wanted.sum()
            owned += taken[wanted].tolist()
        more = np.array([rng.choice(owned) if owned and rng.random() < 0.4 else 0 for _ in range(count)], np.int32)
        pool, owned = share(pool, more), owned + more[more > 0].tolist()
        less = np.zeros(count, np.int32)
        for i in range(count):
            if owned and rng.random() < 0.7:
                less[i] = owned.pop(rng.integers(len(owned)))
        pool = release(pool, less)
        counts = np.bincount(owned, minlength=rows)
        np.testing.assert_array_equal(pool.owners, counts)
        np.testing.assert_array_equal(is_shared(pool, np.arange(rows)), counts > 1)
        free = np.asarray(pool.free)[: int(pool.left)]
        assert sorted(free) == sorted(set(range(1, rows)) - set(owned))


def test_a_pool_has_more_than_the_null_row():
    with pytest.raises(ValueError, match="rows must be at least 2, the null row and one more, got 1"):
        init_ownership(1)
