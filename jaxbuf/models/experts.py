"""Experts: a feed-forward in which a router gives each token some of many MLPs, and weights for what these return.

No token is dropped, and there is no loop over experts: the tokens are sorted by expert, and a ragged product multiplies
each group with its expert's matrix. Every token is computed by itself, so padded and dead ones change no other.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.axes import Array, Float, Float32, Int32
from jaxbuf.models.config import MLP, SquaredReluMLP
from jaxbuf.models.layers import Initializer, linear, linear_float32, parameter, scaled, zeros
from jaxbuf.models.tensor_parallel import Part, add_devices
from jaxbuf.target import Target

GROUP_BEST = 2  # of its experts, by whose scores a group is chosen
LEAST_SUM = 1e-20  # is added to what weights are divided by
# [tokens, in] times [experts, out, in], summed over the last axis of both.
BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


@dataclasses.dataclass(frozen=True)
class Router:
    """Which experts a token has, and with which weights.

    The experts of the best scores are chosen, among equal ones those of the lowest numbers. With groups, which are
    neighbouring experts, only those of the best groups are: of the largest sums of their two best scores.

    Attributes:
      experts, chosen: How many there are, and how many of them a token has.
      scores: A softmax over all experts, or a sigmoid of each.
      renormalised: Whether the weights of a token, which are its experts' scores, are divided by their sum.
      scale: What the weights are multiplied with then.
      bias: Whether a bias of each expert is added to the scores by which it is chosen, and not to its weight.
      groups, chosen_groups: How many there are, and of how many of them a token may have experts.

    Raises:
      ValueError: Numbers that do not fit each other.

    Source: DeepSeek-V3 (2024), section 2.1.2; softmax scores as in Shazeer et al., Outrageously Large Neural Networks
    (2017), section 2.1, without noise.
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self):
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen must be in [1, {self.experts}], the number of experts, got {self.chosen}")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be 'softmax' or 'sigmoid', got {self.scores!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"experts ({self.experts}) must be a multiple of groups ({self.groups})")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                f"chosen_groups must be in [1, {self.groups}], the number of groups, got {self.chosen_groups}"
            )
        each = self.experts // self.groups
        if self.chosen > self.chosen_groups * each:
            raise ValueError(
                f"chosen ({self.chosen}) must be at most chosen_groups ({self.chosen_groups}) times {each}"
            )
        if self.groups > 1 and each < GROUP_BEST:
            raise ValueError(f"groups must have at least {GROUP_BEST} experts each, got {each}")

    def __call__(
        self, logits: Float32[Array, "tokens experts"], bias: Float32[Array, "experts"] | None = None
    ) -> tuple[Int32[Array, "tokens chosen"], Float32[Array, "tokens chosen"]]:
        """The experts of each token, the best first, and their weights, which are differentiable."""
        scores = jax.nn.softmax(logits, axis=-1) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        preferred = jax.lax.stop_gradient(scores if bias is None else scores + bias[None])
        if self.groups > 1:
            grouped = preferred.reshape(-1, self.groups, self.experts // self.groups)
            best = jnp.sum(jax.lax.top_k(grouped, GROUP_BEST)[0], axis=-1)
            _, kept = jax.lax.top_k(best, self.chosen_groups)
            open_groups = jnp.any(kept[:, :, None] == jnp.arange(self.groups, dtype=kept.dtype)[None, None], axis=1)
            preferred = jnp.where(open_groups[:, :, None], grouped, -jnp.inf).reshape(preferred.shape)
        _, chosen = jax.lax.top_k(preferred, self.chosen)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if self.renormalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
        return chosen, scaled(weights, self.scale)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The weighted sum of what a token's experts return, and what the shared ones do, which every token has.

    Attributes:
      router: Of the routed experts.
      size: Numbers between the projections of a routed expert.
      gated: Whether an expert is down(silu(gate x) · up x), else down(relu(up x)²).
      latent: Numbers of a token that routed experts read and write, behind a projection and in front of another; None:
        those of the token itself.
      shared: All shared experts, as one MLP; None: there is none.
      shared_gate: Whether what it returns is multiplied with the sigmoid of a projection of the token to one number.
      devices: Who share the routed experts' inner numbers; the size is then that of one.

    Source: Qwen3-Next and DeepSeek-V3 (2024), section 2.1.2; with `latent` Nemotron 3.
    """

    router: Router
    size: int
    gated: bool = True
    latent: int | None = None
    shared: MLP | SquaredReluMLP | None = None
    shared_gate: bool = False
    devices: int = 1

    def spread(self, devices: int) -> "Experts":
        """What each of so many devices has of it: some of every expert's inner numbers, or all if they do not divide
        them; the shared experts by themselves."""
        found = dataclasses.replace(self, shared=self.shared and self.shared.spread(devices))
        if self.size % devices:
            return found
        return dataclasses.replace(found, size=self.size // devices, devices=devices)

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        """As in `FeedForward.parameters`."""
        return ExpertsParameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def __call__(
        self, parameters: "ExpertsParameters", x: Float[Array, "rows time hidden"], target: Target | None = None
    ) -> Float[Array, "rows time hidden"]:
        """As in `FeedForward.__call__`."""
        p, tokens = parameters, x.reshape(-1, x.shape[-1])
        bias = None if p.router_bias is None else p.router_bias[...]
        chosen, weights = self.router(linear_float32(tokens, p.router), bias)
        inner = tokens if p.latent_in is None else linear(tokens, p.latent_in)
        y = mixture(inner, p.up_proj[...], p.down_proj[...], chosen, weights, gated=self.gated)
        y = (y if p.latent_out is None else linear(y, p.latent_out)).reshape(x.shape)
        if self.shared is None:
            return add_devices(y, self.devices)
        # One sum over the devices does for both, unless only one of them is spread or each device adds a bias.
        together = self.shared.devices == self.devices and not self.shared.bias
        shared = dataclasses.replace(self.shared, devices=1) if together else self.shared
        other = shared(p.shared, x, target)
        if p.shared_gate is not None:
            other = other * jax.nn.sigmoid(linear_float32(x, p.shared_gate)).astype(x.dtype)
        return add_devices(y + other, self.devices) if together else add_devices(y, self.devices) + other


def mixture(
    x: Float[Array, "tokens in"],
    first: Float[Array, "experts _ in"],
    second: Float[Array, "experts out inner"],
    chosen: Int32[Array, "tokens chosen"],
    weights: Float32[Array, "tokens chosen"],
    *,
    gated: bool = True,
) -> Float[Array, "tokens out"]:
    """The weighted sum of what the chosen experts make of each token. Differentiable.

    Args:
      x: The tokens.
      first: Each expert's first projection, in x's dtype; gated with the rows gate | up.
      second: Its second one.
      chosen: The experts of each token, in [0, experts).
      weights: Theirs.
      gated: As in `Experts`.

    Returns:
      An array of x's dtype, summed in float32.
    """
    number = chosen.shape[1]
    by_expert = chosen.reshape(-1)
    order = jnp.argsort(by_expert, stable=True).astype(jnp.int32)
    groups = jnp.zeros(first.shape[0], jnp.int32).at[by_expert].add(1)
    inner = _ragged(x[order // number], first, groups)
    if gated:
        gate, up = jnp.split(inner, 2, axis=-1)
        inner = jax.nn.silu(gate) * up
    else:
        inner = jnp.square(jax.nn.relu(inner))
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
    each = _ragged(inner, second, groups)[places].reshape(*chosen.shape, -1)
    return jnp.sum(each.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)


def _ragged(x: Array, weights: Array, groups: Array) -> Array:
    """x's first rows times the first of the weights [out, in], the next ones times the second; in x's dtype."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.ragged_dot_general(x, weights, groups, BY_EXPERT, precision=precision)


class ExpertsParameters(nnx.Module):
    """Parameters of the feed-forward; those that it does not have are None.

    Attributes:
      router: [experts, hidden]. router_bias: f32 [experts].
      up_proj: [experts, 2 · size, in], of each expert the rows gate | up; in is hidden or latent. Without a gate
        [experts, size, in].
      down_proj: [experts, in, size].
      latent_in: [latent, hidden]. latent_out: [hidden, latent].
      shared: Of the shared experts. shared_gate: [1, hidden].
    """

    def __init__(self, experts: Experts, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        number, size, latent = experts.router.experts, experts.size, experts.latent
        read, part = hidden if latent is None else latent, Part("channels", size)

        def matrices(rows, columns, axes):
            return parameter(rngs, (number, rows, columns), (None, *axes), initializer, dtype=dtype)

        def matrix(rows, columns):
            return parameter(rngs, (rows, columns), (None, None), initializer, dtype=dtype)

        self.router, biased = matrix(number, hidden), experts.router.bias
        bias = parameter(rngs, (number,), (None,), zeros, dtype=dtype, keep_float32=True) if biased else None
        self.router_bias = bias
        parts = (part, part) if experts.gated else (part,)
        self.up_proj = matrices(len(parts) * size, read, (parts, None))
        self.down_proj = matrices(read, size, (None, (part,)))
        self.latent_in = None if latent is None else matrix(latent, hidden)
        self.latent_out = None if latent is None else matrix(hidden, latent)
        given = {"initializer": initializer, "rngs": rngs, "dtype": dtype}
        self.shared: Any = None if experts.shared is None else experts.shared.parameters(hidden, **given)
        self.shared_gate = matrix(1, hidden) if experts.shared is not None and experts.shared_gate else None
