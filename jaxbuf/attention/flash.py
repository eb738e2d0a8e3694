"""Softmax attention of queries over keys beside them, with the log-sum-exp by which parts of a softmax are merged; and
the online softmax, to which keys are added block by block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxbuf.attention.contraction import contract
from jaxbuf.axes import Array, Bool, Float, Float32, Int32

MASKED = float(jnp.finfo(jnp.float32).min)
QUERIES = 256  # tokens whose scores with all keys exist at once


def flash(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows n kv_heads head_dim"],
    v: Float[Array, "rows n kv_heads head_dim"],
    *,
    causal: bool = False,
    lengths: Int32[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], Float32[Array, "rows heads time"]]:
    """Softmax attention of each row's queries over its keys. Differentiable; memory is linear in the queries.

    Values that a query does not see are weighed with zero: what is not finite among them must be selected away before.

    Args:
      q: The queries.
      k, v: Head h reads kv head h // (heads // kv_heads).
      causal: Whether query i sees keys 0 .. i alone.
      lengths: Keys from there on are seen by nobody; of rows with a length of 0 the outputs are zeros here, and not
        specified where a kernel computes them. None: all are real.

    Returns:
      The outputs in q's dtype, of scores, softmax and sums in float32, scaled by head_dim ** -0.5; and the logarithm of
      each softmax's denominator, -inf where a query sees nothing.
    """
    rows, time = q.shape[:2]
    key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    seen = None if lengths is None else key < lengths[:, None, None]

    def attend(q, first):
        visible = seen
        if causal:
            query = first + jnp.arange(q.shape[1], dtype=jnp.int32)[None, :, None]
            visible = key <= query if seen is None else seen & (key <= query)
        return _attend(q, k, v, visible)

    if time <= QUERIES:
        return attend(q, 0)

    # The scores of a block are computed again for its gradient: kept for all blocks, they would be quadratic in time.
    @jax.checkpoint
    def of_block(q, query):
        out, lse = attend(q, query[0, 0])
        return out, jnp.swapaxes(lse, 1, 2)

    query = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None], (rows, time))
    out, lse = in_blocks(of_block, QUERIES, q, query)
    return out, jnp.swapaxes(lse, 1, 2)


def in_blocks(function: Callable[..., Any], block: int, *arrays: Array) -> Any:
    """A function of so many tokens of arrays [rows, time, ...] at a time, whose results, [rows, tokens, ...] each, are
    joined again. Behind the last token there are zeros."""
    rows, time = arrays[0].shape[:2]
    blocks = -(-time // block)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, blocks * block - time), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, blocks, block, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, blocks * block, *x.shape[3:])[:, :time]

    return jax.tree.map(joined, jax.lax.map(lambda each: function(*each), tuple(map(cut, arrays))))


class OnlineSoftmax(NamedTuple):
    """Attention of queries over the keys that were added so far.

    Attributes:
      highest: float32 [rows, kv_heads, group, time], each query's highest score.
      total: Like it, the sum of its weights, relative to that of the highest score.
      out: float32 [rows, kv_heads, group, time, value_dim], the sum of the values with these weights.

    Source: Milakov and Gimelshein (2018), Online normalizer calculation for softmax, algorithm 3.
    """

    highest: Array
    total: Array
    out: Array

    @classmethod
    def empty(cls, rows: int, kv_heads: int, group: int, time: int, value_dim: int) -> "OnlineSoftmax":
        """Without a key."""
        shape = rows, kv_heads, group, time
        zeros = jnp.zeros((*shape, value_dim), jnp.float32)
        return cls(jnp.full(shape, MASKED), jnp.zeros(shape, jnp.float32), zeros)

    def add(
        self,
        scores: Float32[Array, "rows kv_heads group time n"],
        visible: Bool[Array, "#rows #kv_heads #group #time n"],
        values: Float[Array, "..."],
        sums: str = "bkgts,bskd->bkgtd",
        *,
        shares: Float32[Array, "#rows #kv_heads #group #time n"] | None = None,
    ) -> "OnlineSoftmax":
        """With more keys.

        Args:
          scores: Of each query and key, scaled.
          visible: Which of them count.
          values: Of the keys, [rows, n, kv_heads, value_dim], or as `sums` says; what nobody sees must be finite.
          sums: The contraction of weights (bkgts) and values.
          shares: Of each key's value, what counts; its weight counts whole in the softmax's sum. None: all of it.
        """
        scores = jnp.where(visible, scores, MASKED)
        highest = jnp.maximum(self.highest, jnp.max(scores, axis=-1))
        # Where no key is visible yet, highest is MASKED itself: hence the second selection.
        weights = jnp.where(visible, jnp.exp(scores - highest[..., None]), 0.0)
        kept = jnp.exp(self.highest - highest)
        total = self.total * kept + jnp.sum(weights, axis=-1)
        if shares is not None:
            weights = weights * shares
        out = self.out * kept[..., None] + contract(sums, weights.astype(values.dtype), values)
        return OnlineSoftmax(highest, total, out)

    def result(self) -> tuple[Array, Array]:
        """float32 outputs [rows, time, heads, value_dim], and log-sum-exps [rows, heads, time]; zeros and -inf where
        nothing was visible."""
        rows, kv_heads, group, time = self.total.shape
        some = jnp.where(self.total > 0, self.total, 1.0)
        out = jnp.moveaxis(self.out / some[..., None], 3, 1).reshape(rows, time, kv_heads * group, -1)
        lse = jnp.where(self.total > 0, self.highest + jnp.log(some), -jnp.inf)
        return out, lse.reshape(rows, kv_heads * group, time)


def _attend(q: Array, k: Array, v: Array, visible: Bool[Array, "#rows #time n"] | None) -> tuple[Array, Array]:
    rows, time, heads, head_dim = q.shape
    grouped = split_heads(q, k.shape[2])
    scores = contract("btkgd,bskd->bkgts", grouped, k) * head_dim**-0.5
    if visible is not None:
        visible = visible[:, None, None]
        scores = jnp.where(visible, scores, MASKED)
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - highest[..., None])
    if visible is not None:  # where nothing is, highest is MASKED itself
        weights = jnp.where(visible, weights, 0.0)
    total = jnp.sum(weights, axis=-1)
    out = contract("bkgts,bskd->bkgtd", weights.astype(q.dtype), v)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)
    return out, (highest + jnp.log(total)).reshape(rows, heads, time)


def merge(
    out: Float32[Array, "rows time heads head_dim"],
    lse: Float32[Array, "rows heads time"],
    other: Float[Array, "rows time heads head_dim"],
    other_lse: Float32[Array, "rows heads time"],
) -> tuple[Float32[Array, "rows time heads head_dim"], Float32[Array, "rows heads time"]]:
    """Attention over two sets of keys together, of what `flash` gave of each: outputs and log-sum-exps in float32.

    `lse` must be finite; where `other_lse` is -inf, its outputs must be finite and do not count.

    Source: Dao (2023), FlashAttention-2, section 3.1.
    """
    together = jnp.logaddexp(lse, other_lse)
    ours, theirs = (jnp.swapaxes(jnp.exp(x - together), 1, 2)[..., None] for x in (lse, other_lse))
    return out * ours + other.astype(jnp.float32) * theirs, together


def check_heads(q: Float[Array, "... heads head_dim"], kv_heads: int) -> None:
    """Raises a ValueError unless the heads of q are a multiple of kv_heads."""
    if q.shape[-2] % kv_heads:
        raise ValueError(f"heads ({q.shape[-2]}) must be a multiple of kv_heads ({kv_heads})")


def split_heads(
    q: Float[Array, "batch time heads head_dim"], kv_heads: int
) -> Float[Array, "batch time kv_heads group head_dim"]:
    """The heads of q apart: those that read one kv head are a group."""
    batch, time, heads, head_dim = q.shape
    check_heads(q, kv_heads)
    return q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
