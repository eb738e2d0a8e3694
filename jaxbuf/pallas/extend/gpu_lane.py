"""A lane of `extend` on a GPU: a warpgroup, its shared memory, and how what its items need comes there.

Little is waited for where it is asked for. Where an item's entries lie is asked two items ahead, its inputs one; they
are registers until `keep` and `admit` write them to shared memory. Chunks of entries that have memory of their own
beside the item's go there past the registers; a checkpoint too, half after half.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.gpu_products import STATE_RIGHT, VECTORS, ZERO, count, cut
from jaxbuf.pallas.extend.gpu_shape import (
    CHECKPOINT,
    CHUNK,
    FOLD_TO,
    FOLDING,
    HAS_CHECKPOINT,
    LIVE,
    ROW,
    TILE,
    Shape,
)
from jaxbuf.pallas.lanes import (
    EVERY,
    THREADS,
    copy_vectors,
    end_copies,
    gather_numbers,
    gather_vectors,
    load,
    select_positive,
    settle,
    synchronize,
    vectors_layout,
    wait_for_copies,
)

type Array = jax.Array

FOLD_COST = 2  # of an item that folds, in items that do not


class Arrays(NamedTuple):
    """The kernel's references to global memory, in the order of its arguments."""

    numbers: jax.Ref
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


class Place(NamedTuple):
    """An item, two ahead: whether there is one, its row's place in the launch and its head, the fields of the row, each
    in a thread, and positions of its entries: of the first chunk's, if they go through registers, for the threads that
    ask for their vectors; and of all, one a thread."""

    there: Array
    place: Array
    head: Array
    fields: Array
    positions: list[Array]
    every: list[Array]


class Item(NamedTuple):
    """An item that is served: a head of a row, and what the row's fields say."""

    place: Array
    head: Array
    row: Array
    length: Array
    live: Array
    has_checkpoint: Array
    folds: Array
    fold_to: Array

    @property
    def holds(self) -> Array:
        """Whether there is a checkpoint, or will be one."""
        return self.has_checkpoint | self.folds


def read_item(place: Array, head: Array, fields: list[Array]) -> Item:
    row, length, live, _, has_checkpoint, fold_to = fields
    return Item(place, head, row, length, live, has_checkpoint > 0, fold_to >= 0, fold_to)


