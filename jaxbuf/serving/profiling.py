"""Traces of what the device did, and their time summed over the named scopes of the models.

A trace is what jax.profiler writes, so XProf and Perfetto show it too. Its events are operations of compiled programs;
the programs themselves lie beside them, with the scope that every operation comes from.
"""

import collections
import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxbuf.directory import make_directory

SCOPES = ("embedding", "projections", "convolution", "recurrence", "attention", "output", "mlp", "head", "sample")
OTHER = "other"
# Their events last as long as those of the operations inside them, which are counted.
CONTAINERS = ("while", "conditional", "call")
# In the module that its custom call carries, the function of a Pallas kernel is called so; its kernel is that_kernel.
PALLAS, PALLAS_NAME = "mosaic_gpu_v2", re.compile(rb"\\00((?!stable_)\w+_mosaic_gpu)\\00")


type Fields = collections.defaultdict[int, list]


@contextlib.contextmanager
def trace(directory: str | os.PathLike[str] | None) -> Iterator[None]:
    """Writes a jax.profiler trace of what runs inside it to a directory; None: does nothing.

    Python calls are not in it. A directory may hold several traces; each lies in a folder named after its time.

    Args:
      directory: Is made if it is not there.

    Raises:
      ValueError: The directory cannot be made or written to.
      RuntimeError: Another trace is being taken (JAX takes one at a time).
    """
    if directory is None:
        yield
        return
    make_directory(directory, "profile")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(directory, profiler_options=options):
        yield


