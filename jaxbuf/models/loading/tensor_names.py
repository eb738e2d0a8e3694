"""Under which names the tensors of a decoder are stored where they are named as Llama's, as most families' are."""

from collections.abc import Callable, Mapping

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
    return {path + part: Source(name + source.name, source.depthwise) for part, source in tensors.items()}


def softmax_layer(layer: LayerConfig) -> dict[str, Source]:
    """The tensors of a layer with softmax attention and an MLP, with those biases and norms that it has."""
    attention = {"_proj": "_proj.weight"}
    attention |= {"_bias": "_proj.bias"} if layer.mixers[0].bias else {}  # pyright: ignore[reportAttributeAccessIssue]
    found = {f"mixers.0.{part}{path}": f"self_attn.{part}{name}" for part in "qkvo" for path, name in attention.items()}
    if layer.mixers[0].norm is not None:  # pyright: ignore[reportAttributeAccessIssue]
        found |= {f"mixers.0.{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"}
    return {path: Source(name) for path, name in found.items()} | outside_mixers(layer)


def outside_mixers(layer: LayerConfig) -> dict[str, Source]:
    """The tensors of a layer's MLP, and of the norms before it and before the mixer."""
    found = AROUND | {f"mlp.{part}_proj": f"mlp.{part}_proj.weight" for part in MLP_PARTS}
    if layer.feed_forward is not None and layer.feed_forward.bias:
        found |= {f"mlp.{part}_bias": f"mlp.{part}_proj.bias" for part in MLP_PARTS}
    return {path: Source(name) for path, name in found.items()}
