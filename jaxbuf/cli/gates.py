"""`jaxbuf gates`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import Command, Commands, busy, error_console
from jaxbuf.cli.session import load_model, read_tokens, spread_rows
from jaxbuf.terminal import print_table

if TYPE_CHECKING:
    import numpy as np

    from jaxbuf.models.language_model import LanguageModel

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look at gates of softmax layers, and choose how strict they are.",
)
THRESHOLDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # of the table

Gates = Annotated[Path, typer.Argument(help="A file of gates from jaxbuf train-gate.", metavar="GATES")]
Length = Annotated[int, typer.Option(help="Tokens of a sequence.", **options.whole(2))]
Rows = Annotated[int, typer.Option(help="Sequences, spread over the text.", **options.whole(1))]


@app.command(cls=Command)
def plot(
    gates: Gates,
    files: options.Texts = None,
    model: options.Model = "demo",
    output: Annotated[Path | None, typer.Option(help="Where the plot goes; by default beside the gates.")] = None,
    length: Length = 512,
    rows: Rows = 16,
    dtype: options.Dtype = None,
) -> None:
    """Plot which share of a text's keys each layer and head keeps.

    [bold]Examples[/bold]

      jaxbuf gates plot gates.safetensors

      jaxbuf gates plot gates.safetensors book.txt --model ./checkpoint --output kept.png
    """
    with busy("starting JAX"):
        from jaxbuf.models.gates import gated_layers, kept_shares

    err = error_console()
    lm = load_model(err, model, dtype, gates)
    with busy("reading the text"):
        shares = kept_shares(lm, _sequences(lm, files, length, rows))
    names = [str(layer) for layer, _ in gated_layers(lm.config)]
    table = Table("layer", *(f"head {head}" for head in range(shares.shape[1])), "mean")
    for name, row in zip(names, shares, strict=True):
        table.add_row(name, *(f"{share:.3f}" for share in row), f"{row.mean():.3f}")
    print_table(table)
    path = gates.with_suffix(".kept.png") if output is None else output
    _draw(names, shares, path)
    err.print(f"wrote {path}", style="dim", markup=False)


@app.command(cls=Command)
def threshold(
    gates: Gates,
    files: options.Texts = None,
    model: options.Model = "demo",
    to: Annotated[
        float | None,
        typer.Option(help="The threshold of the new file.", show_default=False, **options.number()),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="Of the text's keys, that the new file's gates keep: it says what the threshold is.",
            show_default=False,
            **options.number(),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The new file; by default beside the gates, with the threshold in its name."),
    ] = None,
    length: Length = 512,
    rows: Rows = 16,
    dtype: options.Dtype = None,
) -> None:
    """Tell which share of a text's keys gates keep at some thresholds, and write a file with another one.

    Gates are numbers between 0 and 1, and a key is kept if its gate reaches the threshold that is in the file: another
    threshold needs no training. How well the model predicts text then, [bold]jaxbuf score FILE --gates[/bold] says.

    [bold]Examples[/bold]

      jaxbuf gates threshold gates.safetensors

      jaxbuf gates threshold gates.safetensors --to 0.3

      jaxbuf gates threshold gates.safetensors book.txt --model ./checkpoint --share 0.25 --output quarter.safetensors
    """
    if to is not None and share is not None:
        raise ValueError(f"--to must be given without --share, got {to:g} and {share:g}")
    if output is not None and to is None and share is None:
        raise ValueError(f"--output must be given with --to or --share, got {str(output)!r} alone")
    with busy("starting JAX"):
        from jaxbuf.models.gates import admission_of, key_scores, save_gates, threshold_of, with_threshold

    err = error_console()
    lm = load_model(err, model, dtype, gates)
    with busy("reading the text"):
        scores = key_scores(lm, _sequences(lm, files, length, rows))
        chosen = threshold_of(scores, share) if share is not None else to
    had = admission_of(lm).threshold
    notes = {} if had is None else {had: "the file's"}
    notes |= {} if chosen is None else {chosen: "the new file's"}
    table = Table("threshold", "kept", "")
    for each in sorted({*THRESHOLDS, *notes}):
        table.add_row(f"{each:.4g}", f"{(scores >= each).mean():.3f}", notes.get(each, ""))
    print_table(table)
    if chosen is None:
        return
    path = gates.with_name(f"{gates.stem}-{chosen:.4g}.safetensors") if output is None else output
    save_gates(with_threshold(lm, chosen), path)
    err.print(f"wrote {path}", style="dim", markup=False)


def _sequences(lm: "LanguageModel", files: list[str] | None, length: int, rows: int) -> "np.ndarray":
    """int [rows, length]: sequences spread over a text, fewer of a short one."""
    tokens = read_tokens(lm, files or [])
    if len(tokens) < length:
        raise ValueError(f"FILE must hold at least --length ({length}) tokens, got {len(tokens)}")
    return spread_rows(tokens, length, rows)


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
