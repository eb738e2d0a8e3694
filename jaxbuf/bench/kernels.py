"""Measures the decoding kernels against the time that their bytes take to read, and against other implementations."""

import argparse
import collections
import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxbuf.bench import report
from jaxbuf.bench.kernel_figures import BATCHES, Row, crossover, describe, find, judge, plot, show
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.serving.profiling import trace

PARTS = {
    "decode": "one token a step, limit 16, over batch sizes",
    "recurrent": "the plain recurrent step: limit 1, every step folds",
    "fla": "flash-linear-attention's fused_recurrent_gated_delta_rule (torch and triton), if it is installed",
    "verify": "2, 3, 5 and 9 tokens a step at limit 32, of which 2, 2, 3, and 5 or 9 are accepted",
    "state": "a bfloat16 checkpoint",
    "kv": "KV-only slots of 16 to 256 entries, half and half with buffered ones in a launch",
    "limits": "one token a step, limits 4 to 32",
    "xla": "XLA's compilation of the jnp path, limit 16",
}
SMALL = (1, 2, 4, 8, 16, 64)
VERIFY = {5: (3,), 9: (9, 5), 2: (2,), 3: (2,)}  # tokens a step: how many of them are accepted
LIMITS = (4, 8, 24, 32)
KV_LENGTHS = (16, 64, 112, 144, 176, 200, 224, 256)
LONG = 4096  # tokens in the checkpoint of a slot that has one; any number above 0 measures the same
FOOTPRINT, MOST_LAYERS = 160e6, 80  # the layers' states together exceed twice the H200's L2, 60 MB
BOUNDS = {"bfloat16": 4e-3, "float32": 1e-3}  # a bfloat16's own rounding is up to 3.9e-3
XLA_KERNELS = re.compile(r"fusion|wrapped|mem(cpy|set)|copy|cub", re.IGNORECASE)


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

    @property
    def capacity(self) -> int:
        """Entries from which the slot that holds most folds."""
        return max(self.limit, self.longest + self.time)

    def steps(self, least: int) -> int:
        """A number of steps in whole fold cycles, whatever is accepted."""
        whole = math.lcm(*(cycle(self.time, accepted, self.limit) for accepted in self.accepted))
        return whole * -(-least // whole)


@dataclasses.dataclass(frozen=True)
class Load:
    """What the slots of a program hold at its first step, and accept in each: int32 [batch]."""

    labels: Row
    limit: np.ndarray
    length: np.ndarray
    folded: np.ndarray
    accepted: np.ndarray


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jaxbuf bench kernels",
        description=__doc__,
        epilog="Parts: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()) + ". "
        "The floor of a step is its bytes (checkpoints read and folded, live entries, appends, inputs and outputs, as "
        "the step's own integers say) over the read bandwidth, that of a sum over 4 GiB in the same run; achieved is "
        "floor / time. Times are for one layer's step, averaged over whole fold cycles on states that exceed the L2: "
        "device time is that of the kernels, from jax.profiler, and wall time that of a loop of steps on the device. "
        "Rows fold staggered, as a server's do, and, as a second figure, in lockstep. The kernel's results are "
        "compared with XLA's first; the exit status is 1, and nothing is timed, if they differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="batches 32 and 128 only, and few steps")
    parser.add_argument("--batches", default=None, help="batch sizes to measure instead of the usual, with commas")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which nothing new is started")
    parser.add_argument("--implementation", choices=("gpu", "xla"), default="gpu", help="of what is not the xla part")
    parser.add_argument("--layers", type=int, default=None, help="pools in turn; default: for over twice the L2")
    parser.add_argument("--heads", type=int, default=32, help="value heads; Qwen3.5-4B has 32")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="of keys and values")
    parser.add_argument("--json", type=Path, default=None, help="keep the figures here as they come; a plot beside it")
    parser.add_argument(
        "--profile",
        type=Path,
        default=None,
        help="a folder for the jax.profiler traces of the timed steps, one folder for each program",
    )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    options.batches = options.batches and tuple(int(batch) for batch in options.batches.split(","))
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only must name parts among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    report.check_plots(parser, options.json)
    if options.implementation == "gpu" and jax.default_backend() != "gpu":
        parser.error(f"the kernels need a GPU, this is a {jax.default_backend()}: try --implementation xla")
    return options


