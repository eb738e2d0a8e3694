"""The table of how every operation was checked on every platform: made by `scripts/check_portability`, kept as JSON and
shown on a page of the documentation."""

import dataclasses
import datetime
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxbuf.pallas.dispatch import KERNELS
from jaxbuf.pallas.tpu_memory import vmem_bytes
from jaxbuf.serving.tpu_programs import PROGRAMS
from jaxbuf.tpu_compiler import GENERATIONS, HAS_COMPILER
from tests.portability.artefact import relaid
from tests.portability.operations import CASES, check_compiled, each_case, reason_against
from tests.portability.programs import ONE_PERIOD, check_on_fewest
from tests.portability.programs import check as check_served

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD, PAGE = ROOT / "benchmarks" / "portability.json", ROOT / "docs" / "portability.rst"
KINDS = ("lines", "programs", "full_depth")  # of the record: operations, programs of one period of layers, whole models
CHIPS = [("gpu", "Hopper"), *(("tpu", generation) for generation in GENERATIONS)]
LOWERED_FOR = {"Hopper": "H100"}
# The checks on hardware that run each operation's kernel: those of scripts/check_gpu and scripts/check_tpu.
WHOLE_MODEL = "a_random_qwen3_5_4b_generates_as_without_kernels"
RUN_BY = {
    "extend": "a_step_is_xlas",
    "fold": "a_step_is_xlas",
    "chunked": "_prompt_is_that_of",
    "prefill": "_leaves_the_memory_",
    "experts": "experts_are_",
    "convolve": "convolutions_are_",
    "gated_norm": "gated_norms_are_",
    "append_and_attend_latent": "latent_attention_is_",
    "norm_and_rotate": "queries_and_keys_are_",
}
# Families whose sizes have checks of their own there, by a part of their names.
RUN_OF = {("extend", "Falcon-H1"): "keys_of_256_is_xlas", ("fold", "Falcon-H1"): "keys_of_256_is_xlas"}
RECORDS = {"gpu": "gpu_checks*.json", "tpu": "tpu_checks*.json"}
XLA_ON = "v5e"  # where XLA's path is compiled; it knows no generation from another
PROGRAMS_HEAD = """
``admit`` (reads prompts) and ``generate_tokens`` (decodes) for 64 requests, at the width of published models and one
period of their layers, as the TPU compiler made them {when}: pools are changed where they lie, and XLA moves none
through VMEM or another memory; nothing goes to the host; devices exchange what their layers add up and no more.
*Held*: parameters and memory of a device. *Of a call*: what it takes on top for the time of a call.
"""
FULL_DEPTH_HEAD = """
The same with all layers of the models, for 64 requests, on every generation: on the fewest devices, of those tried,
that hold it (a v4 chip that is not there is two devices to its compiler), as compiled {when} by
``scripts/check_portability --full-depth``. The sizes are of a device: what it holds, and what a call takes on top. That
is much for TPU7x, where the compiler lays the weights out anew (:doc:`tpu`). "-": not compiled yet.
"""
NO_KERNEL = "there is no kernel of it"


