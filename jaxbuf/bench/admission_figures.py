"""What the figures of jaxbuf.bench.write_gate say: points of each line, at equal bytes, as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxbuf.terminal import print_table
from jaxbuf.train.retrieval_plan import Plan
from jaxbuf.train.retrieval_tasks import SHARES

BINS = 5  # of the oracle share
TEXT_BUDGET, TEXT_MORE = 0.5, 0.01  # at half of the bytes a text may take this much more bits a byte

type Figures = Sequence[dict[str, Any]]
type Points = list[dict[str, Any]]


def points(figures: Figures, judged: Sequence[str] | None, bytes_a_token: float | None = None) -> Points:
    """A point for each line and setting: means over the seeds of gates and of examples, and how far these differ.

    Args:
      figures: Of `jaxbuf.bench.write_gate.measure`.
      judged: The tasks whose mean counts; None for a text.
      bytes_a_token: Of the text's own bytes.

    Returns:
      Of each point line, kind, setting, bytes_share, kept, accuracy, nats, and the standard deviation "spread" of what
      counts; of tasks also the accuracy of each, and by bins of the oracle share accuracy and bytes_share; of a text
      bits_per_byte.
    """
    found: Points = []
    for line, setting in dict.fromkeys((figure["line"], figure["setting"]) for figure in figures):
        own = [figure for figure in figures if (figure["line"], figure["setting"]) == (line, setting)]
        counted = [figure for figure in own if judged is None or figure["task"] in judged]
        seeds = dict.fromkeys((figure["gate_seed"], figure["seed"]) for figure in counted)
        rows = [[figure for figure in counted if (figure["gate_seed"], figure["seed"]) == seed] for seed in seeds]
        point = {"line": line, "kind": own[0]["kind"], "setting": setting}
        for name in ("bytes_share", "kept", "accuracy", "nats"):
            point[name] = float(np.mean([figure[name] for figure in counted]))
        value = "accuracy"
        if judged is None:
            assert bytes_a_token is not None
            for row in counted:
                row["bits_per_byte"] = row["nats"] / np.log(2) / bytes_a_token
            value = "bits_per_byte"
            point[value] = float(np.mean([figure[value] for figure in counted]))
        else:
            tasks = dict.fromkeys(figure["task"] for figure in own)
            point["tasks"] = {
                task: {
                    name: float(np.mean([f[name] for f in own if f["task"] == task]))
                    for name in ("accuracy", "bytes_share")
                }
                for task in tasks
            }
            point["by_oracle_share"] = _binned([each for figure in counted for each in figure["by_example"]])
        means = [np.mean([figure[value] for figure in row]) for row in rows]
        point["spread"] = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
        found.append(point)
    return found


def _binned(examples: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    edges = np.linspace(*SHARES, BINS + 1)
    place = np.clip(np.searchsorted(edges, [each["oracle"] for each in examples], side="right") - 1, 0, BINS - 1)
    found = []
    for number in range(BINS):
        own = [each for each, at in zip(examples, place, strict=True) if at == number]
        if own:
            means = {name: float(np.mean([each[name] for each in own])) for name in ("accuracy", "bytes_share")}
            found.append({"oracle": [round(float(edge), 3) for edge in edges[number : number + 2]]} | means)
    return found


def at_budget(found: Points, line: str, value: str, budget: float) -> float | None:
    """What a line has at a share of the bytes, linearly between its points; above all of them what the largest has.

    Args:
      found: All points.
      line: Which of the lines.
      value: "accuracy", "nats" or "bits_per_byte".
      budget: The share.

    Returns:
      None where all its points are above the budget.
    """
    own = sorted((point["bytes_share"], point[value]) for point in found if point["line"] == line)
    if not own or budget < own[0][0]:
        return None
    return float(np.interp(budget, [share for share, _ in own], [reached for _, reached in own]))


def verdicts(found: Points, plan: Plan, *, text: bool) -> dict[str, bool]:
    """What has to hold for each line of gates, in words, and whether it does; nothing holds that was not measured."""
    lines = {point["line"]: point["kind"] for point in found}
    full = next(point for point in found if point["kind"] == "full")
    told: dict[str, bool] = {}
    for line in [line for line, kind in lines.items() if kind == "gates"]:
        if text:
            own = at_budget(found, line, "bits_per_byte", TEXT_BUDGET)
            least = f"{line}, at {TEXT_BUDGET:.0%} of the bytes: at most {TEXT_MORE:.0%} more bits a byte than full"
            told[f"{least} ({_ratio(own, full['bits_per_byte'])})"] = (
                own is not None and own <= (1 + TEXT_MORE) * full["bits_per_byte"]
            )
            others = {name: at_budget(found, name, "bits_per_byte", TEXT_BUDGET) for name in lines if name == "random"}
            for name, theirs in others.items():
                words = f"{line}, at {TEXT_BUDGET:.0%} of the bytes: {name} has more bits a byte"
                told[f"{words} ({_ratio(theirs, own)})"] = own is not None and theirs is not None and theirs > own
            continue
        own, budget = at_budget(found, line, "accuracy", plan.judged_at), f"at {plan.judged_at:.0%} of the bytes"
        words = f"{line}, {budget}: at least {plan.least_share:.0%} of full's accuracy"
        told[f"{words} ({_ratio(own, full['accuracy'])})"] = (
            own is not None and own >= plan.least_share * full["accuracy"]
        )
        for name in [name for name, kind in lines.items() if kind in ("local", "heads")]:
            theirs = at_budget(found, name, "accuracy", plan.judged_at)
            words = f"{line}, {budget}: {name} is {100 * plan.least_gap:.0f} points lower or more"
            gap = "no point there" if own is None or theirs is None else f"{100 * (own - theirs):.1f}"
            told[f"{words} ({gap})"] = own is not None and theirs is not None and theirs <= own - plan.least_gap
    return told


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "no point there" if ours is None or not theirs else f"{ours / theirs:.4f} times"


def nearest(found: Points, budget: float) -> Points:
    """Of each line the point whose bytes are nearest to the budget, full attention aside."""
    lines = dict.fromkeys(point["line"] for point in found if point["kind"] != "full")
    return [
        min((p for p in found if p["line"] == line), key=lambda point: abs(point["bytes_share"] - budget))
        for line in lines
    ]


def show(console: Console, found: Points, budgets: Sequence[float], plan: Plan, *, text: bool) -> None:
    """Prints tables: every point; each line at equal bytes; and by oracle share the points nearest to the budget."""
    value = "bits_per_byte" if text else "accuracy"
    heading = "bits a byte" if text else "accuracy"
    tasks = [] if text else list(found[0]["tasks"])
    table = Table("keys", "setting", "bytes", "kept", heading, "spread", "nats", *tasks)
    for point in found:
        shares = f"{point['bytes_share']:.3f}", f"{point['kept']:.3f}"
        values = f"{point[value]:.4f}", f"{point['spread']:.4f}", f"{point['nats']:.4f}"
        each = (f"{point['tasks'][task]['accuracy']:.3f}" for task in tasks)
        table.add_row(point["line"], point["setting"], *shares, *values, *each)
    table.caption = (
        "bytes: of the softmax layers' memory, as a share of that for all keys; kept: of the keys behind the window"
    )
    if not text:
        table.caption += f"; accuracy, nats and bytes: of {', '.join(plan.tasks)}"
    print_table(table, console)
    table = Table("keys", *(f"{budget:.1%} of the bytes" for budget in budgets), title=f"{heading} at equal bytes")
    table.caption = f"full has {found[0][value]:.4f}"
    for line in dict.fromkeys(point["line"] for point in found if point["kind"] != "full"):
        values = [at_budget(found, line, value, budget) for budget in budgets]
        table.add_row(line, *("" if each is None else f"{each:.4f}" for each in values))
    print_table(table, console)
    if text:
        return
    chosen = [found[0], *nearest(found, plan.judged_at)]
    bins = [each["oracle"] for each in found[0]["by_oracle_share"]]
    table = Table("keys", "setting", *(f"{low:.2f} to {high:.2f}" for low, high in bins))
    table.title = f"accuracy (and bytes) by oracle share, at the points nearest to {plan.judged_at:.0%} of the bytes"
    for point in chosen:
        cells = (f"{each['accuracy']:.3f} ({each['bytes_share']:.2f})" for each in point["by_oracle_share"])
        table.add_row(point["line"], point["setting"], *cells)
    print_table(table, console)


def plot(found: Points, path: Path, plan: Plan, *, text: bool) -> None:
    """What counts and the likelihood against the bytes, a line a way; of tasks also accuracy by the oracle share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        [("bits_per_byte", "bits a byte")]
        if text
        else [("accuracy", "share of right answers"), ("nats", "nats an answer")]
    )
    figure, axes = pyplot.subplots(
        1, len(panels) + (not text), figsize=(3.8 * (len(panels) + (not text)), 3.8), squeeze=False
    )
    full = next(point for point in found if point["kind"] == "full")
    lines = list(dict.fromkeys(point["line"] for point in found if point["kind"] != "full"))
    for axis, (value, label) in zip(axes[0], panels, strict=False):
        axis.axhline(full[value], color="grey", linestyle="--", label="full")
        for color, line in enumerate(lines):
            own = sorted((p for p in found if p["line"] == line), key=lambda point: point["bytes_share"])
            x, y = [point["bytes_share"] for point in own], [point[value] for point in own]
            spread = [point["spread"] if value != "nats" else 0.0 for point in own]
            axis.errorbar(x, y, yerr=spread, color=f"C{color}", marker=".", capsize=2, label=line)
        axis.set(xlabel="bytes held / bytes of all keys", ylabel=label, xlim=(0, 1.05))
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    if not text:
        axis = axes[0][-1]
        for point in [full, *nearest(found, plan.judged_at)]:
            x = [float(np.mean(each["oracle"])) for each in point["by_oracle_share"]]
            y = [each["accuracy"] for each in point["by_oracle_share"]]
            color = "grey" if point is full else f"C{lines.index(point['line'])}"
            axis.plot(x, y, marker=".", color=color, label=f"{point['line']}, {point['bytes_share']:.0%}")
        axis.set(xlabel="oracle share of an example", ylabel="share of right answers")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
