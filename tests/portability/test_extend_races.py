"""The TPU kernel of `extend` has no data race, waits for every copy that it reads from, and stays within its arrays."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.pallas.extend import tpu_plan, tpu_row
from jaxbuf.recurrence import RecurrenceSpec, buffered
from tests.gpu.checks import new_inputs
from tests.pallas.extending import error, poisoned

GDN = RecurrenceSpec(heads=2, key_heads=2, key_dim=64, value_dim=64)
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=64, value_dim=64, decay="channel")
LINEAR = RecurrenceSpec(heads=2, key_heads=1, key_dim=64, value_dim=64, decay="none", delta=False)


@contextlib.contextmanager
def watched(mode):
    """The interpreter that looks for races, in one of its modes: copies are made when they start, or when a wait for
    them ends."""
    jax.clear_caches()  # programs that were traced for the other interpreter
    settings = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, out_of_bounds_reads="raise")
    with pltpu.force_tpu_interpret_mode(settings):
        yield
    jax.clear_caches()


def run(mode, spec, state):
    """Three launches: some rows fold, some rest, one is the null slot's, and one never has a checkpoint."""
    rng = np.random.default_rng(0)
    cache = poisoned(buffered.init(spec, slots=3, limit=4, max_pending=2, state_dtype=state))
    slots, folds = jnp.array([1, 2, 0, 3]), 0
    for lengths, accepted in (([2, 2, 2, 1], [2, 1, 0, 1]), ([2, 0, 1, 2], [2, 0, 0, 1]), ([2, 2, 2, 2], [1, 2, 0, 2])):
        inputs, rows = new_inputs(rng, spec, 4, 2, jnp.float32), {"slots": slots, "lengths": jnp.array(lengths)}
        expected, reference = buffered.extend(spec, cache, *inputs, **rows, implementation="xla")
        with watched(mode):
            out, after = buffered.extend(spec, cache, *inputs, **rows, implementation="tpu", interpret=True)
            jax.block_until_ready((out, after))
        assert interpreter.races is not None
        if interpreter.races.races_found:
            return True
        assert error(out, expected) < 1e-2
        folds += int((np.asarray(after.cursor.folded) > np.asarray(cache.cursor.folded)).sum())
        cache = buffered.commit(reference, jnp.array(accepted), slots=slots)
    assert folds
    return False


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
@pytest.mark.parametrize("spec, state", [(GDN, "float32"), pytest.param(KDA, "split", marks=pytest.mark.slow)])
def test_there_is_no_race(mode, spec, state):
    assert not run(mode, spec, state)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_there_is_no_race_where_a_row_takes_two_programs(monkeypatch, mode):
    monkeypatch.setattr(tpu_plan.Plan, "vmem", lambda plan: 0 if plan.heads == 1 else 2**40)
    assert not run(mode, GDN, "float32")


def test_a_kernel_that_does_not_wait_for_what_it_wrote_has_a_race(monkeypatch):
    monkeypatch.setattr(tpu_row.Row, "wait_writes", lambda row, step: None)
    assert run("eager", GDN, "float32")
