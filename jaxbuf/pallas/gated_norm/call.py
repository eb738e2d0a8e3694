"""What describes a call of `gated_norm`: its size and dtypes."""

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The size and dtypes of a call of `gated_norm`.

    Attributes:
      heads: Heads of all rows and tokens together.
      eps: What is added to the mean of squares.
      out: The dtype of the recurrence's output.
      z: The dtype of z and of the result.
      activation: Of the gate.
    """

    heads: int
    eps: float
    out: np.dtype
    z: np.dtype
    activation: Literal["silu", "sigmoid"] = "silu"
