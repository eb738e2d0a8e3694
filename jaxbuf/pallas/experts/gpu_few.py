"""The products of `jaxbuf.models.experts.mixture` for a few tokens on NVIDIA GPUs (Hopper): Pallas Mosaic GPU.

Rows are not sorted: the kernels read the tokens and the numbers of their experts as they are, and the second one adds
up a token's experts, so that nothing is launched but these two.

The first has blocks for each expert of each token, one for every tile of the expert's rows. The second has blocks for
each token, one for every tile of the rows of all its experts' weights: it multiplies one expert's tile after the other.
An expert of several tokens is read for each of them; the later ones find it in the L2, at best. Therefore these
kernels take over only where most tokens have experts of their own (`serves`).

Neither a choice by each block of the first product, in place of a launch of its own, nor asking the L2 for the second
weights at its end is faster: on an H100 one token took the first product 4.4 us more where the choice takes 1.9, and
2.5 us more where the second product took 1.5 less.

A warpgroup of a block brings pieces of weights to a ring in shared memory, another multiplies them on the tensor cores,
which take 64 rows of tokens, or what lies there. A row of a result depends on one of them, and the others are left.

Floor: weights of the tokens' experts / read bandwidth.

Precision: products of 2-byte operands with float32 sums, rounded between the two products and in the end; the gate, and
the square of relu, are computed from unrounded sums.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.experts.call import Call
from jaxbuf.pallas.project.gpu import ACC, PROCESSORS, SHARED_MEMORY, STEP, TILE, WGMMA, result
from jaxbuf.pallas.threads import COMPILER, store_inside, store_sum

EIGHT = 8  # Rows of tokens are brought by the eight.
MOST_ROWS = 64  # rows of several tokens' experts
MOST_CHOSEN = 16  # experts of a token: those rows of a result that one warp has
MOST_SUMS = 64  # rows of weights in a tile
PIECE = 2**14  # bytes of a piece of weights, at most
MOST_STEPS = 4  # of a piece, each STEP numbers
MOST_PIECES, LEAST_PIECES = 32, 4  # in the ring
RESERVED = 2**10  # bytes of shared memory that a block has besides
MOST_BLOCKS = 4  # of a multiprocessor at once
BUSY = 120  # multiprocessors that have a block suffice


def serves(tokens: int, calls: tuple[Call, Call]) -> bool:
    """Whether these kernels serve a mixture that `supports` says yes to, and are the faster ones.

    Args:
      tokens: How many there are.
      calls: Of both products.
    """
    rows, experts, chosen = calls[0].rows, calls[0].experts, calls[0].rows // tokens
    apart = tokens == 1 or rows <= min(MOST_ROWS, experts // 4)
    schedules = arrange(calls[0], rows), arrange(calls[1], tokens, _padded(chosen))
    return apart and chosen <= MOST_CHOSEN and min(each.ring for each in schedules) >= LEAST_PIECES


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a product is arranged.

    Attributes:
      rows: Of a tile of a weight: of each of the two, where there is a gate.
      tiles: Of a weight.
      columns: Numbers of a weight's row in a piece.
      ring: Pieces of the ring.
    """

    rows: int
    tiles: int
    columns: int
    ring: int


