"""Write-gated attention: a query sees the keys of a local window, and of those before it the ones that a gate admits.

While gates are trained, the admission is soft, in one of three ways. As a "bias", the logarithm of a gate is added to
the score of its key outside the window. As a "share", full attention adds no more than this share of the key's value.
Gates of whole heads mix what a head gives with all keys and with few of them.

A bias of log(FLOOR) hides no key whose score exceeds all others by more: where attention is that sharp, keys whose gate
is nearly closed are still read while gates are trained, and are missed once a threshold is set. A share of zero hides
every key. With the distance D that a key's absence makes, a training's loss is then D (1 - g)^2 + sparsity · g (2 - g)
in its gate g, as far as keys do not depend on each other: its derivative is 2 (1 - g) (sparsity - D), so that the best
gate is 1 where D exceeds the sparsity and 0 elsewhere, with nothing between.
Afterwards the admission is binary: a key is seen if its gate reaches a threshold, whoever asks.

Source: Write-Gated KV (2025), section 3; the floor of the logarithm is that of its authors' code.
"""

import dataclasses
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_rows, check_sizes
from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import MASKED, OnlineSoftmax, check_heads, split_heads
from jaxbuf.axes import Array, Bool, Float, Float32, Int, Int32
from jaxbuf.target import Target

FLOOR = 1e-3  # of a gate, before its logarithm is taken
type Soft = Literal["bias", "share"]
BLOCK = 512  # queries, and keys, whose scores exist at once: fewer are launches too small for a GPU


@dataclasses.dataclass(frozen=True)
class Mixture:
    """How gates of whole heads are soft: see `attend_mixture`.

    Attributes:
      sinks: How many first tokens of a text every query sees.
    """

    sinks: int = 0


class Sizes(NamedTuple):
    """What the blocks of one attention have in common.

    Attributes:
      window: Keys nearer than that count as they are.
      block: Queries, and keys, of a block.
      shares: Whether the weights of keys outside the window are shares of their values; else they are added to scores.
    """

    window: int
    block: int
    shares: bool = False


def attend_sequence(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    gates: Float32[Array, "batch time kv_heads"],
    *,
    window: int,
    threshold: float | Float[Array, "batch"] | None = None,
    lengths: Int[Array, "batch"] | None = None,
    soft: Soft = "bias",
) -> Float[Array, "batch time heads head_dim"]:
    """Causal attention over whole sequences in which query i sees key j by their distance and by the key's gate.

    Differentiable; without a threshold in all four arrays, with one not in gates. Memory is linear in time, that of the
    gradient as well: no bias of queries times keys is ever made.

    Args:
      q: The queries.
      k, v: Head h reads kv head h // (heads // kv_heads).
      gates: Of each key, in [0, 1].
      window: A key is local, and seen as it is, where 0 <= i - j < window. At least 1.
      threshold: Other keys are seen, and as they are, where gate >= threshold: one number, or one a row. None: all are,
        and their gates are soft, as in training.
      soft: How: "bias" adds log(max(gate, FLOOR)) to the score, "share" multiplies the key's value, but not its part in
        the softmax's sum, with the gate.
      lengths: Tokens from there on are not real: they are seen by nobody, whatever they hold. None: all are real.

    Returns:
      The outputs in q's dtype, zeros past `lengths`; scores, softmax and sums in float32, scaled by head_dim ** -0.5.

    Raises:
      ValueError: A shape or dtype does not fit, heads is not a multiple of kv_heads, or window is below 1.

    Source: Write-Gated KV (2025), section 3.2; the gradient of flash attention is Dao (2023), FlashAttention-2,
    algorithm 2, to which the logarithms' is added: that of key j is the sum, over the queries outside of whose window
    it lies, of the gradients of its scores.
    """
    check_sizes(window=window)
    check_soft(soft)
    rows, time = check_gated(q, k, v, gates, threshold, lengths)
    lengths = jnp.full(rows, time, jnp.int32) if lengths is None else jnp.minimum(jnp.asarray(lengths, jnp.int32), time)
    live = (jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None])[:, :, None]
    gates = jnp.where(live, gates, 0.0)
    q, k, v = (jnp.where(live[..., None], x, jnp.zeros((), x.dtype)).astype(q.dtype) for x in (q, k, v))
    shares = threshold is None and soft == "share"
    if shares:
        weights = gates
    elif threshold is None:
        weights = jnp.log(jnp.maximum(gates, FLOOR))
    else:
        admitted = gates >= jnp.reshape(jnp.asarray(threshold, jnp.float32), (-1, 1, 1))
        weights = jnp.where(admitted, 0.0, MASKED)
    block = min(BLOCK, time)
    padded = _whole_blocks(block, split_heads(q, k.shape[2]), k, v, weights)
    out: Array = _attend(Sizes(window, block, shares), *padded, lengths)  # pyright: ignore[reportAssignmentType]
    return out[:, :time].reshape(q.shape)


