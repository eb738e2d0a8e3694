"""What the figures of jaxbuf.bench.step say: as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxbuf.bench.kernel_figures import Row

BETWEEN = "between kernels"
AGREES = 0.1  # how far a kernel's time may lie from that of jaxbuf bench kernels


def compare_forms(figures: Sequence[Row]) -> list[Row]:
    """How many times faster the buffered form's step is than the recurrent one's, for each batch with both."""
    ms = {(row["form"], row["batch"]): row["ms"] for row in figures}
    batches = sorted({batch for _, batch in ms})
    both = [batch for batch in batches if ("recurrent", batch) in ms and ("buffered", batch) in ms]
    return [{"batch": b, "buffered_over_recurrent": ms["recurrent", b] / ms["buffered", b]} for b in both]


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of each part of a step, and of what the wall clock has beside them."""
    rest = row["ms"] - row["device_ms"]
    return row["parts_ms"] | ({BETWEEN: rest} if rest > 0 else {})


def show(console: Console, figures: Sequence[Row], record: Row) -> None:
    """Prints the tables, and what they were measured on."""
    table = Table(
        *("form", "batch", "ms", "tokens/s", "floor", "achieved", "us a layer", "share", "memory"),
        caption="ms and floor: of a step; us a layer and share: of the recurrence's kernel in a trace (of all "
        "operations in its scope where there is no kernel); memory: what the program needs, in GB",
        collapse_padding=True,
        pad_edge=False,
    )
    for row in figures:
        numbers = [f"{row['ms']:.3f}", f"{row['tokens_per_s']:.0f}", f"{row['floor_ms']:.3f}", f"{row['achieved']:.3f}"]
        recurrence = row["recurrence"]
        numbers += [f"{recurrence['us']:.1f}", f"{recurrence['share']:.3f}", f"{row['program_bytes'] / 1e9:.2f}"]
        table.add_row(row["form"], str(row["batch"]), *numbers)
    console.print(table)
    names = sorted({name for row in figures for name in parts(row)}, key=lambda name: -_most(figures, name))
    headings = (f"{row['form']} {row['batch']}" for row in figures)
    table = Table("part", *headings, caption="ms a step", collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_row(name, *(f"{parts(row).get(name, 0.0):.3f}" for row in figures))
    console.print(table)
    say = _Say(console)
    for ratio in compare_forms(figures):
        say(f"batch {ratio['batch']}: buffered over recurrent {ratio['buffered_over_recurrent']:.3f}")
    for row in figures:
        if row["kernel_us"]:
            away = row["recurrence"]["us"] / row["kernel_us"] - 1
            verdict = "agrees" if abs(away) <= AGREES else "DOES NOT AGREE"
            words = f"{row['recurrence']['us']:.1f} us a layer, {row['kernel_us']:.1f} in jaxbuf bench kernels"
            say(f"{row['form']}, batch {row['batch']}: {verdict} within {AGREES:.0%}: {words} ({away:+.1%})")
    for row in figures:
        moved = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in row["bytes"].items())
        say(f"{row['form']}, batch {row['batch']}: a step moves {moved}")
    peaks = [row["peak_bytes"] for row in figures if row["peak_bytes"]]
    if peaks:
        say(f"most memory in use on the device: {max(peaks) / 1e9:.2f} GB")
    buffers = record["command_buffers"]
    asked = f"asked for {buffers['asked']!r}, XLA_FLAGS {' '.join(buffers['xla_flags']) or 'without any of them'}"
    say(f"command buffers {'on' if buffers['on'] else 'off'} in the timed runs ({asked}); off in the traces")
    say(f"memory filled with random numbers, the cursor set to {record['context']} tokens; the prompts were not read")


class _Say:
    def __init__(self, console: Console):
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def _most(figures: Sequence[Row], name: str) -> float:
    return max(parts(row).get(name, 0.0) for row in figures)


def plot(figures: Sequence[Row], path: Path) -> None:
    """Stacked bars: the parts of each form's step at each batch, and its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for row in figures for name in parts(row)}, key=lambda name: -_most(figures, name))
    figure, axis = pyplot.subplots(figsize=(2.5 + 1.6 * len(figures), 6))
    labels = [f"{row['form']}\nbatch {row['batch']}" for row in figures]
    below = [0.0] * len(figures)
    for color, name in enumerate(names):
        heights = [parts(row).get(name, 0.0) for row in figures]
        axis.bar(labels, heights, bottom=below, label=name, color="lightgrey" if name == BETWEEN else f"C{color % 10}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    places, floors = range(len(figures)), [row["floor_ms"] for row in figures]
    left, right = ([place + side for place in places] for side in (-0.4, 0.4))
    axis.hlines(floors, left, right, colors="black", linestyles="--", label="floor: bytes over read bandwidth")
    axis.set(ylabel="ms a step")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
