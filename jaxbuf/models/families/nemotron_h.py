"""Nemotron-H and Nemotron 3: a layer is a Mamba-2 mixer, softmax attention without positions, an MLP, or experts."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jaxbuf.models.config import LayerConfig, ModelConfig, Norm, SquaredReluMLP
from jaxbuf.models.experts import Experts
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_multiple,
    eos_json,
    make,
    model_config,
    read_limits,
    untied_if_stored,
    write_limits,
)
from jaxbuf.models.loading.expert_fields import MOST_EXPERTS, check_groups, grouped_router
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import (
    are_stacked,
    attention_tensors,
    experts_tensors,
    mamba2_tensors,
    mlp_tensors,
    placed,
)
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.mixers.mamba2_mixer import Mamba2
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.shown import shown

MODEL_TYPES = ("nemotron_h",)
SERVED = "Nemotron-H and Nemotron 3 text models"
IGNORED = ("mtp.*",)  # layers that predict further tokens, which transformers does not read either
MAMBA, ATTENTION, MLP_LAYER, EXPERTS_LAYER = "linear_attention", "full_attention", "mlp", "moe"
# What hybrid_override_pattern has for each kind of layer, and the names of layers_block_type, old ones among them.
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP_LAYER, "E": EXPERTS_LAYER}
BLOCKS = {"mamba": MAMBA, "attention": ATTENTION} | {kind: kind for kind in PATTERN.values()}
# Sizes, and what transformers takes where they are absent.
SIZES = {
    "num_key_value_heads": 8,
    "intermediate_size": 21_504,
    "ssm_state_size": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "max_position_embeddings": 4096,
}
# Facts of layers of experts, and what transformers takes where they are absent.
EXPERT_SIZES = {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
EXPERT_FACTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    *EXPERT_SIZES,
    "moe_latent_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)
NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "mamba_num_heads")
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
    ("mamba_num_heads", "mamba_head_dim", "hidden_size"),
    ("n_groups", "ssm_state_size", "hidden_size"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("mamba_num_heads", "mamba_head_dim", "conv_kernel"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Nemotron-H model, under the names that its config.json uses.

    `eos_token_ids` is `eos_token_id` there, and `layers_block_type` may be `hybrid_override_pattern`. `stacked_experts`
    is not there: whether the files have the experts of a layer as two tensors. The facts of experts, from
    `n_routed_experts` on, count where layers have some.

    Raises:
      ValueError: Heads or groups of experts that do not divide, more experts of a token than its groups have, a kind of
        layer that is not served, or sizes whose arrays nobody could hold.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    layers_block_type: tuple[str, ...]
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    max_position_embeddings: int = 4096
    use_bias: bool = False
    use_conv_bias: bool = True
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    stacked_experts: bool = False

    def __post_init__(self):
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        check_multiple(self, "mamba_num_heads", "n_groups")
        if not self.layers_block_type or not {*self.layers_block_type} <= {*PATTERN.values()}:
            found = shown(self.layers_block_type)
            raise ValueError(f"layers_block_type must be a list out of {tuple(BLOCKS)}, got {found}")
        if len(self.layers_block_type) > MOST_LAYERS:
            raise ValueError(f"there must be at most {MOST_LAYERS} layers, got {len(self.layers_block_type)}")
        if not {MAMBA, ATTENTION} & {*self.layers_block_type}:
            raise ValueError("a layer at least must be a Mamba-2 or an attention layer, all are MLPs or experts")
        check_arrays(vars(self), ARRAYS)
        if self.has_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        check_groups(self, "n_routed_experts")
        read = "hidden_size" if self.moe_latent_size is None else "moe_latent_size"
        arrays = [
            ("n_routed_experts", "hidden_size"),
            ("n_routed_experts", "moe_intermediate_size", read),
            ("n_routed_experts", read, "moe_intermediate_size"),
            ("moe_shared_expert_intermediate_size", "hidden_size"),
            (read, "hidden_size"),
        ]
        check_arrays(vars(self), arrays)

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return EXPERTS_LAYER in self.layers_block_type

    @property
    def experts(self) -> Experts:
        """What those layers have."""
        return Experts(
            grouped_router(self, "n_routed_experts"),
            self.moe_intermediate_size,
            gated=False,
            latent=self.moe_latent_size,
            latent_bias=self.mlp_bias and self.moe_latent_size is not None,
            shared=SquaredReluMLP(self.moe_shared_expert_intermediate_size, bias=self.mlp_bias),
        )

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm = Norm(self.layer_norm_epsilon)
        heads, groups = self.mamba_num_heads, self.n_groups
        spec = RecurrenceSpec(heads, groups, self.ssm_state_size, self.mamba_head_dim, decay="head", delta=False)
        mamba = Mamba2(
            spec=spec,
            width=self.conv_kernel,
            eps=self.layer_norm_epsilon,
            least_step=self.time_step_limit[0],
            most_step=self.time_step_limit[1],
            bias=self.use_bias,
            output_bias=self.use_bias,
            convolution_bias=self.use_conv_bias,
        )
        attention = Attention(self.num_attention_heads, self.num_key_value_heads, self.head_dim, rotary=None)
        layers = {
            MAMBA: LayerConfig((mamba,), None, norm),
            ATTENTION: LayerConfig((attention,), None, norm),
            MLP_LAYER: LayerConfig((), SquaredReluMLP(self.intermediate_size, bias=self.mlp_bias), norm),
        }
        if self.has_experts:
            layers[EXPERTS_LAYER] = LayerConfig((), self.experts, norm)
        return model_config("nemotron_h", self, tuple(layers[kind] for kind in self.layers_block_type), norm)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("mlp_hidden_act", "relu2", default="relu2")
    fields.serve("mamba_hidden_act", "silu", default="silu")
    fields.serve("attention_bias", False, default=False)
    fields.serve("sliding_window", None)
    fields.require(*NEEDED, ("layers_block_type", "hybrid_override_pattern"))
    values: dict[str, Any] = {name: fields.size(name) for name in NEEDED}
    values |= {name: fields.size(name, default) for name, default in SIZES.items()}
    # The first released files say attention_head_dim.
    old = "attention_head_dim" if fields.has("attention_head_dim") and not fields.has("head_dim") else "head_dim"
    values |= {
        "head_dim": fields.size(old, 128),
        "layers_block_type": _read_layers(fields),
        "conv_kernel": fields.integer("conv_kernel", 4, least=2, most=SIZE),
        "layer_norm_epsilon": fields.number("layer_norm_epsilon", 1e-5, above=0, most=1),
        "time_step_limit": read_limits(fields),
        "initializer_range": fields.number("initializer_range", 0.02, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=values["vocab_size"]),
    }
    flags = {"use_bias": False, "use_conv_bias": True, "mlp_bias": False, "tie_word_embeddings": False}
    values |= {name: fields.flag(name, default) for name, default in flags.items()}
    if EXPERTS_LAYER in values["layers_block_type"]:
        values |= _read_experts(fields)
    return make(Config, values, fields)


def _read_experts(fields: Fields) -> dict[str, Any]:
    # Of another number some implementations make the shared experts that much wider, and transformers does not.
    fields.serve("n_shared_experts", 1, default=1)
    experts = fields.integer("n_routed_experts", 8, least=1, most=MOST_EXPERTS)
    groups = fields.integer("n_group", 1, least=1, most=experts)
    values: dict[str, Any] = {name: fields.size(name, default) for name, default in EXPERT_SIZES.items()}
    return values | {
        "n_routed_experts": experts,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", 2, least=1, most=experts),
        "moe_latent_size": fields.size("moe_latent_size") if fields.has("moe_latent_size") else None,
        "n_group": groups,
        "topk_group": fields.integer("topk_group", 1, least=1, most=groups),
        "norm_topk_prob": fields.flag("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0),
    }


def _read_layers(fields: Fields) -> tuple[str, ...]:
    """The kinds of the layers, from a list of names or from a text with a letter for each."""
    if fields.has("layers_block_type"):
        given, kinds, name = fields.texts("layers_block_type"), BLOCKS, "layers_block_type"
    else:
        given, kinds, name = tuple(fields.text("hybrid_override_pattern")), PATTERN, "hybrid_override_pattern"
    if not given or not {*given} <= {*kinds}:
        fields.fail(name, f"made of {', '.join(map(repr, kinds))}, and not empty")
    count = fields.size("num_hidden_layers") if fields.has("num_hidden_layers") else len(given)
    if count != len(given):
        raise fields.error(f"{name} has {len(given)} layers, num_hidden_layers is {count}")
    return tuple(kinds[each] for each in given)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config.source)
    eos, _ = data.pop("eos_token_ids"), data.pop("stacked_experts")
    for name in () if config.source.has_experts else EXPERT_FACTS:
        del data[name]
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **data,
        "layers_block_type": list(config.source.layers_block_type),
        "num_hidden_layers": len(config.layers),
        "time_step_limit": write_limits(config.source.time_step_limit),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "eos_token_id": eos_json(eos),
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A head that is there counts, whatever the configuration says; and whether experts are stacked."""
    source = untied_if_stored(config, names).source
    return dataclasses.replace(source, stacked_experts=bool(are_stacked(names, _prefix(names)))).model()


