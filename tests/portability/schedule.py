"""The schedule that the TPU compiler makes of a kernel, read from what it writes down: an estimate of its cycles.

A core issues one bundle of instructions a cycle, unless it waits. So the bundles of a loop's body are the cycles of one
round, at least: waiting for copies and for other units comes on top, and a branch may leave some of them out. How many
rounds a loop takes, the schedule does not say.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DUMPED = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
BUNDLES, ANALYSIS = "final_bundles.txt", "schedule-analysis_final_bundles.txt"
PROGRAM = "-TLP-"  # in the names of the files that are of the program, which starts kernels and copies
KERNEL = 'custom_call_target="tpu_custom_call"'
BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(\w\w)? *: *(>*) *\{(\}?)", re.MULTILINE)


class Loop(NamedTuple):
    """A loop of a kernel.

    Attributes:
      depth: How many loops it stands in, itself included.
      bundles: Of its body, those of the loops in it once.
    """

    depth: int
    bundles: int


class Schedule(NamedTuple):
    """What the compiler made of a kernel.

    Attributes:
      name: Of the kernel in the program.
      bundles: All of it.
      loops: In the order in which they stand there.
    """

    name: str
    bundles: int
    loops: tuple[Loop, ...]

    def __str__(self) -> str:
        words, depth = f"{self.name}: {self.bundles:,} bundles", 0
        for loop in self.loops:
            between = ")" * (depth - loop.depth) + ", "
            words += f" (loops of {loop.bundles:,}" if loop.depth > depth else f"{between}{loop.bundles:,}"
            depth = loop.depth
        return words + ")" * depth


@contextlib.contextmanager
def dumping() -> Iterator[Path]:
    """The folder in which the compiler writes schedules; libtpu must not be loaded yet, and keeps the setting."""
    with tempfile.TemporaryDirectory(prefix="jaxbuf-schedules-") as folder:
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} --xla_jf_dump_to={folder} {DUMPED}".strip()
        yield Path(folder)


def take_schedules(folder: Path) -> list[Schedule]:
    """The schedules of the kernels of a program that was compiled since the last call. The files are removed."""
    found = []
    for path in sorted(folder.glob(f"*-{ANALYSIS}")):
        if PROGRAM not in path.name and KERNEL in path.read_text(encoding="utf-8", errors="replace"):
            prefix = path.name.removesuffix(f"-{ANALYSIS}").rsplit("-", 1)[0]
            (bundles,) = (each for each in folder.glob(f"*-{BUNDLES}") if _is_of(each.name, prefix))
            name = prefix.split("-", 1)[1]
            found.append(read_schedule(name, bundles.read_text(encoding="utf-8", errors="replace")))
    for path in folder.iterdir():
        path.unlink()
    return found


def _is_of(name: str, prefix: str) -> bool:
    """Whether a file of bundles is of the kernel whose files begin with `prefix`."""
    return re.fullmatch(re.escape(prefix) + r"-\d+-" + re.escape(BUNDLES), name) is not None


def read_schedule(name: str, text: str) -> Schedule:
    """A schedule from the compiler's text: a line for each bundle, with its address, LB where a loop's body begins, and
    a > for each loop that it stands in."""
    lines, depth = [], 0
    for found in BUNDLE.finditer(text):
        depth = depth if found[3] else len(found[2])  # An empty bundle does not say where it stands.
        lines.append((found[1] == "LB", depth))
    loops = []
    for place, (begins, depth) in enumerate(lines):
        if begins:
            # A body ends where fewer loops are around, or the next loop begins.
            behind = (i for i, line in enumerate(lines) if i > place and (line[1] < depth or line == (True, depth)))
            loops.append(Loop(depth, next(behind, len(lines)) - place))
    return Schedule(name, len(lines), tuple(loops))
