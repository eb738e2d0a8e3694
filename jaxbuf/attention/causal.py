"""Causal softmax attention over whole sequences, without a cache: what training and the plain forward use."""

import jax
import jax.numpy as jnp

from jaxbuf.attention.flash import check_heads, flash
from jaxbuf.axes import Array, Float, Int
from jaxbuf.pallas.dispatch import ask
from jaxbuf.target import Target


def causal_attention(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    *,
    lengths: Int[Array, "batch"] | None = None,
    implementation: str = "auto",
    target: Target | str | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Causal softmax attention without a cache. Differentiable; memory is linear in time.

    A NaN or infinity in v of a token reaches the outputs of earlier tokens of its row, too: they weigh it with zero. It
    does not reach other rows, and what lies past `lengths` reaches nobody.

    Args:
      q: The queries.
      k, v: Head h reads kv head h // (heads // kv_heads).
      lengths: Keys from there on are seen by no query before; the outputs from there on are finite where q is. None:
        all are real.
      implementation: "xla", "gpu" (cuDNN's flash attention, on NVIDIA GPUs from Ampere on, in bfloat16 or float16), or
        "auto": the target's kernel where it serves the call, else "xla".
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      The outputs in q's dtype; scores, softmax and sums in float32, scaled by head_dim ** -0.5.

    Raises:
      ValueError: heads is not a multiple of kv_heads, no such implementation or target, or the implementation asked for
        can't serve the call; it says why.
    """
    asked = ask("causal_attention", implementation, target, (q,))
    check_heads(q, k.shape[2])
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
        live = (jnp.arange(v.shape[1], dtype=jnp.int32)[None] < lengths[:, None])[:, :, None, None]
        k, v = (jnp.where(live, x, jnp.zeros((), x.dtype)) for x in (k, v))
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    if asked is not None:
        from jaxbuf.pallas.flash import Call, gpu, supports

        (rows, time, heads, head_dim), kv_heads = q.shape, k.shape[2]
        call = Call(rows, time, k.shape[1], heads, kv_heads, head_dim, q.dtype, asked.generation)
        if asked.takes(supports(call, k=k.dtype, v=v.dtype)):
            # What is past a length is behind every real query: a causal one does not see it.
            return gpu.causal(q, k, v)
    return _by_xla(q, k, v, lengths)


@jax.jit
def _by_xla(q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
    return flash(q, k, v, causal=True, lengths=lengths)[0]
