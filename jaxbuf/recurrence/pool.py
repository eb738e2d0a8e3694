"""One layer's arrays of the buffered memory, and what a launch computes with them.

Every function takes the integers that `cursor.py` made for the launch, the same for all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Float, Float32, Int32, Shaped
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.pallas.dispatch import Asked
from jaxbuf.recurrence.begin import Held, PrefillStep, Step
from jaxbuf.recurrence.chunked import solve_chunks
from jaxbuf.recurrence.cursor import Cursor
from jaxbuf.recurrence.put import put_within
from jaxbuf.recurrence.recurrent import HIGHEST
from jaxbuf.recurrence.slots import Copies
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.recurrence.state_format import StateFormat, decode, encode, format_of, rounded, state_format

ENTRIES_AT_ONCE = 16  # entries that are added to a state while it is read and written once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """One layer's memory, shared by all slots. Row 0 of checkpoints and block 0 are null: never read nor written.

    Attributes:
      checkpoints: f32 or bf16: the states, or the high halves of split ones.
      keys: In the entry dtype.
      updates: In the entry dtype: u with the delta rule, v without.
      gates: log_decay, then without delta beta: n is the decay's width (+ 1 without delta).
      low: bf16 or int8: the low halves of split states, which only folds and prefill read and write.
        None if states are not split.
      low_scales: What an int8 `low` is multiplied with; None without one.
    """

    checkpoints: Float[Array, "states heads value_dim key_dim"]
    keys: Float[Array, "blocks block_size key_heads key_dim"]
    updates: Float[Array, "blocks block_size heads value_dim"]
    gates: Float32[Array, "blocks block_size heads n"]
    low: Shaped[Array, "states heads value_dim key_dim"] | None = None
    low_scales: Float32[Array, "states heads value_dim"] | None = None

    @property
    def state_format(self) -> StateFormat:
        """How the states are stored."""
        return format_of(self.checkpoints, self.low)


def init_pool(spec: RecurrenceSpec, cursor: Cursor, *, state_dtype=jnp.float32, entry_dtype=jnp.bfloat16) -> Pool:
    """Zeroed memory of one layer, as large as `cursor` says.

    Args:
      spec: The layer's family and sizes.
      cursor: From `init_cursor`.
      state_dtype: Of the checkpoints: float32, bfloat16 (which drifts where the decay is weak), or "split" or "split8",
        of which a step reads half as many bytes and which do not drift (see `state_format`).
      entry_dtype: Of keys and updates. bfloat16 entries do not accumulate error under an fp32 checkpoint.

    Raises:
      ValueError: A dtype is not one of floating-point numbers, and not "split" or "split8" either.
    """
    form = state_format(state_dtype)
    if not jnp.issubdtype(entry_dtype, jnp.floating):
        raise ValueError(f"entry_dtype must be a dtype of floating-point numbers, got {jnp.dtype(entry_dtype).name}")
    slots, max_blocks = cursor.block_table.shape
    states, blocks = slots, 1 + (slots - 1) * max_blocks
    if cursor.sharing is not None:
        states, blocks = (owned.owners.shape[0] for owned in (cursor.sharing.states, cursor.sharing.blocks))
    entries = blocks, cursor.ring // max_blocks
    shapes = _row_shapes(spec)
    return Pool(
        checkpoints=jnp.zeros((states, *shapes["checkpoints"]), form.high),
        keys=jnp.zeros((*entries, *shapes["keys"]), entry_dtype),
        updates=jnp.zeros((*entries, *shapes["updates"]), entry_dtype),
        gates=jnp.zeros((*entries, *shapes["gates"]), jnp.float32),
        low=None if form.low is None else jnp.zeros((states, *shapes["checkpoints"]), form.low),
        low_scales=jnp.zeros((states, *shapes["checkpoints"][:-1]), jnp.float32) if form.scaled else None,
    )


def _row_shapes(spec: RecurrenceSpec) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint, and of what an entry has, in each array of a pool."""
    return {
        "checkpoints": spec.state_shape,
        "keys": (spec.key_heads, spec.key_dim),
        "updates": (spec.heads, spec.value_dim),
        "gates": (spec.heads, spec.decay_width + (0 if spec.delta else 1)),
    }


