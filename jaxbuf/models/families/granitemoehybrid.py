"""Granite 4: Mamba-2 or softmax attention, an MLP that may have routed experts beside it, and four multipliers."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import MLP, RECURRENCE, LayerConfig, ModelConfig, Norm
from jaxbuf.models.experts import Experts, Router
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    MAMBA_ARRAYS,
    check_multiple,
    check_turned,
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
from jaxbuf.models.loading.expert_fields import MOST_EXPERTS
from jaxbuf.models.loading.fields import Fields, check_arrays
from jaxbuf.models.loading.tensor_names import AROUND, attention_tensors, decoder_tensors, mamba2_tensors, placed
from jaxbuf.models.mixers.attention import Attention

MODEL_TYPES = ("granitemoehybrid",)
SERVED = "Granite 4 text models"
IGNORED = ()
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
MAMBA, ATTENTION = "linear_attention", "full_attention"
LAYER_TYPES = {"mamba": MAMBA, "attention": ATTENTION, MAMBA: MAMBA, ATTENTION: ATTENTION}  # old names first
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("shared_intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)
EXPERT_ARRAYS = (
    ("num_local_experts", "hidden_size"),
    ("num_local_experts", "intermediate_size", "hidden_size"),
    ("num_local_experts", "hidden_size", "intermediate_size"),
)
EXPERT_FACTS = ("num_experts_per_tok", "intermediate_size")
# What the router and the stacked experts of a layer are called: in released files, and by transformers itself.
RELEASED = {"router": "router.layer.weight", "up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
RENAMED = {"router": "router.weight", "up_proj": "experts.gate_up_proj", "down_proj": "experts.down_proj"}


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Granite 4 model, under the names that its config.json uses.

    `rope_theta` is nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`. `num_experts_per_tok` and
    `intermediate_size`, which is an expert's, count where there are experts.

    Raises:
      ValueError: Head counts that do not divide, an odd head_dim where channels are turned, or sizes whose arrays
        nobody could hold.
    """

    vocab_size: int
    hidden_size: int
    shared_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int
    layer_types: tuple[str, ...]
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    attention_bias: bool = False
    position_embedding_type: str | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    intermediate_size: int = 11_008

    def __post_init__(self):
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        if MAMBA in self.layer_types:
            check_multiple(self, "mamba_n_heads", "mamba_n_groups")
        if self.position_embedding_type == "rope":
            check_turned(self)
        check_arrays(vars(self), ARRAYS + MAMBA_ARRAYS + (EXPERT_ARRAYS if self.num_local_experts else ()))

    @property
    def feed_forward(self) -> MLP | Experts:
        """What every layer has. The scores of a token's experts are a softmax over their logits alone, which are those
        of all experts, renormalised."""
        mlp = MLP(self.shared_intermediate_size, fused=True)
        if not self.num_local_experts:
            return mlp
        router = Router(self.num_local_experts, self.num_experts_per_tok)
        return Experts(router, self.intermediate_size, shared=mlp)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.rms_norm_eps)
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=Rotary(self.head_dim, self.rope_theta) if self.position_embedding_type == "rope" else None,
            bias=self.attention_bias,
            score_scale=self.attention_multiplier * math.sqrt(self.head_dim),
        )
        layers = {
            kind: LayerConfig(
                (attention if kind == ATTENTION else mamba_mixer(self, output_bias=self.mamba_proj_bias),),
                self.feed_forward,
                norm,
                residual_scale=self.residual_multiplier,
            )
            for kind in {*self.layer_types}
        }
        scales = {"embedding_scale": self.embedding_multiplier, "logits_scale": 1 / self.logits_scaling}
        return model_config("granitemoehybrid", self, tuple(layers[kind] for kind in self.layer_types), norm, **scales)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("normalization_function", "rmsnorm", default="rmsnorm")
    kind = fields.serve("position_embedding_type", "rope", "nope", None)
    values = read_sizes(fields, NEEDED)
    layers = values.pop("num_hidden_layers")
    values |= read_attention_heads(fields)
    values["layer_types"] = _read_layers(fields, layers)
    if MAMBA in values["layer_types"]:
        values |= read_mamba(fields, values["hidden_size"])
    else:  # the sizes of a mixer that no layer has say nothing; these are some that transformers takes
        values |= {"mamba_n_heads": 1, "mamba_d_head": values["hidden_size"], "mamba_d_state": 1}
    values |= {
        "shared_intermediate_size": fields.size("shared_intermediate_size", 1024),
        "position_embedding_type": "rope" if kind == "rope" else None,
        "rope_theta": read_rope(fields, scalings=False)[0],
        "logits_scaling": fields.number("logits_scaling", 1.0, above=0),
        "num_local_experts": (experts := fields.integer("num_local_experts", 8, least=0, most=MOST_EXPERTS)),
    }
    if experts:
        values["num_experts_per_tok"] = fields.integer("num_experts_per_tok", 2, least=1, most=experts)
        values["intermediate_size"] = fields.size("intermediate_size", 11_008)
    values |= read_usual(fields, eps=1e-6, max_length=2048)
    values |= {name: fields.number(name, 1.0) for name in MULTIPLIERS}
    values |= {name: fields.flag(name, False) for name in ("attention_bias", "tie_word_embeddings")}
    return make(Config, values, fields)


def _read_layers(fields: Fields, layers: int) -> tuple[str, ...]:
    if not fields.has("layer_types"):
        return (MAMBA,) * layers
    given = fields.texts("layer_types")
    if len(given) != layers or not {*given} <= {*LAYER_TYPES}:
        fields.fail("layer_types", f"{layers} (num_hidden_layers) out of {', '.join(map(repr, LAYER_TYPES))}")
    return tuple(LAYER_TYPES[each] for each in given)


def config_json(config: ModelConfig) -> dict[str, Any]:
    source = config.source
    data = dataclasses.asdict(source)
    eos, theta = data.pop("eos_token_ids"), data.pop("rope_theta")
    for name in () if source.num_local_experts else EXPERT_FACTS:
        del data[name]
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        **data,
        "mamba_expand": source.mamba_n_heads * source.mamba_d_head // source.hidden_size,
        "layer_types": list(source.layer_types),
        "num_hidden_layers": len(source.layer_types),
        "time_step_limit": write_limits(source.time_step_limit),
        "hidden_act": "silu",
        "rope_parameters": rope_json(theta),
        "eos_token_id": eos_json(eos),
    }


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    renamed = any(name.endswith(RENAMED["up_proj"]) for name in names)
    return decoder_tensors(config, partial(_layer_tensors, RENAMED if renamed else RELEASED))


def _layer_tensors(experts: Mapping[str, str], layer: LayerConfig) -> dict[str, Source]:
    (mixer,) = layer.mixers
    mamba = mixer.kind == RECURRENCE
    parts = placed(mamba2_tensors(mixer), "", "mamba.") if mamba else placed(attention_tensors(mixer), "", "self_attn.")
    found = {path: Source(name) for path, name in AROUND.items()} | placed(parts, "mixers.0.", "")
    mlp = {"gate_up_proj": Source("shared_mlp.input_linear.weight")}
    mlp |= {"down_proj": Source("shared_mlp.output_linear.weight")}
    if isinstance(layer.feed_forward, Experts):
        mlp = placed(mlp, "shared.", "")
        mlp |= {path: Source(f"block_sparse_moe.{name}") for path, name in experts.items()}
    return found | placed(mlp, "mlp.", "")
