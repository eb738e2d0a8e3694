"""Quest in a launch on pages: decoding steps, and drafts that are verified, read the best pages of a slot.

The bounds of pages are made from the keys at each launch, so nothing is kept beside them that drafts, rollbacks or
forks would have to keep right. All keys are fetched for it: on this path selection saves no byte, and shows what it
costs in accuracy. What a query reads depends on its position alone, not on the tokens that are launched with it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import checked_slots
from jaxbuf.attention import paged
from jaxbuf.attention.paged import BLOCK, PagedKV
from jaxbuf.attention.selection import Quest, page_bounds, page_scores, selected_pages
from jaxbuf.axes import Array, Bool, Float, Int32
from jaxbuf.target import Target


def append_and_attend_selected(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    kv: PagedKV,
    table: Int32[Array, "slots max_pages"],
    quest: Quest,
    *,
    slots: Int32[Array, "rows"],
    start: Int32[Array, "rows"],
    lengths: Int32[Array, "rows"] | None = None,
    order: Int32[Array, "slots max_pending"] | None = None,
    ancestors: Bool[Array, "rows time time"] | None = None,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], PagedKV]:
    """`paged.append` of k and v, then attention of q over the pages that `quest` selects.

    The outputs are those of `jaxbuf.attention.selection.attend_selected_sequence`, of queries behind the prompt.

    Args:
      q, k, v, kv, table, slots, start, lengths, target: As in `jaxbuf.attention.paged_launch.append_and_attend`.
      quest: Which pages: its page_size is the pool's, and `behind` at least time, so that a page whose bounds count has
        committed tokens alone.
      order, ancestors: None: a tree's tokens lie on pages in an order of their own.

    Raises:
      ValueError: A shape or dtype does not fit, quest does not fit the pool or the launch, or order or ancestors are
        given.
    """
    time = q.shape[1]
    if order is not None or ancestors is not None:
        raise ValueError("trees must be False where a selection reads pages: their tokens lie in an order of their own")
    if quest.page_size != kv.page_size:
        raise ValueError(f"page_size must be that of the pool ({kv.page_size}), got {quest.page_size}")
    if quest.behind < time:
        raise ValueError(f"behind must be at least the tokens of a launch ({time}), got {quest.behind}")
    lengths = jnp.full_like(start, time) if lengths is None else lengths
    paged.check_launch(q, k, v, kv, slots=slots, start=start, lengths=lengths)
    slots = checked_slots(slots, table.shape[0], once=True)
    where: dict[str, Any] = {"slots": slots, "start": start, "lengths": lengths, "implementation": "xla"}
    kv = paged.append(kv, table, k, v, **where, target=target)
    query = start[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
    first = jnp.arange(table.shape[1], dtype=jnp.int32) * quest.page_size
    full = (first + quest.page_size - 1)[None, None] <= query[..., None] - quest.behind
    always = (first[None, None] <= query[..., None]) & ~full
    count = quest.budget // quest.page_size - jnp.sum(always, axis=2, dtype=jnp.int32)
    shape = (q.shape[0], k.shape[2], *full.shape[1:])
    full, always = (jnp.broadcast_to(x[:, None], shape) for x in (full, always))
    scores = _scores(q, kv, table[slots], jnp.max(jnp.where(slots > 0, start, 0)))
    read = always | selected_pages(scores, full, jnp.broadcast_to(count[:, None], shape[:3]))
    return paged.attend(q, kv, table, **where, read=read, target=target), kv


def _scores(q: Array, kv: PagedKV, table: Array, end: Array) -> Array:
    """f32 [rows, kv_heads, time, max_pages]: the scores of the pages in `table` with tokens before `end`, block by
    block; zeros for the others."""
    pages = max(1, BLOCK // kv.page_size)
    rest = -table.shape[1] % pages
    padded = jnp.pad(table, ((0, 0), (0, rest)))

    def add(i, scores):
        page = jax.lax.dynamic_slice_in_dim(padded, i * pages, pages, axis=1)
        low, high = page_bounds(jnp.moveaxis(kv.keys[page], 3, 1).astype(q.dtype))
        return jax.lax.dynamic_update_slice_in_dim(scores, page_scores(q, low, high), i * pages, axis=3)

    empty = jnp.zeros((q.shape[0], kv.kv_heads, q.shape[1], padded.shape[1]), jnp.float32)
    scores = jax.lax.fori_loop(0, -(-end // (pages * kv.page_size)), add, empty)
    return scores[..., : table.shape[1]]
