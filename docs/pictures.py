"""Draws the pictures of the README and of these pages: `python docs/pictures.py`, with matplotlib."""

import json
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

FOLDER = Path(__file__).parent
RING = 8  # entries that a ring holds here
READ, WRITTEN, PENDING, EMPTY = "#b9d3ee", "#e07a5f", "#f4d58d", "white"
KEPT, REST = "#8fc9a0", "#e6e6e6"
WIDTH = 7.5  # inches, which pages show as some 740 pixels, so that a point is 1.4 of them
TEXT, SMALL = 9.5, 8.5  # sizes of text in points


def main() -> None:
    draw_overview()
    draw_step()
    draw_fold()
    draw_rejection()
    draw_tree()
    draw_split()
    draw_gates()
    draw_layer_step()


def draw_overview() -> None:
    """step.png, the README's: a step, drafts, a rejection and a fold, one below the other."""
    steps = (
        ("a step", 3, 1, 0, False, "reads the checkpoint and the\nentries, writes one entry"),
        ("three drafts", 4, 1, 3, False, "are entries behind the committed\nones, checked in one step"),
        ("two are wrong", 6, 0, 0, False, "the count of entries goes back\nby two: nothing is copied"),
        ("the ring is full", 0, 1, 0, True, "its entries are folded into the\ncheckpoint, written once"),
    )
    figure, axes = canvas(3.6)
    for number, (name, held, new, pending, folds, told) in enumerate(steps):
        y = -1.35 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=TEXT, fontweight="bold")
        checkpoint(axes, 0.25, y, WRITTEN if folds else READ)
        ring(axes, 2.2, y, [READ] * held + [WRITTEN] * new + [PENDING] * pending)
        axes.text(7.2, y + 0.25, told, va="center", fontsize=TEXT)
    axes.text(1.0, 0.85, "checkpoint\n(all tokens before)", ha="center", fontsize=TEXT)
    axes.text(2.2 + RING * 0.3, 0.85, "ring of recent entries", ha="center", fontsize=TEXT)
    legend(axes, -5.05, ((READ, "read"), (WRITTEN, "written"), (PENDING, "written, not committed")))
    save(figure, axes, (-2.8, 11.9), (-5.15, 1.75), "step.png")


def draw_step() -> None:
    """one_step.png: what one step reads and writes, in bytes of a layer of Qwen3.5-4B."""
    figure, axes = canvas(2.7)
    checkpoint(axes, 0.25, 1.2, READ, "checkpoint\n2 MiB")
    names = [f"$u_{number}, k_{number}$" for number in range(1, 7)]
    ring(axes, 2.9, 1.2, [READ] * 5 + [WRITTEN], names, width=0.95)
    axes.text(2.9 + 0.95 * 3, 2.0, "ring: some 12 kB an entry", ha="center", fontsize=TEXT)
    axes.text(1.0, -0.3, "$q$ on the checkpoint,\ndecayed", ha="center", va="center", fontsize=TEXT)
    axes.text(5.2, -0.3, "$q$ on each entry,\ndecayed since then", ha="center", va="center", fontsize=TEXT)
    arrow(axes, (1.0, 1.0), (1.0, 0.2))
    arrow(axes, (5.2, 1.0), (5.2, 0.2))
    axes.text(3.15, -0.3, "+", ha="center", va="center", fontsize=14)
    axes.text(7.2, -0.3, "=  the output $o_6$", ha="left", va="center", fontsize=TEXT + 1)
    axes.text(9.3, 1.45, "the new token's\nentry: all that\nthe step writes", fontsize=TEXT, va="center")
    arrow(axes, (9.2, 1.45), (8.6, 1.45), WRITTEN)
    legend(axes, -1.4, ((READ, "read"), (WRITTEN, "written")))
    save(figure, axes, (-0.6, 11.9), (-1.5, 2.35), "one_step.png")


def draw_fold() -> None:
    """fold.png: the ring is full; the next step folds, and its own entry is the first of an empty ring."""
    figure, axes = canvas(2.8)
    rows = (
        ("the ring is full", READ, [READ] * RING, "a ninth entry would not fit"),
        ("the step that folds", WRITTEN, [READ] * RING, "reads as ever, and adds all\nentries to the checkpoint"),
        ("after it", READ, [WRITTEN], "that step's entry is the ring's\nfirst; no output has changed"),
    )
    for number, (name, state, colors, told) in enumerate(rows):
        y = -1.25 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=TEXT, fontweight="bold")
        checkpoint(axes, 0.25, y, state)
        ring(axes, 2.4, y, colors)
        axes.text(7.3, y + 0.25, told, va="center", fontsize=TEXT)
    arrow(axes, (2.35, -1.0), (1.85, -1.0), WRITTEN)
    legend(axes, -3.4, ((READ, "read"), (WRITTEN, "written")))
    save(figure, axes, (-3.2, 11.8), (-3.5, 0.85), "fold.png")


