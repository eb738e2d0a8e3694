"""The command line. Text goes to stdout, everything else to stderr, so that a pipe carries the text alone.

JAX and the models are imported by the commands that need them: `jaxbuf --help` answers at once.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from jaxbuf.version import __version__

if TYPE_CHECKING:
    from jaxbuf.serving import Event, Stats

SEGMENT = 16  # tokens generated per call of the compiled program, and so the grain of the stream

app = typer.Typer(
    name="jaxbuf",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve linear-attention and hybrid language models from JAX by moving fewer bytes.",
)
logger = logging.getLogger("jaxbuf")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxbuf {__version__}")
        raise typer.Exit


def _set_log_level(name: str) -> str:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise typer.BadParameter(f"{name!r} is none of debug, info, warning, error")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(level)
    return name


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(callback=_set_log_level, help="What the library logs to stderr: debug, info, warning, error.")
    ] = "warning",
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; [bold]-[/bold] reads it from standard input.")],
    model: Annotated[
        str, typer.Option(help="[bold]demo[/bold], the embedded model, or a checkpoint's directory.")
    ] = "demo",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time (greedy).")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 does not restrict.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed, shapes and device give the same tokens.")] = 0,
    limit: Annotated[int, typer.Option(help="How many entries the recurrent state's buffer holds before a fold.")] = 16,
    form: Annotated[
        Literal["auto", "recurrent", "buffered"],
        typer.Option(
            help="auto, recurrent (the state is written every step) or buffered (only when the buffer fills)."
        ),
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; by default what suits the device and the checkpoint.")
    ] = None,
) -> None:
    """Continue a prompt, streaming the text as it is generated.

    The text alone goes to standard output; the device, the progress and the statistics go to standard error.
    It runs on the device that JAX picks; JAX_PLATFORMS=cpu picks the CPU.
    Ctrl-C stops it and prints the statistics so far.

    [bold]Examples[/bold]

      jaxbuf generate "The configuration file"

      jaxbuf generate "To install it" --temperature 0.8 --top-p 0.95 --seed 3

      jaxbuf generate - --model ./checkpoint --dtype bfloat16 < prompt.txt
    """
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    text = _read_prompt(err) if prompt == "-" else prompt
    with _interrupt() as interrupted:
        _generate(
            err,
            interrupted,
            prompt=text,
            model=model,
            dtype=dtype,
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
            options={"max_new_tokens": max_new_tokens, "limit": limit, "form": form},
        )
    if interrupted.is_set():
        raise typer.Exit(130)


def _read_prompt(err: Console) -> str:
    try:
        return typer.get_binary_stream("stdin").read().decode()
    except UnicodeDecodeError as error:
        raise _failure(err, error) from error


@contextlib.contextmanager
def _interrupt() -> Iterator[threading.Event]:
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


def _generate(
    err: Console,
    interrupted: threading.Event,
    *,
    prompt: str,
    model: str,
    dtype: str | None,
    sampling: dict,
    options: dict,
) -> None:
    with err.status("starting JAX"):
        import jax

        import jaxbuf

        try:
            device = jax.devices()[0]
        except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not there
            raise _failure(err, error) from error
    err.print(f"device: {device.platform} ({device.device_kind})", style="dim")

    try:
        lm = jaxbuf.load(model, dtype=dtype)
        if interrupted.is_set():
            return
        events = jaxbuf.stream(lm, prompt, sampling=jaxbuf.SamplingParams(**sampling), segment=SEGMENT, **options)
        _print_stream(err, events, interrupted)
    except (ValueError, FileNotFoundError, jaxbuf.CheckpointError) as error:
        raise _failure(err, error) from error


def _print_stream(err: Console, events: "Iterable[Event]", interrupted: threading.Event) -> None:
    """Prints text as it comes, to its end or to a Ctrl-C, and the statistics after it."""
    err.print("compiling prefill and decode, once per shape ...", style="dim")
    stdout = typer.get_text_stream("stdout", errors="replace")
    started = time.perf_counter()
    marks: list[tuple[float, Stats]] = []
    for event in events:
        marks.append((time.perf_counter() - started, event.result.stats))
        stdout.write(event.text)
        stdout.flush()
        if interrupted.is_set():
            break
    stdout.write("\n")
    stdout.flush()
    _print_statistics(err, marks)


def _print_statistics(err: Console, marks: "list[tuple[float, Stats]]") -> None:
    """`marks` holds the seconds and the statistics at each event.

    Prefill compiles before the first event and the decoding loop before the second, so the rate is that of the rest.
    """
    seconds, stats = marks[-1]
    line = f"{stats.prompt_tokens} tokens read, {stats.new_tokens} tokens in {seconds:.2f} s, compilation included"
    if len(marks) > 2:
        compiled, before = marks[1]
        line += f"; {(stats.new_tokens - before.new_tokens) / (seconds - compiled):.1f} tokens/s without it"
    err.print(line, style="dim")
    err.print(
        f"recurrent state: {stats.steps} steps, {stats.folds} folds, {stats.live_entries} live entries read, "
        f"{stats.bytes / 1e6:.2f} MB moved",
        style="dim",
    )


def _failure(err: Console, error: Exception) -> typer.Exit:
    logger.debug("", exc_info=error)
    err.print("error:", style="bold red", end=" ")
    err.print(str(error), markup=False)
    return typer.Exit(2)


if __name__ == "__main__":
    app()
