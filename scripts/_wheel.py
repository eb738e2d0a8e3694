"""What the check of a release and the test of the wheel share: it is built, looked into, installed and run."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 25_000_000  # of a wheel, with the embedded model in it
# Nothing of this repository is seen from the environments that have the wheel.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
PROMPT = "The configuration file"


class CommandFailed(RuntimeError):
    """A command ended with an error; the message has the command and all that it wrote."""


def run(*command: object, cwd: Path, timeout: float = 300) -> str:
    """What a command writes to standard output.

    Raises:
      CommandFailed: It ends with an error, or not in `timeout` seconds.
    """
    arguments = list(map(str, command))
    try:
        done = subprocess.run(arguments, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(arguments)}\ntook more than {timeout:.0f} s") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(directory: Path) -> Path:
    """Builds the wheel of the repository as it lies here, by this Python's hatchling."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory, cwd=ROOT)
    (built,) = directory.glob("*.whl")
    return built


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel's size and files, a line each."""
    size, names = wheel.stat().st_size, zipfile.ZipFile(wheel).namelist()
    found = []
    if size >= MOST_BYTES:
        found.append(f"it must be smaller than {MOST_BYTES / 1e6:.0f} MB, and has {size / 1e6:.2f} MB")
    for pattern in (
        r"jaxbuf/models/demo/model\.safetensors",
        r"jaxbuf/models/demo/gates\.safetensors",
        r"jaxbuf/py\.typed",
        r"jaxbuf-.*\.dist-info/licenses/LICENSE",
    ):
        if not any(re.fullmatch(pattern, name) for name in names):
            found.append(f"it must hold {pattern}")
    return found


def readme_code() -> str:
    """The one block of Python in README."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return code
