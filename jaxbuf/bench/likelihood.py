"""Measures what buffered decoding costs in likelihood: with bf16 entries and each checkpoint, against fp32."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbuf.axes import Array
from jaxbuf.bench import report
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.bench.texts import add_text, check_text, documents_of
from jaxbuf.models import decoder
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.scoring import token_logprobs
from jaxbuf.serving import SamplingParams, generate
from jaxbuf.terminal import print_table

QUARTERS = 4
BOUNDS = {"float32": 0.005, "split": 0.0002, "split8": 0.0002}  # of a quarter's difference, by checkpoint
STATES = ("float32", "bfloat16", "split", "split8")
PROMPT, NEW = 64, 64  # tokens of a prompt, and of its greedy continuation
PIECE = 256  # tokens of a row that one launch reads, one at a time


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench likelihood",
        description=(__doc__ or "").splitlines()[0],
        epilog="Teacher-forced: rows of the text are read as decoding reads them, one token a step: in the recurrent "
        "form with float32 entries and states, which is the plain recurrence, and beside it in the buffered form with "
        "each of --states, where --entries are rounded and folded every --limit tokens. All compute in float32. What "
        "is compared is the mean negative log-likelihood of each quarter of the rows (an error that accumulated would "
        "show in the last), the distribution of the next token (its Kullback-Leibler divergence from the "
        f"recurrence's), and the greedy continuations, of {NEW} tokens, of --prompts prompts. The exit status is 1 if "
        f"some quarter differs by more than {BOUNDS['float32']:.1%} with a float32 checkpoint, or "
        f"{BOUNDS['split']:.2%} with a split one. For the figures of the embedded model take text that it was not "
        "trained on: scripts/prepare_demo_data writes data/demo/package/*.txt. A form feed in a file separates "
        "documents.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help='"demo", or a directory in Hugging Face format')
    add_text(parser, "the modules of Python's standard library")
    parser.add_argument("--rows", type=whole(1), default=4, help="stretches of the text, evenly spread over it")
    parser.add_argument("--tokens", type=whole(QUARTERS), default=4096, help="of each that are scored")
    parser.add_argument("--limit", type=whole(2), default=16, help="entries from which the buffered form folds")
    parser.add_argument(
        "--entries", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="dtype of its entries"
    )
    parser.add_argument(
        "--states", default=",".join(STATES), help=f"how checkpoints are kept, with commas: {', '.join(STATES)}"
    )
    parser.add_argument(
        "--prompts", type=whole(0), default=100, help=f"prompts of {PROMPT} tokens to continue greedily"
    )
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    options.states = tuple(dict.fromkeys(options.states.split(",")))
    if unknown := [name for name in options.states if name not in STATES]:
        parser.error(f"--states must name some of {', '.join(STATES)}, got {unknown[0]!r}")
    if options.text:
        check_text(parser, options)
    return options


def cut_rows(lm: LanguageModel, documents: Sequence[Sequence[int]], rows: int, tokens: int) -> np.ndarray:
    """int32 [rows, tokens + 1], evenly spread over the documents one after another, each closed by the end token.

    Raises:
      ValueError: The rows would overlap.
    """
    end = sorted(lm.stop_ids)[:1]
    stream = np.asarray([token for document in documents for token in [*document, *end]], np.int32)
    if len(stream) < rows * (tokens + 1):
        need = f"{rows * (tokens + 1)} tokens for --rows {rows} and --tokens {tokens}"
        raise ValueError(f"--text must have at least {need}, got {len(stream)}")
    starts = np.arange(rows) * (len(stream) // rows)
    return np.stack([stream[start : start + tokens + 1] for start in starts])


type Found = tuple[Array, Array]  # of each token its log-probability, and the divergence of the distribution


@partial(jax.jit, donate_argnames="caches")
def read(
    model: decoder.Decoder, caches: tuple[decoder.Cache, ...], tokens: Array, targets: Array
) -> tuple[tuple[Found, ...], tuple[decoder.Cache, ...]]:
    """Decodes int32 [rows, n] tokens one at a time, with each memory.

    Returns:
      For each memory f32 [rows, n]: the log-probabilities of the targets; and the Kullback-Leibler divergence, in nats,
      of the next token's distribution from that with the first memory. And the memories.
    """
    ones = jnp.ones(tokens.shape[0], jnp.int32)

    def step(caches, now):
        token, target = now
        found, first = [], None
        for i, cache in enumerate(caches):
            hidden, cache = decoder.extend(model, cache, token[:, None])
            logits = decoder.logits(model, hidden[:, 0])
            logprobs = jax.nn.log_softmax(logits)
            first = logprobs if first is None else first
            divergence = jnp.sum(jnp.exp(first) * (first - logprobs), axis=-1)
            found.append((token_logprobs(logits, target).chosen, divergence))
            caches = (*caches[:i], decoder.commit(cache, ones), *caches[i + 1 :])
        return caches, tuple(found)

    caches, found = jax.lax.scan(step, caches, (tokens.T, targets.T))
    return jax.tree.map(jnp.transpose, found), caches


def decode(
    model: decoder.Decoder,
    rows: np.ndarray,
    *,
    limit: int,
    entry_dtype: str,
    states: Sequence[str],
    progress: Progress,
) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Reads int32 [rows, n + 1] tokens with the plain recurrence, and with a buffered memory for each of `states`.

    Args:
      model: The parameters.
      rows: The text.
      limit: Entries from which the buffered memories fold.
      entry_dtype: Of their entries.
      states: How they keep their checkpoints: `state_dtype`.
      progress: Shows what was read.

    Returns:
      float64 [rows, n], the negative log-likelihood of each token after the first, in nats, of the recurrence; and by
      state the same and the divergences, see `read`.
    """
    number, length = rows.shape[0], rows.shape[1] - 1
    sizes = {"slots": number, "capacity": length, "max_pending": 1, "dtype": model.embed_tokens[...].dtype}
    caches = [decoder.init_cache(model.config, **sizes, limit=1, entry_dtype=jnp.float32)]
    for name in states:
        given = {"limit": limit, "entry_dtype": jnp.dtype(entry_dtype), "state_dtype": name}
        caches.append(decoder.init_cache(model.config, **sizes, **given))
    caches, parts = tuple(caches), []
    for begin in progress.track(range(0, length, PIECE), description=f"decoding with {len(caches)} memories"):
        end = min(begin + PIECE, length)
        tokens, targets = (jnp.asarray(rows[:, begin + i : end + i]) for i in range(2))
        part, caches = read(model, caches, tokens, targets)
        parts.append(jax.tree.map(lambda x: np.asarray(x, np.float64), part))
    found = jax.tree.map(lambda *pieces: np.concatenate(pieces, axis=1), *parts)
    (exact, _), *others = found
    return -exact, {name: (-chosen, divergence) for name, (chosen, divergence) in zip(states, others, strict=True)}


