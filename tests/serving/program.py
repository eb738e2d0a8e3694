"""Reads a compiled program's HLO text and says what its loop writes."""

import math
import re

import jax
import numpy as np

from jaxbuf.serving import Carry, generate_tokens, init_carry
from jaxbuf.serving.batch import Batch
from jaxbuf.serving.generation import read_prompts
from jaxbuf.serving.prompts import begin_prompts, end_prompts, read_layer

FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call"}


def computations(hlo: str) -> dict[str, list[str]]:
    """Name -> instruction lines of every computation."""
    found, name = {}, None
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line.strip())
    return found


def operation(line: str) -> tuple[str, str]:
    """The output type and the operation of an instruction line."""
    match = re.search(r"= (\(.*?\)|\S+) ([\w\-]+)\(", line)
    assert match, line
    return match[1], match[2]


def loop_bodies(hlo: str) -> list[str]:
    """Names of the bodies of all while loops."""
    return re.findall(r" while\(.*body=%([\w.\-]+)", hlo)


def gpu_kernels(lowered: str) -> list[tuple[str, list[str]]]:
    """The name of each kernel in a program lowered for CUDA, and the shapes of the fp32 arrays that it takes."""
    found = []
    for call in (line for line in lowered.splitlines() if "@mosaic_gpu" in line):
        (name,) = re.findall(r"\\00((?!stable)[a-z_]+)_mosaic_gpu\\00", call)
        taken = call.split(" : (")[-1].split(") ->")[0]
        found.append((name, re.findall(r"tensor<([\dx]+)xf32>", taken)))
    return found


def written_in_loops(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions in loops, but outside conditionals, that output an array whose last dimensions are `shape`.

    A fusion counts by what it outputs: inside it nothing is written to memory. Tuples, and what only passes a buffer
    on, are no writes.
    """
    wanted = re.compile(r"\[(?:\d+,)*" + ",".join(map(str, shape)) + r"\]")
    return [line for line in outputs_in_loops(hlo) if wanted.search(operation(line)[0])]


def made_in_loops(hlo: str, size: int) -> list[str]:
    """Instructions in loops, but outside conditionals, that output an array of at least `size` elements.

    Not the scatters into an array that the loop already holds: they write in place. Were the old array still needed,
    XLA would put a copy before the scatter, which is found.
    """
    all_lines = computations(hlo)

    def elements(line):
        shapes = re.findall(r"\[([\d,]+)\]", operation(line)[0])
        return max((math.prod(map(int, shape.split(","))) for shape in shapes), default=1)

    def in_place(line):
        fused = re.search(r" fusion\(.*calls=%([\w.\-]+)", line)
        inside = all_lines[fused[1]] if fused else []
        into = re.search(r"ROOT .* scatter\((%[\w.\-]+)", inside[-1]) if inside else None
        held = into and any(f"{into[1]} = " in inner and " parameter(" in inner for inner in inside)
        return held or operation(line)[1] == "scatter"

    return [line for line in outputs_in_loops(hlo) if elements(line) >= size and not in_place(line)]


def outputs_in_loops(hlo: str) -> list[str]:
    """Instructions in loops, but outside conditionals, that write memory."""
    all_lines, found = computations(hlo), []

    def visit(name):
        for line in all_lines[name]:
            if operation(line)[1] not in FREE:
                found.append(line)
            if operation(line)[1] in ("while", "call"):
                for inner in re.findall(r"(?:body|to_apply)=%([\w.\-]+)", line):
                    visit(inner)

    bodies = loop_bodies(hlo)
    assert bodies, "the program has no loop"
    for body in bodies:
        visit(body)
    return found


def check_on_device(hlo: str) -> None:
    """The program has a loop and never talks to the host."""
    assert loop_bodies(hlo)
    for line in (line for lines in computations(hlo).values() for line in lines):
        line = re.sub(r"metadata=\{.*?\}", "", line)  # names of Python functions, tests among them
        for word in ("infeed", "outfeed", "send(", "recv(", "callback", "host_"):
            assert word not in line, line


def check_reused(hlo: str, carry: object) -> None:
    """All arrays of the carry are aliased to outputs: the donated memory is the memory of the result."""
    header = hlo.splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(carry))


def generate_batch(batch: Batch) -> Carry:
    """The carry once all rows of a batch have ended."""
    lm, drafter = batch.lm, () if batch.drafter is None else (batch.drafter,)
    carry = read_prompts(lm, batch.sizes, batch.arrivals, batch.drafter)
    return generate_tokens(lm.model, carry, np.int32(max(batch.begins.max_new_tokens)), *drafter)


def carry_shape(batch: Batch) -> Carry:
    """The shapes of a batch's carry; nothing is computed."""
    return jax.eval_shape(lambda: init_carry(batch.lm.config, batch.sizes, batch.drafter))


def programs_compiled() -> tuple[int, ...]:
    """How many programs each function that a generation runs was compiled to, the layers' last."""
    functions = begin_prompts, end_prompts, generate_tokens, read_layer
    return tuple(function._cache_size() for function in functions)
