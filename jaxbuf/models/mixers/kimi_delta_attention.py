"""The Kimi Delta Attention mixer: Gated DeltaNet with a decay for each key channel, as Kimi Linear and Ling 3.0 have
it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.axes import Array, Float
from jaxbuf.models.layers import (
    Initializer,
    linear,
    linear_float32,
    log_rate,
    ones,
    output,
    parameter,
    step_bias,
    uniform,
)
from jaxbuf.models.mixers.recurrent_mixer import RecurrentMixer
from jaxbuf.models.projections import Summands, project
from jaxbuf.models.tensor_parallel import Part
from jaxbuf.recurrence.gated_norm import gated_norm
from jaxbuf.recurrence.prepare import Weights


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttention(RecurrentMixer):
    """The mixer.

    Attributes:
      spec, width, eps, devices, same_key_head: As in `RecurrentMixer`; of the spec decay is "channel".
      rank: Numbers between the two projections behind the decay, and between those behind the output's gate; None: it
        is one projection each.
      lower_bound: A logarithm of the decay is lower_bound · sigmoid(exp(A_log) · (x + dt_bias)), so never below it;
        None: -exp(A_log) · softplus(x + dt_bias), without a bound.
      wide_rate: Whether A_log is kept as [1, 1, heads, 1], as Kimi Linear's files have it; else it is [heads].

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture (2025), sections 3 and 4; the
    bounded decay as Ling 3.0 has it.
    """

    rank: int | None = None
    lower_bound: float | None = None
    wide_rate: bool = False

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        return KimiDeltaAttentionParameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def __call__(
        self, parameters: "KimiDeltaAttentionParameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Applies the layer; `plan` is one of `jaxbuf.recurrence.recurrent_plan`."""
        p, spec, (rows, time) = parameters, self.spec, x.shape[:2]
        with jax.named_scope("projections"):
            direct = self.rank is None
            weights = [w[...] for w in (p.in_proj_qkv, p.decay, p.gate, p.in_proj_b)]
            products = project(x, weights, float32=(False, direct, False, True), target=plan.target)
            qkv, decay, z, b = products
            if p.decay_up is not None and p.gate_up is not None:
                decay, z = linear_float32(decay, p.decay_up), linear(z, p.gate_up)
        weights = Weights(p.conv1d[...], p.A_log[...].reshape(spec.heads), p.dt_bias[...])
        decay = decay.reshape(rows, time, spec.heads, spec.key_dim)
        inputs, memory = plan.prepare(memory, spec, weights, qkv, decay, b, lower_bound=self.lower_bound)
        out, memory = plan.recur(memory, spec, *inputs)
        out = gated_norm(out, z, p.norm[...], eps=self.eps, activation="sigmoid", target=plan.target)
        with jax.named_scope("output"):
            return output(out, p.out_proj, None, self.devices, plan.target), memory


class KimiDeltaAttentionParameters(nnx.Module):
    """Parameters of the mixer; those that it does not have are None. There are as many key heads as heads.

    Attributes:
      in_proj_qkv: [2 · heads · key_dim + heads · value_dim, hidden], rows ordered q | k | v.
      in_proj_b: [heads, hidden], the write strength.
      decay, decay_up: [heads · key_dim, hidden], or [rank, hidden] and then [heads · key_dim, rank].
      gate, gate_up: The same of the output norm's gate, with value_dim for key_dim.
      conv1d: [rows of in_proj_qkv, width].
      A_log: f32 [heads] or [1, 1, heads, 1].
      dt_bias: f32 [heads · key_dim].
      norm: [value_dim], a plain scale.
      out_proj: [hidden, heads · value_dim].
    """

    def __init__(
        self, mixer: KimiDeltaAttention, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        spec, channels, width, rank = mixer.spec, mixer.channels, mixer.width, mixer.rank
        heads, values = spec.heads, spec.heads * spec.value_dim
        each, of_values = (Part("heads", heads),), Part("heads", heads, spec.value_dim)
        of_keys = Part("heads", heads, spec.key_dim)
        every = of_keys, of_keys, of_values

        def matrix(rows, columns, axes):
            return parameter(rngs, (rows, columns), axes, initializer, dtype=dtype)

        def of_gate(part):
            """One projection, or two."""
            if rank is None:
                return matrix(part.length, hidden, ((part,), None)), None
            return matrix(rank, hidden, (None, None)), matrix(part.length, rank, ((part,), None))

        def float32(shape, axes, initialize):
            return parameter(rngs, shape, axes, initialize, dtype=dtype, keep_float32=True)

        self.in_proj_qkv = matrix(channels, hidden, (every, None))
        self.in_proj_b = matrix(heads, hidden, (each, None))
        self.decay, self.decay_up = of_gate(of_keys)
        self.gate, self.gate_up = of_gate(of_values)
        self.conv1d = parameter(rngs, (channels, width), (every, None), uniform(width**-0.5), dtype=dtype)
        wide = ((1, 1, heads, 1), (None, None, each, None))
        self.A_log = float32(*(wide if mixer.wide_rate else ((heads,), (each,))), log_rate)
        self.dt_bias = float32((of_keys.length,), ((of_keys,),), step_bias)
        self.norm = parameter(rngs, (spec.value_dim,), (None,), ones, dtype=dtype)
        self.out_proj = matrix(hidden, values, (None, (of_values,)))
