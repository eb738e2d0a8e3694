"""One layer of a launch, by a kernel where the platform has one, else as XLA compiles `pool.py`."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxbuf.axes import Array, Float, Float32, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.extend.call import FOLD_TO, FOLDING
from jaxbuf.recurrence import pool as xla
from jaxbuf.recurrence.begin import Held, PrefillStep, Step
from jaxbuf.recurrence.chunked import kernel_call, solve_by_kernel
from jaxbuf.recurrence.pool import Pool
from jaxbuf.recurrence.spec import RecurrenceSpec, check_inputs
from jaxbuf.recurrence.state_format import rounded, state_format
from jaxbuf.target import Target


def extend_pool(
    spec: RecurrenceSpec,
    pool: Pool,
    step: Step,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None = None,
    beta: Float32[Array, "rows time heads"] | None = None,
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], Pool]:
    """`extend` for one layer, with the integers that `begin` made for all of them.

    Args:
      spec: The layer's family and sizes.
      pool: Its arrays.
      step: From `begin`.
      q, k, v, log_decay, beta: As in `recurrent`.
      implementation: "xla", "gpu" (an NVIDIA Hopper GPU), "tpu", or "auto": the target's kernel where it serves the
        call, else "xla".
      interpret: Run the kernel that was named in Pallas' interpreter, on any platform: slow, for tests.
      target: What it is compiled for: a Target, or the name of a chip ("H100"). None: what v lies on, see
        `jaxbuf.target.resolve_target`.

    Returns:
      out in v's dtype, and the pool.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    xla.check_pool(spec, pool)
    asked = ask("extend", implementation, target, (v,), interpret=interpret)
    return _extend_pool(spec, asked, pool, step, q, k, v, log_decay, beta)


@partial(jax.jit, static_argnums=(0, 1))
@jax.named_scope("recurrence")
def _extend_pool(
    spec: RecurrenceSpec,
    asked: Asked | None,
    pool: Pool,
    step: Step,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
) -> tuple[Array, Pool]:
    if asked is not None and asked.takes(_reason(asked, spec, pool, step.before, q, v)):
        entered = k if k.dtype == pool.keys.dtype else rounded(k, pool.keys.dtype)
        inputs = q, entered, v, log_decay, beta
        where = step.before, step.lengths, step.write, step.append, step.ancestors
        return _extend_by_kernel(asked, spec, pool, *where, inputs)
    return xla.extend_with_xla(spec, pool, step, q, k, v, log_decay, beta)


