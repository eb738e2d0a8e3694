"""What the compiled decode loop does: asserted from its HLO."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.paged import PagedKV, append
from jaxbuf.models.language_model import load
from jaxbuf.recurrence.pool import extend_with_xla, fold_with_xla
from jaxbuf.serving import SamplingParams, generate_tokens, loop
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.target import Target
from tests.serving.program import (
    carry_shape,
    check_on_device,
    check_reused,
    gpu_kernels,
    made_in_loops,
    written_in_loops,
)


@pytest.fixture(scope="module")
def carry(lm):
    return carry_shape(make_batch(lm, [[1] * 30] * 8, SamplingParams(temperature=0.5), Decoding(200)))


def test_the_loop_carries_the_integers_of_all_slots_as_one_array_and_gives_them_back(carry, rng):
    slots = carry.cache.sequences.committed.shape

    def is_small(x):
        return x.dtype == jnp.int32 and x.shape == slots

    shapes, tree = jax.tree.flatten(carry)
    small = [jnp.asarray(rng.integers(0, 99, x.shape), x.dtype) if is_small(x) else x for x in shapes]
    integers, others = loop._join(tree.unflatten(small))
    assert integers.shape[0] > 5
    assert not any(map(is_small, others))
    back = loop._apart(carry, (integers, others))
    for x, y in zip(small, jax.tree.leaves(back), strict=True):
        assert x is y or (is_small(x) and np.array_equal(x, y))


def hlo(function, lm, carry):
    compiled = jax.jit(function, donate_argnums=1).lower(lm.model, carry, np.int32(9)).compile()
    return compiled.as_text()


@pytest.fixture(scope="module")
def decode_loop(lm, carry):
    return hlo(generate_tokens.__wrapped__, lm, carry)


@pytest.fixture(scope="module")
def copying_loop(lm, carry):
    """The same program with two mistakes: every step writes all checkpoints and all pages, by `jnp.where`."""

    def fold_by_selection(spec, pool, step, *inputs, target):
        folded = fold_with_xla(spec, pool, step.before, step.write)
        pool = dataclasses.replace(pool, checkpoints=jnp.where(step.any_fold, folded.checkpoints, pool.checkpoints))
        return extend_with_xla(spec, pool, dataclasses.replace(step, any_fold=jnp.array(False)), *inputs)

    def append_by_selection(kv, *where, **rows):
        after = append(kv, *where, **rows)
        changed = jnp.any(rows["lengths"] > 0)
        return PagedKV(jnp.where(changed, after.keys, kv.keys), jnp.where(changed, after.values, kv.values))

    def fresh(model, carry, steps):
        return generate_tokens.__wrapped__(model, carry, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxbuf.recurrence.buffered.extend_pool", fold_by_selection)
        patch.setattr("jaxbuf.attention.paged.append", append_by_selection)
        jax.clear_caches()  # or layers that were traced before, for other tests, would be taken
        found = hlo(fresh, lm, carry)
    jax.clear_caches()  # and those with mistakes by other tests
    return found


def test_no_step_writes_a_checkpoint_unless_a_slot_folds(lm, decode_loop):
    assert written_in_loops(decode_loop, lm.config.spec.state_shape) == []


@pytest.mark.slow
def test_the_same_check_flags_a_fold_that_selects(lm, copying_loop):
    assert written_in_loops(copying_loop, lm.config.spec.state_shape)


def test_no_step_makes_anything_as_large_as_a_page_pool(carry, decode_loop):
    """Tokens are written where they lie, and no step gathers all keys or values."""
    assert made_in_loops(decode_loop, carry.cache.layers[1].keys.size) == []


def test_the_same_check_flags_an_append_that_selects(carry, copying_loop):
    assert made_in_loops(copying_loop, carry.cache.layers[1].keys.size)


def test_one_block_of_pages_is_gathered_at_a_time(carry, decode_loop):
    """What the check for pools looks through is there: asked for the size of a block, it finds the gathers."""
    tokens, heads = 128, carry.cache.layers[1].keys.shape[2:]
    assert made_in_loops(decode_loop, 8 * tokens * math.prod(heads))


def test_the_loop_never_talks_to_the_host(decode_loop):
    check_on_device(decode_loop)


def test_every_byte_of_the_carry_is_reused(carry, decode_loop):
    check_reused(decode_loop, carry)


@pytest.mark.slow
def test_a_cpu_lowers_the_whole_loop_for_a_gpu_with_its_kernels():
    """And for two targets in one process it is two programs."""
    demo, kernels = load("demo"), {}
    for target in (None, Target("gpu", "Hopper"), Target("gpu", "Ampere")):
        lm = dataclasses.replace(demo, compiled_for=target)
        batch = make_batch(lm, [[1] * 30] * 8, decoding=Decoding(200))
        traced = generate_tokens.trace(lm.model, carry_shape(batch), np.int32(9))
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        kernels[target] = [name for name, _ in gpu_kernels(lowered)]
    # Layers share what is lowered. The demo's other operations are too narrow for a kernel.
    recurrent = ["convolve_channels", "extend_heads", "gated_norm_heads"]
    assert list(kernels.values()) == [[], recurrent, []], kernels
