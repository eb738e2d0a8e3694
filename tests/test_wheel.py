"""The built wheel, installed away from the repository, has the embedded model in it and generates."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from _wheel import MOST_BYTES, PROMPT, ROOT, build_wheel, faults, readme_code, run

import jaxbuf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, pytestconfig) -> Path:
    built = build_wheel(tmp_path_factory.mktemp("wheel"))
    pytestconfig.get_terminal_writer().line(f"\n{built.name}: {built.stat().st_size / 1e6:.2f} MB")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory) -> Path:
    """A directory with an environment that has the wheel, and its dependencies from the environment of the tests."""
    directory = tmp_path_factory.mktemp("elsewhere")
    venv.create(directory / "venv", with_pip=True, symlinks=True)
    python = directory / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=directory)
    site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory).strip()
    # A path named in a .pth file is searched last, and .pth files in it (that of the editable jaxbuf) are not read.
    (Path(site_packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory


def test_the_wheel_holds_the_package_and_its_licence_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    information = f"jaxbuf-{jaxbuf.__version__}.dist-info"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "jaxbuf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    package = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert {name for name in names if not name.startswith(information)} == package
    assert f"{information}/licenses/LICENSE" in names
    assert faults(wheel) == []


def test_a_wheel_that_is_too_large_or_lacks_the_model_is_found_out(tmp_path):
    path = tmp_path / "jaxbuf-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("jaxbuf/py.typed", b"")
        file.writestr("jaxbuf/models/demo/gates.safetensors", b"\0" * MOST_BYTES)
        file.writestr("jaxbuf-0.dist-info/licenses/LICENSE", b"")
    assert [fault.partition(",")[0] for fault in faults(path)] == [
        "it must be smaller than 25 MB",
        r"it must hold jaxbuf/models/demo/model\.safetensors",
    ]


def test_the_check_of_a_release_names_a_python_that_is_not_there():
    command = [sys.executable, ROOT / "scripts" / "check_wheel", "--python", "3.99"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Python 3.99 was not found: neither python3.99 on PATH nor one of pyenv's runs\n"


def test_the_installed_wheel_generates(elsewhere):
    code = """
import json, jaxbuf
lm = jaxbuf.load("demo")
(result,) = jaxbuf.generate(lm, ["The configuration file"], max_new_tokens=8)
print(json.dumps({"file": jaxbuf.__file__, "version": jaxbuf.__version__, "tokens": [int(t) for t in result.tokens]}))
"""
    printed = json.loads(run(elsewhere / "venv" / "bin" / "python", "-c", code, cwd=elsewhere))
    assert Path(printed["file"]).is_relative_to(elsewhere)
    assert printed["version"] == jaxbuf.__version__
    lm = jaxbuf.load("demo")
    (here,) = jaxbuf.generate(lm, ["The configuration file"], max_new_tokens=8)
    assert 1 <= len(printed["tokens"]) <= 8
    assert printed["tokens"] == [int(token) for token in here.tokens]


def test_the_installed_command_generates(elsewhere):
    command = elsewhere / "venv" / "bin" / "jaxbuf"
    assert run(command, "--version", cwd=elsewhere).strip() == f"jaxbuf {jaxbuf.__version__}"
    text = run(command, "generate", PROMPT, "--max-new-tokens", 8, cwd=elsewhere)
    assert text.strip()


def test_the_readme_runs_as_written(elsewhere):
    code = readme_code()
    assert len(code.splitlines()) <= 12
    assert run(elsewhere / "venv" / "bin" / "python", "-c", code, cwd=elsewhere).strip()
