"""The integers of the buffered memory: what each slot holds, and what one launch reads, folds and writes.

All decisions of a launch are made here, once for all layers. Layers and kernels get finished indices and look nothing
up themselves.
"""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_range, check_sizes, distinct_slots
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.recurrence.shared_rows import (
    Sharing,
    count_places,
    default_counts,
    init_sharing,
    raise_missing_rows,
    reserve,
)
from jaxbuf.recurrence.spec import Array, check_rows
from jaxbuf.recurrence.traffic import MOST_LIMIT, ring_entries
from jaxbuf.recurrence.tree import ancestors, check_parents, check_path, path_first, permute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cursor:
    """What every slot holds; one for all recurrent layers of a model. Slot 0 is null and stays empty.

    A slot's tokens are `folded` in its checkpoint, then `length` committed entries, then `pending` ones. Entry i
    (logical) lies at ring position order[(origin + i) % ring], which block_table maps to a block.

    Attributes:
      checkpoint_of: int32 [slots + 1], the row of the checkpoint pool that holds the slot's state.
      fold_to: int32 [slots + 1], the row that the slot's folds write. With `sharing` the row is chosen anew at each
        fold, and this is the one that the last fold wrote.
      block_table: int32 [slots + 1, max_blocks]; 0 where there is no block.
      order: int32 [slots + 1, ring], logical to ring position.
      origin, length, pending: int32 [slots + 1].
      limit: int32 [slots + 1], entries from which the slot folds; more than `ring` less max_pending counts as that.
      folded: int32 [slots + 1], tokens in the checkpoint; 0: it holds nothing and is not read.
      max_pending: The most tokens of one launch (static).
      sharing: Who owns the rows and blocks that slots take when they need them; None: every slot has its own for good.
    """

    checkpoint_of: Array
    fold_to: Array
    block_table: Array
    order: Array
    origin: Array
    length: Array
    pending: Array
    limit: Array
    folded: Array
    max_pending: int = dataclasses.field(metadata={"static": True})
    sharing: Sharing | None = None

    @property
    def ring(self) -> int:
        """Entries in each slot's ring."""
        return self.order.shape[1]

    @property
    def position(self) -> Array:
        """int32 [slots + 1]: committed tokens of each slot."""
        return self.folded + self.length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Where the committed state of each row of a launch lies.

    Attributes:
      checkpoint: int32 [rows], its row of the pool; read only where has_checkpoint (bool [rows]).
      entries: int32 [rows, ring], their flat positions in the pool (block · block_size + offset).
      live: int32 [rows], how many of them are committed.
      max_pending: The most tokens of one launch (static).
    """

    checkpoint: Array
    has_checkpoint: Array
    entries: Array
    live: Array
    max_pending: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """The integers of one `extend`, for every layer.

    Attributes:
      slots, lengths: int32 [rows]; lengths is 0 for the null slot.
      start: int32 [rows], tokens committed before: the position of the row's first new token.
      before, now: What the rows held, and what they hold after the fold.
      write: int32 [rows], the checkpoint row that a folding row writes in this launch; past the pool for the others.
      any_fold: bool, whether any row folds: decided here, once for all layers.
      append: int32 [rows, T], flat position of each new entry; past the pool for those that are not real.
      parents: int32 [rows, T], the node before each new token, -1 for the committed tail; None: each follows the last.
      ancestors: bool [rows, T, T], at (i, j) whether new token j is on i's path, i itself included; None likewise.
    """

    slots: Array
    lengths: Array
    start: Array
    before: Held
    now: Held
    write: Array
    any_fold: Array
    append: Array
    parents: Array | None = None
    ancestors: Array | None = None

    @property
    def folds(self) -> Array:
        """bool [rows]: which rows fold in this launch."""
        return self.write < NOWHERE

    @property
    def depth(self) -> Array:
        """int32 [rows, T] or [1, T]: how many of the new tokens precede each one."""
        if self.ancestors is None:
            return jnp.arange(self.append.shape[1], dtype=jnp.int32)[None]
        return jnp.sum(self.ancestors, axis=2, dtype=jnp.int32) - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillStep:
    """The integers of one `prefill`, for every layer.

    Attributes:
      slots, lengths, start, before: As in `Step`.
      head: int32 [rows], tokens that go into the checkpoint; the others stay entries.
      write: int32 [rows], the checkpoint row written; past the pool where none is.
      append: int32 [rows, kept], flat position of token head + i's entry; past the pool where there is none.
    """

    slots: Array
    lengths: Array
    start: Array
    before: Held
    head: Array
    write: Array
    append: Array


def init_cursor(
    *,
    slots: int,
    limit: int | Array = 16,
    max_pending: int = 8,
    block_size: int = 8,
    states: int | None = None,
    blocks: int | None = None,
) -> Cursor:
    """A cursor for `slots` empty requests: physical slots 1 to `slots`.

    Args: as in `buffered.init`; limits for each may also start with the null slot's. A ring holds
    max(limit, max_pending) + max_pending entries, in whole blocks.

    Raises:
      ValueError: As in `buffered.init`.
    """
    check_sizes(slots=slots, max_pending=max_pending, block_size=block_size)
    limits = checked_limits(limit, slots)
    width = ring_entries(int(limits.max()), max_pending, block_size) // block_size
    if (1 + slots * width) * block_size > np.iinfo(np.int32).max:
        raise ValueError(
            f"slots ({slots}) with rings of {width * block_size} entries must be fewer: int32 numbers all entries"
        )
    owned = np.arange(slots + 1, dtype=np.int32)
    table = 1 + (owned[:, None] - 1) * width + np.arange(width, dtype=np.int32)[None]
    table[0] = 0
    sharing = None
    if states is not None or blocks is not None:
        sharing = init_sharing(*default_counts(slots, width, states, blocks, -(-max_pending // block_size) + 1))
        owned, table = np.zeros_like(owned), np.zeros_like(table)
    order = np.broadcast_to(np.arange(width * block_size, dtype=np.int32), (slots + 1, width * block_size))
    full = np.concatenate([[1], np.broadcast_to(limits, (slots,))]).astype(np.int32)

    def zero():
        return jnp.zeros(slots + 1, jnp.int32)

    return Cursor(
        checkpoint_of=jnp.array(owned),
        fold_to=jnp.array(owned),
        block_table=jnp.array(table),
        order=jnp.array(order),
        origin=zero(),
        length=zero(),
        pending=zero(),
        limit=jnp.array(full),
        folded=zero(),
        max_pending=max_pending,
        sharing=sharing,
    )


def checked_limits(limit: object, slots: int, *, longest: int | None = None) -> np.ndarray:
    """Fold thresholds as int32: a scalar, or [slots] for each slot.

    Args:
      limit: One number, integers [slots], or integers [slots + 1] that start with the null slot's.
      slots: How many there are.
      longest: The most entries that a slot can come to hold, committed and pending. A limit above is taken for this
        one: it is never reached either, and the ring would only be longer. None: not known.

    Raises:
      ValueError: Something else than whole numbers from 1 on, or not as many; or a limit above 2**20 is left.
    """
    limits = np.asarray(limit)
    if limits.ndim and limits.dtype.kind not in "iu":
        raise ValueError(f"limit must be whole numbers, got {limits.dtype} {limits.shape}")
    if limits.shape == (slots + 1,):
        limits = limits[1:]
    if limits.shape not in ((), (slots,)):
        raise ValueError(f"limit must be one number or int32 [{slots}], one a slot, got shape {limits.shape}")
    numbers = limits.reshape(-1).tolist()
    for i, number in enumerate(numbers):
        if longest is not None and isinstance(number, int) and number > longest:
            numbers[i] = longest
        check_sizes(most=MOST_LIMIT, limit=numbers[i])
    return np.array(numbers, np.int32).reshape(limits.shape)


def begin(cursor: Cursor, slots: Array, lengths: Array, time: int, parents: Array | None = None) -> tuple[Step, Cursor]:
    """Decides one `extend` of `time` tokens: which rows fold, what is read, where entries go.

    Args:
      slots: int32 [rows].
      lengths: int32 [rows], real tokens of each row, in [0, time].
      time: T, at most max_pending.
      parents: int32 [rows, T], the node before each token, below its own index; -1: the committed tail. None: each
        token follows the one before.

    Returns:
      The launch's integers, and the cursor with the folds done and the new tokens pending. Where shared rows or blocks
      run out, all rows rest (lengths 0) and the cursor's `sharing` is flagged.

    Raises:
      ValueError: time is 0 or exceeds max_pending, or slots, lengths and parents do not fit.
      PoolExhausted: Rows or blocks ran out, where that is known (outside jit).
    """
    if time < 1:
        raise ValueError(f"time must be at least 1 token, got {time}")
    if time > cursor.max_pending:
        raise ValueError(f"time ({time} tokens at once) must be at most max_pending ({cursor.max_pending})")
    slots, lengths = _rows(cursor, slots, lengths, time)
    before = held(cursor, slots)
    # A launch that folds still reads the entries that it folds, and may not write its tokens over them.
    limit = jnp.minimum(cursor.limit[slots], cursor.ring - cursor.max_pending)
    full = (lengths > 0) & (before.live > 0) & (before.live + lengths > limit)
    first = jnp.where(full, 0, before.live)
    cursor, full, lengths = _reserve(cursor, slots, full, lengths, first, first + lengths)
    after, write = _fold_rows(cursor, slots, full)
    now = held(after, slots)
    time_index = jnp.arange(time, dtype=jnp.int32)[None]
    append = _append_positions(now.entries, now.live[:, None] + time_index, time_index < lengths[:, None])
    if parents is not None:
        parents = check_parents(parents, slots.shape[0], time)
        parents = None if time == 1 else parents  # one token makes no tree
    step = Step(
        slots=slots,
        lengths=lengths,
        start=cursor.position[slots],
        before=before,
        now=now,
        write=write,
        any_fold=jnp.any(write < NOWHERE),
        append=append,
        parents=parents,
        ancestors=None if parents is None else ancestors(parents),
    )
    return step, dataclasses.replace(after, pending=put(after.pending, slots, lengths))


def begin_prefill(
    cursor: Cursor, slots: Array, lengths: Array, keep: int | Array = 0, *, time: int | None = None
) -> tuple[PrefillStep, Cursor]:
    """Decides one `prefill`; arguments as there. The returned cursor has the prompt committed.

    `time` is the most tokens that a row has, the width of the prompts; None: whatever `lengths` say.

    Raises:
      ValueError: keep is negative or leaves no room for max_pending entries, or slots and lengths do not fit.
      PoolExhausted: As in `begin`.
    """
    room = cursor.ring - cursor.max_pending
    slots, lengths = _rows(cursor, slots, lengths, time)
    if isinstance(keep, (int, np.integer)) and not isinstance(keep, bool):
        if not 0 <= keep <= room:
            raise ValueError(f"keep must be in [0, {room}], the ring ({cursor.ring}) less max_pending, got {keep}")
        kept_at_most, keep = int(keep), jnp.full(slots.shape, keep, jnp.int32)
    else:
        keep = jnp.asarray(keep)
        check_rows("keep", keep, slots.shape[0])
        check_range("keep", keep, 0, room)
        kept_at_most = room
    before = held(cursor, slots)
    kept = jnp.minimum(jnp.clip(keep.astype(jnp.int32), 0, room), lengths)
    # A checkpoint is written if anything goes into it: part of the prompt, or entries that were live.
    touched = (lengths > 0) & (lengths - kept + before.live > 0)
    start = cursor.position[slots]
    cursor, touched, lengths = _reserve(cursor, slots, touched, lengths, jnp.zeros_like(kept), kept)
    kept = jnp.minimum(kept, lengths)
    head = lengths - kept
    moved, write = _fold_rows(cursor, slots, touched)
    after = dataclasses.replace(
        moved,
        folded=put(moved.folded, slots, moved.folded[slots] + head),
        length=put(moved.length, slots, jnp.where(lengths > 0, kept, moved.length[slots])),
        pending=put(moved.pending, slots, jnp.zeros_like(slots)),
    )
    index = jnp.arange(kept_at_most, dtype=jnp.int32)[None]
    now = held(after, slots)
    append = _append_positions(
        now.entries, jnp.broadcast_to(index, (slots.shape[0], kept_at_most)), index < kept[:, None]
    )
    return PrefillStep(slots, lengths, start, before, head, write, append), after


def begin_fold(cursor: Cursor, slots: Array) -> tuple[Held, Array, Cursor]:
    """Decides a forced fold of all that `slots` committed: what they hold, the rows to write, the cursor after it.

    Pending entries stay pending.
    """
    slots = distinct_slots(slots, cursor.length.shape[0])
    before = held(cursor, slots)
    pending = jnp.where(slots > 0, cursor.pending[slots], 0)
    cursor, which, _ = _reserve(cursor, slots, before.live > 0, pending, pending, pending)
    after, write = _fold_rows(cursor, slots, which)
    return before, write, after


def commit_cursor(cursor: Cursor, accepted: Array, slots: Array, path: Array | None = None) -> Cursor:
    """Makes the first `accepted` (int32 [rows]) pending tokens of each slot real; the rest cease to exist.

    With `path` (int32 [rows, n]) they are the first `accepted` nodes of it, root to leaf, and `order` is permuted so
    that they come first.
    """
    slots = distinct_slots(slots, cursor.length.shape[0])
    raise_missing_rows(cursor.sharing)
    accepted = jnp.asarray(accepted)
    check_rows("accepted", accepted, slots.shape[0])
    pending = cursor.pending[slots]
    check_range("accepted", accepted, 0, pending)
    accepted = jnp.clip(accepted.astype(jnp.int32), 0, pending)
    order = cursor.order
    if path is not None:
        path = check_path(path, accepted, pending, cursor.max_pending)
        moved = path_first(path, accepted, cursor.max_pending)
        order = permute(order, slots, cursor.origin[slots] + cursor.length[slots], moved)
    return dataclasses.replace(
        cursor,
        order=order,
        length=put(cursor.length, slots, cursor.length[slots] + accepted),
        pending=put(cursor.pending, slots, jnp.zeros_like(slots)),
    )


def held(cursor: Cursor, slots: Array) -> Held:
    """Where the committed state of each row lies."""
    blocks = cursor.block_table.shape[1]
    block_size = cursor.ring // blocks
    logical = (cursor.origin[slots][:, None] + jnp.arange(cursor.ring, dtype=jnp.int32)[None]) % cursor.ring
    ring = jnp.take_along_axis(cursor.order[slots], logical, axis=1)
    block = jnp.take_along_axis(cursor.block_table[slots], ring // block_size, axis=1)
    has_checkpoint = (cursor.folded[slots] > 0) & (slots > 0)
    live = jnp.where(slots > 0, cursor.length[slots], 0)
    entries = block * block_size + ring % block_size
    return Held(cursor.checkpoint_of[slots], has_checkpoint, entries, live, cursor.max_pending)


def _reserve(
    cursor: Cursor, slots: Array, folds: Array, lengths: Array, first: Array, end: Array
) -> tuple[Cursor, Array, Array]:
    """Takes the checkpoint rows and blocks that a launch will write, where slots share them.

    After the fold, the launch's entries go to the logical places [first, end), and all entries before `end` are alive.

    Returns:
      The cursor with what was taken, which rows fold, and each row's number of tokens. Where too little was free, no
      row folds and all have 0 tokens.
    """
    if cursor.sharing is None:
        return cursor, folds, lengths
    blocks = cursor.block_table.shape[1]
    folds = folds & (slots > 0)
    origin = cursor.origin[slots] + jnp.where(folds, cursor.length[slots], 0)
    appends = count_places(cursor.order[slots], origin, first, end, blocks) > 0
    keeps = count_places(cursor.order[slots], origin, jnp.zeros_like(end), end, blocks) > 0
    table, checkpoint = cursor.block_table[slots], cursor.checkpoint_of[slots]
    served, target, table, sharing = reserve(cursor.sharing, table, checkpoint, folds, appends, keeps)
    raise_missing_rows(sharing)
    folds = folds & served
    cursor = dataclasses.replace(
        cursor,
        fold_to=put(cursor.fold_to, slots, jnp.where(folds, target, cursor.fold_to[slots])),
        block_table=put(cursor.block_table, slots, table),
        sharing=sharing,
    )
    return cursor, folds, jnp.where(served, lengths, 0)


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


def put(array: Array, slots: Array, new: Array) -> Array:
    """Writes per-row values to their slots; the null slot's are dropped."""
    return array.at[jnp.where(slots > 0, slots, NOWHERE)].set(new, mode="drop")


def _rows(cursor: Cursor, slots: Array, lengths: Array, time: int | None) -> tuple[Array, Array]:
    """The slots of a launch, each of them once, and each row's number of tokens: int32 [rows] in [0, time]."""
    slots, most = distinct_slots(slots, cursor.length.shape[0]), np.iinfo(np.int32).max if time is None else time
    given = jnp.asarray(lengths)
    check_rows("lengths", given, slots.shape[0])
    check_range("lengths", lengths, 0, most)
    return slots, jnp.where(slots > 0, jnp.clip(given.astype(jnp.int32), 0, most), 0)
