"""What a program does, read from what the TPU compiler made of it: copies, aliases, collectives, memory."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxbuf.serving.tpu_programs import OF_LAYERS
from tests.serving.program import FREE, computations, loop_bodies, operation

# What passes arrays on, or waits for one, and moves nothing itself.
PASSED_ON = FREE | {"optimization-barrier", "after-all", "domain"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32", "int8": "s8"}
NAMES |= {"uint8": "u8", "bool": "pred"}
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}
CALLS = r"(?:body|to_apply|branch_computations|\w+_computation)"  # what an instruction runs, but for fusions
HOST = ("infeed", "outfeed", "send", "send-done", "recv", "recv-done")
LEAST_POOL = 2**21  # bytes; smaller arrays are integers, scores of keys and rings of a few tokens


def shapes_in(text: str, *, memory: bool = False) -> list[tuple[str, int]]:
    """The dtype and the number of elements of every array of an HLO type; with `memory` an array that lies in VMEM or
    a smaller memory of the chip counts as one of no elements."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^{}]*\})?", text)
    return [
        (kind, 0 if memory and "S(" in layout else math.prod(map(int, filter(None, shape.split(",")))))
        for kind, shape, layout in found
    ]


def device_shapes(arrays: Any) -> set[tuple[str, int]]:
    """The dtype and the number of elements that a device has of each array, of those of LEAST_POOL bytes or more."""
    found = set()
    for array in jax.tree.leaves(arrays):
        sharding = getattr(array, "sharding", None)
        shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
        if math.prod(shape) * np.dtype(array.dtype).itemsize >= LEAST_POOL:
            found.add((NAMES[np.dtype(array.dtype).name], math.prod(shape)))
    return found


def executed(hlo: str) -> Iterator[tuple[str, str]]:
    """The computation and the line of every instruction that runs by itself: not those within a fusion."""
    lines = computations(hlo)
    fused = set(re.findall(r" fusion\(.*?calls=%([\w.\-]+)", hlo)) | set(re.findall(r"to_apply=%([\w.\-]+)", hlo))
    called = set(re.findall(r" call\(.*?to_apply=%([\w.\-]+)", hlo))
    for name in lines.keys() - (fused - called):
        for line in lines[name]:
            yield name, line


def pool_copies(compiled: jax.stages.Compiled, pools: Any, *, loops_only: bool = False, ends: bool = True) -> list[str]:
    """Instructions that write an array of a pool's dtype and size to the chip's memory anew, wherever they stand,
    branches included.

    Not those that write into the array that they were given: scatters and updates of slices, alone or as the root of a
    fusion, and kernels whose output is aliased to an operand. Nor what `written_back` finds.

    Args:
      compiled: From `jaxbuf.tpu_compiler.compile_for`.
      pools: The memory that is donated to it, arrays or `ShapeDtypeStruct`s with their shardings.
      loops_only: Leave out what stands outside of all loops, and so runs once a call.
      ends: Count what lays arrays out anew at the program's ends, too, see `relaid`.
    """
    found = [line for line, back in _pool_writes(compiled, pools) if not back]
    if loops_only:
        inside = _in_loops(compiled.as_text())
        found = [line for line in found if line.split(":")[0] in inside]
    return found if ends else _within(compiled, pools, found)


def _within(compiled: jax.stages.Compiled, pools: Any, lines: list[str]) -> list[str]:
    """Those of a program's lines that do not lay out pools anew at its ends."""
    entry = re.findall(r"^ENTRY %([\w.\-]+)", compiled.as_text(), re.MULTILINE)[0]
    odd = relaid(compiled, pools)
    return [line for line in lines if line.split(":")[0] != entry or not odd.intersection(_written(line))]


def relaid(compiled: jax.stages.Compiled, pools: Any) -> set[tuple[str, int]]:
    """The dtype and size of the pools whose arguments a TPU does not keep in the order of their axes, which kernels
    want: those whose last axis fills no tile. A program lays them out anew where it begins and where it ends."""
    header = compiled.as_text().splitlines()[0].split("entry_computation_layout={(")[1].split(")->")[0]
    found = set()
    for kind, dims, order in re.findall(r"\b([a-z]+\d*)\[([\d,]+)\]\{([\d,]+)", header):
        if [int(axis) for axis in order.split(",")] != list(range(dims.count(",") + 1))[::-1]:
            found.add((kind, math.prod(map(int, dims.split(",")))))
    return found & device_shapes(pools)


def _written(line: str) -> list[tuple[str, int]]:
    return shapes_in(operation(line)[0])


def _in_loops(hlo: str) -> set[str]:
    """The computations that the bodies of loops run, and those of their branches and calls."""
    lines, found, left = computations(hlo), set[str](), loop_bodies(hlo)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for line in lines[name]:
            for names in re.findall(
                r"(?:body|to_apply|branch_computations|\w+_computation)=\{?([^}\s]+(?:, %[^}\s]+)*)", line
            ):
                left += [each for each in re.findall(r"%([\w.\-]+)", names) if each in lines]
    return found


