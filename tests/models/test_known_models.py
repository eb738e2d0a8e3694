"""Known models have the parameters and states of the published ones, each from one entry of known.json."""

import json

import pytest

from jaxbuf.models.families import config_json, families
from jaxbuf.models.known_models import find_known, known_models
from jaxbuf.planning.model_sizes import find_sizes
from tests.models.known import each_known_model

# MiB of a request's states in float32.
STATES = {
    "Qwen3-Next-80B-A3B": 72,
    "Qwen3.5-0.8B": 18,
    "Qwen3.5-2B": 18,
    "Qwen3.5-4B": 48,
    "Qwen3.5-9B": 48,
    "Qwen3.5-27B": 144,
    "Qwen3.5-35B-A3B": 60,
    "Nemotron-3-Nano-4B": 78.75,
    "Nemotron-H-8B": 96,
    "Nemotron-3-Nano-30B-A3B": 23 * 64 * 64 * 128 * 4 / 2**20,
    "Nemotron-3-Super-120B-A12B": 40 * 128 * 64 * 128 * 4 / 2**20,
    "Mamba-2-2.7B": 160,
    "Codestral-Mamba-7B": 256,
    "Falcon-H1-0.5B": 36 * 24 * 64 * 128 * 4 / 2**20,
    "Falcon-H1-7B": 44 * 24 * 128 * 256 * 4 / 2**20,
    "Granite-4.0-H-Micro": 36 * 64 * 64 * 128 * 4 / 2**20,
    "Granite-4.0-Micro": 0,
    "Granite-4.0-H-Tiny": 36 * 48 * 64 * 128 * 4 / 2**20,
    "Granite-4.0-H-Small": 36 * 128 * 64 * 128 * 4 / 2**20,
    "Olmo-Hybrid-7B": 24 * 30 * 96 * 192 * 4 / 2**20,
    "Llama-3.1-8B": 0,
    "Qwen2.5-7B": 0,
    "Qwen3-8B": 0,
    "Qwen3-30B-A3B": 0,
    "Qwen3-235B-A22B": 0,
    "Kimi-Linear-48B-A3B": 40,
    "Ling-3.0-Flash": 35 * 32 * 128 * 128 * 4 / 2**20,
}
# Bytes that a token's keys and values take in bfloat16.
KEYS_AND_VALUES = {"Qwen3.5-4B": 8 * 2 * 4 * 256 * 2, "Llama-3.1-8B": 32 * 2 * 8 * 128 * 2, "Mamba-2-2.7B": 0}
KEYS_AND_VALUES |= {"Nemotron-H-8B": 4 * 2 * 8 * 128 * 2, "Falcon-H1-7B": 44 * 2 * 2 * 128 * 2}
KEYS_AND_VALUES |= {"Kimi-Linear-48B-A3B": 7 * 576 * 2, "Ling-3.0-Flash": 7 * 576 * 2}


@pytest.mark.parametrize("name", each_known_model())
def test_parameters_are_those_of_the_published_model(name):
    model, sizes = known_models()[name], find_sizes(name)
    assert sizes.count_parameters() == pytest.approx(model.published, rel=0.005)
    if "rounded" not in model.counted:
        assert sizes.count_parameters() == model.published
    assert model.counted


def test_states_are_those_that_are_known_to_the_byte():
    assert {name: find_sizes(name).state_bytes for name in known_models()} == {
        name: round(mib * 2**20) for name, mib in STATES.items()
    }


def test_keys_and_values_are_those_of_a_count_by_hand():
    assert {name: find_sizes(name).kv_bytes("bfloat16") for name in KEYS_AND_VALUES} == KEYS_AND_VALUES


def test_every_family_has_a_known_model():
    assert {model.config.family for model in known_models().values()} == families().keys()


@pytest.mark.parametrize("name", each_known_model())
def test_a_configuration_comes_back_from_the_file_that_it_is_saved_in(name):
    model = known_models()[name]
    found = json.loads(json.dumps(config_json(model.config)))
    assert type(model)(name, 0, "", found).config == model.config


def test_a_name_is_found_however_it_is_written():
    for written in ("mamba-2 2.7b", "Mamba2-2.7B", "MAMBA_2_2.7b"):
        assert find_known(written) is known_models()["Mamba-2-2.7B"]
    assert find_known("mamba-3") is None
