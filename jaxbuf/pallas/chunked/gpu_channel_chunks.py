"""What `gpu_walk` multiplies by, of chunks with a decay for every key channel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.gpu_channel_pairs import KEY, QUERY, SINCE_PARTS
from jaxbuf.pallas.chunked.gpu_layout import CHUNK, RING, place, tile
from jaxbuf.pallas.chunked.gpu_pairs import PARTS
from jaxbuf.pallas.sums import ROW, turned
from jaxbuf.pallas.threads import load


class ChannelArrays(NamedTuple):
    """The chunks of a walk, in global memory.

    Attributes:
      strengths: f32 [rows, heads, chunks, CHUNK]: write strengths.
      keys_at_cut: bfloat16 [rows, heads, PARTS, CHUNK, key_dim]: for the state that is returned, the keys of that chunk
        with their decay up to there, and zeros for tokens behind.
      since_cut: f32 [rows, heads, key_dim]: the decay from that chunk's start up to there.
      attend, since, left, total, inverse: `ChannelPairs`.
    """

    strengths: Any
    keys_at_cut: Any
    since_cut: Any
    attend: Any
    since: Any
    left: Any
    total: Any
    inverse: Any = None


class _Memory(NamedTuple):
    """RING chunks in shared memory; of one chunk `since`, for which the ring has no room; and of that the barriers that
    open when it is there, when all windows have read it, and when `keys_at_cut` are in its place."""

    strengths: Any
    attend: Any
    left: Any
    total: Any
    inverse: Any
    since: Any
    since_full: Any
    since_free: Any
    cut_full: Any


class ChannelChunks:
    """The chunks of a row's head, as `HeadChunks`; `given` are references to `ChannelArrays`."""

    MOST_TOGETHER = 2

    def __init__(self, call: Call, given: ChannelArrays, memory: list, row, head, leads):
        self.call, self.given, self.memory = call, given, _Memory(*memory)
        self.row, self.head, self.leads = row, head, leads

    @staticmethod
    def scratch(call: Call, together: int) -> list:
        return [
            plgpu.SMEM((RING, CHUNK), jnp.float32),
            tile(RING, PARTS, CHUNK, CHUNK),
            tile(RING, PARTS, CHUNK, call.key_dim),
            plgpu.SMEM((RING, 1, call.key_dim), jnp.float32),
            tile(RING, PARTS, CHUNK, CHUNK) if call.delta else tile(1, 1, 8, 64),
            tile(SINCE_PARTS, CHUNK, call.key_dim),
            plgpu.Barrier(num_arrivals=SINCE_PARTS if call.delta else QUERY.stop),
            plgpu.Barrier(num_arrivals=together),
            plgpu.Barrier(num_arrivals=PARTS),
        ]

    @staticmethod
    def copies(call: Call) -> int:
        return 3 + PARTS + call.delta

    def bring(self, i, chunk, full) -> None:
        given, memory, row, head = self.given, self.memory, self.row, self.head
        plgpu.copy_gmem_to_smem(given.strengths.at[row, head, chunk], memory.strengths.at[place(i)], full)
        plgpu.copy_gmem_to_smem(given.attend.at[row, i, head], memory.attend.at[place(i)], full)
        plgpu.copy_gmem_to_smem(given.total.at[row, i, head], memory.total.at[place(i)], full)
        for part in range(PARTS):
            plgpu.copy_gmem_to_smem(given.left.at[row, i, head, part], memory.left.at[place(i), part], full)
        if self.call.delta:
            plgpu.copy_gmem_to_smem(given.inverse.at[row, i, head], memory.inverse.at[place(i)], full)

    def forget_dead(self, i, alive, interpret: bool) -> None:
        """`channel_pairs` has done so."""

    def bring_read(self, i) -> None:
        @pl.when(self.leads)
        def _():
            memory = self.memory
            pl.when(i > 0)(lambda: plgpu.barrier_wait(memory.since_free))
            for part in range(self.given.since.shape[3]):
                there = self.given.since.at[self.row, i, self.head, part]
                plgpu.copy_gmem_to_smem(there, memory.since.at[part], memory.since_full)

    def wait_read(self) -> None:
        plgpu.barrier_wait(self.memory.since_full)

    def end_read(self) -> None:
        plgpu.barrier_arrive(self.memory.since_free)

    def end(self) -> None:
        pl.when(self.leads)(lambda: plgpu.barrier_wait(self.memory.since_free))

    def keys(self, i) -> list:
        return [turned(x) for x in self._read(i, KEY)]

    def queries(self, i) -> list:
        return [turned(x) for x in self._read(i, QUERY)]

    def since(self, i) -> Array | None:
        return None

    def strengths(self, i) -> Array:
        return load(self.memory.strengths.at[place(i)], ROW)

    def inverse(self, i) -> list:
        return [turned(self.memory.inverse.at[place(i), part]) for part in range(PARTS)]

    def attend(self, i) -> list:
        return [self.memory.attend.at[place(i), part] for part in range(PARTS)]

    def left(self, i) -> tuple[Array, Array | None, list]:
        memory = self.memory
        return load(memory.total.at[place(i), 0], ROW), None, [memory.left.at[place(i), part] for part in range(PARTS)]

    def left_at_cut(self, i) -> tuple[Array, Array | None, list]:
        """`keys_at_cut` take the place of what has been read, and what is read of the next chunk comes after them."""
        memory, keys = self.memory, self.given.keys_at_cut.at[self.row, self.head]
        places = self._read(i, KEY)

        @pl.when(self.leads)
        def _():
            plgpu.barrier_wait(memory.since_free)
            for part, target in enumerate(places):
                plgpu.copy_gmem_to_smem(keys.at[part], target, memory.cut_full)

        plgpu.barrier_wait(memory.cut_full)
        return load(self.given.since_cut.at[self.row, self.head], ROW), None, places

    def end_cut(self) -> None:
        self.end_read()

    def _read(self, i, parts: slice) -> list:
        # Nothing is added, but that the compiler cannot know. It would compute these addresses before the first chunk,
        # and they would take registers from there on.
        added = i >> 20
        return [self.memory.since.at[part + added] for part in range(parts.start, parts.stop)]
