"""Softmax attention with grouped queries, and, where an architecture has them, rotary positions, norms of queries and
keys, biases, a gate on the output, and multipliers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.attention.gated_pages import init_gated_kv
from jaxbuf.attention.paged import init_kv
from jaxbuf.attention.rotary import Rotary, rotate
from jaxbuf.attention.selection import Quest, Selection
from jaxbuf.axes import Array, Float
from jaxbuf.models.admission import Admission, Keys
from jaxbuf.models.config import ATTENTION, GATED
from jaxbuf.models.layers import (
    Initializer,
    Norm,
    add_bias,
    norm_weight,
    output,
    parameter,
    rms_norm,
    rms_norm_heads,
    scaled,
    zeros,
)
from jaxbuf.models.norm_and_rotate import norm_and_rotate
from jaxbuf.models.projections import Summands, project
from jaxbuf.models.tensor_parallel import Part, share


@dataclasses.dataclass(frozen=True)
class Attention:
    """The mixer.

    Attributes:
      heads, kv_heads: Query heads, a multiple of the key and value heads.
      head_dim: Of queries, keys and values.
      rotary: The positions; None: there are none, and queries and keys are not turned.
      norm: Of each head's queries and keys, before they are turned; None: there is none.
      norm_all_heads: Whether that is one norm over the queries of all heads, and one over the keys.
      gate: Whether the outputs are multiplied with the sigmoid of a projection of the input.
      bias, output_bias: Whether the projections of queries, keys and values add one, and whether the output's does;
        None: it does if they do.
      input_scale, score_scale, output_scale: The input, the scores q · k / sqrt(head_dim) and the output are multiplied
        with them.
      devices: Who share the heads; the numbers of heads are then one device's.
      admission: Which keys are kept once they leave a local window; None: all are.
      selection: Which of the keys that are there each query reads; None: all that it may see.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None
    norm: Norm | None = None
    norm_all_heads: bool = False
    gate: bool = False
    bias: bool = False
    output_bias: bool | None = None
    input_scale: float = 1.0
    score_scale: float = 1.0
    output_scale: float = 1.0
    devices: int = 1
    admission: Admission | None = None
    selection: Selection | None = None

    @property
    def kind(self) -> str:
        return ATTENTION if self.admission is None else GATED

    @property
    def biased(self) -> str:
        """The projections that add a bias, of "qkvo"."""
        output = self.bias if self.output_bias is None else self.output_bias
        return ("qkv" if self.bias else "") + ("o" if output else "")

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

    def memory(self, shared: Any, dtypes, number: int):
        given = {"head_dim": self.head_dim, "dtype": dtypes.dtype}
        if self.selection is not None and (self.admission is not None or not isinstance(self.selection, Quest)):
            raise ValueError(f"selection must be a Quest without gates where there is a memory, got {self.selection}")
        if self.admission is not None:
            return init_gated_kv(shared, **given, number=number)
        return init_kv(pages=shared.pages, page_size=shared.page_size, kv_heads=self.kv_heads, **given)

    def __call__(
        self, parameters: "AttentionParameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Applies the layer; `plan` is one of `jaxbuf.attention.attention_plan`."""
        p, (batch, time) = parameters, x.shape[:2]

        with jax.named_scope("projections"):
            x = scaled(x, self.input_scale)
            projected = project(x, [w[...] for w in (p.q_proj, p.k_proj, p.v_proj)], target=plan.target)
            biased = [add_bias(y, bias) for y, bias in zip(projected, (p.q_bias, p.k_bias, p.v_bias), strict=True)]
            heads = self.heads, self.kv_heads, self.kv_heads
            q, k, v = (y.reshape(batch, time, n, -1) for y, n in zip(biased, heads, strict=True))
            gate = q[..., self.head_dim :] if self.gate else None
            first, before = q, k
            if self.rotary is not None and self.admission is None and not self.norm_all_heads:
                weights = [w[...] for w in (p.q_norm, p.k_norm) if w is not None]
                angles = plan.angles(self.rotary)
                q, k = norm_and_rotate(q, k, angles, self.norm, tuple(weights), target=plan.target)
            else:
                q = q[..., : self.head_dim]
                if self.norm is not None and p.q_norm is not None and p.k_norm is not None:
                    q, k = self._normalised(q, p.q_norm), self._normalised(k, p.k_norm)
                first, before = q[:, :, :: self.heads // self.kv_heads], k
                if self.admission is not None:
                    q, k = self.admission.without_borrowed(q, k)
                if self.rotary is not None:
                    angles = plan.angles(self.rotary)
                    q, k = rotate(q, angles), rotate(k, angles)
            q, scores = scaled(q, self.score_scale), ()
        if self.admission is not None:
            with jax.named_scope("admission"):
                scores = (self.admission.score(p.admission, Keys(x, before, k, first, plan.positions)),)
                q, k = self.admission.without_borrowed(q, k)  # the rotation brought in another channel's numbers
        with jax.named_scope("attention"):
            if self.selection is None:
                out, memory = plan.attend(memory, q, k, v, *scores)
            else:
                out, memory = plan.attend_selected(memory, q, k, v, *scores, self.selection, self.rotary)
        with jax.named_scope("output"):
            if gate is not None:
                out = out * jax.nn.sigmoid(gate)
            out = out.reshape(batch, time, self.heads * self.head_dim)
            return output(out, p.o_proj, p.o_bias, self.devices, plan.target, self.output_scale), memory

    def _normalised(self, x: Array, weight: nnx.Param) -> Array:
        """The norm of queries or keys [batch, time, heads, head_dim]."""
        assert self.norm is not None  # a mixer without has no weight
        return (
            rms_norm_heads(x, weight, self.norm, self.devices)
            if self.norm_all_heads
            else rms_norm(x, weight, self.norm)
        )


class AttentionParameters(nnx.Module):
    """Parameters of the mixer; those that it does not have are None.

    Attributes:
      q_proj: [heads · head_dim, hidden]; with a gate twice as many rows, each head's are query | gate.
      k_proj, v_proj: [kv_heads · head_dim, hidden].
      q_norm, k_norm: [head_dim], or, of norms over all heads, a number for each channel of each head.
      o_proj: [hidden, heads · head_dim].
      q_bias, k_bias, v_bias, o_bias: One number for each row of the projection.
      admission: Those of the score, or None.
    """

    def __init__(self, mixer: Attention, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        queries, keys, norm = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim, mixer.norm

        def matrix(rows, columns, axes):
            return parameter(rngs, (rows, columns), axes, initializer, dtype=dtype)

        def bias(part, rows, axis):
            return parameter(rngs, (rows,), (axis,), zeros, dtype=dtype) if part in mixer.biased else None

        def of_norm(kind, count):
            if norm is None:
                return None
            if not mixer.norm_all_heads:
                return norm_weight(rngs, mixer.head_dim, norm, dtype=dtype)
            return norm_weight(rngs, count * mixer.head_dim, norm, (Part(kind, count, mixer.head_dim),), dtype=dtype)

        read = 2 * queries if mixer.gate else queries
        heads, kv_heads = (
            (Part("heads", mixer.heads, read // mixer.heads),),
            (Part("key_heads", mixer.kv_heads, mixer.head_dim),),
        )
        self.q_proj = matrix(read, hidden, (heads, None))
        self.k_proj = matrix(keys, hidden, (kv_heads, None))
        self.v_proj = matrix(keys, hidden, (kv_heads, None))
        self.o_proj = matrix(hidden, queries, (None, (Part("heads", mixer.heads, mixer.head_dim),)))
        self.q_norm = of_norm("heads", mixer.heads)
        self.k_norm = of_norm("key_heads", mixer.kv_heads)
        self.q_bias, self.o_bias = bias("q", read, heads), bias("o", hidden, None)
        self.k_bias, self.v_bias = bias("k", keys, kv_heads), bias("v", keys, kv_heads)
        admission, sizes = mixer.admission, (hidden, mixer.kv_heads, mixer.head_dim)
        self.admission = None if admission is None else admission.score.parameters(*sizes, rngs=rngs)
