"""What describes a call of `put_rows`: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `put_rows`.

    Attributes:
      pool: The shape of the pool.
      rows: How many new rows there are.
      stored: The pool's dtype.
      dtype: The new rows' dtype.
    """

    pool: tuple[int, ...]
    rows: int
    stored: np.dtype
    dtype: np.dtype
