"""Products of the same tokens with several weights, as a layer has them: in one launch where there is a kernel."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.contraction import contract
from jaxbuf.axes import Array, Float, Float32
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summands:
    """An array that is still to be summed up, by whoever reads it.

    Attributes:
      numbers: Its summands.
      dtype: What the sum is rounded to.
    """

    numbers: Float32[Array, "summands rows time out"]
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape[1:]

    def total(self) -> Float[Array, "rows time out"]:
        return jnp.sum(self.numbers, axis=0).astype(self.dtype)


def summed[T](y: T | Summands) -> T | Array:
    """An array as it is, and summands summed up."""
    return y.total() if isinstance(y, Summands) else y


def project(
    x: Float[Array, "rows time in"],
    weights: Sequence[Float[Array, "_ in"]],
    *,
    float32: Sequence[bool] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time _"], ...]:
    """x times each of the weights. Differentiable.

    Args:
      x: The tokens.
      weights: Projections as checkpoints have them.
      float32: For each of them whether its product stays in float32, as gates do, or is rounded to x's dtype; None:
        all are rounded.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what x lies on. The
        gradient of a kernel is that of the definition, compiled by XLA.

    Raises:
      ValueError: A shape does not fit, or the implementation asked for can't serve the call; it says why.
    """
    _check(x, weights)
    kept = _kept(float32, len(weights), "weights")
    asked = ask("project", implementation, target, (x,), interpret=interpret)
    return _project(kept, asked, x, tuple(weights))


def gated_project(
    x: Float[Array, "rows time in"],
    gate: Float[Array, "out in"],
    up: Float[Array, "out in"],
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time out"]:
    """silu(gate x) · up x, rounded to x's dtype. Differentiable.

    XLA rounds both products to x's dtype, too; the kernel does not.

    Args:
      x: The tokens.
      gate, up: Projections as checkpoints have them.
      implementation, interpret, target: As in `project`.

    Raises:
      ValueError: As in `project`.
    """
    _check(x, (gate, up))
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {gate.shape} and {up.shape}")
    asked = ask("gated_project", implementation, target, (x,), interpret=interpret)
    return _gated_project(asked, x, gate, up)


def squared_relu_project(
    x: Float[Array, "rows time in"],
    weight: Float[Array, "out in"],
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time out"]:
    """relu(weight x)², rounded to x's dtype. Differentiable.

    XLA rounds the product to x's dtype, too; the kernel does not.

    Args:
      x: The tokens.
      weight: The projection as checkpoints have it.
      implementation, interpret, target: As in `project`.

    Raises:
      ValueError: As in `project`.
    """
    _check(x, (weight,))
    asked = ask("project", implementation, target, (x,), interpret=interpret)
    return _squared_relu_project(asked, x, weight)


def project_rows(
    x: Float[Array, "rows time in"],
    weight: Float[Array, "out in"],
    sizes: Sequence[int],
    *,
    float32: Sequence[bool] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time _"], ...]:
    """`project` with the rows of one weight, so many for each product. No rows are copied. Differentiable.

    Args:
      x: The tokens.
      weight: As checkpoints have it: the rows of the first product, below them those of the second, and so on.
      sizes: How many rows each product has; all of them together.
      float32, implementation, interpret, target: As in `project`.

    Raises:
      ValueError: As in `project`, or the sizes do not add up to the weight's rows.
    """
    _check(x, (weight,))
    if not sizes or min(sizes) < 1 or sum(sizes) != weight.shape[0]:
        raise ValueError(f"sizes must be the rows of each product, {weight.shape[0]} together, got {tuple(sizes)}")
    kept = _kept(float32, len(sizes), "sizes")
    asked = ask("project", implementation, target, (x,), interpret=interpret)
    return _project_rows(tuple(sizes), kept, asked, x, weight)


def product_or_summands(
    x: Float[Array, "rows time in"],
    weight: Float[Array, "out in"],
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Float[Array, "rows time out"] | Summands:
    """x times one weight, left as summands where the weight's rows are cut into slices: for a GPU. Differentiable.

    `jaxbuf.models.residual.add_and_norm` sums them up as it reads them. Arguments and errors as in `project`.
    """
    _check(x, (weight,))
    asked = ask("project", implementation, target, (x,), interpret=interpret)
    found = _product_or_summands(asked, x, weight)
    return found if found.ndim == 3 else Summands(found, x.dtype)


def product(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Float[Array, "... out"]:
    """x times one weight, in x's dtype."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision)


