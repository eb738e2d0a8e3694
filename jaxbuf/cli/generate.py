"""`jaxbuf generate`."""

import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxbuf.cli import options
from jaxbuf.cli.errors import error_console
from jaxbuf.cli.session import (
    COMPILING_AND_GENERATING,
    behind_compilation,
    check_arguments,
    end_at_interrupt,
    ids_text,
    interrupt,
    load_drafter,
    load_model,
    need_tokenizer,
    option_names,
    parse_ids,
    read_text,
    sampling_params,
    waiting,
    write_stream,
    write_texts,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.serving import Beam, Event, GenerationResult, Stats

SEARCHED = ("ignore_eos", "stop_token_ids")  # what of sampling a search takes


@options.with_settings
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="The text to continue, or several at once; [bold]-[/bold] reads one from standard input.",
            metavar="PROMPT...",
            **options.text(),
        ),
    ],
    model: options.Model = "demo",
    gates: options.Gates = None,
    keep: options.Keep = None,
    max_new_tokens: options.MaxNewTokens = 64,
    limit: options.Limit = 16,
    form: options.Form = "auto",
    state_dtype: options.StateDtype = None,
    dtype: options.Dtype = None,
    profile: options.Profile = None,
    token_ids: options.TokenIds = False,
    samples: options.Samples = 1,
    beams: options.Beams = None,
    length_penalty: options.LengthPenalty = None,
    *,
    sampling: dict[str, Any],
    drafting: dict[str, Any],
) -> None:
    """Continue a prompt, streaming the text as it is generated.

    The text alone goes to standard output (several, each under a heading); the device, the progress and the
    statistics go to standard error. Several texts come when all have ended.
    It runs on the device that JAX picks; JAX_PLATFORMS=cpu picks the CPU.
    Ctrl-C stops it and prints the statistics so far; a search with --beams ends without a text.
    The checkpoint's generation_config.json gives the sampling settings that you don't; without one it is greedy.

    [bold]Examples[/bold]

      jaxbuf generate "The configuration file"

      jaxbuf generate "The configuration file" "To install the package,"

      jaxbuf generate "To install it" --temperature 0.8 --top-p 0.95 --seed 3

      jaxbuf generate "To install it" --drafter mtp --draft-tokens 3

      jaxbuf generate "To install it" --drafter mtp --draft-tokens 6 --branches 2 --adaptive-drafts

      jaxbuf generate "To install it" --samples 4 --temperature 0.8

      jaxbuf generate "To install it" --beams 4 --max-new-tokens 20

      jaxbuf generate "To install it" --gates gates.safetensors --keep 0.25

      jaxbuf generate - --model ./checkpoint --dtype bfloat16 < prompt.txt

      jaxbuf generate "12 7 305" --token-ids --stop-token-id 2
    """
    err = error_console()
    settings = {"max_new_tokens": max_new_tokens, "limit": limit, "form": form, "state_dtype": state_dtype}
    search = {"beams": beams, "length_penalty": length_penalty}
    search = {name: value for name, value in search.items() if value is not None}
    if beams is None and search:
        raise ValueError(f"{option_names(search)} must come with --beams: it ranks them")
    if beams is not None:
        others = {"samples": samples > 1, "profile": profile is not None}
        others |= {name: name not in SEARCHED for name in (*drafting, *sampling)}
        _check_search(search, [name for name, there in others.items() if there])
    check_arguments(sampling, drafting, **settings, profile=profile)
    if token_ids and "stop" in sampling:
        raise ValueError("--stop must be left out with --token-ids, which has no text: give --stop-token-id")
    where = "PROMPT"
    if "-" in prompts:
        if len(prompts) > 1:
            raise ValueError(f"PROMPT must be - alone, or texts: standard input is one, got {len(prompts)} prompts")
        where, prompts = "standard input", [read_text("-")]
        if not prompts[0]:
            raise ValueError("standard input is empty: there is no prompt")
    given = [parse_ids(prompt, where) for prompt in prompts] if token_ids else prompts
    asked = Asked(given, token_ids, model, dtype, gates, keep)
    if beams is not None:
        with end_at_interrupt():
            _search(err, asked, settings | search | sampling)
        return
    with interrupt() as interrupted:
        sampling["n"] = samples
        _generate(
            err, interrupted, asked, sampling=sampling, drafting=drafting, settings=settings | {"profile": profile}
        )
    if profile is not None:
        err.print(f"wrote {profile}, which jaxbuf profile {profile} tells about", style="dim", markup=False)
    if interrupted.is_set():
        raise typer.Exit(130)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to continue, a text or token ids, and the model, dtype, gates and room for keys to do it with."""

    prompts: "Sequence[str | list[int]]"
    token_ids: bool  # whether they go in and come out
    model: str
    dtype: str | None
    gates: Path | None = None
    keep: float | None = None

    def load(self, err: Console) -> "LanguageModel":
        """The model; ValueError if there is text and no tokenizer."""
        lm = load_model(err, self.model, self.dtype, self.gates, self.keep)
        if not self.token_ids:
            need_tokenizer(lm)
        return lm

    def output(self, found: "GenerationResult | Beam") -> str:
        """A continuation as it is written."""
        return ids_text(found.tokens) if self.token_ids else found.text

    def heading(self, index: int, told: str = "") -> str:
        """What begins the heading of one of a prompt's texts, which `told` tells from the prompt's others."""
        of_several = f"prompt {index + 1} of {len(self.prompts)}" if len(self.prompts) > 1 else ""
        return ", ".join(part for part in (of_several, told) if part)


def _generate(
    err: Console,
    interrupted: threading.Event,
    asked: Asked,
    *,
    sampling: dict[str, Any],
    drafting: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    import jaxbuf

    lm = asked.load(err)
    settings = settings | load_drafter(err, drafting, asked.dtype) | {"sampling": sampling_params(err, lm, sampling)}
    if interrupted.is_set():
        return
    params = settings["sampling"]
    events = jaxbuf.generate(lm, asked.prompts, stream=True, **settings)
    started = time.perf_counter()
    places = [(index, sample) for index in range(len(asked.prompts)) for sample in range(params.n)]
    if len(places) > 1:
        with waiting(err, COMPILING_AND_GENERATING):
            results = _collect(events, interrupted, places)
        seconds, headings = time.perf_counter() - started, []
        for (index, sample), result in zip(places, results, strict=True):
            told = f"sample {sample + 1} of {params.n}" if params.n > 1 else ""
            headings.append(f"{asked.heading(index, told)} ({result.finish_reason}):")
        write_texts(err, headings, [asked.output(result) for result in results])
        read = sum(
            result.stats.prompt_tokens for (_, sample), result in zip(places, results, strict=True) if sample == 0
        )
        summed = dataclasses.replace(_sum([result.stats for result in results]), prompt_tokens=read)
        _print_statistics(err, [(seconds, summed)], _steps_of(results, params.n))
        return
    marks = []
    for event in write_stream(behind_compilation(err, events, interrupted), interrupted, token_ids=asked.token_ids):
        marks.append((time.perf_counter() - started, event.result.stats))
    _print_statistics(err, marks)


def _collect(
    events: "Generator[Event, None, None]", interrupted: threading.Event, places: list[tuple[int, int]]
) -> "list[GenerationResult]":
    """What the prompts' samples led to, at their end or at a Ctrl-C."""
    results = {}
    with contextlib.closing(events):
        for event in events:
            results[event.index, event.sample] = event.result
            if interrupted.is_set() and len(results) == len(places):
                break
    return [results[place] for place in places]


