"""Whole `admit` and `generate_tokens` programs, compiled by the TPU compiler at the width of published models: their
memory stays in place, nothing goes to the host, and devices exchange what their layers add up and no more."""

import dataclasses
import itertools

import jax
import pytest

from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.planning.tpu_slices import CHIPS_OF_TPUS
from tests.portability.artefact import (
    collectives,
    device_bytes,
    host_transfers,
    pool_copies,
    unaliased,
    vmem_bytes_used,
    written_back,
)
from tests.portability.models import carry_on_mesh, pools_of
from tests.portability.programs import ONE_PERIOD, PROGRAMS, Served
from tests.portability.topologies import GENERATIONS


def check(served: Served, program: str) -> jax.stages.Compiled:
    """Asserts what holds of every program, and gives it."""
    batch = served.batch()
    compiled, carry = served.compiled(program, batch)
    assert unaliased(compiled) == []
    assert host_transfers(compiled) == []
    assert vmem_bytes_used(compiled) <= vmem_bytes(served.generation)
    assert pool_copies(compiled, pools_of(carry), ends=False) == []
    assert written_back(compiled, pools_of(carry), ends=False) == []
    exchanged = collectives(compiled)
    if served.devices == 1:
        assert exchanged == []
        return compiled
    tokens = batch.arrivals[0].tokens.size if program == "admit" else carry.last.size * most_tokens(batch)
    activation = tokens * batch.lm.config.hidden_size * 2
    within = [each for each in exchanged if each.of_layers]
    assert within and all(each.kind == "all-reduce" and each.bytes <= activation for each in within)
    logits = 4 * batch.lm.vocab_size * carry.last.size * most_tokens(batch)
    assert all(each.bytes <= max(activation, logits) for each in exchanged)
    return compiled


def most_tokens(batch) -> int:
    return 1 if batch.drafter is None else 1 + batch.drafter.draft_tokens


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("name", "program"), list(itertools.product(ONE_PERIOD, PROGRAMS)))
def test_a_program_of_one_period_keeps_its_memory_in_place(name, program):
    check(ONE_PERIOD[name], program)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ONE_PERIOD)
def test_a_whole_model_and_its_memory_fit_on_its_chips(name):
    """At full depth, by shapes alone: parameters and memory, with a tenth of the chip left for the time of a call."""
    served = dataclasses.replace(ONE_PERIOD[name], layers=None)
    batch, chip = served.batch(), CHIPS_OF_TPUS[served.generation]
    held = device_bytes((batch.lm.model, batch.drafter, carry_on_mesh(batch, served.mesh)))
    assert 0 < held <= 0.9 * chip.memory_bytes / chip.devices


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", ONE_PERIOD)
def test_a_whole_model_compiles_for_every_generation(name, generation):
    """At full depth, on eight devices if one or four do not hold it."""
    for devices in (ONE_PERIOD[name].devices, 4, 8):
        served = dataclasses.replace(ONE_PERIOD[name], layers=None, generation=generation, devices=devices)
        batch, chip = served.batch(), CHIPS_OF_TPUS[generation]
        held = device_bytes((batch.lm.model, batch.drafter, carry_on_mesh(batch, served.mesh)))
        if held <= 0.9 * chip.memory_bytes / chip.devices:
            memory = check(served, "generate_tokens").memory_analysis()
            assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= chip.memory_bytes / chip.devices
            return
    pytest.skip(f"{held / 1e9:.0f} GB a device do not fit on eight devices of {generation}")


def test_the_programs_cover_what_can_be_asked_for():
    """Every generation once, and among them every drafter, four and eight devices, forms, states and gates."""
    served = ONE_PERIOD.values()
    assert sorted(each.generation for each in served) == sorted(GENERATIONS)
    assert {each.drafter for each in served} == {None, "ngram", "mtp", "lm"}
    assert {each.devices for each in served} == {1, 4, 8}
    assert {each.form for each in served} == {"buffered", "kv", "recurrent"}
    assert {each.gates for each in served} == {True, False}
    assert {each.state_dtype for each in served} == {None, "split"}
    assert len({each.model for each in served}) == 4
