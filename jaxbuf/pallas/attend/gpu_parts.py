"""What the GPU kernels of attention over pages share: which keys a query sees, softmax, products, and joining."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import FIRST_WORKER, ITEM, KEYS, LAST_WORKER, REAL, TILE, Call
from jaxbuf.pallas.threads import COMPILER, THREADS, load, store

SHARED_MEMORY = 226 * 2**10  # of a multiprocessor, for tiles and queries
MOST_TOKENS, PAGE_SIZES = 16, (8, 16, 32, 64)
MASKED = np.float32(-1e30)  # a score, in the exponent of 2: finite, so that differences are no NaN

WGMMA, ACC = plgpu.Layout.WGMMA, plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
ROWS = WGMMA.reduce(1)
SCORES = TILE, KEYS  # of a tile of queries and a block
PART = 64  # columns of values that are cleared at once
JOINING = 16  # blocks of threads that share the queries of an item that is joined
JOINED = 4  # queries that a block joins at once


class Kind(enum.Enum):
    """What lies in a block: committed tokens alone; or others among them; or new tokens."""

    CLEAN, MASKED, NEW = range(3)


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which keys of a row's blocks there are, and which of them the queries of a tile see.

    Attributes:
      call: The call.
      table, rows, order, visible: As in `Integers`.
      row: Which row.
      end: Its END.
      first_query: The tile's first query.
      first_new: Where the first new token lies in the block that has new tokens.
      queries, layout: How many queries the tile has, and the layout of an array of these and a block's keys.
      seen: From `load_seen`, if that was called before; else `is_used` does it.
    """

    call: Call
    table: Any
    rows: Any
    order: Any
    visible: Any
    row: Array
    end: Array
    first_query: Any
    first_new: int = 0
    queries: int = TILE
    layout: Any = WGMMA
    seen: Array | None = None

    def load_seen(self) -> Array:
        """int32 [queries]: which new tokens each query sees, a bit each."""
        return load(self.visible.at[self.row, pl.ds(self.first_query, self.queries)], self.layout.reduce(1))

    def is_live(self, axis: int, kind: Kind, block: Array) -> Array:
        """bool [64, 64]: whether there is something at the place that the index along the axis numbers."""
        return self._is_live(index(axis), WGMMA, kind, block)

    def _is_live(self, inside: Array, layout, kind: Kind, block: Array) -> Array:
        if kind is Kind.NEW:
            return self._has_bit(filled(self.rows[self.row, REAL], inside.shape, layout, jnp.int32), inside)
        place = inside + block * KEYS
        live = place < self.end
        for i, page in enumerate(block_pages(self.call, self.table, self.row, block)):
            live &= (lax.div(inside, np.int32(self.call.page_size)) != i) | (page > 0)
        for i in range(self.call.listed):
            live &= place != self.order[self.row, i]
        return live

    def is_used(self, kind: Kind, block: Array) -> Array:
        """bool [queries, 64]: whether a query sees a key."""
        inside = index(1, self.queries, self.layout)
        if kind is Kind.NEW:
            seen = self.load_seen() if self.seen is None else self.seen
            return self._has_bit(spread(seen, 0, inside.shape, self.layout), inside)
        return self._is_live(inside, self.layout, kind, block)

    def _has_bit(self, bits: Array, inside: Array) -> Array:
        """bool [n, 64]: whether the bit of the token at a place is set; there are none for what is no new token."""
        t = inside - self.first_new if self.first_new else inside
        is_new = (t >= 0) & (t < self.call.time) if self.first_new else t < self.call.time
        return is_new & ((lax.shift_right_logical(bits, jnp.clip(t, 0, MOST_TOKENS)) & 1) > 0)


def index(axis: int, rows: int = TILE, layout: Any = WGMMA) -> Array:
    """int32 [rows, 64]: the index along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, KEYS), axis, layout=layout)


def block_pages(call: Call, table, row: Array, block: Array) -> list[Array]:
    """The pages that a block of a row lies on."""
    return [table[row, block * call.block_pages + i] for i in range(call.block_pages)]


def spread(x: Array, axis: int, dims: tuple[int, ...], layout: Any = WGMMA) -> Array:
    """x [dims[axis]], repeated along the other axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)


def filled(value, dims: tuple[int, ...], layout, dtype=jnp.float32) -> Array:
    """An array of one value, in a layout."""
    return plgpu.layout_cast(jnp.full(dims, value, dtype), layout)


def weigh(
    scores: Array, used: Array | None, highest: Array, total: Array, layout: Any = WGMMA
) -> tuple[Array, Array, Array, Array]:
    """A block's part of an online softmax.

    Args:
      scores: [n, 64], in exponents of 2.
      used: bool [n, 64], whether a query sees a key; None: each sees all.
      highest, total: [n], of the blocks before: each query's largest score, and the sum of its weights.
      layout: Of the scores.

    Returns:
      The weights [n, 64], what is kept of all that was summed before [n], and the new `highest` and `total`.
    """
    if used is not None:
        scores = jnp.where(used, scores, filled(MASKED, scores.shape, layout))
    before, highest = highest, jnp.maximum(highest, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - spread(highest, 0, scores.shape, layout))
    if used is not None:  # Where nothing is used yet, `highest` is MASKED itself.
        weights = jnp.where(used, weights, filled(0, scores.shape, layout))
    kept = jnp.exp2(before - highest)
    total = total * kept + jnp.sum(weights, axis=1)
    return weights, kept, highest, total


