"""The built wheel, installed away from the repository, has the embedded model in it and generates."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import jaxbuf

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"} | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}

pytestmark = pytest.mark.slow


def run(*command, cwd: Path) -> str:
    arguments = list(map(str, command))
    done = subprocess.run(arguments, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, pytestconfig) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory, cwd=ROOT)
    (built,) = directory.glob("*.whl")
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
    assert "jaxbuf/py.typed" in names
    assert any(re.fullmatch(r"jaxbuf/models/demo/.*\.safetensors", name) for name in names)


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
    text = run(command, "generate", "The configuration file", "--max-new-tokens", 8, cwd=elsewhere)
    assert text.strip()


def test_the_readme_runs_as_written(elsewhere):
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 12
    assert run(elsewhere / "venv" / "bin" / "python", "-c", code, cwd=elsewhere).strip()
