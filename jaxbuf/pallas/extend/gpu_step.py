"""`extend` on NVIDIA GPUs (Hopper) where launches bring one token and rings are short: limit 1, the recurrent step.

A block loads some rows of a head's state [value_dim, key_dim] into registers, adds the entries to them one after the
other, writes them back if the row folds, and multiplies them with the new key and query. A thread needs numbers of
other threads only for the sums over a row of the state, and the new token, which it finds in shared memory. Several
blocks run on a multiprocessor, in the order in which the states lie in memory, so that one block's loads overlap with
the others' stores. A block also starts to bring the rows of a block some way behind it to the L2 cache, in one piece:
memory is then read evenly and in long runs, and the blocks that come last wait for little.

Floor: (checkpoint · 2 + live entries + appends + inputs and outputs) / read bandwidth, where every row folds.

Precision: float32 throughout.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, LENGTH, LIVE, ROW, Call, Integers
from jaxbuf.pallas.extend.gpu_products import ZERO, by_row, split, to_int8, where
from jaxbuf.pallas.instructions import end_copies, prefetch, synchronize, wait_for_copies
from jaxbuf.pallas.threads import COMPILER, THREADS, WARP, copy_vector, load, store

MAX_RING = 8  # entries of a ring; they are added to the state one after the other
HELD = 32 * THREADS  # numbers of a state that a block has in its registers, at most
# Few items are cut into more blocks, so that all multiprocessors have some.
FEW_ITEMS = 64
FEW_HELD = 16 * THREADS
LANES = 16  # threads that share a row
# How many blocks ahead of itself a block prefetches. On an H200 the step is slower with less than 330 and with more
# than 528. Launches of up to twice as many blocks do not prefetch: nearly all of their blocks run at once.
AHEAD = 429


def serves(call: Call) -> bool:
    """Whether this kernel takes a call: tokens always come one by one, and rings are short.

    It loads sixteen bytes at once. With a decay a channel and without the delta rule, an entry's gates do not begin at
    a multiple of them.
    """
    aligned = call.decay != "channel" or call.delta
    return call.max_pending == 1 and call.ring <= MAX_RING and aligned


def extend_step(
    call: Call,
    integers: Integers,
    refs: list,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    interpret: bool = False,
) -> Array:
    """`jaxbuf.pallas.extend.gpu.extend` for calls that this kernel serves.

    Args:
      call, integers, q, k, v, log_decay, beta, interpret: As there.
      refs: References to the checkpoints, keys, updates and gates, the last three with blocks and block_size as one
        axis; and to the low halves and their scales, as far as there are some.

    Returns:
      The outputs.
    """
    return _kernel(call, interpret)(*integers[:3], q, k, v, log_decay, beta, *refs)


@functools.cache
def _layout(dtype, key_dim: int):
    """The layout of a block's rows [n, key_dim].

    A thread loads sixteen bytes at once. LANES threads of a warp, or fewer if a row is shorter, load from the same row,
    next to each other; the warp's other threads load from the rows below.
    """
    vector = 16 // np.dtype(dtype).itemsize
    lanes = min(LANES, key_dim // vector)
    tiling = plgpu.Tiling(((THREADS // lanes, lanes * vector), (WARP // lanes, vector)))
    return plgpu.Layout.TILED(tiling, (-4,), (-2, -3), -1)


def _kernel(call: Call, interpret: bool):
    heads, key_dim, held = call.heads, call.key_dim, FEW_HELD if call.items <= FEW_ITEMS else HELD
    n = held // key_dim
    parts, channel = call.value_dim // n, call.decay == "channel"
    blocks = call.items * parts
    layout = _layout(call.state, key_dim)
    along_keys, along_values = layout.reduce(0), layout.reduce(1)

    def spread(x, axis):
        """A row (axis 1) or column (axis 0), repeated over all of the block's part of the state."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (n, key_dim), [axis]), layout)

    def place(block):
        """A block's part, head and line, and which values its rows are."""
        part, head, line = lax.rem(block, parts), lax.rem(block // parts, heads), block // (parts * heads)
        return part, head, line, pl.ds(part * n, n)

    def extend_part(  # A profile shows this name.
        fields, entries, append, q_ref, k_ref, v_ref, decay_ref, beta_ref, checkpoints, keys, updates, gates, *rest
    ):  # fmt: skip
        *low, out_ref, new_vectors, new_values = rest
        block = lax.axis_index("part")
        part, head, line, values = place(block)
        key_head = head // call.heads_per_key
        row, length, live = (fields[line, i] for i in (ROW, LENGTH, LIVE))
        checkpoint, has_checkpoint, fold_to = (fields[line, i] for i in (CHECKPOINT, HAS_CHECKPOINT, FOLD_TO))
        first, appended = entries[line, 0], append[line, 0]
        stack = range(call.stacked)
        # The new token goes to shared memory: the compiler would move loads to where they are used, behind the state's.
        vectors = [ref.at[row, 0, key_head] for ref in (k_ref, q_ref)]
        vectors += [decay_ref.at[row, 0, head]] if channel else []
        new, thread = [*zip(vectors, new_vectors, strict=True), (v_ref.at[row, 0, head, values], new_values)], 0
        for source, target in new:
            thread = copy_vector(source, target, thread, interpret)
        end_copies(interpret)

        def select(numbers):
            """A number of each head of a stack: itself if there is one, else [n], of each of the block's rows."""
            return by_row(numbers, call.first_rows(head) - part * n, call.head_rows, (n,), along_values)

        def load_entry(at):
            key = load(keys.at[at, key_head], along_keys).astype(jnp.float32)
            update = load(updates.at[at, head, values], along_values).astype(jnp.float32)
            if not call.delta:
                update = select([gates[at, call.beta(head, i)] for i in stack]) * update
            gate = ZERO
            if channel:
                gate = load(gates.at[at, head, pl.ds(0, key_dim)], along_keys)
            elif call.decay == "head":
                gate = select([gates[at, call.log_decay(head, i)] for i in stack])
            return gate, key, update

        state = load(checkpoints.at[checkpoint, head, values], layout).astype(jnp.float32)
        if low:

            def add_low():
                rest = load(low[0].at[checkpoint, head, values], layout).astype(jnp.float32)
                scales = [load(ref.at[checkpoint, head, values], along_values) for ref in low[1:]]
                return state + functools.reduce(lambda rest, scale: rest * spread(scale, 0), scales, rest)

            state = lax.cond(fold_to >= 0, add_low, lambda: state)
        if blocks > 2 * AHEAD:

            @pl.when(block + AHEAD < blocks)
            def _():
                _, head, line, values = place(block + AHEAD)
                prefetch(checkpoints.at[fields[line, CHECKPOINT], head, values], interpret)

        gate, key, update = load_entry(first)
        new_gates = [] if channel else [decay_ref[row, 0, call.head(head, i)] for i in stack]
        new_betas = [beta_ref[row, 0, call.head(head, i)] for i in stack]

        def add(state, gate, key, update):
            decay = jnp.exp(gate)
            if decay.ndim:
                decay = spread(decay, 1 if channel else 0)
            return state * decay + spread(update, 0) * spread(key, 1)

        state = where(has_checkpoint > 0, state)
        some = live > 0
        state = add(state, where(some, jnp.asarray(gate)), where(some, key), where(some, update))
        state = lax.fori_loop(1, live, lambda i, state: add(state, *load_entry(entries[line, i])), state)
        kept = {None: [], jnp.dtype(jnp.int8): [jnp.float32]}.get(call.low, [call.low])
        stored, *rest = split(state, [call.state, *kept], interpret)
        if call.low == jnp.int8:
            scale = jnp.max(jnp.abs(rest[0]), axis=1) * np.float32(1 / 127)
            inverse = jnp.where(scale > 0, 1 / scale, ZERO)
            rest = [to_int8(rest[0], spread(inverse, 0), interpret), scale]

        @pl.when(fold_to >= 0)
        def _():
            store(checkpoints.at[fold_to, head, values], stored)
            for ref, half in zip(low, rest, strict=True):
                store(ref.at[fold_to, head, values], half)

        if call.state != jnp.float32:
            state = jnp.where(jnp.broadcast_to(fold_to >= 0, state.shape), stored.astype(jnp.float32), state)

        wait_for_copies(0, interpret)
        synchronize(interpret)
        new_key, query, *gates_of_channels = (load(ref, along_keys) for ref in new_vectors)
        value = load(new_values, along_values).astype(jnp.float32)
        new_gates = gates_of_channels or new_gates
        new_gate, new_beta = select(new_gates), select(new_betas)

        @pl.when((appended >= 0) & (part == 0))
        def _():
            if channel:
                store(gates.at[appended, head, pl.ds(0, key_dim)], new_gate)
            for i in stack:
                if call.decay == "head":
                    store(gates.at[appended, call.log_decay(head, i)], new_gates[i])
                if not call.delta:
                    store(gates.at[appended, call.beta(head, i)], new_betas[i])

            @pl.when(lax.rem(head, call.heads_per_key) == 0)
            def _():
                store(keys.at[appended, key_head], new_key.astype(call.entry))

        new_key, query = new_key.astype(jnp.float32), query.astype(jnp.float32)
        decay = jnp.exp(new_gate)

        def read(probe):
            if channel:
                return jnp.sum(state * spread(probe * decay, 1), axis=1)
            return jnp.sum(state * spread(probe, 1), axis=1) * decay

        out = read(query)
        if call.delta:
            recalled = read(new_key)
            value = new_beta * (value - recalled)
        stored = value.astype(call.entry)
        update = stored.astype(jnp.float32) if call.delta else new_beta * stored.astype(jnp.float32)
        out = out + update * jnp.sum(query * new_key)
        store(out_ref.at[row, 0, head, values], where(length > 0, out).astype(call.out))

        @pl.when(appended >= 0)
        def _():
            store(updates.at[appended, head, values], stored)

    return plgpu.kernel(
        extend_part,
        out_type=jax.ShapeDtypeStruct((call.rows, 1, heads, call.value_dim), call.out),
        grid=(blocks,),
        grid_names=("part",),
        scratch_types=[
            [plgpu.SMEM((key_dim,), dtype) for dtype in (call.probe, call.probe, *[jnp.float32] * channel)],
            plgpu.SMEM((n,), call.out),
        ],
        compiler_params=COMPILER,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
