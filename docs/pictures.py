"""Draws the pictures of the README and of these pages: `python docs/pictures.py`, with matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

FOLDER = Path(__file__).parent
RING = 8  # entries that a ring holds here
READ, WRITTEN, PENDING, EMPTY = "#b9d3ee", "#e07a5f", "#f4d58d", "white"
KEPT, REST = "#8fc9a0", "#e6e6e6"


def main() -> None:
    draw_overview()
    draw_step()
    draw_fold()
    draw_rejection()
    draw_tree()
    draw_split()


def draw_overview() -> None:
    """step.png, the README's: a step, drafts, a rejection and a fold, one below the other."""
    steps = (
        ("a step", 3, 1, 0, False, "reads the checkpoint and the entries,\nwrites one entry"),
        ("three drafts", 4, 1, 3, False, "are entries behind the committed ones,\nchecked in one step"),
        ("two are wrong", 6, 0, 0, False, "the count of entries goes back by two:\nnothing is copied"),
        ("the ring is full", 0, 1, 0, True, "its entries are folded into the\ncheckpoint, written once"),
    )
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for number, (name, held, new, pending, folds, told) in enumerate(steps):
        y = -1.5 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=9, fontweight="bold")
        checkpoint(axes, 0.25, y, WRITTEN if folds else READ)
        ring(axes, 2.4, y, [READ] * held + [WRITTEN] * new + [PENDING] * pending)
        axes.text(7.5, y + 0.25, told, va="center", fontsize=8.5)
    axes.text(1.0, 0.95, "checkpoint\n(all tokens before)", ha="center", fontsize=8)
    axes.text(2.4 + RING * 0.3, 0.95, "ring of recent entries", ha="center", fontsize=8)
    legend(axes, -5.35, ((READ, "read"), (WRITTEN, "written"), (PENDING, "written, not committed")))
    save(figure, axes, (-2.2, 12.4), (-5.5, 1.6), "step.png")


def draw_step() -> None:
    """one_step.png: what one step reads and writes, in bytes of a layer of Qwen3.5-4B."""
    figure, axes = canvas(2.5)
    checkpoint(axes, 0.25, 1.2, READ, "checkpoint\n2 MiB")
    ring(axes, 3.2, 1.2, [READ] * 5 + [WRITTEN], [f"$u_{number}, k_{number}$" for number in range(1, 7)], width=0.85)
    axes.text(3.2 + 0.85 * 3, 2.05, "ring: some 12 kB an entry", ha="center", fontsize=8.5)
    axes.text(1.0, -0.35, "$q$ on the checkpoint,\ndecayed", ha="center", va="center", fontsize=9)
    axes.text(4.9, -0.35, "$q$ on each entry,\ndecayed since then", ha="center", va="center", fontsize=9)
    arrow(axes, (1.0, 1.0), (1.0, 0.05))
    arrow(axes, (4.9, 1.0), (4.9, 0.05))
    axes.text(2.9, -0.35, "+", ha="center", va="center", fontsize=14)
    axes.text(7.0, -0.35, "=  the output $o_6$", ha="left", va="center", fontsize=10)
    axes.text(8.9, 1.45, "the new token's entry:\nall that the step writes", fontsize=8.5, va="center")
    arrow(axes, (8.8, 1.45), (8.3, 1.45), WRITTEN)
    legend(axes, -1.45, ((READ, "read"), (WRITTEN, "written")))
    save(figure, axes, (-0.1, 12.4), (-1.6, 2.4), "one_step.png")


