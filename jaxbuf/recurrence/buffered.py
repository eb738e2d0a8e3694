"""The recurrence with a buffer: a checkpoint of the state, and a ring of recent (key, update, decay) entries.

A decoding step reads the checkpoint and the ring and writes one entry; the ring is folded into the checkpoint only when
it is full. Draft tokens are entries past the committed length, so rejecting them moves an integer.

The memory has two parts. The `Cursor` (integers, `cursor.py`) says what every slot holds and is shared by all
recurrent layers of a model; a `Pool` (`pool.py`) holds one layer's arrays. `begin` and `begin_prefill` turn the cursor
into the integers of one launch, once a step; `extend_pool` and `prefill_pool` run a layer with them. The functions
without `_pool` and `_cursor` do both at once for a single layer.

Source: KVBuffer (2026), sections 3.1-3.4 and eq. 16; ReplaySSM, sections 4 and 5.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.recurrence.cursor import (
    Cursor,
    PrefillStep,
    Step,
    begin,
    begin_fold,
    begin_prefill,
    commit_cursor,
    init_cursor,
    load_cursor,
    reset_cursor,
)
from jaxbuf.recurrence.launch import extend_pool
from jaxbuf.recurrence.pool import Pool, fold_pool, init_pool, prefill_pool, read_pool
from jaxbuf.recurrence.spec import Array, RecurrenceSpec, check_implementation

__all__ = [
    "BufferedState",
    "Cursor",
    "Pool",
    "PrefillStep",
    "Step",
    "begin",
    "begin_prefill",
    "commit",
    "commit_cursor",
    "extend",
    "extend_pool",
    "fold",
    "init",
    "init_cursor",
    "init_pool",
    "load",
    "prefill",
    "prefill_pool",
    "read",
    "reset",
    "reset_cursor",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BufferedState:
    """One cursor with one pool: the memory of a single layer."""

    cursor: Cursor
    pool: Pool


def init(
    spec: RecurrenceSpec,
    *,
    slots: int,
    limit: int | Array = 16,
    max_pending: int = 8,
    block_size: int = 8,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
) -> BufferedState:
    """An empty memory for `slots` requests: physical slots 1 to `slots`; slot 0 is the null slot.

    Args:
      spec: The family.
      slots: How many requests fit.
      limit: Committed entries from which a slot folds, for all or int32 [slots] for each: 1 is the recurrent form, 16
        or so the buffered one, more than a request's length keeps it KV-only (no checkpoint is ever read or written).
      max_pending: The most tokens that one `extend` takes: 1 + drafts.
      block_size: Entries a block holds. A slot's ring has max(limit, max_pending) + max_pending entries, rounded up to
        whole blocks.
      state_dtype, entry_dtype: As in `init_pool`.

    Raises:
      ValueError: A size below 1.
    """
    cursor = init_cursor(slots=slots, limit=limit, max_pending=max_pending, block_size=block_size)
    return BufferedState(cursor, init_pool(spec, cursor, state_dtype=state_dtype, entry_dtype=entry_dtype))


def prefill(
    spec: RecurrenceSpec,
    cache: BufferedState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    slots: Array,
    lengths: Array | None = None,
    keep: int | Array = 0,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Array, BufferedState]:
    """Takes in a prompt: the state after it becomes the slot's checkpoint, all but the last `keep` tokens' part of it.

    It continues from what the slot holds (use `reset` for a new request); entries that were live are folded, pending
    ones are dropped. A slot that was empty and whose whole prompt is kept stays KV-only.

    Args:
      q, k, v, log_decay, beta: As in `recurrent`, [rows, time, ...].
      slots: int32 [rows], the physical slot of each row; 0 writes nothing.
      lengths: int32 [rows], the real tokens of each row; None: all.
      keep: How many last tokens stay as entries in the ring, one number or int32 [rows]; at most the
        ring's size (see `init`) less max_pending.
      chunk_size: As in `chunked`.
      implementation: "auto" or "xla".

    Returns:
      out [rows, time, heads, value_dim] (zero past `lengths` and for slot 0), and the memory.

    Raises:
      ValueError: A shape or dtype does not fit, or keep is out of range.
    """
    check_implementation("prefill", implementation)
    step, cursor = begin_prefill(cache.cursor, slots, _all(lengths, v), keep)
    out, pool = prefill_pool(spec, cache.pool, step, q, k, v, log_decay, beta, chunk_size=chunk_size)
    return out, BufferedState(cursor, pool)


def extend(
    spec: RecurrenceSpec,
    cache: BufferedState,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    slots: Array,
    lengths: Array | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[Array, BufferedState]:
    """Appends T pending tokens after the committed ones and returns all T outputs; earlier pending tokens are dropped.

    A slot folds its committed entries first iff it has some and they and the new ones together exceed its limit.
    Nothing committed changes otherwise; `commit` makes pending entries real. T tokens at once store the same bits as T
    calls of one, as long as the same entries are folded.

    Args:
      q, k, v, log_decay, beta: As in `recurrent`, [rows, T, ...] with T at most max_pending.
      slots: int32 [rows], the physical slot of each row; slot 0 gives zeros and writes nothing; no other slot twice.
      lengths: int32 [rows], the real tokens of each row, 0 for a row that rests; None: all T.
      implementation, interpret: As in `extend_pool`.

    Returns:
      out [rows, T, heads, value_dim] in v's dtype (zero past `lengths`), and the memory.

    Raises:
      ValueError: A shape or dtype does not fit, T exceeds max_pending, or the implementation can't serve the call.

    Source: KVBuffer, eqs. 7 and 16; ReplaySSM, algorithm 6.
    """
    step, cursor = begin(cache.cursor, slots, _all(lengths, v), v.shape[1])
    inputs = q, k, v, log_decay, beta
    out, pool = extend_pool(spec, cache.pool, step, *inputs, implementation=implementation, interpret=interpret)
    return out, BufferedState(cursor, pool)


def commit(cache: BufferedState, accepted: Array, *, slots: Array) -> BufferedState:
    """Makes the first `accepted` pending entries of each slot real; the rest cease to exist.

    Only integers move: no entry is copied and no state is touched, so a rejected draft costs nothing.

    Args:
      accepted: int32 [rows], how many to keep, in [0, pending].
      slots: int32 [rows]; slot 0 is left as it is.

    Raises:
      ValueError: `accepted` is out of range (checked where its value is known; under jit it is clamped).

    Source: ReplaySSM, section 4.2.
    """
    return dataclasses.replace(cache, cursor=commit_cursor(cache.cursor, accepted, slots))


def fold(spec: RecurrenceSpec, cache: BufferedState, *, slots: Array, implementation: str = "auto") -> BufferedState:
    """Folds the committed entries of each slot into its checkpoint now; outputs do not change.

    Pending entries stay pending. Slot 0, and slots with nothing committed in the ring, are left as they are.

    Args:
      slots: int32 [rows].
      implementation: "auto" or "xla".
    """
    check_implementation("fold", implementation)
    before, rows, cursor = begin_fold(cache.cursor, slots)
    return BufferedState(cursor, dataclasses.replace(cache.pool, checkpoints=fold_pool(spec, cache.pool, before, rows)))


def reset(cache: BufferedState, slots: Array) -> BufferedState:
    """Empties slots for their next owner. Only integers move: what the arrays hold is never read again."""
    return dataclasses.replace(cache, cursor=reset_cursor(cache.cursor, slots))


def read(spec: RecurrenceSpec, cache: BufferedState, slots: Array) -> Array:
    """The committed state of each slot, f32 [rows, heads, value_dim, key_dim]; zeros for slot 0."""
    before, _, _ = begin_fold(cache.cursor, slots)
    return read_pool(spec, cache.pool, before)


def load(cache: BufferedState, state: Array, tokens: Array, slots: Array) -> BufferedState:
    """Gives each slot a state computed elsewhere, in place of what it held.

    Args:
      state: f32 [rows, heads, value_dim, key_dim].
      tokens: int32 [rows], how many tokens the state holds, at least 1 (0 leaves the slot empty).
      slots: int32 [rows].

    Raises:
      ValueError: The state's shape does not fit the pool.
    """
    slots = jnp.asarray(slots)
    shape = (slots.shape[0], *cache.pool.checkpoints.shape[1:])
    if state.shape != shape:
        raise ValueError(f"state must have shape {shape}, got {state.shape}")
    rows, cursor = load_cursor(cache.cursor, tokens, slots)
    stored = state.astype(cache.pool.checkpoints.dtype)
    checkpoints = cache.pool.checkpoints.at[rows].set(stored, mode="drop")
    return BufferedState(cursor, dataclasses.replace(cache.pool, checkpoints=checkpoints))


def _all(lengths: Array | None, v: Array) -> Array:
    return jnp.full(v.shape[:1], v.shape[1], jnp.int32) if lengths is None else lengths
