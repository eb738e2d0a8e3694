"""How many bytes the recurrence's memory takes, and how many a step moves, in each form: one layer, one request.

The counts are what the algorithm needs, as the arrays of `pool.py` hold it: a fold adds to its step the write of a
state; of a split one, of which a step reads the high half alone, also the read of the low half. What a step computes
with (q, k, v, gates, outputs) is the same in every form and counted apart, in `token_bytes`. `kvbuffer_model.py` has
the same counts as the paper makes them.
"""

import math

import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.recurrence.state_format import state_format

GATE = 4  # bytes of a gate: they are float32 always
BLOCK_SIZE = 8  # entries of a block, if nobody says otherwise
MOST_LIMIT = 2**20  # of a slot's entries: its ring is made for them, and has their bytes


def checkpoint_bytes(spec: RecurrenceSpec, state_dtype=jnp.float32) -> int:
    """Bytes that one checkpoint takes: heads · value_dim · key_dim numbers of the `state_dtype`.

    A number takes 4 bytes with "split"; with "split8" 3, and the scales of its rows' low halves 4 / key_dim more.
    """
    return state_format(state_dtype).stored_bytes(spec)


def entry_bytes(spec: RecurrenceSpec, entry_dtype=jnp.bfloat16) -> int:
    """Bytes of one ring entry: its key, its update, and its float32 gates (log_decay, and beta without the delta rule).

    A key is stored once for all the heads that share it. KVBuffer, table 2, has one head of each. Keys and updates have
    the `entry_dtype`.
    """
    numbers = spec.key_heads * spec.key_dim + spec.heads * spec.value_dim
    gates = spec.heads * (spec.decay_width + (0 if spec.delta else 1))
    return numbers * jnp.dtype(entry_dtype).itemsize + gates * GATE


def token_bytes(spec: RecurrenceSpec, dtype=jnp.bfloat16) -> int:
    """Bytes that go in and out for one token in every form: q, k, v and the output in `dtype`, log_decay and beta."""
    numbers = 2 * (spec.key_heads * spec.key_dim + spec.heads * spec.value_dim)
    return numbers * jnp.dtype(dtype).itemsize + spec.heads * (spec.decay_width + 1) * GATE


