"""Experts: a feed-forward in which a router gives each token some of many MLPs, and weights for what these return.

No token is dropped, and there is no loop over experts: the tokens are sorted by expert, and a ragged product multiplies
each group with its expert's matrix. Every token is computed by itself, so padded and dead ones change no other.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.axes import Array, Float, Float32, Int32
from jaxbuf.models.config import MLP, SquaredReluMLP
from jaxbuf.models.layers import Initializer, add_bias, linear, linear_float32, parameter, scaled, zeros
from jaxbuf.models.projections import summed
from jaxbuf.models.tensor_parallel import EXPERT, Part, add_devices, share
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
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
      scale: What the weights are multiplied with in the end.
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
        self,
        logits: Float32[Array, "tokens experts"],
        bias: Float32[Array, "experts"] | None = None,
        *,
        implementation: str = "auto",
        interpret: bool = False,
        target: Target | str | None = None,
    ) -> tuple[Int32[Array, "tokens chosen"], Float32[Array, "tokens chosen"]]:
        """The experts of each token, the best first, and their weights, which are differentiable.

        Args:
          logits: Of each token and expert.
          bias: Of each expert, if there is one.
          implementation, interpret, target: As in `mixture`. On TPUs the choice is XLA's.

        Raises:
          ValueError: The implementation asked for can't serve the call; it says why.
        """
        asked = ask("experts", implementation, target, (logits,), interpret=interpret)
        return _choose(self, asked, logits, bias)

    def _defined(self, logits: Array, bias: Array | None) -> tuple[Array, Array]:
        """The choice as XLA computes it."""
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


@partial(jax.jit, static_argnums=(0, 1))
def _choose(router: Router, asked: Asked | None, logits: Array, bias: Array | None) -> tuple[Array, Array]:
    if asked is None or asked.platform != "gpu":
        return router._defined(logits, bias)
    from jaxbuf.pallas.experts import choose  # as in _mixture

    known = {field.name: getattr(router, field.name) for field in dataclasses.fields(router) if field.name != "scores"}
    choice = choose.Choice(tokens=logits.shape[0], softmax=router.scores == "softmax", **known)
    if not asked.takes(choose.supports(choice)):
        return router._defined(logits, bias)
    run = partial(choose.choose, choice, interpret=asked.interpret)
    return differentiable(run, router._defined)(logits, bias)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The weighted sum of what a token's experts return, and what the shared ones do, which every token has.

    Attributes:
      router: Of the routed experts.
      size: Numbers between the projections of a routed expert.
      gated: Whether an expert is down(silu(gate x) · up x), else down(relu(up x)²).
      latent: Numbers of a token that routed experts read and write, behind a projection and in front of another; None:
        those of the token itself.
      latent_bias: Whether both of these projections add a bias.
      shared: All shared experts, as one MLP; None: there is none.
      shared_gate: Whether what it returns is multiplied with the sigmoid of a projection of the token to one number.
      devices: Who share the routed experts' inner numbers; the size is then that of one.
      expert_devices: Who share the routed experts, each of which has router.experts / expert_devices.

    Source: Qwen3-Next and DeepSeek-V3 (2024), section 2.1.2; with `latent` Nemotron 3.
    """

    router: Router
    size: int
    gated: bool = True
    latent: int | None = None
    latent_bias: bool = False
    shared: MLP | SquaredReluMLP | None = None
    shared_gate: bool = False
    devices: int = 1
    expert_devices: int = 1

    def spread(self, devices: int, expert_devices: int = 1) -> "Experts":
        """What each of so many devices has of it: of `devices` some of every expert's inner numbers, or all if they do
        not divide them, and the shared experts by themselves; of `expert_devices` some of the routed experts.

        Raises:
          ValueError: The routed experts are no multiple of expert_devices.
        """
        share("experts", self.router.experts, expert_devices, axis=EXPERT)
        shared = self.shared and self.shared.spread(devices)
        found = dataclasses.replace(self, shared=shared, expert_devices=expert_devices)
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
        chosen, weights = self.router(linear_float32(tokens, p.router), bias, target=target)
        inner = tokens if p.latent_in is None else linear(tokens, p.latent_in, p.latent_in_bias)
        first, second = p.up_proj[...], p.down_proj[...]
        begin = jax.lax.axis_index(EXPERT) * first.shape[0] if self.expert_devices > 1 else None
        y = mixture(inner, first, second, chosen, weights, gated=self.gated, begin=begin, target=target)
        y = (y if p.latent_out is None else linear(y, p.latent_out)).reshape(x.shape)
        return add_bias(self._with_shared(p, x, y, target), p.latent_out_bias)

    def _with_shared(self, p: "ExpertsParameters", x: Array, y: Array, target: Target | None) -> Array:
        """The sum over all devices of y, what the routed experts return for x on this one, and of the shared ones."""
        add = partial(add_devices, devices=self.devices, expert_devices=self.expert_devices)
        if self.shared is None:
            return add(y)
        # One sum over the devices does for both, unless only one of them is spread or each device adds a bias.
        together = self.shared.devices == self.devices and not self.shared.bias
        shared = dataclasses.replace(self.shared, devices=1) if together else self.shared
        other = summed(shared(p.shared, x, target))
        if p.shared_gate is not None:
            other = other * jax.nn.sigmoid(linear_float32(x, p.shared_gate)).astype(x.dtype)
        if not together:
            return add(y) + other
        if self.expert_devices > 1:  # all devices along the axis have the same
            other = jnp.where(jax.lax.axis_index(EXPERT) == 0, other, 0)
        return add(y + other)


