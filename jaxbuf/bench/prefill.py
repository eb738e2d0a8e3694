"""Measures how fast a model reads prompts: tokens a second, what takes the time, and the softmax layers' FLOP/s."""

import argparse
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbuf.attention.causal import causal_attention
from jaxbuf.bench import report
from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.measure import measure_torch, program_bytes
from jaxbuf.bench.model_options import add_model_options, asked_model, check_full_size, read_model_options
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, output, whole
from jaxbuf.bench.step_run import IN_TRACES
from jaxbuf.compilation import without_cache
from jaxbuf.models.config import ATTENTION, LayerConfig
from jaxbuf.models.families import config_json
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import SamplingParams, admit
from jaxbuf.serving.batch import Batch, Decoding, make_batch
from jaxbuf.serving.carry import Carry, CarrySizes
from jaxbuf.serving.profiling import LIBRARY_PRODUCTS, OTHER, Operation, operations, trace
from jaxbuf.serving.prompts import program_key, read_first_chunk
from jaxbuf.target import Target
from jaxbuf.terminal import print_table

USUAL = "8x2048,4x8192,1x32768"
REPEATS = 3
READERS = "begin_prompts", "read_layer", "end_prompts", "admit"  # the programs
STATIC = CarrySizes, LayerConfig  # arguments that compiled programs don't take
BETWEEN, PRODUCTS = "between kernels", "matrix products"
# In the names of libraries' kernels that no scope is known of.
FLASH = re.compile("sdpa|fmha|flash", re.I)
# Of these sizes attention is timed alone: rows, tokens, query heads, heads of keys and values, and their numbers.
type Shape = tuple[int, int, int, int, int]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench prefill",
        description=__doc__,
        epilog="The programs are those by which jaxbuf.generate reads prompts, a few small ones for the first chunk "
        "and admit for the others, on random token ids; the last chunk draws a token of each prompt. The time is "
        f"the wall clock's, the median of {REPEATS} runs from an empty memory to the first tokens. The parts are "
        "operations of a jax.profiler trace of one more run; what they leave of the wall clock is time between "
        "kernels. XLA leaves libraries' kernels without a name of their layer in CUDA graphs: they are known by "
        "their own names, flash attention's as attention and others as matrix products. The FLOP of attention are "
        "those of the scores and sums that a causal softmax needs, 4 for each number of a query and a key that it "
        "sees. jaxbuf's causal_attention and torch's scaled_dot_product_attention are timed on the same sizes, a "
        "layer of whole prompts without a memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--prompts", default=USUAL, help="NUMBERxTOKENS of prompts read together, separated by commas")
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: without kernels")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's attention")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the prompts")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument("--profile", type=folder, default=None, help="a folder for the traces, one folder for each")
    options = parser.parse_args(arguments)
    options.prompts = report.prompt_sizes(parser, options.prompts)
    report.check_plots(parser, options.json)
    read_model_options(parser, options)
    check_full_size(parser, options)
    return options


def make_model(options: argparse.Namespace) -> LanguageModel:
    lm = asked_model(options.model, options.shape, options.sizes, options.dtype)
    if options.implementation == "xla":
        lm = dataclasses.replace(lm, compiled_for=lm.target.without_kernels())
    return lm


def ask(lm: LanguageModel, number: int, tokens: int, seed: int) -> Batch:
    """What `jaxbuf.generate` would start with."""
    prompts = np.random.default_rng(seed).integers(0, lm.vocab_size, (number, tokens)).tolist()
    return make_batch(lm, prompts, SamplingParams(temperature=0.0, ignore_eos=True), Decoding(max_new_tokens=1))


