"""The TPU kernel of `extend` computes, in Pallas' interpreter, what the XLA path computes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.extend import Call, supports, tpu_plan
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.target import Target
from tests.gpu.checks import new_inputs
from tests.pallas import extending
from tests.pallas.extending import DELTA_NET, GLA, KDA, LINEAR, NARROW, ODD, SLOTS, SMALL, STACKED

WIDE = RecurrenceSpec(heads=2, key_heads=1, key_dim=256, value_dim=256)
NEMOTRON = RecurrenceSpec(heads=3, key_heads=1, key_dim=128, value_dim=80, delta=False)
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        (NARROW, "float32", "float32", 4, 1e-5),
        pytest.param(SMALL, "float32", "bfloat16", 4, 1e-2, marks=exhaustive),
        pytest.param(NARROW, "float32", "float32", 40, 1e-5, marks=exhaustive),
        pytest.param(NARROW, "split", "bfloat16", 4, 1e-2, marks=slow),
        pytest.param(SMALL, "split8", "float32", 4, 2e-3, marks=exhaustive),
        pytest.param(NARROW, "bfloat16", "bfloat16", 4, 1e-2, marks=exhaustive),
        pytest.param(STACKED, "float32", "float32", 4, 1e-5, marks=exhaustive),
        pytest.param(NEMOTRON, "float32", "float32", 4, 1e-5, marks=exhaustive),
        pytest.param(NEMOTRON, "split8", "bfloat16", 4, 1e-2, marks=slow),
        pytest.param(DELTA_NET, "float32", "float32", 4, 1e-5, marks=exhaustive),
        pytest.param(LINEAR, "float32", "float32", 4, 1e-5, marks=slow),
        pytest.param(KDA, "float32", "float32", 4, 1e-5, marks=slow),
        pytest.param(KDA, "split", "bfloat16", 18, 1e-2, marks=exhaustive),
        pytest.param(GLA, "float32", "float32", 4, 1e-5, marks=slow),
        pytest.param(GLA, "float32", "bfloat16", 4, 1e-2, marks=exhaustive),
        pytest.param(WIDE, "float32", "float32", 4, 1e-5, marks=slow),
    ],
)
def test_the_tpu_kernel_is_the_xla_path_over_ragged_steps_and_folds(rng, spec, state, entry, limit, bound):
    extending.check_ragged("tpu", rng, spec, state, entry, limit, bound)


@pytest.mark.parametrize(
    "spec, state, entry, limit, bound",
    [
        pytest.param(SMALL, "float32", "float32", 1, 1e-5, marks=slow),
        pytest.param(ODD, "bfloat16", "bfloat16", 2, 1e-2, marks=exhaustive),
        pytest.param(KDA, "float32", "float32", 2, 1e-5, marks=slow),
    ],
)
def test_the_recurrent_step_is_the_xla_path(rng, spec, state, entry, limit, bound):
    extending.check_recurrent("tpu", rng, spec, state, entry, limit, bound)


@slow
@pytest.mark.parametrize("spec, all_heads", [(SMALL, 4), pytest.param(KDA, 2, marks=exhaustive)])
def test_a_row_whose_heads_do_not_fit_at_once_is_served_in_blocks_of_heads(rng, monkeypatch, spec, all_heads):
    monkeypatch.setattr(tpu_plan.Plan, "vmem", lambda plan: 0 if plan.heads < all_heads else 2**40)
    # Limit 5: no other test's program has these sizes, and none that was compiled without the patch is run.
    extending.check_ragged("tpu", rng, spec, "float32", "float32", 5, 1e-5)


@slow
@pytest.mark.parametrize(
    "limit, held, time, pending", [pytest.param(100, 97, 1, 16, marks=exhaustive), (40, 30, 3, 16)]
)
def test_long_rings_are_read_and_folded_as_by_the_xla_path(rng, limit, held, time, pending):
    extending.check_long_ring("tpu", rng, limit, held, time, pending)


@slow
def test_rejected_drafts_that_are_not_finite_change_no_bit(rng):
    extending.check_rejected_drafts("tpu", rng)


@slow
def test_the_null_slot_gives_zeros_and_writes_nothing(rng):
    extending.check_null_slot("tpu", rng)


@slow
def test_a_forced_fold_by_the_kernel_is_that_of_the_xla_path(rng):
    extending.check_forced_fold("tpu", rng)


@exhaustive
def test_the_tpu_kernel_follows_forks_and_the_order_that_a_tree_left(rng):
    extending.check_forks("tpu", rng)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(NARROW, marks=slow),
        pytest.param(STACKED, marks=exhaustive),
        pytest.param(LINEAR, marks=exhaustive),
        pytest.param(KDA, marks=slow),
        pytest.param(DELTA_NET, marks=exhaustive),
    ],
)
def test_trees_are_those_of_the_xla_path(rng, spec):
    extending.check_trees("tpu", rng, spec)


@pytest.mark.parametrize("spec", [SMALL, pytest.param(KDA, marks=slow), pytest.param(STACKED, marks=exhaustive)])
def test_tokens_at_once_and_one_by_one_store_the_same_bits(rng, spec):
    extending.check_at_once("tpu", rng, spec)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"entry_dtype": jnp.float16}, "float32 or bfloat16 entries, got float16"),
        ({"state_dtype": jnp.float16}, "a float32 or bfloat16 checkpoint, got float16"),
        ({"limit": 20_000}, r"at most \d+ bytes of VMEM, got \d+ with 1 of 2 heads at once"),
    ],
)
def test_what_the_tpu_kernel_cannot_serve_is_an_error_that_says_why(rng, changes, reason):
    spec = RecurrenceSpec(heads=2, key_heads=2, key_dim=64, value_dim=64)
    cache = buffered.init(spec, slots=SLOTS, **({"limit": 4, "max_pending": 2} | changes))
    inputs, slots = new_inputs(rng, spec, 1, 1, jnp.float32), jnp.array([1])
    with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this extend: it needs {reason}'):
        buffered.extend(spec, cache, *inputs, slots=slots, implementation="tpu", target="v6e")


@pytest.mark.parametrize("generation, served", [("v4", False), ("v5e", True), ("tpu7x", True)])
def test_what_fits_depends_on_the_generations_vmem(generation, served):
    spec = RecurrenceSpec(heads=32, key_heads=32, key_dim=128, value_dim=128, decay="channel")
    call = call_of(spec, ring=120)
    found = supports(call, platform="tpu", generation=generation)
    assert (found is None) == served, found


def test_what_fits_depends_on_the_scalar_memory_too():
    assert supports(call_of(SMALL, 256, rows=512), platform="tpu", generation="v5e") is None
    reason = supports(call_of(SMALL, 256, rows=1024), platform="tpu", generation="v5e")
    assert reason.startswith("it needs at most 983040 bytes of integers, got 1052672 for 1024 rows of 248 entries")


def call_of(spec, ring, rows=64):
    sizes = {name: getattr(spec, name) for name in ("heads", "key_heads", "key_dim", "value_dim", "decay", "delta")}
    dtypes = {"state": jnp.dtype("float32")} | dict.fromkeys(("entry", "probe", "out"), jnp.dtype("bfloat16"))
    return Call(rows=rows, time=1, ring=ring, max_pending=8, **sizes, **dtypes)


def test_a_v6e_gets_the_kernel_by_itself():
    from jaxbuf.recurrence.launch import kernel_serves

    settings = {"ring": 24, "state_dtype": "float32", "entry_dtype": jnp.bfloat16}
    assert kernel_serves(SMALL, **settings, target=Target("tpu", "v6e"))
    assert not kernel_serves(SMALL, **settings, target=Target("tpu", "v3"))
    assert np.isfinite(tpu_plan.make_plan(call_of(SMALL, 24), "v6e").vmem())
