"""What describes a call of `norm_and_rotate`: its sizes and dtypes."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtypes of a call of `norm_and_rotate`.

    Attributes:
      tokens: Of all rows together.
      heads, kv_heads: Of each.
      head_dim: Numbers of a query or key.
      width: Numbers of a head in what queries are taken from, of which they are the first ones.
      half: Half of the channels that are turned.
      dtype: Of queries and keys.
      normed: Whether they have a norm.
      eps, offset: Of the norm.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    half: int
    dtype: np.dtype
    normed: bool = False
    eps: float = 0.0
    offset: float = 0.0
