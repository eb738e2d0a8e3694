"""What a launch of `append_and_attend` on a TPU goes by: how it is arranged on the chip, and its integers."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import Call
from jaxbuf.pallas.tpu_memory import MEBIBYTE, vmem_bytes

LANES, SUBLANES = 128, 8
KIB = 2**10
BLOCK_BYTES = 256 * KIB  # of a block's keys: large enough that a core waits for bandwidth, not for each block
MOST_SCORES = 512 * KIB  # bytes of the scores of a block that exist at once
LEAST_KEYS, MOST_KEYS = 128, 512  # tokens of a block
MOST_DEPTH = 4
MOST_TOKENS, HEAD_DIMS, PAGE_SIZES = 16, (64, 128, 256), (8, 16, 32, 64, 128)
SMEM_BYTES = 512 * KIB  # for integers; half of what a core has
CORES = {"v4": 2, "v5p": 2}  # cores that share the memory of a device, where there are several
BLOCKS, CLEAN, END, REAL, HOLES, ROW_FIELDS = 0, 1, 2, 3, 4, 5
FIRST_ROW, END_ROW, COUNT, SHARE_FIELDS = 0, 1, 2, 3


class Integers(NamedTuple):
    """The integers of a launch, which all layers share; they lie in a row, because scalar memory pads other shapes.

    A row's committed tokens are read in blocks of `Arrangement.span` places; a row without any has one, too. A worker
    (a core of the device) computes whole rows.

    Attributes:
      rows: int32 [rows · ROW_FIELDS]. BLOCKS: how many are read, at least 1. CLEAN: the first so many hold committed
        tokens alone. END: from this place on, nothing is committed. REAL: bit t says whether new token t is appended.
        HOLES: 1 if a page before END is not there.
      append: int32 [rows · time], where each new token goes: page · page_size + place in the page; -1: nowhere.
      homes: int32 [rows · time]: the first new token of the row whose place is in the same tile of SUBLANES places.
      visible: int32 [rows · time]: bit j of new token t says whether it sees new token j.
      shares: int32 [workers · SHARE_FIELDS]: each worker's first row, the one behind its last, and
        how many blocks its rows have.
      order: int32 [rows · listed], places before END where nothing is committed; one 0 without trees.
      table: int32 [rows, chunks, LANES], the pages of each row's slot; 0 where there is none.
    """

    rows: Array
    append: Array
    homes: Array
    visible: Array
    shares: Array
    order: Array
    table: Array


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a call is arranged on a core.

    A group is what one matrix product serves: the query heads of a key head, or, where each token of a page is a tile
    (`token_tiles`), of as many key heads as a 32-bit word holds numbers of a lane, so that the words of a key's heads
    are read as they lie. Its queries are ordered by key head, token and head.

    Attributes:
      call: The call.
      generation: Of the chip, as in `Target`.
      rank: Values are the first so many numbers of the keys; None: they have pages of their own.
      scale: The scores q · k are multiplied with it.
      depth: Blocks that are in VMEM at once, all but one of them on their way.
      span: Places of a block.
    """

    call: Call
    generation: str
    rank: int | None
    scale: float
    depth: int
    span: int

    @property
    def token_tiles(self) -> bool:
        """Whether XLA keeps each token of a page in tiles of its own: where key heads fill these. Else a head's tokens
        share tiles."""
        call = self.call
        few = (2, 4) if call.dtype.itemsize == 2 else (1, 2, 4)
        return self.rank is None and (call.kv_heads in few or call.kv_heads % SUBLANES == 0)

    @property
    def packed(self) -> int:
        """Key heads of a group."""
        return 4 // self.call.dtype.itemsize if self.token_tiles else 1

    @property
    def groups(self) -> int:
        return self.call.kv_heads // self.packed

    @property
    def queries(self) -> int:
        """Queries of a group, in whole sublanes."""
        return up(self.packed * self.call.queries, SUBLANES)

    @property
    def value_dim(self) -> int:
        return self.call.head_dim if self.rank is None else self.rank

    @property
    def pools(self) -> int:
        """Pools that a layer has: of keys, and of values."""
        return 2 if self.rank is None else 1

    @property
    def new(self) -> int:
        """Places of a block's buffer for new tokens, behind those of committed ones: whole tiles."""
        return up(self.call.time, SUBLANES if self.token_tiles else self.tile)

    @property
    def tile(self) -> int:
        """Rows of a tile in VMEM."""
        return SUBLANES * 4 // self.call.dtype.itemsize

    @property
    def columns(self) -> int:
        """Tokens that a block's buffer has places for."""
        return self.span + self.new

    @property
    def lanes(self) -> int:
        """Numbers of a key that lie side by side where tokens are tiles; a wider key has several parts."""
        return min(self.call.head_dim, LANES)

    @property
    def parts(self) -> int:
        return self.call.head_dim // self.lanes

    @property
    def workers(self) -> int:
        return CORES.get(self.generation, 1)

    @property
    def chunks(self) -> int:
        """Rows of LANES pages that the table of a slot has."""
        return -(-self.call.max_pages // LANES)

    @property
    def vmem(self) -> int:
        """Bytes of the buffers, at most."""
        call = self.call
        width = up(call.head_dim, LANES)
        item, block = self.groups * self.queries, self.pools * self.columns * call.kv_heads * width
        tiles = 0 if self.token_tiles else (self.depth + 1) * self.pools * call.time * call.kv_heads * self.tile * width
        stored = self.depth * (block + item * width) + 2 * item * up(self.value_dim, LANES) + tiles
        return stored * call.dtype.itemsize + 4 * item * (up(self.value_dim, LANES) + 2 * LANES)

    @property
    def scalars(self) -> int:
        """Bytes of scalar memory: the integers of all rows, and tables of the rows that are in flight."""
        call = self.call
        of_rows = call.rows * (ROW_FIELDS + 3 * call.time + call.listed)
        return 4 * (of_rows + (self.depth + 1) * self.chunks * LANES)


def arrange(call: Call, generation: str, *, rank: int | None = None, scale: float | None = None) -> Arrangement:
    """How a call is arranged on a generation of chips.

    Args:
      call: The call.
      generation: As in `Target`; "" for the interpreter.
      rank: As in `Arrangement`.
      scale: As there; None: head_dim ** -0.5.
    """
    least = Arrangement(call, generation, rank, call.head_dim**-0.5 if scale is None else scale, 2, LEAST_KEYS)
    width = up(call.head_dim, LANES) * call.dtype.itemsize
    scores = 4 * least.queries * least.packed  # bytes of a key's
    most = min(BLOCK_BYTES // (call.kv_heads * width), MOST_SCORES // scores, MOST_KEYS)
    plan = least
    while 2 * plan.span <= most:
        plan = dataclasses.replace(plan, span=2 * plan.span)
    deeper = [dataclasses.replace(plan, depth=depth) for depth in range(3, MOST_DEPTH + 1)]
    return [plan, *(each for each in deeper if 2 * each.vmem <= vmem_bytes(generation))][-1]


def vmem_limit(buffers: int, generation: str) -> int:
    """Bytes of VMEM that a kernel may use: its buffers, and room for what the compiler keeps beside them.

    Args:
      buffers: Bytes of these.
      generation: As in `Target`.
    """
    return min(buffers + 8 * MEBIBYTE, vmem_bytes(generation))


def up(number: int, multiple: int) -> int:
    """The number, rounded up to a multiple."""
    return -(-number // multiple) * multiple


def needs(call: Call, plan: Arrangement) -> tuple[tuple[bool, str], ...]:
    """What the kernel needs of a call that is arranged so, and whether it is met."""
    vmem = vmem_bytes(plan.generation)
    return (
        (call.dtype in (jnp.bfloat16, jnp.float32), f"pages in bfloat16 or float32, got {call.dtype.name}"),
        (
            plan.rank is not None or call.head_dim in HEAD_DIMS,
            f"head_dim 64, 128 or 256, got {call.head_dim}",
        ),
        (call.page_size in PAGE_SIZES, f"pages of 8, 16, 32, 64 or 128, got {call.page_size}"),
        (1 <= call.time <= MOST_TOKENS, f"1 to {MOST_TOKENS} tokens at once, got {call.time}"),
        (plan.vmem <= vmem * 3 // 4, f"buffers that fit in {vmem // KIB} KiB of VMEM, got {plan.vmem // KIB} KiB"),
        (
            plan.scalars <= SMEM_BYTES,
            f"at most {SMEM_BYTES // KIB} KiB of integers, got {call.rows} rows and {call.max_pages} pages of a slot",
        ),
    )
