"""The states of a sequence, chunk after chunk, and outputs and updates of its tokens, on a GPU.

A warpgroup keeps WINDOW rows of a head's state [value_dim, key_dim] in its registers from a row's first chunk to the
last. It needs nothing of the state's other rows. The block's first warpgroup asks for the next chunk's keys, queries,
values and pairs while it computes. All products have what depends on the state on their left side, in registers,
transposed: values run down, tokens along.
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
from jaxbuf.pallas.chunked.gpu_channel_chunks import ChannelArrays, ChannelChunks
from jaxbuf.pallas.chunked.gpu_head_chunks import HeadArrays, HeadChunks
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, RING, WINDOW, forget_dead, place, tile
from jaxbuf.pallas.extend.gpu_products import spread, zeros
from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.sums import WGMMA, Sum, halves, products, turned, with_sums
from jaxbuf.pallas.threads import COMPILER, load, store

DIMS = WINDOW, CHUNK
PROCESSORS = 132
COUNT, RETURNS, UPDATES, FIRST, LENGTH, FIELDS = range(6)  # of words, see `walk`


class _Memory(NamedTuple):
    """A block's ring of chunks, and the barriers that open when one is there and when it was used. `HeadChunks` or
    `ChannelChunks` have the rest."""

    values: Any
    out: Any
    full: Any
    free: Any


class _Given(NamedTuple):
    """What is in global memory, see `walk`."""

    words: Any
    state: Any
    values: Any


class _Outs(NamedTuple):
    """What is written to global memory, see `walk`; None: it is not."""

    out: Any
    returned: Any
    last: Any
    updates: Any


def walk(
    call: Call,
    words: Array,
    state: Array | None,
    v: Array,
    arrays: HeadArrays | ChannelArrays,
    chunks: int,
    *,
    goes_on: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Outputs, states and updates.

    Args:
      call: The call's sizes; its time is a multiple of CHUNK.
      words: int32 [rows, FIELDS], in chunks: how many of each row have tokens; in which one its state is returned; the
        first one whose updates are returned. All are counted from the first one of the walk, FIRST, which is counted
        from the row's. And the row's tokens, LENGTH.
      state: f32 [rows, heads, value_dim, key_dim], or None: zeros.
      v: bfloat16 [rows, time, heads, value_dim].
      arrays: What is known of the chunks.
      chunks: How many of each row, at most.
      goes_on: Also return the last states.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, chunks · CHUNK, heads, value_dim]; the states, which are not written where no chunk returns one; with
      goes_on the last states; and, if the call has updates, these, f32 [rows, n, heads, value_dim]. Past a row's tokens
      outputs are zeros, and updates are not written.
    """
    chunks_of = HeadChunks if isinstance(arrays, HeadArrays) else ChannelChunks
    windows = -(-call.value_dim // WINDOW)
    # Windows of a head share its keys; if there are few heads, they are on multiprocessors of their own.
    together = 1
    if call.rows * call.heads * 2 > PROCESSORS:
        together = next(n for n in range(min(windows, chunks_of.MOST_TOGETHER), 0, -1) if windows % n == 0)
    blocks, has_state, width = call.rows * call.heads * (windows // together), state is not None, windows * WINDOW
    heads, states = (call.rows, chunks * CHUNK, call.heads), (call.rows, call.heads, width, call.key_dim)
    kept = 0 if not call.updates else chunks if call.updates == call.time else update_chunks(call)
    own_scratch = chunks_of.scratch(call, together)

    def walk_chunks(words, *refs):
        refs = list(refs)

        def take(n):
            taken, refs[:n] = refs[:n], []
            return taken

        def take_if(there):
            return take(1)[0] if there else None

        given = _Given(words, take_if(has_state), take_if(True))
        there: Any = type(arrays)(*take(sum(x is not None for x in arrays)))
        outs = _Outs(take_if(True), take_if(True), take_if(goes_on), take_if(kept))
        memory, own_memory = _Memory(*take(len(_Memory._fields))), refs
        block, role = lax.axis_index("block"), lax.axis_index("warpgroup")
        rest = lax.div(block, np.int32(windows // together))
        first_window = (block - rest * (windows // together)) * together
        row = lax.div(rest, np.int32(call.heads))
        head = rest - row * call.heads
        own = chunks_of(call, there, own_memory, row, head, role == 0)
        Window(call, given, memory, own, outs, row, head, first_window, role, together, interpret).walk()

    out_type = [
        jax.ShapeDtypeStruct((*heads, width), call.v),
        *[jax.ShapeDtypeStruct(states, jnp.float32)] * (1 + goes_on),
    ]
    if kept:
        out_type.append(jax.ShapeDtypeStruct((call.rows, kept * CHUNK, call.heads, width), jnp.float32))
    # The last window of a head may have rows of no value: of values and states these are zeros. The copy engine takes
    # pieces that begin at multiples of WINDOW.
    more = width - call.value_dim
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, more))) if more else v
    if state is not None and more:
        state = jnp.pad(state, ((0, 0), (0, 0), (0, more), (0, 0)))
    found = plgpu.kernel(
        walk_chunks,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=together,
        thread_name="warpgroup",
        scratch_types=[
            tile(RING, together, CHUNK, WINDOW),
            tile(together, CHUNK, WINDOW),
            plgpu.Barrier(num_arrivals=together + chunks_of.copies(call), num_barriers=RING),
            plgpu.Barrier(num_arrivals=together, num_barriers=RING),
            *own_scratch,
        ],
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )(words, *([] if state is None else [state]), v, *(x for x in arrays if x is not None))
    out, rest = found[0], found[1:]
    last, updates = rest[: 1 + goes_on], rest[1 + goes_on :]
    return [
        out[..., : call.value_dim],
        *(x[:, :, : call.value_dim] for x in last),
        *(x[..., : call.value_dim] for x in updates),
    ]


def update_chunks(call: Call) -> int:
    """Chunks of a row whose updates are returned, if not all are: the tokens may begin within one."""
    return min(call.time // CHUNK, (call.updates + CHUNK - 2) // CHUNK + 1)


class Window:
    """A warpgroup's part of the work: WINDOW rows of a head's state.

    Attributes:
      call, given, memory, outs, interpret: As in `walk`.
      chunks: What all windows of the head multiply by.
      row, head: Whose state.
      first_window, together: The windows of the block, among the head's.
      place: Of the window, among those of the block; the first one brings chunks.
    """

    def __init__(
        self,
        call: Call,
        given: _Given,
        memory: _Memory,
        chunks: HeadChunks | ChannelChunks,
        outs: _Outs,
        row,
        head,
        first_window,
        place,
        together: int,
        interpret: bool,
    ):
        self.call, self.given, self.memory, self.chunks, self.outs = call, given, memory, chunks, outs
        self.row, self.head, self.first_window, self.place, self.together = row, head, first_window, place, together
        self.interpret = interpret
        self.count, self.first = given.words[row, COUNT], given.words[row, FIRST]
        self.values = pl.ds((first_window + place) * WINDOW, WINDOW)

    def walk(self) -> None:
        """Goes through the chunks of the row that have tokens."""
        dims, memory, count = (WINDOW, self.call.key_dim), self.memory, self.count
        if self.given.state is None:
            state = zeros(dims, WGMMA)
        else:
            state = load(self.given.state.at[self.row, self.head, self.values], WGMMA)
        self.bring(np.int32(0))
        pl.when(count > 0)(lambda: self.chunks.bring_read(np.int32(0)))
        state = lax.fori_loop(0, count, self.solve, state)
        if self.outs.last is not None:
            store(self.outs.last.at[self.row, self.head, self.values], state)
        pl.when(count > 0)(self.chunks.end)

        @pl.when(self.place == 0)
        def _():
            def wait(i, _):
                plgpu.barrier_wait(memory.free.at[place(i)])

            lax.fori_loop(jnp.maximum(count - RING, 0), count, wait, None)

        self.fill()
        plgpu.wait_smem_to_gmem(0)

    def fill(self) -> None:
        """Outputs of chunks without tokens: zeros."""
        own, out = self.memory.out.at[self.place], self.outs.out
        chunks = out.shape[1] // CHUNK

        @pl.when(self.count < chunks)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            synchronize(self.interpret)
            own[...] = zeros((CHUNK, WINDOW), WGMMA).astype(self.call.v)
            plgpu.commit_smem()

            def copy(i, _):
                plgpu.copy_smem_to_gmem(own, out.at[self.row, pl.ds(i * CHUNK, CHUNK), self.head, self.values])

            lax.fori_loop(self.count, chunks, copy, None)

    def alive(self, i) -> Array:
        """How many of the tokens of chunk i and those behind are the row's."""
        return self.given.words[self.row, LENGTH] - (self.first + i) * CHUNK

    def bring(self, i) -> None:
        """Brings chunk i, if there is one, once all windows have done with what lies in its place; the block's first
        window does that."""
        at, memory = place(i), self.memory

        @pl.when((self.place == 0) & (i < self.count))
        def _():
            pl.when(i >= RING)(lambda: plgpu.barrier_wait(memory.free.at[at]))
            full, chunk = memory.full.at[at], self.first + i
            for window in range(self.together):
                columns = pl.ds((self.first_window + window) * WINDOW, WINDOW)
                values = self.given.values.at[self.row, pl.ds(chunk * CHUNK, CHUNK), self.head, columns]
                plgpu.copy_gmem_to_smem(values, memory.values.at[at, window], full)
            self.chunks.bring(i, chunk, full)

    def solve(self, i, state: Array) -> Array:
        """A chunk: its outputs and updates, and the state behind it."""
        call, memory, chunks, interpret = self.call, self.memory, self.chunks, self.interpret
        at, returns = place(i), i == self.given.words[self.row, RETURNS]
        # The state that is returned comes last, when no registers have this one any more.
        returned = self.outs.returned.at[self.row, self.head, self.values]
        pl.when(returns)(lambda: store(returned, state))
        chunks.wait_read()
        plgpu.barrier_wait(memory.full.at[at])
        alive = self.alive(i)
        chunks.forget_dead(i, alive, interpret)
        forget_dead(memory.values.at[at, self.place], alive, interpret)
        reads = functools.partial(self.read_state, i, state)
        out, updates = with_sums(reads, [DIMS] * (1 + call.delta), interpret)
        chunks.end_read()
        if call.delta:
            inverse = chunks.inverse(i)

            def multiply(update: Sum) -> Array:
                update.add(updates, inverse)
                return update.read()

            updates = with_sums(multiply, [DIMS], interpret)

        def bring_read():
            pl.when(i + 1 < self.count)(lambda: chunks.bring_read(i + 1))

        pl.when(~returns)(bring_read)
        dims = [(WINDOW, call.key_dim), DIMS]
        state, out = with_sums(functools.partial(self.add_tokens, i, state, out, updates), dims, interpret)

        @pl.when(returns)
        def _():
            self.return_state(i, returned, updates)
            bring_read()

        plgpu.barrier_arrive(memory.free.at[at])
        self.store(i, out, updates)
        return state

    def read_state(self, i, state: Array, out: Sum, recalled: Sum | None = None) -> tuple[Array, Any]:
        """What queries read from the state, and the updates; with the delta rule, in parts, what they are before the
        inverse is multiplied with them."""
        chunks, parts = self.chunks, halves(state, self.interpret)
        queries, keys = chunks.queries(i), chunks.keys(i)
        if recalled is not None:
            recalled.add(parts, keys)
        out.add(parts, queries)
        self.bring(i + 1)
        values = plgpu.load(turned(self.memory.values.at[place(i), self.place]), layout=WGMMA).astype(jnp.float32)
        if recalled is None:
            updates = times(chunks.strengths(i), values)
        else:
            updates = halves(values - times(chunks.since(i), recalled.read(products(parts, queries))), self.interpret)
        return times(chunks.since(i), out.read()), updates

    def add_tokens(
        self, i, state: Array, found: Array, updates: Array, following: Sum, out: Sum
    ) -> tuple[Array, Array]:
        """The state behind the chunk, and its outputs, of which `found` is what was read from the state before it."""
        attend = self.chunks.attend(i)
        self.add_to_state(following, self.chunks.left(i), state, updates)
        parts = halves(updates, self.interpret)
        out.begin(found)
        out.add(parts, attend)
        return following.read(products(parts, attend)), out.read()

    def add_to_state(
        self, following: Sum, left: tuple[Array, Array | None, list], state: Array, updates: Array
    ) -> None:
        """Begins the state behind some tokens, see `HeadChunks.left`."""
        total, factor, keys = left
        following.begin(total * state if total.ndim == 0 else times(total, state))
        following.add(halves(times(factor, updates), self.interpret), keys)

    def store(self, i, out: Array, updates: Array) -> None:
        """Writes outputs and updates."""
        own = self.memory.out.at[self.place]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        synchronize(self.interpret)  # The copy of the last chunk's outputs has read them.
        turned(own)[...] = out.astype(self.call.v)
        forget_dead(own, self.alive(i), self.interpret)
        plgpu.commit_smem()
        there = self.outs.out.at[self.row, pl.ds(i * CHUNK, CHUNK), self.head, self.values]
        plgpu.copy_smem_to_gmem(own, there)
        if self.outs.updates is not None:
            ref, first = self.outs.updates, (i - self.given.words[self.row, UPDATES]) * CHUNK

            @pl.when((first >= 0) & (first < ref.shape[1]))
            def _():
                there = ref.at[self.row, pl.ds(first, CHUNK), self.head, self.values]
                store(turned(there), plgpu.layout_cast(updates, plgpu.Layout.WGMMA_TRANSPOSED))

    def return_state(self, i, ref, updates: Array) -> None:
        """Writes the state that is returned in the place of that before the chunk."""

        def product(found: Sum) -> Array:
            self.add_to_state(found, self.chunks.left_at_cut(i), load(ref, WGMMA), updates)
            return found.read()

        found = with_sums(product, [(WINDOW, self.call.key_dim)], self.interpret)
        self.chunks.end_cut()
        store(ref, found)


def times(numbers: Array | None, x: Array) -> Array:
    """x [n, m] with every column multiplied with a number; None: x."""
    return x if numbers is None else spread(numbers, x.shape, 1, WGMMA) * x
