"""What describes a call of `prepare`: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `prepare`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      heads, key_heads: As in `RecurrenceSpec`.
      ring: Inputs that the ring of a slot has places for.
      eps: What is added to the sum of squares in the norms of q and k.
      dtype: The dtype of inputs and outputs.
      stored: The ring's dtype.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    ring: int
    eps: float
    dtype: np.dtype
    stored: np.dtype

    @property
    def all_heads(self) -> int:
        """Heads of q, k and v together, in this order."""
        return 2 * self.key_heads + self.heads