def _sum(stats: "Sequence[Stats]") -> "Stats":
    """Of all texts together, but for what was read of prompts."""
    names = ("new_tokens", "steps", "folds", "checkpoint_reads", "live_entries", "drafted", "accepted")
    names = (*names, "bytes", "snapshot_bytes", "passed_tokens")
    summed: dict[str, Any] = {name: sum(getattr(each, name) for each in stats) for name in names}
    for name in ("kept_keys", "dropped_keys"):  # of layers and heads
        layers = zip(*(getattr(each, name) for each in stats), strict=True)
        summed[name] = tuple(tuple(map(sum, zip(*heads, strict=True))) for heads in layers)
    return dataclasses.replace(stats[0], **summed)


def _steps_of(results: "list[GenerationResult]", samples: int) -> str:
    """The texts take their steps together, until the last of them ends."""
    kind = "samples" if samples == len(results) else "texts"
    return f"{max(result.stats.steps for result in results)} steps of {len(results)} {kind}"


def _check_search(search: dict[str, Any], others: list[str]) -> None:
    from jaxbuf.serving.beams import check_beams

    check_beams(**search)
    if others:
        raise ValueError(f"--beams does not take {option_names(others)}")


def _search(err: Console, asked: Asked, settings: dict[str, Any]) -> None:
    import jaxbuf

    lm = asked.load(err)
    if not err.is_terminal:  # where the search has a bar of its own
        err.print(f"{COMPILING_AND_GENERATING} ...", style="dim")
    started = time.perf_counter()
    found = jaxbuf.beam_search(lm, asked.prompts, **settings)
    seconds, headings = time.perf_counter() - started, []
    for index, beams in enumerate(found):
        for number, beam in enumerate(beams, 1):
            score = f"log-probability {beam.score:.3f}, ranked by {beam.ranking_score:.4g}"
            told = asked.heading(index, f"beam {number} of {len(beams)}")
            headings.append(f"{told} ({beam.finish_reason}), {score}:")
    write_texts(err, headings, [asked.output(beam) for beams in found for beam in beams])
    err.print(f"{seconds:.2f} s, compilation included", style="dim")


