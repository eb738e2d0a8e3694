"""An architecture in other sizes: fewer layers, heads or experts, for benchmarks and trial compilations."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.families import config_from_dict, config_json

# The fields of families behind each size that can be asked for. `head_dim` is that of softmax heads where a model has
# some, else the recurrence's.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "layer_types", "layers_block_type", "mlp_layer_types"),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size", "shared_intermediate_size"),
    "vocabulary": ("vocab_size",),
    "heads": ("linear_num_value_heads", "linear_num_heads", "num_heads", "mamba_num_heads", "mamba_n_heads"),
    "key_heads": ("linear_num_key_heads", "n_groups", "mamba_n_groups"),
    "dim": (
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "head_dim", "state_size"),
        *("mamba_head_dim", "ssm_state_size", "mamba_d_head", "mamba_d_state"),
    ),
    "attention_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "attention_dim": ("head_dim",),
    "experts": ("num_experts", "num_local_experts"),
    "chosen": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size", "shared_expert_intermediate_size"),
}
OF_RECURRENCE = ("heads", "key_heads", "dim")


def resized(config: ModelConfig, name: str, sizes: Mapping[str, int], *, mtp: bool = False) -> ModelConfig:
    """A configuration with other sizes, those of SIZES.

    `heads`, `key_heads` and `dim` are the recurrence's, `attention_heads`, `kv_heads` and `attention_dim` those of
    softmax layers; of experts, `chosen` is how many a token has, and `expert_ffn` their inner numbers. Of fewer layers
    it has the first ones; kinds of layers that are not among them take the last places.

    Args:
      config: What it is made from.
      name: Of its model, for messages.
      sizes: Those that change.
      mtp: Whether it has an MTP layer, where its family knows one.

    Raises:
      ValueError: It has no such size, or the sizes do not fit each other.
    """
    source = config.source
    fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    changed: dict[str, Any] = {"mtp_num_hidden_layers": int(mtp)} if "mtp_num_hidden_layers" in fields else {}
    for size_name, size in sizes.items():
        own = [field for field in SIZES[size_name] if field in fields]
        if "head_dim" in own and (size_name == "dim") == ("num_attention_heads" in fields):
            own.remove("head_dim")
        if not own or (size_name in OF_RECURRENCE and config.spec is None):
            raise ValueError(f"{size_name} must not be given for {name}, which has none, got {size}")
        changed |= {field: _first(fields[field], size) if size_name == "layers" else size for field in own}
    if "expand" in fields:
        sized = fields | changed
        changed["expand"] = sized["num_heads"] * sized["head_dim"] / sized["hidden_size"]
    # Back and forth, so that the sizes are checked as those of a file are.
    return config_from_dict(config_json(dataclasses.replace(source, **changed).model()))


def _first(layers: int | tuple[str, ...], number: int) -> int | tuple[str, ...]:
    """A number of layers, or so many of their kinds, over and over where there are not as many."""
    if isinstance(layers, int):
        return number
    found = [layers[place % len(layers)] for place in range(number)]
    missing = [kind for kind in dict.fromkeys(layers) if kind not in found][:number]
    return (*found[: number - len(missing)], *missing)
