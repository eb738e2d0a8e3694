"""Reads what the hardware counts while a decoding kernel runs, by Nsight Compute: where warps wait, and for what."""

import argparse
import collections
import csv
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxbuf.bench import kernels, report
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, output, whole
from jaxbuf.bench.processes import started
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.terminal import print_table

TOOL = "ncu"
PATIENCE = 300  # seconds for it: it runs the launch some forty times
LAYERS = 2  # pools in turn, so that a launch finds nothing of its own in the L2
CHILD = "import sys; from jaxbuf.bench.counters import launch; launch(sys.argv[1])"
FORMATS = ("float32", "bfloat16", "split", "split8")
# What is shown of the tool's page of details: its names, and ours.
SHOWN = {
    "Duration": "time",
    "DRAM Throughput": "of the memory's peak bandwidth",
    "L2 Hit Rate": "of the L2's accesses that hit",
    "Issued Warp Per Scheduler": "instructions issued a cycle, by a scheduler",
    "Active Warps Per Scheduler": "warps of a scheduler",
    "Registers Per Thread": "registers of a thread",
    "Local Memory Spilling Requests": "accesses to spilled registers",
}
UNITS = ("us", "ms", "%")  # The others repeat the name.
# Why a warp does not issue, in the tool's words, and what that means.
WAITS = {
    "long_sb": "a load from global memory, or a copy that a barrier tells of",
    "short_sb": "shared memory, or an exponential",
    "wait": "the instruction before, whose length is fixed",
    "barrier": "the warpgroup's other threads",
    "no_inst": "its instructions, which are not in their cache",
    "not_selected": "another warp, which was chosen",
    "mio": "a place in the queue of shared memory",
    "lg": "a place in the queue of global memory",
    "math": "the unit, which another warp uses",
    "dispatch": "the dispatcher",
    "branch_resolving": "the target of a branch",
    "imc": "a constant",
    "drain": "its last stores",
    "selected": "nothing: it issues",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of the machine code.

    Attributes:
      text: As the disassembler writes it.
      executed: How often warps executed it.
      samples: How often a warp was seen at it.
      waits: Of these, how often for each reason, by the tool's name.
    """

    text: str
    executed: int
    samples: int
    waits: dict[str, int]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench counters",
        description=__doc__,
        epilog=f"Needs {TOOL} on the PATH, and the right to read counters. A process of its own makes random memory as "
        "jaxbuf bench kernels does, rows folding in turn, and runs a layer's steps, of which one launch is measured: "
        "it is run again and again, so that the time is not that of jaxbuf bench kernels. A warp is looked at every "
        "so many cycles; a wait is the share of these samples in which it could not issue for that reason. Below are "
        "the instructions at which warps were seen most, each with the one before, which often says what they wait "
        "for.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--family", choices=tuple(kernels.LAYERS), default="gdn", help="of the recurrence")
    kernels.add_sizes(parser)
    parser.add_argument("--batch", type=whole(1), default=128, help="rows")
    parser.add_argument("--tokens", type=whole(1, 16), default=1, help="new tokens of a row")
    parser.add_argument("--accepted", type=whole(1, 16), default=None, help="of these; default: the larger half")
    parser.add_argument("--limit", type=whole(1), default=None, help="default: 16, for several tokens 32; 1: recurrent")
    parser.add_argument("--state-dtype", choices=FORMATS, default="float32", help="of the checkpoints")
    parser.add_argument("--instructions", type=whole(0), default=12, help="how many to show")
    parser.add_argument("--keep", type=folder, default=None, help=f"a folder for {TOOL}'s own report and its pages")
    parser.add_argument("--json", type=output, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    kernels.fill_sizes(parser, options)
    if options.accepted is None:
        options.accepted = (options.tokens + 1) // 2
    if options.accepted > options.tokens:
        parser.error(f"--accepted must be at most --tokens ({options.tokens}), got {options.accepted}")
    if options.limit is None:
        options.limit = 16 if options.tokens == 1 else 32
    if jax.default_backend() != "gpu":
        parser.error(f"the kernels need a GPU, this is a {jax.default_backend()}")
    if shutil.which(TOOL) is None:
        parser.error(f"needs Nsight Compute, whose {TOOL} is not on the PATH")
    return options


def make_case(asked: dict[str, Any]) -> tuple[RecurrenceSpec, kernels.Case]:
    """The layer and the case of `jaxbuf bench kernels` that the options ask for."""
    heads, key_heads, key_dim, value_dim = (asked[name] for name in kernels.SIZES)
    spec = RecurrenceSpec(heads, key_heads, key_dim, value_dim, *kernels.RECURRENCES[asked["family"]])
    accepted = (asked["accepted"],)
    case = kernels.Case("counters", asked["batch"], asked["tokens"], accepted, asked["limit"], asked["state_dtype"])
    return spec, case


def launch(settings: str) -> None:
    """Runs whole fold cycles of a layer's steps; settings: the options, as JSON."""
    spec, case = make_case(json.loads(settings))
    rng, steps = np.random.default_rng(0), case.steps(1)
    integers = jax.device_put(kernels.schedule(case, kernels.loads(case)[0], steps), jax.devices()[0])
    tokens = kernels.make_tokens(spec, case, rng)
    outs = tuple(jnp.zeros_like(tokens[2]) for _ in range(LAYERS))
    pools = kernels.make_pools(spec, case, LAYERS, rng)
    jax.block_until_ready(kernels.run(spec, case.implementation, pools, outs, integers, tokens))


def run(asked: dict[str, Any], directory: Path) -> tuple[str, str]:
    """The tool's pages of details and of the machine code, also as files of the directory beside its own report.

    Raises:
      ValueError: It failed; with its last line.
    """
    kept = directory / "launch"
    skipped = make_case(asked)[1].steps(1) * LAYERS // 2
    which = ["--kernel-name", "regex:mosaic_gpu", "--launch-skip", str(skipped), "--launch-count", "1"]
    how = ["--set", "full", "--clock-control", "none", "--cache-control", "none", "--force-overwrite", "-o", str(kept)]
    _call([TOOL, *which, *how, sys.executable, "-c", CHILD, json.dumps(asked)])
    report_file = kept.with_suffix(".ncu-rep")
    if not report_file.exists():
        raise ValueError(f"{TOOL} measured no launch of a kernel of ours")
    pages = []
    for name, suffix, options in (("details", ".txt", []), ("source", ".csv", ["--csv"])):
        page = _call([TOOL, "--import", str(report_file), "--page", name, *options])
        kept.with_suffix(suffix).write_text(page)
        pages.append(page)
    return pages[0], pages[1]


def _call(command: list[str]) -> str:
    # Without graphs of launches, which are measured as one.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    environment = os.environ | {"XLA_FLAGS": flags.strip()}
    # The program that the tool measures would go on without it, and keep the GPU's memory.
    with started(command, env=environment, stderr=subprocess.PIPE) as ran:
        try:
            out, errors = ran.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{TOOL} took longer than {PATIENCE} s") from None
    if ran.returncode:
        lines = (out + errors).strip().splitlines() or ["no message"]
        told = [line for line in lines if "==ERROR==" in line] or lines
        raise ValueError(f"{TOOL} failed: {told[-1]}")
    return out


def read_details(page: str) -> dict[str, tuple[float, str]]:
    """Numbers of the page of details by their names, each with its unit; the first where a name comes twice."""
    found: dict[str, tuple[float, str]] = {}
    for line in page.splitlines():
        words = re.match(r"    (\S.*?)  +(?:(\S+) +)?([\d,.]+)\s*$", line)
        if words:
            name, unit, value = words.groups()
            found.setdefault(name, (float(value.replace(",", "")), unit or ""))
    return found


def read_code(page: str) -> list[Instruction]:
    """The instructions of the page of the machine code.

    Raises:
      ValueError: The page has no such table.
    """
    rows = csv.reader(io.StringIO(page))
    names = next((row for row in rows if "Source" in row), None)
    if names is None:
        raise ValueError(f"{TOOL}'s page of the machine code has no column Source")
    found = []
    for row in rows:
        if len(row) != len(names):
            continue
        cells = dict(zip(names, row, strict=True))

        def count(name: str, cells: dict[str, str] = cells) -> int:
            return int(float(cells[name].replace(",", "") or 0))

        waits = {name[6:]: count(name) for name in names if re.fullmatch(r"stall_\w+", name)}
        code = Instruction(cells["Source"].strip(), count("Instructions Executed"), count("# Samples"), waits)
        found.append(code)
    return found


def summarize(details: dict[str, tuple[float, str]], code: Sequence[Instruction], most: int) -> dict[str, Any]:
    """The figures: what SHOWN names, shares of the samples by reason, and the instructions seen most."""
    figures: dict[str, Any] = {}
    for name, words in SHOWN.items():
        if name in details:
            value, unit = details[name]
            figures[words] = {"value": value, "unit": unit}
    if {"SM Active Cycles", "Elapsed Cycles"} <= details.keys():
        active = 100 * details["SM Active Cycles"][0] / details["Elapsed Cycles"][0]
        figures["of the time, multiprocessors work"] = {"value": active, "unit": "%"}
    samples = sum(each.samples for each in code) or 1
    reasons = collections.Counter[str]()
    for each in code:
        reasons.update(each.waits)
    order = sorted(range(len(code)), key=lambda i: -code[i].samples)[:most]
    seen = [
        {
            "line": i,
            "samples": code[i].samples / samples,
            "reason": max(code[i].waits, key=lambda name: code[i].waits[name]) if code[i].waits else "",
            "instruction": code[i].text,
            "before": code[i - 1].text if i else "",
        }
        for i in sorted(order)
    ]
    executed = sum(each.executed for each in code)
    waits = {name: count / samples for name, count in reasons.most_common() if count}
    return {"counters": figures, "lines": len(code), "executed": executed, "waits": waits, "instructions": seen}


def show(console: Console, asked: dict[str, Any], found: dict[str, Any]) -> None:
    """Prints the figures as tables."""
    tokens = f"{asked['tokens']} token{'s' * (asked['tokens'] > 1)}"
    sizes = f"{asked['heads']} x {asked['value_dim']}"
    words = f"{asked['family']} ({sizes}), batch {asked['batch']}, {tokens}, limit {asked['limit']}"
    table = Table(caption=f"one launch: {words}, {asked['state_dtype']}, {jax.devices()[0].device_kind}")
    table.add_column("", justify="left")
    table.add_column("", justify="right")
    for name, figure in found["counters"].items():
        table.add_row(name, f"{figure['value']:,.4g} {figure['unit'] if figure['unit'] in UNITS else ''}".strip())
    table.add_row("lines of machine code", str(found["lines"]))
    table.add_row("instructions of all warps", f"{found['executed']:,}")
    print_table(table, console)
    waits = Table(caption="what warps wait for, in shares of the samples")
    for name in ("share", "reason", ""):
        waits.add_column(name, justify="right" if name == "share" else "left")
    for name, share in found["waits"].items():
        waits.add_row(f"{share:.3f}", name, WAITS.get(name, ""))
    print_table(waits, console)
    if found["instructions"]:
        code = Table(caption="where warps were seen most, and the instruction before")
        for name in ("line", "share", "reason", "instruction", "before"):
            code.add_column(name, justify="right" if name in ("line", "share") else "left", overflow="fold")
        for row in found["instructions"]:
            share = f"{row['samples']:.3f}"
            code.add_row(str(row["line"]), share, row["reason"], row["instruction"], row["before"])
        print_table(code, console)


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True)
    names = "family", *kernels.SIZES, "batch", "tokens", "accepted", "limit", "state_dtype"
    asked = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="jaxbuf-counters-") as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        with notes.status(f"{TOOL} runs a launch again and again"):
            details, code = run(asked, directory)
    found = summarize(read_details(details), read_code(code), options.instructions)
    show(console, asked, found)
    if options.json:
        source = report.provenance("scripts/bench_counters", arguments, report.ROOT)
        report.write(options.json, source | asked | {"figures": found})
        report.tell_written(console, options.json)
    return 0
