"""`jaxbuf models`: every family with what was checked of it, the sizes of known models, and their JSON."""

import json

import pytest
from typer.testing import CliRunner

from jaxbuf.cli import app
from jaxbuf.models.checked import KINDS, Check, read_checks
from jaxbuf.models.families import families
from jaxbuf.models.known_models import known_models
from jaxbuf.planning.model_sizes import find_sizes


def invoke(*arguments: str, **options):
    return CliRunner().invoke(app, ["models", *arguments], **{"env": {"COLUMNS": "180"}} | options)


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in text.splitlines() if line.startswith("│")]


def test_the_table_has_every_family_with_the_number_of_checks_that_passed():
    done = invoke()
    assert done.exit_code == 0, done.stderr
    found = {row[0]: row[1:] for row in rows_of(done.stdout) if row[0] in families() and len(row) == 1 + len(KINDS)}
    assert found.keys() == families().keys()
    for family, cells in found.items():
        for kind, cell in zip(KINDS, cells, strict=True):
            own = [check.passed for check in read_checks() if (check.family, check.kind) == (family, kind)]
            passed = f"{sum(own)}" if all(own) else f"{sum(own)} of {len(own)}"
            assert cell == (passed if own else "-"), (family, kind)
    assert all(module.SERVED in done.stdout for module in families().values())
    assert all(kind in done.stdout for module in families().values() for kind in module.MODEL_TYPES)
    assert all(name in done.stdout for name in known_models())


def test_failed_checks_and_dates_are_told(monkeypatch):
    noted = [Check("llama", "beams", f"test[{day}]", f"2026-01-0{day}", day > 1, {"jax": "1"}) for day in (1, 2, 3)]
    monkeypatch.setattr("jaxbuf.models.checked.read_checks", lambda: noted)
    listed = invoke().stdout
    rows = rows_of(listed)
    place = next(number for number, row in enumerate(rows) if row[0] == "llama")
    assert rows[place][1 + list(KINDS).index("beams")] == "2 of 3"
    told = {row[0]: row[2:] for row in rows if len(row) == 4}
    assert told["llama"] == ["llama", "2026-01-01 to 2026-01-03"]
    assert told["mamba2"] == ["mamba2", "not checked"]
    done = invoke("llama")
    assert ["beams", "2 of 3", "2026-01-01 to 2026-01-03", KINDS["beams"]] in rows_of(done.stdout)
    assert ["tpu", "-", "not checked", "on TPUs"] in rows_of(done.stdout)
    assert ["test", "2 of 3"] in rows_of(done.stdout)
    checked = json.loads(invoke("llama", "--json").stdout)["checked"]
    assert checked["beams"] == {"passed": 2, "failed": 1, "oldest": "2026-01-01", "newest": "2026-01-03"}
    assert checked["tpu"] is None


@pytest.mark.slow
def test_a_family_has_its_tests_and_the_sizes_of_its_models():
    done = invoke("nemotron_h")
    assert done.stdout.startswith("nemotron_h: Nemotron-H and Nemotron 3 text models (model_type nemotron_h)\n")
    rows = rows_of(done.stdout)
    assert ["Nemotron-H-8B", "24, 4", "100.7 MB", "16.4 kB", "8.1 B"] in rows
    found = json.loads(invoke("nemotron_h", "--json").stdout)
    assert {"Nemotron-3-Nano-4B", "Nemotron-H-8B"} < {*found["known_models"]}
    assert len(found["checks"]) == sum(check.family == "nemotron_h" for check in read_checks()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "qwen3.5 0.8b", "demo", "Kimi-Linear-48B-A3B", "llama-3.1-8b"])
def test_a_model_has_its_sizes(name):
    done, told = invoke(name), json.loads(invoke(name, "--json").stdout)
    sizes = find_sizes(name)
    assert done.exit_code == 0, done.stderr
    assert (told["recurrent_layers"], told["attention_layers"]) == (sizes.recurrent_layers, sizes.attention_layers)
    assert told["state_bytes"] == sizes.state_bytes and told["parameters"] == sizes.count_parameters()
    assert told["kv_bytes_per_token"] == sizes.kv_bytes(sizes.dtype)
    assert f"{sizes.recurrent_layers} recurrent and {sizes.attention_layers} softmax ones" in done.stdout
    assert f"parameters: {sizes.count_parameters():,}" in done.stdout
    assert told["family"] == sizes.config.family


def test_a_name_that_is_none_is_one_line_with_what_there_is():
    done = invoke("lama")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: NAME: no model 'lama': expected")
    assert "; or a family: " in line and "falcon_h1, " in line


def test_help_teaches_with_examples():
    text = invoke("--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert "jaxbuf models Qwen3-Next-80B-A3B --json" in text and "jaxbuf bench step --model NAME" in text
    assert all(kind in text for kind in ("parity", "forms", "drafters", "trees", "samples", "beams", "mesh", "gpu"))