def check_pool(spec: RecurrenceSpec, pool: Pool) -> None:
    """Raises a ValueError unless the memory is one of `spec`."""
    for name, shape in _row_shapes(spec).items():
        found = getattr(pool, name).shape
        if found[-len(shape) :] != shape:
            expected = ", ".join(map(str, shape))
            raise ValueError(f"{name} of the memory must be [..., {expected}] for this spec, got {found}: another's?")


def extend_with_xla(
    spec: RecurrenceSpec,
    pool: Pool,
    step: Step,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None,
    beta: Float32[Array, "rows time heads"] | None,
) -> tuple[Float[Array, "rows time heads value_dim"], Pool]:
    """`launch.extend_pool`, which has checked the arguments, as XLA compiles it."""
    rows, time = v.shape[:2]
    # The fold comes first, so that the step depends on the pool after it and the pool can change in place.
    states = jax.lax.cond(
        step.any_fold,
        lambda pool: _states(fold_with_xla(spec, pool, step.before, step.write)),
        lambda pool: _states(pool),
        pool,
    )
    # Entries are appended after the fold has read them; without the barrier XLA keeps a copy of them for the fold.
    pool = jax.lax.optimization_barrier(_with_states(pool, states))
    checkpoints = pool.checkpoints
    beta = jnp.ones((rows, time, spec.heads), jnp.float32) if beta is None else beta
    new_gates = _pack_gates(spec, log_decay, beta)
    k = rounded(k, pool.keys.dtype)  # computes with the keys as the ring will store them
    keys, gates = _append(pool.keys, k, step.append), _append(pool.gates, new_gates, step.append)

    index = jnp.arange(step.now.entries.shape[1], dtype=jnp.int32)[None]
    end = (step.now.live + step.lengths)[:, None]
    ring_keys = _per_head(spec, _take(keys, step.now.entries, index < end))
    ring_decay, ring_beta = _unpack_gates(spec, _take(gates, step.now.entries, index < end))
    ring_updates = _take(pool.updates, step.now.entries, index < step.now.live[:, None])
    query, key = _per_head(spec, q.astype(jnp.float32)), _per_head(spec, k)
    value = v.astype(jnp.float32)

    def token(t, checkpoint, updates):
        """Output and entry of pending token t, from the checkpoint and every entry before it.

        Whether those entries are committed or pending makes no difference here, which is why T tokens at once and one
        by one store the same bits.
        """
        current = step.now.live[:, None] + t
        on_path = index <= current
        if step.ancestors is not None:
            node = index - step.now.live[:, None]
            ancestor = jnp.take_along_axis(_at(step.ancestors, t), jnp.clip(node, 0, time - 1), axis=1)
            on_path = on_path & ((node < 0) | ancestor)
        decay = jnp.where(on_path[..., None, None], ring_decay, 0.0)
        to_now = jax.lax.cumsum(decay, axis=1, reverse=True)  # of entry i: decay from i on, its own included
        after = jnp.concatenate([to_now[:, 1:], jnp.zeros_like(to_now[:, :1])], axis=1)
        weighted = jnp.where(on_path[..., None, None], jnp.exp(after) * ring_keys, 0.0)
        key_t, query_t = _at(key, t), _at(query, t)
        since = jnp.exp(to_now[:, 0])
        recalled, out = _read(checkpoints, checkpoint, step.now.has_checkpoint, since * key_t, since * query_t)
        pair = jnp.stack([key_t, query_t], axis=2)
        match = jnp.einsum("nrhd,nhxd->nhxr", weighted, pair, precision=HIGHEST)
        effective = updates if spec.delta else ring_beta[..., None] * updates
        if step.ancestors is not None:
            # A sibling's NaN times zero would be stored in this branch's entry, and stay if the branch is accepted.
            effective = jnp.where(on_path[..., None, None], effective, 0.0)
        before = (index < current)[:, None]
        entry = _at(value, t)
        if spec.delta:
            earlier = jnp.where(before, match[:, :, 0], 0.0)
            recalled = recalled + jnp.einsum("nhr,nrhv->nhv", earlier, effective, precision=HIGHEST)
            entry = _at(beta, t)[..., None] * (entry - recalled)
        entry = rounded(entry, pool.updates.dtype)
        now = (index == current)[..., None, None]
        stored = entry[:, None]
        updates = jnp.where(now, stored, updates)
        effective = jnp.where(now, stored if spec.delta else _at(beta, t)[:, None, :, None] * stored, effective)
        out = out + jnp.einsum("nhr,nrhv->nhv", match[:, :, 1], effective, precision=HIGHEST)
        return updates, entry, out

    if time == 1:
        _, entry, out = token(0, step.now.checkpoint, ring_updates)
        entries, out = entry[:, None], out[:, None]
    else:

        def body(updates, inputs):
            updates, entry, out = token(inputs[0], inputs[1], updates)
            return updates, (entry, out)

        # The checkpoint's row is a loop input, or XLA would gather the checkpoints into memory before the loop.
        inputs = jnp.arange(time, dtype=jnp.int32), jnp.broadcast_to(step.now.checkpoint[None], (time, rows))
        _, (entries, out) = jax.lax.scan(body, ring_updates, inputs)
        entries, out = jnp.moveaxis(entries, 0, 1), jnp.moveaxis(out, 0, 1)

    updates = _append(pool.updates, entries, step.append)
    real = jnp.arange(time, dtype=jnp.int32)[None] < step.lengths[:, None]
    out = jnp.where(real[..., None, None], out, 0.0).astype(v.dtype)
    return out, dataclasses.replace(pool, keys=keys, updates=updates, gates=gates)


