"""`jaxbuf compile`: the programs that serve a model, made by the TPU compiler, and what is said where they can't be."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxbuf.cli import app
from jaxbuf.serving.tpu_programs import compiled_program, held_bytes
from jaxbuf.tpu_compiler import HAS_COMPILER
from tests.portability.programs import Served

SILENT = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "JAX_PLATFORMS")


def run(*arguments: str) -> subprocess.CompletedProcess:
    """In a process of its own, as a user has it: libtpu speaks where it is loaded."""
    env = {name: value for name, value in os.environ.items() if name not in SILENT}
    command = [sys.executable, "-m", "jaxbuf", "compile", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.tpu_compiler
def test_a_model_is_compiled_without_alarming_words():
    found = run("Falcon-H1-0.5B", "--layers", "1", "--rows", "1")
    assert found.returncode == 0, found.stderr
    assert found.stderr.splitlines() == [f"compiling {program} ..." for program in ("admit", "generate_tokens")]
    first, *table = found.stdout.splitlines()
    assert first == (
        "Falcon-H1-0.5B, 1 layer, for 1 device of a TPU v6e, 34.4 GB each: 1 request of at most 384 tokens, 128 tokens "
        "of each prompt at once"
    )
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("│┃").split("│")] for line in table)}
    assert cells["arrays not in place"] == cells["exchanges of layers"] == cells["other exchanges"] == ["0", "0"]
    assert cells["kernels: chunked"] == ["1", "0"] and cells["kernels: extend"] == ["0", "1"]
    assert len(set(cells["parameters, requests"])) == 1
    assert table[-1].startswith("some of it is compiled by XLA on a TPU v6e: there is no kernel for project, ")


@pytest.mark.tpu_compiler
def test_what_a_device_holds_is_what_the_compiler_says():
    """And an array that is not in place is told."""
    batch = Served("Falcon-H1-0.5B", 1, "v6e").batch(8)
    found = compiled_program("generate_tokens", batch)
    assert held_bytes(batch) == pytest.approx(found.held_bytes, rel=0.01)
    assert found.moved == () and found.layer_exchanges == found.other_exchanges == 0 and found.temporary_bytes > 0
    assert found.kernels == {"convolve": 1, "attend": 1, "extend": 1}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Qwen3.5-4",), "no model 'Qwen3.5-4': "),
        (("Qwen3.5-4B", "--device", "v9"), "--device must be one of v4, v5e, "),
        (("Qwen3.5-4B", "--device", "v6e-16"), "--device must have at most 8 devices to compile for, got 'v6e-16'"),
        (("Qwen3.5-4B", "--device", "v6e-3"), "--device v6e-3 can not serve Qwen3.5-4B: the value heads "),
        (("Llama-3.1-8B", "--device", "v5e"), "--device must have room for parameters and requests of Llama-3.1-8B, "),
        (("Qwen3.5-4B", "--layers", "33"), "--layers must be at most 32, got 33"),
        (("Qwen3.5-4B", "--rows", "0"), "--rows must be a whole number of at least 1, got '0'"),
        (("Llama-3.1-8B", "--layers", "1", "--drafter", "mtp"), '--drafter "mtp" needs a model with an MTP layer, '),
    ],
)
def test_what_can_not_be_compiled_is_said_in_a_line(arguments, message):
    found = CliRunner().invoke(app, ["compile", *arguments])
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith(f"error: {message}") and found.stderr.count("\n") == 1


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is here")
def test_without_the_compiler_it_says_what_to_install():
    found = run("demo", "--layers", "1")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: libtpu, the TPU compiler, must be installed: pip install 'jaxbuf[tpu]'\n"
