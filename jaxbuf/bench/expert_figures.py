"""What the figures of jaxbuf.bench.experts say: beside their floors, as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.terminal import print_table

WANTED = 1.5  # times the floor, at most
PLACE = ("hidden", "experts", "chosen", "size", "tokens")


def add_floor(row: Row, case: Any, read: float, rate: float) -> Row:
    """The row with its bytes and its floor, at `read` bytes and `rate` operations a second.

    Args:
      row: With the experts that were drawn, `distinct`.
      case: `jaxbuf.bench.experts.Case`.
    """
    moved = row["distinct"] * case.expert_bytes + case.rest_bytes
    times = 1e6 * moved / read, 1e6 * case.operations / rate
    found = {"bytes": moved, "operations": case.operations, "bytes_us": times[0], "operations_us": times[1]}
    return row | found | {"floor_us": max(times), "over_floor": row["us"] / max(times)}


def by_place(figures: Sequence[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    """The rows that were measured, by what they are of and by implementation."""
    found: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in figures:
        if "us" in row:
            found.setdefault(tuple(row[name] for name in PLACE), {})[row["implementation"]] = row
    return found


def judge(figures: Sequence[Row]) -> list[Row]:
    """Of each case the fastest implementation, and whether it is near enough to the floor."""
    rows = []
    for place, found in by_place(figures).items():
        best = min(found.values(), key=lambda row: row["us"])
        verdict = {"wanted": WANTED, "measured": best["over_floor"], "hit": best["over_floor"] <= WANTED}
        rows.append(dict(zip(PLACE, place, strict=True)) | {"fastest": best["implementation"]} | verdict)
    return rows


def describe(row: Row) -> str:
    """A row as one line, as it comes."""
    words = f"{row['implementation']}: {row['experts']} experts, {row['tokens']} tokens: "
    if "error" in row:
        return words + row["error"]
    return words + f"{row['us']:.1f} us (wall {row['wall_us']:.1f}), {row['over_floor']:.2f} times the floor"


def show(console: Console, figures: Sequence[Row], targets: Sequence[Row]) -> None:
    """Prints the table, the verdicts and what could not be measured."""
    found = by_place(figures)
    names = list(dict.fromkeys(row["implementation"] for rows in found.values() for row in rows.values()))
    table = Table(
        *("experts", "tokens", "distinct", "MB", "floor", *names),
        caption="us of a layer's router and routed experts, and how many times the floor that is; distinct: experts "
        "that the tokens of a call have together; MB: their bytes, with the router's, tokens in and out",
    )
    for place, rows in found.items():
        row, sizes = next(iter(rows.values())), dict(zip(PLACE, place, strict=True))
        words = f"{sizes['chosen']} of {sizes['experts']}", f"{sizes['tokens']:,}", f"{row['distinct']:.0f}"
        times = [f"{rows[name]['us']:.1f} ({rows[name]['over_floor']:.2f})" if name in rows else "" for name in names]
        table.add_row(*words, f"{row['bytes'] / 1e6:.1f}", f"{row['floor_us']:.1f}", *times)
    print_table(table, console)
    for target in targets:
        words = f"{target['chosen']} of {target['experts']} experts, {target['tokens']:,} tokens: "
        words += "reached" if target["hit"] else "MISSED"
        words += f": at most {target['wanted']:g} times the floor, got {target['measured']:.2f} ({target['fastest']})"
        console.print(words, soft_wrap=True)
    for row in figures:
        if "error" in row:
            console.print(describe(row), soft_wrap=True)


def plot(figures: Sequence[Row], path: Path) -> None:
    """Bars: what share of its time each implementation's floor is in each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = by_place(figures)
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    figure, axis = pyplot.subplots(figsize=(8, 1.5 + 0.7 * len(found)))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        lengths = [1 / rows[name]["over_floor"] if name in rows else 0.0 for rows in found.values()]
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(found))]
        axis.barh(places, lengths, width, label=name)
    labels = [f"{chosen} of {experts}\n{tokens:,} token{'s' * (tokens > 1)}" for _, experts, chosen, _, tokens in found]
    axis.set_yticks(range(len(found)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axis.axvline(1 / WANTED, color="gray", linestyle=":", linewidth=1, label="goal")
    axis.set(xlabel="floor / time: 1 is as fast as the bytes allow")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
