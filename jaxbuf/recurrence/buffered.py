"""The recurrence with a buffer: a checkpoint of the state, and a ring of recent (key, update, decay) entries.

A decoding step reads the checkpoint and the ring and writes one entry; the ring is folded into the checkpoint only when
it is full. Draft tokens are written to the ring but not yet counted. Rejecting them only resets the counter; nothing is
copied.

The memory has two parts. The `Cursor` (integers, `cursor.py`) says what every slot holds and is shared by all
recurrent layers of a model; a `Pool` (`pool.py`) holds one layer's arrays. `begin` and `begin_prefill` turn the cursor
into the integers of one launch, once a step; `extend_pool` and `prefill_pool` run a layer with them. The functions
without `_pool` and `_cursor` do both at once for a single layer.

With an fp32 checkpoint and bf16 entries the error does not accumulate where the state contracts: it stays at 2e-3 to
3e-3, even without decay for beta up to 1.5. As beta nears 2 without decay, a step reflects the state instead, and keeps
its rounding: about 1e-2 for beta in [1.9, 2], and for beta = 2 an error that grows with the root of the steps (3e-2
after 4,096 at key_dim 32). entry_dtype=float32 stays below 1e-5 there.

A split checkpoint (`state_dtype` "split" or "split8", see `state_format`) is read at half the bytes, and the error does
not accumulate either. Steps see bfloat16 numbers: outputs are off by some 3e-3, and change by as much with the step in
which a slot folds. At limit 1 every step rounds what the delta rule recalls, as in the buffered form, and nothing is
gained: it is there for slots of either form in one launch. After 2,000 tokens with float32 entries outputs are off by
1.9e-3 there, and the state by 1.1e-3 with the delta rule (at limit 8 by 1.8e-3 and 1.2e-3), by 6e-5 ("split") or 2e-4
("split8") without.

Slots are the physical slots of a launch's rows. A slot out of range, or in two rows of a function
that changes slots, is an error where the values are known. Under jit they are not: the first row of a slot counts, its
later rows and rows of a slot that does not exist are rows of the null slot 0, which gives zeros and writes nothing. No
other slot is touched in either case.

A request: `init`; `prefill` of its prompt; then, step by step, `extend` with the newest token and its drafts and
`commit` of how many were right. `examples/recurrence.py` does it by hand.

Source: KVBuffer (2026), sections 3.1-3.4 and eq. 16; ReplaySSM, sections 4 and 5.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_rows, check_sizes, checked_slots
from jaxbuf.axes import Array, Float, Float32, Int
from jaxbuf.recurrence.begin import PrefillStep, Step, begin, begin_fold, begin_prefill, held
from jaxbuf.recurrence.cursor import Cursor, commit_cursor, init_cursor
from jaxbuf.recurrence.launch import extend_pool, fold_pool, prefill_pool
from jaxbuf.recurrence.pool import Pool, fork_pool, init_pool, read_pool, store_states
from jaxbuf.recurrence.shared_rows import raise_missing_rows
from jaxbuf.recurrence.slots import Copies, fork_cursor, load_cursor, reset_cursor
from jaxbuf.recurrence.spec import RecurrenceSpec, check_inputs, check_state
from jaxbuf.recurrence.traffic import BLOCK_SIZE
from jaxbuf.target import Target

__all__ = [
    "BufferedState",
    "Copies",
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
    "fold_pool",
    "fork",
    "fork_cursor",
    "fork_pool",
    "init",
    "init_cursor",
    "init_pool",
    "load",
    "prefill",
    "prefill_pool",
    "raise_exhausted",
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
    limit: int | Int[Array, "n"] = 16,
    max_pending: int = 8,
    block_size: int = BLOCK_SIZE,
    states: int | None = None,
    blocks: int | None = None,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
    kv_limit: int | Int[Array, "n"] | None = None,
) -> BufferedState:
    """An empty memory for `slots` requests: physical slots 1 to `slots`; slot 0 is the null slot.

    Args:
      spec: The family.
      slots: How many requests fit.
      limit: Committed entries from which a slot folds, for all or one for each slot, at most 2**20: 1 is the
        recurrent form, 16 or so the buffered one, more than a request's length keeps it KV-only (no checkpoint is ever
        read or written). The ring has that many entries, and need not have more than a request's tokens.
      max_pending: The most tokens that one `extend` takes: 1 + drafts.
      block_size: Entries a block holds. A slot's ring has max(limit, kv_limit, max_pending) + max_pending entries,
        rounded up to whole blocks.
      states, blocks: How many checkpoint rows and blocks the slots take from when they need one, and share after a
        `fork`. A shared row is freed once every slot that shared it has a row of its own: where several of them fold in
        one launch, each needs a further row. With one of the two given, the other's default is what all slots could use
        at once (states: slots + slots // 2). None for both: every slot has its own for good, nothing can run out, and a
        fork copies.
      state_dtype, entry_dtype: As in `init_pool`.
      kv_limit: Entries up to which a slot that never folded stays KV-only, where that is more than its limit: for all
        or one for each slot. It reads no checkpoint until then. None: as many as limit says.

    Raises:
      ValueError: A size below 1 or not a whole number, limit or kv_limit above 2**20, or more entries than int32 can
        number.
    """
    sizes = {"limit": limit, "max_pending": max_pending, "block_size": block_size, "kv_limit": kv_limit}
    cursor = init_cursor(slots=slots, **sizes, states=states, blocks=blocks)
    return BufferedState(cursor, init_pool(spec, cursor, state_dtype=state_dtype, entry_dtype=entry_dtype))


def prefill(
    spec: RecurrenceSpec,
    cache: BufferedState,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None = None,
    beta: Float32[Array, "rows time heads"] | None = None,
    *,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"] | None = None,
    keep: int | Int[Array, "rows"] = 0,
    chunk_size: int = 64,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], BufferedState]:
    """Takes in a prompt: the state after it becomes the slot's checkpoint, all but the last `keep` tokens' part of it.

    It continues from what the slot holds (use `reset` for a new request); pending entries are dropped. If `keep` has
    room for the entries that were live and all new ones, nothing is folded: a slot that was empty stays KV-only. Else
    those that were live are folded.

    Args:
      q, k, v, log_decay, beta: As in `recurrent`. Keys are rounded to the entry dtype first, as in
        `extend`, whether or not they stay as entries.
      slots: The physical slot of each row; 0 writes nothing; no other slot twice.
      lengths: The real tokens of each row, in [0, time]; None: all.
      keep: How many last tokens stay as entries in the ring, one number or one a row; at most the ring's size (see
        `init`) less max_pending.
      chunk_size: As in `chunked`.
      implementation, interpret, target: As in `prefill_pool`.

    Returns:
      out (zero past `lengths` and for slot 0), and the memory.

    Raises:
      ValueError: A shape or dtype does not fit, or slots, lengths, keep or chunk_size are out of range or a slot is
        repeated (slots, lengths and keep where they are known: under jit lengths and keep are clamped).
      PoolExhausted: The pool of `states` or `blocks` ran out: see `raise_exhausted`.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    check_sizes(chunk_size=chunk_size)
    check_rows("slots", jnp.asarray(slots), v.shape[0])
    step, cursor = begin_prefill(cache.cursor, slots, _all(lengths, v), keep, time=v.shape[1])
    how = {"implementation": implementation, "interpret": interpret, "target": target}
    out, pool = prefill_pool(spec, cache.pool, step, q, k, v, log_decay, beta, chunk_size=chunk_size, **how)
    return out, BufferedState(cursor, pool)


