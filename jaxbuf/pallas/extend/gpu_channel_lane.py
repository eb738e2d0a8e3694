"""A lane of `extend` on a GPU with a decay a channel: a warpgroup, its shared memory, and how that is filled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend import gpu_schedule
from jaxbuf.pallas.extend.call import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, ROW_FIELDS, Call
from jaxbuf.pallas.extend.gpu_lane import Arrays, Item, read_item
from jaxbuf.pallas.extend.gpu_products import ZERO, count, where
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, MAX_WARPGROUPS, MEMORY, SWIZZLE, count_bytes
from jaxbuf.pallas.instructions import end_copies, prefetch, publish, synchronize
from jaxbuf.pallas.threads import (
    NUMBERS,
    PER_THREAD,
    THREADS,
    copy_numbers,
    copy_vectors,
    gather_numbers,
    load,
    store,
    vectors_layout,
)

DIM = THREADS  # of keys and values: a thread for each channel, and for each row of the state
GROUP = 8  # probes that are multiplied with the state at once
WARPS = 4  # A warp has one of so many keys.
PART = 2 * WARPS  # entries that are left out if none of them is alive
SHORT = 24  # entries, at most, of a short ring
ROWS = vectors_layout(DIM, jnp.float32)  # of a chunk's keys: a warp has all of a key, four numbers a thread
BANDS = DIM // BAND
INPUTS = 4  # arrays of a new token that are copied to shared memory as vectors
KEPT_POSITIONS = 4 * CHUNK  # positions of a row's entries, at most, that are among an item's words


class SharedMemory(NamedTuple):
    """The arrays of a block in shared memory: before the launch their types, in the kernel references to them.

    Every array but `barriers` has a leading axis of the block's warpgroups, which is left out below.

    Attributes:
      barriers: One for each band of each warpgroup. It opens when that band of a checkpoint has arrived.
      numbers: f32 [probe_rows, DIM]: a chunk's decayed keys, and with one token the new key behind them; then the
        decayed probes; then what each of these reads from the state. The last row is the decay of all entries.
      words: f32 [2, THREADS]: what all threads have to know of this item and of the next one, int32 each: the row's
        fields, the positions of the first entries, those of the new entries, and in a tree the new tokens' paths. The
        last is the number of the item after the next.
      weights: f32 [2 T, places]: of each probe its product with each decayed key.
      gates: f32 [places, DIM], keys and updates: [places, DIM + 8] in Call.entry: the entries of an item of one
        token on a short ring, which are copied past the registers. Else None.
      probes, value, gate: The new key and the query, [2, DIM] in Call.probe; the new value, [DIM] in Call.out, and the
        new gate, f32 [DIM], of such an item. Else None.
      scalars: f32 [2, THREADS], likewise: the new token's beta, many times; and without the delta rule the entries',
        each where `words` has its position.
      state: [BANDS, BAND, DIM]: the item's checkpoint, or the high half of a split one.
      input_barriers: One for each warpgroup, which opens when `probes`, `value` and `gate` have arrived.
    """

    barriers: Any
    numbers: Any
    words: Any
    weights: Any
    gates: Any
    keys: Any
    updates: Any
    probes: Any
    value: Any
    gate: Any
    scalars: Any
    state: Any
    input_barriers: Any


class Entry(NamedTuple):
    """A place of a chunk: the gates, the key and the update [DIM] of its entry, without the delta rule its beta; and
    whether there is one. If not, the others are anything."""

    gate: Array
    key: Array
    update: Array
    strength: Array | None
    alive: Array

    def select(self) -> "Entry":
        """With zeros if there is no entry. Not before they are used: it waits until they have arrived."""
        gate, key, update = (where(self.alive, x) for x in (self.gate, self.key, self.update))
        strength = None if self.strength is None else where(self.alive, self.strength)
        return Entry(gate, key, update, strength, self.alive)


class Short(NamedTuple):
    """What an item of one token on a short ring needs in registers.

    Attributes:
      gate, key, query, value: [DIM] of the new token, one number a thread.
      probes: The key and the query as a warp multiplies them with an entry's key.
    """

    gate: Array
    key: Array
    query: Array
    value: Array
    probes: list[Array]


def padded_entries(call: Call) -> int:
    """Entries of a row, padded to whole chunks."""
    return pl.cdiv(max(1, call.max_live), CHUNK) * CHUNK


def is_short(call: Call) -> bool:
    """Whether a row has one token and a short ring."""
    return call.time == 1 and call.max_live <= SHORT


def count_places(call: Call) -> int:
    """Places of a short ring's entries: whole multiples of those that the threads copy at once."""
    return pl.cdiv(max(1, call.max_live), 8) * 8