def prefill_with_xla(
    spec: RecurrenceSpec,
    pool: Pool,
    step: PrefillStep,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None,
    beta: Float32[Array, "rows time heads"] | None,
    *,
    chunk_size: int,
    asked: Asked | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], Pool]:
    """`launch.prefill_pool`, which has checked the arguments, as XLA compiles it; asked is as in `store_states`."""
    k = rounded(k, pool.keys.dtype)  # computes with the keys as the ring will store them
    start = None if step.empty else read_pool(spec, pool, step.before)
    out, state, updates = solve_chunks(
        spec, start, q, k, v, log_decay, beta, chunk_size=chunk_size, lengths=step.lengths
    )
    kept = step.append.shape[1]
    if kept:

        def before_kept():
            # The same sum of u ⊗ k, cut earlier, with the u that are known by now.
            plain, sizes = dataclasses.replace(spec, delta=False), {"chunk_size": chunk_size, "lengths": step.head}
            return solve_chunks(plain, start, q, k, updates, log_decay, None, **sizes)[1]

        # Rows that keep all they read, or none of it, need no other state.
        cut = (step.write < NOWHERE) & (step.head < step.lengths)
        state = jax.lax.cond(jnp.any(cut), before_kept, lambda: state)
        values = tail(updates if spec.delta else v, step.head, kept)
        pool = append_tail(spec, pool, step, k, values, log_decay, beta)
    return out, store_states(pool, state, step.write, asked)


def append_tail(
    spec: RecurrenceSpec,
    pool: Pool,
    step: PrefillStep,
    k: Float[Array, "rows time key_heads key_dim"],
    values: Float[Array, "rows n heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None,
    beta: Float32[Array, "rows time heads"] | None,
) -> Pool:
    """Writes the entries of the tokens from `step.head` on.

    Args:
      spec, pool, step, log_decay, beta: Of the launch.
      k: As the ring stores keys.
      values: Of the tokens from `step.head` on: updates with the delta rule, v without.
    """
    kept = step.append.shape[1]
    beta = jnp.ones((*k.shape[:2], spec.heads), jnp.float32) if beta is None else beta
    keys = _append(pool.keys, tail(k, step.head, kept), step.append)
    updates = _append(pool.updates, values, step.append)
    gates = _append(pool.gates, tail(_pack_gates(spec, log_decay, beta), step.head, kept), step.append)
    return dataclasses.replace(pool, keys=keys, updates=updates, gates=gates)


def tail(x: Array, first: Int32[Array, "rows"], count: int) -> Array:
    """Of x [rows, time, ...] the `count` tokens from `first` on, [rows, count, ...]; past the last, the last again."""
    chosen = jnp.minimum(first[:, None] + jnp.arange(count, dtype=jnp.int32)[None], x.shape[1] - 1)
    return jnp.take_along_axis(x, chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)), axis=1)


