"""`jaxbuf bench`: it lists the programs, hands on every word, and a program keeps figures only where it is told to."""

import importlib.util
import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from typer.testing import CliRunner

from jaxbuf.bench import PROGRAMS, drift
from jaxbuf.cli import app
from jaxbuf.compilation import cache_compilations
from jaxbuf.serving import profiling

SMALL = "--steps 8 --limit 4 --heads 2 --key-heads 1 --dim 4 --families gdn".split()


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "120"})


def test_without_a_name_it_lists_the_programs_and_their_figures(pytestconfig):
    done = bench()
    assert done.exit_code == 0
    for program in PROGRAMS:
        assert program.name in done.stdout
        if program.figures:
            assert f"benchmarks/{program.figures}" in done.stdout
            assert (pytestconfig.rootpath / "benchmarks" / program.figures).is_file()
        launcher = pytestconfig.rootpath / "scripts" / f"bench_{program.name}"
        assert launcher.resolve() == pytestconfig.rootpath / "scripts" / "bench" and launcher.exists()


@pytest.mark.parametrize("program", [program.name for program in PROGRAMS])
def test_every_program_explains_itself(program, capsys):
    done = bench(program, "--help")
    assert done.exit_code == 0
    assert f"usage: jaxbuf bench {program}" in done.stdout and "--json" in done.stdout


def test_every_word_reaches_the_program_and_its_status_comes_back(monkeypatch):
    called = []
    monkeypatch.setattr(drift, "main", lambda words: called.append(list(words)) or 3)
    assert bench("drift", "--steps", "8", "--json=a.json", "--unknown", "x").exit_code == 3
    assert called == [["--steps", "8", "--json=a.json", "--unknown", "x"]]


def test_an_option_that_is_not_there_is_an_error_that_names_it():
    done = bench("load", "--step", "8")
    assert done.exit_code == 2 and "--step" in done.stderr


def test_figures_that_need_matplotlib_say_so_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = bench("drift", "--json", str(tmp_path / "drift.json"))
    assert done.exit_code == 2 and "pip install 'jaxbuf[plots]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def kept_programs(tmp_path):
    names = "compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield cache_compilations(tmp_path / "programs")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.exhaustive
def test_a_short_drift_run_is_not_judged_and_keeps_what_it_is_told_to(tmp_path, monkeypatch, kept_programs):
    monkeypatch.chdir(tmp_path)
    done = bench("drift", *SMALL)
    assert done.exit_code == 0 and "nothing is judged" in done.stdout and "first 4" in done.stdout
    assert [*tmp_path.iterdir()] == [kept_programs] and list(kept_programs.iterdir())
    jax.clear_caches()  # a profile has the names of operations, which what comes out of the directory has lost
    assert bench("drift", *SMALL, "--profile", "trace").exit_code == 0
    assert {"recurrence"} <= {row.scope for row in profiling.time_by_scope("trace") if row.program == "decode"}
    assert bench("drift", *SMALL, "--json", "figures/drift.json").exit_code == 0
    record = json.loads((tmp_path / "figures/drift.json").read_text())
    assert len(record["figures"]) == 42 and record["steps"] == 8 and (tmp_path / "figures/drift.png").is_file()
