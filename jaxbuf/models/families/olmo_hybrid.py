"""Olmo Hybrid: Gated DeltaNet with negative eigenvalues, and softmax attention with norms over all heads at once.

Recurrent layers have their norms in front of the mixer and of the MLP, softmax layers behind them.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxbuf.attention.rotary import Rotary, Scaling
from jaxbuf.models.config import MLP, RECURRENCE, LayerConfig, ModelConfig, Norm
from jaxbuf.models.families import Rows, Source
from jaxbuf.models.loading.common_fields import (
    SOFTMAX_ARRAYS,
    check_multiple,
    check_turned,
    find_rope,
    make,
    model_config,
    read_attention_heads,
    read_rope,
    read_usual,
    softmax_json,
    untied_if_stored,
)
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import attention_tensors, decoder_tensors, mlp_tensors, placed
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.models.mixers.gated_delta_net import GatedDeltaNet
from jaxbuf.recurrence.spec import RecurrenceSpec

MODEL_TYPES = ("olmo_hybrid",)
SERVED = "Olmo Hybrid text models"
IGNORED = ()
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
LINEAR, FULL = "linear_attention", "full_attention"
GATED_NORM_EPS = 1e-5  # of the norm behind the recurrence, which no configuration gives
# Names of norms, and others that files may have.
NORMS = {
    "before_mixers": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "after_mixers": "post_attention_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
OTHER_NAMES = {
    "before_mixers": "attention_layer_norm",
    "before_mlp": "feedforward_layer_norm",
    "after_mixers": "feedforward_layer_norm",
}
ARRAYS = (
    *SOFTMAX_ARRAYS,
    ("linear_num_key_heads", "linear_key_head_dim", "hidden_size"),
    ("linear_num_value_heads", "linear_value_head_dim", "hidden_size"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
    ("linear_num_value_heads", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The static facts of an Olmo Hybrid model, under the names that its config.json uses.

    `rope_theta` and `scaling` are nested in `rope_parameters` there, and `eos_token_ids` is `eos_token_id`. Without
    `rope_theta` queries and keys are not turned.

    Raises:
      ValueError: Head counts that do not divide, an odd head_dim where channels are turned, a layer type that is not
        known, or sizes whose arrays nobody could hold.
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
    layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = 10_000.0
    scaling: Scaling | None = None
    max_position_embeddings: int = 65_536
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")
        if self.rope_theta is not None:
            check_turned(self)
        check_arrays(vars(self), ARRAYS)

    @property
    def spec(self) -> RecurrenceSpec:
        """The recurrence of the linear layers."""
        sizes = self.linear_num_key_heads, self.linear_key_head_dim, self.linear_value_head_dim
        return RecurrenceSpec(self.linear_num_value_heads, *sizes, decay="head", delta=True)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        norm, mlp = Norm(self.rms_norm_eps), MLP(self.intermediate_size)
        recurrent = GatedDeltaNet(
            self.spec,
            self.linear_conv_kernel_dim,
            GATED_NORM_EPS,
            negative_eigenvalues=self.linear_allow_neg_eigval,
        )
        attention = Attention(
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rotary=None if self.rope_theta is None else Rotary(self.head_dim, self.rope_theta, self.scaling),
            norm=norm,
            norm_all_heads=True,
            bias=self.attention_bias,
        )
        layers = {
            LINEAR: LayerConfig((recurrent,), mlp, before=norm),
            FULL: LayerConfig((attention,), mlp, before=None, after=norm),
        }
        return model_config("olmo_hybrid", self, tuple(layers[kind] for kind in self.layer_types), norm)


def read_config(fields: Fields) -> ModelConfig:
    fields.serve("hidden_act", "silu", default="silu")
    fields.require(*NEEDED, ("layer_types", "num_hidden_layers"))
    values: dict[str, Any] = {name: fields.size(name) for name in NEEDED}
    values |= read_attention_heads(fields) | _read_linear_heads(fields)
    values |= read_usual(fields, eps=1e-6, max_length=65_536)
    values |= {
        "layer_types": _read_layers(fields),
        "linear_conv_kernel_dim": fields.integer("linear_conv_kernel_dim", 4, least=2, most=SIZE),
        "linear_allow_neg_eigval": fields.flag("linear_allow_neg_eigval", True),
    }
    values |= {name: fields.flag(name, False) for name in ("tie_word_embeddings", "attention_bias")}
    turned = _has_positions(fields)
    values["rope_theta"], values["scaling"] = read_rope(fields) if turned else (None, None)
    return make(Config, values, fields)


def _read_linear_heads(fields: Fields) -> dict[str, int]:
    """Sizes of the recurrent layers; null counts as absent."""

    def size(name: str, default: int) -> int:
        return fields.size(name) if fields.has(name) else default

    heads = fields.size("num_attention_heads")
    keys = size("linear_num_key_heads", heads)
    key_dim = size("linear_key_head_dim", max(1, 3 * fields.size("hidden_size") // (4 * keys)))
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": size("linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": size("linear_value_head_dim", 2 * key_dim),
    }


def _read_layers(fields: Fields) -> tuple[str, ...]:
    if not fields.has("layer_types"):
        count = fields.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
        kinds = [FULL if layer % 4 == 0 else LINEAR for layer in range(1, count + 1)]
        return tuple(kinds if FULL in kinds else [*kinds[:-1], FULL])
    given = fields.texts("layer_types")
    count = fields.size("num_hidden_layers", len(given))
    if not 0 < len(given) <= MOST_LAYERS or len(given) != count or not {*given} <= {LINEAR, FULL}:
        layers = f"{count} (num_hidden_layers)" if count <= MOST_LAYERS else f"at most {MOST_LAYERS}"
        fields.fail("layer_types", f"a list of {layers} out of {LINEAR!r} and {FULL!r}")
    return given


def _has_positions(fields: Fields) -> bool:
    """A base that is null, and not absent, says that nothing is turned: so transformers reads it."""
    places = find_rope(fields), fields
    place = next((place for place in places if "rope_theta" in place.values), None)
    return place is None or place.values["rope_theta"] is not None


def config_json(config: ModelConfig) -> dict[str, Any]:
    layers = list(config.source.layer_types)
    kinds: dict[str, Any] = {"layer_types": layers, "num_hidden_layers": len(layers)}
    return softmax_json(config, "OlmoHybridForCausalLM", **kinds, hidden_act="silu")


as_stored = untied_if_stored


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    """Norms have either of two names in files: transformers renames some as it reads them, and again as it writes."""
    found = decoder_tensors(config, _layer_tensors)
    for path, source in found.items():
        part = path.split(".")[-1]
        if part in OTHER_NAMES:
            other = source.first.replace(NORMS[part], OTHER_NAMES[part])
            found[path] = Source(other) if other in names else source
    return found


def _layer_tensors(layer: LayerConfig) -> dict[str, Source]:
    mixer, mlp = layer.mixers[0], placed(mlp_tensors(layer.feed_forward), "mlp.", "mlp.")
    if mixer.kind == RECURRENCE:
        parts = ("before_mixers", "before_mlp")
        mixing = placed(_linear_tensors(mixer.spec), "mixers.0.", "linear_attn.")  # pyright: ignore[reportAttributeAccessIssue]
    else:
        parts = ("after_mixers", "after_mlp")
        mixing = placed(attention_tensors(mixer), "mixers.0.", "self_attn.")
    return mixing | mlp | {part: Source(f"{NORMS[part]}.weight") for part in parts}


def _linear_tensors(spec: RecurrenceSpec) -> dict[str, Source]:
    keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
    sizes = {"q": keys, "k": keys, "v": values}
    names = {
        "in_proj_z": "g_proj",
        "in_proj_b": "b_proj",
        "in_proj_a": "a_proj",
        "norm": "o_norm",
        "out_proj": "o_proj",
    }
    return {
        "in_proj_qkv": Source(tuple(Rows(f"{part}_proj.weight", size) for part, size in sizes.items())),
        "conv1d": Source(tuple(Rows(f"{part}_conv1d.weight", size) for part, size in sizes.items()), depthwise=True),
        **{part: Source(part) for part in ("A_log", "dt_bias")},
        **{path: Source(f"{name}.weight") for path, name in names.items()},
    }
