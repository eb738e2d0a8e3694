"""From the projections of a Gated DeltaNet or Kimi Delta Attention layer to what `extend` and `chunked` take.

The short convolution, SiLU, normalised queries and keys, and the gates: `prepare_sequence` for sequences that start
from nothing, `prepare` for what follows on the inputs in a ring.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_rows
from jaxbuf.axes import Array, Float, Float32, Int, Int32
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.recurrence.convolution import (
    call_sizes,
    causal_convolution,
    check_ring,
    extend_checked_ring,
    launch_integers,
    launch_parents,
    ring_places,
)
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.target import Target

EPS = 1e-6  # of the norms of q and k


class Weights(NamedTuple):
    """The parameters of a layer that stand between its projections and the recurrence.

    Attributes:
      convolution: The channels ordered q | k | v.
      A_log: The logarithm of the rate of decay.
      dt_bias: Is added to a: a number for each head, or for each of its key channels where these have decays.
    """

    convolution: Float[Array, "channels width"]
    A_log: Float32[Array, "heads"]
    dt_bias: Float32[Array, "..."]


class Inputs(NamedTuple):
    """What the recurrence takes, with q scaled by key_dim^-1/2."""

    q: Float[Array, "batch time key_heads key_dim"]
    k: Float[Array, "batch time key_heads key_dim"]
    v: Float[Array, "batch time heads value_dim"]
    log_decay: Float32[Array, "batch time heads ..."]
    beta: Float32[Array, "batch time heads"]


@jax.named_scope("convolution")
def prepare_sequence(
    spec: RecurrenceSpec,
    weights: Weights,
    qkv: Float[Array, "batch time channels"],
    a: Float32[Array, "batch time heads ..."],
    b: Float32[Array, "batch time heads"],
    *,
    lower_bound: float | None = None,
) -> Inputs:
    """The inputs of the recurrence over sequences that start from nothing. Differentiable.

    Args:
      spec: A family with decay="head" or "channel".
      weights: Of the layer.
      qkv: Ordered q | k | v; channels = 2 · key_heads · key_dim + heads · value_dim.
      a: The projection behind the decay, in the shape of log_decay.
      b: The one behind the write strength.
      lower_bound: No logarithm of a decay is below it; None: there is no bound.

    Returns:
      q, k and v in qkv's dtype; beta = sigmoid(b); log_decay = -exp(A_log) · softplus(a + dt_bias), or with a bound
      lower_bound · sigmoid(exp(A_log) · (a + dt_bias)).

    Raises:
      ValueError: A shape or dtype does not fit.

    Source: Yang et al., Gated Delta Networks (2024), section 3.4, with the gates of Mamba-2, as Qwen3.5 has it; Kimi
    Team, Kimi Linear (2025), section 4.
    """
    _check(spec, weights, qkv, a, b)
    mixed = jax.nn.silu(causal_convolution(qkv, weights.convolution))
    return _inputs(spec, weights, mixed, a, b, lower_bound)


def prepare(
    spec: RecurrenceSpec,
    weights: Weights,
    ring: Float[Array, "slots ring channel_rows lanes"],
    qkv: Float[Array, "rows time channels"],
    a: Float32[Array, "rows time heads ..."],
    b: Float32[Array, "rows time heads"],
    *,
    lower_bound: float | None = None,
    slots: Int[Array, "rows"],
    start: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    order: Int32[Array, "slots ring"] | None = None,
    parents: Int[Array, "rows time"] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Inputs, Float[Array, "slots ring channel_rows lanes"]]:
    """The inputs of the recurrence for the next tokens of each slot, which its ring of the last inputs takes in.

    Args:
      spec, weights, qkv, a, b, lower_bound: As in `prepare_sequence`.
      ring: From `init_ring`.
      slots, start, lengths, order, parents: As in `extend_ring`. Past its length, and for slot 0, a row's q, k and v
        are zeros and nothing is written.
      implementation, interpret, target: As in `extend_pool`; target None: what qkv lies on.

    Returns:
      The inputs, and the ring.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    _check(spec, weights, qkv, a, b)
    check_ring(ring, qkv.shape[2])
    check_rows("slots", slots, qkv.shape[0])
    asked = ask("prepare", implementation, target, (qkv,), interpret=interpret)
    where = {"slots": slots, "start": start, "lengths": lengths, "order": order, "parents": parents}
    return _prepare(spec, asked, lower_bound, weights, ring, qkv, a, b, **where)