def mixture(
    x: Float[Array, "tokens in"],
    first: Float[Array, "experts _ in"],
    second: Float[Array, "experts out inner"],
    chosen: Int32[Array, "tokens chosen"],
    weights: Float32[Array, "tokens chosen"],
    *,
    gated: bool = True,
    begin: int | Int32[Array, ""] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "tokens out"]:
    """The weighted sum of what the chosen experts make of each token. Differentiable.

    With `begin` only some of the experts are here. Tokens of the others come last, in no group of the products, and
    count as zero.

    Args:
      x: The tokens.
      first: Each expert's first projection, in x's dtype; gated with the rows gate | up.
      second: Its second one.
      chosen: The experts of each token, in [0, experts) if all are here.
      weights: Theirs.
      gated: As in `Experts`.
      begin: The number, among those that tokens choose, of the first expert that is here; None: all are.
      implementation, interpret, target: As in `jaxbuf.models.projections.project`.

    Returns:
      An array of x's dtype, summed in float32.

    Raises:
      ValueError: The implementation asked for can't serve the call; it says why.
    """
    asked = ask("experts", implementation, target, (x,), interpret=interpret)
    begin = None if begin is None else jnp.asarray(begin, jnp.int32)
    return _mixture(gated, asked, x, first, second, chosen, weights, begin)


@partial(jax.jit, static_argnums=(0, 1))
def _mixture(gated: bool, asked: Asked | None, x, first, second, chosen, weights, begin) -> Array:
    defined = partial(_defined, gated)
    if asked is None:
        return defined(x, first, second, weights, chosen, begin)
    # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
    from jaxbuf.pallas.experts import Call, supports

    (rows, (experts, outputs, inner)) = chosen.size, second.shape
    calls = (
        Call(rows, x.shape[1], inner, experts, x.dtype, gated),
        Call(rows, inner, outputs, experts, x.dtype),
    )
    dtypes = "it needs weights in the dtype of x" if {first.dtype, second.dtype} != {x.dtype} else None
    reasons = (dtypes, *(supports(call, platform=asked.platform) for call in calls))
    if not asked.takes(next(filter(None, reasons), None)):
        return defined(x, first, second, weights, chosen, begin)
    by_kernel = {"gpu": _on_gpu, "tpu": _on_tpu}[asked.platform]
    run = partial(by_kernel, calls, asked.interpret)
    return differentiable(run, defined)(x, first, second, weights, chosen, begin)


def _on_tpu(calls, interpret: bool, x, first, second, weights, chosen, begin) -> Array:
    from jaxbuf.pallas.experts import tpu  # as in _mixture

    multiply = partial(tpu.multiply_groups, interpret=interpret)
    products = partial(multiply, calls[0]), partial(multiply, calls[1])
    return _defined(calls[0].gated, x, first, second, weights, chosen, begin, products)


def _on_gpu(calls, interpret: bool, x, first, second, weights, chosen, begin) -> Array:
    from jaxbuf.pallas.experts import gpu, gpu_few, gpu_places  # as in _mixture

    here = chosen if begin is None else chosen - begin
    if gpu_few.serves(x.shape[0], calls):
        inner = gpu_few.expand(calls[0], x, first, here, interpret=interpret)
        return gpu_few.gather(calls[1], inner, second, here, weights, interpret=interpret)
    places, sources, *visits = gpu_places.place_rows(here, calls[0].experts, interpret=interpret)
    how = {"sources": sources, "squared": not calls[0].gated, "interpret": interpret}
    inner = gpu.multiply_groups(calls[0], x, first, *visits, **how)
    each = gpu.multiply_groups(calls[1], inner, second, *visits, interpret=interpret)
    if gpu_places.sums(each.shape[1]):
        return gpu_places.sum_rows(each, places, weights, everywhere=begin is None, interpret=interpret)
    return _weighted(each.at[places].get(mode="fill", fill_value=0), weights, x.dtype)


