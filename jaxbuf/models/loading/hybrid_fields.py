"""What Qwen's hybrid families have in common: Gated DeltaNet layers, gated softmax layers, and an MTP layer."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models.config import FeedForward, LayerConfig, Mixer, ModelConfig, Norm
from jaxbuf.models.families import Source
from jaxbuf.models.loading.common_fields import (
    check_multiple,
    eos_json,
    find_number,
    model_config,
    read_rope,
    read_usual,
)
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import decoder_tensors, placed
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.mixers.gated_delta_net import GatedDeltaNet
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.shown import shown

type LayerType = Literal["linear_attention", "full_attention"]

LAYER_TYPES = ("linear_attention", "full_attention")
NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
RANGES = {
    "rms_norm_eps": {"above": 0, "most": 1},
    "rope_theta": {"above": 0},
    "partial_rotary_factor": {"above": 0, "most": 1},
    "initializer_range": {"least": 0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """The static facts of a hybrid model, under the names that its config.json uses; a family adds its feed-forward's.

    Attributes that are not in a checkpoint under their own name: `rope_theta` and `partial_rotary_factor` (nested in
    `rope_parameters` there), and `eos_token_ids` (`eos_token_id`, a number or a list).

    Raises:
      ValueError: A value of another type or out of range, head counts that do not divide, a layer type that is not
        known, more than 1,024 layers, or sizes whose arrays nobody could hold (2**40 elements).
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[LayerType, ...]
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 0
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    ARRAYS: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("vocab_size", "hidden_size"),
        ("num_attention_heads", "head_dim", "hidden_size"),
        ("linear_num_key_heads", "linear_key_head_dim", "hidden_size"),
        ("linear_num_value_heads", "linear_value_head_dim", "hidden_size"),
        ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
        ("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
        ("linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim"),
    )

    def __post_init__(self):
        own = Fields(vars(self))
        for field in dataclasses.fields(self):
            if field.type is int and field.name != "mtp_num_hidden_layers":
                own.size(field.name)
            elif field.type is float:
                own.number(field.name, **RANGES[field.name])
            elif field.type is bool:
                own.flag(field.name)
        own.integer("mtp_num_hidden_layers", least=0, most=1)
        own.token_ids("eos_token_ids", vocab_size=SIZE + 1)
        own.texts("layer_types")
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")
        if not self.layer_types or not set(self.layer_types) <= set(LAYER_TYPES):
            found = shown(self.layer_types)
            raise ValueError(f"layer_types must be a non-empty list out of {LAYER_TYPES}, got {found}")
        if len(self.layer_types) > MOST_LAYERS:
            raise ValueError(f"layer_types must have at most {MOST_LAYERS} entries, got {len(self.layer_types)}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) times partial_rotary_factor ({self.partial_rotary_factor}) must be "
                f"an even number of channels, got {self.rotary_dim}"
            )
        check_arrays(vars(self), self.ARRAYS)

    @property
    def spec(self) -> RecurrenceSpec:
        """The recurrence of the linear layers."""
        return RecurrenceSpec(
            heads=self.linear_num_value_heads,
            key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            decay="head",
            delta=True,
        )

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def build(self, family: str, feed_forwards: Sequence[FeedForward], mtp: FeedForward) -> ModelConfig:
        """What the decoder is built from.

        Args:
          family: The name of its module.
          feed_forwards: Of each layer.
          mtp: Of the MTP layer, if there is one.
        """
        norm = Norm(self.rms_norm_eps, offset=1.0)
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=Rotary(self.rotary_dim, self.rope_theta),
            norm=norm,
            gate=True,
        )
        mixers: dict[str, Mixer] = {
            "linear_attention": GatedDeltaNet(self.spec, self.linear_conv_kernel_dim, self.rms_norm_eps),
            "full_attention": attention,
        }
        pairs = zip(self.layer_types, feed_forwards, strict=True)
        layers = tuple(LayerConfig((mixers[kind],), feed_forward, norm) for kind, feed_forward in pairs)
        predicting = LayerConfig((attention,), mtp, norm) if self.mtp_num_hidden_layers else None
        return model_config(family, self, layers, norm, mtp=predicting)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a flat `config.json`."""
        data = dataclasses.asdict(self)
        theta, factor = data.pop("rope_theta"), data.pop("partial_rotary_factor")
        eos = data.pop("eos_token_ids")
        return data | {
            "layer_types": list(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor},
            "eos_token_id": eos_json(eos),
        }


def read_hybrid(text: Fields, needed: Sequence[str], *, tied: bool) -> dict[str, Any]:
    """The fields of a hybrid model.

    Args:
      text: The text model's.
      needed: Names of sizes that the family needs besides.
      tied: What counts as `tie_word_embeddings`, which may stand outside of these fields.
    """
    text.serve("hidden_act", "silu", default="silu")
    text.serve("attention_bias", False, default=False)
    text.serve("attn_output_gate", True, default=True)
    text.require(*NEEDED, *needed, ("layer_types", "num_hidden_layers"))
    values = {
        **{name: text.size(name) for name in (*NEEDED, *needed)},
        "layer_types": _layer_types(text),
        "linear_conv_kernel_dim": text.size("linear_conv_kernel_dim", 4),
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": text.integer("mtp_num_hidden_layers", 0, least=0, most=1),
        **read_usual(text, eps=1e-6, max_length=32_768),
    }
    values["rope_theta"], _ = read_rope(text, scalings=False)
    values["partial_rotary_factor"] = find_number(
        text, "partial_rotary_factor", 0.25, **RANGES["partial_rotary_factor"]
    )
    return values


def _layer_types(text: Fields) -> tuple[LayerType, ...]:
    if not text.has("layer_types"):
        interval = text.size("full_attention_interval", 4)
        layers = range(1, text.integer("num_hidden_layers", least=1, most=MOST_LAYERS) + 1)
        return tuple("linear_attention" if layer % interval else "full_attention" for layer in layers)
    given = cast(tuple[LayerType, ...], text.texts("layer_types"))  # the configuration checks which
    count = text.size("num_hidden_layers") if "num_hidden_layers" in text.values else len(given)
    if count != len(given):
        raise text.error(f"layer_types has {len(given)} entries, num_hidden_layers is {count}")
    return given


def stored_facts(source: Hybrid, names: Collection[str]) -> dict[str, Any]:
    """What the names of the tensors say: a head or an MTP layer that is there counts, whatever the configuration."""
    mtp = 1 if any(name.startswith("mtp.") for name in names) else source.mtp_num_hidden_layers
    tied = source.tie_word_embeddings and "lm_head.weight" not in names
    return {"tie_word_embeddings": tied, "mtp_num_hidden_layers": mtp}


def hybrid_tensors(
    config: ModelConfig,
    names: Collection[str],
    layer_tensors: Callable[[LayerConfig], Mapping[str, Source]],
    mtp_tensors: Callable[[LayerConfig], Mapping[str, Source]],
) -> dict[str, Source]:
    """All tensors, where a vision-language checkpoint has the text model's inside of it, too.

    Args:
      config, names: As families get them.
      layer_tensors, mtp_tensors: Of a layer and of the MTP layer, as `decoder_tensors` takes them.
    """
    inside = any(name.startswith("model.language_model.") for name in names)
    found = decoder_tensors(config, layer_tensors, "model.language_model." if inside else "model.")
    if config.mtp is not None:
        parts = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found |= {f"mtp.{part}": Source(f"mtp.{part}.weight") for part in parts}
        found |= placed(mtp_tensors(config.mtp), "mtp.layers.0.", "mtp.layers.0.")
    return found


def linear_tensors(projections: Mapping[str, Source]) -> dict[str, Source]:
    """The tensors of a Gated DeltaNet layer's mixer, with these of its projections."""
    found = {part: Source(f"{part}.weight") for part in ("norm", "out_proj")}
    found |= {part: Source(part) for part in ("A_log", "dt_bias")}
    found["conv1d"] = Source("conv1d.weight", depthwise=True)
    return placed({**projections, **found}, "mixers.0.", "linear_attn.")


# Qwen3.5's projections; Qwen3-Next has two of them in one tensor.
PROJECTIONS = {part: Source(f"{part}.weight") for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}
