"""`jaxbuf score`."""

import functools
import operator
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbuf.cli import options
from jaxbuf.cli.session import error_console, errors_exit, interrupt, load_model, progress_bar

if TYPE_CHECKING:
    from jaxbuf.models.scoring import TextScore


def score(
    files: Annotated[
        list[str], typer.Argument(help="Texts in UTF-8; [bold]-[/bold] is standard input.", metavar="FILE...")
    ],
    model: options.Model = "demo",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a window, for texts that are longer; by default the most that the model takes."),
    ] = None,
    dtype: options.Dtype = None,
) -> None:
    """Tell how probable a model finds files: perplexity per token and bits per byte.

    The first token of a file follows the model's end-of-text token, and every token and byte of the file is counted.
    A file longer than the context is read in windows that overlap by half, so that each token has at least half a
    context before it. The log-likelihood is in nats. Bits per byte compare models with different tokenizers.
    The table goes to standard output, the progress to standard error.

    [bold]Examples[/bold]

      jaxbuf score README.md CHANGELOG.md

      jaxbuf score --model ./checkpoint --context 2048 - < book.txt
    """
    err = error_console()
    scores: list[tuple[str, TextScore]] = []
    with errors_exit(err):
        texts = [(name, _read(name)) for name in files]
        try:
            with interrupt() as interrupted:
                _score(err, interrupted, texts, scores, model=model, context=context, dtype=dtype)
        finally:  # a Ctrl-C or an error leaves what was scored by then
            if scores:
                _print_table(scores)


def _score(
    err: Console,
    interrupted: threading.Event,
    texts: list[tuple[str, str]],
    scores: "list[tuple[str, TextScore]]",
    *,
    model: str,
    context: int | None,
    dtype: str | None,
) -> None:
    """Appends the score of each named text to `scores`, behind a bar."""
    lm = load_model(err, model, dtype)

    from jaxbuf.models.scoring import score_text

    with progress_bar(err) as bar:
        for name, text in texts:
            task = bar.add_task(name, total=None)

            def show(done: int, total: int, task=task) -> None:
                if interrupted.is_set():
                    raise typer.Exit(130)
                bar.update(task, completed=done, total=total)

            scores.append((name, score_text(lm, text, context=context, progress=show)))


def _read(name: str) -> str:
    """The text of a file.

    Raises:
      ValueError: It is empty or not UTF-8.
      OSError: It cannot be read.
    """
    data = typer.get_binary_stream("stdin").read() if name == "-" else Path(name).read_bytes()
    label = "standard input" if name == "-" else name
    if not data:
        raise ValueError(f"{label} is empty: there is nothing to score")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not UTF-8 text: {error}") from error


def _print_table(scores: "list[tuple[str, TextScore]]") -> None:
    table = Table("file")
    table.columns[0].overflow = "fold"
    for heading in ("tokens", "bytes", "log-likelihood", "perplexity", "bits/byte"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(label: Text, found: "TextScore") -> None:
        numbers = (found.tokens, found.bytes, f"{found.log_likelihood:.2f}")
        table.add_row(label, *map(str, numbers), f"{found.perplexity:.2f}", f"{found.bits_per_byte:.4f}")

    for name, found in scores:
        add(Text(name), found)
    table.add_section()
    add(Text("total"), functools.reduce(operator.add, (found for _, found in scores)))
    Console(highlight=False).print(table)
