"""What a chunk's tokens are to one another, on a GPU, where every key channel has a decay of its own.

As in `jaxbuf.recurrence.chunked`, blocks of tokens double: from a token of a left half to one of the right half beside
it, the decay is that to the boundary times that from the boundary, and both are at most 1. A warpgroup has a chunk of a
head, and goes through its key channels, WIDTH at a time. Sums of log decays over any tokens of the chunk are products
with a matrix of ones and zeros.

One product a doubling gives the pairs of keys and those of keys and queries. Its left side has the keys of all tokens,
its right side the keys of left halves and the queries of right halves, all with the decay to or from the boundary. Of a
block's two corners the lower one is then of keys t and s, and the upper one of key t and query s.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, LEAST, forget_dead, tile
from jaxbuf.pallas.chunked.gpu_pairs import PARTS, SQUARE, along_columns, along_rows, places, write, write_inverse
from jaxbuf.pallas.extend.gpu_products import spread, zeros
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.sums import COLUMN, WGMMA, Sum, halves, turned, with_sums
from jaxbuf.pallas.threads import COMPILER, load, store_inside

WIDTH = 64  # key channels that are worked on at once
# Warpgroups of a block, of which a multiprocessor holds one: with three a thread may have 168 registers.
WARPGROUPS = 3
# Queries are rounded to bfloat16 once they have the decay since the chunk's start: only outputs see them, which are
# rounded, too.
QUERY, KEY = slice(0, 1), slice(1, 1 + PARTS)  # of the arrays with that decay
SINCE_PARTS = KEY.stop
LOG2E = np.float32(np.log2(np.e))


class ChannelPairs(NamedTuple):
    """What `gpu_walk` multiplies by; parts are summed.

    Attributes:
      attend: bfloat16 [rows, chunks, heads, PARTS, CHUNK, CHUNK]: at (s, t) the product of key s and query t across the
        decay between them, 0 for s > t.
      since: bfloat16 [rows, chunks, heads, 1 or SINCE_PARTS, CHUNK, key_dim]: queries (QUERY) and, with the delta rule,
        keys (KEY), with the decay since the chunk's start.
      left: bfloat16 [rows, chunks, heads, PARTS, CHUNK, key_dim]: keys with the decay up to the chunk's end.
      total: f32 [rows, chunks, heads, 1, key_dim]: the decay of the whole chunk.
      inverse: As from `gpu_pairs`; None without the delta rule.
    """

    attend: Any
    since: Any
    left: Any
    total: Any
    inverse: Any = None


class _Memory(NamedTuple):
    """Shared memory of each warpgroup: keys and queries [key_dim / WIDTH, CHUNK, WIDTH], and the barrier that opens
    when they are there; of WIDTH channels the decays' logarithms to the base 2, and matrices that have a decay, [parts,
    CHUNK, WIDTH]."""

    keys: Any
    queries: Any
    gates: Any
    decayed: Any
    full: Any

    def of(self, warpgroup) -> "_Memory":
        return _Memory(*(x.at[warpgroup] for x in self))


def channel_pairs(
    call: Call,
    q: Array,
    k: Array,
    log_decay: Array,
    strengths: Array,
    lengths: Array,
    first: Array,
    chunks: int,
    *,
    interpret: bool = False,
) -> ChannelPairs:
    """The matrices by which `gpu_walk` multiplies, of some chunks.

    Args:
      call: The call's sizes; its time is a multiple of CHUNK.
      q, k: bfloat16 [rows, time, key_heads, key_dim].
      log_decay: f32 [rows, time, heads, key_dim].
      strengths: f32 [rows, heads, chunks, CHUNK]: write strengths.
      lengths: int32 [rows]; what is past them may be anything, and of chunks behind nothing is computed.
      first, chunks: int32 [1], the first chunk of each row, and how many.
      interpret: Run in Pallas' GPU interpreter.
    """
    passes = call.key_dim // WIDTH
    served = call.rows * chunks * call.heads
    count = len(ChannelPairs._fields) if call.delta else len(ChannelPairs._fields) - 1

    def chunk_pairs(lengths, first, numbers, q, k, log_decay, strengths, *refs):
        outs, memory = ChannelPairs(*refs[:count]), _Memory(*refs[count:])
        role = lax.axis_index("warpgroup")
        number = lax.axis_index("block") * WARPGROUPS + role
        rest = lax.div(number, np.int32(call.heads))
        row, head = lax.div(rest, np.int32(chunks)), number - rest * call.heads
        place = rest - row * chunks
        chunk = first[0] + place
        key_head = lax.div(head, np.int32(call.heads_per_key))

        @pl.when(number < served)
        def _():
            alive = lengths[row] - chunk * CHUNK

            @pl.when(alive > 0)
            def _():
                own, tokens = memory.of(role), pl.ds(chunk * CHUNK, CHUNK)
                for i in range(passes):
                    for source, target in ((k, own.keys), (q, own.queries)):
                        channels = source.at[row, tokens, key_head, pl.ds(i * WIDTH, WIDTH)]
                        plgpu.copy_gmem_to_smem(channels, target.at[i], own.full)
                there = [None if x is None else x.at[row, place, head] for x in outs]
                log_decays, beta = log_decay.at[row, tokens, head], strengths.at[row, head, chunk]
                _solve(own, numbers, log_decays, beta, ChannelPairs(*there), alive, interpret)
                plgpu.wait_smem_to_gmem(0)

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct((call.rows, chunks, call.heads, *dims), dtype)

    outs = ChannelPairs(
        attend=shape(jnp.bfloat16, PARTS, *SQUARE),
        since=shape(jnp.bfloat16, SINCE_PARTS if call.delta else QUERY.stop, CHUNK, call.key_dim),
        left=shape(jnp.bfloat16, PARTS, CHUNK, call.key_dim),
        total=shape(jnp.float32, 1, call.key_dim),
        inverse=shape(jnp.bfloat16, PARTS, *SQUARE),
    )
    found = plgpu.kernel(
        chunk_pairs,
        out_type=list(outs[:count]),
        grid=(-(-served // WARPGROUPS),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            tile(WARPGROUPS, passes, CHUNK, WIDTH),
            tile(WARPGROUPS, passes, CHUNK, WIDTH),
            tile(WARPGROUPS, PARTS, CHUNK, WIDTH),
            tile(WARPGROUPS, SINCE_PARTS, CHUNK, WIDTH),
            plgpu.Barrier(num_arrivals=2 * passes, num_barriers=WARPGROUPS),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )(lengths, first, jnp.arange(CHUNK, dtype=jnp.uint32), q, k, log_decay, strengths)
    return ChannelPairs(*found)


def _solve(memory: _Memory, numbers, log_decay, strengths, outs: ChannelPairs, alive, interpret: bool) -> None:
    """A head's chunk."""
    plgpu.barrier_wait(memory.full)
    for i in range(memory.keys.shape[0]):
        forget_dead(memory.keys.at[i], alive, interpret)

    def add(i, found: Array) -> Array:
        return found + _pairs_of_channels(memory, numbers, i, log_decay, outs, alive, interpret)

    found = lax.fori_loop(0, memory.keys.shape[0], add, zeros(SQUARE, WGMMA))
    t, s = places()
    write(memory.gates, jnp.where(t <= s, found, np.float32(0)), interpret)
    plgpu.copy_smem_to_gmem(memory.gates, outs.attend)
    if outs.inverse is not None:
        decayed = memory.decayed.at[KEY]
        write_inverse(memory.gates, decayed, found, strengths, outs.inverse, interpret)


