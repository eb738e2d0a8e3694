"""A model of a real one's shape with random parameters, made where it runs: for times, not for text."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

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

# What config.json says of models whose shapes are served, by name. Qwen3.5-4B is without its MTP layer.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_hidden_layers": 32,
        "rope_theta": 1e7,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "vocab_size": 50_288,
        "hidden_size": 2560,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "num_hidden_layers": 64,
        "tie_word_embeddings": True,
    },
}
# The fields behind each size that can be asked for.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "vocabulary": ("vocab_size",),
    "heads": ("linear_num_value_heads", "num_heads"),
    "key_heads": ("linear_num_key_heads", "n_groups"),
    "dim": ("linear_key_head_dim", "linear_value_head_dim", "head_dim", "state_size"),
    "attention_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "attention_dim": ("head_dim",),
}
TABLE_SCALE = 256.0  # of an embedding that is to outweigh whatever the layers add to it


def configuration(shape: str = "qwen3.5-4b", **sizes: int) -> ModelConfig:
    """The configuration of a shape of SHAPES, with other sizes if they are given, those of SIZES.

    `heads`, `key_heads` and `dim` are the recurrence's, `attention_heads`, `kv_heads` and `attention_dim` those of
    softmax layers. Of Qwen3.5's every fourth layer is a softmax layer, and the last one of fewer than four.

    Raises:
      ValueError: The shape has no such size, or the sizes do not fit each other.
    """
    fields = dict(SHAPES[shape])
    recurrent = fields["model_type"] == "mamba2"  # whose head_dim is the recurrence's
    for name, size in sizes.items():
        own = [field for field in SIZES[name] if field in fields]
        if "head_dim" in own and (name == "dim") != recurrent:
            own.remove("head_dim")
        if not own:
            raise ValueError(f"{name} must not be given for {shape}, which has none, got {size}")
        fields |= dict.fromkeys(own, size)
    if fields["model_type"] == "qwen3_5_text":
        fields["full_attention_interval"] = min(4, fields["num_hidden_layers"])
    if recurrent:
        fields["expand"] = fields["num_heads"] * fields["head_dim"] / fields["hidden_size"]
    return config_from_dict(fields)


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
      mesh: With an axis "tensor", as `jaxbuf.load` takes it.
      name: Of the model.

    Raises:
      ValueError: The heads can't be shared by so many devices.
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
      mesh: With an axis "tensor".

    Raises:
      ValueError: The heads can't be shared by so many devices.
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
