"""The TPU kernels of softmax attention over pages, compiled for every generation at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from jaxbuf.attention import gated
from jaxbuf.attention.latent import LatentPages, append_and_attend_latent
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.memory.sequences import make_launch
from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.target import as_target
from jaxbuf.tpu_compiler import GENERATIONS, compile_for, unaliased
from tests.pallas.test_attend import shapes, step
from tests.portability.artefact import pool_copies, vmem_bytes_used

# JAX writes programs for other machines to its cache, and can't read them.
UNREADABLE = "ignore:Error reading persistent compilation cache entry"
pytestmark = [pytest.mark.tpu_compiler, pytest.mark.filterwarnings(UNREADABLE)]

# Rows, tokens of each, heads of queries and of keys, numbers of a head.
LLAMA_8B, QWEN_4B = (128, 1, 32, 8, 128), (128, 1, 16, 4, 256)
CASES = [
    # `test_operations` has these for every generation.
    ("v5e", LLAMA_8B, False, "bfloat16"),
    ("v4", QWEN_4B, False, "bfloat16"),
    ("tpu7x", (64, 1, 4, 1, 128), False, "bfloat16"),  # one of 8 chips
    ("v4", (16, 16, 16, 4, 256), True, "bfloat16"),
    ("v5e", (64, 5, 32, 8, 128), True, "bfloat16"),
    ("v5p", (16, 5, 4, 1, 256), True, "bfloat16"),
    ("v6e", (16, 16, 8, 2, 128), True, "bfloat16"),  # one of 4 chips
    ("tpu7x", (16, 16, 32, 8, 128), True, "bfloat16"),
    ("v4", (8, 1, 32, 32, 128), False, "bfloat16"),  # no groups
    ("v5e", (8, 2, 12, 6, 128), False, "bfloat16"),
    ("v6e", (16, 4, 32, 8, 128), True, "float32"),
    ("tpu7x", (16, 1, 4, 1, 128), False, "float32"),
]


def compiled_step(generation, sizes, trees, dtype):
    given = shapes(*sizes, trees=trees, dtype=jnp.dtype(dtype))
    how = {"target": generation, "implementation": "tpu"}
    return given, compile_for(generation, lambda *given: step(*given, **how), *given, donate_argnums=(3,))


@pytest.mark.parametrize("generation, sizes, trees, dtype", CASES)
def test_attention_over_pages_compiles_and_writes_in_place(generation, sizes, trees, dtype):
    given, compiled = compiled_step(generation, sizes, trees, dtype)
    assert compiled.as_text().count("tpu_custom_call") >= 1
    assert pool_copies(compiled, given[3]) == []
    assert unaliased(compiled) == [f"{dtype}{list(given[0].shape)}"], "all but the outputs"
    assert vmem_bytes_used(compiled) <= vmem_bytes(generation)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_latent_attention_compiles_and_writes_in_place_within_a_loop(generation):
    """Kimi Linear's. XLA keeps its pages as it keeps narrow heads', see below."""
    rows, time, heads, latent, rank, max_pages = 32, 1 + 2 * (generation == "v6e"), 32, 576, 512, 68

    def make(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pages = LatentPages(make(1 + rows * max_pages, 16, 1, latent), rank)
    given = make(rows, time, heads, 192), make(rows, time, latent), pages, make(heads, 256, rank)
    where = {name: make(rows, dtype="int32") for name in ("slots", "start", "lengths")}

    def run(steps, q, latents, pages, up, table, where):
        def one(_, carry):
            out, pages = append_and_attend_latent(carry[0], latents, carry[1], up, table, **where, target=generation)
            return jnp.concatenate([out, carry[0][..., 128:]], axis=-1), pages

        return jax.lax.fori_loop(0, steps, one, (q, pages))

    table = make(rows + 1, max_pages, dtype="int32")
    compiled = compile_for(generation, run, make(dtype="int32"), *given, table, where, donate_argnums=(3,))
    assert "tpu_custom_call" in compiled.as_text()
    copies = pool_copies(compiled, pages)
    assert all(line.startswith("main") for line in copies), copies
    assert vmem_bytes_used(compiled) <= vmem_bytes(generation)


def test_narrow_heads_are_padded_once_a_program():
    """XLA keeps pages of 64 numbers with the pages' axis in a tile's lanes. A program of many steps brings them to the
    kernel's order before its loop and back behind it; in the loop they are written in place."""
    given = shapes(64, 1, 32, 8, 64)

    def run(steps, q, k, v, kv, table, where):
        def one(i, carry):
            where_now = where | {"start": where["start"] + i}
            return append_and_attend(carry[0], k, v, carry[1], table, **where_now, target="v5e", implementation="tpu")

        return jax.lax.fori_loop(0, steps, one, (q, kv))

    steps = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for("v5e", run, steps, *given, donate_argnums=(4,))
    copies = pool_copies(compiled, given[3])
    assert all(line.startswith("main") for line in copies), copies


GATED = [
    *((generation, (32, 1, 32, 8, 128), False) for generation in GENERATIONS),  # Llama 8B
    ("v5e", (16, 5, 16, 4, 256), True),
    ("v6e", (16, 2, 4, 1, 128), False),  # one of 8 chips
    ("tpu7x", (8, 16, 32, 8, 128), True),
]


@pytest.mark.parametrize("generation, sizes, trees", GATED)
def test_gated_attention_compiles_and_writes_in_place(generation, sizes, trees):
    rows, time, heads, kv_heads, head_dim = sizes
    how = {"slots": rows, "kv_heads": kv_heads, "head_dim": head_dim, "max_pending": 16, "trees": trees}
    how |= {"window": 256, "pages": rows * kv_heads * 160, "capacity": 8192, "dtype": jnp.bfloat16}
    cache = jax.eval_shape(lambda: gated.init(**how))

    def make(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    inputs = [make(rows, time, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    inputs.append(make(rows, time, kv_heads, dtype=jnp.float32))
    where = {name: make(rows, dtype=jnp.int32) for name in ("slots", "lengths")}
    if trees:
        where["parents"] = make(rows, time, dtype=jnp.int32)

    def begun(cache, gates, where):
        """A layer's memory when it attends, and the plan that it goes by: what comes before is XLA's for any target."""
        of, layers = cache.sequences, (cache.layer,)
        time, target = gates.shape[1], as_target(generation)
        launch = make_launch(of.committed, of.max_pending, **where, time=time, target=target)
        plan, _, (layer,) = gated._KIND.begin(cache.shared, layers, launch, (gates > 0.4,))
        return plan, layer

    plan, layer = jax.eval_shape(begun, cache, inputs[3], where)

    def run(plan, layer, inputs):
        return plan.attend(layer, *inputs, implementation="tpu")

    compiled = compile_for(generation, run, plan, layer, inputs, donate_argnums=(1,))
    assert compiled.as_text().count("tpu_custom_call") >= 1
    pools = [getattr(layer, name) for name in ("keys", "values", "admitted_keys", "admitted_values")]
    assert pool_copies(compiled, pools) == []
    assert vmem_bytes_used(compiled) <= vmem_bytes(generation)
