"""The kernels of `extend`: they lower for their platform at the real sizes, and compute what the XLA path computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.extend import gpu_schedule, gpu_step
from jaxbuf.recurrence import RecurrenceSpec, buffered
from tests.gpu import checks
from tests.gpu.checks import new_inputs
from tests.pallas import extending
from tests.pallas.extending import (
    DELTA_NET,
    GLA,
    KDA,
    LARGE,
    LARGE_DELTA,
    LARGE_WINDOWS,
    LINEAR,
    NARROW,
    NO_DECAY,
    ODD,
    SLOTS,
    SMALL,
    STACKED,
    WIDE,
    WINDOWS,
    WINDOWS_DELTA,
)

KIMI = dataclasses.replace(KDA, heads=32, key_heads=32)
FALCON = RecurrenceSpec(heads=24, key_heads=1, key_dim=256, value_dim=128, delta=False)
MAMBA = RecurrenceSpec(heads=128, key_heads=8, key_dim=128, value_dim=64, delta=False)
QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)


@pytest.mark.slow
@pytest.mark.parametrize(
    "time, limit, max_pending, state, entry",
    [
        (1, 1, 1, "float32", "bfloat16"),
        (1, 16, 8, "float32", "bfloat16"),
        (5, 32, 8, "float32", "bfloat16"),
        pytest.param(9, 32, 16, "float32", "bfloat16", marks=pytest.mark.exhaustive),
        (1, 256, 8, "float32", "bfloat16"),
        pytest.param(1, 256, 1, "float32", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(1, 16, 8, "bfloat16", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(5, 32, 8, "float32", "float32", marks=pytest.mark.exhaustive),
        (1, 1, 1, "split", "bfloat16"),
        pytest.param(1, 16, 8, "split", "bfloat16", marks=pytest.mark.exhaustive),
        (5, 32, 8, "split", "bfloat16"),
        pytest.param(1, 256, 8, "split", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(1, 1, 1, "split8", "bfloat16", marks=pytest.mark.exhaustive),
        (1, 16, 8, "split8", "bfloat16"),
        pytest.param(5, 32, 8, "split8", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(1, 256, 8, "split8", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(time, limit, max_pending, state, entry):
    dtypes = {"state_dtype": state, "entry_dtype": jnp.dtype(entry)}
    assert "mosaic_gpu" in lowered(QWEN, time, limit=limit, max_pending=max_pending, **dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("time, state", [(1, "float32"), (5, "split")])
def test_the_gpu_kernel_lowers_for_mamba_2s_heads(time, state):
    assert "mosaic_gpu" in lowered(MAMBA, time, limit=32, max_pending=8, state_dtype=state)


@pytest.mark.parametrize(
    "time, limit, max_pending, state, entry",
    [
        pytest.param(1, 1, 1, "float32", "bfloat16", marks=pytest.mark.slow),
        (1, 32, 8, "float32", "bfloat16"),
        pytest.param(5, 32, 8, "split", "float32", marks=pytest.mark.slow),
        pytest.param(1, 256, 8, "split8", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(16, 32, 16, "bfloat16", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_lowers_for_keys_of_256(time, limit, max_pending, state, entry):
    dtypes = {"state_dtype": state, "entry_dtype": jnp.dtype(entry)}
    assert "mosaic_gpu" in lowered(FALCON, time, limit=limit, max_pending=max_pending, **dtypes)


def test_the_gpu_kernel_lowers_for_narrow_heads_with_a_later_chunk_of_any_length():
    assert "mosaic_gpu" in lowered(NARROW, 1, limit=40, max_pending=8)  # 40 entries: 24 behind the first chunk


@pytest.mark.parametrize("spec, time", [(QWEN, 8), pytest.param(MAMBA, 16, marks=pytest.mark.exhaustive)])
def test_the_gpu_kernel_lowers_for_trees(spec, time):
    assert "mosaic_gpu" in lowered(spec, time, limit=32, max_pending=16, parents=jnp.full((128, time), -1))


@pytest.mark.parametrize(
    "time, limit, max_pending, state",
    [
        (1, 1, 1, "float32"),
        pytest.param(1, 16, 8, "float32", marks=pytest.mark.slow),
        pytest.param(5, 32, 5, "float32", marks=pytest.mark.slow),
        pytest.param(9, 32, 16, "bfloat16", marks=pytest.mark.slow),
        pytest.param(1, 256, 8, "float32", marks=pytest.mark.exhaustive),
        pytest.param(1, 16, 8, "split", marks=pytest.mark.slow),
        pytest.param(1, 1, 1, "split", marks=pytest.mark.exhaustive),
        pytest.param(5, 32, 8, "split", marks=pytest.mark.slow),
        pytest.param(1, 256, 8, "split8", marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_lowers_for_a_decay_a_channel(time, limit, max_pending, state):
    assert "mosaic_gpu" in lowered(KIMI, time, limit=limit, max_pending=max_pending, state_dtype=state)


@pytest.mark.parametrize("limit, max_pending", [(1, 1), (16, 8)])
def test_the_gpu_kernel_lowers_without_a_decay(limit, max_pending):
    spec = dataclasses.replace(QWEN, decay="none")
    assert "mosaic_gpu" in lowered(spec, 1, limit=limit, max_pending=max_pending)


def lowered(spec, time: int, rows: int = 128, parents=None, **sizes) -> str:
    """A step's program for CUDA."""
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=rows, **sizes))
    inputs = jax.eval_shape(lambda: new_inputs(np.random.default_rng(0), spec, rows, time, jnp.bfloat16))

    def step(cache, *inputs):
        slots = jnp.arange(1, rows + 1, dtype=jnp.int32)
        return buffered.extend(spec, cache, *inputs, slots=slots, parents=parents, target="H100")

    return jax.jit(step, donate_argnums=0).trace(cache, *inputs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        (NARROW, "split", "bfloat16", 4, 1e-2),
        pytest.param(NARROW, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split8", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, "split8", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.slow),
        pytest.param(WINDOWS, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.slow),
        pytest.param(WINDOWS, "split", "bfloat16", 4, 1e-2, marks=pytest.mark.slow),
        pytest.param(WINDOWS, "split8", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(WINDOWS, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(WINDOWS_DELTA, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(WIDE, "split", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(WIDE, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(LARGE, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.slow),
        pytest.param(LARGE, "split", "float32", 18, 2e-3, marks=pytest.mark.slow),
        pytest.param(LARGE, "split8", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(LARGE_DELTA, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(LARGE_DELTA, "split8", "float32", 4, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(LARGE_WINDOWS, "split", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "split", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "split8", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(ODD, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(DELTA_NET, "float32", "float32", 4, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(LINEAR, "split", "bfloat16", 18, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(KDA, "float32", "float32", 18, 1e-4, marks=pytest.mark.slow),
        pytest.param(KDA, "bfloat16", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(KDA, "split", "float32", 18, 2e-3, marks=pytest.mark.slow),
        pytest.param(KDA, "split8", "float32", 18, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(GLA, "split", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(GLA, "float32", "bfloat16", 4, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(GLA, "float32", "float32", 18, 1e-4, marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_is_the_xla_path_over_ragged_steps_and_folds(rng, monkeypatch, spec, state, entry, limit, bound):
    # Two processors: every block then serves two heads at a time, and more than one after the other.
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    extending.check_ragged("gpu", rng, spec, state, entry, limit, bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        (SMALL, "float32", "float32", 1, 1e-5),
        pytest.param(NARROW, "bfloat16", "bfloat16", 5, 1e-2, marks=pytest.mark.exhaustive),
        pytest.param(ODD, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param(NO_DECAY, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        (DELTA_NET, "float32", "float32", 1, 1e-5),
        (WINDOWS, "float32", "float32", 1, 1e-5),
        pytest.param(WINDOWS, "split8", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        (LARGE, "float32", "float32", 1, 1e-5),
        pytest.param(LARGE_DELTA, "split", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(LARGE_WINDOWS, "split8", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(WINDOWS_DELTA, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param(WIDE, "float32", "float32", 2, 1e-5, marks=pytest.mark.exhaustive),
        (KDA, "float32", "float32", 2, 1e-5),
        # Not the step's kernel: its products on the tensor cores lose 2^-16.
        pytest.param(GLA, "float32", "float32", 2, 4e-5, marks=pytest.mark.exhaustive),
        (GLA, "split", "float32", 2, 2e-3),
        pytest.param(GLA, "split8", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(KDA, "split", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        # A ring longer than those whose entries are copied past the registers.
        pytest.param(KDA, "split8", "float32", 34, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "split", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, "split8", "float32", 2, 2e-3, marks=pytest.mark.exhaustive),
    ],
)
def test_the_recurrent_step_is_the_xla_path(rng, spec, state, entry, limit, bound):
    extending.check_recurrent("gpu", rng, spec, state, entry, limit, bound)


@pytest.mark.parametrize(
    ("spec", "state"),
    [
        pytest.param(WINDOWS, "float32", marks=pytest.mark.slow),
        pytest.param(DELTA_NET, "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(LARGE_DELTA, "split8", marks=pytest.mark.exhaustive),
    ],
)
def test_the_recurrent_step_of_many_items_is_the_xla_path(rng, monkeypatch, spec, state):
    """Blocks of such launches have more of a state each, and ask for that of later ones."""
    monkeypatch.setattr(gpu_step, "FEW_ITEMS", 0)
    monkeypatch.setattr(gpu_step, "AHEAD", 1)
    jax.clear_caches()
    extending.check_recurrent("gpu", rng, spec, state, "float32", 1, 1e-5 if state == "float32" else 2e-3)
    jax.clear_caches()


@pytest.mark.parametrize(
    "limit, held, time, pending",  # rings of 56, 72, 120 and 152
    [
        pytest.param(40, 30, 3, 16, marks=pytest.mark.exhaustive),
        pytest.param(56, 54, 1, 16, marks=pytest.mark.exhaustive),
        pytest.param(100, 97, 1, 16, marks=pytest.mark.exhaustive),
        pytest.param(150, 141, 1, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_later_chunks_of_entries_are_read_and_folded_as_by_the_xla_path(rng, monkeypatch, limit, held, time, pending):
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    extending.check_long_ring("gpu", rng, limit, held, time, pending)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, state, bound",
    [
        (KDA, "float32", 1e-4),
        pytest.param(KDA, "bfloat16", 5e-3, marks=pytest.mark.exhaustive),
        pytest.param(KDA, "split8", 2e-3, marks=pytest.mark.exhaustive),
        (GLA, "split", 2e-3),
        pytest.param(GLA, "float32", 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(NARROW, "float32", 1e-4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_row_may_have_more_entries_than_its_limit(rng, monkeypatch, spec, state, bound):
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    extending.check_more_than_the_limit("gpu", rng, spec, state, bound)


@pytest.mark.slow
def test_a_fold_of_more_entries_than_the_limit_has_the_same_bits_whatever_the_tokens(rng):
    """One token is served with the entries in shared memory, and nine chunk by chunk."""
    cache, one = buffered.init(KDA, slots=1, limit=16, max_pending=10, entry_dtype=jnp.float32), jnp.array([1])
    most = cache.cursor.ring - cache.cursor.max_pending
    assert cache.cursor.room == 16 < most
    prompt = new_inputs(rng, KDA, 1, most + 1, jnp.float32)
    _, cache = buffered.prefill(KDA, cache, *prompt, slots=one, keep=most)
    tokens = new_inputs(rng, KDA, 1, 9, jnp.float32)
    found = [
        extending.extend_by("gpu", KDA, cache, [x[:, :time] for x in tokens], slots=one)[1].pool.checkpoints
        for time in (1, 9)
    ]
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0


@pytest.mark.slow
def test_rejected_drafts_that_are_not_finite_change_no_bit(rng):
    """A kernel's next step, which folds, gives the bits that it gives after finite drafts."""
    extending.check_rejected_drafts("gpu", rng)


@pytest.mark.exhaustive
def test_rejected_drafts_that_are_not_finite_change_no_bit_of_recurrent_steps(rng):
    checks.check_rejected(rng, 1, 1, spec=NARROW, implementation="gpu", interpret=True, steps=6, rows=SLOTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("state", ["split", "split8"])
def test_rejected_drafts_that_are_not_finite_change_no_bit_with_a_decay_a_channel(rng, state):
    how = {"implementation": "gpu", "interpret": True, "rows": SLOTS, "state_dtype": state}
    checks.check_rejected(rng, spec=KDA, steps=6, **how)


@pytest.mark.slow
def test_the_null_slot_gives_zeros_and_writes_nothing(rng):
    extending.check_null_slot("gpu", rng)


@pytest.mark.slow
def test_a_forced_fold_by_the_kernel_is_that_of_the_xla_path(rng):
    extending.check_forced_fold("gpu", rng)


@pytest.mark.exhaustive
def test_the_gpu_kernel_follows_forks_and_the_order_that_a_tree_left(rng):
    extending.check_forks("gpu", rng)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(NARROW, marks=pytest.mark.slow),
        pytest.param(LINEAR, marks=pytest.mark.exhaustive),
        pytest.param(STACKED, marks=pytest.mark.exhaustive),
        pytest.param(WINDOWS, marks=pytest.mark.exhaustive),
        pytest.param(WINDOWS_DELTA, marks=pytest.mark.exhaustive),
        pytest.param(KDA, marks=pytest.mark.exhaustive),
        pytest.param(DELTA_NET, marks=pytest.mark.exhaustive),
        pytest.param(LARGE, marks=pytest.mark.exhaustive),
    ],
)
def test_trees_are_those_of_the_xla_path(rng, monkeypatch, spec):
    """Of random trees, whose committed paths fold; what is not on a path may be NaN."""
    monkeypatch.setattr(gpu_schedule, "PROCESSORS", 2)
    extending.check_trees("gpu", rng, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [SMALL, *(pytest.param(spec, marks=pytest.mark.exhaustive) for spec in (KDA, WINDOWS, WIDE, LARGE, LARGE_DELTA))],
)
def test_tokens_at_once_and_one_by_one_store_the_same_bits(rng, spec):
    extending.check_at_once("gpu", rng, spec)


@pytest.mark.parametrize(
    "spec, limit, reason",
    [
        (RecurrenceSpec(4, 2, key_dim=32, value_dim=64), 4, "key_dim 64, 128 or 256, .* got 32 and 64"),
        (
            RecurrenceSpec(4, 2, key_dim=64, value_dim=64, decay="channel"),
            4,
            "128 for a decay a channel, got 64 and 64",
        ),
        (NARROW, 2000, "a ring of at most 1024 entries, got 2008"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, spec, limit, reason):
    cache = buffered.init(spec, slots=1, limit=limit, max_pending=4)
    *vectors, log_decay, beta = new_inputs(rng, spec, 1, 1, jnp.bfloat16)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this extend: .*{reason}'):
        buffered.extend(
            spec,
            cache,
            *vectors,
            log_decay,
            beta,
            slots=jnp.array([1]),
            implementation="gpu",
            target="H100",
        )
