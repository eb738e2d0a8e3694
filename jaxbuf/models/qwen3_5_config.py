"""The configuration of a Qwen3.5 text model, read from a Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from jaxbuf.models.fields import SIZE, Fields
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.shown import shown

type LayerType = Literal["linear_attention", "full_attention"]

LAYER_TYPES = ("linear_attention", "full_attention")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
SERVED = "dense text models of the Qwen3.5 architecture"
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
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

# So that nothing overflows when a program is made for sizes that nobody means. Of each array, the fields of its first
# dimension are multiplied, and the last field is its last dimension; q | gate and q | k | v are a few of them together.
MOST_LAYERS, MOST_ROWS, MOST_ELEMENTS = 1024, 2**28, 2**40
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
    ("linear_num_key_heads", "linear_key_head_dim", "hidden_size"),
    ("linear_num_value_heads", "linear_value_head_dim", "hidden_size"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of a Qwen3.5 text model, under the names that its `config.json` uses.

    Attributes that are not in a checkpoint under their own name: `rope_theta` and `partial_rotary_factor` (nested in
    `rope_parameters` there), and `eos_token_ids` (`eos_token_id`, a number or a list).

    Raises:
      ValueError: A value of another type or out of range, head counts that do not divide, a layer type that is not
        known, more than 1,024 layers, or sizes whose arrays nobody could hold (2**40 elements).
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
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many} ({getattr(self, many)}) must be a multiple of {few} ({getattr(self, few)})")
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
        for names in ARRAYS:
            sizes = [getattr(self, name) for name in names]
            if math.prod(sizes[:-1]) > MOST_ROWS or math.prod(sizes) > MOST_ELEMENTS:
                product = " times ".join(f"{name} ({size})" for name, size in zip(names, sizes, strict=True))
                raise ValueError(f"{product} must be at most 2**40 elements in at most 2**28 rows")

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
          ValueError: Another model_type, a field that is missing, of another type or out of range, or one whose value
            this forward does not compute.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a configuration must be a mapping of names to values, got {shown(data)}")
        return read_config(Fields(data))

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


def read_config(fields: Fields) -> Config:
    """As `Config.from_dict`; where the fields are those of a file, errors name it.

    Raises:
      CheckpointError: A field of the file is missing, of another type or out of range.
      ValueError: The architecture or a setting is not served; or, where no file is known, any of the above.
    """
    model_type = fields.serve("model_type", *MODEL_TYPES, words=f" (jaxbuf serves {SERVED})")
    text = fields.nested("text_config") if model_type == "qwen3_5" else fields
    text.serve("hidden_act", "silu", default="silu")
    text.serve("attention_bias", False, default=False)
    text.serve("attn_output_gate", True, default=True)
    text.require(*NEEDED, ("layer_types", "num_hidden_layers"))
    rope = next((text.nested(name) for name in ("rope_parameters", "rope_scaling") if text.has(name)), text)
    if rope is not text:
        rope.serve("rope_type" if "rope_type" in rope.values else "type", "default", default="default")
    values = {
        **{name: text.size(name) for name in NEEDED},
        "layer_types": _layer_types(text),
        "linear_conv_kernel_dim": text.size("linear_conv_kernel_dim", 4),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-6, **RANGES["rms_norm_eps"]),
        "max_position_embeddings": text.size("max_position_embeddings", 32_768),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "mtp_num_hidden_layers": text.integer("mtp_num_hidden_layers", 0, least=0, most=1),
        "initializer_range": text.number("initializer_range", 0.02, **RANGES["initializer_range"]),
        "eos_token_ids": text.token_ids("eos_token_id", vocab_size=text.size("vocab_size")),
    }
    for name, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 0.25)):
        values[name] = (rope if name in rope.values else text).number(name, default, **RANGES[name])
    try:
        return Config(**values)
    except ValueError as error:  # of fields that do not fit together
        raise text.error(str(error)) from error


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