class Lane:
    """A warpgroup.

    Attributes:
      arrays: Of global memory.
      number: Which of all lanes it is.
      rows: The first chunk's keys, whose place weights may take; the item's new keys and queries; the chunk's updates.
      sums, lows: Of each entry the gate, then the decay since or its factor; see `Shape.scratch`.
      products: Of pairs with the entries of a chunk, and with each other.
      reads: Of the state with pairs; before, what entries add to outputs, if that is of products.
      first: Where the first chunk is: its references, the first row of its keys and that of its updates.
    """

    def __init__(self, shape: Shape, interpret: bool, arrays: Arrays, scratch: dict):
        slot = lax.axis_index("warpgroup")
        self.shape, self.interpret, self.arrays = shape, interpret, arrays
        self.number = slot * shape.blocks + lax.axis_index("block")
        self.rows, self.sums, self.products, self.reads, self._state = (
            scratch[name].at[slot] for name in ("rows", "sums", "products", "reads", "state")
        )
        self._barriers, self._first_barrier = scratch["barriers"], slot * len(shape.halves)
        self._later, self._positions = (
            scratch[name].at[slot] if shape.stages else None for name in ("later", "positions")
        )
        self.lows = scratch["lows"].at[slot] if shape.exact else None
        self.planes = [self.rows.at[i] for i in range(shape.planes)]
        self.first = self.planes, 0, CHUNK + shape.pairs
        self._layouts = vectors_layout(shape.key_dim, shape.entry), vectors_layout(shape.value_dim, shape.entry)
        # Scalars of the next items are loaded as vectors and read from shared memory when they are used: one loaded as
        # a scalar would be waited for where it is loaded.
        self._word = count((THREADS,), 0, EVERY) - (THREADS - shape.passed)

    def half(self, i: Array | int):
        """A half of a checkpoint: its rows, where it comes, and what tells that it came."""
        rows = pl.ds(i * TILE, TILE)
        return rows, self._state.at[i], self._barriers.at[self._first_barrier + i]

    def each_half(self, function) -> None:
        """Calls a function with the number of each half: in a loop, where instructions for each would be many."""
        halves = range(len(self.shape.halves))
        if self.shape.frugal:
            for i in halves:
                function(i)
        else:
            lax.fori_loop(0, len(halves), lambda i, _: function(i), None)

    def deal(self, turn: Array | int, folding: Array) -> Array:
        """The item that this lane serves in a turn, of which so many fold; past `items` if there is none.

        Items that fold come first, and as if each took FOLD_COST rounds. The first turn's is the lane's number.
        """
        lanes = self.shape.lanes
        rounds, late = folding // lanes, lax.rem(folding, lanes)
        other = turn - rounds - (self.number < late).astype(jnp.int32)  # without those of this lane that fold
        spare = jnp.where(self.number < late, 0, FOLD_COST)  # rounds in which it is among the few that deal with others
        early = other * (lanes - late) + self.number - late
        rest = FOLD_COST * (lanes - late) + (other - spare) * lanes + self.number
        others = folding + jnp.where(other < spare, early, rest)
        return jnp.where(other < 0, turn * lanes + self.number, others)

    def later(self, stage: Array | int):
        """Where a later chunk with memory of its own is: as `first`."""
        start = 2 * self.shape.wide * stage
        return [self._later], start, start + self.shape.wide

    def _load_words(self, ref, start: int, length: int) -> Array:
        """The numbers of a reference [length], each in the thread that passes on the word start + its index."""
        return gather_numbers(ref, jnp.clip(self._word - start, 0, length - 1), self.interpret)

    def read_words(self, start: int, length: int, dtype) -> list[Array]:
        """Words that `admit` passed on: fields of the next item's row, then gates, betas and places of the tokens."""
        start += self.shape.columns - self.shape.passed
        return [lax.bitcast_convert_type(self.sums[start + i], dtype) for i in range(length)]

    def _load_positions(self, place: Array, start: Array | int, length: int) -> list[Array]:
        """Where keys and updates of an item's entries lie, for the threads that ask for them."""
        here = self.arrays.entries.at[place, pl.ds(start, length)]
        return [load(here, layout.reduce(1)) for layout in self._layouts]

    def keep(self, place: Place) -> None:
        """Puts positions of an item's entries into shared memory: for `copy`, when the threads have met."""
        assert self._positions is not None
        for i, x in enumerate(place.every):
            self._positions[pl.ds(i * THREADS, THREADS)] = x

    def locate(self, item: Array) -> Place:
        """Asks for what is needed to ask for an item's inputs."""
        shape, arrays = self.shape, self.arrays
        place = jnp.minimum(item, shape.items - 1) // shape.heads
        positions = [] if shape.ahead else self._load_positions(place, 0, CHUNK)
        every = [load(arrays.entries.at[place, pl.ds(i, THREADS)], EVERY) for i in range(0, shape.columns, THREADS)]
        fields = self._load_words(arrays.numbers.at[place], 0, FOLDING)
        return Place(item < shape.items, place, lax.rem(item, shape.heads), fields, positions, every)

    def fetch(self, i: int, head: Array, fields: list[Array]) -> None:
        """Asks for half i of a checkpoint, if there is one."""

        @pl.when(fields[HAS_CHECKPOINT] > 0)
        def _():
            rows, state, barrier = self.half(i)
            plgpu.copy_gmem_to_smem(self.arrays.checkpoints.at[fields[CHECKPOINT], head, rows], state, barrier)

    def copy(self, head: Array, entry: Array | int, there) -> None:
        """Starts to copy a chunk, from `entry` on, to shared memory, with zeros where there is no entry.

        The entries are those of the item that was kept last.
        """
        (ref,), *starts = there
        n = CHUNK if there is self.first else self.shape.wide
        assert self._positions is not None
        # Read once, if the same threads copy keys and updates.
        at = {layout: load(self._positions.at[pl.ds(entry, n)], layout.reduce(1)) for layout in self._layouts}
        for source, layout, start in zip(self._entries_of(head), self._layouts, starts, strict=True):
            target = ref.at[pl.ds(start, n), pl.ds(0, source.shape[-1])]
            copy_vectors(source, at[layout], layout, target, self.interpret)

    def copy_later(self, head: Array, j: Array | int) -> None:
        """Starts to copy a later chunk to its stage."""
        self.copy(head, CHUNK + j * self.shape.wide, self.later(lax.rem(j, self.shape.stages)))

    def copy_ahead(self, there: Array | bool, place: Place, fields: list[Array]) -> None:
        """Starts to copy what has shared memory of its own of an item's entries; it was kept last."""
        shape, head = self.shape, place.head
        live, folds = fields[LIVE], fields[FOLD_TO] >= 0
        if shape.ahead:

            @pl.when(jnp.asarray(there))
            def _():
                self.copy(head, 0, self.first)

            end_copies(self.interpret)
        for i in range(shape.stages):

            @pl.when(jnp.logical_and(there, (live > CHUNK + i * shape.wide) | folds))
            def _(i=i):
                self.copy_later(head, i)

            end_copies(self.interpret)

    def _entries_of(self, head: Array):
        return self.arrays.keys.at[:, head // self.shape.group], self.arrays.updates.at[:, head]

    def _gather(self, head: Array, positions: list[Array]) -> list[tuple[Array, Array]]:
        """Keys and updates at the positions."""
        refs = zip(self._entries_of(head), self._layouts, positions, strict=True)
        vectors = [gather_vectors(ref, at, layout, self.interpret) for ref, layout, at in refs]
        return list(zip(vectors, positions, strict=True))

    def gather_chunk(self, place: Array, head: Array, c: Array | int) -> list[tuple[Array, Array]]:
        """Keys and updates of chunk c of an item's entries, and where they lie."""
        return self._gather(head, self._load_positions(place, c * CHUNK, CHUNK))

    def load_pairs(self, columns) -> list[Array]:
        """New keys and queries, some columns, as a right side of a product with the state."""
        return [load(x.at[pl.ds(CHUNK, self.shape.width), columns], STATE_RIGHT) for x in self.planes]

    def load_inputs(self, place: Place, fields: list[Array]):
        """All that an item needs of global memory besides its checkpoint."""
        shape, arrays, head, row = self.shape, self.arrays, place.head, fields[ROW]
        if shape.multiplies:  # on short rings it gains nothing
            first = [(at, layout.reduce(1)) for at, layout in zip(place.positions, self._layouts, strict=True)]
            settle(first + [(at, EVERY) for at in place.every], self.interpret)
        key_vector, value_vector = VECTORS[shape.key_dim], VECTORS[shape.value_dim]
        time = range(shape.time)
        new = [load(ref.at[row, t, head // shape.group], key_vector) for ref in (arrays.k, arrays.q) for t in time]
        found = [] if shape.ahead else self._gather(head, place.positions)
        values = [load(arrays.v.at[row, t, head], value_vector) for t in time]
        tokens = arrays.log_decay.at[row, :, head], arrays.beta.at[row, :, head], arrays.append.at[place.place]
        starts = [FOLDING + i * shape.time for i in range(len(tokens))]
        tokens = [self._load_words(ref, start, shape.time) for ref, start in zip(tokens, starts, strict=True)]
        gates = [gather_numbers(arrays.gates.at[:, head], at, self.interpret) for at in place.every]
        return found, gates, new, values, tokens

    def _write(self, start: int, x: Array) -> None:
        """Writes vectors, or one, to `rows`, as halves."""
        length = x.shape[-1]
        for plane, half in enumerate(cut(x.astype(jnp.float32)) if self.shape.planes == 2 else [x]):
            if x.ndim == 1:
                self.rows[plane, start, pl.ds(0, length)] = half
            else:
                self.rows[plane, pl.ds(start, CHUNK), pl.ds(0, length)] = half

    def stage(self, found: list[tuple[Array, Array]]) -> None:
        """Writes a chunk's keys and updates to the place of the first."""
        _, *starts = self.first
        for (x, positions), layout, start in zip(found, self._layouts, starts, strict=True):
            self._write(start, select_positive(x, positions, layout, self.interpret))

    def admit(self, every: list[Array], loaded, fields: Array) -> tuple[list[Array], list[Array]]:
        """Puts an item's inputs into shared memory, and with them the fields of the item after it.

        Returns:
          Its values; and its new keys, where shared memory does not have them as they came.
        """
        shape, word = self.shape, self._word
        found, gates, new, values, tokens = loaded
        if not shape.ahead:
            self.stage(found)
        words = lax.bitcast_convert_type(fields, jnp.float32)
        for i, x in enumerate(tokens):
            x = lax.bitcast_convert_type(x, jnp.float32)
            words = jnp.where(word >= FOLDING + i * shape.time, x, words)
        gates = [jnp.where(at > 0, gate, ZERO) for gate, at in zip(gates, every, strict=True)]
        gates[-1] = jnp.where(word >= 0, words, gates[-1])
        for i, x in enumerate(gates):
            self.sums[pl.ds(i * THREADS, THREADS)] = x
        for i, x in enumerate(new):
            self._write(CHUNK + i, x)
        if shape.ahead:
            wait_for_copies(shape.stages, self.interpret)
        synchronize(self.interpret)
        return values, new[: shape.time] if shape.planes == 2 else []
