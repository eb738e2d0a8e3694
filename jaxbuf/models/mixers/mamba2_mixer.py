"""The Mamba-2 mixer: a recurrence without the delta rule, whose write strength and decay come from one step size."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxbuf.axes import Array, Float
from jaxbuf.models.layers import (
    Initializer,
    log_rate,
    ones,
    output,
    parameter,
    scaled,
    step_bias,
    uniform,
    zeros,
)
from jaxbuf.models.mixers.recurrent_mixer import RecurrentMixer
from jaxbuf.models.projections import Summands, project_rows
from jaxbuf.models.tensor_parallel import Part, add_devices
from jaxbuf.recurrence.gated_norm import grouped_norm
from jaxbuf.target import Target


@dataclasses.dataclass(frozen=True)
class Mamba2(RecurrentMixer):
    """The mixer.

    Of the recurrence keys are B, queries C, and values x; a key head is a group, and has a norm of its own.

    Attributes:
      spec, width, eps, devices, same_key_head: As in `RecurrentMixer`.
      least_step, most_step: Step sizes are clamped to these.
      bias, output_bias: Whether the input's projection adds one, and whether the output's does.
      convolution_bias: Whether the convolution does.
      norm: Of what is read, each group by itself: "gated" is the norm of out · silu(z), "gated after" that of out,
        times silu(z); None: there is none, out · silu(z) is projected.
      input_scale, output_scale: The input and the output are multiplied with them.
      part_scales: What the input's projection gives is multiplied with them: z, x, B, C and the steps before dt_bias.

    Source: Dao and Gu, Transformers are SSMs (2024), sections 5 and 7.
    """

    least_step: float = 0.0
    most_step: float = math.inf
    bias: bool = False
    output_bias: bool = False
    convolution_bias: bool = True
    norm: Literal["gated", "gated after"] | None = "gated"
    input_scale: float = 1.0
    output_scale: float = 1.0
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        """Numbers of all values together."""
        return self.spec.heads * self.spec.value_dim

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        return Mamba2Parameters(self, hidden, initializer=initializer, rngs=rngs, dtype=dtype)

    def __call__(
        self, parameters: "Mamba2Parameters", x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Applies the layer; `plan` is one of `jaxbuf.recurrence.recurrent_plan`."""
        p, spec, (batch, time) = parameters, self.spec, x.shape[:2]
        with jax.named_scope("projections"):
            z, mixed, raw_step = self._project(p, scaled(x, self.input_scale), plan.target)
        with jax.named_scope("convolution"):
            bias = None if p.conv1d_bias is None else p.conv1d_bias[...]
            keys = spec.key_heads * spec.key_dim
            (values, b, c), memory = plan.convolve(memory, p.conv1d[...], bias, mixed, (self.inner, keys, keys))
        values = values.reshape(batch, time, spec.heads, spec.value_dim)
        b, c = (y.reshape(batch, time, spec.key_heads, spec.key_dim) for y in (b, c))
        step = jnp.clip(jax.nn.softplus(raw_step + p.dt_bias[...][None, None]), self.least_step, self.most_step)
        log_decay = -jnp.exp(p.A_log[...])[None, None] * step
        out, memory = plan.recur(memory, spec, c, b, values, log_decay, step)
        with jax.named_scope("output"):
            out = self._norm(out, z, p.norm, p.D[...], values, plan.target)
            return output(out, p.out_proj, p.out_bias, self.devices, plan.target, self.output_scale), memory

    def _project(self, p: "Mamba2Parameters", x: Array, target: Target | None) -> tuple[Array, Array, Array]:
        """z [batch, time, inner], x | B | C [batch, time, channels], and f32 [batch, time, heads] behind the steps."""
        sizes = self.inner, self.channels, self.spec.heads
        z, mixed, step = project_rows(x, p.in_proj[...], sizes, float32=(False, False, True), target=target)
        if p.in_bias is not None:
            biases = jnp.split(p.in_bias[...][None, None], np.cumsum(sizes[:2]), axis=-1)
            z, mixed, step = z + biases[0], mixed + biases[1], step + biases[2].astype(jnp.float32)
        keys, (of_z, *of_mixed, of_step) = self.spec.key_heads * self.spec.key_dim, self.part_scales
        if any(scale != 1 for scale in of_mixed):
            scales = np.repeat(np.asarray(of_mixed, np.float32), [self.inner, keys, keys])
            mixed = mixed * jnp.asarray(scales, mixed.dtype)[None, None]
        return scaled(z, of_z), mixed, scaled(step, of_step)

    def _norm(
        self, out: Array, z: Array, weight: nnx.Param | None, D: Array, values: Array, target: Target | None
    ) -> Array:
        """What is projected: out + D · values with the gate and the norm, in float32; returns out's dtype."""
        if weight is None or self.norm is None:
            out = out + (D[None, None, :, None] * values.astype(jnp.float32)).astype(out.dtype)
            wide = out.reshape(z.shape).astype(jnp.float32)
            return (wide * jax.nn.silu(z.astype(jnp.float32))).astype(out.dtype)
        among = self.same_key_head

        def average(squares):
            return add_devices(squares, self.devices, among=among) / among

        how = {"groups": self.spec.key_heads, "eps": self.eps, "form": self.norm, "skip": (D, values), "target": target}
        return grouped_norm(out, z, weight[...], **how, average=average if among > 1 else None)


class Mamba2Parameters(nnx.Module):
    """Parameters of the mixer; those that it does not have are None.

    Attributes:
      in_proj: [2 · inner + 2 · groups · state + heads, hidden], rows ordered z | x | B | C | steps; inner is
        heads · value_dim. in_bias: One number for each row.
      conv1d: [inner + 2 · groups · state, width]. conv1d_bias: One number for each channel.
      A_log, D, dt_bias: f32 [heads].
      norm: [inner], a plain scale.
      out_proj: [hidden, inner]. out_bias: [hidden].
    """

    def __init__(self, mixer: Mamba2, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        spec, rows = mixer.spec, mixer.inner + mixer.channels + mixer.spec.heads
        values, keys = Part("heads", spec.heads, spec.value_dim), Part("key_heads", spec.key_heads, spec.key_dim)
        each, mixed = Part("heads", spec.heads), (values, keys, keys)
        every = (values, *mixed, each)

        def of_heads(initialize):
            return parameter(rngs, (spec.heads,), ((each,),), initialize, dtype=dtype, keep_float32=True)

        def bias(size, parts, there):
            return parameter(rngs, (size,), (parts,), zeros, dtype=dtype) if there else None

        self.in_proj = parameter(rngs, (rows, hidden), (every, None), initializer, dtype=dtype)
        self.in_bias = bias(rows, every, mixer.bias)
        taps = mixer.channels, mixer.width
        self.conv1d = parameter(rngs, taps, (mixed, None), uniform(mixer.width**-0.5), dtype=dtype)
        self.conv1d_bias = bias(mixer.channels, mixed, mixer.convolution_bias)
        self.A_log, self.D, self.dt_bias = of_heads(log_rate), of_heads(ones), of_heads(step_bias)
        self.norm = parameter(rngs, (mixer.inner,), ((values,),), ones, dtype=dtype) if mixer.norm else None
        self.out_proj = parameter(rngs, (hidden, mixer.inner), (None, (values,)), initializer, dtype=dtype)
        self.out_bias = bias(hidden, None, mixer.output_bias)
