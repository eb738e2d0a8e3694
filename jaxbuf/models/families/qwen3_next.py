"""Qwen3-Next: Gated DeltaNet with fused projections, gated softmax attention, and experts with a shared one."""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

from jaxbuf.models.config import MLP, RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.experts import Experts
from jaxbuf.models.families import Rows, Source
from jaxbuf.models.loading.common_fields import make
from jaxbuf.models.loading.expert_fields import (
    EXPERT_ARRAYS,
    has_experts,
    make_experts,
    read_experts,
    read_sparse_layers,
)
from jaxbuf.models.loading.fields import Fields
from jaxbuf.models.loading.hybrid_fields import Hybrid, hybrid_tensors, linear_tensors, read_hybrid, stored_facts
from jaxbuf.models.loading.tensor_names import (
    AROUND,
    are_stacked,
    attention_tensors,
    experts_tensors,
    mlp_tensors,
    placed,
)
from jaxbuf.recurrence.spec import RecurrenceSpec

MODEL_TYPES = ("qwen3_next",)
SERVED = "text models of the Qwen3-Next architecture"
IGNORED = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Hybrid):
    """The static facts of a Qwen3-Next model: those of `Hybrid`, of its experts, and of the MLPs of layers without.

    `stacked_experts` and `mtp_stacked_experts` are not in a config.json: whether the files have the experts of a layer,
    and of the MTP layer, as one tensor.

    Raises:
      ValueError: As `Hybrid`.
    """

    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    stacked_experts: bool = False
    mtp_stacked_experts: bool = False

    ARRAYS: ClassVar = (
        *Hybrid.ARRAYS,
        *EXPERT_ARRAYS,
        ("intermediate_size", "hidden_size"),
        ("shared_expert_intermediate_size", "hidden_size"),
    )

    @property
    def experts(self) -> Experts:
        """What the layers with experts have, and the MTP layer."""
        return make_experts(self, renormalised=self.norm_topk_prob, shared=self.shared_expert_intermediate_size)

    def model(self) -> ModelConfig:
        """What the decoder is built from."""
        layers, mlp = range(len(self.layer_types)), MLP(self.intermediate_size)
        feed_forwards = [self.experts if has_experts(self, layer) else mlp for layer in layers]
        return self.build("qwen3_next", feed_forwards, self.experts)


def read_config(fields: Fields) -> ModelConfig:
    tied = fields.flag("tie_word_embeddings", False)
    values = read_hybrid(fields, ("intermediate_size", "shared_expert_intermediate_size"), tied=tied)
    values |= read_experts(fields) | read_sparse_layers(fields, len(values["layer_types"]))
    values["norm_topk_prob"] = fields.flag("norm_topk_prob", True)
    return make(Config, values, fields)


def config_json(config: ModelConfig) -> dict[str, Any]:
    data = config.source.to_dict()
    del data["stacked_experts"], data["mtp_stacked_experts"]
    sparse = {"mlp_only_layers": list(config.source.mlp_only_layers)}
    return {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **data, **sparse}


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A head or an MTP layer that is there counts, whatever the configuration says; and whether experts are stacked."""
    facts = stored_facts(config.source, names)
    facts |= {"stacked_experts": bool(are_stacked(names, "model."))}
    facts |= {"mtp_stacked_experts": bool(are_stacked(names, "mtp."))}
    return dataclasses.replace(config.source, **facts).model()


def tensors(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Source]:
    source = config.source
    linear = linear_tensors(_projections(source.spec))

    def layer_tensors(stacked: bool, layer: LayerConfig) -> dict[str, Source]:
        mlp, softmax = layer.feed_forward, layer.mixers[0].kind != RECURRENCE
        sparse = mlp == source.experts
        routed = partial(experts_tensors, source.experts, source.hidden_size, shared="shared_expert")
        found = {path: Source(name) for path, name in AROUND.items()}
        found |= placed(routed(stacked=stacked) if sparse else mlp_tensors(mlp), "mlp.", "mlp.")
        return found | (placed(attention_tensors(layer.mixers[0]), "mixers.0.", "self_attn.") if softmax else linear)

    layers = partial(layer_tensors, source.stacked_experts), partial(layer_tensors, source.mtp_stacked_experts)
    return hybrid_tensors(config, names, *layers)


def _projections(spec: RecurrenceSpec) -> dict[str, Source]:
    """Rows of two tensors: of each key head and the value heads that read it, q | k | v | z, and b | a."""
    group = spec.heads // spec.key_heads
    values = group * spec.value_dim

    def rows(tensor: str, start: int, size: int, all_rows: int) -> Rows:
        return Rows(f"{tensor}.weight", size, start, spec.key_heads, all_rows)

    sizes = [spec.key_dim, spec.key_dim, values, values]
    q, k, v, z = (rows("in_proj_qkvz", sum(sizes[:n]), size, sum(sizes)) for n, size in enumerate(sizes))
    b, a = (rows("in_proj_ba", start, group, 2 * group) for start in (0, group))
    return {
        "in_proj_qkv": Source((q, k, v)),
        "in_proj_z": Source((z,)),
        "in_proj_b": Source((b,)),
        "in_proj_a": Source((a,)),
    }
