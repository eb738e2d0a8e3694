"""Tiny models: the sizes of a Qwen3.5, a Llama, and any configuration in shapes or with random parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import llama
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import replace_parameters

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
LLAMA = llama.Config(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-2,
)


def changed(config: ModelConfig, **fields) -> ModelConfig:
    """The configuration with other fields, under the names of config.json."""
    return dataclasses.replace(config.source, **fields).model()


def abstract(config: ModelConfig, dtype=jnp.float32) -> Decoder:
    """A model in shapes."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def random_model(config: ModelConfig, *, scale: float = 0.3, seed: int | None = None) -> Decoder:
    """Normal numbers in every parameter, norms and gates included, drawn by numpy: nothing to compile.

    Without a seed they are others in every run.
    """
    rng, shapes = np.random.default_rng(seed), abstract(config)
    values = [scale * rng.standard_normal(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    return replace_parameters(shapes, [jnp.asarray(value, jnp.float32) for value in values])


def llama_model(seed: int) -> LanguageModel:
    """A Llama without a tokenizer, whose random parameters follow from the seed."""
    config = LLAMA.model()
    return LanguageModel(random_model(config, seed=seed), config, None, {}, jnp.dtype("float32"), "tiny")
