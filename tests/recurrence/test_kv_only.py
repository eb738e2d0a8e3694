"""Slots that never folded stay KV-only up to their kv_limit, whatever their limit says afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import buffered
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES
from tests.recurrence.twin import ROWS, SLOTS, Twin

NAME = "Gated DeltaNet"
GDN = FAMILIES[NAME]
KV = 20

extend = jax.jit(buffered.extend, static_argnums=0)
prefill = jax.jit(buffered.prefill, static_argnums=0)


def without_checkpoints(cache):
    """NaN in every checkpoint: whoever reads one before writing it shows."""
    spoiled = jnp.full_like(cache.pool.checkpoints, jnp.nan)
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, checkpoints=spoiled))


def test_chunks_and_steps_stay_kv_only_up_to_the_threshold_and_fold_by_the_limit_behind_it(rng):
    slots, one = jnp.array([1, 2]), jnp.array([1, 1])
    given = {"limit": np.array([4, 4]), "kv_limit": np.array([KV, 1]), "entry_dtype": jnp.float32}
    cache = without_checkpoints(buffered.init(GDN, slots=2, max_pending=4, **given))
    inputs = definition.inputs(rng, GDN, 2, 40)
    out, state, _ = definition.run_batch(GDN, None, *inputs)

    def window(start, stop):
        return [None if x is None else jnp.asarray(x[:, start:stop]) for x in inputs]

    for start in (0, 5, 10):  # slot 1 is kept whole; slot 2's limit takes the checkpoint
        found, cache = prefill(GDN, cache, *window(start, start + 5), slots=slots, keep=jnp.array([KV, 0]))
        assert definition.error(found, out[:, start : start + 5]) < 1e-4
        assert cache.cursor.folded.tolist() == [0, 0, start + 5] and cache.cursor.length.tolist() == [0, start + 5, 0]
    folded = []
    for t in range(15, 40):
        found, cache = extend(GDN, cache, *window(t, t + 1), slots=slots)
        assert definition.error(found[:, 0], out[:, t]) < 1e-4
        folded.append(int(cache.cursor.folded[1]))
        cache = buffered.commit(cache, one, slots=slots)
    assert sorted(set(folded)) == [0, KV, KV + 4, KV + 8, KV + 12, KV + 16], folded
    assert definition.error(buffered.read(GDN, cache, slots), state) < 1e-4


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_beside_the_live_entries_folds_them_all(rng):
    cache = buffered.init(GDN, slots=1, limit=4, kv_limit=KV, max_pending=4, entry_dtype=jnp.float32)
    inputs, slots = definition.inputs(rng, GDN, 1, 24), jnp.array([1])
    first, rest = (
        [None if x is None else jnp.asarray(x[:, part]) for x in inputs] for part in (slice(9), slice(9, 24))
    )
    _, cache = buffered.prefill(GDN, cache, *first, slots=slots, keep=KV)
    assert (int(cache.cursor.folded[1]), int(cache.cursor.length[1])) == (0, 9)
    out, cache = buffered.prefill(GDN, cache, *rest, slots=slots, keep=0)
    assert (int(cache.cursor.folded[1]), int(cache.cursor.length[1])) == (24, 0)
    expected, state, _ = definition.run_batch(GDN, None, *inputs)
    assert definition.error(out, expected[:, 9:]) < 1e-4
    assert definition.error(buffered.read(GDN, cache, slots), state) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shared", [{}, {"states": 5, "blocks": 30}])
def test_any_schedule_equals_the_recurrence(rng, shared):
    """Among recurrent, buffered and KV-only slots, with forks, and with pools that run out."""
    twin = Twin(NAME, rng, limits=(1, 4, 16, 4, 1, 8), kv_limit=np.array([1, 30, 1, 20, 30, 1]), **shared)
    for _ in range(20):
        slots = rng.permutation(np.arange(1, SLOTS + 1))[:ROWS].astype(np.int32)
        if (twin.tokens > 40).any():
            twin.reset(np.where(twin.tokens > 40, np.arange(SLOTS + 1), 0).astype(np.int32))
        match rng.integers(0, 5):
            case 0:
                twin.prefill(slots, rng.integers(0, 12, ROWS), rng.integers(0, 30, ROWS))
            case 1:
                twin.fork(slots[:2], slots[2:])
            case _:
                twin.extend(slots, rng.integers(0, 7, ROWS))
