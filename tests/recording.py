"""The mark `checks`: which test checks what of which family, and the note of those that ran (`scripts/test --record`).

    @pytest.mark.checks("beams")

says that a test checks beams of the family that it is parametrised by: by `family` or `architecture`, which name it, or
by `name`, a folder of tests/fixtures. On a module (`pytestmark`) it is said of those tests in it that are parametrised
so. Where nothing is, `family="qwen3_5"` in the mark says it. `jaxbuf.models.checked.KINDS` has the kinds.

A new family is noted with the tables that the tests are parametrised by; nothing here names one.
"""

import datetime
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from safetensors import safe_open

from jaxbuf.models.checked import KINDS, Check, note_checks
from jaxbuf.models.families import families

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
PARAMETERS = ("family", "architecture", "name")  # of tests, that say their family
PROPERTY = "checks"  # of a report
UNSERVED = ""  # the family of a fixture where its module was taken away


def add_options(parser) -> None:
    group = parser.getgroup("checks of families")
    group.addoption(
        "--record", action="store_true", help="note in jaxbuf/models/checked.json which checks of families passed"
    )
    group.addoption("--record-in", metavar="FILE", default=None, help="note them in another file instead")
    group.addoption("--list-checks", metavar="FILE", default=None, help="write all that are collected to a file")


def checks_of(item) -> set[tuple[str, str]]:
    """The (kind, family) of what a test checks.

    Raises:
      pytest.UsageError: It is marked with a kind or a family that does not exist, or says no family.
    """
    found = set()
    for mark in item.iter_markers("checks"):
        (kind,), family = mark.args, mark.kwargs.get("family") or family_of(item)
        if family == UNSERVED or (family is None and mark not in item.own_markers):  # said of the module
            continue
        if kind not in KINDS or family not in families():
            where = f"{item.nodeid}: the mark checks must have a kind out of {', '.join(KINDS)}"
            raise pytest.UsageError(f"{where} and a family out of {', '.join(families())}, got {kind!r}, {family!r}")
        found.add((kind, family))
    return found


def family_of(item) -> str | None:
    """The family that a test is parametrised by, or UNSERVED; None: by none."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for name in PARAMETERS:
        value = given.get(name)
        if value in families():
            return value
        if isinstance(value, str) and (facts := facts_of_fixture(value)):
            return facts["family"]
    # A second architecture of a family has its name, and something behind it.
    begun = [family for family in families() if str(given.get("architecture")).startswith(f"{family}_")]
    return max(begun, key=len, default=None)


@functools.cache
def facts_of_fixture(name: str) -> dict[str, str]:
    """The family of a folder of tests/fixtures, and the version of transformers that computed what is expected."""
    folder = FIXTURES / name
    if not name or not (folder / "expected.safetensors").is_file():
        return {}
    description = folder / "checkpoint" / "config.json"
    if not description.is_file():  # what is expected of the embedded model
        description = ROOT / "jaxbuf" / "models" / "demo" / "config.json"
    kind = json.loads(description.read_text())["model_type"]
    with safe_open(folder / "expected.safetensors", "np") as file:
        versions = file.metadata() or {}
    found = next((family for family, module in families().items() if kind in module.MODEL_TYPES), UNSERVED)
    return {"transformers": versions.get("transformers", "unknown"), "family": found}


def oracle_of(item) -> dict[str, str]:
    """The version of transformers that a test's fixture is from."""
    given = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    facts = facts_of_fixture(given) if isinstance(given, str) else {}
    return {name: version for name, version in facts.items() if name == "transformers"}


def note_items(config, items) -> None:
    """Tells the reports of tests what they check, in whichever process they run; and the file of --list-checks."""
    listed = []
    for item in items:
        found = sorted(checks_of(item))
        if found:
            on = {"jax": jax.__version__} | oracle_of(item)
            if (config.option.record or config.option.record_in) and jax.default_backend() != "cpu":
                on["device"] = jax.devices()[0].device_kind
            item.user_properties.append((PROPERTY, [found, on]))
            listed += [(family, kind, item.nodeid) for kind, family in found]
    if config.option.list_checks:
        Path(config.option.list_checks).write_text(json.dumps(listed))


def marked_files() -> list[str]:
    """The files with marks."""
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.checks(" in path.read_text())
    return sorted(str(path.relative_to(ROOT)) for path in files)


def list_checks(file: Path) -> list[tuple[str, str, str]]:
    """Family, kind and id of every test that is marked, whether it is slow or not, from a process of its own."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [*command, "--list-checks", str(file), *marked_files()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [(family, kind, test) for family, kind, test in json.loads(file.read_text())]


class Recorder:
    """Notes the checks of a session: in the process that the reports of all come to."""

    def __init__(self, folder: Path, file: str | None = None):
        self.folder, self.file, self.found, self.all = folder, file and Path(file), {}, 0

    def pytest_runtest_logreport(self, report):
        said = dict(report.user_properties).get(PROPERTY)
        ended = report.failed or (report.when == "call" and report.passed)
        if said is None or not ended:  # a test that was skipped says nothing
            return
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        checked, on = said
        for kind, family in checked:
            key, before = (family, kind, report.nodeid), self.found.get((family, kind, report.nodeid))
            passed = report.passed and (before is None or before.passed)
            self.found[key] = Check(family, kind, report.nodeid, today, passed, on)

    def pytest_sessionfinish(self):
        if self.found:
            self.all = len(note_checks(self.found.values(), list_checks(self.folder / "checks.json"), self.file))

    def pytest_terminal_summary(self, terminalreporter):
        failed = sum(not check.passed for check in self.found.values())
        terminalreporter.section("checks of families")
        where = self.file or "jaxbuf/models/checked.json"
        said = f"{len(self.found)} ran, {failed} of them failed; {where} has {self.all}"
        terminalreporter.line(said if self.found else "none ran")
