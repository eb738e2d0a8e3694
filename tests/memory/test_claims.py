"""Who gets what of pools that are too small for all."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.memory.claims import Claim, after, grant, grant_all


@jax.jit
def decide(needs, left):
    claims = [Claim(needs[i], left[i]) for i in range(needs.shape[0])]
    granted = grant(claims)
    return granted, grant_all(claims), jnp.stack(after(claims, granted)), jnp.stack([claim.missing for claim in claims])


def test_what_is_granted_is_there_and_nobody_rests_for_nothing(rng):
    for _ in range(300):
        needs = rng.integers(0, 4, (3, 8)).astype(np.int32) * (rng.random((3, 8)) < 0.5)
        left = rng.integers(0, 9, 3).astype(np.int32)
        granted, every, then, missing = (np.asarray(x) for x in decide(needs.astype(np.int32), left))
        np.testing.assert_array_equal(then, left - needs[:, granted].sum(axis=1))
        assert (then >= 0).all()
        assert granted[needs.sum(axis=0) == 0].all(), "a row that needs nothing is served"
        needy = needs.sum(axis=0) > 0
        alone = (needs <= left[:, None]).all(axis=0)
        assert granted[needy].any() == alone[needy].any(), "if one could be served alone, one is"
        assert every == (needs.sum(axis=1) <= left).all()
        assert not every or granted.all()
        np.testing.assert_array_equal(missing, np.maximum(needs.sum(axis=1) - left, 0))


def test_pools_are_looked_at_together():
    """By themselves, the first pool would give its row to row 0, which the second then refuses: row 1 would starve."""
    needs = np.array([[1, 1], [2, 0]], np.int32)
    granted, *_ = decide(needs, np.array([1, 1], np.int32))
    assert granted.tolist() == [False, True]
