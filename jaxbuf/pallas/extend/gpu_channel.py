"""`extend` on NVIDIA GPUs (Hopper) for families whose decay is one number a key channel: KDA, gated linear attention.

A multiprocessor runs one block of up to three warpgroups. Each is a lane: it serves one item (a head of a row) after
the other, independently of the others. While a lane computes, the states of the others, and then the next one of its
own, are copied to shared memory.

An entry's decay differs from channel to channel, so it belongs to the entry's key and not to the product with a probe:
a decayed key is the key times the exponential of the decay up to a token, and a decayed probe is a new key or a query
times the exponential of the decay since the checkpoint. A lane serves an item in these steps:
1. A thread for each channel sums the entries' gates, and writes a chunk's decayed keys to shared memory, for each new
   token again.
2. If the row folds, it multiplies the state in shared memory with the decay of all entries, adds update ⊗ decayed key
   of each, and starts to copy it back.
3. Otherwise a warp for each entry multiplies the decayed keys with the probes, and a thread for each row of the state
   adds the updates, times these products, entry by entry.
4. New tokens are multiplied with each other's decayed keys in the same way.
5. The state is multiplied with the decayed probes on the tensor cores.
6. A thread for each row of the state substitutes forward over the new tokens.

A launch of one token on short rings takes steps 1, 3 and 4 in one pass, from the newest entry to the oldest, and leaves
out places that hold no entry, `PART` at a time. An item's entries are copied to shared memory while the item before is
served.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth. An entry has
as many gates as a key has numbers, in float32: half of the bytes of an entry.

Precision: the state's and the probes' halves in products on the tensor cores lose 2^-16; all else is float32. Gates are
summed as whole numbers, in two parts, which is exact in any order: so T tokens at once and one by one store the same
bits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend import gpu_schedule
from jaxbuf.pallas.extend.call import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, LENGTH, LIVE, ROW, ROW_FIELDS, Call, Integers
from jaxbuf.pallas.extend.gpu_lane import Item
from jaxbuf.pallas.extend.gpu_products import (
    STATE,
    STATE_LEFT,
    STATE_RIGHT,
    TALL,
    ZERO,
    count,
    cut,
    multiply_state,
    spread,
    where,
    zeros,
)
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, MAX_DEALT_ROUNDS, MAX_WARPGROUPS, MEMORY, SWIZZLE
from jaxbuf.pallas.extend.gpu_sums import LEAST_GATE, on_path
from jaxbuf.pallas.instructions import count_up, end_copies, publish, synchronize, wait_for_copies
from jaxbuf.pallas.threads import (
    COMPILER,
    NUMBERS,
    PER_THREAD,
    THREADS,
    copy_vectors,
    gather_numbers,
    load,
    store,
    store_rows,
    vectors_layout,
)

DIM = THREADS  # of keys and values: a thread for each channel, and for each row of the state
GROUP = 8  # probes that are multiplied with the state at once
PART = 4  # entries that are left out if none of them is alive: a warp has one of their keys
SHORT = 24  # entries, at most, of a short ring
ROWS = vectors_layout(DIM, jnp.float32)  # of a chunk's keys: a warp has all of a key, four numbers a thread
BANDS = DIM // BAND
KEPT_POSITIONS = 4 * CHUNK  # positions of a row's entries, at most, that are among an item's words
# A gate is cut to a multiple of 2^-13 and one of 2^-24, and both are whole numbers then. 1.5 · 2^23, added to a float32
# below 2^22, rounds it to a whole number, which the last bits of the sum then are.
HIGH, LOW, WHOLE = (np.float32(x) for x in (2**13, 2**24, 1.5 * 2**23))
WHOLE_BITS = np.int32(WHOLE.view(np.int32))
LEAST = np.int32(-(2**22) + 1)  # LEAST · 2^-13 is -512, whose exponential is 0

type Sum = list[Array]  # of gates: int32 [DIM] of their first parts and of their second parts


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
      state: [BANDS, BAND, DIM]: the item's checkpoint.
    """

    barriers: Any
    numbers: Any
    words: Any
    weights: Any
    gates: Any
    keys: Any
    updates: Any
    state: Any


