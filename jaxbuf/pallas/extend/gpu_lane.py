"""A lane of `extend` on a GPU: a warpgroup, its shared memory, and how what its items need is brought there.

A lane seldom waits for a load right after it asked for it. It asks for the positions of an item's entries two items
ahead (`locate`), and for the item's inputs one item ahead (`load_inputs`). Both are in registers until `keep` and
`admit` write them to shared memory. Two things are copied to shared memory without passing through registers: chunks of
entries that have shared memory of their own (`copy`), and checkpoints, one band after the other (`fetch`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, LIVE, ROW, ROW_FIELDS, Call
from jaxbuf.pallas.extend.gpu_products import STATE_RIGHT, VECTORS, ZERO, by_row, count, cut, zeros
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, Schedule, SharedMemory
from jaxbuf.pallas.instructions import end_copies, prefetch, settle, synchronize, wait_for_copies
from jaxbuf.pallas.threads import (
    PER_THREAD,
    THREADS,
    copy_vectors,
    gather_numbers,
    gather_vectors,
    load,
    select_positive,
    store,
    store_from,
    vectors_layout,
)


class Arrays(NamedTuple):
    """The kernel's references to global memory, in the order of its arguments.

    Attributes:
      fields, entries, append: As in `Integers`; entries are padded to `Schedule.padded_entries`.
      q, k: [rows, T, key_heads, key_dim] in Call.probe.
      v: [rows, T, heads, value_dim]. Here and below, heads and value_dim are one axis where `Call.key_values` is set.
      log_decay, beta: f32 [rows, T, heads]; with a decay a channel log_decay is [rows, T, heads, key_dim].
      checkpoints: [states, heads, value_dim, key_dim] in Call.state.
      keys: [positions, key_heads, key_dim] in Call.entry.
      updates: [positions, heads, value_dim] in Call.entry.
      gates: f32 [positions, Call.gates]; f32 [1, 1], which is not used, if Call.gates is 0. With a decay a channel
        [positions, heads, key_dim], or [..., key_dim + 1] without the delta rule, with the entry's beta behind.
      paths: As in `Integers`, of a tree. Else None.
      low: [states, heads, value_dim, key_dim] in Call.low; None if checkpoints are not split.
      low_scales: f32 [states, heads, value_dim], the scales of an int8 `low`; None without one.
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
    low: jax.Ref | None = None
    low_scales: jax.Ref | None = None


def name_arrays(call: Call, refs: Sequence) -> tuple[Arrays, Sequence]:
    """The references of a call by their names, and those behind them."""
    missing = {"paths": not call.tree, "low": call.low is None, "low_scales": call.low != jnp.int8}
    names = [name for name in Arrays._fields if not missing.get(name)]
    return Arrays(**dict(zip(names, refs, strict=False))), refs[len(names) :]


class Upcoming(NamedTuple):
    """An item that the lane will serve soon. It is located two items ahead: its arrays are then on their way.

    Attributes:
      exists: Whether there is such an item; if not, the rest is that of some other item and is not used.
      line: Its row's line in `Integers`.
      head: Its head.
      fields: int32 [THREADS] in layout `PER_THREAD`: the line's first ROW_FIELDS fields, each in the thread that passes
        it on (see `Lane.admit`).
      first_positions: int32 [CHUNK] each: the flat positions of the first chunk's entries, in the layout of the keys
        and in that of the updates. Empty if the first chunk is copied past the registers.
      all_positions: int32 [THREADS] each, in layout `PER_THREAD`: the flat positions of all entries.
    """

    exists: Array
    line: Array
    head: Array
    fields: Array
    first_positions: list[Array]
    all_positions: list[Array]


class Loaded(NamedTuple):
    """An item's inputs, in registers or on their way there.

    Attributes:
      entries: The first chunk's keys [CHUNK, key_dim] and updates [CHUNK, value_dim], each with the positions that they
        were loaded from. Empty if the first chunk is copied past the registers.
      low_scales: The scales of an int8 low half, f32 [value_dim]: others' unless the item folds. Empty without one.
      gates: f32 [THREADS] each, in layout `PER_THREAD`: for each head of a stack the gates of all entries.
      strengths: The same of the entries' betas, without the delta rule; else empty.
      probes: The new keys, then the queries: [key_dim] each.
      values: The new values: [value_dim] each.
      tokens: [THREADS] each, in layout `PER_THREAD`: the new tokens' log decays and betas (float32), of each head of a
        stack, the flat positions of their entries (int32) and, in a tree, their paths (int32), each in the thread that
        passes it on.
    """

    entries: list[tuple[Array, Array]]
    low_scales: list[Array]
    gates: list[list[Array]]
    strengths: list[list[Array]]
    probes: list[Array]
    values: list[Array]
    tokens: list[Array]


