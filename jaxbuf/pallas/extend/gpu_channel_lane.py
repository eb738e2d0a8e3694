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
from jaxbuf.pallas.extend.gpu_channel_sums import Sum, cut
from jaxbuf.pallas.extend.gpu_channel_weights import DIM, ROWS, WARPS, load_numbers, store_products
from jaxbuf.pallas.extend.gpu_lane import Arrays, Item, read_item
from jaxbuf.pallas.extend.gpu_products import ZERO, count, where
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, MAX_WARPGROUPS, MEMORY, SWIZZLE, count_bytes
from jaxbuf.pallas.instructions import end_copies, prefetch, publish, synchronize, wait_for_copies
from jaxbuf.pallas.threads import (
    NUMBERS,
    PER_THREAD,
    THREADS,
    copy_numbers,
    copy_vector,
    copy_vectors,
    gather_numbers,
    load,
    store,
    vectors_layout,
)

GROUP = 8  # probes that are multiplied with the state at once
PART = 2 * WARPS  # entries that are left out if none of them is alive
SHORT, SHORT_TIME = 32, 8  # entries of a short ring, at most, and tokens
MORE = 8  # entries, at most, that a short ring may have beyond its places
FOLDED_AT_ONCE = 24  # entries of a short ring, at most, that a fold adds at once; else it adds a chunk at once
BANDS = DIM // BAND
INPUTS = 4  # arrays of a new token that are copied to shared memory as vectors
KEPT_POSITIONS = 4 * CHUNK  # positions of a row's entries, at most, that are among an item's words


class SharedMemory(NamedTuple):
    """The arrays of a block in shared memory: before the launch their types, in the kernel references to them.

    Every array but `barriers` has a leading axis of the block's warpgroups, which is left out below. Some are of items
    alone that are short, as `is_short` says; else they are None. Of these, from `gates` to `scalars`, there are as many
    as `count_copies` says, which is left out below, too.

    Attributes:
      barriers: One for each band of each warpgroup. It opens when that band of a checkpoint has arrived.
      numbers: f32 [rows, DIM]: the decayed probes; then what each of these reads from the state. Behind the probes, or
        behind a chunk's decayed keys, which lie there before, are the weights: of each key its product with each
        probe, `Lane.pitch` numbers a key. A row is the decay of all entries while the item folds: of a short item the
        first, with the decayed keys behind it that `gates` has no rows for; else the last.
      words: f32 [2, THREADS]: what all threads have to know of this item and of the next one, int32 each: the row's
        fields, the positions of the first entries, those of the new entries, and in a tree the new tokens' paths. The
        last one of this item's is the number that was drawn, that of the item after the next.
      gates: f32 [places + T, DIM] of a short item: the entries' gates, and behind them the new tokens'. The entries'
        are overwritten by the sums of the gates behind them, as int32, or in a fold by their decayed keys.
      keys, updates: [places, DIM] in Call.entry, of its entries.
      probes: [2 T or more, DIM] in Call.probe: its new keys, and behind them the queries.
      values: [T, DIM] in Call.out: its new values.
      scalars: f32 [1 or 2, THREADS]: its new tokens' betas; and without the delta rule the entries', each where `words`
        has its position.
      state: [BANDS, BAND, DIM]: the item's checkpoint, or the high half of a split one.
      input_barriers: One for each warpgroup, which opens when the new tokens of a short item have arrived, but for
        their betas; unused where threads copy them.
    """

    barriers: Any
    numbers: Any
    words: Any
    gates: Any
    keys: Any
    updates: Any
    probes: Any
    values: Any
    scalars: Any
    state: Any
    input_barriers: Any


class Entry(NamedTuple):
    """A place of a chunk: the gates, the key and the update [DIM] of its entry, without the delta rule its beta; and
    whether there is one. If not, the other arrays may hold any numbers, NaN among them."""

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


def padded_entries(call: Call) -> int:
    """Entries of a row, padded to whole chunks."""
    return pl.cdiv(max(1, call.max_live), CHUNK) * CHUNK


