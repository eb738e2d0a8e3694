"""`extend` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A multiprocessor runs one block of up to three warpgroups, each of which serves one head of a row after the other, on
its own: while one computes, the checkpoints of the others stream in.

A warpgroup multiplies the keys of the live entries, sixteen at a time, with the T new keys and queries and sums the
entries' part of every output, a thread a row of the state [value_dim, key_dim]; asks for the next item's entries;
multiplies the checkpoint once with all new keys and queries, and lets the next one stream in; substitutes forward over
the T tokens and appends their entries. For a row that folds it first adds the entries to the checkpoint in shared
memory, which goes back to the pool meanwhile.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth.

Precision: operands in float32 enter products on the tensor cores as two bfloat16 halves (2^-16 relative); all sums are
float32. No sum's order depends on whether an entry is committed or pending, which is why T tokens at once and one by
one store the same bits.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from jaxbuf.pallas.lanes import COMPILER, load

type Array = jax.Array

THREADS = 128  # of a warpgroup
TILE = 64  # rows of the state that a product takes
CHUNK = 16  # entries, or pairs of a new key and a new query, that a product takes
PROCESSORS = 132  # of an H100 or H200
MEMORY = 227 * 1024  # bytes of shared memory that a block may have
ALIGNMENT = 1024  # of each array in it
FOLD_COST = 2  # of an item that folds, in items that do not
ROW, LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO, FOLDING, FIELDS = range(8)  # of `Integers.numbers`

LEFT, RIGHT, PRODUCT = (
    layout(jnp.bfloat16, m_warps=1) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
TALL_LEFT, TALL_RIGHT, TALL = (
    layout(jnp.bfloat16, m_warps=4) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# A row or column of the state, by its length: one number a thread, or two in four threads each.
VECTORS = {128: plgpu.Layout.TCGEN05_TMEM_NATIVE(4).reduce(1), 64: TALL.reduce(1)}
EVERY = VECTORS[THREADS]


def rows_layout(length: int, dtype) -> plgpu.Layout:
    """Of vectors [n, length]: a thread holds sixteen bytes of one, or of several."""
    part = 16 // np.dtype(dtype).itemsize
    vectors = 32 * part // length  # that a warp holds
    if vectors == 1:
        tiling, warps, lanes = plgpu.Tiling(((4, length), (part,))), (-3,), (-2,)
    else:
        tiling, warps, lanes = plgpu.Tiling(((4 * vectors, length), (vectors, part))), (-4,), (-2, -3)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=lanes, vector_dim=-1)


class Integers(NamedTuple):
    """What the kernel needs to know of each row, those that fold before the others; the same for all layers of a model.

    Attributes:
      numbers: int32 [rows, FIELDS]: which row it is, its tokens, live entries, the checkpoint read, whether there is
        one, the one a fold writes or -1; and how many rows fold.
      entries: int32 [rows, ring], the flat positions of the live entries in logical order; 0 for the others.
      append: int32 [rows, T], the flat position of each new entry; -1 where nothing goes.
    """

    numbers: Array
    entries: Array
    append: Array


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of one kernel.

    Attributes:
      rows, time: Of the launch.
      heads, key_heads, key_dim, value_dim: Of the recurrence.
      ring: Entries of a slot's ring.
      state, entry, pair, out: Dtypes of checkpoints, entries, new keys and queries, and outputs.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    ring: int
    state: np.dtype
    entry: np.dtype
    pair: np.dtype
    out: np.dtype

    @property
    def tiles(self) -> int:
        """Products of CHUNK rows for all pairs: keys and queries in one where they fit."""
        return -(-2 * self.time // CHUNK)

    @property
    def width(self) -> int:
        """Columns of the product of the state with all pairs, rounded up to 8."""
        return -(-2 * self.time // 8) * 8

    @property
    def pairs(self) -> int:
        """Rows of shared memory for new keys and queries."""
        return 2 * self.time if self.frugal else CHUNK * self.tiles

    @property
    def columns(self) -> int:
        """Entries of a ring, rounded up to one for each thread."""
        return -(-self.ring // THREADS) * THREADS

    @property
    def planes(self) -> int:
        """bfloat16 arrays that an entry, key or query is split into."""
        return 1 if self.pair == jnp.bfloat16 else 2

    @property
    def frugal(self) -> bool:
        """Whether products are kept without the rows and columns that no token needs: three slots then fit."""
        return self.time == 1

    @property
    def items(self) -> int:
        return self.rows * self.heads

    @property
    def slots(self) -> int:
        """Warpgroups of a block: as many as there is work and shared memory for."""
        wanted = min(3, pl.cdiv(self.items, PROCESSORS))
        return next((slots for slots in range(wanted, 0, -1) if self.bytes(slots) <= MEMORY), 0)

    def scratch(self, slots: int) -> dict:
        """Shared memory for `slots` warpgroups."""
        tiling = plgpu.TilingTransform((8, 128 // self.state.itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

        longest = max(self.key_dim, self.value_dim)

        def memory(*dims, dtype=jnp.float32, transforms=()):
            return plgpu.SMEM((slots, *dims), dtype, transforms=transforms)

        return {
            "state": memory(self.value_dim, self.key_dim, dtype=self.state, transforms=(tiling, swizzle)),
            # A chunk of keys, the pairs, and the chunk's updates. Rows are a little longer than they need be: their
            # columns then lie in different banks.
            "rows": memory(self.planes, 2 * CHUNK + self.pairs, longest + 8, dtype=jnp.bfloat16),
            # Of each entry the gate, then the decay since.
            "sums": memory(self.columns + CHUNK),
            "products": memory(2 * self.time if self.frugal else CHUNK * self.tiles, 2 * CHUNK),
            "reads": memory(*((2 * self.time, self.value_dim) if self.frugal else (self.value_dim, self.width + 2))),
            "barriers": plgpu.Barrier(num_barriers=slots),
        }

    def bytes(self, slots: int) -> int:
        """Shared memory for `slots` warpgroups."""
        arrays = [x for x in self.scratch(slots).values() if not isinstance(x, plgpu.Barrier)]
        sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays]
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT


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
    padding = shape.columns - shape.ring
    positions = jnp.pad(integers.entries, ((0, 0), (0, padding)))
    refs = [jax.new_ref(x) for x in (checkpoints, *flat)]
    launch = integers._replace(entries=positions)
    out = _kernel(shape, interpret)(*launch, q, k, v, log_decay, beta, *refs)
    checkpoints, *flat = (jax.freeze(ref) for ref in refs)
    return out, (checkpoints, *(x.reshape(old.shape) for x, old in zip(flat, entries, strict=True)))


def _kernel(shape: Shape, interpret: bool):
    time, heads, width, items = shape.time, shape.heads, shape.width, shape.items
    key_dim, value_dim = shape.key_dim, shape.value_dim
    key_vector, value_vector = VECTORS[key_dim], VECTORS[value_dim]
    keys_layout, updates_layout = rows_layout(key_dim, shape.entry), rows_layout(value_dim, shape.entry)
    group, slots = heads // shape.key_heads, shape.slots
    grid = min(PROCESSORS, pl.cdiv(items, slots))
    stride = grid * slots
    tops = range(0, value_dim, TILE)
    part = 128 // shape.state.itemsize  # columns of the state that a product takes: a tile of its memory
    parts = [pl.ds(start, part) for start in range(0, key_dim, part)]
    whole, chunk, both = pl.ds(0, key_dim), pl.ds(0, CHUNK), pl.ds(0, 2 * CHUNK)
    first_update = CHUNK + shape.pairs  # of `rows`
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
        checkpoints, keys, updates, gates, out_ref, scratch,
    ):  # fmt: skip
        slot = lax.axis_index("warpgroup")
        lane = slot * grid + lax.axis_index("block")
        state, rows, sums_ref, products, reads, barrier = (
            scratch[name].at[slot] for name in ("state", "rows", "sums", "products", "reads", "barriers")
        )
        # The items of rows that fold are dealt to the lanes first, one each and round after round; then the others, as
        # if each of the first had taken FOLD_COST rounds.
        folding = numbers[0, FOLDING] * heads
        rounds, late = folding // stride, lax.rem(folding, stride)
        own = rounds + (lane < late).astype(jnp.int32)  # items of this lane that fold
        spare = jnp.where(lane < late, 0, FOLD_COST)  # rounds in which it is among the few that deal with others

        def item_of(turn):
            """The item that this lane serves in a turn; past `items` if there is none."""
            other = turn - own
            early = other * (stride - late) + lane - late
            rest = FOLD_COST * (stride - late) + (other - spare) * stride + lane
            return jnp.where(other < 0, turn * stride + lane, folding + jnp.where(other < spare, early, rest))

        def locate(turn):
            """Place and head of an item, what the row's cursor says, and where its entries lie."""
            item = item_of(turn)
            place = jnp.minimum(item, items - 1) // heads
            here = entries.at[place, chunk]
            positions = [load(here, layout.reduce(1)) for layout in (keys_layout, updates_layout)]
            every = [load(entries.at[place, pl.ds(i, THREADS)], EVERY) for i in range(0, shape.columns, THREADS)]
            fields = [numbers[place, i] for i in range(FOLDING)]
            return item < items, place, lax.rem(item, heads), fields, positions, every

        def fetch(head, fields):
            @pl.when(fields[HAS_CHECKPOINT] > 0)
            def _():
                plgpu.copy_gmem_to_smem(checkpoints.at[fields[CHECKPOINT], head], state, barrier)

        def gather(head, positions):
            """Keys and updates at the positions."""
            refs = (keys.at[:, head // group], keys_layout), (updates.at[:, head], updates_layout)
            vectors = [_gather(ref, at, layout, interpret) for (ref, layout), at in zip(refs, positions, strict=True)]
            return list(zip(vectors, positions, strict=True))

        def gather_chunk(place, head, c):
            here = entries.at[place, pl.ds(c * CHUNK, CHUNK)]
            return gather(head, [load(here, layout.reduce(1)) for layout in (keys_layout, updates_layout)])

        def gather_next(place, head, c, chunks, found):
            """What the chunk after c holds, if there is one."""
            return lax.cond(c + 1 < chunks, lambda: gather_chunk(place, head, c + 1), lambda: found)

        def load_inputs(place, head, fields, positions, every):
            """All that an item needs of global memory besides its checkpoint: asked for one item ahead."""
            row = fields[ROW]
            new = [load(ref.at[row, t, head // group], key_vector) for ref in (k_ref, q_ref) for t in range(time)]
            found = gather(head, positions)
            values = [load(v_ref.at[row, t, head], value_vector) for t in range(time)]
            tokens = [(decay_ref[row, t, head], beta_ref[row, t, head], append[place, t]) for t in range(time)]
            its_gates = [_gather_scalars(gates.at[:, head], at, interpret) for at in every]
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
                write(start, _living(x, positions, layout, interpret))

        def admit(item, loaded):
            """An item's inputs, into shared memory and to their places among the entries."""
            there, _, head, _, _, every = item
            found, its_gates, new, values, tokens = loaded
            stage(found)
            for i, (gate, positions) in enumerate(zip(its_gates, every, strict=True)):
                sums_ref[pl.ds(i * THREADS, THREADS)] = jnp.where(positions > 0, gate, zero)
            for i, x in enumerate(new):
                write(CHUNK + i, x)
            for (gate, _, to), key in zip(tokens, new[:time], strict=True):

                @pl.when(there & (to >= 0))
                def _(to=to, gate=gate, key=key):
                    gates[to, head] = gate

                    @pl.when(lax.rem(head, group) == 0)
                    def _():
                        keys[to, head // group] = key.astype(shape.entry)

            plgpu.commit_smem()
            return values, tokens

        def load_update(i):
            here = [rows.at[plane, first_update + i, pl.ds(0, value_dim)] for plane in range(shape.planes)]
            return _whole([load(x, value_vector) for x in here])

        def fold(place, head, live, holds, total):
            """state · decay + Σ weight · u ⊗ k, in shared memory, a chunk of entries at a time."""

            def add(c, found):
                ahead = gather_next(place, head, c, chunks, found)
                weight = jnp.exp(load(sums_ref.at[pl.ds(c * CHUNK, CHUNK)], TALL_LEFT.reduce(0)))
                decay = jnp.where(c == 0, jnp.exp(total), np.float32(1))
                for top in tops:
                    here = [rows.at[i, pl.ds(first_update, CHUNK), pl.ds(top, TILE)] for i in range(shape.planes)]
                    update = _whole([load(x.transpose((1, 0)), TALL_LEFT) for x in here])
                    update = _halves(update * spread(weight, update.shape, 1, TALL_LEFT))
                    for columns in parts:
                        these = [load(rows.at[i, chunk, columns], TALL_RIGHT) for i in range(shape.planes)]
                        there = state.at[pl.ds(top, TILE), columns]
                        old = _where(holds | (c > 0), load(there, TALL).astype(jnp.float32) * decay)
                        there[...] = multiply(old, update, these).astype(shape.state)
                plgpu.commit_smem()

                @pl.when(c + 1 < chunks)
                def _():
                    stage(ahead)
                    plgpu.commit_smem()

                return ahead

            chunks, nothing = pl.cdiv(live, CHUNK), []
            for length, layout in (key_dim, keys_layout), (value_dim, updates_layout):
                vectors = plgpu.layout_cast(jnp.zeros((CHUNK, length), shape.entry), layout)
                nothing.append((vectors, plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.int32), layout.reduce(1))))
            lax.fori_loop(0, chunks, add, nothing)

        def serve(turn, carry):
            here, following, values, tokens = carry
            _, place, head, (row, length, live, _, has_checkpoint, fold_to), _, _ = here
            then = locate(turn + 2)  # early, or its arrival would be waited for at the end of the turn
            has_checkpoint, folds = has_checkpoint > 0, fold_to >= 0
            new_gates = [gate for gate, _, _ in tokens]

            # Decay from each entry to the last committed token, summed from old to new.
            def add_gates(c, carry):
                sums, total = carry
                for i in range(CHUNK):
                    gate = sums_ref[c * CHUNK + i]
                    sums = [x + jnp.where(n < c * CHUNK + i, gate, zero) for x, n in zip(sums, index, strict=True)]
                    total = total + gate
                return sums, total

            index = [count((THREADS,), 0, EVERY) + start for start in range(0, shape.columns, THREADS)]
            sums = add_gates(0, ([zeros((THREADS,), EVERY)] * len(index), zero))
            sums, total = lax.fori_loop(1, pl.cdiv(live, CHUNK), add_gates, sums)
            plgpu.commit_smem()  # all have read the gates
            for i, x in enumerate(sums):
                sums_ref[pl.ds(THREADS * i, THREADS)] = x
            plgpu.commit_smem()

            @pl.when(has_checkpoint & folds)
            def _():
                plgpu.barrier_wait(barrier)

            @pl.when(folds)
            def _():
                fold(place, head, live, has_checkpoint, total)
                plgpu.copy_smem_to_gmem(state, checkpoints.at[fold_to, head])

            total = jnp.where(folds, zero, total)

            # What the entries of a chunk add to every output, and the products of the tokens among each other.
            def add_entries(c, added):
                right = [load(rows.at[i, both, whole].transpose((1, 0)), RIGHT) for i in range(shape.planes)]
                token = count((2 * CHUNK,), 0, PRODUCT.reduce(0)) - CHUNK
                # The last CHUNK of the sums that are read belong to no entry of the chunk, and count from 0.
                since = load(sums_ref.at[pl.ds(c * CHUNK, 2 * CHUNK)], PRODUCT.reduce(0))
                since = jnp.where(token < 0, since, zero)
                decays = []
                for t, gate in enumerate(new_gates):
                    since = since + jnp.where(token < t, gate, zero)
                    decays.append(jnp.exp(since))
                for start in range(0, 2 * time, CHUNK):
                    left = [load(rows.at[i, pl.ds(CHUNK + start, CHUNK), whole], LEFT) for i in range(shape.planes)]
                    matches = multiply(zeros((CHUNK, 2 * CHUNK), PRODUCT), left, right)
                    these = range(start, min(start + CHUNK, 2 * time))
                    if shape.frugal:
                        for i in these:
                            products[i] = pick(matches, i - start, 0, PRODUCT) * decays[i % time]
                        continue
                    decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
                    for i in these:
                        decay = jnp.where(line == i - start, spread(decays[i % time], decay.shape, 1, PRODUCT), decay)
                    products[pl.ds(start, CHUNK), both] = matches * decay
                plgpu.commit_smem()
                for i in range(CHUNK):
                    update = load_update(i)
                    added = [x + products[j, i] * update for j, x in enumerate(added)]
                return added

            def add_more_entries(c, carry):
                added, found = carry
                ahead = gather_next(place, head, c, chunks, found)
                plgpu.commit_smem()  # all are done with the chunk before
                stage(found)
                plgpu.commit_smem()
                return add_entries(c, added), ahead

            chunks = jnp.where(folds, 1, pl.cdiv(live, CHUNK))
            added = add_entries(0, [zeros((value_dim,), value_vector)] * (2 * time))

            if shape.ring > CHUNK:

                def add_others():
                    carry = added, gather_chunk(place, head, 1)
                    return lax.fori_loop(1, chunks, add_more_entries, carry)[0]

                added = lax.cond(chunks > 1, add_others, lambda: added)
            added = [_where(~folds, x) for x in added]
            there, next_place, next_head, next_fields, positions, every = following
            loaded = load_inputs(next_place, next_head, next_fields, positions, every)

            @pl.when(has_checkpoint & ~folds)
            def _():
                plgpu.barrier_wait(barrier)

            for top in tops:
                tile = zeros((TILE, width), TALL)
                for columns in parts:
                    pairs = [rows.at[i, pl.ds(CHUNK, width), columns].transpose((1, 0)) for i in range(shape.planes)]
                    these = load(state.at[pl.ds(top, TILE), columns], TALL_LEFT)
                    tile = multiply(tile, _halves(these), [load(pair, TALL_RIGHT) for pair in pairs])
                if shape.frugal:
                    for i in range(2 * time):
                        reads[i, pl.ds(top, TILE)] = pick(tile, i, 1, TALL)
                else:
                    reads[pl.ds(top, TILE), pl.ds(0, width)] = tile

            @pl.when(folds)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            plgpu.commit_smem()

            @pl.when(there)
            def _():
                fetch(next_head, next_fields)

            def read(i):
                return _where(holds, load(reads.at[i] if shape.frugal else reads.at[:, i], value_vector))

            totals = []
            for gate in new_gates:
                total = total + gate
                totals.append(jnp.exp(total))
            holds, new_updates = has_checkpoint | folds, []
            for t, (_, beta, to) in enumerate(tokens):
                recalled, out = added[t], added[time + t]
                for s, update in enumerate(new_updates):
                    recalled = recalled + products[t, CHUNK + s] * update
                recalled = recalled + totals[t] * read(t)
                stored = (beta * (values[t].astype(jnp.float32) - recalled)).astype(shape.entry)
                # As a later launch finds it.
                new_updates.append(_whole(_halves(stored.astype(jnp.float32)) if shape.planes == 2 else [stored]))
                for s, update in enumerate(new_updates):
                    out = out + products[time + t, CHUNK + s] * update
                out = out + totals[t] * read(time + t)
                out_ref[row, t, head] = _where(t < length, out).astype(shape.out)

                @pl.when(to >= 0)
                def _(to=to, stored=stored):
                    updates[to, head] = stored

            plgpu.commit_smem()  # all have read what the next item overwrites
            return following, then, *admit(following, loaded)

        start, following = locate(0), locate(1)

        @pl.when(start[0])
        def _():
            _, place, head, fields, positions, every = start
            loaded = load_inputs(place, head, fields, positions, every)
            fetch(head, fields)
            carry = start, following, *admit(start, loaded)
            lax.while_loop(lambda carry: carry[1][0][0], lambda carry: (carry[0] + 1, serve(*carry)), (0, carry))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_heads,
        out_type=jax.ShapeDtypeStruct((shape.rows, time, heads, value_dim), shape.out),
        grid=(grid,),
        grid_names=("block",),
        num_threads=slots,
        thread_name="warpgroup",
        scratch_types=[shape.scratch(slots)],
        # No sum goes across warps: no scratch memory for it.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _gather(ref, positions: Array, layout, interpret: bool) -> Array:
    """Vectors [n, length] of a reference [m, length], at positions int32 [n]: each thread asks for what it holds."""
    if interpret:
        return jnp.stack([ref[positions[i]] for i in range(positions.shape[0])])
    dims = positions.shape[0], ref.shape[-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(dims, ref.dtype, layout=layout),
    )
    def load_vectors(_, ref, positions):
        tiled = layout.to_mgpu()
        kind = ir.VectorType.get((tiled.vector_length,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(tiled.registers_shape(dims), object)
        places, each = tiled.thread_idxs(dims), positions.registers.flat
        for (i, _), (_, column), at in zip(np.ndenumerate(registers), places, each, strict=True):
            registers[i] = vector.load(kind, ref, [_index(at), column])
        return mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None)

    return load_vectors(ref, positions)


def _gather_scalars(ref, positions: Array, interpret: bool) -> Array:
    """The numbers [n] of a reference [m] at positions int32 [n]."""
    if interpret:
        return jnp.stack([ref[positions[i]] for i in range(positions.shape[0])])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), EVERY),
        return_type=plgpu.ShapeDtypeStruct(positions.shape, ref.dtype, layout=EVERY),
    )
    def load_scalars(_, ref, positions):
        kind = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(positions.registers.shape, object)
        for i, at in np.ndenumerate(positions.registers):
            registers[i] = vector.load(kind, ref, [_index(at)])
        return mgpu.FragmentedArray(_registers=registers, _layout=positions.layout, _is_signed=None)

    return load_scalars(ref, positions)


def _living(x: Array, positions: Array, layout, interpret: bool) -> Array:
    """x where the positions are above 0, else zeros: what is there may be another owner's NaN."""
    if interpret:
        return jnp.where(positions[:, None] > 0, x, jnp.zeros_like(x))

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(1)), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
    )
    def select(_, x, positions):
        registers = np.empty_like(x.registers)
        for (i, vectors), at in zip(np.ndenumerate(x.registers), positions.registers.flat, strict=True):
            zeros = arith.constant(vectors.type, ir.DenseElementsAttr.get_splat(vectors.type, _zero(vectors.type)))
            lives = arith.cmpi(arith.CmpIPredicate.ne, _index(at), arith.constant(ir.IndexType.get(), 0))
            registers[i] = arith.select(lives, vectors, zeros)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return select(x, positions)


def _zero(kind):
    return ir.FloatAttr.get(ir.VectorType(kind).element_type, 0.0)


def _index(register):
    """A register of one int32, as an index."""
    return arith.index_cast(ir.IndexType.get(), vector.extract(register, [], [0]))


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