def arrange(call: Call, units: int, held: int = 0) -> Schedule:
    """The schedule of a product.

    Args:
      call: The product.
      units: How many times blocks go through all tiles.
      held: Rows of tokens of which shared memory holds all numbers; 0: eight, of which it holds pieces.
    """
    parts = 2 if call.gated else 1
    found = [n for n in range(EIGHT, MOST_SUMS // parts + 1, EIGHT) if call.outputs % n == 0]
    rows = max((n for n in found if units * (call.outputs // n) >= BUSY), default=found[0])
    tiles = call.outputs // rows

    def fits(steps: int) -> bool:
        return call.inputs % (steps * STEP) == 0 and 2 * parts * rows * steps * STEP <= PIECE

    columns = STEP * max(steps for steps in range(1, MOST_STEPS + 1) if steps == 1 or fits(steps))
    slot, more = parts * rows + (0 if held else EIGHT), 2 * (columns * (TILE - EIGHT) + call.inputs * held)

    def ring(blocks: int) -> int:
        return min(MOST_PIECES, (SHARED_MEMORY // blocks - RESERVED - more) // (2 * columns * slot))

    # Blocks that share a multiprocessor share its memory: they all read at once, and end together.
    together = range(min(MOST_BLOCKS, -(-units * tiles // PROCESSORS)), 1, -1)
    return Schedule(rows, tiles, columns, next((n for n in map(ring, together) if n >= LEAST_PIECES), ring(1)))


class Memory(NamedTuple):
    """A block's ring: weights [ring, parts · rows, columns], and barriers that open when a piece is there (`full`), and
    when it was used (`free`). Besides `tokens` [rows, columns]: of each piece eight or sixteen rows, one piece behind
    the other, and as many more as the last product reads."""

    tokens: Any
    weights: Any
    full: Any
    free: Any


def expand(call: Call, x: Array, weights: Array, chosen: Array, *, interpret: bool = False) -> Array:
    """Each token times the first weight of each of its experts, and what follows it: the gate, or the square of relu.

    Args:
      call: The product's sizes and dtype.
      x: [tokens, inputs].
      weights: [experts, outputs, inputs], gated [experts, 2 · outputs, inputs].
      chosen: int32 [tokens, chosen]; those that are not in [0, experts) are elsewhere.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [tokens · padded, outputs], padded being chosen, or more, in eights; rows of no expert are not specified.
    """
    if x.shape[0] > EIGHT:  # pieces have rows by eight, unless x has fewer
        x = jnp.pad(x, ((0, -x.shape[0] % EIGHT), (0, 0)))
    dims = chosen.shape[0], chosen.shape[1]
    return _expanding(call, arrange(call, chosen.size), dims, interpret)(chosen, x, weights)


def gather(call: Call, inner: Array, weights: Array, chosen: Array, shares: Array, *, interpret: bool = False) -> Array:
    """The weighted sum of each token's rows times the second weights of its experts.

    Args:
      call: The product's sizes and dtype.
      inner: From `expand`.
      weights: [experts, outputs, inputs].
      chosen: As for `expand`.
      shares: float32 [tokens, chosen]: what each expert's result is multiplied with.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [tokens, outputs].
    """
    dims = chosen.shape[0], chosen.shape[1]
    schedule = arrange(call, dims[0], _padded(dims[1]))
    return _gathering(call, schedule, dims, interpret)(chosen, shares, inner, weights)


def _padded(chosen: int) -> int:
    return -(-chosen // EIGHT) * EIGHT


def _expanding(call: Call, schedule: Schedule, dims: tuple[int, int], interpret: bool):
    (tokens, number), pieces = dims, call.inputs // schedule.columns
    padded, parts = _padded(number), 2 if call.gated else 1

    def expand_tokens(chosen, x, weights, out, *refs):
        memory, block = Memory(*refs), lax.axis_index("block")
        pair, row = _split(block, schedule.tiles)
        token, place = _split(pair, number)
        row *= schedule.rows
        expert, role = chosen[token, place], lax.axis_index("warpgroup")
        here = (expert >= 0) & (expert < call.experts)
        eight = token & np.int32(-EIGHT)  # the first of its eight

        @pl.when(here & (role == 0))
        def _():

            def first_row(i):
                return lax.rem(i, np.int32(schedule.ring)) * EIGHT

            sums = _multiply(schedule, memory, np.int32(0), np.int32(pieces), parts, first_row, interpret)
            found = result(sums, squared=not call.gated)
            begin = token * np.int32(padded) + place
            where = {"begin": begin, "end": begin + np.int32(1)}
            store_inside(found.astype(out.dtype), WGMMA, out, begin - (token - eight), row, interpret, **where)

        @pl.when(here & (role == 1))
        def _():
            def bring(i, at, columns, full):
                for part in range(parts):
                    piece = weights.at[expert, pl.ds(part * call.outputs + row, schedule.rows), columns]
                    target = memory.weights.at[at, pl.ds(part * schedule.rows, schedule.rows)]
                    plgpu.copy_gmem_to_smem(piece, target, full)
                # Where x has fewer rows than eight, what lies below them arrives as zeros.
                target = memory.tokens.at[pl.ds(at * EIGHT, EIGHT)]
                plgpu.copy_gmem_to_smem(x.at[pl.ds(eight, EIGHT), columns], target, full)

            _bring(schedule, memory, np.int32(0), np.int32(pieces), bring)
            _await_uses(schedule, memory, np.int32(pieces))

    name = f"expand_tokens_{call.outputs}_by_{call.inputs}"
    shape = jax.ShapeDtypeStruct((tokens * padded, call.outputs), call.dtype)
    blocks, held = tokens * number * schedule.tiles, schedule.ring * EIGHT
    return _launch(expand_tokens, name, call, schedule, blocks, shape, held, parts + 1, interpret)


def _gathering(call: Call, schedule: Schedule, dims: tuple[int, int], interpret: bool):
    (tokens, number), pieces = dims, call.inputs // schedule.columns
    padded = _padded(number)

    def gather_experts(chosen, shares, inner, weights, out, *refs):
        memory, block, role = Memory(*refs[:-1]), lax.axis_index("block"), lax.axis_index("warpgroup")
        token, row = _split(block, schedule.tiles)
        row, there = row * schedule.rows, refs[-1]

        # All are asked for at once: a load takes as long as several experts' products.
        places = range(number)
        experts = [chosen[token, place] for place in places]
        here = [(expert >= 0) & (expert < call.experts) for expert in experts]
        counts = [jnp.where(each, np.int32(pieces), np.int32(0)) for each in here]
        before = [np.int32(0), *itertools.accumulate(counts)]

        @pl.when(role == 0)
        def _():
            dims = TILE, schedule.rows
            rows = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=WGMMA)
            factors = [shares[token, place] for place in places]
            total = plgpu.layout_cast(jnp.zeros(dims, jnp.float32), WGMMA)
            plgpu.barrier_wait(there)
            for place, count, begun, factor in zip(places, counts, before, factors, strict=False):
                (found,) = _multiply(schedule, memory, begun, count, 1, lambda i: i * padded, interpret)
                total = jnp.where(rows == place, found * factor, total)
            store_sum(total, WGMMA, out, token, row, interpret)

        @pl.when(role == 1)
        def _():
            for i in range(pieces):
                source = inner.at[pl.ds(token * padded, padded), pl.ds(i * schedule.columns, schedule.columns)]
                plgpu.copy_gmem_to_smem(source, memory.tokens.at[pl.ds(i * padded, padded)], there)
            for expert, count, begun in zip(experts, counts, before, strict=False):

                def bring(i, at, columns, full, expert=expert):
                    piece = weights.at[expert, pl.ds(row, schedule.rows), columns]
                    plgpu.copy_gmem_to_smem(piece, memory.weights.at[at], full)

                _bring(schedule, memory, begun, count, bring)
            _await_uses(schedule, memory, before[-1])

    name = f"gather_experts_{call.outputs}_by_{call.inputs}"
    shape, held = jax.ShapeDtypeStruct((tokens, call.outputs), call.dtype), pieces * padded
    more = [plgpu.Barrier(num_arrivals=pieces)]
    blocks = tokens * schedule.tiles
    return _launch(gather_experts, name, call, schedule, blocks, shape, held, 1, interpret, more)


def _launch(
    kernel: Callable[..., None],
    name: str,
    call: Call,
    schedule: Schedule,
    blocks: int,
    out: jax.ShapeDtypeStruct,
    held: int,
    copies: int,
    interpret: bool,
    scratch: list[Any] | None = None,
):
    """A kernel of two warpgroups a block.

    Args:
      kernel, name: What runs, and the name that a profile shows; kernels of other weights have others.
      call, schedule: The product and how it is arranged.
      blocks: How many there are.
      out: The result's shape.
      held: Rows of tokens that a block holds.
      copies: Of a piece of the ring.
      interpret: Run in Pallas' GPU interpreter.
      scratch: More of what a block has, besides `Memory`.
    """
    kernel.__name__ = name
    transforms = plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    pieces = schedule.ring, (2 if call.gated else 1) * schedule.rows, schedule.columns
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((held + TILE - EIGHT, schedule.columns), call.dtype, transforms=transforms),
            plgpu.SMEM(pieces, call.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=copies, num_barriers=schedule.ring),
            plgpu.Barrier(num_arrivals=1, num_barriers=schedule.ring),
            *(scratch or []),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _split(number, by: int):
    """Quotient and remainder."""
    quotient = lax.div(number, np.int32(by))
    return quotient, number - quotient * np.int32(by)


def _bring(schedule: Schedule, memory: Memory, before, count, bring: Callable[..., None]) -> None:
    """Brings pieces once there is room for them.

    Args:
      schedule, memory: The block's.
      before: How many pieces were brought earlier.
      count: How many are brought.
      bring: Copies a piece, given its number, its place in the ring, its columns, and the barrier of the copies.
    """

    def bring_piece(i, _):
        at = lax.rem(before + i, np.int32(schedule.ring))
        pl.when(before + i >= schedule.ring)(lambda: plgpu.barrier_wait(memory.free.at[at]))
        bring(i, at, pl.ds(i * schedule.columns, schedule.columns), memory.full.at[at])

    lax.fori_loop(0, count, bring_piece, None)


def _await_uses(schedule: Schedule, memory: Memory, pieces) -> None:
    """Waits until the last of so many pieces were used."""

    def wait(i, _):
        plgpu.barrier_wait(memory.free.at[lax.rem(i, np.int32(schedule.ring))])

    lax.fori_loop(jnp.maximum(pieces - schedule.ring, 0), pieces, wait, None)


def _multiply(
    schedule: Schedule, memory: Memory, before, count, parts: int, first_row: Callable[[Any], Any], interpret: bool
) -> list[Array]:
    """float32 [TILE, rows] for each part: rows of tokens times the tile's rows.

    Args:
      schedule, memory: The block's.
      before: How many pieces were multiplied earlier.
      count: How many are multiplied; with none the products are zero.
      parts: Of a piece of weights.
      first_row: Where the tokens of a piece begin, given its number.
      interpret: Run in Pallas' GPU interpreter.
    """
    dims, ring = (TILE, schedule.rows), np.int32(schedule.ring)

    def factors(i):
        x = memory.tokens.at[pl.ds(first_row(i), TILE)]
        pieces = memory.weights.at[lax.rem(before + i, ring)]
        return [(x, pieces.at[pl.ds(part * schedule.rows, schedule.rows)]) for part in range(parts)]

    def await_piece(i):
        plgpu.barrier_wait(memory.full.at[lax.rem(before + i, ring)])

    def let_go(i):
        plgpu.barrier_arrive(memory.free.at[lax.rem(before + i, ring)])

    if interpret:  # The interpreter does not know the instruction.

        def add(i, sums):
            await_piece(i)
            pairs = [[ref[...].astype(jnp.float32) for ref in pair] for pair in factors(i)]
            sums = [s + jnp.dot(x, w.T, precision="highest") for s, (x, w) in zip(sums, pairs, strict=True)]
            let_go(i)
            return sums

        return lax.fori_loop(0, count, add, [jnp.zeros(dims, jnp.float32) for _ in range(parts)])

    def multiply_pieces(*sums):
        def add_piece(i, _):
            await_piece(i)
            for total, (x, weight) in zip(sums, factors(i), strict=True):
                plgpu.wgmma(total, x, weight.transpose((1, 0)))
            plgpu.wgmma_wait(parts)  # those of the piece before have ended
            pl.when(i > 0)(lambda: let_go(i - 1))

        lax.fori_loop(0, count, add_piece, None)
        found = [total[...] for total in sums]
        pl.when(count > 0)(lambda: let_go(count - 1))
        return found

    return pl.run_scoped(multiply_pieces, *[ACC(dims, jnp.float32) for _ in range(parts)])
