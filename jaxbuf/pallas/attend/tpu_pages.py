"""Pages of keys or values in a TPU's memory: how their live part is copied to VMEM, and read there.

A TPU keeps the last two axes of an array in tiles of 8 rows of 128 numbers, and of some numbers of heads in tiles of
fewer rows. Of [pages, page_size, kv_heads, head_dim] these axes are heads and their numbers, so that each token has
tiles of its own and is copied alone. Where a token's heads do not fill such tiles (one head of two-byte numbers, three,
six), XLA keeps heads before tokens: then a head's tokens share tiles, eight of them are copied at once, and the kernel
sees pages as [pages, kv_heads, page_size, head_dim], which changes nothing in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.attend.tpu_call import SUBLANES, Arrangement, up
from jaxbuf.pallas.attend.tpu_softmax import index


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """Pages [pages, page_size, kv_heads, head_dim] of which each token is a tile, or several.

    Two key heads of two-byte numbers share 32-bit words. A group's words are every n-th row of a block's: they are read
    with a stride, and seen as rows of both heads in turn. So nothing is unpacked; a query gives the keys of the other
    head no weight.

    Attributes:
      plan: Of the call.
      interpret: Whether the kernel is interpreted: the interpreters know no views of memory as words.
    """

    plan: Arrangement
    interpret: bool

    least = 1  # tokens that are copied alone

    def buffer(self) -> Any:
        """The memory for blocks: a wide key's parts come first, because strided loads have LANES numbers."""
        plan = self.plan
        shape = plan.depth, plan.parts, plan.columns, plan.call.kv_heads, plan.lanes
        return pltpu.VMEM(shape, plan.call.dtype)

    def copies(self, source: Any, buffer: Any, place: Any, count: int, semaphore: Any) -> Iterator[Any]:
        """Copies of tokens [count, kv_heads, head_dim] to a block's buffer, from a place on."""
        for part in range(self.plan.parts):
            there = source if self.plan.parts == 1 else source.at[:, :, pl.ds(part * self.plan.lanes, self.plan.lanes)]
            yield pltpu.make_async_copy(there, buffer.at[part, pl.ds(place, count)], semaphore)

    def of_page(self, pool: Any, page: Array, first: Any, count: int) -> Any:
        """Some tokens of a page."""
        return pool.at[page, pl.ds(first, count)]

    def stored(self, pool: Array) -> Array:
        """A pool as the kernel sees it; the same function gives it back."""
        return pool

    def inputs(self, new: Array) -> Array:
        """New keys or values [rows, time, kv_heads, head_dim] as the kernel sees them."""
        return new

    def new_tokens(self, new: Any, row: Array) -> tuple[Any, int]:
        """A row's new tokens, and how many are copied."""
        return new.at[row], self.plan.call.time

    def rows(self, buffer: Any, group: int, count: int, live: Callable[[Array], Array] | None = None) -> Array:
        """The first tokens of a block as a group reads them: [count · packed, head_dim], a token's heads side by side.

        Args:
          buffer: The block's.
          group: Which.
          count: Tokens.
          live: bool, of the numbers of tokens: zeros stand in place of those that are not live; None: all are.
        """
        found = []
        for part in range(self.plan.parts):
            words = self._words(buffer.at[part], group, count)
            if live is not None:
                words = jnp.where(live(index((count, 1), 0)), words, jnp.zeros((), words.dtype))
            found.append(words if self.plan.packed == 1 else pltpu.bitcast(words, self.plan.call.dtype))
        return jnp.concatenate(found, axis=1)

    def _words(self, buffer: Any, group: int, count: int) -> Array:
        """[count, lanes] in 32 bits: those that hold the numbers of a group's heads."""
        packed, groups, lanes = self.plan.packed, self.plan.groups, self.plan.lanes
        if self.interpret:
            found = buffer[pl.ds(0, count)][:, group * packed : (group + 1) * packed].reshape(count * packed, lanes)
            return found if packed == 1 else pltpu.bitcast(found, jnp.dtype(jnp.int32))
        words = buffer if packed == 1 else buffer.bitcast(jnp.int32)
        words = words.reshape(self.plan.columns * groups, lanes)
        return words[pl.ds(group, count, groups) if groups > 1 else pl.ds(0, count), :]


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """Pages [pages, kv_heads, page_size, head_dim] of which a head's tokens share tiles. The functions are those of
    `TokenTiles`.

    Attributes:
      plan: Of the call.
    """

    plan: Arrangement

    least = SUBLANES

    def buffer(self) -> Any:
        plan = self.plan
        return pltpu.VMEM((plan.depth, plan.call.kv_heads, plan.columns, plan.call.head_dim), plan.call.dtype)

    def copies(self, source: Any, buffer: Any, place: Any, count: int, semaphore: Any) -> Iterator[Any]:
        place = place if isinstance(place, int) else pl.multiple_of(place, SUBLANES)
        yield pltpu.make_async_copy(source, buffer.at[:, pl.ds(place, count)], semaphore)

    def of_page(self, pool: Any, page: Array, first: Any, count: int) -> Any:
        return pool.at[page, :, pl.ds(first, count)]

    def stored(self, pool: Array) -> Array:
        return jnp.swapaxes(pool, 1, 2)

    def inputs(self, new: Array) -> Array:
        padded = jnp.pad(new, ((0, 0), (0, -new.shape[1] % SUBLANES), (0, 0), (0, 0)))
        return jnp.swapaxes(padded, 1, 2)

    def new_tokens(self, new: Any, row: Array) -> tuple[Any, int]:
        return new.at[row], up(self.plan.call.time, SUBLANES)

    def rows(self, buffer: Any, group: int, count: int, live: Callable[[Array], Array] | None = None) -> Array:
        found = buffer[group, pl.ds(0, count)]
        if live is None:
            return found
        # In float32, because a row of two-byte numbers is no whole register; rounding changes nothing.
        kept = jnp.where(live(index((count, 1), 0)), found.astype(jnp.float32), np.float32(0))
        return kept.astype(found.dtype)


def each_piece(page_size: int, least: int, count: Array, act: Callable[[Array, Any, int], None]) -> None:
    """Calls `act(page, first, count)` with the number of each page and the tokens on it that hold the first `count`
    tokens of a block: whole pages, then the parts of the last one, by powers of two.

    Args:
      page_size: Tokens of a page.
      least: Tokens that are copied alone; `count` is rounded up to a multiple of it.
      count: Tokens.
      act: What is done with each piece; the number of tokens in it is static.
    """
    count = -(-count // least) * least
    whole, rest = count // page_size, count % page_size
    lax.fori_loop(0, whole, lambda i, _: act(i, 0, page_size), None)
    size = least
    while size < page_size:
        first = pl.multiple_of(rest // (2 * size) * (2 * size), least)
        pl.when((rest & size) > 0)(lambda first=first, size=size: act(whole, first, size))
        size *= 2
