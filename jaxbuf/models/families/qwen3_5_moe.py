"""Qwen3.5 with experts: its mixers, and in every layer routed experts and a shared one with a gate."""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

from jaxbuf.models.config import RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.experts import Experts
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import make
from jaxbuf.models.loading.expert_fields import EXPERT_ARRAYS, make_experts, read_experts
from jaxbuf.models.loading.fields import Fields
from jaxbuf.models.loading.hybrid_fields import (
    PROJECTIONS,
    Hybrid,
    hybrid_tensors,
    linear_tensors,
    read_hybrid,
    stored_facts,
)
from jaxbuf.models.loading.tensor_names import AROUND, are_stacked, attention_tensors, experts_tensors, placed

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
SERVED = "text models of the Qwen3.5 architecture with experts"
IGNORED = ("model.visual.*",)  # the vision tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Hybrid):
    """The static facts of a Qwen3.5-MoE text model: those of `Hybrid`, and those of its experts.

    `stacked_experts` and `mtp_stacked_experts` are not in a config.json: whether the files have the experts of a layer,
    and of the MTP layer, as one tensor.

    Raises:
      ValueError: As `Hybrid`.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    stacked_experts: bool = True
    mtp_stacked_experts: bool = True

    ARRAYS: ClassVar = (*Hybrid.ARRAYS, *EXPERT_ARRAYS, ("shared_expert_intermediate_size", "hidden_size"))

    @property
    def experts(self) -> Experts:
        """What every layer has."""
        return make_experts(self, renormalised=True, shared=self.shared_expert_intermediate_size)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        return self.build("qwen3_5_moe", (self.experts,) * len(self.layer_types), self.experts)


def read_config(fields: Fields) -> ModelConfig:
    """Text only (`qwen3_5_moe_text`, flat) or vision-language (`qwen3_5_moe`, the text model only)."""
    text = fields.nested("text_config") if fields.values["model_type"] == "qwen3_5_moe" else fields
    tied = fields.flag("tie_word_embeddings", False)
    values = read_hybrid(text, ("shared_expert_intermediate_size",), tied=tied) | read_experts(text)
    return make(Config, values, text)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = config.source.to_dict()
    del data["stacked_experts"], data["mtp_stacked_experts"]
    return {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **data}


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A head or an MTP layer that is there counts, whatever the configuration says; and whether experts are stacked."""
    facts = stored_facts(config.source, names)
    facts |= {"stacked_experts": are_stacked(names, "model.") is not False}
    facts |= {"mtp_stacked_experts": are_stacked(names, "mtp.") is not False}
    return dataclasses.replace(config.source, **facts).model()


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    source = config.source

    def layer_tensors(stacked: bool, layer: LayerConfig) -> dict[str, Source]:
        routed = experts_tensors(source.experts, source.hidden_size, stacked=stacked, shared="shared_expert")
        found = {path: Source(name) for path, name in AROUND.items()} | placed(routed, "mlp.", "mlp.")
        if layer.mixers[0].kind == RECURRENCE:
            return found | linear_tensors(PROJECTIONS)
        return found | placed(attention_tensors(layer.mixers[0]), "mixers.0.", "self_attn.")

    layers = partial(layer_tensors, source.stacked_experts), partial(layer_tensors, source.mtp_stacked_experts)
    return hybrid_tensors(config, names, *layers)
