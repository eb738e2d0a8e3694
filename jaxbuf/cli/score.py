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
from jaxbuf.cli.errors import error_console
from jaxbuf.cli.session import interrupt, load_model, need_tokenizer, parse_ids, progress_bar, read_text
from jaxbuf.terminal import print_table

if TYPE_CHECKING:
    from jaxbuf.models.scoring import TextScore


def score(
    files: Annotated[
        list[str], typer.Argument(help="Texts in UTF-8; [bold]-[/bold] is standard input.", metavar="FILE...")
    ],
    model: options.Model = "demo",
    gates: options.Gates = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window, for texts that are longer; by default the most that the model takes.",
            **options.whole(2),
        ),
    ] = None,
    dtype: options.Dtype = None,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            help="The files hold token ids in place of text, as a model without a tokenizer needs it: whole numbers, "
            "separated by spaces, line breaks or commas. Bytes are not told.",
        ),
    ] = False,
) -> None:
    """Tell how probable a model finds files: perplexity per token and bits per byte.

    The first token of a file follows what the tokenizer puts before a text (Llama's begin-of-text token), or else the
    model's end-of-text token, and every token and byte of the file is counted, but not that one.
    A file longer than the context is read in windows that overlap by half, so that each token has at least half a
    context before it. The log-likelihood is in nats. Bits per byte compare models with different tokenizers.
    The table goes to standard output, the progress to standard error.

    [bold]Examples[/bold]

      jaxbuf score README.md CHANGELOG.md

      jaxbuf score --model ./checkpoint --context 2048 - < book.txt
    """
    err = error_console()
    scores: list[tuple[str, TextScore]] = []
    texts = [(name, _read(name, token_ids=token_ids)) for name in files]
    try:
        with interrupt() as interrupted:
            _score(err, interrupted, texts, scores, model=model, gates=gates, context=context, dtype=dtype)
    finally:  # a Ctrl-C or an error leaves what was scored by then
        if scores:
            _print_table(scores)


def _score(
    err: Console,
    interrupted: threading.Event,
    texts: list[tuple[str, str | list[int]]],
    scores: "list[tuple[str, TextScore]]",
    *,
    model: str,
    gates: Path | None,
    context: int | None,
    dtype: str | None,
) -> None:
    """Appends the score of each named text, or list of token ids, to `scores`, behind a bar."""
    lm = load_model(err, model, dtype, gates)
    if any(isinstance(text, str) for _, text in texts):
        need_tokenizer(lm)
    if context is not None and context > lm.max_length:
        raise ValueError(f"context must be in [2, {lm.max_length}], up to the model's max_length, got {context}")

    from jaxbuf.models.scoring import score_text

    with progress_bar(err) as bar:
        for name, text in texts:
            task = bar.add_task(name, total=None)

            def show(done: int, total: int, task=task) -> None:
                if interrupted.is_set():
                    raise typer.Exit(130)
                bar.update(task, completed=done, total=total)

            try:
                scores.append((name, score_text(lm, text, context=context, progress=show)))
            except ValueError as error:
                raise ValueError(f"{_label(name)}: {error}") from error


def _label(name: str) -> str:
    return "standard input" if name == "-" else name


def _read(name: str, *, token_ids: bool) -> str | list[int]:
    """The text of a file, or its token ids.

    Raises:
      ValueError: It is empty, not UTF-8, or holds something else than token ids.
      OSError: It cannot be read.
    """
    text = read_text(name, "" if name == "-" else "FILE")
    if not text:
        raise ValueError(f"{_label(name)} is empty: there is nothing to score")
    return parse_ids(text, _label(name)) if token_ids else text


def _print_table(scores: "list[tuple[str, TextScore]]") -> None:
    table = Table()
    table.add_column("file", no_wrap=True)
    for heading in ("tokens", "bytes", "log-likelihood", "perplexity", "bits/byte"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(label: Text, found: "TextScore") -> None:
        size, rate = (str(found.bytes), f"{found.bits_per_byte:.4f}") if found.bytes else ("-", "-")
        table.add_row(label, str(found.tokens), size, f"{found.log_likelihood:.2f}", f"{found.perplexity:.2f}", rate)

    for name, found in scores:
        add(Text(name), found)
    table.add_section()
    add(Text("total"), functools.reduce(operator.add, (found for _, found in scores)))
    print_table(table)