def written_back(compiled: jax.stages.Compiled, pools: Any, *, ends: bool = True) -> list[str]:
    """Instructions that write a whole pool from VMEM to where it was. XLA's memory-space assignment fetches a pool that
    fits into VMEM, scatters there, and writes all of it back; kernels pin pools to the chip's memory. `ends` is as in
    `pool_copies`."""
    found = [line for line, back in _pool_writes(compiled, pools) if back]
    return found if ends else _within(compiled, pools, found)


def _pool_writes(compiled: jax.stages.Compiled, pools: Any) -> list[tuple[str, bool]]:
    """The lines of what writes whole pools, and whether each writes back what lay in VMEM."""
    hlo, wanted = compiled.as_text(), device_shapes(pools)
    lines = computations(hlo)
    found = []
    for name, line in executed(hlo):
        kind, does = operation(line)
        # What runs beside other instructions is counted where it ends, with its result.
        if does in PASSED_ON or does.endswith("-start") or does in ("call-update", "async-update"):
            continue
        written = [place for place, shape in enumerate(shapes_in(kind, memory=True)) if shape in wanted]
        if not all(_is_in_place(lines, line, place) for place in written):
            start = _operands(line)[0] if does == "copy-done" else ""
            source = next((inner for inner in lines[name] if start and f"{start} = " in inner), "")
            moved = shapes_in(operation(source)[0], memory=True) if source else []
            found.append((f"{name}: {line}", len(moved) > 1 and moved[1][1] == 0))
    return found


def _is_in_place(lines: dict[str, list[str]], line: str, place: int) -> bool:
    """Whether part `place` of what an instruction writes is an operand of it, changed in place."""
    does = operation(line)[1]
    if does in ("scatter", "dynamic-update-slice"):
        return True
    if does == "custom-call":
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}\s*(?:,|$)", line.split(", metadata=")[0] + ",")
        keys = re.findall(r"\{([\d, ]*)\}: \(", aliases[0]) if aliases else []
        return "" in keys or str(place) in keys
    return does == "fusion" and _updated_parameter(lines, line, place) is not None


def _updated_parameter(lines: dict[str, list[str]], fusion: str, place: int) -> int | None:
    """The number of the operand that a fusion's output `place` is, after updates in place; None: it is none, or the
    same as it was."""
    called = re.search(r"calls=%([\w.\-]+)", fusion)
    assert called, fusion
    inside = {inner.removeprefix("ROOT ").split(" = ")[0]: inner for inner in lines[called[1]]}
    line, updates = next(inner for inner in inside.values() if inner.startswith("ROOT")), 0
    if operation(line)[1] == "tuple":
        line = inside[_operands(line)[place]]
    while operation(line)[1] != "parameter":
        does, source = operation(line)[1], 0
        if does == "fusion":
            found = _updated_parameter(lines, line, 0)
            if found is None:
                return None
            source, updates = found, updates + 1
        elif does in ("scatter", "dynamic-update-slice"):
            updates += 1
        elif does not in ("bitcast", "get-tuple-element", "reshape"):
            return None
        line = inside[_operands(line)[source]]
    number = re.search(r" parameter\((\d+)\)", line)
    return int(number[1]) if updates and number else None


def _operands(line: str) -> list[str]:
    does = operation(line)[1]
    return re.findall(r"%[\w.\-]+", line.split(f" {does}(", 1)[1].split(")")[0])


def host_transfers(compiled: jax.stages.Compiled) -> list[str]:
    """Instructions that send something to the host, or wait for it."""
    hlo = compiled.as_text()
    assert loop_bodies(hlo) or "while" not in hlo
    found = []
    for lines in computations(hlo).values():
        for line in lines:
            bare = re.sub(r"metadata=\{.*?\}", "", line)
            if operation(line)[1] in HOST or "callback" in bare or "is_host_transfer=true" in bare or "S(5)" in bare:
                found.append(line)
    return found


class Collective(NamedTuple):
    """An exchange between devices.

    Attributes:
      kind: One of COLLECTIVES.
      bytes: Of the largest array that a device gets.
      scope: Which part of the program it is of, as JAX names it; "" where XLA made it of several.
    """

    kind: str
    bytes: int
    scope: str

    @property
    def of_layers(self) -> bool:
        """Whether it is one of the decoder's layers, not of the embedding, the head or sampling."""
        return OF_LAYERS.search(self.scope) is not None


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """All that a program has, in no order."""
    found = []
    for lines in computations(compiled.as_text()).values():
        for line in lines:
            output, does = operation(line)
            does = does.removesuffix("-start")
            if does in COLLECTIVES:
                sizes = [BYTES.get(name, 4) * number for name, number in shapes_in(output)]
                scope = re.search(r'op_name="([^"]*)"', line)
                found.append(Collective(does, max(sizes, default=0), scope[1] if scope else ""))
    return found


def vmem_bytes_used(compiled: jax.stages.Compiled) -> int:
    """The most VMEM that one instruction, a kernel among them, has to itself."""
    config = r'\{"memory_space":"1","offset":"(\d+)","size":"(\d+)"\}'
    used = re.findall(r'"used_scoped_memory_configs":\[([^\]]*)\]', compiled.as_text())
    return max((int(start) + int(size) for each in used for start, size in re.findall(config, each)), default=0)
