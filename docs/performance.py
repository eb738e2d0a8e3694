"""Writes performance.rst from the records in `benchmarks/`: `python docs/performance.py`. A test compares the two."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.rst"
Figure = dict[str, Any]
Table = list[list[str]]

HEAD = """\
What was measured
=================

Every table on this page is made by ``docs/performance.py`` from a record in ``benchmarks/``, and under each stand the
device, the date and the command that measured it. ``scripts/bench_NAME`` and ``jaxbuf bench NAME`` are the same
program. What had been aimed at before measuring, and where it was missed, is in ``benchmarks/README.md`` of the
repository, with every other figure.

Words of this page: the *floor* of a step is the time that its bytes take at the read bandwidth which was measured in
the same run; *of the floor* is the floor over the step's time, so that 1 cannot be passed. *Recurrent* is the plain
form, which reads and writes the state in every step. *Buffered* is ours with ring and folds (:doc:`buffered`), at
``limit`` 16 unless it says otherwise, whole cycles of folds included. *Split* states are read by their high halves
(:doc:`using`). Times of a layer are those of the device; times of whole steps are those of a clock, over many steps.
"""


@dataclass(frozen=True)
class Section:
    """One benchmark: its title, what was measured, the records it is read from, and how its table is made of them."""

    title: str
    text: str
    records: tuple[str, ...]
    table: Callable[[], Table]
    plots: tuple[tuple[str, str], ...] = ()  # the file's name, and what it shows
    after: str = ""


@cache
def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def find(name: str, **wanted: Any) -> Figure | None:
    """The only figure of a record with these fields; None if there is none."""
    found = [each for each in record(name)["figures"] if all(each.get(key) == value for key, value in wanted.items())]
    if len(found) > 1:
        raise ValueError(f"{len(found)} figures of {name} have {wanted}")
    return found[0] if found else None


def told(figure: Figure | None, field: str, digits: int = 3) -> str:
    """A number of a figure with so many significant digits; a dash where it was not measured."""
    value = None if figure is None else figure.get(field)
    return "\\-" if value is None else significant(value, digits)


def significant(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text or abs(float(text)) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


BATCHES = (32, 128, 256)


def kernels(part: str, batch: int, name: str = "kernels", **wanted: Any) -> Figure | None:
    return find(name, part=part, batch=batch, phase="staggered", **wanted)


def against_floor(figure: Figure) -> tuple[str, str, str]:
    """Its time, its floor, and the floor over the time."""
    return told(figure, "us"), told(figure, "floor_us"), told(figure, "achieved", 2)


def layer_step() -> Table:
    rows = [["rows", "buffered", "of the floor", "recurrent", "FLA", "FLA, faster layout", "XLA, buffered"]]
    for batch in BATCHES:
        step = kernels("decode", batch, "kernels_recurrent")
        peers = [find("kernels_recurrent", part="fla", batch=batch, state_v_first=first) for first in (False, True)]
        others = [kernels("recurrent", batch, "kernels_recurrent"), *peers, kernels("xla", batch)]
        rows.append([str(batch), told(step, "us"), told(step, "achieved", 2), *(told(other, "us") for other in others)])
    return rows


def layer_drafts() -> Table:
    cases = ((2, 2), (3, 2), (5, 3), (9, 5), (9, 9))
    rows = [["rows", "1 token", *(f"{time} tokens, {kept} kept" for time, kept in cases)]]
    for batch in BATCHES:
        found = [kernels("verify", batch, time=time, accepted=kept) for time, kept in cases]
        rows.append([str(batch), told(kernels("decode", batch), "us"), *(told(each, "us") for each in found)])
    return rows


def split_layer() -> Table:
    name = "kernels_split"
    rows = [["rows", "float32", "split", "split8", "FLA", "FLA, faster layout", "5 tokens, 3 kept, split"]]
    for batch in BATCHES:
        kinds = [kernels("split", batch, name, state_dtype=kind, time=1) for kind in ("split", "split8")]
        peers = [find(name, part="fla", batch=batch, state_v_first=first) for first in (False, True)]
        found = [kernels("decode", batch, name), *kinds, *peers]
        found.append(kernels("split", batch, name, state_dtype="split", time=5))
        rows.append([str(batch), *(told(each, "us") for each in found)])
    return rows


def mamba2_layer() -> Table:
    rows = [["rows", "recurrent", "buffered", "of the floor", "buffered, split", "5 tokens, 3 kept"]]
    for batch in BATCHES:
        step = kernels("decode", batch, "kernels_mamba2")
        split = kernels("split", batch, "kernels_mamba2_split", state_dtype="split", time=1)
        verify = kernels("verify", batch, "kernels_mamba2", time=5)
        recurrent = told(kernels("recurrent", batch, "kernels_mamba2"), "us")
        kept = told(step, "achieved", 2)
        rows.append([str(batch), recurrent, told(step, "us"), kept, told(split, "us"), told(verify, "us")])
    return rows


OTHER_FAMILIES = {
    "kda": "Kimi Delta Attention",
    "gla": "gated linear attention",
    "deltanet": "DeltaNet",
    "retention": "retention",
    "linear": "linear attention",
}


def families() -> Table:
    rows = [["family", "rows", "buffered", "floor", "of the floor"]]
    for family, title in OTHER_FAMILIES.items():
        for batch in BATCHES:
            if step := kernels("decode", batch, f"kernels_{family}"):
                rows.append([title, str(batch), *against_floor(step)])
    return rows


def heads_of_80() -> Table:
    name, rows = "kernels_mamba2_80", [["rows", "states", "buffered", "floor", "of the floor"]]
    for figure in record(name)["figures"]:
        if figure["phase"] == "staggered" and figure["time"] == 1:
            rows.append([str(figure["batch"]), figure["state_dtype"], *against_floor(figure)])
    return rows


def latent_attention() -> Table:
    rows = [["rows x tokens", "jaxbuf", "floor", "of the floor", "XLA"]]
    for figure in record("attention")["figures"]:
        if figure["implementation"] == "gpu" and figure["rank"]:
            case = {key: figure[key] for key in ("batch", "context", "time")}
            other = told(find("attention_latent", implementation="xla", **case), "us")
            rows.append([f"{figure['batch']} x {figure['context']:,}", *against_floor(figure), other])
    return rows


def trees() -> Table:
    rows = [["eight tokens, of which four are kept", "us", "floor, us", "of the floor"]]
    for tree, name in ((False, "a chain"), (True, "a tree")):
        found = find("kernels_tree", part="tree", tree=tree, phase="staggered")
        rows.append([name, *against_floor(found)])
    return rows


def kv_only() -> Table:
    rows = [["entries of each KV-only row", "us", "floor, us", "of the floor"]]
    for figure in record("kernels_kv")["figures"]:
        entries = figure["kv_length"]
        text = str(entries) if entries else "none is KV-only"
        rows.append([text, *against_floor(figure)])
    return rows


def attention() -> Table:
    rows = [["heads", "rows x tokens", "new tokens", "jaxbuf, paged", "of the floor", "torch flash", "cuDNN", "XLA"]]
    for name in ("attention", "attention_llama"):
        for figure in record(name)["figures"]:
            if figure["implementation"] != "gpu" or figure["rank"]:
                continue
            same = ("heads", "kv_heads", "head_dim", "batch", "context", "longest", "time")
            case = {key: figure[key] for key in same}
            others = [find(name, implementation=other, **case) for other in ("torch flash", "torch cudnn", "xla")]
            size = f"{figure['batch']} x {figure['context']:,}"
            if figure["longest"] != figure["context"]:
                size += f", one of them {figure['longest']:,}"
            heads = f"{figure['heads']} on {figure['kv_heads']} of {figure['head_dim']}"
            times = [told(figure, "us"), told(figure, "achieved", 2), *(told(other, "us") for other in others)]
            rows.append([heads, size, str(figure["time"]), *times])
    return rows


def experts() -> Table:
    rows = [["experts, tokens", "jaxbuf", "floor", "gathered", "``ragged_dot_general``", "JAX's library"]]
    for figure in record("experts")["figures"]:
        if figure["implementation"] != "gpu":
            continue
        case = {key: figure[key] for key in ("experts", "tokens")}
        others = [find("experts", implementation=other, **case) for other in ("gather", "xla", "library")]
        first = f"{figure['chosen']} of {figure['experts']}, {figure['tokens']:,}"
        rows.append([first, told(figure, "us"), told(figure, "floor_us"), *(told(other, "us") for other in others)])
    return rows


def experts_h100() -> Table:
    rows = [["experts, tokens", "jaxbuf", "floor", "times the floor"]]
    for figure in record("experts_h100")["figures"]:
        first = f"{figure['chosen']} of {figure['experts']}, {figure['tokens']:,}"
        rows.append([first, told(figure, "us"), told(figure, "floor_us"), told(figure, "over_floor")])
    return rows


RECURRENCES = (("Gated DeltaNet", "chunked"), ("Kimi Delta Attention", "chunked_kda"), ("Mamba-2", "chunked_mamba2"))


def chunks() -> Table:
    rows = [["family", "prompts x tokens", "jaxbuf", "XLA", "FLA", "bytes in and out"]]
    for family, name in RECURRENCES:
        for figure in record(name)["figures"]:
            if figure["implementation"] != "gpu":
                continue
            case = {key: figure[key] for key in ("rows", "tokens")}
            others = [find(name, implementation=other, **case) for other in ("xla", "flash-linear-attention")]
            size = f"{figure['rows']} x {figure['tokens']:,}"
            rows.append([family, size, *(told(each, "us") for each in (figure, *others)), told(figure, "floor_us")])
    return rows


def prompts() -> Table:
    rows = [["prompts x tokens", "ms", "tokens/s", "of it the recurrence, ms"]]
    for figure in record("prefill")["figures"]:
        size, of_recurrence = f"{figure['prompts']} x {figure['tokens']:,}", told(figure["parts_ms"], "recurrence")
        rows.append([size, told(figure, "ms"), told(figure, "tokens_per_s"), of_recurrence])
    return rows


def whole_steps() -> Table:
    rows = [["rows", "recurrent", "buffered", "split", "sum of floors, buffered", "tokens/s, buffered"]]
    for name, batches in (("step_few", (1, 8, 32)), ("step_wide", (128, 256))):
        for batch in batches:
            forms = [find(name, form=form, batch=batch) for form in ("recurrent", "buffered", "split")]
            times = [told(form, "ms") for form in forms]
            rows.append([str(batch), *times, told(forms[1], "floor_ms"), told(forms[1], "tokens_per_s")])
    return rows


MODELS = (
    ("Qwen3.5-4B", "step_drafts"),
    ("Nemotron-3-Nano-4B", "step_nemotron_nano_4b"),
    ("Qwen3.5-35B-A3B", "step_qwen3_5_35b"),
    ('Qwen3-Next-80B-A3B on two GPUs, mesh axis "tensor"', "step_qwen3_next_tensor"),
    ('the same, mesh axis "expert"', "step_qwen3_next_expert"),
)


def drafted_steps() -> Table:
    rows = [["model", "rows", "plain step, ms", "tokens/s", "with 4 drafts, ms", "tokens/s", "sum of floors, plain"]]
    for model, name in MODELS:
        plain, drafted = (find(name, drafts=drafts) for drafts in (0, 4))
        times = [told(figure, field) for figure in (plain, drafted) for field in ("ms", "tokens_per_s")]
        rows.append([model, str(plain and plain["batch"]), *times, told(plain, "floor_ms")])
    return rows


def steps_by_form(name: str) -> Table:
    rows = [["form", "ms", "tokens/s", "sum of floors, ms"]]
    for figure in record(name)["figures"]:
        rows.append([figure["form"], told(figure, "ms"), told(figure, "tokens_per_s"), told(figure, "floor_ms")])
    return rows


def two_devices() -> Table:
    rows = [["GPUs", "ms", "of it exchange", "tokens/s"]]
    for figure in record("step_devices")["figures"]:
        exchange = told(figure, "exchange_ms") if figure["devices"] > 1 else "\\-"
        rows.append([str(figure["devices"]), told(figure, "ms"), exchange, told(figure, "tokens_per_s")])
    return rows


def short_texts() -> Table:
    rows = [
        ["tokens of a prompt", "auto, ms", "buffered, ms", "checkpoints read by auto", "state bytes, auto to buffered"]
    ]
    for length in (8, 64, 128, 256):
        auto, buffered = (find("short", length=length, form=form) for form in ("auto", "buffered"))
        assert auto and buffered
        share, moved = f"{auto['checkpoint_reads']:.0%}", f"{auto['state_bytes'] / buffered['state_bytes']:.0%}"
        rows.append([str(length), told(auto, "ms"), told(buffered, "ms"), share, moved])
    return rows


def sampling() -> Table:
    rows = [["setting", "tokens that stay", "32 rows, ms over greedy", "256 rows, ms over greedy"]]
    for figure in record("sample")["figures"]:
        if figure["batch"] == 32 and figure["setting"] != "greedy":
            large = find("sample", batch=256, setting=figure["setting"])
            times = [told(each, "over_greedy_ms") for each in (figure, large)]
            rows.append([setting_of(figure), f"{figure['kept']:,.0f}", *times])
    return rows


def setting_of(figure: Figure) -> str:
    parts = [f"{key} {figure[key]}" for key in ("temperature", "min_p", "top_k", "top_p") if key in figure]
    return ", ".join(parts) + ("" if figure["logits_std"] > 1 else ", flat logits")


def compilation() -> Table:
    names = {"cold": "new process", "cached": "new process, from the compilation cache"}
    rows = [["", "first generation, s", "the same with an n-gram drafter next, s"]]
    for process, text in names.items():
        first, drafted = (find("compile", process=process, drafter=drafter) for drafter in (None, "ngram"))
        rows.append([text, told(first, "first_s"), told(drafted, "first_s")])
    return rows


def drafters() -> Table:
    kinds = {"text": "a held-out package's text", "code": "Python's standard library", "logs": "made-up logs"}
    rows = [["prompts from", "drafter", "greedy", "temperature 0.8", "snapshots' bytes, greedy"]]
    for kind, text in kinds.items():
        for drafter, name in (("mtp", "multi-token-prediction layer"), ("ngram", "n-grams")):
            found = {
                each["temperature"]: each
                for each in record("drafts")["kinds"][kind]["generated"]
                if each["drafter"] == drafter
            }
            steps = [told(found[temperature], "tokens_per_step") for temperature in (0.0, 0.8)]
            rows.append([text, name, *steps, told(found[0.0], "snapshot_ratio") + " times"])
    return rows


FAMILIES = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi Delta Attention"}


def drift() -> Table:
    kinds = ("float32", "split", "split8", "bfloat16")
    rows = [["family", *(f"{kind}: worst, growth" for kind in kinds)]]
    for family, name in FAMILIES.items():
        cells = []
        for kind in kinds:
            found = [
                each
                for each in record("drift_split")["figures"]
                if (each["family"], each["checkpoint"], each["entries"]) == (family, kind, "bfloat16")
            ]
            worst = max(each["worst"] for each in found)
            # where nothing but float32's own rounding is left, its growth says nothing
            growth = f", {max(each['growth'] for each in found):.2f}" if worst > 1e-5 else ""
            cells.append(f"{worst:.1e}{growth}")
        rows.append([name, *cells])
    return rows


def likelihood() -> Table:
    rows = [
        [
            "checkpoint",
            "likelihood changes by at most",
            "divergence from the recurrence, nats",
            "greedy texts that differ",
        ]
    ]
    for kind, quarters in record("likelihood")["quarters"].items():
        change = max(abs(each["relative_difference"]) for each in quarters)
        divergence = sum(each["divergence_nats"] for each in quarters) / len(quarters)
        differing = f"{record('likelihood')['different_greedy_rows'][kind]} of {record('likelihood')['prompts']}"
        rows.append([kind, f"{change:.4%}".replace("%", " %"), f"{divergence:.1e}", differing])
    return rows


RETRIEVAL = ("key_value", "recall", "selective_copy")


WAYS_TO_KEEP = {
    "full": "all keys",
    "gates": "write gates",
    "hidden": "scores of hidden states",
    "neuron": "a borrowed neuron",
    "head": "whole heads",
    "random": "random keys",
    "local": "a window",
    "streaming": "StreamingLLM",
    "quest": "Quest over all keys",
    "gates, quest": "Quest over gates' keys",
}


def retrieval_rows(points: Iterable[Figure]) -> Table:
    rows = []
    for point in points:
        setting = "" if point["line"] == "full" else f", {point['setting']}".replace(", 0.", ", sparsity 0.")
        shares = point["bytes_share"], *(point["tasks"][task]["accuracy"] for task in RETRIEVAL)
        rows.append([WAYS_TO_KEEP[point["line"]] + setting, *(f"{share:.1%}".replace("%", " %") for share in shares)])
    return rows


def retrieval_head(*first: str) -> list[str]:
    return [*first, "bytes", *(f"right: {task.replace('_', ' ')}" for task in RETRIEVAL)]


def retrieval() -> Table:
    neuron = [point for point in record("write_gate_retrieval_neuron")["points"] if point["line"] == "neuron"]
    return [retrieval_head("keys"), *retrieval_rows(record("write_gate_retrieval")["points"] + neuron)]


def retrieval_of_a_hybrid() -> Table:
    return [retrieval_head("keys"), *retrieval_rows(record("write_gate_hybrid")["points"])]


def selected() -> Table:
    rows = [retrieval_head("model", "keys")]
    for model, name in (("Llama's", "write_gate_retrieval_selected"), ("hybrid", "write_gate_hybrid_selected")):
        rows += [[model, *row] for row in retrieval_rows(record(name)["points"])]
    return rows


def embedded_gates() -> Table:
    rows = [["keys behind the window", "kept", "of all bytes", "nats a token", "more"]]
    keys = record("demo_gates")["keys"]
    for name, each in keys.items():
        more = each["nats"] / keys["all"]["nats"] - 1
        shares = [f"{each[field]:.3f}" for field in ("kept", "bytes")]
        rows.append([name, *shares, f"{each['nats']:.4f}", f"{more:.2%}".replace("%", " %")])
    return rows


def loading() -> Table:
    rows = [["dtype", "parameters, GB", "peak over the library's own, GB", "seconds"]]
    for figure in record("load_memory")["figures"]:
        sizes = [f"{figure[field] / 1e9:.3f}" for field in ("parameters", "over_baseline")]
        rows.append([figure["dtype"], *sizes, told(figure, "seconds", 2)])
    return rows


SECTIONS = (
    Section(
        "One layer's decoding step",
        "A Gated DeltaNet layer of Qwen3.5-4B's sizes (16 key heads, 32 value heads, 128 by 128), float32 "
        "checkpoint, bfloat16 entries; microseconds. FLA is flash-linear-attention 0.6.0, as it is and with its "
        "state in the layout in which it is faster; XLA's time is of another run. Rows fold in turn, as a server's "
        "do.",
        ("kernels_recurrent", "kernels"),
        layer_step,
        (("kernels.png", "One layer's step against its bytes: ours, XLA's and flash-linear-attention's."),),
    ),
    Section(
        "One layer's step with drafts",
        "The same layer, several tokens of each row at once, of which some are kept and the others rejected; "
        "``limit`` 32 but for one token; microseconds.",
        ("kernels",),
        layer_drafts,
    ),
    Section(
        "One layer's step with a tree of drafts",
        "The same layer in another run, 128 rows, ``limit`` 32.",
        ("kernels_tree",),
        trees,
    ),
    Section(
        "One layer's step with split states",
        "The same layer in another run, microseconds. Rejecting costs nothing, so the last column is a step that "
        "reads five tokens (``limit`` 32).",
        ("kernels_split",),
        split_layer,
        (("kernels_split.png", "One layer's step with float32, split and split8 checkpoints."),),
    ),
    Section(
        "One layer's step of Mamba-2",
        "Sizes of Nemotron-H-8B (128 heads of 64, 8 groups, states of 128 numbers); microseconds.",
        ("kernels_mamba2", "kernels_mamba2_split"),
        mamba2_layer,
        (("kernels_mamba2.png", "One Mamba-2 layer's step against its bytes."),),
        "No peer was timed in these runs.",
    ),
    Section(
        "One layer's step of Mamba-2 with heads of 80",
        "Sizes of Nemotron-3-Nano-4B (96 heads of 80, 8 groups, states of 128 numbers); microseconds.",
        ("kernels_mamba2_80",),
        heads_of_80,
        (("kernels_mamba2_80.png", "One Mamba-2 layer's step with heads of 80 against its bytes."),),
    ),
    Section(
        "One layer's step of other families",
        "32 heads of 128, states of 128 numbers, one token a step; microseconds. The first two have a decay for each "
        "key channel, which is half of an entry's bytes.",
        tuple(f"kernels_{family}" for family in OTHER_FAMILIES),
        families,
        (("kernels_kda.png", "Kimi Delta Attention's step against its bytes."),),
        "No peer was timed in these runs.",
    ),
    Section(
        "Rows without a checkpoint",
        "128 rows of the Gated DeltaNet layer, of which half are KV-only: they read their entries and no checkpoint.",
        ("kernels_kv",),
        kv_only,
        (("kernels_kv.png", "A step's time by the number of entries that KV-only rows hold."),),
    ),
    Section(
        "A softmax layer's step",
        "Keys and values in pages of 16 tokens, bfloat16; microseconds. torch's kernels read keys that lie in one "
        "piece. A dash: the run ended before, or torch has no such rows.",
        ("attention", "attention_llama"),
        attention,
        (("attention.png", "A softmax layer's step against the bytes of its keys and values."),),
    ),
    Section(
        "Latent attention's step",
        "Kimi-Linear's sizes: 32 heads on a latent of 512 numbers with 64 for positions, bfloat16, one new token, "
        "behind the projections; microseconds. The floor is the larger of the bytes' time and the products'. XLA's "
        "path is of an earlier run.",
        ("attention", "attention_latent"),
        latent_attention,
    ),
    Section(
        "Routed experts",
        "The router and the routed experts of one layer of Qwen3.5-35B-A3B (8 of 256) and of Qwen3-Next-80B-A3B "
        "(10 of 512), bfloat16; microseconds. The floor counts the experts that the tokens chose, or the products "
        "if they take longer. A dash: that path refused the sizes, or the run ended before.",
        ("experts",),
        experts,
        (("experts.png", "Routed experts by number of tokens: five ways."),),
    ),
    Section(
        "Routed experts with kernels for one token and for many, on an H100",
        "The same, later, with kernels that serve a few tokens without sorting, and thousands in larger visits. An "
        "H100 reads 3.2 TB a second where an H200 reads 4.6: compare multiples of the floor, not times, with those "
        "above.",
        ("experts_h100",),
        experts_h100,
    ),
    Section(
        "Whole steps of Qwen3.5-4B",
        "Random weights in bfloat16, 1,024 tokens behind every row; milliseconds.",
        ("step_few", "step_wide"),
        whole_steps,
        (
            ("step_wide.png", "The parts of a step at 128 and 256 rows, beside the time that their bytes take."),
            ("step_few.png", "The same at 1, 8 and 32 rows."),
        ),
    ),
    Section(
        "Whole steps with drafts, and models with experts",
        "Buffered, random weights in bfloat16, behind 1,024 tokens: plain steps, and steps that check four drafts "
        "of which two are kept, so that they give each row three tokens. In steps with drafts a row's tokens are "
        "all the same here: they touch fewer experts than a text's would, so that the times of models with experts "
        "are lower bounds.",
        tuple(name for _, name in MODELS),
        drafted_steps,
        (("step_qwen3_5_35b.png", "The parts of a step of Qwen3.5-35B-A3B."),),
        "Mamba-2 with heads of 80, which Nemotron-3-Nano-4B has, had no kernel when this was measured.",
    ),
    Section(
        "Whole steps of Nemotron-H-8B",
        "128 rows behind 1,024 tokens, random weights in bfloat16.",
        ("step_nemotron_h_8b",),
        partial(steps_by_form, "step_nemotron_h_8b"),
        (("step_nemotron_h_8b.png", "The parts of a step of Nemotron-H-8B."),),
    ),
    Section(
        "Whole steps of Nemotron-3-Nano-4B",
        "256 rows behind 1,024 tokens, random weights in bfloat16.",
        ("step_nemotron_nano_4b_256",),
        partial(steps_by_form, "step_nemotron_nano_4b_256"),
        (("step_nemotron_nano_4b_256.png", "The parts of a step of Nemotron-3-Nano-4B."),),
    ),
    Section(
        "One model over two GPUs",
        'Qwen3.5-4B, 128 rows, on one and on two GPUs along a mesh axis "tensor". This was measured before '
        "attention and projections had kernels: compare the two lines with each other, not with the tables above.",
        ("step_devices",),
        two_devices,
        (("step_devices.png", "The parts of a step on one GPU and on two."),),
    ),
    Section(
        "One layer's recurrence over prompts, on an H100",
        "``chunked`` in bfloat16 from an empty state, all its kernels together; microseconds. Layers of Qwen3.5-4B (32 "
        "value heads on 16 key heads of 128), of Kimi-Linear (32 heads of 128) and of Nemotron-H-8B (128 heads of 64, "
        "8 groups). FLA is flash-linear-attention 0.6.0's chunk_gated_delta_rule in the same run. The last column is "
        "the time that what goes in and out takes at the bandwidth of the run; the products take longer.",
        ("chunked", "chunked_kda", "chunked_mamba2"),
        chunks,
        (("chunked.png", "Nanoseconds a token of one layer's recurrence: ours, XLA's and FLA's."),),
        "Of outputs in bfloat16 none is off by more than 3.1e-3 of the largest, and of states by 1.1e-5, against "
        "float32; FLA's states are off by a few thousandths (in the record).",
    ),
    Section(
        "Reading prompts",
        "Qwen3.5-4B in bfloat16 with random weights, through the programs of ``generate``; attention is cuDNN's, and "
        "the recurrence has the kernel of the table above.",
        ("prefill",),
        prompts,
        (("prefill.png", "The parts of reading prompts."),),
    ),
    Section(
        "Short texts",
        '128 rows of a random Qwen3.5-4B of four layers: ``form="auto"``, which reads no checkpoint of a short '
        'text, and ``form="buffered"``.',
        ("short",),
        short_texts,
    ),
    Section(
        "Choosing a token",
        "What drawing from the logits adds to taking the greatest, at a vocabulary of 248,320. *Flat* logits have "
        "their probability spread over thousands of tokens.",
        ("sample",),
        sampling,
    ),
    Section(
        "Compiling",
        "The first ``generate`` of a random Qwen3.5-4B in bfloat16, 8 prompts of 100 tokens; running it again "
        "takes 0.3 s.",
        ("compile",),
        compilation,
    ),
    Section(
        "What drafts save",
        "The embedded model in float32 with four drafts a step: new tokens for each forward of the model, over 100 "
        "prompts; 1 is what plain decoding gives. The last column is how many times the recurrent state's bytes "
        "the usual way to roll back would have moved, which keeps a state for each verified token. No greedy text "
        "of 600 differs from the one without a drafter.",
        ("drafts",),
        drafters,
    ),
    Section(
        "How far the buffered form is from the plain recurrence",
        "4,096 tokens of one layer with bfloat16 entries, against the plain recurrence in float32, by the kind of "
        "checkpoint: the worst relative error of any step, and the error of the last 512 steps over that of the "
        "first, the greatest of strong and weak decay and of independent and correlated keys. (Mamba-2's entries "
        "store what came in, already bfloat16: with a float32 checkpoint nothing is rounded.)",
        ("drift_split",),
        drift,
        (
            (
                "drift_split.png",
                "Errors over 4,096 steps: flat for float32 and split checkpoints, growing for bfloat16.",
            ),
        ),
    ),
    Section(
        "What it does to a likelihood",
        "The embedded model with bfloat16 entries decodes 4 x 4,096 held-out tokens step by step, against the "
        "recurrence in float32; the greatest change of a quarter, and greedy continuations of 64 tokens.",
        ("likelihood",),
        likelihood,
    ),
    Section(
        "Write gates: retrieval",
        "Right answers of a small model of Llama's architecture on texts of 2,048 tokens, 20 examples of each task and "
        "seed, against the bytes that softmax layers hold (:doc:`write_gated`). Gates have three seeds, the others "
        "one. *Whole heads* keeps all keys of the heads that DuoAttention's training ranks highest. *Scores of hidden "
        "states* are KVzap's form, *a borrowed neuron* DMS's, for which the model itself is trained on.",
        ("write_gate_retrieval", "write_gate_retrieval_neuron"),
        retrieval,
        (("write_gate_retrieval.png", "Right answers against bytes held."),),
    ),
    Section(
        "Write gates: a hybrid's softmax layers",
        "The same tasks, for a model with Gated DeltaNet in every other layer. Its recurrent states are small (two "
        "heads of 16 x 32), so that its softmax layers have to look things up; the bytes are theirs.",
        ("write_gate_hybrid",),
        retrieval_of_a_hybrid,
        (("write_gate_hybrid.png", "Right answers of a hybrid against the bytes of its softmax layers."),),
    ),
    Section(
        "Write gates: selection on top, and StreamingLLM",
        "Quest reads, of the keys that are held, a number of keys for each query (*budget*); StreamingLLM's positions "
        "never grow. Eight examples of each task and seed, gates of one seed.",
        ("write_gate_retrieval_selected", "write_gate_hybrid_selected"),
        selected,
    ),
    Section(
        "Write gates: the embedded model",
        'Held-out text with the gates that come with the package, ``gates="demo"``.',
        ("demo_gates",),
        embedded_gates,
    ),
    Section(
        "Loading",
        "A random checkpoint of 2.0 GB in five shards, loaded on a CPU in a fresh process.",
        ("load_memory",),
        loading,
    ),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in lines_of(section))]).rstrip() + "\n"


def lines_of(section: Section) -> Iterable[str]:
    yield from [section.title, "-" * len(section.title), "", *wrap(section.text, 120, break_on_hyphens=False), ""]
    table = section.table()
    yield from [".. list-table::", "   :header-rows: 1", ""]
    for row in table:
        if len(row) != len(table[0]):
            raise ValueError(f"{section.title}: a row of {len(row)} cells under {len(table[0])} headings")
        yield from [f"   {'*' if place == 0 else ' '} - {cell}".rstrip() for place, cell in enumerate(row)]
    yield ""
    for name, shown in section.plots:
        yield from [f".. image:: ../benchmarks/{name}", f"   :alt: {shown}", ""]
    if section.after:
        yield from [section.after, ""]
    for name in dict.fromkeys(section.records):
        found = record(name)
        device = "CPU" if found["device"] == "cpu" else found["device"]
        yield f"- ``benchmarks/{name}.json``: {device}, {found['date']}, ``{found['command']}``"
    yield ""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
