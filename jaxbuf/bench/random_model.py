"""A model of a real one's shape with random parameters, made where it runs: for times, not for text."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxbuf.models.config import LayerConfig, ModelConfig
from jaxbuf.models.decoder import Decoder, DecoderLayer
from jaxbuf.models.known_models import find_known, known_models
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, normal, replace_parameters
from jaxbuf.models.loading.sharding import check_mesh, placed
from jaxbuf.models.resizing import resized
from jaxbuf.models.tensor_parallel import automatic

FIRST = "Qwen3.5-4B"
TABLE_SCALE = 256.0  # of an embedding that is to outweigh whatever the layers add to it


def configuration(shape: str = FIRST, **sizes: int) -> ModelConfig:
    """The configuration of a known model without an MTP layer, with other sizes if they are given.

    Args:
      shape: Its name.
      **sizes: As `jaxbuf.models.resizing.resized` takes them.

    Raises:
      ValueError: The model is not known, it has no such size, or the sizes do not fit each other.
    """
    known = find_known(shape)
    if known is None:
        raise ValueError(f"shape must be the name of a known model ({', '.join(known_models())}), got {shape!r}")
    return resized(known.config, shape, sizes)


def random_model(
    config: ModelConfig, dtype: jnp.dtype, seed: int = 0, mesh: Mesh | None = None, name: str = "random"
) -> LanguageModel:
    """Random parameters on the default device or spread over a mesh, from the architecture's own initial distributions.

    Nothing passes through the host, and each kind of layer is compiled once however many there are. For a mesh the
    default device holds one layer at a time, or the embedding, before it is spread.

    Args:
      config: Its layers' parameters are all made; of an MTP layer none.
      dtype: Of the parameters.
      seed: The same gives the same parameters, on a mesh too.
      mesh: As `jaxbuf.load` takes it.
      name: Of the model.

    Raises:
      ValueError: The heads or experts can't be shared by so many devices.
    """
    spread = _on_mesh(config, mesh)
    keys = jax.random.split(jax.random.key(seed), len(config.layers) + 1)
    abstract = jax.eval_shape(lambda: Decoder(spread, rngs=nnx.Rngs(0), dtype=dtype))
    model = replace_parameters(abstract, _values(config, abstract, dtype, keys, mesh))
    return LanguageModel(model, spread, None, {}, jnp.dtype(dtype), name)


def spread_model(lm: LanguageModel, mesh: Mesh) -> LanguageModel:
    """The same model with its parameters spread over a mesh, as `jaxbuf.load` spreads those of a directory.

    Args:
      lm: On one device; it stays as it is.
      mesh: As `jaxbuf.load` takes it.

    Raises:
      ValueError: The heads or experts can't be shared by so many devices.
    """
    config = _on_mesh(lm.config, mesh)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=lm.dtype))
    values = [placed(param[...], param, mesh) for param in named_parameters(lm.model).values()]
    return dataclasses.replace(lm, model=replace_parameters(abstract, values), config=config)


def repeating_model(lm: LanguageModel) -> LanguageModel:
    """The same model with another embedding table, after which it gives its newest token again, whatever came before.

    So its greedy tokens are known beforehand, while every step computes what it always does. The table is random, and
    so large that it outweighs what the layers add to it; a head that the model has beside is the same table again.
    """
    table = lm.model.embed_tokens[...]
    where = table.sharding if lm.config.mesh is not None else None
    make = jax.jit(_large_table, static_argnums=(0, 1), out_shardings=where)
    values = [
        make(table.shape, table.dtype) if name in ("embed_tokens", "lm_head") else param[...]
        for name, param in named_parameters(lm.model).items()
    ]
    return dataclasses.replace(lm, model=replace_parameters(lm.model, values))


def _large_table(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return (TABLE_SCALE * jax.random.normal(jax.random.key(7), shape, jnp.float32)).astype(dtype)


def _on_mesh(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    check_mesh(mesh)
    config = dataclasses.replace(config, mesh=None if mesh is None else automatic(mesh))
    _ = config.on_device  # raises an error if its heads can't be shared
    return config


def _values(
    config: ModelConfig, abstract: Decoder, dtype: jnp.dtype, keys: jax.Array, mesh: Mesh | None
) -> Iterator[jax.Array]:
    """All parameters in the order of the model's leaves, those of a layer made when the first of them comes."""
    rest, layer, number = iter(_rest(config, dtype, keys[0])), iter(()), -1
    paths = [path for path, _ in jax.tree.leaves_with_path(abstract)]
    for path, param in zip(paths, named_parameters(abstract).values(), strict=True):
        if not _in_layers(path):
            yield placed(next(rest), param, mesh)
            continue
        if path[1].idx != number:
            number = path[1].idx
            layer = iter(_layer(config, config.layers[number], dtype, keys[1 + number]))
        yield placed(next(layer), param, mesh)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(config: ModelConfig, layer: LayerConfig, dtype, key: jax.Array) -> list[jax.Array]:
    given = {"initializer": normal(config.initializer_range), "rngs": nnx.Rngs(key), "dtype": dtype}
    return jax.tree.leaves(DecoderLayer(layer, config.hidden_size, **given))


@partial(jax.jit, static_argnums=(0, 1))
def _rest(config: ModelConfig, dtype, key: jax.Array) -> list[jax.Array]:
    """The parameters outside the layers, as those of a model of one layer, whose own are left out."""
    model = Decoder(config, rngs=nnx.Rngs(key), dtype=dtype)
    return [leaf for path, leaf in jax.tree.leaves_with_path(model) if not _in_layers(path)]


def _in_layers(path) -> bool:
    return getattr(path[0], "name", None) == "layers"
