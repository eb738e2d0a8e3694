"""StreamingLLM's attention: the first tokens of a text and its latest ones, at positions that never grow.

Keys are turned to their positions in the text when they are made, by a model and in its caches. A cache that holds the
first tokens and a window numbers them 0, 1, 2, ... without the gap between: the distance from a query to a key of the
window is what it is in the text, and that to a first token is as if the window followed it at once. Scores depend on
distances alone, so it is the query that is turned back, for the first tokens, by as much as the gap is long.

Local attention, without the turn, is `jaxbuf.models.admission.Rule(keeps="none", sinks=...)`, which has a memory. This
is for whole sequences, to compare with.

Source: StreamingLLM (2023), section 3.2.
"""

import dataclasses

import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import OnlineSoftmax, merge, split_heads
from jaxbuf.attention.gated_sequence import attend_admitted, check_gated
from jaxbuf.attention.rotary import Rotary, rotate
from jaxbuf.axes import Array, Float, Float32, Int


@dataclasses.dataclass(frozen=True)
class Streaming:
    """What a cache of the first and the latest tokens holds.

    Attributes:
      window: The latest tokens, the query's own among them.
      sinks: The first tokens of a text.
      dense: How many first softmax layers of a model read everything.
    """

    window: int
    sinks: int = 4
    dense: int = 0

    def __post_init__(self):
        check_sizes(window=self.window, sinks=self.sinks)
        check_sizes(dense=self.dense, least=0)

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
        """As in `jaxbuf.attention.selection.Selection`: `attend_streaming_sequence`, which has no gates."""
        if gates is not None:
            raise ValueError("gates must be None where positions are those within a cache: what it holds is fixed")
        return attend_streaming_sequence(q, k, v, rotary, self, lengths=lengths)


def attend_streaming_sequence(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    rotary: Rotary | None,
    streaming: Streaming,
    *,
    lengths: Int[Array, "batch"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Attention over whole sequences in which query i sees the sinks and its window, with positions within the cache.

    The query at position i sees key j where 0 <= i - j < window or j < sinks. Its own position in the cache is
    min(i, sinks + window - 1), and that of a sink is j. Memory is linear in time. It is made for evaluation.

    Args:
      q, k: Turned to their positions in the text.
      v: Head h reads kv head h // (heads // kv_heads).
      rotary: How they were turned; None: they were not, and this is local attention with sinks.
      streaming: What is seen.
      lengths: Tokens from there on are not real; None: all are.

    Returns:
      The outputs in q's dtype, zeros past `lengths`; scores, softmax and sums in float32, scaled by head_dim ** -0.5.

    Raises:
      ValueError: A shape or dtype does not fit, or heads is not a multiple of kv_heads.

    Source: StreamingLLM (2023), section 3.2.
    """
    window, sinks = streaming.window, min(streaming.sinks, k.shape[1])
    gates = jnp.zeros(k.shape[:3], jnp.float32)
    rows, time = check_gated(q, k, v, gates, None, lengths)
    lengths = jnp.full(rows, time, jnp.int32) if lengths is None else jnp.minimum(jnp.asarray(lengths, jnp.int32), time)
    at = jnp.arange(time, dtype=jnp.int32)
    real = (at[None] < lengths[:, None])[..., None, None]
    q, k, v = (jnp.where(real, x, jnp.zeros((), x.dtype)).astype(q.dtype) for x in (q, k, v))
    # The threshold is above every gate, so that the window alone is seen.
    out, lse = attend_admitted(q, k, v, gates, window=window, threshold=jnp.ones(rows, jnp.float32), lengths=lengths)

    if rotary is not None:
        cos, sin = rotary.angles(jnp.minimum(at, streaming.sinks + window - 1)[None] - at[None])
        amplitude = 1.0 if rotary.scaling is None else rotary.scaling.amplitude  # which q has already
        q = rotate(q, (cos / amplitude, sin / amplitude))
    scores = contract("btkgd,bskd->bkgts", split_heads(q, k.shape[2]), k[:, :sinks]) * q.shape[-1] ** -0.5
    behind = (at[:, None] - at[None, :sinks] >= window)[None, None, None]
    empty = OnlineSoftmax.empty(rows, k.shape[2], q.shape[2] // k.shape[2], time, q.shape[3])
    out, _ = merge(out.astype(jnp.float32), lse, *empty.add(scores, behind, v[:, :sinks]).result())
    return jnp.where(real, out, 0.0).astype(q.dtype)
