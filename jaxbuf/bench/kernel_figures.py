"""What the figures of jaxbuf.bench.kernels say: against the targets, as tables, as plots."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxbuf.recurrence.state_format import SPLIT
from jaxbuf.terminal import print_table

BATCHES = (32, 128, 256)  # of the targets
TARGETS = (  # what, at least or at most, and how much at each of BATCHES
    ("decode, limit 16: achieved/floor", ">=", (0.78, 0.90, 0.92)),
    ("decode over flash-linear-attention", ">=", (2.1, 2.4, 2.4)),
    ("decode over the recurrent step, as a share of the byte ratio", ">=", (0.88, 0.92, 0.92)),
    ("recurrent step: achieved/floor", ">=", (0.80, 0.90, 0.92)),
    ("verify 5, 3 accepted, limit 32: times decode", "<=", (1.35, 1.25, 1.25)),
    ("verify 9, 9 accepted, limit 32: times decode", "<=", (2.0, 1.8, 1.8)),
)

MAMBA2_TARGETS = (  # us on an H200, at most, at each of BATCHES
    ("Mamba-2 decode, best limit: us", "decode", (42.0, 152.0, 298.0)),
    ("Mamba-2 decode, split: us", "split", (25.2, 91.2, 178.8)),
)
SPLIT_TARGETS = (  # us of a split checkpoint's step on an H200, at most, at each of BATCHES
    ("decode, limit 16: us", {"time": 1}, (13.5, 45.0, 88.0)),
    ("verify 5, 3 accepted, limit 32: us", {"time": 5}, (21.0, 62.0, 112.0)),
)
OTHER_TARGETS = {  # the same of other families: of the floor, at least, at some of BATCHES
    "kda": {128: 0.85, 256: 0.88},
    **{family: {128: 0.82} for family in ("gla", "deltanet", "retention", "linear")},
}
LABELS = ("part", "operation", "implementation", "batch", "time", "accepted", "limit", "phase", "kv_length")
LABELS += ("state_dtype", "state_v_first", "tree")


type Row = dict[str, Any]


def find_all(figures: Sequence[Row], part: str, **wanted) -> list[Row]:
    """The rows of a part with these values that were measured, of the staggered ones if it has phases."""
    wanted = {"part": part} | wanted
    measured = (row for row in figures if "us" in row and row.get("phase", "staggered") == "staggered")
    return [row for row in measured if all(row.get(name) == value for name, value in wanted.items())]


def find(figures: Sequence[Row], part: str, **wanted) -> Row | None:
    """The first of `find_all`."""
    return next(iter(find_all(figures, part, **wanted)), None)


def ratio(above: Row | None, below: Row | None, name: str = "us") -> float | None:
    return above[name] / below[name] if above and below else None


def judge(figures: Sequence[Row], family: str = "gdn") -> list[Row]:
    """The table of a family's targets, with what was measured (None: nothing) and whether it is reached."""
    rows = {"gdn": _judge_gdn, "mamba2": _judge_mamba2}.get(family, functools.partial(_judge_other, family))(figures)
    for row in rows:
        value, wanted = row["measured"], row["wanted"]
        row["hit"] = None if value is None else value >= wanted if row["sense"] == ">=" else value <= wanted
    return rows


def _judge_other(family: str, figures: Sequence[Row]) -> list[Row]:
    rows = []
    for batch, bound in OTHER_TARGETS[family].items():
        about = {"target": f"{family} decode: achieved/floor", "batch": batch, "sense": ">=", "wanted": bound}
        rows.append(about | {"measured": (find(figures, "decode", batch=batch) or {}).get("achieved")})
        if family == "kda":
            rows.append(_judge_verify("KDA", figures, batch))
    return rows


def _judge_verify(name: str, figures: Sequence[Row], batch: int) -> Row:
    verify, decode = find(figures, "verify", batch=batch, time=5, accepted=3), find(figures, "decode", batch=batch)
    about = {"target": f"{name} verify 5, 3 accepted, limit 32: times decode", "batch": batch}
    return about | {"sense": "<=", "wanted": 1.3, "measured": ratio(verify, decode)}


def _judge_mamba2(figures: Sequence[Row]) -> list[Row]:
    rows = []
    for name, part, bounds in MAMBA2_TARGETS:
        parts = (part, "limits") if part == "decode" else (part,)
        for batch, bound in zip(BATCHES, bounds, strict=True):
            found = [row["us"] for each in parts for row in find_all(figures, each, batch=batch, time=1)]
            about = {"target": name, "batch": batch, "sense": "<=", "wanted": bound}
            rows.append(about | {"measured": min(found, default=None)})
    return rows + [_judge_verify("Mamba-2", figures, batch) for batch in BATCHES]


