"""DMA bytes of the TPU kernel of `prepare` and of its convolution, counted in the interpreter, over their floors; and
that its copies wait for one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.pallas.prepare import tpu
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.convolution import extend_ring, init_ring
from jaxbuf.recurrence.prepare import Weights, prepare
from tests.portability.dma import count_dma_bytes

SPEC = RecurrenceSpec(heads=8, key_heads=4, key_dim=128, value_dim=128)
ROWS, TIME, WIDTH = 16, 2, 4


@pytest.fixture
def launch(rng):
    """The arrays of a launch whose rows have all their last inputs."""
    channels = SPEC.channels

    def normal(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    heads = (SPEC.heads,)
    weights = Weights(normal(channels, WIDTH), normal(*heads, dtype=jnp.float32), normal(*heads, dtype=jnp.float32))
    ring = init_ring(slots=ROWS, channels=channels, width=WIDTH, max_pending=4, dtype=jnp.bfloat16)
    gates = [normal(ROWS, TIME, SPEC.heads, dtype=jnp.float32) for _ in range(2)]
    arrays = weights, ring, normal(ROWS, TIME, channels), *gates
    integers = rng.permutation(ROWS) + 1, rng.integers(3, 99, ROWS), np.full(ROWS, TIME)
    return arrays, dict(zip(("slots", "start", "lengths"), (jnp.asarray(x, jnp.int32) for x in integers), strict=True))


def run_prepare(arrays, where, implementation="tpu"):
    return prepare(SPEC, *arrays, **where, implementation=implementation, interpret=implementation == "tpu")


def run_convolution(arrays, where, implementation="tpu"):
    weights, ring, x, *_ = arrays
    how = {"implementation": implementation, "interpret": implementation == "tpu"}
    return extend_ring(ring, weights.convolution, x, **where, **how)


@pytest.mark.parametrize("run", [run_prepare, run_convolution])
def test_a_launch_moves_what_it_needs(launch, run):
    arrays, where = launch
    moved, (found, ring) = count_dma_bytes(lambda: run(arrays, where))
    vector = SPEC.channels * 2
    taps = WIDTH * SPEC.channels * 4
    gates = 4 * ROWS * TIME * SPEC.heads * 4 + 2 * SPEC.heads * 4 if run is run_prepare else 0
    floor = ROWS * vector * (WIDTH - 1 + 3 * TIME) + taps + gates
    assert floor <= moved.bytes <= 1.05 * floor
    expected, ring_expected = run(arrays, where, "xla")
    np.testing.assert_array_equal(ring, ring_expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) <= 2**-7 * np.linalg.norm(y)


def test_rows_without_a_past_move_no_past(launch):
    arrays, where = launch
    where = where | {"start": jnp.zeros(ROWS, jnp.int32)}
    moved, _ = count_dma_bytes(lambda: run_convolution(arrays, where))
    assert moved.copies == ROWS * TIME * SPEC.channels * 2


def races(launch, mode):
    """Whether there are any in a launch of two programs, the last of which has rows to spare."""
    arrays, where = launch
    arrays, where = (*arrays[:2], *(x[:10] for x in arrays[2:])), {name: x[:10] for name, x in where.items()}
    expected = np.asarray(run_convolution(arrays, where, "xla")[1], np.float32)
    jax.clear_caches()  # programs that were traced for the other interpreter
    settings = {"detect_races": True, "out_of_bounds_reads": "raise", "vector_clock_size": 256}
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode, **settings)):
        _, ring = jax.block_until_ready(run_convolution(arrays, where))
    jax.clear_caches()
    assert interpreter.races is not None
    if not interpreter.races.races_found:
        np.testing.assert_array_equal(np.asarray(ring, np.float32), expected)
    return interpreter.races.races_found


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_there_is_no_race(launch, mode):
    assert not races(launch, mode)


def test_a_kernel_that_does_not_wait_for_its_inputs_has_a_race(launch, monkeypatch):
    monkeypatch.setattr(tpu._Program, "copy_sources", lambda self: self._sources(self.step, start=True))
    assert races(launch, "eager")
