"""Measures what ways to keep keys cost in answers and in likelihood, against the bytes that they really hold."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxbuf.bench import admission_figures, report
from jaxbuf.bench.admission_groups import Group, task_groups, text_group
from jaxbuf.bench.admission_reading import Reading, count_different, read
from jaxbuf.bench.admission_ways import (
    Way,
    file_ways,
    full_way,
    local_ways,
    quest_ways,
    random_ways,
    streaming_ways,
)
from jaxbuf.bench.parser import Parser, errors_are_lines, output, whole
from jaxbuf.bench.texts import check_text
from jaxbuf.models.gates import admission_of
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.progress import Report, progress_bar
from jaxbuf.terminal import parse_number
from jaxbuf.train.retrieval_plan import PLANS

TAIL = 32  # last tokens that are decoded one by one, to see that answers are the same


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench write_gate",
        description=(__doc__ or "").splitlines()[0],
        epilog="Two measurements. `tasks`: generated examples with answers far back (scripts/train_retrieval trains a "
        "model for them), each answer being right if the model finds it most probable with the true tokens before it; "
        "by task, and by the oracle share, which is the share of an example's tokens that are worth keeping. `text`: "
        "bits a byte of held-out text; without --text that is the end of Python's standard library that jaxbuf "
        "train-gate leaves out. Compared are all keys (full), each file of --gates, random keys (random), by default "
        "as many as each file of gates kept, and a window with the first tokens (local), on request at positions that "
        "never grow (streaming), too, and Quest over all keys and over those of gates. Sequences are read by a "
        "prefill into the memory that generation uses, and the bytes are those of that memory's arrays afterwards: "
        "whole pages for each layer and head, the latest tokens' pages, gates, tables, lists and counters, as a share "
        "of the same for all keys; streaming and Quest read whole sequences instead, and the bytes are those of the "
        "keys that they choose from. --decoded reads the end of some examples one token at a time, as generation does, "
        "and counts answers that differ, with the first file of gates or else at random. Lines are compared at "
        "--budgets by linear interpolation between their points; the exit status is 1 if a file of gates misses the "
        "bounds that are printed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("measurement", nargs="?", choices=("tasks", "text"), default="tasks", help="what is read")
    parser.add_argument("--model", default="demo", help='"demo", or a directory in Hugging Face format')
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="to compute in")
    parser.add_argument(
        "--gates",
        nargs="+",
        default=[],
        metavar="NAME=FILE[,FILE...]",
        help="gates from jaxbuf train-gate or scripts/train_retrieval: files of one recipe that differ in their seed; "
        "names with one word before a colon are one line (gates:0.1=a,b gates:0.3=c,d); a FILE alone has its own name",
    )
    parser.add_argument("--plan", choices=sorted(PLANS), default="full", help="of the tasks, and of defaults for them")
    parser.add_argument("--thresholds", default=None, help="of gates, with commas; default: each file's own")
    parser.add_argument("--head-shares", default=None, help="of heads that keep all keys, in files of heads' scores")
    parser.add_argument("--rates", default=None, help="of random keys, with commas; default: those that gates kept")
    parser.add_argument("--window", type=whole(1), default=None, help="of gates and random keys, not the files' own")
    parser.add_argument("--local-windows", default=None, help="of local attention, with commas")
    parser.add_argument("--streaming-windows", default=None, help="of StreamingLLM, with commas; default: none")
    parser.add_argument("--quest-budgets", default=None, help="keys that a query reads, with commas; default: none")
    parser.add_argument("--budgets", default=None, help="shares of the full memory's bytes to compare at, with commas")
    parser.add_argument("--examples", type=whole(1), default=None, help="of each task and seed; default: the plan's")
    parser.add_argument("--text", type=Path, nargs="+", help="files that are read as text; see below")
    parser.add_argument("--length", type=whole(16), default=2048, help="tokens of a stretch of text")
    parser.add_argument("--stretches", type=whole(1), default=8, help="of the text, evenly spread over it")
    parser.add_argument("--rows", type=whole(1), default=8, help="sequences that are read at once")
    parser.add_argument("--decoded", type=whole(0), default=4, help="examples whose end is decoded, too")
    parser.add_argument(
        "--json", type=output, default=None, help="write the figures to this file, and a plot beside it"
    )
    options = parser.parse_args(arguments)
    options.gates = _named_files(parser, options.gates)
    plan, text = PLANS[options.plan], options.measurement == "text"
    sizes = (options.length // 16, options.length // 8, options.length // 4, options.length // 2)
    defaults = {"thresholds": (), "head_shares": plan.head_shares, "rates": (), "budgets": plan.budgets}
    for name, default in defaults.items():
        words = getattr(options, name)
        setattr(options, name, default if words is None else _numbers(parser, name, words))
    options.local_windows = (
        report.whole_numbers(parser, "--local-windows", options.local_windows)
        if options.local_windows
        else (sizes if text else plan.local_windows)
    )
    for name in ("streaming_windows", "quest_budgets"):
        words, option = getattr(options, name), f"--{name.replace('_', '-')}"
        setattr(options, name, report.whole_numbers(parser, option, words) if words else [])
    if options.text:
        check_text(parser, options)
    report.check_plots(parser, options.json)
    return options


def measure(way: Way, groups: Sequence[Group], full: Sequence[np.ndarray] | None, rows: int, tell: Report):
    """The figures of a way on every group, as a dict each, and the bytes of every sequence.

    Args:
      way: What is measured.
      groups: What is read.
      full: The bytes of every group's sequences with all keys; None: this way keeps them all.
      rows: How many sequences are read at once.
      tell: Called with every group.
    """
    figures, held = [], []
    for number, group in enumerate(groups):
        tell(f"{way.line}, {way.setting}", number, len(groups))
        reading = _read_all(way, group.tokens, rows)
        held.append(reading.bytes)
        whole_bytes = reading.bytes if full is None else full[number]
        right = (reading.best[:, :-1] == group.tokens[:, 1:]) & group.asked[:, :-1]
        asked = group.asked.sum(1)
        figure: dict[str, Any] = {name: getattr(way, name) for name in ("line", "kind", "setting")}
        figure |= {
            "gate_seed": way.seed,
            "seed": group.seed,
            "task": group.task,
            "accuracy": float(right.sum() / asked.sum()),
            "nats": float(-np.sum(reading.logprobs * group.asked) / asked.sum()),
            "bytes": float(np.mean(reading.bytes)),
            "bytes_share": float(np.mean(reading.bytes / whole_bytes)),
            "kept": float(np.nanmean(reading.kept)) if np.isfinite(reading.kept).any() else 1.0,
        }
        if group.oracle is not None:
            columns = {
                "oracle": group.oracle,
                "accuracy": right.sum(1) / asked,
                "bytes_share": reading.bytes / whole_bytes,
            }
            rows_of = zip(*columns.values(), strict=True)
            figure["by_example"] = [
                {name: round(float(x), 4) for name, x in zip(columns, row, strict=True)} for row in rows_of
            ]
        figures.append(figure)
    return figures, held


def _read_all(way: Way, tokens: np.ndarray, rows: int) -> Reading:
    """Reads all sequences, so many at a time; the last batch is filled up with the first sequences."""
    rows, parts = min(rows, len(tokens)), []
    for start in range(0, len(tokens), rows):
        index = np.arange(start, start + rows) % len(tokens)
        parts.append(Reading(*(x[: len(tokens) - start] for x in read(way, tokens[index]))))
    return Reading(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def compare(lm: LanguageModel, groups: Sequence[Group], options: argparse.Namespace) -> Iterator[tuple[Way, list]]:
    """Each way that the options name, with its figures: full attention first, then files, random keys and windows."""
    plan = PLANS[options.plan]
    files = file_ways(lm, options.gates, options.thresholds, options.head_shares, options.window)
    with progress_bar(None) as tell:
        figures, full = measure(full_way(lm), groups, None, options.rows, tell)
        yield full_way(lm), figures
        kept = []
        for way in files:
            figures, _ = measure(way, groups, full, options.rows, tell)
            if way.kind == "gates":
                kept.append(round(float(np.mean([figure["kept"] for figure in figures])), 3))
            yield way, figures
        rates = options.rates or sorted(set(kept)) or plan.random_rates
        window = options.window or (admission_of(files[0].lm).window if files else plan.window)
        rules = *random_ways(lm, rates, window), *local_ways(lm, options.local_windows, plan.sinks)
        streaming = streaming_ways(lm, options.streaming_windows, plan.sinks)
        first = [way for way in files if way.kind == "gates" and way.seed == 0]
        for way in (*rules, *streaming, *quest_ways([full_way(lm), *first], options.quest_budgets)):
            figures, _ = measure(way, groups, full, options.rows, tell)
            yield way, figures


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status: 1 if gates miss a bound, 2 if the model, a file
    or the text does not serve."""
    options, console = parse(arguments), Console(highlight=False)
    plan, text = PLANS[options.plan], options.measurement == "text"
    lm = load(options.model, dtype=options.dtype)
    settings: dict[str, Any] = {"measurement": options.measurement, "model": lm.name, "dtype": options.dtype}
    bytes_a_token = None
    if text:
        _check_length(lm, "--length", options.length)
        group, bytes_a_token, told = text_group(lm, options.text, options.length, options.stretches)
        groups = [group]
        settings |= {"text": told, "length": options.length, "stretches": options.stretches}
    else:
        if lm.vocab_size < plan.vocabulary.size:
            raise ValueError(f"--plan must have at most {lm.vocab_size} tokens for {lm.name}, got {options.plan}")
        _check_length(lm, "--plan", plan.length)
        groups = task_groups(plan, options.examples or plan.examples)
        settings |= {"plan": options.plan, "examples": options.examples or plan.examples}
    console.print(f"{lm.name}, {options.dtype}, on {jax.devices()[0].device_kind}", soft_wrap=True, markup=False)
    figures, ways = [], []
    for way, found in compare(lm, groups, options):
        figures += found
        ways.append(way)
    decoded = _decoded(ways, groups, options.decoded)
    points = admission_figures.points(figures, None if text else plan.tasks, bytes_a_token)
    verdicts = admission_figures.verdicts(points, plan, text=text)
    admission_figures.show(console, points, options.budgets, plan, text=text)
    if decoded:
        told = "{line}, {setting}: of {answers} answers {different} differ when they are decoded one by one"
        console.print(told.format(**decoded), soft_wrap=True)
    for told, held in verdicts.items():
        console.print(f"{'holds' if held else 'DOES NOT HOLD'}: {told}", soft_wrap=True)
    if options.json:
        record = report.provenance("scripts/eval_write_gate", arguments, report.ROOT) | settings
        record |= {"points": points, "decoded": decoded, "verdicts": verdicts, "figures": figures}
        report.write(options.json, record)
        admission_figures.plot(points, options.json.with_suffix(".png"), plan, text=text)
        report.tell_written(console, options.json, plot=True)
    return 0 if all(verdicts.values()) else 1


