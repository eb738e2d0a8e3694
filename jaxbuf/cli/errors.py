"""From what goes wrong to one line on standard error that names what was typed, and exit code 2."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from jaxbuf.terminal import errors_told, text_console

logger = logging.getLogger("jaxbuf")

NARROWEST = 20  # columns of a terminal for which something is laid out
# What the library calls what the command line has under another name.
ALIASES = {
    "n": "samples",
    "stop_token_ids": "stop_token_id",
    "memory_bytes": "memory",
    "workspace_bytes": "workspace",
    "parameter_bytes": "parameters",
}


def error_console() -> Console:
    """Standard error, for everything but text."""
    return text_console(stderr=True)


def busy(doing: str) -> contextlib.AbstractContextManager:
    """On a terminal a line that moves while something takes its time, and is gone behind it; elsewhere nothing.

    Importing JAX is a part of it where a command does nothing else for seconds.
    """
    return error_console().status(doing)


def print_error(err: Console, message: str) -> None:
    """One line; the traceback is in the debug log."""
    err.print(Text.assemble(("error:", "bold red"), " ", " ".join(message.splitlines())))


def option_name(parameter: Any) -> str:
    """An option or an argument as it is typed and as the help shows it."""
    if parameter.param_type_name == "argument":
        return (parameter.metavar or parameter.name.upper()).strip("[]").removesuffix("...")
    return max(parameter.opts, key=len)


def as_typed(message: str, parameters: Iterable[Any]) -> str:
    """A library's message with the names of its arguments as those of a command's options.

    A name with an underscore is one wherever it stands as a word; others could be plain words, and are taken for the
    argument only where the message begins with them.
    """
    names = {parameter.name: option_name(parameter) for parameter in parameters}
    names |= {library: names[own] for library, own in ALIASES.items() if own in names}
    if "prompts" in names:  # the first of them may be the only one
        typed = names["prompts"]
        message = re.sub(
            r"\bprompts\[(\d+)\]", lambda found: f"{typed} {int(found[1]) + 1}" if int(found[1]) else typed, message
        )
    first, _, rest = message.partition(" ")
    name, colon = first.removesuffix(":"), ":" * first.endswith(":")
    message = f"{names.get(name, name)}{colon} {rest}" if rest else message
    words = "|".join(re.escape(name) for name in names if "_" in name)
    return re.sub(rf"(?<![\w./'\"-])({words})(?![\w/])", lambda found: names[found[1]], message) if words else message


@contextlib.contextmanager
def errors_exit(parameters: Iterable[Any] = ()) -> Iterator[None]:
    """What a user can cause ends the program with exit code 2 and one line, in the words of these options."""

    def tell(line: str, error: Exception):
        logger.debug("", exc_info=error)
        print_error(error_console(), as_typed(line, parameters))
        raise typer.Exit(2) from error

    with errors_told(tell):
        yield


class Command(TyperCommand):
    """A command whose errors are one line."""

    def invoke(self, ctx: Any) -> Any:
        with errors_exit(self.params):
            return super().invoke(ctx)


class Commands(TyperGroup):
    """The command line: also wrong usage is one line, and standard streams may be closed."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        _prepare_streams()
        _check_width()
        try:
            status = super().main(*arguments, standalone_mode=False, **settings)
            sys.stdout.flush()
        except typer.Abort:
            status = 1
        except BrokenPipeError:
            status = 1
        except OSError as error:
            print_error(error_console(), f"standard output: {error.strerror or error}")
            status = 2
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            status = _explain(error)
        except SystemExit as ending:
            status = ending.code
        if status:
            _drop_output()
        sys.exit(status if isinstance(status, int) else 0)


def _explain(error: Any) -> int:
    """Says what is wrong with the usage; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # its help was printed
        return error.exit_code
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    message, hint = error.format_message(), getattr(error, "param_hint", None)
    if error.message and (hint or parameter is not None):
        name = hint if isinstance(hint, str) else option_name(parameter)
        said = error.message.removeprefix("Value error, ")
        message = f"{name} {said}" if said.startswith("must") else f"{name}: {said}"
    elif context is not None:
        message = f"{message.rstrip('.')}; {context.command_path} --help explains"
    print_error(error_console(), re.sub(r"\s*\n\s*", " ", message))
    return error.exit_code


def _check_width() -> None:
    """Rich shows nothing at all in a width of 0, and Typer ends with a traceback in one that is no number."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        width = os.environ.get(name, "")
        if width and (not width.isdecimal() or int(width) == 0):
            del os.environ[name]
        elif width and int(width) < NARROWEST:
            os.environ[name] = str(NARROWEST)


def _prepare_streams() -> None:
    """A stream that is closed becomes the null device, so that no file takes its number; what an encoding does not
    have is written as an escape."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            try:
                os.fstat(number)
            except OSError:
                os.dup2(null, number)
            setattr(sys, name, os.fdopen(null, "r" if number == 0 else "w", encoding="utf-8"))
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What could not be written is not tried again when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
