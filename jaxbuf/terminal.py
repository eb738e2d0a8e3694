"""What the programs share that people start in a terminal: numbers as they are typed, tables, errors of one line."""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxbuf.shown import shown

MOST = 2**31 - 1  # of a whole number: int32 is what the device counts in
FIGURE = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?( ?(%|[kMGT]?B|ms|us|s))?|[-+]?(inf|nan)|-?")  # also none
LARGEST = 3.4028234663852886e38  # of a number: the largest float32


def parse_whole(text: str, least: int | None = None, most: int | None = MOST) -> int:
    """The whole number that was typed.

    Raises:
      ValueError: It is none, or not in [least, most]. The message lacks the name of the option, and begins with "must".
    """
    try:
        number = int(text)
    except ValueError:  # also more digits than Python converts
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        expected = "a whole number"
        if least is not None:
            expected += f" of at least {least}" if most in (None, MOST) else f" from {least} to {most}"
        if number is not None and most is not None and number > most and (least is None or most == MOST):
            expected = f"a whole number of at most {most}"
        raise ValueError(f"must be {expected}, got {shown(text)}")
    return number


def parse_number(text: str, least: float = -math.inf, *, above: bool = False) -> float:
    """The number that was typed, which a float32 has to hold.

    Args:
      text: As it was typed.
      least: The least number that is accepted.
      above: The number has to be above `least`.

    Raises:
      ValueError: It is none, or out of range. The message lacks the name of the option, and begins with "must".
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:
        raise ValueError(f"must be a finite number, at most {LARGEST:.3g}, got {shown(text)}")
    if number < least or (above and number == least):
        raise ValueError(f"must be a number {'above' if above else 'of at least'} {least:g}, got {shown(text)}")
    return number


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Checks that a file, or a folder, can be written where a user wants it, before anything takes time.

    Nothing is made. Folders above it need not be there yet.

    Raises:
      ValueError: It cannot be written. The message lacks the name of the option, and begins with "must".
    """
    expected = "a directory to write to" if folder else "a file to write to"
    if "\0" in str(path):
        raise ValueError(f"must be {expected}, got {str(path)!r}: a name holds no null character")
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
    except (OSError, ValueError) as error:  # a name that is too long, or above it what may not be read
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"must be {expected}, got {str(path)!r}: {reason}") from error
    if there == path:
        wrong = "it is a directory" if not folder and path.is_dir() else ""
        wrong = "it is a file" if folder and not path.is_dir() else wrong
    else:
        wrong = "" if there.is_dir() else f"{there} is no directory"
    if not wrong and not os.access(there, os.W_OK | os.X_OK if there.is_dir() else os.W_OK):
        wrong = f"{there} may not be written to"
    if wrong:
        raise ValueError(f"must be {expected}, got {str(path)!r}: {wrong}")


def text_console(*, stderr: bool = False) -> Console:
    """A console for sentences: a terminal breaks their lines between words; elsewhere a line stays one."""
    console = Console(stderr=stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def print_table(table: Table, console: Console | None = None) -> None:
    """Prints a table in the one style that all programs have.

    Columns of figures are aligned at the right. Columns with `no_wrap` keep their width, so that names of files stay
    whole, to be copied and searched for: where the terminal is too narrow, the table has no space at its rules, and
    where that is not enough it is wider than the terminal.
    """
    console = console or Console(highlight=False)
    for column in table.columns:
        cells = [str(cell).strip() for cell in column.cells]
        if column.justify == "left" and any(cells) and all(FIGURE.fullmatch(cell) for cell in cells):
            column.justify, column.min_width = "right", max(map(cell_len, cells))
        if column.no_wrap:
            column.min_width = max((_width(cell) for cell in column.cells), default=1)
            column.min_width = max(column.min_width, _width(column.header))
    wide = console.options.update(max_width=sys.maxsize)
    if Measurement.get(console, wide, table).minimum > console.width:
        table.collapse_padding, table.pad_edge = True, False
    least = Measurement.get(console, wide, table).minimum
    before = console.width
    console.width = max(before, least)
    console.print(table, crop=False)
    console.width = before


def _width(cell: Any) -> int:
    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return max(map(cell_len, text.plain.splitlines()), default=0)


@contextlib.contextmanager
def errors_told(tell: Callable[[str, Exception], object]) -> Iterator[None]:
    """Calls `tell` with one line, and the error, where something fails that a user can cause; other errors, which are
    faults of the program, are raised, and so is that nobody reads the output any more."""
    try:
        yield
    except Exception as error:
        line = None if isinstance(error, BrokenPipeError) else line_of(error)
        if line is None:
            raise
        tell(line, error)


def line_of(error: BaseException) -> str | None:
    """What an error that a user can cause says in one line; None for others."""
    checkpoint = sys.modules.get("jaxbuf.models.loading.checkpoint")
    text = " ".join(str(error).split("\n")).strip()
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        text = error.strerror  # without its number
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    if isinstance(error, RuntimeError):  # JAX's own
        if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
            return f"out of memory: {text}"
        return text if "Unable to initialize backend" in text or "No visible" in text else None
    users = (ValueError, OSError) if checkpoint is None else (ValueError, OSError, checkpoint.CheckpointError)
    return text if isinstance(error, users) else None
