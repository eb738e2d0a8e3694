"""Any schedule of prefill, extend, trees, commit, fold, fork and reset gives what float64 gives, for every family.

Which calls, on which slots, of how many tokens, with which trees and how much of them accepted: all of it is drawn, so
a schedule that fails shrinks to a short one. The numbers come from a drawn seed, and every launch has the same shapes.
"""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxbuf.recurrence import recurrent
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES, worst_row
from tests.recurrence.families import inputs as inputs_of
from tests.recurrence.twin import (
    INTERPRETED,
    PROMPT,
    ROWS,
    SHARED,
    SLOTS,
    TIME,
    Twin,
    commit,
    extend,
    path_to,
    read,
    reset,
)

GDN, EACH = "Gated DeltaNet", np.arange(1, SLOTS + 1, dtype=np.int32)
FIRST = EACH[:ROWS]
STEPS = 30  # calls of a schedule
bounded = partial(
    settings,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)
seeds = st.integers(0, 2**32 - 1)


def per_row(most, least=0):
    return st.tuples(*[st.integers(least, most)] * ROWS)


@st.composite
def slots(draw):
    """Different slots; rows may be null, and shrink to that."""
    free, drawn = EACH.tolist(), []
    for _ in range(ROWS):
        place = draw(st.integers(0, len(free)))
        drawn.append(free.pop(place - 1) if place else 0)
    return tuple(drawn)


@st.composite
def neighbours(draw):
    """Different slots one after another, from two numbers: calls of so few draws are what a schedule shrinks to."""
    first, count = draw(st.integers(0, SLOTS - 1)), draw(st.integers(0, ROWS))
    return tuple((first + row) % SLOTS + 1 if row < count else 0 for row in range(ROWS))


trees = st.tuples(*[st.tuples(st.just(-1), *(st.integers(-1, node - 1) for node in range(1, TIME)))] * ROWS)
held_slots = st.runner().flatmap(lambda schedule: st.sampled_from([0, *schedule.held() * 2, *EACH.tolist()]))
limits = st.tuples(*[st.sampled_from((1, 5, 16, 40, 40))] * (SLOTS - 1))
numbers = partial(np.array, dtype=np.int32)


class Schedule(RuleBasedStateMachine):
    """Any calls in any order. The twin checks after each all there is to check about it."""

    family, sizes, least = GDN, SHARED, 1  # `least`: limits below it are this one
    how = None

    @initialize(seed=seeds, limits=limits)
    def start(self, seed, limits):
        # The last gives every memory the same ring.
        rng, limits = np.random.default_rng(seed), [max(limit, self.least) for limit in (*limits, 40)]
        self.twin = Twin(self.family, rng, limits=limits, how=self.how, **self.sizes)

    def held(self):
        """Slots that hold tokens."""
        return np.flatnonzero(self.twin.tokens).tolist()

    @rule(slots=slots(), lengths=per_row(PROMPT), keep=per_row(PROMPT))
    def prefill(self, slots, lengths, keep):
        self.twin.prefill(numbers(slots), lengths, keep)

    @rule(slot=held_slots)
    def prefill_and_keep_all(self, slot):
        """Twice, and the ring wraps into blocks that forks may still read."""
        self.twin.prefill(numbers([slot, 0, 0, 0]), [PROMPT] * ROWS, [PROMPT] * ROWS)

    @rule(slots=slots(), lengths=per_row(TIME), accepted=per_row(TIME))
    def extend(self, slots, lengths, accepted):
        self.twin.extend(numbers(slots), lengths, leaf=[TIME - 1] * ROWS, accepted=accepted)

    @rule(slots=slots(), lengths=per_row(TIME), parents=trees, leaf=per_row(TIME - 1), accepted=per_row(TIME))
    def extend_by_a_tree(self, slots, lengths, parents, leaf, accepted):
        self.twin.extend(numbers(slots), lengths, numbers(parents), leaf, accepted)

    @rule(slots=neighbours())
    def fold(self, slots):
        self.twin.fold(numbers(slots))

    @rule(source=st.tuples(*[held_slots] * ROWS), into=slots())
    def fork(self, source, into):
        """Slots may trade places, and one may be the source of several."""
        self.twin.fork(source, into)

    @rule(source=held_slots, into=slots())
    def branch(self, source, into):
        self.twin.fork([source] * ROWS, into)

    @rule(slots=neighbours())
    def reset(self, slots):
        self.twin.reset(numbers(slots))


