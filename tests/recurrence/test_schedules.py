"""Any schedule of prefill, extend, trees, commit, fold, fork and reset gives what float64 gives, for every family."""

import numpy as np
import pytest

from tests.recurrence.families import FAMILIES
from tests.recurrence.twin import PROMPT, ROWS, SHARED, SLOTS, TIME, Twin, random_parents

ACTIONS = {"tree": 0.35, "chain": 0.2, "prefill": 0.12, "fold": 0.08, "fork": 0.15, "reset": 0.1}


def act(twin, rng):
    """One random call."""
    action, slots = rng.choice(list(ACTIONS), p=list(ACTIONS.values())), twin.rows()
    if action == "tree":
        twin.extend(slots, rng.integers(0, TIME + 1, ROWS), random_parents(rng))
    elif action == "chain":
        twin.extend(slots, rng.integers(0, TIME + 1, ROWS))
    elif action == "prefill":
        twin.prefill(slots, rng.integers(0, PROMPT + 1, ROWS), rng.integers(0, PROMPT + 1, ROWS))
    elif action == "fold":
        twin.fold(slots)
    elif action == "fork":  # slots may trade places, and one may be the source of several
        target = rng.permutation(np.arange(1, SLOTS + 1))[:ROWS] * (rng.random(ROWS) < 0.8)
        twin.fork(rng.integers(0, SLOTS + 1, ROWS), target)
    else:
        twin.reset(slots)
    return action


def run_schedule(family, rng, steps, **sizes):
    twin = Twin(family, rng, **sizes)
    for _ in range(steps):
        act(twin, rng)
    twin.reset(np.arange(1, SLOTS + 1, dtype=np.int32))
    sharing = twin.cache.cursor.sharing
    if sharing is not None:
        for owned in (sharing.states, sharing.blocks):
            assert int(owned.left) == owned.owners.shape[0] - 1, "after freeing all slots everything is free"


@pytest.mark.parametrize("sizes", [SHARED, pytest.param({}, marks=pytest.mark.slow)], ids=["shared rows", "own rows"])
def test_any_schedule_equals_the_recurrence(rng, sizes):
    run_schedule("Gated DeltaNet", rng, 40, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Gated DeltaNet"])
def test_any_schedule_of_any_family_equals_the_recurrence(rng, family):
    run_schedule(family, rng, 40, **SHARED)
