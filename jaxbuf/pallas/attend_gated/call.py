"""What describes a call of `attend_gated`: its sizes and dtype."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes and dtype of a call of `attend_gated`.

    Attributes:
      rows: Rows of the launch.
      time: New tokens of each row.
      heads, kv_heads, head_dim: Of queries, and of keys and values.
      page_size: Tokens of a page.
      columns: Local pages of a slot at most.
      max_pages: Pages of a list at most.
      dtype: Of queries, keys, values and pages.
    """

    rows: int
    time: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    columns: int
    max_pages: int
    dtype: np.dtype
