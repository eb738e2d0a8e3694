"""The states of a sequence, chunk after chunk, and outputs and updates of its tokens, on a GPU.

A warpgroup keeps WINDOW rows of a head's state [value_dim, key_dim] in its registers from a row's first chunk to the
last. It needs nothing of the state's other rows. Another warpgroup of the block brings the next chunk's keys, queries,
values and pairs meanwhile. All products have what depends on the state on their left side, in registers, transposed:
values run down, tokens along.
"""

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
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, GATES, LEFT, SINCE, STRENGTH, WINDOW, tile
from jaxbuf.pallas.chunked.gpu_pairs import PARTS
from jaxbuf.pallas.extend.gpu_products import spread, zeros
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.sums import ROW, WGMMA, Sum, halves, turned, with_sums
from jaxbuf.pallas.threads import COMPILER, load, store

DIMS = WINDOW, CHUNK
RING = 2  # chunks in shared memory
PROCESSORS = 132


class _Memory(NamedTuple):
    """A block's ring of chunks, and the barriers that open when one is there and when it was used."""

    keys: Any
    queries: Any
    values: Any
    gates: Any
    attend: Any
    inverse: Any
    out: Any
    full: Any
    free: Any


class _Given(NamedTuple):
    """What is in global memory, see `walk`."""

    words: Any
    state: Any
    queries: Any
    keys: Any
    values: Any
    gates: Any
    at_cut: Any
    attend: Any
    inverse: Any


