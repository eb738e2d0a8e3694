"""Measures whole decoding steps of a model: how long they take, what takes it, and how long their bytes would take."""

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress, TaskID

from jaxbuf.bench import report
from jaxbuf.bench.kernel_figures import Row, find
from jaxbuf.bench.measure import bandwidths, measure_torch
from jaxbuf.bench.model_options import add_model_options, asked_model, check_full_size, read_model_options
from jaxbuf.bench.parser import Parser, errors_are_lines, folder, output, whole
from jaxbuf.bench.random_model import repeating_model
from jaxbuf.bench.step_carry import FORMS, PLAIN, Tokens, first_carry, make_batch, make_carry, small_arrays
from jaxbuf.bench.step_figures import compare_devices, compare_drafts, compare_forms, plot, show
from jaxbuf.bench.step_parts import floors, held_bytes, matrices
from jaxbuf.bench.step_run import COMMAND_BUFFERS, REPEATS, compile_steps, count_devices, measure, memory
from jaxbuf.models.families import config_json
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.shapes import power_of_two_from
from jaxbuf.models.tensor_parallel import EXPERT, TENSOR
from jaxbuf.serving.own_drafter import MOST_DRAFTS

USUAL = ("recurrent", "buffered")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxbuf bench step",
        description=__doc__,
        epilog="The program is the one that jaxbuf.generate runs, generate_tokens, on a batch of prompts of --context "
        "tokens, greedily: one compiled loop whose carry is donated. The prompts are not read: the memory is filled "
        "with random numbers, and the cursor set behind the prompts. Rows fold staggered, as a server's do, and steps "
        "are in whole fold cycles. The time of a step is the wall clock's over all steps of one call, the median of "
        f"{REPEATS} runs that start alike; single_ms of the JSON is a call of one step. The parts are operations "
        "of a jax.profiler trace of one more fold cycle, which XLA runs without command buffers (CUDA graphs), or "
        "their kernels could not be told apart; what the parts leave of a step is time between kernels. Matrix "
        "products are the operations that read a matrix of the model, in whatever part of it. The floor of a step is "
        "its bytes (weights, checkpoints read and folded, entries read and appended, keys and values) over the read "
        "bandwidth measured in the same run, and that of a part the bytes that it moves: weights those of matrix "
        "products. Of a layer's experts the bytes are those of as many as the step's tokens touch on average if each "
        "token's are drawn uniformly; all_experts_bytes of the JSON has the weights with all of them. "
        "With --drafts a step that verifies as many drafts is measured beside the plain one: the model's embedding is "
        "replaced by a large random one, so that it repeats its newest token, and of each row's drafts as many repeat "
        "it as are to be kept; the program is that of every drafter. With --peers torch multiplies matrices of the "
        "same shapes, each of them as often as the model has it, in a process of its own, unless the model has "
        "experts. The exit status is 1 if it can't. A model without recurrent layers has one form, called buffered "
        "here, whatever --forms says. "
        "With --devices above 1 the model's heads, MLP channels and vocabulary are spread over so many devices, as "
        "jaxbuf.load(mesh=...) does; bytes and memory are then those of one device, the parts a mean over the devices, "
        "and the bandwidth is the first one's. With --expert-devices the routed experts are spread over so many of "
        "them, and everything, each expert's inner numbers too, over devices / expert-devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--batches", default="128,256", help="rows that decode at once, separated by commas")
    parser.add_argument("--context", type=whole(1), default=1024, help="tokens before the first timed step")
    parser.add_argument("--steps", type=whole(1), default=64, help="of one run; rounded up to whole fold cycles")
    parser.add_argument("--limit", type=whole(2), default=16, help="entries from which the buffered form folds")
    parser.add_argument(
        "--drafts", type=whole(0, MOST_DRAFTS), default=0, help="that a step verifies; 0: plain steps alone"
    )
    parser.add_argument(
        "--accepted",
        type=whole(1, 1 + MOST_DRAFTS),
        default=None,
        help="tokens that a row gets in a step with drafts, one more than are kept of them; default: half of them kept",
    )
    parser.add_argument(
        "--forms",
        default=",".join(USUAL),
        help=f"forms of the memory, separated by commas: {', '.join(FORMS)}; the split ones are buffered",
    )
    parser.add_argument(
        "--devices",
        default="1",
        help="how many devices the model is spread over; several numbers, separated by commas, are compared",
    )
    parser.add_argument(
        "--expert-devices",
        type=whole(1),
        default=1,
        help="over how many of the devices the experts are spread, along a mesh axis of their own",
    )
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: without our kernels")
    parser.add_argument(
        "--command-buffers",
        choices=COMMAND_BUFFERS,
        default="default",
        help="CUDA graphs in the timed program: as XLA and XLA_FLAGS have it; off; on for fusions, matrix products and "
        "custom calls, which is XLA's own default; or loops: for conditionals and while loops as well",
    )
    parser.add_argument(
        "--peers", action="store_true", help="also time torch's matrix products of the same shapes, if it is installed"
    )
    parser.add_argument("--kernels", type=Path, default=None, help="figures of jaxbuf bench kernels to compare with")
    parser.add_argument(
        "--json", type=output, default=None, help="keep the figures here as they come; a plot beside it"
    )
    parser.add_argument("--profile", type=folder, default=None, help="a folder for the traces, one folder for each")
    options = parser.parse_args(arguments)
    options.batches = report.whole_numbers(parser, "--batches", options.batches)
    options.devices = report.whole_numbers(parser, "--devices", options.devices)
    if max(options.devices) > len(jax.devices()):
        there = f"{len(jax.devices())}, the devices that are there"
        parser.error(f"--devices must be at most {there}, got {max(options.devices)}")
    if odd := [devices for devices in options.devices if devices > 1 and devices % options.expert_devices]:
        parser.error(f"--devices must be multiples of --expert-devices ({options.expert_devices}), got {odd[0]}")
    if options.expert_devices > max(options.devices):
        parser.error(
            f"--expert-devices must be at most {max(options.devices)}, --devices, got {options.expert_devices}"
        )
    options.forms = options.forms.split(",")
    if unknown := set(options.forms) - set(FORMS):
        parser.error(f"--forms must name forms among {', '.join(FORMS)}, got {', '.join(sorted(unknown))}")
    if options.accepted is None:
        options.accepted = options.drafts // 2 + 1
    if options.accepted > 1 + options.drafts:
        parser.error(f"--accepted must be at most {1 + options.drafts}, 1 + --drafts, got {options.accepted}")
    if options.drafts >= options.limit:
        parser.error(f"--drafts must be below --limit ({options.limit}), got {options.drafts}")
    if options.context < options.limit:
        parser.error(f"--context must be at least {options.limit}, got {options.context}")
    report.check_plots(parser, options.json)
    if options.kernels is not None:
        options.kernels = report.read_kernels(parser, "--kernels", options.kernels)["figures"]
    read_model_options(parser, options)
    check_full_size(parser, options)
    options.steps = PLAIN.steps(options.steps, options.limit)
    options.tokens = [PLAIN] + [Tokens(options.drafts, options.accepted)] * bool(options.drafts)
    return options


