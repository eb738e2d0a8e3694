"""The set-up that scripts/test and scripts/demo share, with a stand-in for uv that writes down what it was asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = ("requirements.lock", "requirements.newest.lock", "requirements.tpu.lock")
UV = """#!/usr/bin/env bash
echo "$*" >> "$UV_CALLS"
case "$*" in
  venv*)
    directory="${@: -1}"
    mkdir -p "$directory/bin"
    printf '#!/bin/sh\\necho python "$@"\\n' > "$directory/bin/python"
    chmod +x "$directory/bin/python"
    ;;
  "pip sync"*)
    touch "$(dirname "$(dirname "$5")")/half"
    [ -z "${INTERRUPTED-}" ]
    ;;
esac
"""


class Clone:
    """A copy of the repository's scripts, at a path with a space in it, run from another directory."""

    def __init__(self, directory: Path):
        self.root = directory / "a clone"
        self.calls = directory / "calls"
        self.elsewhere = directory / "elsewhere"
        programs = directory / "bin"
        for folder in (self.root / "jaxbuf", self.elsewhere, programs):
            folder.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in (".python-version", *LOCKS, "pyproject.toml", "jaxbuf/version.py"):
            shutil.copy(ROOT / name, self.root / name)
        (programs / "uv").write_text(UV)
        (programs / "uv").chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "UV_CALLS": str(self.calls),
            "VIRTUAL_ENV": str(self.elsewhere),
        }

    def test(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.root / "scripts" / "test", *arguments],
            cwd=self.elsewhere,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def new_calls(self) -> list[str]:
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [" ".join(call.split()[:2]) for call in calls if call != "--version"]


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_a_fresh_clone_is_set_up_and_a_second_run_installs_nothing(clone):
    first = clone.test("-k", "fold")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "python -m pytest -m not slow and not exhaustive -k fold\n"
    assert clone.new_calls() == ["venv --quiet", "pip sync", "pip install"]
    second = clone.test()
    assert second.returncode == 0
    assert second.stderr == ""
    assert clone.new_calls() == []


def test_nothing_is_installed_into_the_environment_that_is_active(clone):
    clone.test()
    assert list(clone.elsewhere.iterdir()) == []
    assert (clone.root / ".venv" / "bin" / "python").exists()


def test_the_newest_packages_have_an_environment_of_their_own(clone):
    first = clone.test("--newest", "-k", "fold")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "python -m pytest -m not slow and not exhaustive -k fold\n"
    assert "setting up .venv-newest from requirements.newest.lock" in first.stderr
    assert clone.new_calls() == ["venv --quiet", "pip sync", "pip install"]
    assert (clone.root / ".venv-newest" / "bin" / "python").exists() and not (clone.root / ".venv").exists()
    clone.test()
    clone.new_calls()
    with (clone.root / "requirements.newest.lock").open("a") as lock:
        lock.write("# changed\n")
    assert clone.test().returncode == 0 and clone.new_calls() == []
    assert clone.test("--newest").returncode == 0 and clone.new_calls() == ["pip sync", "pip install"]


def test_without_arguments_what_needs_the_tpu_compiler_is_left_to_its_suite(clone):
    assert "--ignore tests/portability" in clone.test().stdout
    assert "--ignore" not in clone.test("-k", "fold").stdout


@pytest.mark.parametrize(
    ("level", "markers"), [([], "not exhaustive"), (["--exhaustive"], "exhaustive")], ids=["alone", "exhaustive"]
)
def test_the_tpu_compiler_has_an_environment_of_its_own(clone, level, markers):
    first = clone.test("--portability", *level, "-k", "extend")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"python -m pytest -m {markers} tests/portability -k extend\n"
    assert "setting up .venv-tpu from requirements.tpu.lock" in first.stderr
    assert clone.new_calls() == ["venv --quiet", "pip sync", "pip install"]
    assert (clone.root / ".venv-tpu" / "bin" / "python").exists() and not (clone.root / ".venv").exists()
    (clone.root / "tests").mkdir()
    chosen = clone.test("--portability", *level, "tests::one")
    assert chosen.stdout == f"python -m pytest -m {markers} tests::one\n"