def _judge_gdn(figures: Sequence[Row]) -> list[Row]:
    rows = []
    for column, batch in enumerate(BATCHES):
        decode, recurrent = (find(figures, part, batch=batch) for part in ("decode", "recurrent"))
        speedup, by_bytes = ratio(recurrent, decode), ratio(recurrent, decode, "bytes")
        verify = {n: find(figures, "verify", batch=batch, time=n, accepted=a) for n, a in ((5, 3), (9, 9))}
        measured = (
            decode and decode["achieved"],
            ratio(find(figures, "fla", batch=batch, state_v_first=False), decode),
            speedup / by_bytes if speedup and by_bytes else None,
            recurrent and recurrent["achieved"],
            ratio(verify[5], decode),
            ratio(verify[9], decode),
        )
        for (name, sense, wanted), value in zip(TARGETS, measured, strict=True):
            rows.append({"target": name, "batch": batch, "sense": sense, "wanted": wanted[column], "measured": value})
    narrow = ratio(find(figures, "decode", batch=256), find(figures, "state", batch=256))
    rows.append(
        {"target": "bfloat16 checkpoint over float32", "batch": 256, "sense": ">=", "wanted": 1.7, "measured": narrow}
    )
    tree, chain = (find(figures, "tree", batch=128, tree=tree) for tree in (True, False))
    about = {"target": "a tree of 8 tokens: times a chain of 8", "batch": 128, "sense": "<=", "wanted": 1.15}
    rows.append(about | {"measured": ratio(tree, chain)})
    rows += _judge_split(figures)
    time, by_bytes = (crossover(figures, name) for name in ("us", "bytes"))
    away = abs(time / by_bytes - 1) if time and by_bytes else None
    name = "KV-only crossover: how far from the byte count's"
    rows.append({"target": name, "batch": 128, "sense": "<=", "wanted": 0.2, "measured": away})
    return rows


def _judge_split(figures: Sequence[Row]) -> list[Row]:
    """The targets of split checkpoints, of each kind that was measured."""
    rows = []
    for kind in sorted({row["state_dtype"] for row in figures if row["part"] == "split" and "us" in row}):
        for name, wanted, bounds in SPLIT_TARGETS:
            for batch, bound in zip(BATCHES, bounds, strict=True):
                row = find(figures, "split", batch=batch, state_dtype=kind, **wanted)
                about = {"target": f"{kind}, {name}", "batch": batch, "sense": "<=", "wanted": bound}
                rows.append(about | {"measured": row and row["us"]})
        for batch in (1, 2, 4, 8):
            decode, exact = find(figures, "split", batch=batch, state_dtype=kind), find(figures, "decode", batch=batch)
            about = {"target": f"{kind}, decode: times float32", "batch": batch, "sense": "<=", "wanted": 1.03}
            rows.append(about | {"measured": ratio(decode, exact)})
    return rows


def crossover(figures: Sequence[Row], name: str) -> float | None:
    """The number of entries at which a step of a KV-only slot costs as much, in `name` ("us" or "bytes"), as one of a
    buffered slot; None if it cost less at every size that was measured."""
    rows = sorted((row for row in figures if row["part"] == "kv" and "us" in row), key=lambda row: row["kv_length"])
    if not rows or rows[0]["kv_length"]:
        return None
    over = [(row["kv_length"], row[name] - rows[0][name]) for row in rows[1:]]
    for (left, below), (right, above) in itertools.pairwise(over):
        if below < 0 <= above:
            return left + (right - left) * below / (below - above)
    return None


def show(console: Console, figures: Sequence[Row], targets: Sequence[Row]) -> None:
    table = Table(
        *("part", "batch", "T", "acc.", "limit", "phase", "us", "wall", "floor", "achieved"),
        caption="times of a layer's step in us; limit: or entries of KV-only slots; achieved: floor / time",
    )
    for row in figures:
        if "error" in row or row["part"] == "companions":
            continue
        numbers = [f"{row[name]:.1f}" if row.get(name) else "" for name in ("us", "wall_us", "floor_us")]
        numbers.append(f"{row['achieved']:.3f}" if "achieved" in row else "")
        words = [row.get(name, "") for name in ("batch", "time", "accepted", "limit")]
        words[-1] = row.get("kv_length", words[-1])
        phase = row.get("phase", "[V, K]" if row.get("state_v_first") else "[K, V]")
        part = row["state_dtype"] if row["part"] in ("split", "state") else row["part"]
        table.add_row(part, *map(str, words), phase, *numbers)
    if figures and all(row["part"] == "companions" for row in figures):
        show_companions(console, figures)
        return
    print_table(table, console)
    show_companions(console, figures)
    batches = sorted({row["batch"] for row in figures if row["part"] == "decode"})
    pairs = {n: ratio(find(figures, "recurrent", batch=n), find(figures, "decode", batch=n)) for n in batches}
    if any(pairs.values()):
        words = ", ".join(f"{pairs[batch]:.2f} at {batch}" for batch in batches if pairs[batch])
        console.print(f"limit 16 over the recurrent step, by batch: {words}", soft_wrap=True)
    table = Table("target", "batch", "wanted", "measured", "")
    measured = [row for row in targets if row["measured"] is not None]
    for row in measured:
        wanted, value = f"{row['sense']} {row['wanted']}", f"{row['measured']:.3f}"
        table.add_row(row["target"], str(row["batch"]), wanted, value, "hit" if row["hit"] else "MISS")
    if measured:
        print_table(table, console)
    if len(measured) < len(targets):
        batches = ", ".join(map(str, BATCHES))
        words = f"{len(targets) - len(measured)} of {len(targets)} targets, at batch {batches}, were not measured"
        console.print(words, soft_wrap=True)


