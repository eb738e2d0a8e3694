"""Reads a compiled program's HLO text and says where it writes an array as large as one of the memory's pools."""

import math
import re

import jax
import numpy as np

from tests.serving.program import FREE, computations, operation

NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8"}
IN_PLACE = {"scatter", "dynamic-update-slice"}
PASSES_ON = FREE | {"copy-done", "async-done", "optimization-barrier", "after-all"}


def pool_sized_writes(hlo: str, pools) -> list[str]:
    """Instructions that output as many elements, of the same dtype, as an array in `pools`, and do not work in place.

    Every instruction of the program is looked at, in loops and outside them, but for the branches of conditionals: on
    XLA's path a fold stands in one. In place are scatters and updates of slices (XLA puts a copy before those that can
    not be, which is found), and what a custom call aliases to an operand.
    """
    wanted = {(NAMES[array.dtype.name], math.prod(array.shape)) for array in jax.tree.leaves(pools)}
    inside = computations(hlo)
    found = []
    for name in _reached(hlo, inside):
        for line in inside[name]:
            kind, op = operation(line)
            if op in PASSES_ON:
                continue
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", kind)
            large = [shape for shape in shapes if (shape[0], _elements(shape[1])) in wanted]
            if large and not _in_place(line, op, len(large), inside):
                found.append(line)
    return found


def _elements(dimensions: str) -> int:
    return int(np.prod([int(size) for size in dimensions.split(",") if size], dtype=np.int64))


def _reached(hlo: str, inside: dict[str, list[str]]) -> list[str]:
    """The computations that run: the entry, bodies of loops and what is called; neither branches nor insides of
    fusions."""
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+) ", hlo, re.MULTILINE)
    found, waiting = [], [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.append(name)
        for line in inside[name]:
            if operation(line)[1] in ("while", "call", "async-start"):
                waiting += re.findall(r"(?:body|to_apply|calls)=%([\w.\-]+)", line)
    return found


def _in_place(line: str, op: str, large: int, inside: dict[str, list[str]]) -> bool:
    if op == "custom-call":
        aliasing = line.partition("output_to_operand_aliasing=")[2].partition(")}")[0]
        return len(re.findall(r"\(\d+, \{", aliasing)) >= large
    if op != "fusion":
        return op in IN_PLACE
    fused = re.search(r"calls=%([\w.\-]+)", line)
    lines = {line.split(" = ")[0].removeprefix("ROOT "): line for line in inside[fused[1]]} if fused else {}

    def works_in_place(name: str) -> bool:
        if name not in lines:
            return False
        op = operation(lines[name])[1]
        if op in IN_PLACE:
            return True
        if op in ("tuple", "bitcast", "reshape"):
            operands = re.findall(r"%[\w.\-]+", lines[name].split(f" {op}(", 1)[1])
            return all(works_in_place(operand) for operand in operands)
        return False

    root = next((line.removeprefix("ROOT ").split(" = ")[0] for line in lines.values() if line.startswith("ROOT ")), "")
    return works_in_place(root)