class Item(NamedTuple):
    """The item that is served: a head of a row. All attributes are scalars.

    Attributes:
      line: The row's line in `Integers`.
      head: The head.
      row: The row of the inputs and outputs.
      length: The row's new tokens.
      live: Its live entries.
      checkpoint: The checkpoint that it reads.
      has_checkpoint: Whether it has a checkpoint.
      folds: Whether it folds.
      fold_to: The checkpoint that the fold writes.
    """

    line: Array
    head: Array
    row: Array
    length: Array
    live: Array
    checkpoint: Array
    has_checkpoint: Array
    folds: Array
    fold_to: Array

    @property
    def has_state(self) -> Array:
        """Whether shared memory holds a state when the probes are multiplied: a checkpoint, or the result of a fold."""
        return self.has_checkpoint | self.folds


def read_item(line: Array, head: Array, fields: list[Array]) -> Item:
    """The item with this head, of the row that a line's first ROW_FIELDS fields describe."""
    row, length, live, checkpoint, has_checkpoint, fold_to = fields
    return Item(line, head, row, length, live, checkpoint, has_checkpoint > 0, fold_to >= 0, fold_to)


class ChunkMemory(NamedTuple):
    """Where a chunk of entries lies in shared memory.

    Attributes:
      planes: References to bfloat16 [n, pitch]; one, or those of the high and of the low halves.
      keys: The row of the first entry's key.
      updates: The row of the first entry's update.
    """

    planes: list
    keys: Any
    updates: Any


