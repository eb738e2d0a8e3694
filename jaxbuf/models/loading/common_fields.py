"""What the config.json of several families say in the same way: positions, tokens that end a text, a tied head."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from jaxbuf.attention.rotary import Llama3Scaling
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.loading.fields import Fields, check_arrays

SOFTMAX_ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "head_dim", "hidden_size"),
)
# Of "llama3" positions: names in config.json, and those of Llama3Scaling.
SCALING = {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high"}


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


def read_rope(fields: Fields, *, scalings: bool = True) -> tuple[float, Llama3Scaling | None]:
    """The base of the positions' frequencies, and how they are stretched.

    Args:
      fields: The configuration.
      scalings: Whether the family may stretch them as Llama 3 does.

    Raises:
      CheckpointError: A number is missing, of another type or out of range.
      ValueError: Positions of a kind that is not served.
    """
    theta, rope = find_number(fields, "rope_theta", 10_000.0, above=0), find_rope(fields)
    if rope is fields:
        return theta, None
    kinds = ("default", "llama3") if scalings else ("default",)
    kind = rope.serve("rope_type" if "rope_type" in rope.values else "type", *kinds, default="default")
    if kind == "default":
        return theta, None
    rope.require(*SCALING, "original_max_position_embeddings")
    numbers = {name: rope.number(key, above=0) for key, name in SCALING.items()}
    if numbers["low"] >= numbers["high"]:
        raise rope.error(f"low_freq_factor ({numbers['low']}) must be below high_freq_factor ({numbers['high']})")
    return theta, Llama3Scaling(**numbers, context=rope.size("original_max_position_embeddings"))


def rope_json(theta: float, scaling: Llama3Scaling | None = None) -> dict[str, Any]:
    """The rope_parameters that `read_rope` reads back."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    numbers = {key: getattr(scaling, name) for key, name in SCALING.items()}
    context = {"original_max_position_embeddings": scaling.context}
    return {"rope_type": "llama3", "rope_theta": theta, **numbers, **context}


def eos_json(ids: tuple[int, ...]) -> int | list[int] | None:
    """The eos_token_id that `Fields.token_ids` reads back: a number, a list of several, or null."""
    return ids[0] if len(ids) == 1 else list(ids) or None


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
    """Raises a ValueError unless a model of softmax layers alone has heads that fit, and arrays that can be held."""
    check_multiple(source, "num_attention_heads", "num_key_value_heads")
    if source.head_dim % 2:
        raise ValueError(f"head_dim must be even, for its channels are turned in pairs, got {source.head_dim}")
    check_arrays(vars(source), SOFTMAX_ARRAYS)