def _decoded(ways: Sequence[Way], groups: Sequence[Group], number: int) -> dict[str, Any]:
    """What the end of some examples is when it is decoded, with the first gates, or else the first rule."""
    if not number:
        return {}
    way = next((way for way in ways if way.kind == "gates"), ways[1])
    tokens, asked = (np.concatenate([getattr(group, name) for group in groups]) for name in ("tokens", "asked"))
    some = np.linspace(0, len(tokens) - 1, min(number, len(tokens))).astype(int)
    different, answers = count_different(way, tokens[some], asked[some], TAIL)
    return {"line": way.line, "setting": way.setting, "answers": answers, "different": different}


def _check_length(lm: LanguageModel, option: str, length: int) -> None:
    if length > lm.max_length:
        raise ValueError(f"{option} must have at most {lm.max_length} tokens in a row for {lm.name}, got {length}")


def _named_files(parser: Parser, words: Sequence[str]) -> dict[str, list[Path]]:
    """The files by name; ends the program with one line where one is not there."""
    found: dict[str, list[Path]] = {}
    for word in words:
        name, equals, files = word.partition("=")
        paths = [Path(file) for file in (files if equals else word).split(",")]
        if missing := [path for path in paths if not path.is_file()]:
            parser.error(f"--gates must name files, there is no {missing[0]}")
        found.setdefault(name if equals else paths[0].stem, []).extend(paths)
    return found


def _numbers(parser: Parser, option: str, words: str) -> tuple[float, ...]:
    """The numbers of an option, separated by commas; ends the program with one line if one is below 0."""
    try:
        return tuple(parse_number(word, 0) for word in words.split(","))
    except ValueError:
        parser.error(f"--{option.replace('_', '-')} must be numbers of at least 0, separated by commas, got {words!r}")
