"""The integers of the buffered memory: what each slot holds. What a launch makes of them is in `begin.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Int, Int32
from jaxbuf.memory.sequences import Commit, make_commit, put
from jaxbuf.memory.tree import permute
from jaxbuf.recurrence.shared_rows import Sharing, default_counts, init_sharing, raise_missing_rows
from jaxbuf.recurrence.traffic import BLOCK_SIZE, MOST_LIMIT, ring_entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cursor:
    """What every slot holds; one for all recurrent layers of a model. Slot 0 is null and stays empty.

    A slot's tokens are `folded` in its checkpoint, then `length` committed entries, then `pending` ones. Entry i
    (logical) lies at ring position order[(origin + i) % ring], which block_table maps to a block.

    Attributes:
      checkpoint_of: The row of the checkpoint pool that holds the slot's state.
      fold_to: The row that the slot's folds write. With `sharing` the row is chosen anew at each fold, and this is the
        one that the last fold wrote.
      block_table: The blocks of each slot; 0 where there is no block.
      order: Logical to ring position.
      origin, length, pending: As said.
      limit: Entries from which the slot folds; more than `room` counts as that.
      folded: Tokens in the checkpoint; 0: it holds nothing and is not read.
      max_pending: The most tokens of one launch (static).
      room: The largest limit, or max_pending if that is more, in whole blocks, but at most `ring` less max_pending
        (static). Prompts may leave more entries.
      sharing: Who owns the rows and blocks that slots take when they need them; None: every slot has its own for good.
      kv_limit: Entries up to which a slot that never folded stays KV-only, where that is more than its limit; None: as
        many as its limit says.
    """

    checkpoint_of: Int32[Array, "slots"]
    fold_to: Int32[Array, "slots"]
    block_table: Int32[Array, "slots max_blocks"]
    order: Int32[Array, "slots ring"]
    origin: Int32[Array, "slots"]
    length: Int32[Array, "slots"]
    pending: Int32[Array, "slots"]
    limit: Int32[Array, "slots"]
    folded: Int32[Array, "slots"]
    max_pending: int = dataclasses.field(metadata={"static": True})
    room: int = dataclasses.field(metadata={"static": True})
    sharing: Sharing | None = None
    kv_limit: Int32[Array, "slots"] | None = None

    @property
    def ring(self) -> int:
        """Entries in each slot's ring."""
        return self.order.shape[1]

    @property
    def position(self) -> Int32[Array, "slots"]:
        """Committed tokens of each slot."""
        return self.folded + self.length


