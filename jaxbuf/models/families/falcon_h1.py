"""Falcon-H1: Mamba-2 beside softmax attention in every layer, and multipliers (muP) wherever something is projected."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    MAMBA_ARRAYS,
    check_multiple,
    check_softmax,
    eos_json,
    make,
    mamba_mixer,
    model_config,
    read_attention_heads,
    read_mamba,
    read_rope,
    read_sizes,
    read_usual,
    rope_json,
    untied_if_stored,
    write_limits,
)
from jaxbuf.models.loading.fields import Fields, check_arrays
from jaxbuf.models.loading.tensor_names import attention_tensors, decoder_tensors, mamba2_tensors, mlp_tensors, placed
from jaxbuf.models.mixers.attention import Attention

MODEL_TYPES = ("falcon_h1",)
SERVED = "Falcon-H1 text models"
IGNORED = ()
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MULTIPLIERS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "key_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
FLAGS = {
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "projectors_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Falcon-H1 model, under the names that its config.json uses.

    `rope_theta` is nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`. `mlp_multipliers` are the
    gate's and the output's, `ssm_multipliers` those of z, x, B, C and the time steps.

    Raises:
      ValueError: Head counts that do not divide, an odd head_dim, or sizes whose arrays nobody could hold.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    projectors_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    ssm_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_softmax(self)
        check_multiple(self, "mamba_n_heads", "mamba_n_groups")
        check_arrays(vars(self), MAMBA_ARRAYS)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.rms_norm_eps)
        gated = "gated after" if self.mamba_norm_before_gate else "gated"
        mamba = mamba_mixer(
            self,
            output_bias=self.projectors_bias,
            norm=gated if self.mamba_rms_norm else None,
            input_scale=self.ssm_in_multiplier,
            output_scale=self.ssm_out_multiplier,
            part_scales=self.ssm_multipliers,
        )
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=Rotary(self.head_dim, self.rope_theta),
            bias=self.attention_bias,
            input_scale=self.attention_in_multiplier,
            score_scale=self.key_multiplier,
            output_scale=self.attention_out_multiplier,
        )
        of_gate, of_output = self.mlp_multipliers
        mlp = MLP(self.intermediate_size, bias=self.mlp_bias, gate_scale=of_gate, output_scale=of_output)
        layers = (LayerConfig((mamba, attention), mlp, norm),) * self.num_hidden_layers
        scales = {"embedding_scale": self.embedding_multiplier, "logits_scale": self.lm_head_multiplier}
        return model_config("falcon_h1", self, layers, norm, **scales)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    values = read_sizes(fields, NEEDED)
    values |= read_attention_heads(fields, key_value_heads=8)
    values |= read_mamba(fields, values["hidden_size"])
    values["rope_theta"], _ = read_rope(fields, scalings=False)
    values |= read_usual(fields, eps=1e-5, max_length=8192)
    values |= {name: fields.number(name, 1.0) for name in MULTIPLIERS}
    lists = {"mlp_multipliers": (1.0,) * 2, "ssm_multipliers": (1.0,) * 5}
    values |= {name: fields.numbers(name, ones) for name, ones in lists.items() if fields.has(name)}
    values |= {name: fields.flag(name, default) for name, default in FLAGS.items()}
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    source = config.source
    data = dataclasses.asdict(source)
    eos, theta = data.pop("eos_token_ids"), data.pop("rope_theta")
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **data,
        "mamba_d_ssm": source.mamba_n_heads * source.mamba_d_head,
        "mlp_multipliers": list(source.mlp_multipliers),
        "ssm_multipliers": list(source.ssm_multipliers),
        "time_step_limit": write_limits(source.time_step_limit),
        "hidden_act": "silu",
        "rope_parameters": rope_json(theta),
        "eos_token_id": eos_json(eos),
    }


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    return decoder_tensors(config, _layer_tensors) | {"norm": Source("model.final_layernorm.weight")}


def _layer_tensors(layer: LayerConfig) -> dict[str, Source]:
    mamba, attention = layer.mixers
    found = {"before_mixers": Source("input_layernorm.weight"), "before_mlp": Source("pre_ff_layernorm.weight")}
    found |= placed(mamba2_tensors(mamba), "mixers.0.", "mamba.")
    found |= placed(attention_tensors(attention), "mixers.1.", "self_attn.")
    return found | placed(mlp_tensors(layer.feed_forward), "mlp.", "feed_forward.")
