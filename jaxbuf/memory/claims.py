"""Which rows of a launch get what they need, where several pools may be too small for all of them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Int32


class Claim(NamedTuple):
    """What a launch needs of one pool.

    Attributes:
      needs: Of each row.
      left: How many rows of the pool are free.
    """

    needs: Int32[Array, "rows"]
    left: Int32[Array, ""]

    @property
    def missing(self) -> Int32[Array, ""]:
        """How many are missing for all rows together."""
        return jnp.maximum(jnp.sum(self.needs, dtype=jnp.int32) - self.left, 0)


def grant(claims: Sequence[Claim]) -> Bool[Array, "rows"]:
    """Which rows get all that they need, of every pool.

    Rows that need less come first, and of equal ones the earlier row. So a row that needs nothing is always served, and
    if any row could be served alone, some row is. All pools are looked at together: rows that one pool granted and
    another refused would else keep what a third row could have used.

    Args:
      claims: At least one.
    """
    needs, left = jnp.stack([claim.needs for claim in claims]), jnp.stack([claim.left for claim in claims])[:, None]
    total, granted = jnp.sum(needs, axis=0, dtype=jnp.int32), jnp.all(needs <= left, axis=0)
    row = jnp.arange(total.shape[0], dtype=jnp.int32)
    # No sort: launches are small, and a comparison of all pairs is one operation.
    not_after = (total[None] < total[:, None]) | ((total[None] == total[:, None]) & (row[None] <= row[:, None]))
    counts = not_after & granted[None]
    used = jnp.sum(jnp.where(counts[None], needs[:, None], 0), axis=2, dtype=jnp.int32)
    return granted & jnp.all((needs == 0) | (used <= left), axis=0)


def grant_all(claims: Sequence[Claim]) -> Bool[Array, ""]:
    """Whether every row gets all that it needs."""
    served = jnp.asarray(True)
    for claim in claims:
        served = served & (claim.missing == 0)
    return served


def after(claims: Sequence[Claim], granted: Bool[Array, "rows"]) -> tuple[Int32[Array, ""], ...]:
    """Of each pool what is left once the `granted` rows took what they need."""
    return tuple(claim.left - jnp.sum(jnp.where(granted, claim.needs, 0), dtype=jnp.int32) for claim in claims)
