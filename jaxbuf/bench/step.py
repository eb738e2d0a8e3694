"""Measures whole decoding steps of a model: how long they take, what takes it, and how long their bytes would take."""

import argparse
import dataclasses
import functools
import inspect
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import Progress, TaskID

from jaxbuf.bench import report
from jaxbuf.bench.kernel_figures import Row, find
from jaxbuf.bench.measure import bandwidths
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, output, whole
from jaxbuf.bench.random_model import configuration, random_model
from jaxbuf.bench.step_figures import compare_devices, compare_forms, plot, show
from jaxbuf.compilation import without_cache
from jaxbuf.models.cache import fold_limits, memory_partitions
from jaxbuf.models.config import ATTENTION, RECURRENCE
from jaxbuf.models.families import config_json
from jaxbuf.models.language_model import LanguageModel, load
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.tensor_parallel import TENSOR, devices_of
from jaxbuf.recurrence.state_format import StateFormat, state_format
from jaxbuf.recurrence.traffic import entry_bytes, fold_cycle
from jaxbuf.serving import Carry, SamplingParams, batch, generate_tokens, init_carry
from jaxbuf.serving.carry import EMPTY, RUNNING, Counters
from jaxbuf.serving.profiling import Operation, operations, trace

# What is measured, and how it keeps its checkpoints: the last two are the buffered form as well.
FORMS = {"recurrent": "float32", "buffered": "float32", "split": "split", "split8": "split8"}
USUAL = ("recurrent", "buffered")
DTYPES = ("float32", "bfloat16", "float16")
# Of the random model, by option: the full ones.
SIZES: dict[str, int] = {name: size.default for name, size in inspect.signature(configuration).parameters.items()}
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # XLA's own choice, spelled out
COMMAND_BUFFERS = {  # what of a program XLA may record as CUDA graphs
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "on": {"xla_gpu_enable_command_buffer": CAPTURED},
    "loops": {"xla_gpu_enable_command_buffer": CAPTURED + ",CONDITIONAL,WHILE"},
}
# While a trace is taken XLA launches one by one what it recorded: that is its default, and the parts depend on it.
IN_TRACES = {"xla_enable_command_buffers_during_profiling": False}
REPEATS = 3
PALLAS_KERNEL = "mosaic_gpu"  # in the names of Pallas' kernels
# In the names of operations, and of the kernels of NCCL and XLA, that move numbers between devices.
EXCHANGE = re.compile(r"nccl|all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective[-_]?permute|psum", re.I)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench step",
        description=__doc__,
        epilog="The program is the one that jaxbuf.generate runs, generate_tokens, on a batch of prompts of --context "
        "tokens, greedily: one compiled loop whose carry is donated. The prompts are not read: the memory is filled "
        "with random numbers, and the cursor set behind the prompts. Rows fold staggered, as a server's do, and steps "
        "are in whole fold cycles. The time of a step is the wall clock's over all steps, the median of "
        f"{REPEATS} runs that start alike. The parts are operations of a jax.profiler trace of one more fold cycle, "
        "which XLA runs without command buffers (CUDA graphs), or their kernels could not be told apart; what the "
        "parts leave of a step is time between kernels. The floor of a step is its bytes (weights, checkpoints read "
        "and folded, entries read and appended, keys and values) over the read bandwidth measured in the same run. "
        "With --devices above 1 the model's heads, MLP channels and vocabulary are spread over so many devices, as "
        "jaxbuf.load(mesh=...) does; bytes and memory are then those of one device, the parts a mean over the devices, "
        "and the bandwidth is the first one's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="random",
        help="random, with the shape of Qwen3.5-4B unless the options below say otherwise; demo; or a directory",
    )
    parser.add_argument("--batches", default="128,256", help="rows that decode at once, separated by commas")
    parser.add_argument("--context", type=whole(1), default=1024, help="tokens before the first timed step")
    parser.add_argument("--steps", type=whole(1), default=64, help="of one run; rounded up to whole fold cycles")
    parser.add_argument("--limit", type=whole(2), default=16, help="entries from which the buffered form folds")
    parser.add_argument(
        "--forms",
        default=",".join(USUAL),
        help=f"forms of the memory, separated by commas: {', '.join(FORMS)}; the split ones are buffered",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=None, help="of the parameters; default: bfloat16, or as a checkpoint is"
    )
    parser.add_argument(
        "--devices",
        default="1",
        help="how many devices the model is spread over; several numbers, separated by commas, are compared",
    )
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: without our kernels")
    parser.add_argument(
        "--command-buffers",
        choices=COMMAND_BUFFERS,
        default="default",
        help="CUDA graphs in the timed program: as XLA and XLA_FLAGS have it; off; on for fusions, matrix products and "
        "custom calls, which is XLA's own default; or loops: for conditionals and while loops as well",
    )
    parser.add_argument("--kernels", type=Path, default=None, help="figures of jaxbuf bench kernels to compare with")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument("--profile", type=folder, default=None, help="a folder for the traces, one folder for each")
    shape = parser.add_argument_group("the random model")
    for name, default in SIZES.items():
        shape.add_argument("--" + name.replace("_", "-"), type=whole(1), default=default)
    options = parser.parse_args(arguments)
    options.batches = report.whole_numbers(parser, "--batches", options.batches)
    options.devices = report.whole_numbers(parser, "--devices", options.devices)
    if max(options.devices) > len(jax.devices()):
        there = f"{len(jax.devices())}, the devices that are there"
        parser.error(f"--devices must be at most {there}, got {max(options.devices)}")
    options.forms = options.forms.split(",")
    if unknown := set(options.forms) - set(FORMS):
        parser.error(f"--forms must name forms among {', '.join(FORMS)}, got {', '.join(sorted(unknown))}")
    if options.context < options.limit:
        parser.error(f"--context must be at least {options.limit}, got {options.context}")
    report.check_plots(parser, options.json)
    if options.kernels is not None:
        options.kernels = report.read_kernels(parser, "--kernels", options.kernels)["figures"]
    full = options.model == "random" and all(getattr(options, name) == size for name, size in SIZES.items())
    if full and jax.default_backend() == "cpu":
        names = " and ".join("--" + name.replace("_", "-") for name in list(SIZES)[:2])
        parser.error(f"a random model of full size needs a GPU, this is a cpu: try --model demo, or {names}")
    cycle = fold_cycle(options.limit)
    options.steps = cycle * -(-options.steps // cycle)
    return options


def make_model(options: argparse.Namespace, devices: int = 1) -> LanguageModel:
    """The model, spread over the first so many devices.

    Raises:
      ValueError: Its heads can't be shared by so many.
    """
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), (TENSOR,))
    try:
        if options.model == "random":
            sizes = {name: getattr(options, name) for name in SIZES}
            lm = random_model(configuration(**sizes), jnp.dtype(options.dtype or "bfloat16"), mesh=mesh)
        else:
            lm = load(options.model, dtype=options.dtype, mesh=mesh)
    except ValueError as error:
        if mesh is None:
            raise
        raise ValueError(f"--devices {devices}: {error}") from error
    if options.implementation == "xla":
        lm = dataclasses.replace(lm, compiled_for=lm.target.without_kernels())
    return lm