@dataclasses.dataclass(frozen=True)
class ScopeTime:
    """What one scope of one program took.

    Attributes:
      program: The jitted function's name: "start" reads prompts, "generate_tokens" decodes.
      scope: One of SCOPES, summed over the layers, or "other" (residual additions, norms, cursors, copies).
      seconds: Its operations' durations together. Where several run at once, as on a CPU's threads or a GPU's streams,
        that is more than the time that passed.
      operations: How many ran.
      longest: The names of those operations, or GPU kernels, that took the most, and their seconds: three at most.
    """

    program: str
    scope: str
    seconds: float
    operations: int
    longest: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One run of one operation, or of a GPU kernel that an operation launched.

    Attributes:
      program, scope: As in `ScopeTime`.
      name: Of the operation or the kernel.
      seconds: How long it ran.
    """

    program: str
    scope: str
    name: str
    seconds: float


def time_by_scope(directory: str | os.PathLike[str]) -> list[ScopeTime]:
    """The time of every program and scope in the newest trace of a directory, the longest first.

    Args:
      directory: What `trace`, or `profile` of `jaxbuf.generate`, wrote to.

    Raises:
      FileNotFoundError: There is no trace in it.
      ValueError: The trace holds no operation of a compiled program.
    """
    found: collections.defaultdict[tuple[str, str], list[tuple[str, float]]] = collections.defaultdict(list)
    for operation in operations(directory):
        found[operation.program, operation.scope].append((operation.name, operation.seconds))
    rows = [_sum(*place, events) for place, events in found.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def operations(directory: str | os.PathLike[str]) -> list[Operation]:
    """Every run of every operation in the newest trace of a directory; arguments and errors as in `time_by_scope`."""
    runs = sorted({file.parent for file in Path(directory).glob("plugins/profile/*/*.xplane.pb")})
    if not runs:
        raise FileNotFoundError(f"no trace in {str(directory)!r}: expected plugins/profile/*/*.xplane.pb in it")
    found: list[Operation] = []
    with warnings.catch_warnings():
        # The types of jaxlib's events lack a __module__; where warnings are errors, that would end the process.
        warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
        for file in sorted(runs[-1].glob("*.xplane.pb")):
            data = file.read_bytes()
            programs = _programs(data)
            for program, operation, name, duration in _events(data):
                scope = _place(programs.get(program, {}), operation, name)
                if scope is not None:
                    found.append(Operation(program.rpartition("(")[0].removeprefix("jit_"), scope, name, duration))
    if not found:
        raise ValueError(f"the trace in {str(runs[-1])!r} holds no operation of a compiled program")
    return found


def _sum(program: str, scope: str, events: list[tuple[str, float]]) -> ScopeTime:
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, duration in events:
        seconds[name] += duration
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    return ScopeTime(program, scope, sum(seconds.values()), len(events), tuple(longest))


def scope_of(path: str) -> str:
    """The scope of an operation from its name in the program, as "jit(start)/layer_0/mlp/add"."""
    return next((part for part in path.split("/") if part in SCOPES), OTHER)


def _place(scopes: dict[str, str | None], operation: str, name: str) -> str | None:
    """The scope of an event called `name` that ran for an operation; None for a container's own event.

    A kernel of a CUDA graph runs for the graph, which is no operation of the program: it is placed by its name, that of
    the fusion or of the Pallas kernel it was made from. Those that are the same share a kernel; they come from the same
    part of other layers.
    """
    if scopes.get(operation) or name == operation:
        return scopes.get(operation, OTHER)
    return scopes.get(name) or OTHER


def _events(data: bytes) -> Iterator[tuple[str, str, str, float]]:
    """(program, operation, name, seconds) of every operation or kernel that ran; a program is called "name(id)"."""
    for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    program = f"{stats.get('hlo_module')}({stats.get('program_id')})"
                    yield program, str(stats["hlo_op"]), event.name, event.duration_ns * 1e-9


# The programs are in no event, so ProfileData does not show them; they are read from the file itself. The numbers are
# those of the fields in XLA's xplane.proto (XSpace, XPlane, XEventMetadata, XStat) and hlo.proto (HloProto, and its
# modules, computations and instructions).


def _programs(data: bytes) -> dict[str, dict[str, str | None]]:
    """For every program, called "name(id)", the scope of each operation; None for a container."""
    found = {}
    for plane in map(_fields, _fields(data)[1]):
        if _text(plane, 2) != "/host:metadata":
            continue
        for entry in map(_fields, plane[4]):
            metadata = _fields(entry[2][0])
            for stat in map(_fields, metadata[5]):
                for proto in map(_fields, stat[6]):
                    found[_text(metadata, 2)] = _scopes(_fields(proto[1][0]))
    return found


def _scopes(module: Fields) -> dict[str, str | None]:
    """The scope of each instruction of a program.

    XLA drops the name of some, of a decoding step's matrix products for one. A fusion without a name has the scope of
    most instructions inside it, and any other the scope of what it flows into.
    """
    scopes: dict[str, str | None] = {}
    insides: dict[int, tuple[dict[int, str | None], str | None]] = {}  # the scopes of its parameters, and of most in it
    for computation in map(_fields, module[3]):  # a computation comes after those it calls
        parameters: dict[int, str | None] = {}
        flows_into: dict[int, str | None] = {}
        named: collections.Counter[str] = collections.Counter()
        for instruction in map(_fields, reversed(computation[2])):  # and an instruction after those it uses
            name, kind, identity = _text(instruction, 1), _text(instruction, 2), instruction[35][0]
            path = "".join(_text(_fields(metadata), 2) for metadata in instruction[7])
            called = insides[_numbers(instruction, 38)[0]] if kind == "fusion" else ({}, None)
            if path:
                named[scope_of(path)] += 1
            scope = scope_of(path) if path else called[1] or flows_into.get(identity)
            scopes[name] = None if kind in CONTAINERS else scope or OTHER
            for kernel in _kernels(name, instruction):
                scopes.setdefault(kernel, scopes[name])
            if kind == "parameter":
                parameters[instruction[9][0] if instruction[9] else 0] = scope
            for place, operand in enumerate(_numbers(instruction, 36)):
                flows_into[operand] = called[0].get(place) or scope or flows_into.get(operand)
        most = named.most_common(1)
        insides[computation[5][0]] = parameters, most[0][0] if most else None
    return scopes


def _kernels(name: str, instruction: Fields) -> Iterator[str]:
    """What a GPU calls the kernels of an instruction."""
    yield re.sub("[^0-9A-Za-z_]", "_", name)
    if _text(instruction, 28) == PALLAS:
        for configuration in instruction[43]:
            yield from (found.decode() + "_kernel" for found in PALLAS_NAME.findall(bytes(configuration)))


def _fields(message: bytes | memoryview) -> Fields:
    """The values of an encoded protocol buffer by field: numbers, or views of bytes."""
    view, at = memoryview(message), 0
    fields: Fields = collections.defaultdict(list)
    while at < len(view):
        key, at = _number(view, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(view, at)
        else:
            size, at = _number(view, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = view[at : at + size], at + size
        fields[key >> 3].append(value)
    return fields


def _text(fields: Fields, field: int) -> str:
    return "".join(bytes(value).decode() for value in fields[field])


def _numbers(fields: Fields, field: int) -> list[int]:
    """A field of many numbers, packed or one by one."""
    numbers = []
    for value in fields[field]:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _number(value, at)
            numbers.append(number)
    return numbers


def _number(view: memoryview, at: int) -> tuple[int, int]:
    """A number in base 128, least digit first, and where the next value starts."""
    number = shift = 0
    while True:
        byte = view[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