class Arrays(NamedTuple):
    """The kernel's references to global memory, in the order of its arguments.

    Attributes:
      fields, entries, append, paths: As in `Integers`; entries are padded to whole chunks, and paths is None without a
        tree.
      q, k, v, log_decay, beta: As `extend_channels` takes them.
      checkpoints: [states, heads, DIM, DIM] in Call.state.
      keys: [positions, key_heads, DIM] in Call.entry.
      updates: [positions, heads, DIM] in Call.entry.
      gates: f32 [positions, heads, DIM]; without the delta rule [..., DIM + 1], with the entry's beta behind.
    """

    fields: jax.Ref
    entries: jax.Ref
    append: jax.Ref
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    log_decay: jax.Ref
    beta: jax.Ref
    checkpoints: jax.Ref
    keys: jax.Ref
    updates: jax.Ref
    gates: jax.Ref
    paths: jax.Ref | None = None


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
      beta: Of the new token.
      strengths: Without the delta rule the betas of the entries.
    """

    gate: Array
    key: Array
    query: Array
    value: Array
    probes: list[Array]
    beta: Array
    strengths: list[Array]


def extend_channels(
    call: Call,
    integers: Integers,
    refs: list,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    interpret: bool = False,
) -> Array:
    """`jaxbuf.pallas.extend.gpu.extend` for decay="channel".

    Args:
      call, integers, q, k, v, beta, interpret: As there. Entries are padded to whole chunks.
      log_decay: f32 [rows, T, heads, key_dim].
      refs: References to the checkpoints; and to the keys, updates and gates, with blocks and block_size as one axis.

    Returns:
      The outputs.
    """
    paths = [] if integers.paths is None else [integers.paths]
    warpgroups = _warpgroups(call)
    lanes = warpgroups * _blocks(call, warpgroups)
    draws = pl.cdiv(call.items, lanes) > MAX_DEALT_ROUNDS and not interpret
    counter = [jax.new_ref(jnp.zeros(1, jnp.int32))] if draws else []
    return _kernel(call, warpgroups, draws, interpret)(*integers[:3], q, k, v, log_decay, beta, *refs, *paths, *counter)


def padded_entries(call: Call) -> int:
    """Entries of a row, padded to whole chunks."""
    return pl.cdiv(max(1, call.max_live), CHUNK) * CHUNK


def _is_short(call: Call) -> bool:
    """Whether a row has one token and a short ring."""
    return call.time == 1 and call.max_live <= SHORT


def _places(call: Call) -> int:
    """Places of a short ring's entries: whole multiples of those that the threads copy at once."""
    return pl.cdiv(max(1, call.max_live), 8) * 8


def _shared_memory(call: Call, warpgroups: int) -> SharedMemory:
    columns = SWIZZLE // call.state.itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    short, held = _is_short(call), _places(call)
    places = held + PART if short else CHUNK
    probe_rows = places if short else max(CHUNK, pl.cdiv(2 * call.time, GROUP) * GROUP) + 1

    def memory(*dims, dtype=jnp.float32, transforms=()):
        return plgpu.SMEM((warpgroups, *dims), dtype, transforms=transforms)

    return SharedMemory(
        barriers=plgpu.Barrier(num_barriers=warpgroups * BANDS),
        numbers=memory(probe_rows, DIM),
        words=memory(2, THREADS),
        weights=memory(2 * call.time, places),
        gates=memory(held, DIM) if short else None,
        keys=memory(held, DIM + 8, dtype=call.entry) if short else None,
        updates=memory(held, DIM + 8, dtype=call.entry) if short else None,
        state=memory(BANDS, BAND, DIM, dtype=call.state, transforms=(tiling, swizzle)),
    )