def make_batch(lm: LanguageModel, rows: int, form: str, options: argparse.Namespace) -> batch.Batch:
    """What `jaxbuf.generate` would start with, for prompts of the context's length; a token more than steps."""
    prompts = [[row % lm.vocab_size] * options.context for row in range(rows)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    decoding = batch.Decoding(
        max_new_tokens=options.steps + 1,
        limit=options.limit,
        form="recurrent" if form == "recurrent" else "buffered",
        state_dtype=FORMS[form],
    )
    return batch.make_batch(lm, prompts, sampling, decoding)


def make_carry(lm: LanguageModel, asked: batch.Batch) -> Carry:
    """The carry once its prompts were read, but for random memory in place of theirs; nothing runs on the prompts.

    On a mesh the memory is spread as the layers want it, and every device has the rest.
    """
    shapes = jax.eval_shape(lambda: init_carry(lm.config, asked.sizes))
    begins, rows, mesh = asked.begins, asked.sizes.rows, lm.config.mesh
    used = np.arange(rows) < len(asked.rows)

    @functools.partial(jax.jit, out_shardings=None if mesh is None else everywhere(mesh))
    def integers():
        carry = init_carry(lm.config, asked.sizes)
        length = jnp.where(used, len(asked.prompts[0]), 0).astype(jnp.int32)
        history = dataclasses.replace(
            carry.history,
            prompt_length=length,
            length=length + used.astype(np.int32),
            stop_ids=jnp.asarray(begins.stop_ids),
        )
        return dataclasses.replace(
            carry,
            cache=dataclasses.replace(carry.cache, layers=()),
            history=history,
            last=jnp.arange(rows, dtype=jnp.int32) % lm.vocab_size,
            state=jnp.where(used, RUNNING, EMPTY).astype(jnp.int32),
            max_new_tokens=jnp.asarray(begins.max_new_tokens),
            sampling=begins.sampling,
            allowed=jnp.asarray(begins.allowed),
        )

    carry = integers()
    keys = jax.random.split(jax.random.key(1), len(shapes.cache.layers))
    layers = []
    for kind, layer, key in zip(shapes.cache.kinds, shapes.cache.layers, keys, strict=True):
        leaves, tree = jax.tree.flatten(layer)
        plain = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
        spread = memory_partitions([kind], [layer])
        where = None if mesh is None else tuple(NamedSharding(mesh, partition) for partition in spread)
        layers.append(_random_memory(plain, where, key))
    return dataclasses.replace(carry, cache=dataclasses.replace(carry.cache, layers=tuple(layers)))


def everywhere(mesh: Mesh | None) -> Any:
    """Where the small arrays of a carry lie: on every device of a mesh; without one, on the first device."""
    return jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_memory(shapes, where: Sequence[NamedSharding] | None, key: jax.Array):
    """Numbers of the size that a layer's memory holds: on zeros, a chip may run faster than it does on numbers."""

    leaves, tree = jax.tree.flatten_with_path(shapes)

    def fill(key, path, shape):
        name = path[-1].name
        x = jax.random.normal(key, shape.shape, jnp.float32)
        if name == "gates":
            x = -jnp.abs(x) / 20
        return (x / math.sqrt(shape.shape[-1]) if name == "keys" else x).astype(shape.dtype)

    keys = jax.random.split(key, len(leaves))
    filled = [fill(key, *leaf) for key, leaf in zip(keys, leaves, strict=True)]
    filled = filled if where is None else jax.lax.with_sharding_constraint(filled, list(where))
    return jax.tree.unflatten(tree, filled)


def small_arrays(carry: Carry) -> Carry:
    """A carry without the layers' memory, on the host: a run donates what it starts from."""
    return jax.device_get(dataclasses.replace(carry, cache=dataclasses.replace(carry.cache, layers=())))


def first_carry(small: Carry, form: str, options: argparse.Namespace) -> Carry:
    """The small arrays at the first step of a form, from those of `make_carry`."""
    cache, shared = small.cache, small.cache.shared[RECURRENCE]
    slots = np.arange(cache.rows + 1)
    used = (slots > 0) & (slots <= np.sum(small.state == RUNNING))
    limit = 1 if form == "recurrent" else options.limit
    # Each row folds every `limit` steps, each at a step of its own.
    length = np.where(used, 1 + slots % limit, 0)
    held = {
        "length": length,
        "folded": np.where(used, options.context - length, 0),
        "limit": np.where(used, limit, 1),
        "origin": np.zeros_like(slots),
        "pending": np.zeros_like(slots),
    }
    cursor = dataclasses.replace(shared.cursor, **{name: value.astype(np.int32) for name, value in held.items()})
    committed = np.where(used, options.context, 0).astype(np.int32)
    sequences = dataclasses.replace(cache.sequences, committed=committed, pending=np.zeros_like(committed))
    shared = cache.shared | {RECURRENCE: dataclasses.replace(shared, cursor=cursor)}
    return dataclasses.replace(small, cache=dataclasses.replace(cache, sequences=sequences, shared=shared))


def restart(carry: Carry, first: Carry, mesh: Mesh | None = None) -> Carry:
    """The first carry of a form with the large arrays of this one, where the model lies."""
    placed = jax.device_put(first, everywhere(mesh))
    return dataclasses.replace(placed, cache=dataclasses.replace(placed.cache, layers=carry.cache.layers))


def compile_steps(lm: LanguageModel, carry: Carry, command_buffers: str) -> tuple[Any, float]:
    """The program, and the seconds it took to compile. Not from the compilation cache: a profile needs its names."""
    began = time.perf_counter()
    with without_cache():
        lowered = generate_tokens.lower(lm.model, carry, np.int32(0))
        compiled = lowered.compile(compiler_options=IN_TRACES | COMMAND_BUFFERS[command_buffers])
    return compiled, time.perf_counter() - began


def measure(program, lm: LanguageModel, form: str, carry: Carry, first: Carry, options) -> tuple[Row, Carry]:
    """One form at one batch, from its first carry: the figures, and the carry to go on with."""
    walls, whole, devices = [], fold_cycle(options.limit), devices_of(lm.config.mesh)
    limit = int(fold_limits(first.cache)[0])

    def run(carry, steps):
        carry = jax.block_until_ready(restart(carry, first, lm.config.mesh))
        began = time.perf_counter()
        carry = jax.block_until_ready(program(lm.model, carry, np.int32(steps)))
        return carry, time.perf_counter() - began

    carry, _ = run(carry, whole)
    for _ in range(REPEATS):
        carry, wall = run(carry, options.steps)
        walls.append(wall)
    counters = jax.device_get(carry.counters)
    rows = int(np.sum(first.state == RUNNING))
    assert np.sum(counters.steps) == rows * options.steps, "every row decodes in every step"
    assert np.sum(counters.folds) * limit == np.sum(counters.steps), "steps are in whole fold cycles"
    with tempfile.TemporaryDirectory(prefix="jaxbuf-step-") as temporary:
        name = f"{form}-{rows}" if devices == 1 else f"{form}-{rows}-devices-{devices}"
        directory = options.profile / name if options.profile else Path(temporary)
        with trace(directory):
            carry, _ = run(carry, whole)
        traced = [ran for ran in operations(directory) if ran.program == "generate_tokens"]
    ms = 1e3 * statistics.median(walls) / options.steps
    found = {"form": form, "batch": rows, "devices": devices, "limit": limit, "steps": options.steps}
    found |= {"context": options.context, "ms": ms, "tokens_per_s": 1e3 * rows / ms}
    found |= {"folds": float(np.sum(counters.folds) / np.sum(counters.steps))}
    found |= split(traced, whole * devices, len(lm.config.specs))
    return found | {"bytes": count_bytes(lm, memory_dtypes(carry), counters, options)}, carry


def memory_dtypes(carry: Carry) -> tuple[StateFormat, jnp.dtype, jnp.dtype]:
    """How checkpoints are kept, and the dtypes of entries, and of keys and values."""
    layers = list(zip(carry.cache.kinds, carry.cache.layers, strict=True))
    pools = [layer.pool for kind, layer in layers if kind == RECURRENCE]
    pages = [layer for kind, layer in layers if kind == ATTENTION]
    state, entry = (pools[0].state_format, pools[0].keys.dtype) if pools else (state_format("float32"), jnp.float32)
    return state, jnp.dtype(entry), pages[0].keys.dtype if pages else jnp.dtype(jnp.float32)


def split(traced: Sequence[Operation], steps: int, layers: int) -> Row:
    """The time of each part of a step in ms, what of it moves numbers between devices, and the time of the recurrence's
    kernel in us a layer. With `steps` the steps of all devices together, all are means over the devices.

    The kernel's mean counts, so that an event which the profiler lost does not. Without one, the recurrence is all
    operations in its scope.
    """
    parts: dict[str, float] = {}
    for ran in traced:
        parts[ran.scope] = parts.get(ran.scope, 0.0) + 1e3 * ran.seconds / steps
    recurrence = [ran for ran in traced if ran.scope == "recurrence"]
    kernels = [ran.seconds for ran in recurrence if PALLAS_KERNEL in ran.name]
    calls = max(1, steps * layers)
    if kernels:
        us = max(1, round(len(kernels) / calls)) * 1e6 * statistics.mean(kernels)
    else:
        us = 1e6 * sum(ran.seconds for ran in recurrence) / calls
    device = sum(parts.values())
    named = sorted({ran.name for ran in recurrence if PALLAS_KERNEL in ran.name})
    return {
        "device_ms": device,
        "parts_ms": dict(sorted(parts.items(), key=lambda part: -part[1])),
        "exchange_ms": 1e3 * sum(ran.seconds for ran in traced if EXCHANGE.search(ran.name)) / steps,
        "operations": len(traced) / steps,
        "recurrence": {
            "kernel": ", ".join(named) or None,
            "launches": len(kernels) / calls,
            "us": us,
            "share": 1e-3 * us * layers / device if device else 0.0,
        },
    }


def count_bytes(lm: LanguageModel, dtypes, counters: Counters, options) -> dict[str, float]:
    """What each device must move in a step, on average over a run of all rows: read once, or written once where it is
    appended. What several devices have counts for each.

    Weights: all that a step multiplies with. Of an embedding that is not the head, a step reads a row for each token,
    which is left out, as activations are.
    """
    config, (state, entry, pages) = lm.config.on_device, dtypes
    unread = ("mtp.",) if lm.model.lm_head is None else ("mtp.", "embed_tokens")
    weights = (p[...] for name, p in named_parameters(lm.model).items() if not name.startswith(unread))
    total = {name.name: float(np.sum(getattr(counters, name.name))) for name in dataclasses.fields(counters)}
    # Step i reads context + i tokens besides its own, which it appends and reads.
    tokens = total["steps"] * (options.context + (options.steps - 1) / 2 + 2)
    entries = total["live_entries"] + total["steps"]
    work = total["checkpoint_reads"], total["folds"]
    moved = {
        "weights": options.steps * float(sum(held_bytes(weight) for weight in weights)),
        "checkpoints": sum(state.read_bytes(s) * work[0] + state.fold_bytes(s) * work[1] for s in config.specs),
        "entries": sum(entry_bytes(spec, entry) * entries for spec in config.specs),
        "keys and values": config.kv_numbers * pages.itemsize * tokens,
    }
    return {name: value / options.steps for name, value in moved.items()}


def held_bytes(array: jax.Array) -> int:
    """The bytes of an array on each of its devices, which have as much."""
    return array.addressable_shards[0].data.nbytes


def memory(program, devices: int) -> Row:
    """Bytes: what the program needs at once on each device, and the most that this process had in use on the last of
    them until now."""
    needs = program.memory_analysis()
    sizes = [getattr(needs, f"{name}_size_in_bytes", 0) for name in ("argument", "output", "temp")]
    total = sum(sizes) - getattr(needs, "alias_size_in_bytes", 0)
    peak = (jax.devices()[devices - 1].memory_stats() or {}).get("peak_bytes_in_use")
    return {"program_bytes": total, "temporary_bytes": sizes[2], "peak_bytes": peak}


def kernel_figure(figures: list[Row] | None, row: Row) -> float | None:
    """Microseconds of the same step of a layer in the figures of `jaxbuf bench kernels`."""
    if figures is None or row["devices"] > 1:  # whose kernels have a part of the heads
        return None
    part = {"recurrent": "recurrent", "buffered": "decode"}.get(row["form"])
    wanted = {} if part else {"time": 1, "state_dtype": FORMS[row["form"]]}
    found = find(figures, part or "split", batch=row["batch"], limit=row["limit"], **wanted)
    return found["us"] if found else None


@errors_are_lines
def main(arguments: Sequence[str]) -> int:
    """Runs with the words of a command line; returns the exit status."""
    options, console, notes = parse(arguments), Console(highlight=False), Console(stderr=True, highlight=False)
    return run(options, arguments, console, notes)


def run(options: argparse.Namespace, arguments: Sequence[str], console: Console, notes: Console) -> int:
    record = report.provenance("scripts/bench_step", arguments, report.ROOT)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "command_buffer" in flag or "graph" in flag]
    record["command_buffers"] = {
        "asked": options.command_buffers,
        "compiler_options": COMMAND_BUFFERS[options.command_buffers],
        "xla_flags": flags,
        "on": options.command_buffers != "off" and jax.default_backend() == "gpu",
        "in_traces": False,
    }
    if options.command_buffers == "default" and any(flag.endswith("command_buffer=") for flag in flags):
        record["command_buffers"]["on"] = False
    record |= {name: getattr(options, name) for name in ("implementation", "context", "limit", "steps", "devices")}
    figures: list[Row] = []
    with Progress(console=notes, redirect_stdout=False) as progress:
        each = 1 + len(options.batches) * len(options.forms)
        task = progress.add_task("measuring the bandwidth", total=1 + each * len(options.devices))
        record |= bandwidths()
        for devices in options.devices:
            progress.update(task, advance=1, description=f"making the model{on_devices(devices)}")
            lm = make_model(options, devices)
            if "model" not in record:
                record["model"] = describe(lm)
            for row in measure_model(lm, options, progress, task):
                row["floor_ms"] = 1e3 * sum(row["bytes"].values()) / record["read_bytes_per_s"]
                row["achieved"] = row["floor_ms"] / row["ms"]
                figures.append(row)
                if options.json:
                    ratios = {"ratios": compare_forms(figures), "device_ratios": compare_devices(figures)}
                    report.write(options.json, record | ratios | {"figures": figures})
            del lm
    show(console, figures, record)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return 0