class FreedSchedule(Schedule):
    """After every call: if all slots were freed now, nobody would own anything."""

    @invariant()
    def freeing_every_slot_fills_the_free_stacks(self):
        sharing = reset(self.twin.cache, EACH).cursor.sharing
        for owned in (sharing.states, sharing.blocks):
            rows = owned.owners.shape[0]
            assert not np.asarray(owned.owners).any()
            assert int(owned.left) == rows - 1
            assert np.sort(np.asarray(owned.free)[: rows - 1]).tolist() == list(range(1, rows))


any_slots = st.tuples(*[st.sampled_from((-1, 0, 1, 1, 2, 2, 3, 4, SLOTS, SLOTS + 1, 99))] * ROWS)
odd = {"slots": any_slots, "lengths": per_row(TIME + 2, -2)}


class WithRepeatedSlots(Schedule):
    """Compiled calls whose slots are there twice or do not exist, and whose lengths are out of range, among others."""

    @rule(slots=any_slots, lengths=per_row(PROMPT + 2, -2), keep=per_row(PROMPT + 99, -2))
    def prefill_any(self, slots, lengths, keep):
        self.twin.prefill(numbers(slots), lengths, keep)

    @rule(**odd, accepted=per_row(TIME))
    def extend_any(self, slots, lengths, accepted):
        self.twin.extend(numbers(slots), lengths, leaf=[TIME - 1] * ROWS, accepted=accepted)

    @rule(**odd, parents=trees, leaf=per_row(TIME - 1), accepted=per_row(TIME))
    def extend_any_by_a_tree(self, slots, lengths, parents, leaf, accepted):
        self.twin.extend(numbers(slots), lengths, numbers(parents), leaf, accepted)

    @rule(slots=any_slots, tokens=per_row(9, -1))
    def load_any(self, slots, tokens):
        self.twin.load(numbers(slots), tokens)

    @rule(source=any_slots, into=any_slots)
    def fork_any(self, source, into):
        self.twin.fork(source, into)

    @rule(slots=any_slots)
    def fold_any(self, slots):
        self.twin.fold(numbers(slots))

    @rule(slots=any_slots)
    def reset_any(self, slots):
        self.twin.reset(numbers(slots))


def run(machine, examples, family=GDN, sizes=SHARED, how=None):
    """A blob that a failure prints goes on the machine's class, as `@reproduce_failure`."""
    of_family = type(machine.__name__, (machine,), {"family": family, "sizes": sizes, "how": how})
    run_state_machine_as_test(of_family, settings=bounded(max_examples=examples, stateful_step_count=STEPS))


def test_any_schedule_equals_the_recurrence():
    """Outputs and states; slots outside a call keep every bit; nothing with several owners is written."""
    run(Schedule, 12)


def test_freeing_every_slot_after_any_schedule_fills_the_free_stacks():
    run(FreedSchedule, 6)


def test_slots_that_are_repeated_or_do_not_exist_harm_no_other_slot():
    """After every call each row has as many owners as slots refer to it, and other slots have kept every bit."""
    run(WithRepeatedSlots, 6)


slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
many = pytest.mark.parametrize("times", [pytest.param(1, marks=slow), pytest.param(6, marks=exhaustive)])
of_both_sizes = pytest.mark.parametrize("sizes", [SHARED, {}], ids=["shared rows", "own rows"])


@many
@of_both_sizes
def test_slots_that_are_repeated_harm_no_other_slot_in_many_schedules(sizes, times):
    run(WithRepeatedSlots, times * (12 if sizes else 6), sizes=sizes)


