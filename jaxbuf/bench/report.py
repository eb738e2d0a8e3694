"""Recorded figures, and where they come from: script, command, date, device and versions."""

import argparse
import importlib.util
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxbuf.terminal import parse_whole

PACKAGES = ("jax", "flax", "optax", "numpy")
ROOT = Path(__file__).resolve().parent.parent.parent


def read_kernels(parser: argparse.ArgumentParser, option: str, path: Path) -> dict[str, Any]:
    """The record that `jaxbuf bench kernels` wrote; ends the program with an error if it is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and "figures" in record:
            return record
        error = "it has no figures"
    except (OSError, ValueError) as found:
        error = str(found)
    parser.error(f"{option} must be the JSON of jaxbuf bench kernels, got {path}: {error}")


def check_plots(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Ends the program with one line if a plot would go beside `path` and matplotlib is not there to draw it."""
    if path and importlib.util.find_spec("matplotlib") is None:
        parser.error("--json draws a plot, which needs matplotlib: pip install 'jaxbuf[plots]'")


def whole_numbers(parser: argparse.ArgumentParser, option: str, words: str) -> list[int]:
    """The numbers of an option, separated by commas; ends the program with one line if they are none from 1 on."""
    try:
        return [parse_whole(word, 1) for word in words.split(",")]
    except ValueError:
        parser.error(f"{option} must be whole numbers of at least 1, separated by commas, got {words!r}")


def prompt_sizes(parser: argparse.ArgumentParser, words: str) -> list[tuple[int, int]]:
    """How many prompts and of how many tokens, of --prompts; ends the program with one line if that says something
    else."""

    def read(word: str) -> tuple[int, int]:
        number, _, tokens = word.partition("x")  # without an x there are no tokens, which are no whole number
        return parse_whole(number, 1), parse_whole(tokens, 1)

    try:
        return [read(word) for word in words.split(",")]
    except ValueError:
        form = "NUMBERxTOKENS, whole numbers from 1 on, separated by commas"
        parser.error(f"--prompts must be {form}, got {words!r}")


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes a record as JSON, into a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def tell_written(console: Console, path: Path, *, plot: bool = False) -> None:
    """Says where a record, and perhaps its plot, was written to; the file's name stays in one piece."""
    console.print(f"wrote {path}{' and its plot' * plot}", soft_wrap=True, markup=False, highlight=False)


def provenance(script: str, arguments: Sequence[str], root: Path) -> dict[str, Any]:
    """What a reader needs to repeat a measurement; no folder of the machine it was made on.

    Args:
      script: The script's path in the repository.
      arguments: As it was called; absolute paths become relative to `root`, or bare names outside it.
      root: The repository.

    Returns:
      script, command, date (UTC), device and versions, ready for JSON.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "script": script,
        "command": " ".join([script, *(_portable(word, root) for word in arguments)]),
        "date": datetime.now(UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }


def _portable(word: str, root: Path) -> str:
    """A word of a command with each of its paths, of which commas may separate several, as in `provenance`."""
    option, equals, value = word.rpartition("=")
    parts = []
    for part in value.split(","):
        path = Path(part)
        if path.is_absolute():
            part = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        parts.append(part)
    return option + equals + ",".join(parts)
