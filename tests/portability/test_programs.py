"""Whole `admit` and `generate_tokens` programs, compiled by the TPU compiler at the width of published models: their
memory stays in place, nothing goes to the host, and devices exchange what their layers add up and no more."""

import dataclasses
import itertools

import jax
import pytest

from jaxbuf.planning.tpu_slices import CHIPS_OF_TPUS, find_slice
from jaxbuf.serving.tpu_programs import PROGRAMS, held_bytes
from jaxbuf.tpu_compiler import GENERATIONS, device_memory
from tests.portability.programs import ONE_PERIOD, check


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
    held = held_bytes(batch)
    assert 0 < held <= 0.9 * chip.memory_bytes / chip.devices


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", ONE_PERIOD)
def test_a_whole_model_compiles_for_every_generation(name, generation):
    """At full depth, on four or eight devices if fewer do not hold it; write gates lie on one."""
    for devices in sorted({ONE_PERIOD[name].devices} | ({1} if ONE_PERIOD[name].gates else {4, 8})):
        served = dataclasses.replace(ONE_PERIOD[name], layers=None, generation=generation, devices=devices)
        room, held = device_memory(find_slice(generation)), held_bytes(served.batch())
        if held > 0.9 * room:
            continue
        try:
            memory = check(served, "generate_tokens").memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue  # what it takes for the time of a call does not fit
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= room
        return
    pytest.skip(f"{held / 1e9:.0f} GB a device and what a call takes do not fit on so many devices of {generation}")


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