@partial(jax.jit, static_argnums=(0, 1, 2))
@jax.named_scope("convolution")
def _prepare(
    spec: RecurrenceSpec,
    asked: Asked | None,
    lower_bound: float | None,
    weights: Weights,
    ring: Array,
    qkv: Array,
    a: Array,
    b: Array,
    *,
    slots: Array,
    start: Array,
    lengths: Array,
    order: Array | None,
    parents: Array | None,
) -> tuple[Inputs, Array]:
    # A kernel must not be given a slot past the ring: it would write where another array lies.
    slots, start, lengths = launch_integers(ring, slots, start, lengths, qkv.shape[1])
    parents = launch_parents(ring, weights.convolution, qkv, order, parents)
    if asked is not None:
        # Imported here: Pallas takes a while, and a CPU has no use for it.
        from jaxbuf.pallas import prepare as kernels

        call = kernels.Call(
            **call_sizes(ring, weights.convolution, qkv),
            heads=spec.heads,
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            tree=parents is not None,
            eps=EPS,
            decay=spec.decay,
            lower_bound=lower_bound,
        )
        reason = kernels.supports(call, platform=asked.platform, generation=asked.generation)
        if asked.takes(reason):
            if asked.platform == "tpu":
                found = ring_places(ring, call.width, call.time, slots, start, lengths, order)
                places = kernels.tpu.Places(*found, parents)
                how = {"generation": asked.generation, "interpret": asked.interpret}
                inputs, ring = kernels.tpu.prepare(call, ring, weights, (qkv, a, b), places, **how)
            else:
                tree = {"order": order, "parents": parents}
                by_gpu, integers = kernels.gpu.prepare, (slots, start, lengths)
                inputs, ring = by_gpu(call, ring, weights, (qkv, a, b), integers, **tree, interpret=asked.interpret)
            return Inputs(*inputs), ring
        # What serves no head of this size may serve the convolution.
        asked = dataclasses.replace(asked, operation="convolve")
    where = slots, start, lengths, order, parents
    mixed, ring = extend_checked_ring(asked, "silu", (), ring, weights.convolution, None, qkv, *where)
    return _inputs(spec, weights, mixed, a, b, lower_bound), ring


def l2_normalise(x: Float[Array, "..."], *, scale: float = 1.0) -> Float[Array, "..."]:
    """x / sqrt(sum x² + EPS) · scale over the last axis, in float32; returns x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * (jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPS) * scale)
    return wide.astype(x.dtype)


def _inputs(
    spec: RecurrenceSpec, weights: Weights, mixed: Array, a: Array, b: Array, lower_bound: float | None
) -> Inputs:
    """Everything after the convolution and SiLU, whose output is `mixed`."""
    keys, rows = spec.key_heads * spec.key_dim, mixed.shape[:2]
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(*rows, spec.key_heads, spec.key_dim) for x in (q, k))
    rate = jnp.exp(weights.A_log).reshape(-1, *[1] * (a.ndim - 3))[None, None]
    raw = a + weights.dt_bias.reshape(a.shape[2:])[None, None]
    log_decay = -rate * jax.nn.softplus(raw) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * raw)
    return Inputs(
        q=l2_normalise(q, scale=spec.key_dim**-0.5),
        k=l2_normalise(k),
        v=v.reshape(*rows, spec.heads, spec.value_dim),
        log_decay=log_decay,
        beta=jax.nn.sigmoid(b),
    )


def _check(spec: RecurrenceSpec, weights: Weights, qkv: Array, a: Array, b: Array) -> None:
    if spec.decay == "none":
        raise ValueError(f'spec.decay must be "head" or "channel", got {spec.decay!r}')
    channels = spec.channels
    if qkv.ndim != 3 or qkv.shape[2] != channels:
        raise ValueError(f"qkv must be [batch, time, {channels}], got shape {qkv.shape}")
    if weights.convolution.ndim != 2 or weights.convolution.shape[0] != channels:
        raise ValueError(f"convolution must be [{channels}, width], got shape {weights.convolution.shape}")
    heads = (spec.heads,)
    biases = heads if spec.decay == "head" else (spec.heads * spec.key_dim,)
    gates = {"a": (a, spec.decay_shape(*qkv.shape[:2])), "b": (b, (*qkv.shape[:2], *heads))}
    gates |= {"A_log": (weights.A_log, heads), "dt_bias": (weights.dt_bias, biases)}
    for name, (array, shape) in gates.items():
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 {shape}, got {array.dtype} {array.shape}")