def draw_fold() -> None:
    """fold.png: the ring is full; the next step folds, and its own entry is the first of an empty ring."""
    figure, axes = canvas(2.5)
    rows = (
        ("the ring is full", READ, [READ] * RING, "a ninth entry would not fit"),
        (
            "the step that folds",
            WRITTEN,
            [READ] * RING,
            "reads as ever, and writes to the checkpoint\nwhat it is with all entries added",
        ),
        ("after it", READ, [WRITTEN], "that step's entry is the ring's first;\nno output has changed"),
    )
    for number, (name, state, colors, told) in enumerate(rows):
        y = -1.25 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=9, fontweight="bold")
        checkpoint(axes, 0.25, y, state)
        ring(axes, 2.4, y, colors)
        axes.text(7.5, y + 0.25, told, va="center", fontsize=8.5)
    arrow(axes, (2.35, -1.0), (1.85, -1.0), WRITTEN)
    legend(axes, -3.35, ((READ, "read"), (WRITTEN, "written")))
    save(figure, axes, (-2.6, 12.6), (-3.5, 0.9), "fold.png")


def draw_rejection() -> None:
    """rejection.png: three drafts behind the newest token, of which the model keeps the first."""
    figure, axes = canvas(3.0)
    text, drafted = ["The", "cat", "sat", "on"], ["his", "hat"]
    rows = (
        (
            "a step",
            [READ] * 2 + [WRITTEN] + [PENDING] * 3,
            [*text, *drafted],
            "committed 2, pending 4",
            "reads the newest token and three drafts",
        ),
        ("the model", [], [], "", "its own choice at each place"),
        ("commit", [READ] * 4, [*text, *drafted], "committed 4, pending 0", "integers change, nothing else"),
        (
            "next step",
            [READ] * 4 + [WRITTEN, PENDING],
            [*text, "the", "mat"],
            "committed 4, pending 2",
            "writes over the rejected entries",
        ),
    )
    for number, (name, colors, texts, counts, told) in enumerate(rows):
        y = -1.0 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=9, fontweight="bold")
        if texts:
            ring(axes, 0.2, y, colors, texts, width=0.85)
        axes.text(5.7, y + 0.25, counts, va="center", fontsize=8.5, family="monospace")
        axes.text(10.0, y + 0.25, told, va="center", fontsize=8.5)
    for place, (choice, judged, color) in enumerate((("on", "the draft", "#3f8f56"), ("the", "another", WRITTEN))):
        x = 0.2 + 0.85 * (place + 3.45)
        axes.text(x, -0.65, choice, ha="center", va="center", fontsize=9)
        axes.text(x, -1.08, judged, ha="center", fontsize=7, color=color)
    legend(axes, -3.95, ((READ, "committed"), (WRITTEN, "newest token, pending"), (PENDING, "drafts, pending")))
    save(figure, axes, (-1.7, 15.2), (-4.1, 0.8), "rejection.png")


def draw_tree() -> None:
    """tree.png: five drafts as a tree, the path that is kept, and the list of places that is reordered."""
    figure, axes = canvas(3.2)
    places = {-1: (0.0, 0.0), 0: (1.8, 0.7), 1: (1.8, -0.9), 2: (3.6, 1.2), 3: (3.6, 0.1), 4: (5.4, 0.1)}
    parents, names = {0: -1, 1: -1, 2: 0, 3: 0, 4: 3}, {-1: "sat", 0: "on", 1: "by", 2: "his", 3: "the", 4: "mat"}
    path = (-1, 0, 3, 4)
    for node, parent in parents.items():
        (x0, y0), (x1, y1) = places[parent], places[node]
        axes.plot(
            [x0 + 0.45, x1 - 0.45], [y0, y1], color=KEPT if node in path else "grey", linewidth=2 if node in path else 1
        )
    for node, (x, y) in places.items():
        color = READ if node < 0 else KEPT if node in path else PENDING
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.4, y - 0.22), 0.8, 0.44, boxstyle="round,pad=0.04", facecolor=color, edgecolor="black"
            )
        )
        axes.text(x, y, names[node], ha="center", va="center", fontsize=9)
        if node >= 0:
            axes.text(x, y - 0.48, f"draft {node}", ha="center", fontsize=7)
    axes.text(2.7, 1.75, "each draft reads its ancestors alone", ha="center", fontsize=8.5)
    x = 7.4
    axes.text(x, 1.65, "ring places 3 to 7, as written", fontsize=8.5)
    order = [names[node] for node in range(5)]
    ring(axes, x, 0.95, [KEPT, PENDING, PENDING, KEPT, KEPT], order, width=0.8, size=5)
    axes.text(x, 0.35, "order of these places, once the path is kept", fontsize=8.5)
    ring(axes, x, -0.4, [KEPT] * 3 + [REST] * 2, ["3", "6", "7", "4", "5"], width=0.8, size=5)
    axes.text(x, -0.95, "entries stay where they are;\nthe list of places is permuted", fontsize=8.5, va="center")
    legend(axes, -1.95, ((READ, "committed"), (KEPT, "kept"), (PENDING, "rejected")))
    save(figure, axes, (-0.6, 12.0), (-2.1, 2.1), "tree.png")


