"""Compiles for TPUs that are not there: libtpu holds the compiler of every generation, and needs no chip."""

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbuf.planning.tpu_slices import Slice
from jaxbuf.target import CHIPS

HAS_COMPILER = importlib.util.find_spec("libtpu") is not None
GENERATIONS = tuple(target.generation for target in CHIPS.values() if target.platform == "tpu")
# The smallest slices of so many devices that the compiler knows. JAX has two devices a chip on v4 and tpu7x.
SLICES = {
    "v4": {4: "v4:2x2x1", 8: "v4:2x2x1"},
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4"},
    "v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {4: "v6e:2x2", 8: "v6e:2x4"},
    "tpu7x": {4: "tpu7x:2x2x1", 8: "tpu7x:2x2x1"},
}


@functools.cache
def tpu_mesh(generation: str, devices: int = 1, axis: str = "tensor") -> Mesh:
    """A mesh of abstract devices in a row.

    Args:
      generation: One of GENERATIONS.
      devices: 1 to 8.
      axis: The name of its one axis.

    Raises:
      ValueError: libtpu is not installed, there is no such generation, or no slice has so many devices.
    """
    if not HAS_COMPILER:
        raise ValueError("libtpu, the TPU compiler, must be installed: pip install 'jaxbuf[tpu]'")
    if generation not in SLICES:
        raise ValueError(f"generation must be one of {', '.join(SLICES)}, got {generation!r}")
    fitting = [name for size, name in SLICES[generation].items() if size >= devices >= 1]
    if not fitting:
        raise ValueError(f"devices must be 1 to {max(SLICES[generation])}, got {devices}")
    _prepare_library()
    found = topologies.get_topology_desc(platform="tpu", topology_name=fitting[0])
    return Mesh(np.array(found.devices[:devices]), (axis,))


def _prepare_library() -> None:
    """For the compiler that is loaded next. It asks no cloud what chips this machine has, and two processes may load
    it. Where there is no TPU it would say so in alarming words, unless it is told what chip and host these are."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if jax.config.jax_platforms == "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def on_mesh(mesh: Mesh, tree: Any, partition: PartitionSpec | None = None) -> Any:
    """Arrays, or what has a shape and a dtype, as `ShapeDtypeStruct`s that lie on a mesh: on every device of it, unless
    they say themselves where."""
    everywhere = NamedSharding(mesh, PartitionSpec() if partition is None else partition)

    def placed(x):
        own = getattr(x, "sharding", None)
        devices = own.mesh.devices if isinstance(own, NamedSharding) and not own.mesh.empty else None
        here = devices is not None and devices.size > 0 and set(devices.flat) <= set(mesh.devices.flat)
        where = own if here else everywhere
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=where)

    return jax.tree.map(placed, tree)


def compile_for(
    generation: str, function: Callable[..., Any], *specs: Any, donate_argnums: Sequence[int] = (), devices: int = 1
) -> jax.stages.Compiled:
    """A function as the real TPU compiler makes it; what Mosaic or XLA refuse is an error of `compile`.

    Args:
      generation: One of GENERATIONS.
      function: Is jitted here, unless it is already; then what it donates is its own matter.
      *specs: Its arguments: pytrees of arrays or `ShapeDtypeStruct`s. Those with a sharding on `tpu_mesh(generation,
        devices)` lie there, others on every device.
      donate_argnums: As `jax.jit` has it.
      devices: Of the mesh.
    """
    mesh = tpu_mesh(generation, devices)
    jitted = function if hasattr(function, "trace") else jax.jit(function, donate_argnums=tuple(donate_argnums))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _without_cache():
        return jitted.trace(*on_mesh(mesh, specs)).lower().compile()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """JAX writes what is compiled ahead of time to its compilation cache, and without a chip can't read it again."""
    directory = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()


def device_memory(where: Slice) -> int:
    """Bytes of memory of each of the devices that a slice has to the compiler.

    A v4 chip is one device with all its memory where it is there, and two with half of it each where it is not.
    """
    return where.memory_bytes // 2 if where.generation == "v4" else where.memory_bytes


def unaliased(compiled: jax.stages.Compiled) -> list[str]:
    """Dtype and shape of every output that is not in the place of a donated argument."""
    header = (compiled.as_text() or "").splitlines()[0]
    found = re.findall(r"\{(\d*)\}: \(\d+, \{\}, (?:may|must)-alias\)", header)
    aliased = {int(number or 0) for number in found}  # no number: of the only output
    outputs = jax.tree.leaves(compiled.out_info)
    return [f"{x.dtype}{list(x.shape)}" for number, x in enumerate(outputs) if number not in aliased]


def device_bytes(arrays: Any) -> int:
    """The bytes that a device has of arrays, or of shapes that say where they lie."""
    total = 0
    for array in jax.tree.leaves(arrays):
        sharding = getattr(array, "sharding", None)
        shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
        total += int(np.prod(shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    return total
