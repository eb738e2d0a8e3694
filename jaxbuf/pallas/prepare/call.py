"""What describes a call of `prepare`, or of the convolution alone: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The sizes and dtypes of a call of `extend_ring`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      channels: Of the convolution.
      width: Its taps.
      ring: Inputs that the ring of a slot has places for.
      dtype: The dtype of inputs and outputs.
      stored: The ring's dtype.
      tree: Whether a token may follow another than the one before it.
      parts: Channels of each of the arrays that the output is; none: it is one.
    """

    rows: int
    time: int
    channels: int
    width: int
    ring: int
    dtype: np.dtype
    stored: np.dtype
    tree: bool
    parts: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)


@dataclasses.dataclass(frozen=True)
class Call(Convolution):
    """The sizes and dtypes of a call of `prepare`: those of its convolution, and more.

    Attributes:
      heads, key_heads, key_dim, value_dim: As in `RecurrenceSpec`.
      eps: What is added to the sum of squares in the norms of q and k.
      decay: As in `RecurrenceSpec`: a decay for each head, or for each key channel of it.
      lower_bound: As in `jaxbuf.recurrence.prepare.prepare_sequence`.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    eps: float
    decay: str = "head"
    lower_bound: float | None = None

    @property
    def all_heads(self) -> int:
        """Heads of q, k and v together, in this order."""
        return 2 * self.key_heads + self.heads
