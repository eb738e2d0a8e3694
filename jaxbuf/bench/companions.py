"""Times `prepare` and `gated_norm`, the kernels around the recurrence, beside XLA's compilation of the same."""

import argparse
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.bench.measure import device_time, timed, worst_errors
from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.convolution import init_ring
from jaxbuf.recurrence.gated_norm import gated_norm
from jaxbuf.recurrence.prepare import Weights, prepare

OPERATIONS = ("prepare", "gated_norm")
WIDTH, MAX_PENDING, EPS = 4, 8, 1e-6  # of Qwen3.5's convolution, of the ring of its inputs, and of the norm
FOOTPRINT, MOST_LAYERS = 120e6, 16  # what a step of all layers moves is twice the H200's L2, but at small batches
# Of a vector, relative to XLA's path. On a GPU XLA may leave out a rounding to bfloat16 within an operation, so that
# two of a bfloat16's steps, up to 3.9e-3 each, may lie between the two. A ring takes its inputs in as they are.
BOUNDS = {"bfloat16": 1.2e-2, "float32": 5e-6, "ring": 0.0}
WRONG = "WRONG"  # how the error of a row begins whose results are


@dataclasses.dataclass(frozen=True)
class Case:
    """One timed program: `time` tokens a step of `batch` rows."""

    operation: str
    batch: int
    time: int
    implementation: str
    part: str = "companions"


def plan(implementation: str, sizes: Iterable[tuple[int, int]]) -> list[Case]:
    """Both operations in both implementations, at each (batch, time)."""
    every = dict.fromkeys((implementation, "xla"))
    return [Case(operation, *size, name) for operation in OPERATIONS for size in sizes for name in every]


def count_bytes(spec: RecurrenceSpec, case: Case, dtype=jnp.bfloat16) -> int:
    """What one call reads and writes: the parameters of the layer, which stay in the cache, are left out.

    `prepare`: the ring's last inputs; each token's own, its append, and its q, k and v; two float32 gates in and two
    out a head. `gated_norm`: two arrays in and one out.
    """
    size, tokens = jnp.dtype(dtype).itemsize, case.batch * case.time
    if case.operation == "prepare":
        vectors = case.batch * (WIDTH - 1) + 3 * tokens
        return vectors * spec.channels * size + 16 * tokens * spec.heads
    return 3 * tokens * spec.heads * spec.value_dim * size


