"""What a chunk's tokens are to one another, on a GPU: of every chunk of every head at once, before `gpu_walk`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.gpu_layout import (
    CHUNK,
    HIGH,
    LOW,
    MOST_TOGETHER,
    MOST_WARPGROUPS,
    SHARED_MEMORY,
    STRENGTH,
    forget_dead,
    tile,
)
from jaxbuf.pallas.extend.gpu_products import spread
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.sums import COLUMN, ROW, WGMMA, Sum, halves, turned, with_sums
from jaxbuf.pallas.threads import COMPILER, load

SQUARE = CHUNK, CHUNK
PARTS = 2


class _Memory(NamedTuple):
    """Shared memory: of each of a block's chunks keys and queries [CHUNK, key_dim], and the barrier that opens when
    they are there; of each warpgroup two matrices in parts."""

    keys: Any
    queries: Any
    matrices: Any
    inverses: Any
    full: Any


def pairs(call: Call, q: Array, k: Array, gates: Array, lengths: Array, *, interpret: bool = False) -> list[Array]:
    """The matrices by which `gpu_walk` multiplies.

    Args:
      call: The call's sizes; its time is a multiple of CHUNK.
      q, k: bfloat16 [rows, time, key_heads, key_dim].
      gates: f32 [rows, heads, chunks, GATES, CHUNK]: see `gpu_layout`.
      lengths: int32 [rows]; what is past them may be anything but in gates, and of chunks behind nothing is computed.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      bfloat16 [rows, chunks, heads, PARTS, CHUNK, CHUNK], whose parts are summed: at (t, s) the product of query t and
      key s across the decay between them; and with the delta rule the inverse of the system times the write strengths.
    """
    chunks, group, count = call.time // CHUNK, call.heads_per_key, 2 if call.delta else 1
    warpgroups = next(n for n in range(min(MOST_TOGETHER, group), 0, -1) if group % n == 0)
    served = call.rows * chunks * call.key_heads
    room = SHARED_MEMORY // (2 * CHUNK * (2 * call.key_dim + 2 * warpgroups * PARTS * CHUNK))
    together = max(1, min(MOST_WARPGROUPS // warpgroups, room))

    def chunk_pairs(lengths, q, k, gates, *refs):
        outs, memory = refs[:count], _Memory(*refs[count:])
        role = lax.axis_index("warpgroup")
        own, member = lax.div(role, np.int32(warpgroups)), lax.rem(role, np.int32(warpgroups))
        number = lax.axis_index("block") * together + own
        rest = lax.div(number, np.int32(call.key_heads))
        row, key_head = lax.div(rest, np.int32(chunks)), number - rest * call.key_heads
        chunk = rest - row * chunks

        @pl.when(number < served)
        def _():
            alive = lengths[row] - chunk * CHUNK

            @pl.when(alive > 0)
            def _():
                keys, queries, full = (x.at[own] for x in (memory.keys, memory.queries, memory.full))

                @pl.when(member == 0)
                def _():
                    tokens = pl.ds(chunk * CHUNK, CHUNK)
                    plgpu.copy_gmem_to_smem(k.at[row, tokens, key_head], keys, full)
                    plgpu.copy_gmem_to_smem(q.at[row, tokens, key_head], queries, full)

                plgpu.barrier_wait(full)
                forget_dead(keys, alive, interpret)
                there = _Memory(keys, queries, memory.matrices.at[role], memory.inverses.at[role], full)
                attend = _products(queries, keys, interpret)

                def serve(i, _):
                    head = key_head * group + i * warpgroups + member
                    targets = [out.at[row, chunk, head] for out in outs]
                    _pairs_of_head(there, gates.at[row, head, chunk], attend, targets, interpret)

                if group == warpgroups:
                    serve(0, None)
                else:
                    lax.fori_loop(0, group // warpgroups, serve, None)
                plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((call.rows, chunks, call.heads, PARTS, *SQUARE), jnp.bfloat16)
    return plgpu.kernel(
        chunk_pairs,
        out_type=[shape] * count,
        grid=(-(-served // together),),
        grid_names=("block",),
        num_threads=together * warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            tile(together, CHUNK, call.key_dim),
            tile(together, CHUNK, call.key_dim),
            tile(together * warpgroups, PARTS, *SQUARE),
            tile(together * warpgroups, PARTS, *SQUARE),
            plgpu.Barrier(num_arrivals=2, num_barriers=together),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )(lengths, q, k, gates)


def _products(x, keys, interpret: bool) -> Array:
    """The products of queries or keys with keys."""

    def multiply(found: Sum) -> Array:
        found.add([x], [turned(keys)])
        return found.read()

    return with_sums(multiply, [SQUARE], interpret)


def _pairs_of_head(memory: _Memory, gates, attend: Array, outs, interpret: bool) -> None:
    """Writes a head's matrices."""
    t, s = places()
    since = [along_rows(gates.at[which]) - along_columns(gates.at[which]) for which in (HIGH, LOW)]
    decay = jnp.exp(jnp.where(s <= t, since[0] + since[1], np.float32(-np.inf)))
    write(memory.matrices, attend * decay, interpret)
    plgpu.copy_smem_to_gmem(memory.matrices, outs[0])
    if len(outs) == 1:
        return
    overlap = _products(memory.keys, memory.keys, interpret) * decay
    write_inverse(memory.matrices, memory.inverses, overlap, gates.at[STRENGTH], outs[1], interpret)