def is_short(call: Call) -> bool:
    """Whether items have few tokens and few entries, which are copied past the registers, to shared memory: there must
    be room for two of them."""
    few = call.time <= SHORT_TIME and call.max_read <= SHORT and call.max_live <= count_places(call) + MORE
    return few and count_bytes(_shared_memory(call, 2, short=True)) <= MEMORY


def count_copies(call: Call) -> int:
    """How often there is shared memory for a short item's new tokens and entries: with one token twice, so that those
    of the next item are copied while this one is served, if as many lanes have room for that; else once."""

    def fits(warpgroups, copies):
        return count_bytes(_shared_memory(call, warpgroups, short=True, copies=copies)) <= MEMORY

    lanes = next((n for n in range(MAX_WARPGROUPS, 1, -1) if fits(n, 1)), 1)
    return 2 if call.time == 1 and fits(lanes, 2) else 1


def count_places(call: Call) -> int:
    """Places of a short ring's entries: whole parts. A row that folds may have more entries."""
    places = pl.cdiv(max(1, call.max_read), PART) * PART
    return places if places <= FOLDED_AT_ONCE else pl.cdiv(places, CHUNK) * CHUNK


def count_new_rows(call: Call) -> int:
    """New tokens, and what fills them up to as many for each warp."""
    return pl.cdiv(call.time, WARPS) * WARPS


def count_pitch(call: Call) -> int:
    """Weights of a key: as many times 2 or 4, which a thread loads at once, that there is one for each probe."""
    return 2 if call.time == 1 else pl.cdiv(2 * call.time, 4) * 4


def weights_row(call: Call, *, short: bool) -> int:
    """The row of `SharedMemory.numbers` in which the weights begin."""
    return 2 * call.time if short else max(CHUNK, pl.cdiv(2 * call.time, GROUP) * GROUP)


def shared_memory(call: Call, warpgroups: int) -> SharedMemory:
    return _shared_memory(call, warpgroups, short=is_short(call), copies=count_copies(call))


