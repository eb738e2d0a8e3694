"""Qwen3.5's softmax layer: grouped queries, normalised q and k, partial rotary positions, a gate on the output."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.models.layers import Initializer, linear, parameter, rms_norm, rotate, zeros

type Array = jax.Array
type Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class GatedAttention(nnx.Module):
    """Parameters of the layer, with the names, order and shapes of a Qwen3.5 checkpoint's `self_attn`.

    Attributes:
      q_proj: [heads · 2 · head_dim, hidden]; each head's rows are query | gate.
      k_proj, v_proj: [kv_heads · head_dim, hidden].
      q_norm, k_norm: [head_dim], centred at zero.
      o_proj: [hidden, heads · head_dim].
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        initializer: Initializer,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        queries, keys = heads * head_dim, kv_heads * head_dim
        self.q_proj = parameter(rngs, (2 * queries, hidden), ("query_heads", None), initializer, dtype=dtype)
        self.k_proj = parameter(rngs, (keys, hidden), ("kv_heads", None), initializer, dtype=dtype)
        self.v_proj = parameter(rngs, (keys, hidden), ("kv_heads", None), initializer, dtype=dtype)
        self.q_norm = parameter(rngs, (head_dim,), (None,), zeros, dtype=dtype)
        self.k_norm = parameter(rngs, (head_dim,), (None,), zeros, dtype=dtype)
        self.o_proj = parameter(rngs, (hidden, queries), (None, "query_heads"), initializer, dtype=dtype)


def gated_attention(
    layer: GatedAttention, x: Array, *, angles: tuple[Array, Array], attend: Attend
) -> tuple[Array, Any]:
    """Applies the layer.

    Args:
      layer: Its parameters.
      x: [batch, time, hidden].
      angles: Cosines and sines of the positions, from `rotary_angles`.
      attend: (q [batch, time, heads, head_dim], k, v [batch, time, kv_heads, head_dim]) -> (out like q, its memory).

    Returns:
      [batch, time, hidden] in x's dtype, and attend's memory.
    """
    batch, time = x.shape[:2]
    with jax.named_scope("projections"):
        both = linear(x, layer.q_proj).reshape(batch, time, layer.heads, 2 * layer.head_dim)
        q, gate = jnp.split(both, 2, axis=-1)
        k = linear(x, layer.k_proj).reshape(batch, time, layer.kv_heads, layer.head_dim)
        v = linear(x, layer.v_proj).reshape(batch, time, layer.kv_heads, layer.head_dim)
        q = rotate(rms_norm(q, layer.q_norm, eps=layer.eps), angles)
        k = rotate(rms_norm(k, layer.k_norm, eps=layer.eps), angles)
    with jax.named_scope("attention"):
        out, memory = attend(q, k, v)
    with jax.named_scope("output"):
        out = out * jax.nn.sigmoid(gate)
        return linear(out.reshape(batch, time, layer.heads * layer.head_dim), layer.o_proj), memory
