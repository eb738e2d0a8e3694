"""Measures the first generation of a shape: in a new process, from the compilation cache, and with a drafter more."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxbuf.bench import report
from jaxbuf.bench.model_options import TOO_LARGE, add_model_options, asked_model, is_too_large, read_model_options
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.compilation import cache_compilations
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import SamplingParams
from jaxbuf.serving.generation import generate
from jaxbuf.terminal import print_table

type Row = dict[str, Any]

PROGRAMS = ("begin_prompts", "read_layer", "end_prompts", "generate_tokens")
# What JAX tells of each program that it makes, by the name that it has here.
PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
FOUND = "/jax/compilation_cache/cache_hits"
CHILD = "import json, sys; from jaxbuf.bench.compile import measure; print(sys.argv[1] + measure(*sys.argv[2:]))"
PROCESSES = ("cold", "cached")
FIGURES = "figures: "  # before them in what a measuring process prints


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench compile",
        description=__doc__,
        epilog="Two processes run one after the other, with one compilation cache, which is empty at first and removed "
        "at the end. Each makes the model, calls jaxbuf.generate on random prompts, greedily, and calls it again with "
        "--drafter. A time is the wall clock's from the call to the last token; making the model is not part of it. "
        "The programs are begin_prompts, read_layer and end_prompts, which read prompts, and generate_tokens, which "
        "decodes; read_layer are those of all kinds of layers together. JAX traces each and lowers it, and XLA "
        "compiles it, or it comes out of the cache. For a GPU, what was lowered is kept there, too: the time of "
        "lowering is then part of tracing, or tracing is reading what was kept. XLA compiles them side by side, so "
        "that a generation takes less than the sum. The second call of the same generation is what is left without "
        "all that.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--prompts", type=whole(1), default=8, help="that are continued at once")
    parser.add_argument("--tokens", type=whole(1), default=100, help="of each prompt")
    parser.add_argument("--new-tokens", type=whole(2), default=64, help="that each is continued by")
    parser.add_argument("--drafter", choices=("ngram", "none"), default="ngram", help="of the second generation")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    read_model_options(parser, options)
    return options


def make_model(asked: Mapping[str, Any]) -> LanguageModel:
    """The model that the options ask for.

    Raises:
      ValueError: A random model of full size on a CPU.
    """
    if is_too_large(asked["model"], asked["sizes"]):
        raise ValueError(f"{TOO_LARGE} --layers")
    return asked_model(asked["model"], asked["shape"], asked["sizes"], asked["dtype"], progress=False)


def measure(settings: str, process: str, cache: str) -> str:
    """The figures of this process, which did nothing yet, as a line of JSON.

    Args:
      settings: The options, as JSON.
      process: The name that the figures are given, one of PROCESSES.
      cache: The folder of the compilation cache.
    """
    asked = json.loads(settings)
    cache_compilations(cache)
    told: list[tuple[str, float, str]] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        told.append((event, duration_secs, str(facts.get("fun_name", ""))))

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(lambda event, **facts: told.append((event, 0.0, "")))
    lm = make_model(asked)
    jax.block_until_ready(lm.model.norm[...])
    shape, greedy = (asked["prompts"], asked["tokens"]), SamplingParams(temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(0, lm.vocab_size, shape)

    def timed(drafter: Any) -> float:
        began = time.perf_counter()
        generate(lm, prompts, asked["new_tokens"], greedy, drafter=drafter, progress=False)
        return time.perf_counter() - began

    rows = []
    for drafter in (None, *([] if asked["drafter"] == "none" else [asked["drafter"]])):
        told.clear()
        first = timed(drafter)
        programs, found = split(told), sum(event == FOUND for event, _, _ in told)
        row = {"process": process, "drafter": drafter, "first_s": first, "again_s": timed(drafter)}
        rows.append(row | {"programs": programs, "found_in_cache": found})
    device = jax.devices()[0].device_kind
    return json.dumps({"device": device, "model": lm.name, "dtype": lm.dtype.name, "figures": rows})


def split(told: Sequence[tuple[str, float, str]]) -> dict[str, dict[str, float]]:
    """Seconds of each part of each program, from events, their seconds, and the functions that they are of."""
    found = {program: dict.fromkeys(PARTS.values(), 0.0) for program in PROGRAMS}
    for event, seconds, function in told:
        name = function.removeprefix("jit(").removesuffix(")")
        if event in PARTS and name in found:
            found[name][PARTS[event]] += seconds
    return found


def run(options: argparse.Namespace, process: str, cache: str) -> dict[str, Any]:
    """What `measure` finds in a process of its own.

    Raises:
      ValueError: It failed; with its error.
    """
    names = "model", "shape", "sizes", "dtype", "prompts", "tokens", "new_tokens", "drafter"
    settings = json.dumps({name: getattr(options, name) for name in names})
    command = [sys.executable, "-c", CHILD, FIGURES, settings, process, cache]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FIGURES)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the {process} process failed: {last.removeprefix('ValueError: ')}")
    return json.loads(lines[-1].removeprefix(FIGURES))


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="jaxbuf-compile-") as cache:
        found = []
        for process in PROCESSES:
            with notes.status(f"the {process} process"):
                found.append(run(options, process, cache))
    rows, made = [row for each in found for row in each["figures"]], found[0]
    where = f"{made['model']}, {made['dtype']}, {options.prompts} prompts of {options.tokens} tokens, {made['device']}"
    table = Table(caption=f"seconds; {where}")
    for name in ("process", "drafter", "first", "again", "program", "trace", "lower", "compile or load"):
        table.add_column(name, justify="left" if name in ("process", "drafter", "program") else "right")
    for row in rows:
        whole_s = [row["process"], row["drafter"] or "", f"{row['first_s']:.2f}", f"{row['again_s']:.2f}"]
        for name, parts in row["programs"].items():
            table.add_row(*whole_s, name, *(f"{seconds:.2f}" for seconds in parts.values()))
            whole_s = [""] * 4
    print_table(table, console)
    if options.json:
        settings = {name: getattr(options, name) for name in ("shape", "sizes", "prompts", "tokens", "new_tokens")}
        source = report.provenance("scripts/bench_compile", arguments, report.ROOT) | {"device": made["device"]}
        told = {name: made[name] for name in ("model", "dtype")}
        report.write(options.json, source | settings | told | {"figures": rows})
        report.tell_written(console, options.json)
    return 0
