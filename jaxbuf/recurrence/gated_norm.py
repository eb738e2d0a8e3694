"""The gated norms that read the recurrence's output: of each head (Gated DeltaNet, Kimi Delta Attention) and of each
group of channels (Mamba-2)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float, Float32
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target

type Activation = Literal["silu", "sigmoid"]
type Form = Literal["gated", "gated after"]


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
        call = kernels.Call(heads, out.shape[3], eps, out=out.dtype, z=z.dtype, activation=activation)
        if asked.takes(kernels.supports(call, platform=asked.platform)):
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


def grouped_norm(
    out: Float[Array, "rows time heads value_dim"],
    z: Float[Array, "rows time heads*value_dim"],
    weight: Float[Array, "heads*value_dim"],
    *,
    groups: int,
    eps: float,
    form: Form,
    skip: tuple[Float32[Array, "heads"], Float[Array, "rows time heads value_dim"]] | None = None,
    average: Callable[[Array], Array] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time heads*value_dim"]:
    """The norm of each group of neighbouring heads, times weight, with a gate. Differentiable.

    All is computed in float32, and the result rounded to out's dtype.

    Args:
      out: From `extend`.
      z: The gate, before SiLU.
      weight: Of the norm, a number for each channel.
      groups: How many groups; they divide the heads.
      eps: Is added to the mean of squares.
      form: "gated" is the norm of out · silu(z), "gated after" that of out, times silu(z).
      skip: D and values: D · values, rounded to out's dtype, is added to out first. None: nothing is.
      average: Makes of each group's mean of squares, float32 [rows, T, groups, 1], that of all devices which share the
        group. XLA then compiles all of it. None: each group is on one device.
      implementation, interpret, target: As in `gated_norm`.

    Raises:
      ValueError: A shape does not fit, no such form, or the implementation asked for can't serve the call; it says why.

    Source: Dao and Gu, Transformers are SSMs (2024), section 7.1.
    """
    if out.ndim != 4 or z.shape != (*out.shape[:2], out.shape[2] * out.shape[3]) or weight.shape != z.shape[2:]:
        raise ValueError(
            "out must be [rows, T, heads, value_dim], z [rows, T, heads · value_dim] and weight [heads · value_dim], "
            f"got {out.shape}, {z.shape} and {weight.shape}"
        )
    if groups < 1 or out.shape[2] % groups:
        raise ValueError(f"groups must divide the heads ({out.shape[2]}), got {groups}")
    if form not in ("gated", "gated after"):
        raise ValueError(f"form must be 'gated' or 'gated after', got {form!r}")
    if skip is not None and (skip[0].shape != out.shape[2:3] or skip[1].shape != out.shape):
        raise ValueError(f"skip must be D [heads] and values {out.shape}, got {skip[0].shape} and {skip[1].shape}")
    asked = ask("gated_norm", implementation, target, (z,), interpret=interpret)
    if average is not None:
        if asked is not None:
            asked.takes("it needs groups that lie on one device each, got an average over several")
        return _defined_of_groups(groups, eps, form, out, z, weight, *(skip or ()), average=average)
    return _grouped_norm(groups, eps, form, asked, out, z, weight, *(skip or ()))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
@jax.named_scope("output")
def _grouped_norm(
    groups: int, eps: float, form: Form, asked: Asked | None, out: Array, z: Array, weight: Array, *skip: Array
) -> Array:
    defined = partial(_defined_of_groups, groups, eps, form)
    if asked is not None:
        # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
        from jaxbuf.pallas import gated_norm as kernels

        vectors, dim = out.shape[0] * out.shape[1] * groups, z.shape[2] // groups
        call = kernels.Call(vectors, dim, eps, out=out.dtype, z=z.dtype, groups=groups, form=form)
        if skip:
            call = dataclasses.replace(call, values=skip[1].dtype, value_dim=out.shape[3])
        if asked.takes(kernels.supports(call, platform=asked.platform)):
            kernel = partial(kernels.gpu.gated_norm, call, interpret=asked.interpret)
            return differentiable(kernel, defined)(out, z, weight, *skip)
    return defined(out, z, weight, *skip)


def _defined_of_groups(
    groups: int,
    eps: float,
    form: Form,
    out: Array,
    z: Array,
    weight: Array,
    *skip: Array,
    average: Callable[[Array], Array] | None = None,
) -> Array:
    if skip:
        D, values = skip
        out = out + (D[None, None, :, None] * values.astype(jnp.float32)).astype(out.dtype)
    gate = jax.nn.silu(z.astype(jnp.float32))
    wide = out.reshape(z.shape).astype(jnp.float32)
    wide = wide * gate if form == "gated" else wide
    grouped = wide.reshape(*z.shape[:2], groups, -1)
    squares = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
    squares = squares if average is None else average(squares)
    wide = (grouped * jax.lax.rsqrt(squares + eps)).reshape(z.shape) * weight.astype(jnp.float32)[None, None]
    return (wide if form == "gated" else wide * gate).astype(out.dtype)
