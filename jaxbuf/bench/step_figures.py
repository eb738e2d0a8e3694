"""What the figures of jaxbuf.bench.step say: as tables and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxbuf.bench import step_parts
from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.step_parts import PRODUCTS
from jaxbuf.terminal import print_table

BETWEEN = "between kernels"
AGREES = 0.1  # how far a kernel's time may lie from that of jaxbuf bench kernels


def compare_forms(figures: Sequence[Row]) -> list[Row]:
    """How many times faster the buffered form's step is than the recurrent one's, wherever there are both."""
    names = "devices", "batch", "drafts"
    ms = {(*(row[name] for name in names), row["form"]): row["ms"] for row in figures}
    places = sorted({place[:-1] for place in ms})
    both = [place for place in places if (*place, "recurrent") in ms and (*place, "buffered") in ms]
    return [
        dict(zip(names, place, strict=True))
        | {"buffered_over_recurrent": ms[*place, "recurrent"] / ms[*place, "buffered"]}
        for place in both
    ]


def compare_devices(figures: Sequence[Row]) -> list[Row]:
    """How many times faster a step of so many devices is than the same one of the fewest."""
    found = []
    for row in figures:
        same = [other for other in figures if all(other[name] == row[name] for name in ("form", "batch", "drafts"))]
        fewest = min(same, key=lambda other: other["devices"])
        if fewest["devices"] < row["devices"]:
            place = {name: row[name] for name in ("form", "batch", "drafts", "devices")}
            found.append(place | {"fewest": fewest["devices"], "times_faster": fewest["ms"] / row["ms"]})
    return found


def compare_drafts(figures: Sequence[Row]) -> list[Row]:
    """How many times as long a step that verifies drafts takes as the plain one."""
    names = "form", "batch", "devices"
    plain = {tuple(row[name] for name in names): row["ms"] for row in figures if not row["drafts"]}
    return [
        {name: row[name] for name in (*names, "drafts", "accepted")}
        | {"over_plain": row["ms"] / plain[tuple(row[name] for name in names)]}
        for row in figures
        if row["drafts"] and tuple(row[name] for name in names) in plain
    ]


def named(row: Row, figures: Sequence[Row]) -> str:
    """What a row is called beside the others: with its devices where not all are of one."""
    several = any(other["devices"] != 1 for other in figures)
    drafts = f", {row['accepted']} of {1 + row['drafts']} tokens" if row["drafts"] else ""
    return f"{row['form']} {row['batch']}{drafts}" + (f" on {row['devices']}" if several else "")


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of each part of a step, and of what the wall clock has beside them."""
    rest = row["ms"] - row["device_ms"]
    return step_parts.parts(row) | ({BETWEEN: rest} if rest > 0 else {})


def show(console: Console, figures: Sequence[Row], record: Row) -> None:
    """Prints the tables, and what they were measured on."""
    counts = sorted({row["devices"] for row in figures})
    places = [f"{count} device{'s' if count > 1 else ''}" for count in counts]
    several = ["devices"] if counts != [1] else []
    drafts = ["tokens"] if any(row["drafts"] for row in figures) else []
    table = Table(
        *("form", "batch", *drafts, *several, "ms", "tokens/s", "floor", "achieved", "us a layer", "share", "memory"),
        title=f"{record['model']['name']} in {record['model']['dtype']}, on {' and on '.join(places)}",
        caption="ms and floor: of a step; us a layer and share: of the recurrence's kernel in a trace (of all "
        "operations in its scope where there is no kernel); memory: what the program needs, in GB"
        + "; tokens: that a row gets of those that a step reads" * bool(drafts)
        + "; all but ms and tokens/s: of one device" * bool(several),
    )
    for row in figures:
        numbers = [f"{row['ms']:.3f}", f"{row['tokens_per_s']:.0f}", f"{row['floor_ms']:.3f}", f"{row['achieved']:.3f}"]
        recurrence = row["recurrence"]
        numbers += [f"{recurrence['us']:.1f}", f"{recurrence['share']:.3f}", f"{row['program_bytes'] / 1e9:.2f}"]
        tokens = [f"{row['accepted']} of {1 + row['drafts']}"] * len(drafts)
        table.add_row(row["form"], str(row["batch"]), *tokens, *(str(row[name]) for name in several), *numbers)
    print_table(table, console)
    show_parts(console, figures)
    say = _Say(console)
    for ratio in compare_forms(figures):
        where = f", on {ratio['devices']}" if several else ""
        where += f", {ratio['drafts']} drafts" if ratio["drafts"] else ""
        say(f"batch {ratio['batch']}{where}: buffered over recurrent {ratio['buffered_over_recurrent']:.3f}")
    for ratio in compare_devices(figures):
        of_drafts = f", {ratio['drafts']} drafts" if ratio["drafts"] else ""
        what = f"{ratio['form']}, batch {ratio['batch']}{of_drafts}: {ratio['devices']} devices over {ratio['fewest']}"
        say(f"{what} {ratio['times_faster']:.3f}")
    for ratio in compare_drafts(figures):
        what = f"{ratio['accepted']} of {1 + ratio['drafts']} tokens accepted"
        where = f", on {ratio['devices']}" if several else ""
        say(f"{ratio['form']}, batch {ratio['batch']}{where}: {what}, over the plain step {ratio['over_plain']:.3f}")
    for row in figures:
        if row["torch_ms"]:
            ours = parts(row)[PRODUCTS]
            words = f"{ours:.3f} ms, torch's {row['torch_ms']:.3f} ({ours / row['torch_ms'] - 1:+.1%})"
            say(f"{named(row, figures)}: matrix products {words}")
    for row in record["torch"]:
        if "error" in row:
            say(f"torch: {row['error']}")
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
        words = (
            f"a call of one step takes {row['single_ms']:.2f} ms, each of {row['steps']} in one call {row['ms']:.2f}"
        )
        say(f"{named(row, figures)}: {words}")
    for row in figures:
        moved = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in row["bytes"].items())
        each = f", on each of {row['devices']} devices" if row["devices"] > 1 else ""
        say(f"{named(row, figures)}: a step moves {moved}{each}")
    peaks = [row["peak_bytes"] for row in figures if row["peak_bytes"]]
    if peaks:
        say(f"most memory in use on the device: {max(peaks) / 1e9:.2f} GB")
    buffers = record["command_buffers"]
    asked = f"asked for {buffers['asked']!r}, XLA_FLAGS {' '.join(buffers['xla_flags']) or 'without any of them'}"
    say(f"command buffers {'on' if buffers['on'] else 'off'} in the timed runs ({asked}); off in the traces")
    say(f"memory filled with random numbers, the cursor set to {record['context']} tokens; the prompts were not read")