def shared_memory(call: Call, warpgroups: int) -> SharedMemory:
    columns = SWIZZLE // call.state.itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    short, held = is_short(call), count_places(call)
    places = held + WARPS if short else CHUNK
    probe_rows = places if short else max(CHUNK, pl.cdiv(2 * call.time, GROUP) * GROUP) + 1

    def memory(*dims, dtype=jnp.float32, transforms=()):
        return plgpu.SMEM((warpgroups, *dims), dtype, transforms=transforms)

    def if_short(*dims, **how):
        return memory(*dims, **how) if short else None

    return SharedMemory(
        barriers=plgpu.Barrier(num_barriers=warpgroups * BANDS),
        numbers=memory(probe_rows, DIM),
        words=memory(2, THREADS),
        weights=memory(2 * call.time, places),
        gates=if_short(held, DIM),
        keys=if_short(held, DIM + 8, dtype=call.entry),
        updates=if_short(held, DIM + 8, dtype=call.entry),
        probes=if_short(2, DIM, dtype=call.probe),
        value=if_short(DIM, dtype=call.out),
        gate=if_short(DIM),
        scalars=if_short(2, THREADS),
        state=memory(BANDS, BAND, DIM, dtype=call.state, transforms=(tiling, swizzle)),
        input_barriers=plgpu.Barrier(num_barriers=warpgroups, num_arrivals=INPUTS),
    )


def count_warpgroups(call: Call) -> int:
    """The warpgroups of a block: as many as there is work and shared memory for."""

    wanted = min(MAX_WARPGROUPS, pl.cdiv(call.items, gpu_schedule.PROCESSORS))
    return next(n for n in range(wanted, 0, -1) if n == 1 or count_bytes(shared_memory(call, n)) <= MEMORY)


def count_blocks(call: Call, warpgroups: int) -> int:
    return min(gpu_schedule.PROCESSORS, pl.cdiv(call.items, warpgroups))


