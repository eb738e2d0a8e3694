"""What describes a call of `project` or one of its kin: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of products of the same x with several weights.

    Attributes:
      tokens: Rows of x.
      inputs: Numbers of each.
      outputs: Rows of each weight.
      dtypes: What each product is rounded to.
      dtype: Of x and of the weights.
      gated: Whether there are two weights, a gate's and that of what it gates, and one result.
      squared: Whether the square of relu follows.
      stacked: Whether all weights are one array, its rows one weight's below the other's.
      slices: Into how many the numbers of x and of the weights' rows are cut. Each is multiplied by itself; what these
        products are summed up to is left to the reader.
    """

    tokens: int
    inputs: int
    outputs: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    dtype: np.dtype
    gated: bool = False
    squared: bool = False
    stacked: bool = False
    slices: int = 1
