"""Measures what buffered decoding costs in likelihood: a text's, with bf16 entries against the fp32 recurrence."""

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

from jaxbuf.bench import report
from jaxbuf.bench.arguments import Parser, errors_are_lines, output, whole
from jaxbuf.bench.texts import add_text, check_text, documents_of
from jaxbuf.models import qwen3_5
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.scoring import token_logprobs

type Array = jax.Array

QUARTERS = 4
BOUND = 0.005
PIECE = 256  # tokens of a row that one launch reads, one at a time


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench likelihood",
        description=(__doc__ or "").splitlines()[0],
        epilog="Teacher-forced: rows of the text are read as decoding reads them, one token a step, twice: in the "
        "recurrent form with float32 entries, which is the plain recurrence, and in the buffered form, where --entries "
        "are rounded and folded every --limit tokens. Both compute in float32. What is compared is the mean negative "
        "log-likelihood of each quarter of the rows: an error that accumulated would show in the last. The exit status "
        f"is 1 if some quarter differs by more than {BOUND:.1%}. For the figures of the embedded model take text that "
        "it was not trained on: scripts/prepare_demo_data writes data/demo/package/*.txt. A form feed in a file "
        "separates documents.",
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
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
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


@partial(jax.jit, donate_argnames="cache")
def read(model: qwen3_5.Qwen3_5, cache: qwen3_5.Cache, tokens: Array, targets: Array) -> tuple[Array, qwen3_5.Cache]:
    """Decodes int32 [rows, n] tokens one at a time; f32 [rows, n] log-probabilities of the targets, and the cache."""
    ones = jnp.ones(tokens.shape[0], jnp.int32)

    def step(cache: qwen3_5.Cache, now: tuple[Array, Array]) -> tuple[qwen3_5.Cache, Array]:
        token, target = now
        hidden, cache = qwen3_5.extend(model, cache, token[:, None])
        found = token_logprobs(qwen3_5.logits(model, hidden[:, 0]), target)
        return qwen3_5.commit(cache, ones), found.chosen

    cache, found = jax.lax.scan(step, cache, (tokens.T, targets.T))
    return found.T, cache


def likelihood(
    model: qwen3_5.Qwen3_5, rows: np.ndarray, *, limit: int, entry_dtype: str, progress: Progress
) -> np.ndarray:
    """float64 [rows, n]: the negative log-likelihood, in nats, of each token of int32 [rows, n + 1] after the first.

    Args:
      model: The parameters.
      rows: The text.
      limit: Entries from which the memory folds: 1 is the recurrent form.
      entry_dtype: Of the entries.
      progress: Shows what was read.
    """
    number, length = rows.shape[0], rows.shape[1] - 1
    sizes = {"slots": number, "capacity": length, "limit": limit, "max_pending": 1}
    dtype = model.embed_tokens[...].dtype
    cache = qwen3_5.init_cache(model.config, **sizes, dtype=dtype, entry_dtype=jnp.dtype(entry_dtype))
    found = []
    name = f"decoding, limit {limit}, {entry_dtype} entries"
    for begin in progress.track(range(0, length, PIECE), description=name):
        end = min(begin + PIECE, length)
        part, cache = read(model, cache, jnp.asarray(rows[:, begin:end]), jnp.asarray(rows[:, begin + 1 : end + 1]))
        found.append(-np.asarray(part, np.float64))
    return np.concatenate(found, axis=1)


def compare(recurrent: np.ndarray, buffered: np.ndarray) -> list[dict[str, Any]]:
    """The mean of each quarter of two [rows, n], in nats a token, and by how much of the first the second is more."""
    figures, first = [], 1
    for exact, found in zip(*(np.array_split(x, QUARTERS, axis=1) for x in (recurrent, buffered)), strict=True):
        mean, other = float(exact.mean()), float(found.mean())
        last = first + exact.shape[1] - 1
        figures.append(
            {
                "tokens": [first, last],
                "recurrent_nats": round(mean, 6),
                "buffered_nats": round(other, 6),
                "relative_difference": float(f"{other / mean - 1:.3g}"),
                "mean_absolute_difference_nats": float(f"{np.abs(found - exact).mean():.3g}"),
            }
        )
        first = last + 1
    return figures


def show(console: Console, record: dict[str, Any]) -> None:
    title = f"negative log-likelihood, nats a token, {record['rows']} rows"
    table = Table("tokens", "fp32 recurrence", "buffered", "difference", "a token's", title=title)
    for row in record["quarters"]:
        means = f"{row['recurrent_nats']:.4f}", f"{row['buffered_nats']:.4f}", f"{row['relative_difference']:+.4%}"
        first, last = row["tokens"]
        table.add_row(f"{first} to {last}", *means, f"{row['mean_absolute_difference_nats']:.1e}")
    table.caption = "a token's: the mean of the differences' absolute values"
    console.print(table)


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
    with Progress(console=Console(stderr=True), redirect_stdout=False) as progress:
        recurrent = likelihood(lm.model, rows, limit=1, entry_dtype="float32", progress=progress)
        buffered = likelihood(lm.model, rows, limit=options.limit, entry_dtype=options.entries, progress=progress)
    quarters = compare(recurrent, buffered)
    worst = float(np.max([abs(quarter["relative_difference"]) for quarter in quarters]))  # NaN if one is
    name = f"every quarter within {BOUND:.1%} of the fp32 recurrence (at most {worst:.4%})"
    settings = {name: getattr(options, name) for name in ("rows", "tokens", "limit", "entries")}
    record = report.provenance("scripts/bench_likelihood", arguments, report.ROOT) | {"model": lm.name}
    record |= {"text": told} | settings | {"quarters": quarters, name: worst <= BOUND}
    show(console, record)
    console.print(f"{'holds' if worst <= BOUND else 'DOES NOT HOLD'}: {name}")
    if options.json:
        report.write(options.json, record)
        report.tell_written(console, options.json)
    return 0 if worst <= BOUND else 1