class Lane:
    """A warpgroup, its part of shared memory, and what it does to bring there what its items need."""

    def __init__(self, call: Call, interpret: bool, arrays: Arrays, out, memory: SharedMemory, warpgroup: Array):
        self.call, self.interpret, self.arrays, self.out = call, interpret, arrays, out
        own: list[Any] = [ref if ref is None else ref.at[warpgroup] for ref in memory[1:]]
        self.numbers, self.words, self.weights, self.gates, self.keys, self.updates, *own = own
        self.probes, self.value, self.gate, self.scalars, self.state, self.inputs = own
        self._barriers, self._first_barrier = memory.barriers, warpgroup * BANDS
        self.kept = min(KEPT_POSITIONS, padded_entries(call))
        self.channels = pl.ds(0, DIM)
        # With several tokens, instructions for each of them and for a first chunk of its own would be too many.
        self.one_token = call.time == 1
        self.short, self.places = is_short(call), count_places(call)
        self.last_row = self.numbers.shape[0] - 1
        self.buffer: Array | int = 0  # which of `words` are those of the item that is looked at

    def each_token(self, function: Callable[[Array | int], None]) -> None:
        """Calls a function with the number of each new token."""
        if self.one_token:
            function(0)
        else:
            lax.fori_loop(0, self.call.time, lambda t, _: function(t), None)

    def each_band(self, function: Callable[[Array | int], None]) -> None:
        """Calls a function with the number of each band."""
        lax.fori_loop(0, BANDS, lambda i, _: function(i), None)

    def barrier(self, band: Array | int):
        return self._barriers.at[self._first_barrier + band]

    def strips(self) -> list:
        """Slices of the state's columns that lie in a tile of its shared memory."""
        columns = SWIZZLE // self.call.state.itemsize
        return [pl.ds(start, columns) for start in range(0, DIM, columns)]

    def ask_for_words(self, number: Array) -> list[Array]:
        """Loads the words of an item, each kind into the threads whose numbers are those of the words."""
        line, time, arrays = jnp.minimum(number, self.call.items - 1) // self.call.heads, self.call.time, self.arrays
        kinds = [(arrays.fields, ROW_FIELDS), (arrays.entries, self.kept), (arrays.append, time)]
        kinds += [] if arrays.paths is None else [(arrays.paths, time)]
        thread, start, found = count((THREADS,), 0, PER_THREAD), 0, []
        for ref, length in kinds:
            at = jnp.clip(thread - start, 0, length - 1)
            found.append(gather_numbers(ref.at[line], at, self.interpret))
            start += length
        return found

    def keep_words(self, words: list[Array], drawn: Array | None) -> None:
        """Writes them to shared memory, when no thread needs those of the item before; and the number drawn."""
        starts = ROW_FIELDS, ROW_FIELDS + self.kept, ROW_FIELDS + self.kept + self.call.time
        thread, found = count((THREADS,), 0, PER_THREAD), words[0]
        for start, x in zip(starts, words[1:], strict=False):
            found = jnp.where(thread >= start, x, found)
        synchronize(self.interpret)
        store(self.words.at[self.buffer], lax.bitcast_convert_type(found, jnp.float32))
        if drawn is not None:
            synchronize(self.interpret)
            publish(drawn, self.words.at[self.buffer, THREADS - 1])
        synchronize(self.interpret)

    def word(self, i: Array | int) -> Array:
        return lax.bitcast_convert_type(self.words[self.buffer, i], jnp.int32)

    def drawn(self) -> Array:
        """The number that the lane drew last."""
        return self.word(THREADS - 1)

    def append_to(self, t: Array | int) -> Array:
        """The position of a new entry; -1 if it is not written."""
        return self.word(ROW_FIELDS + self.kept + t)

    def path(self, t: Array | int) -> Array:
        return self.word(ROW_FIELDS + self.kept + self.call.time + t)

    def fetch(self, number: Array) -> None:
        """Starts to copy the checkpoint of an item, whose words are kept, to shared memory, if it has one.

        Of a split one, that is the high half. The low half is brought to the L2 cache if the item folds.
        """
        head, checkpoint = lax.rem(number, self.call.heads), self.word(CHECKPOINT)

        @pl.when(self.word(HAS_CHECKPOINT) > 0)
        def _():
            for i in range(BANDS):
                source = self.arrays.checkpoints.at[checkpoint, head, pl.ds(i * BAND, BAND)]
                plgpu.copy_gmem_to_smem(source, self.state.at[i], self.barrier(i))
            if self.arrays.low is not None:
                low = self.arrays.low.at[checkpoint, head]
                pl.when(self.word(FOLD_TO) >= 0)(lambda: prefetch(low, self.interpret))

    def read_item(self, number: Array) -> Item:
        """The item with a number, whose words are kept."""
        line = jnp.minimum(number, self.call.items - 1) // self.call.heads
        return read_item(line, lax.rem(number, self.call.heads), [self.word(i) for i in range(ROW_FIELDS)])

    def copy_short(self, number: Array) -> None:
        """Starts to copy the new token and the entries of an item, whose words are kept, to shared memory; zeros where
        there is no entry. No register has to wait for them."""
        if not self.short:
            return
        arrays, item, places = self.arrays, self.read_item(number), pl.ds(ROW_FIELDS, self.places)
        row, head, key_head = item.row, item.head, item.head // self.call.heads_per_key
        for source, target in (
            (arrays.k.at[row, 0, key_head], self.probes.at[0]),
            (arrays.q.at[row, 0, key_head], self.probes.at[1]),
            (arrays.v.at[row, 0, head], self.value),
            (arrays.log_decay.at[row, 0, head], self.gate),
        ):
            plgpu.copy_gmem_to_smem(source, target, self.inputs)
        same = plgpu.layout_cast(jnp.broadcast_to(row, (THREADS,)), PER_THREAD)
        copy_numbers(arrays.beta.at[:, 0], same, head, self.scalars.at[0], self.interpret)
        if not self.call.delta:
            # The thread that has an entry's word copies its beta.
            thread = count((THREADS,), 0, PER_THREAD)
            at = lax.bitcast_convert_type(load(self.words.at[self.buffer], PER_THREAD), jnp.int32)
            at = jnp.where((thread >= ROW_FIELDS) & (thread < ROW_FIELDS + self.places), at, 0)
            copy_numbers(arrays.gates.at[:, head], at, jnp.int32(DIM), self.scalars.at[1], self.interpret)
        for ref, head, target in (
            (arrays.gates, item.head, self.gates),
            (arrays.keys, item.head // self.call.heads_per_key, self.keys),
            (arrays.updates, item.head, self.updates),
        ):
            aligned = ref.shape[-1] * ref.dtype.itemsize % 16 == 0
            layout = vectors_layout(DIM, ref.dtype) if aligned else NUMBERS
            at = load(self.words.at[self.buffer, places], layout.reduce(1))
            at = lax.bitcast_convert_type(at, jnp.int32)
            source, target = ref.at[:, head, self.channels], target.at[:, self.channels]
            copy_vectors(source, at, layout, target, self.interpret)
        end_copies(self.interpret)

    def load_probes(self, item: Item, t: Array | int) -> list[Array]:
        """The key and the query of a new token, as a warp multiplies them with an entry's key."""
        arrays, key_head = self.arrays, item.head // self.call.heads_per_key
        return [load(ref.at[item.row, t, key_head], ROWS.reduce(0)) for ref in (arrays.k, arrays.q)]

    def read_short(self) -> Short | None:
        """The new token that `copy_short` has brought; None of other items."""
        if not self.short:
            return None
        plgpu.barrier_wait(self.inputs)
        return Short(
            gate=load(self.gate, PER_THREAD),
            key=load(self.probes.at[0], PER_THREAD),
            query=load(self.probes.at[1], PER_THREAD),
            value=load(self.value, PER_THREAD),
            probes=[load(self.probes.at[i], ROWS.reduce(0)) for i in range(2)],
        )

    def strength(self, item: Item, i: int) -> Array:
        """Without the delta rule the beta of an entry of a short ring; 0 if there is none."""
        return jnp.where(item.live > i, self.scalars[1, ROW_FIELDS + i], ZERO)

    def positions(self, item: Item, c: Array | int) -> list[Array]:
        """The positions of a chunk's entries."""
        start = c * CHUNK

        def kept():
            return [self.word(ROW_FIELDS + start + i) for i in range(CHUNK)]

        if isinstance(c, int) or padded_entries(self.call) <= KEPT_POSITIONS:
            return kept()
        entries = self.arrays.entries
        return lax.cond(start < self.kept, kept, lambda: [entries[item.line, start + i] for i in range(CHUNK)])

    def load_chunk(self, item: Item, c: Array | int) -> list[Entry]:
        """A chunk's entries."""
        call, arrays, positions = self.call, self.arrays, self.positions(item, c)
        key_head = item.head // call.heads_per_key
        gates, keys, updates = (
            [load(ref.at[at, head, self.channels], PER_THREAD) for at in positions]
            for ref, head in ((arrays.gates, item.head), (arrays.keys, key_head), (arrays.updates, item.head))
        )
        betas = [None if call.delta else arrays.gates[at, item.head, DIM] for at in positions]
        alive = [item.live > c * CHUNK + i for i in range(CHUNK)]
        return [Entry(*entry) for entry in zip(gates, keys, updates, betas, alive, strict=True)]

    def each_chunk(self, item: Item, first: list[Entry] | None, add: Callable, carry):
        """Calls `add` with the number of each chunk, the chunk, and what it returned for the one before."""
        chunks, begun = pl.cdiv(item.live, CHUNK), 0
        if first is not None:
            carry, begun = add(0, [entry.select() for entry in first], carry), 1
        if self.call.max_live <= CHUNK:
            return carry

        def add_loaded(c, carry):
            return add(c, [entry.select() for entry in self.load_chunk(item, c)], carry)

        return lax.fori_loop(begun, chunks, add_loaded, carry)
