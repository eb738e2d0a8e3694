"""Measures how far the buffered recurrence drifts from the fp32 recurrence over a long decode."""

import argparse
import contextlib
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, output, whole
from jaxbuf.compilation import without_cache
from jaxbuf.recurrence import RecurrenceSpec, buffered, recurrent
from jaxbuf.recurrence.state_format import SPLIT
from jaxbuf.serving.profiling import trace
from jaxbuf.terminal import print_table

DECAYS = (-0.001, -0.05, -0.5)
KEYS = ("iid", "correlated")
# Of each memory the dtype of the entries, and how the checkpoint is stored.
MEMORIES = (
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "bfloat16"),
    ("bfloat16", "split"),
    ("bfloat16", "split8"),
)
# The recurrences: their decay, and whether they have the delta rule.
FAMILIES: dict[str, tuple[Literal["head", "channel"], bool]] = {
    "gdn": ("head", True),
    "mamba2": ("head", False),
    "kda": ("channel", True),
}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
BOUND, GROWTH, WINDOW = 4e-3, 1.15, 512
ROUNDING = 1e-5  # errors below are those of float32 sums (without the delta rule entries lose nothing here)
SPLIT_MEAN, SPLIT_WORST = 3.5e-3, 8e-3  # what a split checkpoint may be off: its steps read bfloat16 numbers
IMPLEMENTATIONS = {"auto": ("auto",), "xla": ("xla",), "gpu": ("gpu",), "both": ("xla", "gpu")}
MORE = 1.1  # at most how many times XLA's drift the kernel's may be


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench drift",
        description=__doc__,
        epilog="The error of a step is |out - reference| / |reference| over all heads, where the reference is the fp32 "
        "recurrence on the same inputs, rounded to bfloat16 beforehand. An error that grows is an error that "
        "accumulates: with an fp32 or a split checkpoint it must not, with a bfloat16 one and weak decay it does. "
        "Of the families gdn is Gated DeltaNet, mamba2 has its decay and no delta rule, kda a decay for each key "
        "channel. "
        f"The exit status is 1 if what must hold does not; fewer than {2 * WINDOW} steps are not judged. With "
        "--implementation both the GPU kernel decodes the same inputs as XLA's compilation of the jnp path, and with "
        f"bf16 entries its error must be at most {MORE} times XLA's, in the first and in the last {WINDOW} steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    told = f"of the recurrence, with commas: {', '.join(FAMILIES)}; default: all"
    parser.add_argument("--families", default=None, help=told)
    parser.add_argument("--steps", type=whole(1), default=4096, help="tokens decoded, one at a time")
    parser.add_argument("--limit", type=whole(1), default=16, help="entries from which the ring folds")
    parser.add_argument("--heads", type=whole(1), default=32, help="value heads; Qwen3.5-4B has 32")
    parser.add_argument("--key-heads", type=whole(1), default=16)
    parser.add_argument("--dim", type=whole(1), default=128, help="of keys and values")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the inputs")
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default="auto",
        help="of extend: gpu is the kernel, both compares it with xla; auto is the kernel where it serves the shape",
    )
    parser.add_argument(
        "--json", type=output, default=None, help="write the figures to this file, and a plot beside it"
    )
    parser.add_argument(
        "--profile",
        type=folder,
        default=None,
        help="a folder for a jax.profiler trace, which `jaxbuf profile` sums up; every operation of every step is in "
        "it, so take few --steps",
    )
    options = parser.parse_args(arguments)
    options.families = tuple((options.families or ",".join(FAMILIES)).split(","))
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"--families must name some of {', '.join(FAMILIES)}, got {unknown[0]!r}")
    if options.heads % options.key_heads:
        parser.error(f"--heads must be a multiple of --key-heads, got {options.heads} and {options.key_heads}")
    report.check_plots(parser, options.json)
    if options.implementation in ("gpu", "both") and jax.default_backend() != "gpu":
        parser.error(f"--implementation {options.implementation} needs a GPU, this is a {jax.default_backend()}")
    return options


