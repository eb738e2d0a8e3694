"""`jaxbuf generate`."""

import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxbuf.cli import options
from jaxbuf.cli.session import (
    check_arguments,
    error_console,
    errors_exit,
    interrupt,
    load_drafter,
    load_model,
    sampling_params,
    write_stream,
)

if TYPE_CHECKING:
    from jaxbuf.serving import Stats


@options.with_sampling
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; [bold]-[/bold] reads it from standard input.")],
    model: options.Model = "demo",
    max_new_tokens: options.MaxNewTokens = 64,
    limit: options.Limit = 16,
    form: options.Form = "auto",
    drafter: options.Drafter = None,
    draft_tokens: options.DraftTokens = 4,
    dtype: options.Dtype = None,
    profile: options.Profile = None,
    *,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt, streaming the text as it is generated.

    The text alone goes to standard output; the device, the progress and the statistics go to standard error.
    It runs on the device that JAX picks; JAX_PLATFORMS=cpu picks the CPU.
    Ctrl-C stops it and prints the statistics so far.
    The checkpoint's generation_config.json gives the sampling settings that you don't; without one it is greedy.

    [bold]Examples[/bold]

      jaxbuf generate "The configuration file"

      jaxbuf generate "To install it" --temperature 0.8 --top-p 0.95 --seed 3

      jaxbuf generate "To install it" --drafter mtp --draft-tokens 3

      jaxbuf generate - --model ./checkpoint --dtype bfloat16 < prompt.txt
    """
    err = error_console()
    settings = {"max_new_tokens": max_new_tokens, "limit": limit, "form": form, "draft_tokens": draft_tokens}
    with errors_exit(err):
        check_arguments(sampling, **settings)
        text = typer.get_binary_stream("stdin").read().decode() if prompt == "-" else prompt
    with errors_exit(err), interrupt() as interrupted:
        _generate(
            err,
            interrupted,
            prompt=text,
            model=model,
            drafter=drafter,
            dtype=dtype,
            sampling=sampling,
            settings=settings | {"profile": profile},
        )
    if interrupted.is_set():
        raise typer.Exit(130)


def _generate(
    err: Console,
    interrupted: threading.Event,
    *,
    prompt: str,
    model: str,
    drafter: str | None,
    dtype: str | None,
    sampling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    import jaxbuf

    lm = load_model(err, model, dtype)
    settings = settings | {"drafter": load_drafter(err, drafter, dtype), "sampling": sampling_params(lm, sampling)}
    if interrupted.is_set():
        return
    events = jaxbuf.generate(lm, [prompt], stream=True, **settings)
    err.print("compiling prefill and decode, once per shape ...", style="dim")
    started = time.perf_counter()
    marks = []
    for event in write_stream(events, interrupted):
        marks.append((time.perf_counter() - started, event.result.stats))
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
    if stats.drafted:
        err.print(
            f"drafts: {stats.drafted} checked, {stats.accepted} accepted, {stats.mean_accepted_length:.2f} tokens a "
            f"step; a state kept for each would have moved {stats.snapshot_bytes / 1e6:.2f} MB",
            style="dim",
        )
