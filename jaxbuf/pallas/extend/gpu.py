"""`extend` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A multiprocessor runs one block of up to three warpgroups, each of which serves one head of a row after the other, on
its own: while one computes, the checkpoints of the others stream in.

An item is a head of a row. A warpgroup sums the entries' part of every output, a chunk of entries at a time: it
multiplies their keys with the T new keys and queries on the tensor cores, then the products with their updates, a
thread a row of the state [value_dim, key_dim] (or on the tensor cores, too: see `gpu_entries`). Then it multiplies the
checkpoint with all new keys and queries, half after half, and lets the next item's stream in behind; substitutes
forward over the T tokens; appends their entries. For a row that folds it first adds the entries to the checkpoint in
shared memory, which goes back to the pool meanwhile.

Modules: `gpu_lane` is a warpgroup, and how what an item needs comes to it; `gpu_entries` sums the entries' part,
`gpu_sums` their decays, `gpu_fold` folds, `gpu_products` is what all of them multiply with; `gpu_shape` has the sizes.
One token a launch on few entries is another kernel, `gpu_step`.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth.

Precision: operands in float32 enter products on the tensor cores as two bfloat16 halves (2^-16 relative); all sums are
float32. No sum's order depends on whether an entry is committed or pending, which is why T tokens at once and one by
one store the same bits, with a float32 checkpoint: how often a fold rounds a narrower one depends on T.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.gpu_entries import add_all
from jaxbuf.pallas.extend.gpu_fold import fold
from jaxbuf.pallas.extend.gpu_lane import Arrays, Item, Lane, Place, read_item
from jaxbuf.pallas.extend.gpu_products import STATE, STATE_LEFT, VECTORS, ZERO, cut, join, multiply_state, where, zeros
from jaxbuf.pallas.extend.gpu_shape import CHUNK, FOLDING, TILE, Integers, Shape
from jaxbuf.pallas.extend.gpu_step import extend_step
from jaxbuf.pallas.extend.gpu_sums import factor, parts, sum_decays
from jaxbuf.pallas.lanes import COMPILER, count_up, load, publish, round_now, store_rows, synchronize

type Array = jax.Array


def extend(
    shape: Shape,
    integers: Integers,
    arrays: tuple[Array, Array, Array, Array],
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """`jaxbuf.recurrence.buffered.extend_pool` for decay="head", delta=True; `supports` says for which sizes.

    Args:
      shape: Static.
      integers: Of the launch.
      arrays: Checkpoints, keys, updates and gates as in `Pool`; what is returned takes their place in memory.
      q, k: [rows, T, key_heads, key_dim] in shape.pair, k rounded to what the entries hold.
      v: [rows, T, heads, value_dim]. log_decay, beta: f32 [rows, T, heads].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, T, heads, value_dim] in shape.out, and the arrays.
    """
    checkpoints, *entries = arrays
    flat = [x.reshape(-1, *x.shape[2:4]) for x in entries]
    flat[2] = flat[2].reshape(-1, shape.heads)
    if shape.alone:
        refs = [jax.new_ref(x) for x in (checkpoints, *flat)]
        out = extend_step(shape, integers, refs, q, k, v, log_decay, beta, interpret=interpret)
        checkpoints, *flat = (jax.freeze(ref) for ref in refs)
        return out, (checkpoints, *(x.reshape(old.shape) for x, old in zip(flat, entries, strict=True)))
    positions = integers.entries[:, : shape.columns]
    positions = jnp.pad(positions, ((0, 0), (0, shape.columns - positions.shape[1])))
    counter = [jnp.zeros(1, jnp.int32)] if shape.draws and not interpret else []
    refs = [jax.new_ref(x) for x in (checkpoints, *flat, *counter)]
    launch = integers._replace(entries=positions)
    out = _kernel(shape, interpret)(*launch, q, k, v, log_decay, beta, *refs)
    checkpoints, *flat = (jax.freeze(ref) for ref in refs[:4])
    return out, (checkpoints, *(x.reshape(old.shape) for x, old in zip(flat, entries, strict=True)))


def _kernel(shape: Shape, interpret: bool):
    draws = shape.draws and not interpret  # the interpreter knows no atomics

    def extend_heads(*refs):
        *refs, out, scratch = refs
        arrays, counter = Arrays(*refs[: len(Arrays._fields)]), refs[len(Arrays._fields) :]
        lane = Lane(shape, interpret, arrays, scratch)

        # Items that fold come early, for they take longest. Either the lanes draw items when they have done others,
        # which makes up for the multiprocessors' unequal shares of the bandwidth; or they are dealt. (The interpreter
        # deals what should be drawn: in another order.)
        folding = arrays.numbers[0, FOLDING] * shape.heads

        def locate_after_next(turn):
            if not draws:
                return lane.locate(lane.deal(turn + 2, folding))
            # What was drawn a turn ago: for a number drawn in this turn it would wait.
            drawn = lax.bitcast_convert_type(lane.sums[shape.columns], jnp.int32)
            return lane.locate(3 * shape.lanes + drawn)

        def serve(turn, carry):
            """Serves an item; asks for the inputs of the next one, and where those of the one after it lie."""
            (_, place, head, fields), following, values, new_keys = carry
            item, following = read_item(place, head, fields), Place(*following)
            number = count_up(*counter) if draws else None
            next_fields = lane.read_words(0, FOLDING, jnp.int32)
            gates, betas = (lane.read_words(FOLDING + i * shape.time, shape.time, jnp.float32) for i in range(2))
            places = lane.read_words(FOLDING + 2 * shape.time, shape.time, jnp.int32)
            if not shape.frugal:
                then = locate_after_next(turn)

            # It arrives while this item is served, if there are registers.
            def load_next():
                return lane.load_inputs(following, next_fields)

            _append_keys(lane, item, places, gates, new_keys)
            gates = [parts(lane, gate) for gate in gates]
            # The factors of a fold are up to the last entry.
            until = [jnp.where(item.folds, ZERO, x) for x in gates[0]] if shape.frugal else None
            total = sum_decays(lane, item.live, until)
            pl.when(item.folds)(functools.partial(fold, lane, item, total))
            total = [jnp.where(item.folds, ZERO, x) for x in total]
            if shape.frugal:  # not before the fold, which would wait for it
                loaded = load_next()
            added = add_all(lane, item, gates)
            if shape.frugal:
                then = locate_after_next(turn)
            else:
                loaded = load_next()
            if shape.stages:
                lane.keep(following)
                synchronize(interpret)  # all are done with the entries
                lane.copy_ahead(following.there, following, next_fields)
            # Too many pairs to be held are loaded again for each half.
            pairs = [lane.load_pairs(columns) for columns in shape.parts] if shape.width <= CHUNK else None

            def read_half(i):
                _read_state(lane, item, i, pairs)
                pl.when(following.there)(functools.partial(lane.fetch, i, following.head, next_fields))

            lane.each_half(read_half)
            _substitute(lane, item, out, added, total, gates, betas, places, values)
            if number is not None:
                publish(number, lane.sums.at[shape.columns])
            synchronize(interpret)  # all have read what the next item overwrites
            here = following.there, following.place, following.head, next_fields
            return here, then, *lane.admit(following.every, loaded, then.fields)

        start = lane.locate(lane.number)

        @pl.when(start.there)
        def _():
            fields = [arrays.numbers[start.place, i] for i in range(FOLDING)]
            lane.each_half(lambda i: lane.fetch(i, start.head, fields))
            loaded = lane.load_inputs(start, fields)
            if shape.stages:
                lane.keep(start)
                synchronize(interpret)
                lane.copy_ahead(True, start, fields)
            following = lane.locate(shape.lanes + lane.number if draws else lane.deal(1, folding))
            if draws:  # as if the item of the third turn had been drawn
                lane.sums[shape.columns] = lax.bitcast_convert_type(lane.number - shape.lanes, jnp.float32)
            here = start.there, start.place, start.head, fields
            carry = here, following, *lane.admit(start.every, loaded, following.fields)
            lax.while_loop(lambda carry: carry[1][0][0], lambda carry: (carry[0] + 1, serve(*carry)), (0, carry))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_heads,
        out_type=jax.ShapeDtypeStruct((shape.rows, shape.time, shape.heads, shape.value_dim), shape.out),
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=shape.slots,
        thread_name="warpgroup",
        scratch_types=[shape.scratch(shape.slots, shape.stages)],
        # No sum goes across warps: no scratch memory for it.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _append_keys(lane: Lane, item: Item, places: list[Array], gates: list[Array], new_keys: list[Array]) -> None:
    """Writes the new tokens' gates and, for the first of the heads that share one, their keys."""
    shape = lane.shape
    for t, (to, gate) in enumerate(zip(places, gates, strict=True)):

        @pl.when(to >= 0)
        def _(t=t, to=to, gate=gate):
            lane.arrays.gates[to, item.head] = gate

            @pl.when(lax.rem(item.head, shape.group) == 0)
            def _():
                here = lane.rows.at[0, CHUNK + t, pl.ds(0, shape.key_dim)]
                key = new_keys[t] if new_keys else load(here, VECTORS[shape.key_dim])
                lane.arrays.keys[to, item.head // shape.group] = key.astype(shape.entry)


def _read_state(lane: Lane, item: Item, i: Array, pairs: list[list[Array]] | None) -> None:
    """Multiplies half i of the state with the new keys and queries; then its memory is free."""
    shape = lane.shape
    half, state, barrier = lane.half(i)
    pl.when(item.has_checkpoint & ~item.folds)(lambda: plgpu.barrier_wait(barrier))

    def multiply_half():
        # Two sums: products that follow one another would wait for each other.
        tiles = [zeros((TILE, shape.width), STATE)] * 2
        for j, columns in enumerate(shape.parts):
            right = pairs[j] if pairs else lane.load_pairs(columns)
            for left in cut(load(state.at[:, columns], STATE_LEFT)):
                tiles = [tiles[1], multiply_state(tiles[0], left, right, lane.interpret)]
        tile = tiles[0] + tiles[1]
        if shape.frugal:
            store_rows(tile, STATE, 1, lane.reads.at[:, half], lane.interpret)
        else:
            lane.reads[half, pl.ds(0, shape.width)] = tile

    if shape.stages:  # a slot may well be without a checkpoint where a ring is longer than a chunk
        pl.when(item.holds)(multiply_half)
    else:
        multiply_half()
    for behind, _ in enumerate(shape.halves):
        last = item.folds & (i == len(shape.halves) - 1 - behind)
        pl.when(last)(functools.partial(plgpu.wait_smem_to_gmem, behind, wait_read_only=True))
    synchronize(lane.interpret)


def _substitute(lane: Lane, item: Item, out, added, total, gates, betas, places, values) -> None:
    """Forward substitution over the T tokens: writes their outputs, and appends their updates."""
    shape = lane.shape
    time, vector = shape.time, VECTORS[shape.value_dim]

    def read(i):
        return where(item.holds, load(lane.reads.at[i] if shape.frugal else lane.reads.at[:, i], vector))

    decays = []
    for gate in gates:
        total = [x + y for x, y in zip(total, gate, strict=True)]
        decays.append(factor(total))
    recalls, outs = added[:time], added[time:]
    for t, (beta, to) in enumerate(zip(betas, places, strict=True)):
        recalled = recalls[t] + decays[t] * read(t)
        stored = (beta * (values[t].astype(jnp.float32) - recalled)).astype(shape.entry)
        update = stored.astype(jnp.float32)
        if shape.planes == 2:  # as a later launch finds it
            update = join(cut(round_now(update, vector, lane.interpret)))
        for i in range(t, time):
            if i > t:
                recalls[i] = recalls[i] + lane.products[i, shape.span + t] * update
            outs[i] = outs[i] + lane.products[time + i, shape.span + t] * update
        result = outs[t] + decays[t] * read(time + t)
        out[item.row, t, item.head] = where(t < item.length, result).astype(shape.out)

        @pl.when(to >= 0)
        def _(to=to, stored=stored):
            lane.arrays.updates[to, item.head] = stored
