"""Qwen3 with experts: softmax attention alone, with a plain norm of each head's queries and keys."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import MLP, LayerConfig, ModelConfig, Norm
from jaxbuf.models.experts import Experts
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_softmax,
    eos_json,
    make,
    model_config,
    read_attention_heads,
    read_rope,
    read_sizes,
    read_usual,
    rope_json,
    untied_if_stored,
)
from jaxbuf.models.loading.expert_fields import (
    EXPERT_ARRAYS,
    has_experts,
    make_experts,
    read_experts,
    read_sparse_layers,
)
from jaxbuf.models.loading.fields import Fields, check_arrays
from jaxbuf.models.loading.tensor_names import (
    AROUND,
    are_stacked,
    attention_tensors,
    decoder_tensors,
    experts_tensors,
    mlp_tensors,
    placed,
)
from jaxbuf.models.mixers.attention import Attention

MODEL_TYPES = ("qwen3_moe",)
SERVED = "text models of the Qwen3 architecture with experts"
IGNORED = ()
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Qwen3-MoE model, under the names that its config.json uses.

    `rope_theta` is nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`. `stacked_experts` is not
    there: whether the files have the experts of a layer as one tensor.

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
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    stacked_experts: bool = False

    def __post_init__(self):
        check_softmax(self)
        check_arrays(vars(self), EXPERT_ARRAYS)

    @property
    def experts(self) -> Experts:
        """What the layers with experts have."""
        return make_experts(self, renormalised=self.norm_topk_prob)

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
        dense = LayerConfig((attention,), MLP(self.intermediate_size), norm)
        sparse = dataclasses.replace(dense, feed_forward=self.experts)
        layers = tuple(sparse if has_experts(self, layer) else dense for layer in range(self.num_hidden_layers))
        return model_config("qwen3_moe", self, layers, norm)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("use_sliding_window", False, default=False)
    values = read_sizes(fields, NEEDED)
    layers = values["num_hidden_layers"]
    if fields.has("layer_types"):
        fields.serve("layer_types", ["full_attention"] * layers)
    values |= read_attention_heads(fields, key_value_heads=4)
    values |= read_experts(fields)
    values |= read_sparse_layers(fields, layers)
    values["rope_theta"], _ = read_rope(fields, scalings=False)
    values |= read_usual(fields, eps=1e-6, max_length=32_768)
    for name in ("norm_topk_prob", "tie_word_embeddings", "attention_bias"):
        values[name] = fields.flag(name, False)
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config.source)
    eos, theta, _ = data.pop("eos_token_ids"), data.pop("rope_theta"), data.pop("stacked_experts")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **data,
        "mlp_only_layers": list(config.source.mlp_only_layers),
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": rope_json(theta),
        "eos_token_id": eos_json(eos),
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A head that is there counts, whatever the configuration says; and whether experts are stacked."""
    source = untied_if_stored(config, names).source
    return dataclasses.replace(source, stacked_experts=bool(are_stacked(names))).model()


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    source = config.source

    def layer_tensors(layer: LayerConfig) -> dict[str, Source]:
        found = {path: Source(name) for path, name in AROUND.items()}
        found |= placed(attention_tensors(layer.mixers[0]), "mixers.0.", "self_attn.")
        if layer.feed_forward != source.experts:
            return found | placed(mlp_tensors(layer.feed_forward), "mlp.", "mlp.")
        routed = experts_tensors(source.experts, source.hidden_size, stacked=source.stacked_experts)
        return found | placed(routed, "mlp.", "mlp.")

    return decoder_tensors(config, layer_tensors)