def describe(lm: LanguageModel) -> Row:
    """What was measured, for the record; the bytes are those of all parameters, on a mesh with what is repeated."""
    found = {"name": lm.name, "bytes": sum(p[...].nbytes for p in named_parameters(lm.model).values())}
    found |= {"dtype": jnp.dtype(lm.dtype).name, "config": config_json(lm.config)}
    return found | {"memory": "random; the prompts were not read"}


def on_devices(devices: int) -> str:
    """What to say of a model beside others that lie on fewer devices."""
    return "" if devices == 1 else f" on {devices} devices"


def measure_model(lm: LanguageModel, options, progress: Progress, task: TaskID) -> Iterator[Row]:
    """The figures of all forms and batches, without what the bandwidth says of them.

    Raises:
      ValueError: The model has no room for the context.
    """
    devices = devices_of(lm.config.mesh)
    for rows in options.batches:
        try:
            asked = {form: make_batch(lm, rows, form, options) for form in options.forms}
        except ValueError as error:
            raise ValueError(f"--context {options.context}: {error}") from error
        by_program: dict[tuple[int, str], list[str]] = {}
        for form, its_batch in asked.items():
            sizes = its_batch.sizes.limit, its_batch.sizes.state_dtype
            by_program.setdefault(sizes, []).append(form)
        for forms in by_program.values():
            progress.update(task, description=f"compiling, batch {rows}{on_devices(devices)}")
            carry = make_carry(lm, asked[forms[0]])
            small = small_arrays(carry)
            program, seconds = compile_steps(lm, carry, options.command_buffers)
            for form in forms:
                progress.update(task, description=f"{form}, batch {rows}{on_devices(devices)}")
                row, carry = measure(program, lm, form, carry, first_carry(small, form, options), options)
                model = sum(held_bytes(p[...]) for p in named_parameters(lm.model).values())
                row |= memory(program, devices) | {"model_bytes": model, "compile_s": seconds}
                yield row | {"kernel_us": kernel_figure(options.kernels, row)}
                progress.advance(task)
            del carry, program
