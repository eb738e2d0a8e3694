"""What the benchmark programs take on the command line: checked early, and what is wrong is one line."""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxbuf.terminal import check_writable, errors_told, parse_number, parse_whole

type Main = Callable[[Sequence[str]], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, which begins with the option."""

    def error(self, message: str):
        message = re.sub(r"^argument (\S+?)(?:/\S+)?: must", r"\1 must", message)
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


def whole(least: int, *most: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number of at least `least`, and at most `most` if that is given."""

    def parse(text: str) -> int:
        try:
            return parse_whole(text, least, *most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a finite number of at least, or above, `least`."""

    def parse(text: str) -> float:
        try:
            return parse_number(text, least, above=above)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def output(text: str) -> Path:
    """The type of an option that names a JSON file to write, with perhaps a plot beside it."""
    path = Path(text)
    try:
        if path.suffix == ".png":
            raise ValueError(f"must not end in .png, which is the plot's name, got {text!r}")
        check_writable(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def folder(text: str) -> Path:
    """The type of an option that names a folder to write to."""
    try:
        check_writable(Path(text), folder=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def errors_are_lines(main: Main) -> Main:
    """Makes what a user can cause one line on standard error and the exit status 2."""

    @functools.wraps(main)
    def wrapped(arguments: Sequence[str]) -> int:
        program = main.__module__.rpartition(".")[2]
        with errors_told(lambda line, _: sys.stderr.write(f"jaxbuf bench {program}: error: {line}\n")):
            return main(arguments)
        return 2

    return wrapped
