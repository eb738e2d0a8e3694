"""`extend` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A multiprocessor runs one block of up to three warpgroups, each of which serves one head of a row after the other, on
its own: while one computes, the checkpoints of the others stream in.

An item is a head of a row. A warpgroup sums the entries' part of every output, a chunk of entries at a time: it
multiplies their keys with the T new keys and queries on the tensor cores, then the products with their updates, a
thread a row of the state [value_dim, key_dim]. Then it multiplies the checkpoint with all new keys and queries, half
after half, and lets the next item's stream in behind; substitutes forward over the T tokens; appends their entries. For
a row that folds it first adds the entries to the checkpoint in shared memory, which goes back to the pool meanwhile.

Little is waited for where it is asked for: cursors are read two items ahead; entries, gates and inputs one, by vectors
of sixteen bytes a thread. They are staged in shared memory when an item is done; entries beyond the first chunk, and
with several tokens that one too, go there past the registers where it has room for them beside the item's.

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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.gpu_shape import (
    CHECKPOINT,
    CHUNK,
    FOLD_TO,
    FOLDING,
    HAS_CHECKPOINT,
    LIVE,
    ROW,
    TILE,
    WIDE,
    Integers,
    Shape,
)
from jaxbuf.pallas.extend.gpu_step import extend_step
from jaxbuf.pallas.lanes import (
    COMPILER,
    EVERY,
    THREADS,
    copy_vectors,
    count_up,
    end_copies,
    gather_numbers,
    gather_vectors,
    load,
    publish,
    round_now,
    select_positive,
    synchronize,
    vectors_layout,
    wait_for_copies,
)

type Array = jax.Array

FOLD_COST = 2  # of an item that folds, in items that do not

LEFT, RIGHT, PRODUCT = (
    layout(jnp.bfloat16, m_warps=1) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
TALL_LEFT, TALL_RIGHT, TALL = (
    layout(jnp.bfloat16, m_warps=4) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# A row or column of the state, by its length: one number a thread, or two in four threads each.
VECTORS = {128: EVERY, 64: TALL.reduce(1)}


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
    padding = shape.columns - shape.ring
    positions = jnp.pad(integers.entries, ((0, 0), (0, padding)))
    counter = [jnp.zeros(1, jnp.int32)] if shape.draws and not interpret else []
    refs = [jax.new_ref(x) for x in (checkpoints, *flat, *counter)]
    launch = integers._replace(entries=positions)
    out = _kernel(shape, interpret)(*launch, q, k, v, log_decay, beta, *refs)
    checkpoints, *flat = (jax.freeze(ref) for ref in refs[:4])
    return out, (checkpoints, *(x.reshape(old.shape) for x, old in zip(flat, entries, strict=True)))


def _kernel(shape: Shape, interpret: bool):
    time, heads, width, items = shape.time, shape.heads, shape.width, shape.items
    key_dim, value_dim = shape.key_dim, shape.value_dim
    key_vector, value_vector = VECTORS[key_dim], VECTORS[value_dim]
    keys_layout, updates_layout = vectors_layout(key_dim, shape.entry), vectors_layout(value_dim, shape.entry)
    group, slots = heads // shape.key_heads, shape.slots
    draws = shape.draws and not interpret  # the interpreter knows no atomics
    stride = shape.lanes
    halves = [pl.ds(top, TILE) for top in range(0, value_dim, TILE)]
    part = 128 // shape.state.itemsize  # columns of the state that a product takes: a tile of its memory
    parts = [pl.ds(start, part) for start in range(0, key_dim, part)]
    whole = pl.ds(0, key_dim)
    first_update = CHUNK + 2 * time  # of `rows`
    stages, span = shape.stages, WIDE if shape.stages else CHUNK  # of later chunks, and their entries
    # First of the pairs that a product takes; the last takes some a second time.
    tiles = [*range(0, 2 * time - CHUNK, CHUNK), max(0, 2 * time - CHUNK)]
    ahead = bool(stages) and not shape.frugal  # whether entries go to shared memory at once, past the registers
    zero = np.float32(0)

    def zeros(dims, layout):
        return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), layout)

    def spread(x, dims, axis, layout):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)

    def count(dims, axis, layout):
        return plgpu.broadcasted_iota(jnp.int32, dims, axis, layout=layout)

    def multiply(total, a, b):
        """total + a b, over all halves."""
        for x in a:
            for y in b:
                if interpret:  # the interpreter knows no mma
                    total += jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32), precision="highest")
                else:
                    total = plgpu.mma(total, x, y)
        return total

    def pick(x, index, axis, layout):
        """The row (axis 0) or column (axis 1) of a product: a sum of it and zeros."""
        return jnp.sum(jnp.where(count(x.shape, axis, layout) == index, x, zero), axis=axis)

    def extend_heads(
        numbers, entries, append, q_ref, k_ref, v_ref, decay_ref, beta_ref,
        checkpoints, keys, updates, gates, *others,
    ):  # fmt: skip
        slot = lax.axis_index("warpgroup")
        lane = slot * shape.blocks + lax.axis_index("block")
        *counter, out_ref, scratch = others
        state, rows, sums_ref, products, reads = (
            scratch[name].at[slot] for name in ("state", "rows", "sums", "products", "reads")
        )

        def later(stage):
            """Where the keys and the updates of a later chunk are: a reference, and the first row of each."""
            ref, start = scratch["later"].at[slot], 2 * WIDE * stage
            return [ref], start, start + WIDE

        planes = [rows.at[i] for i in range(shape.planes)]
        first = planes, 0, first_update
        barriers = [scratch["barriers"].at[slot * len(halves) + i] for i in range(len(halves))]
        # Items that fold come early, for they take longest. Either the lanes draw items when they have done others,
        # which makes up for the multiprocessors' unequal shares of the bandwidth; or they are dealt, those that fold
        # first and as if each took FOLD_COST rounds. (The interpreter deals what should be drawn: in another order.)
        folding = numbers[0, FOLDING] * heads
        rounds, late = folding // stride, lax.rem(folding, stride)
        own = rounds + (lane < late).astype(jnp.int32)  # items of this lane that fold
        spare = jnp.where(lane < late, 0, FOLD_COST)  # rounds in which it is among the few that deal with others

        def deal(turn):
            """The item that this lane serves in a turn; past `items` if there is none."""
            other = turn - own
            early = other * (stride - late) + lane - late
            rest = FOLD_COST * (stride - late) + (other - spare) * stride + lane
            return jnp.where(other < 0, turn * stride + lane, folding + jnp.where(other < spare, early, rest))

        # Scalars of the next items are loaded as vectors and read from shared memory when they are used: one loaded as
        # a scalar would be waited for where it is loaded.
        word = count((THREADS,), 0, EVERY) - (THREADS - shape.passed)
        passed = shape.columns - shape.passed

        def load_words(ref, start, length):
            """The numbers of a reference [length], each in the thread that passes on the word start + its index."""
            return gather_numbers(ref, jnp.clip(word - start, 0, length - 1), interpret)

        def read_words(start, length, dtype):
            return [lax.bitcast_convert_type(sums_ref[passed + start + i], dtype) for i in range(length)]

        def load_positions(place, start, length):
            """Where keys and updates of an item's entries lie, for the threads that ask for them."""
            here = entries.at[place, pl.ds(start, length)]
            return [load(here, layout.reduce(1)) for layout in (keys_layout, updates_layout)]

        def locate_later(place, j):
            """Positions of the entries of a later chunk."""
            return load_positions(place, CHUNK + j * WIDE, WIDE)

        def copy(head, positions, there):
            """Starts to copy a chunk to shared memory, with zeros where there is no entry."""
            (ref,), *starts = there
            refs, layouts = (keys.at[:, head // group], updates.at[:, head]), (keys_layout, updates_layout)
            for source, at, layout, start in zip(refs, positions, layouts, starts, strict=True):
                target = ref.at[pl.ds(start, at.shape[0]), pl.ds(0, source.shape[-1])]
                copy_vectors(source, at, layout, target, interpret)

        def copy_ahead(there, head, live, folds, positions):
            """Starts to copy what has shared memory of its own of an item's entries."""
            if ahead:

                @pl.when(jnp.asarray(there))
                def _():
                    copy(head, positions[:2], first)

                end_copies(interpret)
            for i in range(stages):

                @pl.when(jnp.logical_and(there, (live > CHUNK + i * WIDE) | folds))
                def _(i=i):
                    copy(head, positions[2 * (i + 1) :][:2], later(i))

                end_copies(interpret)

        def locate(item):
            """Place and head of an item, what the row's cursor says, and where its entries lie."""
            place = jnp.minimum(item, items - 1) // heads
            positions = load_positions(place, 0, CHUNK)
            for stage in range(stages):
                positions += locate_later(place, stage)
            every = [load(entries.at[place, pl.ds(i, THREADS)], EVERY) for i in range(0, shape.columns, THREADS)]
            fields = load_words(numbers.at[place], 0, FOLDING)
            return item < items, place, lax.rem(item, heads), fields, positions, every

        def fetch(i, head, fields):
            """Half i of a checkpoint."""

            @pl.when(fields[HAS_CHECKPOINT] > 0)
            def _():
                there = checkpoints.at[fields[CHECKPOINT], head, halves[i]]
                plgpu.copy_gmem_to_smem(there, state.at[halves[i]], barriers[i])

        def gather(head, positions):
            """Keys and updates at the positions."""
            refs = (keys.at[:, head // group], keys_layout), (updates.at[:, head], updates_layout)
            vectors = [
                gather_vectors(ref, at, layout, interpret) for (ref, layout), at in zip(refs, positions, strict=True)
            ]
            return list(zip(vectors, positions, strict=True))

        def gather_chunk(place, head, c):
            return gather(head, load_positions(place, c * CHUNK, CHUNK))

        def load_pairs(columns):
            pairs = [x.at[pl.ds(CHUNK, width), columns].transpose((1, 0)) for x in planes]
            return [load(pair, TALL_RIGHT) for pair in pairs]

        def gather_next(place, head, c, chunks, found):
            """What the chunk after c holds, if there is one."""
            return lax.cond(c + 1 < chunks, lambda: gather_chunk(place, head, c + 1), lambda: found)

        def load_inputs(place, head, fields, positions, every):
            """All that an item needs of global memory besides its checkpoint: asked for one item ahead."""
            row = fields[ROW]
            new = [load(ref.at[row, t, head // group], key_vector) for ref in (k_ref, q_ref) for t in range(time)]
            found = [] if ahead else gather(head, positions[:2])
            values = [load(v_ref.at[row, t, head], value_vector) for t in range(time)]
            tokens = decay_ref.at[row, :, head], beta_ref.at[row, :, head], append.at[place]
            tokens = [load_words(ref, FOLDING + i * time, time) for i, ref in enumerate(tokens)]
            its_gates = [gather_numbers(gates.at[:, head], at, interpret) for at in every]
            return found, its_gates, new, values, tokens

        def write(start, x):
            """Writes vectors, or one, to `rows`, as halves."""
            length = x.shape[-1]
            for plane, half in enumerate(_halves(x.astype(jnp.float32)) if shape.planes == 2 else [x]):
                if x.ndim == 1:
                    rows[plane, start, pl.ds(0, length)] = half
                else:
                    rows[plane, pl.ds(start, CHUNK), pl.ds(0, length)] = half

        def stage(found):
            """Writes a chunk's keys and updates."""
            layouts, starts = (keys_layout, updates_layout), (0, first_update)
            for (x, positions), layout, start in zip(found, layouts, starts, strict=True):
                write(start, select_positive(x, positions, layout, interpret))

        def admit(every, loaded, fields):
            """Puts an item's inputs into shared memory, and with them the fields of the item after it."""
            found, its_gates, new, values, tokens = loaded
            if not ahead:
                stage(found)
            words = lax.bitcast_convert_type(fields, jnp.float32)
            for i, x in enumerate(tokens):
                x = lax.bitcast_convert_type(x, jnp.float32)
                words = jnp.where(word >= FOLDING + i * time, x, words)
            its_gates = [jnp.where(at > 0, gate, zero) for gate, at in zip(its_gates, every, strict=True)]
            its_gates[-1] = jnp.where(word >= 0, words, its_gates[-1])
            for i, x in enumerate(its_gates):
                sums_ref[pl.ds(i * THREADS, THREADS)] = x
            for i, x in enumerate(new):
                write(CHUNK + i, x)
            if ahead:
                wait_for_copies(stages, interpret)
            synchronize(interpret)
            return values, new[:time] if shape.planes == 2 else []

        def load_updates(source):
            refs, _, start = source
            return lambda i: _whole([load(x.at[start + i, pl.ds(0, value_dim)], value_vector) for x in refs])

        def fold(place, head, live, fold_to, holds, total):
            """state · decay + Σ weight · u ⊗ k, in shared memory and from there to the pool: chunk after chunk, or all
            that are in shared memory at once."""

            def add(c, sources, last):
                """Adds chunks in shared memory, from chunk c on: where each is, its first entry, its length."""
                begins = jnp.equal(c, 0)
                decay = jnp.where(begins, jnp.exp(total), np.float32(1))
                steps = [(*source, entry, i) for source, entry, n in sources for i in range(0, n, CHUNK)]
                weights = [
                    jnp.exp(load(sums_ref.at[pl.ds(entry + i, CHUNK)], TALL_LEFT.reduce(0))) for *_, entry, i in steps
                ]
                for i, half in enumerate(halves):

                    @pl.when(holds & begins)
                    def _(i=i):
                        plgpu.barrier_wait(barriers[i])

                    factors = []
                    for (refs, _, start, _, j), weight in zip(steps, weights, strict=True):
                        here = [x.at[pl.ds(start + j, CHUNK), half].transpose((1, 0)) for x in refs]
                        update = _whole([load(x, TALL_LEFT) for x in here])
                        factors.append(_halves(update * spread(weight, update.shape, 1, TALL_LEFT)))
                    for columns in parts:
                        there = state.at[half, columns]
                        new = _where(holds | ~begins, load(there, TALL).astype(jnp.float32) * decay)
                        for (refs, start, _, _, j), factor in zip(steps, factors, strict=True):
                            these = [load(x.at[pl.ds(start + j, CHUNK), columns], TALL_RIGHT) for x in refs]
                            new = multiply(new, factor, these)
                        there[...] = new.astype(shape.state)
                    plgpu.commit_smem()  # for the copy to the pool

                    @pl.when(last)
                    def _(half=half):
                        plgpu.copy_smem_to_gmem(state.at[half], checkpoints.at[fold_to, head, half])

            def fold_chunk(c, _):
                add(c, [(first, c * CHUNK, CHUNK)], c + 1 == chunks)

                @pl.when(c + 1 < chunks)
                def _():
                    # Not asked for ahead: what is on its way when the fold ends would be waited for by all others.
                    stage(gather_chunk(place, head, c + 1))
                    synchronize(interpret)

            def fold_later(j, _):
                copy(head, locate_later(place, j), later(0))
                end_copies(interpret)
                wait_for_copies(0, interpret)
                synchronize(interpret)
                add(j + 1, [(later(0), CHUNK + j * WIDE, WIDE)], j + 1 == chunks)

            # What folds has at least one entry: the checkpoint is waited for, and goes back.
            if not stages:
                chunks = pl.cdiv(live, CHUNK)
                lax.fori_loop(0, chunks, fold_chunk, None)
                return
            chunks = pl.cdiv(live - CHUNK, WIDE)  # later ones
            wait_for_copies(0, interpret)
            synchronize(interpret)
            staged = [(later(i), CHUNK + i * WIDE, WIDE) for i in range(stages)]
            add(0, [(first, 0, CHUNK), *staged], chunks <= stages)
            if shape.ring > CHUNK + stages * WIDE:
                lax.fori_loop(stages, chunks, fold_later, None)

        def serve(turn, carry):
            (_, place, head, fields), following, values, new_keys = carry
            row, length, live, _, has_checkpoint, fold_to = fields
            number = count_up(*counter) if draws else None
            next_fields = read_words(0, FOLDING, jnp.int32)
            new_gates, betas = (read_words(FOLDING + i * time, time, jnp.float32) for i in range(2))
            places = read_words(FOLDING + 2 * time, time, jnp.int32)
            if not shape.frugal:
                # What was drawn a turn ago: this is too early for a number drawn in this one.
                drawn = 3 * stride + lax.bitcast_convert_type(sums_ref[shape.columns], jnp.int32)
                then = locate(drawn if draws else deal(turn + 2))
            there, next_place, next_head, _, next_positions, every = following

            # What the next item needs is asked for early: it arrives while this one is served, if there are registers.
            def load_next():
                return load_inputs(next_place, next_head, next_fields, next_positions, every)

            has_checkpoint, folds = has_checkpoint > 0, fold_to >= 0
            for t, (to, gate) in enumerate(zip(places, new_gates, strict=True)):

                @pl.when(to >= 0)
                def _(t=t, to=to, gate=gate):
                    gates[to, head] = gate

                    @pl.when(lax.rem(head, group) == 0)
                    def _():
                        key = new_keys[t] if new_keys else load(rows.at[0, CHUNK + t, whole], key_vector)
                        keys[to, head // group] = key.astype(shape.entry)

            # Decay from each entry to the last committed token, summed from old to new. Entry n is in thread n mod
            # THREADS, block n // THREADS: it takes all gates of later blocks, and those after it of its own.
            def add_gates(block, c, carry):
                (*before, sum), total = carry
                for i in range(CHUNK):
                    gate = sums_ref[c * CHUNK + i]
                    before = [x + gate for x in before]
                    sum = sum + jnp.where(index < (c * CHUNK + i) - block * THREADS, gate, zero)
                    total = total + gate
                return [*before, sum], total

            index, sums, total = count((THREADS,), 0, EVERY), [], zero
            for block in range(shape.columns // THREADS):
                start, end = (jnp.minimum(pl.cdiv(live, CHUNK), (block + i) * THREADS // CHUNK) for i in range(2))
                begun = [*sums, zeros((THREADS,), EVERY)], total
                if block == 0:
                    start, begun = 1, add_gates(0, 0, begun)
                sums, total = lax.fori_loop(start, end, functools.partial(add_gates, block), begun)
            synchronize(interpret)  # all have read the gates
            for i, x in enumerate(sums):
                sums_ref[pl.ds(THREADS * i, THREADS)] = x
            synchronize(interpret)

            @pl.when(folds)
            def _():
                fold(place, head, live, fold_to, has_checkpoint, total)

            total = jnp.where(folds, zero, total)
            if shape.frugal:  # not before the fold, which would wait for it
                loaded = load_next()

            # What the entries of a chunk add to every output; of the first, the tokens' products among each other too.
            def add_entries(entry, source, length, added, number=None):
                refs, start, _ = source
                tokens = CHUNK if length == CHUNK else 0
                n = length + tokens
                right = [load(x.at[pl.ds(start, n), whole].transpose((1, 0)), RIGHT) for x in refs]
                columns = pl.ds(span - CHUNK if tokens else 0, n)
                # Behind the entries of a chunk of CHUNK lie the new keys, which count from 0.
                token = count((n,), 0, PRODUCT.reduce(0)) - length
                since = load(sums_ref.at[pl.ds(entry, n)], PRODUCT.reduce(0))
                since = jnp.where(token < 0, since, zero)
                decays = []
                for t, gate in enumerate(new_gates):
                    since = since + jnp.where(token < t, gate, zero)
                    decays.append(jnp.exp(since))
                for start in tiles:
                    left = [load(x.at[pl.ds(CHUNK + start, CHUNK), whole], LEFT) for x in planes]
                    matches = multiply(zeros((CHUNK, n), PRODUCT), left, right)
                    these = range(start, min(start + CHUNK, 2 * time))
                    if shape.frugal:
                        for i in these:
                            products[i, columns] = pick(matches, i - start, 0, PRODUCT) * decays[i % time]
                        continue
                    decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
                    for i in these:
                        decay = jnp.where(line == i - start, spread(decays[i % time], decay.shape, 1, PRODUCT), decay)
                    products[pl.ds(start, CHUNK), columns] = matches * decay
                if number is not None:
                    publish(number, sums_ref.at[shape.columns])
                synchronize(interpret)
                load_update = load_updates(source)
                for i in range(length):
                    update = load_update(i)
                    added = [x + products[j, columns.start + i] * update for j, x in enumerate(added)]
                return added

            def add_chunk(c, carry):
                added, found = carry
                next_found = gather_next(place, head, c, chunks, found)
                synchronize(interpret)  # all are done with the chunk before
                stage(found)
                synchronize(interpret)
                return add_entries(c * CHUNK, first, CHUNK, added), next_found

            loops = shape.ring > CHUNK + WIDE  # an item may have more later chunks than one

            def add_later(j, added):
                positions = locate_later(place, jnp.minimum(j + stages, chunks - 1)) if loops else None
                wait_for_copies(stages - 1, interpret)
                synchronize(interpret)
                added = add_entries(CHUNK + j * WIDE, later(lax.rem(j, stages)), WIDE, added)
                if loops:
                    synchronize(interpret)  # all are done with it

                    @pl.when(j + stages < chunks)
                    def _():
                        copy(head, positions, later(lax.rem(j, stages)))

                    end_copies(interpret)
                return added

            added = add_entries(0, first, CHUNK, [zeros((value_dim,), value_vector)] * (2 * time), number=number)
            if stages:
                chunks = jnp.where(folds, 0, pl.cdiv(live - CHUNK, WIDE))
                if loops:
                    added = lax.fori_loop(0, chunks, add_later, added)
                else:
                    added = lax.cond(chunks > 0, lambda: add_later(0, added), lambda: added)
            elif shape.ring > CHUNK:
                chunks = jnp.where(folds, 1, pl.cdiv(live, CHUNK))

                def add_others():
                    return lax.fori_loop(1, chunks, add_chunk, (added, gather_chunk(place, head, 1)))[0]

                added = lax.cond(chunks > 1, add_others, lambda: added)
            added = [_where(~folds, x) for x in added]
            if shape.frugal:
                drawn = 2 * stride + lax.bitcast_convert_type(sums_ref[shape.columns], jnp.int32)
                then = locate(drawn if draws else deal(turn + 2))
            else:
                loaded = load_next()

            if stages:
                synchronize(interpret)  # all are done with the entries
                copy_ahead(there, next_head, next_fields[LIVE], next_fields[FOLD_TO] >= 0, next_positions)
            pairs = {columns.start: load_pairs(columns) for columns in parts} if width <= CHUNK else None
            holds = has_checkpoint | folds
            for i, half in enumerate(halves):

                @pl.when(has_checkpoint & ~folds)
                def _(i=i):
                    plgpu.barrier_wait(barriers[i])

                def multiply_state(half=half):
                    tile = zeros((TILE, width), TALL)
                    for columns in parts:
                        these = load(state.at[half, columns], TALL_LEFT)
                        tile = multiply(tile, _halves(these), pairs[columns.start] if pairs else load_pairs(columns))
                    if shape.frugal:
                        for j in range(2 * time):
                            reads[j, half] = pick(tile, j, 1, TALL)
                    else:
                        reads[half, pl.ds(0, width)] = tile

                if stages:  # a slot may well be without a checkpoint where a ring is longer than a chunk
                    pl.when(holds)(multiply_state)
                else:
                    multiply_state()

                @pl.when(folds)
                def _(i=i):
                    plgpu.wait_smem_to_gmem(len(halves) - 1 - i, wait_read_only=True)

                synchronize(interpret)

                @pl.when(there)
                def _(i=i):
                    fetch(i, next_head, next_fields)

            def read(i):
                return _where(holds, load(reads.at[i] if shape.frugal else reads.at[:, i], value_vector))

            totals = []
            for gate in new_gates:
                total = total + gate
                totals.append(jnp.exp(total))
            new_updates = []
            for t, (beta, to) in enumerate(zip(betas, places, strict=True)):
                recalled, out = added[t], added[time + t]
                for s, update in enumerate(new_updates):
                    recalled = recalled + products[t, span + s] * update
                recalled = recalled + totals[t] * read(t)
                stored = (beta * (values[t].astype(jnp.float32) - recalled)).astype(shape.entry)
                update = stored.astype(jnp.float32)
                if shape.planes == 2:  # as a later launch finds it
                    update = _whole(_halves(round_now(update, value_vector, interpret)))
                new_updates.append(update)
                for s, update in enumerate(new_updates):
                    out = out + products[time + t, span + s] * update
                out = out + totals[t] * read(time + t)
                out_ref[row, t, head] = _where(t < length, out).astype(shape.out)

                @pl.when(to >= 0)
                def _(to=to, stored=stored):
                    updates[to, head] = stored

            synchronize(interpret)  # all have read what the next item overwrites
            here = there, next_place, next_head, next_fields
            return here, then, *admit(every, loaded, then[3])

        start, following = (locate(turn * stride + lane if draws else deal(turn)) for turn in range(2))

        @pl.when(start[0])
        def _():
            there, place, head, _, positions, every = start
            fields = [numbers[place, i] for i in range(FOLDING)]
            loaded = load_inputs(place, head, fields, positions, every)
            for i in range(len(halves)):
                fetch(i, head, fields)
            if draws and not shape.frugal:  # as if the item of the third turn had been drawn
                sums_ref[shape.columns] = lax.bitcast_convert_type(lane - stride, jnp.float32)
            copy_ahead(True, head, fields[LIVE], fields[FOLD_TO] >= 0, positions)
            here = there, place, head, fields
            carry = here, following, *admit(every, loaded, following[3])
            lax.while_loop(lambda carry: carry[1][0][0], lambda carry: (carry[0] + 1, serve(*carry)), (0, carry))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_heads,
        out_type=jax.ShapeDtypeStruct((shape.rows, time, heads, value_dim), shape.out),
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=slots,
        thread_name="warpgroup",
        scratch_types=[shape.scratch(slots, shape.stages)],
        # No sum goes across warps: no scratch memory for it.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _halves(x: Array) -> list[Array]:
    """bfloat16 arrays that sum to x: itself, or two halves with 2^-16 left out."""
    if x.dtype == jnp.bfloat16:
        return [x]
    # Cut off by its bits: a conversion there and back takes the slow units.
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def _whole(halves: list[Array]) -> Array:
    """What `_halves` cut, float32."""
    parts = [x.astype(jnp.float32) for x in halves]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros: selected, because what x was read from may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
