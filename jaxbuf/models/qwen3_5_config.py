"""The configuration of a Qwen3.5 text model, read from a Hugging Face `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxbuf.recurrence.spec import RecurrenceSpec

type LayerType = Literal["linear_attention", "full_attention"]

LAYER_TYPES = ("linear_attention", "full_attention")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Qwen3.5 text model, under the names that its `config.json` uses.

    Attributes that are not in a checkpoint under their own name: `rope_theta` and `partial_rotary_factor` (nested in
    `rope_parameters` there), and `eos_token_ids` (`eos_token_id`, a number or a list).

    Raises:
      ValueError: A size below 1, head counts that do not divide, or a layer type that is not known.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
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

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "mtp_num_hidden_layers" and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.mtp_num_hidden_layers not in (0, 1):
            raise ValueError(f"mtp_num_hidden_layers must be 0 or 1, got {self.mtp_num_hidden_layers}")
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many} ({getattr(self, many)}) must be a multiple of {few} ({getattr(self, few)})")
        if not self.layer_types or not set(self.layer_types) <= set(LAYER_TYPES):
            raise ValueError(f"layer_types must be a non-empty list out of {LAYER_TYPES}, got {self.layer_types}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) times partial_rotary_factor ({self.partial_rotary_factor}) must be "
                f"an even number of channels, got {self.rotary_dim}"
            )

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

    @property
    def convolution_channels(self) -> int:
        """Channels of q, k and v together."""
        spec = self.spec
        return 2 * spec.key_heads * spec.key_dim + spec.heads * spec.value_dim

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Config":
        """Reads a `config.json`: text only (`qwen3_5_text`, flat) or vision-language (`qwen3_5`, the text model only).

        Raises:
          ValueError: Another model_type, a field that is missing, or one whose value this forward does not compute.
        """
        model_type = data.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type must be one of {MODEL_TYPES}, got {model_type!r}")
        text, tied = data, data.get("tie_word_embeddings", False)
        if model_type == "qwen3_5":
            text = data.get("text_config")
            if not isinstance(text, Mapping):
                raise ValueError(f'a config of model_type "qwen3_5" must have a text_config, got {text!r}')
        rope = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
        rope |= {name: text[name] for name in rope if name in text}
        rope |= text.get("rope_parameters") or text.get("rope_scaling") or {}
        computed = {
            "hidden_act": (text.get("hidden_act", "silu"), "silu"),
            "attention_bias": (text.get("attention_bias", False), False),
            "attn_output_gate": (text.get("attn_output_gate", True), True),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        }
        for name, (found, expected) in computed.items():
            if found != expected:
                raise ValueError(f"{name} must be {expected!r}, got {found!r}")
        values = {
            field.name: text[field.name]
            for field in dataclasses.fields(cls)
            if field.name in text and field.name not in ("layer_types", "tie_word_embeddings", *rope)
        }
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in (*values, "layer_types")
        ]
        if "layer_types" not in text and "num_hidden_layers" not in text:
            missing.append("layer_types or num_hidden_layers")
        if missing:
            raise ValueError(f"the configuration lacks {', '.join(missing)}")
        return cls(
            **values,
            layer_types=_layer_types(text),
            rope_theta=float(rope["rope_theta"]),
            partial_rotary_factor=float(rope["partial_rotary_factor"]),
            tie_word_embeddings=bool(tied),
            eos_token_ids=token_ids(text.get("eos_token_id")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` of a text-only checkpoint; `from_dict` reads it back."""
        data = dataclasses.asdict(self)
        theta, factor = data.pop("rope_theta"), data.pop("partial_rotary_factor")
        eos = data.pop("eos_token_ids")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **data,
            "layer_types": list(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor},
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        }


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    given = text.get("layer_types")
    if given is None:
        layers, interval = range(1, text["num_hidden_layers"] + 1), text.get("full_attention_interval", 4)
        return tuple("linear_attention" if layer % interval else "full_attention" for layer in layers)
    count = text.get("num_hidden_layers", len(given))
    if count != len(given):
        raise ValueError(f"layer_types has {len(given)} entries, num_hidden_layers is {count}")
    return tuple(given)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` entry, which may be a number, a list or absent, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
