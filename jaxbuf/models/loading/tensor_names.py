"""Under which names the tensors of a decoder are stored where they are named as Llama's, as most families' are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxbuf.models.config import LayerConfig, ModelConfig
from jaxbuf.models.families import Rows, Source

AROUND = {"before_mixers": "input_layernorm.weight", "before_mlp": "post_attention_layernorm.weight"}
MLP_PARTS = ("gate", "up", "down")
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
LATENT = {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"}


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
    found = {f"{part}_proj": f"{part}_proj.weight" for part in "qkvo"}
    found |= {f"{part}_bias": f"{part}_proj.bias" for part in mixer.biased}
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


def experts_tensors(
    experts: Any,
    hidden: int,
    *,
    stacked: bool,
    parts: Sequence[str] = EXPERT_PARTS,
    bias: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
) -> dict[str, Source]:
    """The tensors of `Experts`. The projections to and from latent tokens have the names that Nemotron 3 gives them.

    Args:
      experts: The feed-forward.
      hidden: Numbers of a token.
      stacked: Whether all experts have two tensors, experts.gate_up_proj and experts.down_proj; else each has its own.
      parts: What the projections of one expert are called; without a gate two.
      bias: The name of the bias by which experts are chosen.
      shared: What the names of the shared experts begin with.
    """
    found = {"router": Source("gate.weight")} | ({"router_bias": Source(bias)} if experts.router.bias else {})
    *first, last = parts
    numbers, read = range(experts.router.experts), experts.latent or hidden
    if stacked:
        joined = "gate_up_proj" if experts.gated else "up_proj"
        found |= {"up_proj": Source(f"experts.{joined}"), "down_proj": Source("experts.down_proj")}
    else:
        ups = tuple(Rows(f"experts.{number}.{part}.weight", experts.size) for number in numbers for part in first)
        downs = tuple(Rows(f"experts.{number}.{last}.weight", read) for number in numbers)
        found |= {"up_proj": Source(ups, stacked=True), "down_proj": Source(downs, stacked=True)}
    if experts.latent is not None:
        found |= {path: Source(f"{name}.weight") for path, name in LATENT.items()}
        found |= {f"{path}_bias": Source(f"{name}.bias") for path, name in LATENT.items() if experts.latent_bias}
    if experts.shared is not None:
        mlp = mlp_tensors(experts.shared, MLP_PARTS if experts.gated else MLP_PARTS[1:])
        found |= placed(mlp, "shared.", f"{shared}.")
        found |= {"shared_gate": Source(f"{shared}_gate.weight")} if experts.shared_gate else {}
    return found


def are_stacked(names: Collection[str], prefix: str = "") -> bool | None:
    """Whether the experts of some tensors, whose names begin like that, are stacked; None if there are none."""
    inside = [name for name in names if name.startswith(prefix) and ".experts." in name]
    return any(name.endswith(".experts.down_proj") for name in inside) if inside else None