@jax.named_scope("recurrence")
def fold_with_xla(spec: RecurrenceSpec, pool: Pool, before: Held, write: Int32[Array, "rows"]) -> Pool:
    """The pool after the state that `before` describes is written to the rows `write`; rows past the pool are not
    written."""
    return store_states(pool, read_pool(spec, pool, before), write)


def store_states(
    pool: Pool,
    state: Float[Array, "rows heads value_dim key_dim"],
    write: Int32[Array, "rows"],
    asked: Asked | None = None,
) -> Pool:
    """Writes states to the rows `write`; rows past the pool are not written.

    Args:
      pool, state, write: As said.
      asked: As in `put_within`.
    """
    new = encode(state, pool.state_format)
    return _with_states(pool, jax.tree.map(lambda old, new: put_within(asked, old, new, write), _states(pool), new))


def _states(pool: Pool) -> tuple[Array, Array | None, Array | None]:
    return pool.checkpoints, pool.low, pool.low_scales


def _with_states(pool: Pool, states: tuple[Array, Array | None, Array | None]) -> Pool:
    checkpoints, low, low_scales = states
    return dataclasses.replace(pool, checkpoints=checkpoints, low=low, low_scales=low_scales)


def fork_pool(pool: Pool, copies: Copies) -> Pool:
    """One layer's part of a fork: what `copies` says, all read before anything is written."""
    states = _states(pool)
    if copies.states is not None:
        read, written = copies.states
        states = jax.tree.map(lambda x: x.at[written].set(x[read], mode="drop"), states)
    read, written = copies.blocks
    keys, updates, gates = (x.at[written].set(x[read], mode="drop") for x in (pool.keys, pool.updates, pool.gates))
    return _with_states(dataclasses.replace(pool, keys=keys, updates=updates, gates=gates), states)


def read_pool(spec: RecurrenceSpec, pool: Pool, held: Held) -> Float32[Array, "rows heads value_dim key_dim"]:
    """Checkpoint and live entries summed into the state. KVBuffer, eq. 16."""
    index = jnp.arange(held.entries.shape[1], dtype=jnp.int32)
    updates, keys, decay = _weigh(spec, pool, held.entries, index[None] < held.live[:, None])
    added = jnp.einsum("nrhv,nrhd->nhvd", updates, keys, precision=HIGHEST)
    return decay[:, :, None] * _checkpoint(pool, held) + added


