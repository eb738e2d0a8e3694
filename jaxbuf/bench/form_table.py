"""Writes the table that `form="auto"` goes by, from the figures of `jaxbuf bench kernels`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxbuf.bench import report
from jaxbuf.bench.kernel_figures import find
from jaxbuf.serving import forms

FIGURES = report.ROOT / "benchmarks" / "kernels.json"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/make_forms",
        description=__doc__,
        epilog="It takes the parts decode (limit 16) and recurrent, at every batch where both were measured, and puts "
        "them in the place of what the table has for the same device and heads. Between two measured batches of which "
        "only the larger one is faster buffered, auto is the recurrent form: measure small batches too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("figures", type=Path, nargs="?", default=FIGURES, help="the JSON of jaxbuf bench kernels")
    parser.add_argument("--table", type=Path, default=forms.TABLE, help="the table to write to")
    options = parser.parse_args(arguments)
    options.record = report.read_kernels(parser, "figures", options.figures)
    return options


def row(record: dict[str, Any]) -> dict[str, Any]:
    """The table's row of a record of `jaxbuf bench kernels`.

    Raises:
      ValueError: It has no batch at which both forms were measured.
    """
    figures = record["figures"]
    pairs = []
    for batch in sorted({figure["batch"] for figure in figures if figure["part"] == "decode"}):
        recurrent, decode = (find(figures, part, batch=batch) for part in ("recurrent", "decode"))
        if recurrent and decode:
            pairs.append((batch, recurrent, decode))
    if not pairs:
        raise ValueError("the figures must have the parts decode and recurrent at one batch at least, and have not")
    crossover = record.get("kv_only_crossover") or {}
    kv = {"kv_entries": crossover.get("us"), "kv_entries_by_bytes": crossover.get("bytes")}
    return {
        "device": record["device"],
        "heads": record["heads"],
        "key_heads": record["key_heads"],
        "key_dim": record["dim"],
        "value_dim": record["dim"],
        "limit": pairs[0][2]["limit"],
        "batches": [batch for batch, _, _ in pairs],
        "recurrent_us": [round(recurrent["us"], 2) for _, recurrent, _ in pairs],
        "buffered_us": [round(decode["us"], 2) for _, _, decode in pairs],
        **{name: round(number, 1) for name, number in kv.items() if number is not None},
        "command": record["command"],
        "date": record["date"],
        "versions": record["versions"],
    }


def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console = parse(arguments), Console(highlight=False)
    new = row(options.record)
    table = json.loads(options.table.read_text(encoding="utf-8"))["measured"] if options.table.exists() else []
    same = ("device", *forms.SIZES)
    table = [old for old in table if any(old[name] != new[name] for name in same)] + [new]
    report.write(options.table, {"measured": sorted(table, key=lambda old: [old[name] for name in same])})
    least = forms.from_dict(new).buffered_from
    words = "recurrent at every batch" if least is None else f"buffered from batch {least} on"
    console.print(f"{new['device']}, {new['heads']} heads: auto is {words}; wrote {options.table}", soft_wrap=True)
    return 0
