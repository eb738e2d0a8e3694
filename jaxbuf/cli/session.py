"""What the commands share: the start with a model, the stream of text, errors of one line, a quiet Ctrl-C."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.serving import Event, SamplingParams

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


@contextlib.contextmanager
def end_at_interrupt() -> Iterator[None]:
    """A Ctrl-C ends the process at once, for what runs in one piece and has nothing to show before its end.

    Python would not see it before the compiled program has ended.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def check_arguments(
    sampling: dict[str, Any], drafting: dict[str, Any], *, max_new_tokens: int, limit: int, form: Any
) -> None:
    """Checks what no model makes right or wrong, before JAX starts and one is loaded.

    Raises:
      ValueError: As `jaxbuf.SamplingParams` and `jaxbuf.generate`, or options of drafts without who drafts.
    """
    import jaxbuf
    from jaxbuf.serving.drafters import DRAFT_TOKENS, check_branches
    from jaxbuf.serving.request import check_settings

    jaxbuf.SamplingParams(**sampling)
    draft_tokens, drafter = drafting.get("draft_tokens", DRAFT_TOKENS), drafting.get("drafter")
    check_settings(max_new_tokens, limit, form, draft_tokens=draft_tokens)
    if drafting and drafter is None:
        raise ValueError(f"{option_names(drafting)} must come with a --drafter: ngram, mtp or a model")
    if drafter is not None:
        _check_drafter(drafter)
    if "branches" in drafting:
        check_branches(drafting["branches"], draft_tokens)
        if drafter not in ("ngram", "mtp"):
            raise ValueError(f"--branches must come with --drafter ngram or mtp, got {drafter}: it drafts no trees")


def _check_drafter(name: str) -> None:
    from jaxbuf.models.hub import parse_id

    if name not in ("ngram", "mtp", "demo") and not (name and Path(name).is_dir()) and parse_id(name) is None:
        raise ValueError(f'--drafter must be "ngram", "mtp" or a model (a directory or an id), got {name!r}')


def option_names(names: Iterable[str]) -> str:
    """As they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def sampling_params(lm: "LanguageModel", given: dict[str, Any], **more: Any) -> "SamplingParams":
    """What the user gave, and the checkpoint's own defaults for the rest."""
    import jaxbuf

    return jaxbuf.SamplingParams(**lm.sampling_defaults | given | more)


def progress_bar(err: Console) -> Progress:
    """A bar on a terminal that vanishes when it is done; elsewhere nothing."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def load_model(err: Console, model: str, dtype: str | None) -> "LanguageModel":
    """Starts JAX, says on what device, and loads the model behind a bar.

    Raises:
      ValueError: JAX has no device, or what `jaxbuf.load` raises, its other errors likewise.
    """
    with err.status("starting JAX"):
        import jax

        from jaxbuf.models.checkpoint import compute_dtype

        compute_dtype(dtype)
        try:
            device = jax.devices()[0]
        except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not there
            raise ValueError(str(error)) from error
    err.print(f"device: {device.platform} ({device.device_kind})", style="dim")
    return _load(err, model, dtype, "loading")


def load_drafter(err: Console, drafting: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """What `jaxbuf.generate` takes for the options of drafts; a model is loaded, with the errors of `load_model`."""
    from jaxbuf.serving.drafters import DRAFT_TOKENS, MTP, NGram

    settings = {"draft_tokens": DRAFT_TOKENS} | drafting
    name, branches = drafting.get("drafter"), settings.pop("branches", 1)
    if name not in (None, "ngram", "mtp"):
        try:
            settings["drafter"] = _load(err, name, dtype, "loading the drafter")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"--drafter: {error}") from error
    elif name is not None and branches > 1:
        settings["drafter"] = {"ngram": NGram, "mtp": MTP}[name](settings["draft_tokens"], branches)
    return settings


def _load(err: Console, model: str, dtype: str | None, task_name: str) -> "LanguageModel":
    import jaxbuf

    bar = progress_bar(err)
    task = bar.add_task(task_name, total=None)

    def show(read: int, total: int) -> None:
        bar.start()  # not before: a download shows a bar of its own
        bar.update(task, completed=read, total=total)

    try:
        return jaxbuf.load(model, dtype=dtype, progress=show)
    finally:
        bar.stop()


def write_texts(err: Console, headings: Sequence[str], texts: Sequence[str]) -> None:
    """Texts that are there as a whole, on standard output, each under its heading; one alone leaves it to standard
    error."""
    stdout = typer.get_text_stream("stdout", errors="replace")
    for heading, text in zip(headings, texts, strict=True):
        if len(texts) == 1:
            err.print(heading, style="dim")
        else:
            stdout.write(heading + "\n")
        stdout.write(text + "\n")
    stdout.flush()


def write_stream(events: "Generator[Event, None, None]", interrupted: threading.Event) -> "Iterator[Event]":
    """Writes text as it comes, to its end or to a Ctrl-C, and a newline after it; yields each event once written."""
    stdout = typer.get_text_stream("stdout", errors="replace")
    with contextlib.closing(events):
        for event in events:
            stdout.write(event.text)
            stdout.flush()
            yield event
            if interrupted.is_set():
                break
    stdout.write("\n")
    stdout.flush()
