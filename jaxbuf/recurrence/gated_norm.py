"""The gated norm behind Gated DeltaNet and Kimi Delta Attention: what reads the recurrence's output."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target

type Activation = Literal["silu", "sigmoid"]


def gated_norm(
    out: Float[Array, "rows time heads value_dim"],
    z: Float[Array, "rows time heads*value_dim"],
    weight: Float[Array, "value_dim"],
    *,
    eps: float,
    activation: Activation = "silu",
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time heads*value_dim"]:
    """out / rms(out) · weight · silu(z), or sigmoid(z) for silu(z). Differentiable.

    The norm is over each head's value_dim, in float32. It is rounded to out's dtype, its product with the gate to z's.

    Args:
      out: From `extend`.
      z: The gate, before its activation.
      weight: Of the norm.
      eps: Is added to the mean of squares.
      activation: "silu" (Gated DeltaNet) or "sigmoid" (Kimi Delta Attention).
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what z lies on. The
        gradient of a kernel is that of the definition, compiled by XLA.

    Raises:
      ValueError: A shape does not fit, no such activation, or the implementation asked for can't serve the call; it
        says why.

    Source: Yang et al., Gated Delta Networks (2024), section 3.4; Kimi Team, Kimi Linear (2025), section 4.
    """
    if out.ndim != 4 or z.shape != (*out.shape[:2], out.shape[2] * out.shape[3]) or weight.shape != out.shape[3:]:
        raise ValueError(
            "out must be [rows, T, heads, value_dim], z [rows, T, heads · value_dim] and weight [value_dim], "
            f"got {out.shape}, {z.shape} and {weight.shape}"
        )
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation must be 'silu' or 'sigmoid', got {activation!r}")
    asked = ask("gated_norm", implementation, target, (z,), interpret=interpret)
    return _gated_norm(eps, activation, asked, out, z, weight)


@partial(jax.jit, static_argnums=(0, 1, 2))
@jax.named_scope("output")
def _gated_norm(eps: float, activation: Activation, asked: Asked | None, out: Array, z: Array, weight: Array) -> Array:
    if asked is not None:
        # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
        from jaxbuf.pallas import gated_norm as kernels

        heads = out.shape[0] * out.shape[1] * out.shape[2]
        call = kernels.Call(heads, eps, out=out.dtype, z=z.dtype, activation=activation)
        if asked.takes(kernels.supports(call, value_dim=out.shape[3], platform=asked.platform)):
            by = kernels.tpu if asked.platform == "tpu" else kernels.gpu
            kernel = partial(by.gated_norm, call, interpret=asked.interpret)
            return differentiable(kernel, partial(_defined, eps, activation))(out, z, weight)
    return _defined(eps, activation, out, z, weight)


def _defined(eps: float, activation: Activation, out: Array, z: Array, weight: Array) -> Array:
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = (wide * weight.astype(jnp.float32)[None, None, None]).astype(out.dtype)
    wide_z = z.astype(jnp.float32)
    gate = (jax.nn.silu(wide_z) if activation == "silu" else jax.nn.sigmoid(wide_z)).reshape(out.shape)
    return (normal.astype(jnp.float32) * gate).astype(z.dtype).reshape(z.shape)
