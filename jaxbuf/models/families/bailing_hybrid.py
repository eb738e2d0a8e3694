"""Ling 3.0: Kimi Delta Attention with a bounded decay, and latent attention with positions and a gate for each head,
with experts in groups behind both.

A layer that predicts further tokens, which files have behind the others, is not read; transformers does not read it
either, and no configuration says of which kind it is.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import make, read_rope, rope_json
from jaxbuf.models.loading.fields import SIZE, Fields
from jaxbuf.models.loading.latent_fields import (
    FULL,
    LINEAR,
    LatentHybrid,
    kda_tensors,
    latent_tensors,
    layer_tensors,
    read_latent_hybrid,
)
from jaxbuf.models.loading.tensor_names import decoder_tensors
from jaxbuf.models.mixers.kimi_delta_attention import KimiDeltaAttention
from jaxbuf.models.mixers.latent_attention import LatentAttention

MODEL_TYPES = ("bailing_hybrid",)
SERVED = "Ling 3.0 text models"
IGNORED = ("model.layers.{layers}.*",)
GATES = {"decay": "f_proj", "gate": "g_proj"}
THETA = 6_000_000.0
# What transformers takes where these are absent.
DEFAULTS = {
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
}


@dataclasses.dataclass(frozen=True)
class Config(LatentHybrid):
    """The static facts of a Ling 3.0 model, see `LatentHybrid`.

    `linear_head_dim` is `head_dim` in released files, `linear_conv_kernel_dim` is `short_conv_kernel_size`, and there
    are as many recurrent heads as others. Where the names that begin with "linear_" are there, they count.

    Raises:
      ValueError: An odd qk_rope_head_dim, or as in `LatentHybrid`.
    """

    rope_theta: float = THETA
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0

    def __post_init__(self):
        super().__post_init__()
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        bound = self.kda_lower_bound if self.kda_safe_gate else None
        recurrent = KimiDeltaAttention(self.spec, self.linear_conv_kernel_dim, self.rms_norm_eps, lower_bound=bound)
        attention = LatentAttention(
            heads=self.num_attention_heads,
            key_dim=self.qk_nope_head_dim,
            shared_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            rank=self.kv_lora_rank,
            rotary=Rotary(self.qk_rope_head_dim, self.rope_theta),
            head_gate=True,
            bias=self.attention_bias,
        )
        return self.build("bailing_hybrid", {LINEAR: recurrent, FULL: attention})


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("q_lora_rank", None)
    group = fields.size("layer_group_size", 6)
    values = read_latent_hybrid(
        fields, DEFAULTS, lambda count: [LINEAR if layer % group else FULL for layer in range(1, count + 1)]
    )
    # Transformers writes the size of latent attention's turned part as head_dim, and the other one beside it.
    released = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
    released |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    heads, size, taps = (name if fields.has(name) else released[name] for name in released)
    values |= {
        "linear_num_heads": fields.size(heads),
        "linear_head_dim": fields.size(size, 128),
        "linear_conv_kernel_dim": fields.integer(taps, 4, least=2, most=SIZE),
        "kda_safe_gate": fields.flag("kda_safe_gate", True),
        "kda_lower_bound": fields.number("kda_lower_bound", -5.0, most=0),
    }
    values["rope_theta"], _ = read_rope(fields, scalings=False, theta=THETA)
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = config.source.to_dict()
    theta, size, taps = (data.pop(name) for name in ("rope_theta", "linear_head_dim", "linear_conv_kernel_dim"))
    return {
        "architectures": ["BailingHybridForCausalLM"],
        "model_type": "bailing_hybrid",
        **data,
        "head_dim": size,
        "short_conv_kernel_size": taps,
        "rope_parameters": rope_json(theta),
        "num_nextn_predict_layers": 0,
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    return config


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    def of_layer(layer: LayerConfig) -> dict[str, Source]:
        mixer: Any = layer.mixers[0]
        recurrent = mixer.kind == RECURRENCE
        mixing = kda_tensors(mixer, GATES, "dense") if recurrent else latent_tensors(mixer, "dense")
        return layer_tensors(layer, mixing, "attention.", "mlp.", hidden=config.hidden_size, bias="gate.expert_bias")

    return decoder_tensors(config, of_layer) | {"embed_tokens": Source("model.word_embeddings.weight")}
