"""What the figures of jaxbuf.bench.step say: as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxbuf.bench.kernel_figures import Row

BETWEEN = "between kernels"
AGREES = 0.1  # how far a kernel's time may lie from that of jaxbuf bench kernels


def compare_forms(figures: Sequence[Row]) -> list[Row]:
    """How many times faster the buffered form's step is than the recurrent one's, wherever there are both."""
    ms = {(row["devices"], row["batch"], row["form"]): row["ms"] for row in figures}
    places = sorted({place[:2] for place in ms})
    both = [place for place in places if (*place, "recurrent") in ms and (*place, "buffered") in ms]
    return [
        {
            "devices": place[0],
            "batch": place[1],
            "buffered_over_recurrent": ms[*place, "recurrent"] / ms[*place, "buffered"],
        }
        for place in both
    ]


def compare_devices(figures: Sequence[Row]) -> list[Row]:
    """How many times faster a step of so many devices is than the same one of the fewest."""
    found = []
    for row in figures:
        same = [other for other in figures if all(other[name] == row[name] for name in ("form", "batch"))]
        fewest = min(same, key=lambda other: other["devices"])
        if fewest["devices"] < row["devices"]:
            place = {name: row[name] for name in ("form", "batch", "devices")}
            found.append(place | {"fewest": fewest["devices"], "times_faster": fewest["ms"] / row["ms"]})
    return found


def named(row: Row, figures: Sequence[Row]) -> str:
    """What a row is called beside the others: with its devices where not all are of one."""
    several = any(other["devices"] != 1 for other in figures)
    return f"{row['form']} {row['batch']}" + (f" on {row['devices']}" if several else "")


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of each part of a step, and of what the wall clock has beside them."""
    rest = row["ms"] - row["device_ms"]
    return row["parts_ms"] | ({BETWEEN: rest} if rest > 0 else {})


def show(console: Console, figures: Sequence[Row], record: Row) -> None:
    """Prints the tables, and what they were measured on."""
    counts = sorted({row["devices"] for row in figures})
    places = [f"{count} device{'s' if count > 1 else ''}" for count in counts]
    several = ["devices"] if counts != [1] else []
    table = Table(
        *("form", "batch", *several, "ms", "tokens/s", "floor", "achieved", "us a layer", "share", "memory"),
        title=f"{record['model']['name']} in {record['model']['dtype']}, on {' and on '.join(places)}",
        caption="ms and floor: of a step; us a layer and share: of the recurrence's kernel in a trace (of all "
        "operations in its scope where there is no kernel); memory: what the program needs, in GB"
        + "; all but ms and tokens/s: of one device"
        * bool(several),
        collapse_padding=True,
        pad_edge=False,
    )
    for row in figures:
        numbers = [f"{row['ms']:.3f}", f"{row['tokens_per_s']:.0f}", f"{row['floor_ms']:.3f}", f"{row['achieved']:.3f}"]
        recurrence = row["recurrence"]
        numbers += [f"{recurrence['us']:.1f}", f"{recurrence['share']:.3f}", f"{row['program_bytes'] / 1e9:.2f}"]
        table.add_row(row["form"], str(row["batch"]), *(str(row[name]) for name in several), *numbers)
    console.print(table)
    names = sorted({name for row in figures for name in parts(row)}, key=lambda name: -_most(figures, name))
    headings = (named(row, figures) for row in figures)
    table = Table("part", *headings, caption="ms a step", collapse_padding=True, pad_edge=False)
    for name in names:
        table.add_row(name, *(f"{parts(row).get(name, 0.0):.3f}" for row in figures))
    console.print(table)
    say = _Say(console)
    for ratio in compare_forms(figures):
        where = f", on {ratio['devices']}" if several else ""
        say(f"batch {ratio['batch']}{where}: buffered over recurrent {ratio['buffered_over_recurrent']:.3f}")
    for ratio in compare_devices(figures):
        what = f"{ratio['form']}, batch {ratio['batch']}: {ratio['devices']} devices over {ratio['fewest']}"
        say(f"{what} {ratio['times_faster']:.3f}")
    for row in figures:
        if row["devices"] > 1:
            say(f"{named(row, figures)}: {row['exchange_ms']:.3f} ms of a step move numbers between devices, or wait")
    for row in figures:
        if row["kernel_us"]:
            away = row["recurrence"]["us"] / row["kernel_us"] - 1
            verdict = "agrees" if abs(away) <= AGREES else "DOES NOT AGREE"
            words = f"{row['recurrence']['us']:.1f} us a layer, {row['kernel_us']:.1f} in jaxbuf bench kernels"
            say(f"{row['form']}, batch {row['batch']}: {verdict} within {AGREES:.0%}: {words} ({away:+.1%})")
    for row in figures:
        moved = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in row["bytes"].items())
        each = f", on each of {row['devices']} devices" if row["devices"] > 1 else ""
        say(f"{row['form']}, batch {row['batch']}: a step moves {moved}{each}")
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
    several = any(row["devices"] != 1 for row in figures)
    labels = [f"{row['form']}\nbatch {row['batch']}" for row in figures]
    if several:
        labels = [f"{label}\n{row['devices']} devices" for label, row in zip(labels, figures, strict=True)]
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