def attend_mixture(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    gates: Float32[Array, "batch time kv_heads"],
    *,
    window: int,
    sinks: int = 0,
    lengths: Int[Array, "batch"] | None = None,
    target: Target | str | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Mixes the outputs of two attentions: gate · full + (1 - gate) · streaming.

    The full one is causal over all keys. The streaming one sees the first `sinks` keys and the local window. A token's
    gate mixes the token's own output. All tokens of a head are meant to have the same gate; that of the sinks does not
    matter, since both attentions give them the same. Differentiable in all four arrays; memory is linear in time.

    Args:
      q, k, v, window, lengths: As in `attend_sequence`.
      gates: Of each token's output, in [0, 1].
      sinks: How many first tokens every query sees; 0: none but those of its window.
      target: Of the full attention, as in `causal_attention`.

    Returns:
      The outputs in q's dtype, zeros past `lengths`.

    Raises:
      ValueError: As in `attend_sequence`, or sinks is below 0.

    Source: DuoAttention (2024), section 2.3, eq. 2.
    """
    check_sizes(sinks=sinks, least=0)
    _, time = check_gated(q, k, v, gates, None, lengths)
    first = jnp.arange(time, dtype=jnp.int32)[None, :, None] < sinks
    streaming = attend_sequence(
        q, k, v, jnp.broadcast_to(first, gates.shape).astype(jnp.float32), window=window, threshold=0.5, lengths=lengths
    )
    if lengths is not None:
        live = (jnp.arange(time, dtype=jnp.int32)[None] < jnp.asarray(lengths, jnp.int32)[:, None])[:, :, None]
        gates = jnp.where(live, gates, 0.0)  # so that both summands are zero there
        q, k, v = (jnp.where(live[..., None], x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    full = causal_attention(q, k, v, lengths=lengths, target=target)
    share = jnp.repeat(gates, q.shape[2] // k.shape[2], axis=2)[..., None]
    mixed = share * full.astype(jnp.float32) + (1.0 - share) * streaming.astype(jnp.float32)
    return mixed.astype(q.dtype)


def attend_admitted(
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    gates: Float32[Array, "rows time kv_heads"],
    *,
    window: int,
    threshold: Float32[Array, "rows"],
    lengths: Int32[Array, "rows"],
) -> tuple[Float[Array, "rows time heads head_dim"], Float32[Array, "rows heads time"]]:
    """`attend_sequence` with thresholds, of arguments that were checked and are zeros past `lengths`.

    Returns:
      The outputs, and the logarithm of each softmax's denominator, finite for all queries.
    """
    rows, time, heads, _ = q.shape
    weights = jnp.where(gates >= threshold[:, None, None], 0.0, MASKED)
    block = min(BLOCK, time)
    grouped, k, v, weights = _whole_blocks(block, split_heads(q, k.shape[2]), k, v, weights)
    out, lse = _forward(Sizes(window, block), grouped, k, v, weights, lengths)
    return out[:, :time].reshape(q.shape), lse[..., :time].reshape(rows, heads, time)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, q: Array, k: Array, v: Array, weights: Array, lengths: Array) -> Array:
    """The outputs like q [rows, n, kv_heads, group, head_dim], n whole blocks; `weights` f32 [rows, n, kv_heads] are
    added to the scores of keys outside the window, or are shares of their values."""
    return _forward(sizes, q, k, v, weights, lengths)[0]


def _forward(sizes, q, k, v, weights, lengths):
    """The outputs, and f32 [rows, kv_heads, group, n] the log-sum-exp of each query's scores."""
    block = sizes.block

    def of_queries(number):
        queries = _part(q, number, block)

        def add_keys(place, softmax):
            keys, values = _part(k, place, block), _part(v, place, block)
            here = _part(weights, place, block)
            scores, visible, outside = _scores(sizes, queries, keys, here, number, place, lengths)
            return softmax.add(scores, visible, values, shares=_shares(here, outside) if sizes.shares else None)

        empty = OnlineSoftmax.empty(q.shape[0], q.shape[2], q.shape[3], block, q.shape[4])
        highest, total, out = jax.lax.fori_loop(0, number + 1, add_keys, empty)
        total = jnp.where(total > 0, total, 1.0)  # finite, where `result` gives -inf: gradients need it so
        return jnp.moveaxis(out / total[..., None], 3, 1).astype(q.dtype), highest + jnp.log(total)

    out, lse = jax.lax.map(of_queries, jnp.arange(q.shape[1] // block, dtype=jnp.int32))
    return _joined(out, 1), _joined(lse, 3)


def _keep(sizes, q, k, v, weights, lengths):
    out, lse = _forward(sizes, q, k, v, weights, lengths)
    return out, (q, k, v, weights, lengths, out, lse)


def _gradient(sizes, kept, given):
    """The gradients of q, k, v and weights, from that of the outputs: block by block, with the scores made again."""
    q, k, v, weights, lengths, out, lse = kept
    block = sizes.block
    scale = q.shape[-1] ** -0.5
    # Of each query the sum, over its keys, of weight times the gradient of the weight.
    common = jnp.moveaxis(jnp.sum(given.astype(jnp.float32) * out.astype(jnp.float32), axis=-1), 1, 3)

    def of_queries(carry, number):
        queries, given_here = _part(q, number, block), _part(given, number, block)
        lse_here, common_here = (jax.lax.dynamic_slice_in_dim(x, number * block, block, axis=3) for x in (lse, common))

        def add_keys(place, carry):
            of_q, of_k, of_v, of_weights = carry
            keys, values = _part(k, place, block), _part(v, place, block)
            here = _part(weights, place, block)
            scores, visible, outside = _scores(sizes, queries, keys, here, number, place, lengths)
            parts = jnp.where(visible, jnp.exp(scores - lse_here[..., None]), 0.0)
            of_parts = contract("btkgd,bskd->bkgts", given_here, values)
            if sizes.shares:
                shares = _shares(here, outside)
                of_scores = parts * (shares * of_parts - common_here[..., None])
                of_here = jnp.sum(jnp.where(outside, parts * of_parts, 0.0), axis=(2, 3))
                parts = parts * shares
            else:
                of_scores = parts * (of_parts - common_here[..., None])
                of_here = jnp.sum(jnp.where(outside, of_scores, 0.0), axis=(2, 3))
            of_scores, parts = of_scores.astype(q.dtype), parts.astype(q.dtype)
            of_q = of_q + scale * contract("bkgts,bskd->btkgd", of_scores, keys)
            of_k = _added(of_k, place, scale * contract("bkgts,btkgd->bskd", of_scores, queries))
            of_v = _added(of_v, place, contract("bkgts,btkgd->bskd", parts, given_here))
            return of_q, of_k, of_v, _added(of_weights, place, jnp.moveaxis(of_here, 1, 2))

        of_q = jnp.zeros(queries.shape, jnp.float32)
        of_q, *carry = jax.lax.fori_loop(0, number + 1, add_keys, (of_q, *carry))
        return tuple(carry), of_q.astype(q.dtype)

    empty = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v, weights))
    numbers = jnp.arange(q.shape[1] // block, dtype=jnp.int32)
    (of_k, of_v, of_weights), of_q = jax.lax.scan(of_queries, empty, numbers)
    return _joined(of_q, 1), of_k.astype(k.dtype), of_v.astype(v.dtype), of_weights, None


_attend.defvjp(_keep, _gradient)


def _scores(
    sizes: Sizes,
    queries: Float[Array, "rows n kv_heads group head_dim"],
    keys: Float[Array, "rows n kv_heads head_dim"],
    weights: Float32[Array, "rows n kv_heads"],
    number: Int32[Array, ""],
    place: Int32[Array, ""],
    lengths: Int32[Array, "rows"],
) -> tuple[Float32[Array, "rows kv_heads group n n"], Bool[Array, "rows 1 1 n n"], Bool[Array, "n n"]]:
    """The scores of a block of queries with one of keys, which of them count, and which lie outside the window."""
    offset = jnp.arange(sizes.block, dtype=jnp.int32)
    query, key = number * sizes.block + offset, place * sizes.block + offset
    distance = query[:, None] - key[None]
    outside = distance >= sizes.window
    scores = contract("btkgd,bskd->bkgts", queries, keys) * queries.shape[-1] ** -0.5
    if not sizes.shares:
        bias = jnp.moveaxis(weights, 1, 2)[:, :, None, None]
        scores = scores + jnp.where(outside, bias, 0.0)
    visible = (distance >= 0)[None] & (jnp.maximum(query[:, None], key[None])[None] < lengths[:, None, None])
    visible = visible[:, None, None]
    return jnp.where(visible, scores, MASKED), visible, outside


def _shares(
    weights: Float32[Array, "rows n kv_heads"], outside: Bool[Array, "n n"]
) -> Float32[Array, "rows kv_heads 1 n n"]:
    return jnp.where(outside, jnp.moveaxis(weights, 1, 2)[:, :, None, None], 1.0)


def _part(x: Array, number: Array, block: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis=1)


def _whole_blocks(block: int, *arrays: Array) -> list[Array]:
    """Arrays [rows, time, ...] with zeros behind, to whole blocks of their second axis."""
    return [jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2))) for x in arrays]


