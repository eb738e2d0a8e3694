"""What is read from compiled programs: each check passes a small program that does right, and finds the mistake of one
that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxbuf.tpu_compiler import GENERATIONS, SLICES, compile_for, tpu_mesh, unaliased
from tests.portability.artefact import (
    collectives,
    host_transfers,
    pool_copies,
    relaid,
    vmem_bytes_used,
    written_back,
)

pytestmark = pytest.mark.tpu_compiler

POOL = jax.ShapeDtypeStruct((2**14, 8, 16, 128), jnp.bfloat16)  # 512 MiB, which no memory on a chip's die holds
SMALL = jax.ShapeDtypeStruct((256, 8, 16, 128), jnp.bfloat16)  # 8 MiB
ROWS = jax.ShapeDtypeStruct((4, 8, 16, 128), jnp.bfloat16)
PLACES = jax.ShapeDtypeStruct((4,), jnp.int32)
STEPS = jax.ShapeDtypeStruct((), jnp.int32)


def written(pool, rows, places):
    return pool.at[places].set(rows)


def selected(pool, rows, places):
    """The same with a mistake: the whole pool is written by a selection."""
    return jnp.where(jnp.any(places > 0), pool.at[places].set(rows), pool + 1)


def looped(step):
    def run(pool, rows, places, steps):
        return jax.lax.fori_loop(0, steps, lambda i, pool: step(pool, rows + i.astype(jnp.bfloat16), places), pool)

    return run


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_has_a_compiler_and_writes_in_place(generation):
    compiled = compile_for(generation, looped(written), POOL, ROWS, PLACES, STEPS, donate_argnums=(0,))
    assert pool_copies(compiled, POOL) == [] and unaliased(compiled) == []
    assert host_transfers(compiled) == [] and collectives(compiled) == []


def test_a_pool_that_is_selected_is_found():
    compiled = compile_for("v4", looped(selected), POOL, ROWS, PLACES, STEPS, donate_argnums=(0,))
    assert pool_copies(compiled, POOL) and pool_copies(compiled, POOL, loops_only=True)


def test_a_pool_that_is_needed_later_is_found():
    """The program gives the old pool back beside the new one, so that XLA copies it first."""
    compiled = compile_for("v4", lambda *given: (written(*given), given[0]), POOL, ROWS, PLACES, donate_argnums=(0,))
    assert pool_copies(compiled, POOL) and pool_copies(compiled, POOL, loops_only=True) == []


def test_a_pool_whose_last_axis_fills_no_tile_is_laid_out_anew_at_the_ends():
    """A kernel reads it in the order of its axes; a TPU keeps it in another one between programs."""
    narrow = jax.ShapeDtypeStruct((2**14, 8, 16, 80), jnp.bfloat16)

    def body(pool, out):
        pltpu.sync_copy(out.at[0], out.at[1])

    def run(pool):
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            input_output_aliases={0: 0},
        )(pool)

    compiled = compile_for("v6e", run, narrow, donate_argnums=(0,))
    assert relaid(compiled, narrow) == {("bf16", 2**14 * 8 * 16 * 80)}
    assert pool_copies(compiled, narrow) and pool_copies(compiled, narrow, ends=False) == []
    compiled = compile_for("v6e", run, POOL, donate_argnums=(0,))
    assert relaid(compiled, POOL) == set() and pool_copies(compiled, POOL) == []


def test_what_is_not_donated_is_found():
    compiled = compile_for("v5e", written, POOL, ROWS, PLACES)
    assert unaliased(compiled) == ["bfloat16[16384, 8, 16, 128]"] and pool_copies(compiled, POOL)


def test_a_call_of_the_host_is_found():
    def told(pool, rows, places):
        jax.debug.callback(lambda x: None, places)
        return written(pool, rows, places)

    assert host_transfers(compile_for("v6e", told, POOL, ROWS, PLACES, donate_argnums=(0,)))


def test_collectives_are_counted_by_kind_and_bytes():
    mesh = tpu_mesh("v5p", 8)
    spread = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=spread)

    def summed(x):
        along = {"in_specs": PartitionSpec(None, "tensor"), "out_specs": PartitionSpec()}
        total = x.sum()  # which the other needs, or XLA makes one exchange of both
        return jax.shard_map(lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, **along)(x * jnp.sin(total))

    found = collectives(compile_for("v5p", summed, x, devices=8))
    assert sorted((each.kind, each.bytes, each.of_layers) for each in found) == [
        ("all-reduce", 4, False),
        ("all-reduce", 8 * 128 * 4, True),
    ]


def test_a_pool_that_goes_through_vmem_is_told_apart():
    """XLA fetches a small one whole, scatters in VMEM, and writes it back."""
    compiled = compile_for("v6e", looped(selected), SMALL, ROWS, PLACES, STEPS, donate_argnums=(0,))
    assert pool_copies(compiled, SMALL) == [] and written_back(compiled, SMALL)


def scratch_of(tiles):
    """A kernel that fills `tiles` tiles of VMEM."""

    def body(which, x, out, scratch):
        def fill(i, carry):
            scratch[i] = x[...] * i.astype(jnp.float32)
            return carry

        jax.lax.fori_loop(0, tiles, fill, 0)
        out[...] = scratch[which[0]]

    def run(which, x):
        call = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
            scratch_shapes=[pltpu.VMEM((tiles, 8, 128), jnp.float32)],
        )
        return call(which, x)

    return run, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.float32)


def test_the_vmem_of_a_kernel_is_found():
    assert 2**22 <= vmem_bytes_used(compile_for("v6e", *scratch_of(1024))) < 2**22 + 2**16


@pytest.mark.parametrize(("generation", "megabytes"), [("v4", 16), ("v6e", 128)])
def test_a_kernel_that_asks_for_more_vmem_than_a_chip_has_does_not_compile(generation, megabytes):
    message = rf"would exceed memory \(size={megabytes * 2**20}\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        compile_for(generation, *scratch_of(megabytes * 256 + 256))


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_has_slices_of_four_and_eight_devices(generation, devices):
    mesh = tpu_mesh(generation, devices)
    assert mesh.shape == {"tensor": devices} and len(set(mesh.devices.flat)) == devices


@pytest.mark.parametrize(
    ("generation", "devices", "message"),
    [("v7", 1, r"generation must be one of v4, .*, got 'v7'"), ("v5e", 9, "devices must be 1 to 8, got 9")],
)
def test_a_slice_that_is_not_there_is_an_error(generation, devices, message):
    with pytest.raises(ValueError, match=message):
        tpu_mesh(generation, devices)


def test_slices_are_those_of_the_generations():
    assert tuple(SLICES) == GENERATIONS
    assert np.array([tuple(sizes) for sizes in SLICES.values()]).tolist() == [[4, 8]] * len(GENERATIONS)
