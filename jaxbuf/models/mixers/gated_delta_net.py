"""The Gated DeltaNet mixer: the recurrent layer of Qwen3-Next, Qwen3.5 and Olmo Hybrid."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.axes import Array, Float
from jaxbuf.models.layers import (
    Initializer,
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
class GatedDeltaNet(RecurrentMixer):
    """The mixer.

    Attributes:
      spec, width, eps, devices, same_key_head: As in `RecurrentMixer`.
      negative_eigenvalues: Whether the write strength is twice as large, up to 2: a token may then turn the sign of
        what the state recalls for its key.

    Source: Yang et al., Gated Delta Networks (2024), section 3.4, as Qwen3.5 has it; Grazzi et al., Unlocking
    State-Tracking in Linear RNNs Through Negative Eigenvalues (2024), section 4.2.
    """

    negative_eigenvalues: bool = False

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        return GatedDeltaNetParameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def __call__(
        self, parameters: "GatedDeltaNetParameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Applies the layer; `plan` is one of `jaxbuf.recurrence.recurrent_plan`."""
        p = parameters
        with jax.named_scope("projections"):
            weights = [w[...] for w in (p.in_proj_qkv, p.in_proj_z, p.in_proj_a, p.in_proj_b)]
            qkv, z, a, b = project(x, weights, float32=(False, False, True, True), target=plan.target)
        weights = Weights(p.conv1d[...], p.A_log[...], p.dt_bias[...])
        inputs, memory = plan.prepare(memory, self.spec, weights, qkv, a, b)
        if self.negative_eigenvalues:
            inputs = inputs._replace(beta=2 * inputs.beta)
        out, memory = plan.recur(memory, self.spec, *inputs)
        out = gated_norm(out, z, p.norm[...], eps=self.eps, target=plan.target)
        with jax.named_scope("output"):
            return output(out, p.out_proj, None, self.devices, plan.target), memory


class GatedDeltaNetParameters(nnx.Module):
    """Parameters of the mixer, with the names, order and shapes of a Qwen3.5 checkpoint's `linear_attn`.

    Attributes:
      in_proj_qkv: [2 · key_heads · key_dim + heads · value_dim, hidden], rows ordered q | k | v.
      in_proj_z: [heads · value_dim, hidden], the output norm's gate.
      in_proj_b, in_proj_a: [heads, hidden], write strength and decay.
      conv1d: [rows of in_proj_qkv, width].
      A_log, dt_bias: f32 [heads].
      norm: [value_dim], a plain scale.
      out_proj: [hidden, heads · value_dim].
    """

    def __init__(
        self, mixer: GatedDeltaNet, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype
    ):
        spec, channels, width = mixer.spec, mixer.channels, mixer.width
        values = spec.heads * spec.value_dim
        of_keys, of_values = (
            Part("key_heads", spec.key_heads, spec.key_dim),
            Part("heads", spec.heads, spec.value_dim),
        )
        each, every = (Part("heads", spec.heads),), (of_keys, of_keys, of_values)
        self.in_proj_qkv = parameter(rngs, (channels, hidden), (every, None), initializer, dtype=dtype)
        self.in_proj_z = parameter(rngs, (values, hidden), ((of_values,), None), initializer, dtype=dtype)
        self.in_proj_b = parameter(rngs, (spec.heads, hidden), (each, None), initializer, dtype=dtype)
        self.in_proj_a = parameter(rngs, (spec.heads, hidden), (each, None), initializer, dtype=dtype)
        self.conv1d = parameter(rngs, (channels, width), (every, None), uniform(width**-0.5), dtype=dtype)
        self.A_log = parameter(rngs, (spec.heads,), (each,), log_rate, dtype=dtype, keep_float32=True)
        self.dt_bias = parameter(rngs, (spec.heads,), (each,), step_bias, dtype=dtype, keep_float32=True)
        self.norm = parameter(rngs, (spec.value_dim,), (None,), ones, dtype=dtype)
        self.out_proj = parameter(rngs, (hidden, values), (None, (of_values,)), initializer, dtype=dtype)
