"""The programs that serve a model, compiled for TPUs that are not there: from shapes, by the TPU's own compiler."""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxbuf.models.cache import Cache, memory_partitions
from jaxbuf.models.config import ATTENTION
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.mtp import MTPCache
from jaxbuf.serving.admit import admit, init_carry
from jaxbuf.serving.batch import Batch, Decoding, make_batch
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.serving.sampling import SamplingParams
from jaxbuf.tpu_compiler import compile_for, device_bytes, on_mesh, tpu_mesh, unaliased

PROGRAMS = {"admit": admit, "generate_tokens": generate_tokens}  # of a batch: what reads prompts, what decodes
# What kernels compute is named after the scope of the model that they stand in, but for these.
OPERATIONS = {"output": "gated_norm", "attention": "attend"}
EXCHANGES = r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
# The scopes of what layers compute. In a loop XLA may give the kernel's alone, without what is around it.
OF_LAYERS = re.compile(r"shard_map|\blayer_\d+/")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What the compiler made of one of PROGRAMS.

    Attributes:
      name: In PROGRAMS.
      seconds: That tracing, lowering and compiling it took.
      held_bytes: Of its arguments, on one device: parameters, and the memory of all requests.
      temporary_bytes: On one device, for the time of a call.
      moved: Dtype and shape of each array of its carry that it writes to another place than it was in.
      layer_exchanges, other_exchanges: How often devices exchange something in the layers, and in the embedding, the
        logits and sampling. They are counted as they stand in the program: a step of `generate_tokens` and a call of
        `admit` have each once, but of a branch only where it is taken.
      kernels: How many Pallas kernels it has, by what they compute.
    """

    name: str
    seconds: float
    held_bytes: int
    temporary_bytes: int
    moved: tuple[str, ...]
    layer_exchanges: int
    other_exchanges: int
    kernels: dict[str, int]

    @property
    def used_bytes(self) -> int:
        """All of it together."""
        return self.held_bytes + self.temporary_bytes


def abstract_batch(lm: LanguageModel, rows: int, prompt_tokens: int, max_new_tokens: int, **decoding: Any) -> Batch:
    """What `jaxbuf.generate` makes of so many prompts of so many tokens; nothing is allocated.

    Args:
      lm: From `jaxbuf.models.abstract.abstract_model`.
      rows: Prompts.
      prompt_tokens: Of each.
      max_new_tokens: Of each.
      **decoding: As `Decoding` has it.
    """
    prompts = [[1 + row % 100] * prompt_tokens for row in range(rows)]
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    return make_batch(lm, prompts, sampling, Decoding(max_new_tokens, **decoding))


def compile_program(name: str, batch: Batch) -> tuple[jax.stages.Compiled, Any]:
    """One of PROGRAMS as the TPU compiler makes it, and the shapes of the carry that it takes.

    Args:
      name: In PROGRAMS.
      batch: Of `abstract_batch`; its model is for a TPU, and lies on one device or on a `jaxbuf.tpu_compiler.tpu_mesh`.
    """
    generation, devices = batch.lm.target.generation, batch.lm.config.mesh.size if batch.lm.config.mesh else 1
    carry = carry_on_mesh(batch)
    third = {"admit": batch.arrivals[0], "generate_tokens": jax.ShapeDtypeStruct((), np.int32)}[name]
    drafter = () if batch.drafter is None else (batch.drafter,)
    compiled = compile_for(generation, PROGRAMS[name], batch.lm.model, carry, third, *drafter, devices=devices)
    return compiled, carry


def compiled_program(name: str, batch: Batch) -> CompiledProgram:
    """Compiles one of PROGRAMS, and tells what it takes.

    Args:
      name, batch: As in `compile_program`.
    """
    began = time.perf_counter()
    compiled, _ = compile_program(name, batch)
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    exchanged = [bool(OF_LAYERS.search(_scope(line))) for line in text.splitlines() if re.search(EXCHANGES, line)]
    return CompiledProgram(
        name,
        time.perf_counter() - began,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(unaliased(compiled)),
        sum(exchanged),
        len(exchanged) - sum(exchanged),
        dict(Counter(_kernels(text))),
    )


def held_bytes(batch: Batch) -> int:
    """What one device holds between two calls: parameters, a drafter's too, and the memory of all requests."""
    return device_bytes((batch.lm.model, batch.drafter, carry_on_mesh(batch)))


def _kernels(text: str) -> Iterator[str]:
    """The operation that each kernel in a compiled program is of: "extend", "attend"."""
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            parts = _scope(line).split("/pallas_call")[0].split("/")
            parts = [part for part in parts if not part.startswith("jit(")]
            yield OPERATIONS.get(parts[-1], parts[-1]) if parts and parts[-1] else "other"


def _scope(line: str) -> str:
    """Where an instruction stands in the model, as JAX names it; "" where XLA made it of several."""
    found = re.search(r'op_name="([^"]*)"', line)
    return found[1] if found else ""


def carry_on_mesh(batch: Batch) -> Any:
    """The shapes of a batch's carry: the layers' memory spread as the layers want it, the rest on every device."""
    carry = jax.eval_shape(lambda drafter: init_carry(batch.lm.config, batch.sizes, drafter), batch.drafter)
    spread = batch.lm.config.mesh is not None
    mesh = batch.lm.config.mesh or tpu_mesh(batch.lm.target.generation)

    def is_memory(node: Any) -> bool:
        return isinstance(node, Cache | MTPCache)

    def placed(node: Any) -> Any:
        if isinstance(node, Cache) and spread:
            return dataclasses.replace(node, layers=_spread(node.kinds, node.layers, mesh))
        if isinstance(node, MTPCache) and spread:
            return dataclasses.replace(node, kv=_spread((ATTENTION,), (node.kv,), mesh)[0])
        return node

    return on_mesh(mesh, jax.tree.map(placed, carry, is_leaf=is_memory))


def _spread(kinds: tuple[str, ...], memories: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(memories)
    partitions = memory_partitions(kinds, memories)
    return jax.tree.unflatten(
        tree,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, partition))
            for leaf, partition in zip(leaves, partitions, strict=True)
        ],
    )
