"""Checkpoint rows and blocks that slots take when they need them, and may share: copy on write.

A slot has a checkpoint row from its first fold on, and blocks where its entries lie. A fork shares the checkpoint row
and the full blocks, and copies the partly filled ones at once. So when a slot appends to a block that others own, too,
none of the slot's own live entries are in that block any more: the launch takes a free block and copies nothing.
Likewise a fold writes a free row where others own the old one.

A launch takes rows before it gives any back, so that it never writes a row that it reads.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Bool, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.ownership import (
    Ownership,
    clear_flag,
    flag_missing,
    init_ownership,
    is_shared,
    raise_missing,
    release_rows,
    take_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharing:
    """Who owns the checkpoint rows (`states`) and the blocks of all layers' pools."""

    states: Ownership
    blocks: Ownership


def default_counts(slots: int, width: int, states: int | None, blocks: int | None, written: int) -> tuple[int, int]:
    """How many checkpoint rows and blocks all slots could use at once, where None is given.

    What slots share stays until they have rows of their own: with slots in pairs that all fold, or all write to
    `written` shared blocks of their `width`, in one launch, half as many again.
    """
    states = slots + slots // 2 if states is None else states
    return states, slots * width + slots // 2 * min(written, width) if blocks is None else blocks


def init_sharing(states: int, blocks: int) -> Sharing:
    """`states` checkpoint rows and `blocks` blocks beside the null ones, all free."""
    check_sizes(states=states, blocks=blocks)
    return Sharing(init_ownership(1 + states), init_ownership(1 + blocks))


def claim_rows(
    pools: Sharing,
    table: Int32[Array, "rows max_blocks"],
    checkpoint: Int32[Array, "rows"],
    folds: Bool[Array, "rows"],
    appends: Bool[Array, "rows max_blocks"],
) -> tuple[Claim, Claim]:
    """The checkpoint rows and blocks that the rows of a launch need beside those that they have for themselves.

    Args:
      pools: Who owns what.
      table: The blocks of each row's slot; 0 where there is none.
      checkpoint: Its checkpoint row; 0: none.
      folds: Which write their checkpoint.
      appends: Where new entries go.
    """
    new_state, new_block = _wanted(pools, table, checkpoint, folds, appends)
    blocks = jnp.sum(new_block, axis=1, dtype=jnp.int32)
    return Claim(new_state.astype(jnp.int32), pools.states.left), Claim(blocks, pools.blocks.left)


def take_shared(
    pools: Sharing,
    table: Int32[Array, "rows max_blocks"],
    checkpoint: Int32[Array, "rows"],
    folds: Bool[Array, "rows"],
    appends: Bool[Array, "rows max_blocks"],
    keeps: Bool[Array, "rows max_blocks"],
) -> tuple[Int32[Array, "rows"], Int32[Array, "rows max_blocks"], Sharing]:
    """Gives the rows of a launch the checkpoint rows and blocks that they will write; enough are free.

    Args:
      pools, table, checkpoint, folds, appends: As in `claim_rows`.
      keeps: Where entries lie that are alive after the launch. A row that folds gives back its other blocks.

    Returns:
      target: The checkpoint row that each folding row writes; its own, if nobody else has it.
      table, pools: As they are now.
    """
    new_state, new_block = _wanted(pools, table, checkpoint, folds, appends)
    taken, states = take_rows(pools.states, new_state)
    target = jnp.where(new_state, taken, checkpoint)
    states = release_rows(states, jnp.where(new_state, checkpoint, 0))
    taken, blocks = take_rows(pools.blocks, new_block)
    now = jnp.where(new_block, taken, jnp.where(folds[:, None] & ~keeps & ~appends, 0, table))
    return target, now, Sharing(states, release_rows(blocks, jnp.where(now != table, table, 0)))


def note_missing(pools: Sharing, states: Int32[Array, ""], blocks: Int32[Array, ""]) -> Sharing:
    """The pools with a note of how many checkpoint rows and blocks were missing.

    Raises:
      PoolExhausted: Some were, where that is known.
    """
    fresh = Sharing(flag_missing(clear_flag(pools.states), states), flag_missing(clear_flag(pools.blocks), blocks))
    raise_missing_rows(fresh)
    return Sharing(flag_missing(pools.states, states), flag_missing(pools.blocks, blocks))


def _wanted(pools: Sharing, table: Array, checkpoint: Array, folds: Array, appends: Array) -> tuple[Array, Array]:
    """Which rows need a checkpoint row of their own (bool [rows]), and which blocks (bool [rows, max_blocks])."""
    new_state = folds & ((checkpoint == 0) | is_shared(pools.states, checkpoint))
    return new_state, appends & ((table == 0) | is_shared(pools.blocks, table))


def count_places(
    order: Int32[Array, "rows ring"],
    origin: Int32[Array, "rows"],
    first: Int32[Array, "rows"],
    end: Int32[Array, "rows"],
    blocks: int,
) -> Int32[Array, "rows {blocks}"]:
    """How many of the logical places [first, end) each block of a ring holds.

    Args:
      order: Of each row's ring, logical to ring position.
      origin, first, end: Of each row.
      blocks: Blocks of one ring.
    """
    rows, ring = order.shape
    logical = jnp.arange(ring, dtype=jnp.int32)[None]
    place = jnp.take_along_axis(order, (origin[:, None] + logical) % ring, axis=1)
    block = jnp.where((logical >= first[:, None]) & (logical < end[:, None]), place // (ring // blocks), blocks)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((rows, blocks), jnp.int32).at[row, block].add(1, mode="drop")


def raise_missing_rows(pools: Sharing | None) -> None:
    """Raises `PoolExhausted` if a launch lacked checkpoint rows or blocks, where that is known; see
    `jaxbuf.memory.ownership.raise_missing`."""
    if pools is not None:
        raise_missing(states=pools.states, blocks=pools.blocks)
