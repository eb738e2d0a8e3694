"""What Kimi Linear and Ling 3.0 say in the same way: layers of Kimi Delta Attention and of latent attention, and
experts in groups beside shared ones."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxbuf.models.config import MLP, LayerConfig, Mixer, ModelConfig, Norm
from jaxbuf.models.experts import Experts
from jaxbuf.models.families import Rows, Source
from jaxbuf.models.loading.common_fields import eos_json, model_config
from jaxbuf.models.loading.expert_fields import MOST_EXPERTS, check_groups, grouped_router
from jaxbuf.models.loading.fields import MOST_LAYERS, SIZE, Fields, check_arrays
from jaxbuf.models.loading.tensor_names import AROUND, experts_tensors, mlp_tensors, placed
from jaxbuf.recurrence.spec import RecurrenceSpec

LINEAR, FULL = KINDS = "linear_attention", "full_attention"
DENSE, SPARSE = FEED_FORWARDS = "dense", "sparse"
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_intermediate_size",
)
# What released files call a field, and its other name, which newer ones of transformers have or Ling's have.
NAMES = {
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}
ARRAYS = (
    ("vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("num_attention_heads", "qk_nope_head_dim", "hidden_size"),
    ("num_attention_heads", "qk_rope_head_dim", "hidden_size"),
    ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"),
    ("num_attention_heads", "v_head_dim", "kv_lora_rank"),
    ("num_attention_heads", "v_head_dim", "hidden_size"),
    ("kv_lora_rank", "hidden_size"),
    ("linear_num_heads", "linear_head_dim", "hidden_size"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
    ("num_local_experts", "hidden_size"),
    ("num_local_experts", "moe_intermediate_size", "hidden_size"),
    ("num_local_experts", "hidden_size", "moe_intermediate_size"),
    ("n_shared_experts", "moe_intermediate_size", "hidden_size"),
)


@dataclasses.dataclass(frozen=True)
class LatentHybrid:
    """The static facts that both families have, under the names that transformers uses.

    `eos_token_ids` is `eos_token_id` in config.json, and the fields of `NAMES` may have their other name there.

    Raises:
      ValueError: A kind of layer that is not known, experts that are not in groups, a token with more of them than its
        groups have, or sizes whose arrays nobody could hold.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    linear_num_heads: int
    linear_head_dim: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int = 4
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1_048_576
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    tie_word_embeddings: ClassVar[bool] = False  # neither family can

    def __post_init__(self):
        check_groups(self, "num_local_experts")
        check_arrays(vars(self), ARRAYS)

    @property
    def spec(self) -> RecurrenceSpec:
        """The recurrence of the linear layers."""
        heads, size = self.linear_num_heads, self.linear_head_dim
        return RecurrenceSpec(heads, heads, size, size, decay="channel", delta=True)

    @property
    def experts(self) -> Experts:
        """What the sparse layers have."""
        shared = MLP(self.n_shared_experts * self.moe_intermediate_size)
        return Experts(grouped_router(self, "num_local_experts"), self.moe_intermediate_size, shared=shared)

    def build(self, family: str, mixers: Mapping[str, Mixer]) -> ModelConfig:
        """What the decoder is built from.

        Args:
          family: The name of its module.
          mixers: That of each kind of layer.
        """
        norm = Norm(self.rms_norm_eps)
        feed_forwards = {DENSE: MLP(self.intermediate_size), SPARSE: self.experts}
        layers = tuple(
            LayerConfig((mixers[kind],), feed_forwards[feed_forward], norm)
            for kind, feed_forward in zip(self.layer_types, self.mlp_layer_types, strict=True)
        )
        return model_config(family, self, layers, norm)

    def to_dict(self) -> dict[str, Any]:
        """The fields of a config.json, under the names of released files."""
        data = dataclasses.asdict(self)
        eos = data.pop("eos_token_ids")
        data |= {released: data.pop(name) for released, name in NAMES.items()}
        return data | {
            "num_hidden_layers": len(self.layer_types),
            "num_key_value_heads": self.num_attention_heads,
            "layer_types": list(self.layer_types),
            "mlp_layer_types": list(self.mlp_layer_types),
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": eos_json(eos),
        }


