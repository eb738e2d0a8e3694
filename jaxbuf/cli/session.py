"""What the commands share: the start with a model, what is read and written, a quiet Ctrl-C."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from jaxbuf.cli.errors import busy
from jaxbuf.terminal import MOST, check_writable, parse_whole

if TYPE_CHECKING:
    import numpy as np

    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.serving import Event, SamplingParams


COMPILING = "compiling prefill and decode, once per shape"
COMPILING_AND_GENERATING = "compiling, once per shape, and generating"


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
    sampling: dict[str, Any],
    drafting: dict[str, Any],
    *,
    max_new_tokens: int,
    limit: int,
    form: Any,
    state_dtype: str | None = None,
    profile: Path | None = None,
) -> None:
    """Checks what no model makes right or wrong, before JAX starts and one is loaded.

    Raises:
      ValueError: As `jaxbuf.SamplingParams` and `jaxbuf.generate`, options of drafts without who drafts, or a profile
        that cannot be written.
    """
    with busy("starting JAX"):
        import jaxbuf
        from jaxbuf.serving.batch import Decoding, check_settings
        from jaxbuf.serving.drafters import DRAFT_TOKENS, check_branches

    jaxbuf.SamplingParams(**sampling)
    draft_tokens, drafter = drafting.get("draft_tokens", DRAFT_TOKENS), drafting.get("drafter")
    check_settings(Decoding(max_new_tokens, limit, form, draft_tokens=draft_tokens, state_dtype=state_dtype))
    if drafting and drafter is None:
        raise ValueError(f"{option_names(drafting)} must come with a --drafter: ngram, mtp or a model")
    if drafter is not None:
        _check_drafter(drafter)
    if "branches" in drafting:
        check_branches(drafting["branches"], draft_tokens)
        if drafter not in ("ngram", "mtp"):
            raise ValueError(f"--branches must come with --drafter ngram or mtp, got {drafter}: it drafts no trees")
    if profile is not None:
        try:
            check_writable(profile, folder=True)
        except ValueError as error:
            raise ValueError(f"--profile {error}") from error


def _check_drafter(name: str) -> None:
    from jaxbuf.models.loading.hub import parse_id

    if name not in ("ngram", "mtp", "demo") and not (name and os.path.isdir(name)) and parse_id(name) is None:
        raise ValueError(f'--drafter must be "ngram", "mtp" or a model (a directory or an id), got {name!r}')


def stay_on_cpu() -> None:
    """For programs that are made for chips elsewhere: where JAX_PLATFORMS does not say otherwise, JAX uses the CPU.

    It would look for TPUs as soon as their compiler is installed, and tell at length that there are none.
    """
    import jax

    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")


OF_DRAWING = ("top_k", "top_p", "min_p", "seed")  # settings of how a token is drawn


def option_names(names: Iterable[str]) -> str:
    """As they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def sampling_params(err: Console, lm: "LanguageModel", given: dict[str, Any], **more: Any) -> "SamplingParams":
    """What the user gave, and the checkpoint's own defaults for the rest. Says so where what was given changes nothing,
    as nothing is drawn."""
    import jaxbuf

    defaults = lm.sampling_defaults
    params = jaxbuf.SamplingParams(**defaults | given | more)
    used = {name: value for name, value in defaults.items() if name not in given | more}
    if params.temperature > 0 and used:
        told = ", ".join(f"{name} {value:g}" for name, value in used.items())
        err.print(f"from the checkpoint's generation_config.json: {told}", style="dim", markup=False)
    if params.temperature == 0:
        if idle := [name for name in OF_DRAWING if name in given]:
            err.print(f"without a --temperature nothing is drawn, and {option_names(idle)} of no effect", style="dim")
        if params.n > 1:
            err.print("the samples are all the same, as the temperature is 0: give a --temperature", style="dim")
    return params


def progress_bar(err: Console) -> Progress:
    """A bar on a terminal that vanishes when it is done; elsewhere nothing."""
    told = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), told, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


@contextlib.contextmanager
def waiting(err: Console, doing: str) -> Iterator[None]:
    """On a terminal a line with the time that passes, gone at the end; elsewhere the words alone, once."""
    if not err.is_terminal:
        err.print(f"{doing} ...", style="dim")
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as bar:
        err.show_cursor(True)  # a Ctrl-C may end the process here, and would leave the terminal without one
        bar.add_task(doing, total=None)
        yield


def behind_compilation(
    err: Console, events: "Generator[Event, None, None]", interrupted: threading.Event
) -> "Generator[Event, None, None]":
    """The events of a stream, the first of which is held back on a terminal until the second is there, or a Ctrl-C.

    Before either of them a program is compiled, and the line that moves meanwhile would wipe away the text before it.
    """
    with contextlib.closing(events):
        first: list[Event] = []
        with waiting(err, COMPILING):
            while err.is_terminal and len(first) < 2 and not interrupted.is_set():
                event = next(events, None)
                if event is None:
                    break
                first.append(event)
        yield from first
        yield from events


