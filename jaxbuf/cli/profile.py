"""`jaxbuf profile`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxbuf.cli.errors import busy
from jaxbuf.terminal import print_table, text_console


def profile(
    directory: Annotated[Path, typer.Argument(help="What --profile of another command wrote to.", metavar="DIR")],
) -> None:
    """Tell where the time went in a profile: a table of the model's parts, summed over its layers.

    The newest profile of the directory is read. A program's parts are embedding, projections, convolution, recurrence,
    attention, output (of a mixer), mlp, head, sample, and other (norms, residual additions, cursors, copies), whose
    longest operations stand below the table.
    The programs begin_prompts, read_layer and end_prompts read prompts, or start on a mesh, and admit their later
    chunks; generate_tokens decodes.
    Times are those of operations, added up: where several run at once, that is more than the time that passed.
    Compilation is not in them. XProf and Perfetto open the same files.

    [bold]Examples[/bold]

      jaxbuf generate "The configuration file" --max-new-tokens 128 --profile trace

      jaxbuf profile trace
    """
    with busy("reading the trace"):
        from google.protobuf.message import DecodeError

        from jaxbuf.serving.profiling import OTHER, time_by_scope

        try:
            rows = time_by_scope(directory)
        # Errors of JAX, protobuf and ours: it is no trace.
        except (RuntimeError, DecodeError, LookupError, TypeError) as error:
            raise ValueError(f"the newest trace in {str(directory)!r} cannot be read: {error}") from error
    totals = {}
    for row in rows:
        totals[row.program] = totals.get(row.program, 0.0) + row.seconds
    table = Table()
    for heading in ("program", "part"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "share", "operations"):
        table.add_column(heading, justify="right", no_wrap=True)
    for program, total in sorted(totals.items(), key=lambda item: -item[1]):
        for row in rows:
            if row.program == program:
                share = f"{row.seconds / total:.1%}"
                table.add_row(program, row.scope, f"{1e3 * row.seconds:.3f}", share, str(row.operations))
        table.add_row(program, "all", f"{1e3 * total:.3f}", "100.0%", "", end_section=True)
    console = text_console()
    print_table(table, console)
    for row in rows:
        if row.scope == OTHER:
            longest = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in row.longest)
            console.print(f"{row.program}, longest in other: {longest}", markup=False)
