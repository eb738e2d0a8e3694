"""Attention of a chunk of prompts: over its own keys beside it, and over what its slots committed in pages before.

Two parts of one softmax, each by flash attention, and merged. The committed keys and values are copied out of their
pages, so many tokens of each row at a time that they take no more memory than the chunk itself, or a fixed size.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxbuf.attention import paged
from jaxbuf.attention.flash import merge
from jaxbuf.attention.paged import PagedKV
from jaxbuf.axes import Array, Bool, Float, Int32
from jaxbuf.pallas.dispatch import ask
from jaxbuf.target import Target

# Committed tokens that are copied out of pages at once, if a chunk has fewer: so many of all rows together, more where
# that is few of each row, up to a bound. Of a chunk of 2,048 tokens behind 30,720 an H200's kernels took 2.07 ms in
# pieces of 4,096 and 1.74 ms in one; to copy 1,024 tokens takes 2.3 to 2.9 us, whether they are there or not.
TOKENS, ENOUGH, MOST_TOKENS = 2**14, 4096, 2**18


class Tokens(Protocol):
    """Pages whose tokens are read as keys and values one by one.

    Attributes:
      page_size: Tokens of a page.
    """

    @property
    def page_size(self) -> int: ...

    def tokens(self, index: Int32[Array, "rows n"]) -> tuple[Array, Array]:
        """The keys and values [rows, n, kv_heads, head_dim] of some tokens, which page · page_size + place numbers."""
        ...


def attend_chunk(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    kv: PagedKV,
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots max_pending"] | None = None,
    ancestors: Bool[Array, "rows time time"] | None = None,
    implementation: str = "auto",
    target: Target | str | None = None,
) -> Float[Array, "rows time heads head_dim"]:
    """`paged.attend` for a chunk of a prompt, whose own keys and values are given: they are not read from pages.

    Memory is linear in the chunk. With the kernel, rows without committed tokens cost nothing beside their chunk, and
    the outputs of the null slot and past `lengths` are zeros.

    Args:
      q, k, v: Of positions start .. start + time - 1, as they were appended; all of them have a page.
      kv: The layer's pool.
      table, slots, start, lengths, order, ancestors: As in `paged.attend`; lengths at most time.
      implementation: "xla", "gpu" (cuDNN's flash attention, on NVIDIA GPUs from Ampere on, in bfloat16 or float16), or
        "auto": the target's kernel where it serves the call, else "xla".
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Raises:
      ValueError: As in `paged.attend`, or the implementation asked for can't serve the call; it says why.
    """
    asked = ask("attend_chunk", implementation, target, (q,))
    where = {"slots": slots, "start": start, "lengths": lengths, "order": order}
    if asked is not None:
        from jaxbuf.pallas.flash import Call, gpu, supports

        (rows, time, heads, head_dim), kv_heads = q.shape, k.shape[2]
        call = Call(rows, time, time, heads, kv_heads, head_dim, q.dtype, asked.generation)
        reason = None
        if ancestors is not None:
            reason = "it needs tokens in a row, got a tree"
        elif kv.keys.dtype != q.dtype:
            reason = f"it needs pages in q's {q.dtype.name}, got {kv.keys.dtype.name}"
        if asked.takes(reason or supports(call, k=k.dtype, v=v.dtype)):
            return attend_parts(gpu.flash, q, k, v, kv, table, **where)
    return paged.attend(q, kv, table, **where, ancestors=ancestors, implementation="xla")


@partial(jax.jit, static_argnums=0, static_argnames="piece")  # so that layers share a trace
def attend_parts(
    flash: Callable[..., tuple[Array, Array]],
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    kv: Tokens,
    table: Int32[Array, "slots max_pages"],
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"],
    order: Int32[Array, "slots max_pending"] | None = None,
    piece: int | None = None,
) -> Float[Array, "rows time heads head_dim"]:
    """`attend_chunk` by an implementation of `jaxbuf.attention.flash.flash`.

    Args:
      flash: That implementation (static).
      q, k, v, kv, table, slots, start, lengths, order: As there, in one dtype; slots that are out of range are null.
      piece: The committed tokens of a row that are copied out of pages at once (static); None: `piece_size`.
    """
    rows, time = q.shape[:2]
    capacity = table.shape[1] * kv.page_size
    piece = min(capacity, piece_size(rows, time) if piece is None else piece)
    asked = (slots > 0) & (lengths > 0)
    committed = jnp.where(asked, jnp.minimum(start, capacity), 0)
    real = asked[:, None] & (jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None])
    own_k, own_v = (jnp.where(real[..., None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    own, own_lse = flash(q, own_k, own_v, causal=True)

    def add_piece(i, carry):
        count = jnp.clip(committed - i * piece, 0, piece)
        k, v = _committed(kv, table, slots, start, order, i * piece, piece, count)
        out, lse = flash(q, k, v, lengths=count)
        some = count > 0  # where there is no key, nothing is known of the results
        out = jnp.where(some[:, None, None, None], out, jnp.zeros((), out.dtype))
        merged, merged_lse = carry
        return merge(merged, merged_lse, out, jnp.where(some[:, None, None], lse, -jnp.inf))

    def with_pages():
        pieces = -(-jnp.max(committed) // piece)
        first = own.astype(jnp.float32), own_lse
        return jax.lax.fori_loop(0, pieces, add_piece, first)[0].astype(q.dtype)

    out = jax.lax.cond(jnp.any(committed > 0), with_pages, lambda: own)
    return jnp.where(real[..., None, None], out, jnp.zeros((), out.dtype))


def piece_size(rows: int, time: int) -> int:
    """How many committed tokens of each row are copied out of pages at once beside a chunk of `time` tokens."""
    return max(time, TOKENS // rows, min(ENOUGH, MOST_TOKENS // rows))


def _committed(
    kv: Tokens,
    table: Array,
    slots: Array,
    start: Array,
    order: Array | None,
    first: Array,
    piece: int,
    count: Array,
) -> tuple[Array, Array]:
    """The keys and values [rows, piece, kv_heads, head_dim] of each slot's committed tokens from `first` on: `count`
    (int32 [rows]) of them, and zeros behind."""
    page_size = kv.page_size
    offset = jnp.arange(piece, dtype=jnp.int32)[None]
    place = first + offset if order is None else _without_open(first + offset, order[slots], start)
    page = jnp.broadcast_to(place // page_size, (slots.shape[0], piece))
    page = jnp.take_along_axis(table[slots], jnp.clip(page, 0, table.shape[1] - 1), axis=1)
    live = (offset < count[:, None])[..., None, None]
    k, v = kv.tokens(page * page_size + place % page_size)
    return jnp.where(live, k, jnp.zeros((), k.dtype)), jnp.where(live, v, jnp.zeros((), v.dtype))


def _without_open(place: Array, listed: Array, start: Array) -> Array:
    """int32 [rows, n]: `place` (int32 [1, n]), with another one that is committed where it is open.

    Places `listed` (int32 [rows, max_pending]) are open, all others before start + max_pending are committed. So as
    many places before `start` are open as are committed behind, which take their place: a softmax does not depend on
    the order of its keys.
    """
    ahead = start[:, None] + jnp.arange(listed.shape[1], dtype=jnp.int32)[None]
    is_open = listed < start[:, None]
    is_behind = ~jnp.any(ahead[:, :, None] == listed[:, None], axis=2)
    number, behind = (jnp.cumsum(x, axis=1, dtype=jnp.int32) for x in (is_open, is_behind))
    same = is_behind[:, None] & (number[:, :, None] == behind[:, None])
    instead = jnp.sum(jnp.where(same, ahead[:, None], 0), axis=2, dtype=jnp.int32)
    found = is_open[:, None] & (place[..., None] == listed[:, None])
    return jnp.where(
        jnp.any(found, axis=2), jnp.sum(jnp.where(found, instead[:, None], 0), axis=2, dtype=jnp.int32), place
    )
