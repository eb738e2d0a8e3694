"""What describes a call of `add_and_norm`: its size and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The size and dtypes of a call of `add_and_norm`.

    Attributes:
      tokens: Of all rows together.
      hidden: Numbers of each.
      eps, offset: Of the norm.
      dtype: Of x, what is added to it, and both results.
      summands: Of what is added, in float32, to be summed up and rounded first; 0: it is one array of that dtype.
    """

    tokens: int
    hidden: int
    eps: float
    offset: float
    dtype: np.dtype
    summands: int = 0