def walk(
    call: Call,
    words: Array,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    at_cut: Array,
    pairs: list[Array],
    *,
    interpret: bool = False,
) -> list[Array]:
    """Outputs, states and updates.

    Args:
      call: The call's sizes; its time is a multiple of CHUNK.
      words: int32 [rows, 3]: the chunks of each row that have tokens; the chunk in which its state is returned; the
        first one whose updates are returned.
      state: f32 [rows, heads, value_dim, key_dim], or None: zeros.
      q, k, v: bfloat16 [rows, time, heads, dim]; k and v have zeros past lengths.
      gates: As in `pairs`.
      at_cut: f32 [rows, heads, 2, CHUNK]: for the state that is returned, what every token of that chunk, and the state
        that the chunk begins with, are multiplied with (the latter CHUNK times).
      pairs: From `pairs`.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, time, heads, value_dim]; the states, which are not written where no chunk returns one; and, if the
      call has updates, these, f32 [rows, n, heads, value_dim]. What belongs to no token is not written.
    """
    windows = -(-call.value_dim // WINDOW)
    # Windows of a head share its keys; if there are few heads, they are on multiprocessors of their own.
    together = windows if call.rows * call.heads * 2 > PROCESSORS else 1
    chunks, blocks, has_state = call.time // CHUNK, call.rows * call.heads * (windows // together), state is not None
    heads, width = (call.rows, call.time, call.heads), windows * WINDOW
    kept = 0 if not call.updates else chunks if call.updates == call.time else update_chunks(call)

    def walk_chunks(*refs):
        refs, outs, memory = list(refs[: -len(_Memory._fields)]), [], refs[-len(_Memory._fields) :]
        for _ in range(2 + bool(kept)):
            outs.insert(0, refs.pop())
        if not call.delta:
            refs.append(None)
        if not has_state:
            refs.insert(1, None)
        given, memory = _Given(*refs), _Memory(*memory)
        block, role = lax.axis_index("block"), lax.axis_index("warpgroup")
        rest = lax.div(block, np.int32(windows // together))
        first_window = (block - rest * (windows // together)) * together
        row = lax.div(rest, np.int32(call.heads))
        head = rest - row * call.heads
        count = given.words[row, 0]

        bring = functools.partial(_bring, call, given, memory, row, head, first_window, together, count)
        window = Window(call, given, memory, outs, row, head, first_window + role, role, bring, interpret)
        window.walk(count)

    out_type = [
        jax.ShapeDtypeStruct((*heads, width), call.v),
        jax.ShapeDtypeStruct((call.rows, call.heads, width, call.key_dim), jnp.float32),
    ]
    if kept:
        out_type.append(jax.ShapeDtypeStruct((call.rows, kept * CHUNK, call.heads, width), jnp.float32))
    # The last window of a head may have rows of no value: of values and states these are zeros. The copy engine takes
    # pieces that begin at multiples of WINDOW.
    more = width - call.value_dim
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, more))) if more else v
    if state is not None and more:
        state = jnp.pad(state, ((0, 0), (0, 0), (0, more), (0, 0)))
    arrays = [words, *([] if state is None else [state]), q, k, v, gates, at_cut, *pairs]
    found = plgpu.kernel(
        walk_chunks,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=together,
        thread_name="warpgroup",
        scratch_types=[
            tile(RING, CHUNK, call.key_dim),
            tile(RING, CHUNK, call.key_dim),
            tile(RING, together, CHUNK, WINDOW),
            plgpu.SMEM((RING, GATES, CHUNK), jnp.float32),
            tile(RING, PARTS, CHUNK, CHUNK),
            tile(RING, PARTS, CHUNK, CHUNK) if call.delta else tile(1, 1, 8, 64),
            tile(together, CHUNK, WINDOW),
            plgpu.Barrier(num_arrivals=4 + together + call.delta, num_barriers=RING),
            plgpu.Barrier(num_arrivals=together, num_barriers=RING),
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )(*arrays)
    out, states, *updates = found
    return [out[..., : call.value_dim], states[:, :, : call.value_dim], *(x[..., : call.value_dim] for x in updates)]


def update_chunks(call: Call) -> int:
    """Chunks of a row whose updates are returned, if not all are: the tokens may begin within one."""
    return min(call.time // CHUNK, (call.updates + CHUNK - 2) // CHUNK + 1)


def _bring(call: Call, given: _Given, memory: _Memory, row, head, first_window, together: int, count, i) -> None:
    """Brings a chunk, if there is one more, once all warpgroups have done with what lies in its place."""

    @pl.when(i < count)
    def _():
        pl.when(i >= RING)(lambda: plgpu.barrier_wait(memory.free.at[lax.rem(i, np.int32(RING))]))
        _copy(call, given, memory, row, head, first_window, together, i)


def _copy(call: Call, given: _Given, memory: _Memory, row, head, first_window, together: int, i) -> None:
    at, key_head = lax.rem(i, np.int32(RING)), lax.div(head, np.int32(call.heads_per_key))
    full, tokens = memory.full.at[at], pl.ds(i * CHUNK, CHUNK)
    plgpu.copy_gmem_to_smem(given.keys.at[row, tokens, key_head], memory.keys.at[at], full)
    plgpu.copy_gmem_to_smem(given.queries.at[row, tokens, key_head], memory.queries.at[at], full)
    for window in range(together):
        columns = pl.ds((first_window + window) * WINDOW, WINDOW)
        plgpu.copy_gmem_to_smem(given.values.at[row, tokens, head, columns], memory.values.at[at, window], full)
    plgpu.copy_gmem_to_smem(given.gates.at[row, head, i], memory.gates.at[at], full)
    plgpu.copy_gmem_to_smem(given.attend.at[row, i, head], memory.attend.at[at], full)
    if call.delta:
        plgpu.copy_gmem_to_smem(given.inverse.at[row, i, head], memory.inverse.at[at], full)


class Window:
    """A warpgroup's part of the work: WINDOW rows of a head's state.

    Attributes:
      call, given, memory, outs, row, head, interpret: As in `walk`; row and head are numbers.
      number: Of the window, among the head's.
      place: Of the window, among those of the block.
    """

    def __init__(
        self, call: Call, given: _Given, memory: _Memory, outs, row, head, number, place, bring, interpret: bool
    ):
        self.call, self.given, self.memory, self.outs, self.interpret = call, given, memory, outs, interpret
        self.row, self.head, self.number, self.place, self.bring = row, head, number, place, bring
        self.values = pl.ds(number * WINDOW, WINDOW)

    def walk(self, count) -> None:
        """Goes through the first `count` chunks of the row."""
        dims = WINDOW, self.call.key_dim
        if self.given.state is None:
            state = zeros(dims, WGMMA)
        else:
            state = load(self.given.state.at[self.row, self.head, self.values], WGMMA)
        pl.when(self.place == 0)(lambda: self.bring(np.int32(0)))
        lax.fori_loop(0, count, self.solve, state)

        @pl.when(self.place == 0)
        def _():
            def wait(i, _):
                plgpu.barrier_wait(self.memory.free.at[lax.rem(i, np.int32(RING))])

            lax.fori_loop(jnp.maximum(count - RING, 0), count, wait, None)

        plgpu.wait_smem_to_gmem(0)

    def solve(self, i, state: Array) -> Array:
        """A chunk: its outputs and updates, and the state behind it."""
        call, memory, interpret = self.call, self.memory, self.interpret
        at = lax.rem(i, np.int32(RING))
        plgpu.barrier_wait(memory.full.at[at])
        reads = functools.partial(self.read_state, i, at, state)
        out, updates = with_sums(reads, [DIMS] * (1 + call.delta), interpret)
        if call.delta:
            inverse = [turned(memory.inverse.at[at, part]) for part in range(PARTS)]

            def multiply(update: Sum) -> Array:
                update.add(updates, inverse)
                return update.read()

            updates = with_sums(multiply, [DIMS], interpret)
        self.return_state(i, at, state, updates)
        dims = [(WINDOW, call.key_dim), DIMS]
        state, out = with_sums(functools.partial(self.add_tokens, at, state, out, updates), dims, interpret)
        plgpu.barrier_arrive(memory.free.at[at])
        self.store(i, out, updates)
        return state

    def along(self, at, which: int) -> Array:
        """Numbers of a chunk's tokens, which run along."""
        return spread(load(self.memory.gates.at[at, which], ROW), DIMS, 1, WGMMA)

    def read_state(self, i, at, state: Array, out: Sum, recalled: Sum | None = None) -> tuple[Array, Any]:
        """What queries read from the state, and the updates; with the delta rule, in parts, what they are before the
        inverse is multiplied with them."""
        memory, parts = self.memory, halves(state)
        if recalled is not None:
            recalled.add(parts, [turned(memory.keys.at[at])])
        out.add(parts, [turned(memory.queries.at[at])])
        pl.when(self.place == 0)(lambda: self.bring(i + 1))
        values = plgpu.load(turned(memory.values.at[at, self.place]), layout=WGMMA).astype(jnp.float32)
        if recalled is None:
            updates = self.along(at, STRENGTH) * values
        else:
            updates = halves(values - self.along(at, SINCE) * recalled.read(len(parts)))
        return self.along(at, SINCE) * out.read(), updates

    def add_tokens(
        self, at, state: Array, found: Array, updates: Array, following: Sum, out: Sum
    ) -> tuple[Array, Array]:
        """The state behind the chunk, and its outputs, of which `found` is what was read from the state before it."""
        memory = self.memory
        # The decay of the whole chunk is that since its start, of its last token.
        following.begin(memory.gates[at, SINCE, CHUNK - 1] * state)
        following.add(halves(self.along(at, LEFT) * updates), [memory.keys.at[at]])
        out.begin(found)
        out.add(halves(updates), [turned(memory.attend.at[at, part]) for part in range(PARTS)])
        return following.read(3), out.read()

    def store(self, i, out: Array, updates: Array) -> None:
        """Writes outputs and updates."""
        own = self.memory.out.at[self.place]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        synchronize(self.interpret)  # The copy of the last chunk's outputs has read them.
        turned(own)[...] = out.astype(self.call.v)
        plgpu.commit_smem()
        there = self.outs[0].at[self.row, pl.ds(i * CHUNK, CHUNK), self.head, self.values]
        plgpu.copy_smem_to_gmem(own, there)
        if len(self.outs) > 2:
            ref, first = self.outs[2], (i - self.given.words[self.row, 2]) * CHUNK

            @pl.when((first >= 0) & (first < ref.shape[1]))
            def _():
                there = ref.at[self.row, pl.ds(first, CHUNK), self.head, self.values]
                store(turned(there), plgpu.layout_cast(updates, plgpu.Layout.WGMMA_TRANSPOSED))

    def return_state(self, i, at, state: Array, updates: Array) -> None:
        """Writes the state that is returned, if it is that of this chunk."""

        @pl.when(i == self.given.words[self.row, 1])
        def _():
            gates, dims = self.given.at_cut.at[self.row, self.head], (WINDOW, self.call.key_dim)

            def product(found: Sum) -> Array:
                found.begin(gates[1, 0] * state)
                left = spread(load(gates.at[0], ROW), DIMS, 1, WGMMA)
                found.add(halves(left * updates), [self.memory.keys.at[at]])
                return found.read()

            found = with_sums(product, [dims], self.interpret)
            there = self.outs[1].at[self.row, self.head, self.values]
            store(there, found)