def load_model(
    err: Console, model: str, dtype: str | None, gates: "Path | None" = None, keep: float | None = None
) -> "LanguageModel":
    """Starts JAX, says on what device, and loads the model behind a bar, and its gates, if a file of some is given.

    Args:
      err: Of the device and the progress.
      model, dtype: As in `jaxbuf.load`.
      gates: A file of gates.
      keep: The share of a request's keys that its memory has room for, see `jaxbuf.models.gates.with_room`.

    Raises:
      ValueError: JAX has no device, or keep without gates; or what `jaxbuf.load` raises, its other errors likewise.
    """
    if keep is not None and gates is None:
        raise ValueError("keep must come with --gates: without gates all keys are kept")
    with err.status("starting JAX"):
        import jax

        from jaxbuf.models.loading.checkpoint import compute_dtype

        try:
            device = jax.devices()[0]
        except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not there
            raise ValueError(str(error)) from error
        compute_dtype(dtype)
    err.print(f"device: {device.platform} ({device.device_kind})", style="dim")
    try:
        lm = _load(err, model, dtype, "loading")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--model: {error}") from error
    if gates is None:
        return lm
    from jaxbuf.models.gates import load_gates, with_room

    try:
        lm = load_gates(lm, gates)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"gates: {error}") from error
    return lm if keep is None else with_room(lm, keep=keep)


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


def need_tokenizer(lm: "LanguageModel") -> None:
    """Raises ValueError that says what to do about a model without a tokenizer."""
    if lm.tokenizer is None:
        raise ValueError(
            f"the model {lm.name!r} has no tokenizer.json, which text needs: give token ids, with --token-ids"
        )


def read_text(name: str, argument: str = "") -> str:
    """The text of a file, or of standard input, which is called "-".

    Args:
      name: Of the file.
      argument: What errors call the file before its name.

    Raises:
      ValueError: It is not UTF-8.
      OSError: It cannot be read.
    """
    label = "standard input" if name == "-" else f"{argument} {name}".strip()
    try:
        return (typer.get_binary_stream("stdin").read() if name == "-" else Path(name).read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"{label} cannot be read: {error.strerror or error}") from error


def spread_rows(tokens: "np.ndarray", length: int, rows: int) -> "np.ndarray":
    """int32 [rows, length]: sequences spread over a text, as many as lie in it side by side if those are fewer."""
    import numpy as np

    starts = np.linspace(0, len(tokens) - length, min(rows, len(tokens) // length)).astype(int)
    return np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)


def read_tokens(lm: "LanguageModel", files: list[str]) -> "np.ndarray":
    """The tokens of all files, texts or .npy of token ids, one behind the other; of none: those of the modules of this
    Python's standard library.

    Raises:
      ValueError: A file cannot be read, or holds no token ids of the model; or texts, and it has no tokenizer.
    """
    import sysconfig

    import numpy as np

    if not files:
        need_tokenizer(lm)
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return np.concatenate([lm.encode(path.read_text(encoding="utf-8", errors="replace")) for path in modules])
    found = []
    for name in files:
        if name.endswith(".npy"):
            try:
                array = np.load(name)
            except (OSError, ValueError) as error:
                raise ValueError(f"FILE {name} cannot be read: {error}") from error
            if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"FILE {name} must hold token ids [n], got {array.dtype} {array.shape}")
            if array.size and not 0 <= array.min() <= array.max() < lm.vocab_size:
                raise ValueError(
                    f"FILE {name} must hold ids in [0, {lm.vocab_size}), got {array.min()} to {array.max()}"
                )
            found.append(array)
        else:
            need_tokenizer(lm)
            found.append(np.asarray(lm.encode(read_text(name, "FILE"))))
    return np.concatenate(found)


def parse_ids(text: str, label: str) -> list[int]:
    """Token ids that spaces, line breaks or commas separate.

    Raises:
      ValueError: There are none, or one is no whole number of at least 0.
    """
    words = text.replace(",", " ").split()
    if not words:
        raise ValueError(f"{label} must hold at least one token id, got none")
    try:
        return [parse_whole(word, 0, MOST) for word in words]
    except ValueError as error:
        raise ValueError(f"{label} must hold token ids, each of which {error}") from None


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


def ids_text(tokens: Iterable[int]) -> str:
    """Token ids as they are read and written, separated by spaces."""
    return " ".join(map(str, tokens))


def write_stream(
    events: "Generator[Event, None, None]", interrupted: threading.Event, *, token_ids: bool = False
) -> "Iterator[Event]":
    """Writes text, or token ids, as they come, to the end or to a Ctrl-C, and a newline after it; yields each event
    once written."""
    stdout, first = typer.get_text_stream("stdout", errors="replace"), True
    with contextlib.closing(events):
        for event in events:
            if not token_ids:
                stdout.write(event.text)
            elif event.tokens:
                stdout.write(ids_text(event.tokens) if first else f" {ids_text(event.tokens)}")
                first = False
            stdout.flush()
            yield event
            if interrupted.is_set():
                break
    stdout.write("\n")
    stdout.flush()
