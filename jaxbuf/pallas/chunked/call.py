"""What describes a call of `chunked`: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `chunked`, or of what `prefill` asks of it.

    Attributes:
      rows: Sequences.
      time: Tokens of each.
      heads, key_heads, key_dim, value_dim, decay, delta: As in `RecurrenceSpec`.
      q, k, v: The dtypes of queries, keys and values; outputs have that of values.
      has_state: Whether the sequences start from states; else from nothing.
      has_beta: Whether there are write strengths; else all are 1.
      cut: Whether the states that are returned are those after some of a row's tokens; else after all.
      updates: Of how many of each row's tokens the updates are returned: of none, of all (`time`), or of up to so many
        behind the cut.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    q: np.dtype
    k: np.dtype
    v: np.dtype
    decay: str = "head"
    delta: bool = True
    has_state: bool = True
    has_beta: bool = True
    cut: bool = False
    updates: int = 0

    @property
    def heads_per_key(self) -> int:
        """Heads that read the same key head."""
        return self.heads // self.key_heads

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Of inputs that have several numbers a head: how many, and how many heads share them."""
        group = self.heads_per_key
        return {
            "q": (self.key_dim, group),
            "k": (self.key_dim, group),
            "v": (self.value_dim, 1),
            "log_decay": (self.key_dim, 1),
        }