class Lane:
    """A warpgroup, and what it does to bring its items' inputs to shared memory.

    Attributes:
      schedule: The launch's schedule.
      call: The call that it arranges.
      interpret: Whether the kernel runs in Pallas' interpreter.
      arrays: The references to global memory.
      number: The lane's number among all lanes of the launch.
      vectors, products, reads, fold_reads, decays, decays_low, strengths: The lane's own part of `SharedMemory`.
      low_scales: Where the scales of an int8 low half lie in shared memory: [value_dim]. None without one.
      planes: References to the one or two planes of `vectors`, bfloat16 [2 · CHUNK + probe_rows, pitch].
      first_chunk: Where the first chunk lies: in `planes`, before and behind the probes.
      first_rows: `Call.first_rows` of the item that is served.
    """

    def __init__(self, schedule: Schedule, interpret: bool, arrays: Arrays, memory: SharedMemory):
        warpgroup = lax.axis_index("warpgroup")
        self.schedule, self.call, self.interpret, self.arrays = schedule, schedule.call, interpret, arrays
        self.number = warpgroup * schedule.blocks + lax.axis_index("block")
        self.vectors, self.decays, self.products, self.reads, self._state = (
            ref.at[warpgroup] for ref in (memory.vectors, memory.decays, memory.products, memory.reads, memory.state)
        )
        self._barriers, self._first_barrier = memory.barriers, warpgroup * schedule.buffers
        self._low, self.fold_reads, self.low_scales = (
            ref if ref is None else ref.at[warpgroup] for ref in (memory.low, memory.fold_reads, memory.low_scales)
        )
        if self.call.low == jnp.int8 and not schedule.one_token:
            self.low_scales = self.reads.at[:, schedule.probe_columns]
        self._later, self._positions = (
            ref.at[warpgroup] if schedule.stages else None for ref in (memory.later, memory.positions)
        )
        self.decays_low = memory.decays_low.at[warpgroup] if schedule.sums_exactly else None
        self.strengths = None if self.call.delta else memory.strengths.at[warpgroup]
        self.planes = [self.vectors.at[i] for i in range(schedule.planes)]
        self.first_chunk = ChunkMemory(self.planes, 0, CHUNK + schedule.probe_rows)
        call = self.call
        self._layouts = vectors_layout(call.key_dim, call.entry), vectors_layout(call.value_dim, call.entry)
        # The next item's scalars are loaded as vectors, a word in each of the last threads, and read from shared memory
        # when they are used. A thread would wait for a value loaded as a scalar right where it is loaded.
        self.first_rows: Array | int = 0
        self._word = count((THREADS,), 0, PER_THREAD) - (THREADS - self.call.passed_words)
        last = self.decays.at[0, pl.ds(schedule.padded_entries - THREADS, THREADS)]
        self._words = last if memory.words is None else memory.words.at[warpgroup]

    def by_row(self, numbers: Sequence[Array]) -> Array:
        """A number of each head of a stack, as what rows of the state are multiplied with: the number itself if there
        is one, else [value_dim]."""
        value_dim = self.call.value_dim
        return by_row(numbers, self.first_rows, self.call.head_rows, (value_dim,), VECTORS[value_dim])

    def place(self, head: Array, rows=None) -> tuple:
        """Where a stack's values lie in an array, or some of them: indices behind the others."""
        if not self.call.key_values:
            return (head,) if rows is None else (head, rows)
        first, size = (0, self.call.value_dim) if rows is None else (rows.start, rows.size)
        return (pl.ds(self.call.first_value(head) + first, size),)

    def and_own(self, flag: Array, head: Array, i: Array | int) -> Array:
        """Whether a flag is set and band i of a stack's state is not another window's, which reads and stores it.

        Of a band that is another's, shared memory has whatever was there; nothing of what comes of it is stored.
        """
        return flag & (i * BAND >= self.call.first_own(head)) if self.call.key_values else flag

    def store_values(self, x: Array, ref, head: Array) -> None:
        """Writes those of a stack's values that are its own.

        Args:
          x: [value_dim], in their layout.
          ref: Where they all lie in global memory.
          head: The stack.
        """
        if self.call.key_values:
            store_from(x, ref, jnp.asarray(self.call.first_own(head)), self.interpret)
        else:
            store(ref, x)

    def band(self, i: Array | int):
        """Band i of a checkpoint: its rows, its shared memory, and the barrier that opens when it has arrived."""
        rows = pl.ds(i * BAND, BAND)
        return rows, self._state.at[i], self._barriers.at[self._first_barrier + i]

    def halves(self):
        """The halves of a split checkpoint, the high one first: the whole in global memory; and where a band lies in
        shared memory while it is folded, with the barrier that opens when it has arrived. Without the low half, if that
        lies in registers.
        """
        _, high, high_barrier = self.band(0)
        if self.schedule.low_in_registers:
            return ((self.arrays.checkpoints, high, high_barrier),)
        _, low, low_barrier = self.band(1)
        low, source = low if self._low is None else self._low, self.arrays.low
        assert source is not None
        return (self.arrays.checkpoints, high, high_barrier), (source, low, low_barrier)

    def each_band(self, function) -> None:
        """Calls a function with the number of each band; in a loop if there are several new tokens.

        The instructions for each token, repeated for each band, would be too many.
        """
        bands = range(len(self.schedule.bands))
        if self.schedule.one_token:
            for i in bands:
                function(i)
        else:
            lax.fori_loop(0, len(bands), lambda i, _: function(i), None)

    def deal(self, turn: Array | int, folding: Array) -> Array:
        """The item that this lane serves in a turn, if items are dealt; `Call.items` or more if there is none.

        The first `folding` items fold. They are dealt first, one to each lane in every round; the last round of them
        may not reach all lanes. An item that folds takes as long as `Schedule.fold_cost` others. So the lanes that got
        one fewer are dealt as many items each before all lanes are dealt the rest. In the first turn, a lane serves the
        item that has the lane's number.
        """
        lanes, fold_cost = self.schedule.lanes, self.schedule.fold_cost
        rounds, more = (
            folding // lanes,
            lax.rem(folding, lanes),
        )  # The first `more` lanes get one item more that folds.
        other = turn - rounds - (self.number < more).astype(jnp.int32)  # items that did not fold, before this turn
        alone = jnp.where(self.number < more, 0, fold_cost)  # items that only the lanes that got one fewer are dealt
        early = other * (lanes - more) + self.number - more
        rest = fold_cost * (lanes - more) + (other - alone) * lanes + self.number
        others = folding + jnp.where(other < alone, early, rest)
        return jnp.where(other < 0, turn * lanes + self.number, others)

    def later_chunk(self, stage: Array | int) -> ChunkMemory:
        """Where the later chunk of a stage lies."""
        start = 2 * self.schedule.later_size * stage
        return ChunkMemory([self._later], start, start + self.schedule.later_size)

    def _load_words(self, ref, start: int, length: int) -> Array:
        """Loads the numbers of a reference [length]: number i into the thread that passes on word start + i."""
        return gather_numbers(ref, jnp.clip(self._word - start, 0, length - 1), self.interpret)

    def read_words(self, start: int, length: int, dtype) -> list[Array]:
        """Reads words that `admit` passed on.

        They are the first ROW_FIELDS fields of the next item's row; then, of this item, the new tokens' log decays of
        each head of a stack, their betas likewise, the flat positions of their entries and, in a tree, their paths.
        """
        start += THREADS - self.call.passed_words
        return [lax.bitcast_convert_type(self._words[start + i], dtype) for i in range(length)]

    def _load_positions(self, line: Array, start: Array | int, length: int) -> list[Array]:
        """The flat positions of some entries, in the threads that load their keys, and in those that load updates."""
        positions = self.arrays.entries.at[line, pl.ds(start, length)]
        return [load(positions, layout.reduce(1)) for layout in self._layouts]

    def keep(self, upcoming: Upcoming) -> None:
        """Writes the positions of an item's entries to shared memory, where `copy` reads them after `synchronize`."""
        assert self._positions is not None
        for i, x in enumerate(upcoming.all_positions):
            store(self._positions.at[pl.ds(i * THREADS, THREADS)], x)

    def locate(self, item: Array) -> Upcoming:
        """Asks for what the lane has to know of an item, given by its number, before it can ask for its inputs."""
        call, schedule, arrays = self.call, self.schedule, self.arrays
        line = jnp.minimum(item, call.items - 1) // call.heads
        first_positions = [] if schedule.copies_first_chunk else self._load_positions(line, 0, CHUNK)
        starts = range(0, schedule.padded_entries, THREADS)
        all_positions = [load(arrays.entries.at[line, pl.ds(i, THREADS)], PER_THREAD) for i in starts]
        fields = self._load_words(arrays.fields.at[line], 0, ROW_FIELDS)
        return Upcoming(item < call.items, line, lax.rem(item, call.heads), fields, first_positions, all_positions)

    def fetch(self, i: Array | int, head: Array, fields: list[Array]) -> None:
        """Starts to copy band i of an item's checkpoint to shared memory, if the row has a checkpoint.

        If a split one folds, there is shared memory for the halves of one band: those of the first are copied, in the
        place of all bands, and the others are brought to the L2 cache. So is a low half that a fold loads to registers.
        """
        checkpoint, (first, *others) = fields[CHECKPOINT], self.schedule.bands

        def fetch_first_band():
            for half, place in zip(self.halves(), (0, len(others)), strict=True):
                pl.when(jnp.equal(i, place))(functools.partial(self.fetch_half, half, checkpoint, head, first))
            for band in others:
                for source, *_ in self.halves():
                    place = checkpoint, *self.place(head, band)
                    fetch_others = functools.partial(prefetch, source.at[place], self.interpret)
                    pl.when(jnp.equal(i, 0))(fetch_others)

        def fetch_band():
            rows, state, barrier = self.band(i)
            self.fetch_half((self.arrays.checkpoints, state, barrier), checkpoint, head, rows)

        exists, folds = fields[HAS_CHECKPOINT] > 0, fields[FOLD_TO] >= 0
        if self.arrays.low is None:
            pl.when(self.and_own(exists, head, i))(fetch_band)
        elif self.schedule.low_in_registers:
            pl.when(exists)(fetch_band)
            rows, *_ = self.band(i)
            low = self.arrays.low.at[(checkpoint, *self.place(head, rows))]
            pl.when(exists & folds)(functools.partial(prefetch, low, self.interpret))
        else:
            pl.when(self.and_own(exists & ~folds, head, i))(fetch_band)
            pl.when(exists & folds)(fetch_first_band)

    def fetch_half(self, half, checkpoint: Array, head: Array, rows) -> None:
        """Starts to copy some rows of a checkpoint, or of a half of it, one of `halves`, to shared memory."""
        source, target, barrier = half
        plgpu.copy_gmem_to_smem(source.at[(checkpoint, *self.place(head, rows))], target, barrier)

    def copy(self, head: Array, entry: Array | int, chunk: ChunkMemory) -> None:
        """Starts to copy a chunk, from `entry` on, to shared memory; zeros are written where there is no entry.

        The entries are those of the item that was kept last.
        """
        (ref,), *starts = chunk
        n = CHUNK if chunk is self.first_chunk else self.schedule.later_size
        assert self._positions is not None
        # The positions are loaded once if the same threads copy keys and updates.
        at = {layout: load(self._positions.at[pl.ds(entry, n)], layout.reduce(1)) for layout in self._layouts}
        for source, layout, start in zip(self._entries_of(head), self._layouts, starts, strict=True):
            target = ref.at[pl.ds(start, n), pl.ds(0, source.shape[-1])]
            copy_vectors(source, at[layout], layout, target, self.interpret)

    def copy_later(self, head: Array, j: Array | int) -> None:
        """Starts to copy later chunk j to its stage."""
        first_entry = CHUNK + j * self.schedule.later_size
        self.copy(head, first_entry, self.later_chunk(lax.rem(j, self.schedule.stages)))

    def copy_ahead(self, exists: Array | bool, upcoming: Upcoming, fields: list[Array]) -> None:
        """Starts to copy the chunks that have shared memory of their own, of the item that was kept last."""
        schedule, head = self.schedule, upcoming.head
        live, folds = fields[LIVE], fields[FOLD_TO] >= 0
        if schedule.copies_first_chunk:

            @pl.when(jnp.asarray(exists))
            def _():
                self.copy(head, 0, self.first_chunk)

            end_copies(self.interpret)
        for i in range(schedule.stages):

            @pl.when(jnp.logical_and(exists, (live > CHUNK + i * schedule.later_size) | folds))
            def _(i=i):
                self.copy_later(head, i)

            end_copies(self.interpret)

    def _entries_of(self, head: Array):
        """The references to all keys and all updates of a head."""
        keys = self.arrays.keys.at[:, head // self.call.heads_per_key]
        return keys, self.arrays.updates.at[(slice(None), *self.place(head))]

    def _gather(self, head: Array, positions: list[Array]) -> list[tuple[Array, Array]]:
        """Loads the keys and updates at some positions; returns each with the positions."""
        refs = zip(self._entries_of(head), self._layouts, positions, strict=True)
        vectors = [gather_vectors(ref, at, layout, self.interpret) for ref, layout, at in refs]
        return list(zip(vectors, positions, strict=True))

    def gather_chunk(self, line: Array, head: Array, c: Array | int) -> list[tuple[Array, Array]]:
        """Loads chunk c of an item's entries, of CHUNK entries: keys and updates, each with its positions."""
        return self._gather(head, self._load_positions(line, c * CHUNK, CHUNK))

    def load_probes(self, columns) -> list[Array]:
        """Loads some columns of all probes from shared memory, as the right side of a product with the state."""
        probes = pl.ds(CHUNK, self.schedule.probe_columns)
        return [load(plane.at[probes, columns], STATE_RIGHT) for plane in self.planes]

    def load_inputs(self, upcoming: Upcoming, fields: list[Array]) -> Loaded:
        """Asks for all that an item needs of global memory, except its checkpoint and chunks that `copy` brings."""
        call, schedule, arrays = self.call, self.schedule, self.arrays
        head, row = upcoming.head, fields[ROW]
        if schedule.adds_on_tensor_cores or call.stacked > 1:  # Fewer loads share no counter; there it costs time.
            first = [] if schedule.copies_first_chunk else zip(upcoming.first_positions, self._layouts, strict=True)
            known = [(at, layout.reduce(1)) for at, layout in first]
            settle(known + [(at, PER_THREAD) for at in upcoming.all_positions], self.interpret)
        key_vector, value_vector = VECTORS[call.key_dim], VECTORS[call.value_dim]
        time, per_key = range(call.time), call.heads_per_key
        probes = [load(ref.at[row, t, head // per_key], key_vector) for ref in (arrays.k, arrays.q) for t in time]
        entries = [] if schedule.copies_first_chunk else self._gather(head, upcoming.first_positions)
        values = [load(arrays.v.at[(row, t, *self.place(head))], value_vector) for t in time]
        stack = range(call.stacked)
        tokens = [x.at[row, :, call.head(head, i)] for x in (arrays.log_decay, arrays.beta) for i in stack]
        tokens += [ref.at[upcoming.line] for ref in (arrays.append, arrays.paths) if ref is not None]
        starts = [ROW_FIELDS + i * call.time for i in range(len(tokens))]
        tokens = [self._load_words(ref, start, call.time) for ref, start in zip(tokens, starts, strict=True)]

        def gather(column):
            """A number of each entry."""
            return [gather_numbers(arrays.gates.at[:, column], at, self.interpret) for at in upcoming.all_positions]

        no_decays = [zeros((THREADS,), PER_THREAD)] * len(upcoming.all_positions)
        gates = [gather(call.log_decay(head, i)) if call.decay_width else [*no_decays] for i in stack]
        strengths = [] if call.delta else [gather(call.beta(head, i)) for i in stack]
        scales = []
        if arrays.low_scales is not None:  # A low half counts in a fold alone.
            checkpoint = jnp.where(fields[FOLD_TO] >= 0, fields[CHECKPOINT], 0)
            scales.append(load(arrays.low_scales.at[(checkpoint, *self.place(head))], value_vector))
        return Loaded(entries, scales, gates, strengths, probes, values, tokens)

    def _write(self, start: int, x: Array) -> None:
        """Writes a vector, or CHUNK of them, to `planes` from row `start` on."""
        length = x.shape[-1]
        for plane, half in enumerate(cut(x.astype(jnp.float32)) if self.schedule.planes == 2 else [x]):
            if x.ndim == 1:
                store(self.vectors.at[plane, start, pl.ds(0, length)], half)
            else:
                store(self.vectors.at[plane, pl.ds(start, CHUNK), pl.ds(0, length)], half)

    def write_chunk(self, chunk: list[tuple[Array, Array]]) -> None:
        """Writes a chunk from `gather_chunk` to the first chunk's shared memory; zeros where there is no entry."""
        _, *starts = self.first_chunk
        for (x, positions), layout, start in zip(chunk, self._layouts, starts, strict=True):
            self._write(start, select_positive(x, positions, layout, self.interpret))

    def admit(self, positions: list[Array], loaded: Loaded, fields: Array) -> tuple[list[Array], list[Array]]:
        """Writes an item's inputs to shared memory, and with them the words that are passed on.

        Args:
          positions: The item's `Upcoming.all_positions`.
          loaded: Its inputs.
          fields: `Upcoming.fields` of the item after it.

        Returns:
          The item's values; and its new keys, if shared memory has them as halves only, else an empty list.
        """
        call, schedule, word = self.call, self.schedule, self._word
        if not schedule.copies_first_chunk:
            self.write_chunk(loaded.entries)
        words = lax.bitcast_convert_type(fields, jnp.float32)
        for i, x in enumerate(loaded.tokens):
            x = lax.bitcast_convert_type(x, jnp.float32)
            words = jnp.where(word >= ROW_FIELDS + i * call.time, x, words)
        gates, strengths = (
            [[jnp.where(at > 0, x, ZERO) for x, at in zip(of_head, positions, strict=True)] for of_head in every]
            for every in (loaded.gates, loaded.strengths)
        )
        if schedule.reads_late:
            store(self._words, words)
        else:
            gates[0][-1] = jnp.where(word >= 0, words, gates[0][-1])
        kept = [(self.decays, gates)] if self.strengths is None else [(self.decays, gates), (self.strengths, strengths)]
        for ref, every in kept:
            for head, of_head in enumerate(every):
                for i, x in enumerate(of_head):
                    store(ref.at[head, pl.ds(i * THREADS, THREADS)], x)
        for x in loaded.low_scales:
            assert self.low_scales is not None
            store(self.low_scales, x)
        for i, x in enumerate(loaded.probes):
            self._write(CHUNK + i, x)
        if schedule.copies_first_chunk:
            wait_for_copies(schedule.stages, self.interpret)
        synchronize(self.interpret)
        return loaded.values, loaded.probes[: call.time] if schedule.planes == 2 else []
