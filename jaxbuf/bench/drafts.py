"""Measures what drafts save: how many of them a model keeps, and so how many tokens it gives in one forward pass.

Letters in shapes: W tokens of a window, D hidden size, K drafts of a step.
"""

import argparse
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.models import qwen3_5
from jaxbuf.models.cache import MTPCache, init_mtp
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.qwen3_5_mtp import draft_mtp
from jaxbuf.serving import GenerationResult, SamplingParams, generate
from jaxbuf.serving.speculation import MOST_DRAFTS

type Array = jax.Array
type Name = Literal["mtp", "ngram"]

DRAFTERS: tuple[Name, ...] = ("mtp", "ngram")
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENT_BREAK = "\f"
WINDOW = 512
WINDOWS = 8  # at once
BATCH = 32


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jaxbuf bench drafts",
        description=(__doc__ or "").splitlines()[0],
        epilog="Two measurements. Teacher-forced (drafter mtp): the model and its MTP layer read windows of "
        f"{WINDOW} tokens, evenly spread over the text, and at every place the layer drafts in a chain that is kept on "
        "the text; a draft is accepted where it is the model's own greedy choice. Generated: prompts cut from the text "
        "at random places are continued greedily and at --temperature, with each drafter, by the buffered form; the "
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
    parser.add_argument("--draft-tokens", type=int, default=4, help="the most drafts of a step")
    parser.add_argument("--text", type=Path, nargs="+", help=f"files; default: the repository's {', '.join(TEXTS)}")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text, read teacher-forced; in whole windows")
    parser.add_argument("--prompts", type=int, default=100, help=f"to continue, in batches of at most {BATCH}")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="the most tokens of each continuation")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled continuations")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' places and of sampling")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    options.drafters = options.drafters.split(",")
    if unknown := set(options.drafters) - set(DRAFTERS):
        parser.error(f"--drafters must name drafters among {', '.join(DRAFTERS)}, got {', '.join(sorted(unknown))}")
    least = {"tokens": options.draft_tokens + 2, "prompts": 1, "prompt_tokens": 1, "max_new_tokens": 2}
    for name, number in (least | {"draft_tokens": 1}).items():
        if getattr(options, name) < number:
            parser.error(f"--{name.replace('_', '-')} must be at least {number}, got {getattr(options, name)}")
    if options.draft_tokens > MOST_DRAFTS:
        parser.error(f"--draft-tokens must be at most {MOST_DRAFTS}, got {options.draft_tokens}")
    if options.temperature <= 0:
        parser.error(f"--temperature must be above 0 (greedy is measured anyway), got {options.temperature}")
    options.text = options.text or [report.ROOT / name for name in TEXTS if (report.ROOT / name).is_file()]
    if not options.text:
        parser.error(f"--text must name files: {', '.join(TEXTS)} of the repository are not here")
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"--text must name files, there is no {missing[0]}")
    return options


def read_documents(lm: LanguageModel, files: Sequence[Path]) -> list[list[int]]:
    """The tokens of every document of the files, in order."""
    texts = [text for path in files for text in path.read_text(encoding="utf-8").split(DOCUMENT_BREAK)]
    return [lm.encode(text.removeprefix("\n")) for text in texts if text.strip()]