@many
@of_both_sizes
def test_any_of_many_schedules_equals_the_recurrence(sizes, times):
    run(FreedSchedule if sizes else Schedule, times * (30 if sizes else 10), sizes=sizes)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=slow if family == "KDA" else exhaustive) for family in FAMILIES if family != GDN],
)
def test_any_schedule_of_any_family_equals_the_recurrence(family):
    run(Schedule, 8, family)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=slow if family in (GDN, "KDA", "Mamba-2") else exhaustive)
        for family in FAMILIES
        if family != "retention"
    ],
)
def test_any_schedule_equals_the_recurrence_by_the_interpreted_tpu_kernel(family):
    """Of retention the kernel sees nothing that it does not see of Mamba-2."""
    run(Schedule, 3 if family in (GDN, "KDA", "Mamba-2") else 6, family, how=INTERPRETED)


run_recurrent = jax.jit(recurrent, static_argnums=0)


@given(seed=seeds, steps=st.lists(st.tuples(per_row(TIME), per_row(TIME)), min_size=1, max_size=12))
@bounded(max_examples=20)
def test_limit_one_equals_the_recurrence(seed, steps):
    """The recurrent form's outputs and states; the only entries are those of the last launch, all else is folded."""
    rng = np.random.default_rng(seed)
    twin = Twin(GDN, rng, limits=[1] * (SLOTS - 1) + [40], **SHARED)
    spec, cache, state = twin.spec, twin.cache, np.zeros((ROWS, *twin.spec.state_shape), np.float32)
    for lengths, accepted in steps:
        lengths, inputs = numbers(lengths), inputs_of(rng, GDN, ROWS, TIME)
        accepted = np.minimum(numbers(accepted), lengths)
        out, cache = extend(spec, cache, *inputs, slots=FIRST, lengths=lengths, parents=None)
        cache = commit(cache, accepted, slots=FIRST, path=None)
        assert worst_row(out, run_recurrent(spec, state, *inputs, lengths=lengths)[0]) < 1e-4
        state = run_recurrent(spec, state, *inputs, lengths=accepted)[1]
        assert worst_row(read(spec, cache, EACH)[:ROWS], state) < 1e-4
        launched = lengths > 0
        np.testing.assert_array_equal(np.asarray(cache.cursor.length)[FIRST][launched], accepted[launched])


@given(seed=seeds, prompts=per_row(PROMPT), keep=per_row(8), parents=trees)
@bounded(max_examples=10)
def test_a_tree_equals_its_branches_run_alone(seed, prompts, keep, parents):
    """Each node's output, and the state once the path to it is committed, are those of a chain of that path."""
    rng, parents = np.random.default_rng(seed), numbers(parents)
    twin = Twin(GDN, rng, **SHARED).prefill(FIRST, prompts, keep)
    spec, inputs, full = twin.spec, inputs_of(rng, GDN, ROWS, TIME), np.full(ROWS, TIME, np.int32)
    out, tree = extend(spec, twin.cache, *inputs, slots=FIRST, lengths=full, parents=parents)
    for node in range(TIME):
        branches = [path_to(row, node) for row in parents]
        lengths = numbers([len(branch) for branch in branches])
        path = numbers([branch + [0] * (TIME - len(branch)) for branch in branches])
        alone = [np.stack([x[row, nodes] for row, nodes in enumerate(path)]) for x in inputs]
        plain, chain = extend(spec, twin.cache, *alone, slots=FIRST, lengths=lengths, parents=None)
        assert worst_row(out[:, node], np.asarray(plain)[np.arange(ROWS), lengths - 1]) < 1e-5
        tree_state, chain_state = (
            read(spec, commit(cache, lengths, slots=FIRST, path=nodes), EACH)
            for cache, nodes in ((tree, path), (chain, None))
        )
        assert definition.error(tree_state, chain_state) < 1e-5
