"""Programs of tests that must begin in a process of their own."""

import os
import subprocess
import sys


def lines_of(program: str) -> list[str]:
    """The lines that a program prints, which must not fail. XLA gets sixteen threads, as `attending.py` explains."""
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    command = [sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