def inputs(spec: RecurrenceSpec, steps: int, mean_log_decay: float, keys: str, seed: int):
    """q, k, v (bfloat16), log_decay and beta of one sequence; correlated keys follow an AR(1) process at 0.95."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, steps, spec.key_heads, spec.key_dim))
    if keys == "correlated":
        for t in range(1, steps):
            k[t] = 0.95 * k[t - 1] + np.sqrt(1 - 0.95**2) * k[t]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((steps, spec.heads, spec.value_dim))
    channels = (spec.key_dim,) if spec.decay == "channel" else ()
    log_decay = mean_log_decay * rng.exponential(size=(steps, spec.heads, *channels))
    beta = 1 / (1 + np.exp(-rng.standard_normal((steps, spec.heads))))
    rounded = [jnp.asarray(x[None], jnp.bfloat16).astype(jnp.float32) for x in (q, k, v)]
    return (*rounded, *(jnp.asarray(x[None], jnp.float32) for x in (log_decay, beta)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3), static_argnames="implementation")
def decode(
    spec: RecurrenceSpec, limit: int, entry_dtype: str, state_dtype: str, tokens, *, implementation: str = "auto"
):
    """The outputs [steps, heads, value_dim] of the buffered form, one token at a time, folds included."""
    slot, one = jnp.ones(1, jnp.int32), jnp.ones(1, jnp.int32)
    cache = buffered.init(spec, slots=1, limit=limit, max_pending=1, entry_dtype=entry_dtype, state_dtype=state_dtype)

    def step(cache, token):
        token = (x[None, None] for x in token)
        out, cache = buffered.extend(spec, cache, *token, slots=slot, implementation=implementation)
        return buffered.commit(cache, one, slots=slot), out[0, 0]

    return jax.lax.scan(step, cache, tuple(x[0] for x in tokens))[1]


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status, 1 if what must hold does not."""
    options, console = parse(arguments), Console()
    window = min(WINDOW, max(1, options.steps // 2))
    rows, curves = [], {}
    implementations = IMPLEMENTATIONS[options.implementation]
    regimes = [(family, decay, keys) for family in options.families for decay in DECAYS for keys in KEYS]
    with without_cache() if options.profile else contextlib.nullcontext(), trace(options.profile):
        for family, decay, keys in track(regimes, "decoding", console=Console(stderr=True)):
            spec = RecurrenceSpec(options.heads, options.key_heads, options.dim, options.dim, *FAMILIES[family])
            tokens = inputs(spec, options.steps, decay, keys, options.seed)
            reference = np.asarray(jax.jit(recurrent, static_argnums=0)(spec, None, *tokens)[0][0], np.float64)
            norm = np.linalg.norm(reference, axis=(1, 2))
            for (entry, checkpoint), implementation in itertools.product(MEMORIES, implementations):
                out = decode(spec, options.limit, entry, checkpoint, tokens, implementation=implementation)
                error = np.linalg.norm(np.asarray(out, np.float64) - reference, axis=(1, 2)) / norm
                first, last = float(error[:window].mean()), float(error[-window:].mean())
                named = {"family": family, "mean_log_decay": decay, "keys": keys, "entries": entry}
                named |= {"checkpoint": checkpoint, "implementation": implementation}
                found = {"worst": float(error.max()), "mean": float(error.mean()), "first": first, "last": last}
                rows.append(named | found | {"growth": last / first})
                curves[family, decay, keys, entry, checkpoint] = error  # of both, the kernel's is drawn
    show(console, rows, window)
    if options.steps < 2 * WINDOW:
        verdicts = {}
        console.print(f"fewer than {2 * WINDOW} steps: nothing is judged", highlight=False)
    else:
        verdicts = judge([row for row in rows if row["implementation"] == implementations[-1]])
        if options.implementation == "both":
            verdicts |= compare(rows)
    for name, held in verdicts.items():
        console.print(f"{'holds' if held else 'DOES NOT HOLD'}: {name}", highlight=False)
    if options.json:
        names = ("families", "steps", "limit", "heads", "key_heads", "dim", "seed", "implementation")
        settings = {name: getattr(options, name) for name in names}
        source = report.provenance("scripts/bench_drift", arguments, report.ROOT)
        report.write(options.json, source | settings | {"figures": rows} | verdicts)
        plot(curves, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return 0 if all(verdicts.values()) else 1


def judge(rows: list[dict]) -> dict[str, bool]:
    """What must hold of an fp32 checkpoint with bfloat16 entries, and of the control that must fail it."""
    sound = [row for row in rows if (row["entries"], row["checkpoint"]) == ("bfloat16", "float32")]
    named = ("bfloat16", "bfloat16", -0.001, "correlated")
    names = ("entries", "checkpoint", "mean_log_decay", "keys")
    controls = [row for row in rows if tuple(row[name] for name in names) == named]
    split = [row for row in rows if row["checkpoint"] in SPLIT]
    return {
        f"fp32 checkpoint, bf16 entries: every step at most {BOUND}": all(row["worst"] <= BOUND for row in sound),
        f"... and no growth: last {WINDOW} steps at most {GROWTH} of the first": all(
            row["growth"] <= GROWTH or row["last"] <= ROUNDING for row in sound
        ),
        f"split checkpoints, bf16 entries: mean at most {SPLIT_MEAN}, every step at most {SPLIT_WORST}": all(
            row["mean"] <= SPLIT_MEAN and row["worst"] <= SPLIT_WORST for row in split
        ),
        f"... and no growth: last {WINDOW} steps at most {GROWTH} of the first (split)": all(
            row["growth"] <= GROWTH for row in split
        ),
        "the control (bf16 checkpoint, weak decay, correlated keys) exceeds one of them": all(
            row["worst"] > BOUND or row["growth"] > GROWTH for row in controls
        ),
    }


def compare(rows: list[dict]) -> dict[str, bool]:
    """What must hold of the kernel beside XLA's path: with float32 entries both errors are rounding, and not compared.

    The rows come in pairs, XLA's first.
    """
    pairs = [pair for pair in zip(rows[::2], rows[1::2], strict=True) if pair[0]["entries"] == "bfloat16"]
    ratios = [kernel[name] / xla[name] for xla, kernel in pairs for name in ("first", "last")]
    name = f"bf16 entries: the kernel's mean errors at most {MORE} times XLA's (at most {max(ratios):.3f})"
    return {name: max(ratios) <= MORE}


def show(console: Console, rows: list[dict], window: int) -> None:
    ends = f"first {window}", f"last {window}"
    headings = ("family", "decay", "keys", "entries", "state", "by", "worst", "mean", *ends, "growth")
    caption = "decay: mean log_decay; state: the checkpoint; by: the implementation; errors relative to fp32"
    table = Table(*headings, caption=caption)
    for row in rows:
        numbers = (f"{row[name]:.1e}" for name in ("worst", "mean", "first", "last"))
        dtypes = SHORT[row["entries"]], SHORT.get(row["checkpoint"], row["checkpoint"])
        words = row["family"], str(row["mean_log_decay"]), row["keys"], *dtypes, row["implementation"]
        table.add_row(*words, *numbers, f"{row['growth']:.2f}")
    for column in table.columns:
        column.no_wrap = True
    print_table(table, console)


def plot(curves: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(itertools.product(dict.fromkeys(family for family, *_ in curves), KEYS))
    size = 10, 2.6 * len(rows)
    figure, axes = pyplot.subplots(len(rows), len(DECAYS), figsize=size, sharex=True, sharey=True, layout="constrained")
    for (family, decay, keys, entry, checkpoint), error in curves.items():
        axis = axes[rows.index((family, keys)), DECAYS.index(decay)]
        smooth = np.convolve(error, np.full(64, 1 / 64), "valid")
        style = {"float32": "-", "bfloat16": "--"}.get(checkpoint, ":")
        axis.plot(
            smooth,
            style,
            color=f"C{MEMORIES.index((entry, checkpoint))}",
            label=f"{SHORT[entry]} entries, {SHORT.get(checkpoint, checkpoint)} checkpoint",
        )
        axis.set(yscale="log")
        axis.set_title(f"{family}, decay {decay}, {keys} keys", fontsize=10)
        axis.axhline(BOUND, color="grey", linewidth=0.8)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error of the output")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