def show_companions(console: Console, figures: Sequence[Row]) -> None:
    """A line for each size of `prepare` and `gated_norm`: the kernel, if it ran, and XLA's compilation."""
    rows = {
        tuple(row[name] for name in ("operation", "batch", "time", "implementation")): row
        for row in figures
        if row["part"] == "companions" and "us" in row
    }
    table = Table(
        *("operation", "batch", "T", "us", "launches", "floor", "achieved", "XLA us", "launches", "times"),
        caption="times of a layer's call in us; achieved: the kernel's floor / time; times: XLA's time / the kernel's",
    )

    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    for size in dict.fromkeys(key[:3] for key in rows):
        ours, xla = rows.get((*size, "gpu")), rows.get((*size, "xla"))
        kernel, compiled = ours or {}, xla or {}
        cells = [number(kernel.get("us")), number(kernel.get("launches"), 1), number((ours or compiled)["floor_us"])]
        cells += [number(kernel.get("achieved"), 3), number(compiled.get("us")), number(compiled.get("launches"), 1)]
        table.add_row(*map(str, size), *cells, number(ratio(xla, ours)))
    if table.row_count:
        print_table(table, console)


def describe(row: Row) -> str:
    words = " ".join(f"{name}={row[name]}" for name in LABELS if name in row)
    if "error" in row:
        return f"{words}: {row['error']}"
    parts = f"{words}: {row['us']:.1f} us", f"wall {row['wall_us']:.1f}" if row.get("wall_us") else ""
    floor = f"floor {row['floor_us']:.1f}, achieved {row['achieved']:.3f}" if "achieved" in row else ""
    return ", ".join(part for part in (*parts, floor) if part)


def plot(figures: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8))
    measured = [row for row in figures if "us" in row and row.get("phase", "staggered") == "staggered"]

    def draw(axis, label: str, rows: Sequence[Row], x: str, y: str = "us", style: str = "o-", **settings) -> None:
        points = sorted((row[x], row[y]) for row in rows)
        if points:
            axis.plot(*zip(*points, strict=True), style, label=label, **settings)

    def part(name: str, **wanted) -> list[Row]:
        return [r for r in measured if r["part"] == name and all(r[key] == value for key, value in wanted.items())]

    batch, limit, tokens, lengths = axes.flat
    ours = {"limit 16": part("decode"), "recurrent step": part("recurrent")}
    ours |= {f"{name}, limit 16": part("split", state_dtype=name, time=1) for name in SPLIT}
    others = {
        "flash-linear-attention": part("fla", state_v_first=False),
        "... its state [value, key]": part("fla", state_v_first=True),
        "XLA, limit 16": part("xla"),
    }
    for color, (label, rows) in enumerate((ours | others).items()):
        draw(batch, label, rows, "batch", color=f"C{color}")
        if label in ours:
            draw(batch, f"{label}: floor", rows, "batch", "floor_us", "--", color=f"C{color}")
    batch.set(title="one token", xlabel="batch", xscale="log", yscale="log")
    middle = {row["batch"] for row in part("limits")}
    for size in sorted(middle):
        rows = part("limits") + part("decode", batch=size) + part("recurrent", batch=size)
        draw(limit, "measured", rows, "limit", color="C0")
        draw(limit, "floor", rows, "limit", "floor_us", "--", color="C0")
        limit.set(title=f"one token, batch {size}", xlabel="limit", ylim=(0, None))
    for color, size in enumerate(sorted({row["batch"] for row in part("verify")})):
        all_but = [row for row in part("verify", batch=size) if (row["time"], row["accepted"]) != (9, 5)]
        rows = [row | {"drafts": row["time"] - 1} for row in all_but + part("decode", batch=size)]
        draw(tokens, f"batch {size}", rows, "drafts", color=f"C{color}")
        draw(tokens, f"batch {size}: floor", rows, "drafts", "floor_us", "--", color=f"C{color}")
    tokens.set(title="verification, limit 32 (0 drafts: limit 16)", xlabel="draft tokens", ylim=(0, None))
    alone = [row for row in part("kv") if row["kv_length"]]
    draw(lengths, "half the slots KV-only", alone, "kv_length", color="C0")
    draw(lengths, "... floor", alone, "kv_length", "floor_us", "--", color="C0")
    for row in part("kv", kv_length=0):
        lengths.axhline(row["us"], color="C1", label="all slots buffered")
        lengths.axhline(row["floor_us"], color="C1", linestyle="--", label="... floor")
        lengths.set(title=f"KV-only slots among others, batch {row['batch']}", xlabel="their entries", ylim=(0, None))
    for axis in axes.flat:
        axis.set_ylabel("us a layer and step")
        axis.set_visible(axis.has_data())
        if axis.has_data():
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")  # Panels without data are cut off at the edges.
    pyplot.close(figure)
