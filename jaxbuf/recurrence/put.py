"""Writes whole rows of a pool: on TPUs by a kernel, which moves those rows and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Int32, Shaped
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.target import Target


def put_rows(
    pool: Shaped[Array, "_ *n"],
    new: Shaped[Array, "rows *n"],
    rows: Int32[Array, "rows"],
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Shaped[Array, "_ *n"]:
    """The pool with new rows, rounded to its dtype.

    Args:
      pool: What is written.
      new: The rows.
      rows: Where each goes, at least 0; past the pool: nowhere. No place twice.
      implementation, interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`; target None: what new lies on.

    Raises:
      ValueError: A shape does not fit, or the implementation asked for can't serve the call; it says why.
    """
    if pool.ndim < 1 or new.shape != (rows.shape[0], *pool.shape[1:]):
        raise ValueError(f"new must have shape {(rows.shape[0], *pool.shape[1:])}, got {new.shape}")
    return _put_rows(ask("put_rows", implementation, target, (new,), interpret=interpret), pool, new, rows)


def put_within(
    asked: Asked | None, pool: Shaped[Array, "_ *n"], new: Shaped[Array, "rows *n"], rows: Int32[Array, "rows"]
) -> Shaped[Array, "_ *n"]:
    """`put_rows` within another operation.

    Args:
      asked: The kernel that the operation has asked. Of a TPU: rows are written by a kernel, too, where one takes them.
      pool, new, rows: As in `put_rows`.
    """
    if asked is not None:
        serves = asked.platform == "tpu"
        asked = Asked("put_rows", "tpu", False, asked.interpret, asked.generation) if serves else None
    return _put_rows(asked, pool, new, rows)


@partial(jax.jit, static_argnums=0)
def _put_rows(asked: Asked | None, pool: Array, new: Array, rows: Array) -> Array:
    new = new.astype(pool.dtype)
    if asked is not None:
        # Imported here: Pallas takes a while, and a CPU has no use for it.
        from jaxbuf.pallas.put import Call, supports

        call = Call(pool.shape, rows.shape[0], jnp.dtype(pool.dtype), jnp.dtype(new.dtype))
        if asked.takes(supports(call)):
            from jaxbuf.pallas.put import tpu

            return tpu.put_rows(pool, new, rows, interpret=asked.interpret)
    return pool.at[rows].set(new, mode="drop")
