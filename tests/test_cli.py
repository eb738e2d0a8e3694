"""`jaxbuf generate` with the embedded model: the text alone on stdout, an error is a line, Ctrl-C keeps the text."""

import os
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app

PROMPT = "The configuration file"
COMMAND = [sys.executable, "-m", "jaxbuf.cli"]


def invoke(*arguments: str, **options):
    return CliRunner().invoke(app, list(arguments), **options)


def test_the_version_is_that_of_the_package():
    assert invoke("--version").stdout == f"jaxbuf {jaxbuf.__version__}\n"


def test_help_teaches_with_examples():
    text = invoke("generate", "--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    options = (
        "--model",
        "--max-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--seed",
        "--limit",
        "--form",
        "--dtype",
    )
    assert all(option in text for option in options)
    assert f'jaxbuf generate "{PROMPT}"' in text


def test_the_command_line_starts_without_jax():
    code = "import sys, jaxbuf.cli; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_stdout_holds_the_text_alone_and_stderr_the_statistics():
    lm = jaxbuf.load("demo")
    (expected,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40)
    done = invoke("generate", PROMPT, "--max-new-tokens", "40")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    assert done.stderr.startswith("device: cpu")
    assert "compiling" in done.stderr
    stats = expected.stats
    assert f"{stats.prompt_tokens} tokens read, {stats.new_tokens} tokens in " in done.stderr
    assert f"{stats.steps} steps, {stats.folds} folds, {stats.live_entries} live entries read" in done.stderr
    assert f"{stats.bytes / 1e6:.2f} MB moved" in done.stderr


def test_options_reach_the_generation():
    lm = jaxbuf.load("demo")
    sampling = jaxbuf.SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=7)
    (expected,) = jaxbuf.generate(lm, [PROMPT], max_new_tokens=40, sampling=sampling, form="recurrent")
    done = invoke(
        *("generate", "-", "--max-new-tokens", "40", "--form", "recurrent"),
        *("--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--seed", "7"),
        input=PROMPT,
    )
    assert done.stdout == expected.text + "\n"
    assert f"{expected.stats.folds} folds" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt"),
        ([PROMPT, "--model", "no-such-model"], "no-such-model"),
        ([PROMPT, "--dtype", "float7"], "float7"),
        ([PROMPT, "--max-new-tokens", "100000"], "100000"),
        ([PROMPT, "--max-new-tokens", "0"], "max_new_tokens"),
        ([PROMPT, "--temperature", "-1"], "temperature"),
        ([PROMPT, "--top-k", "-2"], "top_k"),
        ([PROMPT, "--top-p", "1.5"], "top_p"),
        ([PROMPT, "--limit", "0"], "limit"),
    ],
)
def test_an_error_is_one_line_that_names_what_came(arguments, message):
    done = invoke("generate", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert message in lines[-1]


def test_an_unknown_form_is_an_error_that_lists_the_forms():
    done = invoke("generate", PROMPT, "--form", "folded", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2
    assert all(form in done.stderr for form in ("folded", "auto", "recurrent", "buffered"))


def test_a_broken_checkpoint_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = invoke("generate", PROMPT, "--model", str(tmp_path))
    assert done.exit_code == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_standard_input_that_is_no_text_is_an_error():
    done = invoke("generate", "-", input=b"\xff\xfe")
    assert done.exit_code == 2
    assert "utf-8" in done.stderr.splitlines()[-1]


def test_a_platform_that_is_not_there_is_an_error():
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    done = subprocess.run([*COMMAND, "generate", PROMPT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_the_text_so_far_and_prints_its_statistics():
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--max-new-tokens", "8000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        first = os.read(process.stdout.fileno(), 65536)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert (first + rest).decode().strip()
    assert re.search(r"^\d+ tokens read, \d+ tokens in ", stderr.decode(), re.MULTILINE)
    assert re.search(r"\d+ steps, \d+ folds", stderr.decode())
    assert "Traceback" not in stderr.decode()
