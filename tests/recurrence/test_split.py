"""Split checkpoints: what is read is a bfloat16 state, what is kept is nearly a float32 one."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test
from jax.extend.core import Literal, jaxprs_in_params

from jaxbuf.recurrence import RecurrenceSpec, buffered, recurrent, traffic
from jaxbuf.recurrence.state_format import decode, encode, state_format
from tests.compiling import MANY_STEPS
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES, worst_row
from tests.recurrence.families import inputs as inputs_of
from tests.recurrence.test_schedules import Schedule, bounded
from tests.recurrence.twin import SHARED

GDN = FAMILIES["Gated DeltaNet"]
KEPT = {"split": 1e-4, "split8": 4e-4}  # how far the state may be off without the delta rule
RECALLED = 5e-3  # and with it: updates are made with what the high half recalls
OUT = 1e-2
both = pytest.mark.parametrize("state_dtype", ["split", "split8"])


@both
def test_both_halves_are_the_state_and_the_high_one_is_its_bfloat16(rng, state_dtype):
    state = (rng.standard_normal((3, 4, 24, 16)) * 10.0 ** rng.integers(-6, 6, (3, 4, 24, 1))).astype(np.float32)
    form = state_format(state_dtype)
    high, low, scale = jax.jit(encode, static_argnums=1)(state, form)
    np.testing.assert_array_equal(high, jnp.asarray(state, jnp.bfloat16))
    rest = state - np.asarray(high, np.float32)
    kept = np.asarray(decode(high, low, scale))
    largest = np.abs(rest).max(axis=-1, keepdims=True)
    # bfloat16 has eight bits of the rest; int8 has 127 steps up to the largest of the row.
    allowed = np.abs(rest) * 2.0**-8 if state_dtype == "split" else largest * 1.001 / 254
    assert (np.abs(kept - state) <= allowed + np.abs(state) * 2.0**-23).all()
    assert np.abs(np.asarray(low, np.float32)).max() > 0, "the low half vanished"


@both
def test_zeros_and_powers_of_two_have_no_low_half(state_dtype):
    state = np.broadcast_to(np.float32([0.0, -0.0, 1.0, -2.0, 0.5, 2.0**100, 0.0, 2.0**-100]), (2, 8))
    high, low, scale = jax.jit(encode, static_argnums=1)(state, state_format(state_dtype))
    assert not np.asarray(low, np.float32).any() and not (scale is not None and np.asarray(scale).any())
    np.testing.assert_array_equal(decode(high, low, scale), state)


def test_bytes_of_a_number():
    """4 and 3.03 bytes are stored, 2 are read, and a fold reads the low half and writes both."""
    spec = RecurrenceSpec(32, 16, 128, 128)
    number = 32 * 128 * 128
    stored = {name: traffic.checkpoint_bytes(spec, name) / number for name in ("float32", "bfloat16", *KEPT)}
    assert stored == {"float32": 4, "bfloat16": 2, "split": 4, "split8": 3 + 4 / 128}
    moved = {
        name: [
            traffic.state_traffic(spec, **work, live_entries=0, appended=0, state_dtype=name) / number
            for work in ({"checkpoint_reads": 1, "folds": 0}, {"checkpoint_reads": 0, "folds": 1})
        ]
        for name in stored
    }
    assert moved == {"float32": [4, 4], "bfloat16": [2, 2], "split": [2, 6], "split8": [2, 4 + 8 / 128]}
    sizes = {name: pool_bytes(spec, name) for name in stored}
    assert sizes == {name: 3 * traffic.checkpoint_bytes(spec, name) for name in stored}  # of two slots and the null one
    # A request that has no checkpoint pays up to about half as many entries.
    assert [traffic.crossover(spec, name) for name in stored] == [188, 98, 109, 104]


def pool_bytes(spec, state_dtype):
    """Of the states, as a pool has them."""
    pool = jax.eval_shape(lambda: buffered.init(spec, slots=2, state_dtype=state_dtype)).pool
    arrays = [x for x in (pool.checkpoints, pool.low, pool.low_scales) if x is not None]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def run(family, state_dtype, examples):
    """Schedules whose limits are 8 at least: at lower ones a state is written too often."""
    state = RECALLED if FAMILIES[family].delta else KEPT[state_dtype]
    sizes = SHARED | {"state_dtype": state_dtype, "bounds": (OUT, state)}
    machine = type("SplitSchedule", (Schedule,), {"family": family, "sizes": sizes, "least": 8})
    run_state_machine_as_test(machine, settings=bounded(max_examples=examples, stateful_step_count=30))


@pytest.mark.slow
def test_any_schedule_is_near_the_recurrence():
    run("Gated DeltaNet", "split8", 6)


@pytest.mark.parametrize(
    ("family", "state_dtype"),
    [
        pytest.param(family, name, marks=pytest.mark.slow if (i + j) % 8 == 0 else pytest.mark.exhaustive)
        for i, family in enumerate(FAMILIES)
        for j, name in enumerate(KEPT)
    ],
)
def test_any_schedule_of_any_family_is_near_the_recurrence(family, state_dtype):
    run(family, state_dtype, 6)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=MANY_STEPS)
def decode_all(spec, sizes, inputs):
    """Outputs [rows, time, ...] of a token a step, and the state at the end."""
    rows = inputs[2].shape[0]
    slots, one = jnp.arange(1, rows + 1), jnp.ones(rows, jnp.int32)
    cache = buffered.init(spec, slots=rows, max_pending=1, entry_dtype=jnp.float32, **dict(sizes))

    def step(cache, token):
        out, cache = buffered.extend(spec, cache, *(None if x is None else x[:, None] for x in token), slots=slots)
        return buffered.commit(cache, one, slots=slots), out[:, 0]

    cache, out = jax.lax.scan(step, cache, tuple(None if x is None else jnp.moveaxis(x, 1, 0) for x in inputs))
    return jnp.moveaxis(out, 0, 1), buffered.read(spec, cache, slots)


@pytest.mark.slow
@both
@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("family", ["Gated DeltaNet", "Mamba-2"])
def test_after_2000_tokens_outputs_and_states_are_those_of_float64(rng, family, limit, state_dtype):
    """Of the recurrence in float64; a checkpoint in bfloat16 beside it drifts."""
    spec, inputs = FAMILIES[family], inputs_of(rng, family, 4, 2000)
    expected, after, _ = definition.run_batch(spec, np.zeros((4, *spec.state_shape)), *inputs)
    found = {
        name: decode_all(spec, (("limit", limit), ("state_dtype", name)), inputs) for name in (state_dtype, "bfloat16")
    }
    out, state = found[state_dtype]
    assert worst_row(out, expected) < OUT
    assert worst_row(state, after) < (RECALLED if spec.delta else KEPT[state_dtype])
    # With the delta rule most of either error is that of the recalls.
    assert worst_row(state, after) < worst_row(found["bfloat16"][1], after) / (1.2 if spec.delta else 3)


@pytest.mark.slow
@both
def test_tokens_at_once_and_one_by_one_store_the_same_bits(rng, state_dtype):
    """Where the same entries are folded."""
    sizes = {"slots": 3, "limit": 12, "max_pending": 4, "state_dtype": state_dtype}
    at_once = one_by_one = buffered.init(GDN, **sizes)
    slots, one, four = jnp.arange(1, 4), jnp.ones(3, jnp.int32), jnp.full(3, 4)
    extend = jax.jit(buffered.extend, static_argnums=0)
    for launch in range(7):  # 12 entries, and then a fold
        inputs = inputs_of(rng, "Gated DeltaNet", 3, 4)
        _, at_once = extend(GDN, at_once, *inputs, slots=slots)
        at_once = buffered.commit(at_once, four, slots=slots)
        if launch % 3 == 0 and launch:
            one_by_one = buffered.fold(GDN, one_by_one, slots=slots)
        for t in range(4):
            _, one_by_one = extend(GDN, one_by_one, *(x[:, t : t + 1] for x in inputs), slots=slots)
            one_by_one = buffered.commit(one_by_one, one, slots=slots)
    assert (np.asarray(at_once.cursor.folded)[1:] == 24).all()
    chex.assert_trees_all_equal(at_once, one_by_one)


@pytest.mark.slow
@both
def test_a_folding_launch_reads_the_new_high_half(rng, state_dtype):
    """Its output is what a fold and then a launch give, not what the state before it was rounded to would."""
    sizes = {"slots": 2, "limit": 4, "max_pending": 4, "entry_dtype": jnp.float32}
    cache, slots = buffered.init(GDN, **sizes, state_dtype=state_dtype), jnp.array([1, 2])
    for _ in range(3):
        _, cache = buffered.extend(GDN, cache, *inputs_of(rng, "Gated DeltaNet", 2, 4), slots=slots)
        cache = buffered.commit(cache, jnp.full(2, 4), slots=slots)
    inputs = inputs_of(rng, "Gated DeltaNet", 2, 1)
    found, _ = buffered.extend(GDN, cache, *inputs, slots=slots)
    folded = buffered.fold(GDN, cache, slots=slots)
    expected, _ = buffered.extend(GDN, folded, *inputs, slots=slots)
    np.testing.assert_array_equal(found, expected)
    state = np.asarray(folded.pool.checkpoints)[np.asarray(folded.cursor.checkpoint_of)[1:]].astype(np.float32)
    exact, _ = recurrent(GDN, jnp.asarray(state), *inputs)
    assert worst_row(found, exact) < 1e-5


@both
def test_a_step_that_does_not_fold_touches_no_low_half(state_dtype):
    """Asserted from the program: low halves go to the branch that folds, and nowhere else."""
    spec = RecurrenceSpec(8, 4, key_dim=32, value_dim=64)
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=32, state_dtype=state_dtype))
    inputs = [jnp.asarray(x) for x in definition.inputs(np.random.default_rng(0), spec, 8, 1)]

    def step(cache, inputs):
        return buffered.extend(spec, cache, *inputs, slots=jnp.arange(1, 9))

    jaxpr = jax.make_jaxpr(step)(cache, inputs).jaxpr
    names = [path[-1].name for path, _ in jax.tree_util.tree_flatten_with_path(cache)[0]]
    low = {variable for name, variable in zip(names, jaxpr.invars, strict=False) if name.startswith("low")}
    assert len(low) == (1 if state_dtype == "split" else 2)
    assert readers(jaxpr, low) == {"cond", "optimization_barrier"}


def readers(jaxpr, names):
    """Which operations read some variables of a jaxpr. Calls are looked into, branches are not.

    What the fold's branches and the barrier make of them counts as the variables.
    """
    found = set()
    for equation in jaxpr.eqns:
        operation, inner = equation.primitive.name, next(iter(jaxprs_in_params(equation.params)), None)
        places = [i for i, x in enumerate(equation.invars) if not isinstance(x, Literal) and x in names]
        if not places:
            continue
        if operation == "cond":
            names = names | set(equation.outvars[1:])  # behind the checkpoints
        elif operation == "optimization_barrier":
            names = names | {equation.outvars[i] for i in places}
        elif inner is not None:
            found |= readers(inner, {inner.invars[i] for i in places})
            continue
        found.add(operation)
    return found
