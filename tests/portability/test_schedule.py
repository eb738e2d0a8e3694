"""A kernel's schedule is read from the compiler's text, loops in loops included."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.portability.schedule import Loop, Schedule, read_schedule

ROOT = Path(__file__).resolve().parent.parent.parent
# As the compiler writes it: a key, bundles with their addresses, and lines that go on with a bundle.
TEXT = """= control target key start
LB: loop body
= control target key end

     0   :  { %8 = vsyncpa [#allocation4], 0  ;;  /* The window
base_bounds: (64, 4, 1) */ }
   0x1   :  { %9 = vsyncpa [#allocation7], 0 }
   0x2 LB: > { %1 = sst }
   0x3   : > { %2 = sst }
   0x4 LB: >> { %3 = vld }
   0x5   : >> { %4 = vld }
   0x6   : >> { %5 = vld }
   0x7 PF: > { %6 = sld }
   0x8 LB: >> { %7 = vld }
   0x9   :  { %8 = sst }
   0xa LB: > { %9 = sst }
"""


def test_loops_are_read_with_what_is_in_them():
    loops = Loop(1, 7), Loop(2, 3), Loop(2, 1), Loop(1, 1)
    found = read_schedule("kernel", TEXT)
    assert found == Schedule("kernel", 11, loops)
    assert str(found) == "kernel: 11 bundles (loops of 7 (loops of 3, 1), 1)"


def test_an_empty_bundle_ends_no_loop():
    found = read_schedule("kernel", "  0x1 LB: > { a }\n  0x2   :  {}\n  0x3   : > { c }\n  0x4   :  { d }\n")
    assert found == Schedule("kernel", 4, (Loop(1, 3),))


def test_loops_that_follow_one_another_are_two():
    found = read_schedule("kernel", "  0x1 LB: > { a }\n  0x2   : > { b }\n  0x3 LB: > { c }\n")
    assert found.loops == (Loop(1, 2), Loop(1, 1))


@pytest.mark.tpu_compiler
def test_the_command_prints_the_schedule_of_a_kernel():
    """In a process of its own: libtpu reads its settings where it is loaded."""
    asked = ["--cycles", "--operation", "put_rows", "--generation", "v5e"]
    run = subprocess.run(
        [sys.executable, "scripts/check_portability", *asked],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *lines = run.stdout.splitlines()
    assert first.startswith("Estimates")
    (ring,) = (line for line in lines if line.startswith("put_rows | inputs of a convolution (Qwen3.5-4B) | v5e | "))
    # One loop starts copies, and one waits for them.
    assert re.search(r"bundles \(loops of \d+, \d+\)$", ring)
    assert any("XLA: it needs a last axis" in line for line in lines)
