"""Causal softmax attention over whole sequences, without a cache: what training and the plain forward use."""

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float, Int
from jaxbuf.pallas.dispatch import ask
from jaxbuf.target import Target

MASKED = float(jnp.finfo(jnp.float32).min)


def causal_attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    *,
    lengths: Int[Array, "batch"] | None = None,
    implementation: str = "auto",
    target: Target | str | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Causal softmax attention without a cache. Differentiable; memory is quadratic in time.

    A NaN or infinity in v of a token reaches the outputs of earlier tokens of its row, too: they weigh it with zero. It
    does not reach other rows, and what lies past `lengths` reaches nobody.

    Args:
      q: The queries.
      k, v: Head h reads kv head h // (heads // kv_heads).
      lengths: Keys from there on are seen by nobody. None: all are real.
      implementation: "auto" or "xla": there is no kernel yet.
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      The outputs in q's dtype; scores, softmax and sums in float32, scaled by head_dim ** -0.5.

    Raises:
      ValueError: heads is not a multiple of kv_heads, or no such implementation or target.
    """
    ask("causal_attention", implementation, target, (q,))
    check_heads(q, k.shape[2])
    if lengths is not None:
        live = jnp.arange(v.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        v = jnp.where(live[:, :, None, None], v, jnp.zeros((), v.dtype))
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    precision = jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default")
    with precision, jax.numpy_dtype_promotion("standard"):  # it relies on implicit promotion
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=lengths)


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
