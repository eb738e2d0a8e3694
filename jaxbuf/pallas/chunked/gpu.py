"""`chunked` on NVIDIA GPUs (Hopper), in two launches: Pallas Mosaic GPU.

1. `gpu_pairs` computes of every chunk and head what its tokens are to one another: the products of queries and keys
   across the decay between them, and with the delta rule the inverse of the system of `jaxbuf.recurrence.chunked`. A
   chunk needs nothing of another, so that all multiprocessors work at once. `gpu_channel_pairs` does so where every key
   channel has a decay, and writes the keys and queries with their decays, too.
2. `gpu_walk` goes through the chunks of a row's head, with the state in registers, which leaves it five products a
   chunk. What it multiplies by it has from `gpu_head_chunks` or `gpu_channel_chunks`.

XLA sums the gates before, if there is one a head. Where a state is to be returned that is not the last (`prefill` keeps
some tokens as entries), the walk computes it behind that chunk, from weights that are XLA's, too.

Floor: (q, k, v, gates, pairs twice, outputs) / read bandwidth, or the products' time, which is larger: of a head and
chunk of Gated DeltaNet, 128 by 128, a pair takes 34 products of 64 by 64 by 64, the walk 36, each 128 cycles. With a
decay a channel it is 100 and 44, and the pairs with their keys and queries are 112 KB a chunk and head, which are
written and read once.

Precision: float32 operands are two bfloat16 halves, the first one rounded, so that a product is off by 2^-18; sums are
float32. Outputs are rounded to bfloat16, which is all that one sees of it in outputs.

In keys and values the kernels put zeros in place of tokens past a row's length, XLA in gates, so that they add nothing.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.gpu_channel_chunks import ChannelArrays
from jaxbuf.pallas.chunked.gpu_channel_pairs import channel_pairs
from jaxbuf.pallas.chunked.gpu_head_chunks import HeadArrays
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, LEAST
from jaxbuf.pallas.chunked.gpu_pairs import pairs
from jaxbuf.pallas.chunked.gpu_walk import COUNT, RETURNS, UPDATES, update_chunks, walk
from jaxbuf.pallas.sums import halves

# Sums of a chunk's multiples of 2^-13 are exact, of log decays not below LEAST: down to -2^11; and so are those of what
# that leaves, in multiples of 2^-27.
COARSE, FINE = np.float32(2.0**13), np.float32(2.0**27)
MOST_SOLVED = 8192  # chunks of heads with a decay a key channel, of 112 KB each


def solve(
    call: Call,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    lengths: Array,
    cut: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:
    """`jaxbuf.recurrence.chunked.solve_chunks`, as `jaxbuf.pallas.chunked.tpu.solve` has it."""
    rows, time, chunks = call.rows, call.time, -(-call.time // CHUNK)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, time)
    cut = lengths if cut is None else jnp.clip(cut.astype(jnp.int32), 0, lengths)
    padded = dataclasses.replace(
        call, time=chunks * CHUNK, updates=chunks * CHUNK if call.updates == time else call.updates
    )
    real = jnp.arange(padded.time, dtype=jnp.int32)[None] < lengths[:, None]

    def whole(x):
        return jnp.pad(x, ((0, 0), (0, padded.time - time), *((0, 0),) * (x.ndim - 2)))

    def by_chunk(x):
        """[rows, time, heads] -> [rows, heads, chunks, CHUNK], with zeros past lengths."""
        x = jnp.where(real[..., None], whole(x), 0.0)
        return jnp.moveaxis(x.reshape(rows, chunks, CHUNK, call.heads), 3, 1)

    ones = jnp.ones((rows, time, call.heads), jnp.float32)
    strengths = by_chunk(ones if beta is None else beta)
    arrays = whole(q), whole(k)
    ends = -(-lengths // CHUNK), jnp.maximum(cut - 1, -1) // CHUNK
    words = jnp.stack([*ends, first_chunk(padded, cut), jnp.zeros_like(cut), lengths], axis=1)
    v = whole(v)
    if call.decay == "channel":
        log_decay = whole(log_decay)
        tokens = words, lengths, cut, *arrays, v, log_decay, strengths
        out, last, updates = _solve_channels(padded, state, *tokens, interpret)
    else:
        sums, at_cut = _sums(by_chunk(jnp.zeros_like(ones) if log_decay is None else log_decay), cut)
        gates = jnp.stack([*sums[:2], strengths, *sums[2:]], axis=3)
        given = HeadArrays(*arrays, gates, at_cut, *pairs(padded, *arrays, gates, lengths, interpret=interpret))
        out, last, *updates = walk(padded, words, state, v, given, chunks, interpret=interpret)
        updates = updates[0] if updates else None
    begins = jnp.zeros_like(last) if state is None else state
    last = jnp.where((cut > 0)[:, None, None, None], last, begins)
    if updates is not None and call.updates == time:
        updates = jnp.where(real[:, :time, None, None], updates[:, :time], 0)
    return out[:, :time], last, updates


def _solve_channels(
    call: Call,
    state: Array | None,
    words: Array,
    lengths: Array,
    cut: Array,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    strengths: Array,
    interpret: bool,
) -> tuple[Array, Array, Array | None]:
    """Outputs, states and updates as from `walk`, of all chunks, with a decay a key channel: at most MOST_SOLVED chunks
    of all heads at once, as their pairs take memory."""
    chunks = call.time // CHUNK
    spans = -(-chunks // max(1, MOST_SOLVED // (call.rows * call.heads)))
    size = -(-chunks // spans)
    at_cut, all_updates = _channels_at_cut(call, k, log_decay, cut), call.updates == call.time

    def solve_span(state, first, *, goes_on: bool):
        found = channel_pairs(call, q, k, log_decay, strengths, lengths, first[None], size, interpret=interpret)
        own = words + jnp.stack([-first, -first, jnp.int32(0) if all_updates else -first, first, jnp.int32(0)])[None]
        own = own.at[:, COUNT].set(jnp.clip(own[:, COUNT], 0, size))
        given = ChannelArrays(strengths, *at_cut, *found)
        found = walk(call, own, state, v, given, size, goes_on=goes_on, interpret=interpret)
        return own, found

    if spans == 1:
        _, (out, last, *updates) = solve_span(state, jnp.int32(0), goes_on=False)
        return out, last, updates[0] if updates else None

    def add_span(carry, first):
        """Of what each walk returns, the part that belongs to its chunks is kept."""
        state, last, kept = carry
        own, (out, returned, state, *updates) = solve_span(state, first, goes_on=True)
        last = jnp.where(_within(own[:, RETURNS], size)[:, None, None, None], returned, last)
        if not call.updates or all_updates:
            return (state, last, kept), (out, *updates)
        place = jnp.arange(updates[0].shape[1], dtype=jnp.int32) // CHUNK
        written = _within(own[:, UPDATES, None] + place[None], size)
        return (state, last, jnp.where(written[..., None, None], updates[0], kept)), (out,)

    shape = call.rows, call.heads, call.value_dim, call.key_dim
    state = jnp.zeros(shape, jnp.float32) if state is None else state
    kept = None
    if call.updates and not all_updates:
        kept = jnp.zeros((call.rows, update_chunks(call) * CHUNK, call.heads, call.value_dim), jnp.float32)
    firsts = size * jnp.arange(spans, dtype=jnp.int32)
    (_, last, kept), found = lax.scan(add_span, (state, jnp.zeros_like(state), kept), firsts)
    out, *updates = (jnp.moveaxis(x, 0, 1).reshape(call.rows, -1, *x.shape[3:]) for x in found)
    return out, last, updates[0] if updates else kept


def _within(place: Array, size: int) -> Array:
    return (place >= 0) & (place < size)


def first_chunk(call: Call, cut: Array) -> Array:
    """int32 [rows]: the first chunk of a row whose updates are returned."""
    return jnp.zeros_like(cut) if call.updates in (0, call.time) else cut // CHUNK


def first_update(call: Call, cut: Array) -> Array:
    """int32 [rows]: the token whose update is the first that is returned of a row, if not all are."""
    return cut // CHUNK * CHUNK


def _channels_at_cut(call: Call, k: Array, log_decay: Array, cut: Array) -> tuple[Array, Array]:
    """`keys_at_cut` and `since_cut` of `ChannelArrays`.

    Args:
      call: The call's sizes; its time is a multiple of CHUNK.
      k: bfloat16 [rows, time, key_heads, key_dim].
      log_decay: f32 [rows, time, heads, key_dim].
      cut: int32 [rows].
    """
    last = jnp.maximum(cut - 1, 0)  # the token before the cut
    before = (jnp.arange(CHUNK, dtype=jnp.int32)[None] <= (last % CHUNK)[:, None])[:, None, :, None]

    def of_chunk(x):
        """[rows, time, heads, key_dim] -> f32 [rows, heads, CHUNK, key_dim]; what is behind the cut becomes zeros."""
        x = x.reshape(call.rows, -1, CHUNK, *x.shape[2:])
        x = jnp.take_along_axis(x, (last // CHUNK)[:, None, None, None, None], axis=1)[:, 0]
        return jnp.where(before, jnp.moveaxis(x, 1, 2).astype(jnp.float32), 0.0)

    gates, keys = jnp.maximum(of_chunk(log_decay), LEAST), jnp.repeat(of_chunk(k), call.heads_per_key, axis=1)
    behind = jnp.pad(gates[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    left = jnp.exp(lax.cumsum(behind, axis=2, reverse=True))
    return jnp.stack(halves(keys * left, True), axis=2), jnp.exp(jnp.sum(gates, axis=2))


def _sums(log_decay: Array, cut: Array) -> tuple[list[Array], Array]:
    """Sums of log decays and decays within chunks.

    Args:
      log_decay: f32 [rows, heads, chunks, CHUNK].
      cut: int32 [rows].

    Returns:
      Sums up to each token in two parts, the decay since the chunk's start, and that up to its end; and `at_cut` of
      `walk`.
    """
    gate = jnp.maximum(log_decay, LEAST)
    high = jnp.round(gate * COARSE) / COARSE
    low = jnp.round((gate - high) * FINE) / FINE
    high, low = (jnp.cumsum(x, axis=-1) for x in (high, low))

    def decay(high, low):
        return jnp.exp(high + low)

    left = decay(high[..., -1:] - high, low[..., -1:] - low)
    # The token before the cut, and its chunk.
    last = jnp.maximum(cut - 1, 0)
    chunk, place = last // CHUNK, last % CHUNK
    of_chunk = [jnp.take_along_axis(x, chunk[:, None, None, None], axis=2)[:, :, 0] for x in (high, low)]
    ends = [jnp.take_along_axis(x, place[:, None, None], axis=2) for x in of_chunk]
    before = jnp.arange(CHUNK, dtype=jnp.int32)[None] <= place[:, None]
    weights = decay(*(end - x for end, x in zip(ends, of_chunk, strict=True)))
    weights = jnp.where(before[:, None], weights, 0.0)
    at_cut = jnp.stack([weights, jnp.broadcast_to(decay(*ends), weights.shape)], axis=2)
    return [high, low, decay(high, low), left], at_cut