def make_model(options: argparse.Namespace, devices: int = 1) -> LanguageModel:
    """The model, spread over the first so many devices.

    Raises:
      ValueError: Its heads or experts can't be shared by so many.
    """
    experts = 1 if devices == 1 else options.expert_devices
    each = np.array(jax.devices()[:devices]).reshape(devices // experts, experts)
    mesh = None if devices == 1 else Mesh(each, (TENSOR, EXPERT)) if experts > 1 else Mesh(each[:, 0], (TENSOR,))
    try:
        name = "random" if options.sizes else f"random {options.shape}"
        lm = asked_model(options.model, options.shape, options.sizes, options.dtype, mesh=mesh, name=name)
    except ValueError as error:
        if mesh is None:
            raise
        raise ValueError(f"--devices {devices}: {error}") from error
    if options.drafts:
        lm = repeating_model(lm)
    if options.implementation == "xla":
        lm = dataclasses.replace(lm, compiled_for=lm.target.without_kernels())
    return lm


def kernel_figure(figures: list[Row] | None, row: Row) -> float | None:
    """Microseconds of the same step of a layer in the figures of `jaxbuf bench kernels`."""
    if figures is None or row["drafts"] or row["devices"] > 1:  # of several, each has a part of the heads
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
    names = "implementation", "context", "limit", "steps", "drafts", "accepted", "devices"
    record |= {name: getattr(options, name) for name in names}
    figures: list[Row] = []
    with Progress(console=notes, redirect_stdout=False, transient=True) as progress:
        each = 1 + len(options.batches) * len(options.forms) * len(options.tokens)
        task = progress.add_task("measuring the bandwidth", total=1 + each * len(options.devices))
        record |= bandwidths()
        for devices in options.devices:
            progress.update(task, advance=1, description=f"making the model{on_devices(devices)}")
            lm = make_model(options, devices)
            if "model" not in record:
                record["model"] = describe(lm, options)
                if not lm.config.specs:
                    options.forms = ["buffered"]
            torch = time_torch(lm, options) if options.peers else []
            record["torch"] = record.get("torch", []) + torch
            for row in measure_model(lm, options, progress, task):
                row["floor_ms"] = 1e3 * sum(row["bytes"].values()) / record["read_bytes_per_s"]
                row["floors_ms"] = floors(row["bytes"], record["read_bytes_per_s"])
                row["achieved"] = row["floor_ms"] / row["ms"]
                row["torch_ms"] = torch_products(torch, row)
                figures.append(row)
                if options.json:
                    ratios = {"ratios": compare_forms(figures), "device_ratios": compare_devices(figures)}
                    ratios |= {"draft_ratios": compare_drafts(figures)}
                    report.write(options.json, record | ratios | {"figures": figures})
            del lm
    show(console, figures, record)
    if options.json:
        plot(figures, options.json.with_suffix(".png"))
        report.tell_written(console, options.json, plot=True)
    return int(bool(record.get("torch")) and not any("us" in row for row in record["torch"]))


def time_torch(lm: LanguageModel, options: argparse.Namespace) -> list[Row]:
    """torch's matrix products of the model's shapes, of every number of vectors that a step multiplies with; none of a
    model with experts, whose products have no plain shape."""
    rows = sorted({power_of_two_from(batch) * tokens.read for batch in options.batches for tokens in options.tokens})
    known = matrices(lm)
    if any(len(shape) > 2 for shape in known):
        return []
    shapes = [[*shape, count] for shape, count in known.items()]
    dtype = jnp.dtype(lm.dtype).name
    found = measure_torch("products", [[number, shapes, dtype] for number in rows])
    return [{"devices": count_devices(lm)} | row for row in found]


def torch_products(torch: Sequence[Row], row: Row) -> float | None:
    """Milliseconds of a step's matrix products, one after another, in torch; None where they were not measured."""
    same = [each for each in torch if each.get("vectors") == row["vectors"]]
    return sum(1e-3 * each["count"] * each["us"] for each in same) if same else None


def describe(lm: LanguageModel, options: argparse.Namespace) -> Row:
    """What was measured, for the record; the bytes are those of all parameters, on a mesh with what is repeated."""
    found = {"name": lm.name, "bytes": sum(p[...].nbytes for p in named_parameters(lm.model).values())}
    found |= {"dtype": jnp.dtype(lm.dtype).name, "config": config_json(lm.config)}
    if options.drafts:
        found["embedding"] = "random and large: the model repeats its newest token"
    return found | {"memory": "random; the prompts were not read"}


def on_devices(devices: int) -> str:
    """What to say of a model beside others that lie on fewer devices."""
    return "" if devices == 1 else f" on {devices} devices"


def measure_model(lm: LanguageModel, options, progress: Progress, task: TaskID) -> Iterator[Row]:
    """The figures of all forms and batches, without what the bandwidth says of them.

    Raises:
      ValueError: The model has no room for the context.
    """
    devices = count_devices(lm)
    for rows, tokens in ((rows, tokens) for rows in options.batches for tokens in options.tokens):
        try:
            asked = {form: make_batch(lm, rows, form, options, tokens) for form in options.forms}
        except ValueError as error:
            raise ValueError(f"--context {options.context}: {error}") from error
        by_program: dict[tuple[int, str], list[str]] = {}
        for form, its_batch in asked.items():
            sizes = its_batch.sizes.limit, its_batch.sizes.state_dtype
            by_program.setdefault(sizes, []).append(form)
        what = f"batch {rows}" + (f", {tokens.drafts} drafts" if tokens.drafts else "") + on_devices(devices)
        for forms in by_program.values():
            progress.update(task, description=f"compiling, {what}")
            carry, drafter = make_carry(lm, asked[forms[0]]), asked[forms[0]].drafter
            small = small_arrays(carry)
            program, compiled, seconds = compile_steps(lm, carry, options.command_buffers, drafter)
            for form in forms:
                progress.update(task, description=f"{form}, {what}")
                first = first_carry(small, form, options, tokens)
                row, carry = measure(program, lm, form, carry, first, options, tokens, drafter)
                model = sum(held_bytes(p[...]) for p in named_parameters(lm.model).values())
                row |= memory(compiled, devices) | {"model_bytes": model, "compile_s": seconds}
                yield row | {"kernel_us": kernel_figure(options.kernels, row)}
                progress.advance(task)
            del carry, program, compiled