def _defined(gated: bool, x, first, second, weights, chosen, begin, products=None) -> Array:
    """The mixture of tokens that are sorted by expert; `products`: what multiplies them, XLA unless it is given."""
    multiply_first, multiply_second = products or (_ragged, _ragged)
    sources, places, groups = _sort(chosen, begin, first.shape[0])
    inner = _kept(multiply_first(_kept(x[sources], groups, begin), first, groups), groups, begin)
    if gated:
        # In float32, as the kernels do: roundings of silu would add a quarter to bfloat16's error.
        gate, up = jnp.split(inner.astype(jnp.float32), 2, axis=-1)
        inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    else:
        inner = jnp.square(jax.nn.relu(inner))
    each = _kept(multiply_second(inner, second, groups), groups, begin)
    return _weighted(each[places], weights, x.dtype)


def _sort(chosen: Array, begin: Array | None, here: int):
    """Sorts what experts get by expert; what those elsewhere get comes last.

    Args:
      chosen, begin: As in `mixture`.
      here: How many experts are here.

    Returns:
      int32 [tokens · chosen] the token of each row, and the row of each expert of each token, and int32 [here] the rows
      of each expert's group.
    """
    number, by_expert = chosen.shape[1], chosen.reshape(-1)
    if begin is not None:
        by_expert = by_expert - begin
        by_expert = jnp.where((by_expert >= 0) & (by_expert < here), by_expert, here)
    order = jnp.argsort(by_expert, stable=True).astype(jnp.int32)
    groups = jnp.zeros(here, jnp.int32).at[by_expert].add(1, mode="drop")
    rows = jnp.arange(order.shape[0], dtype=jnp.int32)
    return order // number, jnp.zeros_like(order).at[order].set(rows), groups


def _kept(rows: Array, groups: Array, begin: Array | None) -> Array:
    """Where some experts are elsewhere, zeros for their rows: what a product gives for rows of no group is not
    specified, nor is its gradient."""
    if begin is None:
        return rows
    within = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(groups)
    return jnp.where(within[:, None], rows, 0)


def _weighted(each: Array, weights: Array, dtype: jnp.dtype) -> Array:
    each = each.reshape(*weights.shape, -1).astype(jnp.float32)
    return jnp.sum(each * weights[:, :, None], axis=1).astype(dtype)


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
      latent_in_bias: [latent]. latent_out_bias: [hidden].
      shared: Of the shared experts. shared_gate: [1, hidden].
    """

    def __init__(self, experts: Experts, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        number, size, latent = experts.router.experts, experts.size, experts.latent
        read, part = hidden if latent is None else latent, Part("channels", size)
        every = (Part("experts", number),)

        def matrices(rows, columns, axes):
            return parameter(rngs, (number, rows, columns), (every, *axes), initializer, dtype=dtype)

        def matrix(rows, columns):
            return parameter(rngs, (rows, columns), (None, None), initializer, dtype=dtype)

        def biases(size, there, keep_float32=False):
            return parameter(rngs, (size,), (None,), zeros, dtype=dtype, keep_float32=keep_float32) if there else None

        self.router = matrix(number, hidden)
        self.router_bias = biases(number, experts.router.bias, keep_float32=True)
        parts = (part, part) if experts.gated else (part,)
        self.up_proj = matrices(len(parts) * size, read, (parts, None))
        self.down_proj = matrices(read, size, (None, (part,)))
        self.latent_in = None if latent is None else matrix(latent, hidden)
        self.latent_in_bias = None if latent is None else biases(latent, experts.latent_bias)
        self.latent_out = None if latent is None else matrix(hidden, latent)
        self.latent_out_bias = None if latent is None else biases(hidden, experts.latent_bias)
        given = {"initializer": initializer, "rngs": rngs, "dtype": dtype}
        self.shared: Any = None if experts.shared is None else experts.shared.parameters(hidden, **given)
        self.shared_gate = matrix(1, hidden) if experts.shared is not None and experts.shared_gate else None
