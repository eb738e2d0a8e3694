"""Measures the decoding kernels against the time that their bytes take to read, and against other implementations."""

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxbuf.bench import companions, report
from jaxbuf.bench.drift import FAMILIES
from jaxbuf.bench.kernel_figures import BATCHES, Row, crossover, describe, judge, plot, show
from jaxbuf.bench.measure import bandwidths, bare_passes, device_time, timed, worst_errors
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, number, output, whole
from jaxbuf.recurrence import RecurrenceSpec, buffered, traffic
from jaxbuf.recurrence.state_format import SPLIT, decode

PARTS = {
    "decode": "one token a step, limit 16, over batch sizes",
    "recurrent": "the plain recurrent step: limit 1, every step folds",
    "fla": "flash-linear-attention's fused_recurrent_gated_delta_rule (torch and triton), if it is installed",
    "verify": "2, 3, 5 and 9 tokens a step at limit 32, of which 2, 2, 3, and 5 or 9 are accepted",
    "state": "a bfloat16 checkpoint",
    "split": "split checkpoints: one token at limit 16, and 5 of which 3 are accepted at limit 32",
    "kv": "KV-only slots of 16 to 256 entries, half and half with buffered ones in a launch",
    "limits": "one token a step, limits 4 to 32",
    "tree": "8 tokens a step at limit 32, of which 4 are accepted: a chain, and a tree in which they are a path",
    "companions": "prepare and gated_norm beside XLA's compilation of them, at 1 and 5 tokens a step",
    "xla": "XLA's compilation of the jnp path, limit 16",
}
SIZES = ("heads", "key_heads", "dim", "value_dim")
KIMI = {"heads": 32, "key_heads": 32, "dim": 128, "value_dim": 128}
LAYERS: dict[str, dict[str, int]] = {  # by the recurrence, of Qwen3.5-4B, of Nemotron-H-8B and of Kimi-Linear
    "gdn": {"heads": 32, "key_heads": 16, "dim": 128, "value_dim": 128},
    "mamba2": {"heads": 128, "key_heads": 8, "dim": 128, "value_dim": 64},
    "kda": KIMI,
    "gla": KIMI,
    "deltanet": KIMI,
    "retention": KIMI,
    "linear": KIMI,
}
RECURRENCES: dict[str, tuple[Literal["none", "head", "channel"], bool]] = {
    **FAMILIES,
    "gla": ("channel", False),
    "deltanet": ("none", True),
    "retention": ("head", False),
    "linear": ("none", False),
}
OF_GDN = ("fla", "companions")  # parts of one family alone
SMALL = (1, 2, 4, 8, 16, 64)
VERIFY = {5: (3,), 9: (9, 5), 2: (2,), 3: (2,)}  # tokens a step: how many of them are accepted
JUDGED = (5, 9)  # tokens a step that there is a target for
TREE = (-1, 0, 0, 1, 1, 2, 2, 3)  # the node before each one
TREE_PATH = (0, 1, 3, 7)  # what is accepted of it
LIMITS = (4, 8, 24, 32)
KV_LENGTHS = (16, 64, 112, 144, 176, 200, 224, 256)
LONG = 4096  # tokens in the checkpoint of a slot that has one; any number above 0 measures the same
FOOTPRINT, MOST_LAYERS = 160e6, 80  # the layers' states together exceed twice the H200's L2, 60 MB
COMPILERS = 6  # programs compiled at once
BOUNDS = {"bfloat16": 4e-3, "float32": 1e-3}  # a bfloat16's own rounding is up to 3.9e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program. `accepted` has an entry for each way of running it; `longest`: entries of KV-only slots."""

    part: str
    batch: int
    time: int = 1
    accepted: tuple[int, ...] = (1,)
    limit: int = 16
    state_dtype: str = "float32"
    implementation: str = "gpu"
    longest: int = 0
    tree: bool = False

    @property
    def capacity(self) -> int:
        """Entries from which the slot that holds most folds."""
        return max(self.limit, self.longest + self.time)

    def steps(self, least: int) -> int:
        """A number of steps in whole fold cycles, whatever is accepted."""
        whole = math.lcm(*(traffic.fold_cycle(self.limit, self.time, accepted) for accepted in self.accepted))
        return whole * -(-least // whole)


type AnyCase = Case | companions.Case


@dataclasses.dataclass(frozen=True)
class Load:
    """What the slots of a program hold at its first step, and accept in each: int32 [batch]."""

    labels: Row
    limit: np.ndarray
    length: np.ndarray
    folded: np.ndarray
    accepted: np.ndarray


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench kernels",
        description=__doc__,
        epilog="Parts: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()) + ". "
        "The floor of a step is its bytes (checkpoints read and folded, live entries, appends, inputs and outputs, as "
        "the step's own integers say) over the read bandwidth, that of a sum over 4 GiB in the same run; achieved is "
        "floor / time. Times are for one layer's step, averaged over whole fold cycles on states that exceed the L2: "
        "device time is that of the kernels, from jax.profiler, and wall time that of a loop of steps on the device, "
        "held up at times by the programs that are compiled meanwhile; rest_us in the JSON is the loop's other kernels "
        "(integers, counters), which a model's step shares among its layers. "
        "Rows fold staggered, as a server's do, and, as a second figure, in lockstep. The kernel's results, of each "
        "kind of launch that is timed, are compared with XLA's first; the exit status is 1, and nothing is timed, if "
        "they differ. Those of a companion are compared before it is timed; one that differs is left out, and the "
        "exit status is 1 as well. It is 1 too if nothing of a part that --only names could be measured; other errors"
        " are remarks. What XLA takes to read the checkpoints of a batch once, and to update them in place, is "
        "printed beside: a launch has a start and an end, and writes cost more than reads, which the floor does not "
        "count.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", type=lambda words: words.split(","), default=[], help="parts to measure instead of all, with commas"
    )
    parser.add_argument("--quick", action="store_true", help="batches 32 and 128 only, and few steps")
    parser.add_argument("--batches", default=None, help="batch sizes to measure instead of the usual, with commas")
    parser.add_argument("--budget", type=number(0), default=330, help="seconds after which nothing new is started")
    parser.add_argument("--implementation", choices=("gpu", "xla"), default="gpu", help="of what is not the xla part")
    parser.add_argument("--layers", type=whole(1), default=None, help="pools in turn; default: for over twice the L2")
    parser.add_argument(
        "--family",
        choices=tuple(LAYERS),
        default="gdn",
        help="of the recurrence: Gated DeltaNet, Mamba-2, Kimi Delta Attention, gated linear attention, DeltaNet, "
        "retention or linear attention",
    )
    add_sizes(parser)
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument(
        "--profile",
        type=folder,
        default=None,
        help="a folder for the jax.profiler traces of the timed steps, one folder for each program",
    )
    options = parser.parse_args(arguments)
    options.batches = options.batches and tuple(report.whole_numbers(parser, "--batches", options.batches))
    fill_sizes(parser, options)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only must name parts among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if elsewhere := [part for part in options.only if part in OF_GDN and options.family != "gdn"]:
        parser.error(f"--only must not name {elsewhere[0]} with --family {options.family}: it is of gdn alone")
    report.check_plots(parser, options.json)
    if options.implementation == "gpu" and jax.default_backend() != "gpu":
        parser.error(f"the kernels need a GPU, this is a {jax.default_backend()}: try --implementation xla")
    return options


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options for a layer's sizes; what they leave out, `fill_sizes` has."""
    parser.add_argument("--heads", type=whole(1), default=None, help="value heads; default: 32, of Mamba-2 128")
    parser.add_argument(
        "--key-heads", type=whole(1), default=None, help="default: 32, of Gated DeltaNet 16, of Mamba-2 8 groups"
    )
    parser.add_argument("--dim", type=whole(1), default=None, help="of keys; default: 128")
    parser.add_argument("--value-dim", type=whole(1), default=None, help="default: --dim, of Mamba-2 64")


