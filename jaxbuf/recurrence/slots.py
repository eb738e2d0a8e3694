"""What happens to whole slots: they are emptied, loaded with a state, or forked."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_range, check_rows, checked_fork, checked_slots, distinct_slots, first_rows
from jaxbuf.axes import Array, Int, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.ownership import NOWHERE, clear_flag, is_shared, release_rows, share_rows, short_of, take_rows
from jaxbuf.memory.sequences import put
from jaxbuf.recurrence.cursor import Cursor
from jaxbuf.recurrence.shared_rows import Sharing, count_places, note_missing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """What a fork copies in every layer's pool; the targets are past the pool where nothing is copied.

    Attributes:
      states: Checkpoint rows read and written; None: checkpoints are shared, and none is copied.
      blocks: Blocks read and written.
    """

    states: tuple[Int32[Array, "rows"], Int32[Array, "rows"]] | None
    blocks: tuple[Int32[Array, "rows max_blocks"], Int32[Array, "rows max_blocks"]]


def reset_cursor(cursor: Cursor, slots: Int[Array, "rows"]) -> Cursor:
    """Empties slots; one that is there twice is emptied once. They keep their limit, and the rows and
    blocks that are theirs; shared ones are given back."""
    # A slot that gave its rows back twice would take them from the slots that share them.
    cursor = _empty(cursor, first_rows(checked_slots(slots, cursor.length.shape[0])))
    pools = cursor.sharing
    if pools is None:
        return cursor
    return dataclasses.replace(cursor, sharing=Sharing(clear_flag(pools.states), clear_flag(pools.blocks)))


def load_cursor(
    cursor: Cursor, tokens: Int[Array, "rows"], slots: Int[Array, "rows"]
) -> tuple[Int32[Array, "rows"], Cursor]:
    """The checkpoint rows to write (past the pool where tokens is 0), and the cursor of slots that hold just that.

    Raises:
      ValueError: slots or tokens do not fit, or are out of range or repeated, where that is known.
      PoolExhausted: Shared rows ran out, where that is known; inside jit the cursor is flagged and nothing written.
    """
    slots = distinct_slots(slots, cursor.length.shape[0])
    tokens = jnp.asarray(tokens)
    check_rows("tokens", tokens, slots.shape[0])
    check_range("tokens", tokens, 0, NOWHERE)
    empty = _empty(cursor, slots)
    target = empty.fold_to[slots]
    loaded, served = (tokens > 0) & (slots > 0), jnp.asarray(True)
    if cursor.sharing is not None and empty.sharing is not None:
        missing = short_of(empty.sharing.states, loaded)
        flagged = note_missing(cursor.sharing, missing, jnp.zeros_like(missing))
        served = missing == 0
        target, states = take_rows(empty.sharing.states, loaded & served)
        empty = dataclasses.replace(empty, sharing=dataclasses.replace(empty.sharing, states=states))
        cursor = dataclasses.replace(cursor, sharing=flagged)
    loaded = loaded & (target > 0)
    done = dataclasses.replace(
        empty,
        checkpoint_of=put(empty.checkpoint_of, slots, jnp.where(loaded, target, empty.checkpoint_of[slots])),
        fold_to=put(empty.fold_to, slots, jnp.where(loaded, target, empty.fold_to[slots])),
        folded=put(empty.folded, slots, jnp.where(loaded, tokens.astype(jnp.int32), 0)),
    )
    if cursor.sharing is not None:
        done = jax.tree.map(lambda new, old: jnp.where(served, new, old), done, cursor)
    return jnp.where(loaded, target, NOWHERE), done


def fewest_tokens(cursor: Cursor, slots: Int32[Array, "rows"], *, alone: bool) -> Int32[Array, "rows"]:
    """How many of its tokens a slot can be cut back to at least: those in the checkpoint; and if `alone`
    those up to the last entry in a block that another slot owns, too. See `jaxbuf.memory.kind.MemoryKind`."""
    folded = cursor.folded[slots]
    if cursor.sharing is None or not alone:
        return folded
    logical = jnp.arange(cursor.ring, dtype=jnp.int32)[None]
    place = jnp.take_along_axis(cursor.order[slots], (cursor.origin[slots][:, None] + logical) % cursor.ring, axis=1)
    table = cursor.block_table[slots]
    block = jnp.take_along_axis(table, place // (cursor.ring // table.shape[1]), axis=1)
    shared = is_shared(cursor.sharing.blocks, block) & (logical < cursor.length[slots][:, None])
    return folded + jnp.max(jnp.where(shared, logical + 1, 0), axis=1)


def claim_fork(
    cursor: Cursor, source: Int32[Array, "rows"], target: Int32[Array, "rows"], tokens: Int[Array, "rows"]
) -> tuple[Claim, ...]:
    """The checkpoint rows and blocks that a fork takes, where slots share them; see `fork_cursor`."""
    if cursor.sharing is None:
        return ()
    copied, _ = _copied(cursor, source, target, tokens - cursor.folded[source])
    blocks = jnp.sum(copied, axis=1, dtype=jnp.int32)
    return Claim(jnp.zeros_like(blocks), cursor.sharing.states.left), Claim(blocks, cursor.sharing.blocks.left)


def fork_cursor(
    cursor: Cursor, source: Int[Array, "rows"], target: Int[Array, "rows"], tokens: Int[Array, "rows"] | None = None
) -> tuple[Copies, Cursor]:
    """Makes each target slot hold what its source committed, and decides what has to be copied for that.

    All sources are read as they were before: slots may trade places. Targets forget what they held.

    Args:
      source, target: A row with a 0, or with twice the same slot, is left out. No target twice; under jit the first row
        of a target counts.
      tokens: How many of the source's committed tokens the target holds, the first ones; at least those in the
        checkpoint. None: all.

    Raises:
      ValueError: The two do not fit each other, or slots are out of range or a target repeated, where that is known.
      PoolExhausted: Blocks ran out, where that is known; inside jit the cursor is flagged and nothing else changes.
    """
    source, target = checked_fork(source, target, cursor.length.shape[0])
    real, zero = target > 0, jnp.zeros_like(source)
    length = cursor.length[source] if tokens is None else tokens - cursor.folded[source]
    copied, alive = _copied(cursor, source, target, length)
    table, has_checkpoint = cursor.block_table[source], real & (cursor.folded[source] > 0)
    checkpoint, old = cursor.checkpoint_of[source], cursor
    if cursor.sharing is None:
        row, mine = cursor.fold_to[target], cursor.block_table[target]
        states = checkpoint, jnp.where(has_checkpoint & (row > 0), row, NOWHERE)
        served = jnp.asarray(True)
    else:
        states, pools = None, cursor.sharing
        missing = short_of(pools.blocks, copied)
        flagged = note_missing(pools, jnp.zeros_like(missing), missing)
        served = missing == 0
        old = dataclasses.replace(cursor, sharing=flagged)
        row, whole = jnp.where(has_checkpoint, checkpoint, 0), jnp.where((alive > 0) & ~copied, table, 0)
        shared = Sharing(share_rows(pools.states, row), share_rows(pools.blocks, whole))
        taken, fresh = take_rows(shared.blocks, copied & served)
        mine = jnp.where(copied, taken, whole)
        # Targets give their blocks back after the copies took theirs: no block is read and written in one call.
        cursor = _empty(dataclasses.replace(cursor, sharing=Sharing(shared.states, fresh)), target)
    after = dataclasses.replace(
        cursor,
        checkpoint_of=put(cursor.checkpoint_of, target, row),
        fold_to=put(cursor.fold_to, target, row),
        block_table=put(cursor.block_table, target, mine),
        pending=put(cursor.pending, target, zero),
        length=put(cursor.length, target, length),
        **{
            name: put(getattr(cursor, name), target, getattr(old, name)[source])
            for name in ("order", "origin", "limit", "folded", *(() if cursor.kv_limit is None else ("kv_limit",)))
        },
    )
    if cursor.sharing is not None:
        after = jax.tree.map(lambda new, was: jnp.where(served, new, was), after, old)
    copied = copied & served & (mine > 0)
    return Copies(states, (table, jnp.where(copied, mine, NOWHERE))), after


def _copied(cursor: Cursor, source: Array, target: Array, length: Array) -> tuple[Array, Array]:
    """Which blocks of each source a fork copies, bool [rows, max_blocks], and int32 how many live entries are in each,
    of the first `length` (int32 [rows]).

    Where slots share blocks, those are copied to which both slots will append: the partly filled ones.
    """
    blocks = cursor.block_table.shape[1]
    zero = jnp.zeros_like(source)
    alive = count_places(cursor.order[source], cursor.origin[source], zero, length, blocks)
    alive = jnp.where((target > 0)[:, None], alive, 0)
    whole = cursor.ring // blocks if cursor.sharing is not None else alive + 1
    return (alive > 0) & (alive < whole), alive


def _empty(cursor: Cursor, slots: Array) -> Cursor:
    zero = jnp.zeros_like(slots)
    identity = jnp.broadcast_to(jnp.arange(cursor.ring, dtype=jnp.int32)[None], (slots.shape[0], cursor.ring))
    if cursor.sharing is not None:
        real = slots > 0
        states = release_rows(cursor.sharing.states, jnp.where(real, cursor.checkpoint_of[slots], 0))
        table = jnp.where(real[:, None], cursor.block_table[slots], 0)
        cursor = dataclasses.replace(
            cursor,
            checkpoint_of=put(cursor.checkpoint_of, slots, zero),
            fold_to=put(cursor.fold_to, slots, zero),
            block_table=put(cursor.block_table, slots, jnp.zeros_like(table)),
            sharing=Sharing(states, release_rows(cursor.sharing.blocks, table)),
        )
    emptied = {name: put(getattr(cursor, name), slots, zero) for name in ("origin", "length", "pending", "folded")}
    return dataclasses.replace(cursor, order=put(cursor.order, slots, identity), **emptied)
