"""A language model without its numbers: what programs are compiled and exported from where no weights are."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.loading.sharding import parameter_sharding, spread_shape
from jaxbuf.target import Target, as_target


def abstract_model(
    config: ModelConfig, name: str, target: Target | str, dtype: str | jnp.dtype = "bfloat16"
) -> LanguageModel:
    """A language model of which every parameter is a `jax.ShapeDtypeStruct`, placed on the mesh of its configuration if
    it has one. Nothing is allocated.

    Args:
      config: Of the model.
      name: Of the model.
      target: What its programs are for: a `Target` or a chip's name ("v6e", "H100", "cpu").
      dtype: Of the parameters, but for the gates' float32.

    Raises:
      ValueError: No such target.
    """
    abstract = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))
    values: list[Any] = []
    for param in named_parameters(abstract).values():
        shape, where = spread_shape(param, config.mesh), parameter_sharding(param, config.mesh)
        values.append(jax.ShapeDtypeStruct(shape, param.get_raw_value().dtype, sharding=where))
    model = replace_parameters(abstract, values)
    return LanguageModel(model, config, None, {}, jnp.dtype(dtype), name, compiled_for=as_target(target))
