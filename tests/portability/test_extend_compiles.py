"""The TPU kernel of `extend` as the real compiler makes it, beside the sizes that `test_operations` has: arrays that
are narrower than a tile, long rings, many tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.tpu_compiler import GENERATIONS, compile_for, on_mesh, tpu_mesh, unaliased
from tests.gpu.checks import new_inputs
from tests.portability.artefact import pool_copies, vmem_bytes_used, written_back

pytestmark = pytest.mark.tpu_compiler
ROWS = 64
SLOTS = np.arange(1, ROWS + 1, dtype=np.int32)
GDN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
WIDE = RecurrenceSpec(heads=16, key_heads=8, key_dim=256, value_dim=256)
KDA = RecurrenceSpec(heads=32, key_heads=32, key_dim=128, value_dim=128, decay="channel")
GLA = RecurrenceSpec(heads=8, key_heads=4, key_dim=128, value_dim=128, decay="channel", delta=False)
MAMBA = RecurrenceSpec(heads=128, key_heads=8, key_dim=128, value_dim=64, delta=False)
NEMOTRON = RecurrenceSpec(heads=96, key_heads=8, key_dim=128, value_dim=80, delta=False)
# What one of eight devices has.
NEMOTRON_8 = RecurrenceSpec(heads=12, key_heads=1, key_dim=128, value_dim=80, delta=False)
GDN_8 = RecurrenceSpec(heads=4, key_heads=2, key_dim=128, value_dim=128)
GDN_16 = RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=128)
NARROW = RecurrenceSpec(heads=8, key_heads=4, key_dim=64, value_dim=64, decay="none", delta=False)
SHORT, LONG = {"limit": 16, "max_pending": 8}, {"limit": 188, "max_pending": 8}


def shapes(spec, time, tree, dtype, sizes):
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, **sizes))
    inputs = jax.eval_shape(lambda: new_inputs(np.random.default_rng(0), spec, ROWS, time, dtype))
    parents = jax.ShapeDtypeStruct((ROWS, time), jnp.int32) if tree else None
    return cache, parents, inputs


def step(spec, generation, cache, parents, inputs):
    how = {"implementation": "tpu", "target": generation}
    return buffered.extend(spec, cache, *inputs, slots=SLOTS, parents=parents, **how)


def row_major(generation, tree):
    """How an array lies whose last axis is the fastest, whatever that is padded to."""
    place = on_mesh(tpu_mesh(generation, 1), jax.ShapeDtypeStruct((), jnp.int32)).sharding
    return jax.tree.map(lambda x: Format(Layout(tuple(range(len(x.shape)))), place), tree)


def check(spec, generation, time=1, tree=False, dtype=jnp.bfloat16, **sizes):
    """Compiles a step whose pool lies row by row, as the kernel has it, and asserts that it stays in place."""
    cache, parents, inputs = shapes(spec, time, tree, dtype, SHORT | sizes)
    run = functools.partial(step, spec, generation)
    # XLA may lay out per-head gates as it likes: the kernel gets the live entries' from XLA, which appends new ones.
    arrays = cache.pool if spec.decay == "channel" else _without_gates(cache.pool)
    formats = row_major(generation, arrays)
    chosen = {id(x): y for x, y in zip(jax.tree.leaves(arrays), jax.tree.leaves(formats), strict=True)}
    layouts = jax.tree.map(lambda x: chosen.get(id(x)), cache)
    jitted = jax.jit(run, donate_argnums=0, in_shardings=(layouts, None, None), out_shardings=(None, layouts))
    compiled = compile_for(generation, jitted, cache, parents, inputs)
    assert "tpu_custom_call" in compiled.as_text()
    assert pool_copies(compiled, arrays) == [] and written_back(compiled, arrays) == []
    held = {(x.shape, x.dtype) for x in jax.tree.leaves(cache.pool) if x.size}
    kept = {f"{dtype}{list(shape)}" for shape, dtype in held}
    assert not kept.intersection(unaliased(compiled))
    assert vmem_bytes_used(compiled) <= vmem_bytes(generation)


def _without_gates(pool):
    return [x for x in (pool.checkpoints, pool.keys, pool.updates, pool.low, pool.low_scales) if x is not None]


EACH = [pytest.param(name, marks=() if name == "v5e" else pytest.mark.exhaustive) for name in GENERATIONS]


@pytest.mark.parametrize("generation", EACH)
@pytest.mark.parametrize("spec", [MAMBA, NEMOTRON, NEMOTRON_8, GLA, NARROW])
def test_arrays_narrower_than_a_tile_stay_in_place_where_they_lie_row_by_row(spec, generation):
    check(spec, generation, 5 if spec is NEMOTRON else 1)


@pytest.mark.parametrize(
    "spec, generations, settings",
    [
        (GDN, GENERATIONS, {"time": 16, "limit": 32, "max_pending": 16}),
        (GDN, ("v4", "v6e"), LONG),
        (GDN, ("v5p", "tpu7x"), {"time": 5, "state_dtype": "split8"}),
        (GDN, ("v5e",), {"time": 5, "entry_dtype": jnp.float32, "dtype": jnp.float32}),
        (GDN, ("tpu7x",), {"limit": 1, "max_pending": 1}),
        (GDN, ("v5p",), {"state_dtype": "bfloat16"}),
        (GDN_8, ("v4", "v5e"), {"time": 5}),
        (GDN_16, GENERATIONS, {"time": 8, "tree": True}),
        (WIDE, GENERATIONS, {}),
        (WIDE, ("v5e", "tpu7x"), {"time": 8, "tree": True}),
        (KDA, ("v4", "tpu7x"), {"time": 16, "limit": 32, "max_pending": 16}),
        (KDA, ("v5e", "tpu7x"), LONG),
        (KDA, ("v6e",), {"time": 5, "state_dtype": "split8"}),
        (MAMBA, ("v5e", "tpu7x"), {"limit": 238}),
        (NEMOTRON, ("v5p",), {"time": 8, "tree": True, "state_dtype": "split8"}),
    ],
)
def test_the_kernel_compiles_and_its_pool_stays_in_place(spec, generations, settings):
    for generation in generations:
        check(spec, generation, **settings)


@pytest.mark.parametrize("spec", [GDN, NEMOTRON, NEMOTRON_8, GLA, NARROW])
def test_a_loop_of_steps_copies_no_pool(spec):
    """Whatever layout XLA has given the program's own arguments: it may be another one, and copied before the loop."""
    cache, parents, inputs = shapes(spec, 1, False, jnp.bfloat16, SHORT)

    def loop(cache, inputs):
        def body(_, carry):
            out, cache = step(spec, "v5e", carry[0], parents, inputs)
            return buffered.commit(cache, jnp.ones(ROWS, jnp.int32), slots=SLOTS), out

        return jax.lax.fori_loop(0, 32, body, (cache, inputs[2]))

    compiled = compile_for("v5e", loop, cache, inputs, donate_argnums=(0,))
    assert "tpu_custom_call" in compiled.as_text()
    assert pool_copies(compiled, cache.pool, loops_only=True) == []


def test_a_call_that_does_not_fit_into_v4s_vmem_is_xlas():
    cache, parents, inputs = shapes(KDA, 1, False, jnp.bfloat16, LONG)
    with pytest.raises(ValueError, match=r"it needs at most .* bytes of VMEM, got"):
        compile_for("v4", functools.partial(step, KDA, "v4"), cache, parents, inputs)
