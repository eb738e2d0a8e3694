"""What describes a call of flash attention: its sizes and dtype, and the chips that it is for."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtype of softmax attention of some queries over some keys.

    Attributes:
      rows: Sequences.
      time: Queries of each row.
      keys: Keys and values of each row.
      heads, kv_heads, head_dim: Of queries, and of keys and values.
      dtype: Of queries, keys and values.
      generation: Of the chips, as in `jaxbuf.target.Target`.
    """

    rows: int
    time: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype
    generation: str
