"""`jaxbuf bench`."""

import importlib

import typer
from rich.table import Table

from jaxbuf.bench import PROGRAMS
from jaxbuf.cli.errors import Command, busy
from jaxbuf.terminal import print_table, text_console

app = typer.Typer(
    help="Run a benchmark; without a name, list them.",
    epilog="jaxbuf bench NAME --help explains what a benchmark measures, and its options. Each prints a table, and "
    "--json FILE keeps its figures.",
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        table = Table()
        table.add_column("name", no_wrap=True)
        table.add_column("measures")
        table.add_column("recorded figures", no_wrap=True)
        for program in PROGRAMS:
            table.add_row(
                program.name, program.measures, f"benchmarks/{program.figures}" if program.figures else "none yet"
            )
        console = text_console()
        print_table(table, console)
        console.print(
            "jaxbuf bench NAME runs one, jaxbuf bench NAME --help explains it. Recorded figures are in the repository."
        )


def _add(name: str, measures: str) -> None:
    # The program has its own --help and options, which all words are left to.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, cls=Command, help=f"Measures {measures}.", add_help_option=False, context_settings=settings)
    def run(context: typer.Context) -> None:
        with busy("starting JAX"):
            program = importlib.import_module(f"jaxbuf.bench.{name}")
        raise typer.Exit(program.main(context.args))


for program in PROGRAMS:
    _add(program.name, program.measures)
