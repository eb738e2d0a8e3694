"""What the architectures share: parameters with named axes, norms, projections, rotary positions, the gated MLP.

Weights have the layout of Hugging Face checkpoints: a projection is [out, in]. Every parameter carries the names of its
axes (`Param.axes`, one name or None a dimension); `sharding.py` maps names to a mesh.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.attention.contraction import contract

type Array = jax.Array
type Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    initializer: Initializer,
    *,
    dtype: jnp.dtype,
    keep_float32: bool = False,
) -> nnx.Param:
    """Makes a parameter whose axes have names.

    Args:
      rngs: Where the initial value's randomness comes from.
      shape, axes: One size and one logical name (or None: never split) a dimension.
      initializer: (key, shape, dtype) -> value.
      dtype: The value's dtype, unless keep_float32.
      keep_float32: The parameter stays float32 whatever the compute dtype (the gates' A_log and dt_bias).
    """
    value = initializer(rngs.params(), shape, jnp.float32).astype(jnp.float32 if keep_float32 else dtype)
    return nnx.Param(value, axes=axes, keep_float32=keep_float32)


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter under its dotted path ("layers.0.mlp.gate_proj"), in the order of the tree's leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_parameter)
    return {".".join(_key(part) for part in path): leaf for path, leaf in leaves}


def replace_parameters[Model: nnx.Module](model: Model, values: Iterable[Array]) -> Model:
    """The same module with other values, given in the order of `named_parameters`; `model` may be abstract."""
    return jax.tree.unflatten(jax.tree.structure(model), list(values))


def cast[Model: nnx.Module](model: Model, dtype: jnp.dtype) -> Model:
    """The same module computing in `dtype`, but for what is kept in float32. Differentiable, so that training can hold
    float32 weights and compute in bf16."""
    parameters = named_parameters(model).values()
    return replace_parameters(model, [p[...] if p.keep_float32 else p[...].astype(dtype) for p in parameters])


def linear(x: Array, weight: nnx.Param) -> Array:
    """x [..., in] times weight [out, in]: [..., out] in x's dtype."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight[...], precision=precision)


def linear_float32(x: Array, weight: nnx.Param) -> Array:
    """As `linear`, but f32 [..., out]: for gates and logits, which are never rounded to the compute dtype."""
    return contract("...i,oi->...o", x, weight[...])


def rms_norm(x: Array, weight: nnx.Param, *, eps: float, offset: float = 1.0) -> Array:
    """x / rms(x) * (offset + weight) over the last axis, in float32; returns x's dtype.

    Qwen3.5 centres its weights at zero (offset 1), except in the gated norm after the recurrence (offset 0).
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = offset + weight[...].astype(jnp.float32)
    return (wide * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def rotary_angles(positions: Array, *, dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines f32 [batch, time, 1, dim // 2] of int32 positions [batch, time]; dim is the rotated width."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotates the first 2 · (angles' width) channels of x [batch, time, heads, head_dim], half against half.

    Source: Su et al., RoFormer (2021), eq. 34, in the half-split order of GPT-NeoX.
    """
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], axis=-1)


class GatedMLP(nnx.Module):
    """down(silu(gate x) · up x); gate_proj and up_proj [ffn, hidden], down_proj [hidden, ffn]."""

    def __init__(self, hidden: int, ffn: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.gate_proj = parameter(rngs, (ffn, hidden), ("ffn", None), initializer, dtype=dtype)
        self.up_proj = parameter(rngs, (ffn, hidden), ("ffn", None), initializer, dtype=dtype)
        self.down_proj = parameter(rngs, (hidden, ffn), (None, "ffn"), initializer, dtype=dtype)


def gated_mlp(layer: GatedMLP, x: Array) -> Array:
    """x [..., hidden] -> [..., hidden]."""
    return linear(jax.nn.silu(linear(x, layer.gate_proj)) * linear(x, layer.up_proj), layer.down_proj)


def zeros(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Initial weights of norms centred at zero."""
    return jnp.zeros(shape, dtype)


def ones(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Initial weights of plain norms."""
    return jnp.ones(shape, dtype)


def normal(scale: float) -> Initializer:
    """Initial weights from a normal distribution with this standard deviation."""

    def initialize(key, shape, dtype):
        return scale * jax.random.normal(key, shape, dtype)

    return initialize


def _is_parameter(node) -> bool:
    return isinstance(node, nnx.Param)


def _key(part) -> str:
    return part.name if isinstance(part, jax.tree_util.GetAttrKey) else str(part.idx)
