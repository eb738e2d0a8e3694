"""What a launch of `append_and_attend` on a TPU goes by: how it is arranged on the chip, and its integers."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.call import Call
from jaxbuf.pallas.tpu_memory import vmem_bytes

LANES, SUBLANES = 128, 8
KIB = 2**10
BLOCK_BYTES = 256 * KIB  # of a block's keys: large enough that a core waits for bandwidth, not for each block
MOST_SCORES = 512 * KIB  # bytes of the scores of a block that exist at once
LEAST_KEYS, MOST_KEYS = 128, 512  # tokens of a block
MOST_DEPTH = 4
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
      visible: int32 [rows · time]: bit j of new token t says whether it sees new token j.
      shares: int32 [workers · SHARE_FIELDS]: each worker's first row, the one behind its last, and
        how many blocks its rows have.
      order: int32 [rows · listed], places before END where nothing is committed; one 0 without trees.
      table: int32 [rows, chunks, LANES], the pages of each row's slot; 0 where there is none.
    """

    rows: Array
    append: Array
    visible: Array
    shares: Array
    order: Array
    table: Array


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a call is arranged on a core.

    A group is what one matrix product serves: the query heads of as many key heads as a 32-bit word holds numbers of a
    lane, so that the words of a key's heads are read as they lie. Its queries are ordered by key head, token and head.

    Attributes:
      call: The call.
      generation: Of the chip, as in `Target`.
      depth: Blocks that are in VMEM at once, all but one of them on their way.
      span: Places of a block.
    """

    call: Call
    generation: str
    depth: int
    span: int

    @property
    def packed(self) -> int:
        """Key heads of a group."""
        return 4 // self.call.dtype.itemsize

    @property
    def groups(self) -> int:
        return self.call.kv_heads // self.packed

    @property
    def queries(self) -> int:
        """Queries of a group, in whole sublanes."""
        return _up(self.packed * self.call.queries, SUBLANES)

    @property
    def new(self) -> int:
        """Places of a block's buffer for new tokens, behind those of committed ones."""
        return _up(self.call.time, SUBLANES)

    @property
    def columns(self) -> int:
        """Tokens that a block's buffer has places for."""
        return self.span + self.new

    @property
    def lanes(self) -> int:
        """Numbers of a key that lie side by side in a buffer; a wider key has several parts."""
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
        block = 2 * self.columns * call.kv_heads * max(call.head_dim, LANES) * call.dtype.itemsize
        item = self.groups * self.queries * max(call.head_dim, LANES)
        return self.depth * block + (self.depth + 2) * item * call.dtype.itemsize + 4 * item + 8 * item

    @property
    def scalars(self) -> int:
        """Bytes of scalar memory: the integers of all rows, and tables of the rows that are in flight."""
        call = self.call
        of_rows = call.rows * (ROW_FIELDS + 2 * call.time + call.listed)
        return 4 * (of_rows + (self.depth + 1) * self.chunks * LANES)


def arrange(call: Call, generation: str) -> Arrangement:
    """How a call is arranged on a generation of chips.

    Args:
      call: The call.
      generation: As in `Target`; "" for the interpreter.
    """
    token = call.kv_heads * max(call.head_dim, LANES) * call.dtype.itemsize
    queries = _up(call.queries * 4 // call.dtype.itemsize, SUBLANES)
    most = min(BLOCK_BYTES // token, MOST_SCORES // (4 * queries * 4 // call.dtype.itemsize))
    span = LEAST_KEYS
    while 2 * span <= min(most, MOST_KEYS):
        span *= 2
    block = 2 * (span + _up(call.time, SUBLANES)) * token
    depth = int(np.clip(vmem_bytes(generation) // 2 // block, 2, MOST_DEPTH))
    return Arrangement(call, generation, depth, span)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


MOST_TOKENS, HEAD_DIMS, PAGE_SIZES = 16, (64, 128, 256), (8, 16, 32, 64, 128)


def needs(call: Call) -> tuple[tuple[bool, str], ...]:
    """What the kernel needs of a call, and whether it is met."""
    served = arrange(call, "") if call.dtype.itemsize in (2, 4) else None
    heads = (2, 4) if call.dtype.itemsize == 2 else (1, 2, 4)
    return (
        (call.dtype in (jnp.bfloat16, jnp.float32), f"pages in bfloat16 or float32, got {call.dtype.name}"),
        (call.head_dim in HEAD_DIMS, f"head_dim 64, 128 or 256, got {call.head_dim}"),
        (call.kv_heads in heads or call.kv_heads % 8 == 0, f"1, 2, 4 or a multiple of 8 kv_heads, got {call.kv_heads}"),
        (call.page_size in PAGE_SIZES, f"pages of 8, 16, 32, 64 or 128, got {call.page_size}"),
        (1 <= call.time <= MOST_TOKENS, f"1 to {MOST_TOKENS} tokens at once, got {call.time}"),
        (
            served is None or served.scalars <= SMEM_BYTES,
            f"at most {SMEM_BYTES // KIB} KiB of integers, got {call.rows} rows and {call.max_pages} pages of a slot",
        ),
    )
