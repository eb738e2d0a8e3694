"""`jaxbuf gates`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import Command, Commands, busy, error_console
from jaxbuf.cli.session import load_model, read_tokens
from jaxbuf.terminal import print_table

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="rich", help="Look at gates of softmax layers.")


@app.command(cls=Command)
def plot(
    gates: Annotated[Path, typer.Argument(help="A file of gates from jaxbuf train-gate.", metavar="GATES")],
    files: options.Texts = None,
    model: options.Model = "demo",
    output: Annotated[Path | None, typer.Option(help="Where the plot goes; by default beside the gates.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", **options.whole(2))] = 512,
    rows: Annotated[int, typer.Option(help="Sequences, spread over the text.", **options.whole(1))] = 16,
    dtype: options.Dtype = None,
) -> None:
    """Plot which share of a text's keys each layer and head keeps.

    [bold]Examples[/bold]

      jaxbuf gates plot gates.safetensors

      jaxbuf gates plot gates.safetensors book.txt --model ./checkpoint --output kept.png
    """
    with busy("starting JAX"):
        import numpy as np

        from jaxbuf.models.gates import gated_layers, kept_shares

    err = error_console()
    lm = load_model(err, model, dtype, gates)
    with busy("reading the text"):
        tokens = read_tokens(lm, files or [])
        if len(tokens) < length:
            raise ValueError(f"FILE must hold at least --length ({length}) tokens, got {len(tokens)}")
        starts = np.linspace(0, len(tokens) - length, min(rows, len(tokens) // length)).astype(int)
        shares = kept_shares(lm, np.stack([tokens[start : start + length] for start in starts]))
    names = [str(layer) for layer, _ in gated_layers(lm.config)]
    table = Table("layer", *(f"head {head}" for head in range(shares.shape[1])), "mean")
    for name, row in zip(names, shares, strict=True):
        table.add_row(name, *(f"{share:.3f}" for share in row), f"{row.mean():.3f}")
    print_table(table)
    path = gates.with_suffix(".kept.png") if output is None else output
    _draw(names, shares, path)
    err.print(f"wrote {path}", style="dim", markup=False)


def _draw(names: list[str], shares, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("matplotlib must be installed for a plot: pip install 'jaxbuf[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.5 + 0.5 * shares.shape[1], 1.5 + 0.3 * len(names)), layout="constrained")
    image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="head of keys and values", ylabel="layer", yticks=range(len(names)), yticklabels=names)
    figure.colorbar(image, label="share of keys kept")
    figure.savefig(path, dpi=120)