def init_cursor(
    *,
    slots: int,
    limit: int | Int[Array, "n"] | np.ndarray = 16,
    max_pending: int = 8,
    block_size: int = BLOCK_SIZE,
    states: int | None = None,
    blocks: int | None = None,
    shares: bool = False,
    kv_limit: int | Int[Array, "n"] | np.ndarray | None = None,
) -> Cursor:
    """A cursor for `slots` empty requests: physical slots 1 to `slots`.

    Args: as in `buffered.init`; limits for each may also start with the null slot's. A ring holds
    max(limit, kv_limit, max_pending) + max_pending entries, in whole blocks. With `shares` slots share checkpoint rows
    and blocks even if neither number is given.

    Raises:
      ValueError: As in `buffered.init`.
    """
    check_sizes(slots=slots, max_pending=max_pending, block_size=block_size)
    limits = checked_limits(limit, slots)
    kv_limits = None if kv_limit is None else checked_limits(kv_limit, slots, name="kv_limit")
    most = int(max(limits.max(), 0 if kv_limits is None else kv_limits.max()))
    width = ring_entries(most, max_pending, block_size) // block_size
    if (1 + slots * width) * block_size > np.iinfo(np.int32).max:
        raise ValueError(
            f"slots ({slots}) with rings of {width * block_size} entries must be fewer: int32 numbers all entries"
        )
    owned = np.arange(slots + 1, dtype=np.int32)
    table = 1 + (owned[:, None] - 1) * width + np.arange(width, dtype=np.int32)[None]
    table[0] = 0
    sharing = None
    if shares or states is not None or blocks is not None:
        sharing = init_sharing(*default_counts(slots, width, states, blocks, -(-max_pending // block_size) + 1))
        owned, table = np.zeros_like(owned), np.zeros_like(table)
    order = np.broadcast_to(np.arange(width * block_size, dtype=np.int32), (slots + 1, width * block_size))

    def zero():
        return jnp.zeros(slots + 1, jnp.int32)

    def each(found):
        return jnp.array(np.concatenate([[1], np.broadcast_to(found, (slots,))]).astype(np.int32))

    return Cursor(
        checkpoint_of=jnp.array(owned),
        fold_to=jnp.array(owned),
        block_table=jnp.array(table),
        order=jnp.array(order),
        origin=zero(),
        length=zero(),
        pending=zero(),
        limit=each(limits),
        folded=zero(),
        max_pending=max_pending,
        room=min(width * block_size - max_pending, -(-max(most, max_pending) // block_size) * block_size),
        sharing=sharing,
        kv_limit=None if kv_limits is None else each(kv_limits),
    )


def checked_limits(limit: object, slots: int, *, longest: int | None = None, name: str = "limit") -> np.ndarray:
    """Fold thresholds as int32: a scalar, or [slots] for each slot.

    Args:
      limit: One number, integers [slots], or integers [slots + 1] that start with the null slot's.
      slots: How many there are.
      longest: The most entries that a slot can come to hold, committed and pending. A limit above is taken for this
        one: it is never reached either, and the ring would only be longer. None: not known.
      name: Of the argument, in errors.

    Raises:
      ValueError: Something else than whole numbers from 1 on, or not as many; or a limit above 2**20 is left.
    """
    limits = np.asarray(limit)
    if limits.ndim and limits.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {limits.dtype} {limits.shape}")
    if limits.shape == (slots + 1,):
        limits = limits[1:]
    if limits.shape not in ((), (slots,)):
        raise ValueError(f"{name} must be one number or int32 [{slots}], one a slot, got shape {limits.shape}")
    numbers = limits.reshape(-1).tolist()
    for i, number in enumerate(numbers):
        if longest is not None and isinstance(number, int) and number > longest:
            numbers[i] = longest
        check_sizes(most=MOST_LIMIT, **{name: numbers[i]})
    return np.array(numbers, np.int32).reshape(limits.shape)


def commit_cursor(
    cursor: Cursor, accepted: Int[Array, "rows"], slots: Int[Array, "rows"], path: Int[Array, "rows n"] | None = None
) -> Cursor:
    """Makes the first `accepted` pending tokens of each slot real; the rest cease to exist.

    With `path` they are the first `accepted` nodes of it, root to leaf, and `order` is permuted so
    that they come first.
    """
    raise_missing_rows(cursor.sharing)
    return commit_entries(
        cursor, make_commit(cursor.pending, cursor.position, cursor.max_pending, accepted, slots, path)
    )


def commit_entries(cursor: Cursor, done: Commit) -> Cursor:
    """The cursor after a commit."""
    slots, order = done.slots, cursor.order
    if done.permutation is not None:
        order = permute(order, slots, cursor.origin[slots] + cursor.length[slots], done.permutation)
    return dataclasses.replace(
        cursor,
        order=order,
        length=put(cursor.length, slots, cursor.length[slots] + done.accepted),
        pending=put(cursor.pending, slots, jnp.zeros_like(slots)),
    )


def rollback_entries(cursor: Cursor, slots: Int32[Array, "rows"], count: Int32[Array, "rows"]) -> Cursor:
    """The cursor whose slots' last `count` committed entries are pending again.

    Entries that were folded since stay where they are: whoever rolls back sees to it that none was.
    """
    length = cursor.length[slots]
    count = jnp.minimum(count, length)
    return dataclasses.replace(
        cursor, length=put(cursor.length, slots, length - count), pending=put(cursor.pending, slots, count)
    )


def thresholds(cursor: Cursor, slots: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """The entries from which each slot folds; one that never folded stays KV-only up to its kv_limit."""
    limit = cursor.limit[slots]
    if cursor.kv_limit is not None:
        limit = jnp.where(cursor.folded[slots] > 0, limit, jnp.maximum(limit, cursor.kv_limit[slots]))
    return jnp.minimum(limit, cursor.room)
