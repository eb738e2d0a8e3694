"""Which keys of a softmax layer are kept once they leave a local window: a score of each key, and a threshold.

Any softmax mixer with keys and values can carry an `Admission`. Its score is a part: the write gate, which reads the
key before and after it is turned to its position; other learned scores of the same form, to compare with; and rules,
which learn nothing. All of them give one number in [0, 1] a key and head, when the key is written, so one memory
(`jaxbuf.attention.gated_memory`) serves them all.

Parameters of scores are float32 whatever the model computes in, and are saved apart from the model's.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.arguments import check_sizes
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.gated_pages import WhenFull
from jaxbuf.attention.gated_sequence import Mixture, Soft, check_soft
from jaxbuf.axes import Array, Float, Float32, Int32
from jaxbuf.models.layers import Norm, normal, ones, parameter, rms_norm, zeros
from jaxbuf.models.tensor_parallel import Part

NORM = Norm(1e-6)
OPEN = 2.0  # of learned scores, before the sigmoid, at the start: 0.88, so that training begins near full attention


class Keys(NamedTuple):
    """What a score may read of new keys.

    Attributes:
      x: [rows, time, hidden], what the mixer reads.
      before, after: [rows, time, kv_heads, head_dim], the keys before and after they are turned to their positions.
      queries: [rows, time, kv_heads, head_dim], of each group the first head's query, before it is turned.
      positions: int32 [1 or rows, time].
    """

    x: Float[Array, "rows time hidden"]
    before: Float[Array, "rows time kv_heads head_dim"]
    after: Float[Array, "rows time kv_heads head_dim"]
    queries: Float[Array, "rows time kv_heads head_dim"]
    positions: Int32[Array, "#rows time"]


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a score asks of those who use it.

    Attributes:
      soft: What a score does while it is trained. None: what `Admission.soft` says; else it mixes two attentions, see
        `jaxbuf.attention.gated_sequence.attend_mixture`.
      bounds: In what range training keeps the parameters; None: they are free.
      borrows: Whose last channel the score reads in place of parameters of its own: that of the first "query" of each
        group, or of each "key". Attention then sees a zero there.
    """

    soft: Mixture | None = None
    bounds: tuple[float, float] | None = None
    borrows: Literal["query", "key"] | None = None


class Score(Protocol):
    """What gives every key a number in [0, 1]."""

    @property
    def terms(self) -> Terms:
        """What it asks of those who use it."""
        ...

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> nnx.Module | None:
        """New parameters of one layer; None where nothing is learned."""
        ...

    def __call__(self, parameters: Any, keys: Keys) -> Float32[Array, "rows time kv_heads"]:
        """The scores."""
        ...


@dataclasses.dataclass(frozen=True)
class Admission:
    """Which keys a mixer keeps: those of a local window, and behind it those whose score reaches a threshold.

    Attributes:
      score: What scores them.
      window: A query sees the latest so many keys, its own among them, whatever their scores are.
      threshold: None: all keys behind the window are seen, and their scores are soft, as in training.
      keep: For which share of the keys that a slot's capacity could give, of all heads of a layer together, a cache has
        pages behind the window. `generate` makes caches whose capacity is a power of two, so that a shorter text may
        keep a larger share of its own keys.
      soft: How scores count without a threshold, "bias" or "share", see `jaxbuf.attention.gated_sequence`; those of
        whole heads have their own way.
      when_full: What happens where these do not suffice: "rest", "evict" or "raise", see
        `jaxbuf.attention.gated_pages.init_gated_table`.
    """

    score: Score
    window: int
    threshold: float | None = 0.1
    keep: float = 1.0
    when_full: WhenFull = "rest"
    soft: Soft = "bias"

    def __post_init__(self):
        check_sizes(window=self.window)
        check_soft(self.soft)
        if not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise ValueError(f"keep must be a number above 0 and at most 1, got {self.keep!r}")
        if self.when_full not in get_args(WhenFull):
            raise ValueError(f"when_full must be one of {', '.join(get_args(WhenFull))}, got {self.when_full!r}")
        if self.threshold is not None and not isinstance(self.threshold, int | float):
            raise ValueError(f"threshold must be a number or None, got {self.threshold!r}")

    def without_borrowed(
        self, q: Float[Array, "rows time heads head_dim"], k: Float[Array, "rows time kv_heads head_dim"]
    ) -> tuple[Float[Array, "rows time heads head_dim"], Float[Array, "rows time kv_heads head_dim"]]:
        """Queries q and keys k with zeros in the channels that the score borrows, see `Terms`; most borrow none."""
        borrows = self.score.terms.borrows
        if borrows is None:
            return q, k
        heads, head_dim = q.shape[2:] if borrows == "query" else k.shape[2:]
        group = q.shape[2] // k.shape[2] if borrows == "query" else 1
        first = jnp.arange(heads, dtype=jnp.int32) % group == 0
        last = jnp.arange(head_dim, dtype=jnp.int32) == head_dim - 1
        taken = (first[:, None] & last[None])[None, None]
        if borrows == "query":
            return jnp.where(taken, jnp.zeros((), q.dtype), q), k
        return q, jnp.where(taken, jnp.zeros((), k.dtype), k)


