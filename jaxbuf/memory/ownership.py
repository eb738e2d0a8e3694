"""Who owns the rows of a pool: a count of owners for each row, and a stack of those that nobody owns.

A row with more than one owner is never written. No shape depends on how many rows are free, so all of it runs inside
jit and inside a loop on the device. A caller asks for what is there before it takes rows (`short_of`, or
`jaxbuf.memory.claims` for each row of a launch by itself) and notes how many were missing (`flag_missing`), until rows
are given back and the note is cleared (`clear_flag`).
"""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Int, Int32

NOWHERE = np.iinfo(np.int32).max  # an index past every array: scatters with mode="drop" skip it


class PoolExhausted(RuntimeError):
    """A pool had fewer free rows than a launch needed. Nothing was written."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ownership:
    """The owners of a pool's rows. Row 0 is null: never owned, never free.

    Attributes:
      owners: How many own each.
      free: A stack of the rows without an owner: its first `left` entries.
      left: How many these are.
      lacking: How many rows were missing in the first launch that found too few; 0: no launch has.
    """

    owners: Int32[Array, "states"]
    free: Int32[Array, "states"]
    left: Int32[Array, ""]
    lacking: Int32[Array, ""]


def init_ownership(rows: int) -> Ownership:
    """All of `rows` rows free but the null row; low numbers are taken first."""
    if rows < 2:
        raise ValueError(f"rows must be at least 2, the null row and one more, got {rows}")
    stack = np.arange(rows, dtype=np.int32)[::-1]
    zero = jnp.zeros((), jnp.int32)
    return Ownership(jnp.zeros(rows, jnp.int32), jnp.asarray(stack), jnp.asarray(rows - 1, jnp.int32), zero)


def short_of(pool: Ownership, wanted: Bool[Array, "*n"]) -> Int32[Array, ""]:
    """How many rows are missing for one to each true entry of `wanted`."""
    return jnp.maximum(jnp.sum(wanted, dtype=jnp.int32) - pool.left, 0)


def take_rows(pool: Ownership, wanted: Bool[Array, "*n"]) -> tuple[Int32[Array, "*n"], Ownership]:
    """One free row, with one owner, for each true entry of `wanted`; 0 for the others.

    There must be enough of them: see `short_of`.
    """
    flat = wanted.reshape(-1)
    count = jnp.cumsum(flat, dtype=jnp.int32)
    taken = jnp.where(flat, pool.free[jnp.maximum(pool.left - count, 0)], 0)
    pool = dataclasses.replace(pool, left=pool.left - jnp.sum(flat, dtype=jnp.int32))
    return taken.reshape(wanted.shape), share_rows(pool, taken)


def share_rows(pool: Ownership, rows: Int32[Array, "*n"]) -> Ownership:
    """One more owner for each entry of `rows`; 0 is skipped."""
    return dataclasses.replace(pool, owners=pool.owners.at[_real(rows)].add(1, mode="drop"))


def release_rows(pool: Ownership, rows: Int32[Array, "*n"]) -> Ownership:
    """One owner less for each entry of `rows`; 0 is skipped. Rows without one become free."""
    owners = pool.owners.at[_real(rows)].add(-1, mode="drop")
    freed = (pool.owners > 0) & (owners <= 0)
    place = jnp.where(freed, pool.left + jnp.cumsum(freed, dtype=jnp.int32) - 1, NOWHERE)
    return dataclasses.replace(
        pool,
        owners=jnp.maximum(owners, 0),
        free=pool.free.at[place].set(jnp.arange(owners.shape[0], dtype=jnp.int32), mode="drop"),
        left=pool.left + jnp.sum(freed, dtype=jnp.int32),
    )


def is_shared(pool: Ownership, rows: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    """Which of `rows` have several owners and may not be written."""
    return pool.owners[rows] > 1


def flag_missing(pool: Ownership, missing: Int32[Array, ""]) -> Ownership:
    """Notes that rows were missing, if any were and none were before."""
    return dataclasses.replace(pool, lacking=jnp.where(pool.lacking > 0, pool.lacking, missing))


def clear_flag(pool: Ownership) -> Ownership:
    """Clears the note of missing rows."""
    return dataclasses.replace(pool, lacking=jnp.zeros_like(pool.lacking))


def raise_missing(**pools: Ownership | None) -> None:
    """Raises where the values are known and a flag is set; inside jit they are not, and who lacks rows rests.

    Args:
      pools: By the argument that makes each larger; None for one whose rows are not shared.

    Raises:
      PoolExhausted: Says which pool, how many rows it has, how many were missing, and what to raise.
    """
    for name, pool in pools.items():
        if pool is None or isinstance(pool.lacking, jax.core.Tracer) or not int(pool.lacking):
            continue
        lacking, rows = int(pool.lacking), pool.owners.shape[0] - 1
        raise PoolExhausted(
            f"the pool of {name} ran out: {lacking} more needed, it has {rows}; nothing was written there. "
            f"Make it with {name}={rows + lacking} or more, or serve fewer requests at once (reset gives theirs back)"
        )


def _real(rows: Array) -> Array:
    return jnp.where(rows > 0, rows, NOWHERE).reshape(-1)
