"""Published models without their numbers, and the programs that serve them: shapes that say where they lie."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxbuf.bench.random_model import configuration
from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.cache import Cache, memory_partitions
from jaxbuf.models.config import ATTENTION, ModelConfig
from jaxbuf.models.families import config_from_dict, config_json
from jaxbuf.models.gates import gated_config
from jaxbuf.models.known_models import find_known
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.mtp import MTPCache
from jaxbuf.models.tensor_parallel import automatic
from jaxbuf.serving import SamplingParams, init_carry
from jaxbuf.serving.batch import Batch, Decoding, make_batch
from tests.portability.topologies import on_mesh

WINDOW = 256  # of write gates


def model_config(
    name: str, layers: int | None = None, *, gates: bool = False, mtp: bool = False, mesh: Mesh | None = None
) -> ModelConfig:
    """The configuration of a known model.

    Args:
      name: In known.json.
      layers: The first ones, as `random_model.configuration` takes them; None: all.
      gates: Whether its softmax layers have write gates.
      mtp: Whether it has its MTP layer.
      mesh: Over which its layers are spread.
    """
    known = find_known(name)
    assert known is not None, name
    config = configuration(name, **({} if layers is None else {"layers": layers}))
    if mtp:
        config = config_from_dict(config_json(dataclasses.replace(config.source, mtp_num_hidden_layers=1).model()))
    if gates:
        config = gated_config(config, Admission(WriteGate(), window=WINDOW, threshold=0.5))
    config = dataclasses.replace(config, mesh=None if mesh is None else automatic(mesh))
    _ = config.on_device  # an error if its heads can't be shared
    return config


def abstract_batch(lm: LanguageModel, rows: int, prompt: int, new_tokens: int, **decoding: Any) -> Batch:
    """What `jaxbuf.generate` makes of so many prompts of so many tokens."""
    prompts = [[1 + row % 100] * prompt for row in range(rows)]
    sampling = SamplingParams(temperature=0.7, top_p=0.9)
    return make_batch(lm, prompts, sampling, Decoding(new_tokens, **decoding))


def carry_on_mesh(batch: Batch, mesh: Mesh) -> Any:
    """The shapes of a batch's carry: the layers' memory spread as the layers want it, the rest on every device."""
    carry = jax.eval_shape(lambda drafter: init_carry(batch.lm.config, batch.sizes, drafter), batch.drafter)
    spread = batch.lm.config.mesh is not None

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


def pools_of(carry: Any) -> list[Any]:
    """The layers' memory in a carry, those of a drafter among them."""
    found: list[Any] = []
    for node in jax.tree.leaves(carry, is_leaf=lambda node: isinstance(node, Cache | MTPCache)):
        if isinstance(node, Cache):
            found += node.layers
        elif isinstance(node, MTPCache):
            found.append(node.kv)
    return jax.tree.leaves(found)