def fill_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Sizes that were not given are those of the family's layer."""
    sizes = LAYERS[options.family]
    if options.family != "mamba2" and options.value_dim is None:
        options.value_dim = options.dim
    for name in SIZES:
        if getattr(options, name) is None:
            setattr(options, name, sizes[name])
    if options.heads % options.key_heads:
        parser.error(f"--heads must be a multiple of --key-heads, got {options.heads} and {options.key_heads}")


def plan(options: argparse.Namespace) -> list[AnyCase]:
    """What is measured, the most telling first."""
    large = options.batches or (BATCHES[:2] if options.quick else BATCHES)
    small = () if options.batches or options.quick else SMALL
    middle, most = 128 if 128 in large else large[-1], large[-1]
    make = functools.partial(Case, implementation=options.implementation)
    cases: list[AnyCase] = [
        make(part, batch, limit=limit) for part, limit in (("decode", 16), ("recurrent", 1)) for batch in large
    ]
    cases += [Case("fla", most)]
    verify = [make("verify", batch, time, accepted, 32) for time, accepted in VERIFY.items() for batch in large]
    cases += [case for case in verify if case.time in JUDGED]
    cases += [make("state", most, state_dtype="bfloat16")]
    cases += [make("split", batch, state_dtype=name) for name in SPLIT for batch in large]
    cases += [make("split", batch, 5, (3,), 32, state_dtype=name) for name in SPLIT for batch in large]
    cases += [make("split", batch, state_dtype=name) for name in SPLIT for batch in small]
    cases += [make("kv", middle, longest=KV_LENGTHS[-1])]
    cases += [make(part, batch, limit=limit) for batch in small for part, limit in (("decode", 16), ("recurrent", 1))]
    cases += [case for case in verify if case.time not in JUDGED]
    cases += [make("limits", middle, limit=limit) for limit in LIMITS]
    cases += companions.plan(options.implementation, [*((batch, 1) for batch in large), (middle, 5)])
    cases += [Case("xla", batch, implementation="xla") for batch in large]
    tree = functools.partial(make, "tree", middle, len(TREE), (len(TREE_PATH),), 32)
    cases += [tree(), tree(tree=True)]
    left_out = OF_GDN if options.family != "gdn" else ()
    return [case for case in cases if case.part in (options.only or PARTS) and case.part not in left_out]


