"""Imported first by the programs beside it: their Python has what they need, or .venv's takes its place."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("jaxbuf") is None:
    sys.path.insert(1, str(ROOT))
if importlib.util.find_spec("jax") is None:
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit(f"{sys.executable} has no jax, and there is no .venv: scripts/test makes one")
    os.execv(python, [str(python), *sys.argv])
