"""The gated norm behind Gated DeltaNet: what reads the recurrence's output."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.pallas.dispatch import asks_kernel, takes_call

type Array = jax.Array


@partial(jax.jit, static_argnames=("eps", "implementation", "interpret"))
@jax.named_scope("output")
def gated_norm(
    out: Array, z: Array, weight: Array, *, eps: float, implementation: str = "auto", interpret: bool = False
) -> Array:
    """out / rms(out) · weight · silu(z), the norm over each head's value_dim, in float32.

    The norm is rounded to out's dtype, its product with the gate to z's.

    Args:
      out: [rows, T, heads, value_dim], from `extend`.
      z: [rows, T, heads · value_dim].
      weight: [value_dim].
      eps: Is added to the mean of squares.
      implementation: "xla", "gpu" (an NVIDIA Hopper GPU), or "auto": the kernel of the platform where it serves the
        call, else "xla". Only "xla" has a gradient.
      interpret: Run the kernel in Pallas' interpreter, on any platform: slow, for tests.

    Returns:
      [rows, T, heads · value_dim] in z's dtype.

    Raises:
      ValueError: A shape does not fit, or the implementation asked for can't serve the call; it says why.

    Source: Yang et al., Gated Delta Networks (2024), section 3.4.
    """
    if out.ndim != 4 or z.shape != (*out.shape[:2], out.shape[2] * out.shape[3]) or weight.shape != out.shape[3:]:
        raise ValueError(
            "out must be [rows, T, heads, value_dim], z [rows, T, heads · value_dim] and weight [value_dim], "
            f"got {out.shape}, {z.shape} and {weight.shape}"
        )
    if asks_kernel("gated_norm", implementation):
        # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
        from jaxbuf.pallas.gated_norm import Call, gpu, supports

        heads = out.shape[0] * out.shape[1] * out.shape[2]
        call = Call(heads, eps, out=out.dtype, z=z.dtype)
        reason = supports(call, value_dim=out.shape[3])
        if takes_call("gated_norm", implementation, reason):
            return gpu.gated_norm(call, out, z, weight, interpret=interpret)
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = (wide * weight.astype(jnp.float32)[None, None, None]).astype(out.dtype)
    gate = jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)
    return (normal.astype(jnp.float32) * gate).astype(z.dtype).reshape(z.shape)
