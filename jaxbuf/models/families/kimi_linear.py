"""Kimi Linear: Kimi Delta Attention, and latent attention without positions, with experts behind both."""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any

from jaxbuf.models.config import RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import make
from jaxbuf.models.loading.fields import SIZE, Fields, check_arrays
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

MODEL_TYPES = ("kimi_linear",)
SERVED = "Kimi Linear text models"
IGNORED = ()
GATES = {"decay": "f_a_proj", "decay_up": "f_b_proj", "gate": "g_a_proj", "gate_up": "g_b_proj"}
SPARSE = "block_sparse_moe."  # what the names of experts begin with
# What transformers takes where these are absent.
DEFAULTS = {
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1_048_576,
}
# What linear_attn_config calls sizes of the recurrent layers, and what transformers takes where they are absent.
LINEAR_SIZES = {"linear_num_heads": ("num_heads", 32), "linear_head_dim": ("head_dim", 128)}


@dataclasses.dataclass(frozen=True)
class Config(LatentHybrid):
    """The static facts of a Kimi Linear model, see `LatentHybrid`.

    The fields that begin with "linear_", and the kinds of the layers, are in `linear_attn_config` in released files.
    """

    q_lora_rank: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.q_lora_rank is not None:
            widest = ("num_attention_heads", "qk_nope_head_dim", "q_lora_rank")
            check_arrays(vars(self), (("q_lora_rank", "hidden_size"), widest))

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        recurrent = KimiDeltaAttention(
            self.spec, self.linear_conv_kernel_dim, self.rms_norm_eps, rank=self.linear_head_dim, wide_rate=True
        )
        attention = LatentAttention(
            heads=self.num_attention_heads,
            key_dim=self.qk_nope_head_dim,
            shared_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            rank=self.kv_lora_rank,
            rotary=None,
            query_rank=self.q_lora_rank,
            bias=self.attention_bias,
        )
        return self.build("kimi_linear", {LINEAR: recurrent, FULL: attention})


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("mla_use_nope", True, default=True)
    fields.serve("moe_router_activation_func", "sigmoid", default="sigmoid")
    fields.serve("moe_layer_freq", 1, default=1)
    linear = fields.nested("linear_attn_config") if fields.has("linear_attn_config") else Fields({}, fields.file)
    values = read_latent_hybrid(fields, DEFAULTS, partial(_read_layers, linear))
    for name, (nested, default) in LINEAR_SIZES.items():
        values[name] = linear.size(nested) if nested in linear.values else fields.size(name, default)
    taps = "short_conv_kernel_size"
    place, name = (linear, taps) if taps in linear.values else (fields, "linear_conv_kernel_dim")
    values["linear_conv_kernel_dim"] = place.integer(name, 4, least=2, most=SIZE)
    values["q_lora_rank"] = fields.size("q_lora_rank") if fields.has("q_lora_rank") else None
    return make(Config, values, fields)


def _read_layers(linear: Fields, count: int) -> tuple[str, ...]:
    """The kinds of so many layers, of which linear_attn_config has numbers from 1 on; without them as transformers has
    it."""
    lists = {"kda_layers": LINEAR, "full_attn_layers": FULL}
    if not all(name in linear.values for name in lists):
        return tuple(FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count))
    kinds = {layer: kind for name, kind in lists.items() for layer in linear.integers(name, (), most=count)}
    if sum(len(linear.values[name]) for name in lists) != count or {*kinds} != {*range(1, count + 1)}:
        raise linear.error(
            f"{linear.path}kda_layers and {linear.path}full_attn_layers must have each layer from 1 to {count} "
            "(num_hidden_layers) once"
        )
    return tuple(kinds[layer] for layer in range(1, count + 1))


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **config.source.to_dict(),
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
    }


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    return config


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    """Transformers writes the MLPs of layers without experts as if they were some, and reads both."""

    def of_layer(layer: LayerConfig) -> dict[str, Source]:
        mixer: Any = layer.mixers[0]
        recurrent = mixer.kind == RECURRENCE
        mixing = kda_tensors(mixer, GATES, "o_proj") if recurrent else latent_tensors(mixer, "o_proj")
        given = {"hidden": config.hidden_size, "parts": ("w1", "w3", "w2")}
        return layer_tensors(layer, mixing, "self_attn.", SPARSE, **given)

    found = decoder_tensors(config, of_layer)
    for path, source in found.items():
        renamed = source.first.replace(".mlp.", f".{SPARSE}") if isinstance(source.stored, str) else ""
        if renamed in names:
            found[path] = Source(renamed)
    return found
