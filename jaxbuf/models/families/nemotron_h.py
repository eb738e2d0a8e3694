"""Nemotron-H and dense Nemotron 3: a layer is a Mamba-2 mixer, softmax attention without positions, or an MLP."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from jaxbuf.models.config import LayerConfig, ModelConfig, Norm, SquaredReluMLP
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
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import attention_tensors, mamba2_tensors, mlp_tensors, placed
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.mixers.mamba2_mixer import Mamba2
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.shown import shown

MODEL_TYPES = ("nemotron_h",)
SERVED = "Nemotron-H and dense Nemotron 3 text models"
IGNORED = ("mtp.*",)  # layers that predict further tokens, which transformers does not read either
MAMBA, ATTENTION, MLP_LAYER = "linear_attention", "full_attention", "mlp"
# What hybrid_override_pattern has for each kind of layer, and the names of layers_block_type, old ones among them.
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP_LAYER, "E": "moe"}
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

    `eos_token_ids` is `eos_token_id` there, and `layers_block_type` may be `hybrid_override_pattern`.

    Raises:
      ValueError: Heads that do not divide, a kind of layer that is not served, or sizes whose arrays nobody could hold.
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

    def __post_init__(self):
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        check_multiple(self, "mamba_num_heads", "n_groups")
        if "moe" in self.layers_block_type:
            raise ValueError('layers_block_type has layers of experts ("moe"), which are not served yet')
        if not self.layers_block_type or not {*self.layers_block_type} <= {MAMBA, ATTENTION, MLP_LAYER}:
            found = shown(self.layers_block_type)
            raise ValueError(f"layers_block_type must be a list out of {tuple(BLOCKS)}, got {found}")
        if len(self.layers_block_type) > MOST_LAYERS:
            raise ValueError(f"there must be at most {MOST_LAYERS} layers, got {len(self.layers_block_type)}")
        if self.layers_block_type.count(MLP_LAYER) == len(self.layers_block_type):
            raise ValueError("a layer at least must be a Mamba-2 or an attention layer, all are MLPs")
        check_arrays(vars(self), ARRAYS)

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
    return make(Config, values, fields)


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
    eos = data.pop("eos_token_ids")
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


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    # Released files say "backbone", newer ones of transformers "model".
    model = "model." if any(name.startswith("model.") for name in names) else "backbone."
    found = {"embed_tokens": Source(f"{model}embeddings.weight"), "norm": Source(f"{model}norm_f.weight")}
    if not config.tied:
        found["lm_head"] = Source("lm_head.weight")
    source = config.source
    for number, kind in enumerate(source.layers_block_type):
        if kind == MLP_LAYER:
            parts = placed(mlp_tensors(config.layers[number].feed_forward, ("up", "down")), "mlp.", "")
        else:
            mixer = config.layers[number].mixers[0]
            parts = placed(mamba2_tensors(mixer) if kind == MAMBA else attention_tensors(mixer), "mixers.0.", "")
        layer = placed(parts, "", "mixer.")
        layer["before_mlp" if kind == MLP_LAYER else "before_mixers"] = Source("norm.weight")
        found |= placed(layer, f"layers.{number}.", f"{model}layers.{number}.")
    return found
