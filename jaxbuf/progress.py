"""A bar for work that takes long: on a terminal or in a notebook, on standard error; elsewhere nothing."""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY = 0.5  # seconds before a bar appears: what is done by then needs none


class Report(Protocol):
    """Moves a bar: what is being done, how much of it is done, and of how much, where that was not known before."""

    def __call__(self, doing: str, done: int, total: int | None = None) -> None: ...


def say_nothing(doing: str, done: int, total: int | None = None) -> None:
    """The report of work that shows no bar."""


def check_progress(progress: object) -> None:
    """Raises ValueError unless it is None, True or False."""
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be None, True or False, got {progress!r}")


def _has_widgets() -> bool:
    """Whether a notebook can show a bar: without this package Rich shows a warning in its place."""
    return importlib.util.find_spec("ipywidgets") is not None


@contextlib.contextmanager
def progress_bar(total: int | None, show: bool | None = None, *, console: Console | None = None) -> Iterator[Report]:
    """Yields a `Report` that moves a bar, which is gone at the end.

    Args:
      total: How much there is to do; None: a report will tell.
      show: Whether there is a bar; None: on a terminal, and in a notebook that has ipywidgets, by which it moves there.
        True shows one wherever standard error goes.
      console: Where to; None: standard error.

    Raises:
      ValueError: As `check_progress`.
    """
    check_progress(show)
    console = Console(stderr=True, force_terminal=show or None) if console is None else console
    if show is None:
        show = console.is_terminal or (console.is_jupyter and _has_widgets())
    if not show:
        yield say_nothing
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=total)
    lock, ended = threading.Lock(), False

    def start():
        with lock:
            if not ended:
                bar.start()
                console.show_cursor(True)  # a Ctrl-C may end the process here, and would leave the terminal without one

    def report(doing: str, done: int, total: int | None = None) -> None:
        bar.update(task, description=doing, completed=done, total=total)

    timer = threading.Timer(DELAY, start)
    timer.daemon = True
    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        with lock:
            ended = True
            bar.stop()
