"""`extend` on NVIDIA GPUs (Hopper) for one token a launch and few entries: the plain recurrent step, at limit 1.

A block has some rows of a head's state [value_dim, key_dim] in its registers, adds the entries to them one after the
other, writes them back if the row folds, and multiplies them with the new key and query. No thread needs what another
has, save the sums over a row of the state. Blocks come and go in the order of memory, several on a multiprocessor: the
loads of one hide behind the others' stores.

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

from jaxbuf.pallas.extend.gpu_products import ZERO, where
from jaxbuf.pallas.extend.gpu_shape import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, LENGTH, LIVE, ROW, Integers, Shape
from jaxbuf.pallas.lanes import COMPILER, load

type Array = jax.Array

PART = 64  # rows of the state that a block has


def extend_step(
    shape: Shape,
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
    """`jaxbuf.pallas.extend.gpu.extend` on references to its arrays, the entries' flat: for time 1."""
    return _kernel(shape, interpret)(*integers, q, k, v, log_decay, beta, *refs)


@functools.cache
def _layout(dtype):
    """Of [PART, key_dim]: sixteen bytes a thread, of four rows a warp."""
    vector = 16 // np.dtype(dtype).itemsize
    return plgpu.Layout.TILED(plgpu.Tiling(((16, 8 * vector), (4, vector))), (-4,), (-2, -3), -1)


def _kernel(shape: Shape, interpret: bool):
    heads, key_dim, parts = shape.heads, shape.key_dim, shape.value_dim // PART
    group = heads // shape.key_heads
    layout = _layout(shape.state)
    along_keys, along_values = layout.reduce(0), layout.reduce(1)

    def spread(x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (PART, key_dim), [axis]), layout)

    def extend_part(
        numbers, entries, append, q_ref, k_ref, v_ref, decay_ref, beta_ref, checkpoints, keys, updates, gates, out_ref
    ):  # fmt: skip
        item = lax.axis_index("part")
        part, head, place = lax.rem(item, parts), lax.rem(item // parts, heads), item // (parts * heads)
        values, key_head = pl.ds(part * PART, PART), head // group
        row, length, live = (numbers[place, i] for i in (ROW, LENGTH, LIVE))
        checkpoint, holds, fold_to = (numbers[place, i] for i in (CHECKPOINT, HAS_CHECKPOINT, FOLD_TO))
        first, to = entries[place, 0], append[place, 0]

        def load_entry(at):
            key = load(keys.at[at, key_head], along_keys).astype(jnp.float32)
            update = load(updates.at[at, head, values], along_values).astype(jnp.float32)
            return gates[at, head], key, update

        state = load(checkpoints.at[checkpoint, head, values], layout).astype(jnp.float32)
        gate, key, update = load_entry(first)
        new_key, query = (load(ref.at[row, 0, key_head], along_keys) for ref in (k_ref, q_ref))
        value = load(v_ref.at[row, 0, head, values], along_values).astype(jnp.float32)
        new_gate, new_beta = decay_ref[row, 0, head], beta_ref[row, 0, head]

        def add(state, gate, key, update):
            return state * jnp.exp(gate) + spread(update, 0) * spread(key, 1)

        state = where(holds > 0, state)
        some = live > 0
        state = add(state, jnp.where(some, gate, ZERO), where(some, key), where(some, update))
        state = lax.fori_loop(1, live, lambda i, state: add(state, *load_entry(entries[place, i])), state)
        stored = state.astype(shape.state)

        @pl.when(fold_to >= 0)
        def _():
            checkpoints[fold_to, head, values] = stored

        if shape.state != jnp.float32:
            state = jnp.where(jnp.broadcast_to(fold_to >= 0, state.shape), stored.astype(jnp.float32), state)

        @pl.when((to >= 0) & (part == 0))
        def _():
            gates[to, head] = new_gate

            @pl.when(lax.rem(head, group) == 0)
            def _():
                keys[to, key_head] = new_key.astype(shape.entry)

        new_key, query = new_key.astype(jnp.float32), query.astype(jnp.float32)
        decay = jnp.exp(new_gate)
        recalled = jnp.sum(state * spread(new_key, 1), axis=1) * decay
        out = jnp.sum(state * spread(query, 1), axis=1) * decay
        stored = (new_beta * (value - recalled)).astype(shape.entry)
        out = out + stored.astype(jnp.float32) * jnp.sum(query * new_key)
        out_ref[row, 0, head, values] = where(length > 0, out).astype(shape.out)

        @pl.when(to >= 0)
        def _():
            updates[to, head, values] = stored

    return plgpu.kernel(
        extend_part,
        out_type=jax.ShapeDtypeStruct((shape.rows, 1, heads, shape.value_dim), shape.out),
        grid=(shape.items * parts,),
        grid_names=("part",),
        compiler_params=COMPILER,  # and no barrier: no thread reads what another wrote
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
