"""`jaxbuf train-gate`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxbuf.cli import options
from jaxbuf.cli.errors import busy, error_console
from jaxbuf.cli.session import load_model, read_tokens, spread_rows
from jaxbuf.terminal import print_table

if TYPE_CHECKING:
    import numpy as np

    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.train.text_sequences import Sequences
    from jaxbuf.train.write_gate import GateTraining, Recipe

HELD_OUT = 0.05  # of the text, its end
SPARSITY, RATE = 0.06, 5e-3  # where nobody says them, of scores of keys: what suits the embedded model
PAGE = 16  # tokens of a page of keys and values
SCORED = 16  # held-out sequences that the table at the end is made of


def train_gate(
    files: options.Texts = None,
    model: options.Model = "demo",
    output: Annotated[
        Path, typer.Option(help="Where the gates go; beside them their checkpoints, metrics, plot and the last table.")
    ] = Path("gates.safetensors"),
    score: Annotated[
        str,
        typer.Option(
            help="What scores keys: write-gate, of the keys; hidden, of what the layer reads; head, a number for each "
            "head; neuron, a channel of the queries, for which the model is tuned, too."
        ),
    ] = "write-gate",
    width: Annotated[
        int | None,
        typer.Option(
            help="Numbers between a score's two layers; without it, 4 times those of a key, and hidden is one layer.",
            **options.whole(1),
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            help="First tokens that every head keeps, where heads are scored: 16 without it.", **options.whole(0)
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Latest tokens that are seen whatever their gates are.")] = 64,
    threshold: Annotated[float, typer.Option(help="Keys are kept if their gates reach it.")] = 0.1,
    share: Annotated[
        float | None,
        typer.Option(help="The share of heads, or of keys, that are to be kept: it sets the threshold at the end."),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            help="Weight of the penalty: the higher, the fewer keys are kept. Without it 0.06; of heads 0.05."
        ),
    ] = None,
    soft: Annotated[
        str,
        typer.Option(
            help="How gates count while they are trained: bias, added to scores as their logarithm (the paper's), or "
            "share, of the values: then few end half open, and a sparsity of 0.16 and more is a good start."
        ),
    ] = "bias",
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.", **options.whole(1))] = 100,
    rows: Annotated[int, typer.Option(help="Sequences of a step.", **options.whole(1))] = 1,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", **options.whole(2))] = 1024,
    pieces: Annotated[
        int, typer.Option(help="Parts of a step's rows that are read one after the other.", **options.whole(1))
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="The highest learning rate. Without it 5e-3; of heads 0.02, where the model is tuned 1e-4."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first gates and of the sequences.", **options.whole(0))] = 0,
    dtype: options.Dtype = None,
    devices: Annotated[
        int, typer.Option(help="Devices that share the rows of a step, each with the whole model.", **options.whole(1))
    ] = 1,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Train on a Hugging Face data set in place of files: its name, with a configuration behind a colon, "
            "or a directory of its files. It is streamed, in its own order.",
            metavar="NAME[:CONFIG]",
            show_default=False,
            **options.text(),
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Of the data set.", **options.text())] = "train",
    field: Annotated[str, typer.Option(help="The texts' name in the data set's examples.", **options.text())] = "text",
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="A text in UTF-8, or a .npy of token ids, to try the gates on; by default the last twentieth of FILE, "
            "or the first documents of the data set, which are not trained on.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train gates that keep few keys of a model's softmax layers, and try them.

    What options are by default suits the embedded model and a few minutes of a CPU. The model itself is not changed,
    but for --score neuron, which writes a tuned one beside the gates. A run that was stopped goes on from its last
    checkpoint when it is started again with the same options. At the end the gates are tried on text that was not
    trained on: how well the model predicts it with all keys, with those that the gates keep, and with as many that were
    drawn at random.

    [bold]Examples[/bold]

      jaxbuf train-gate

      jaxbuf train-gate book.txt --model ./checkpoint --window 256 --rate 1e-3 --steps 5000 --rows 8

      jaxbuf train-gate tokens.npy --model ./checkpoint --devices 8 --rows 64 --pieces 2

      jaxbuf train-gate --dataset HuggingFaceFW/fineweb-edu:sample-10BT --model ./checkpoint

      jaxbuf generate --gates gates.safetensors "The configuration file"
    """
    with busy("starting JAX"):
        from jaxbuf.bench import report
        from jaxbuf.train.write_gate import GateTraining

    sizes = {"steps": steps, "rows": rows, "length": length, "pieces": pieces, "seed": seed, "soft": soft}
    recipe = _recipe(score, width, sinks, sparsity, rate, window=window, threshold=threshold, **sizes)
    if share is not None and not 0 <= share <= 1:
        raise typer.BadParameter(f"must be in [0, 1], got {share}", param_hint="--share")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"must be in a directory that is there, got {output}", param_hint="--output")
    if dataset is not None and files:
        raise typer.BadParameter("must come without FILE: it takes its place", param_hint="--dataset")
    err = error_console()
    lm = load_model(err, model, dtype)
    with busy("reading the text"):
        data, tried = _read(lm, files or [], dataset, split, field, held_out, recipe)
        training = GateTraining(lm, data, recipe, devices=_devices(devices))
    gated = run_training(err, training, output, share)
    rows_tried = spread_rows(tried, length, SCORED)
    with busy("trying the gates on text that was not trained on"):
        tried_out = _try(lm, gated, rows_tried, recipe)
    found = {"recipe": _settings(recipe), "tokens": rows_tried.size, "keys": tried_out}
    report.write(output.with_suffix(".json"), found)
    table = Table("keys behind the window", "kept", "of all bytes", "nats a token", "more")
    full = found["keys"]["all"]["nats"]
    for name, (kept, held, nats) in ((name, each.values()) for name, each in found["keys"].items()):
        table.add_row(name, f"{kept:.3f}", f"{held:.3f}", f"{nats:.4f}", f"{nats / full - 1:.2%}")
    print_table(table)


