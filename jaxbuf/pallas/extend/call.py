"""What describes a call of `extend`: its sizes and dtypes, and the integers that say where each row's memory lies."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array

ROW, LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO, FOLDING, FIELDS = range(8)  # columns of `Integers.fields`
ROW_FIELDS = FOLDING  # columns that describe a row; the one behind them, FOLDING, is the same in every line


class Integers(NamedTuple):
    """What a kernel needs to know of each row, the same for all layers of a model.

    Each row has one line in all three arrays. Rows that fold have the early lines, because they take longest.

    Attributes:
      fields: int32 [rows, FIELDS]. ROW: which row of the inputs and outputs the line is about. LENGTH: the row's new
        tokens. LIVE: its live entries. CHECKPOINT: the checkpoint that is read. HAS_CHECKPOINT: 1 if there is one,
        else 0. FOLD_TO: the checkpoint that a fold writes, or -1 if the row does not fold. FOLDING: how many rows fold.
      entries: int32 [rows, ring], the flat position of each live entry, in logical order; 0 behind them.
      append: int32 [rows, T], the flat position of each new entry; -1 where none is written.
      paths: int32 [rows, T], of a tree: bit j of number i says whether token j is on token i's path, i itself included.
        None: each token follows the one before.
    """

    fields: Array
    entries: Array
    append: Array
    paths: Array | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `extend`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      heads, key_heads, key_dim, value_dim: As in `RecurrenceSpec`.
      ring: Entries that the ring of a slot has places for.
      max_pending: The most tokens of any launch. The ring keeps this many places free for pending tokens.
      state: The checkpoints' dtype, or that of their high halves if they are split.
      low: The dtype of their low halves; None if they are not split.
      decay, delta: As in `RecurrenceSpec`.
      tree: Whether the new tokens are those of a tree. One token is none.
      room: A row with more live entries than that folds. None: rows may fill all places that are not kept free.
      stacked: How many heads, one on the other, count as one here: `heads` is the number of such stacks, and
        `value_dim` that of one. Only the decays and write strengths of a stack's heads are their own.
      head_values: Values of one head, where a stack has other than whole heads: `heads` and `value_dim` are then those
        of windows on the values of all heads. 0: a stack has whole heads.
      key_values: Values of all heads of a key head, where these are no whole number of windows: the last of them begins
        earlier, so that it ends with them. What it has in common with the one before is that one's. 0: they are.
      entry: The dtype of the entries' keys and updates.
      probe: The dtype of the new keys and queries.
      out: The outputs' dtype.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    ring: int
    max_pending: int
    state: np.dtype
    entry: np.dtype
    probe: np.dtype
    out: np.dtype
    low: np.dtype | None = None
    decay: str = "head"
    delta: bool = True
    tree: bool = False
    room: int | None = None
    stacked: int = 1
    head_values: int = 0
    key_values: int = 0

    @property
    def items(self) -> int:
        """Heads, or stacks, of all rows together: the units of work."""
        return self.rows * self.heads

    @property
    def heads_per_key(self) -> int:
        """Heads that read the same key head."""
        return self.heads // self.key_heads

    @property
    def gates(self) -> int:
        """Numbers of an entry besides key and update: of each head its log_decay, as far as entries have one, and,
        without the delta rule, its beta."""
        return self.all_heads * (self.decay_width + (not self.delta))

    @property
    def decay_width(self) -> int:
        """As in `RecurrenceSpec`."""
        return {"none": 0, "head": 1, "channel": self.key_dim}[self.decay]

    @property
    def all_heads(self) -> int:
        """Heads, however they are stacked."""
        return self.all_values // self.head_values if self.head_values else self.heads * self.stacked

    @property
    def all_values(self) -> int:
        """Values of all heads together."""
        return self.key_heads * self.key_values if self.key_values else self.heads * self.value_dim

    def head(self, stack, i: int):
        """Which head is number i of a stack. A window that has rows of fewer heads has other heads as the last ones."""
        if not self.head_values:
            return stack * self.stacked + i
        if self.head_values % self.value_dim == 0:
            return stack // (self.head_values // self.value_dim)
        return jnp.minimum(self.first_value(stack) // self.head_values + i, self.all_heads - 1)

    def first_value(self, stack):
        """The first of a stack's values among those of all heads."""
        if not self.key_values:
            return stack * self.value_dim
        key_head = stack // self.heads_per_key
        first = (stack - key_head * self.heads_per_key) * self.value_dim
        return key_head * self.key_values + jnp.minimum(first, self.key_values - self.value_dim)

    def first_own(self, stack):
        """The first row of a stack that is not another window's: 0, or half of them."""
        if not self.key_values:
            return 0
        last = stack - stack // self.heads_per_key * self.heads_per_key == self.heads_per_key - 1
        return jnp.where(last, self.value_dim // 2, 0)

    def first_rows(self, stack):
        """Rows of a stack that are its first head's; behind them each head has `head_rows`."""
        if not self.head_values:
            return self.head_rows
        return self.head_values * (self.head(stack, 0) + 1) - self.first_value(stack)

    @property
    def head_rows(self) -> int:
        """Rows of the state that a head has."""
        return self.head_values or self.value_dim // self.stacked

    def log_decay(self, stack, i: int):
        """Which number of `gates` is the log_decay of head i of a stack, if the decay is one a head."""
        return self.head(stack, i) * (1 if self.delta else 2)

    def beta(self, stack, i: int):
        """Which of them is its beta: without the delta rule, and if the decay is not one a channel."""
        return self.head(stack, i) * (1 + self.decay_width) + self.decay_width

    @property
    def value_axes(self) -> tuple[int, ...]:
        """The axes of values, and of a state's rows: heads and value_dim; one where windows overlap."""
        return (self.all_values,) if self.key_values else (self.heads, self.value_dim)

    @property
    def passed_words(self) -> int:
        """Numbers that a lane of the GPU passes on to the next item through shared memory: the fields of a row, and for
        each token its place and each head's gate and beta, and in a tree its path. As many as threads at most."""
        return ROW_FIELDS + (1 + self.tree + 2 * self.stacked) * self.time

    @property
    def max_live(self) -> int:
        """The most live entries that a row can have: the places of its ring that are not kept free."""
        return self.ring - self.max_pending

    @property
    def max_read(self) -> int:
        """The most live entries of a row that does not fold."""
        return self.max_live if self.room is None else min(self.room, self.max_live)
