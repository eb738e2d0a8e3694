"""Qwen3, dense text models: softmax attention alone, with a plain norm of each head's queries and keys."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import eos_json, read_rope, rope_json, untied_if_stored
from jaxbuf.models.loading.fields import MOST_LAYERS, Fields, check_arrays
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
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Qwen3 model, under the names that its config.json uses.

    `rope_theta` is nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`.

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
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, for its channels are turned in pairs, got {self.head_dim}")
        check_arrays(vars(self), ARRAYS)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.rms_norm_eps)
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=Rotary(self.head_dim, self.rope_theta),
            norm=norm,
            bias=self.attention_bias,
        )
        return ModelConfig(
            family="qwen3",
            source=self,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(LayerConfig((attention,), MLP(self.intermediate_size), norm),) * self.num_hidden_layers,
            norm=norm,
            tied=self.tie_word_embeddings,
            max_length=self.max_position_embeddings,
            eos_token_ids=self.eos_token_ids,
            initializer_range=self.initializer_range,
        )


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("use_sliding_window", False, default=False)
    fields.require(*NEEDED)
    values: dict[str, Any] = {name: fields.size(name) for name in NEEDED}
    layers = values["num_hidden_layers"] = fields.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
    if fields.has("layer_types"):
        fields.serve("layer_types", ["full_attention"] * layers)
    values |= {
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, above=0, most=1),
        "rope_theta": read_rope(fields, scalings=False)[0],
        "max_position_embeddings": fields.size("max_position_embeddings", 32_768),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": fields.flag("attention_bias", False),
        "initializer_range": fields.number("initializer_range", 0.02, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=values["vocab_size"]),
    }
    try:
        return Config(**values).model()
    except ValueError as error:  # of fields that do not fit together
        raise fields.error(str(error)) from error


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config.source)
    eos, theta = data.pop("eos_token_ids"), data.pop("rope_theta")
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **data,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": rope_json(theta),
        "eos_token_id": eos_json(eos),
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    return untied_if_stored(config, names)


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    found = {path: Source(f"model.{path}.weight") for path in ("embed_tokens", "norm")}
    if not config.tied:
        found["lm_head"] = Source("lm_head.weight")
    for number in range(len(config.layers)):
        layer = f"layers.{number}."
        found |= {layer + path: Source(f"model.{layer}{name}") for path, name in _layer_tensors(config.source).items()}
    return found


def _layer_tensors(source: Config) -> dict[str, str]:
    """The parameters of a layer, and their tensors."""
    found = {"before_mixers": "input_layernorm.weight", "before_mlp": "post_attention_layernorm.weight"}
    found |= {f"mlp.{part}_proj": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    found |= {f"mixers.0.{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"}
    found |= {f"mixers.0.{part}_proj": f"self_attn.{part}_proj.weight" for part in "qkvo"}
    if source.attention_bias:
        found |= {f"mixers.0.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"}
    return found