def _read(
    lm: "LanguageModel",
    files: list[str],
    dataset: str | None,
    split: str,
    field: str,
    held_out: Path | None,
    recipe: "Recipe",
) -> "tuple[Sequences, np.ndarray]":
    """What is trained on, and tokens that are not."""
    import numpy as np

    from jaxbuf.train.text_sequences import DocumentSequences, end_of, read_documents, stream_dataset

    kept = None if held_out is None else np.concatenate(read_documents(lm, [held_out], name="held_out"))
    if dataset is not None:
        sequences, first = stream_dataset(lm, dataset, recipe.rows, recipe.length, split=split, field=field)
        kept = np.concatenate(first) if kept is None else kept
    else:
        documents = read_documents(lm, files) if files else [read_tokens(lm, [])]
        count = sum(document.size for document in documents)
        if kept is None:
            if count < 2 * recipe.length:
                raise ValueError(f"files must hold at least {2 * recipe.length} tokens, got {count}")
            documents, kept = end_of(documents, max(int(HELD_OUT * count), recipe.length))
        sequences = DocumentSequences(documents, recipe.rows, recipe.length, seed=recipe.seed)
    if kept.size < recipe.length:
        where = "dataset" if held_out is None else "held_out"
        raise ValueError(f"{where} must hold {recipe.length} tokens to try gates on, got {kept.size}")
    return sequences, kept


def _devices(count: int) -> "list[Any] | None":
    import jax

    if count > jax.device_count():
        raise ValueError(f"devices must be at most those that there are ({jax.device_count()}), got {count}")
    return None if count == 1 else jax.devices()[:count]


def _settings(recipe: "Recipe") -> dict[str, Any]:
    return dataclasses.asdict(recipe) | {"score": repr(recipe.score)}


def _recipe(
    name: str, width: int | None, sinks: int | None, sparsity: float | None, rate: float | None, **settings: Any
) -> "Recipe":
    """The recipe of a score, with the settings that were given."""
    from jaxbuf.train.write_gate import RECIPES

    if name not in RECIPES:
        raise typer.BadParameter(f"must be one of {', '.join(RECIPES)}, got {name!r}", param_hint="--score")
    recipe = RECIPES[name]
    of_score = {"width": width, "sinks": sinks}
    given = {option: value for option, value in of_score.items() if value is not None}
    for option in given:
        if option not in {field.name for field in dataclasses.fields(recipe.score)}:  # pyright: ignore[reportArgumentType]
            raise typer.BadParameter(f"must not be given with --score {name}", param_hint=f"--{option}")
    if given:
        settings["score"] = dataclasses.replace(recipe.score, **given)  # pyright: ignore[reportArgumentType]
    if sparsity is None and name != "head":
        sparsity = SPARSITY
    if rate is None and name in ("write-gate", "hidden"):
        rate = RATE
    learned = {"sparsity": sparsity, "rate": rate}
    return dataclasses.replace(recipe, **settings, **{key: x for key, x in learned.items() if x is not None})


