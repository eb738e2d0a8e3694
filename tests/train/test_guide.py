"""The guide to write gates: its commands exist as it writes them, and those for the embedded model run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from jaxbuf.cli import app

GUIDE = (Path(__file__).parents[2] / "docs" / "write_gated.rst").read_text()
CONTINUED = GUIDE.replace("\\\n", "")  # a command of several lines is one
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^   \$ (jaxbuf .*)$", CONTINUED, re.MULTILINE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_guide_can_be_typed(words):
    command, words = typer.main.get_command(app), list(words)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]  # pyright: ignore[reportAttributeAccessIssue]
    command.make_context("jaxbuf", words)  # an option that is not there, or a value of the wrong kind, raises


def test_the_python_of_the_guide_names_what_is_there():
    (code,) = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", GUIDE, re.MULTILINE)
    lines = [line[3:] for line in code.splitlines()]
    compile("\n".join(lines), "guide", "exec")
    for line in lines:
        if line.startswith(("import ", "from ")):
            exec(line, {})
    settings = re.search(r"Recipe\((.*?)\)", code)
    assert settings
    exec(f"from jaxbuf.train.write_gate import Recipe; Recipe({settings[1]})", {})


@pytest.mark.exhaustive
@pytest.mark.foreign
def test_the_commands_for_the_embedded_model_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("text.npy", np.random.default_rng(0).integers(1, 4096, 400).astype(np.int32))
    few = {
        "train-gate": ["text.npy", "--steps", "2", "--length", "80"],
        "generate": ["--max-new-tokens", "3"],
        "gates": ["text.npy", "--length", "80"],
    }
    ran = set()
    for words in COMMANDS:
        if "--model" in words:
            continue
        done = CliRunner().invoke(app, [*words, *few[words[0]]])
        assert done.exit_code == 0, (words, done.output)
        assert done.stdout.strip()
        ran.add(words[0])
    assert ran == set(few)
    assert {
        "gates.safetensors",
        "gates.jsonl",
        "gates.png",
        "gates.json",
        "gates.kept.png",
        "stricter.safetensors",
    } <= {path.name for path in tmp_path.iterdir()}
