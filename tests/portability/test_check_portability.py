"""What scripts/check_portability says to those who ask for something that is not there."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def main(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("JAX_PLATFORMS", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, os.environ.get(name, "cpu" if name == "JAX_PLATFORMS" else ""))
    return runpy.run_path(str(ROOT / "scripts" / "check_portability"))["main"]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "Qwen3.5-4"), "--model must be one of Qwen3-Next-80B-A3B, "),
        (("--model", "Qwen3.5-4B", "--device", "v9"), "--device must be one of v4, v5e, "),
        (
            ("--model", "Qwen3.5-4B", "--device", "v6e-16"),
            "--device must have at most 8 devices to compile for, got 'v6",
        ),
        (("--model", "Qwen3.5-4B", "--device", "v6e-3"), "--device v6e-3 can not serve Qwen3.5-4B: the value heads "),
        (
            ("--model", "Llama-3.1-8B", "--device", "v5e"),
            "--device v5e has 17.2 GB a device, and parameters and memory ",
        ),
        (("--model", "Qwen3.5-4B", "--layers", "33"), "--layers must be from 1 to 32, got 33"),
        (("--model", "Qwen3.5-4B", "--rows", "0"), "--rows must be at least 1, got 0"),
        (("--generation", "v9"), "--generation must be one of Hopper, v4, "),
        (("--cycles", "--generation", "Hopper"), "--generation must be one of v4, "),
        (("--operation", "put"), "--operation must be one of extend, "),
    ],
)
def test_what_is_not_there_is_said_in_a_line(main, capfd, arguments, message):
    assert main(list(arguments)) == 2
    out, error = capfd.readouterr()
    assert out == "" and error.splitlines()[-1].removeprefix("scripts/check_portability: ").startswith(message)


@pytest.mark.tpu_compiler
def test_a_model_is_compiled_without_alarming_words():
    """In a process of its own: libtpu speaks where it is loaded."""
    command = [sys.executable, "scripts/check_portability", "--model", "Falcon-H1-0.5B", "--layers", "1", "--rows", "1"]
    silent = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
    env = {name: value for name, value in os.environ.items() if name not in silent} | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    compiling = [f"compiling {program}, layers: 1 ..." for program in ("admit", "generate_tokens")]
    assert found.stderr.splitlines() == compiling
    assert [line.split(" on v6e: ")[0] for line in found.stdout.splitlines()] == [
        "admit of Falcon-H1-0.5B",
        "generate_tokens of Falcon-H1-0.5B",
    ]
    assert found.stdout.count("0 arrays not in place, 0 copies of pools, 0 exchanges between devices") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cycles", "--write"], "--cycles must be given without"),
        (["--write", "--generation", "v4"], "--write must be given without"),
    ],
)
def test_options_that_exclude_each_other(main, capfd, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capfd.readouterr().err
