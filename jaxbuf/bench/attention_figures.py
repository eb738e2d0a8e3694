"""What the figures of jaxbuf.bench.attention say: against the targets, as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.terminal import print_table

SIZES = ("heads", "kv_heads", "head_dim", "batch", "context", "longest")
# Decoding on an H200: sizes, the most us, and the most times as long as its bytes take (None: no matter).
TARGETS = (
    ((16, 4, 256, 128, 1024, 1024), 130, None),
    ((16, 4, 256, 64, 8192, 8192), 485, None),
    ((16, 4, 256, 8, 65_536, 65_536), 515, None),
    ((32, 8, 128, 64, 8192, 8192), 485, None),
    ((16, 4, 256, 64, 1024, 65_536), None, 1.15),
    ((32, 1, 576, 128, 1024, 1024), None, 1.25),  # latents, as those below
    ((32, 1, 576, 64, 8192, 8192), None, 1.25),
)
OTHERS = {"xla": "XLA", "torch flash": "flash", "torch cudnn": "cuDNN"}  # and how the table calls them


def place(row: Row) -> tuple[int, ...]:
    """What a row is of: its sizes and its new tokens."""
    return (*(row[name] for name in SIZES), row["time"])


def by_place(figures: Sequence[Row]) -> dict[tuple[int, ...], dict[str, Row]]:
    """The rows that were measured, by what they are of and by implementation."""
    found: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in figures:
        if "us" in row:
            found.setdefault(place(row), {})[row["implementation"]] = row
    return found


def judge(figures: Sequence[Row]) -> list[Row]:
    """The targets, with what was measured of the kernel (None: nothing) and whether it is reached."""
    rows, found = [], by_place(figures)
    for sizes, most, times in TARGETS:
        row = found.get((*sizes, 1), {}).get("gpu")
        name, wanted = ("us", most) if most is not None else ("us over floor", times)
        measured = None if row is None else row["us"] / (1 if most is not None else row["floor_us"])
        hit = None if measured is None or wanted is None else measured <= wanted
        target = {"target": name, "wanted": wanted, "measured": measured, "hit": hit}
        rows.append(dict(zip(SIZES, sizes, strict=True)) | target)
    return rows


def called(sizes: Sequence[int]) -> str:
    """Rows and tokens of a case, in words."""
    batch, context, longest = sizes[3:6]
    return f"{batch} x {context:,}" + (f", one {longest:,}" if longest != context else "")


def describe(row: Row) -> str:
    """A row as one line, as it comes."""
    words = (
        f"{row['implementation']}: {called(place(row))}, {row['heads']} heads x {row['head_dim']}, T {row['time']}: "
    )
    if "error" in row:
        return words + row["error"]
    return words + f"{row['us']:.1f} us (wall {row['wall_us']:.1f}), achieved {row['achieved']:.3f}"


def show(console: Console, figures: Sequence[Row], targets: Sequence[Row]) -> None:
    """Prints the table, the targets and what could not be measured."""
    found = by_place(figures)
    others = [name for name in OTHERS if any(name in row for row in found.values())]
    ours = any("gpu" in row for row in found.values())
    table = Table(
        *("heads", "rows x tokens", "T"),
        *(["us", "wall", "floor", "achieved"] if ours else ["floor"]),
        *(OTHERS[name] for name in others),
        caption="us of a layer's call; T: new tokens of a row; achieved: floor / us; then what others take: XLA's path "
        "on the same pages, torch over contiguous keys and values",
    )
    for sizes, rows in found.items():
        any_row = next(iter(rows.values()))
        words = f"{sizes[0]}/{sizes[1]} x {sizes[2]}", called(sizes), str(sizes[-1])
        numbers = [f"{any_row['floor_us']:.1f}"]
        if ours:
            own = rows.get("gpu")
            times = [f"{own[name]:.1f}" for name in ("us", "wall_us")] if own else ["", ""]
            numbers = [*times, *numbers, f"{own['achieved']:.3f}" if own else ""]
        numbers += [f"{rows[name]['us']:.1f}" if name in rows else "" for name in others]
        table.add_row(*words, *numbers)
    print_table(table, console)
    for target in targets:
        if target["measured"] is not None:
            verdict = "reached" if target["hit"] else "MISSED"
            what = called([target[name] for name in SIZES])
            words = f"{target['target']} at most {target['wanted']:g}, got {target['measured']:.4g}"
            console.print(f"{what}, {target['heads']} heads: {verdict}: {words}", soft_wrap=True)
    for row in figures:
        if "error" in row:
            console.print(describe(row), soft_wrap=True)


def plot(figures: Sequence[Row], path: Path) -> None:
    """Bars: what share of its floor each implementation reaches in each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = by_place(figures)
    names = [name for name in ("gpu", *OTHERS) if any(name in rows for rows in found.values())]
    figure, axis = pyplot.subplots(figsize=(8, 1.5 + 0.7 * len(found)))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        lengths = [rows[name]["achieved"] if name in rows else 0.0 for rows in found.values()]
        places = [index - 0.4 + width * (number + 0.5) for index in range(len(found))]
        axis.barh(places, lengths, width, label={"gpu": "kernel"}.get(name, OTHERS.get(name)))
    labels = [f"{called(sizes)}\n{sizes[0]}/{sizes[1]} x {sizes[2]}, {sizes[-1]} new" for sizes in found]
    axis.set_yticks(range(len(found)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axis.set(xlabel="floor / time: 1 is as fast as the bytes allow")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
