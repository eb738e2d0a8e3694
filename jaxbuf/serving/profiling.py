"""Traces of what the device did, and their time summed over the named scopes of the models.

A trace is what jax.profiler writes, so XProf and Perfetto show it too. Its events are operations of compiled programs;
the programs themselves lie beside them, with the scope that every operation comes from.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxbuf.directory import make_directory

SCOPES = ("embedding", "projections", "convolution", "recurrence", "attention", "output", "mlp", "head", "sample")
OTHER = "other"
# Their events last as long as those of the operations inside them, which are counted.
CONTAINERS = ("while", "conditional", "call")
# In the module that its custom call carries, the function of a Pallas kernel is called so; its kernel is that_kernel.
PALLAS, PALLAS_NAME = "mosaic_gpu_v2", re.compile(rb"\\00((?!stable_)\w+_mosaic_gpu)\\00")
# In the targets of custom calls that multiply matrices, and in the names of libraries' kernels that do.
LIBRARY_PRODUCTS = re.compile("gemm|matmul|nvjet|cutlass|cublas", re.I)


class _Work(NamedTuple):
    """What an instruction does: `Operation.multiplies`, `reads` and `sources`."""

    multiplies: bool = False
    reads: tuple[tuple[int, ...], ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()


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
      program: The jitted function's name: "begin_prompts", "read_layer", "end_prompts" and "admit" read prompts (on a
        mesh "start" and "admit"), "generate_tokens" decodes.
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
      multiplies: Whether it multiplies matrices, alone or with other things in one fusion.
      reads: The shapes of the arrays that it reads.
      sources: The shapes that these arrays have where they were made, before they were taken for arrays of another
        shape.
    """

    program: str
    scope: str
    name: str
    seconds: float
    multiplies: bool = False
    reads: tuple[tuple[int, ...], ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()


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
            modules, ran = _modules(data), collections.defaultdict(list)
            programs = {name: _scopes(module) for name, module in modules.items()}
            works = {name: _works(module) for name, module in modules.items()}
            for program, *event in _events(data):
                ran[program].append(event)
            for program, events in ran.items():
                names = {operation for operation, *_ in events}
                scopes, work = _scopes_of(program, names, programs), _scopes_of(program, names, works)
                name = program.rpartition("(")[0].removeprefix("jit_")
                for operation, event, duration in events:
                    scope = _place(scopes, operation, event)
                    if scope is not None:
                        found.append(Operation(name, scope, event, duration, *_find(work, operation, event)))
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
    """The scope of an operation from its name in the program, as "jit(read_layer)/mlp/add"."""
    return next((part for part in path.split("/") if part in SCOPES), OTHER)


def _scopes_of[T](program: str, ran: set[str], programs: dict[str, dict[str, T]]) -> dict[str, T]:
    """The scopes, or what else there is of each operation, of a program that ran, called "name(id)".

    Events of a program from a compilation cache have the id that it had in the process that compiled it. So of the
    programs of that name it is the one with the most of the operations that ran, and the id decides between equals.
    """
    name = program.rpartition("(")[0]
    alike = [other for other in programs if other.rpartition("(")[0] == name]
    best = max(alike, key=lambda other: (len(ran & programs[other].keys()), other == program), default="")
    return programs.get(best, {})


def _place(scopes: dict[str, str | None], operation: str, name: str) -> str | None:
    """The scope of an event called `name` that ran for an operation; None for a container's own event.

    A kernel of a CUDA graph runs for the graph, which is no operation of the program: it is placed by its name, that of
    the fusion or of the Pallas kernel it was made from. Those that are the same share a kernel; they come from the same
    part of other layers.
    """
    if scopes.get(operation) or name == operation:
        return scopes.get(operation, OTHER)
    return scopes.get(name) or OTHER


def _find(works: dict[str, _Work], operation: str, name: str) -> _Work:
    """What an event called `name` that ran for an operation did; a kernel of a CUDA graph is found by its name.

    A library's kernel has none of the names in the program: what it reads is not known.
    """
    return works.get(operation) or works.get(name) or _Work(bool(LIBRARY_PRODUCTS.search(name)))


def _events(data: bytes) -> Iterator[tuple[str, str, str, float]]:
    """(program, operation, name, seconds) of every operation or kernel that ran; a program is called "name(id)"."""
    for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    program = f"{stats.get('hlo_module')}({stats.get('program_id')})"
                    yield program, str(stats["hlo_op"]), event.name, event.duration_ns * 1e-9


# The programs are in no event or stat, which is all that jax.profiler.ProfileData shows, also in jax 0.12; jaxlib's
# private HloModule parses a program but does not find it in the file, and the HLO of the client's live executables
# lacks the ids by which events name programs. So the file is parsed by the fields of XLA's xplane.proto and hlo.proto
# that are needed; the others are skipped.
PROTO = """
message XSpace { repeated XPlane planes = 1; }
message XPlane { string name = 2; repeated EventMetadataEntry event_metadata = 4; }
message EventMetadataEntry { XEventMetadata value = 2; }
message XEventMetadata { string name = 2; repeated XStat stats = 5; }
message XStat { bytes bytes_value = 6; }
message HloProto { HloModuleProto hlo_module = 1; }
message HloModuleProto { repeated HloComputationProto computations = 3; }
message HloComputationProto { repeated HloInstructionProto instructions = 2; int64 id = 5; }
message HloInstructionProto {
  string name = 1; string opcode = 2; OpMetadata metadata = 7; int64 parameter_number = 9;
  ShapeProto shape = 3; string custom_call_target = 28; int64 id = 35; repeated int64 operand_ids = 36;
  repeated int64 called_computation_ids = 38; bytes backend_config = 43;
}
message ShapeProto { repeated int64 dimensions = 3; repeated ShapeProto tuple_shapes = 4; }
message OpMetadata { string op_name = 2; }
"""


@functools.cache
def _messages() -> dict[str, Any]:
    """The classes of the messages in PROTO, by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # a tenth of a second, for this alone

    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="jaxbuf", syntax="proto2")
    for name, fields in re.findall(r"message (\w+) {(.*?)}", PROTO, re.DOTALL):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", fields):
            added = message.field.add(name=field, number=int(number))
            added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
            if kind in ("string", "bytes", "int64"):
                added.type = getattr(added, f"TYPE_{kind.upper()}")
            else:
                added.type, added.type_name = added.TYPE_MESSAGE, f".jaxbuf.{kind}"
    classes = message_factory.GetMessages([file], descriptor_pool.DescriptorPool())
    return {name.removeprefix("jaxbuf."): each for name, each in classes.items()}


def _parsed(kind: str, data: bytes) -> Any:
    return _messages()[kind].FromString(data)


def _modules(data: bytes) -> dict[str, Any]:
    """Every program, called "name(id)", as its HLO."""
    metadata = [plane for plane in _parsed("XSpace", data).planes if plane.name == "/host:metadata"]
    programs = [entry.value for plane in metadata for entry in plane.event_metadata]
    return {
        program.name: _parsed("HloProto", stat.bytes_value).hlo_module
        for program in programs
        for stat in program.stats
        if stat.bytes_value
    }


def _works(module: Any) -> dict[str, _Work]:
    """What each instruction of a program does, by its name and by those of its kernels."""
    works: dict[str, _Work] = {}
    multiplies: dict[int, bool] = {}  # whether a computation does
    for computation in module.computations:  # a computation comes after those it calls
        by_id, inside = {each.id: each for each in computation.instructions}, False
        for instruction in computation.instructions:
            called = any(multiplies.get(each, False) for each in instruction.called_computation_ids)
            library = bool(LIBRARY_PRODUCTS.search(instruction.custom_call_target))
            own = instruction.opcode == "dot" or library or (instruction.opcode == "fusion" and called)
            inside = inside or own
            arrays = [by_id[each] for each in instruction.operand_ids if not by_id[each].shape.tuple_shapes]
            reads = tuple(tuple(array.shape.dimensions) for array in arrays)
            sources = tuple(tuple(_source(array, by_id).shape.dimensions) for array in arrays)
            works[instruction.name] = work = _Work(own, reads, sources)
            for kernel in _kernels(instruction):
                works.setdefault(kernel, work)
        multiplies[computation.id] = inside
    return works


def _source(instruction: Any, by_id: dict[int, Any]) -> Any:
    """What made the numbers of an instruction, which may only give them another shape."""
    while instruction.opcode in ("bitcast", "reshape"):
        instruction = by_id[instruction.operand_ids[0]]
    return instruction


def _scopes(module: Any) -> dict[str, str | None]:
    """The scope of each instruction of a program.

    XLA drops the name of some, of a decoding step's matrix products for one. A fusion without a name has the scope of
    most instructions inside it, and any other the scope of what it flows into.
    """
    scopes: dict[str, str | None] = {}
    insides: dict[int, tuple[dict[int, str | None], str | None]] = {}  # the scopes of its parameters, and of most in it
    for computation in module.computations:  # a computation comes after those it calls
        parameters: dict[int, str | None] = {}
        flows_into: dict[int, str | None] = {}
        named: collections.Counter[str] = collections.Counter()
        for instruction in reversed(computation.instructions):  # and an instruction after those it uses
            name, kind, path = instruction.name, instruction.opcode, instruction.metadata.op_name
            called = insides[instruction.called_computation_ids[0]] if kind == "fusion" else ({}, None)
            if path:
                named[scope_of(path)] += 1
            scope = scope_of(path) if path else called[1] or flows_into.get(instruction.id)
            scopes[name] = None if kind in CONTAINERS else scope or OTHER
            for kernel in _kernels(instruction):
                scopes.setdefault(kernel, scopes[name])
            if kind == "parameter":
                parameters[instruction.parameter_number] = scope
            for place, operand in enumerate(instruction.operand_ids):
                flows_into[operand] = called[0].get(place) or scope or flows_into.get(operand)
        most = named.most_common(1)
        insides[computation.id] = parameters, most[0][0] if most else None
    return scopes


def _kernels(instruction: Any) -> Iterator[str]:
    """What a GPU calls the kernels of an instruction."""
    yield re.sub("[^0-9A-Za-z_]", "_", instruction.name)
    if instruction.custom_call_target == PALLAS:
        yield from (found.decode() + "_kernel" for found in PALLAS_NAME.findall(instruction.backend_config))