def draw_rejection() -> None:
    """rejection.png: three drafts behind the newest token, of which the model keeps the first."""
    figure, axes = canvas(4.0)
    text, drafted = ["The", "cat", "sat", "on"], ["his", "hat"]
    rows = (
        (
            "a step",
            [READ] * 2 + [WRITTEN] + [PENDING] * 3,
            [*text, *drafted],
            (2, 4),
            "reads the newest token\nand three drafts",
        ),
        ("the model", [], [], None, "its own choice at each place"),
        ("commit", [READ] * 4, [*text, *drafted], (4, 0), "integers change, nothing else"),
        (
            "next step",
            [READ] * 4 + [WRITTEN, PENDING],
            [*text, "the", "mat"],
            (4, 2),
            "writes over the rejected entries",
        ),
    )
    for number, (name, colors, texts, counts, told) in enumerate(rows):
        y = -1.25 * number
        axes.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=TEXT, fontweight="bold")
        if texts:
            ring(axes, 0.2, y, colors, texts, width=0.85)
        if counts:
            told += "\ncommitted {}, pending {}".format(*counts)
        axes.text(5.6, y + 0.25, told, va="center", fontsize=TEXT)
    for place, (choice, judged, color) in enumerate((("on", "the draft", "#2f7a45"), ("the", "another", "#b8472c"))):
        x = 0.2 + 1.3 * place + 0.85 * 3.1
        axes.text(x, -0.85, choice, ha="center", va="center", fontsize=TEXT)
        axes.text(x, -1.35, judged, ha="center", fontsize=TEXT, color=color)
    legend(
        axes, -4.85, ((READ, "committed"), (WRITTEN, "newest token, pending"), (PENDING, "drafts, pending")), gap=3.6
    )
    save(figure, axes, (-1.9, 11.2), (-5.0, 0.8), "rejection.png")


def draw_tree() -> None:
    """tree.png: five drafts as a tree, the path that is kept, and the list of places that is reordered."""
    figure, axes = canvas(3.4)
    places = {-1: (0.0, 0.0), 0: (1.7, 0.75), 1: (1.7, -0.95), 2: (3.4, 1.4), 3: (3.4, 0.1), 4: (5.1, 0.1)}
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
        axes.text(x, y, names[node], ha="center", va="center", fontsize=TEXT)
        if node >= 0:
            axes.text(x, y - 0.56, f"draft {node}", ha="center", fontsize=SMALL)
    axes.text(2.4, 1.95, "each draft reads its ancestors alone", ha="center", fontsize=TEXT)
    x = 6.5
    axes.text(x, 1.65, "ring places 3 to 7, as written", fontsize=TEXT)
    order = [names[node] for node in range(5)]
    ring(axes, x, 0.95, [KEPT, PENDING, PENDING, KEPT, KEPT], order, width=0.9, size=5)
    axes.text(x, 0.4, "their order, once the path is kept", fontsize=TEXT)
    ring(axes, x, -0.3, [KEPT] * 3 + [REST] * 2, ["3", "6", "7", "4", "5"], width=0.9, size=5)
    axes.text(x, -0.85, "entries stay where they are;\nthe list of places is permuted", fontsize=TEXT, va="center")
    legend(axes, -2.1, ((READ, "committed"), (KEPT, "kept"), (PENDING, "rejected")))
    save(figure, axes, (-0.6, 11.2), (-2.2, 2.3), "tree.png")


def draw_split() -> None:
    """split.png: the two halves of a number of a split checkpoint, and who reads and writes them."""
    figure, axes = canvas(2.5)
    for x, name in ((2.6, "high half, bfloat16"), (5.8, "low half, bfloat16 or int8")):
        axes.text(x + 1.3, 0.7, name, ha="center", fontsize=TEXT)
    rows = (
        ("a step", READ, EMPTY, "reads half of the bytes;\nrounding is seen, not kept"),
        ("a fold", WRITTEN, WRITTEN, "reads both, adds the entries\nin float32, writes both"),
    )
    for number, (name, high, low, told) in enumerate(rows):
        y = -1.0 * number
        axes.text(2.4, y + 0.25, name, ha="right", va="center", fontsize=TEXT, fontweight="bold")
        for x, color in ((2.6, high), (5.8, low)):
            axes.add_patch(Rectangle((x, y), 2.6, 0.5, facecolor=color, edgecolor="black"))
        axes.text(5.5, y + 0.25, "+", ha="center", va="center", fontsize=12)
        axes.text(8.7, y + 0.25, told, va="center", fontsize=TEXT)
    axes.text(2.6, -1.45, "a number of the checkpoint = high + low", fontsize=TEXT, va="center")
    legend(axes, -2.3, ((READ, "read"), (WRITTEN, "read and written"), (EMPTY, "not touched")), 2.6)
    save(figure, axes, (1.2, 13.1), (-2.4, 1.1), "split.png")


