"""Measures decoding and verification of a softmax layer, or one of latent attention, against the time that it needs: to
read its keys and values, or if that is longer to multiply them."""

import argparse
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxbuf.attention.latent import LatentPages, append_and_attend_latent
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.axes import Array
from jaxbuf.bench import report
from jaxbuf.bench.attention_figures import SIZES, describe, judge, plot, show
from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.measure import bandwidths, device_time, measure_torch, timed, worst_errors
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, number, output, whole
from jaxbuf.serving.own_drafter import MOST_DRAFTS

DTYPES = ("bfloat16", "float16", "float32")
FOOTPRINT, MOST_LAYERS = 160e6, 40  # what all layers read together exceeds twice the H200's L2, 60 MB
MOST_COMPILED = 8  # layers of XLA's path, of which each is tens of kernels
COMPILERS = 6  # programs compiled at once
STEPS = {"gpu": 16, "xla": 4}  # of one run
CHECKED = 8, 2048, 7  # rows and tokens at most of what is compared before; how many times less most rows hold
BOUNDS = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 1e-5}  # a rounding of the output, and some of its terms
HEADS = (16, 4, 256)  # Qwen3.5-4B's; Llama-3.1-8B's are 32, 8, 128
LATENT, RANK = (32, 1, 576), 512  # Kimi-Linear's: to absorbed queries latents are the keys of one head
OWN_DIM = 128  # numbers of a head's keys and values that are made from a latent, as in all models with that rank
# Queries and outputs are rounded once more, and a head's outputs have few numbers.
LATENT_BOUNDS = BOUNDS | {"bfloat16": 8e-3}
JOIN = "join_segments"  # the kernel that joins what workers found of rows that they share
PRODUCTS_PER_S = 800e12  # operations in 2-byte numbers that an H100 or H200 gets done


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program.

    Attributes:
      heads, kv_heads, head_dim: Of queries, and of keys and values.
      batch: Rows.
      context: Committed tokens of each row, but of the first.
      longest: Committed tokens of the first row.
      time: New tokens of each row.
      dtype: Of queries, keys, values and pages.
      page_size: Tokens of a page.
      implementation: "gpu" or "xla".
      rank: Of latent attention, whose latents are the keys, and the first so many numbers of them the values; None:
        keys and values have pages of their own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    longest: int
    time: int
    dtype: str = "bfloat16"
    page_size: int = 16
    implementation: str = "gpu"
    rank: int | None = None

    @property
    def start(self) -> np.ndarray:
        """Committed tokens of each row, int32 [batch]."""
        return np.where(np.arange(self.batch) == 0, self.longest, self.context).astype(np.int32)

    @property
    def pages(self) -> np.ndarray:
        """Pages of each row, those of its new tokens included: int32 [batch]."""
        return (self.start + self.time + self.page_size - 1) // self.page_size

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.rank is None else self.rank

    @property
    def bound(self) -> float:
        """The largest relative error of a head's output."""
        return (BOUNDS if self.rank is None else LATENT_BOUNDS)[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        pools = 2 if self.rank is None else 1
        return pools * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """What one call moves: the keys and values of the committed tokens, those of the new ones, which come in and
        are appended, queries and outputs."""
        new, committed = self.batch * self.time, int(np.sum(self.start, dtype=np.int64))
        query = self.heads * (self.head_dim + self.value_dim) * jnp.dtype(self.dtype).itemsize
        return self.token_bytes * (committed + 2 * new) + query * new

    @property
    def operations(self) -> int:
        """Multiplications and additions of queries with keys, and of weights with values."""
        committed = int(np.sum(self.start, dtype=np.int64))
        return 2 * self.time * self.heads * (self.head_dim + self.value_dim) * (committed + self.batch * self.time)

    @property
    def layers(self) -> int:
        """How many take turns, if nobody says otherwise."""
        most = MOST_COMPILED if self.implementation == "xla" else MOST_LAYERS
        return int(min(most, max(2, -(-FOOTPRINT // self.bytes))))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench attention",
        description=__doc__,
        epilog="What is timed is append_and_attend, one layer's call of a step: the new tokens' keys and values are "
        "appended to pages in random order, and queries attend to them and to all that is there. The floor is its "
        "bytes (keys and values read, those of new tokens in and out, queries and outputs) over the read bandwidth, "
        "that of a sum over 4 GiB in the same run; achieved is floor / time. Device time is that of the kernel, and of "
        "the one that joins what its workers found of rows that they share (second_us in the JSON), from jax.profiler, "
        "and wall time that of a loop of steps on the device, in which layers with memory of their own take turns, so "
        f"many that the L2 holds nothing of them (of XLA's path at most {MOST_COMPILED}); rest_us in "
        "the JSON is the loop's other kernels (integers, which a model's layers share). XLA's path is all kernels of "
        "its loop. Of latent attention append_and_attend_latent is timed, and its floor is at least its products' time "
        f"at {PRODUCTS_PER_S / 1e12:.0f} TFLOP/s. The kernel's outputs, on a small case, are compared with those of "
        "XLA's path in float32 first; the exit status is 1, and nothing is timed, if they differ. With --peers torch's "
        "scaled_dot_product_attention is "
        "timed over contiguous keys and values of the same tokens, by its flash and cuDNN backends, in a process of "
        "its own; it has no rows of different lengths. The exit status is 1 if it can't.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--heads", type=whole(1), default=None, help=f"of queries; default: the usual, or {HEADS[0]}")
    parser.add_argument("--kv-heads", type=whole(1), default=None, help=f"default: the usual, or {HEADS[1]}")
    parser.add_argument("--head-dim", type=whole(1), default=None, help=f"default: the usual, or {HEADS[2]}")
    parser.add_argument(
        "--rank",
        type=whole(1),
        default=None,
        help="latent attention of this rank, and no other cases; --head-dim are then the numbers of a latent, and the "
        f"defaults {LATENT[0]} heads and {LATENT[2]}",
    )
    parser.add_argument("--batches", default=None, help="rows of each case instead of the usual, with commas")
    parser.add_argument(
        "--contexts",
        default=None,
        help="committed tokens of a row, as many numbers as --batches, with commas; 1024:65536 is one row of 65536 "
        "among rows of 1024",
    )
    parser.add_argument("--tokens", default="1,5", help="new tokens of a row, with commas: 1, or more to verify drafts")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--page-size", type=whole(1), default=16, help="tokens of a page")
    parser.add_argument("--implementation", choices=("gpu", "xla"), default="gpu", help="beside XLA's path")
    parser.add_argument("--layers", type=whole(1), default=None, help="in turn; default: for over twice the L2")
    parser.add_argument("--peers", action="store_true", help="also time torch's attention, if it is installed")
    parser.add_argument("--budget", type=number(0), default=330, help="seconds after which nothing new is started")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument("--profile", type=folder, default=None, help="a folder for the traces, one folder for each")
    options = parser.parse_args(arguments)
    options.tokens = report.whole_numbers(parser, "--tokens", options.tokens)
    if max(options.tokens) > 1 + MOST_DRAFTS:
        parser.error(f"--tokens must be at most {1 + MOST_DRAFTS} each, got {max(options.tokens)}")
    if options.batches is not None:
        options.batches = report.whole_numbers(parser, "--batches", options.batches)
    if options.contexts is not None:
        options.contexts = [_context(parser, options.contexts, word) for word in options.contexts.split(",")]
    if (options.batches is None) != (options.contexts is None):
        parser.error("--batches and --contexts must be given together")
    counts = [len(each or ()) for each in (options.batches, options.contexts)]
    if counts[0] != counts[1]:
        parser.error(f"--batches and --contexts must name as many cases, got {counts[0]} and {counts[1]}")
    given, latent = (options.heads, options.kv_heads, options.head_dim), options.rank is not None
    options.own_heads = None
    if any(given) or latent:
        usual_heads = LATENT if latent else HEADS
        options.own_heads = tuple(size or usual for size, usual in zip(given, usual_heads, strict=True))
        if options.own_heads[0] % options.own_heads[1]:
            parser.error("--heads must be a multiple of --kv-heads, got {} and {}".format(*options.own_heads))
        _, kv_heads, numbers = options.own_heads
        if latent and (kv_heads != 1 or options.rank > numbers):
            parser.error(f"--rank must be at most --head-dim ({numbers}), with one KV head, got {options.rank}")
    report.check_plots(parser, options.json)
    if options.implementation == "gpu" and jax.default_backend() != "gpu":
        parser.error(f"the kernel needs a GPU, this is a {jax.default_backend()}: try --implementation xla")
    return options


def _context(parser: argparse.ArgumentParser, words: str, word: str) -> tuple[int, int]:
    """The tokens of most rows and of the first one."""
    numbers = report.whole_numbers(parser, "--contexts", word.replace(":", ","))
    if len(numbers) > 2:
        parser.error(f"--contexts must be numbers, or two of them with a colon between, got {words!r}")
    return numbers[0], numbers[-1]


def plan(options: argparse.Namespace) -> list[Case]:
    """What is measured: the kernel, decoding first, and then XLA's path, which a short budget leaves out."""
    heads, llama, sizes = options.own_heads or HEADS, (32, 8, 128), options.batches
    if sizes is not None:
        shapes = [(*heads, batch, *context) for batch, context in zip(sizes, options.contexts, strict=True)]
    else:
        usual = (128, 1024), (64, 8192), (8, 65_536), (1, 1024)
        shapes = [(*heads, batch, context, context) for batch, context in usual]
        if options.own_heads is None:
            shapes += [(*llama, 64, 8192, 8192)]
        shapes += [(*heads, 64, 1024, 65_536)]
    every = [dict(zip(SIZES, shape, strict=True)) | {"rank": options.rank} for shape in shapes]
    if sizes is None and options.own_heads is None:
        latents = [(*LATENT, batch, context, context) for batch, context in ((128, 1024), (64, 8192))]
        every += [dict(zip(SIZES, shape, strict=True)) | {"rank": RANK} for shape in latents]
    names = dict.fromkeys((options.implementation, "xla"))
    given = {"dtype": options.dtype, "page_size": options.page_size}
    every = [sizes | {"time": time} for time in options.tokens for sizes in every]
    return [Case(**sizes, **given, implementation=name) for name in names for sizes in every]


def make_table(case: Case, rng: np.random.Generator) -> np.ndarray:
    """The pages of every slot, in random order: int32 [batch + 1, max_pages]; slot 0 has none."""
    pages = case.pages
    table = np.zeros((case.batch + 1, int(pages.max())), np.int32)
    there = np.arange(table.shape[1])[None] < pages[:, None]
    table[1:][there] = 1 + rng.permutation(int(pages.sum()))
    return table


@functools.partial(jax.jit, static_argnums=0)
def make_pool(case: Case, key: jax.Array) -> PagedKV | LatentPages:
    """Random pages of a layer."""
    shape = 1 + int(case.pages.sum()), case.page_size, case.kv_heads, case.head_dim
    if case.rank is not None:
        return LatentPages(jax.random.normal(key, shape, case.dtype), case.rank)
    return PagedKV(*(jax.random.normal(each, shape, case.dtype) for each in jax.random.split(key)))


@functools.partial(jax.jit, static_argnums=0)
def make_tokens(case: Case, key: jax.Array) -> tuple[Array, Array, Array]:
    """Random q [batch, time, heads, head_dim], k and v [batch, time, kv_heads, head_dim].

    Of latent attention: q [batch, time, heads, OWN_DIM + shared], latents [batch, time, head_dim] and
    up [heads, 2 · OWN_DIM, rank], as in `append_and_attend_latent`.
    """
    new = case.batch, case.time
    shapes = [(*new, number, case.head_dim) for number in (case.heads, case.kv_heads, case.kv_heads)]
    if case.rank is not None:
        query = OWN_DIM + case.head_dim - case.rank
        shapes = (*new, case.heads, query), (*new, case.head_dim), (case.heads, 2 * OWN_DIM, case.rank)
    keys = jax.random.split(key, 3)
    a, b, c = (jax.random.normal(each, shape, case.dtype) for each, shape in zip(keys, shapes, strict=True))
    return a, b, c if case.rank is None else c * jnp.asarray(case.rank**-0.5, case.dtype)


@functools.partial(jax.jit, static_argnums=0)
def attend(
    case: Case, pool: PagedKV | LatentPages, table: Array, tokens: tuple[Array, Array, Array]
) -> tuple[Array, PagedKV | LatentPages]:
    """One layer's call."""
    slots = jnp.arange(1, case.batch + 1, dtype=jnp.int32)
    where = {"slots": slots, "start": jnp.asarray(case.start), "implementation": case.implementation}
    if isinstance(pool, LatentPages):
        q, latents, up = tokens
        return append_and_attend_latent(q, latents, pool, up, table, **where)
    return append_and_attend(*tokens, pool, table, **where)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def run(case: Case, pools, outs, table, tokens, steps):
    """All steps on the device, every layer in each; the outputs are kept, or XLA would leave them out."""

    def body(_, carry):
        done = [attend(case, pool, table, tokens) for pool in carry[0]]
        return tuple(pool for _, pool in done), tuple(out for out, _ in done)

    return jax.lax.fori_loop(0, steps, body, (pools, outs))


def compile_case(case: Case, layers: int) -> Any:
    """The compiled program of a case."""
    key = jax.random.key(0)
    pool = jax.eval_shape(functools.partial(make_pool, case), key)
    tokens = jax.eval_shape(functools.partial(make_tokens, case), key)
    table = jax.ShapeDtypeStruct((case.batch + 1, int(case.pages.max())), jnp.int32)
    out, _ = jax.eval_shape(functools.partial(attend, case), pool, table, tokens)
    return run.lower(case, (pool,) * layers, (out,) * layers, table, tokens, np.int32(0)).compile()


def new_key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**31)))


def measure(case: Case, layers: int, options: argparse.Namespace, program: Callable, rng: np.random.Generator) -> Row:
    """The row of a case, whose compiled program it runs, without what the bandwidth says of it."""
    tokens, table = make_tokens(case, new_key(rng)), jax.device_put(make_table(case, rng), jax.devices()[0])
    pools = tuple(make_pool(case, new_key(rng)) for _ in range(layers))
    out, _ = jax.eval_shape(functools.partial(attend, case), pools[0], table, tokens)
    carry, steps = (pools, tuple(jnp.zeros(out.shape, out.dtype) for _ in pools)), STEPS[case.implementation]
    del pools  # they are donated

    def call(carry):
        return jax.block_until_ready(program(*carry, table, tokens, np.int32(steps)))

    sizes = case.implementation, case.heads, case.head_dim, case.batch, case.context, case.longest, case.time
    name = "-".join(map(str, sizes))
    _, wall, kernels = timed(call, carry, options.profile and options.profile / name)
    calls = steps * layers
    row = dataclasses.asdict(case) | {"layers": layers, "steps": steps, "device_us": None}
    row |= {"wall_us": 1e6 * wall / calls} | device_time(kernels, calls, case.implementation, JOIN)
    return row | {"us": row["device_us"] or row["wall_us"]}


def check(cases: Sequence[Case], rng: np.random.Generator) -> tuple[dict[str, float], dict[str, float]]:
    """The largest relative error of an output of a head against XLA's path in float32, by heads and tokens, from cases
    of few and ragged rows; and what it may be."""
    batch, most, less = CHECKED
    found, bounds = {}, {}
    for case in cases:
        name = f"{case.heads}/{case.kv_heads} heads x {case.head_dim}, {case.time} tokens"
        if name in found:
            continue
        longest = min(most, case.longest)
        sizes = {"batch": min(batch, case.batch), "context": max(1, longest // less), "longest": longest}
        case = dataclasses.replace(case, **sizes)
        tokens, table = make_tokens(case, new_key(rng)), jnp.asarray(make_table(case, rng))
        pool = make_pool(case, new_key(rng))
        wide = dataclasses.replace(case, dtype="float32", implementation="xla")
        exact, _ = attend(wide, *jax.tree.map(_widen, (pool, table, tokens)))
        out, _ = attend(case, pool, table, tokens)
        found[name] = float(worst_errors(out, exact))
        bounds[name] = case.bound
    return found, bounds


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def time_torch(cases: Sequence[Case]) -> list[tuple[Case, Row]]:
    """torch's rows, of the cases whose rows are all of one length, and not of latents; each with its case."""
    every = dict.fromkeys(dataclasses.replace(case, implementation="torch") for case in cases)
    same = [case for case in every if case.context == case.longest and case.rank is None]
    names = "batch", "context", "heads", "kv_heads", "head_dim", "time", "layers", "dtype"
    rows = measure_torch("attention", [[getattr(case, name) for name in names] for case in same])
    return [(case, dataclasses.asdict(case) | row) for row in rows for case in [same[row.pop("case", 0)]]]


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status.

    It is 1 if the kernel's results are wrong, or nothing came of torch though it was asked for.
    """
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    began, cases = time.perf_counter(), plan(options)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng, figures, left_out = np.random.default_rng(seed), [], []
    record = report.provenance("scripts/bench_attention", arguments, report.ROOT)
    record |= {"seed": seed, "page_size": options.page_size, "dtype": options.dtype}

    def keep(row: Row) -> None:
        figures.append(row)
        notes.print(describe(row), soft_wrap=True)
        if options.json:
            report.write(options.json, record | {"targets": judge(figures), "left_out": left_out, "figures": figures})

    with Progress(console=notes, redirect_stdout=False, transient=True) as progress, contextlib.ExitStack() as stack:
        task = progress.add_task("comparing", total=len(cases) + options.peers)
        record |= bandwidths()  # while nothing is compiled
        read = record["read_bytes_per_s"]
        first = [case for case in cases if case.implementation == options.implementation]
        layers = {case: options.layers or case.layers for case in cases}
        compilers = futures.ThreadPoolExecutor(COMPILERS)
        stack.callback(compilers.shutdown, wait=False, cancel_futures=True)
        programs = {case: compilers.submit(compile_case, case, layers[case]) for case in cases}
        errors, bounds = check(first, rng)
        record["errors"] = errors
        if any(not error <= bounds[name] for name, error in errors.items()):
            expected = max(bounds.values())
            console.print(f"WRONG: at most {expected} is expected, got {errors}; nothing is timed", soft_wrap=True)
            return 1
        notes.print(f"read {read / 1e12:.2f} TB/s; largest relative error {max(errors.values(), default=0):.1e}")
        progress.update(task, description="compiling")
        # All before the first is timed: what is compiled meanwhile would hold up the host, and be in the traces.
        futures.wait(programs.values(), timeout=max(0.0, options.budget / 2 - (time.perf_counter() - began)))
        for case in cases:
            progress.update(task, description=f"{case.implementation}, {case.batch} x {case.longest}, {case.time}")
            if time.perf_counter() - began > options.budget:
                left_out.append(dataclasses.asdict(case))
                continue
            try:
                row = measure(case, layers[case], options, programs[case].result(), rng)
            except Exception as error:  # what one shape cannot do must not cost the figures of the others
                first = (str(error).splitlines() or [""])[0]
                row = dataclasses.asdict(case) | {"error": f"{type(error).__name__}: {first}"}
            keep(add_floor(row, case, read))
            progress.advance(task)
        compilers.shutdown(wait=False, cancel_futures=True)
        if options.peers:
            progress.update(task, description="torch")
            for case, row in time_torch(cases):
                keep(add_floor(row, case, read))
    show(console, figures, judge(figures))
    if left_out:
        words = f"--budget {options.budget:.0f} was spent: {len(left_out)} of {len(cases)} programs left out"
        console.print(words, soft_wrap=True)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return int(options.peers and not any("us" in row for row in figures if row["implementation"].startswith("torch")))


def add_floor(row: Row, case: Case, read: float) -> Row:
    """The row with its bytes and its floor, if it was measured.

    The floor is the time of its bytes, at `read` bytes a second, and of latent attention that of its products, if they
    take longer: every head multiplies the same latents.
    """
    if "us" not in row:
        return row
    row, floor = row | {"bytes": case.bytes}, case.bytes / read
    if case.rank is not None:
        row |= {"operations": case.operations}
        floor = max(floor, case.operations / PRODUCTS_PER_S)
    return row | {"floor_us": 1e6 * floor, "achieved": 1e6 * floor / row["us"]}