def ring_entries(limit: int, max_pending: int, block_size: int = BLOCK_SIZE) -> int:
    """Entries of a slot's ring: max(limit, max_pending) + max_pending, in whole blocks, as `init_cursor` makes it.

    Raises:
      ValueError: A size below 1 or not a whole number, or limit is above 2**20.
    """
    check_sizes(limit=limit, most=MOST_LIMIT)
    check_sizes(max_pending=max_pending, block_size=block_size)
    return -(-(max(limit, max_pending) + max_pending) // block_size) * block_size


def pool_bytes(
    spec: RecurrenceSpec,
    *,
    slots: int,
    limit: int = 16,
    max_pending: int = 8,
    block_size: int = BLOCK_SIZE,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
) -> int:
    """Bytes of the arrays that `buffered.init` makes with these arguments, the null row and the null block included.

    A slot adds one checkpoint and one ring: checkpoint_bytes + ring_entries · entry_bytes.
    """
    ring = ring_entries(limit, max_pending, block_size)
    entries = block_size + slots * ring
    return (slots + 1) * checkpoint_bytes(spec, state_dtype) + entries * entry_bytes(spec, entry_dtype)


def state_traffic(
    spec: RecurrenceSpec,
    *,
    checkpoint_reads: float,
    folds: float,
    live_entries: float,
    appended: float,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
) -> float:
    """Bytes of counted work: checkpoints read, and written by folds; entries read and appended.

    Of a split checkpoint a step reads the high half. A fold also reads the low half, and writes both.

    Args:
      spec: The family and its sizes.
      checkpoint_reads, folds, live_entries, appended: How many; sums over steps, or means of one. Whole numbers give a
        whole number.
      state_dtype, entry_dtype: Of the checkpoint (a dtype, "split" or "split8"), and of keys and updates.
    """
    form = state_format(state_dtype)
    checkpoints = form.read_bytes(spec) * checkpoint_reads + form.fold_bytes(spec) * folds
    return checkpoints + entry_bytes(spec, entry_dtype) * (live_entries + appended)


def fold_cycle(limit: int, tokens: int = 1, accepted: float = 1) -> int:
    """Steps from one fold of a slot to the next: it folds where its entries and `tokens` new ones exceed the limit.

    A folding step leaves what it accepted, so its successors find accepted, 2 · accepted, ... entries.

    Args:
      limit: Of the slot; 1 is the recurrent form, which folds in every step.
      tokens: Tokens of a step, 1 + drafts.
      accepted: How many of them a step keeps, in [1, tokens]; a mean makes this an estimate.

    Raises:
      ValueError: A size below 1, or accepted is out of range.
    """
    check_sizes(limit=limit, tokens=tokens)
    if not 1 <= accepted <= tokens:
        raise ValueError(f"accepted must be in [1, tokens ({tokens})], got {accepted}")
    return max(1, math.floor((limit - tokens) / accepted) + 1)


def buffered_step_bytes(
    spec: RecurrenceSpec,
    limit: int,
    *,
    tokens: int = 1,
    accepted: float = 1,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
) -> float:
    """Mean bytes of a step over a fold cycle: decoding, or verification of `tokens` - 1 drafts. Limit 1: recurrent.

    In a cycle of n steps the checkpoint is read n times and written once, and the entries found are accepted · (1 + 2 +
    ... + n). Source: the cells of KVBuffer's table 2 for the chunkwise form; arguments as in `fold_cycle`.
    """
    cycle = fold_cycle(limit, tokens, accepted)
    return state_traffic(
        spec,
        checkpoint_reads=1,
        folds=1 / cycle,
        live_entries=accepted * (cycle + 1) / 2,
        appended=tokens,
        state_dtype=state_dtype,
        entry_dtype=entry_dtype,
    )


def kv_only_step_bytes(spec: RecurrenceSpec, entries: float, *, tokens: int = 1, entry_dtype=jnp.bfloat16) -> float:
    """Bytes of a step of `tokens` tokens over `entries` committed ones of the `entry_dtype`, without a checkpoint.

    Source: KVBuffer, section 3.4.
    """
    return state_traffic(
        spec, checkpoint_reads=0, folds=0, live_entries=entries, appended=tokens, entry_dtype=entry_dtype
    )


def snapshot_step_bytes(spec: RecurrenceSpec, tokens: int = 1, *, state_dtype=jnp.float32) -> int:
    """Bytes of a step of the design that this replaces: one state is read, and one written for every token's position.

    The states have the `state_dtype`; of split ones both halves are read and written. With one token it is the plain
    recurrence, in place.

    Source: KVBuffer, section 3.3 (the denominator of eq. 9).
    """
    return checkpoint_bytes(spec, state_dtype) * (1 + tokens)


def best_limit(
    spec: RecurrenceSpec,
    *,
    tokens: int = 1,
    accepted: float = 1,
    state_dtype=jnp.float32,
    entry_dtype=jnp.bfloat16,
) -> int:
    """The limit of the fewest `buffered_step_bytes`; of equal ones the smallest. Arguments as in `fold_cycle`.

    A cycle of n steps costs fold / n for its fold (the bytes of a checkpoint; of a split one also those of its low
    half) and entry · accepted · n / 2 for the entries it finds, least at n = sqrt(2 · fold / (entry · accepted)).
    KVBuffer's eq. 6 has its best at sqrt(2) times that, for its fold is
    a kernel of its own, which reads the state once more.
    """
    entry = entry_bytes(spec, entry_dtype) * accepted
    around = math.ceil(math.sqrt(2 * state_format(state_dtype).fold_bytes(spec) / entry))
    # The smallest limit of each number of steps; one in between has as many as the one below it.
    limits = [1, *(math.ceil(tokens + accepted * (cycle - 1)) for cycle in range(2, around + 2))]

    def cost(limit: int) -> tuple[float, int]:
        sizes = {"state_dtype": state_dtype, "entry_dtype": entry_dtype}
        return buffered_step_bytes(spec, limit, tokens=tokens, accepted=accepted, **sizes), limit

    return min(limits, key=cost)


def crossover(spec: RecurrenceSpec, state_dtype=jnp.float32, entry_dtype=jnp.bfloat16, limit: int = 16) -> int:
    """The limit of a KV-only slot: how many entries cost as many bytes to read as a step of the buffered form.

    A shorter request decodes faster without a checkpoint; a longer one should fold. With a step's own entry in both
    forms, n · entry = checkpoint · (1 + 1 / limit) + entry · (limit + 1) / 2, rounded to the nearest whole number: 188
    for Gated DeltaNet with 16 key heads and 32 value heads of 128 by 128, 143 and 210 with 16 and 48 value heads, 76
    for KDA with 32 heads. Mamba-2 with 128 heads of 64 by 128 and 8 groups has 238, as a head of an entry stores two
    gates, log_decay and beta; with one it would be 244.

    Args:
      spec: The family and its sizes.
      state_dtype: Of the checkpoint; a bfloat16 or split one is crossed at about half as many entries.
      entry_dtype: Of keys and updates.
      limit: Of the buffered form that the slot would turn to.

    Raises:
      ValueError: limit is below 1.

    Source: KVBuffer, eqs. 10 and 19, with equality for the speedup and the bytes as they are stored here.
    """
    buffered = buffered_step_bytes(spec, limit, state_dtype=state_dtype, entry_dtype=entry_dtype)
    entry = entry_bytes(spec, entry_dtype)
    return max(1, round((buffered - entry) / entry))
