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
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.lanes import COMPILER, load

type Array = jax.Array

THREADS = 128  # of a warpgroup
TILE = 64  # rows of the state that a product takes
CHUNK = 16  # entries, or pairs of a new key and a new query, that a product takes
PROCESSORS = 132  # of an H100 or H200
MEMORY = 227 * 1024  # bytes of shared memory that a block may have
ALIGNMENT = 1024  # of each array in it
LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO, FIELDS = range(6)  # of `Integers.numbers`

LEFT, RIGHT, PRODUCT = (
    layout(jnp.bfloat16, m_warps=1) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
TALL_LEFT, TALL_RIGHT, TALL = (
    layout(jnp.bfloat16, m_warps=4) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)
# A row or column of the state, by its length: one number a thread, or two in four threads each.
VECTORS = {128: plgpu.Layout.TCGEN05_TMEM_NATIVE(4).reduce(1), 64: TALL.reduce(1)}


class Integers(NamedTuple):
    """What the kernel needs to know of each row; the same for all layers of a model.

    Attributes:
      numbers: int32 [rows, FIELDS]: tokens, live entries, the checkpoint read, whether there is one, the one a fold
        writes or -1.
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
    def columns(self) -> int:
        """Entries of a ring, rounded up to whole chunks."""
        return -(-self.ring // CHUNK) * CHUNK

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
            # A chunk of keys, then the pairs, or of a fold the updates. Rows are a little longer than they need be:
            # their columns then lie in different banks.
            "rows": memory(self.planes, CHUNK * (1 + self.tiles), longest + 8, dtype=jnp.bfloat16),
            "sums": memory(-(-self.columns // THREADS) * THREADS + CHUNK),
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
    key_vector, value_vector, every = VECTORS[key_dim], VECTORS[value_dim], VECTORS[THREADS]
    group, slots = heads // shape.key_heads, shape.slots
    grid = min(PROCESSORS, pl.cdiv(items, slots))
    stride = grid * slots
    tops = range(0, value_dim, TILE)
    part = 128 // shape.state.itemsize  # columns of the state that a product takes: a tile of its memory
    parts = [pl.ds(start, part) for start in range(0, key_dim, part)]
    whole, chunk, both = pl.ds(0, key_dim), pl.ds(0, CHUNK), pl.ds(0, 2 * CHUNK)
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
        first = slot * grid + lax.axis_index("block")
        state, rows, sums_ref, products, reads, barrier = (
            scratch[name].at[slot] for name in ("state", "rows", "sums", "products", "reads", "barriers")
        )

        def locate(item):
            """Row and head of an item, what the row's cursor says, and where its first entries lie."""
            row = jnp.minimum(item, items - 1) // heads
            positions = [entries[row, i] for i in range(CHUNK)]
            return row, lax.rem(item, heads), [numbers[row, i] for i in range(FIELDS)], positions

        def fetch(head, fields):
            @pl.when(fields[HAS_CHECKPOINT] > 0)
            def _():
                plgpu.copy_gmem_to_smem(checkpoints.at[fields[CHECKPOINT], head], state, barrier)

        def gather(head, positions):
            """Keys and updates at the positions. What is dead is selected away where they are used, or the selection
            would wait for them here."""
            refs = [(keys.at[i, head // group], updates.at[i, head]) for i in positions]
            return [(load(key, key_vector), load(update, value_vector)) for key, update in refs]

        def gather_next(row, head, c, chunks, found):
            """What the chunk after c holds, if there is one."""

            def gathered():
                return gather(head, [entries[row, (c + 1) * CHUNK + i] for i in range(CHUNK)])

            return lax.cond(c + 1 < chunks, gathered, lambda: found)

        def load_inputs(row, head, positions):
            """All that an item needs of global memory besides its checkpoint: asked for one item ahead."""
            new = [load(ref.at[row, t, head // group], key_vector) for ref in (k_ref, q_ref) for t in range(time)]
            values = [load(v_ref.at[row, t, head], value_vector) for t in range(time)]
            tokens = [(decay_ref[row, t, head], beta_ref[row, t, head], append[row, t]) for t in range(time)]
            return gather(head, positions), [gates[i, head] for i in positions], new, values, tokens

        def stage(start, vectors):
            """Writes vectors into `rows`, as halves."""
            for i, x in enumerate(vectors):
                for plane, half in enumerate(_halves(x.astype(jnp.float32)) if shape.planes == 2 else [x]):
                    rows[plane, start + i, pl.ds(0, x.shape[0])] = half

        def living(c, live, vectors):
            return [_where(c * CHUNK + i < live, x) for i, x in enumerate(vectors)]

        def fold(row, head, live, holds, total, found):
            """state · decay + Σ weight · u ⊗ k, in shared memory, a chunk of entries at a time."""

            def add(c, found):
                stage(0, living(c, live, [key for key, _ in found]))
                stage(CHUNK, living(c, live, [update for _, update in found]))
                plgpu.commit_smem()
                found = gather_next(row, head, c, chunks, found)
                weight = jnp.exp(load(sums_ref.at[pl.ds(c * CHUNK, CHUNK)], TALL_LEFT.reduce(0)))
                decay = jnp.where(c == 0, jnp.exp(total), np.float32(1))
                for top in tops:
                    update = zeros((TILE, CHUNK), TALL_LEFT)
                    for i in range(1 if shape.entry == jnp.bfloat16 else 2):
                        these = rows.at[i, pl.ds(CHUNK, CHUNK), pl.ds(top, TILE)].transpose((1, 0))
                        update = update + load(these, TALL_LEFT).astype(jnp.float32)
                    update = _halves(update * spread(weight, update.shape, 1, TALL_LEFT))
                    for columns in parts:
                        these = [load(rows.at[i, chunk, columns], TALL_RIGHT) for i in range(shape.planes)]
                        there = state.at[pl.ds(top, TILE), columns]
                        old = _where(holds | (c > 0), load(there, TALL).astype(jnp.float32) * decay)
                        there[...] = multiply(old, update, these).astype(shape.state)
                plgpu.commit_smem()
                return found

            chunks = pl.cdiv(live, CHUNK)
            lax.fori_loop(0, chunks, add, found)

        def serve(turn, carry):
            here, following, (found, old_gates, new, values, tokens) = carry
            row, head, (length, live, _, has_checkpoint, fold_to), _ = here
            item = first + turn * stride
            # Two items ahead, and early, or its arrival would be waited for at the end of the turn.
            then = locate(item + 2 * stride)
            has_checkpoint, folds = has_checkpoint > 0, fold_to >= 0
            new_gates = [gate for gate, _, _ in tokens]

            # Decay from each entry to the last committed token, summed from old to new.
            def add_gates(c, gates_of_chunk, sums, total):
                for i, gate in enumerate(gates_of_chunk):
                    gate = jnp.where(c * CHUNK + i < live, gate, zero)
                    sums = [x + jnp.where(n < c * CHUNK + i, gate, zero) for x, n in zip(sums, index, strict=True)]
                    total = total + gate
                return sums, total

            def add_more_gates(c, carry):
                return add_gates(c, [gates[entries[row, c * CHUNK + i], head] for i in range(CHUNK)], *carry)

            index = [count((THREADS,), 0, every) + start for start in range(0, shape.columns, THREADS)]
            sums = add_gates(0, old_gates, [zeros((THREADS,), every)] * len(index), zero)
            sums, total = lax.fori_loop(1, pl.cdiv(live, CHUNK), add_more_gates, sums)
            for i, x in enumerate(sums):
                sums_ref[pl.ds(THREADS * i, THREADS)] = x

            @pl.when(has_checkpoint & folds)
            def _():
                plgpu.barrier_wait(barrier)

            @pl.when(folds)
            def _():
                fold(row, head, live, has_checkpoint, total, found)
                plgpu.copy_smem_to_gmem(state, checkpoints.at[fold_to, head])

            total = jnp.where(folds, zero, total)
            stage(CHUNK, new)
            for (gate, _, to), key in zip(tokens, new[:time], strict=True):

                @pl.when(to >= 0)
                def _(to=to, gate=gate, key=key):
                    gates[to, head] = gate

                    @pl.when(lax.rem(head, group) == 0)
                    def _():
                        keys[to, head // group] = key.astype(shape.entry)

            # What the entries of a chunk add to every output, and the products of the tokens among each other.
            def add_entries(c, carry):
                found, added = carry
                stage(0, living(c, live, [key for key, _ in found]))
                plgpu.commit_smem()
                new_updates = living(c, live, [update for _, update in found])
                found = gather_next(row, head, c, chunks, found)
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
                    here = range(start, min(start + CHUNK, 2 * time))
                    if shape.frugal:
                        for i in here:
                            products[i] = pick(matches, i - start, 0, PRODUCT) * decays[i % time]
                        continue
                    decay, line = jnp.ones_like(matches), count(matches.shape, 0, PRODUCT)
                    for i in here:
                        decay = jnp.where(line == i - start, spread(decays[i % time], decay.shape, 1, PRODUCT), decay)
                    products[pl.ds(start, CHUNK), both] = matches * decay
                plgpu.commit_smem()
                for i, update in enumerate(new_updates):
                    update = update.astype(jnp.float32)
                    added = [x + products[j, i] * update for j, x in enumerate(added)]
                return found, added

            chunks = jnp.where(folds, 1, jnp.maximum(pl.cdiv(live, CHUNK), 1))
            _, added = lax.fori_loop(0, chunks, add_entries, (found, [zeros((value_dim,), value_vector)] * (2 * time)))
            added = [_where(~folds, x) for x in added]
            loaded = load_inputs(following[0], following[1], following[3])

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

            @pl.when(item + stride < items)
            def _():
                fetch(following[1], following[2])

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
                new_updates.append(stored.astype(jnp.float32))
                for s, update in enumerate(new_updates):
                    out = out + products[time + t, CHUNK + s] * update
                out = out + totals[t] * read(time + t)
                out_ref[row, t, head] = _where(t < length, out).astype(shape.out)

                @pl.when(to >= 0)
                def _(to=to, stored=stored):
                    updates[to, head] = stored

            plgpu.commit_smem()  # all have read what the next item overwrites
            return following, then, loaded

        @pl.when(first < items)
        def _():
            start, following = locate(first), locate(first + stride)
            loaded = load_inputs(start[0], start[1], start[3])
            fetch(start[1], start[2])
            start = start, following, loaded
            lax.fori_loop(0, pl.cdiv(items - first, stride), serve, start)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_heads,
        out_type=jax.ShapeDtypeStruct((shape.rows, time, heads, value_dim), shape.out),
        grid=(grid,),
        grid_names=("block",),
        num_threads=slots,
        thread_name="warpgroup",
        scratch_types=[shape.scratch(slots)],
        compiler_params=COMPILER,
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


def _where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros: selected, because what x was read from may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
