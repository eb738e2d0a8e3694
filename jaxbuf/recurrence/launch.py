"""One layer of a launch, by a kernel where the platform has one, else as XLA compiles `pool.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.recurrence import pool as xla
from jaxbuf.recurrence.cursor import NOWHERE, Step
from jaxbuf.recurrence.pool import Pool
from jaxbuf.recurrence.spec import Array, RecurrenceSpec, check_implementation, check_inputs


@partial(jax.jit, static_argnums=0, static_argnames=("implementation", "interpret"))
@jax.named_scope("recurrence")
def extend_pool(
    spec: RecurrenceSpec,
    pool: Pool,
    step: Step,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[Array, Pool]:
    """`extend` for one layer, with the integers that `begin` made for all of them.

    Args:
      spec: The layer's family and sizes.
      pool: Its arrays.
      step: From `begin`.
      q, k, v, log_decay, beta: As in `recurrent`, [rows, T, ...].
      implementation: "xla", "gpu" (an NVIDIA Hopper GPU), or "auto": the kernel of the platform where it serves the
        call, else "xla".
      interpret: Run the kernel in Pallas' interpreter, on any platform: slow, for tests.

    Returns:
      out [rows, T, heads, value_dim] in v's dtype, and the pool.

    Raises:
      ValueError: A shape or dtype does not fit, or the implementation asked for can't serve the call; it says why.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    check_implementation("extend", implementation, ("gpu",))
    if implementation == "gpu" or (implementation == "auto" and _has_hopper()):
        # Imported here: Pallas' GPU part takes a while, and a CPU has no use for it.
        from jaxbuf.pallas.extend import gpu, supports

        shape = gpu.Shape(
            rows=v.shape[0],
            time=v.shape[1],
            heads=spec.heads,
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            ring=step.before.entries.shape[1],
            block_size=pool.keys.shape[1],
            state=pool.checkpoints.dtype,
            entry=pool.keys.dtype,
            pair=jnp.dtype(jnp.bfloat16 if q.dtype == pool.keys.dtype == jnp.bfloat16 else jnp.float32),
            out=v.dtype,
        )
        reason = supports(shape, value_dim=spec.value_dim, decay=spec.decay, delta=spec.delta)
        if reason is None:
            assert log_decay is not None  # check_inputs: the kernel's family has one
            arrays = pool.checkpoints, pool.keys, pool.updates, pool.gates
            k = xla.rounded(k, pool.keys.dtype)
            beta = jnp.ones(v.shape[:3], jnp.float32) if beta is None else beta
            inputs = q.astype(shape.pair), k.astype(shape.pair), v, log_decay, beta
            integers = gpu.Integers(*_integers(step, shape.block_size))
            out, arrays = gpu.extend(shape, integers, arrays, *inputs, interpret=interpret)
            return out, Pool(*arrays)
        if implementation == "gpu":
            raise ValueError(f'implementation="gpu" can not serve this extend: {reason}')
    return xla.extend_pool(spec, pool, step, q, k, v, log_decay, beta)


def _has_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


def _integers(step: Step, block_size: int) -> tuple[Array, ...]:
    """The fields of `pallas.extend.gpu.Integers`.

    Entries in the null block are left out, and so is everything of a row with no token.
    """
    before, ring = step.before, step.before.entries.shape[1]
    works = step.lengths > 0
    logical = jnp.arange(ring, dtype=jnp.int32)
    valid = (logical[None] < before.live[:, None]) & (before.entries >= block_size) & works[:, None]
    order = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, ring)
    there = order[:, :, None] == logical[None, None]
    here = valid[:, :, None] & (before.place[:, :, None] == logical[None, None])
    block = jnp.max(jnp.where(here, before.entries[:, :, None] // block_size, 0), axis=1)
    numbers = [
        step.lengths,
        jnp.sum(valid, axis=1, dtype=jnp.int32),
        before.checkpoint,
        (before.has_checkpoint & works).astype(jnp.int32),
        jnp.where(step.folds & works, step.fold_to, -1),
    ]
    rank = jnp.min(jnp.where(here, order[:, :, None], NOWHERE), axis=1)
    table = jnp.max(block.reshape(-1, ring // block_size, block_size), axis=2)
    place = jnp.sum(jnp.where(there, before.place[:, :, None], 0), axis=1, dtype=jnp.int32)
    writes = (step.append >= block_size) & (step.append < NOWHERE)
    return jnp.stack(numbers, axis=1), rank, table, place, jnp.where(writes, step.append, -1)