def loads(case: Case) -> list[Load]:
    """The ways to run a program: staggered and in lockstep, or KV-only slots of each length (0: none) among others."""
    rows, found = np.arange(case.batch), []

    def everywhere(value: int) -> np.ndarray:
        return np.full(case.batch, value)

    for accepted in case.accepted:
        phase = rows % traffic.fold_cycle(case.limit, case.time, accepted)
        staggered = (everywhere(case.limit), accepted * (1 + phase), everywhere(LONG), everywhere(accepted))
        lockstep = (staggered[0], everywhere(accepted), *staggered[2:])
        if case.part != "kv":
            found += [Load({"phase": "staggered", "accepted": accepted}, *staggered)]
            found += [Load({"phase": "lockstep", "accepted": accepted}, *lockstep)]
            continue
        for entries in (0, *(n for n in KV_LENGTHS if n <= case.longest)):
            alone = (rows % 2 == 1) & (entries > 0)
            # What KV-only slots append is rejected, so that they stay as long as they are.
            only = (case.capacity, entries, 0, 0)
            mixed = [np.where(alone, value, others) for value, others in zip(only, staggered, strict=True)]
            found += [Load({"phase": "staggered", "accepted": accepted, "kv_length": entries}, *mixed)]
    return found


def schedule(case: Case, load: Load, steps: int) -> buffered.Step:
    """The integers of every step, stacked: numpy [steps, ...]. Made beforehand, so that a timed loop is layers only."""
    with jax.default_device(_host()):
        cursor = buffered.init_cursor(slots=case.batch, limit=case.capacity, max_pending=case.time)
        held = {"limit": load.limit, "length": load.length, "folded": load.folded}
        first = {name: jnp.asarray(np.insert(values, 0, 0), jnp.int32) for name, values in held.items()}
        cursor = dataclasses.replace(cursor, **first)
        return jax.device_get(_schedule(cursor, jnp.asarray(load.accepted, jnp.int32), case.time, case.tree, steps))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _schedule(cursor: buffered.Cursor, accepted: jax.Array, time: int, tree: bool, steps: int) -> buffered.Step:
    slots = jnp.arange(1, accepted.shape[0] + 1, dtype=jnp.int32)
    parents, path = (jnp.tile(jnp.array(x, jnp.int32), (len(slots), 1)) if tree else None for x in (TREE, TREE_PATH))

    def one(cursor, _):
        step, cursor = buffered.begin(cursor, slots, jnp.full_like(slots, time), time, parents)
        return buffered.commit_cursor(cursor, accepted, slots, path), step

    return jax.lax.scan(one, cursor, None, length=steps)[1]


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX was told to use no CPU
        return jax.devices()[0]


