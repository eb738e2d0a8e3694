"""Measures what drafts save: how many of them a model keeps, and so how many tokens it gives in one forward pass.

Letters in shapes: W tokens of a window, D hidden size, K drafts of a step.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbuf.axes import Array
from jaxbuf.bench import report
from jaxbuf.bench.parser import Parser, errors_are_lines, number, output, whole
from jaxbuf.bench.texts import KINDS, WINDOW, Kind, add_text, check_text, cut_prompts, cut_windows, documents_of
from jaxbuf.models import decoder
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.mtp import MTPCache, draft_mtp, init_mtp
from jaxbuf.serving import GenerationResult, SamplingParams, generate
from jaxbuf.serving.drafting import propose_ngram
from jaxbuf.serving.own_drafter import MOST_DRAFTS
from jaxbuf.serving.sampling import History
from jaxbuf.terminal import print_table

type Name = Literal["mtp", "ngram"]

DRAFTERS: tuple[Name, ...] = ("mtp", "ngram")
PROMPT_TOKENS: dict[Kind, int] = {"text": 64, "code": 1024, "logs": 1024}  # what repeats itself needs room to
WINDOWS = 8  # at once
BATCH = 32


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench drafts",
        description=(__doc__ or "").splitlines()[0],
        epilog="Two measurements of each of --kinds: the files of --text, Python's standard library as code, and logs "
        f"that the seed makes up. Teacher-forced: the model reads windows of {WINDOW} tokens, evenly spread over the "
        "text, and at every place the drafter drafts in a chain that is kept on the text before it; a draft is "
        "accepted where it is the model's own greedy choice. Generated: prompts cut from the text at random places are "
        "continued greedily and at --temperature, with each drafter, by the buffered form; the "
        "counts come from the results' stats. A step is one forward pass of the model, so tokens a step is how many "
        "times fewer passes it takes. State moved is compared with the design that keeps a state for each token that "
        "is verified. Rows whose greedy tokens differ from those without a drafter are counted: in float32 only a tie "
        "up to rounding can make one. For the figures of the embedded model take text that it was not trained on: "
        "scripts/prepare_demo_data writes data/demo/package/*.txt. A form feed in a file separates documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help='"demo", or a directory in Hugging Face format')
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="to compute in")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="who drafts, separated by commas")
    parser.add_argument(
        "--draft-tokens",
        type=whole(1, MOST_DRAFTS),
        default=4,
        help=f"the most drafts of a step, at most {MOST_DRAFTS}",
    )
    add_text(parser)
    parser.add_argument("--kinds", default="text", help=f"of text, separated by commas, among {', '.join(KINDS)}")
    parser.add_argument(
        "--tokens", type=whole(3), default=20_000, help="of the text, read teacher-forced; in whole windows"
    )
    parser.add_argument("--prompts", type=whole(1), default=100, help=f"to continue, in batches of at most {BATCH}")
    sizes = ", ".join(f"{number} of {kind}" for kind, number in PROMPT_TOKENS.items())
    parser.add_argument("--prompt-tokens", type=whole(1), default=None, help=f"of each prompt; default: {sizes}")
    parser.add_argument("--max-new-tokens", type=whole(2), default=64, help="the most tokens of each continuation")
    parser.add_argument("--temperature", type=number(0, above=True), default=0.8, help="of the sampled continuations")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of the prompts' places and of sampling")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    for name, known in (("drafters", DRAFTERS), ("kinds", KINDS)):
        given = getattr(options, name).split(",")
        if unknown := set(given) - set(known):
            parser.error(f"--{name} must name {name} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(options, name, given)
    if options.tokens < options.draft_tokens + 2:
        parser.error(f"--tokens must be at least {options.draft_tokens + 2}, got {options.tokens}")
    if "text" in options.kinds:
        check_text(parser, options)
    elif options.text:
        parser.error(f"--text is read as the kind text, which --kinds leaves out, got {','.join(options.kinds)}")
    return options


@jax.jit
def read(model: decoder.Decoder, tokens: Array) -> tuple[Array, Array]:
    """The hidden states [rows, W, D] of tokens [rows, W], and the model's greedy choice after each, int32 [rows, W]."""
    hidden = decoder.forward(model, tokens)
    return hidden, jnp.argmax(decoder.logits(model, hidden), axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="draft_tokens")
