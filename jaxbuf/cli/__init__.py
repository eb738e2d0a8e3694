"""The command line. Text goes to stdout, everything else to stderr, so that a pipe carries the text alone; of several
texts each has a heading there.

JAX and the models are imported by the commands that need them: `jaxbuf --help` answers at once.
"""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxbuf.cli import bench, gates
from jaxbuf.cli.chat import chat
from jaxbuf.cli.compile import compile_model
from jaxbuf.cli.errors import Command, Commands
from jaxbuf.cli.export import export
from jaxbuf.cli.generate import generate
from jaxbuf.cli.models import models
from jaxbuf.cli.plan import plan
from jaxbuf.cli.profile import profile
from jaxbuf.cli.score import score
from jaxbuf.cli.train_gate import train_gate
from jaxbuf.version import __version__

app = typer.Typer(
    name="jaxbuf",
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve linear-attention and hybrid language models from JAX by moving fewer bytes.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxbuf {__version__}")
        raise typer.Exit


def _set_log_level(name: str) -> str:
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise typer.BadParameter(f"must be debug, info, warning or error, got {name!r}")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxbuf").setLevel(level)
    return name


def _cache_compilations(directory: Path | None) -> Path | None:
    if directory is not None:
        from jaxbuf.compilation import cache_compilations

        try:
            cache_compilations(directory)
        except ValueError as error:
            raise typer.BadParameter(str(error).removeprefix("directory ")) from error
    return directory


GREETING = (
    "[bold]jaxbuf {version}[/bold] serves linear-attention and hybrid language models from JAX by moving fewer bytes: "
    "the recurrent state is read at every step and written only when a ring of recent entries is full, rejected drafts "
    "cost an integer, and softmax layers may keep only the keys that a learned gate admits.",
    "",
    "Three commands to try, none of which downloads anything:",
    "",
    '  [bold]jaxbuf generate "The configuration file"[/bold]',
    "      Writes on, with the model of 8 million parameters that is in the package.",
    "  [bold]jaxbuf plan Qwen3.5-4B --context 32768[/bold]",
    "      Tells what a request of a known model costs in memory, and how many fit.",
    "  [bold]jaxbuf models[/bold]",
    "      Tells which models are served, and what was checked of each.",
    "",
    "[bold]jaxbuf --help[/bold] lists all commands; each has a --help with examples.",
)


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(callback=_set_log_level, help="What the library logs to stderr: debug, info, warning, error.")
    ] = "warning",
    compilation_cache: Annotated[
        Path | None,
        typer.Option(
            callback=_cache_compilations,
            envvar="JAX_COMPILATION_CACHE_DIR",
            metavar="DIR",
            show_default=False,
            help="Keep compiled programs in this directory: what it holds is not compiled again.",
        ),
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        for line in GREETING:
            Console(highlight=False).print(line.format(version=__version__))


for command in (generate, chat, score, plan, export, models, profile):
    app.command(cls=Command)(command)
app.command("compile", cls=Command)(compile_model)
app.command("train-gate", cls=Command)(train_gate)
app.add_typer(bench.app, name="bench")
app.add_typer(gates.app, name="gates")
