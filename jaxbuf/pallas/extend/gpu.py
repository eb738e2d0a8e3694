"""`extend` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A multiprocessor runs one block, which serves two heads (each of some row) at a time, over and over; one where two do
not fit in its shared memory, or there are few. Two warpgroups of 128 threads share the work on a head; a thread owns a
row of its state. One turns the gates of the live entries into decay weights, multiplies their keys with the T new keys
and queries, sums the entries' part of every output, and at the end substitutes forward over the T tokens and appends
their entries. The other waits for the checkpoint [128, key_dim], multiplies it once with all new keys and queries, and
lets the next head's checkpoint stream in. For a row that folds it first adds the entries to the checkpoint in shared
memory, which goes back to the pool meanwhile.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth.

Precision: operands in float32 enter products on the tensor cores as two bfloat16 halves (2^-17 relative); all sums are
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

type Array = jax.Array

ROWS = 128  # rows of the state that a warpgroup holds: one a thread
TILE = 64  # rows of the state that a product takes
PART = 64  # columns of the state that come and go together
GATES = 4  # heads whose gates are copied together: 16 bytes, the least that can be
UNROLL = 4  # entries that a loop takes at once
PROCESSORS = 132  # of an H100 or H200
MEMORY = 227 * 1024  # bytes of shared memory that a block may have
LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO, FIELDS = range(6)  # of `Integers.numbers`

VECTOR = plgpu.Layout.TCGEN05_TMEM_NATIVE(4).reduce(1)  # one number a thread: a row of the state
LEFT, RIGHT, PRODUCT = plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC
TALL_LEFT, TALL_RIGHT, TALL = (layout(jnp.bfloat16, m_warps=4) for layout in (LEFT, RIGHT, PRODUCT))
BROAD = PRODUCT(jnp.bfloat16, m_warps=1)


class Integers(NamedTuple):
    """What the kernel needs to know of each row; the same for all layers of a model.

    Attributes:
      numbers: int32 [rows, FIELDS]: tokens, live entries, the checkpoint read, whether there is one, the one a fold
        writes or -1.
      rank: int32 [rows, ring], the logical index of each ring position; the largest int32 where it is dead.
      table: int32 [rows, ring / block_size], the pool's block of each block of the ring; 0 where none of it is live.
      place: int32 [rows, ring], the ring position of each logical index.
      append: int32 [rows, T], the flat position of each new entry; -1 where nothing goes.
    """

    numbers: Array
    rank: Array
    table: Array
    place: Array
    append: Array


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of one kernel.

    Attributes:
      rows, time: Of the launch.
      heads, key_heads, key_dim: Of the recurrence; value_dim is 128.
      ring, block_size: Entries of a slot's ring, and of a block.
      state, entry, pair, out: Dtypes of checkpoints, entries, new keys and queries, and outputs.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    ring: int
    block_size: int
    state: np.dtype
    entry: np.dtype
    pair: np.dtype
    out: np.dtype

    @property
    def height(self) -> int:
        """Rows of a product with new keys and queries: T of each, rounded up to the tensor cores' 16."""
        return -(-2 * self.time // 16) * 16

    @property
    def width(self) -> int:
        """Columns of their product with the state, rounded up to 8."""
        return -(-2 * self.time // 8) * 8

    @property
    def warps(self) -> int:
        """How many of a warpgroup's four warps share out those rows."""
        return self.height // 16

    @property
    def piece(self) -> int:
        """Columns of such a product: entries, or new tokens."""
        return 32 // self.warps

    @property
    def columns(self) -> int:
        """Entries of a ring, rounded up to what a product takes."""
        return max(-(-self.ring // 16) * 16, self.piece)

    @property
    def pieces(self) -> list[int]:
        """Where each product with entries starts; the last may overlap the one before."""
        return sorted({min(start, self.columns - self.piece) for start in range(0, self.columns, self.piece)})

    @property
    def parts(self) -> int:
        """How many parts of PART columns come and go together."""
        return self.key_dim // PART

    @property
    def places(self) -> int:
        """Entries of a ring, rounded up to whole 128 bytes of integers: copies are that long."""
        return -(-self.ring // 32) * 32

    def scratch(self, slots: int) -> dict:
        """Shared memory for `slots` heads at a time."""

        def tiled(dtype):
            tiling = plgpu.TilingTransform((8, 128 // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
            return tiling, plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]

        def memory(*dims, dtype=jnp.float32, transforms=()):
            return plgpu.SMEM((slots, *dims), dtype, transforms=transforms)

        planes = {} if self.entry == jnp.bfloat16 else {"planes": memory(4, self.columns, ROWS, dtype=jnp.bfloat16)}
        return planes | {
            "state": memory(self.parts, ROWS, PART, dtype=self.state, transforms=tiled(self.state)),
            "ring_keys": memory(self.columns, self.key_dim, dtype=self.entry, transforms=tiled(self.entry)),
            "ring_updates": memory(self.columns, ROWS, dtype=self.entry),
            "ring_gates": memory(self.ring, GATES),
            "places": memory(self.places, dtype=jnp.int32),
            # Rows a little longer than they need be: their columns then lie in different banks.
            "pairs": memory(32, self.key_dim + 8, dtype=self.pair),
            "results": memory(ROWS, self.width + 2),
            "products": memory(self.height, self.columns),
            "pendings": memory(self.height, self.piece),
            "weights": memory(self.columns + 32),
            "state_barriers": plgpu.Barrier(num_barriers=(slots, self.parts)),
            "place_barriers": plgpu.Barrier(num_barriers=slots),
            "ring_barriers": plgpu.Barrier(num_arrivals=3, num_barriers=(slots, self.ring // self.block_size)),
            "ready_barriers": plgpu.Barrier(num_barriers=slots),
            "read_barriers": plgpu.Barrier(num_barriers=slots),
            "free_barriers": plgpu.Barrier(num_barriers=slots),
        }

    @property
    def bytes(self) -> int:
        """Shared memory for one head at a time."""
        return sum(
            int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize
            for x in self.scratch(1).values()
            if not isinstance(x, plgpu.Barrier)
        )


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
      v: [rows, T, heads, 128]. log_decay, beta: f32 [rows, T, heads].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, T, heads, 128] in shape.out, and the arrays.
    """
    checkpoints, *entries = arrays
    flat = [x.reshape(-1, *x.shape[2:4]) for x in entries]
    flat[2] = flat[2].reshape(-1, shape.heads)
    place = jnp.pad(integers.place, ((0, 0), (0, shape.places - shape.ring)))
    rank = jnp.pad(integers.rank, ((0, 0), (0, shape.columns - shape.ring)), constant_values=np.iinfo(np.int32).max)
    refs = [jax.new_ref(x) for x in (checkpoints, *flat)]
    launch = integers._replace(place=place, rank=rank)
    out = _kernel(shape, interpret)(*launch, q, k, v, log_decay, beta, *refs)
    checkpoints, *flat = (jax.freeze(ref) for ref in refs)
    return out, (checkpoints, *(x.reshape(old.shape) for x, old in zip(flat, entries, strict=True)))


def _kernel(shape: Shape, interpret: bool):
    time, piece, heads, key_dim = shape.time, shape.piece, shape.heads, shape.key_dim
    height, width = shape.height, shape.width
    group, block_size, blocks = heads // shape.key_heads, shape.block_size, shape.ring // shape.block_size
    items = shape.rows * heads
    slots = 2 if items > PROCESSORS and 2 * shape.bytes <= MEMORY else 1
    grid = min(PROCESSORS, pl.cdiv(items, slots))
    stride = grid * slots
    left, right, wide = (layout(jnp.bfloat16, m_warps=shape.warps) for layout in (LEFT, RIGHT, PRODUCT))
    zero = np.float32(0)

    def zeros(dims, layout):
        return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), layout)

    def spread(x, dims, axis, layout):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)

    def multiply(total, a, b):
        """total + a b over halves; the product of two low halves is left out."""
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                if i + j < 2:
                    if interpret:  # the interpreter knows no mma
                        total += jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32), precision="highest")
                    else:
                        total = plgpu.mma(total, x, y)
        return total

    def at_token(t, sums, decays):
        """decays with exp(sums) in the rows of token t."""
        decay = spread(jnp.exp(sums), decays.shape, 1, wide)
        if time == 1:
            return decay
        token = plgpu.broadcasted_iota(jnp.int32, decays.shape, 0, layout=wide)
        return jnp.where((token == t) | (token == time + t), decay, decays)

    def body(
        numbers, rank, table, place_ref, append, q_ref, k_ref, v_ref, decay_ref, beta_ref,
        checkpoints, keys, updates, gates, out_ref, scratch,
    ):  # fmt: skip
        group_index = lax.axis_index("warpgroup")
        slot = group_index // 2
        first = slot * grid + lax.axis_index("block")
        turns = pl.cdiv(items - first, stride)
        state, ring_keys, ring_updates, ring_gates, place, pair, result, products, pending, weights = (
            scratch[name].at[slot]
            for name in (
                "state", "ring_keys", "ring_updates", "ring_gates", "places", "pairs", "results", "products",
                "pendings", "weights",
            )
        )  # fmt: skip
        planes = [scratch["planes"].at[slot, i] for i in range(4)] if "planes" in scratch else []
        names = ("place", "ready", "read", "free")
        place_barrier, ready, read_out, free = (scratch[f"{x}_barriers"].at[slot] for x in names)
        parts = [pl.ds(i * PART, PART) for i in range(shape.parts)]
        state_barriers = [scratch["state_barriers"].at[slot, i] for i in range(shape.parts)]
        ring_barriers = [scratch["ring_barriers"].at[slot, j] for j in range(blocks)]

        def locate(item):
            """Row and head of an item, and what the row's cursor says."""
            row = jnp.minimum(item, items - 1) // heads
            return row, lax.rem(item, heads), [numbers[row, i] for i in range(FIELDS)]

        def entries_warpgroup():
            def fetch(row, head, present):
                plgpu.copy_gmem_to_smem(place_ref.at[row], place, place_barrier)
                for j, source in enumerate(present):

                    @pl.when(source > 0)
                    def _(j=j, source=source):
                        there, to = pl.ds(source * block_size, block_size), pl.ds(j * block_size, block_size)
                        four = pl.ds(head // GATES * GATES, GATES)
                        plgpu.copy_gmem_to_smem(keys.at[there, head // group], ring_keys.at[to], ring_barriers[j])
                        plgpu.copy_gmem_to_smem(updates.at[there, head], ring_updates.at[to], ring_barriers[j])
                        plgpu.copy_gmem_to_smem(gates.at[there, four], ring_gates.at[to], ring_barriers[j])

            def inputs(item):
                """What an item needs early, straight from global memory."""
                row, head, fields = locate(item)
                present = [table[row, j] for j in range(blocks)]
                new = [_load(ref.at[row, t, head // group], VECTOR) for ref in (k_ref, q_ref) for t in range(time)]
                new_gates = [decay_ref[row, t, head] for t in range(time)]
                ranks = [_load(rank.at[row, pl.ds(start, piece)], wide.reduce(0)) for start in shape.pieces]
                return row, head, fields, present, new, new_gates, ranks

            def serve(turn, item_inputs):
                item = first + turn * stride
                row, head, (length, live, _, has_checkpoint, fold_to), present, new, new_gates, ranks = item_inputs
                holds, folds = (has_checkpoint > 0) | (fold_to >= 0), fold_to >= 0
                values = [_load(v_ref.at[row, t, head], VECTOR) for t in range(time)]
                betas = [beta_ref[row, t, head] for t in range(time)]
                to = [append[row, t] for t in range(time)]
                following = inputs(item + stride)
                for i, x in enumerate(new):
                    pair[i, pl.ds(0, key_dim)] = x
                plgpu.barrier_wait(place_barrier)
                for j, source in enumerate(present):

                    @pl.when(source > 0)
                    def _(j=j):
                        plgpu.barrier_wait(ring_barriers[j])

                # Decay from each entry to the last committed token, summed from old to new.
                def add_gate(j, carry):
                    sums, total = carry
                    for i in range(UNROLL):
                        i = UNROLL * j + i
                        gate = jnp.where(i < live, ring_gates[place[i], lax.rem(head, GATES)], zero)
                        sums = [x + jnp.where(mine < i, gate, zero) for x, mine in zip(sums, ranks, strict=True)]
                        total = total + gate
                    return sums, total

                sums, total = [zeros((piece,), wide.reduce(0))] * len(ranks), zero
                sums, total = lax.fori_loop(0, pl.cdiv(live, UNROLL), add_gate, (sums, total))

                @pl.when(folds)
                def _():
                    for start, x, mine in zip(shape.pieces, sums, ranks, strict=True):
                        weights[pl.ds(start, piece)] = jnp.where(mine < live, jnp.exp(x), -1.0)
                    weights[shape.columns] = jnp.exp(total)

                plgpu.commit_smem()
                plgpu.barrier_arrive(ready)

                # Products of the new keys and queries with entries, and among each other, decayed up to each token.
                rows = pair.at[:, pl.ds(0, key_dim)]
                new_pairs = _halves(_load(rows.at[pl.ds(0, height)], left))
                total = jnp.where(folds, zero, total)
                totals = []
                for gate in new_gates:
                    total = total + gate
                    totals.append(jnp.exp(total))
                for start, x in zip(shape.pieces, sums, strict=True):
                    these = _load(ring_keys.at[pl.ds(start, piece)].transpose((1, 0)), right)
                    matches = multiply(zeros((height, piece), wide), new_pairs, _halves(these))
                    decays = jnp.ones_like(matches)
                    for t, gate in enumerate(new_gates):
                        x = x + gate
                        decays = at_token(t, x, decays)
                    products[:, pl.ds(start, piece)] = matches * decays
                these = _load(rows.at[pl.ds(0, piece)].transpose((1, 0)), right)
                matches = multiply(zeros((height, piece), wide), new_pairs, _halves(these))
                decays, x = jnp.ones_like(matches), zeros((piece,), wide.reduce(0))
                column = plgpu.broadcasted_iota(jnp.int32, (piece,), 0, layout=wide.reduce(0))
                for t, gate in enumerate(new_gates):
                    x = x + jnp.where(column < t, gate, zero)
                    decays = at_token(t, x, decays)
                pending[...] = matches * decays
                plgpu.commit_smem()

                def add_updates(j, sums):
                    for i in range(UNROLL):
                        i = UNROLL * j + i
                        p, alive = place[i], i < entries
                        update = _where(alive, _load(ring_updates.at[p], VECTOR).astype(jnp.float32))
                        factors = [jnp.where(alive, products[i, p], zero) for i in range(2 * time)]
                        sums = [total + factor * update for factor, total in zip(factors, sums, strict=True)]
                    return sums

                entries = jnp.where(folds, 0, live)
                sums = lax.fori_loop(0, pl.cdiv(entries, UNROLL), add_updates, [zeros((ROWS,), VECTOR)] * (2 * time))
                plgpu.commit_smem()  # all have read the entries

                @pl.when((item + stride < items) & ~folds)
                def _():
                    fetch(following[0], following[1], following[3])

                plgpu.barrier_wait(read_out)

                @pl.when((item + stride < items) & folds)
                def _():  # the fold read them, too
                    fetch(following[0], following[1], following[3])

                reads = [
                    _where(holds, _load(result.at[:, i], VECTOR)) for i in range(2 * time)
                ]  # else from what lay there
                plgpu.barrier_arrive(free)
                new_updates = []
                for t in range(time):
                    recalled, out = sums[t], sums[time + t]
                    for s, update in enumerate(new_updates):
                        recalled = recalled + pending[t, s] * update
                    recalled = recalled + totals[t] * reads[t]
                    stored = (betas[t] * (values[t].astype(jnp.float32) - recalled)).astype(shape.entry)
                    new_updates.append(stored.astype(jnp.float32))
                    for s, update in enumerate(new_updates):
                        out = out + pending[time + t, s] * update
                    out = out + totals[t] * reads[time + t]
                    out_ref[row, t, head] = _where(t < length, out).astype(shape.out)

                    @pl.when(to[t] >= 0)
                    def _(t=t, stored=stored):
                        updates[to[t], head] = stored
                        gates[to[t], head] = new_gates[t]

                        @pl.when(lax.rem(head, group) == 0)
                        def _():
                            keys[to[t], head // group] = new[t].astype(shape.entry)

                plgpu.commit_smem()  # all have read what the next item overwrites
                return following

            start = inputs(first)
            fetch(start[0], start[1], start[3])
            plgpu.barrier_arrive(free)
            lax.fori_loop(0, turns, serve, start)

        def state_warpgroup():
            def fetch(i, head, fields):
                @pl.when(fields[HAS_CHECKPOINT] > 0)
                def _():
                    source = checkpoints.at[fields[CHECKPOINT], head, :, parts[i]]
                    plgpu.copy_gmem_to_smem(source, state.at[i], state_barriers[i])

            def fold(i, has_checkpoint):
                """state · decay + Σ weight · u ⊗ k. What is dead is selected away on both sides of the product."""
                entries = pl.ds(0, shape.columns)
                key_planes, update_planes = (planes[:2], planes[2:]) if planes else ([ring_keys], [ring_updates])
                alive = _load(weights.at[entries], TALL_RIGHT.reduce(1)) >= 0
                key = [_load(ref.at[:, parts[i]], TALL_RIGHT) for ref in key_planes]
                key = [jnp.where(spread(alive, x.shape, 0, TALL_RIGHT), x, jnp.zeros_like(x)) for x in key]
                factor, decay = _load(weights.at[entries], TALL_LEFT.reduce(0)), weights[shape.columns]
                for top in range(0, ROWS, TILE):
                    rows = pl.ds(top, TILE)
                    update = zeros((TILE, shape.columns), TALL_LEFT)
                    for ref in update_planes:
                        update = update + _load(ref.at[:, rows].transpose((1, 0)), TALL_LEFT).astype(jnp.float32)
                    scale = spread(factor, update.shape, 1, TALL_LEFT)
                    update = jnp.where(scale >= 0, scale * update, zero)
                    old = _where(has_checkpoint, _load(state.at[i, rows], TALL).astype(jnp.float32) * decay)
                    state[i, rows] = multiply(old, _halves(update), key).astype(shape.state)

            def serve(turn, here):
                item = first + turn * stride
                _, head, (_, _, _, has_checkpoint, fold_to) = here
                has_checkpoint, folds = has_checkpoint > 0, fold_to >= 0
                goes_on = item + stride < items
                following = locate(item + stride)
                plgpu.barrier_wait(ready)
                if planes:  # only numbers of two bytes can be read transposed

                    @pl.when(folds)
                    def _():
                        for ref, halves in ((ring_keys, planes[:2]), (ring_updates, planes[2:])):
                            for plane, x in zip(halves, _halves(_load(ref, BROAD)), strict=True):
                                plane[...] = x
                        plgpu.commit_smem()

                tiles = [zeros((TILE, width), TALL) for _ in range(0, ROWS, TILE)]
                for i, part in enumerate(parts):

                    @pl.when(has_checkpoint)
                    def _(i=i):
                        plgpu.barrier_wait(state_barriers[i])

                    @pl.when(folds)
                    def _(i=i, part=part):
                        fold(i, has_checkpoint)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(state.at[i], checkpoints.at[fold_to, head, :, part])

                    new = _halves(_load(pair.at[pl.ds(0, width), part].transpose((1, 0)), TALL_RIGHT))
                    for j, top in enumerate(range(0, ROWS, TILE)):
                        tiles[j] = multiply(tiles[j], _halves(_load(state.at[i, pl.ds(top, TILE)], TALL_LEFT)), new)
                    plgpu.commit_smem()  # all have read this part of the state

                    @pl.when(goes_on & ~folds)
                    def _(i=i):
                        fetch(i, *following[1:])

                @pl.when(folds)
                def _():
                    for i in range(shape.parts):
                        plgpu.wait_smem_to_gmem(shape.parts - 1 - i, wait_read_only=True)
                        plgpu.commit_smem()

                        @pl.when(goes_on)
                        def _(i=i):
                            fetch(i, *following[1:])

                plgpu.barrier_wait(free)
                for top, total in zip(range(0, ROWS, TILE), tiles, strict=True):
                    result[pl.ds(top, TILE), pl.ds(0, width)] = total
                plgpu.commit_smem()
                plgpu.barrier_arrive(read_out)
                return following

            start = locate(first)
            for i in range(shape.parts):
                fetch(i, *start[1:])
            lax.fori_loop(0, turns, serve, start)
            plgpu.barrier_wait(free)
            plgpu.wait_smem_to_gmem(0)

        pl.when((turns > 0) & (lax.rem(group_index, 2) == 0))(entries_warpgroup)
        pl.when((turns > 0) & (lax.rem(group_index, 2) == 1))(state_warpgroup)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.rows, time, heads, ROWS), shape.out),
        grid=(grid,),
        grid_names=("block",),
        num_threads=2 * slots,
        thread_name="warpgroup",
        scratch_types=[shape.scratch(slots)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _halves(x: Array) -> list[Array]:
    """bfloat16 arrays that sum to x: itself, or two halves with 2^-17 left out."""
    if x.dtype == jnp.bfloat16:
        return [x]
    x = x.astype(jnp.float32)
    high = x.astype(jnp.bfloat16)
    return [high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)]


def _where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros: selected, because what x was read from may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