def _print_statistics(err: Console, marks: "list[tuple[float, Stats]]", steps: str | None = None) -> None:
    """`marks` holds the seconds and the statistics at each event; `steps` says their number otherwise than they do.

    Prefill compiles before the first event and the decoding loop before the second, so the rate is that of the rest.
    """
    seconds, stats = marks[-1]
    line = f"{stats.prompt_tokens} tokens read, {stats.new_tokens} tokens in {seconds:.2f} s, compilation included"
    if len(marks) > 2:
        compiled, before = marks[1]
        line += f"; {(stats.new_tokens - before.new_tokens) / (seconds - compiled):.1f} tokens/s without it"
    err.print(line, style="dim")
    counted = steps or f"{stats.steps} steps"
    if stats.bytes:
        counted = (
            f"recurrent state: {counted}, {stats.folds} folds, {stats.live_entries} live entries read, "
            f"{stats.bytes / 1e6:.2f} MB moved"
        )
    err.print(counted, style="dim")  # steps alone where no layer has a recurrent state
    if stats.kept_keys and not stats.passed_tokens:
        err.print("gates: no token has left the window yet", style="dim")
    elif stats.kept_keys:
        shares = [share for heads in stats.kept_shares for share in heads]
        dropped = sum(sum(heads) for heads in stats.dropped_keys)
        err.print(
            f"gates: {stats.passed_tokens} tokens left the window, of whose keys {sum(shares) / len(shares):.0%} are "
            f"kept ({min(shares):.0%} to {max(shares):.0%} a head); {dropped} left because memory was full",
            style="dim",
        )
    if stats.drafted:
        told = f"drafts: {stats.drafted} checked, {stats.accepted} accepted, "
        told += f"{stats.mean_accepted_length:.2f} tokens a step"
        if stats.snapshot_bytes:
            told += f"; a state kept for each would have moved {stats.snapshot_bytes / 1e6:.2f} MB"
        err.print(told, style="dim")
