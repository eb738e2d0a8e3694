"""`project` and its kin on NVIDIA GPUs (Hopper), for the few tokens of a decoding step: Pallas Mosaic GPU.

The rows of all weights are shared out in tiles of equal height, as many as there are multiprocessors wherever one tile
each suffices: no multiprocessor has more to read than another. A warpgroup of a block brings pieces of its tile, and
the same pieces of all tokens, to a ring in shared memory. One or two others multiply them on the tensor cores, each 64
or 128 tokens. The tokens come from the L2 for every tile: where a weight has few rows, its tiles would have so few that
the tokens were most of the work, so its rows are cut into slices, and a tile has a block for each.

Blocks of a cluster that read a share of the tokens each and pass it on are not faster (28.7 us in twos and 42 in fours
where these take 28.3, 128 tokens, two weights of 9216 x 2560). Nor is a step whose kernels are launched while the ones
before them end, with the first pieces of weights prefetched to the L2: 7.59 ms where it takes 7.45, Qwen3.5-4B with
128 rows. Nor are products whose blocks, behind their own pieces, prefetch the next product's weights: 2.42 ms a step
where they take 2.31, Qwen3.5-4B with one row, up to 16 MB of each.

Floor: (weights + x + results) / read bandwidth.

Precision: products of 2-byte operands with float32 sums, rounded once; the gate is computed from unrounded sums.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.project.call import Call
from jaxbuf.pallas.threads import COMPILER, THREADS, store_inside

PROCESSORS = 132  # of an H100 or H200
SHARED_MEMORY = 226 * 2**10  # of a multiprocessor
MOST_TOKENS = 256
TILE = 64  # tokens of a product
STEP = 64  # numbers of a row that are brought at once
MOST_STEPS = 10  # in the ring
# Rows of a weight are cut into slices, the best number first, for so many tokens (with 256 a step of Qwen3.5-4B takes
# 2 % longer than with the library's products), and for weights of so few rows.
SLICES, MOST_IN_SLICES, MOST_ROWS = (3, 4, 2), 128, 8192
LIBRARY_SLICES = 4  # into which XLA cuts them, beyond so many tokens
MOST_SUMS = 160  # of a thread
# Registers of each thread that multiplies, and of each that brings, by the warpgroups that multiply; None: as compiled.
REGISTERS: dict[int, tuple[int, int] | None] = {1: None, 2: (216, 40), 3: (160, 32)}

WGMMA, ACC = plgpu.Layout.WGMMA, plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is arranged.

    Attributes:
      warpgroups: Of a block, that multiply.
      products: Of each of them, one for each 64 of its tokens.
      rows: Of a tile of weights: of each of the two, where there is a gate.
      tiles: How many each weight has.
      ring: Pieces of the ring.
    """

    warpgroups: int
    products: int
    rows: int
    tiles: tuple[int, ...]
    ring: int

    @property
    def tokens(self) -> int:
        """Of a piece, what is beyond the call's own included."""
        return self.warpgroups * self.products * TILE