class Reading:
    """The programs that read the prompts of a batch: the first chunk's, and that of the others if there are any."""

    def __init__(self, asked: Batch):
        self.asked, self.chunks = asked, asked.arrivals
        self.lowered: dict[Hashable, Lowered] = {}
        self.results: dict[Hashable, Any] = {}
        self.order: list[Hashable] = []  # the program of each call
        self.carry = self._read(self._lower)

    def _read(self, run: Callable[..., Any]) -> Any:
        """Runs the programs as `jaxbuf.generate` does; `run` is as in `read_first_chunk`."""
        model, (first, *others) = self.asked.lm.model, self.chunks
        carry = read_first_chunk(model, self.asked.sizes, first, run=run)
        for chunk in others:
            carry = run(admit, model, carry, chunk)
        return carry

    def _lower(self, program: Any, *args: Any) -> Any:
        key = program_key(program, args)
        if key not in self.lowered:
            traced = program.trace(*args)
            self.lowered[key], self.results[key] = traced.lower(), traced.out_info
        self.order.append(key)
        return self.results[key]

    def compile(self) -> None:
        self.programs = {key: lowered.compile(compiler_options=IN_TRACES) for key, lowered in self.lowered.items()}

    def __call__(self) -> Carry:
        """Reads the prompts."""
        order = iter(self.order)

        def run(_: Any, *args: Any) -> Any:
            return self.programs[next(order)](*(arg for arg in args if not isinstance(arg, STATIC)))

        return jax.block_until_ready(self._read(run))

    def describe(self) -> Row:
        """How the prompts are cut, and the bytes that are needed at once at most: parameters, memory of all layers,
        what the programs pass on, and what one of them makes on the way."""
        most = max(program_bytes(program)["temporary_bytes"] for program in self.programs.values())
        passed = self.asked.lm.model, self.results[self.order[0]]  # the second has the memory, plans and hidden states
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(passed))
        chunk = int(self.chunks[0].tokens.shape[1])
        return {"chunks": len(self.chunks), "chunk_tokens": chunk, "program_bytes": held + most}


def compile_all(readings: Sequence[Reading]) -> float:
    """The seconds that compiling all takes, side by side. Not from the compilation cache: a profile needs the names of
    operations."""
    began = time.perf_counter()
    with without_cache(), ThreadPoolExecutor(len(readings)) as pool:
        for done in [pool.submit(reading.compile) for reading in readings]:
            done.result()
    return time.perf_counter() - began


def attention_flop(lm: LanguageModel, number: int, tokens: int) -> float:
    """Of all softmax layers, for prompts that are read from nothing."""
    pairs = number * tokens * (tokens + 1) / 2
    return sum(4 * mixer.heads * mixer.head_dim * pairs for mixer in softmax_mixers(lm))


def softmax_mixers(lm: LanguageModel) -> list[Any]:
    return [mixer for layer in lm.config.layers for mixer in layer.mixers if mixer.kind == ATTENTION]


def measure(read: Reading, number: int, tokens: int, options: argparse.Namespace) -> Row:
    """The figures of prompts that are read together, by compiled programs."""
    lm, found = read.asked.lm, read.describe()
    carry, walls = read(), []
    lacking = int(np.sum(carry.lacking))
    if lacking:
        raise ValueError(f"--prompts {number}x{tokens}: {lacking} rows found no room in the memory")
    del carry
    for _ in range(REPEATS):
        began = time.perf_counter()
        read()
        walls.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory(prefix="jaxbuf-prefill-") as temporary:
        directory = options.profile / f"{number}x{tokens}" if options.profile else Path(temporary)
        with trace(directory):
            read()
        traced = [ran for ran in operations(directory) if ran.program in READERS]
    seconds = statistics.median(walls)
    found |= {"prompts": number, "tokens": tokens, "ms": 1e3 * seconds, "tokens_per_s": number * tokens / seconds}
    found |= split(traced)
    return found | {"attention_flop": attention_flop(lm, number, tokens)}