def places() -> tuple[Array, Array]:
    """The row and the column of every number of a matrix [CHUNK, CHUNK]."""
    t, s = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in range(2))
    return t, s


def along_rows(ref) -> Array:
    """A number for each row of such a matrix, from memory."""
    return spread(load(ref, COLUMN), SQUARE, 0, WGMMA)


def along_columns(ref) -> Array:
    """A number for each column."""
    return spread(load(ref, ROW), SQUARE, 1, WGMMA)


def write_inverse(matrices, inverses, overlap: Array, strengths, out, interpret: bool) -> None:
    """Starts to write a system's inverse times the write strengths, by which `gpu_walk` multiplies.

    Args:
      matrices, inverses: bfloat16 [PARTS, CHUNK, CHUNK] in shared memory; the former may still be copied from there.
      overlap: At (t, s), s < t, the product of keys t and s across the decay between them; elsewhere anything.
      strengths: f32 [CHUNK], in memory.
      out: Where to, in global memory.
      interpret: Whether this runs in Pallas' interpreter.
    """
    t, s = places()
    system = jnp.where(s < t, along_rows(strengths) * overlap, np.float32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    write(matrices, system, interpret)
    inverse = jnp.where(s == t, np.float32(1), -jnp.where(_corners(t, s, 0), system, np.float32(0)))

    def double(level, inverse):
        write(inverses, inverse, interpret)
        corners = functools.partial(_invert_corners, matrices, inverses, inverse, _corners(t, s, level), interpret)
        return inverse - with_sums(corners, [SQUARE] * 2, interpret)

    inverse = lax.fori_loop(1, CHUNK.bit_length() - 1, double, inverse)
    write(inverses, inverse * along_columns(strengths), interpret)
    plgpu.copy_smem_to_gmem(inverses, out)


def _corners(t: Array, s: Array, level: Array | int) -> Array:
    """Of blocks of 2 << level tokens on the diagonal, the corners: from the left half to the right one."""
    return ((t >> level) == (s >> level) + 1) & (((s >> level) & 1) == 0)


def _invert_corners(
    matrices, inverses, inverse: Array, corners: Array, interpret: bool, low: Sum, corner: Sum
) -> Array:
    """D^-1 C A^-1 of every block on the diagonal: A^-1 and D^-1 are inverses of its halves, and C is its corner.

    Among the products of all inverses with the whole system are those with the corners.
    """
    low.add(halves(inverse, interpret), [matrices.at[i] for i in range(PARTS)])
    found = jnp.where(corners, low.read(), np.float32(0))
    corner.add(halves(found, interpret), [inverses.at[i] for i in range(PARTS)])
    return corner.read()


def write(ref, x: Array, interpret: bool) -> None:
    """Writes a matrix in parts to shared memory that products and copies have done with; others may read it then."""
    synchronize(interpret)
    for i, part in enumerate(halves(x, interpret)):
        ref[i] = part
    plgpu.commit_smem()