def arrange(call: Call) -> Schedule:
    warpgroups, products = min(2, -(-call.tokens // TILE)), -(-call.tokens // (2 * TILE))
    parts, weights = (2, call.outputs[:1]) if call.gated else (1, call.outputs)

    def tiles(rows: int) -> tuple[int, ...]:
        return tuple(-(-n // rows) for n in weights)

    def cost(rows: int) -> int:
        """Rows that the busiest multiprocessor reads, and what it does besides, in rows."""
        return -(-sum(tiles(rows)) * call.slices // PROCESSORS) * (parts * rows + 8)

    most = min(256, MOST_SUMS * THREADS // (products * TILE)) // parts  # wgmma has 256 columns at most
    rows = min(range(8, most + 1, 8), key=cost)
    room = SHARED_MEMORY // (2 * STEP * (warpgroups * products * TILE + parts * rows))
    return Schedule(warpgroups, products, rows, tiles(rows), min(MOST_STEPS, room))


def slices_of(tokens: int, inputs: int, outputs: int) -> int:
    """Into how many slices rows of a weight are best cut; 1 where the library's product is as fast."""
    if tokens > MOST_IN_SLICES or outputs > MOST_ROWS:
        return 1
    return next((n for n in SLICES if inputs % (n * STEP) == 0), 1)


def library_slices_of(tokens: int, inputs: int, outputs: int) -> int:
    """Into how many slices rows of a weight are cut for the library's product, with more tokens than `slices_of` takes;
    1 if they are not. XLA cuts them itself, and sums the products up in a launch of its own."""
    fits = MOST_IN_SLICES < tokens <= MOST_TOKENS and outputs <= MOST_ROWS and inputs % (LIBRARY_SLICES * STEP) == 0
    return LIBRARY_SLICES if fits else 1


class Memory(NamedTuple):
    """A block's ring: tokens [ring, all its warpgroups' tokens, STEP], weights [ring, parts · rows, STEP], and barriers
    that open when a piece is there (`full`), and when it was used (`free`)."""

    tokens: Any
    weights: Any
    full: Any
    free: Any


def project(call: Call, x: Array, weights: Sequence[Array], *, interpret: bool = False) -> tuple[Array, ...]:
    """`jaxbuf.models.projections.project` or one of its kin; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      x: [tokens, inputs].
      weights: Each [out, inputs]; where they are stacked, one.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [tokens, out] for each weight, [slices, tokens, out] with several slices; for a gated call one.
    """
    if call.tokens > 8:  # pieces have rows by eight, unless x has fewer
        x = jnp.pad(x, ((0, -call.tokens % 8), (0, 0)))
    found = _kernel(call, arrange(call), interpret)(x, *weights)
    return tuple(found)


def _kernel(call: Call, schedule: Schedule, interpret: bool):
    parts, weights, results = 2 if call.gated else 1, 1 if call.stacked else len(call.outputs), len(call.dtypes)
    tokens, steps = 8 * -(-call.tokens // 8), call.inputs // (STEP * call.slices)
    shape, tiles = (call.slices, call.tokens) if call.slices > 1 else (call.tokens,), sum(schedule.tiles)
    transforms = plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    begins = [sum(schedule.tiles[:i]) for i in range(len(schedule.tiles))]
    above = [sum(call.outputs[:i]) if call.stacked else 0 for i in range(len(call.outputs))]  # rows

    def multiply_tokens(x, *refs):
        given, outs = refs[:weights], refs[weights : weights + results]
        memory = Memory(*refs[weights + results :])
        slice_number, number = lax.div(lax.axis_index("block"), np.int32(tiles)), lax.axis_index("block")
        number -= slice_number * tiles
        role = lax.axis_index("warpgroup")

        def set_registers(which: int, action) -> None:
            if (registers := REGISTERS[schedule.warpgroups]) and not interpret:
                plgpu.set_max_registers(registers[which], action=action)

        def each_weight(function) -> None:
            """Calls it with the number of the tile's weight, and which of that weight's rows is the tile's first."""
            for i, (begin, count) in enumerate(zip(begins, schedule.tiles, strict=True)):
                here = functools.partial(function, i, (number - begin) * schedule.rows)
                pl.when((number >= begin) & (number < begin + count))(here)

        @pl.when(role < schedule.warpgroups)
        def _():
            set_registers(0, "increase")
            found = multiply(schedule, memory, role, steps, parts, interpret)

            def write(i, row):
                out = outs[i] if call.slices == 1 else outs[i].at[slice_number]
                for product, sums in enumerate(found):
                    first = (role * schedule.products + product) * TILE
                    written = result(sums, call.squared).astype(out.dtype)
                    store_inside(written, WGMMA, out, first, row, interpret)

            each_weight(write)

        @pl.when(role == schedule.warpgroups)
        def _():
            set_registers(1, "decrease")

            def bring(i, row):
                here = given if call.gated or call.stacked else given[i : i + 1]
                _bring(schedule, memory, x, here, above[i] + row, slice_number * steps, tokens, steps)

            each_weight(bring)

    # A profile shows this name, and kernels of other weights have others.
    multiply_tokens.__name__ = f"multiply_tokens_{'_'.join(map(str, call.outputs))}_by_{call.inputs}"
    return plgpu.kernel(
        multiply_tokens,
        out_type=[
            jax.ShapeDtypeStruct((*shape, n), dtype)
            for n, dtype in zip(call.outputs[:results], call.dtypes, strict=True)
        ],
        grid=(tiles * call.slices,),
        grid_names=("block",),
        num_threads=schedule.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((schedule.ring, schedule.tokens, STEP), call.dtype, transforms=transforms),
            plgpu.SMEM((schedule.ring, parts * schedule.rows, STEP), call.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=1 + parts, num_barriers=schedule.ring),
            plgpu.Barrier(num_arrivals=schedule.warpgroups, num_barriers=schedule.ring),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _bring(
    schedule: Schedule, memory: Memory, x, weights: Sequence[Any], row: Array, first: Array, tokens: int, steps: int
) -> None:
    """Brings the pieces of a tile, which begins at `row` of its weights, and of the tokens: `steps` from `first` on."""

    def source(weight, i):
        # What lies below a weight's last row arrives as zeros, or as what the next one has there: neither is stored.
        return weight.at[pl.ds(row, min(schedule.rows, weight.shape[0])), pl.ds((first + i) * STEP, STEP)]

    # Where x has fewer rows than a piece, what lies below them arrives as zeros, too: Pallas lets a slice reach there
    # that begins at a number which is not known yet.
    top = lax.axis_index("block") * 0

    def bring_piece(i, _):
        at, columns = lax.rem(i, np.int32(schedule.ring)), pl.ds((first + i) * STEP, STEP)
        full = memory.full.at[at]
        pl.when(i >= schedule.ring)(lambda: plgpu.barrier_wait(memory.free.at[at]))
        for part, weight in enumerate(weights):
            piece = source(weight, i)
            target = memory.weights.at[at, pl.ds(part * schedule.rows, piece.shape[0])]
            plgpu.copy_gmem_to_smem(piece, target, full)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(top, tokens), columns], memory.tokens.at[at, pl.ds(0, tokens)], full)

    lax.fori_loop(0, steps, bring_piece, None)

    def wait(i, _):
        plgpu.barrier_wait(memory.free.at[lax.rem(i, np.int32(schedule.ring))])

    lax.fori_loop(max(steps - schedule.ring, 0), steps, wait, None)


def result(sums: Sequence[Array], squared: bool = False) -> Array:
    """What is written of a product: its sums, the square of their relu, or silu(gate) · up."""
    if len(sums) == 1:
        return jnp.square(jnp.maximum(sums[0], 0)) if squared else sums[0]
    gate, up = sums
    root = lax.rsqrt(np.float32(1) + jnp.exp(-gate))  # Its square is the sigmoid. A division takes ten instructions.
    return gate * (root * root) * up


class Multiplied(Protocol):
    """What `multiply` needs to know of a schedule, see `Schedule`."""

    @property
    def products(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def ring(self) -> int: ...


def multiply(
    schedule: Multiplied, memory: Memory, role, steps: int, parts: int, interpret: bool, before=0
) -> list[list[Array]]:
    """float32 [TILE, rows] for each of the warpgroup's products and each part: its tokens times the tile's rows.

    Args:
      schedule, memory: The block's.
      role: The warpgroup's number.
      steps: How many pieces there are.
      parts: Of the tile.
      interpret: Run in Pallas' GPU interpreter.
      before: How many pieces of other tiles went through the ring earlier.
    """
    dims, products = (TILE, schedule.rows), schedule.products

    def place(i):
        return lax.rem(before + i, np.int32(schedule.ring))

    def factors(i):
        at = place(i)
        tokens = [memory.tokens.at[at, pl.ds((role * products + j) * TILE, TILE)] for j in range(products)]
        weights = [memory.weights.at[at, pl.ds(part * schedule.rows, schedule.rows)] for part in range(parts)]
        return [(x, weight) for x in tokens for weight in weights]

    def let_go(i):
        plgpu.barrier_arrive(memory.free.at[place(i)])

    if interpret:  # The interpreter does not know the instruction.

        def add(i, sums):
            plgpu.barrier_wait(memory.full.at[place(i)])
            pairs = [[ref[...].astype(jnp.float32) for ref in pair] for pair in factors(i)]
            sums = [s + jnp.dot(x, w.T, precision="highest") for s, (x, w) in zip(sums, pairs, strict=True)]
            let_go(i)
            return sums

        found = lax.fori_loop(0, steps, add, [jnp.zeros(dims, jnp.float32) for _ in range(products * parts)])
        return [found[j * parts : (j + 1) * parts] for j in range(products)]

    def multiply_pieces(*sums):
        def add_piece(i, _):
            plgpu.barrier_wait(memory.full.at[place(i)])
            for total, (x, weight) in zip(sums, factors(i), strict=True):
                plgpu.wgmma(total, x, weight.transpose((1, 0)))
            plgpu.wgmma_wait(len(sums))  # those of the piece before have ended
            pl.when(i > 0)(lambda: let_go(i - 1))

        lax.fori_loop(0, steps, add_piece, None)
        found = [total[...] for total in sums]
        let_go(np.int32(steps - 1))
        return [found[j * parts : (j + 1) * parts] for j in range(products)]

    return pl.run_scoped(multiply_pieces, *[ACC(dims, jnp.float32) for _ in range(products * parts)])