def extend(
    spec: RecurrenceSpec,
    cache: BufferedState,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None = None,
    beta: Float32[Array, "rows time heads"] | None = None,
    *,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"] | None = None,
    parents: Int[Array, "rows time"] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], BufferedState]:
    """Appends T pending tokens after the committed ones and returns all T outputs; earlier pending tokens are dropped.

    A slot folds its committed entries first iff it has some and they and the new ones together exceed its limit.
    Nothing committed changes otherwise; `commit` makes pending entries real. T tokens at once store the same bits as T
    calls of one, as long as the same entries are folded.

    A NaN or infinity of one token may reach the outputs of other tokens of its row in the same launch, earlier ones and
    other branches of a tree among them: what a token must not see is multiplied by a weight of zero. It reaches no
    other row, and, once the token is rejected, nothing in later launches.

    Args:
      q, k, v, log_decay, beta: As in `recurrent`, with T at most max_pending.
      slots: The physical slot of each row; slot 0 gives zeros and writes nothing; no other slot twice.
      lengths: The real tokens of each row, 0 for a row that rests; None: all T.
      parents: For a tree: the token before each one, of a lower index; -1 is the committed tail. A token sees what was
        committed and its ancestors, so that every branch gives what it gives alone. None: each token follows the one
        before.
      implementation, interpret, target: As in `extend_pool`.

    Returns:
      out in v's dtype (zero past `lengths`), and the memory.

    Raises:
      ValueError: A shape or dtype does not fit, T exceeds max_pending, slots or lengths are out of range or a slot is
        repeated (where they are known: under jit lengths are clamped), or the implementation can't serve the call.
      PoolExhausted: The pool of `states` or `blocks` ran out: see `raise_exhausted`.

    Source: KVBuffer, eqs. 7 and 16; ReplaySSM, algorithm 6.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    check_rows("slots", jnp.asarray(slots), v.shape[0])
    step, cursor = begin(cache.cursor, slots, _all(lengths, v), v.shape[1], parents)
    how = {"implementation": implementation, "interpret": interpret, "target": target}
    out, pool = extend_pool(spec, cache.pool, step, q, k, v, log_decay, beta, **how)
    return out, BufferedState(cursor, pool)


def commit(
    cache: BufferedState,
    accepted: Int[Array, "rows"],
    *,
    slots: Int[Array, "rows"],
    path: Int[Array, "rows n"] | None = None,
) -> BufferedState:
    """Makes the first `accepted` pending entries of each slot, or of a path, real; the rest cease to exist.

    Only integers move: no entry is copied and no state is touched, so a rejected draft costs nothing.

    Args:
      accepted: How many to keep, in [0, pending].
      slots: Slot 0 is left as it is; no other slot twice (under jit its first row counts).
      path: For a tree: the accepted nodes from the root to a leaf, of which the first `accepted` count; what stands
        past them is ignored. None: the tokens in their order. The parents are not remembered: that it is a path of the
        tree is not checked, and after a tree None is right only where the first `accepted` tokens are a chain from the
        root.

    Raises:
      ValueError: `accepted`, `path` or a slot is out of range, or a slot repeated (checked where their values are
        known; under jit `accepted` is clamped).
      PoolExhausted: The `extend` before it rested because rows ran out, where that is known.

    Source: ReplaySSM, section 4.2.
    """
    return dataclasses.replace(cache, cursor=commit_cursor(cache.cursor, accepted, slots, path))


def fold(
    spec: RecurrenceSpec,
    cache: BufferedState,
    *,
    slots: Int[Array, "rows"],
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> BufferedState:
    """Folds the committed entries of each slot into its checkpoint now; outputs do not change.

    Pending entries stay pending. Slot 0, and slots with nothing committed in the ring, are left as they are.

    Args:
      slots: No slot but 0 twice.
      implementation, interpret, target: As in `extend_pool`.

    Raises:
      ValueError: The implementation can't serve the call, or (where that is known) a slot is out of range or repeated.
      PoolExhausted: The pool of `states` ran out: see `raise_exhausted`.
    """
    before, write, cursor = begin_fold(cache.cursor, slots)
    how = {"implementation": implementation, "interpret": interpret, "target": target}
    pool = fold_pool(spec, cache.pool, before, write, **how)
    return BufferedState(cursor, pool)


def fork(cache: BufferedState, source: Int[Array, "..."] | int, target: Int[Array, "..."] | int) -> BufferedState:
    """Makes each target slot hold what its source committed (beams, several samples of one prompt).

    With `states` or `blocks` (see `init`) the two share the checkpoint and every full block until one of them folds;
    partly filled blocks, to which both will append, are copied now, so that no later launch has to copy. Without, every
    slot has its own rows and all that is alive is copied to the target's.

    Args:
      source, target: One a row, or one number; one source may have many targets. Sources are read as they were
        before the call, so that slots may trade places; targets forget what they held, and take the source's limit. A
        row with a 0, or whose source is its target, is left out. No target twice (under jit its first row counts).

    Raises:
      ValueError: The two do not fit, or (where that is known) a slot is out of range or a target is repeated.
      PoolExhausted: The pool of `blocks` ran out: see `raise_exhausted`.
    """
    source, target = jnp.atleast_1d(jnp.asarray(source)), jnp.atleast_1d(jnp.asarray(target))
    if source.shape == (1,):
        source = jnp.broadcast_to(source, target.shape)
    copies, cursor = fork_cursor(cache.cursor, source, target)
    return BufferedState(cursor, fork_pool(cache.pool, copies))


def raise_exhausted(cache: BufferedState) -> None:
    """Raises if rows ran out in an earlier launch. Call it on the host, after what was compiled.

    A row of a launch for which rows or blocks do not suffice rests: nothing of its slot changes, the other rows are
    served, and a note stays until `reset` gives some back. A fork or a load is done for all its rows or for none.
    Outside jit the call itself raises, and nothing has changed.

    Raises:
      PoolExhausted: Says which pool, how many it has, how many were missing, and what to raise.
    """
    raise_missing_rows(cache.cursor.sharing)


def reset(cache: BufferedState, slots: Int[Array, "rows"]) -> BufferedState:
    """Empties slots for their next owner. Only integers move: what the arrays hold is never read again.

    Shared rows and blocks are given back, and the note of rows that lacked some (see `raise_exhausted`) is cleared.

    Args:
      slots: A slot that is there several times is emptied once.

    Raises:
      ValueError: A slot is out of range, where that is known.
    """
    return dataclasses.replace(cache, cursor=reset_cursor(cache.cursor, slots))


def read(
    spec: RecurrenceSpec, cache: BufferedState, slots: Int[Array, "rows"]
) -> Float32[Array, "rows heads value_dim key_dim"]:
    """The committed state of each slot; zeros for slot 0.

    Args:
      slots: A slot may be there several times.

    Raises:
      ValueError: A slot is out of range, where that is known.
    """
    return read_pool(spec, cache.pool, held(cache.cursor, checked_slots(slots, cache.cursor.length.shape[0])))


def load(
    cache: BufferedState,
    state: Float[Array, "rows heads value_dim key_dim"],
    tokens: Int[Array, "rows"],
    slots: Int[Array, "rows"],
) -> BufferedState:
    """Gives each slot a state computed elsewhere, in place of what it held.

    Args:
      state: Stored as the checkpoints are (see `init_pool`).
      tokens: How many tokens the state holds, at least 1 (0 leaves the slot empty).
      slots: No slot but 0 twice (under jit its first row counts).

    Raises:
      ValueError: The state's shape or dtype does not fit the pool; or (where that is known) tokens are negative, or a
        slot is out of range or repeated.
      PoolExhausted: The pool of `states` ran out: see `raise_exhausted`.
    """
    write, cursor = load_cursor(cache.cursor, tokens, slots)
    check_state(state, write.shape[0], cache.pool.checkpoints.shape[1:])
    return BufferedState(cursor, store_states(cache.pool, jnp.asarray(state), write))


def _all(lengths: Array | None, v: Array) -> Array:
    return jnp.full(v.shape[:1], v.shape[1], jnp.int32) if lengths is None else lengths
