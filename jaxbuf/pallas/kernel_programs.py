"""The kernels of a lowered program as programs of their own, which are compiled side by side.

XLA compiles a program's Mosaic GPU kernels one after the other, as it comes to them, which takes seconds for the large
ones. Mosaic GPU looks up each by its hash first, in what the process has compiled.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from jaxbuf.exported import MOSAIC_CALL, PLATFORMS

log = logging.getLogger("jaxbuf")
DTYPES = {"i1": "bool", "f32": "float32", "f16": "float16", "bf16": "bfloat16"} | {
    name + str(bits): f"{dtype}{bits}" for name, dtype in (("i", "int"), ("ui", "uint")) for bits in (8, 16, 32, 64)
}


class Kernel(NamedTuple):
    """A call of a kernel.

    Attributes:
      attributes: What Mosaic GPU is told: the kernel's code, its hash, and settings.
      operands, results: Of the call.
    """

    attributes: dict[str, Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def hash(self) -> bytes:
        """By which Mosaic GPU knows the kernel."""
        return self.attributes["kernel_hash"]

    def lower(self) -> jax.stages.Lowered:
        """A program that calls it and does nothing else."""
        call = jax.ffi.ffi_call(MOSAIC_CALL, self.results)
        program = jax.jit(lambda *operands: call(*operands, **self.attributes))
        return program.trace(*self.operands).lower(lowering_platforms=(PLATFORMS["gpu"],))


def find_kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The Mosaic GPU kernels of a program, each once, those with the most code first."""
    module: Any = lowered.compiler_ir()
    found = {kernel.hash: kernel for kernel in _calls(module.operation)}
    return sorted(found.values(), key=lambda kernel: -len(kernel.attributes["module"]))


def compile_kernels(lowered: jax.stages.Lowered, pool: Executor, begun: set[bytes]) -> list[Future[None]]:
    """Begins to compile a program's kernels, on the threads of `pool`, and does not wait for them.

    What goes wrong is noted in the log and nothing else: the program compiles without, and tells what it can't compile.

    Args:
      lowered: The program.
      pool: The threads.
      begun: The hashes of kernels that were begun before, which are left out; these are added.

    Returns:
      What can be waited for. No exception comes of it.
    """
    running: list[Future[None]] = []
    try:
        kernels = find_kernels(lowered)
    except Exception as error:  # Another version of JAX may write a call in another way.
        log.debug("kernels are compiled one after the other: %r", error)
        return running
    for kernel in kernels:
        if kernel.hash not in begun:
            running.append(pool.submit(_compile, kernel))
        begun.add(kernel.hash)
    return running


def _compile(kernel: Kernel) -> None:
    try:
        kernel.lower().compile()
    except Exception as error:
        log.debug("a kernel is compiled with its program: %r", error)


def compiler_threads() -> ThreadPoolExecutor:
    """Threads for `compile_kernels`: as many as there are processors."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "kernels")


def _calls(operation: Any) -> Iterator[Kernel]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                op = inner.operation
                if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == MOSAIC_CALL:
                    config = ir.DictAttr(op.attributes["mhlo.backend_config"])
                    attributes = {item.name: _value(item.attr) for item in config}
                    types = ([x.type for x in values] for values in (op.operands, op.results))
                    yield Kernel(attributes, *(tuple(map(_shape, kinds)) for kinds in types))
                yield from _calls(op)


def _value(attribute: Any) -> Any:
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    raise NotImplementedError(f"a kernel's attribute {attribute}")


def _shape(kind: Any) -> jax.ShapeDtypeStruct:
    tensor = ir.RankedTensorType(kind)
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(DTYPES[str(tensor.element_type)]))
