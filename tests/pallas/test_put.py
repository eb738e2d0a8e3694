"""The kernel of `put_rows` writes the rows that it is given, bit by bit, and nothing else; it moves them once, and its
copies do not race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.recurrence.put import put_rows, put_within
from tests.pallas.attending import LATE

ENTRIES, ROWS = 9, 6


@pytest.fixture
def arrays(rng):
    """A pool, new rows of its dtype, and where they go: two of them nowhere."""

    def make(*shape, dtype=jnp.bfloat16):
        pool, new = (jnp.asarray(rng.standard_normal((n, *shape)) * 100, dtype) for n in (ENTRIES, ROWS))
        rows = rng.permutation(ENTRIES)[:ROWS].astype(np.int32)
        rows[rng.permutation(ROWS)[:2]] = NOWHERE, ENTRIES
        return pool, new, rows

    return make


def by_hand(pool, new, rows):
    expected = np.array(pool)
    for row, values in zip(rows, np.array(new), strict=True):
        if row < len(expected):
            expected[row] = values
    return expected


@pytest.mark.parametrize("how", [True, LATE])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 24, 128), jnp.bfloat16), ((3, 256), jnp.float32), ((2, 8, 128), jnp.int8)]
)
def test_the_kernel_writes_the_rows_and_nothing_else(arrays, shape, dtype, how):
    given = arrays(*shape, dtype=dtype)
    expected = by_hand(*given)
    for found in (
        put_rows(*map(jnp.array, given), implementation="tpu", interpret=how),
        put_rows(*map(jnp.array, given), implementation="xla"),
    ):
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.array(found), expected)


def test_rows_are_rounded_to_the_pools_dtype(arrays):
    pool, new, rows = arrays(2, 128)
    exact = new.astype(jnp.float32) * 1.001
    found = put_rows(pool, exact, rows, implementation="tpu", interpret=True)
    np.testing.assert_array_equal(np.array(found), by_hand(pool, exact.astype(pool.dtype), rows))


def test_what_the_kernel_can_not_serve_is_an_error_that_says_why(arrays):
    for shape, reason in (((2, 80), "a last axis that is a multiple of 128, got 80"), ((128,), "a pool of three axes")):
        with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this put_rows: it needs {reason}'):
            put_rows(*arrays(*shape), implementation="tpu", target="v6e")
    pool, new, rows = arrays(2, 128)
    with pytest.raises(ValueError, match=r"new must have shape \(6, 2, 128\), got \(6, 2, 64\)"):
        put_rows(pool, new[..., :64], rows)


def test_within_another_operation_xla_writes_what_the_kernel_does_not_take(arrays):
    from jaxbuf.pallas.dispatch import Asked

    asked = Asked("prefill", "tpu", True, True)
    for shape, kernels in (((2, 128), 1), ((2, 80), 0)):
        given = arrays(*shape)
        made = str(jax.make_jaxpr(lambda *given: put_within(asked, *given))(*given))
        assert made.count("pallas_call[") == kernels
        np.testing.assert_array_equal(np.array(put_within(asked, *given)), by_hand(*given))


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_copies_do_not_race(arrays, mode):
    given = arrays(2, 16, 128)
    expected = by_hand(*given)
    jax.clear_caches()  # programs that were traced for the other interpreter
    settings = {"detect_races": True, "out_of_bounds_reads": "raise", "vector_clock_size": 64}
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode, **settings)):
        found = jax.block_until_ready(put_rows(*given, implementation="tpu", interpret=True))
    jax.clear_caches()
    assert interpreter.races is not None and not interpreter.races.races_found
    np.testing.assert_array_equal(np.array(found), expected)
