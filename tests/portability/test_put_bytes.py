"""The TPU kernel of `put_rows` moves the rows that it writes, and the pool never goes through VMEM, as it does where
XLA writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.recurrence.put import put_rows
from jaxbuf.tpu_compiler import compile_for
from tests.portability.artefact import pool_copies, written_back
from tests.portability.dma import count_dma_bytes

RING = jax.ShapeDtypeStruct((65, 8, 64, 128), jnp.bfloat16)  # of one layer of Qwen3.5-4B: 8 MiB
INPUTS = jax.ShapeDtypeStruct((64 * 8, 64, 128), jnp.bfloat16)
PLACES = jax.ShapeDtypeStruct((64 * 8,), jnp.int32)


def computed_and_put(implementation, generation):
    """A program that has work to do while XLA fetches the pool."""

    def run(ring, inputs, places):
        x = inputs.reshape(inputs.shape[0], -1).astype(jnp.float32)
        mixed = (jnp.tanh(x @ x.T) @ x).reshape(inputs.shape)
        how = {"implementation": implementation, "target": generation}
        return put_rows(ring.reshape(-1, *ring.shape[2:]), mixed, places, **how).reshape(ring.shape)

    return compile_for(generation, run, RING, INPUTS, PLACES, donate_argnums=(0,))


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", ["v4", "v5e", "v6e"])
def test_a_small_pool_stays_where_it_is(generation):
    compiled = computed_and_put("tpu", generation)
    assert pool_copies(compiled, RING) == written_back(compiled, RING) == []


@pytest.mark.tpu_compiler
def test_xla_takes_a_small_pool_through_vmem():
    assert written_back(computed_and_put("xla", "v5e"), RING)


def test_a_launch_moves_the_rows_that_it_writes(rng):
    pool, new = (jnp.asarray(rng.standard_normal((n, 4, 128)), jnp.float32) for n in (40, 6))
    rows = np.array([3, NOWHERE, 17, 39, 40, 1], np.int32)
    moved, found = count_dma_bytes(lambda: put_rows(pool, new, rows, implementation="tpu", interpret=True))
    assert moved.bytes == 2 * 4 * (4 * 128 * 4)  # four rows are read and written
    np.testing.assert_array_equal(found, pool.at[rows].set(new, mode="drop"))