def summands(x: Array, dtype) -> tuple[Array, Array]:
    """float32 x as two numbers of a dtype: x rounded, and what that has left over."""
    rounded = x.astype(dtype)
    return rounded, (x - rounded.astype(x.dtype)).astype(dtype)


def share(total: Array, layout: Any = ROWS) -> Array:
    """What each query's weighted sum is multiplied with at the end: 1 / total [n]; `layout`: the total's."""
    # The best key weighs 1; without any key, 0 / 1.
    return 1 / jnp.where(total > 0, total, filled(1, total.shape, layout))


def multiply_keys(queries, keys, interpret: bool) -> Array:
    """float32 [64, 64]: queries [64, head_dim] times keys [64, head_dim], both in shared memory."""
    if interpret:  # The interpreter does not know the instruction.
        a, b = (x[...].astype(jnp.float32) for x in (queries, keys))
        return jnp.dot(a, b.T, precision="highest")

    def multiply(ref):
        plgpu.wgmma(ref, queries, keys.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(multiply, ACC(SCORES, jnp.float32))


def add_values(total: Array, weights: Sequence, values, interpret: bool) -> Array:
    """total + the weights' sum · values.

    Args:
      total: [64, n] in registers.
      weights: Summands [64, 64], in registers or in shared memory.
      values: [64, n] in shared memory.
      interpret: Whether this runs in Pallas' interpreter.
    """
    if interpret:
        a, b = (sum(x[...].astype(jnp.float32) for x in several) for several in (weights, (values,)))
        return total + jnp.dot(a, b, precision="highest")

    def add(ref):
        for summand in weights:
            plgpu.wgmma(ref, summand, values)

    return pl.run_state(add)(ACC.init(total))  # pyright: ignore[reportReturnType]


def clear(values, live: Array) -> None:
    """Writes zeros in place of dead values [64, n]: theirs may be NaN, of which no weight makes zero."""
    for part in range(0, values.shape[1], PART):
        columns = pl.ds(part, PART)
        x = load(values.at[:, columns], WGMMA)
        store(values.at[:, columns], jnp.where(live, x, jnp.zeros_like(x)))
    plgpu.commit_smem()


def vector_layout(length: int):
    """The layout of a vector in the registers of a warpgroup."""
    return ROWS if length < THREADS else plgpu.Layout.WG_STRIDED((length,), length // THREADS)


def join_segments(
    workers: int, queries: int, width: int, dtype, place: Callable[[Array, Array, Array], Array], interpret: bool
):
    """The kernel that writes the outputs of the items that workers share.

    Its arguments are `joins` of `Integers`, the parts [n, queries, width] that the workers found, their largest scores
    and sums [n, 2, queries], and the outputs [items, queries, width], which it writes in place.

    Args:
      workers: How many there are.
      queries, width, dtype: Of an item's outputs.
      place: Takes an item, its first worker and one of its workers; returns which of the parts that one has written.
      interpret: Whether it runs in Pallas' interpreter.
    """
    layout, blocks = vector_layout(width), min(queries, JOINING)
    together = min(JOINED, -(-queries // blocks))

    def join_segments(joins, parts, sums, out):  # A profile shows this name.
        line = lax.axis_index("worker")
        item, first, last = (joins[line, field] for field in (ITEM, FIRST_WORKER, LAST_WORKER))

        def join(kept, worker, carries):
            segment = place(jnp.maximum(item, 0), first, worker)
            return [join_one(segment, query, carry) for query, carry in zip(kept, carries, strict=True)]

        def join_one(segment, query, carry):
            highest, total, x = carry
            its, its_total = sums[segment, 0, query], sums[segment, 1, query]
            part = load(parts.at[segment, query], layout)
            before, highest = highest, jnp.maximum(highest, its)
            kept, weight = jnp.exp2(before - highest), jnp.exp2(its - highest)
            x = x * jnp.broadcast_to(kept, x.shape) + part * jnp.broadcast_to(weight, x.shape)
            return highest, total * kept + its_total * weight, x

        def join_some(i, _):
            # No load waits for that of another query, or for that of the other of two workers, whom there are at least.
            which = [lax.axis_index("query") + (i * together + j) * blocks for j in range(together)]
            kept = [jnp.minimum(query, queries - 1) for query in which]
            carries = [(jnp.float32(MASKED), jnp.float32(0), filled(0, (width,), layout))] * together
            for worker in (first, first + 1):
                carries = join(kept, worker, carries)
            carries = lax.fori_loop(first + 2, last + 1, functools.partial(join, kept), carries)
            for query, (_, total, x) in zip(which, carries, strict=True):
                x = x / jnp.broadcast_to(jnp.where(total > 0, total, 1), x.shape)
                pl.when(query < queries)(lambda query=query, x=x: store(out.at[item, query], x.astype(dtype)))

        @pl.when(item >= 0)
        def _():
            each = blocks * together
            count = lax.div(queries - lax.axis_index("query") + (each - 1), np.int32(each))
            lax.fori_loop(0, count, join_some, None)

    return plgpu.kernel(
        join_segments,
        out_type=(),
        grid=(workers, blocks),
        grid_names=("worker", "query"),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
