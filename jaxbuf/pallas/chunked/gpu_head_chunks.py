"""What `gpu_walk` multiplies by, of chunks whose decay is one number a head, or that have none."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, GATES, LEFT, RING, SINCE, STRENGTH, forget_dead, place, tile
from jaxbuf.pallas.chunked.gpu_pairs import PARTS
from jaxbuf.pallas.sums import ROW, turned
from jaxbuf.pallas.threads import load


class HeadArrays(NamedTuple):
    """The chunks of a walk, in global memory.

    Attributes:
      queries, keys: bfloat16 [rows, time, key_heads, key_dim].
      gates: f32 [rows, heads, chunks, GATES, CHUNK]: see `gpu_layout`.
      at_cut: f32 [rows, heads, 2, CHUNK]: for the state that is returned, what every token of that chunk, and the state
        that the chunk begins with, are multiplied with (the latter CHUNK times).
      attend, inverse: From `pairs`; inverse: None without the delta rule.
    """

    queries: Any
    keys: Any
    gates: Any
    at_cut: Any
    attend: Any
    inverse: Any = None


class _Memory(NamedTuple):
    """RING chunks in shared memory."""

    queries: Any
    keys: Any
    gates: Any
    attend: Any
    inverse: Any


class HeadChunks:
    """The chunks of a row's head. `ChannelChunks` has the same methods.

    Attributes:
      call: The call.
      given, memory: References to `HeadArrays` and `_Memory`.
      row, head: Whose chunks.
    """

    MOST_TOGETHER = 2  # windows of a block, whose threads may then have 255 registers

    def __init__(self, call: Call, given: HeadArrays, memory: list, row, head, leads):
        """leads: Whether this is the warpgroup of the block that brings chunks."""
        self.call, self.given, self.memory, self.row, self.head = call, given, _Memory(*memory), row, head

    @staticmethod
    def scratch(call: Call, together: int) -> list:
        """Shared memory and barriers for `together` windows."""
        return [
            tile(RING, CHUNK, call.key_dim),
            tile(RING, CHUNK, call.key_dim),
            plgpu.SMEM((RING, GATES, CHUNK), jnp.float32),
            tile(RING, PARTS, CHUNK, CHUNK),
            tile(RING, PARTS, CHUNK, CHUNK) if call.delta else tile(1, 1, 8, 64),
        ]

    @staticmethod
    def copies(call: Call) -> int:
        """How many copies `bring` starts."""
        return 4 + call.delta

    def bring(self, i, chunk, full) -> None:
        """Starts to copy the i-th chunk of the walk, which is `chunk` of the row, to its place in the ring."""
        given, memory, row, head = self.given, self.memory, self.row, self.head
        tokens, key_head = pl.ds(chunk * CHUNK, CHUNK), lax.div(head, np.int32(self.call.heads_per_key))
        plgpu.copy_gmem_to_smem(given.keys.at[row, tokens, key_head], memory.keys.at[place(i)], full)
        plgpu.copy_gmem_to_smem(given.queries.at[row, tokens, key_head], memory.queries.at[place(i)], full)
        plgpu.copy_gmem_to_smem(given.gates.at[row, head, chunk], memory.gates.at[place(i)], full)
        plgpu.copy_gmem_to_smem(given.attend.at[row, i, head], memory.attend.at[place(i)], full)
        if self.call.delta:
            plgpu.copy_gmem_to_smem(given.inverse.at[row, i, head], memory.inverse.at[place(i)], full)

    def forget_dead(self, i, alive, interpret: bool) -> None:
        """Zeros in what chunk i has behind its first `alive` tokens."""
        forget_dead(self.memory.keys.at[place(i)], alive, interpret)

    # A chunk may have something that is read before all else, and that the next chunk's takes the place of meanwhile.

    def bring_read(self, i) -> None:
        """Starts to copy what is read first of chunk i, once that of the chunk before has been read."""

    def wait_read(self) -> None:
        """Waits for it."""

    def end_read(self) -> None:
        """Its place may be written over once all windows have said so."""

    def end(self) -> None:
        """Waits until all windows have, behind the last chunk."""

    # Numbers, and right sides of products in parts, of chunk i.

    def keys(self, i) -> list:
        """[key_dim, CHUNK]: what the state is multiplied by for what tokens recall."""
        return [turned(self.memory.keys.at[place(i)])]

    def queries(self, i) -> list:
        """[key_dim, CHUNK]: what the state is multiplied by for outputs."""
        return [turned(self.memory.queries.at[place(i)])]

    def since(self, i) -> Array | None:
        """[CHUNK]: with what both products are multiplied; None: with nothing."""
        return self._along(i, SINCE)

    def strengths(self, i) -> Array:
        """[CHUNK]: write strengths."""
        return self._along(i, STRENGTH)

    def inverse(self, i) -> list:
        """[CHUNK, CHUNK]: what updates are multiplied by."""
        return [turned(self.memory.inverse.at[place(i), part]) for part in range(PARTS)]

    def attend(self, i) -> list:
        """[CHUNK, CHUNK]: what updates are multiplied by for outputs."""
        return [turned(self.memory.attend.at[place(i), part]) for part in range(PARTS)]

    def left(self, i) -> tuple[Array, Array | None, list]:
        """What leads to the state behind the chunk.

        Returns:
          A number, or [key_dim]: with what the state is multiplied; [CHUNK], with what updates are multiplied, or None:
          with nothing; and [CHUNK, key_dim], what these are then multiplied by.
        """
        # The decay of the whole chunk is that since its start, of its last token.
        return self.memory.gates[place(i), SINCE, CHUNK - 1], self._along(i, LEFT), [self.memory.keys.at[place(i)]]

    def left_at_cut(self, i) -> tuple[Array, Array | None, list]:
        """`left` for the state that is returned, which chunk i has."""
        gates = self.given.at_cut.at[self.row, self.head]
        return gates[1, 0], load(gates.at[0], ROW), [self.memory.keys.at[place(i)]]

    def end_cut(self) -> None:
        """Once `left_at_cut` was multiplied with."""

    def _along(self, i, which: int) -> Array:
        return load(self.memory.gates.at[place(i), which], ROW)
