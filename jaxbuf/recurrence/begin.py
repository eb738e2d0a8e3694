"""What one launch reads, folds and writes, of the buffered memory: integers, decided once for all layers.

Layers and kernels get finished indices and look nothing up themselves.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_range, check_rows, distinct_slots
from jaxbuf.axes import Array, Bool, Int, Int32
from jaxbuf.memory.claims import Claim, grant
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.memory.sequences import Launch, make_launch, put
from jaxbuf.recurrence.cursor import Cursor, thresholds
from jaxbuf.recurrence.shared_rows import claim_rows, count_places, note_missing, take_shared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Where the committed state of each row of a launch lies.

    Attributes:
      checkpoint: Its row of the pool; read only where has_checkpoint.
      entries: Their flat positions in the pool (block · block_size + offset).
      live: How many of them are committed.
      max_pending: The most tokens of one launch (static).
      room: A row with more entries than that folds (static).
    """

    checkpoint: Int32[Array, "rows"]
    has_checkpoint: Bool[Array, "rows"]
    entries: Int32[Array, "rows ring"]
    live: Int32[Array, "rows"]
    max_pending: int = dataclasses.field(metadata={"static": True})
    room: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """The integers of one `extend`, for every layer.

    Attributes:
      slots, lengths: Of each row; the null slot's length is 0.
      start: Tokens committed before: the position of the row's first new token.
      before, now: What the rows held, and what they hold after the fold.
      write: The checkpoint row that a folding row writes in this launch; past the pool for the others.
      any_fold: Whether any row folds: decided here, once for all layers.
      append: Flat position of each new entry; past the pool for those that are not real.
      parents: The node before each new token, -1 for the committed tail; None: each follows the last.
      ancestors: At (i, j) whether new token j is on i's path, i itself included; None likewise.
    """

    slots: Int32[Array, "rows"]
    lengths: Int32[Array, "rows"]
    start: Int32[Array, "rows"]
    before: Held
    now: Held
    write: Int32[Array, "rows"]
    any_fold: Bool[Array, ""]
    append: Int32[Array, "rows time"]
    parents: Int32[Array, "rows time"] | None = None
    ancestors: Bool[Array, "rows time time"] | None = None

    @property
    def folds(self) -> Bool[Array, "... rows"]:
        """Which rows fold in this launch."""
        return self.write < NOWHERE

    @property
    def depth(self) -> Int32[Array, "#rows time"]:
        """How many of the new tokens precede each one."""
        if self.ancestors is None:
            return jnp.arange(self.append.shape[1], dtype=jnp.int32)[None]
        return jnp.sum(self.ancestors, axis=2, dtype=jnp.int32) - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillStep:
    """The integers of one `prefill`, for every layer.

    Attributes:
      slots, lengths, start, before: As in `Step`.
      head: Tokens that go into the checkpoint; the others stay entries.
      write: The checkpoint row written; past the pool where none is.
      append: Flat position of token head + i's entry; past the pool where there is none.
      empty: Whether no row holds anything before (static).
    """

    slots: Int32[Array, "rows"]
    lengths: Int32[Array, "rows"]
    start: Int32[Array, "rows"]
    before: Held
    head: Int32[Array, "rows"]
    write: Int32[Array, "rows"]
    append: Int32[Array, "rows n"]
    empty: bool = dataclasses.field(default=False, metadata={"static": True})


class Use(NamedTuple):
    """What a launch does to each row's ring.

    Attributes:
      folds: Whether all that is live goes into the checkpoint.
      first, end: New entries go to the logical places [first, end) of what is left, and all entries before `end` are
        alive afterwards.
    """

    folds: Bool[Array, "rows"]
    first: Int32[Array, "rows"]
    end: Int32[Array, "rows"]


def begin(
    cursor: Cursor,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    time: int,
    parents: Int[Array, "rows time"] | None = None,
) -> tuple[Step, Cursor]:
    """Decides one `extend` of `time` tokens: which rows fold, what is read, where entries go.

    Args:
      slots: Of each row.
      lengths: Real tokens of each row, in [0, time].
      time: T, at most max_pending.
      parents: The node before each token, below its own index; -1: the committed tail. None: each token follows the one
        before.

    Returns:
      The launch's integers, and the cursor with the folds done and the new tokens pending. A row for which shared rows
      or blocks do not suffice rests (its length is 0), and the cursor's `sharing` has a note of it.

    Raises:
      ValueError: time is 0 or exceeds max_pending, or slots, lengths and parents do not fit.
      PoolExhausted: Rows or blocks do not suffice for all, where that is known (outside jit).
    """
    launch = make_launch(cursor.position, cursor.max_pending, slots, lengths, time, parents=parents)
    return begin_launch(*_granted(cursor, launch))


