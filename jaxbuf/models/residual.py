"""The residual stream: what a mixer or an MLP adds to it, and the norm of the sum, which the next one reads."""

from functools import partial

import jax

from jaxbuf.axes import Array, Float
from jaxbuf.models.layers import Norm, normalised
from jaxbuf.models.projections import Summands
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target


def add_and_norm(
    x: Float[Array, "rows time hidden"],
    y: Float[Array, "rows time hidden"] | Summands,
    weight: Float[Array, "hidden"],
    norm: Norm,
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time hidden"], Float[Array, "rows time hidden"]]:
    """x + y, and its norm. Differentiable.

    Args:
      x: The residual stream.
      y: What is added to it; summands are summed up and rounded first.
      weight: Of the norm.
      norm: Which.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what x lies on. The
        gradient of a kernel is that of the definition, compiled by XLA.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    numbers = y.numbers if isinstance(y, Summands) else y
    if x.ndim != 3 or (y.shape, y.dtype) != (x.shape, x.dtype) or weight.shape != x.shape[2:]:
        raise ValueError(
            "x and y must be [rows, time, hidden] of one dtype and weight [hidden], "
            f"got {x.dtype} {x.shape}, {y.dtype} {y.shape} and {weight.shape}"
        )
    asked = ask("add_and_norm", implementation, target, (x,), interpret=interpret)
    return _add_and_norm(norm, asked, x, numbers, weight)


@partial(jax.jit, static_argnums=(0, 1))
def _add_and_norm(norm: Norm, asked: Asked | None, x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    if asked is None:
        return _defined(norm, x, y, weight)
    # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
    from jaxbuf.pallas.add_and_norm import Call, gpu, supports

    rows, time, hidden = x.shape
    call = Call(rows * time, hidden, norm.eps, norm.offset, x.dtype, 0 if y.ndim == 3 else y.shape[0])
    if not asked.takes(supports(call)):
        return _defined(norm, x, y, weight)

    def add(x, y, weight):
        flat = x.reshape(-1, hidden), y.reshape(*y.shape[:-3], -1, hidden)
        found = gpu.add_and_norm(call, *flat, weight, interpret=asked.interpret)
        return tuple(a.reshape(x.shape) for a in found)

    return differentiable(add, partial(_defined, norm))(x, y, weight)


def _defined(norm: Norm, x: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    total = x + (y if y.ndim == 3 else Summands(y, x.dtype).total())
    return total, normalised(total, weight, norm)