@dataclasses.dataclass(frozen=True)
class WriteGate:
    """A small MLP for each head, of the key before and after its rotation.

    Attributes:
      width: Numbers between its two layers; None: 4 · head_dim.

    Source: Write-Gated KV (2025), section 3.2.
    """

    width: int | None = None

    @property
    def terms(self) -> Terms:
        return Terms()

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> "WriteGateParameters":
        """As in `Score.parameters`."""
        return WriteGateParameters(kv_heads, head_dim, self.width or 4 * head_dim, rngs=rngs)

    def __call__(self, parameters: "WriteGateParameters", keys: Keys) -> Array:
        p = parameters
        both = [
            rms_norm(key.astype(jnp.float32), weight, NORM)
            for key, weight in ((keys.before, p.norm_before), (keys.after, p.norm_after))
        ]
        inner = contract("btkc,kwc->btkw", jnp.concatenate(both, axis=-1), p.up[...])
        inner = jax.nn.gelu(inner + p.up_bias[...][None, None])
        return jax.nn.sigmoid(contract("btkw,kw->btk", inner, p.down[...]) + p.down_bias[...][None, None])


class WriteGateParameters(nnx.Module):
    """Parameters of a layer's write gates, in float32.

    Attributes:
      norm_before, norm_after: [head_dim], which the heads share.
      up, up_bias: [kv_heads, width, 2 · head_dim], [kv_heads, width].
      down, down_bias: [kv_heads, width], [kv_heads].
    """

    def __init__(self, kv_heads: int, head_dim: int, width: int, *, rngs: nnx.Rngs):
        heads = (Part("key_heads", kv_heads),)
        self.norm_before = _weight(rngs, (head_dim,), None, ones)
        self.norm_after = _weight(rngs, (head_dim,), None, ones)
        self.up = _weight(rngs, (kv_heads, width, 2 * head_dim), heads, normal((2 * head_dim) ** -0.5))
        self.up_bias = _weight(rngs, (kv_heads, width), heads, zeros)
        self.down = _weight(rngs, (kv_heads, width), heads, normal(0.1 * width**-0.5))
        self.down_bias = _weight(rngs, (kv_heads,), heads, _opened)


@dataclasses.dataclass(frozen=True)
class HiddenScore:
    """A score of the hidden state that the mixer reads, for each head.

    Attributes:
      width: Numbers between the two layers of an MLP; None: one linear layer.

    Source: the form of KVzap (NVIDIA, 2026), thresholded when a key leaves the window.
    """

    width: int | None = None

    @property
    def terms(self) -> Terms:
        return Terms()

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> "HiddenScoreParameters":
        """As in `Score.parameters`."""
        return HiddenScoreParameters(hidden, kv_heads, self.width, rngs=rngs)

    def __call__(self, parameters: "HiddenScoreParameters", keys: Keys) -> Array:
        p, x = parameters, rms_norm(keys.x.astype(jnp.float32), parameters.norm, NORM)
        if p.up is not None and p.up_bias is not None:
            x = jax.nn.gelu(contract("bth,wh->btw", x, p.up[...]) + p.up_bias[...][None, None])
        return jax.nn.sigmoid(contract("btw,kw->btk", x, p.down[...]) + p.down_bias[...][None, None])


class HiddenScoreParameters(nnx.Module):
    """Parameters of a layer's scores of hidden states, in float32.

    Attributes:
      norm: [hidden].
      up, up_bias: [width, hidden], [width]; None where the score is linear.
      down, down_bias: [kv_heads, width or hidden], [kv_heads].
    """

    def __init__(self, hidden: int, kv_heads: int, width: int | None, *, rngs: nnx.Rngs):
        heads = (Part("key_heads", kv_heads),)
        self.norm = _weight(rngs, (hidden,), None, ones)
        self.up = None if width is None else _weight(rngs, (width, hidden), None, normal(hidden**-0.5))
        self.up_bias = None if width is None else _weight(rngs, (width,), None, zeros)
        read = hidden if width is None else width
        self.down = _weight(rngs, (kv_heads, read), heads, normal(0.1 * read**-0.5))
        self.down_bias = _weight(rngs, (kv_heads,), heads, _opened)


@dataclasses.dataclass(frozen=True)
class HeadScore:
    """One number a head, whatever the key is, but for the first tokens, which are always kept.

    Heads above the threshold keep everything, the others only their window: DuoAttention's retrieval and streaming
    heads. While it is trained, the number mixes what both give. `jaxbuf.models.gates.threshold_for_share` is the
    threshold that a share of the heads reaches.

    Attributes:
      sinks: How many first tokens of a text are kept.

    Source: DuoAttention (2024), section 2.
    """

    sinks: int = 0

    def __post_init__(self):
        check_sizes(sinks=self.sinks, least=0)

    @property
    def terms(self) -> Terms:
        return Terms(soft=Mixture(self.sinks), bounds=(0.0, 1.0))

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> "HeadScoreParameters":
        """As in `Score.parameters`."""
        return HeadScoreParameters(kv_heads, rngs=rngs)

    def __call__(self, parameters: "HeadScoreParameters", keys: Keys) -> Array:
        score = _clipped(parameters.alpha[...])[None, None]
        sink = (keys.positions < self.sinks)[..., None]
        shape = (*keys.after.shape[:2], keys.after.shape[2])
        return jnp.broadcast_to(jnp.where(sink, 1.0, score), shape)


