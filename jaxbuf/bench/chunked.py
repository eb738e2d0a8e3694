"""Measures how fast a layer's recurrence reads whole prompts, beside XLA's path and flash-linear-attention's chunks."""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxbuf.axes import Array
from jaxbuf.bench import report
from jaxbuf.bench.kernels import LAYERS, RECURRENCES, SIZES
from jaxbuf.bench.measure import bandwidths, device_time, measure_torch, timed
from jaxbuf.bench.parser import Parser, errors_are_lines, number, output, whole
from jaxbuf.recurrence import RecurrenceSpec, chunked
from jaxbuf.terminal import print_table

type Row = dict[str, Any]

USUAL = "1x2048,1x8192,1x32768,4x8192,8x2048"
CALLS = 5  # of a run
CHECKED = 512  # tokens that are compared with XLA's path in float32
BOUND = 2**-7  # of outputs in bfloat16: of their rounding, and what it is measured against
SPARED = 5.0  # seconds of a call on XLA's path: it is left out where it would take longer, by that of fewer tokens


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench chunked",
        description=__doc__,
        epilog="What is timed is jaxbuf.recurrence.chunked of one layer, in bfloat16, from an empty state, all its "
        "kernels together (from jax.profiler), and the wall clock's time of a call among others. The floor is the time "
        "that q, k, v, the gates, the outputs and the states take at the bandwidth measured in the same run; the "
        "products take longer. Outputs are compared with XLA's path in float32 first: the exit status is 1, and "
        "nothing is timed, if they differ. With --peers the same is done by flash-linear-attention's "
        "chunk_gated_delta_rule, where torch, triton and fla-core are installed: its own error is measured against "
        "the recurrence token by token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--family", choices=LAYERS, default="gdn", help="of the recurrence")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole(1), default=None, help="instead of the family's")
    parser.add_argument("--prompts", default=USUAL, help="NUMBERxTOKENS read together, separated by commas")
    parser.add_argument(
        "--implementations", default=None, help="separated by commas; default: gpu,xla, or xla on a CPU"
    )
    parser.add_argument("--peers", action="store_true", help="time flash-linear-attention, too")
    parser.add_argument("--budget", type=number(0), default=200, help="seconds after which nothing new is started")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the inputs")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    options = parser.parse_args(arguments)
    options.prompts = report.prompt_sizes(parser, options.prompts)
    there = ("gpu", "xla") if jax.default_backend() == "gpu" else ("xla",)
    options.implementations = ",".join(there) if options.implementations is None else options.implementations
    if unknown := [name for name in options.implementations.split(",") if name not in there]:
        parser.error(f"--implementations must be of those that run here, {', '.join(there)}, got {unknown[0]!r}")
    options.implementations = options.implementations.split(",")
    for name, size in LAYERS[options.family].items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    if options.peers and options.family != "gdn":
        parser.error(
            f"--peers must come with --family gdn, which flash-linear-attention is timed of, got {options.family}"
        )
    report.check_plots(parser, options.json)
    return options


def make_inputs(spec: RecurrenceSpec, rows: int, tokens: int, seed: int) -> list[Array | None]:
    """q, k (normalised) and v in bfloat16; log_decay and beta."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shape = rows, tokens, spec.key_heads, spec.key_dim
    q, k = (jax.random.normal(key, shape, jnp.float32) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (rows, tokens, spec.heads, spec.value_dim), jnp.bfloat16)
    decays = spec.decay_shape(rows, tokens)
    log_decay = None if decays is None else -0.05 * jnp.abs(jax.random.normal(keys[3], decays, jnp.float32))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], v.shape[:3], jnp.float32))
    return [q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v, log_decay, beta]


def moved_bytes(spec: RecurrenceSpec, rows: int, tokens: int) -> int:
    """Bytes of what every way of computing it reads and writes."""
    halves = 2 * spec.key_heads * spec.key_dim + 2 * spec.heads * spec.value_dim
    decays = spec.decay_shape(rows, tokens)
    gates = rows * tokens * spec.heads + (0 if decays is None else int(np.prod(decays)))
    return 2 * rows * tokens * halves + 4 * gates + 4 * rows * int(np.prod(spec.state_shape))


def check(spec: RecurrenceSpec, implementation: str, seed: int) -> dict[str, float]:
    """Largest errors relative to the largest number, of outputs and states, against XLA's path in float32."""
    inputs = make_inputs(spec, 2, CHECKED, seed)
    wide = [None if x is None else x.astype(jnp.float32) for x in inputs]
    exact = jax.jit(partial(chunked, spec, None, implementation="xla"))(*wide)
    found = jax.jit(partial(chunked, spec, None, implementation=implementation))(*inputs)
    return {
        name: float(jnp.max(jnp.abs(x.astype(jnp.float32) - y)) / jnp.max(jnp.abs(y)))
        for name, x, y in zip(("outputs", "states"), found, exact, strict=True)
    }


