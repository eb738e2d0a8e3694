"""The embedded model's gates: what they keep and cost, on record and on text of this repository."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import jaxbuf
from jaxbuf.models.admission import Admission, Rule
from jaxbuf.models.gates import DEMO, admission_of, gate_parameters, kept_shares, with_gates

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/demo_gates.json").read_text())


def test_the_record_is_of_these_gates_and_the_card_quotes_it():
    assert RECORD["gates_sha256"] == hashlib.sha256(DEMO.read_bytes()).hexdigest()
    card = (DEMO.parent / "README.md").read_text()
    for name, found in RECORD["keys"].items():
        more = found["nats"] / RECORD["keys"]["all"]["nats"] - 1
        assert f"| {name} | {found['kept']:.3f} | {found['bytes']:.3f} | {found['nats']:.4f} | {more:.2%} |" in card
    assert f"`{RECORD['command']}`" in card and DEMO.stat().st_size < 1_000_000


def test_half_of_the_bytes_cost_at_most_one_percent_and_chance_is_worse():
    full, gates, chance = (RECORD["keys"][name] for name in ("all", "those that the gates keep", "as many, at random"))
    assert gates["bytes"] <= 0.5
    assert gates["nats"] <= 1.01 * full["nats"] < chance["nats"]
    assert chance["kept"] == gates["kept"]


def test_the_package_finds_them_by_name():
    lm = jaxbuf.load("demo", gates="demo", progress=False)
    assert admission_of(lm).window == RECORD["recipe"]["window"]
    assert {str(param[...].dtype) for param in gate_parameters(lm.model).values()} == {"float32"}


@pytest.mark.exhaustive
def test_on_text_that_was_never_trained_on_they_cost_little_and_chance_costs_more():
    lm = jaxbuf.load("demo", progress=False)
    tokens = np.asarray(lm.encode((ROOT / "CHANGELOG.md").read_text()), np.int32)[:4096].reshape(4, 1024)
    gated = jaxbuf.load("demo", gates="demo", progress=False)
    kept, window = float(kept_shares(gated, tokens).mean()), admission_of(gated).window
    chance = with_gates(lm, Admission(Rule("random", rate=kept), window))
    full, ours, random = (-float(np.mean(each.score(tokens)[:, 1:])) for each in (lm, gated, chance))
    assert 0.2 < kept < 0.8
    assert ours < 1.02 * full and ours - full < 0.5 * (random - full), (kept, full, ours, random)
