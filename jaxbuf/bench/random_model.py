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
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, normal, replace_parameters
from jaxbuf.models.loading.sharding import check_mesh, placed
from jaxbuf.models.tensor_parallel import automatic


def configuration(
    *,
    layers: int = 32,
    hidden: int = 2560,
    ffn: int = 9216,
    vocabulary: int = 248_320,
    heads: int = 32,
    key_heads: int = 16,
    dim: int = 128,
    attention_heads: int = 16,
    kv_heads: int = 4,
    attention_dim: int = 256,
) -> ModelConfig:
    """Of Qwen3.5-4B's text model without its MTP layer, if nothing else is asked for.

    Every fourth layer is a softmax layer, and the last one of fewer than four.
    """
    interval = min(4, layers)
    return config_from_dict(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": attention_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": attention_dim,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": dim,
            "linear_value_head_dim": dim,
            "num_hidden_layers": layers,
            "full_attention_interval": interval,
            "rope_theta": 1e7,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": True,
        }
    )


def random_model(config: ModelConfig, dtype: jnp.dtype, seed: int = 0, mesh: Mesh | None = None) -> LanguageModel:
    """Random parameters on the default device or spread over a mesh, from the architecture's own initial distributions.

    Nothing passes through the host, and each kind of layer is compiled once however many there are. For a mesh the
    default device holds one layer at a time, or the embedding, before it is spread.

    Args:
      config: Its layers' parameters are all made; of an MTP layer none.
      dtype: Of the parameters.
      seed: The same gives the same parameters, on a mesh too.
      mesh: With an axis "tensor", as `jaxbuf.load` takes it.

    Raises:
      ValueError: The heads can't be shared by so many devices.
    """
    spread = _on_mesh(config, mesh)
    keys = jax.random.split(jax.random.key(seed), len(config.layers) + 1)
    abstract = jax.eval_shape(lambda: Decoder(spread, rngs=nnx.Rngs(0), dtype=dtype))
    model = replace_parameters(abstract, _values(config, abstract, dtype, keys, mesh))
    return LanguageModel(model, spread, None, {}, jnp.dtype(dtype), "random")


def spread_model(lm: LanguageModel, mesh: Mesh) -> LanguageModel:
    """The same model with its parameters spread over a mesh, as `jaxbuf.load` spreads those of a directory.

    Args:
      lm: On one device; it stays as it is.
      mesh: With an axis "tensor".

    Raises:
      ValueError: The heads can't be shared by so many devices.
    """
    config = _on_mesh(lm.config, mesh)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=lm.dtype))
    values = [placed(param[...], param, mesh) for param in named_parameters(lm.model).values()]
    return dataclasses.replace(lm, model=replace_parameters(abstract, values), config=config)


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
