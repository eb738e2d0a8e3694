"""What the config.json of several families say in the same way: positions, time steps, tokens that end a text, a tied
head."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

from jaxbuf.attention.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling, yarn_amplitude
from jaxbuf.models.config import LayerConfig, ModelConfig, Norm
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.mixers.mamba2_mixer import Mamba2
from jaxbuf.recurrence.spec import RecurrenceSpec

SOFTMAX_ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)
# Sizes of a Mamba-2 mixer, and what transformers takes where they are absent.
MAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
MAMBA_ARRAYS = (
    ("mamba_n_heads", "mamba_d_head", "hidden_size"),
    ("mamba_n_groups", "mamba_d_state", "hidden_size"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_conv"),
)
CONTEXT = "original_max_position_embeddings"
# Of stretched positions, by their rope_type: names in config.json, and those of the scaling.
SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high", CONTEXT: "context"},
    "yarn": {
        "factor": "factor",
        CONTEXT: "context",
        "attention_factor": "amplitude",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "truncate": "whole",
    },
}


def find_rope(fields: Fields) -> Fields:
    """Where the positions are described: rope_scaling, which older files have and which counts where both are there,
    rope_parameters, or the configuration itself."""
    return next((fields.nested(name) for name in ("rope_scaling", "rope_parameters") if fields.has(name)), fields)


def find_number(fields: Fields, name: str, default: float, **bounds: float) -> float:
    """A number of the positions: where they are described, in rope_parameters, or in the configuration itself."""
    places = [find_rope(fields)]
    places += [fields.nested("rope_parameters")] if fields.has("rope_parameters") else []
    place = next((place for place in places if name in place.values), fields)
    return place.number(name, default, **bounds)


def read_rope(fields: Fields, *, scalings: bool = True, theta: float = 10_000.0) -> tuple[float, Scaling | None]:
    """The base of the positions' frequencies, and how they are stretched.

    Args:
      fields: The configuration.
      scalings: Whether the family may stretch them: as Llama 3 does, linearly, or by YaRN.
      theta: The base where none is given.

    Raises:
      CheckpointError: A number is missing, of another type or out of range.
      ValueError: Positions of a kind that is not served.
    """
    theta, rope = find_number(fields, "rope_theta", theta, above=0), find_rope(fields)
    if rope is fields:
        return theta, None
    kinds = ("default", *SCALINGS) if scalings else ("default",)
    kind = rope.serve("rope_type" if "rope_type" in rope.values else "type", *kinds, default="default")
    if kind == "default":
        return theta, None
    return theta, SCALINGS[kind](fields, rope, theta)


def _read_linear(fields: Fields, rope: Fields, theta: float) -> Scaling:
    return LinearScaling(rope.number("factor", above=0))


def _read_llama3(fields: Fields, rope: Fields, theta: float) -> Scaling:
    rope.require(*SCALING["llama3"])
    factor, low, high = (rope.number(f"{name}factor", above=0) for name in ("", "low_freq_", "high_freq_"))
    if low >= high:
        raise rope.error(f"low_freq_factor ({low}) must be below high_freq_factor ({high})")
    return Llama3Scaling(factor, low, high, rope.size(CONTEXT))


def _read_yarn(fields: Fields, rope: Fields, theta: float) -> Scaling:
    """Null counts as absent here, as transformers has it; but a null factor is the ratio of the two contexts."""
    rope.require("factor")
    places = fields, rope  # the configuration's own counts first
    context = next((place.size(CONTEXT) for place in places if place.has(CONTEXT)), None)
    if context is None:
        context = fields.size("max_position_embeddings")
    factor = rope.number("factor", above=0) if rope.has("factor") else fields.size("max_position_embeddings") / context
    fast, slow = (
        rope.number(name, above=0) if rope.has(name) else default
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if slow > fast:
        raise rope.error(f"beta_slow ({slow}) must be at most beta_fast ({fast})")
    if theta <= 1:
        raise rope.error(f"rope_theta must be above 1 for rope_type 'yarn', got {theta}")
    whole = rope.flag("truncate") if rope.has("truncate") else True
    return YarnScaling(factor, context, _read_amplitude(rope, factor), fast, slow, whole)


def _read_amplitude(rope: Fields, factor: float) -> float:
    """Of YaRN: given, or by the two scales if there are both, or what the paper proposes for the factor."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor", above=0)
    scales = [rope.number(name, least=0) if rope.has(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    if all(scales):
        over, under = (yarn_amplitude(factor, scale) for scale in scales)
        return over / under
    return yarn_amplitude(factor)


SCALINGS: dict[str, Callable[[Fields, Fields, float], Scaling]] = {
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def rope_json(theta: float | None, scaling: Scaling | None = None) -> dict[str, Any]:
    """The rope_parameters that `read_rope` reads back."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    numbers = {key: getattr(scaling, name) for key, name in SCALING[scaling.kind].items()}
    return {"rope_type": scaling.kind, "rope_theta": theta, **numbers}


def eos_json(ids: tuple[int, ...]) -> int | list[int] | None:
    """The eos_token_id that `Fields.token_ids` reads back: a number, a list of several, or null."""
    return ids[0] if len(ids) == 1 else list(ids) or None


def softmax_json(config: ModelConfig, architecture: str, **more: Any) -> dict[str, Any]:
    """config.json of a family whose fields are called as there, but for `rope_theta`, `scaling` and `eos_token_ids`.

    Args:
      config: The model's.
      architecture: What transformers calls the class.
      more: Further fields, and those that are written in another way.
    """
    data = dataclasses.asdict(config.source)
    eos, theta, _ = data.pop("eos_token_ids"), data.pop("rope_theta"), data.pop("scaling")
    return {
        "architectures": [architecture],
        "model_type": config.family,
        **data,
        **more,
        "rope_parameters": rope_json(theta, config.source.scaling),
        "eos_token_id": eos_json(eos),
    }


def read_limits(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """What the time steps of a Mamba-2 mixer are clamped to, from the field of this name; without it 0 and infinity."""
    if not fields.has(name):
        return 0.0, math.inf
    limits = fields.values[name]
    if isinstance(limits, list | tuple):  # transformers writes infinity as an object, for JSON has none
        limits = [math.inf if x == {"__float__": "Infinity"} else x for x in limits]
    numbers = isinstance(limits, list | tuple) and all(type(x) in (int, float) for x in limits) and len(limits) == 2
    if not numbers or not 0 <= limits[0] <= limits[1]:
        fields.fail(name, "two numbers, the second at least the first, which is at least 0")
    return float(limits[0]), float(limits[1])


def write_limits(limits: tuple[float, float]) -> list[Any]:
    """The time_step_limit that `read_limits` reads back."""
    return [{"__float__": "Infinity"} if x == math.inf else x for x in limits]


def read_sizes(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """Sizes that must be there, num_hidden_layers among them."""
    fields.require(*names)
    layers = fields.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
    return {name: fields.size(name) for name in names} | {"num_hidden_layers": layers}


def read_usual(fields: Fields, *, eps: float, max_length: int) -> dict[str, Any]:
    """What nearly every text model says: the norms' eps and the most tokens, with these defaults, the spread of new
    weights, and the tokens that end a text."""
    return {
        "rms_norm_eps": fields.number("rms_norm_eps", eps, above=0, most=1),
        "max_position_embeddings": fields.size("max_position_embeddings", max_length),
        "initializer_range": fields.number("initializer_range", 0.02, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=fields.size("vocab_size")),
    }


def read_attention_heads(fields: Fields, *, key_value_heads: int | None = None) -> dict[str, int]:
    """num_key_value_heads and head_dim: without them as many as queries have, and the hidden size shared by those.

    Args:
      fields: With hidden_size and num_attention_heads.
      key_value_heads: What an absent num_key_value_heads counts as; null counts as None does.
    """
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    default = heads if key_value_heads is None or "num_key_value_heads" in fields.values else key_value_heads
    found = fields.size("num_key_value_heads") if fields.has("num_key_value_heads") else default
    if fields.has("head_dim"):
        return {"num_key_value_heads": found, "head_dim": fields.size("head_dim")}
    if hidden % heads:
        raise fields.error(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
    return {"num_key_value_heads": found, "head_dim": hidden // heads}


def read_mamba(fields: Fields, hidden: int) -> dict[str, Any]:
    """The fields of a Mamba-2 mixer that several families call mamba_<what>, and time_step_limit.

    Args:
      fields: The configuration.
      hidden: Its hidden_size, which says how wide the mixer is where mamba_d_ssm does not.
    """
    values: dict[str, Any] = {name: fields.size(name, default) for name, default in MAMBA.items()}
    values["mamba_d_conv"] = fields.integer("mamba_d_conv", 4, least=2, most=SIZE)
    expand = fields.size("mamba_expand", 2)
    inner = fields.size("mamba_d_ssm") if fields.has("mamba_d_ssm") else expand * hidden
    heads = values["mamba_n_heads"]
    auto = fields.values.get("mamba_d_head", "auto") == "auto"
    size = inner // heads if auto else fields.size("mamba_d_head")
    if heads * size != inner:
        raise fields.error(
            f"mamba_n_heads ({heads}) times mamba_d_head ({'auto' if auto else size}) must be the width of the mixer, "
            f"{inner} by mamba_d_ssm or mamba_expand"
        )
    limits = read_limits(fields)
    flags = {"mamba_conv_bias": True, "mamba_proj_bias": False}
    flags = {name: fields.flag(name, default) for name, default in flags.items()}
    return values | flags | {"mamba_d_head": size, "time_step_limit": limits}


def mamba_mixer(source: Any, **more: Any) -> Mamba2:
    """The Mamba-2 mixer of a family whose source has what `read_mamba` read, and rms_norm_eps; `more` are attributes of
    the mixer that the family has besides."""
    heads, groups = source.mamba_n_heads, source.mamba_n_groups
    least, most = source.time_step_limit
    return Mamba2(
        spec=RecurrenceSpec(heads, groups, source.mamba_d_state, source.mamba_d_head, decay="head", delta=False),
        width=source.mamba_d_conv,
        eps=source.rms_norm_eps,
        least_step=least,
        most_step=most,
        bias=source.mamba_proj_bias,
        convolution_bias=source.mamba_conv_bias,
        **more,
    )


def model_config(family: str, source: Any, layers: tuple[LayerConfig, ...], norm: Norm, **more: Any) -> ModelConfig:
    """The ModelConfig of a family, with what all sources have under one name.

    Args:
      family: The name of its module.
      source: What it keeps of a config.json.
      layers, norm: As in `ModelConfig`.
      more: Its other attributes. Without max_length it is the source's max_position_embeddings.
    """
    if "max_length" not in more:
        more["max_length"] = source.max_position_embeddings
    return ModelConfig(
        family=family,
        source=source,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        layers=layers,
        norm=norm,
        tied=source.tie_word_embeddings,
        eos_token_ids=source.eos_token_ids,
        initializer_range=source.initializer_range,
        **more,
    )


def untied_if_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The configuration of a family whose source has `tie_word_embeddings`: a head that is there counts, whatever the
    file says."""
    tied = config.tied and "lm_head.weight" not in names
    return dataclasses.replace(config.source, tie_word_embeddings=tied).model()


def make(source: Callable[..., Any], values: dict[str, Any], fields: Fields) -> ModelConfig:
    """The ModelConfig of what was read; fields that do not fit together are an error that names the file.

    Args:
      source: Makes what a family keeps of a config.json, which has `model()`.
      values: Its fields.
      fields: Where they were read from.
    """
    try:
        return source(**values).model()
    except ValueError as error:
        raise fields.error(str(error)) from error


def check_multiple(source: Any, many: str, few: str) -> None:
    """Raises a ValueError unless one field is a multiple of another."""
    if getattr(source, many) % getattr(source, few):
        raise ValueError(f"{many} ({getattr(source, many)}) must be a multiple of {few} ({getattr(source, few)})")


def check_softmax(source: Any) -> None:
    """Raises a ValueError unless a model's softmax layers have heads that fit, and arrays that can be held."""
    check_multiple(source, "num_attention_heads", "num_key_value_heads")
    check_turned(source)
    check_arrays(vars(source), SOFTMAX_ARRAYS)


def check_turned(source: Any) -> None:
    """Raises a ValueError unless the channels of a head can be turned in pairs."""
    if source.head_dim % 2:
        raise ValueError(f"head_dim must be even, for its channels are turned in pairs, got {source.head_dim}")
