"""Softmax attention with grouped queries, and, where an architecture has them, rotary positions, norms of queries and
keys, biases, a gate on the output, and multipliers."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.attention.paged import init_kv
from jaxbuf.attention.paged_memory import PageTable
from jaxbuf.attention.rotary import Rotary, rotate
from jaxbuf.axes import Array, Float
from jaxbuf.models.config import ATTENTION
from jaxbuf.models.layers import (
    Initializer,
    Norm,
    add_bias,
    norm_weight,
    output,
    parameter,
    rms_norm,
    scaled,
    zeros,
)
from jaxbuf.models.projections import project
from jaxbuf.models.tensor_parallel import Part, share


@dataclasses.dataclass(frozen=True)
class Attention:
    """The mixer.

    Attributes:
      heads, kv_heads: Query heads, a multiple of the key and value heads.
      head_dim: Of queries, keys and values.
      rotary: The positions; None: there are none, and queries and keys are not turned.
      norm: Of each head's queries and keys, before they are turned; None: there is none.
      gate: Whether the outputs are multiplied with the sigmoid of a projection of the input.
      bias: Whether the four projections add one.
      input_scale, score_scale, output_scale: The input, the scores q · k / sqrt(head_dim) and the output are multiplied
        with them.
      devices: Who share the heads; the numbers of heads are then one device's.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    norm: Norm | None = None
    gate: bool = False
    bias: bool = False
    input_scale: float = 1.0
    score_scale: float = 1.0
    output_scale: float = 1.0
    devices: int = 1

    kind: ClassVar = ATTENTION

    @property
    def width(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        return 0

    @property
    def kv_numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    def spread(self, devices: int) -> "Attention":
        """What each of so many devices has of it; errors as in `Mixer.spread`."""
        heads = share("query heads", self.heads, devices)
        kv_heads = share("key and value heads", self.kv_heads, devices, repeated=True)
        return dataclasses.replace(self, heads=heads, kv_heads=kv_heads, devices=devices)

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        return AttentionParameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def memory(self, shared: PageTable, dtypes):
        sizes = {"pages": shared.pages, "page_size": shared.page_size}
        return init_kv(**sizes, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtypes.dtype)

    def __call__(
        self, parameters: "AttentionParameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"], Any]:
        """Applies the layer; `plan` is one of `jaxbuf.attention.attention_plan`."""
        p, (batch, time) = parameters, x.shape[:2]

        with jax.named_scope("projections"):
            x = scaled(x, self.input_scale)
            projected = project(x, [w[...] for w in (p.q_proj, p.k_proj, p.v_proj)], target=plan.target)
            biased = [add_bias(y, bias) for y, bias in zip(projected, (p.q_bias, p.k_bias, p.v_bias), strict=True)]
            heads = self.heads, self.kv_heads, self.kv_heads
            q, k, v = (y.reshape(batch, time, n, -1) for y, n in zip(biased, heads, strict=True))
            gate = None
            if self.gate:
                q, gate = jnp.split(q, 2, axis=-1)
            if self.norm is not None and p.q_norm is not None and p.k_norm is not None:
                q, k = rms_norm(q, p.q_norm, self.norm), rms_norm(k, p.k_norm, self.norm)
            if self.rotary is not None:
                angles = plan.angles(self.rotary)
                q, k = rotate(q, angles), rotate(k, angles)
            q = scaled(q, self.score_scale)
        with jax.named_scope("attention"):
            out, memory = plan.attend(memory, q, k, v)
        with jax.named_scope("output"):
            if gate is not None:
                out = out * jax.nn.sigmoid(gate)
            out = out.reshape(batch, time, self.heads * self.head_dim)
            return scaled(output(out, p.o_proj, p.o_bias, self.devices), self.output_scale), memory


class AttentionParameters(nnx.Module):
    """Parameters of the mixer; those that it does not have are None.

    Attributes:
      q_proj: [heads · head_dim, hidden]; with a gate twice as many rows, each head's are query | gate.
      k_proj, v_proj: [kv_heads · head_dim, hidden].
      q_norm, k_norm: [head_dim].
      o_proj: [hidden, heads · head_dim].
      q_bias, k_bias, v_bias, o_bias: One number for each row of the projection.
    """

    def __init__(self, mixer: Attention, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        queries, keys, norm = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.norm

        def matrix(rows, columns, axes):
            return parameter(rngs, (rows, columns), axes, initializer, dtype=dtype)

        def bias(rows, axis):
            return parameter(rngs, (rows,), (axis,), zeros, dtype=dtype) if mixer.bias else None

        read = 2 * queries if mixer.gate else queries
        heads, kv_heads = (
            (Part("heads", mixer.heads, read // mixer.heads),),
            (Part("key_heads", mixer.kv_heads, mixer.head_dim),),
        )
        self.q_proj = matrix(read, hidden, (heads, None))
        self.k_proj = matrix(keys, hidden, (kv_heads, None))
        self.v_proj = matrix(keys, hidden, (kv_heads, None))
        self.o_proj = matrix(hidden, queries, (None, (Part("heads", mixer.heads, mixer.head_dim),)))
        self.q_norm = None if norm is None else norm_weight(rngs, mixer.head_dim, norm, dtype=dtype)
        self.k_norm = None if norm is None else norm_weight(rngs, mixer.head_dim, norm, dtype=dtype)
        self.q_bias, self.o_bias = bias(read, heads), bias(hidden, None)
        self.k_bias, self.v_bias = bias(keys, kv_heads), bias(keys, kv_heads)
