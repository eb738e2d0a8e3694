"""Qwen3.5, dense text models: Gated DeltaNet and gated softmax attention, and a layer that predicts a token further."""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

from jaxbuf.models.config import MLP, RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import make
from jaxbuf.models.loading.fields import Fields
from jaxbuf.models.loading.hybrid_fields import (
    PROJECTIONS,
    Hybrid,
    hybrid_tensors,
    linear_tensors,
    read_hybrid,
    stored_facts,
)
from jaxbuf.models.loading.hybrid_fields import LayerType as LayerType
from jaxbuf.models.loading.tensor_names import outside_mixers, softmax_layer

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
SERVED = "dense text models of the Qwen3.5 architecture"
IGNORED = ("model.visual.*",)  # the vision tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Hybrid):
    """The static facts of a Qwen3.5 text model: those of `Hybrid`, and the size of its MLPs.

    Raises:
      ValueError: As `Hybrid`.
    """

    intermediate_size: int

    ARRAYS: ClassVar = (*Hybrid.ARRAYS, ("intermediate_size", "hidden_size"))

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        mlp = MLP(self.intermediate_size)
        return self.build("qwen3_5", (mlp,) * len(self.layer_types), mlp)


def read_config(fields: Fields) -> ModelConfig:
    """Text only (`qwen3_5_text`, flat) or vision-language (`qwen3_5`, the text model only)."""
    text = fields.nested("text_config") if fields.values["model_type"] == "qwen3_5" else fields
    values = read_hybrid(text, ("intermediate_size",), tied=fields.flag("tie_word_embeddings", False))
    return make(Config, values, text)


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **config.source.to_dict(),
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A head or an MTP layer that is there counts, whatever the configuration says."""
    return dataclasses.replace(config.source, **stored_facts(config.source, names)).model()


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    return hybrid_tensors(config, names, _layer_tensors, _layer_tensors)


def _layer_tensors(layer: LayerConfig) -> dict[str, Source]:
    if layer.mixers[0].kind != RECURRENCE:
        return softmax_layer(layer)
    return linear_tensors(PROJECTIONS) | outside_mixers(layer)
