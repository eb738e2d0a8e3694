"""How a row's new tokens are appended to their pages on a TPU: token by token, or tile by tile.

A row's tokens are appended when all pages of the row were read, and on their way while later rows are computed. Both
classes have the same functions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.tpu_call import SUBLANES, Arrangement, Integers
from jaxbuf.pallas.attend.tpu_softmax import index


@dataclasses.dataclass(frozen=True)
class TokenAppends:
    """Tokens that are tiles are copied from the launch's inputs to their places.

    Attributes:
      plan: Of the call.
      integers: Of the launch.
      new, pools: Its keys and values, and their pools.
      memory: What `scratch` asked for.
    """

    plan: Arrangement
    integers: Integers
    new: Sequence[Any]
    pools: Sequence[Any]
    memory: Sequence[Any]

    @staticmethod
    def scratch(plan: Arrangement) -> list[Any]:
        """How many tokens are on their way, and their semaphore."""
        return [pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA]

    def clear(self) -> None:
        """Nothing is on its way."""
        self.memory[0][0] = jnp.int32(0)

    def fetch(self, row: Array) -> None:
        """Brings what is needed to append a row's tokens."""

    def start(self, row: Array, buffers: Sequence[Any]) -> None:
        """Starts to append a row's tokens, which lie in the buffers of its last block, too."""
        time, size = self.plan.call.time, self.plan.call.page_size

        def append(t, count):
            at = self.integers.append[row * time + t]

            @pl.when(at >= 0)
            def _():
                for copy in self._copies(row, t, at // size, lax.rem(at, np.int32(size))):
                    copy.start()

            return count + (at >= 0).astype(jnp.int32)

        self.memory[0][0] = lax.fori_loop(0, time, append, jnp.int32(0))

    def finish(self) -> None:
        """Waits until the tokens that are on their way have arrived."""

        def wait(*_):
            for copy in self._copies(0, 0, 0, 0):
                copy.wait()

        lax.fori_loop(0, self.memory[0][0], wait, None)

    def _copies(self, row: Any, t: Any, page: Any, inside: Any) -> list[Any]:
        pairs = zip(self.new, self.pools, strict=True)
        return [pltpu.make_async_copy(x.at[row, t], pool.at[page, inside], self.memory[1]) for x, pool in pairs]


@dataclasses.dataclass(frozen=True)
class TileAppends(TokenAppends):
    """Of tokens that share tiles, the tiles are read, changed and written back.

    A tile holds SUBLANES places of a page. It has the number of the first new token of the row that lies in it, its
    home; the new tokens of a row may lie in as many tiles as there are tokens.
    """

    @staticmethod
    def scratch(plan: Arrangement) -> list[Any]:
        """How many tiles are on their way back, and their semaphore; semaphores of those that come; tiles of the rows
        in flight, and of one whose tiles are on their way back."""
        call, rows = plan.call, plan.depth + 1
        tiles = pltpu.VMEM((rows, call.time, call.kv_heads, SUBLANES, call.head_dim), call.dtype)
        return [*TokenAppends.scratch(plan), pltpu.SemaphoreType.DMA((rows,)), *[tiles] * plan.pools]

    def fetch(self, row: Array) -> None:
        self._each_tile(row, lambda copy: copy.start(), come=True)

    def start(self, row: Array, buffers: Sequence[Any]) -> None:
        self._each_tile(row, lambda copy: copy.wait(), come=True)
        call, place = self.plan.call, lax.rem(row, np.int32(self.plan.depth + 1))
        for t in range(call.time):
            at = self.integers.append[row * call.time + t]
            home = self.integers.homes[row * call.time + t]

            @pl.when(at >= 0)
            def _(t=t, at=at, home=home):
                is_it = index((SUBLANES, 1), 0) == lax.rem(at, np.int32(SUBLANES))
                for tiles, buffer in zip(self.memory[3:], buffers, strict=True):
                    for head in range(call.kv_heads):
                        # Of two-byte numbers a row is no whole register: they are changed as float32, without a loss.
                        new = buffer[head, pl.ds(self.plan.span, self.plan.new)].astype(jnp.float32)
                        old = tiles[place, home, head].astype(jnp.float32)
                        tiles[place, home, head] = jnp.where(is_it, new[t : t + 1], old).astype(call.dtype)

        self.memory[0][0] = self._each_tile(row, lambda copy: copy.start(), come=False)

    def finish(self) -> None:
        def wait(*_):
            for copy in self._tile_copies(0, 0, 0, self.memory[1], come=False):
                copy.wait()

        lax.fori_loop(0, self.memory[0][0], wait, None)

    def _each_tile(self, row: Array, act: Any, *, come: bool) -> Array:
        """Does something with the copies of each tile that a row's tokens lie in; returns how many there are."""
        time, place = self.plan.call.time, lax.rem(row, np.int32(self.plan.depth + 1))
        semaphore = self.memory[2].at[place] if come else self.memory[1]

        def of_token(t, count):
            at, home = (x[row * time + t] for x in (self.integers.append, self.integers.homes))
            is_first = (at >= 0) & (home == t)

            @pl.when(is_first)
            def _():
                for copy in self._tile_copies(place, t, at, semaphore, come=come):
                    act(copy)

            return count + is_first.astype(jnp.int32)

        return lax.fori_loop(0, time, of_token, jnp.int32(0))

    def _tile_copies(self, place: Any, t: Any, at: Any, semaphore: Any, *, come: bool) -> list[Any]:
        size = self.plan.call.page_size
        page, inside = at // size, at % size
        first = inside // SUBLANES * SUBLANES
        first = first if isinstance(first, int) else pl.multiple_of(first, SUBLANES)
        pairs = []
        for pool, tiles in zip(self.pools, self.memory[3:], strict=True):
            there, here = pool.at[page, :, pl.ds(first, SUBLANES)], tiles.at[place, t]
            pairs.append((there, here) if come else (here, there))
        return [pltpu.make_async_copy(source, to, semaphore) for source, to in pairs]


class NoAppends(TokenAppends):
    """Nothing is appended."""

    @staticmethod
    def scratch(plan: Arrangement) -> list[Any]:
        return []

    def clear(self) -> None:
        pass

    def start(self, row: Array, buffers: Sequence[Any]) -> None:
        pass

    def finish(self) -> None:
        pass
