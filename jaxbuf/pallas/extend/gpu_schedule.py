"""How the GPU kernel of `extend` arranges a call: who serves what, in which chunks, in which shared memory.

`arrange` chooses how many warpgroups share a block and how many chunks of entries have shared memory of their own; all
else follows from these two numbers and the call. The package's docstring explains the terms.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.call import Call
from jaxbuf.pallas.threads import THREADS, WARP

# Sizes of the products on the tensor cores.
BAND = 64  # rows of the state
CHUNK = 16  # entries of a first chunk; or probes that are multiplied with a chunk's keys
MAX_LATER_CHUNK = 32  # entries, at most, of a later chunk that has shared memory of its own
SKIPPED_TOGETHER = 8  # entries of a chunk; with several new tokens, they are skipped if none of them is live

# The machine.
PROCESSORS = 132  # multiprocessors of an H100 or H200
MEMORY = 227 * 1024  # bytes of shared memory that a block may have
SWIZZLE = 128  # bytes of a row of the tiles in which the state lies in shared memory
ALIGNMENT = 1024  # bytes; where each array in shared memory begins

# The order of the work.
MAX_WARPGROUPS = 3  # warpgroups of a block
MAX_SMALL_WARPGROUPS = 4  # with one new token and windows of 64 values; 128 registers a thread are enough then
MAX_DEALT_ROUNDS = 4  # Up to this many rounds, items are dealt statically; beyond, lanes draw from a counter.
SPACING = 6  # Where lanes draw, rows that fold are at most this many lines apart: others keep the memory busy.


class SharedMemory(NamedTuple):
    """The arrays of a block in shared memory: before the launch their types, in the kernel references to them.

    Every array but `barriers` has a leading axis of the block's warpgroups, which is left out below. The sizes are
    those of `Schedule`; pitch is the length of a key or update and a little more.

    Attributes:
      barriers: One for each band of each warpgroup. It opens when that band of a checkpoint has arrived.
      later: bfloat16 [2 · later_size · stages, pitch]: the keys, then the updates, of each stage. None without stages.
      decays_low: f32 [stacked, ...], the second parts of `decays`, unless these are exponentials; then both parts of
        each warp's sum. None unless `sums_exactly`.
      positions: int32 [padded_entries], the flat positions of an item's entries. None without stages.
      products: f32, each probe times each key of a chunk; then each probe times each new key. With stacks, weighed for
        each head.
      reads: f32, the state times each probe. With `adds_on_tensor_cores`, what entries add to outputs until then.
      fold_reads: f32, with one new token the same of a split state that was folded. None if no state is split.
      vectors: bfloat16 [planes, 2 · CHUNK + probe_rows, pitch]: the first chunk's keys, the probes, the first chunk's
        updates. With `adds_on_tensor_cores`, the weights of each chunk overwrite these keys.
      state: [bands, BAND, key_dim], the item's checkpoint, or the high half of a split one. While a split one folds,
        the first band is the high half of the band that the fold has come to, and the second the low half, unless
        `low_in_registers`.
      low: int8 [BAND, key_dim], where the low half lies instead if it is int8. None if it is not, or with
        `low_in_registers`.
      low_scales: f32 [value_dim], with one new token the scales of an int8 low half's rows; with several, they are the
        column of `reads` behind the products. None if it is not int8.
      strengths: f32 [stacked, padded_entries + CHUNK], without the delta rule: of each entry its beta. Else None.
      decays: f32 [stacked, padded_entries + CHUNK]: of each entry the gate, which is overwritten by the decay since
        the entry, or by that decay's exponential. Of the first head's, the last `passed_words` numbers before
        `padded_entries` are those passed on to the next item, unless `words` has them, and the one at `padded_entries`
        is the number that the lane drew: no chunk's decays reach that far.
      words: f32 [THREADS], of which the last `passed_words` are passed on. None unless `reads_late`.
    """

    barriers: Any
    later: Any
    decays_low: Any
    positions: Any
    products: Any
    reads: Any
    fold_reads: Any
    vectors: Any
    state: Any
    low: Any
    low_scales: Any
    strengths: Any
    decays: Any
    words: Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The arrangement of one call, from `arrange`.

    Attributes:
      call: The call.
      warpgroups: Warpgroups of a block; each serves items on its own.
      stages: Later chunks that have shared memory of their own at the same time, `later_size` entries each. 0: later
        chunks have CHUNK entries, and each is written over the chunk before it.
    """

    call: Call
    warpgroups: int
    stages: int

    # Work: which lane serves which item.

    @property
    def blocks(self) -> int:
        """Blocks of the launch: one for each multiprocessor, or fewer if there is less work."""
        return min(PROCESSORS, pl.cdiv(self.call.items, self.warpgroups))

    @property
    def lanes(self) -> int:
        """Warpgroups of all blocks together."""
        return self.blocks * self.warpgroups

    @property
    def draws(self) -> bool:
        """Whether lanes draw items from a counter; it has to be zeroed before, which pays off for many rounds only."""
        return pl.cdiv(self.call.items, self.lanes) > MAX_DEALT_ROUNDS

    @property
    def spacing(self) -> int:
        """One line in so many, or in fewer, is a row's that folds, so that all of these are in the first half.

        1: the rows that fold have the first lines.
        """
        return SPACING if self.draws else 1

    @property
    def fold_cost(self) -> int:
        """Where items are dealt, one that folds counts as this many that do not."""
        return 2 if self.call.low is None else 4

    # Chunks: which entries are taken together, and how they are added.

    @property
    def later_size(self) -> int:
        """Entries of a later chunk with shared memory of its own: as many as rows can have, in whole groups."""
        # Threads copy vectors of 128 numbers in groups of eight, and of 64 in groups of sixteen. Windows of both sizes
        # serve the same memory: a fold's sums must have one order.
        windows = self.call.head_values and self.call.stacked > 1
        group = 8 if min(self.call.key_dim, self.call.value_dim) > 64 and not windows else 16
        return min(MAX_LATER_CHUNK, max(CHUNK, -(-(self.call.max_live - CHUNK) // group) * group))

    @property
    def padded_entries(self) -> int:
        """Entries of a row, padded to whole chunks, and the passed words; rounded up to whole multiples of THREADS."""
        later = max(0, self.call.max_live - CHUNK)
        padded = CHUNK + -(-later // MAX_LATER_CHUNK) * MAX_LATER_CHUNK
        return -(-(padded + self.call.passed_words) // THREADS) * THREADS

    @property
    def copies_first_chunk(self) -> bool:
        """Whether an item's first chunk is copied straight to shared memory, and not loaded into registers first."""
        return bool(self.stages) and not self.one_token

    @property
    def sums_exactly(self) -> bool:
        """Whether decays are summed in two exact parts, in any order; this pays off for many entries only."""
        return self.call.max_live > CHUNK + MAX_LATER_CHUNK

    @property
    def adds_on_tensor_cores(self) -> bool:
        """Whether entries are added to outputs on the tensor cores, a chunk at once.

        Their sum then has another order than one by one. That is allowed where tokens always come one by one.
        """
        return self.call.max_pending == 1 and self.stages > 0 and self.sums_exactly and self.call.stacked == 1

    # Products: what the tensor cores multiply at once.

    @property
    def one_token(self) -> bool:
        """Whether a row has one new token.

        Products are then stored without the rows and columns that no token needs, so that three warpgroups fit.
        """
        return self.call.time == 1

    @property
    def planes(self) -> int:
        """bfloat16 arrays that hold a key, query or update: 1, or 2 (the high and the low half of float32)."""
        return 1 if self.call.probe == jnp.bfloat16 else 2

    @property
    def bands(self) -> list:
        """The bands of the state: slices of its rows."""
        return [pl.ds(top, BAND) for top in range(0, self.call.value_dim, BAND)]

    @property
    def buffers(self) -> int:
        """Bands that have shared memory at the same time: all; or two at least, for the halves of a split one."""
        return len(self.bands) if self.call.low is None or self.low_in_registers else max(2, len(self.bands))

    @property
    def low_in_registers(self) -> bool:
        """Whether a fold loads the low half of a split checkpoint to registers, and stores it from there.

        With keys of 256 numbers, shared memory for it would cost a warpgroup.
        """
        return self.call.low is not None and self.call.key_dim > THREADS

    @property
    def state_strips(self) -> list:
        """Slices of the state's columns that a product takes: each is as wide as a tile of its shared memory."""
        columns = SWIZZLE // self.call.state.itemsize
        return [pl.ds(start, columns) for start in range(0, self.call.key_dim, columns)]

    @property
    def key_strips(self) -> list:
        """Slices of a key's numbers. Each has a sum of its own, because products into one sum wait for each other."""
        n = self.call.key_dim // (4 if self.adds_on_tensor_cores else 2)
        return [pl.ds(start, n) for start in range(0, self.call.key_dim, n)]

    @property
    def probe_columns(self) -> int:
        """Columns of the product of the state with all probes: 2 T, rounded up to 8."""
        return -(-2 * self.call.time // 8) * 8

    @property
    def probe_starts(self) -> list[int]:
        """The first probe of each product with a chunk's keys; CHUNK probes are taken, by the last some once more."""
        probes = 2 * self.call.time
        return [*range(0, probes - CHUNK, CHUNK), max(0, probes - CHUNK)]

    # Memory: what a block holds in shared memory.

    @property
    def product_rows(self) -> int:
        """Rows of `SharedMemory.products`, of each head of a stack."""
        probes = 2 * self.call.time
        return probes if self.one_token else max(CHUNK, probes)

    @property
    def reads_late(self) -> bool:
        """Whether passed words are read where they are used, not all when the lane begins to serve the item.

        The fold of a split state needs many registers: what they hold meanwhile is spilled.
        """
        return self.call.low == jnp.int8 or (self.call.low is not None and not self.one_token)

    @property
    def probe_rows(self) -> int:
        """Rows of shared memory for the probes.

        A product with the state reads `probe_columns` of them. While chunks are copied to the rows behind, none of
        those may be among the rows that it reads.
        """
        return self.probe_columns if self.copies_first_chunk else 2 * self.call.time

    @property
    def entry_columns(self) -> int:
        """Columns of `SharedMemory.products` for the entries of a chunk; those of the new keys come behind them."""
        return MAX_LATER_CHUNK if self.stages else CHUNK

    def shared_memory(self) -> SharedMemory:
        """The types of a block's arrays in shared memory."""
        call, one_token = self.call, self.one_token
        probes = 2 * call.time

        # Rows are a little longer than they need be: their columns then lie in different banks.
        pitch = max(call.key_dim, call.value_dim) + 8

        def memory(*dims, dtype=jnp.float32, transforms=()):
            return plgpu.SMEM((self.warpgroups, *dims), dtype, transforms=transforms)

        def states(*dims, dtype):  # in tiles as wide as a strip
            columns = SWIZZLE // call.state.itemsize
            tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
            swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
            return memory(*dims, BAND, call.key_dim, dtype=dtype, transforms=(tiling, swizzle))

        low_decays = 0 if one_token else self.padded_entries
        every = self.padded_entries + CHUNK
        reads = (probes, call.value_dim) if one_token else (call.value_dim, self.probe_columns + 2)
        return SharedMemory(
            barriers=plgpu.Barrier(num_barriers=self.warpgroups * self.buffers),
            later=memory(2 * self.later_size * self.stages, pitch, dtype=jnp.bfloat16) if self.stages else None,
            decays_low=memory(call.stacked, low_decays + 2 * THREADS // WARP) if self.sums_exactly else None,
            positions=memory(self.padded_entries, dtype=jnp.int32) if self.stages else None,
            products=memory(call.stacked * self.product_rows, self.entry_columns + CHUNK),
            reads=memory(*reads),
            fold_reads=memory(*reads) if call.low is not None and one_token else None,
            vectors=memory(self.planes, 2 * CHUNK + self.probe_rows, pitch, dtype=jnp.bfloat16),
            state=states(self.buffers, dtype=call.state),
            low=states(dtype=call.low) if call.low == jnp.int8 and not self.low_in_registers else None,
            low_scales=memory(call.value_dim) if call.low == jnp.int8 and one_token else None,
            strengths=None if call.delta else memory(call.stacked, every),
            decays=memory(call.stacked, every),
            words=memory(THREADS) if self.reads_late else None,
        )

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that a block needs."""
        return count_bytes(self.shared_memory())


def count_bytes(memory: Iterable) -> int:
    """Bytes of shared memory that a block with these arrays needs; barriers and None count nothing."""
    arrays = [x for x in memory if x is not None and not isinstance(x, plgpu.Barrier)]
    sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT


def arrange(call: Call) -> Schedule:
    """Chooses a call's warpgroups and stages: as many as there is work and shared memory for."""
    # Small states: a window takes as long as what its lane waits for, not as its bytes, so more lanes are faster.
    small = call.time == 1 and call.head_values and call.value_dim == BAND and call.key_dim <= THREADS
    most = MAX_SMALL_WARPGROUPS if small else MAX_WARPGROUPS
    if call.low == jnp.int8 and call.time > 1:
        most = min(2, most)  # Three have too few registers for folds of several tokens with int8 low halves.
    wanted = min(most, pl.cdiv(call.items, PROCESSORS))

    def fit(stages: int) -> Schedule:
        """The most warpgroups that have shared memory for so many stages; 0 if there is not enough for one."""
        schedules = [Schedule(call, warpgroups, stages) for warpgroups in range(wanted, 0, -1)]
        return next((schedule for schedule in schedules if schedule.bytes <= MEMORY), Schedule(call, 0, stages))

    without = fit(0)
    if call.max_live <= CHUNK or call.entry != jnp.bfloat16 or without.planes > 1:
        return without
    # Where rows have at most one later chunk, a stage may cost the fourth warpgroup. Where they have several, stages
    # may cost the third one, too.
    fewest, choices = (3, (1,)) if not without.sums_exactly else (2, (2, 1))
    fewest = min(fewest, without.warpgroups)
    return next((with_stages for with_stages in map(fit, choices) if with_stages.warpgroups >= fewest), without)