def _shared_memory(call: Call, warpgroups: int, *, short: bool, copies: int = 1) -> SharedMemory:
    columns = SWIZZLE // call.state.itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE)  # pyright: ignore[reportAbstractUsage]
    places, probes = count_places(call), 2 * call.time
    weighed = places + count_new_rows(call) if short else CHUNK
    rows = weights_row(call, short=short) + pl.cdiv(weighed * count_pitch(call), DIM) + (not short)
    # The last probes are multiplied together with the rows behind them; these products are left out.
    rows = max(rows, pl.cdiv(probes, GROUP) * GROUP)
    if short:  # While it folds, the decay and the keys of entries that there are no places for lie there.
        rows = max(rows, 1 + max(0, call.max_live - places))

    def memory(*dims, dtype=jnp.float32, transforms=()):
        return plgpu.SMEM((warpgroups, *dims), dtype, transforms=transforms)

    def if_short(*dims, **how):
        return memory(copies, *dims, **how) if short else None

    return SharedMemory(
        barriers=plgpu.Barrier(num_barriers=warpgroups * BANDS),
        numbers=memory(rows, DIM),
        words=memory(2, THREADS),
        gates=if_short(places + call.time, DIM),
        keys=if_short(places, DIM, dtype=call.entry),
        updates=if_short(places, DIM, dtype=call.entry),
        probes=if_short(max(probes, count_new_rows(call)), DIM, dtype=call.probe),
        values=if_short(call.time, DIM, dtype=call.out),
        scalars=if_short(1 if call.delta else 2, THREADS),
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
        self.numbers, self.words, *self._copies, self.state, self.inputs = own
        self._barriers, self._first_barrier = memory.barriers, warpgroup * BANDS
        self.kept = min(KEPT_POSITIONS, padded_entries(call))
        self.channels = pl.ds(0, DIM)
        # With several tokens, instructions for each of them and for a first chunk of its own would be too many.
        self.one_token = call.time == 1
        self.short, self.places, self.new_rows = is_short(call), count_places(call), count_new_rows(call)
        self.more = range(self.places, call.max_live) if self.short else range(0)  # entries without places, at most
        self.first_new = self.places if self.short else 0  # the place of the first new token, as `weigh` counts them
        self.pitch, self._weights = count_pitch(call), DIM * weights_row(call, short=self.short)
        self.decay_row = 0 if self.short else self.numbers.shape[0] - 1
        self.early = self.short and count_copies(call) > 1  # whether the next item's are copied before they are needed
        self.look_at(0)

    def look_at(self, buffer: Array | int) -> None:
        """Chooses the item that `word` and the arrays of a short item are those of: this one or the next, in turn."""
        self.buffer = buffer
        copy = buffer if self.early else 0
        held: list[Any] = [ref if ref is None else ref.at[copy] for ref in self._copies]
        self.gates, self.keys, self.updates, self.probes, self.values, self.scalars = held

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

    def keep_words(self, words: list[Array]) -> None:
        """Writes them to shared memory, when no thread needs those of the item before. With copies that are early,
        threads have waited for each other since then."""
        starts = ROW_FIELDS, ROW_FIELDS + self.kept, ROW_FIELDS + self.kept + self.call.time
        thread, found = count((THREADS,), 0, PER_THREAD), words[0]
        for start, x in zip(starts, words[1:], strict=False):
            found = jnp.where(thread >= start, x, found)
        if not self.early:
            synchronize(self.interpret)
        store(self.words.at[self.buffer], lax.bitcast_convert_type(found, jnp.float32))
        synchronize(self.interpret)

    def word(self, i: Array | int) -> Array:
        return lax.bitcast_convert_type(self.words[self.buffer, i], jnp.int32)

    def tell_drawn(self, drawn: Array) -> None:
        """Tells all threads the number that one of them drew, when they have waited for each other."""
        publish(drawn, self.words.at[self.buffer, THREADS - 1])

    def drawn(self) -> Array:
        """The number that was told last."""
        return self.word(THREADS - 1)

    def append_to(self, t: Array | int) -> Array:
        """The position of a new entry; -1 if it is not written."""
        return self.word(ROW_FIELDS + self.kept + t)

    def path(self, t: Array | int) -> Array:
        return self.word(ROW_FIELDS + self.kept + self.call.time + t)

    def fetch(self, number: Array, band: Array | None = None) -> None:
        """Starts to copy a band of the checkpoint of an item, whose words are kept, to shared memory, if it has one; or
        all bands.

        Of a split one, that is the high half. The low half is brought to the L2 cache if the item folds.
        """
        head, checkpoint = lax.rem(number, self.call.heads), self.word(CHECKPOINT)

        @pl.when(self.word(HAS_CHECKPOINT) > 0)
        def _():
            for i in range(BANDS) if band is None else [band]:
                source = self.arrays.checkpoints.at[checkpoint, head, pl.ds(i * BAND, BAND)]
                plgpu.copy_gmem_to_smem(source, self.state.at[i], self.barrier(i))
            if self.arrays.low is not None:
                low, wanted = self.arrays.low.at[checkpoint, head], self.word(FOLD_TO) >= 0
                if band is not None:
                    wanted &= jnp.equal(band, 0)
                pl.when(wanted)(lambda: prefetch(low, self.interpret))

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
        time, thread = self.call.time, count((THREADS,), 0, PER_THREAD)
        new = (
            (arrays.k.at[row, :, key_head], self.probes.at[pl.ds(0, time)]),
            (arrays.q.at[row, :, key_head], self.probes.at[pl.ds(time, time)]),
            (arrays.v.at[row, :, head], self.values),
            (arrays.log_decay.at[row, :, head], self.gates.at[pl.ds(self.places, time)]),
        )
        if self.early:  # The copy engine would bring them after the states that it was asked for before.
            behind = 0
            for source, target in new:
                for t in range(time):
                    behind = copy_vector(source.at[t], target.at[t], behind, self.interpret)
        else:
            for source, target in new:
                plgpu.copy_gmem_to_smem(source, target, self.inputs)
        token = jnp.minimum(thread, time - 1)
        copy_numbers(arrays.beta.at[row], token, head, self.scalars.at[0], self.interpret)
        if not self.call.delta:
            # The thread that has an entry's word copies its beta.
            at = lax.bitcast_convert_type(load(self.words.at[self.buffer], PER_THREAD), jnp.int32)
            at = jnp.where((thread >= ROW_FIELDS) & (thread < ROW_FIELDS + self.places), at, 0)
            copy_numbers(arrays.gates.at[:, head], at, jnp.int32(DIM), self.scalars.at[1], self.interpret)
        for ref, of_head, target in (
            (arrays.gates, head, self.gates.at[pl.ds(0, self.places)]),
            (arrays.keys, key_head, self.keys),
            (arrays.updates, head, self.updates),
        ):
            aligned = ref.shape[-1] * ref.dtype.itemsize % 16 == 0
            layout = vectors_layout(DIM, ref.dtype) if aligned else NUMBERS
            at = load(self.words.at[self.buffer, places], layout.reduce(1))
            at = lax.bitcast_convert_type(at, jnp.int32)
            copy_vectors(ref.at[:, of_head, self.channels], at, layout, target, self.interpret)
        end_copies(self.interpret)

    def await_short(self) -> None:
        """Waits until what `copy_short` copies has arrived, and all threads are done with the item before."""
        self.await_copies()
        synchronize(self.interpret)

    def await_copies(self) -> None:
        """Waits until what `copy_short` copies for this thread has arrived."""
        if self.short and not self.early:
            plgpu.barrier_wait(self.inputs)
        wait_for_copies(0, self.interpret)

    def load_probes(self, item: Item, t: Array | int) -> list[Array]:
        """The key and the query of a new token, f32 [DIM], as a warp multiplies them with keys."""
        return [load(ref, ROWS.reduce(0)).astype(jnp.float32) for ref in self.new_probes(item, t)]

    def new_probes(self, item: Item, t: Array | int) -> list:
        """References to the key and the query of a new token, [DIM] each."""
        if self.short:
            return [self.probes.at[i * self.call.time + t] for i in range(2)]
        key_head = item.head // self.call.heads_per_key
        return [ref.at[item.row, t, key_head] for ref in (self.arrays.k, self.arrays.q)]

    def new_gates(self, item: Item, t: Array | int):
        """A reference to the gates of a new token, [DIM]."""
        if self.short:
            return self.gates.at[self.places + t]
        return self.arrays.log_decay.at[item.row, t, item.head]

    def sum_new(self, item: Item, t: Array | int, layout) -> Sum:
        """The gates of a new token as a sum of one, [DIM]."""
        return cut(load(self.new_gates(item, t), layout))

    def weigh(self, place: Array | int, keys: list[Array], probes: list[list[Array]], t: Array | int) -> None:
        """Writes the weights of some keys for new tokens from token t on.

        Args:
          place: The first key's place.
          keys: For each of the tokens f32 [n, DIM], decayed, in layout `ROWS`.
          probes: Of each token, from `load_probes`.
          t: The first token's number.
        """
        first, time = self._weights + place * self.pitch + t, self.call.time
        if not self.call.delta:  # Nothing is recalled.
            first, probes = first + time, [of_token[1:] for of_token in probes]
        store_products(keys, probes, self.numbers, first, self.pitch, time, self.interpret)

    def load_weights(self, place: int) -> list[Array | None]:
        """The weights of a place's key, for each probe, in all threads; None for those that are not used."""
        time, n = self.call.time, self.pitch
        found = load_numbers(self.numbers, self._weights + place * n, n, self.interpret)[: 2 * time]
        return [x if self.call.delta or i >= time else None for i, x in enumerate(found)]

    def has_more(self, item: Item) -> Array:
        """Whether there are more entries than places, in a row that folds."""
        return item.live > self.places

    def locate_more(self, item: Item) -> list[tuple[Array, Array]]:
        """The entries, of a short ring, that there are no places for, those of a row that folds: the position of each,
        and whether there is one."""
        return [(self.arrays.entries[item.line, i], item.live > i) for i in self.more]

    def new_beta(self, item: Item, t: Array | int) -> Array:
        """A new token's beta."""
        return self.scalars[0, t] if self.short else self.arrays.beta[item.row, t, item.head]

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
