"""Measures how a step chooses its tokens from the logits, greedy and sampled, with top_k and top_p and without."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.bench.measure import bandwidths, device_time, timed
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.progress import progress_bar
from jaxbuf.serving import SamplingParams
from jaxbuf.serving.sampling import History, choose, narrow, pack
from jaxbuf.serving.token_masks import mask_words
from jaxbuf.terminal import print_table

type Row = dict[str, Any]

PEAKED, FLAT = 8.0, 1.0  # standard deviations of the logits
GREEDY = "greedy"
SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    GREEDY: (PEAKED, {"temperature": 0.0}),
    "temperature": (PEAKED, {"temperature": 0.8}),
    "min_p": (PEAKED, {"temperature": 0.8, "min_p": 0.05}),
    "top_k and top_p": (PEAKED, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    "top_p": (PEAKED, {"temperature": 0.8, "top_p": 0.95}),
    "flat top_p": (FLAT, {"temperature": 0.8, "top_p": 0.95}),
    "flat top_k and top_p": (FLAT, {"temperature": 0.8, "top_k": 1000, "top_p": 0.95}),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench sample",
        description=__doc__,
        epilog="What is measured is what every step of generate_tokens does with its logits, float32, in a compiled "
        "loop of --steps: the wall clock's time of a step, the median of three runs, and its kernels' time. The logits "
        f"are random, normal: of standard deviation {PEAKED:g} a few tokens hold nearly all of the probability, of "
        f"{FLAT:g} many thousands share it. The floor is what reading the logits once takes at the bandwidth that the "
        "run measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batches", default="32,256", help="rows that choose at once, separated by commas")
    parser.add_argument("--vocab", type=whole(2), default=248_320, help="tokens: Qwen3.5's")
    parser.add_argument("--steps", type=whole(1), default=20)
    parser.add_argument("--seed", type=whole(0), default=0, help="of the logits")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    options.batches = report.whole_numbers(parser, "--batches", options.batches)
    return options


@jax.jit
def choose_often(logits, allowed, sampling, history, steps):
    """The last of the tokens that `steps` steps choose from the same logits."""

    def step(i, last):
        # Each step depends on the one before: nothing of it can be computed ahead of the loop.
        now, last = jax.lax.optimization_barrier((logits, last))
        return choose(now, allowed, sampling, history, history.length + i + 0 * last)[0]

    return jax.lax.fori_loop(0, steps, step, jnp.zeros(logits.shape[0], jnp.int32))


@jax.jit
def kept(logits, sampling):
    """How many tokens the settings leave of each row."""
    return jnp.sum(narrow(logits, sampling) > -jnp.inf, axis=1, dtype=jnp.int32)


def measure(setting: str, batch: int, options: argparse.Namespace) -> Row:
    spread, params = SETTINGS[setting]
    logits = spread * jax.random.normal(jax.random.key(options.seed), (batch, options.vocab), jnp.float32)
    sampling = pack([SamplingParams(**params, seed=seed) for seed in range(batch)])
    length = jnp.full(batch, 8, jnp.int32)
    history = History(jnp.zeros((batch, 64), jnp.int32), length, length, jnp.full((batch, 1), -1, jnp.int32))
    allowed = jnp.full((batch, mask_words(options.vocab)), -1, jnp.int32)

    def call(_):
        return jax.block_until_ready(choose_often(logits, allowed, sampling, history, jnp.int32(options.steps)))

    _, wall, kernels = timed(call, None, None)
    left = 1.0 if setting == GREEDY else float(np.mean(kept(logits, sampling)))
    taken = device_time(kernels, options.steps, "xla")
    found = {"batch": batch, "setting": setting} | params | {"logits_std": spread, "kept": left}
    return found | {"ms": 1e3 * wall / options.steps} | taken | {"bytes": logits.nbytes}


def judge(rows: list[Row], read_bytes_per_s: float) -> list[Row]:
    """Adds the floor, and what each setting takes over the greedy choice at the same batch."""
    greedy = {row["batch"]: row["ms"] for row in rows if row["setting"] == GREEDY}
    return [
        row | {"floor_ms": 1e3 * row["bytes"] / read_bytes_per_s, "over_greedy_ms": row["ms"] - greedy[row["batch"]]}
        for row in rows
    ]


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console = parse(arguments), Console(highlight=False)
    rows: list[Row] = []
    with progress_bar(len(options.batches) * len(SETTINGS), None) as told:
        told("the bandwidth", 0)
        bandwidth = bandwidths()
        for batch in options.batches:
            for setting in SETTINGS:
                told(f"{setting}, {batch} rows", len(rows))
                rows.append(measure(setting, batch, options))
    rows = judge(rows, bandwidth["read_bytes_per_s"])
    device = jax.devices()[0].device_kind
    table = Table(caption=f"a vocabulary of {options.vocab:,}, {device}; the floor: the logits are read once")
    for name in ("rows", "setting", "tokens kept", "ms", "over greedy", "kernels", "launches", "floor"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        kernels = f"{1e-3 * row['device_us']:.3f}" if "device_us" in row else ""
        launches = f"{row['launches']:.0f}" if "launches" in row else ""
        times = f"{row['ms']:.3f}", f"{row['over_greedy_ms']:.3f}", kernels, launches, f"{row['floor_ms']:.3f}"
        table.add_row(str(row["batch"]), row["setting"], f"{row['kept']:,.0f}", *times)
    print_table(table, console)
    if options.json:
        settings = {name: getattr(options, name) for name in ("vocab", "steps", "seed")}
        source = report.provenance("scripts/bench_sample", arguments, report.ROOT)
        report.write(options.json, source | settings | bandwidth | {"figures": rows})
        report.tell_written(console, options.json)
    return 0