def run_training(err: Console, training: "GateTraining", output: Path, share: float | None = None) -> "LanguageModel":
    """Trains to the end, behind a bar, and leaves gates, checkpoints, metrics and a plot.

    A process that was killed at any moment and is started again leaves the same.

    Args:
      err: Where the bar is, and what is said.
      training: From where it goes on, if there are checkpoints.
      output: Of the gates; the other files lie beside it.
      share: Of heads, or of the keys of the first step's text, that the threshold keeps; None: the recipe's threshold.

    Returns:
      The model with its gates.
    """
    from jaxbuf.models.admission import HeadScore
    from jaxbuf.models.gates import save_gates, threshold_for_share, with_threshold
    from jaxbuf.progress import progress_bar
    from jaxbuf.train.write_gate import append_metrics, trim_metrics

    checkpoints, metrics = output.with_suffix(".checkpoints"), output.with_suffix(".jsonl")
    if training.restore(checkpoints):
        err.print(f"goes on behind step {training.step}, from {checkpoints}", markup=False)
    trim_metrics(metrics, training.step)
    every = max(1, training.recipe.steps // 10)
    with progress_bar(training.recipe.steps, console=err) as report:
        report("compiling", training.step)
        for found in training.run():
            append_metrics(metrics, found)
            report(f"distance {found['distance']:.4f}, {found['kept']:.0%} kept", training.step)
            if training.step % every == 0 or training.step == training.recipe.steps:
                training.save(checkpoints)
    gated = training.lm
    if share is not None:
        keys = None if isinstance(training.recipe.score, HeadScore) else training.batch(0)
        gated = with_threshold(gated, threshold_for_share(gated, share, keys))
    save_gates(gated, output)
    written = [output, metrics]
    if training.recipe.tunes == "model":
        written.insert(0, output.with_suffix(".model"))
        gated.save(written[0])
    if made := _plot(metrics, output.with_suffix(".png")):
        written.append(made)
    err.print(f"wrote {', '.join(map(str, written[:-1]))} and {written[-1]}", markup=False)
    return gated


def _plot(metrics: Path, path: Path) -> Path | None:
    """A plot of the metrics; None where matplotlib is not installed."""
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
    lm: "LanguageModel", gated: "LanguageModel", text: "np.ndarray", recipe: "Recipe"
) -> dict[str, dict[str, float]]:
    """For each way to keep keys the share that is kept behind the window, the share of the bytes, and the text's nats a
    token."""
    import numpy as np

    from jaxbuf.models.admission import Admission, Rule
    from jaxbuf.models.gates import kept_shares, with_gates

    kept = float(np.mean(kept_shares(gated, text)))

    def ruled(**rule: Any) -> "LanguageModel":
        return with_gates(lm, Admission(Rule(**rule), recipe.window, recipe.threshold))

    models = {
        "all": (1.0, lm),
        "those that the gates keep": (kept, gated),
        "as many, at random": (kept, ruled(keeps="random", rate=kept)),
        "none": (0.0, ruled(keeps="none")),
    }
    found = {}
    for name, (share, each) in models.items():
        bytes_share = 1.0 if each is lm else _share_of_bytes(each, text, recipe)
        nats = -float(np.mean(each.score(text, progress=False)[:, 1:]))
        found[name] = {"kept": share, "bytes": bytes_share, "nats": nats}
    return found


def _share_of_bytes(gated: "LanguageModel", text: "np.ndarray", recipe: "Recipe") -> float:
    """Of the pages of keys and values of softmax layers at the end of the text, over those of all keys.

    Whole pages count: of a row's window, which has room for three tokens more, and of each head's admitted keys.
    """
    import numpy as np

    from jaxbuf.models.gates import kept_keys

    behind = kept_keys(gated, text)[:, :, : -recipe.window]
    pages = np.ceil(np.sum(behind, axis=2) / PAGE)
    window = np.ceil((recipe.window + 3) / PAGE)
    return float(np.mean(pages + window) / np.ceil(recipe.length / PAGE))
