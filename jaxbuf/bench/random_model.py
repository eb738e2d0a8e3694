"""A model of a real one's shape with random parameters, made where it runs: for times, not for text."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.config import LayerConfig, ModelConfig
from jaxbuf.models.decoder import Decoder, DecoderLayer
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import normal, replace_parameters


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


def random_model(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> LanguageModel:
    """Random parameters on the default device, from the architecture's own initial distributions.

    Nothing passes through the host, and each kind of layer is compiled once however many there are.

    Args:
      config: Its layers' parameters are all made; of an MTP layer none.
      dtype: Of the parameters.
      seed: The same gives the same parameters.
    """
    keys = jax.random.split(jax.random.key(seed), len(config.layers) + 1)
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    layers = [_layer(config, layer, dtype, key) for layer, key in zip(config.layers, keys[1:], strict=True)]
    model = replace_parameters(abstract, _with_layers(abstract, layers, _rest(config, dtype, keys[0])))
    return LanguageModel(model, config, None, {}, jnp.dtype(dtype), "random")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(config: ModelConfig, layer: LayerConfig, dtype, key: jax.Array) -> list[jax.Array]:
    given = {"initializer": normal(config.initializer_range), "rngs": nnx.Rngs(key), "dtype": dtype}
    return jax.tree.leaves(DecoderLayer(layer, config.hidden_size, **given))


@partial(jax.jit, static_argnums=(0, 1))
def _rest(config: ModelConfig, dtype, key: jax.Array) -> list[jax.Array]:
    """The parameters outside the layers, as those of a model of one layer, whose own are left out."""
    model = Decoder(config, rngs=nnx.Rngs(key), dtype=dtype)
    return [leaf for path, leaf in jax.tree.leaves_with_path(model) if not _in_layers(path)]


def _with_layers(abstract: Decoder, layers: list[list[jax.Array]], rest: list[jax.Array]) -> list[jax.Array]:
    """All leaves in the order of the model's."""
    inside, outside = [iter(layer) for layer in layers], iter(rest)
    paths = [path for path, _ in jax.tree.leaves_with_path(abstract)]
    return [next(inside[path[1].idx] if _in_layers(path) else outside) for path in paths]


def _in_layers(path) -> bool:
    return getattr(path[0], "name", None) == "layers"