def draw_split() -> None:
    """split.png: the two halves of a number of a split checkpoint, and who reads and writes them."""
    figure, axes = canvas(2.6)
    for x, name in ((2.6, "high half, bfloat16"), (6.2, "low half, bfloat16 or int8")):
        axes.text(x + 1.5, 0.75, name, ha="center", fontsize=9)
    rows = (
        ("a step", READ, EMPTY, "reads half of the bytes; rounding is seen, not kept"),
        ("a fold", WRITTEN, WRITTEN, "reads both, adds the entries in float32, writes both"),
    )
    for number, (name, high, low, told) in enumerate(rows):
        y = -1.0 * number
        axes.text(2.4, y + 0.25, name, ha="right", va="center", fontsize=9, fontweight="bold")
        for x, color in ((2.6, high), (6.2, low)):
            axes.add_patch(Rectangle((x, y), 3.0, 0.5, facecolor=color, edgecolor="black"))
        axes.text(5.9, y + 0.25, "+", ha="center", va="center", fontsize=12)
        axes.text(9.5, y + 0.25, told, va="center", fontsize=8.5)
    axes.text(2.6, -1.55, "a number of the checkpoint = high + low", fontsize=8.5, va="center")
    legend(axes, -2.35, ((READ, "read"), (WRITTEN, "read and written"), (EMPTY, "not touched")), 2.6)
    save(figure, axes, (1.2, 15.4), (-2.5, 1.1), "split.png")


def canvas(height: float) -> tuple[Figure, Axes]:
    return pyplot.subplots(figsize=(9, height), layout="constrained")


def checkpoint(axes: Axes, x: float, y: float, color: str, text: str = "") -> None:
    """A checkpoint's box of 1.5 by 0.7."""
    axes.add_patch(
        FancyBboxPatch((x, y - 0.1), 1.5, 0.7, boxstyle="round,pad=0.05", facecolor=color, edgecolor="black")
    )
    axes.text(x + 0.75, y + 0.25, text, ha="center", va="center", fontsize=8)


def ring(
    axes: Axes,
    x: float,
    y: float,
    colors: list[str],
    texts: list[str] | None = None,
    width: float = 0.6,
    size: int = RING,
) -> None:
    """A ring's places from x on, as long as `texts` or `size`; those without a color are empty."""
    for place in range(len(texts) if texts else size):
        color = colors[place] if place < len(colors) else EMPTY
        axes.add_patch(Rectangle((x + width * place, y), width - 0.1, 0.5, facecolor=color, edgecolor="black"))
        if texts:
            shade = "grey" if color == EMPTY else "black"
            axes.text(
                x + width * place + width / 2 - 0.05,
                y + 0.25,
                texts[place],
                ha="center",
                va="center",
                fontsize=8,
                color=shade,
            )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})


def legend(axes: Axes, y: float, labels: tuple[tuple[str, str], ...], x: float = 0.2) -> None:
    for place, (color, label) in enumerate(labels):
        axes.add_patch(Rectangle((x + 3.2 * place, y), 0.35, 0.35, facecolor=color, edgecolor="black"))
        axes.text(x + 0.5 + 3.2 * place, y + 0.15, label, va="center", fontsize=8)


def save(figure: Figure, axes: Axes, x: tuple[float, float], y: tuple[float, float], name: str) -> None:
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    figure.savefig(FOLDER / name, dpi=140)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