def measure_attention(shape: Shape, dtype: str, target: Target) -> Row:
    """The time of `causal_attention` on random prompts, without a memory."""
    number, tokens, heads, kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((number, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    q, k, v = (jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))
    call = jax.jit(partial(causal_attention, target=target)).lower(q, k, v).compile()
    jax.block_until_ready(call(q, k, v))
    began = time.perf_counter()
    jax.block_until_ready([call(q, k, v) for _ in range(REPEATS)])
    ms = 1e3 * (time.perf_counter() - began) / REPEATS
    flop = 2 * number * heads * head_dim * tokens * (tokens + 1)
    return {"layer_ms": ms, "layer_flop_per_s": 1e3 * flop / ms}


def part(ran: Operation) -> str:
    """The part that an operation belongs to: its scope, if one is known."""
    if ran.scope != OTHER:
        return ran.scope
    return "attention" if FLASH.search(ran.name) else PRODUCTS if LIBRARY_PRODUCTS.search(ran.name) else OTHER


def split(traced: Sequence[Operation]) -> Row:
    """The milliseconds of each part, and of the operations of attention that took the most."""
    parts: dict[str, float] = {}
    attention: dict[str, float] = {}
    for ran in traced:
        parts[part(ran)] = parts.get(part(ran), 0.0) + 1e3 * ran.seconds
        if part(ran) == "attention":
            attention[ran.name] = attention.get(ran.name, 0.0) + 1e3 * ran.seconds
    longest = sorted(attention.items(), key=lambda item: -item[1])[:5]
    return {
        "device_ms": sum(parts.values()),
        "parts_ms": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "attention_ms": dict(longest),
    }


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of each part, and of what the wall clock has beside them."""
    rest = row["ms"] - row["device_ms"]
    return row["parts_ms"] | ({BETWEEN: rest} if rest > 0 else {})


def named(row: Row) -> str:
    return f"{row['prompts']} x {row['tokens']}"


def show(console: Console, figures: Sequence[Row], record: Row) -> None:
    """Prints the tables."""
    model = record["model"]
    table = Table(
        *("prompts", "chunks", "ms", "tokens/s", "attention TFLOP/s", "torch", "memory"),
        title=f"{model['name']} in {model['dtype']}, {record['device']}",
        caption="attention: of a layer alone; torch: of its scaled_dot_product_attention, the fastest of its kernels; "
        "memory: what is needed at once, in GB",
    )
    for row in figures:
        rates = [row.get("layer_flop_per_s"), fastest(record["torch"], row)]
        words = ["" if rate is None else f"{rate / 1e12:.0f}" for rate in rates]
        numbers = [f"{row['ms']:.1f}", f"{row['tokens_per_s']:.0f}", *words, f"{row['program_bytes'] / 1e9:.1f}"]
        table.add_row(named(row), f"{row['chunks']} x {row['chunk_tokens']}", *numbers)
    print_table(table, console)
    table = Table("part", *map(named, figures), caption="ms")
    for name in ordered(figures):
        table.add_row(name, *(f"{parts(row).get(name, 0.0):.2f}" for row in figures))
    print_table(table, console)
    for row in record["torch"]:
        if "error" in row:
            console.print(f"torch's attention: {row['error']}", soft_wrap=True)


def fastest(theirs: Sequence[Row], row: Row) -> float | None:
    """FLOP/s of torch's fastest kernel on a layer of these prompts."""
    sizes = row["prompts"], row["tokens"]
    rates = [their["flop_per_s"] for their in theirs if (their.get("prompts"), their.get("tokens")) == sizes]
    return max(rates, default=None)


def ordered(figures: Sequence[Row]) -> list[str]:
    """The names of all parts, the one that takes the most first."""
    names = {name for row in figures for name in parts(row)}
    return sorted(names, key=lambda name: -max(parts(row).get(name, 0.0) for row in figures))


def plot(figures: Sequence[Row], path: Path) -> None:
    """Stacked bars: microseconds a token of each part, at each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(4 + 1.2 * len(figures), 5))
    below = [0.0] * len(figures)
    for color, name in enumerate(ordered(figures)):
        heights = [1e3 * parts(row).get(name, 0.0) / (row["prompts"] * row["tokens"]) for row in figures]
        shade = "lightgrey" if name == BETWEEN else f"C{color % 10}"
        axis.bar([named(row) for row in figures], heights, bottom=below, label=name, color=shade)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axis.set(ylabel="us a token", xlabel="prompts x tokens")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    record = report.provenance("scripts/bench_prefill", arguments, report.ROOT)
    record |= {"implementation": options.implementation, "torch": []}
    figures: list[Row] = []
    with Progress(console=notes, redirect_stdout=False, transient=True) as progress:
        task = progress.add_task("making the model", total=2 + len(options.prompts))
        lm = make_model(options)
        record["model"] = {"name": lm.name, "dtype": jnp.dtype(lm.dtype).name, "config": config_json(lm.config)}
        mixers = softmax_mixers(lm)
        with ThreadPoolExecutor(1) as beside:  # lowering needs no GPU
            progress.update(task, advance=1, description="lowering")
            if mixers and not options.no_torch:
                heads = mixers[0].heads, mixers[0].kv_heads, mixers[0].head_dim
                theirs = beside.submit(measure_torch, "prompts", [(*sizes, *heads) for sizes in options.prompts])
                readings = [Reading(ask(lm, number, tokens, options.seed)) for number, tokens in options.prompts]
                record["torch"] = theirs.result()
            else:
                readings = [Reading(ask(lm, number, tokens, options.seed)) for number, tokens in options.prompts]
        progress.update(task, advance=1, description="compiling")
        record["compile_s"] = compile_all(readings)
        for reading, (number, tokens) in zip(readings, options.prompts, strict=True):
            progress.update(task, advance=1, description=f"{number} prompts of {tokens} tokens")
            row = measure(reading, number, tokens, options)
            if mixers:
                shape = number, tokens, mixers[0].heads, mixers[0].kv_heads, mixers[0].head_dim
                row |= measure_attention(shape, record["model"]["dtype"], lm.target)
            figures.append(row)
            if options.json:
                report.write(options.json, record | {"figures": figures})
    show(console, figures, record)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return 0
