"""What families with routed experts say of them in config.json: Qwen's, and which layers have some, and those whose
experts are in groups."""

from typing import Any

from jaxbuf.models.config import MLP
from jaxbuf.models.experts import GROUP_BEST, Experts, Router
from jaxbuf.models.loading.common_fields import check_multiple
from jaxbuf.models.loading.fields import SIZE, Fields

MOST_EXPERTS = 2**14  # so that no names are made for experts that nobody means
EXPERT_ARRAYS = (
    ("num_experts", "hidden_size"),
    ("num_experts", "moe_intermediate_size", "hidden_size"),
    ("num_experts", "hidden_size", "moe_intermediate_size"),
)


def read_experts(fields: Fields) -> dict[str, int]:
    """num_experts, which may be called num_local_experts, num_experts_per_tok and moe_intermediate_size."""
    fields.require(("num_experts", "num_local_experts"), "num_experts_per_tok", "moe_intermediate_size")
    name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
    experts = fields.integer(name, least=1, most=MOST_EXPERTS)
    return {
        "num_experts": experts,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", least=1, most=experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size"),
    }


def read_sparse_layers(fields: Fields, layers: int) -> dict[str, Any]:
    """decoder_sparse_step, and mlp_only_layers, of which null counts as none."""
    given = fields.has("mlp_only_layers")
    return {
        "decoder_sparse_step": fields.integer("decoder_sparse_step", 1, least=1, most=SIZE),
        "mlp_only_layers": fields.integers("mlp_only_layers", (), most=layers - 1) if given else (),
    }


def has_experts(source: Any, layer: int) -> bool:
    """Whether a layer has experts, of what `read_sparse_layers` read; the others have an MLP."""
    return layer not in source.mlp_only_layers and (layer + 1) % source.decoder_sparse_step == 0


def make_experts(source: Any, *, renormalised: bool, shared: int | None = None) -> Experts:
    """The experts that `read_experts` read.

    Args:
      source: Has its fields.
      renormalised: As in `Router`.
      shared: Numbers between the projections of the shared expert, which has a gate; None: there is none.
    """
    router = Router(source.num_experts, source.num_experts_per_tok, renormalised=renormalised)
    mlp = None if shared is None else MLP(shared)
    return Experts(router, source.moe_intermediate_size, shared=mlp, shared_gate=shared is not None)


def check_groups(source: Any, experts: str) -> None:
    """Raises a ValueError unless the experts, whose number has this name, are in groups that a token can choose from.

    Args:
      source: Has that number, num_experts_per_tok, n_group and topk_group.
      experts: The name.
    """
    check_multiple(source, experts, "n_group")
    number, groups, chosen = getattr(source, experts), source.n_group, source.topk_group
    if groups > 1 and number // groups < GROUP_BEST:
        raise ValueError(
            f"{experts} ({number}) must be at least {GROUP_BEST} times n_group ({groups}), for a group is chosen by "
            f"its {GROUP_BEST} best experts"
        )
    if source.num_experts_per_tok > chosen * (number // groups):
        raise ValueError(
            f"num_experts_per_tok ({source.num_experts_per_tok}) must be at most topk_group ({chosen}) times the "
            f"{number // groups} experts of a group"
        )


def grouped_router(source: Any, experts: str) -> Router:
    """The router of sigmoid scores with a bias, over experts in groups, whose number has this name.

    Args:
      source: As in `check_groups`, with norm_topk_prob and routed_scaling_factor.
      experts: The name.
    """
    return Router(
        getattr(source, experts),
        source.num_experts_per_tok,
        scores="sigmoid",
        renormalised=source.norm_topk_prob,
        scale=source.routed_scaling_factor,
        bias=True,
        groups=source.n_group,
        chosen_groups=source.topk_group,
    )
