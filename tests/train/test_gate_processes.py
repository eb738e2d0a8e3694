"""Training of gates in processes of its own: killed at any moment and resumed, and over several devices."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.compiling import flags_for

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("gate_program.py")


def start(*arguments, cache: Path, devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": flags_for(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(cache),  # programs that are started again compile nothing
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return printed


def began(process: subprocess.Popen) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n", process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_training_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path, rng, kills):
    folders = {name: tmp_path / name for name in ("undisturbed", "killed")}
    for folder in folders.values():
        folder.mkdir()
    process = start("train", folders["undisturbed"], cache=tmp_path / "cache")
    finish(process)

    died, seconds = 0, 4.0
    while died < kills:
        process = start("train", folders["killed"], cache=tmp_path / "cache")
        began(process)
        beginning = time.monotonic()
        try:
            process.wait(rng.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            died += 1
        else:  # It was done before its turn came: the next one begins anew, and has less time.
            seconds = time.monotonic() - beginning
            finish(process)
            compare(folders)
            for path in sorted(folders["killed"].rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    process = start("train", folders["killed"], cache=tmp_path / "cache")
    finish(process)
    compare(folders)


def compare(folders: dict[str, Path]) -> None:
    expected, found = (load_file(folder / "gates.safetensors") for folder in folders.values())
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    expected, found = ((folder / "gates.jsonl").read_text() for folder in folders.values())
    assert found == expected
    assert [json.loads(line)["step"] for line in found.splitlines()] == list(range(1, 11))


@pytest.mark.slow
def test_devices_and_pieces_give_the_numbers_of_one(tmp_path):
    found = json.loads(finish(start("devices", cache=tmp_path / "cache", devices=2)))
    for name, places in (("devices", 2), ("pieces", 1)):
        assert found[name]["metrics"] < 1e-3 and found[name]["gates"] < 1e-3, found
        assert found[name]["places"] == places and found[name]["generates"], found