def _pairs_of_channels(memory: _Memory, numbers, i, log_decay, outs: ChannelPairs, alive, interpret: bool) -> Array:
    """The i-th WIDTH channels' part of the pairs: at (t, s) of keys t and s below the diagonal, of key t and query s on
    it and above. Writes these channels' keys and queries with their decays."""
    channels = pl.ds(i * WIDTH, WIDTH)
    t, s = (x.astype(jnp.int32) for x in (along_rows(numbers), along_columns(numbers)))
    gates = jnp.maximum(load(log_decay.at[:, channels], WGMMA), LEAST)
    write(memory.gates, jnp.where(t < alive, LOG2E * gates, np.float32(0)), interpret)
    keys, queries = (x.at[i] for x in (memory.keys, memory.queries))

    def read(ref):
        return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

    since = _decay(memory.gates, s <= t, interpret)
    # The whole chunk's decay is that since its start, of its last token.
    store_inside(since, WGMMA, outs.total, jnp.int32(1 - CHUNK), i * WIDTH, interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    synchronize(interpret)
    memory.decayed[0] = (since * read(queries)).astype(jnp.bfloat16)
    if outs.inverse is None:
        plgpu.commit_smem()
    else:
        write(memory.decayed.at[KEY], since * read(keys), interpret)
    _copy(memory.decayed, outs.since, channels)
    left = _decay(memory.gates, s > t, interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    write(memory.decayed.at[KEY], left * read(keys), interpret)
    _copy(memory.decayed.at[KEY], outs.left, channels)

    def own(found: Sum) -> Array:
        found.add([keys], [turned(queries)])
        return jnp.where(t == s, found.read(), np.float32(0))

    found = with_sums(own, [SQUARE], interpret)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def double(level, found):
        t, s = load(numbers, COLUMN), along_columns(numbers)
        width = np.uint32(1) << level.astype(jnp.uint32)
        half, right = t & ~(width - np.uint32(1)), (t & width) > np.uint32(0)

        def row(x):
            return spread(x, SQUARE, 0, WGMMA)

        def within(first, count):
            """Whether s is one of so many tokens: differences below zero are large numbers."""
            return s - row(first) < row(count)

        # In a right half sums from its start up to a token, in a left half of what is behind the token.
        first, end = jnp.where(right, half, t + np.uint32(1)), jnp.where(right, t + np.uint32(1), half + width)
        decay = _decay(memory.gates, within(first, end - first), interpret)
        key, query = read(keys), read(queries)
        decayed = memory.decayed.at[KEY]
        write(decayed, decay * jnp.where(row(t & width) > np.uint32(0), query, key), interpret)

        def multiply(pairs: Sum) -> Array:
            pairs.add(halves(decay * key, interpret), [turned(decayed.at[part]) for part in range(PARTS)])
            return pairs.read()

        pairs = with_sums(multiply, [SQUARE], interpret)
        return found + jnp.where(s - row(half ^ width) < width, pairs, np.float32(0))

    return lax.fori_loop(0, CHUNK.bit_length() - 1, double, found)


def _copy(decayed, out, channels) -> None:
    """Starts to write matrices' channels to global memory, as many as there are there."""
    for i in range(out.shape[0]):
        plgpu.copy_smem_to_gmem(decayed.at[i], out.at[i, :, channels])


def _decay(gates, ones: Array, interpret: bool) -> Array:
    """The decays over sums of tokens, [CHUNK, WIDTH].

    Args:
      gates: Logarithms of decays to the base 2, in parts.
      ones: bool [CHUNK, CHUNK]: at (t, s) whether row t's sum has token s.
      interpret: Whether this runs in Pallas' interpreter.
    """

    def multiply(found: Sum) -> Array:
        matrix = jnp.where(ones, np.float32(1), np.float32(0)).astype(jnp.bfloat16)
        found.add([matrix], [gates.at[part] for part in range(PARTS)])
        return found.read()

    return jnp.exp2(with_sums(multiply, [(CHUNK, WIDTH)], interpret))