def layers_for(spec: RecurrenceSpec, case: Case) -> int:
    return int(min(MOST_LAYERS, max(2, -(-FOOTPRINT // count_bytes(spec, case)))))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_layer(spec: RecurrenceSpec, case: Case, dtype: str, key: jax.Array) -> dict[str, Any]:
    """Random arrays of one layer: its memory (the ring, or nothing), its parameters, and the inputs of a call."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int, scale: float = 1.0, dtype=dtype) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

    rows, heads, values = (case.batch, case.time), spec.heads, spec.value_dim
    if case.operation == "gated_norm":
        out, z = normal(*rows, heads, values, scale=0.1), normal(*rows, heads * values)
        return {"memory": (), "parameters": normal(values), "inputs": (out, z)}
    channels, gates = spec.channels, functools.partial(normal, dtype="float32")
    ring = init_ring(slots=case.batch, channels=channels, width=WIDTH, max_pending=MAX_PENDING, dtype=jnp.dtype(dtype))
    return {
        "memory": normal(*ring.shape),
        "parameters": Weights(normal(channels, WIDTH, scale=0.5), gates(heads), gates(heads)),
        "inputs": (normal(*rows, channels), gates(*rows, heads, scale=3), gates(*rows, heads)),
    }


def make_integers(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows in slots at random, at any position: int32 [batch]."""
    rows = case.batch
    found = {"slots": rng.permutation(rows) + 1, "start": rng.integers(0, 999, rows), "lengths": [case.time] * rows}
    return {name: np.asarray(value, np.int32) for name, value in found.items()}


def odd_integers(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The same with a null slot, starts in the first tokens, and rows of fewer tokens; the last row is a usual one."""
    usual, last = make_integers(case, rng), case.batch - 1
    found = {name: value.copy() for name, value in usual.items()}
    found["slots"][:1] = 0
    found["start"][:WIDTH] = np.arange(len(found["start"][:WIDTH]))
    found["lengths"] = rng.integers(0, case.time + 1, case.batch, np.int32)
    for name, value in found.items():
        value[last] = usual[name][last]
    return found


def call(spec: RecurrenceSpec, operation: str, implementation: str, layer: dict[str, Any], where) -> tuple[Any, Any]:
    """(what the operation returns, the layer's memory after it)."""
    parameters, inputs = layer["parameters"], layer["inputs"]
    if operation == "gated_norm":
        out, z = inputs
        return gated_norm(out, z, parameters, eps=EPS, implementation=implementation), ()
    return prepare(spec, parameters, layer["memory"], *inputs, **where, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def compare(spec: RecurrenceSpec, case: Case, layer: dict[str, Any], where) -> tuple[Any, jax.Array]:
    """The worst errors of a call against XLA's path, an array of them for each result; and of the ring, 0 if equal."""
    both = [call(spec, case.operation, name, layer, where) for name in (case.implementation, "xla")]
    # Else XLA might compare its own results before it rounds them.
    (found, memory), (wanted, same) = jax.lax.optimization_barrier(both)
    if case.operation == "gated_norm":  # by head
        found, wanted = (x.reshape(layer["inputs"][0].shape) for x in (found, wanted))
        return worst_errors((found,), (wanted,)), jnp.float32(0)
    return worst_errors(tuple(found), tuple(wanted)), jnp.sum(memory != same).astype(jnp.float32)


def check(spec: RecurrenceSpec, case: Case, programs: dict[str, Any], rng: np.random.Generator) -> dict[str, float]:
    """The kernel's largest errors by what BOUNDS bounds, from the compiled programs of `Lowered`."""
    found = dict.fromkeys(BOUNDS, 0.0)
    for dtype in ("bfloat16", "float32"):
        layer = programs[f"make {dtype}"](new_key(rng))
        errors, ring = programs[f"compare {dtype}"](layer, odd_integers(case, rng))
        # log_decay and beta, the last two of prepare's results, are always float32.
        kinds = [dtype] * 3 + ["float32"] * 2 if len(errors) == 5 else [dtype]
        for kind, error in [*zip(kinds, errors, strict=True), ("ring", ring)]:
            found[kind] = max(found[kind], float(error))
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def run(spec: RecurrenceSpec, case: Case, steps: int, carry, layers, where):
    """All steps on the device, every layer in each; the results are kept, or XLA would leave them out."""

    def body(i, carry):
        done, now = [], where | {"start": where["start"] + i * case.time}
        for layer, (_, memory) in zip(layers, carry, strict=True):
            # Inputs seem new in every step, or XLA would do what depends on them alone once, before the loop.
            inputs, _ = jax.lax.optimization_barrier((layer["inputs"], i))
            layer = layer | {"memory": memory, "inputs": inputs}
            done.append(call(spec, case.operation, case.implementation, layer, now))
        return tuple(done)

    return jax.lax.fori_loop(0, steps, body, carry)


def new_key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**31)))


def without_memory(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name != "memory"}


class Lowered:
    """The programs of a case: to make its arrays, to check the kernel in each dtype, and to time."""

    def __init__(self, spec: RecurrenceSpec, case: Case, options: argparse.Namespace, rng: np.random.Generator):
        key, where, self.programs = new_key(rng), make_integers(case, rng), {}
        count = options.layers or layers_for(spec, case)
        for dtype in ("bfloat16",) if case.implementation == "xla" else ("float32", "bfloat16"):
            self.programs[f"make {dtype}"] = make_layer.lower(spec, case, dtype, key)
            layer = jax.eval_shape(functools.partial(make_layer, spec, case, dtype), key)
            if case.implementation != "xla":
                self.programs[f"compare {dtype}"] = compare.lower(spec, case, layer, where)
        results = jax.eval_shape(lambda layer: call(spec, case.operation, "xla", layer, where), layer)
        layers = (without_memory(layer),) * count
        self.programs["run"] = run.lower(spec, case, count_steps(options), (results,) * count, layers, where)

    def compile(self) -> dict[str, Any]:
        return {name: program.compile() for name, program in self.programs.items()}


def count_steps(options: argparse.Namespace) -> int:
    return 8 if options.quick else 16


def measure(
    spec: RecurrenceSpec, case: Case, options: argparse.Namespace, programs: dict[str, Any], read: float, rng
) -> list[Row]:
    """The row of a case from its compiled programs; read: bytes a second. A wrong result is not timed."""
    row, errors = dataclasses.asdict(case), {}
    if case.implementation != "xla":
        errors = check(spec, case, programs, rng)
        if any(errors[kind] > bound for kind, bound in BOUNDS.items()):
            return [
                row | {"errors": errors, "error": f"{WRONG}: at most {BOUNDS} is expected, got {errors}; not timed"}
            ]
    where, steps = jax.device_put(make_integers(case, rng), jax.devices()[0]), count_steps(options)
    layers = [programs["make bfloat16"](new_key(rng)) for _ in range(options.layers or layers_for(spec, case))]
    shapes = jax.eval_shape(lambda layer: call(spec, case.operation, "xla", layer, where)[0], layers[0])
    carry = tuple((jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), layer["memory"]) for layer in layers)
    others = tuple(map(without_memory, layers))
    del layers  # the rings are donated

    def again(carry):
        return jax.block_until_ready(programs["run"](carry, others, where))

    name = "-".join(map(str, (case.part, case.operation, case.implementation, case.batch, case.time)))
    carry, wall, kernels = timed(again, carry, options.profile and options.profile / name)
    calls = steps * len(others)
    row |= {"layers": len(others), "steps": steps, "errors": errors, "device_us": None, "wall_us": 1e6 * wall / calls}
    row |= {"launches": None} | device_time(kernels, calls, case.implementation)
    row["us"] = row["device_us"] or row["wall_us"]
    row["bytes"] = count_bytes(spec, case)
    row["floor_us"] = 1e6 * row["bytes"] / read
    return [row | {"achieved": row["floor_us"] / row["us"]}]
