"""The Gated DeltaNet layer: one forward, whatever memory it runs on.

Projections, gates, normalisation and the gated output norm stand here once. What differs between training, prefill and
decoding is where the convolution's past and the recurrent state live: two functions that the caller hands in.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.layers import Initializer, l2_normalise, linear, linear_float32, ones, parameter, rms_norm
from jaxbuf.recurrence.spec import RecurrenceSpec

type Array = jax.Array
type Convolve = Callable[[Array, Array], tuple[Array, Any]]
type Recur = Callable[[RecurrenceSpec, Array, Array, Array, Array, Array], tuple[Array, Any]]


class GatedDeltaNet(nnx.Module):
    """Parameters of the layer, with the names, order and shapes of a Qwen3.5 checkpoint's `linear_attn`.

    Attributes:
      spec: The recurrence (static).
      eps: Of the output norm (static).
      in_proj_qkv: [2 · key_heads · key_dim + heads · value_dim, hidden], rows ordered q | k | v.
      in_proj_z: [heads · value_dim, hidden], the output norm's gate.
      in_proj_b, in_proj_a: [heads, hidden], write strength and decay.
      conv1d: [rows of in_proj_qkv, width].
      A_log, dt_bias: f32 [heads].
      norm: [value_dim], a plain scale.
      out_proj: [hidden, heads · value_dim].
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        hidden: int,
        *,
        width: int,
        eps: float,
        initializer: Initializer,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        self.spec, self.eps = spec, eps
        values = spec.heads * spec.value_dim
        channels = 2 * spec.key_heads * spec.key_dim + values
        self.in_proj_qkv = parameter(rngs, (channels, hidden), ("key_heads", None), initializer, dtype=dtype)
        self.in_proj_z = parameter(rngs, (values, hidden), ("heads", None), initializer, dtype=dtype)
        self.in_proj_b = parameter(rngs, (spec.heads, hidden), ("heads", None), initializer, dtype=dtype)
        self.in_proj_a = parameter(rngs, (spec.heads, hidden), ("heads", None), initializer, dtype=dtype)
        self.conv1d = parameter(rngs, (channels, width), ("key_heads", None), _uniform(width**-0.5), dtype=dtype)
        self.A_log = parameter(rngs, (spec.heads,), ("heads",), _log_rate, dtype=dtype, keep_float32=True)
        self.dt_bias = parameter(rngs, (spec.heads,), ("heads",), _step_bias, dtype=dtype, keep_float32=True)
        self.norm = parameter(rngs, (spec.value_dim,), (None,), ones, dtype=dtype)
        self.out_proj = parameter(rngs, (hidden, values), (None, "heads"), initializer, dtype=dtype)


def gated_delta_net(
    layer: GatedDeltaNet, x: Array, *, convolve: Convolve, recur: Recur
) -> tuple[Array, tuple[Any, Any]]:
    """Applies the layer.

    Args:
      layer: Its parameters.
      x: [batch, time, hidden].
      convolve: (qkv [batch, time, channels], weight [channels, width]) -> (the same shape before the activation, its
        memory).
      recur: (spec, q, k, v, log_decay, beta) -> (out [batch, time, heads, value_dim], its memory).

    Returns:
      [batch, time, hidden] in x's dtype, and the two memories (convolution's, recurrence's).

    Source: Yang et al., Gated Delta Networks (2024), section 3.4, as Qwen3.5 has it.
    """
    spec = layer.spec
    with jax.named_scope("projections"):
        mixed = linear(x, layer.in_proj_qkv)
        z = linear(x, layer.in_proj_z)
        log_decay, beta = gates(layer, x)
    with jax.named_scope("convolution"):
        mixed, ring = convolve(mixed, layer.conv1d[...])
        q, k, v = _split_heads(spec, jax.nn.silu(mixed))
        q, k = l2_normalise(q, scale=spec.key_dim**-0.5), l2_normalise(k)
    out, memory = recur(spec, q, k, v, log_decay, beta)
    with jax.named_scope("output"):
        return _gated_output(layer, out, z), (ring, memory)


def gates(layer: GatedDeltaNet, x: Array) -> tuple[Array, Array]:
    """log_decay = -exp(A_log) · softplus(a + dt_bias) and beta = sigmoid(b), f32 [batch, time, heads]."""
    a, b = linear_float32(x, layer.in_proj_a), linear_float32(x, layer.in_proj_b)
    rate, bias = jnp.exp(layer.A_log[...]), layer.dt_bias[...]
    return -rate[None, None] * jax.nn.softplus(a + bias[None, None]), jax.nn.sigmoid(b)


def _split_heads(spec: RecurrenceSpec, mixed: Array) -> tuple[Array, Array, Array]:
    keys = spec.key_heads * spec.key_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    head = (*mixed.shape[:2], spec.key_heads, spec.key_dim)
    return q.reshape(head), k.reshape(head), v.reshape(*mixed.shape[:2], spec.heads, spec.value_dim)


def _gated_output(layer: GatedDeltaNet, out: Array, z: Array) -> Array:
    gate = jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)
    out = rms_norm(out, layer.norm, eps=layer.eps, offset=0.0)
    out = (out.astype(jnp.float32) * gate).astype(z.dtype)
    return linear(out.reshape(z.shape), layer.out_proj)


def _uniform(bound: float) -> Initializer:
    def initialize(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return initialize


def _log_rate(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A uniform in [1, 16], stored as its logarithm, as Mamba-2 starts it."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _step_bias(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The inverse softplus of a step log-uniform in [0.001, 0.1]: heads start with memories of different length."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))
