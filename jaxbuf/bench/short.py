"""Measures decoding steps behind short texts, whose rows may do without a recurrent state, in each form of memory."""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.bench.random_model import configuration, random_model
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.packed import pack
from jaxbuf.progress import progress_bar
from jaxbuf.serving import SamplingParams, generate_tokens
from jaxbuf.serving.batch import Batch, Decoding, make_batch
from jaxbuf.serving.carry import Carry
from jaxbuf.serving.generation import read_prompts
from jaxbuf.serving.stats import state_traffic
from jaxbuf.terminal import print_table

type Row = dict[str, Any]

FORMS = ("buffered", "kv", "auto", "recurrent")
SLOWER = 1.03  # as much as "auto" may take of the time of "buffered"
SPREAD = 0.25  # of the prompts' lengths, so that not all rows fold at once
REPEATS = 5


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench short",
        description=__doc__,
        epilog="The programs are those of jaxbuf.generate: the prompts are read, and generate_tokens decodes --steps "
        "tokens of each, greedily, again and again from a copy of what reading left; the forms of one length by turns. "
        f"The prompts' lengths are drawn within {SPREAD:.0%} of the one that is named. The time of a step is the wall "
        "clock's over all steps, the median of the runs. State bytes are what the steps' own counters say of "
        "checkpoints and entries. The random model has one softmax layer behind every three recurrent ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="random", help="random, with Qwen3.5-4B's sizes; demo; or a directory")
    parser.add_argument("--layers", type=whole(1), default=4, help="of the random model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="of the random model: bfloat16")
    parser.add_argument("--batch", type=whole(1), default=128, help="rows that decode at once")
    parser.add_argument("--lengths", default="8,64,128,256", help="of the prompts, in tokens, separated by commas")
    parser.add_argument("--steps", type=whole(1), default=32)
    parser.add_argument("--limit", type=whole(2), default=16, help="entries from which the buffered form folds")
    parser.add_argument("--forms", default="buffered,auto", help=f"separated by commas: {', '.join(FORMS)}")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the prompts")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    options.lengths = report.whole_numbers(parser, "--lengths", options.lengths)
    options.forms = list(dict.fromkeys(options.forms.split(",")))
    if unknown := set(options.forms) - set(FORMS):
        parser.error(f"--forms must name forms among {', '.join(FORMS)}, got {', '.join(sorted(unknown))}")
    if options.model == "random" and jax.default_backend() == "cpu":
        parser.error("a random model of such sizes needs a GPU, this is a cpu: try --model demo")
    return options


def make_model(options: argparse.Namespace) -> LanguageModel:
    if options.model == "random":
        return random_model(configuration(layers=options.layers), jnp.dtype(options.dtype or "bfloat16"))
    return load(options.model, dtype=options.dtype)


def make_prompts(lm: LanguageModel, length: int, options: argparse.Namespace) -> list[list[int]]:
    rng = np.random.default_rng(options.seed)
    least, most = round(length * (1 - SPREAD)), round(length * (1 + SPREAD))
    lengths = rng.integers(max(1, least), most + 1, options.batch)
    return [rng.integers(0, lm.vocab_size, number).tolist() for number in lengths]


def timed(batch: Batch, start: Carry, steps: int) -> tuple[float, Carry]:
    """Seconds of `steps` steps from a copy of the carry, and the carry after them."""
    carry, model = jax.block_until_ready(jax.tree.map(jnp.copy, start)), pack(batch.lm.model)  # as `generate` does
    began = time.perf_counter()
    carry = jax.block_until_ready(generate_tokens(model, carry, np.int32(steps)))
    return time.perf_counter() - began, carry


def describe(lm: LanguageModel, batch: Batch, after: Carry, seconds: list[float], steps: int) -> Row:
    counters = {name: int(np.sum(getattr(after.counters, name))) for name in ("steps", "folds", "live_entries")}
    reads = int(np.sum(after.counters.checkpoint_reads))
    dtypes = {"state_dtype": batch.sizes.state_dtype, "entry_dtype": batch.sizes.entry_dtype}
    spec, layers = lm.config.spec, len(lm.config.specs)
    counted = {"checkpoint_reads": reads, "drafted": 0} | counters | dtypes
    moved = 0 if spec is None else state_traffic(spec, layers, **counted)
    return {
        "ran": batch.form,
        "kv_limit": batch.sizes.kv_limit,
        "blocks": batch.sizes.blocks,
        "ms": 1e3 * statistics.median(seconds) / steps,
        "checkpoint_reads": reads / counters["steps"],
        "folds": counters["folds"] / counters["steps"],
        "entries": counters["live_entries"] / counters["steps"],
        "state_bytes": moved / steps,
    }


def measure(lm: LanguageModel, length: int, options: argparse.Namespace) -> list[Row]:
    """The forms at one length, by turns."""
    prompts, sampling = make_prompts(lm, length, options), SamplingParams(temperature=0.0, ignore_eos=True)
    batches, starts = {}, {}
    for form in options.forms:
        decoding = Decoding(max_new_tokens=options.steps + 1, limit=options.limit, form=form)
        batches[form] = make_batch(lm, prompts, sampling, decoding)
        starts[form] = read_prompts(lm, batches[form].sizes, batches[form].arrivals)
    seconds, last = {form: [] for form in options.forms}, {}
    for turn in range(1 + REPEATS):
        for form in options.forms:
            taken, last[form] = timed(batches[form], starts[form], options.steps)
            if turn:  # the first compiles
                seconds[form].append(taken)
    rows = []
    for form in options.forms:
        row = describe(lm, batches[form], last[form], seconds[form], options.steps)
        rows.append({"length": length, "form": form, "batch": options.batch} | row)
    ms = {row["form"]: row["ms"] for row in rows}
    return [row | {"of_buffered": row["ms"] / ms["buffered"] if "buffered" in ms else None} for row in rows]


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console = parse(arguments), Console(highlight=False)
    rows: list[Row] = []
    with progress_bar(len(options.lengths), None) as told:
        told("making the model", 0)
        lm = make_model(options)
        for done, length in enumerate(options.lengths):
            told(f"prompts of {length} tokens", done)
            rows += measure(lm, length, options)
    table = Table(caption=f"{lm.name}, batch {options.batch}, {jax.devices()[0].device_kind}; folds, reads: a step's")
    for name in ("tokens", "form", "ran", "ms", "of buffered", "checkpoint reads", "folds", "entries", "state MB"):
        table.add_column(name, justify="left" if name in ("form", "ran") else "right")
    for row in rows:
        ratio = "" if row["of_buffered"] is None else f"{row['of_buffered']:.3f}"
        counted = (f"{row[name]:.2f}" for name in ("checkpoint_reads", "folds", "entries"))
        state = f"{row['state_bytes'] / 1e6:.1f}"
        table.add_row(str(row["length"]), row["form"], row["ran"], f"{row['ms']:.3f}", ratio, *counted, state)
    print_table(table, console)
    late = [row for row in rows if row["form"] == "auto" and (row["of_buffered"] or 0) > SLOWER]
    for row in late:
        console.print(f"auto takes more than {SLOWER} times what buffered does at {row['length']} tokens")
    if options.json:
        settings = {name: getattr(options, name) for name in ("model", "layers", "batch", "steps", "limit", "seed")}
        source = report.provenance("scripts/bench_short", arguments, report.ROOT)
        report.write(options.json, source | settings | {"dtype": jnp.dtype(lm.dtype).name, "figures": rows})
        report.tell_written(console, options.json)
    return 0
