"""What a launch of `extend` on a GPU is given: its sizes, what warpgroups get of them, and the integers of each row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.lanes import THREADS, WARP

type Array = jax.Array

TILE = 64  # rows of the state that a product takes
CHUNK = 16  # entries, or pairs of a new key and a new query, that a product takes
WIDE = 32  # entries of a later chunk at most, where there is shared memory for them
GROUP = 8  # entries of a chunk: several tokens skip those of which there are none
PROCESSORS = 132  # of an H100 or H200
MEMORY = 227 * 1024  # bytes of shared memory that a block may have
SWIZZLE = 128  # bytes of a row of the state's tiles in it
ALIGNMENT = 1024  # of each array in it
FEW_ROUNDS = 4  # of items, which lanes have dealt: from more they draw
FEW_ENTRIES = 8  # of a ring, that are added to the state one after the other
SPACING = 6  # rows of which one folds, where lanes draw: the others keep the memory busy meanwhile
ROW, LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO, FOLDING, FIELDS = range(8)  # of `Integers.numbers`


class Integers(NamedTuple):
    """What the kernel needs to know of each row, the same for all layers of a model; rows that fold stand early.

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
      max_time: The most tokens of a launch: as many places of a ring are free.
      state, entry, pair, out: Dtypes of checkpoints, entries, new keys and queries, and outputs.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    ring: int
    max_time: int
    state: np.dtype
    entry: np.dtype
    pair: np.dtype
    out: np.dtype

    @property
    def alone(self) -> bool:
        """Whether tokens only come one by one, to few entries."""
        return self.max_time == 1 and self.ring <= FEW_ENTRIES

    @property
    def room(self) -> int:
        """Committed entries that a slot may have."""
        return self.ring - self.max_time

    @property
    def wide(self) -> int:
        """Entries of a later chunk, where there is shared memory for it: as many as slots may have, in whole groups."""
        # Threads copy vectors of 128 numbers in groups of eight, and of 64 in groups of sixteen.
        group = GROUP if min(self.key_dim, self.value_dim) > TILE else CHUNK
        return min(WIDE, max(CHUNK, -(-(self.room - CHUNK) // group) * group))

    @property
    def width(self) -> int:
        """Columns of the product of the state with all pairs, rounded up to 8."""
        return -(-2 * self.time // 8) * 8

    @property
    def pairs(self) -> int:
        """Rows of shared memory for new keys and queries.

        A product with the state reads `width` of them, which no copy that is on its way meanwhile may meet.
        """
        return self._pairs(self.stages)

    def _pairs(self, stages: int) -> int:
        return self.width if stages and not self.frugal else 2 * self.time

    @property
    def columns(self) -> int:
        """Entries of a slot, in whole chunks, and what is passed on behind them, rounded up to one for each thread."""
        later = max(0, self.room - CHUNK)
        return -(-(CHUNK + -(-later // WIDE) * WIDE + self.passed) // THREADS) * THREADS

    @property
    def exact(self) -> bool:
        """Whether decays are summed exactly, in two parts, which may then be done in any order: worth it for many."""
        return self.room > CHUNK + WIDE

    @property
    def passed(self) -> int:
        """Numbers that reach the next item through shared memory: the fields of a row, and three of each token."""
        return FOLDING + 3 * self.time

    @property
    def planes(self) -> int:
        """bfloat16 arrays that an entry, key or query is split into."""
        return 1 if self.pair == jnp.bfloat16 else 2

    @property
    def frugal(self) -> bool:
        """Whether products are kept without the rows and columns that no token needs: three slots then fit."""
        return self.time == 1

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.heads // self.key_heads

    @property
    def halves(self) -> list:
        """Rows of the state that are asked for, and multiplied, together."""
        return [pl.ds(top, TILE) for top in range(0, self.value_dim, TILE)]

    @property
    def parts(self) -> list:
        """Columns of the state that a product takes: a tile of its memory."""
        columns = SWIZZLE // self.state.itemsize
        return [pl.ds(start, columns) for start in range(0, self.key_dim, columns)]

    @property
    def tiles(self) -> list[int]:
        """First of the pairs that a product takes; the last takes some a second time."""
        return [*range(0, 2 * self.time - CHUNK, CHUNK), max(0, 2 * self.time - CHUNK)]

    @property
    def items(self) -> int:
        return self.rows * self.heads

    @property
    def blocks(self) -> int:
        return min(PROCESSORS, pl.cdiv(self.items, self.slots))

    @property
    def lanes(self) -> int:
        """Warpgroups of all blocks."""
        return self.blocks * self.slots

    @property
    def draws(self) -> bool:
        """Whether lanes draw their items: worth a counter that must be zeroed before, if there are many."""
        return pl.cdiv(self.items, self.lanes) > FEW_ROUNDS

    @property
    def spacing(self) -> int:
        """Rows of which one folds, among the first half or fewer of them; 1: those that fold come first."""
        return SPACING if self.draws else 1

    @property
    def stages(self) -> int:
        """Later chunks, of `wide` entries, that have shared memory at once; if none, they are of CHUNK and share it.

        A ring of several is worth a warpgroup.
        """
        if self.room <= CHUNK or self.entry != jnp.bfloat16 or self.planes > 1:
            return 0
        if self.room <= CHUNK + WIDE:
            return int(self._slots(1) == self._slots(0))
        return next((stages for stages in (2, 1) if self._slots(stages) >= min(2, self._slots(0))), 0)

    @property
    def ahead(self) -> bool:
        """Whether a first chunk goes to shared memory at once, past the registers."""
        return bool(self.stages) and not self.frugal

    @property
    def span(self) -> int:
        """Columns of `products` for entries, before what tokens have of each other."""
        return WIDE if self.stages else CHUNK

    @property
    def multiplies(self) -> bool:
        """Whether entries are added on the tensor cores, a chunk at once: in another order than one by one, which is no
        matter where tokens always come one by one."""
        return self.max_time == 1 and self.stages > 0 and self.exact

    @property
    def slots(self) -> int:
        """Warpgroups of a block: as many as there is work and shared memory for."""
        return self._slots(self.stages)

    def _slots(self, stages: int) -> int:
        wanted = min(3, pl.cdiv(self.items, PROCESSORS))
        return next((slots for slots in range(wanted, 0, -1) if self.bytes(slots, stages) <= MEMORY), 0)

    def scratch(self, slots: int, stages: int) -> dict:
        """Shared memory for `slots` warpgroups with `stages` later chunks."""
        tiling = plgpu.TilingTransform((8, SWIZZLE // self.state.itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]

        # Rows are a little longer than they need be: their columns then lie in different banks.
        pitch = max(self.key_dim, self.value_dim) + 8
        entries = WIDE if stages else CHUNK

        def memory(*dims, dtype=jnp.float32, transforms=()):
            return plgpu.SMEM((slots, *dims), dtype, transforms=transforms)

        arrays = {
            "state": memory(len(self.halves), TILE, self.key_dim, dtype=self.state, transforms=(tiling, swizzle)),
            # A chunk of keys, the pairs, and the chunk's updates.
            "rows": memory(self.planes, 2 * CHUNK + self._pairs(stages), pitch, dtype=jnp.bfloat16),
            # Of each entry the gate, then the decay since, or its factor; behind the gates, what is passed on; then the
            # number drawn.
            # CHUNK more than columns: for that number; no chunk's decays lie there.
            "sums": memory(self.columns + CHUNK),
            "products": memory(2 * self.time if self.frugal else max(CHUNK, 2 * self.time), entries + CHUNK),
            "reads": memory(*((2 * self.time, self.value_dim) if self.frugal else (self.value_dim, self.width + 2))),
            "barriers": plgpu.Barrier(num_barriers=slots * (self.value_dim // TILE)),
        }
        if self.exact:  # of each decay the second part, if it is kept in parts; behind them both of a warp's sums
            arrays["lows"] = memory((0 if self.frugal else self.columns) + 2 * THREADS // WARP)
        if stages:  # keys and updates of each; where entries lie
            arrays["later"] = memory(2 * self.wide * stages, pitch, dtype=jnp.bfloat16)
            arrays["positions"] = memory(self.columns, dtype=jnp.int32)
        return arrays

    def bytes(self, slots: int, stages: int) -> int:
        """Shared memory for `slots` warpgroups with `stages` later chunks."""
        arrays = [x for x in self.scratch(slots, stages).values() if not isinstance(x, plgpu.Barrier)]
        sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays]
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT
