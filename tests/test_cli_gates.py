"""`jaxbuf gates threshold`: what the embedded model's gates keep at some thresholds, and gates with another one."""

import numpy as np
import pytest
from typer.testing import CliRunner

import jaxbuf
from jaxbuf.cli import app
from jaxbuf.models.gates import admission_of, gate_parameters, kept_shares

LENGTH = 80


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    tokens = np.random.default_rng(0).integers(1, 4096, 2 * LENGTH).astype(np.int32)
    path = tmp_path_factory.mktemp("text") / "text.npy"
    np.save(path, tokens)
    return path, tokens.reshape(2, LENGTH)


def run(*arguments):
    done = CliRunner().invoke(app, ["gates", "threshold", *map(str, arguments), "--length", str(LENGTH)])
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    return done, {note or threshold: (float(threshold), float(kept)) for threshold, kept, note in rows}


@pytest.mark.slow
def test_the_table_has_what_is_kept_and_a_new_file_another_threshold(text, tmp_path):
    path, tokens = text
    new = tmp_path / "quarter.safetensors"
    done, table = run("demo", path, "--share", 0.25, "--output", new)
    assert done.exit_code == 0, done.output
    had, got = jaxbuf.load("demo", gates="demo"), jaxbuf.load("demo", gates=new)
    for lm, note in ((had, "the file's"), (got, "the new file's")):
        threshold, kept = table[note]
        assert admission_of(lm).threshold == pytest.approx(threshold, rel=1e-3)
        assert kept_shares(lm, tokens).mean() == pytest.approx(kept, abs=1e-3)
    assert table["the new file's"][1] == pytest.approx(0.25, abs=0.01)
    in_order = [kept for _, kept in sorted(table.values())]
    assert in_order == sorted(in_order, reverse=True)
    for name, param in gate_parameters(had.model).items():
        np.testing.assert_array_equal(param[...], gate_parameters(got.model)[name][...])


@pytest.mark.slow
def test_by_default_the_new_file_lies_beside_the_old_one(text, tmp_path):
    path, _ = text
    jaxbuf.models.gates.save_gates(jaxbuf.load("demo", gates="demo"), tmp_path / "mine.safetensors")
    done, _ = run(tmp_path / "mine.safetensors", path, "--to", 0.3)
    assert done.exit_code == 0, done.output
    assert admission_of(jaxbuf.load("demo", gates=tmp_path / "mine-0.3.safetensors")).threshold == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", 0.3, "--share", 0.2), "--to must be given without --share, got 0.3 and 0.2"),
        (("--output", "x"), "--output must be given with --to or --share, got 'x' alone"),
        (("--to", "much"), "--to must be a"),
    ],
)
def test_what_can_not_be_is_said_in_a_line(arguments, message):
    done, _ = run("demo", *arguments)
    assert done.exit_code == 2 and f"error: {message}" in done.stderr
