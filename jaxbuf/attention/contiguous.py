"""A contiguous key/value cache for softmax layers, and attention over it.

The committed length of a slot is its caller's integer: rejected drafts are rolled back by a smaller `start`, and rows
past it are dead. Dead rows are selected away in the scores and in the values, so a NaN left there reaches nobody.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxbuf.attention.contraction import contract

type Array = jax.Array

MASKED = float(jnp.finfo(jnp.float32).min)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer.

    Attributes:
      keys, values: [slots, kv_heads, capacity, head_dim]; slot s lies at index s - 1, the null slot has no storage.
        Time is next to the innermost axis, so that products over it read the cache where it lies.
    """

    keys: Array
    values: Array


def init_kv(*, slots: int, capacity: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Returns an empty cache for `slots` requests of at most `capacity` tokens.

    Raises:
      ValueError: A size below 1.
    """
    for name, size in (("slots", slots), ("capacity", capacity), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    shape = (slots, kv_heads, capacity, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(cache: KVCache, k: Array, v: Array, *, slots: Array | None = None, start: Array, lengths: Array) -> KVCache:
    """Writes the keys and values of positions start .. start + lengths - 1 of each row's slot.

    Args:
      cache: The cache; nothing else in it changes.
      k, v: [rows, time, kv_heads, head_dim]; rounded to the cache's dtype.
      slots: int32 [rows], physical slots; the null slot 0 writes nothing. None: row i is slot i + 1.
      start: int32 [rows]. Positions past the capacity are dropped.
      lengths: int32 [rows], how many of the time positions are real.
    """
    rows, time = k.shape[:2]
    index = _index(cache, slots, rows)
    slot_count, _, capacity, _ = cache.keys.shape
    offsets = jnp.arange(time, dtype=start.dtype)[None]
    positions = jnp.where(offsets < lengths[:, None], start[:, None] + offsets, capacity)
    target = jnp.where(index < 0, slot_count, index)[:, None]

    def write(old, new):
        return old.at[target, :, positions].set(new.astype(old.dtype), mode="drop")

    return KVCache(write(cache.keys, k), write(cache.values, v))


def attend(
    q: Array, cache: KVCache, *, slots: Array | None = None, start: Array, lengths: Array | None = None
) -> Array:
    """Softmax attention of each row's queries over its slot's tokens up to and including the query's own.

    Args:
      q: [rows, time, heads, head_dim], queries of positions start .. start + time - 1, whose keys were appended.
      cache: The cache; heads must be a multiple of its kv_heads, head h reads kv head h // (heads // kv_heads).
      slots: int32 [rows], physical slots; the null slot 0 gives zeros. None: row i is slot i + 1, and no copy is made.
      start: int32 [rows].
      lengths: int32 [rows], how many of the queries are real; None: all. The others give finite values.

    Returns:
      out [rows, time, heads, head_dim] in q's dtype; scores, softmax and sums in float32, scaled by head_dim ** -0.5.

    Raises:
      ValueError: heads is not a multiple of kv_heads, or slots is None and rows is not the cache's number of slots.
    """
    rows, time = q.shape[:2]
    index = _index(cache, slots, rows)
    keys, values = cache.keys, cache.values
    if slots is not None:
        keys, values = keys[jnp.maximum(index, 0)], values[jnp.maximum(index, 0)]
    lengths = jnp.full_like(start, time) if lengths is None else lengths
    end = jnp.where(index < 0, 0, start + lengths)  # the null slot sees no position
    position = jnp.arange(keys.shape[2], dtype=start.dtype)
    live = position[None] < end[:, None]
    query = start[:, None] + jnp.arange(time, dtype=start.dtype)[None]
    visible = live[:, None] & (position[None, None] <= query[..., None])
    values = jnp.where(live[:, None, :, None], values, jnp.zeros((), values.dtype))
    return _attention(q, keys, values, visible)


def causal_attention(q: Array, k: Array, v: Array, *, lengths: Array | None = None) -> Array:
    """Causal softmax attention without a cache. Differentiable; memory is quadratic in time.

    Args:
      q: [batch, time, heads, head_dim].
      k, v: [batch, time, kv_heads, head_dim].
      lengths: int32 [batch]; keys from there on are seen by nobody. None: all are real.

    Returns:
      out [batch, time, heads, head_dim] in q's dtype.

    Raises:
      ValueError: heads is not a multiple of kv_heads.
    """
    time = q.shape[1]
    position = jnp.arange(time, dtype=jnp.int32)
    visible = (position[None] <= position[:, None])[None]
    v = jnp.swapaxes(v, 1, 2)
    if lengths is not None:
        live = position[None] < lengths[:, None]
        visible = visible & live[:, None]
        v = jnp.where(live[:, None, :, None], v, jnp.zeros((), v.dtype))
    return _attention(q, jnp.swapaxes(k, 1, 2), v, visible)


def _index(cache: KVCache, slots: Array | None, rows: int) -> Array:
    """int32 [rows]: where each row's slot lies in the cache; -1 for the null slot."""
    if slots is not None:
        return slots - 1
    if rows != cache.keys.shape[0]:
        raise ValueError(f"rows ({rows}) must be the cache's slots ({cache.keys.shape[0]}) when slots is None")
    return jnp.arange(rows, dtype=jnp.int32)


def _attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """q [b, t, heads, d]; k, v [b, kv_heads, s, d]; visible bool [b, t, s] (or [1, t, s])."""
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = contract("btkgd,bksd->bkgts", q, k.astype(q.dtype))
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = contract("bkgts,bksd->btkgd", weights, v.astype(q.dtype))
    return out.reshape(batch, time, heads, head_dim).astype(q.dtype)
