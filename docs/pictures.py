"""Draws the pictures of the README and of these pages: `python docs/pictures.py`, with matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch, Rectangle

RING = 8  # entries that a ring holds here
READ, WRITTEN, PENDING, EMPTY = "#b9d3ee", "#e07a5f", "#f4d58d", "white"


def main() -> None:
    steps = (
        ("a step", 3, 1, 0, False, "reads the checkpoint and the entries,\nwrites one entry"),
        ("three drafts", 4, 1, 3, False, "are entries behind the committed ones,\nchecked in one step"),
        ("two are wrong", 6, 0, 0, False, "the count of entries goes back by two:\nnothing is copied"),
        ("the ring is full", 0, 1, 0, True, "its entries are folded into the\ncheckpoint, written once"),
    )
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for number, step in enumerate(steps):
        _draw_step(axes, -1.5 * number, *step)
    axes.text(1.0, 0.95, "checkpoint\n(all tokens before)", ha="center", fontsize=8)
    axes.text(2.4 + RING * 0.3, 0.95, "ring of recent entries", ha="center", fontsize=8)
    for place, (color, label) in enumerate(((READ, "read"), (WRITTEN, "written"), (PENDING, "written, not committed"))):
        axes.add_patch(Rectangle((0.2 + 3.2 * place, -5.35), 0.35, 0.35, facecolor=color, edgecolor="black"))
        axes.text(0.7 + 3.2 * place, -5.2, label, va="center", fontsize=8)
    axes.set(xlim=(-2.2, 12.4), ylim=(-5.5, 1.6))
    axes.axis("off")
    figure.savefig(Path(__file__).parent / "step.png", dpi=140)


def _draw_step(axes, y: float, name: str, held: int, new: int, pending: int, folds: bool, told: str) -> None:
    """One row: `held` entries that are read, then new and pending ones; a fold writes the checkpoint."""
    axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=9, fontweight="bold")
    style = {"boxstyle": "round,pad=0.05", "edgecolor": "black"}
    axes.add_patch(FancyBboxPatch((0.25, y - 0.1), 1.5, 0.7, facecolor=WRITTEN if folds else READ, **style))
    colors = [READ] * held + [WRITTEN] * new + [PENDING] * pending
    colors += [EMPTY] * (RING - len(colors))
    for place, color in enumerate(colors):
        corner = 2.4 + 0.6 * place, y
        axes.add_patch(Rectangle(corner, 0.5, 0.5, facecolor=color, edgecolor="black"))
    axes.text(7.5, y + 0.25, told, va="center", fontsize=8.5)


if __name__ == "__main__":
    main()
