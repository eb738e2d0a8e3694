"""Which pages of keys a query reads: Quest, over all keys or over those that gates admitted.

Of every page of keys the least and the greatest number of each channel are kept, its bounds. No key of the page can
have a higher product with a query than the bounds allow, so a query reads the pages whose bounds allow the most. What
is kept stays whole: a page that one query passes over the next one may read.

This is the definition, on whole sequences, to measure what selection costs in accuracy: it computes the scores of all
keys and then looks at few. On this path no byte is saved.

Source: Quest (2024), section 3; pages of a head's admitted keys are Write-Gated KV's (2025), section 5.3.
"""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import OnlineSoftmax, in_blocks, merge, split_heads
from jaxbuf.attention.gated_sequence import attend_admitted, check_gated
from jaxbuf.attention.rotary import Rotary
from jaxbuf.axes import Array, Bool, Float, Float32, Int, Int32

QUERIES = 64  # whose scores with all keys exist at once


class Selection(Protocol):
    """What decides, query by query, which of the keys that are there a softmax layer reads.

    Attributes:
      dense: How many first softmax layers of a model read everything.
    """

    @property
    def dense(self) -> int: ...

    def attend_sequence(
        self,
        q: Float[Array, "batch time heads head_dim"],
        k: Float[Array, "batch time kv_heads head_dim"],
        v: Float[Array, "batch time kv_heads head_dim"],
        rotary: Rotary | None,
        *,
        gates: Float32[Array, "batch time kv_heads"] | None = None,
        window: int = 1,
        threshold: float | None = 0.1,
        lengths: Int[Array, "batch"] | None = None,
    ) -> Float[Array, "batch time heads head_dim"]:
        """The layer's attention over whole sequences.

        Args:
          q, k: Turned to their positions.
          v: Head h reads kv head h // (heads // kv_heads).
          rotary: How queries and keys were turned; None: they were not.
          gates, window, threshold: Of a layer with an admission, as in `jaxbuf.attention.gated.attend_sequence`.
          lengths: Tokens from there on are not real; None: all are.

        Raises:
          ValueError: The selection does not serve gates.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Quest:
    """How many keys a query reads, and in which pages they lie.

    Attributes:
      budget: Tokens that a query reads of each head's keys, in whole pages. What is always read counts: pages too near
        to be chosen (see `behind`), and with gates the window. Where these alone are more, they are read all the same.
      page_size: Tokens of a page.
      behind: A page is chosen by its score once all of its tokens are at least this far behind the query; until then it
        is always read. 1 in the paper, where that is the newest page alone. A memory that may take back its latest
        tokens needs more.
      dense: How many first softmax layers of a model read everything.
      prompt: How many first tokens of a text read everything, as a prompt does that is read at once.
    """

    budget: int
    page_size: int = 16
    behind: int = 1
    dense: int = 2
    prompt: int = 0

    def __post_init__(self):
        check_sizes(budget=self.budget, page_size=self.page_size, behind=self.behind)
        check_sizes(dense=self.dense, prompt=self.prompt, least=0)

    def attend_sequence(
        self,
        q: Float[Array, "batch time heads head_dim"],
        k: Float[Array, "batch time kv_heads head_dim"],
        v: Float[Array, "batch time kv_heads head_dim"],
        rotary: Rotary | None,
        *,
        gates: Float32[Array, "batch time kv_heads"] | None = None,
        window: int = 1,
        threshold: float | None = 0.1,
        lengths: Int[Array, "batch"] | None = None,
    ) -> Float[Array, "batch time heads head_dim"]:
        """As in `Selection`: `attend_selected_sequence`."""
        if threshold is None:
            raise ValueError("threshold must be a number where pages are selected, got None: that is for training")
        how: dict[str, Any] = {"gates": gates, "window": window, "threshold": threshold, "lengths": lengths}
        return attend_selected_sequence(q, k, v, self, **how)


def page_bounds(
    keys: Float[Array, "*n page_size head_dim"],
) -> tuple[Float[Array, "*n head_dim"], Float[Array, "*n head_dim"]]:
    """The least and the greatest number of every channel in each page of keys, which are turned to their positions."""
    return jnp.min(keys, axis=-2), jnp.max(keys, axis=-2)


def page_scores(
    q: Float[Array, "rows time heads head_dim"],
    low: Float[Array, "rows kv_heads pages head_dim"],
    high: Float[Array, "rows kv_heads pages head_dim"],
) -> Float32[Array, "rows kv_heads time pages"]:
    """How high a query's product with a key of each page may be, at most: the highest of the heads of a group.

    Args:
      q: The queries, turned to their positions.
      low, high: The bounds of the pages, low nowhere above high.

    Source: Quest (2024), algorithm 1: the sum over channels of max(q · low, q · high).
    """
    grouped = split_heads(q, low.shape[1])
    zero = jnp.zeros((), q.dtype)
    # The greater of the two products is the one with high where q is positive, and the one with low where it is not.
    above = contract("btkgd,bkpd->bkgtp", jnp.maximum(grouped, zero), high.astype(q.dtype))
    below = contract("btkgd,bkpd->bkgtp", jnp.minimum(grouped, zero), low.astype(q.dtype))
    return jnp.max(above + below, axis=2)


def selected_pages(
    scores: Float32[Array, "*n pages"], bounded: Bool[Array, "*n pages"], count: Int32[Array, "*n"]
) -> Bool[Array, "*n pages"]:
    """The `count` pages with the highest scores, of those that have bounds; of equal ones the earlier pages.

    Args:
      scores: From `page_scores`; what stands for a page without bounds does not matter.
      bounded: Which pages have bounds.
      count: How many are chosen; where fewer have bounds, all of these are. Below 1: none.
    """
    order = jnp.argsort(jnp.where(bounded, scores, -jnp.inf), axis=-1, descending=True, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return bounded & (rank < count[..., None])


def attend_selected_sequence(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    quest: Quest,
    *,
    gates: Float32[Array, "batch time kv_heads"] | None = None,
    window: int = 1,
    threshold: float | Float[Array, "batch"] = 0.1,
    lengths: Int[Array, "batch"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Causal attention over whole sequences in which every query reads the pages that `quest` allows it.

    Without gates a page has the keys of page_size positions in a row. The query at position i reads the pages that hold
    a key from position i - behind + 1 to i, and of the pages before those with the highest scores, budget // page_size
    pages in all.

    With gates the query reads the keys of the window as `jaxbuf.attention.gated.attend_sequence` does. Behind it each
    head has a list of its own, of the keys that its gates admit; a page has page_size of these in a row, and is full
    once so many have left the window. The last page is read where it is not full, and those before by their scores:
    (budget - the window's keys) // page_size pages in all, of each head.

    Memory is linear in time. Differentiable where no gates are given; it is made for evaluation.

    Args:
      q, k: Turned to their positions.
      v: Head h reads kv head h // (heads // kv_heads).
      quest: Which pages. Its first `prompt` queries read all of their pages.
      gates: Of each key, in [0, 1]; None: all keys are read by pages.
      window, threshold: Of the gates, as in `jaxbuf.attention.gated.attend_sequence`.
      lengths: Tokens from there on are not real; None: all are.

    Returns:
      The outputs in q's dtype, zeros past `lengths`; scores, softmax and sums in float32.

    Raises:
      ValueError: A shape or dtype does not fit, heads is not a multiple of kv_heads, or window is below 1.

    Source: Quest (2024), section 3.3.
    """
    check_sizes(window=window)
    ones = jnp.ones(k.shape[:3], jnp.float32)
    rows, time = check_gated(q, k, v, ones if gates is None else gates, threshold, lengths)
    lengths = jnp.full(rows, time, jnp.int32) if lengths is None else jnp.minimum(jnp.asarray(lengths, jnp.int32), time)
    real = (jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    q, k, v = (jnp.where(real[..., None], x, jnp.zeros((), x.dtype)).astype(q.dtype) for x in (q, k, v))
    limit = jnp.broadcast_to(jnp.asarray(threshold, jnp.float32), (rows,))
    listed = jnp.broadcast_to(real if gates is None else real & (gates >= limit[:, None, None]), k.shape[:3])
    lists = _listed(k, v, listed, quest.page_size)
    behind = 0 if gates is None else window  # how far a key is when it comes to its list
    out, lse = _attend_lists(q, *lists, quest, behind)
    if gates is not None:
        # Above every gate, so that of these keys the window alone is seen.
        near = attend_admitted(
            q, k, v, jnp.zeros_like(ones), window=window, threshold=jnp.ones(rows, jnp.float32), lengths=lengths
        )
        out, _ = merge(near[0].astype(jnp.float32), near[1], out, lse)
    return jnp.where(real[..., None], out, 0.0).astype(q.dtype)


def _listed(k: Array, v: Array, listed: Array, page_size: int) -> tuple[Array, Array, Array]:
    """The keys and values of each head that are on its list, in order, and their positions.

    Returns [rows, kv_heads, pages, page_size, head_dim] twice, and int32 [rows, kv_heads, pages, page_size]; where the
    list has ended, zeros and a position behind all others.
    """
    time, end = k.shape[1], jnp.iinfo(jnp.int32).max
    order = jnp.argsort(~listed, axis=1, stable=True).astype(jnp.int32)
    there = jnp.take_along_axis(listed, order, axis=1)
    k, v = (
        jnp.where(there[..., None], jnp.take_along_axis(x, order[..., None], axis=1), jnp.zeros((), x.dtype))
        for x in (k, v)
    )
    position = jnp.where(there, order, end)
    rest = -time % page_size

    def paged(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, 0), (0, rest), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x, 2, 1).reshape(x.shape[0], x.shape[2], -1, page_size, *x.shape[3:])

    return paged(k, 0), paged(v, 0), paged(position, end)