def draft_all(model: decoder.Decoder, memory: MTPCache, hidden: Array, tokens: Array, *, draft_tokens: int) -> Array:
    """The MTP layer's greedy drafts at every place of a text, in a chain that is kept on the text.

    Where the drafts before it are the text's, that is the chain as it is in decoding.

    Args:
      model: With an MTP layer.
      memory: Empty, a slot for each row.
      hidden: [rows, W, D], the model's, at each token.
      tokens: int32 [rows, W].
      draft_tokens: K.

    Returns:
      int32 [W - K, rows, K]: [i, :, k] is a draft of the token at place i + 2 + k, with the text before it read.
    """
    rows, window = tokens.shape
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))  # nothing reads the last one

    def choose(scores: Array, number: Array, text: Array) -> tuple[Array, Array, Array]:
        true = jax.lax.dynamic_index_in_dim(text, number, axis=1, keepdims=False)
        return true, jnp.argmax(scores, axis=-1).astype(jnp.int32), text

    def at(memory: MTPCache, newest: Array) -> tuple[MTPCache, Array]:
        before = jax.lax.dynamic_slice_in_dim(hidden, newest - 1, 1, axis=1)
        token = jax.lax.dynamic_slice_in_dim(tokens, newest, 1, axis=1)
        ahead = jax.lax.dynamic_slice_in_dim(padded, newest + 1, draft_tokens, axis=1)
        start = jnp.full(rows, newest - 1, jnp.int32)
        _, drafts, memory = draft_mtp(
            model, memory, before, token, start=start, draft_tokens=draft_tokens, choose=choose, state=ahead
        )
        return memory, drafts

    return jax.lax.scan(at, memory, jnp.arange(1, window - draft_tokens + 1, dtype=jnp.int32))[1]