def begin_prefill(
    cursor: Cursor,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    keep: int | Int[Array, "rows"] = 0,
    *,
    time: int | None = None,
) -> tuple[PrefillStep, Cursor]:
    """Decides one `prefill`; arguments as there. The returned cursor has the prompt committed.

    `time` is the most tokens that a row has, the width of the prompts; None: whatever `lengths` say.

    Raises:
      ValueError: keep is negative or leaves no room for max_pending entries, or slots and lengths do not fit.
      PoolExhausted: As in `begin`.
    """
    launch = make_launch(cursor.position, cursor.max_pending, slots, lengths, time, keep=keep)
    return begin_prompt(*_granted(cursor, launch))


def claim(cursor: Cursor, launch: Launch) -> tuple[Claim, ...]:
    """The checkpoint rows and blocks that a launch takes, where slots share them; nothing where they do not."""
    if cursor.sharing is None:
        return ()
    return _claim(cursor, launch.slots, _use(cursor, launch))


def begin_launch(cursor: Cursor, launch: Launch) -> tuple[Step, Cursor]:
    """`begin` of a launch whose rows were granted all that they need."""
    slots, lengths = launch.slots, launch.lengths
    before, use = held(cursor, slots), _use(cursor, launch)
    cursor = _take(cursor, slots, use)
    after, write = _fold_rows(cursor, slots, use.folds)
    now = held(after, slots)
    time_index = jnp.arange(launch.time, dtype=jnp.int32)[None]
    append = _append_positions(now.entries, now.live[:, None] + time_index, time_index < lengths[:, None])
    step = Step(
        slots=slots,
        lengths=lengths,
        start=launch.start,
        before=before,
        now=now,
        write=write,
        any_fold=jnp.any(write < NOWHERE),
        append=append,
        parents=launch.parents,
        ancestors=launch.ancestors,
    )
    return step, dataclasses.replace(after, pending=put(after.pending, slots, lengths))


def begin_prompt(cursor: Cursor, launch: Launch) -> tuple[PrefillStep, Cursor]:
    """`begin_prefill` of a launch whose rows were granted all that they need."""
    slots, lengths = launch.slots, launch.lengths
    kept_at_most, _ = _keep(cursor, launch)
    before, use = held(cursor, slots), _use(cursor, launch)
    cursor, kept = _take(cursor, slots, use), use.end - use.first
    head = lengths - kept
    moved, write = _fold_rows(cursor, slots, use.folds)
    after = dataclasses.replace(
        moved,
        folded=put(moved.folded, slots, moved.folded[slots] + head),
        length=put(moved.length, slots, jnp.where(lengths > 0, use.end, moved.length[slots])),
        pending=put(moved.pending, slots, jnp.zeros_like(slots)),
    )
    index = jnp.arange(kept_at_most, dtype=jnp.int32)[None]
    now = held(after, slots)
    append = _append_positions(now.entries, use.first[:, None] + index, index < kept[:, None])
    return PrefillStep(slots, lengths, launch.start, before, head, write, append, launch.empty), after


def begin_fold(cursor: Cursor, slots: Int[Array, "rows"]) -> tuple[Held, Int32[Array, "rows"], Cursor]:
    """Decides a forced fold of all that `slots` committed: what they hold, the rows to write, the cursor after it.

    Pending entries stay pending.
    """
    slots = distinct_slots(slots, cursor.length.shape[0])
    before = held(cursor, slots)
    pending = jnp.where(slots > 0, cursor.pending[slots], 0)
    use = Use(before.live > 0, pending, pending)
    if cursor.sharing is not None:
        claims = _claim(cursor, slots, use)
        cursor = dataclasses.replace(cursor, sharing=note_missing(cursor.sharing, *(c.missing for c in claims)))
        use = use._replace(folds=use.folds & grant(claims))
        cursor = _take(cursor, slots, use)
    after, write = _fold_rows(cursor, slots, use.folds)
    return before, write, after