def count_different(
    lm: LanguageModel, prompts: list[list[int]], *, limit: int, entry_dtype: str, states: Sequence[str]
) -> dict[str, int]:
    """How many of the prompts' greedy continuations are not the plain recurrence's, by state."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def tokens(**how):
        return [result.tokens for result in generate(lm, prompts, NEW, sampling, progress=False, **how)]

    exact = tokens(form="recurrent", entry_dtype="float32")
    how = {"form": "buffered", "limit": limit, "entry_dtype": entry_dtype}
    found = {name: tokens(**how, state_dtype=name) for name in states}
    return {name: sum(a != b for a, b in zip(exact, each, strict=True)) for name, each in found.items()}


def compare(recurrent: np.ndarray, buffered: np.ndarray, divergence: np.ndarray) -> list[dict[str, Any]]:
    """The mean of each quarter of two [rows, n], in nats a token, and by how much of the first the second is more; and
    the mean of the divergences [rows, n]."""
    figures, first = [], 1
    quarters = (np.array_split(x, QUARTERS, axis=1) for x in (recurrent, buffered, divergence))
    for exact, found, apart in zip(*quarters, strict=True):
        mean, other = float(exact.mean()), float(found.mean())
        last = first + exact.shape[1] - 1
        figures.append(
            {
                "tokens": [first, last],
                "recurrent_nats": round(mean, 6),
                "buffered_nats": round(other, 6),
                "relative_difference": float(f"{other / mean - 1:.3g}"),
                "mean_absolute_difference_nats": float(f"{np.abs(found - exact).mean():.3g}"),
                "divergence_nats": float(f"{apart.mean():.3g}"),
            }
        )
        first = last + 1
    return figures


def show(console: Console, record: dict[str, Any]) -> None:
    title = f"negative log-likelihood, nats a token, {record['rows']} rows, {record['entries']} entries"
    table = Table("state", "tokens", "fp32", "buffered", "difference", "a token's", "KL", title=title)
    for state, quarters in record["quarters"].items():
        for row in quarters:
            means = f"{row['recurrent_nats']:.4f}", f"{row['buffered_nats']:.4f}", f"{row['relative_difference']:+.4%}"
            (first, last), apart = row["tokens"], f"{row['divergence_nats']:.1e}"
            table.add_row(state, f"{first} to {last}", *means, f"{row['mean_absolute_difference_nats']:.1e}", apart)
        table.add_section()
    table.caption = (
        "a token's: the mean of the differences' absolute values; KL: the divergence of the next token's distribution "
        "from the recurrence's"
    )
    print_table(table, console)


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status: 1 if a quarter differs by too much, 2 if the
    model or the text does not serve."""
    options, console = parse(arguments), Console(highlight=False)
    lm = load(options.model, dtype="float32")
    if options.tokens > lm.max_length:
        raise ValueError(f"--tokens must be at most {lm.max_length} for {lm.name}, got {options.tokens}")
    documents, told = documents_of(lm, "text" if options.text else "code", options.text or (), seed=0)
    rows = cut_rows(lm, documents, options.rows, options.tokens)
    console.print(f"{lm.name}, float32, on {jax.devices()[0].device_kind}", soft_wrap=True, markup=False)
    sizes = {"limit": options.limit, "entry_dtype": options.entries, "states": options.states}
    with Progress(console=Console(stderr=True), redirect_stdout=False, transient=True) as progress:
        recurrent, found = decode(lm.model, rows, **sizes, progress=progress)
    quarters = {name: compare(recurrent, *figures) for name, figures in found.items()}
    prompts = cut_rows(lm, documents, options.prompts, PROMPT - 1).tolist() if options.prompts else []
    different = count_different(lm, prompts, **sizes) if prompts else {}
    verdicts = {}
    for name, bound in BOUNDS.items():
        if name in quarters:
            worst = float(np.max([abs(quarter["relative_difference"]) for quarter in quarters[name]]))  # NaN if one is
            told_bound = f"{name} checkpoint: every quarter within {bound:.2%} of the fp32 recurrence"
            verdicts[f"{told_bound} (at most {worst:.4%})"] = worst <= bound
    settings = {name: getattr(options, name) for name in ("rows", "tokens", "limit", "entries", "prompts")}
    record = report.provenance("scripts/bench_likelihood", arguments, report.ROOT) | {"model": lm.name}
    record |= {"text": told} | settings | {"quarters": quarters, "different_greedy_rows": different} | verdicts
    show(console, record)
    if different:
        told = ", ".join(f"{count} ({name})" for name, count in different.items())
        console.print(f"of {len(prompts)} greedy continuations of {NEW} tokens differ from the recurrence's: {told}")
    for name, held in verdicts.items():
        console.print(f"{'holds' if held else 'DOES NOT HOLD'}: {name}")
    if options.json:
        report.write(options.json, record)
        report.tell_written(console, options.json)
    return 0 if all(verdicts.values()) else 1
