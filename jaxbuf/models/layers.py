"""What the architectures share: parameters with named axes, norms, projections, the gated MLP.

Weights have the layout of Hugging Face checkpoints: a projection is [out, in]. Every parameter says how tensor
parallelism spreads it (`Param.axes`: for each dimension None, or the `Part`s that it is made of).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.axes import Array, Float, Float32, Key
from jaxbuf.models.projections import (
    Summands,
    gated_project,
    product,
    product_float32,
    product_or_summands,
    project,
    squared_relu_project,
)
from jaxbuf.models.tensor_parallel import Axis, Part, add_devices
from jaxbuf.target import Target

type Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]


def parameter(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    initializer: Initializer,
    *,
    dtype: jnp.dtype,
    keep_float32: bool = False,
) -> nnx.Param:
    """Makes a parameter that says what its axes are made of.

    Args:
      rngs: Where the initial value's randomness comes from.
      shape, axes: For each dimension its size, and the parts that it is made of (None: every device has all of it).
      initializer: (key, shape, dtype) -> value.
      dtype: The value's dtype, unless keep_float32.
      keep_float32: The parameter stays float32 whatever the compute dtype (the gates' A_log and dt_bias, and the
        biases by which experts are chosen).
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


def linear(
    x: Float[Array, "... in"],
    weight: nnx.Param | Float[Array, "out in"],
    bias: nnx.Param | Float[Array, "out"] | None = None,
) -> Float[Array, "... out"]:
    """x times weight, plus bias if there is one, in x's dtype."""
    return add_bias(product(x, weight[...]), bias)


def add_bias(y: Float[Array, "... out"], bias: nnx.Param | Float[Array, "out"] | None) -> Float[Array, "... out"]:
    """y plus a bias, if there is one."""
    return y if bias is None else y + bias[...].reshape((1,) * (y.ndim - 1) + bias[...].shape)


def output(
    x: Float[Array, "rows time n"],
    weight: nnx.Param,
    bias: nnx.Param | None,
    devices: int,
    target: Target | None = None,
    scale: float = 1.0,
) -> Float[Array, "rows time out"] | Summands:
    """`linear` of what each of so many devices has of x's last axis, summed over them and scaled: what a layer adds.

    With a target it may be left as summands.
    """
    if target is not None and devices == 1 and bias is None and scale == 1:
        return product_or_summands(x, weight[...], target=target)
    return scaled(add_bias(add_devices(linear(x, weight), devices), bias), scale)


def scaled(x: Float[Array, "*n"], scale: float) -> Float[Array, "*n"]:
    """x times a number, in x's dtype."""
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


def linear_float32(x: Float[Array, "... in"], weight: nnx.Param) -> Float32[Array, "... out"]:
    """As `linear`, but float32: for gates and logits, which are never rounded to the compute dtype."""
    return product_float32(x, weight[...])


@dataclasses.dataclass(frozen=True)
class Norm:
    """x / rms(x) · (offset + weight) over the last axis.

    Attributes:
      eps: Is added to the mean square.
      offset: 1 for weights that are centred at zero, else 0.
    """

    eps: float
    offset: float = 0.0


def norm_weight(rngs: nnx.Rngs, size: int, norm: Norm, axis: Axis = None, *, dtype: jnp.dtype) -> nnx.Param:
    """The weight [size] of a norm that scales by 1 at first; `axis` as in `parameter`."""
    return parameter(rngs, (size,), (axis,), zeros if norm.offset else ones, dtype=dtype)


def rms_norm(x: Float[Array, "*n"], weight: nnx.Param, norm: Norm) -> Float[Array, "*n"]:
    """A norm of x, in float32; returns x's dtype."""
    return normalised(x, weight[...], norm)


def rms_norm_heads(
    x: Float[Array, "rows time heads head_dim"], weight: nnx.Param, norm: Norm, devices: int = 1
) -> Float[Array, "rows time heads head_dim"]:
    """One norm over all heads, which so many devices share, in float32; returns x's dtype.

    Where fewer heads than devices are repeated, each is repeated as often, so that the mean stays what it is.
    """
    wide = x.astype(jnp.float32)
    squares = add_devices(jnp.mean(wide * wide, axis=(-2, -1), keepdims=True), devices) / devices
    scale = norm.offset + weight[...].astype(jnp.float32)
    return (wide * jax.lax.rsqrt(squares + norm.eps) * scale.reshape(1, 1, *x.shape[2:])).astype(x.dtype)