def read_latent_hybrid(
    fields: Fields, defaults: Mapping[str, Any], kinds: Callable[[int], Sequence[str]]
) -> dict[str, Any]:
    """The fields of `LatentHybrid` but for those that begin with "linear_".

    Args:
      fields: The configuration.
      defaults: What transformers takes where these are absent: first_k_dense_replace, routed_scaling_factor, n_group,
        topk_group, rms_norm_eps and max_position_embeddings.
      kinds: The kinds of so many layers where layer_types is absent or null.
    """
    fields.serve("hidden_act", "silu", default="silu")
    fields.serve("tie_word_embeddings", False, default=False)
    experts, chosen = ((name, NAMES[name]) for name in ("num_experts", "num_experts_per_token"))
    fields.require(*NEEDED, "num_hidden_layers", experts, chosen)
    values: dict[str, Any] = {name: fields.size(name) for name in NEEDED}
    if fields.has("num_key_value_heads"):  # all heads read one latent, by a matrix of their own
        fields.serve("num_key_value_heads", values["num_attention_heads"])
    count = fields.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
    number = fields.integer(_name(fields, "num_experts"), least=1, most=MOST_EXPERTS)
    groups = fields.integer(_name(fields, "num_expert_group"), defaults["n_group"], least=1, most=number)
    if not fields.has("mlp_layer_types"):
        first = fields.integer("first_k_dense_replace", defaults["first_k_dense_replace"], least=0, most=SIZE)
        of_layers = tuple(DENSE if layer < first else SPARSE for layer in range(count))
    else:
        of_layers = read_kinds(fields, "mlp_layer_types", FEED_FORWARDS, count)
    given = fields.has("layer_types")
    return values | {
        "layer_types": tuple(read_kinds(fields, "layer_types", KINDS, count) if given else kinds(count)),
        "mlp_layer_types": of_layers,
        "num_local_experts": number,
        "num_experts_per_tok": fields.integer(_name(fields, "num_experts_per_token"), least=1, most=number),
        "n_shared_experts": fields.size(_name(fields, "num_shared_experts"), 1),
        "n_group": groups,
        "topk_group": fields.integer("topk_group", defaults["topk_group"], least=1, most=groups),
        "norm_topk_prob": fields.flag(_name(fields, "moe_renormalize"), True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", defaults["routed_scaling_factor"]),
        "attention_bias": fields.flag("attention_bias", False),
        "rms_norm_eps": fields.number("rms_norm_eps", defaults["rms_norm_eps"], above=0, most=1),
        "max_position_embeddings": fields.size(_name(fields, "model_max_length"), defaults["max_position_embeddings"]),
        "initializer_range": fields.number("initializer_range", 0.02, least=0),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=values["vocab_size"]),
    }


def read_kinds(fields: Fields, name: str, known: Sequence[str], count: int) -> tuple[str, ...]:
    """A list with one of the known kinds for each of so many layers."""
    given = fields.texts(name)
    if len(given) != count or not {*given} <= {*known}:
        fields.fail(name, f"a list of {count} (num_hidden_layers) out of {' and '.join(map(repr, known))}")
    return given


def _name(fields: Fields, released: str) -> str:
    """That of the two names of a field which the file has; the released one counts where it has both, or none."""
    other = NAMES[released]
    return other if other in fields.values and released not in fields.values else released


def layer_tensors(
    layer: LayerConfig, mixing: Mapping[str, Source], attention: str, sparse: str, **names: Any
) -> dict[str, Source]:
    """The tensors of a layer.

    Args:
      layer: The layer.
      mixing: Those of its mixer.
      attention: What their names begin with.
      sparse: What the names of experts begin with; those of an MLP begin with "mlp.".
      names: Of experts, as `experts_tensors` takes them.
    """
    found = {path: Source(name) for path, name in AROUND.items()} | placed(mixing, "mixers.0.", attention)
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, MLP):
        return found | placed(mlp_tensors(feed_forward), "mlp.", "mlp.")
    return found | placed(experts_tensors(feed_forward, stacked=False, **names), "mlp.", sparse)


def kda_tensors(mixer: Any, projections: Mapping[str, str], out: str) -> dict[str, Source]:
    """The tensors of a `KimiDeltaAttention`.

    Args:
      mixer: The mixer.
      projections: The names of those of the decay and of the gate, by their paths.
      out: That of the last one.
    """
    spec = mixer.spec
    sizes = {"q": spec.heads * spec.key_dim, "k": spec.heads * spec.key_dim, "v": spec.heads * spec.value_dim}
    named = {"in_proj_b": "b_proj", "norm": "o_norm", "out_proj": out, **projections}
    return {path: Source(f"{name}.weight") for path, name in named.items()} | {
        "in_proj_qkv": Source(tuple(Rows(f"{part}_proj.weight", size) for part, size in sizes.items())),
        "conv1d": Source(tuple(Rows(f"{part}_conv1d.weight", size) for part, size in sizes.items()), depthwise=True),
        "A_log": Source("A_log"),
        "dt_bias": Source("dt_bias"),
    }


def latent_tensors(mixer: Any, out: str) -> dict[str, Source]:
    """The tensors of a `LatentAttention`, with those projections and biases that it has; `out` names the last one."""
    named = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "o_proj": out}
    biased = {"kv_down_bias": "kv_a_proj_with_mqa", "o_bias": out}
    if mixer.query_rank is None:
        named["q_proj"] = "q_proj"
    else:
        named |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_proj": "q_b_proj"}
        biased["q_down_bias"] = "q_a_proj"
    if mixer.head_gate:
        named["gate"] = "g_proj"
    found = {path: Source(f"{name}.weight") for path, name in named.items()}
    return found | ({path: Source(f"{name}.bias") for path, name in biased.items()} if mixer.bias else {})
