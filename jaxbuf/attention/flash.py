"""Softmax attention of queries over keys beside them, with the log-sum-exp by which parts of a softmax are merged."""

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
    blocks = -(-time // QUERIES)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERIES - time), (0, 0), (0, 0)))
    padded = jnp.moveaxis(padded.reshape(rows, blocks, QUERIES, *q.shape[2:]), 1, 0)
    first = QUERIES * jnp.arange(blocks, dtype=jnp.int32)
    # The scores of a block are computed again for its gradient: kept for all blocks, they would be quadratic in time.
    out, lse = jax.lax.map(jax.checkpoint(lambda block: attend(*block)), (padded, first))
    out = jnp.moveaxis(out, 0, 1).reshape(rows, blocks * QUERIES, *q.shape[2:])
    lse = jnp.moveaxis(lse, 0, 2).reshape(rows, q.shape[2], blocks * QUERIES)
    return out[:, :time], lse[:, :, :time]


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