def measure(spec: RecurrenceSpec, implementation: str, rows: int, tokens: int, seed: int) -> Row:
    inputs = make_inputs(spec, rows, tokens, seed)
    compute = jax.jit(lambda *inputs: chunked(spec, None, *inputs, implementation=implementation))
    program = compute.lower(*inputs).compile()

    def call(_):
        found = [program(*inputs) for _ in range(CALLS)]
        return jax.block_until_ready(found[-1])

    _, wall, kernels = timed(call, None, None)
    row = {"wall_us": 1e6 * wall / CALLS} | device_time(kernels, CALLS, "xla")
    row |= {"us": row.get("device_us") or row["wall_us"]}
    named = sorted(((sum(taken) / CALLS, name) for name, taken in kernels.items()), reverse=True)
    return row | {"kernels": {name: us for us, name in named[:4]}}


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    sizes = options.heads, options.key_heads, options.dim, options.value_dim
    spec, began = RecurrenceSpec(*sizes, *RECURRENCES[options.family]), time.perf_counter()
    record = report.provenance("scripts/bench_chunked", arguments, report.ROOT)
    record |= {"family": options.family, "spec": dataclasses.asdict(spec), "seed": options.seed, "dtype": "bfloat16"}
    figures: list[Row] = []

    def keep(row: Row) -> None:
        figures.append(row)
        if options.json:
            report.write(options.json, record | {"figures": figures})

    cases = [(how, *prompts) for prompts in options.prompts for how in options.implementations]
    with Progress(console=notes, redirect_stdout=False, transient=True) as progress:
        task = progress.add_task("comparing", total=len(cases) + 1)
        record["errors"] = {how: check(spec, how, options.seed) for how in options.implementations if how != "xla"}
        wrong = [errors for errors in record["errors"].values() if not errors["outputs"] <= BOUND]
        if wrong:
            console.print(f"WRONG: outputs may be off by {BOUND}, got {wrong[0]['outputs']}; nothing is timed")
            return 1
        record |= bandwidths()
        before: dict[str, float] = {}
        for how, rows, tokens in cases:
            progress.update(task, advance=1, description=f"{how}, {rows} x {tokens} tokens")
            case = {"implementation": how, "rows": rows, "tokens": tokens}
            if time.perf_counter() - began > options.budget:
                keep(case | {"error": f"--budget {options.budget:.0f} was spent"})
                continue
            if before.get(how, 0.0) * rows * tokens > SPARED:
                keep(case | {"error": f"left out: a call would take more than {SPARED:.0f} s"})
                continue
            try:
                row = measure(spec, how, rows, tokens, options.seed)
            except Exception as error:  # one that does not run must not cost the figures of the others
                keep(case | {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"})
                continue
            before[how] = 1e-6 * row["wall_us"] / (rows * tokens)
            nbytes = moved_bytes(spec, rows, tokens)
            keep(case | row | {"bytes": nbytes, "floor_us": 1e6 * nbytes / record["read_bytes_per_s"]})
        if options.peers:
            progress.update(task, advance=1, description="flash-linear-attention")
            peers = measure_torch("chunked", [[*prompts, *sizes] for prompts in options.prompts])
            for row in peers:
                keep({"implementation": "flash-linear-attention"} | row)
    show(console, spec, figures, record)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return 0


def show(console: Console, spec: RecurrenceSpec, figures: Sequence[Row], record: Row) -> None:
    caption = (
        f"{spec.heads} heads of {spec.value_dim} on {spec.key_heads} keys of {spec.key_dim}, {record['device']}; "
        "floor: of the bytes that go in and out"
    )
    table = Table(caption=caption)
    for name in ("prompts", "implementation", "us", "floor", "tokens/s", "launches"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    for row in figures:
        if "us" not in row:
            console.print(f"{row['implementation']}: {row['error']}", soft_wrap=True)
            continue
        tokens, floor = row["rows"] * row["tokens"], f"{row['floor_us']:.0f}" if "floor_us" in row else ""
        speed, launches = f"{1e6 * tokens / row['us']:,.0f}", f"{row.get('launches', 0):.0f}"
        table.add_row(
            f"{row['rows']} x {row['tokens']}", row["implementation"], f"{row['us']:.0f}", floor, speed, launches
        )
    print_table(table, console)
    for how, errors in record["errors"].items():
        words = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        console.print(f"{how}: largest errors against float32: {words}", soft_wrap=True)


def plot(figures: Sequence[Row], path: Path) -> None:
    """Bars: nanoseconds a token by each implementation, at each size; a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed_rows = [row for row in figures if "us" in row]
    prompts = list(dict.fromkeys((row["rows"], row["tokens"]) for row in timed_rows))
    names = list(dict.fromkeys(row["implementation"] for row in timed_rows))
    figure, axis = pyplot.subplots(figsize=(3 + 1.3 * len(prompts), 4.5))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        of_name = {(row["rows"], row["tokens"]): row["us"] for row in timed_rows if row["implementation"] == name}
        places = [j for j, each in enumerate(prompts) if each in of_name]
        heights = [1e3 * of_name[prompts[j]] / (prompts[j][0] * prompts[j][1]) for j in places]
        axis.bar([j + (i - (len(names) - 1) / 2) * width for j in places], heights, width, label=name)
    axis.set(yscale="log", ylabel="ns a token", xlabel="prompts x tokens", xticks=range(len(prompts)))
    axis.set_xticklabels([f"{rows} x {tokens:,}" for rows, tokens in prompts])
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
