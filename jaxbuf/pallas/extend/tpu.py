"""`extend` on TPUs, in one launch: Pallas Mosaic TPU.

A program serves a row; a row whose heads do not fit into VMEM at once takes several programs, a block of heads each
(`tpu_plan`). What a program does is in `tpu_row`:

1. It starts the copies of what the next program needs: the checkpoint if there is one, the low half of a split one if
   the row folds, and the live entries, one by one. Then it waits for its own, which the program before has started.
2. It turns live entries and new tokens into float32 numbers, in the order of their places: a row for each head.
3. If the row folds, it adds the entries to the checkpoint and starts the copy back to the pool.
4. It multiplies the heads' states with all new keys and queries (2 T probes).
5. For one new token after the other it sums the decays, multiplies the entries on the token's path with its key and
   query, and sums their updates. That gives the output and, by forward substitution, the update, rounded as it will be
   stored.
6. It starts the copies of the new entries into the pool. The next program waits for them before their place in VMEM is
   used again.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth. The copies
are these, and the ring's gates for all of its places where an entry has one number a head: 0.1 % of a checkpoint of
128 by 128 for 24 places. `tests/portability/test_extend_bytes.py` counts them.

Why it is so:
- The checkpoint is one operand, which the output is aliased to, in HBM. Were it passed as a block, too, XLA would copy
  the pool. The outputs are declared to lie in HBM as well, or XLA moves small pools to VMEM and back in every launch.
- Entries lie one behind the other on an axis that is not tiled, so that one entry can be copied. Only live ones are.
  Gates of one number a head are no tile, and would be padded to one: XLA gathers them and appends new ones.
- Entries have few rows, and a program has many heads. The matrix unit would wait for each head's few; the vector unit
  takes them in one order, whichever of them are committed, so that T tokens at once and one by one store the same
  bits. The chunks, and with them the order of sums, depend on the ring's length alone.
- Loads that are `heads` rows apart bring a head's entries into one tile. Such loads need arrays of 128 columns, so
  wider ones are cut.
- The state is what the matrix unit multiplies. Mosaic's own float32 product takes six passes over a float32 state. Cut
  into three bfloat16 parts, packed in half the registers, it takes three for all of the probes' parts: exact products,
  float32 sums.
- Several heads are computed side by side, all loads before all stores: one alone leaves the processor waiting for
  sums over lanes.
- Dead entries are neither copied nor computed; what stands in their places is selected away.

An estimate from the compiler's schedule for a v5e, for Gated DeltaNet with 32 heads of 128 by 128 and 8 live entries:
71 cycles a head for the state and 64 for the entries, with all else some 5,600 a row, 3.7 us at 1.5 GHz. The row's
copies take 2.6 us at 819 GB/s. With Mosaic's float32 products and one head after the other it was 9,500 cycles.

Arrays whose last axis is no multiple of 128 (value_dim 64 or 80, GLA's gates) are padded in HBM where they lie row by
row, as the kernel has them. XLA lays out a program's own arguments in any order that pads less, and then copies such
arrays before the program's loop and after it, never within; a program whose arguments are given this layout copies
none (`tests/portability/test_extend_compiles.py`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import Call, Integers
from jaxbuf.pallas.extend.tpu_plan import Plan, make_plan
from jaxbuf.pallas.extend.tpu_row import Refs, Row


def extend(
    call: Call,
    integers: Integers,
    arrays: tuple[Array, ...],
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    generation: str = "",
    interpret: Any = False,
) -> tuple[Array, tuple[Array, ...]]:
    """`jaxbuf.recurrence.pool.extend_pool` for every decay; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      integers: Where each row's memory lies, in the rows' order.
      arrays: Checkpoints, keys, updates and gates as in `Pool`, and behind them `Pool.low` if checkpoints are split,
        and `Pool.low_scales` if its numbers are int8. All but gates of one number a head are written in place.
      q, k: [rows, T, key_heads, key_dim]; k is rounded to the entries' dtype.
      v: [rows, T, heads, value_dim].
      log_decay: f32 [rows, T, heads], 0 where entries have none; [rows, T, heads, key_dim] if it is one a channel.
      beta: f32 [rows, T, heads].
      generation: Of the TPU, as in `jaxbuf.target.Target`: its VMEM decides how many heads a program takes.
      interpret: Run in Pallas' interpreter.

    Returns:
      out [rows, T, heads, value_dim] in call.out, and the arrays.
    """
    checkpoints, keys, updates, gates, *low = arrays
    plan = make_plan(call, generation)
    assert isinstance(plan, Plan), plan
    rows, time, heads = call.rows, call.time, call.heads
    flat = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (keys, updates, gates)]
    pool = {"checkpoints": checkpoints, "keys": flat[0], "updates": flat[1]}
    inputs: dict[str, Array] = {"q": q, "k": k, "v": v}
    positions = integers.entries[:, : call.max_live]
    channel, width = call.decay == "channel", call.decay_width
    packed = []
    if width:
        packed.append(log_decay if channel else log_decay[..., None])
    if not call.delta:
        packed.append(beta[..., None])
    if channel:
        pool["gates"] = flat[2]
        inputs["new_gates"] = jnp.concatenate(packed, axis=-1)
    elif packed:
        # Appended by XLA after it has gathered the live ones. An index of -1 would be the last entry's.
        ring = flat[2][jnp.pad(positions, ((0, 0), (0, plan.ring_rows - positions.shape[1])))]
        if width:
            inputs["ring_decay"], inputs["new_decay"] = ring[..., 0], log_decay
        if not call.delta:
            inputs["ring_beta"] = ring[..., -1]
        where = jnp.where(integers.append < 0, flat[2].shape[0], integers.append)
        gates = flat[2].at[where].set(jnp.concatenate(packed, axis=-1), mode="drop").reshape(gates.shape)
    if call.delta or not channel:
        inputs["new_beta"] = beta
    pool |= dict(zip(("low", "low_scales"), low, strict=False))
    paths = integers.paths
    if paths is None:
        chain = np.array([(2 << t) - 1 for t in range(time)], np.int64).astype(np.int32)
        paths = jnp.broadcast_to(jnp.asarray(chain)[None], (rows, time))
    # One array: of several, each row would be padded to a tile, and scalar memory is small.
    words = jnp.concatenate([integers.fields, positions, integers.append, paths], axis=1).reshape(-1)
    body = functools.partial(_body, plan, tuple(pool), tuple(inputs))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def block(x):
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((1, *x.shape[1:]), lambda i, b, *_: (i, *zeros))

    out_shape = jax.ShapeDtypeStruct((rows, time, heads, call.value_dim), call.out)
    operands = [*pool.values(), *inputs.values()]
    found = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, plan.blocks),
            in_specs=[*[hbm] * len(pool), *map(block, inputs.values())],
            out_specs=[block(out_shape), *[hbm] * len(pool)],
            scratch_shapes=plan.scratch(),
        ),
        out_shape=[out_shape, *[pltpu.HBM(x.shape, x.dtype) for x in pool.values()]],
        input_output_aliases={1 + i: 1 + i for i in range(len(pool))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=plan.vmem_limit
        ),
        interpret=interpret,
        name="extend",
    )(words, *operands)
    out, after = found[0], dict(zip(pool, found[1:], strict=True))
    shaped = [after["keys"].reshape(keys.shape), after["updates"].reshape(updates.shape)]
    gates = after["gates"].reshape(gates.shape) if channel else gates
    return out, (after["checkpoints"], *shaped, gates, *[after[n] for n in ("low", "low_scales") if n in after])


def _body(plan: Plan, pool_names: tuple[str, ...], input_names: tuple[str, ...], *refs: Any) -> None:
    """A program: it names what it is given, scalars, inputs, outputs and scratch one behind the other."""
    given = iter(refs)
    words = next(given)
    pool, inputs = ({name: next(given) for name in names} for names in (pool_names, input_names))
    out, written = next(given), {name: next(given) for name in pool_names}
    scratch = dict(zip(plan.scratch_names(), given, strict=True))
    Row(plan, Refs(words, pool, inputs, out, written, scratch)).run()
