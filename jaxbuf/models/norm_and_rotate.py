"""Queries and keys of a softmax layer: the norm of each head's, and their rotary positions."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.attention.rotary import rotate
from jaxbuf.axes import Array, Float, Float32
from jaxbuf.models.layers import Norm, normalised
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.target import Target


def norm_and_rotate(
    q: Float[Array, "rows time heads _"],
    k: Float[Array, "rows time kv_heads head_dim"],
    angles: tuple[Float32[Array, "#rows time 1 n"], Float32[Array, "#rows time 1 n"]],
    norm: Norm | None = None,
    weights: tuple[Float[Array, "head_dim"], ...] = (),
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], Float[Array, "rows time kv_heads head_dim"]]:
    """Queries and keys, each head's normed by itself and then turned by its position. Differentiable.

    Args:
      q: A head's numbers, of which the query is the first head_dim.
      k: The keys.
      angles: Cosines and sines, from `jaxbuf.attention.rotary.Rotary.angles`.
      norm: Which norm; None: there is none.
      weights: That of the queries' norm and that of the keys'; without a norm none.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what q lies on. The
        gradient of a kernel is that of the definition, compiled by XLA.

    Returns:
      q and k, in their dtype.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    head_dim = k.shape[-1]
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] < head_dim or q.dtype != k.dtype:
        raise ValueError(
            "q and k must be [rows, time, heads, numbers] of one dtype, with at least k's numbers in q, "
            f"got {q.dtype} {q.shape} and {k.dtype} {k.shape}"
        )
    if len(weights) != (0 if norm is None else 2) or any(weight.shape != (head_dim,) for weight in weights):
        shapes = " and ".join(str(weight.shape) for weight in weights) or "none"
        raise ValueError(f"weights must be two of [{head_dim}] with a norm, and none without, got {shapes}")
    asked = ask("norm_and_rotate", implementation, target, (q,), interpret=interpret)
    return _norm_and_rotate(norm, asked, q, k, angles, weights)


@partial(jax.jit, static_argnums=(0, 1))
def _norm_and_rotate(
    norm: Norm | None,
    asked: Asked | None,
    q: Array,
    k: Array,
    angles: tuple[Array, Array],
    weights: tuple[Array, ...],
) -> tuple[Array, Array]:
    defined = partial(_defined, norm)
    if asked is None:
        return defined(q, k, angles, weights)
    # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
    from jaxbuf.pallas.norm_and_rotate import Call, gpu, supports

    (rows, time, heads, width), (*_, kv_heads, head_dim) = q.shape, k.shape
    half, used = angles[0].shape[-1], norm or Norm(0.0)
    sizes = rows * time, heads, kv_heads, head_dim, width, half
    call = Call(*sizes, q.dtype, norm is not None, used.eps, used.offset)
    if not asked.takes(supports(call)):
        return defined(q, k, angles, weights)

    def turn(q, k, angles, weights):
        cos, sin = (jnp.broadcast_to(x, (rows, time, 1, half)).reshape(-1, half) for x in angles)
        flat = q.reshape(-1, width), k.reshape(-1, head_dim)
        queries, keys = gpu.norm_and_rotate(call, *flat, weights, cos, sin, interpret=asked.interpret)
        return queries.reshape(rows, time, heads, head_dim), keys.reshape(k.shape)

    return differentiable(turn, defined)(q, k, angles, weights)


def _defined(
    norm: Norm | None, q: Array, k: Array, angles: tuple[Array, Array], weights: tuple[Array, ...]
) -> tuple[Array, Array]:
    q = q[..., : k.shape[-1]]
    if norm is not None:
        q, k = (normalised(x, weight, norm) for x, weight in zip((q, k), weights, strict=True))
    return rotate(q, angles), rotate(k, angles)