def _warpgroups(call: Call) -> int:
    """The warpgroups of a block: as many as there is work and shared memory for."""

    def size(warpgroups: int) -> int:
        arrays = [x for x in _shared_memory(call, warpgroups)[1:] if x is not None]
        sizes = (int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in arrays)
        return sum(pl.cdiv(x, gpu_schedule.ALIGNMENT) * gpu_schedule.ALIGNMENT for x in sizes) + gpu_schedule.ALIGNMENT

    wanted = min(MAX_WARPGROUPS, pl.cdiv(call.items, gpu_schedule.PROCESSORS))
    return next(n for n in range(wanted, 0, -1) if n == 1 or size(n) <= MEMORY)


def _blocks(call: Call, warpgroups: int) -> int:
    return min(gpu_schedule.PROCESSORS, pl.cdiv(call.items, warpgroups))


def _kernel(call: Call, warpgroups: int, draws: bool, interpret: bool):
    blocks = _blocks(call, warpgroups)
    lanes = warpgroups * blocks

    def extend_channels(*refs):  # A profile shows this name.
        *refs, out, memory = refs
        given = len(Arrays._fields) - (not call.tree)
        arrays, counter = Arrays(*refs[:given]), refs[given:]
        warpgroup = lax.axis_index("warpgroup")
        lane = _Lane(call, interpret, arrays, out, memory, warpgroup)

        def serve(carry):
            """Serves an item; the lane draws the one after the next, or is dealt it."""
            number, following, buffer, loaded = carry
            drawn = count_up(*counter) if draws else None
            loaded = lane.serve(number, following, buffer, loaded, drawn)
            after = 2 * lanes + lane.drawn() if draws else following + lanes
            return following, after, 1 - buffer, loaded

        first = warpgroup * blocks + lax.axis_index("block")

        @pl.when(first < call.items)
        def _():
            lane.keep_words(lane.ask_for_words(first), None)
            lane.fetch(first)
            lane.copy_short(first)
            start = first, first + lanes, jnp.int32(0), lane.load_short(first)
            lax.while_loop(lambda carry: carry[0] < call.items, serve, start)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_channels,
        out_type=jax.ShapeDtypeStruct((call.rows, call.time, call.heads, DIM), call.out),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[_shared_memory(call, warpgroups)],
        # The compiler's sums across warps would need scratch memory; there are none.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