def interpreted_by(operation: str, platform: str) -> str | None:
    """The tests that run an operation's kernel in Pallas' interpreter against XLA's path."""
    kernel = KERNELS[operation].get(platform)
    if kernel is None or kernel.library is not None:
        return None
    own = sorted((ROOT / "tests" / "pallas").glob(f"test_{kernel.package.rsplit('.', 1)[1]}*.py"))
    for path in own + sorted((ROOT / "tests" / "attention").glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f'"{platform}"' in text and "interpret" in text and (path in own or kernel.package in text):
            return str(path.relative_to(ROOT))
    return None


def run_on(operation: str, family: str, platform: str, generation: str) -> dict[str, str] | None:
    """When, and on what, the newest check on hardware held that runs an operation's kernel."""
    found, own = [], RUN_BY.get(operation, WHOLE_MODEL)
    if platform == "gpu":
        own = next((check for (of, part), check in RUN_OF.items() if of == operation and part in family), own)
    for path in sorted((ROOT / "benchmarks").glob(RECORDS[platform])):
        record = json.loads(path.read_text(encoding="utf-8"))
        of_chip = platform == "gpu" or record.get("generation") == generation
        names = [name for name, check in record["checks"].items() if check["holds"]]
        if of_chip and any(f"_{own.removeprefix('_')}" in f"_{name}" for name in names):  # from a word's beginning on
            found.append({"date": record["date"], "device": record["device"], "record": f"benchmarks/{path.name}"})
    return max(found, key=lambda each: each["date"], default=None)


def check(operation: str, family: str, platform: str, generation: str) -> dict[str, Any]:
    """A line of the table: what was found of a case on one kind of chip."""
    began = time.perf_counter()
    line: dict[str, Any] = {"operation": operation, "family": family, "platform": platform, "generation": generation}
    kernel, reason = platform in KERNELS[operation], NO_KERNEL
    if kernel:
        reason = reason_against(operation, family, platform, LOWERED_FOR.get(generation, generation))
    line |= {"kernel": kernel and reason is None, "reason": reason, "interpreted": None, "run": None}
    line |= {"lowered": line["kernel"], "compiled": None}
    if line["kernel"]:
        line |= {
            "interpreted": interpreted_by(operation, platform),
            "run": run_on(operation, family, platform, generation),
        }
    line["failed"] = None
    if platform == "tpu" and HAS_COMPILER and (line["kernel"] or generation == XLA_ON):
        try:
            compiled = check_compiled(
                operation, family, generation, "tpu" if line["kernel"] else "xla", vmem_bytes(generation)
            )
        except (AssertionError, jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            line["failed"] = f"{type(error).__name__}: {error}"[:500]
        else:
            case, memory = CASES[operation][family](), compiled.memory_analysis()
            odd = relaid(compiled, [case.arrays[place] for place in case.donated]) if line["kernel"] else ()
            line["compiled"] = {"temporary": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes}
            line["compiled"]["relaid"] = len(odd)
    return line | {"seconds": round(time.perf_counter() - began, 2), "date": datetime.date.today().isoformat()}


def lines(
    operations: Sequence[str] | None, generations: Sequence[str] | None, report: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """The lines of some operations on some chips; None: all. `report` gets each as it is found."""
    found = []
    for operation, family in each_case():
        for platform, generation in CHIPS:
            if generation not in (generations or (generation,)) or operation not in (operations or (operation,)):
                continue
            found.append(check(operation, family, platform, generation))
            report(found[-1])
    return found


def read() -> dict[str, list[dict[str, Any]]]:
    """The lines of all KINDS that are kept, each with the date on which it was found."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {kind: [{"date": record["date"]} | line for line in record.get(kind, [])] for kind in KINDS}


def check_program(name: str, program: str) -> dict[str, Any]:
    """A line of the table of programs: what was found of one of ONE_PERIOD."""
    began, served = time.perf_counter(), ONE_PERIOD[name]
    line: dict[str, Any] = {"name": name, "program": program, "served": str(served), "generation": served.generation}
    line |= {"devices": served.devices, "held": None, "temporary": None, "failed": None}
    try:
        memory = check_served(served, program).memory_analysis()
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        line["failed"] = f"{type(error).__name__}: {error}"[:500]
    else:
        line |= {"held": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}
    return line | {"seconds": round(time.perf_counter() - began, 2), "date": datetime.date.today().isoformat()}


def check_full_depth(name: str, program: str, generation: str) -> dict[str, Any]:
    """A line of the table of whole models: what was found of all layers of one of ONE_PERIOD on a generation."""
    began = time.perf_counter()
    line: dict[str, Any] = {"name": name, "program": program, "generation": generation}
    line |= {"devices": None, "held": None, "temporary": None, "failed": None}
    try:
        served, compiled, held = check_on_fewest(name, program, generation)
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        line |= {"served": str(dataclasses.replace(ONE_PERIOD[name], layers=None))}
        line |= {"failed": f"{type(error).__name__}: {error}"[:500]}
    else:
        memory: Any = compiled and compiled.memory_analysis()
        line |= {"served": str(served), "devices": served.devices, "held": held}
        line |= {"temporary": memory and memory.temp_size_in_bytes}
    return line | {"seconds": round(time.perf_counter() - began, 2), "date": datetime.date.today().isoformat()}


def full_depth_words(line: dict[str, Any]) -> str:
    """A line's cell of the table of whole models."""
    if line["failed"]:
        return f"does not hold: {line['failed'].splitlines()[0].split(': [')[0][:200]}"
    devices = f"{line['devices']} {'device' if line['devices'] == 1 else 'devices'}"
    held = f"{line['held'] / 1e9:.2f} GB"
    if line["temporary"] is None:
        return f"does not fit on {devices}: {held} each, and what a call takes"
    return f"{devices}: {held}, {line['temporary'] / 1e9:.2f} GB"


def full_depth_page(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The page's part on whole models."""
    out = ["Whole models", "------------", "", FULL_DEPTH_HEAD.strip().format(when=_when(lines)), ""]
    out += [".. list-table::", "   :header-rows: 1", f"   :widths: 30 15{' 11' * len(GENERATIONS)}", ""]
    head = ["model", "program", *GENERATIONS]
    out += [f"   {' ' if place else '*'} - {cell}" for place, cell in enumerate(head)]
    for name, program in dict.fromkeys((line["name"], line["program"]) for line in lines):
        own = {line["generation"]: line for line in lines if (line["name"], line["program"]) == (name, program)}
        cells = [next(iter(own.values()))["served"], f"``{program}``"]
        cells += [full_depth_words(own[each]) if each in own else "-" for each in GENERATIONS]
        out += [f"   {' ' if place else '*'} - {cell}" for place, cell in enumerate(cells)]
    return [*out, ""]


def programs_page(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The page's part on whole programs."""
    out = ["Whole programs", "--------------", ""]
    out += [
        PROGRAMS_HEAD.strip().format(when=_when(lines)),
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: 40 18 16 13 13",
        "",
    ]
    out += ["   * - model", "     - program", "     - devices", "     - held", "     - of a call"]
    for line in lines:
        sizes = [f"{line[each] / 1e9:.2f} GB" for each in ("held", "temporary")] if not line["failed"] else ["-", "-"]
        program = f"``{line['program']}``" + (f", does not hold: {line['failed'][:200]}" if line["failed"] else "")
        cells = [line["served"], program, f"{line['devices']} of {line['generation']}", *sizes]
        out += [f"   {'*' if not place else ' '} - {cell}" for place, cell in enumerate(cells)]
    return [*out, ""]


def replaced(kept: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found, and of other operations what is kept, in the order of the cases."""
    new = {line["operation"] for line in found}
    of_each = {(line["operation"], line["family"], line["generation"]): line for line in kept}
    of_each = {key: line for key, line in of_each.items() if key[0] not in new}
    of_each |= {(line["operation"], line["family"], line["generation"]): line for line in found}
    cases = [(*case, generation) for case in each_case() for _, generation in CHIPS]
    return [of_each[case] for case in cases if case in of_each]


def replaced_models(kept: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of whole models: what was found, and of the others what is kept, in the order of the cases."""
    of_each = {(line["name"], line["program"], line["generation"]): line for line in (*kept, *found)}
    return [of_each[case] for case in itertools.product(ONE_PERIOD, PROGRAMS, GENERATIONS) if case in of_each]


def words(line: dict[str, Any]) -> str:
    """A line's cell of the page."""
    if line["failed"]:
        return f"{'kernel' if line['kernel'] else 'XLA'}, does not hold: {line['failed'].splitlines()[0][:200]}"
    if not line["kernel"]:
        made = "XLA" if line["compiled"] is None else "XLA, compiled"
        return made if line["reason"] == NO_KERNEL else f"{made}: {line['reason']}"
    steps = ["interpreted"] if line["interpreted"] else []
    if (made := line["compiled"]) is None:
        steps.append("lowered")
    else:
        steps.append("compiled" + " (with pools laid out anew once a call)" * bool(made["relaid"]))
    steps += [f"run {line['run']['date']} ({line['run']['device']})"] if line["run"] else []
    return "kernel: " + ", ".join(steps)


def page(record: dict[str, Any]) -> str:
    """The page of the documentation."""
    jax_version = record["versions"]["jax"]
    when = _when(record["lines"])
    head = f"""Which chips, checked how
========================

Every operation at the sizes of published models, on every kind of chip that there are kernels for, as
``scripts/check_portability`` found it {when} with jax {jax_version}. *Interpreted*: the kernel runs in
Pallas' interpreter in the tests, and gives what XLA's path gives. *Lowered*: JAX and Mosaic accept it for the chip.
*Compiled*: the chip's own compiler made it, without the chip, in place and within the chip's VMEM. *Run*: a check on
such a chip held. TPUs keep arrays whose last axis fills no tile in another order of axes than kernels read: those a
program lays out anew once a call, not in a step. Where XLA serves an operation, the reason is there, unless there is
no kernel at all.

"""
    out = [head.rstrip(), ""]
    for operation in dict.fromkeys(line["operation"] for line in record["lines"]):
        own = [line for line in record["lines"] if line["operation"] == operation]
        title = f"``{operation}``"
        out += [title, "-" * len(title), "", ".. list-table::", "   :header-rows: 1", "   :widths: 30 35 35", ""]
        out += ["   * - case", "     - Hopper", "     - TPUs"]
        for family in dict.fromkeys(line["family"] for line in own):
            cells = {line["generation"]: words(line) for line in own if line["family"] == family}
            on_tpus = _merged({name: cell for name, cell in cells.items() if name in GENERATIONS})
            out += [f"   * - {family}", f"     - {cells.get('Hopper', '-')}", f"     - {on_tpus}"]
        out.append("")
    if record.get("programs"):
        out += programs_page(record["programs"])
    if record.get("full_depth"):
        out += full_depth_page(record["full_depth"])
    return "\n".join(out).rstrip() + "\n"


def _when(lines: Iterable[dict[str, Any]]) -> str:
    dates = sorted({line["date"] for line in lines})
    return f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"


def _merged(cells: dict[str, str]) -> str:
    """One sentence where all generations are alike."""
    kinds: dict[str, list[str]] = {}
    for name, cell in cells.items():
        kinds.setdefault(cell, []).append(name)
    if not kinds:
        return "-"
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(names)}: {cell}" for cell, names in kinds.items())


def incomplete(record: dict[str, Any]) -> Iterable[str]:
    """What a record lacks: of all cases on all chips, and of all programs as they are compiled now."""
    there = {(line["operation"], line["family"], line["generation"]) for line in record["lines"]}
    for operation, family in each_case():
        for _, generation in CHIPS:
            if (operation, family, generation) not in there:
                yield f"{operation} of {family} on {generation}"
    kept = {(line["name"], line["program"], line["served"]) for line in record.get("programs", ())}
    for name, served in ONE_PERIOD.items():
        for program in PROGRAMS:
            if (name, program, str(served)) not in kept:
                yield f"{program} of {served}"
    kept = {(line["name"], line["program"], line["generation"]) for line in record.get("full_depth", ())}
    for name, generation in itertools.product(ONE_PERIOD, GENERATIONS):  # of reading prompts, what was tried
        if (name, "generate_tokens", generation) not in kept:
            yield f"generate_tokens of all layers of {name} on {generation}"
