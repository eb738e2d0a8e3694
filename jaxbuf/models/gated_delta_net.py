"""The Gated DeltaNet layer: one forward, whatever memory it runs on.

The order of its parts stands here once. What differs between training, prefill and decoding is where the convolution's
past and the recurrent state live: two functions that the caller hands in.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.layers import Initializer, linear, linear_float32, ones, parameter
from jaxbuf.recurrence.gated_norm import gated_norm
from jaxbuf.recurrence.prepare import Inputs, Weights
from jaxbuf.recurrence.spec import RecurrenceSpec

type Array = jax.Array
type Prepare = Callable[[RecurrenceSpec, Weights, Array, Array, Array], tuple[Inputs, Any]]
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
    layer: GatedDeltaNet, x: Array, *, prepare: Prepare, recur: Recur, implementation: str = "auto"
) -> tuple[Array, tuple[Any, Any]]:
    """Applies the layer.

    Args:
      layer: Its parameters.
      x: [batch, time, hidden].
      prepare: (spec, weights, qkv, a, b) -> (the recurrence's inputs, the convolution's memory), see
        `jaxbuf.recurrence.prepare`.
      recur: (spec, q, k, v, log_decay, beta) -> (out [batch, time, heads, value_dim], its memory).
      implementation: Of `gated_norm`; only "xla" has a gradient.

    Returns:
      [batch, time, hidden] in x's dtype, and the two memories (convolution's, recurrence's).

    Source: Yang et al., Gated Delta Networks (2024), section 3.4, as Qwen3.5 has it.
    """
    with jax.named_scope("projections"):
        qkv, z = linear(x, layer.in_proj_qkv), linear(x, layer.in_proj_z)
        a, b = linear_float32(x, layer.in_proj_a), linear_float32(x, layer.in_proj_b)
    weights = Weights(layer.conv1d[...], layer.A_log[...], layer.dt_bias[...])
    inputs, ring = prepare(layer.spec, weights, qkv, a, b)
    out, memory = recur(layer.spec, *inputs)
    out = gated_norm(out, z, layer.norm[...], eps=layer.eps, implementation=implementation)
    with jax.named_scope("output"):
        return linear(out, layer.out_proj), (ring, memory)


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
