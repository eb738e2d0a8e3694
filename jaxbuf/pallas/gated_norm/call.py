"""What describes a call of `gated_norm` or `grouped_norm`: its size and dtypes."""

import dataclasses
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The size and dtypes of a call.

    Attributes:
      vectors: All vectors with a norm of their own: heads, or groups of channels, of all rows and tokens together.
      dim: Numbers of a vector.
      eps: What is added to the mean of squares.
      out: The dtype of the recurrence's output.
      z: The dtype of z.
      activation: Of the gate.
      groups: Vectors of a token that have weights of their own; 1: all vectors have the same weights.
      form: "head" is `gated_norm`, whose norm is rounded to `out` before it meets the gate, and whose result has z's
        dtype. The others are those of `grouped_norm`, which rounds to `out` at the end alone.
      values: The dtype of the values that a multiple of is added to the output first; None: there are none.
      value_dim: Numbers of a head's value: of so many neighbours the multiple is the same.
    """

    vectors: int
    dim: int
    eps: float
    out: np.dtype
    z: np.dtype
    activation: Literal["silu", "sigmoid"] = "silu"
    groups: int = 1
    form: Literal["head", "gated", "gated after"] = "head"
    values: np.dtype | None = None
    value_dim: int = 0

    @property
    def result(self) -> np.dtype:
        """The dtype of the result."""
        return self.z if self.form == "head" else self.out