def product_float32(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Float32[Array, "... out"]:
    """As `product`, but in float32."""
    return contract("...i,oi->...o", x, weight)


def product_slices(
    x: Float[Array, "rows time in"], weight: Float[Array, "out in"], slices: int
) -> Float32[Array, "summands rows time out"]:
    """x times one weight, as so many summands: the products of slices of x and of the weight's rows."""
    cut = x.reshape(*x.shape[:-1], slices, -1), weight.reshape(weight.shape[0], slices, -1)
    return contract("rtsi,osi->srto", *cut)


def _check(x: Array, weights: Sequence[Array]) -> None:
    if x.ndim != 3 or any(w.ndim != 2 or w.shape[1] != x.shape[2] or w.dtype != x.dtype for w in weights):
        shapes = " and ".join(f"{w.dtype} {w.shape}" for w in weights)
        raise ValueError(
            f"x must be [rows, time, in] and weights [out, in] of its dtype, got {x.dtype} {x.shape} and {shapes}"
        )


def _kept(float32: Sequence[bool] | None, count: int, what: str) -> tuple[bool, ...]:
    """Which of so many products stay in float32."""
    kept = (False,) * count if float32 is None else tuple(float32)
    if len(kept) != count:
        raise ValueError(f"float32 must say something of each of the {count} {what}, got {len(kept)} values")
    return kept


@partial(jax.jit, static_argnums=0)
def _product_or_summands(asked: Asked | None, x: Array, weight: Array) -> Array:
    if asked is None:
        return product(x, weight)
    from jaxbuf.pallas.project import Call, gpu, supports  # as in _by_kernel

    rows, time, size = x.shape
    slices = gpu.slices_of(rows * time, size, weight.shape[0])
    call = Call(rows * time, size, (weight.shape[0],), (np.dtype(np.float32),), x.dtype, slices=slices)
    if slices == 1 and not asked.named and supports(call) is None:
        slices = gpu.library_slices_of(rows * time, size, weight.shape[0])
        return product_slices(x, weight, slices) if slices > 1 else product(x, weight)
    if slices == 1 or not asked.takes(supports(call)):
        return product(x, weight)

    def multiply(x, weight):
        (found,) = gpu.project(call, x.reshape(-1, size), [weight], interpret=asked.interpret)
        return found.reshape(slices, rows, time, -1)

    def defined(x, weight):
        return jnp.pad(product_float32(x, weight)[None], ((0, slices - 1), (0, 0), (0, 0), (0, 0)))

    return differentiable(multiply, defined)(x, weight)


@partial(jax.jit, static_argnums=(0, 1))
def _project(kept: tuple[bool, ...], asked: Asked | None, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    return _by_kernel(asked, _dtypes(kept, x), partial(_defined, kept), x, weights)


@partial(jax.jit, static_argnums=0)
def _gated_project(asked: Asked | None, x: Array, gate: Array, up: Array) -> Array:
    return _by_kernel(asked, (x.dtype,), _gated_defined, x, (gate, up), gated=True)[0]


@partial(jax.jit, static_argnums=0)
def _squared_relu_project(asked: Asked | None, x: Array, weight: Array) -> Array:
    return _by_kernel(asked, (x.dtype,), _squared_relu_defined, x, (weight,), squared=True)[0]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _project_rows(
    sizes: tuple[int, ...], kept: tuple[bool, ...], asked: Asked | None, x: Array, weight: Array
) -> tuple[Array, ...]:
    dtypes, defined = _dtypes(kept, x), partial(_rows_defined, sizes, kept)
    return _by_kernel(asked, dtypes, defined, x, (weight,), outputs=sizes, stacked=True)


def _dtypes(kept: tuple[bool, ...], x: Array) -> tuple[np.dtype, ...]:
    return tuple(np.dtype(np.float32) if each else x.dtype for each in kept)


def _by_kernel(
    asked: Asked | None, dtypes, defined: Callable, x: Array, weights: tuple[Array, ...], *, outputs=None, **how: bool
):
    """The kernel's products if it takes the call, else those of the definition."""
    if asked is None:
        return defined(x, weights)
    # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
    from jaxbuf.pallas.project import Call, gpu, supports

    rows, time, size = x.shape
    call = Call(rows * time, size, outputs or tuple(w.shape[0] for w in weights), dtypes, x.dtype, **how)
    if not asked.takes(supports(call)):
        return defined(x, weights)

    def multiply(x, weights):
        found = gpu.project(call, x.reshape(-1, size), weights, interpret=asked.interpret)
        return tuple(y.reshape(rows, time, -1) for y in found)

    return differentiable(multiply, defined)(x, weights)


def _apart(x: Array, weights: tuple[Array, ...]) -> Iterator[tuple[Array, Array]]:
    """x with each weight. XLA takes no product for one of the same x: it would write their weights side by side, in
    each step anew, to multiply once."""
    return (jax.lax.optimization_barrier((x, weight)) for weight in weights)


def _defined(kept: tuple[bool, ...], x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    how = (product_float32 if each else product for each in kept)
    return tuple(multiply(x, w) for multiply, (x, w) in zip(how, _apart(x, weights), strict=True))


def _gated_defined(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    gate, up = (product(x, weight) for x, weight in _apart(x, weights))
    return (jax.nn.silu(gate) * up,)


def _squared_relu_defined(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    (weight,) = weights
    return (jnp.square(jax.nn.relu(product(x, weight))),)


def _rows_defined(
    sizes: tuple[int, ...], kept: tuple[bool, ...], x: Array, weights: tuple[Array, ...]
) -> tuple[Array, ...]:
    """The whole weight is multiplied once and the products are cut: cutting the weight would write it anew. What stays
    in float32 is few rows, which are multiplied again."""
    (weight,), ends = weights, np.cumsum(sizes)
    whole = None if all(kept) else product(x, weight)

    def rows(end: int, size: int, wide: bool) -> Array:
        if wide or whole is None:
            x_here, weight_here = jax.lax.optimization_barrier((x, weight[end - size : end]))
            return product_float32(x_here, weight_here)
        return whole[..., end - size : end]

    return tuple(rows(int(end), size, wide) for end, size, wide in zip(ends, sizes, kept, strict=True))
