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
    """

    rows: int
    time: int
    channels: int
    width: int
    ring: int
    dtype: np.dtype
    stored: np.dtype
    tree: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `prepare`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      heads, key_heads, key_dim, value_dim: As in `RecurrenceSpec`.
      width: Taps of the convolution.
      ring: Inputs that the ring of a slot has places for.
      eps: What is added to the sum of squares in the norms of q and k.
      dtype: The dtype of inputs and outputs.
      stored: The ring's dtype.
      tree: Whether a token may follow another than the one before it.
      ordered: Whether the ring has a list of its rows, as where trees are served.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int
    ring: int
    eps: float
    dtype: np.dtype
    stored: np.dtype
    tree: bool = False
    ordered: bool = False

    @property
    def all_heads(self) -> int:
        """Heads of q, k and v together, in this order."""
        return 2 * self.key_heads + self.heads

    @property
    def convolution(self) -> Convolution:
        """Of the convolution in it."""
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        own = {name: getattr(self, name) for name in ("rows", "time", "width", "ring", "dtype", "stored", "tree")}
        return Convolution(**own, channels=channels)