def held(cursor: Cursor, slots: Int32[Array, "rows"]) -> Held:
    """Where the committed state of each row lies."""
    blocks = cursor.block_table.shape[1]
    block_size = cursor.ring // blocks
    logical = (cursor.origin[slots][:, None] + jnp.arange(cursor.ring, dtype=jnp.int32)[None]) % cursor.ring
    ring = jnp.take_along_axis(cursor.order[slots], logical, axis=1)
    block = jnp.take_along_axis(cursor.block_table[slots], ring // block_size, axis=1)
    has_checkpoint = (cursor.folded[slots] > 0) & (slots > 0)
    live = jnp.where(slots > 0, cursor.length[slots], 0)
    entries = block * block_size + ring % block_size
    return Held(cursor.checkpoint_of[slots], has_checkpoint, entries, live, cursor.max_pending, cursor.room)


def _use(cursor: Cursor, launch: Launch) -> Use:
    """What a launch does to the rings of its rows."""
    slots, lengths = launch.slots, launch.lengths
    live = jnp.where(slots > 0, cursor.length[slots], 0)
    if launch.commits:
        _, keep = _keep(cursor, launch)
        stays = live + lengths <= keep
        kept = jnp.minimum(keep, lengths)
        first = jnp.where(stays, live, 0)
        # A checkpoint is written if anything goes into it: part of the prompt, or entries that were live.
        return Use((lengths > 0) & ~stays & (lengths - kept + live > 0), first, first + kept)
    # A launch that folds still reads the entries that it folds, and may not write its tokens over them.
    folds = (lengths > 0) & (live > 0) & (live + lengths > thresholds(cursor, slots))
    first = jnp.where(folds, 0, live)
    return Use(folds, first, first + lengths)


def _keep(cursor: Cursor, launch: Launch) -> tuple[int, Array]:
    """The most tokens that a prompt leaves as entries (static), and the most that each row does, int32 [rows]."""
    room, keep, rows = cursor.ring - cursor.max_pending, launch.keep, launch.slots.shape[0]
    if isinstance(keep, (int, np.integer)) and not isinstance(keep, bool):
        if not 0 <= keep <= room:
            raise ValueError(f"keep must be in [0, {room}], the ring ({cursor.ring}) less max_pending, got {keep}")
        return int(keep), jnp.full(rows, keep, jnp.int32)
    keep = jnp.asarray(keep)
    check_rows("keep", keep, rows)
    check_range("keep", keep, 0, room)
    return room, jnp.clip(keep.astype(jnp.int32), 0, room)


def _granted(cursor: Cursor, launch: Launch) -> tuple[Cursor, Launch]:
    """The cursor with a note of what is missing, and the launch in which rows that lack something rest."""
    claims = claim(cursor, launch)
    if not claims or cursor.sharing is None:
        return cursor, launch
    cursor = dataclasses.replace(cursor, sharing=note_missing(cursor.sharing, *(c.missing for c in claims)))
    return cursor, dataclasses.replace(launch, lengths=jnp.where(grant(claims), launch.lengths, 0))


def _claim(cursor: Cursor, slots: Array, use: Use) -> tuple[Claim, ...]:
    assert cursor.sharing is not None
    return claim_rows(cursor.sharing, *_touched(cursor, slots, use)[:4])


def _take(cursor: Cursor, slots: Array, use: Use) -> Cursor:
    """The cursor with the checkpoint rows and blocks that a launch writes, where slots share them."""
    if cursor.sharing is None:
        return cursor
    target, table, sharing = take_shared(cursor.sharing, *_touched(cursor, slots, use))
    return dataclasses.replace(
        cursor,
        fold_to=put(cursor.fold_to, slots, jnp.where(use.folds, target, cursor.fold_to[slots])),
        block_table=put(cursor.block_table, slots, table),
        sharing=sharing,
    )


def _touched(cursor: Cursor, slots: Array, use: Use) -> tuple[Array, Array, Array, Array, Array]:
    """What `claim_rows` and `take_shared` look at: tables, checkpoint rows, who folds, and blocks written and kept."""
    folds, blocks = use.folds & (slots > 0), cursor.block_table.shape[1]
    origin = cursor.origin[slots] + jnp.where(folds, cursor.length[slots], 0)
    appends = count_places(cursor.order[slots], origin, use.first, use.end, blocks) > 0
    keeps = count_places(cursor.order[slots], origin, jnp.zeros_like(use.end), use.end, blocks) > 0
    return cursor.block_table[slots], cursor.checkpoint_of[slots], folds, appends, keeps


def _fold_rows(cursor: Cursor, slots: Array, which: Array) -> tuple[Cursor, Array]:
    """The cursor after the rows in `which` folded, and the checkpoint row each writes (NOWHERE for the others)."""
    length = cursor.length[slots]
    target = cursor.fold_to[slots]
    which = which & (slots > 0) & (target > 0)  # without a row to write, a slot stays KV-only
    gone = jnp.where(which, length, 0)
    after = dataclasses.replace(
        cursor,
        checkpoint_of=put(cursor.checkpoint_of, slots, jnp.where(which, target, cursor.checkpoint_of[slots])),
        origin=put(cursor.origin, slots, (cursor.origin[slots] + gone) % cursor.ring),
        length=put(cursor.length, slots, length - gone),
        folded=put(cursor.folded, slots, cursor.folded[slots] + gone),
    )
    return after, jnp.where(which, target, NOWHERE)


def _append_positions(entries: Array, logical: Array, real: Array) -> Array:
    # Logical places past the ring belong to tokens that are not real; the index is only kept in range.
    place = jnp.take_along_axis(entries, jnp.minimum(logical, entries.shape[1] - 1), axis=1)
    return jnp.where(real, place, NOWHERE)
