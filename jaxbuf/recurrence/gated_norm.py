"""The gated norm behind Gated DeltaNet: what reads the recurrence's output."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target


def gated_norm(
    out: Float[Array, "rows time heads value_dim"],
    z: Float[Array, "rows time heads*value_dim"],
    weight: Float[Array, "value_dim"],
    *,
    eps: float,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time heads*value_dim"]:
    """out / rms(out) · weight · silu(z), the norm over each head's value_dim, in float32. Differentiable.

    The norm is rounded to out's dtype, its product with the gate to z's.

    Args:
      out: From `extend`.
      z: The gate, before silu.
      weight: Of the norm.
      eps: Is added to the mean of squares.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what z lies on. The
        gradient of a kernel is that of the definition, compiled by XLA.

    Raises:
      ValueError: A shape does not fit, or the implementation asked for can't serve the call; it says why.

    Source: Yang et al., Gated Delta Networks (2024), section 3.4.
    """
    if out.ndim != 4 or z.shape != (*out.shape[:2], out.shape[2] * out.shape[3]) or weight.shape != out.shape[3:]:
        raise ValueError(
            "out must be [rows, T, heads, value_dim], z [rows, T, heads · value_dim] and weight [value_dim], "
            f"got {out.shape}, {z.shape} and {weight.shape}"
        )
    asked = ask("gated_norm", implementation, target, (z,), interpret=interpret)
    return _gated_norm(eps, asked, out, z, weight)


@partial(jax.jit, static_argnums=(0, 1))
@jax.named_scope("output")
def _gated_norm(eps: float, asked: Asked | None, out: Array, z: Array, weight: Array) -> Array:
    if asked is not None:
        # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
        from jaxbuf.pallas.gated_norm import Call, gpu, supports

        call = Call(out.shape[0] * out.shape[1] * out.shape[2], eps, out=out.dtype, z=z.dtype)
        if asked.takes(supports(call, value_dim=out.shape[3])):
            kernel = partial(gpu.gated_norm, call, interpret=asked.interpret)
            return differentiable(kernel, partial(_defined, eps))(out, z, weight)
    return _defined(eps, out, z, weight)


def _defined(eps: float, out: Array, z: Array, weight: Array) -> Array:
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = (wide * weight.astype(jnp.float32)[None, None, None]).astype(out.dtype)
    gate = jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)
    return (normal.astype(jnp.float32) * gate).astype(z.dtype).reshape(z.shape)
