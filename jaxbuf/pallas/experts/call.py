"""What describes a product of groups of rows with an expert's weight each: its sizes and dtype."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtype of one of the two products of a mixture of experts.

    Attributes:
      rows: Of x, those that are there to align groups left out: tokens times the experts that each has.
      inputs: Numbers of each.
      outputs: Numbers of a result's row.
      experts: How many weights there are.
      dtype: Of x, of the weights and of the result.
      gated: Whether a weight has the rows gate | up, twice as many as outputs, and the result is silu(gate) · up.
    """

    rows: int
    inputs: int
    outputs: int
    experts: int
    dtype: np.dtype
    gated: bool = False
