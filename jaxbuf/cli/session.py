"""What the commands share: the start with a model, the stream of text, errors of one line, a quiet Ctrl-C."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.serving import Event

SEGMENT = 16  # tokens generated per call of the compiled program, and so the grain of the stream

logger = logging.getLogger("jaxbuf")


def error_console() -> Console:
    """Standard error, for everything but text."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(err: Console, error: Exception) -> None:
    """One line; the traceback is in the debug log."""
    logger.debug("", exc_info=error)
    err.print("error:", style="bold red", end=" ")
    err.print(str(error), markup=False)


@contextlib.contextmanager
def errors_exit(err: Console) -> Iterator[None]:
    """What a user can cause ends the program with exit code 2 and one line."""
    import jaxbuf

    try:
        yield
    except (ValueError, OSError, jaxbuf.CheckpointError) as error:
        print_error(err, error)
        raise typer.Exit(2) from error


@contextlib.contextmanager
def interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one ends the process.

    It raises nothing, for JAX runs Python callbacks in which an exception would be lost.
    """
    asked = threading.Event()

    def ask(*_):
        asked.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, b"\nstopping; Ctrl-C again to end at once\n")

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def load_model(err: Console, model: str, dtype: str | None) -> "LanguageModel":
    """Starts JAX, says on what device, and loads the model.

    Raises:
      ValueError: JAX has no device, or what `jaxbuf.load` raises, its other errors likewise.
    """
    with err.status("starting JAX"):
        import jax

        import jaxbuf

        try:
            device = jax.devices()[0]
        except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not there
            raise ValueError(str(error)) from error
    err.print(f"device: {device.platform} ({device.device_kind})", style="dim")
    return jaxbuf.load(model, dtype=dtype)


def write_stream(events: "Iterable[Event]", interrupted: threading.Event) -> "Iterator[Event]":
    """Writes text as it comes, to its end or to a Ctrl-C, and a newline after it; yields each event once written."""
    stdout = typer.get_text_stream("stdout", errors="replace")
    for event in events:
        stdout.write(event.text)
        stdout.flush()
        yield event
        if interrupted.is_set():
            break
    stdout.write("\n")
    stdout.flush()