def draw_gates() -> None:
    """gates.png: which keys the query of token 20 sees in two heads of a write-gated layer with a window of 8."""
    figure, axes = canvas(2.5)
    older, window = 13, 8
    rows = (("head 0", (0, 5, 10)), ("head 1", (0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 12)))
    for number, (name, admitted) in enumerate(rows):
        y = -0.95 * number
        axes.text(-0.15, y + 0.25, name, ha="right", va="center", fontsize=TEXT, fontweight="bold")
        for token in range(older + window):
            color = READ if token >= older else KEPT if token in admitted else EMPTY
            x = 0.55 * token + (0.4 if token >= older else 0)
            axes.add_patch(
                Rectangle((x, y), 0.45, 0.5, facecolor=color, edgecolor="black" if color != EMPTY else "#bbbbbb")
            )
    axes.text(0.55 * older / 2, 0.8, "older keys: those that the head's gate admitted", ha="center", fontsize=TEXT)
    axes.text(0.55 * (older + window / 2) + 0.4, 0.8, "window: all keys", ha="center", fontsize=TEXT)
    for token in (0, older - 1, older, older + window - 1):
        x = 0.55 * token + 0.22 + (0.4 if token >= older else 0)
        axes.text(x, -1.3, str(token), ha="center", fontsize=SMALL)
    axes.text(-0.15, -1.3, "token", ha="right", fontsize=SMALL)
    legend(axes, -2.1, ((READ, "in the window"), (KEPT, "admitted"), (EMPTY, "dropped when it left the window")), 0.0)
    save(figure, axes, (-1.5, 12.4), (-2.2, 1.2), "gates.png")


def draw_layer_step() -> None:
    """layer_step.png, the README's: a Gated DeltaNet layer's step at batch 128, others' beside it, from the record."""
    record = json.loads((FOLDER.parent / "benchmarks" / "kernels.json").read_text())

    def step(part: str, **wanted: object) -> dict:
        wanted |= {"part": part, "batch": 128}
        found = [row for row in record["figures"] if all(row.get(name) == value for name, value in wanted.items())]
        if len(found) != 1:
            raise ValueError(f"{len(found)} figures have {wanted}")
        return found[0]

    rows = (
        ("jaxbuf, buffered", step("decode", phase="staggered"), "#3f7fbf"),
        ("flash-linear-attention 0.6.0,\nits faster state layout", step("fla", state_v_first=True), "#a0a0a0"),
        ("jaxbuf, recurrent:\nthe state written in each step", step("recurrent", phase="staggered"), READ),
        ("flash-linear-attention 0.6.0", step("fla", state_v_first=False), "#a0a0a0"),
    )
    figure, axes = canvas(2.6)
    for place, (_, row, color) in enumerate(rows):
        axes.barh(place, row["us"], 0.62, color=color)
        axes.text(row["us"] + 2, place, f"{row['us']:.1f} us", va="center", fontsize=TEXT)
        if row.get("floor_us"):
            axes.vlines(row["floor_us"], place - 0.31, place + 0.31, colors="black", linestyles="--", linewidth=1.2)
    axes.plot([], [], "k--", linewidth=1.2, label="what its bytes take")
    axes.legend(loc="upper right", frameon=False, fontsize=TEXT)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=TEXT)
    axes.invert_yaxis()
    axes.set_xlim(0, 215)
    axes.set_title(f"One layer's decoding step, 128 requests, {record['device']}", fontsize=TEXT + 1)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    store(figure, "layer_step.png")


def canvas(height: float) -> tuple[Figure, Axes]:
    return pyplot.subplots(figsize=(WIDTH, height), layout="constrained")


def checkpoint(axes: Axes, x: float, y: float, color: str, text: str = "") -> None:
    """A checkpoint's box of 1.5 by 0.7."""
    axes.add_patch(
        FancyBboxPatch((x, y - 0.1), 1.5, 0.7, boxstyle="round,pad=0.05", facecolor=color, edgecolor="black")
    )
    axes.text(x + 0.75, y + 0.25, text, ha="center", va="center", fontsize=TEXT)


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
                fontsize=SMALL,
                color=shade,
            )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color})


def legend(axes: Axes, y: float, labels: tuple[tuple[str, str], ...], x: float = 0.2, gap: float = 3.2) -> None:
    for place, (color, label) in enumerate(labels):
        axes.add_patch(Rectangle((x + gap * place, y), 0.35, 0.35, facecolor=color, edgecolor="black"))
        axes.text(x + 0.5 + gap * place, y + 0.17, label, va="center", fontsize=TEXT)


def save(figure: Figure, axes: Axes, x: tuple[float, float], y: tuple[float, float], name: str) -> None:
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    store(figure, name)


def store(figure: Figure, name: str) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=200)
    Image.open(drawn).convert("RGB").quantize(64).save(FOLDER / name, optimize=True)  # a third of the bytes
    pyplot.close(figure)


if __name__ == "__main__":
    main()
