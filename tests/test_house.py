"""What holds for the repository as a whole: one version, one lock a jax, one direction of imports, no machine named."""

import ast
import collections
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import jaxbuf
from jaxbuf.bench import PROGRAMS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxbuf"
MODULES = sorted(PACKAGE.rglob("*.py"))
LOCK, NEWEST_LOCK, TPU_LOCK = "requirements.lock", "requirements.newest.lock", "requirements.tpu.lock"
LOCK_OF = {".venv-newest": NEWEST_LOCK, ".venv-tpu": TPU_LOCK}  # of environments; of all others LOCK

# What each part of the package may import of the others; within itself a part is free.
LAYERS = {
    "pallas": set(),
    "memory": set(),
    "recurrence": {"memory", "pallas"},
    "attention": {"memory", "pallas"},
    "models": {"recurrence", "attention", "memory", "pallas"},
    "planning": {"models", "recurrence", "attention", "memory", "pallas"},
    "serving": {"models", "recurrence", "attention", "memory", "pallas"},
    "train": {"models", "recurrence", "attention", "memory", "pallas"},
    "bench": {"serving", "train", "planning", "models", "recurrence", "attention", "memory", "pallas"},
}


def tracked_files() -> list[Path]:
    """The repository's files: those of git, and those that a commit of everything would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything that a module imports, at its top or inside its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import, line {node.lineno}"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked_versions(lock: str) -> dict[str, str]:
    lines = (ROOT / lock).read_text().splitlines()
    pins = (re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==([^ ;\\]+)", line) for line in lines)
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def test_the_version_is_stated_once():
    stated = [path for path in MODULES if re.search(r"^__version__\s*=", path.read_text(), re.MULTILINE)]
    assert stated == [PACKAGE / "version.py"]
    assert "version" in pyproject()["project"]["dynamic"]
    assert importlib.metadata.version("jaxbuf") == jaxbuf.__version__


def test_the_changelog_has_a_place_for_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", jaxbuf.__version__)


def test_what_is_cited_is_this_version_and_its_licence():
    cited = dict(re.findall(r'^([\w-]+): "?(.+?)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["license"]) == (jaxbuf.__version__, pyproject()["project"]["license"])
    released = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == (cited["version"], cited["date-released"])


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_there_is_no_module_called_utils():
    assert [path for path in MODULES if "utils" in path.relative_to(ROOT).with_suffix("").parts] == []


def test_no_two_modules_have_one_name():
    """But for packages, what every operation's kernels have, and commands, benchmarks among them, which are named as
    what they run."""
    shared = {"__init__", "__main__", "call", "gpu", "tpu"}
    commands = {PACKAGE / "bench" / f"{program.name}.py" for program in PROGRAMS}
    names = collections.Counter(path.stem for path in MODULES if path.parent.name != "cli" and path not in commands)
    assert {name for name, number in names.items() if number > 1} <= shared


@pytest.mark.slow
def test_a_program_whose_python_lacks_jax_runs_in_the_environment_of_the_tests():
    programs = {path.name: path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file()}
    programs = [name for name, text in programs.items() if text.startswith("#!/usr/bin/env python3")]
    programs.remove("make_parity_fixtures")  # has an environment of its own
    assert len(programs) > 9
    assert all("\nimport _environment" in (ROOT / "scripts" / name).read_text() for name in programs)
    if not (ROOT / ".venv").exists():
        pytest.skip("scripts/test has not set .venv up")
    ran = subprocess.run(
        [sys.executable, "-S", "scripts/make_forms", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0 and "auto" in ran.stdout, ran.stderr


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!")


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test"])
def test_scripts_explain_themselves_from_any_directory(script, tmp_path):
    done = subprocess.run([ROOT / script, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {script}")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("lock", "used"),
    [
        (LOCK, ("test", "train", "plots", "docs")),
        (NEWEST_LOCK, ("test", "train", "plots")),
        (TPU_LOCK, ("test", "train", "plots", "docs", "tpu")),
    ],
)
def test_a_lock_satisfies_every_requirement_that_it_was_made_from(lock, used):
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    locked = locked_versions(lock)
    wanted = [*project["dependencies"], *(requirement for extra in used for requirement in extras[extra])]
    wanted += pyproject()["build-system"]["requires"]
    if lock in (LOCK, TPU_LOCK):
        wanted += pyproject()["tool"]["uv"]["constraint-dependencies"]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name} is not in {lock}"
        assert requirement.specifier.contains(locked[name], prereleases=True), (
            f"{requirement}: {locked[name]} is in {lock}"
        )


def test_the_newest_lock_has_a_newer_jax():
    assert Version(locked_versions(NEWEST_LOCK)["jax"]) > Version(locked_versions(LOCK)["jax"])


def test_only_the_lock_for_tpus_has_the_tpu_compiler_and_the_rest_of_it_is_as_in_the_first():
    first, newest, tpu = (locked_versions(lock) for lock in (LOCK, NEWEST_LOCK, TPU_LOCK))
    assert "libtpu" not in first.keys() | newest.keys()
    assert tpu.keys() - first.keys() == {"libtpu"}
    assert {name: version for name, version in tpu.items() if first.get(name, version) != version} == {}


def test_the_tests_run_on_what_is_locked():
    locked = locked_versions(LOCK_OF.get(Path(sys.prefix).name, LOCK))
    installed = {canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()}
    wrong = {name: pin for name, pin in locked.items() if installed.get(name, pin) != pin}
    assert wrong == {}


def test_no_file_names_a_registry_or_a_directory_of_one_machine():
    # A file that names an index can't be installed from a mirror, and one that names a directory works on one machine.
    hosts = [b"pypi." + b"org", b"pythonhosted." + b"org", b"npmjs." + b"org", b"debian." + b"org/debian"]
    directories = [rb"(?<![\w.}*-])/" + name + rb"/" for name in (b"work", b"root", b"home", b"tmp")]
    pattern = re.compile(b"|".join([*map(re.escape, hosts), *directories]))
    found = {}
    for path in tracked_files():
        if path.suffix in (".safetensors", ".npz") or path.name == "tokenizer.json":
            continue
        hit = pattern.search(path.read_bytes())
        if hit:
            found[str(path.relative_to(ROOT))] = hit[0].decode()
    assert found == {}


def test_imports_point_one_way():
    wrong = []
    for path in MODULES:
        part = path.relative_to(PACKAGE).parts[0]
        if part not in LAYERS:
            continue
        for name in imported_modules(path):
            target = name.split(".")[1] if name.startswith("jaxbuf.") else None
            if target in {*LAYERS, "cli"} and target != part and target not in LAYERS[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_public_package_is_not_imported_from_within():
    # `import jaxbuf` runs the public API; a part that imported it would depend on everything.
    wrong = [p for p in MODULES if p.parent != PACKAGE / "cli" and "jaxbuf" in imported_modules(p)]
    assert wrong == []


def test_only_tests_and_benchmarks_know_torch_and_transformers():
    allowed = {ROOT / "scripts" / "make_parity_fixtures"}
    python = [path for path in tracked_files() if path.suffix == ".py" or is_python_script(path)]
    wrong = []
    for path in python:
        if path in allowed or path.is_relative_to(PACKAGE / "bench") or path.relative_to(ROOT).parts[0] == "tests":
            continue
        roots = {name.split(".")[0] for name in imported_modules(path)}
        if roots & {"torch", "transformers"}:
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def is_python_script(path: Path) -> bool:
    if path.parent != ROOT / "scripts" or path.suffix:
        return False
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first


@pytest.mark.slow
def test_importing_the_package_does_not_import_torch():
    code = "import sys, jaxbuf, jaxbuf.serving, jaxbuf.models; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_library_never_prints():
    wrong = []
    for path in MODULES:
        if path.parent == PACKAGE / "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


def test_logging_goes_to_the_logger_of_the_library():
    wrong = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                name = ast.unparse(node.args[0]) if node.args else ""
                if name not in ("'jaxbuf'", "__name__"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []


@pytest.mark.slow
def test_no_family_needs_another(tmp_path):
    """With Qwen3.5's module deleted, everything imports, and the other families are what they were."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", "demo")
    for name in ("jaxbuf", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "jaxbuf" / "models" / "families" / "qwen3_5.py").unlink()
    walk = "import importlib, pkgutil, jaxbuf; assert jaxbuf.__file__.startswith({!r})\n"
    walk += "for module in pkgutil.walk_packages(jaxbuf.__path__, 'jaxbuf.'):\n"
    walk += "    module.name.endswith('__main__') or importlib.import_module(module.name)"
    environment = os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    arguments = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", walk.format(str(copy))], **arguments)
    assert done.returncode == 0, done.stderr
    parity = ["tests/models/test_parity.py", "-k", "test_logits and (llama_full or mamba2_full)"]
    parity += ["-q", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *parity], **arguments)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
