"""Llama: softmax attention alone, plain norms, and where a configuration says so positions that are stretched."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary, Scaling
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_softmax,
    eos_json,
    make,
    read_attention_heads,
    read_rope,
    rope_json,
    untied_if_stored,
)
from jaxbuf.models.loading.fields import MOST_LAYERS, Fields
from jaxbuf.models.loading.tensor_names import decoder_tensors, softmax_layer
from jaxbuf.models.mixers.attention import Attention

MODEL_TYPES = ("llama",)
SERVED = "text models of the Llama architecture"
IGNORED = ("*.rotary_emb.inv_freq",)  # in older files
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Llama model, under the names that its config.json uses.

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
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
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
            bias=self.attention_bias,
        )
        layer = LayerConfig((attention,), MLP(self.intermediate_size, bias=self.mlp_bias), norm)
        return ModelConfig(
            family="llama",
            source=self,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(layer,) * self.num_hidden_layers,
            norm=norm,
            tied=self.tie_word_embeddings,
            max_length=self.max_position_embeddings,
            eos_token_ids=self.eos_token_ids,
            initializer_range=self.initializer_range,
        )


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.require(*NEEDED)
    values: dict[str, Any] = {name: fields.size(name) for name in NEEDED}
    values["num_hidden_layers"] = fields.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
    values |= read_attention_heads(fields)
    values["rope_theta"], values["scaling"] = read_rope(fields)
    values |= {
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, above=0, most=1),
        "max_position_embeddings": fields.size("max_position_embeddings", 2048),
        "initializer_range": fields.number("initializer_range", 0.02, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=values["vocab_size"]),
    }
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        values[name] = fields.flag(name, False)
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config.source)
    eos, theta, _ = data.pop("eos_token_ids"), data.pop("rope_theta"), data.pop("scaling")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **data,
        "hidden_act": "silu",
        "rope_parameters": rope_json(theta, config.source.scaling),
        "eos_token_id": eos_json(eos),
    }


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    return decoder_tensors(config, softmax_layer)
