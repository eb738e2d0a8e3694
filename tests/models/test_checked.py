"""checked.json, what was checked of each family, is not stale, and is written as tests run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxbuf.models.checked import KINDS, Check, note_checks, path, read_checks
from jaxbuf.models.families import families
from tests import recording

ROOT = Path(__file__).parent.parent.parent
TEST = "tests/models/test_parity.py::test_logits[llama_full]"


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Every test that is marked, as collected: family, kind and id."""
    return recording.list_checks(tmp_path_factory.mktemp("checks") / "checks.json")


def test_every_family_was_compared_with_transformers_and_no_other_is_noted():
    noted = {(check.family, check.kind) for check in read_checks() if check.passed}
    missing = [family for family in families() if (family, "parity") not in noted]
    assert missing == [], "scripts/test --record -k FAMILY notes what is checked of it"
    assert {family for family, _ in noted} <= families().keys() and {kind for _, kind in noted} <= KINDS.keys()


def test_readmes_table_says_what_is_noted():
    columns = (("parity",), ("drafters", "trees"), ("samples", "beams"), ("mesh",), ("gpu",))
    passed = {(check.family, check.kind): True for check in read_checks()}
    passed |= {(check.family, check.kind): False for check in read_checks() if not check.passed}
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| [^|]+ \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = {family: cells.split(" | ") for family, cells in rows}
    assert told.keys() == families().keys()
    for family, cells in told.items():
        noted = [all(passed.get((family, kind), False) for kind in kinds) for kinds in columns]
        assert cells == ["yes" if each else "-" for each in noted], family


@pytest.mark.slow
@pytest.mark.slow
def test_what_is_noted_are_tests_that_there_are(marked):
    noted = {(check.family, check.kind, check.test) for check in read_checks()}
    assert noted - set(map(tuple, marked)) == set(), "scripts/test --record takes out what is no more"


@pytest.mark.slow
def test_every_family_has_a_test_of_every_kind_that_needs_no_hardware(marked):
    there = {(family, kind) for family, kind, _ in marked}
    kinds = KINDS.keys() - {"gpu", "tpu"}
    assert [(family, kind) for family in families() for kind in kinds if (family, kind) not in there] == []


def test_the_file_is_as_it_is_written(tmp_path):
    copy = tmp_path / "checked.json"
    copy.write_text(path().read_text())
    note_checks([], file=copy)
    assert copy.read_text() == path().read_text()


def test_newer_checks_take_the_place_of_older_ones_and_what_is_no_more_is_taken_out(tmp_path):
    file = tmp_path / "checked.json"
    one, other = (
        Check("llama", kind, f"{kind}.py::test[a]", "2026-01-01", True, {"jax": "1"}) for kind in ("mesh", "beams")
    )
    assert note_checks([one, other], file=file) == read_checks(file) == [other, one]  # in the order of KINDS
    failed = Check("llama", "mesh", one.test, "2026-01-02", False, {"jax": "2"})
    assert note_checks([failed], file=file) == [other, failed]
    assert one.function == "mesh.py::test"
    assert note_checks([], exist=[("llama", "mesh", one.test)], file=file) == read_checks(file) == [failed]
    assert note_checks([], exist=[], file=file) == [] and read_checks(tmp_path / "none.json") == []
    assert len(json.dumps(KINDS)) > 0 and path().parent.name == "models"


def report(when="call", outcome="passed", checks=(("parity", "llama"),), test=TEST):
    said = [(recording.PROPERTY, [list(map(list, checks)), {"jax": "1"}])] if checks else []
    flags = {name: name == outcome for name in ("passed", "failed", "skipped")}
    return SimpleNamespace(when=when, nodeid=test, user_properties=said, **flags)


def test_a_test_passes_if_no_part_of_it_fails():
    for given, expected in (
        ([report("setup"), report(), report("teardown")], [True]),
        ([report("setup"), report(outcome="failed"), report("teardown")], [False]),
        ([report("setup", "failed"), report("teardown")], [False]),
        ([report("setup"), report(), report("teardown", "failed")], [False]),
        ([report("setup", "skipped"), report("teardown")], []),
        ([report("setup"), report(outcome="skipped"), report("teardown")], []),
        ([report(checks=())], []),
    ):
        recorder = recording.Recorder(path().parent)
        for each in given:
            recorder.pytest_runtest_logreport(each)
        assert [check.passed for check in recorder.found.values()] == expected


def item(*marks, **parameters):
    """A test with these marks, the first of which are its own and the last its module's."""
    own = [mark.mark for mark in marks]
    return SimpleNamespace(
        nodeid="a", own_markers=own, iter_markers=lambda name: own, callspec=SimpleNamespace(params=parameters)
    )


def test_the_family_is_what_a_test_is_parametrised_by():
    checks = pytest.mark.checks
    assert recording.checks_of(item(checks("beams"), architecture="mamba2", name="mtp")) == {("beams", "mamba2")}
    assert recording.checks_of(item(checks("parity"), name="llama_yarn")) == {("parity", "llama")}
    assert recording.checks_of(item(checks("parity"), name="demo")) == {("parity", "qwen3_5")}
    assert recording.checks_of(item(checks("beams", family="qwen3"))) == {("beams", "qwen3")}
    assert recording.oracle_of(item(name="llama_yarn")).keys() == {"transformers"}
    of_module = item(checks("beams"), name="mtp")
    of_module.own_markers = []
    assert recording.checks_of(of_module) == set()


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (pytest.mark.checks("speed", family="llama"), "must have a kind out of parity, .*, got 'speed', 'llama'"),
        (pytest.mark.checks("beams", family="gpt"), "and a family out of .*, falcon_h1, .*, got 'beams', 'gpt'"),
        (pytest.mark.checks("beams"), "got 'beams', None"),
    ],
)
def test_a_mark_of_what_does_not_exist_is_an_error(mark, message):
    with pytest.raises(pytest.UsageError, match=message):
        recording.checks_of(item(mark))


@pytest.mark.exhaustive
def test_several_processes_note_in_one_file(tmp_path):
    file = tmp_path / "checked.json"
    command = [sys.executable, "-m", "pytest", "-q", "-n2", "--record-in", str(file), "-p", "no:cacheprovider"]
    tests = ["tests/models/test_parity.py", "-k", "saved and (llama_full or mamba2_full)"]
    done = subprocess.run([*command, *tests], cwd=recording.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    found = read_checks(file)
    assert [(check.family, check.kind, check.passed) for check in found] == [
        ("llama", "parity", True),
        ("mamba2", "parity", True),
    ]
    assert all(check.on.keys() == {"jax", "transformers"} for check in found)
    assert f"2 ran, 0 of them failed; {file} has 2" in done.stdout
