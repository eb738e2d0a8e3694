"""Trains gates of a tiny model to the end, as `jaxbuf train-gate` does, or compares devices.

A program of its own: one test kills it, the other has it start with two devices.

    gate_program.py train FOLDER      leaves gates.safetensors, its checkpoints and metrics there; prints "begins" first
    gate_program.py devices           prints as JSON how far two devices and two pieces are from one of each
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxbuf.cli.train_gate import run_training
from jaxbuf.models.admission import WriteGate
from jaxbuf.train.write_gate import GateTraining, Recipe
from tests.tiny import llama_model

RECIPE = Recipe(score=WriteGate(8), window=4, threshold=0.5, sparsity=1.0, steps=10, rows=4, length=24, rate=0.02)


def training(*, pieces: int = 1, devices: list | None = None) -> GateTraining:
    lm = llama_model(0)
    tokens = np.random.default_rng(0).integers(0, 61, 500)
    return GateTraining(lm, tokens, dataclasses.replace(RECIPE, pieces=pieces), devices=devices)


def train(folder: str) -> None:
    prepared = training()
    print("begins", flush=True)
    run_training(Console(stderr=True), prepared, Path(folder) / "gates.safetensors")


def devices() -> None:
    alone = training()
    expected = list(alone.run(until=3))
    found = {}
    for name, settings in (("devices", {"devices": jax.devices()[:2]}), ("pieces", {"pieces": 2})):
        other = training(**settings)
        metrics = list(other.run(until=3))
        gates = {key: np.asarray(value) for key, value in other.state.gates.items()}
        found[name] = {
            "metrics": max(abs(a[key] / b[key] - 1) for a, b in zip(metrics, expected, strict=True) for key in a),
            "gates": max(float(np.abs(gates[key] - value).max()) for key, value in alone.state.gates.items()),
            "places": len(next(iter(other.state.gates.values())).devices()),
            "generates": other.lm.logits(np.arange(30)).shape == (30, 61),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    {"train": train, "devices": devices}[sys.argv[1]](*sys.argv[2:])
