"""Qwen3, dense text models: softmax attention alone, with a plain norm of each head's queries and keys."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary, Scaling
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_softmax,
    make,
    model_config,
    read_rope,
    read_sizes,
    read_usual,
    softmax_json,
    untied_if_stored,
)
from jaxbuf.models.loading.fields import Fields
from jaxbuf.models.loading.tensor_names import decoder_tensors, softmax_layer
from jaxbuf.models.mixers.attention import Attention

MODEL_TYPES = ("qwen3",)
SERVED = "dense text models of the Qwen3 architecture"
IGNORED = ()
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Qwen3 model, under the names that its config.json uses.

    `rope_theta` and `scaling` are nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`.

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
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    scaling: Scaling | None = None
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_softmax(self)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.rms_norm_eps)
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=Rotary(self.head_dim, self.rope_theta, self.scaling),
            norm=norm,
            bias=self.attention_bias,
        )
        layer = LayerConfig((attention,), MLP(self.intermediate_size), norm)
        return model_config("qwen3", self, (layer,) * self.num_hidden_layers, norm)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("use_sliding_window", False, default=False)
    values = read_sizes(fields, NEEDED)
    if fields.has("layer_types"):
        fields.serve("layer_types", ["full_attention"] * values["num_hidden_layers"])
    values["rope_theta"], values["scaling"] = read_rope(fields)
    values |= read_usual(fields, eps=1e-6, max_length=32_768)
    values |= {name: fields.flag(name, False) for name in ("tie_word_embeddings", "attention_bias")}
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    return softmax_json(config, "Qwen3ForCausalLM", hidden_act="silu", use_sliding_window=False)


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    return decoder_tensors(config, softmax_layer)
