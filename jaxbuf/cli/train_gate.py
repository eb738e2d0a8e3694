"""`jaxbuf train-gate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import error_console
from jaxbuf.cli.session import load_model, read_tokens
from jaxbuf.terminal import print_table

if TYPE_CHECKING:
    import numpy as np

    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.train.write_gate import GateTraining, Recipe

HELD_OUT = 0.05  # of the text, its end
SCORED = 16  # held-out sequences that the table at the end is made of


def train_gate(
    files: options.Texts = None,
    model: options.Model = "demo",
    output: Annotated[
        Path, typer.Option(help="Where the gates go; beside them their checkpoints, metrics and plot.")
    ] = Path("gates.safetensors"),
    score: Annotated[
        str,
        typer.Option(help="What scores keys: write-gate, of the keys, or hidden, of what the layer reads."),
    ] = "write-gate",
    window: Annotated[int, typer.Option(help="Latest tokens that are seen whatever their gates are.")] = 64,
    threshold: Annotated[float, typer.Option(help="Keys are kept if their gates reach it.")] = 0.1,
    sparsity: Annotated[float, typer.Option(help="Weight of the penalty: the higher, the fewer keys are kept.")] = 0.3,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.", **options.whole(1))] = 100,
    rows: Annotated[int, typer.Option(help="Sequences of a step.", **options.whole(1))] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", **options.whole(2))] = 256,
    pieces: Annotated[
        int, typer.Option(help="Parts of a step's rows that are read one after the other.", **options.whole(1))
    ] = 1,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the first gates and of the sequences.", **options.whole(0))] = 0,
    dtype: options.Dtype = None,
) -> None:
    """Train gates that keep few keys of a model's softmax layers, and try them.

    The model itself is not changed. A run that was stopped goes on from its last checkpoint when it is started again
    with the same options. At the end the gates are tried on the last twentieth of the text: how well the model predicts
    it with all keys, with those that the gates keep, and with as many that were drawn at random.

    [bold]Examples[/bold]

      jaxbuf train-gate

      jaxbuf train-gate book.txt --model ./checkpoint --window 256 --sparsity 0.3 --output book-gates.safetensors

      jaxbuf generate --gates gates.safetensors "The configuration file"
    """
    from jaxbuf.models.admission import HiddenScore, WriteGate
    from jaxbuf.train.write_gate import GateTraining, Recipe

    scores = {"write-gate": WriteGate(), "hidden": HiddenScore()}
    if score not in scores:
        raise typer.BadParameter(f"must be one of {', '.join(scores)}, got {score!r}", param_hint="--score")
    sizes = {"steps": steps, "rows": rows, "length": length, "pieces": pieces, "rate": rate, "seed": seed}
    recipe = Recipe(score=scores[score], window=window, threshold=threshold, sparsity=sparsity, **sizes)
    if not output.parent.is_dir():
        raise typer.BadParameter(f"must be in a directory that is there, got {output}", param_hint="--output")
    err = error_console()
    lm = load_model(err, model, dtype)
    tokens = read_tokens(lm, files or [])
    end = len(tokens) - max(int(HELD_OUT * len(tokens)), length)
    if end < length:
        raise typer.BadParameter(f"must hold at least {2 * length} tokens, got {len(tokens)}", param_hint="FILE")
    training = GateTraining(lm, tokens[:end], recipe)
    _run(err, training, output)
    found = _try(lm, training.lm, tokens[end:], recipe)
    table = Table("keys behind the window", "kept", "nats a token")
    for name, (kept, nats) in found.items():
        table.add_row(name, f"{kept:.3f}", f"{nats:.4f}")
    print_table(table)


def _run(err: Console, training: "GateTraining", output: Path) -> None:
    """Trains to the end, behind a bar, and leaves gates, checkpoints, metrics and a plot."""
    from jaxbuf.models.gates import save_gates
    from jaxbuf.progress import progress_bar
    from jaxbuf.train.write_gate import append_metrics

    checkpoints, metrics = output.with_suffix(".checkpoints"), output.with_suffix(".jsonl")
    if training.restore(checkpoints):
        err.print(f"goes on behind step {training.step}, from {checkpoints}", markup=False)
    elif metrics.exists():
        metrics.unlink()
    every = max(1, training.recipe.steps // 10)
    with progress_bar(training.recipe.steps, console=err) as report:
        report("compiling", training.step)
        for found in training.run():
            append_metrics(metrics, found)
            report(f"distance {found['distance']:.4f}, {found['kept']:.0%} kept", training.step)
            if training.step % every == 0 or training.step == training.recipe.steps:
                training.save(checkpoints)
    save_gates(training.lm, output)
    made = _plot(metrics, output.with_suffix(".png"))
    err.print(f"wrote {output}, {metrics}{f' and {made}' if made else ''}", markup=False)


def _plot(metrics: Path, path: Path) -> Path | None:
    """A plot of the metrics; None where matplotlib is not installed."""
    import json

    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axes, name, label in ((left, "distance", "distance of hidden states"), (right, "kept", "share of keys kept")):
        axes.plot([line["step"] for line in lines], [line[name] for line in lines])
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    figure.savefig(path, dpi=120)
    return path


def _try(
    lm: "LanguageModel", gated: "LanguageModel", tokens: "np.ndarray", recipe: "Recipe"
) -> dict[str, tuple[float, float]]:
    """For each way to keep keys the share that is kept and the held-out text's nats a token."""
    import numpy as np

    from jaxbuf.models.admission import Admission, Rule
    from jaxbuf.models.gates import kept_shares, with_gates

    rows = min(SCORED, len(tokens) // recipe.length)
    text = np.asarray(tokens[: rows * recipe.length], np.int32).reshape(rows, recipe.length)
    kept = float(np.mean(kept_shares(gated, text)))

    def ruled(**rule: Any) -> "LanguageModel":
        return with_gates(lm, Admission(Rule(**rule), recipe.window, recipe.threshold))

    models = {
        "all": (1.0, lm),
        "those that the gates keep": (kept, gated),
        "as many, at random": (kept, ruled(keeps="random", rate=kept)),
        "none": (0.0, ruled(keeps="none")),
    }
    return {name: (share, -float(np.mean(each.score(text)[:, 1:]))) for name, (share, each) in models.items()}
