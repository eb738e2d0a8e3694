"""Under which names the tensors of a decoder are stored where they are named as Llama's, as most families' are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxbuf.models.config import LayerConfig, ModelConfig
from jaxbuf.models.families import Source

AROUND = {"before_mixers": "input_layernorm.weight", "before_mlp": "post_attention_layernorm.weight"}
MLP_PARTS = ("gate", "up", "down")


def decoder_tensors(
    config: ModelConfig, layer_tensors: Callable[[LayerConfig], Mapping[str, Source]], model: str = "model."
) -> dict[str, Source]:
    """The tensors of the embedding, the last norm, the head if there is one, and all layers.

    Args:
      config: The model's.
      layer_tensors: A layer to its parameters' paths and sources, both without the beginning that says which layer.
      model: What all names but the head's begin with.
    """
    found = {path: Source(f"{model}{path}.weight") for path in ("embed_tokens", "norm")}
    if not config.tied:
        found["lm_head"] = Source("lm_head.weight")
    for number, layer in enumerate(config.layers):
        found |= placed(layer_tensors(layer), f"layers.{number}.", f"{model}layers.{number}.")
    return found


def placed(tensors: Mapping[str, Source], path: str, name: str) -> dict[str, Source]:
    """The same with something in front of the parameters' paths and of the tensors' names."""
    return {path + part: source.behind(name) for part, source in tensors.items()}


def softmax_layer(layer: LayerConfig) -> dict[str, Source]:
    """The tensors of a layer with softmax attention and an MLP, with those biases and norms that it has."""
    return placed(attention_tensors(layer.mixers[0]), "mixers.0.", "self_attn.") | outside_mixers(layer)


def attention_tensors(mixer: Any) -> dict[str, Source]:
    """The tensors of softmax attention, an `Attention`, with those biases and norms that it has."""
    parts = {"_proj": "_proj.weight"} | ({"_bias": "_proj.bias"} if mixer.bias else {})
    found = {f"{part}{path}": f"{part}{name}" for part in "qkvo" for path, name in parts.items()}
    if mixer.norm is not None:
        found |= {f"{part}_norm": f"{part}_norm.weight" for part in "qk"}
    return {path: Source(name) for path, name in found.items()}


def mamba2_tensors(mixer: Any) -> dict[str, Source]:
    """The tensors of a Mamba-2 mixer, a `Mamba2`, with the norm and those biases that it has."""
    found = {part: Source(part) for part in ("A_log", "D", "dt_bias")}
    found |= {part: Source(f"{part}.weight") for part in ("in_proj", "out_proj")}
    found["conv1d"] = Source("conv1d.weight", depthwise=True)
    optional = {
        "norm": ("norm.weight", mixer.norm),
        "conv1d_bias": ("conv1d.bias", mixer.convolution_bias),
        "in_bias": ("in_proj.bias", mixer.bias),
        "out_bias": ("out_proj.bias", mixer.output_bias),
    }
    return found | {path: Source(name) for path, (name, there) in optional.items() if there}


def outside_mixers(layer: LayerConfig) -> dict[str, Source]:
    """The tensors of a layer's MLP, and of the norms before it and before the mixer."""
    norms = {path: Source(name) for path, name in AROUND.items()}
    return norms | placed(mlp_tensors(layer.feed_forward), "mlp.", "mlp.")


def mlp_tensors(mlp: Any, parts: Sequence[str] = MLP_PARTS) -> dict[str, Source]:
    """The tensors of an MLP's projections, with those biases that it has."""
    found = {f"{part}_proj": Source(f"{part}_proj.weight") for part in parts}
    return found | ({f"{part}_bias": Source(f"{part}_proj.bias") for part in parts} if mlp.bias else {})