def fold_pool(
    spec: RecurrenceSpec,
    pool: Pool,
    before: Held,
    write: Int32[Array, "rows"],
    *,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> Pool:
    """`fold` for one layer: the state that `before` describes is written to the rows `write`.

    Args:
      spec, pool, implementation, interpret: As in `extend_pool`.
      before, write: From `begin_fold`; rows past the pool are not written.
      target: As in `extend_pool`; None: what the pool lies on.

    Raises:
      ValueError: The implementation asked for can't serve the call; it says why.
    """
    asked = ask("fold", implementation, target, (pool.keys,), interpret=interpret)
    return _fold_pool(spec, asked, pool, before, write)


@partial(jax.jit, static_argnums=(0, 1))
@jax.named_scope("recurrence")
def _fold_pool(spec: RecurrenceSpec, asked: Asked | None, pool: Pool, before: Held, write: Array) -> Pool:
    if asked is not None:
        # The kernel of `extend` folds; its one new token is appended nowhere, and its output is not used.
        rows = write.shape[0]
        q, v = (jnp.zeros((rows, 1, *x.shape[2:]), pool.keys.dtype) for x in (pool.keys, pool.updates))
        reason = _reason(asked, spec, pool, before, q, v)
        if asked.takes(reason):
            shape = spec.decay_shape(rows, 1)
            log_decay = None if shape is None else jnp.zeros(shape, jnp.float32)
            append, lengths = jnp.full((rows, 1), NOWHERE), (write < NOWHERE).astype(jnp.int32)
            inputs = q, q, v, log_decay, jnp.zeros(v.shape[:3], jnp.float32)
            return _extend_by_kernel(asked, spec, pool, before, lengths, write, append, None, inputs)[1]
    return xla.fold_with_xla(spec, pool, before, write)


def prefill_pool(
    spec: RecurrenceSpec,
    pool: Pool,
    step: PrefillStep,
    q: Float[Array, "rows time key_heads key_dim"],
    k: Float[Array, "rows time key_heads key_dim"],
    v: Float[Array, "rows time heads value_dim"],
    log_decay: Float32[Array, "rows time heads ..."] | None = None,
    beta: Float32[Array, "rows time heads"] | None = None,
    *,
    chunk_size: int = 64,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads value_dim"], Pool]:
    """`prefill` for one layer, with the integers that `begin_prefill` made for all of them.

    Args:
      spec, pool, q, k, v, log_decay, beta, interpret, target: As in `extend_pool`.
      step: From `begin_prefill`.
      chunk_size: Of XLA's path, as in `chunked`.
      implementation: "xla", "gpu", "tpu", or "auto": the target's kernel where it serves the call, else "xla".

    Returns:
      out in v's dtype, and the pool.

    Raises:
      ValueError: As in `extend_pool`.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    xla.check_pool(spec, pool)
    asked = ask("prefill", implementation, target, (v,), interpret=interpret)
    return _prefill_pool(spec, asked, chunk_size, pool, step, q, k, v, log_decay, beta)


@partial(jax.jit, static_argnums=(0, 1, 2))
@jax.named_scope("recurrence")
def _prefill_pool(
    spec: RecurrenceSpec,
    asked: Asked | None,
    chunk_size: int,
    pool: Pool,
    step: PrefillStep,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
) -> tuple[Array, Pool]:
    if asked is not None:
        from jaxbuf.pallas.chunked import supports

        kept, time = step.append.shape[1], v.shape[1]
        entry = jnp.dtype(jnp.bfloat16 if pool.keys.dtype == jnp.bfloat16 else jnp.float32)
        keys = rounded(k, pool.keys.dtype).astype(entry)
        updates = min(kept, time) if spec.delta else 0
        call = kernel_call(spec, q, keys, v, beta, cut=kept > 0, updates=updates)
        if asked.takes(supports(call, platform=asked.platform, generation=asked.generation)):
            # The state that is stored is the one before the tokens that are kept; of updates only theirs are needed.
            start = None
            if not step.empty:
                # States are read where the layer's turn comes. XLA would read them for all layers before the first, and
                # hold them until then: it sees nothing that they wait for.
                q, before = jax.lax.optimization_barrier((q, step.before))
                start = xla.read_pool_by_entries(spec, pool, before)
            cut = step.head if kept else None
            inputs = q, keys, v, log_decay, beta, step.lengths, cut
            out, state, updates, first = solve_by_kernel(asked, call, start, *inputs)
            if kept:
                values = xla.tail(v, step.head, kept)
                if updates is not None:
                    values = xla.tail(updates, step.head - first, kept)
                pool = xla.append_tail(spec, pool, step, keys, values, log_decay, beta)
            return out, xla.store_states(pool, state, step.write, asked)
    return xla.prefill_with_xla(spec, pool, step, q, k, v, log_decay, beta, chunk_size=chunk_size, asked=asked)


def kernel_serves(spec: RecurrenceSpec, *, ring: int, state_dtype: object, entry_dtype: Any, target: Target) -> bool:
    """Whether a step of one token is a kernel's, with rings of so many entries.

    Args:
      spec: The layer's family and sizes.
      ring: Entries of a slot.
      state_dtype, entry_dtype: As in `init_pool`.
      target: What it is compiled for.
    """
    asked = ask("extend", "auto", target)
    if asked is None:
        return False
    from jaxbuf.pallas.extend import Call, supports

    form, entry = state_format(state_dtype), jnp.dtype(entry_dtype)
    sizes = {name: getattr(spec, name) for name in ("heads", "key_heads", "key_dim", "value_dim")}
    dtypes = {"state": form.high, "low": form.low, "entry": entry, "probe": entry, "out": entry}
    call = Call(rows=1, time=1, ring=ring, max_pending=1, delta=spec.delta, decay=spec.decay, **sizes, **dtypes)
    return supports(call, platform=asked.platform, generation=asked.generation) is None


def _call(spec: RecurrenceSpec, pool: Pool, before: Held, q: Array, v: Array, *, tree: bool = False):
    # Imported here: Pallas takes a while, and a CPU has no use for it.
    from jaxbuf.pallas.extend import Call

    return Call(
        rows=v.shape[0],
        time=v.shape[1],
        heads=spec.heads,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        ring=before.entries.shape[1],
        max_pending=before.max_pending,
        room=before.room,
        state=pool.checkpoints.dtype,
        low=None if pool.low is None else pool.low.dtype,
        entry=pool.keys.dtype,
        probe=jnp.dtype(jnp.bfloat16 if q.dtype == pool.keys.dtype == jnp.bfloat16 else jnp.float32),
        out=v.dtype,
        delta=spec.delta,
        decay=spec.decay,
        tree=tree,
    )


def _reason(asked: Asked, spec: RecurrenceSpec, pool: Pool, before: Held, q: Array, v: Array) -> str | None:
    from jaxbuf.pallas.extend import supports

    call = _call(spec, pool, before, q, v)
    return supports(call, platform=asked.platform, generation=asked.generation)


def _extend_by_kernel(
    asked: Asked,
    spec: RecurrenceSpec,
    pool: Pool,
    before: Held,
    lengths: Array,
    write: Array,
    append: Array,
    ancestors: Array | None,
    inputs: tuple[Array, Array, Array, Array | None, Array | None],
) -> tuple[Array, Pool]:
    """The kernel on the fields of a `Step`, and on q, k (rounded), v, log_decay and beta."""
    from jaxbuf.pallas.extend import Integers

    q, k, v, log_decay, beta = inputs
    ancestors = None if v.shape[1] == 1 else ancestors  # One token has no other on its path.
    call = _call(spec, pool, before, q, v, tree=ancestors is not None)
    log_decay = jnp.zeros(v.shape[:3], jnp.float32) if log_decay is None else log_decay
    beta = jnp.ones(v.shape[:3], jnp.float32) if beta is None else beta
    of_rows = _row_integers(before, lengths, write, append, pool.keys.shape[1], ancestors)
    names = ["checkpoints", "keys", "updates", "gates", "low", "low_scales"]
    names = [name for name in names if getattr(pool, name) is not None]
    arrays = tuple(getattr(pool, name) for name in names)
    tokens = q.astype(call.probe), k.astype(call.probe), v, log_decay, beta
    if asked.platform == "tpu":
        from jaxbuf.pallas.extend import tpu

        how = {"generation": asked.generation, "interpret": asked.interpret}
        out, arrays = tpu.extend(call, Integers(*of_rows), arrays, *tokens, **how)
    else:
        from jaxbuf.pallas.extend import gpu

        integers = Integers(*_folding_first(of_rows, gpu.row_spacing(call)))
        out, arrays = gpu.extend(call, integers, arrays, *tokens, interpret=asked.interpret)
    return out, dataclasses.replace(pool, **dict(zip(names, arrays, strict=True)))


def _row_integers(
    before: Held,
    lengths: Array,
    write: Array,
    append: Array,
    block_size: int,
    ancestors: Array | None,
) -> tuple[Array, ...]:
    """The attributes of `pallas.extend.Integers`, in which each row has one line, in the rows' order.

    Entries in the null block are left out, and so is everything of a row without tokens.
    """
    works = lengths > 0
    rows, ring = before.entries.shape
    logical = jnp.arange(ring, dtype=jnp.int32)
    valid = (logical[None] < before.live[:, None]) & (before.entries >= block_size) & works[:, None]
    order = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, NOWHERE)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    entries = jnp.zeros_like(before.entries).at[row, order].set(before.entries, mode="drop")
    folds = (write < NOWHERE) & works
    fields = [
        row[:, 0],
        lengths,
        jnp.sum(valid, axis=1, dtype=jnp.int32),
        before.checkpoint,
        (before.has_checkpoint & works).astype(jnp.int32),
        jnp.where(folds, write, -1),
        jnp.broadcast_to(jnp.sum(folds, dtype=jnp.int32), rows),
    ]
    writes = (append >= block_size) & (append < NOWHERE)
    found = [jnp.stack(fields, axis=1), entries, jnp.where(writes, append, -1)]
    if ancestors is not None:
        bits = 1 << jnp.arange(append.shape[1], dtype=jnp.int32)
        found.append(jnp.sum(jnp.where(ancestors, bits[None, None], 0), axis=2, dtype=jnp.int32))
    return tuple(found)


def _folding_first(of_rows: tuple[Array, ...], spacing: int) -> tuple[Array, ...]:
    """The lines of `_row_integers` in another order: rows that fold get early ones.

    They get one line in `spacing`, or in fewer, so that all of them are in the first half. With spacing 1, they get the
    first lines.
    """
    folds, count = of_rows[0][:, FOLD_TO] >= 0, of_rows[0][0, FOLDING]
    rows = folds.shape[0]
    # No sort, which XLA would not fuse with anything.
    rank = jnp.where(folds, jnp.cumsum(folds), jnp.cumsum(~folds)) - 1
    stride = jnp.clip(rows // jnp.maximum(2 * count, 1), 1, spacing)
    others = jnp.maximum(stride - 1, 1)  # lines between those of two rows that fold
    between = rank // others * stride + lax.rem(rank, others) + 1
    later = jnp.where(rank < count * (stride - 1), between, count + rank)
    line = jnp.where(folds, rank * stride, later)
    first = jnp.argmax(line[None] == jnp.arange(rows, dtype=jnp.int32)[:, None], axis=1)
    return tuple(x[first] for x in of_rows)