def read_pool_by_entries(
    spec: RecurrenceSpec, pool: Pool, held: Held
) -> Float32[Array, "rows heads value_dim key_dim"]:
    """As `read_pool`, but adds the entries to the state sixteen at a time, until those of the fullest row are added.

    For prompts: their rows mostly have none, and rings are long where rows may be KV-only. On a GPU XLA took ten
    seconds to compile and time the ways in which it could compute such a float32 product.
    """

    def add(i: Array, state: Array) -> Array:
        index = i * ENTRIES_AT_ONCE + jnp.arange(ENTRIES_AT_ONCE, dtype=jnp.int32)
        positions = held.entries[:, jnp.minimum(index, held.entries.shape[1] - 1)]
        updates, keys, decay = _weigh(spec, pool, positions, index[None] < held.live[:, None])
        return decay[:, :, None] * state + jnp.sum(updates[..., None] * keys[..., None, :], axis=1)

    rounds = -(-jnp.max(held.live, initial=0) // ENTRIES_AT_ONCE)
    return jax.lax.fori_loop(0, rounds, add, _checkpoint(pool, held))


def _weigh(
    spec: RecurrenceSpec, pool: Pool, positions: Int32[Array, "rows n"], alive: Bool[Array, "rows n"]
) -> tuple[Array, Array, Array]:
    """Entries that follow each other, f32: updates [rows, n, heads, value_dim]; keys [rows, n, heads, key_dim], decayed
    to after the last one; and what the state before them decays by until then [rows, heads, 1 or key_dim].

    Those that are not alive have an update of 0 and decay nothing.
    """
    keys = _per_head(spec, _take(pool.keys, positions, alive))
    updates = _take(pool.updates, positions, alive)
    decay, beta = _unpack_gates(spec, _take(pool.gates, positions, alive))
    to_now = jax.lax.cumsum(decay, axis=1, reverse=True)
    after = jnp.concatenate([to_now[:, 1:], jnp.zeros_like(to_now[:, :1])], axis=1)
    updates = updates if spec.delta else beta[..., None] * updates
    return updates, jnp.exp(after) * keys, jnp.exp(to_now[:, 0])


def _checkpoint(pool: Pool, held: Held) -> Float32[Array, "rows heads value_dim key_dim"]:
    """Each row's, in float32; zeros without one."""
    checkpoint = decode(*jax.tree.map(lambda x: x[held.checkpoint], _states(pool)))
    return jnp.where(held.has_checkpoint[:, None, None, None], checkpoint, 0.0)


def _read(checkpoints: Array, rows: Array, holds: Array, key: Array, query: Array) -> tuple[Array, Array]:
    """S k and S q for each row's checkpoint S: [rows, heads, key_dim] -> [rows, heads, value_dim]; 0 without one.

    One reduction of both products, because XLA fuses it with the gather and reads each checkpoint once, where it lies;
    a dot would first have its operand gathered into memory, a copy of the checkpoints every step.
    """
    state = checkpoints[rows].astype(jnp.float32)
    state = jnp.where(holds[:, None, None, None], state, 0.0)
    products = state * key[:, :, None], state * query[:, :, None]
    return jax.lax.reduce(products, (jnp.float32(0), jnp.float32(0)), lambda a, b: (a[0] + b[0], a[1] + b[1]), (3,))


def _append(array: Array, new: Array, positions: Array) -> Array:
    """Writes new [rows, time, ...] to flat entry positions int32 [rows, time], but none in block 0 or past the end."""
    positions = jnp.where(positions < array.shape[1], NOWHERE, positions)
    flat = _flat(array)
    return flat.at[positions].set(new.astype(array.dtype), mode="drop").reshape(array.shape)


def _take(array: Array, positions: Array, alive: Array) -> Array:
    """f32 [rows, ring, ...] of entries. Dead ones and block 0 are selected away: they may hold another owner's NaN."""
    alive = alive & (positions >= array.shape[1])
    taken = _flat(array)[positions].astype(jnp.float32)
    return jnp.where(alive.reshape(*alive.shape, *(1,) * (taken.ndim - 2)), taken, 0.0)


def _flat(array: Array) -> Array:
    """[blocks, block_size, ...] as [entries, ...]; the last axis may be empty (a DeltaNet's gates)."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _per_head(spec: RecurrenceSpec, x: Array) -> Array:
    return jnp.repeat(x, spec.group, axis=-2)


def _at(x: Array, t: Array | int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False)


def _pack_gates(spec: RecurrenceSpec, log_decay: Array | None, beta: Array) -> Array:
    parts = []
    if log_decay is not None:
        parts.append(log_decay[..., None] if spec.decay == "head" else log_decay)
    if not spec.delta:
        parts.append(beta[..., None])
    return jnp.concatenate(parts, axis=-1) if parts else jnp.zeros((*beta.shape, 0), jnp.float32)


def _unpack_gates(spec: RecurrenceSpec, gates: Array) -> tuple[Array, Array]:
    """log_decay [rows, ring, heads, 1 or key_dim], 0 without decay, and beta [rows, ring, heads], 1 with delta."""
    decay = gates[..., : spec.decay_width] if spec.decay_width else jnp.zeros((*gates.shape[:-1], 1), jnp.float32)
    return decay, jnp.ones(gates.shape[:-1], jnp.float32) if spec.delta else gates[..., -1]