def _attend_lists(
    q: Array, k: Array, v: Array, position: Array, quest: Quest, behind: int
) -> tuple[Float32[Array, "rows time heads head_dim"], Float32[Array, "rows heads time"]]:
    """What queries read of the lists from `_listed`, on which keys are that lie at least `behind` back: outputs and
    log-sum-exps, -inf where nothing is read."""
    rows, time, heads, head_dim = q.shape
    kv_heads, pages, size = position.shape[1:]
    low, high = page_bounds(k)
    k, v = (x.reshape(rows, kv_heads, pages * size, head_dim) for x in (k, v))

    def of_queries(queries: Array, positions: Array) -> tuple[Array, Array]:
        at = positions[0]
        on_list = position[:, :, None] <= (at - behind)[None, None, :, None, None]
        full = position[:, :, None, :, -1] <= (at - max(behind, quest.behind))[None, None, :, None]
        always = on_list[..., 0] & ~full
        near = jnp.minimum(behind, at + 1)  # keys that are read beside the lists
        count = jnp.maximum(quest.budget - near, 0) // quest.page_size
        count = count[None, None] - jnp.sum(always, axis=-1, dtype=jnp.int32)
        count = jnp.where((at < quest.prompt)[None, None], pages, count)
        read = always | selected_pages(page_scores(queries, low, high), full, count)
        seen = (read[..., None] & on_list).reshape(rows, kv_heads, 1, -1, pages * size)
        softmax = OnlineSoftmax.empty(rows, kv_heads, heads // kv_heads, queries.shape[1], head_dim)
        scores = contract("btkgd,bksd->bkgts", split_heads(queries, kv_heads), k) * head_dim**-0.5
        out, lse = softmax.add(scores, seen, v, "bkgts,bksd->bkgtd").result()
        return out, jnp.swapaxes(lse, 1, 2)

    positions = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None], (rows, time))
    out, lse = in_blocks(of_queries, QUERIES, q, positions)
    return out, jnp.swapaxes(lse, 1, 2)
