"""What a softmax mixer does with its memory: on whole sequences without one, or in a launch on a cache.

Both plans have the same functions, so that a mixer is written once: `angles` and `attend`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.attention import paged
from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.rotary import Rotary
from jaxbuf.memory.sequences import Launch
from jaxbuf.target import Target

type Array = jax.Array


class _Positions:
    """The positions of a launch's tokens, int32 [rows or 1, time], and the angles that its layers share."""

    def __init__(self, positions: Array):
        self.positions, self._angles = positions, {}

    def angles(self, rotary: Rotary) -> tuple[Array, Array]:
        """`Rotary.angles` of the positions; computed once for all layers."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary.angles(self.positions)
        return self._angles[rotary]


class WholeAttention(_Positions):
    """Sequences that start from nothing, without a memory: it is None. Differentiable."""

    def __init__(self, time: int, lengths: Array | None = None, target: Target | None = None):
        """time: The tokens of a row, of which the first `lengths` (int32 [batch]; None: all) are real; target: what the
        program is compiled for."""
        super().__init__(jnp.arange(time, dtype=jnp.int32)[None])
        self._lengths, self._target = lengths, target

    def attend(self, memory: None, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """`causal_attention`."""
        return causal_attention(q, k, v, lengths=self._lengths, target=self._target), None


class LaunchedAttention(_Positions):
    """A launch on a cache: its memory is a PagedKV."""

    def __init__(self, launch: Launch, table: Array, order: Array | None = None):
        """table, order: The pages of each slot, and where its next tokens lie in them, see `jaxbuf.attention.paged`."""
        super().__init__(launch.start[:, None] + launch.depth)
        self._launch, self._table, self._order = launch, table, order

    def attend(self, memory: PagedKV, q: Array, k: Array, v: Array) -> tuple[Array, PagedKV]:
        """Appends k and v, and attends: `paged.append`, then `paged.attend`."""
        launch = self._launch
        where: dict[str, Any] = {"slots": launch.slots, "start": launch.start, "lengths": launch.lengths}
        where |= {"order": self._order, "target": launch.target}
        memory = paged.append(memory, self._table, k, v, **where)
        return paged.attend(q, memory, self._table, **where, ancestors=launch.ancestors), memory