@pytest.mark.parametrize("given", ["--all", "--newest", "--record"])
def test_portability_goes_with_no_other_suite(clone, given):
    refused = clone.test("--portability", given)
    assert refused.returncode == 2 and "--portability" in refused.stderr
    assert clone.new_calls() == []


@pytest.mark.parametrize("fails", ["", "--all", "--portability"])
def test_ci_runs_both_suites_and_fails_if_either_does(clone, fails):
    shutil.copytree(ROOT / ".ci", clone.root / ".ci")
    suites = clone.root / "scripts" / "test"
    suites.write_text(f'#!/bin/sh\necho "$@"\n[ "$1" != "{fails}" ]\n')
    done = subprocess.run([clone.root / ".ci" / "run"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["--all", "--portability"]
    assert done.returncode == (1 if fails else 0)


def test_an_interrupted_set_up_is_not_believed(clone):
    interrupted = clone.test(INTERRUPTED="yes")
    assert interrupted.returncode == 1
    assert "requirements.lock could not be installed" in interrupted.stderr
    assert (clone.root / ".venv" / "half").exists()
    clone.new_calls()
    assert clone.test().returncode == 0
    assert clone.new_calls() == ["venv --quiet", "pip sync", "pip install"]


def test_an_environment_that_is_not_ours_is_made_again(clone):
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    (clone.root / ".venv" / "foreign").touch()
    assert clone.test().returncode == 0
    assert not (clone.root / ".venv" / "foreign").exists()


def test_a_new_lock_changes_the_packages_in_place(clone):
    clone.test()
    clone.new_calls()
    with (clone.root / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert clone.test().returncode == 0
    assert clone.new_calls() == ["pip sync", "pip install"]


def test_a_new_version_reinstalls_the_package_alone(clone):
    clone.test()
    clone.new_calls()
    (clone.root / "jaxbuf" / "version.py").write_text('__version__ = "9.9.9"\n')
    assert clone.test().returncode == 0
    assert clone.new_calls() == ["pip install"]


def test_a_clone_that_was_moved_is_set_up_again(clone):
    clone.test()
    clone.new_calls()
    moved = clone.root.with_name("moved")
    clone.root.rename(moved)
    clone.root = moved
    assert clone.test().returncode == 0
    assert clone.new_calls() == ["venv --quiet", "pip sync", "pip install"]


def test_a_machine_with_no_uv_and_no_python_is_told_so(clone, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for program in ("bash", "basename", "cat", "cmp", "dirname", "env", "head", "mkdir", "rm"):
        (bare / program).symlink_to(shutil.which(program))
    done = clone.test(PATH=str(bare))
    assert done.returncode == 1
    assert done.stderr == "test: neither uv nor a python3 that runs was found: install one of them\n"


@pytest.mark.parametrize(
    ("level", "pytests"),
    [
        ("--all", ["not exhaustive"]),
        ("--exhaustive", ["", "not slow and not exhaustive"]),
    ],
)
def test_everything_runs_even_if_a_part_fails(clone, level, pytests):
    clone.test()
    for program in ("ruff", "pyright"):
        path = clone.root / ".venv" / "bin" / program
        path.write_text(f"#!/bin/sh\necho {program} $*\n[ {program} != ruff ]\n")
        path.chmod(0o755)
    done = clone.test("-x", level)
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith("== ")] == [
        "ruff check .",
        "ruff format --check .",
        "pyright --pythonpath .venv/bin/python",
        *(f"python -m pytest -m {markers} -x" for markers in pytests),
    ]
    assert "failed: .venv/bin/ruff check ." in done.stderr


@pytest.mark.parametrize(("status", "failed"), [(0, False), (1, True), (5, False)])
def test_the_newest_packages_are_asked_for_fast_tests_and_there_may_be_none(clone, status, failed):
    clone.test()
    clone.test("--newest")
    for program in ("ruff", "pyright"):
        (clone.root / ".venv" / "bin" / program).symlink_to("/bin/true")
    (clone.root / ".venv-newest" / "bin" / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit {status}\n')
    done = clone.test("--exhaustive", "-x")
    assert done.returncode == failed
    assert ("failed: on_newest_jax -x" in done.stderr) is failed