class _Lane:
    """A warpgroup, its part of shared memory, and how it serves an item."""

    def __init__(self, call: Call, interpret: bool, arrays: Arrays, out, memory: SharedMemory, warpgroup: Array):
        self.call, self.interpret, self.arrays, self.out = call, interpret, arrays, out
        own: list[Any] = [ref if ref is None else ref.at[warpgroup] for ref in memory[1:]]
        self.numbers, self.words, self.weights, self.gates, self.keys, self.updates, self.state = own
        self._barriers, self._first_barrier = memory.barriers, warpgroup * BANDS
        self.kept = min(KEPT_POSITIONS, padded_entries(call))
        self.channels = pl.ds(0, DIM)
        # With several tokens, instructions for each of them and for a first chunk of its own would be too many.
        self.one_token = call.time == 1
        self.short, self.places = _is_short(call), _places(call)
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

    # What an item needs of global memory before it can be served.

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
        """Starts to copy the checkpoint of an item, whose words are kept, to shared memory, if it has one."""
        head, checkpoint = lax.rem(number, self.call.heads), self.word(CHECKPOINT)

        @pl.when(self.word(HAS_CHECKPOINT) > 0)
        def _():
            for i in range(BANDS):
                source = self.arrays.checkpoints.at[checkpoint, head, pl.ds(i * BAND, BAND)]
                plgpu.copy_gmem_to_smem(source, self.state.at[i], self.barrier(i))

    # An item.

    def read_item(self, number: Array) -> Item:
        """The item with a number, whose words are kept."""
        row, length, live, checkpoint, has_checkpoint, fold_to = (
            self.word(i) for i in (ROW, LENGTH, LIVE, CHECKPOINT, HAS_CHECKPOINT, FOLD_TO)
        )
        line = jnp.minimum(number, self.call.items - 1) // self.call.heads
        head = lax.rem(number, self.call.heads)
        return Item(line, head, row, length, live, checkpoint, has_checkpoint > 0, fold_to >= 0, fold_to)

    def copy_short(self, number: Array) -> None:
        """Starts to copy the entries of an item, whose words are kept, to shared memory; zeros where there is none."""
        if not self.short:
            return
        arrays, item, places = self.arrays, self.read_item(number), pl.ds(ROW_FIELDS, self.places)
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

    def load_short(self, number: Array) -> Short | None:
        """Asks for the rest of what such an item needs; None of other items, which ask when they are served."""
        if not self.short:
            return None
        arrays, item, strengths = self.arrays, self.read_item(number), []
        row, head, key_head = item.row, item.head, item.head // self.call.heads_per_key
        if not self.call.delta:
            places = [self.word(ROW_FIELDS + i) for i in range(self.places)]
            strengths = [arrays.gates[at, head, DIM] for at in places]
        return Short(
            gate=load(arrays.log_decay.at[row, 0, head], PER_THREAD),
            key=load(arrays.k.at[row, 0, key_head], PER_THREAD),
            query=load(arrays.q.at[row, 0, key_head], PER_THREAD),
            value=load(arrays.v.at[row, 0, head], PER_THREAD),
            probes=[load(ref.at[row, 0, key_head], ROWS.reduce(0)) for ref in (arrays.k, arrays.q)],
            beta=arrays.beta[row, 0, head],
            strengths=strengths,
        )

    def serve(
        self, number: Array, following: Array, buffer: Array, loaded: Short | None, drawn: Array | None
    ) -> Short | None:
        """Serves an item; starts to copy the state of the one that follows, and returns what that one needs."""
        call, arrays, time = self.call, self.arrays, range(self.call.time)
        self.buffer = buffer
        item, next_words = self.read_item(number), self.ask_for_words(following)
        append = [self.append_to(t) for t in time]
        paths = [self.path(t) for t in time] if call.tree else None
        if loaded is not None:
            values, betas = [loaded.value], [loaded.beta]
            added = self.add_short(item, loaded)
        else:
            first = self.load_chunk(item, 0) if self.one_token or call.max_live <= CHUNK else None
            values = [load(arrays.v.at[item.row, t, item.head], PER_THREAD) for t in time]
            betas = [arrays.beta[item.row, t, item.head] for t in time]
            total = self.sum_gates(item, first)
            pl.when(item.folds)(functools.partial(self.fold, item, first, total))
            added = self.add_entries(item, first, total)
            self.weigh_new(item)
            self.decay_probes(item, [where(~item.folds, x) for x in total])
        self.each_token(functools.partial(self.append_entry, item))
        self.buffer = 1 - buffer
        self.keep_words(next_words, drawn)
        # They arrive while the state is multiplied. A load would not: the assembler has few counters for loads, so that
        # a later load from shared memory would wait for it.
        self.copy_short(following)
        self.read_state(item)
        # All threads are done with the state.
        pl.when(item.folds)(functools.partial(plgpu.wait_smem_to_gmem, 0, wait_read_only=True))
        synchronize(self.interpret)
        pl.when(following < call.items)(lambda: self.fetch(following))
        loaded = self.load_short(following)
        self.substitute(item, added, values, betas, append, paths)
        return loaded

    # Sums of gates.

    def nothing(self) -> Sum:
        return [plgpu.layout_cast(jnp.zeros((DIM,), jnp.int32), PER_THREAD)] * 2

    def cut_gate(self, gate: Array) -> Sum:
        """A gate in two parts, multiples of 2^-13 and of 2^-24."""
        gate = jnp.maximum(gate, LEAST_GATE)
        high, number = self.whole(gate * HIGH)
        low, _ = self.whole((gate - number * (1 / HIGH)) * LOW)
        return [high, low]

    def whole(self, x: Array) -> tuple[Array, Array]:
        """float32 x, of less than 2^22, rounded to a whole number: as int32 and as float32."""
        if self.interpret:  # XLA would simplify what is below.
            return jnp.round(x).astype(jnp.int32), jnp.round(x)
        x = x + WHOLE
        return lax.bitcast_convert_type(x, jnp.int32) - WHOLE_BITS, x - WHOLE

    def factor(self, sum: Sum) -> Array:
        """The exponential of a sum of gates."""
        high, low = sum
        high = jnp.maximum(high, LEAST)
        if self.interpret:
            numbers = [x.astype(jnp.float32) for x in (high, low)]
        else:
            numbers = [lax.bitcast_convert_type(x + WHOLE_BITS, jnp.float32) - WHOLE for x in (high, low)]
        return jnp.exp(numbers[0] * (1 / HIGH) + numbers[1] * (1 / LOW))

    def new_gate(self, item: Item, t: Array | int) -> Sum:
        return self.cut_gate(load(self.arrays.log_decay.at[item.row, t, item.head], PER_THREAD))

    def since_commit(self, item: Item, t: Array | int) -> Sum:
        """The sum of the gates of the new tokens on token t's path, its own included."""
        if isinstance(t, int):
            return self.new_gate(item, 0)
        return lax.fori_loop(0, t + 1, lambda j, sum: self.add_on_path(item, t, j, sum), self.nothing())

    def add_on_path(self, item: Item, t: Array, j: Array, sum: Sum) -> Sum:
        """The sum with new token j's gate added, if that token is on token t's path."""
        found = _plus(sum, self.new_gate(item, j))
        if not self.call.tree:
            return found
        there = (lax.shift_right_logical(self.path(t), j) & 1) > 0
        return [jnp.where(jnp.broadcast_to(there, x.shape), x, y) for x, y in zip(found, sum, strict=True)]

    # Entries.

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

    def sum_gates(self, item: Item, first: list[Entry] | None) -> Sum:
        """The sum of all entries' gates."""

        def add(_, chunk, total):
            for entry in chunk:
                total = _plus(total, self.cut_gate(entry.gate))
            return total

        return self.each_chunk(item, first, add, self.nothing())

    def sum_behind(self, chunk: list[Entry], left: Sum) -> list[Sum]:
        """For each entry of a chunk the sum of the gates behind it, where `left` is that of the chunk's and of those
        behind the chunk."""
        found = []
        for entry in chunk:
            left = _minus(left, self.cut_gate(entry.gate))
            found.append(left)
        return found

    def decay_keys(self, chunk: list[Entry], behind: list[Sum], more: Sum | None) -> None:
        """Writes a chunk's keys to shared memory, each with the decay of the gates behind it and of `more`."""
        synchronize(self.interpret)  # All threads are done with what was there.
        for i, (entry, sum) in enumerate(zip(chunk, behind, strict=True)):
            decay = self.factor(sum if more is None else _plus(sum, more))
            store(self.numbers.at[i, self.channels], entry.key.astype(jnp.float32) * decay)
        synchronize(self.interpret)

    def multiply_keys(self, item: Item, t: Array | int) -> None:
        """Writes the products of the probes of token t with the decayed keys to `weights`."""
        call, arrays, key_head = self.call, self.arrays, item.head // self.call.heads_per_key
        keys = load(self.numbers.at[pl.ds(0, CHUNK), self.channels], ROWS)
        for i, ref in enumerate((arrays.k, arrays.q)):
            if i or call.delta:  # Without the delta rule nothing is recalled.
                probe = load(ref.at[item.row, t, key_head], ROWS.reduce(0)).astype(jnp.float32)
                products = keys * spread(probe, keys.shape, 1, ROWS)
                store(self.weights.at[i * call.time + t, pl.ds(0, CHUNK)], jnp.sum(products, axis=1))

    def add_short(self, item: Item, loaded: Short) -> list[Array]:
        """All of the steps before the state is multiplied, for one token on a short ring.

        Returns:
          As `add_entries`.
        """
        call, interpret = self.call, self.interpret
        wait_for_copies(0, interpret)
        ours, others = (
            [x.astype(jnp.float32) for x in probes] for probes in ([loaded.key, loaded.query], loaded.probes)
        )
        since = self.cut_gate(loaded.gate)
        synchronize(interpret)  # All threads are done with the item before.
        store(self.numbers.at[self.places, self.channels], ours[0])
        # A fold decays the entries up to the last of them.
        sum = [where(~item.folds, x) for x in since]
        starts = range(0, self.places, PART)
        for start in reversed(starts):

            def decay_part(sum, start=start):
                for i in reversed(range(start, start + PART)):
                    key = load(self.keys.at[i, self.channels], PER_THREAD).astype(jnp.float32)
                    store(self.numbers.at[i, self.channels], key * self.factor(sum))
                    sum = _plus(sum, self.cut_gate(load(self.gates.at[i, self.channels], PER_THREAD)))
                return sum

            # Folds add all places.
            sum = lax.cond(item.folds | (item.live > start), decay_part, lambda sum: sum, sum)
        synchronize(interpret)
        pl.when(item.folds)(functools.partial(self.fold, item, None, sum, loaded.strengths))

        def multiply(start):
            keys = load(self.numbers.at[pl.ds(start, PART), self.channels], ROWS)
            for i, probe in enumerate(others):
                if i or call.delta:
                    products = keys * spread(probe, keys.shape, 1, ROWS)
                    store(self.weights.at[i, pl.ds(start, PART)], jnp.sum(products, axis=1))

        alive = [~item.folds & (item.live > start) for start in starts]
        for start, some in zip(starts, alive, strict=True):
            pl.when(some)(functools.partial(multiply, start))
        multiply(self.places)
        synchronize(interpret)
        # A folded state is that up to the last entry.
        decay = self.factor(
            [jnp.where(jnp.broadcast_to(item.folds, x.shape), y, x) for x, y in zip(sum, since, strict=True)]
        )
        for i, probe in enumerate(ours):
            store(self.numbers.at[i, self.channels], probe * decay)

        def add_part(added, start):
            added = [*added]
            for i in range(start, start + PART):
                update = load(self.updates.at[i, self.channels], PER_THREAD).astype(jnp.float32)
                if loaded.strengths:
                    update = jnp.where(item.live > i, loaded.strengths[i], ZERO) * update
                for j in (0, 1) if call.delta else (1,):
                    added[j] = added[j] + self.weights[j, i] * update
            return added

        added = [zeros((DIM,), PER_THREAD)] * 2
        for start, some in zip(starts, alive, strict=True):
            added = lax.cond(some, functools.partial(add_part, start=start), lambda added: added, added)
        synchronize(interpret)
        return added

    def add_entries(self, item: Item, first: list[Entry] | None, total: Sum) -> list[Array]:
        """What the entries add to each probe's product with the state; zeros if the item folds."""
        call = self.call

        def add_chunk(c, chunk, carry):
            added, left = carry
            behind = self.sum_behind(chunk, left)

            def weigh(t):
                self.decay_keys(chunk, behind, self.since_commit(item, t))
                self.multiply_keys(item, t)

            self.each_token(weigh)
            synchronize(self.interpret)
            added = [*added]
            for i, entry in enumerate(chunk):
                update = entry.update.astype(jnp.float32)
                update = update if entry.strength is None else entry.strength * update
                for j in range(0 if call.delta else call.time, 2 * call.time):
                    added[j] = added[j] + self.weights[j, i] * update
            return added, behind[-1]

        empty = [zeros((DIM,), PER_THREAD)] * (2 * call.time), total
        return lax.cond(
            item.folds | (item.live == 0),
            lambda: empty[0],
            lambda: self.each_chunk(item, first, add_chunk, empty)[0],
        )

    def weigh_new(self, item: Item) -> None:
        """Writes the products of each token's probes with the decayed keys of the tokens up to it to `weights`.

        In a tree, those of tokens that are not on the path are not used; they might be infinite.
        """
        key_head = item.head // self.call.heads_per_key

        def weigh(t):
            synchronize(self.interpret)  # All threads are done with the keys before, and with the entries' weights.

            def decay_key(i, since):
                s = t - i
                key = load(self.arrays.k.at[item.row, s, key_head], PER_THREAD).astype(jnp.float32)
                store(self.numbers.at[s, self.channels], key * self.factor(since))
                return since if self.one_token else self.add_on_path(item, t, s, since)

            if self.one_token:
                decay_key(0, self.nothing())
            else:
                lax.fori_loop(0, t + 1, decay_key, self.nothing())
            synchronize(self.interpret)
            self.multiply_keys(item, t)

        self.each_token(weigh)

    def decay_probes(self, item: Item, total: Sum) -> None:
        """Writes the probes to shared memory, with the decay since the checkpoint."""
        synchronize(self.interpret)
        key_head = item.head // self.call.heads_per_key

        def write(t):
            decay = self.factor(_plus(total, self.since_commit(item, t)))
            for i, ref in enumerate((self.arrays.k, self.arrays.q)):
                probe = load(ref.at[item.row, t, key_head], PER_THREAD).astype(jnp.float32)
                store(self.numbers.at[i * self.call.time + t, self.channels], probe * decay)

        self.each_token(write)
        synchronize(self.interpret)

    def append_entry(self, item: Item, t: Array | int) -> None:
        """Writes a new token's gates to the ring, without the delta rule its beta, too; and its key, if the head is the
        first of its key head's."""
        call, arrays, to = self.call, self.arrays, self.append_to(t)
        head, key_head = item.head, item.head // call.heads_per_key

        @pl.when(to >= 0)
        def _():
            store(arrays.gates.at[to, head, self.channels], load(arrays.log_decay.at[item.row, t, head], PER_THREAD))
            if not call.delta:
                store(arrays.gates.at[to, head, DIM], arrays.beta[item.row, t, head])

            @pl.when(lax.rem(head, call.heads_per_key) == 0)
            def _():
                key = load(arrays.k.at[item.row, t, key_head], PER_THREAD)
                store(arrays.keys.at[to, key_head], key.astype(call.entry))

    # The state.

    def fold(self, item: Item, first: list[Entry] | None, total: Sum, strengths: Sequence[Array] = ()) -> None:
        """Makes the state in shared memory, checkpoint · exp(total) + Σ update ⊗ decayed key; starts to copy it.

        Args:
          item: The item.
          first: Its first chunk, or None.
          total: The sum of all gates.
          strengths: Of a short ring, whose keys have been decayed, the betas without the delta rule.
        """
        # The checkpoint's decay, for the columns that each thread has of it.
        store(self.numbers.at[self.last_row, self.channels], self.factor(total))
        synchronize(self.interpret)
        decays = [load(self.numbers.at[self.last_row, strip], TALL.reduce(0)) for strip in self.strips()]

        def add_chunk(load_updates, betas, begins):
            def add_to(band):
                pl.when(item.has_checkpoint & begins)(lambda: plgpu.barrier_wait(self.barrier(band)))
                updates = [x.astype(jnp.float32) for x in load_updates(pl.ds(band * BAND, BAND))]
                if not self.call.delta:
                    updates = [x * y for x, y in zip(betas, updates, strict=True)]
                for strip, decay in zip(self.strips(), decays, strict=True):
                    part = self.state.at[band, :, strip]
                    new = load(part, TALL).astype(jnp.float32)
                    decayed = where(item.has_checkpoint, new * spread(decay, new.shape, 1, TALL))
                    new = jnp.where(jnp.broadcast_to(begins, new.shape), decayed, new)
                    for i, update in enumerate(updates):
                        key = load(self.numbers.at[i, strip], TALL.reduce(0))
                        new = new + spread(update, new.shape, 0, TALL) * spread(key, new.shape, 1, TALL)
                    store(part, new.astype(self.call.state))

            self.each_band(add_to)

        def add_loaded(c, chunk, left):
            positions, alive = self.positions(item, c), [entry.alive for entry in chunk]
            behind = self.sum_behind(chunk, left)
            self.decay_keys(chunk, behind, None)

            def load_updates(rows):
                refs = [self.arrays.updates.at[at, item.head, rows] for at in positions]
                return [where(some, load(ref, TALL.reduce(1))) for some, ref in zip(alive, refs, strict=True)]

            add_chunk(load_updates, [entry.strength for entry in chunk], jnp.equal(c, 0))
            return behind[-1]

        if self.short:
            betas = [jnp.where(item.live > i, beta, ZERO) for i, beta in enumerate(strengths)]
            places = range(self.places)
            add_chunk(
                lambda rows: [load(self.updates.at[i, rows], TALL.reduce(1)) for i in places], betas, jnp.bool_(True)
            )
        else:
            self.each_chunk(item, first, add_loaded, total)
        plgpu.commit_smem()  # The copies below read what was stored.
        for band in range(BANDS):
            stored = self.arrays.checkpoints.at[item.fold_to, item.head, pl.ds(band * BAND, BAND)]
            plgpu.copy_smem_to_gmem(self.state.at[band], stored)

    def read_state(self, item: Item) -> None:
        """Overwrites the decayed probes with what each reads from the state."""
        probes = 2 * self.call.time
        starts = range(0, probes, GROUP)
        found = []
        for band in range(BANDS):
            pl.when(item.has_checkpoint & ~item.folds)(functools.partial(plgpu.barrier_wait, self.barrier(band)))
            # Two sums each, because products into one sum wait for each other.
            sums = [[zeros((BAND, GROUP), STATE)] * 2 for _ in starts]
            for strip in self.strips():
                left = cut(load(self.state.at[band, :, strip], STATE_LEFT))
                for i, start in enumerate(starts):
                    right = cut(load(self.numbers.at[pl.ds(start, GROUP), strip], STATE_RIGHT))
                    for part in left:
                        sums[i] = [sums[i][1], multiply_state(sums[i][0], part, right, self.interpret)]
            found.append([x + y for x, y in sums])
        synchronize(self.interpret)  # All threads have read the probes.
        for band, products in enumerate(found):
            for start, product in zip(starts, products, strict=True):
                n = min(GROUP, probes - start)
                target = self.numbers.at[pl.ds(start, n), pl.ds(band * BAND, BAND)]
                store_rows(product, STATE, 1, target, self.interpret)

    def substitute(self, item: Item, added: list[Array], values, betas, append, paths) -> None:
        """Substitutes forward over the T tokens: writes their outputs, and their updates to the ring."""
        call, time = self.call, self.call.time

        def read(i):
            """What probe i reads from the state."""
            return where(item.has_state, load(self.numbers.at[i, self.channels], PER_THREAD))

        recalls, outs, first = added[:time], added[time:], self.places if self.short else 0
        for t, to in enumerate(append):
            stored = values[t]
            if call.delta:
                stored = betas[t] * (stored.astype(jnp.float32) - (recalls[t] + read(t)))
            stored = stored.astype(call.entry)
            update = stored.astype(jnp.float32)
            if not call.delta:
                update = betas[t] * update
            for i in range(t, time):
                if i > t and call.delta:
                    recalls[i] = on_path(paths, i, t, recalls[i] + self.weights[i, first + t] * update, recalls[i])
                outs[i] = on_path(paths, i, t, outs[i] + self.weights[time + i, first + t] * update, outs[i])
            result = where(t < item.length, outs[t] + read(time + t))
            store(self.out.at[item.row, t, item.head], result.astype(call.out))

            @pl.when(to >= 0)
            def _(to=to, stored=stored):
                store(self.arrays.updates.at[to, item.head], stored)


def _plus(a: Sum, b: Sum) -> Sum:
    return [x + y for x, y in zip(a, b, strict=True)]


def _minus(a: Sum, b: Sum) -> Sum:
    return [x - y for x, y in zip(a, b, strict=True)]