def cut_windows(lm: LanguageModel, documents: Sequence[Sequence[int]], tokens: int) -> np.ndarray:
    """int32 [windows, W], at least `tokens` if there are as many: the documents one after another, each closed by the
    model's end token, and of these the windows that are evenly spread over them.
    """
    end = sorted(lm.stop_ids)[:1]
    stream = np.asarray([token for document in documents for token in [*document, *end]], np.int32)
    window = max(1, min(WINDOW, len(stream), tokens))
    windows = stream[: len(stream) // window * window].reshape(-1, window)
    number = min(len(windows), -(-tokens // window))
    return windows[np.arange(number) * len(windows) // max(number, 1)]


def cut_prompts(documents: Sequence[Sequence[int]], number: int, length: int, seed: int) -> list[list[int]]:
    """`number` prompts of `length` tokens, each inside one document, from places that are drawn with the seed.

    Raises:
      ValueError: No document is so long.
    """
    starts = [(document, place) for document in documents for place in range(len(document) - length + 1)]
    if not starts:
        longest = max(map(len, documents), default=0)
        raise ValueError(f"--prompt-tokens must be at most the longest document's ({longest}), got {length}")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(starts), number, replace=number > len(starts))
    return [list(document[place : place + length]) for document, place in (starts[i] for i in chosen)]


@jax.jit
def read(model: qwen3_5.Qwen3_5, tokens: Array) -> tuple[Array, Array]:
    """The hidden states [rows, W, D] of tokens [rows, W], and the model's greedy choice after each, int32 [rows, W]."""
    hidden = qwen3_5.forward(model, tokens)
    return hidden, jnp.argmax(qwen3_5.logits(model, hidden), axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="draft_tokens")
def draft_all(model: qwen3_5.Qwen3_5, memory: MTPCache, hidden: Array, tokens: Array, *, draft_tokens: int) -> Array:
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


def measure_forced(lm: LanguageModel, windows: np.ndarray, draft_tokens: int, progress: Progress) -> dict[str, Any]:
    """Acceptance of the MTP layer's drafts on a text, int32 [windows, W].

    Returns:
      tokens and places that were judged; of each draft: acceptance, that where the drafts before it are the text
      (acceptance_on_text, None if they never are), and at how many places they are; and tokens_per_step, 1 + the mean
      number of drafts that are accepted before the first that is not.
    """
    window = windows.shape[1]
    rows, rights, followeds = min(WINDOWS, len(windows)), [], []
    for begin in progress.track(range(0, len(windows), rows), description="reading the text, mtp"):
        part = windows[begin : begin + rows]
        tokens = np.concatenate([part, np.zeros((rows - len(part), window), np.int32)])
        hidden, best = read(lm.model, tokens)
        memory = init_mtp(lm.config, slots=rows, capacity=window, max_pending=1 + draft_tokens, dtype=hidden.dtype)
        drafts = draft_all(lm.model, memory, hidden, jnp.asarray(tokens), draft_tokens=draft_tokens)
        right, followed = compare(np.asarray(drafts), np.asarray(best), tokens)
        rights.append(right[:, : len(part)].reshape(-1, draft_tokens))
        followeds.append(followed[:, : len(part)].reshape(-1, draft_tokens))
    right, followed = np.concatenate(rights), np.concatenate(followeds)
    kept = zip(np.sum(right & followed, axis=0), np.sum(followed, axis=0), strict=True)
    return {
        "tokens": windows.size,
        "places": len(right),
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


def show(console: Console, record: dict[str, Any]) -> None:
    forced = record["teacher_forced"]
    if forced:
        table = Table("draft", "accepted", "where the drafts before it are the text", "such places")
        table.title = f"mtp, teacher-forced on {forced['tokens']:,} tokens"
        columns = (forced[name] for name in ("acceptance", "acceptance_on_text", "places_on_text"))
        for number, (share, on_text, places) in enumerate(zip(*columns, strict=True), start=1):
            table.add_row(str(number), f"{share:.3f}", "" if on_text is None else f"{on_text:.3f}", f"{places:,}")
        table.caption = f"{forced['tokens_per_step']:.2f} tokens a step, at {forced['places']:,} places"
        console.print(table)
    headings = ("drafter", "T", "tokens", "steps", "tokens a step", "kept", "state MB", "times fewer", "differ")
    table = Table(*headings, title=f"{record['prompts']} prompts, at most {record['draft_tokens']} drafts a step")
    table.caption = (
        "T: temperature; kept: share of the drafts; state: what the recurrent layers moved, and how many times less "
        "that is than keeping a state for each verified token would move in these steps; differ: rows whose greedy "
        "tokens differ from those without a drafter"
    )
    for row in record["generated"]:
        accepted = f"{row['accepted_share']:.3f}" if row["drafter"] else ""
        counts = f"{row['new_tokens']:,}", f"{row['steps']:,}", f"{row['tokens_per_step']:.2f}", accepted
        moved = f"{row['bytes'] / 1e6:.0f}", f"{row['snapshot_ratio']:.2f}"
        name = row["drafter"] or "none"
        table.add_row(name, f"{row['temperature']:g}", *counts, *moved, str(row.get("rows_that_differ", "")))
    console.print(table)


def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status, 2 if the model or the text does not serve."""
    options, console = parse(arguments), Console(highlight=False)
    lm = load(options.model, dtype=options.dtype)
    try:
        documents = read_documents(lm, options.text)
        windows = cut_windows(lm, documents, options.tokens)
        if "mtp" in options.drafters and lm.model.mtp is None:
            raise ValueError(f"--drafters must leave out mtp: {lm.name} has no MTP layer")
        if windows.size < options.draft_tokens + 2:
            raise ValueError(f"--text must have at least {options.draft_tokens + 2} tokens, got {windows.size}")
        if (whole := options.prompt_tokens + options.max_new_tokens) > lm.max_length:
            raise ValueError(
                f"--prompt-tokens and --max-new-tokens together must be at most {lm.max_length}, got {whole}"
            )
        prompts = cut_prompts(documents, options.prompts, options.prompt_tokens, options.seed)
    except ValueError as error:
        console.print(str(error), soft_wrap=True, markup=False)
        return 2
    console.print(f"{lm.name}, {options.dtype}, on {jax.devices()[0].device_kind}; seed {options.seed}")
    if windows.size < options.tokens:
        console.print(f"The text has fewer than the {options.tokens:,} tokens asked for: {windows.size:,} are read.")
    record = report.provenance("scripts/bench_drafts", arguments, report.ROOT) | {
        "model": lm.name,
        "dtype": options.dtype,
        "text": [
            {"file": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in options.text
        ],
    }
    settings = ("draft_tokens", "prompts", "prompt_tokens", "max_new_tokens", "seed")
    record |= {name: getattr(options, name) for name in settings}
    with Progress(console=Console(stderr=True), redirect_stdout=False) as progress:
        forced = measure_forced(lm, windows, options.draft_tokens, progress) if "mtp" in options.drafters else None
        record |= {"teacher_forced": forced, "generated": measure_generated(lm, prompts, options, progress)}
    show(console, record)
    if options.json:
        report.write(options.json, record)
        console.print(f"wrote {options.json}", soft_wrap=True)
    return 0