def show_parts(console: Console, figures: Sequence[Row]) -> None:
    """Prints the table of the parts of each step beside their floors."""
    peers = any(row["torch_ms"] for row in figures)
    table = Table(
        *("step", "part", "ms", "floor", "achieved"),
        *(["torch"] if peers else []),
        caption="ms a step; floor: of the bytes that the part moves; matrix products: of all parts, in which they are "
        "not counted" + "; torch: the same products, by torch" * peers,
    )
    for row in figures:
        found = parts(row)
        for place, (name, ms) in enumerate(sorted(found.items(), key=lambda part: -part[1])):
            floor = row["floors_ms"].get(name)
            numbers = ["", ""] if floor is None or not ms else [f"{floor:.3f}", f"{floor / ms:.3f}"]
            torch = [f"{row['torch_ms']:.3f}" if name == PRODUCTS and row["torch_ms"] else ""] if peers else []
            table.add_row("" if place else named(row, figures), name, f"{ms:.3f}", *numbers, *torch)
        table.add_section()
    print_table(table, console)


class _Say:
    def __init__(self, console: Console):
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def _most(figures: Sequence[Row], name: str) -> float:
    return max(parts(row).get(name, 0.0) for row in figures)


def _from_the_top(axis) -> tuple[list, list]:
    """A legend's handles and labels, in the order in which bars lie above one another."""
    handles, labels = axis.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def plot(figures: Sequence[Row], path: Path) -> None:
    """Stacked bars: the parts of each form's step at each batch, and its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for row in figures for name in parts(row)}, key=lambda name: -_most(figures, name))
    figure, axis = pyplot.subplots(figsize=(4 + 1.2 * len(figures), 5))
    several = any(row["devices"] != 1 for row in figures)
    labels = [f"{row['form']}\nbatch {row['batch']}" for row in figures]
    if any(row["drafts"] for row in figures):
        labels = [
            f"{label}\n{1 + row['drafts']} token{'s' * (row['drafts'] > 0)}"
            for label, row in zip(labels, figures, strict=True)
        ]
    if several:
        labels = [
            f"{label}\n{row['devices']} device{'s' * (row['devices'] > 1)}"
            for label, row in zip(labels, figures, strict=True)
        ]
    below = [0.0] * len(figures)
    for color, name in enumerate(names):
        heights = [parts(row).get(name, 0.0) for row in figures]
        axis.bar(labels, heights, bottom=below, label=name, color="lightgrey" if name == BETWEEN else f"C{color % 10}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    places, floors = range(len(figures)), [row["floor_ms"] for row in figures]
    left, right = ([place + side for place in places] for side in (-0.4, 0.4))
    axis.hlines(floors, left, right, colors="black", linestyles="--", label="floor: bytes over read bandwidth")
    axis.set(ylabel="ms a step")
    axis.legend(*_from_the_top(axis), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