def _added(x: Array, number: Array, part: Array) -> Array:
    start, block = number * part.shape[1], part.shape[1]
    held = jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(x, held + part, start, axis=1)


def _joined(blocks: Array, axis: int) -> Array:
    """Blocks along the first axis, joined along this one of what each is."""
    moved = jnp.moveaxis(blocks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def check_soft(soft: Soft) -> None:
    """Raises a ValueError where it is no way for gates to be soft."""
    if soft not in get_args(Soft.__value__):
        raise ValueError(f'soft must be "bias" or "share", got {soft!r}')


def check_gated(q: Array, k: Array, v: Array, gates: Array, threshold, lengths) -> tuple[int, int]:
    """Raises a ValueError that names the first argument that does not fit; returns rows and time."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [batch, time, heads, head_dim], got shapes {q.shape} and {k.shape}")
    (rows, time), expected = q.shape[:2], (*q.shape[:2], k.shape[2], q.shape[3])
    check_heads(q, k.shape[2])
    for name, array, shape in (("k", k, expected), ("v", v, expected), ("gates", gates, expected[:3])):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if gates.dtype != jnp.float32:
        raise ValueError(f"gates must be float32, got {gates.dtype}")
    if threshold is not None and jnp.shape(threshold) not in ((), (rows,)):
        raise ValueError(f"threshold must be a number or f32 [{rows}], one a row, got shape {jnp.shape(threshold)}")
    if lengths is not None:
        check_rows("lengths", jnp.asarray(lengths), rows)
    return rows, time