def compare(drafts: np.ndarray, best: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each draft is the model's choice, and whether all drafts before it are the text: bool [W - K, rows, K].

    Args:
      drafts: As from `draft_all`.
      best: int32 [rows, W], the model's choice after each token.
      tokens: int32 [rows, W].
    """
    places, _, number = drafts.shape
    place = np.arange(places)[:, None] + np.arange(number)[None] + 1
    right = drafts == np.moveaxis(best[:, place], 0, 1)
    followed = drafts[:, :, :-1] == np.moveaxis(tokens[:, place[:, :-1] + 1], 0, 1)
    first = np.ones((*followed.shape[:2], 1), bool)
    return right, np.concatenate([first, np.logical_and.accumulate(followed, axis=2)], axis=2)


@partial(jax.jit, static_argnames="draft_tokens")
def draft_all_ngram(tokens: Array, *, draft_tokens: int) -> Array:
    """`draft_all` of the n-gram drafter, from int32 [rows, W] tokens; -1 where it has no drafts."""
    rows, window = tokens.shape
    none, blank = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 0), jnp.int32)

    def at(_, newest: Array) -> tuple[None, Array]:
        history = History(tokens, none, jnp.full(rows, newest + 1, jnp.int32), blank)
        drafts, count = propose_ngram(history, draft_tokens)
        return None, jnp.where((count > 0)[:, None], drafts, -1)

    return jax.lax.scan(at, None, jnp.arange(1, window - draft_tokens + 1, dtype=jnp.int32))[1]


def measure_forced(
    lm: LanguageModel, windows: np.ndarray, drafter: Name, draft_tokens: int, progress: Progress
) -> dict[str, Any]:
    """Acceptance of a drafter's drafts on a text, int32 [windows, W].

    Returns:
      tokens and places that were judged, and at how many of those it had drafts; of each draft: acceptance (a place
      without drafts accepts none), that where the drafts before it are the text (acceptance_on_text, None if they never
      are), and at how many places they are; and tokens_per_step, 1 + the mean number of drafts that are accepted before
      the first that is not.
    """
    window = windows.shape[1]
    rows, rights, followeds, drafted = min(WINDOWS, len(windows)), [], [], 0
    for begin in progress.track(range(0, len(windows), rows), description=f"reading the text, {drafter}"):
        part = windows[begin : begin + rows]
        tokens = np.concatenate([part, np.zeros((rows - len(part), window), np.int32)])
        hidden, best = read(lm.model, tokens)
        if drafter == "mtp":
            memory = init_mtp(lm.config, slots=rows, capacity=window, max_pending=1 + draft_tokens, dtype=hidden.dtype)
            drafts = draft_all(lm.model, memory, hidden, jnp.asarray(tokens), draft_tokens=draft_tokens)
        else:
            drafts = draft_all_ngram(jnp.asarray(tokens), draft_tokens=draft_tokens)
        drafted += int(np.sum(np.asarray(drafts)[:, : len(part), 0] >= 0))
        right, followed = compare(np.asarray(drafts), np.asarray(best), tokens)
        rights.append(right[:, : len(part)].reshape(-1, draft_tokens))
        followeds.append(followed[:, : len(part)].reshape(-1, draft_tokens))
    right, followed = np.concatenate(rights), np.concatenate(followeds)
    kept = zip(np.sum(right & followed, axis=0), np.sum(followed, axis=0), strict=True)
    return {
        "tokens": windows.size,
        "places": len(right),
        "places_with_drafts": drafted,
        "acceptance": [round(float(share), 4) for share in right.mean(axis=0)],
        "acceptance_on_text": [round(float(hits / places), 4) if places else None for hits, places in kept],
        "places_on_text": [int(number) for number in followed.sum(axis=0)],
        "tokens_per_step": round(1 + float(np.logical_and.accumulate(right, axis=1).sum(axis=1).mean()), 4),
    }


def continue_prompts(
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    drafter: Name | None,
    temperature: float,
    options,
    progress: Progress,
) -> list[GenerationResult]:
    """One result a prompt. All batches have one size, so that one program serves them."""
    batches = -(-len(prompts) // BATCH)
    size, results = -(-len(prompts) // batches), []
    name = f"generating, {drafter or 'no drafter'}, temperature {temperature:g}"
    for begin in progress.track(range(0, len(prompts), size), description=name):
        rows = [i % len(prompts) for i in range(begin, begin + size)]
        results += generate(
            lm,
            [prompts[row] for row in rows],
            options.max_new_tokens,
            [SamplingParams(temperature=temperature, seed=options.seed + row) for row in rows],
            form="buffered",
            drafter=drafter,
            draft_tokens=options.draft_tokens,
        )
    return results[: len(prompts)]


def summarise(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Sums over the results, and their ratios; the first token of each comes from prefill and needs no step."""
    names = ("new_tokens", "steps", "drafted", "accepted", "folds", "bytes", "snapshot_bytes")
    total = {name: sum(getattr(result.stats, name) for result in results) for name in names}
    return total | {
        "tokens_per_step": round((total["new_tokens"] - len(results)) / max(total["steps"], 1), 4),
        "accepted_share": round(total["accepted"] / max(total["drafted"], 1), 4),
        "snapshot_ratio": round(total["snapshot_bytes"] / max(total["bytes"], 1), 4),
    }


def measure_generated(
    lm: LanguageModel, prompts: Sequence[list[int]], options, progress: Progress
) -> list[dict[str, Any]]:
    """A figure for each drafter and temperature; the first is greedy without a drafter."""
    plain = continue_prompts(lm, prompts, None, 0.0, options, progress)
    figures: list[dict[str, Any]] = [{"drafter": None, "temperature": 0.0} | summarise(plain)]
    for drafter in options.drafters:
        for temperature in (0.0, options.temperature):
            results = continue_prompts(lm, prompts, drafter, temperature, options, progress)
            figure = {"drafter": drafter, "temperature": temperature} | summarise(results)
            if temperature == 0:
                pairs = zip(results, plain, strict=True)
                figure["rows_that_differ"] = sum(list(ours.tokens) != list(theirs.tokens) for ours, theirs in pairs)
            figures.append(figure)
    return figures


def show(console: Console, kind: Kind, figures: dict[str, Any], draft_tokens: int) -> None:
    for drafter, forced in figures["teacher_forced"].items():
        table = Table("draft", "accepted", "where the drafts before it are the text", "such places")
        table.title = f"{kind}: {drafter}, teacher-forced on {forced['tokens']:,} tokens"
        columns = (forced[name] for name in ("acceptance", "acceptance_on_text", "places_on_text"))
        for draft, (share, on_text, places) in enumerate(zip(*columns, strict=True), start=1):
            table.add_row(str(draft), f"{share:.3f}", "" if on_text is None else f"{on_text:.3f}", f"{places:,}")
        table.caption = (
            f"{forced['tokens_per_step']:.2f} tokens a step, at {forced['places']:,} places, of which "
            f"{forced['places_with_drafts']:,} had drafts"
        )
        print_table(table, console)
    headings = ("drafter", "T", "tokens", "steps", "tokens a step", "kept", "state MB", "times fewer", "differ")
    title = f"{kind}: {figures['prompts']} prompts of {figures['prompt_tokens']} tokens, at most {draft_tokens} drafts"
    table = Table(*headings, title=title)
    table.caption = (
        "T: temperature; kept: share of the drafts; state: what the recurrent layers moved, and how many times less "
        "that is than keeping a state for each verified token would move in these steps; differ: rows whose greedy "
        "tokens differ from those without a drafter"
    )
    for row in figures["generated"]:
        accepted = f"{row['accepted_share']:.3f}" if row["drafter"] else ""
        counts = f"{row['new_tokens']:,}", f"{row['steps']:,}", f"{row['tokens_per_step']:.2f}", accepted
        moved = f"{row['bytes'] / 1e6:.0f}", f"{row['snapshot_ratio']:.2f}"
        name = row["drafter"] or "none"
        table.add_row(name, f"{row['temperature']:g}", *counts, *moved, str(row.get("rows_that_differ", "")))
    print_table(table, console)


def prepare(lm: LanguageModel, kind: Kind, options: argparse.Namespace) -> tuple[np.ndarray, list, dict[str, Any]]:
    """Windows and prompts of a kind of text, and what its record begins with.

    Raises:
      ValueError: The text or the model does not serve.
    """
    documents, told = documents_of(lm, kind, options.text, options.seed)
    windows = cut_windows(lm, documents, options.tokens)
    if windows.size < options.draft_tokens + 2:
        raise ValueError(f"--text must have at least {options.draft_tokens + 2} tokens, got {windows.size}")
    length = options.prompt_tokens or PROMPT_TOKENS[kind]
    if (whole := length + options.max_new_tokens) > lm.max_length:
        raise ValueError(f"--prompt-tokens and --max-new-tokens together must be at most {lm.max_length}, got {whole}")
    prompts = cut_prompts(documents, options.prompts, length, options.seed)
    return windows, prompts, {"text": told, "prompts": len(prompts), "prompt_tokens": length}


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status, 2 if the model or the text does not serve."""
    options, console = parse(arguments), Console(highlight=False)
    lm = load(options.model, dtype=options.dtype)
    if "mtp" in options.drafters and lm.model.mtp is None:
        raise ValueError(f"--drafters must leave out mtp: {lm.name} has no MTP layer")
    prepared = {kind: prepare(lm, kind, options) for kind in options.kinds}
    told = f"{lm.name}, {options.dtype}, on {jax.devices()[0].device_kind}; seed {options.seed}"
    console.print(told, soft_wrap=True, markup=False)
    record = report.provenance("scripts/bench_drafts", arguments, report.ROOT)
    record |= {"model": lm.name, "dtype": options.dtype}
    record |= {name: getattr(options, name) for name in ("draft_tokens", "max_new_tokens", "seed")} | {"kinds": {}}
    for kind, (windows, prompts, told) in prepared.items():
        if windows.size < options.tokens:
            few = f"{windows.size:,}"
            console.print(f"The {kind} has fewer than the {options.tokens:,} tokens asked for: {few} are read.")
        with Progress(console=Console(stderr=True), redirect_stdout=False, transient=True) as progress:
            forced = {
                name: measure_forced(lm, windows, name, options.draft_tokens, progress) for name in options.drafters
            }
            generated = measure_generated(lm, prompts, options, progress)
        record["kinds"][kind] = told | {"teacher_forced": forced, "generated": generated}
        show(console, kind, record["kinds"][kind], options.draft_tokens)
    if options.json:
        report.write(options.json, record)
        report.tell_written(console, options.json)
    return 0