def count_bytes(spec: RecurrenceSpec, steps: buffered.Step, state_dtype: str) -> Row:
    """What one layer moves in a step, on average over the stacked steps, for bfloat16 entries, inputs and outputs.

    Returns:
      bytes a step: checkpoints read, checkpoints written by folds, entries read and appended, q, k, v, the gates and
      the outputs; and folds and live entries a row and step.
    """
    works, count = steps.lengths > 0, steps.lengths.shape[0]
    reads = np.sum(steps.before.has_checkpoint & works) / count
    folds = np.sum(np.asarray(steps.folds) & works) / count
    live = np.sum(steps.before.live * works) / count
    tokens = np.sum(steps.lengths) / count
    moved = traffic.state_traffic(
        spec, checkpoint_reads=reads, folds=folds, live_entries=live, appended=tokens, state_dtype=state_dtype
    )
    total = moved + tokens * traffic.token_bytes(spec)
    rows = steps.lengths.shape[1]
    return {"bytes": float(total), "folds": float(folds / rows), "live": float(live / rows)}


def layers_for(spec: RecurrenceSpec, batch: int) -> int:
    return int(min(MOST_LAYERS, max(2, -(-FOOTPRINT // (batch * traffic.checkpoint_bytes(spec))))))


def pool_shapes(spec: RecurrenceSpec, case: Case) -> buffered.Pool:
    cursor = buffered.init_cursor(slots=case.batch, limit=case.capacity, max_pending=case.time)
    return jax.eval_shape(lambda: buffered.init_pool(spec, cursor, state_dtype=case.state_dtype))


def make_pools(spec: RecurrenceSpec, case: Case, layers: int, rng: np.random.Generator) -> tuple[buffered.Pool, ...]:
    """Random memory for each layer, made on the device: on zeros, a chip may run faster than it does on numbers."""
    shapes = pool_shapes(spec, case)

    @jax.jit
    def make(key):
        def some(key, shape):
            return jax.random.normal(key, shape.shape, jnp.bfloat16).astype(shape.dtype)

        keys = jax.random.split(key, 5)
        low = None
        if shapes.low is not None:  # as large as what rounding to the high half leaves
            low = (some(keys[4], shapes.low).astype(jnp.float32) * 2.0**-10).astype(shapes.low.dtype)
        return buffered.Pool(
            checkpoints=some(keys[0], shapes.checkpoints),
            keys=some(keys[1], shapes.keys) / math.sqrt(spec.key_dim),
            updates=some(keys[2], shapes.updates),
            gates=-abs(some(keys[3], shapes.gates)) / 20,
            low=low,
            low_scales=None if shapes.low_scales is None else jnp.full(shapes.low_scales.shape, 2.0**-16, jnp.float32),
        )

    return tuple(make(jax.random.key(int(seed))) for seed in rng.integers(2**31, size=layers))


def make_tokens(spec: RecurrenceSpec, case: Case, rng: np.random.Generator) -> tuple[Any, ...]:
    """q, k (normalised), v in bfloat16; log_decay about -0.05, if there is one, and beta in float32."""
    shape = (case.batch, case.time)
    q, k = rng.standard_normal((2, *shape, spec.key_heads, spec.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((*shape, spec.heads, spec.value_dim))
    decay_shape = spec.decay_shape(*shape)
    log_decay = None if decay_shape is None else jnp.asarray(-0.05 * rng.exponential(size=decay_shape), jnp.float32)
    rounded = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return *rounded, log_decay, jnp.asarray(1 / (1 + np.exp(-rng.standard_normal(v.shape[:3]))), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def run(spec: RecurrenceSpec, implementation: str, pools, outs, steps: buffered.Step, tokens):
    """All steps on the device, every layer in each; the outputs are kept, or XLA would leave them out."""

    def body(i, carry):
        step = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), steps)
        done = [buffered.extend_pool(spec, pool, step, *tokens, implementation=implementation) for pool in carry[0]]
        return tuple(pool for _, pool in done), tuple(out for out, _ in done)

    return jax.lax.fori_loop(0, steps.lengths.shape[0], body, (pools, outs))


def compile_case(spec: RecurrenceSpec, case: AnyCase, options: argparse.Namespace, seed: int) -> Any:
    """The compiled program of a case."""
    rng = np.random.default_rng(seed)  # its own: this runs in a thread
    if isinstance(case, companions.Case):
        return companions.Lowered(spec, case, options, rng).compile()
    layers, tokens = options.layers or layers_for(spec, case.batch), make_tokens(spec, case, rng)
    pools, outs = (pool_shapes(spec, case),) * layers, (tokens[2],) * layers
    steps = schedule(case, loads(case)[0], case.steps(8 if options.quick else 24))
    return run.lower(spec, case.implementation, pools, outs, steps, tokens).compile()


def measure(spec: RecurrenceSpec, case: Case, options: argparse.Namespace, program: Callable, read: float, rng):
    """The rows of a case, whose compiled program it runs; read: bytes a second."""
    layers = options.layers or layers_for(spec, case.batch)
    steps = case.steps(8 if options.quick else 24)
    tokens = make_tokens(spec, case, rng)
    carry = make_pools(spec, case, layers, rng), tuple(jnp.zeros_like(tokens[2]) for _ in range(layers))
    rows = []
    for load in loads(case):
        integers = schedule(case, load, steps)
        placed = jax.device_put(integers, jax.devices()[0])

        def call(carry, placed=placed):
            return jax.block_until_ready(program(*carry, placed, tokens))

        name = "-".join(str(word) for word in (case.part, case.batch, case.time, case.limit, *load.labels.values()))
        carry, walls, kernels = timed(call, carry, options.profile and options.profile / name)
        calls = steps * layers
        device = device_time(kernels, calls, case.implementation)
        row = dataclasses.asdict(case) | load.labels | {"layers": layers, "steps": steps}
        row |= {"device_us": None, "wall_us": 1e6 * walls / calls} | device
        row["us"] = row["device_us"] or row["wall_us"]
        row |= count_bytes(spec, integers, case.state_dtype)
        row["floor_us"] = 1e6 * row["bytes"] / read
        rows.append(row | {"achieved": row["floor_us"] / row["us"]})
    return rows


def compared(timed: Sequence[Case]) -> list[Case]:
    """What is compared with XLA's path before so many cases of the kernel are timed: one of each kind."""
    batch = min(BATCHES[1], max(case.batch for case in timed))
    kinds = [Case("decode", batch), Case("verify", batch, 5, (3,), 32)]
    kinds += [Case("tree", batch, len(TREE), (len(TREE_PATH),), 32, tree=True)]
    kinds += [Case("split", batch, state_dtype=name) for name in SPLIT]

    def kind(case: Case) -> tuple[bool, bool, str]:
        """Launches of one token and of several, of trees, and of each form of split states. Others: float32."""
        split = case.state_dtype in SPLIT
        return case.time > 1 and not split, case.tree, case.state_dtype if split else "float32"

    wanted = {kind(case) for case in timed}
    return [case for case in kinds if kind(case) in wanted]


def check(spec: RecurrenceSpec, cases: Sequence[Case], rng: np.random.Generator) -> dict[str, float]:
    """The kernel's worst relative errors against XLA's path, over a fold cycle from random memory: by dtype.

    Every step starts both from the same memory. An error is that of a row of 128 numbers or so, against its norm:
    of outputs, stored entries and gates, and checkpoints.
    """

    @functools.partial(jax.jit, static_argnums=(0,))
    def extend(implementation, pool, step, tokens):
        return buffered.extend_pool(spec, pool, step, *tokens, implementation=implementation)

    errors = jax.jit(worst_errors)
    found = dict.fromkeys(BOUNDS, 0.0)
    for case in cases:
        (pool,), steps = make_pools(spec, case, 1, rng), schedule(case, loads(case)[0], case.steps(1))
        for i in range(steps.lengths.shape[0]):
            step, tokens = jax.tree.map(lambda x, i=i: x[i], steps), make_tokens(spec, case, rng)
            results = [extend(implementation, pool, step, tokens) for implementation in ("xla", "gpu")]
            pool = results[0][1]
            wanted, got = ((out, _with_whole_states(after)) for out, after in results)
            for array, error in zip(jax.tree.leaves(wanted), jax.tree.leaves(errors(got, wanted)), strict=True):
                found[array.dtype.name] = max(found[array.dtype.name], float(error))
    return found


def _with_whole_states(pool: buffered.Pool) -> buffered.Pool:
    """With both halves of split states as one: nearly equal states may be split differently."""
    if pool.low is None:
        return pool
    states = decode(pool.checkpoints, pool.low, pool.low_scales)
    return dataclasses.replace(pool, checkpoints=states, low=None, low_scales=None)


def measure_peer(spec: RecurrenceSpec, batches: Sequence[int], layers: int | None) -> list[Row]:
    """flash-linear-attention's rows, from a process of its own: two profilers in one get in each other's way."""
    shape = [spec.heads, spec.key_heads, spec.key_dim, spec.value_dim]
    sizes = [[batch, layers or layers_for(spec, batch)] for batch in batches]
    command = [sys.executable, "-m", "jaxbuf.bench.peer", json.dumps(shape), json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise RuntimeError("its process failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1])
    return [{"part": "fla"} | row for row in json.loads(done.stdout.splitlines()[-1])]


def keep(path: Path | None, record: Row, figures: Sequence[Row], left_out: Sequence[Row]) -> None:
    if path:
        crossovers = {name: crossover(figures, name) for name in ("us", "bytes")}
        summary = {"targets": judge(figures, record["family"]), "kv_only_crossover": crossovers, "left_out": left_out}
        report.write(path, record | summary | {"figures": figures})


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status.

    It is 1 if a kernel's results are wrong, or nothing but errors came of a part that was asked for by name.
    """
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    began, cases = time.perf_counter(), plan(options)
    sizes = options.heads, options.key_heads, options.dim, options.value_dim
    spec = RecurrenceSpec(*sizes, *RECURRENCES[options.family])
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng, figures, left_out = np.random.default_rng(seed), [], []
    settings = {name: getattr(options, name) for name in ("family", *SIZES, "quick", "implementation")}
    record = report.provenance("scripts/bench_kernels", arguments, report.ROOT) | settings | {"seed": seed}
    with Progress(console=notes, redirect_stdout=False, transient=True) as progress:
        task = progress.add_task("comparing", total=len(cases))
        recurrences = [case for case in cases if isinstance(case, Case) and case.part != "fla"]
        if kernels := [case for case in recurrences if case.implementation == "gpu"]:
            record["errors"] = errors = check(spec, compared(kernels), rng)
            words = ", ".join(f"{error:.1e} ({name})" for name, error in errors.items())
            notes.print(f"largest relative error against XLA's path: {words}", soft_wrap=True)
            if any(errors[name] > bound for name, bound in BOUNDS.items()):
                console.print(f"WRONG: at most {BOUNDS} is expected, got {errors}; nothing is timed", soft_wrap=True)
                return 1
        record |= bandwidths()
        read = record["read_bytes_per_s"]
        notes.print(f"read {read / 1e12:.2f} TB/s, copy {record['copy_bytes_per_s'] / 1e12:.2f} TB/s")
        batches = sorted({case.batch for case in recurrences if case.part in ("decode", "recurrent")} & set(BATCHES))
        bare = bare_passes([batch * traffic.checkpoint_bytes(spec) for batch in batches], FOOTPRINT)
        record["bare"] = [{"batch": batch} | row for batch, row in zip(batches, bare, strict=True)]
        # Compiled in threads, in the order of the timings: they are the device's own, or of one call of many steps.
        compilers = futures.ThreadPoolExecutor(COMPILERS)
        programs = {
            case: compilers.submit(compile_case, spec, case, options, seed) for case in cases if case.part != "fla"
        }
        for case in cases:
            progress.update(task, description=f"{case.part}, batch {case.batch}")
            if time.perf_counter() - began > options.budget:
                left_out.append(dataclasses.asdict(case))
                continue
            try:
                if case.part == "fla":
                    batches = sorted({case.batch for case in cases if case.part in ("decode", "fla")})
                    rows = measure_peer(spec, batches, options.layers)
                elif isinstance(case, companions.Case):
                    rows = companions.measure(spec, case, options, programs[case].result(), read, rng)
                else:
                    rows = measure(spec, case, options, programs[case].result(), read, rng)
            except Exception as error:  # what one shape cannot do must not cost the figures of the others
                first = (str(error).splitlines() or [""])[0]
                rows = [dataclasses.asdict(case) | {"error": f"{type(error).__name__}: {first}"}]
            figures += rows
            for row in rows:
                notes.print(describe(row), soft_wrap=True)
            keep(options.json, record, figures, left_out)
            progress.advance(task)
    compilers.shutdown(wait=False, cancel_futures=True)
    show(console, figures, judge(figures, options.family))
    for row in record.get("bare", ()):
        words = f"{row['read_us']:.1f} us to read them, {row['update_us']:.1f} us to read and write them in place"
        console.print(f"the checkpoints of batch {row['batch']} alone, by XLA: {words}", soft_wrap=True)
    for row in figures:
        if "error" in row:
            console.print(describe(row), soft_wrap=True)
    if left_out:
        words = f"--budget {options.budget:.0f} was spent: {len(left_out)} of {len(cases)} programs left out"
        console.print(words, soft_wrap=True)
    keep(options.json, record, figures, left_out)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    measured, failed = ({row["part"] for row in figures if name in row} for name in ("us", "error"))
    missing = [part for part in options.only if part in failed - measured]
    if missing:
        console.print(f"--only {','.join(missing)}: nothing could be measured, see above", soft_wrap=True)
    return int(bool(missing) or any(row.get("error", "").startswith(companions.WRONG) for row in figures))
