"""An online softmax in VMEM: attention of the queries of several groups over the keys that were added so far."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array

MASKED = np.float32(-1e30)  # a score, in the exponent of 2: finite, so that differences are no NaN
LANES = 128


class Softmax(NamedTuple):
    """What is in VMEM.

    Attributes:
      highest: float32 [groups, queries, LANES], the highest score of each query, in every lane.
      total: Like it, the sum of the weights, relative to that of the highest score.
      out: float32 [groups, queries, head_dim], the sum of the values with these weights.
    """

    highest: Any
    total: Any
    out: Any

    @staticmethod
    def scratch(groups: int, queries: int, head_dim: int) -> list[Any]:
        """The memory that the kernel is given for one."""
        wide = pltpu.VMEM((groups, queries, LANES), jnp.float32)
        return [wide, wide, pltpu.VMEM((groups, queries, head_dim), jnp.float32)]

    def clear(self) -> None:
        """Forgets all keys."""
        self.highest[...] = jnp.full(self.highest.shape, MASKED, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.out[...] = jnp.zeros(self.out.shape, jnp.float32)

    def add(self, group: Any, q: Array, keys: Array, values: Array, seen: Array | None, scale: float) -> None:
        """Adds keys for the queries of a group.

        Args:
          group: Which.
          q: [queries, head_dim].
          keys, values: [n, head_dim], in q's dtype; values that no query sees are finite.
          seen: bool [queries, n] or [1, n]: which keys count; None: all.
          scale: The scores q · k are multiplied with it.
        """
        scores = dot(q, keys, 1) * np.float32(scale * math.log2(math.e))
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        before = self.highest[group][:, :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - highest)
        if seen is not None:  # Where nothing is seen yet, `highest` is MASKED itself.
            weights = jnp.where(seen, weights, np.float32(0))
        kept = jnp.exp2(before - highest)
        total = self.total[group][:, :1] * kept + jnp.sum(weights, axis=1, keepdims=True)
        shape = self.highest.shape[1:]
        self.highest[group] = jnp.broadcast_to(highest, shape)
        self.total[group] = jnp.broadcast_to(total, shape)
        self.out[group] = self.out[group] * kept + dot(weights.astype(values.dtype), values, 0)

    def result(self, group: int) -> Array:
        """float32 [queries, head_dim]: zeros where nothing was seen."""
        total = self.total[group][:, :1]
        return self.out[group] / jnp.where(total > 0, total, np.float32(1))


def dot(a: Array, b: Array, axis: int) -> Array:
    """a [m, k] times b, [k, n] (axis 0) or [n, k] (axis 1), summed in float32; float32 operands are multiplied in
    full."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
    )


def index(shape: tuple[int, ...], axis: int) -> Array:
    """int32, each element's place along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def has_bit(bits: Array, number: Array) -> Array:
    """bool: whether a bit is set; none below bit 0 or from bit 31 on is."""
    inside = (number >= 0) & (number < 31)
    return inside & ((lax.shift_right_logical(bits, jnp.clip(number, 0, 30)) & 1) > 0)