class HeadScoreParameters(nnx.Module):
    """alpha [kv_heads], in float32, one at first."""

    def __init__(self, kv_heads: int, *, rngs: nnx.Rngs):
        self.alpha = _weight(rngs, (kv_heads,), (Part("key_heads", kv_heads),), ones)


@jax.custom_jvp
def _clipped(alpha: Float32[Array, "kv_heads"]) -> Float32[Array, "kv_heads"]:
    """alpha in [0, 1]. Its gradient is that of the identity: at a bound it has to say whether to come back."""
    return jnp.clip(alpha, 0.0, 1.0)


_clipped.defjvp(lambda primals, tangents: (_clipped(*primals), *tangents))


@dataclasses.dataclass(frozen=True)
class BorrowedNeuron:
    """A score without parameters of its own: a channel of the layer's queries or keys says which key may go.

    The channel is the last one, before it is turned to its position, of the first query of each group of heads, or of
    the key. A key is given up where scale · channel - offset is high: the score is the sigmoid of its negative. What
    the channel held is lost to attention, which sees a zero there before and after the rotation; and the score learns
    by the projection that makes the channel. So it is trained together with the model, whose first act is to set the
    channel's weights to zero (`jaxbuf.models.gates.with_idle_neurons`): every score then starts at sigmoid(offset).

    What is given up goes when it leaves the window, as with every score. The published training differs in three
    points: it adds noise to the decisions, and makes them binary at once, with the gradient of soft ones; it asks for a
    share of keys that grows with the steps, where the penalty here has a weight; and it compares the models' logits.

    Attributes:
      source: Whose channel it is.
      scale, offset: See above.

    Source: the form of Dynamic Memory Sparsification (NVIDIA, 2025), section 3.2, with the channel, the scale and the
    offset of its authors' code.
    """

    source: Literal["query", "key"] = "query"
    scale: float = 100.0
    offset: float = 5.0

    def __post_init__(self):
        if self.source not in ("query", "key"):
            raise ValueError(f"source must be 'query' or 'key', got {self.source!r}")

    @property
    def terms(self) -> Terms:
        return Terms(borrows=self.source)

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> None:
        """As in `Score.parameters`: they are the model's."""
        return None

    def __call__(self, parameters: None, keys: Keys) -> Array:
        read = keys.queries if self.source == "query" else keys.before
        return jax.nn.sigmoid(self.offset - self.scale * read[..., -1].astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Scores of 0 and 1 that nobody learns.

    Attributes:
      keeps: "all" keys, "none", or a "random" share of them.
      sinks: How many first tokens of a text are kept whatever the rule is: with "none" that is local attention with
        sinks.
      rate: The share of "random".
      seed: Of "random": whether a key is kept depends on it, on its position and its head alone.
    """

    keeps: Literal["all", "none", "random"] = "all"
    sinks: int = 0
    rate: float = 0.5
    seed: int = 0

    def __post_init__(self):
        if self.keeps not in ("all", "none", "random"):
            raise ValueError(f"keeps must be 'all', 'none' or 'random', got {self.keeps!r}")
        check_sizes(sinks=self.sinks, least=0)
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must be in [0, 1], got {self.rate!r}")

    @property
    def terms(self) -> Terms:
        return Terms()

    def parameters(self, hidden: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs) -> None:
        """As in `Score.parameters`: there are none."""
        return None

    def __call__(self, parameters: None, keys: Keys) -> Array:
        rows, time, heads = keys.after.shape[:3]
        if self.keeps == "random":
            kept = _drawn(keys.positions, heads, self.seed) < self.rate
        else:
            kept = jnp.full((*keys.positions.shape, heads), self.keeps == "all")
        kept = kept | (keys.positions < self.sinks)[..., None]
        return jnp.broadcast_to(kept, (rows, time, heads)).astype(jnp.float32)


def _drawn(positions: Int32[Array, "*n"], heads: int, seed: int) -> Float32[Array, "*n {heads}"]:
    """Uniform in [0, 1), the same for a position and head in every launch."""
    head = jnp.arange(heads, dtype=jnp.uint32).reshape((1,) * positions.ndim + (heads,))
    x = positions[..., None].astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + head * jnp.uint32(0x85EBCA77)
    x = x + jnp.uint32(seed * 0xC2B2AE3D & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    x = x ^ (x >> jnp.uint32(16))
    return (x >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], first: Any, initializer: Any) -> nnx.Param:
    axes = (first, *(None,) * (len(shape) - 1))
    return parameter(rngs, shape, axes, initializer, dtype=jnp.float32, keep_float32=True)


def _opened(key, shape, dtype) -> Array:
    return jnp.full(shape, OPEN, dtype)
