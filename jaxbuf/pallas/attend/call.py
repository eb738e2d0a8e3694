"""What describes a call of `append_and_attend`: its sizes and dtype, and the integers that it goes by."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxbuf.axes import Array

KEYS = 64  # places of a block
TILE = 64  # queries that a warpgroup multiplies at once
MOST_TILES = 2  # of queries, which a warpgroup each multiplies with the same block
BLOCKS, CLEAN, END, REAL, ROW_FIELDS = 0, 1, 2, 3, 4
FIRST_ROW, FIRST_HEAD, FIRST_BLOCK, COUNT, SEGMENTS, WORKER_FIELDS = 0, 1, 2, 3, 4, 5
ITEM, FIRST_WORKER, LAST_WORKER, JOIN_FIELDS = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtype of a call of `append_and_attend`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      heads, kv_heads, head_dim: Of queries, and of keys and values.
      page_size: Tokens of a page.
      max_pages: Pages of a slot at most.
      listed: Places in the list of a slot's next tokens; 0 without trees.
      dtype: Of queries, keys, values and pages.
    """

    rows: int
    time: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    listed: int
    dtype: np.dtype

    @property
    def group(self) -> int:
        """Query heads that read a key head."""
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Queries that read the same keys: the new tokens of a row, and for each the query heads of a key head."""
        return self.time * self.group

    @property
    def tiles(self) -> int:
        """Tiles of queries."""
        return -(-self.queries // TILE)

    @property
    def items(self) -> int:
        """Pairs of a row and a key head."""
        return self.rows * self.kv_heads

    @property
    def block_pages(self) -> int:
        """Pages of a block."""
        return KEYS // self.page_size

    @property
    def padded_pages(self) -> int:
        """Pages of a slot at most, in whole blocks."""
        return -(-self.max_pages // self.block_pages) * self.block_pages


class Integers(NamedTuple):
    """The integers of a launch, which all layers share.

    An item is a row with a key head; items are numbered row by row. Its places are read in blocks. All blocks
    of all items, in order, are cut into equal parts, one for each worker. What a worker reads of one item is a segment.

    Attributes:
      rows: int32 [rows, ROW_FIELDS]. BLOCKS: how many are read, at least 1. CLEAN: the first so many hold committed
        tokens alone. END: from this place on, nothing is committed. REAL: bit t says whether new token t is appended.
      table: int32 [rows, padded_pages], the pages of each row's slot; 0 where there is none.
      order: int32 [rows, listed], places before END where nothing is committed; None without trees.
      append: int32 [rows, time], where each new token goes: page · page_size + place in the page; -1: nowhere.
      visible: int32 [rows, tiles · TILE]: bit t says whether a query sees new token t; token by token.
      workers: int32 [workers, WORKER_FIELDS]: the row, head and block that each begins with, how many blocks it
        reads, and in how many segments.
      joins: int32 [workers, JOIN_FIELDS]: where a worker is the second one of an item, the item, and the first and the
        last worker that read of it; elsewhere the item is -1.
    """

    rows: Array
    table: Array
    order: Array | None
    append: Array
    visible: Array
    workers: Array
    joins: Array
