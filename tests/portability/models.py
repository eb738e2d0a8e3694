"""Published models without their numbers, and the programs that serve them: shapes that say where they lie."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.cache import Cache
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.gates import gated_config
from jaxbuf.models.known_models import find_known
from jaxbuf.models.mtp import MTPCache
from jaxbuf.models.resizing import resized
from jaxbuf.models.tensor_parallel import automatic

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
    config = resized(known.config, name, {} if layers is None else {"layers": layers}, mtp=mtp)
    if gates:
        config = gated_config(config, Admission(WriteGate(), window=WINDOW, threshold=0.5))
    config = dataclasses.replace(config, mesh=None if mesh is None else automatic(mesh))
    _ = config.on_device  # an error if its heads can't be shared
    return config


def pools_of(carry: Any) -> list[Any]:
    """The layers' memory in a carry, those of a drafter among them."""
    found: list[Any] = []
    for node in jax.tree.leaves(carry, is_leaf=lambda node: isinstance(node, Cache | MTPCache)):
        if isinstance(node, Cache):
            found += node.layers
        elif isinstance(node, MTPCache):
            found.append(node.kv)
    return jax.tree.leaves(found)