def normalised(x: Float[Array, "*n"], weight: Float[Array, "_"], norm: Norm) -> Float[Array, "*n"]:
    """As `rms_norm`, with a weight that is an array."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norm.eps)
    scale = norm.offset + weight.astype(jnp.float32)
    return (wide * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """Parameters of down(silu(gate x) · up x): gate_proj and up_proj [ffn, hidden], down_proj [hidden, ffn].

    With `fused` one matrix, gate_up_proj [2 · ffn, hidden], has the rows gate | up, and gate_proj and up_proj are None.
    With `bias` each projection adds one, gate_bias and up_bias [ffn], down_bias [hidden]; else these are None.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        initializer: Initializer,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
        bias: bool = False,
        fused: bool = False,
    ):
        part = Part("channels", ffn)

        def matrix(parts):
            return parameter(rngs, (len(parts) * ffn, hidden), (parts, None), initializer, dtype=dtype)

        self.gate_proj, self.up_proj = (None, None) if fused else (matrix((part,)), matrix((part,)))
        self.gate_up_proj = matrix((part, part)) if fused else None
        self.down_proj = parameter(rngs, (hidden, ffn), (None, (part,)), initializer, dtype=dtype)
        self.gate_bias = parameter(rngs, (ffn,), ((part,),), zeros, dtype=dtype) if bias else None
        self.up_bias = parameter(rngs, (ffn,), ((part,),), zeros, dtype=dtype) if bias else None
        self.down_bias = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype) if bias else None


def gated_mlp(
    layer: GatedMLP,
    x: Float[Array, "rows time hidden"],
    devices: int = 1,
    target: Target | None = None,
    gate_scale: float = 1.0,
) -> Float[Array, "rows time hidden"] | Summands:
    """The MLP of x; `devices` share the channels. What it is compiled for: `target`; None: for what x lies on.

    What the gate's projection gives is multiplied with `gate_scale` before silu.
    """
    weights = [w[...] for w in (layer.gate_proj, layer.up_proj, layer.gate_up_proj) if w is not None]
    fused = len(weights) == 1
    if not fused and layer.gate_bias is None and gate_scale == 1:
        return output(gated_project(x, *weights, target=target), layer.down_proj, layer.down_bias, devices, target)
    products = project(x, weights, target=target)
    gate, up = jnp.split(products[0], 2, axis=-1) if fused else products
    gate, up = add_bias(gate, layer.gate_bias), add_bias(up, layer.up_bias)
    return output(jax.nn.silu(scaled(gate, gate_scale)) * up, layer.down_proj, layer.down_bias, devices, target)


class PlainMLP(nnx.Module):
    """Parameters of an MLP without a gate: up_proj [ffn, hidden], down_proj [hidden, ffn].

    With `bias` each adds one, up_bias [ffn] and down_bias [hidden]; else these are None.
    """

    def __init__(
        self, hidden: int, ffn: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype, bias: bool = False
    ):
        channels = (Part("channels", ffn),)
        self.up_proj = parameter(rngs, (ffn, hidden), (channels, None), initializer, dtype=dtype)
        self.down_proj = parameter(rngs, (hidden, ffn), (None, channels), initializer, dtype=dtype)
        self.up_bias = parameter(rngs, (ffn,), (channels,), zeros, dtype=dtype) if bias else None
        self.down_bias = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype) if bias else None


def squared_relu_mlp(
    layer: PlainMLP, x: Float[Array, "rows time hidden"], devices: int = 1, target: Target | None = None
) -> Float[Array, "rows time hidden"] | Summands:
    """down(relu(up x)²) of x; `devices` and `target` as in `gated_mlp`.

    Source: So et al., Primer (2021), section 3.
    """
    if layer.up_bias is None:
        inner = squared_relu_project(x, layer.up_proj[...], target=target)
    else:
        (up,) = project(x, [layer.up_proj[...]], target=target)
        inner = jnp.square(jax.nn.relu(add_bias(up, layer.up_bias)))
    return output(inner, layer.down_proj, layer.down_bias, devices, target)


def zeros(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Initial weights of norms centred at zero."""
    return jnp.zeros(shape, dtype)


def ones(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Initial weights of plain norms."""
    return jnp.ones(shape, dtype)


def normal(scale: float) -> Initializer:
    """Initial weights from a normal distribution with this standard deviation."""

    def initialize(key, shape, dtype):
        return scale * jax.random.normal(key, shape, dtype)

    return initialize


def uniform(bound: float) -> Initializer:
    """Initial weights from a uniform distribution in [-bound, bound]."""

    def initialize(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return initialize


def log_rate(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A uniform in [1, 16], stored as its logarithm, as Mamba-2 starts it."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def step_bias(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The inverse softplus of a step log-uniform in [0.001, 0.1]: heads start with memories of different length."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


def _is_parameter(node) -> bool:
    return isinstance(node, nnx.Param)


def _key(part) -> str:
    return part.name if isinstance(part, jax.tree_util.GetAttrKey) else str(part.idx)