def plan(options: argparse.Namespace) -> list[Case]:
    """What is measured, the most telling first."""
    large = options.batches or (BATCHES[:2] if options.quick else BATCHES)
    small = () if options.batches or options.quick else SMALL
    middle, most = 128 if 128 in large else large[-1], large[-1]
    make = functools.partial(Case, implementation=options.implementation)
    cases = [make(part, batch, limit=limit) for part, limit in (("decode", 16), ("recurrent", 1)) for batch in large]
    cases += [Case("fla", most)]
    cases += [make("verify", batch, time, accepted, 32) for time, accepted in VERIFY.items() for batch in large]
    cases += [make("state", most, state_dtype="bfloat16")]
    cases += [make("kv", middle, longest=longest) for longest in KV_LENGTHS[-2:][::-1]]
    cases += [make(part, batch, limit=limit) for batch in small for part, limit in (("decode", 16), ("recurrent", 1))]
    cases += [make("limits", middle, limit=limit) for limit in LIMITS]
    cases += [Case("xla", batch, implementation="xla") for batch in large]
    return [case for case in cases if case.part in options.only]


def cycle(time: int, accepted: int, limit: int) -> int:
    """Steps from one fold of a slot to the next: it folds where its entries and `time` new ones exceed the limit."""
    return max(1, (limit - time) // accepted + 1)


def loads(case: Case) -> list[Load]:
    """The ways to run a program: staggered and in lockstep, or KV-only slots of each length (0: none) among others."""
    rows, found = np.arange(case.batch), []

    def everywhere(value: int) -> np.ndarray:
        return np.full(case.batch, value)

    for accepted in case.accepted:
        phase = rows % cycle(case.time, accepted, case.limit)
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
        return jax.device_get(_schedule(cursor, jnp.asarray(load.accepted, jnp.int32), case.time, steps))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _schedule(cursor: buffered.Cursor, accepted: jax.Array, time: int, steps: int) -> buffered.Step:
    slots = jnp.arange(1, accepted.shape[0] + 1, dtype=jnp.int32)

    def one(cursor, _):
        step, cursor = buffered.begin(cursor, slots, jnp.full_like(slots, time), time)
        return buffered.commit_cursor(cursor, accepted, slots), step

    return jax.lax.scan(one, cursor, None, length=steps)[1]


def _host():
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX was told to use no CPU
        return jax.devices()[0]


def count_bytes(spec: RecurrenceSpec, steps: buffered.Step, state_bytes: int) -> Row:
    """What one layer moves in a step, on average over the stacked steps, for bfloat16 entries, inputs and outputs.

    Args:
      state_bytes: Of one number of the checkpoint.

    Returns:
      bytes a step: checkpoints read, checkpoints written by folds, entries read and appended, q, k, v, the gates and
      the outputs; and folds and live entries a row and step.
    """
    works, count = steps.lengths > 0, steps.lengths.shape[0]
    reads = np.sum(steps.before.has_checkpoint & works) / count
    folds = np.sum(np.asarray(steps.folds) & works) / count
    live = np.sum(steps.before.live * works) / count
    tokens = np.sum(steps.lengths) / count
    checkpoint = math.prod(spec.state_shape) * state_bytes
    key, value, gate = 2 * spec.key_heads * spec.key_dim, 2 * spec.heads * spec.value_dim, 4 * spec.heads
    total = (reads + folds) * checkpoint + (live + tokens) * (key + value + gate) + tokens * 2 * (key + value + gate)
    rows = steps.lengths.shape[1]
    return {"bytes": float(total), "folds": float(folds / rows), "live": float(live / rows)}


def layers_for(spec: RecurrenceSpec, batch: int) -> int:
    return int(min(MOST_LAYERS, max(2, -(-FOOTPRINT // (batch * math.prod(spec.state_shape) * 4)))))


def make_pools(spec: RecurrenceSpec, case: Case, layers: int, rng: np.random.Generator) -> tuple[buffered.Pool, ...]:
    """Random memory for each layer: on zeros, a chip may run faster than it does on numbers."""
    cursor = buffered.init_cursor(slots=case.batch, limit=case.capacity, max_pending=case.time)
    shapes = jax.eval_shape(lambda: buffered.init_pool(spec, cursor, state_dtype=jnp.dtype(case.state_dtype)))
    some = rng.standard_normal(2**20 + 7, np.float32)  # repeated, and not in step with the slots
    values = {"checkpoints": some, "keys": some / math.sqrt(spec.key_dim), "updates": some, "gates": -abs(some) / 20}
    arrays = {
        name: np.resize(value.astype(getattr(shapes, name).dtype), getattr(shapes, name).shape)
        for name, value in values.items()
    }
    return tuple(buffered.Pool(**{name: jnp.array(array) for name, array in arrays.items()}) for _ in range(layers))


def make_tokens(spec: RecurrenceSpec, case: Case, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """q, k (normalised), v in bfloat16; log_decay about -0.05 and beta in float32."""
    shape = (case.batch, case.time)
    q, k = rng.standard_normal((2, *shape, spec.key_heads, spec.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((*shape, spec.heads, spec.value_dim))
    log_decay, raw = -0.05 * rng.exponential(size=v.shape[:3]), rng.standard_normal(v.shape[:3])
    rounded = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    return *rounded, *(jnp.asarray(x, jnp.float32) for x in (log_decay, 1 / (1 + np.exp(-raw))))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def run(spec: RecurrenceSpec, implementation: str, pools, outs, steps: buffered.Step, tokens):
    """All steps on the device, every layer in each; the outputs are kept, or XLA would leave them out."""

    def body(i, carry):
        step = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), steps)
        done = [buffered.extend_pool(spec, pool, step, *tokens, implementation=implementation) for pool in carry[0]]
        return tuple(pool for _, pool in done), tuple(out for out, _ in done)

    return jax.lax.fori_loop(0, steps.lengths.shape[0], body, (pools, outs))


def measure(spec: RecurrenceSpec, case: Case, options: argparse.Namespace, read: float, rng) -> list[Row]:
    layers = options.layers or layers_for(spec, case.batch)
    steps = case.steps(8 if options.quick else 24)
    tokens = make_tokens(spec, case, rng)
    carry = make_pools(spec, case, layers, rng), tuple(jnp.zeros_like(tokens[2]) for _ in range(layers))
    rows = []
    for load in loads(case):
        integers = schedule(case, load, steps)
        placed = jax.device_put(integers, jax.devices()[0])

        def call(carry, placed=placed):
            return jax.block_until_ready(run(spec, case.implementation, *carry, placed, tokens))

        name = "-".join(str(word) for word in (case.part, case.batch, case.time, case.limit, *load.labels.values()))
        carry, walls, kernels = timed(call, carry, options.profile and options.profile / name)
        calls = steps * layers
        device = device_time(kernels, calls, case.implementation)
        row = dataclasses.asdict(case) | load.labels | {"layers": layers, "steps": steps}
        row |= {"device_us": None, "wall_us": 1e6 * walls / calls} | device
        row["us"] = row["device_us"] or row["wall_us"]
        row |= count_bytes(spec, integers, jnp.dtype(case.state_dtype).itemsize)
        row["floor_us"] = 1e6 * row["bytes"] / read
        rows.append(row | {"achieved": row["floor_us"] / row["us"]})
    return rows


def timed(call: Callable, carry, directory: Path | None) -> tuple[Any, float, dict[str, list[float]]]:
    """Runs once to compile, three times for the wall clock (seconds, median) and once for the kernels' durations."""
    carry, walls = call(carry), []
    for _ in range(3):
        start = time.perf_counter()
        carry = call(carry)
        walls.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory(prefix="jaxbuf-kernels-") as temporary:
        directory = directory or Path(temporary)
        with trace(directory):
            carry = call(carry)
        return carry, float(np.median(walls)), durations(directory)


def durations(directory: Path) -> dict[str, list[float]]:
    """Microseconds of every run of every kernel on a GPU, by name, in the newest trace of a directory."""
    found = collections.defaultdict(list)
    newest = max(directory.glob("plugins/profile/*/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    found[event.name].append(event.duration_ns / 1e3)
    return dict(found)


def device_time(kernels: dict[str, list[float]], calls: int, implementation: str) -> Row:
    """Microseconds of device time a call, nothing without a GPU's kernels.

    XLA's path is all kernels of the loop. Ours is the longest that XLA did not make; its mean counts, so that an event
    which the profiler lost does not.
    """
    if implementation == "xla":
        total = sum(map(sum, kernels.values()))
        return {"device_us": total / calls, "launches": sum(map(len, kernels.values())) / calls} if kernels else {}
    ours = {name: taken for name, taken in kernels.items() if not XLA_KERNELS.search(name)}
    if not ours:
        return {}
    name = max(ours, key=lambda name: sum(ours[name]))
    taken, each = np.array(ours[name]), max(1, round(len(ours[name]) / calls))
    rest = (sum(map(sum, kernels.values())) - taken.sum()) / calls
    spread = {"least_us": taken.min(), "median_us": np.median(taken), "most_us": taken.max(), "rest_us": rest}
    found = {"device_us": each * taken.mean()} | spread | {"launches": len(taken) / calls}
    return {"kernel": name} | {key: float(value) for key, value in found.items()}


def bandwidths() -> Row:
    """Bytes a second that a sum reads, and that a copy reads and writes."""
    x = jnp.full(2**30 if jax.default_backend() == "gpu" else 2**24, 0.5, jnp.float32)
    found = {}
    for name, operation, moved in (("read", jnp.sum, x.nbytes), ("copy", jnp.negative, 2 * x.nbytes)):
        compiled, times = jax.jit(operation), 8

        def call(_, compiled=compiled, times=times):
            for _ in range(times):
                out = jax.block_until_ready(compiled(x))
            return out

        _, wall, kernels = timed(call, None, None)
        taken = device_time(kernels, times, "xla").get("device_us", 1e6 * wall / times)
        found[f"{name}_bytes_per_s"] = 1e6 * moved / taken
    return found


def check(spec: RecurrenceSpec, batch: int, rng: np.random.Generator) -> dict[str, float]:
    """The kernel's worst relative errors against XLA's path, over a fold cycle from random memory: by dtype.

    Every step starts both from the same memory. An error is that of a row of 128 numbers or so, against its norm:
    of outputs, stored entries and gates, and checkpoints.
    """

    @functools.partial(jax.jit, static_argnums=(0,))
    def extend(implementation, pool, step, tokens):
        return buffered.extend_pool(spec, pool, step, *tokens, implementation=implementation)

    @jax.jit
    def errors(a, b):
        def worst(a, b):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            error = jnp.linalg.norm(a - b, axis=-1) / jnp.maximum(jnp.linalg.norm(b, axis=-1), 1e-6)
            return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf))

        return jax.tree.map(worst, a, b)

    found = dict.fromkeys(BOUNDS, 0.0)
    for case in (Case("decode", batch), Case("verify", batch, 5, (3,), 32)):
        (pool,), steps = make_pools(spec, case, 1, rng), schedule(case, loads(case)[0], case.steps(1))
        for i in range(steps.lengths.shape[0]):
            step, tokens = jax.tree.map(lambda x, i=i: x[i], steps), make_tokens(spec, case, rng)
            wanted, got = extend("xla", pool, step, tokens), extend("gpu", pool, step, tokens)
            for array, error in zip(jax.tree.leaves(wanted), jax.tree.leaves(errors(got, wanted)), strict=True):
                found[array.dtype.name] = max(found[array.dtype.name], float(error))
            pool = wanted[1]
    return found


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
        summary = {"targets": judge(figures), "kv_only_crossover": crossovers, "left_out": left_out}
        report.write(path, record | summary | {"figures": figures})


def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status, 1 if a kernel's results are wrong."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    began, cases = time.perf_counter(), plan(options)
    spec = RecurrenceSpec(options.heads, options.key_heads, options.dim, options.dim)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng, figures, left_out = np.random.default_rng(seed), [], []
    settings = {name: getattr(options, name) for name in ("heads", "key_heads", "dim", "quick", "implementation")}
    record = report.provenance("scripts/bench_kernels", arguments, report.ROOT) | settings | {"seed": seed}
    with Progress(console=notes, redirect_stdout=False) as progress:
        task = progress.add_task("comparing", total=len(cases))
        if any(case.implementation == "gpu" and case.part != "fla" for case in cases):
            record["errors"] = errors = check(spec, min(BATCHES[0], cases[0].batch), rng)
            words = ", ".join(f"{error:.1e} ({name})" for name, error in errors.items())
            notes.print(f"largest relative error against XLA's path: {words}", soft_wrap=True)
            if any(errors[name] > bound for name, bound in BOUNDS.items()):
                console.print(f"WRONG: at most {BOUNDS} is expected, got {errors}; nothing is timed", soft_wrap=True)
                return 1
        record |= bandwidths()
        read = record["read_bytes_per_s"]
        notes.print(f"read {read / 1e12:.2f} TB/s, copy {record['copy_bytes_per_s'] / 1e12:.2f} TB/s")
        for case in cases:
            progress.update(task, description=f"{case.part}, batch {case.batch}")
            if case.part == "kv" and find(figures, "kv"):
                continue  # the shorter ring is for a kernel that has no room for the longer one
            if time.perf_counter() - began > options.budget:
                left_out.append(dataclasses.asdict(case))
                continue
            try:
                if case.part == "fla":
                    batches = sorted({case.batch for case in cases if case.part in ("decode", "fla")})
                    rows = measure_peer(spec, batches, options.layers)
                else:
                    rows = measure(spec, case, options, read, rng)
            except Exception as error:  # what one shape cannot do must not cost the figures of the others
                first = (str(error).splitlines() or [""])[0]
                rows = [dataclasses.asdict(case) | {"error": f"{type(error).__name__}: {first}"}]
            figures += rows
            for row in rows:
                notes.print(describe(row), soft_wrap=True)
            keep(options.json, record, figures, left_out)
            progress.advance(task)
    show(console, figures, judge(figures))
    for row in figures:
        if "error" in row:
            console.print(describe(row), soft_wrap=True)
    if left_out:
        words = f"--budget {options.budget:.0f} was spent: {len(left_out)} of {len(cases)} programs left out"
        console.print(words, soft_wrap=True)
    keep(options.json, record, figures, left_out)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        console.print(f"wrote {options.json} and its plot", soft_wrap=True)
    return 0
