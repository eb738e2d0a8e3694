"""`jaxbuf plan`: a table of what `jaxbuf.plan` finds, or its JSON."""

import json

import pytest
import typer
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app
from jaxbuf.cli.plan import parse_size

NEXT = "Qwen3-Next-80B-A3B"


def invoke(*arguments: str, **options):
    return CliRunner().invoke(app, ["plan", *arguments], **options)


@pytest.mark.slow
def test_json_is_a_plan_for_each_context():
    options = ("--memory", "320GB", "--draft-tokens", "4", "--accepted", "2.5", "--limit", "32", "--state-dtype")
    done = invoke(NEXT, "--json", *options, "bfloat16", "--workspace", "8GiB", "--context", "1000", "--context", "9")
    assert done.exit_code == 0, done.stderr
    sizes = {"accepted": 2.5, "limit": 32, "state_dtype": "bfloat16", "workspace_bytes": 8 * 2**30}
    expected = [jaxbuf.plan(NEXT, 320 * 10**9, 4, context, **sizes).to_dict() for context in (1000, 9)]
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))


@pytest.mark.slow
def test_the_table_fits_a_terminal_and_compares_at_1k_and_8k():
    done = invoke(NEXT, "--memory", "320GB", "--draft-tokens", "4", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [
        [cell.strip() for cell in line[1:-1].replace("┃", "│").split("│")] for line in lines if line[:1] in ("│", "┃")
    ]
    assert all(len(line) <= 80 for line in lines if line[:1] in ("│", "┃"))
    headings = [row for row in rows if row[0] == "a request"]
    assert headings == [["a request", "recurrent", "buffered", "kv-only", "snapshots"]] * 2
    fits = [row[1:] for row in rows if row[0] == "requests that fit"]
    plans = [jaxbuf.plan(NEXT, 320 * 10**9, 4, context) for context in (1024, 8192)]
    assert fits == [[str(cost.requests) for cost in found.forms] for found in plans]
    told = " ".join(done.stdout.split())
    assert "4.38 times the recurrent memory of the buffered form (ring of 24 entries)" in told
    assert "3.51 times all of it at 1024 tokens" in done.stdout
    assert "2.00 times all of it at 8192 tokens" in done.stdout
    assert "162.6 GB parameters (bfloat16)" in done.stdout
    assert "crossover: up to about 188 tokens" in done.stdout


def test_a_model_without_recurrent_layers_has_one_column():
    asked = "--context", "1024", "--draft-tokens", "2", "--requests", "32"
    done = invoke("llama-3.1-8b", *asked, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    assert "Llama-3.1-8B: 0 recurrent and 32 softmax layers" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    cells = {row.split("│")[1].strip(): [cell.strip() for cell in row.split("│")[2:-1]] for row in rows}
    assert "any form" in done.stdout
    assert cells["keys and values"] == ["134.2 MB"] and "states" not in cells and "state moved a step" not in cells
    memory = jaxbuf.plan("Llama-3.1-8B", 80 * 10**9, 2, 1024).memory_for("buffered", 32)
    assert cells["memory for 32"] == [f"{memory / 1e9:.1f} GB"]
    assert "crossover" not in done.stdout and "draft position" not in done.stdout
    (found,) = json.loads(invoke("Llama-3.1-8B", "--json", "--context", "9").stdout)
    assert found["crossover"] is None and [form["form"] for form in found["forms"]] == ["buffered"]


def test_a_model_of_latent_attention_is_planned_with_576_numbers_a_token():
    done = invoke("Kimi-Linear-48B-A3B", "--context", "9", "--json")
    (found,) = json.loads(done.stdout)
    buffered = next(form for form in found["forms"] if form["form"] == "buffered")
    assert buffered["kv_bytes"] == 16 * 7 * 576 * 2 and found["parameter_bytes"] > 2 * 49_122_681_728
    assert "98.2 GB parameters (bfloat16)" in invoke("Kimi-Linear-48B-A3B", "--context", "9").stdout


@pytest.mark.slow
def test_the_model_may_be_an_option_as_elsewhere():
    expected = invoke(NEXT, "--context", "9").stdout
    assert invoke("--model", NEXT, "--context", "9").stdout == expected
    assert invoke(NEXT, "--model", NEXT, "--context", "9").stdout == expected
    assert invoke("--context", "9").stdout == invoke("--model", "demo", "--context", "9").stdout != expected


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_said_to():
    done = invoke(NEXT, "--memory", "80GB", "--context", "1024")
    assert done.exit_code == 0, done.stderr
    assert "The parameters and the workspace do not fit." in done.stdout and "They do on" not in done.stdout
    done = invoke(NEXT, "--device", "v6e", "--context", "1024")
    assert "do not fit.\nThey do on v6e-8.\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("80 gib", 80 * 2**30), ("94.5GiB", 94.5 * 2**30), ("141e9", 141e9), ("0", 0), ("1.1TB", 1.1e12)],
)
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "3x", "-1", "320", "1.2.3GB", "80 GB!"])
def test_what_is_no_size_is_an_error_that_shows_one(text):
    with pytest.raises(typer.BadParameter, match="80GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model",), "no-such-model"),
        (
            ("demo", "--draft-tokens", "2", "--accepted", "4"),
            "--accepted must be a number in [1, 1 + --draft-tokens (3)], got 4.0",
        ),
        (("demo", "--dtype", "float7"), "float7"),
    ],
)
def test_an_error_is_one_line(arguments, message):
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


def test_help_teaches_with_examples():
    text = invoke("--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    options = ("--memory", "--draft-tokens", "--accepted", "--context", "--limit", "--state-dtype", "--json")
    assert all(option in text for option in options)
    assert f"jaxbuf plan {NEXT} --memory 320GB --draft-tokens 4" in text
    assert all(form in text for form in ("recurrent", "buffered", "kv-only", "snapshots"))


def test_a_slice_of_tpus_stands_in_place_of_a_memory():
    done = invoke("Qwen3.5-4B", "--device", "tpu7x-2", "--context", "1024", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    assert "2 chips of a TPU tpu7x, 4 devices; what follows is of one device, with 3.69 TB a second" in " ".join(
        done.stdout.split()
    )
    assert "a second: the heads are spread over all" in " ".join(done.stdout.split())
    assert "103.1 GB of memory" in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if "a step of all, estimate" in line)
    assert row.count(" ms") == 4
    done = invoke("Qwen3.5-4B", "--device", "v6e", "--context", "1024", "--requests", "64")
    (row,) = (line for line in done.stdout.splitlines() if "a step of 64, estimate" in line)
    seconds = jaxbuf.plan("Qwen3.5-4B", device="v6e", context=1024).step_seconds_for("buffered", 64)
    assert f"{1e3 * seconds:.3g} ms" in row
    (found,) = json.loads(invoke("Qwen3.5-4B", "--device", "v6e", "--context", "1024", "--json").stdout)
    assert found["device"]["generation"] == "v6e" and found["forms"][0]["step_seconds"] > 0
    both = invoke("Qwen3.5-4B", "--device", "v6e", "--memory", "80GB")
    assert both.exit_code != 0 and "--memory must be left out with --device" in both.stderr
    wrong = invoke("Qwen3.5-4B", "--device", "v6e-3")
    assert wrong.exit_code != 0 and 'must be a multiple of the mesh axis "tensor" (3)' in wrong.stderr