def _prefix(names: Collection[str]) -> str:
    """What tensors' names begin with: released files say "backbone", newer ones of transformers "model"."""
    return "model." if any(name.startswith("model.") for name in names) else "backbone."


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    model = _prefix(names)
    found = {"embed_tokens": Source(f"{model}embeddings.weight"), "norm": Source(f"{model}norm_f.weight")}
    if not config.tied:
        found["lm_head"] = Source("lm_head.weight")
    source = config.source
    for number, kind in enumerate(source.layers_block_type):
        layer = placed(_parts(source, kind, config.layers[number]), "", "mixer.")
        layer["before_mixers" if kind in (MAMBA, ATTENTION) else "before_mlp"] = Source("norm.weight")
        found |= placed(layer, f"layers.{number}.", f"{model}layers.{number}.")
    return found


def _parts(source: Config, kind: str, layer: LayerConfig) -> dict[str, Source]:
    """The tensors of a layer without its norm."""
    if kind == MLP_LAYER:
        return placed(mlp_tensors(layer.feed_forward, ("up", "down")), "mlp.", "")
    if kind == EXPERTS_LAYER:
        given = {"stacked": source.stacked_experts, "parts": ("up_proj", "down_proj")}
        return placed(experts_tensors(source.experts, source.hidden_size, **given), "mlp.", "")
    mixer = layer.mixers[0]
    return placed(mamba2_tensors(mixer) if kind == MAMBA else attention_tensors(mixer), "mixers.0.", "")
