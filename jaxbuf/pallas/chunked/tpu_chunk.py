"""A program of the TPU kernel of `chunked`: a chunk of a row, of a block of its heads."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.pallas.chunked.tpu_layout import LANES, Layout
from jaxbuf.pallas.chunked.tpu_parts import parts_of, product, products

# Columns of a row's integers: its tokens; of how many the state is returned; then where its blocks lie (see `tpu`).
LENGTH, CUT, ROW, FIRST_CHUNK, LAST_CHUNK, FIRST_BLOCK, LAST_BLOCK, FIRST_UPDATES, FIELDS = range(9)
# In place of a log_decay of -infinity: its exponential is 0 as well, and 0 times it is 0.
LEAST = np.float32(-1e30)
TILE = 16  # rows of a register's bfloat16 numbers; blocks of so many are solved by substitution
INCLUSIVE, AFTER = 0, 1  # of the matrices of ones: sums up to a token, and of all that is behind it


class Refs(NamedTuple):
    """What a program is given.

    Attributes:
      words: In scalar memory, FIELDS integers a row.
      inputs: Blocks of "q", "k", "v", "log_decay", "beta" and "state", as far as the call has them.
      out, state, updates: The outputs' blocks; updates: None if they are not returned.
      scratch: "ones"; "running" if the state that is returned is not the last; "gates", "since", "left" and "beta".
    """

    words: Any
    inputs: dict
    out: Any
    state: Any
    updates: Any
    scratch: dict


class Chunk:
    """A program.

    Attributes:
      layout, call, refs: What it was given.
      row, block, chunk: Of the launch.
    """

    def __init__(self, layout: Layout, refs: Refs):
        self.layout, self.call, self.refs = layout, layout.call, refs
        self.row, self.block, self.chunk = (pl.program_id(axis) for axis in range(3))
        self.running = refs.scratch.get("running", refs.state)

    def field(self, column: int):
        return self.refs.words[self.row * FIELDS + column]

    def run(self) -> None:
        layout, call, refs = self.layout, self.call, self.refs
        size = layout.chunk
        live = jnp.clip(self.field(LENGTH) - self.chunk * size, 0, size)
        cut = self.field(CUT) - self.chunk * size

        @pl.when(self.chunk == 0)
        def _():
            self.begin()

        if call.cut:

            @pl.when((self.chunk == 0) & (cut == 0))
            def _():
                refs.state[...] = self.running[...]

            # A chunk with the cut in it is solved in two parts, of which the second continues from the first.
            split = (cut > 0) & (cut < live)

            def part(i, _):
                end = jnp.where(split & (i == 0), cut, live)
                self.solve(jnp.where(i == 0, 0, cut), end)

                @pl.when(end == cut)
                def _():
                    refs.state[...] = self.running[...]

            lax.fori_loop(0, jnp.where(live == 0, 0, jnp.where(split, 2, 1)), part, None)
        else:

            @pl.when(live > 0)
            def _():
                self.solve(0, live)

        @pl.when(live == 0)
        def _():
            refs.out[...] = jnp.zeros(refs.out.shape, refs.out.dtype)
            if call.updates == call.time:
                refs.updates[...] = jnp.zeros(refs.updates.shape, jnp.float32)

    def begin(self) -> None:
        """What all chunks of a row need: the state that it starts from, and the matrices of ones."""
        refs = self.refs
        if self.call.has_state:
            self.running[...] = refs.inputs["state"][...]
        else:
            self.running[...] = jnp.zeros(self.running.shape, jnp.float32)
        ones = refs.scratch["ones"]
        t, s = self.places()
        ones[INCLUSIVE] = (s <= t).astype(ones.dtype)
        ones[AFTER] = (s > t).astype(ones.dtype)
        if self.call.decay == "channel":
            for level in range(self.layout.levels):
                # In a right half sums from its start to a token, in a left half of what is behind the token.
                same, right = t >> level == s >> level, t >> level & 1 == 1
                ones[2 + level] = (same & ((right & (s <= t)) | (~right & (s > t)))).astype(ones.dtype)

    def places(self):
        """Row and column of the numbers of a square matrix."""
        square = self.layout.chunk, self.layout.chunk
        return (lax.broadcasted_iota(jnp.int32, square, axis) for axis in range(2))

    def solve(self, start, end) -> None:
        """Outputs of the chunk's tokens from `start` to `end`, and the running state behind them."""
        layout, refs, call = self.layout, self.refs, self.call
        place = lax.broadcasted_iota(jnp.int32, (layout.chunk, 1), 0)
        alive = (place >= start) & (place < end)
        scratch = refs.scratch
        if "beta" in refs.inputs:
            scratch["beta"][...] = jnp.where(alive, refs.inputs["beta"][0], 0.0)
        if call.decay == "head":
            gates = jnp.where(alive, jnp.maximum(refs.inputs["log_decay"][0], LEAST), 0.0)
            scratch["gates"][...] = gates
            gates = parts_of(gates, layout.parts)
            for name, which in (("since", INCLUSIVE), ("left", AFTER)):
                scratch[name][...] = jnp.exp(product([scratch["ones"][which]], gates))

        def unit(i, _):
            unit_head = i * layout.unit
            place, width = self.place(unit_head, "v"), call.value_dim
            kept, first = ([], []), 0
            for head in range(0, layout.unit, layout.together):
                found = self.solve_heads(unit_head, range(head, head + layout.together), alive)
                for columns, more in zip(kept, found, strict=True):
                    columns += more
                count = len(kept[0])
                # Loads and stores are of whole vectors of 128 numbers, as far as there are.
                if count * width % LANES == 0 or head + layout.together == layout.unit:
                    for ref, columns in zip((refs.out, refs.updates), kept, strict=True):
                        if ref is not None:
                            self.store(ref, place, first, columns, start)
                    kept, first = ([], []), first + count * width

        count = layout.heads // layout.unit
        if count == 1:
            unit(0, None)
        else:
            lax.fori_loop(0, count, unit, None)

    def load(self, name: str, unit_head, head: int, alive):
        """The numbers of a unit's head, or of the key head that it reads, [tokens, width]; those of dead tokens are
        zeros."""
        width, group = self.call.widths[name]
        first, ref = head // group * width, self.refs.inputs[name]
        begin = first // LANES * LANES
        size = min(-(-(first + width) // LANES) * LANES, ref.shape[2]) - begin
        x = ref[0, :, pl.ds(self.place(unit_head, name) + begin, size)][:, first - begin : first - begin + width]
        return jnp.where(alive, x, jnp.zeros_like(x))

    def place(self, unit_head, name: str):
        """Where the numbers of a unit begin among those of a token. Units begin at multiples of 128 numbers; one of
        several in a group reads the group's key head."""
        width, group = self.call.widths[name]
        return unit_head if isinstance(unit_head, int) else pl.multiple_of(lax.div(unit_head, group) * width, LANES)

    def column(self, name: str, head):
        """A head's numbers of the block's gates, [tokens, 1]."""
        x = self.refs.scratch[name][...]
        at = lax.broadcasted_iota(jnp.int32, x.shape, 1) == self.block * self.layout.heads + head
        return jnp.sum(jnp.where(at, x, 0.0), axis=1, keepdims=True)

    def solve_heads(self, unit_head, heads: range, alive) -> tuple[list, list]:
        """`solve` of some heads, stage by stage for all of them: heads that wait for nothing fill the time in which
        one alone waits for its own last product. Returns the outputs and updates of each, [tokens, value_dim]."""
        call, parts = self.call, self.layout.parts
        group = call.heads_per_key

        def split(x):
            return parts_of(x, parts)

        # Key heads that several of the heads read are loaded and multiplied once.
        key_heads = sorted({head // group for head in heads})
        keys, queries = ({n: self.load(name, unit_head, n * group, alive) for n in key_heads} for name in ("k", "q"))
        values = [self.load("v", unit_head, head, alive).astype(jnp.float32) for head in heads]
        states = [self.running[0, unit_head + head] for head in heads]
        betas = None if not call.has_beta else [self.column("beta", unit_head + head) for head in heads]
        of_key = [head // group for head in heads]
        pairs = self.channel_pairs if call.decay == "channel" else self.head_pairs
        found = pairs(unit_head, heads, keys, queries, alive)
        read = [split(x) for x in states]
        probes = [[x.query, x.key] if call.delta else [x.query] for x in found]
        of_state = [products(x, state, 1) for x, state in zip(probes, read, strict=True)]
        of_state = [[y if x.factor is None else x.factor * y for y in z] for x, z in zip(found, of_state, strict=True)]
        if call.delta:
            systems = [x.overlap if betas is None else betas[n] * x.overlap for n, x in enumerate(found)]
            inverses = self.unit_lower_inverses(systems)
            values = [v - recalled for v, (_, recalled) in zip(values, of_state, strict=True)]
        updates = values if betas is None else [b * v for b, v in zip(betas, values, strict=True)]
        if call.delta:
            updates = [product(split(x), split(y)) for x, y in zip(inverses, updates, strict=True)]
        inside = [product(split(x.attend), split(u)) for x, u in zip(found, updates, strict=True)]
        added = []
        for x, n, u in zip(found, of_key, updates, strict=True):
            weighted = u if x.left is None else x.left * u
            added.append(product(split(weighted), split(keys[n]) if x.left_key is None else x.left_key, 0, 0))
        for n, (head, x) in enumerate(zip(heads, found, strict=True)):
            kept = states[n] if x.total is None else x.total * states[n]
            self.running[0, unit_head + head] = kept + added[n]
        return [x[0] + y for x, y in zip(of_state, inside, strict=True)], updates

    def store(self, ref, place, first: int, columns: list, start) -> None:
        """Stores heads' numbers, from number `first` of a unit's on, which is at a multiple of 128 numbers."""
        x = (columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)).astype(ref.dtype)
        lanes = pl.ds(place + first, x.shape[1])
        if self.call.cut:
            # What the chunk's first part has put there stays.
            token = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
            x = jnp.where(token >= start, x, ref[0, :, lanes])
        ref[0, :, lanes] = x

    # What a chunk's tokens are to one another

    def head_pairs(self, unit_head, heads: range, keys: dict, queries: dict, alive) -> list["Pairs"]:
        """Of a decay that is one number a head, or none."""
        call, parts, scratch = self.call, self.layout.parts, self.refs.scratch
        t, s = self.places()
        key, query = ({n: parts_of(x, parts) for n, x in each.items()} for each in (keys, queries))
        probes = {n: [query[n], key[n]] if call.delta else [query[n]] for n in key}
        matches = {n: products(probes[n], key[n], 1) for n in key}
        found = []
        for head in heads:
            n = head // call.heads_per_key
            factor = left = total = decay = None
            if call.decay == "head":
                # At (t, s) the sum over (s, t], of numbers of one sign: never a difference of two sums.
                gates = jnp.where(t > s, self.column("gates", unit_head + head), 0.0)
                decay = jnp.exp(product([scratch["ones"][INCLUSIVE]], parts_of(gates, parts)))
                factor, left = (self.column(name, unit_head + head) for name in ("since", "left"))
                total = factor[-1:, :]

            def weighted(x, on, decay=decay):
                return jnp.where(on, x if decay is None else decay * x, 0.0)

            attend, below = weighted(matches[n][0], s <= t), weighted(matches[n][1], s < t) if call.delta else None
            found.append(Pairs(attend, below, query[n], key[n], factor, left, None, total))
        return found

    def channel_pairs(self, unit_head, heads: range, keys: dict, queries: dict, alive) -> list["Pairs"]:
        """Of a decay a channel, by doubling, as `jaxbuf.recurrence.chunked` has it: from a token of a left half to one
        of the right half beside it, the decay is that to the boundary times that from the boundary."""
        call, layout, parts = self.call, self.layout, self.layout.parts
        size = layout.chunk
        t, s = self.places()
        ones = self.refs.scratch["ones"]
        ones = ones[...].reshape(ones.shape[0] * size, size)
        found = []
        for head in heads:
            n = head // call.heads_per_key
            gates = parts_of(jnp.maximum(self.load("log_decay", unit_head, head, alive), LEAST), parts)
            decays = jnp.exp(product([ones], gates))
            since, left, *decays = (decays[i * size : (i + 1) * size] for i in range(2 + layout.levels))
            key, query = keys[n].astype(jnp.float32), queries[n].astype(jnp.float32)
            own = jnp.sum(key * query, axis=1, keepdims=True)
            pairs = [jnp.where(t == s, own, 0.0), jnp.zeros(t.shape, jnp.float32)][: 1 + call.delta]
            for level, decay in enumerate(decays):
                on, halves = self.corners(level)
                probes = [parts_of(halves.right(decay * x), parts) for x in (query, key)[: 1 + call.delta]]
                corners = products(probes, parts_of(decay * key, parts), 1)
                pairs = [
                    halves.with_right(x, jnp.where(on, y, halves.right(x))) for x, y in zip(pairs, corners, strict=True)
                ]
            query, probe, kept = (parts_of(x, parts) for x in (since * query, since * key, left * key))
            found.append(Pairs(pairs[0], pairs[-1], query, probe, None, None, kept, since[-1:, :]))
        return found

    def corners(self, level: int):
        """Of blocks of 2**level tokens: in rows of right halves, which columns are in the left half beside them; and
        the halves. Smaller ones than a tile are not taken apart: their rows are all rows."""
        halves = Halves(1 << level)
        rows = self.layout.chunk // (2 if halves.apart else 1)
        row, s = (lax.broadcasted_iota(jnp.int32, (rows, self.layout.chunk), axis) for axis in range(2))
        if halves.apart:
            return s >> level == row >> level << 1, halves
        return (row >> level == (s >> level) + 1) & (s >> level & 1 == 0), halves

    def unit_lower_inverses(self, matrices: list) -> list:
        """The inverses of unit lower triangular matrices, whose numbers below the diagonal are given among zeros.

        By exact elimination, as `jaxbuf.recurrence.chunked.unit_lower_inverse` has it, which says why no series would
        do: blocks of TILE on the diagonal by forward substitution, and of blocks that double from there on the corner,
        -D^-1 C A^-1.
        """
        parts = self.layout.parts
        inverses = self.inverses_of_tiles(matrices)
        for level in range(TILE.bit_length() - 1, self.layout.levels):
            on, halves = self.corners(level)
            corners = [parts_of(jnp.where(on, halves.right(x), 0.0), parts) for x in matrices]
            cut = [parts_of(x, parts) for x in inverses]
            low = [parts_of(product(x, y), parts) for x, y in zip(corners, cut, strict=True)]
            low = [[halves.with_right(jnp.zeros((self.layout.chunk,) * 2, y.dtype), y) for y in x] for x in low]
            low = [product([halves.right(y) for y in x], z) for x, z in zip(cut, low, strict=True)]
            inverses = [halves.with_right(x, halves.right(x) - y) for x, y in zip(inverses, low, strict=True)]
        return inverses

    def inverses_of_tiles(self, matrices: list) -> list:
        """The inverses of matrices' blocks of TILE on the diagonal, all else 0, by forward substitution.

        All blocks at once, side by side in TILE rows. A row that is known is subtracted from those below it, times a
        number of each block: products with ones spread each number over its block's columns.
        """
        size, count = self.layout.chunk, self.layout.chunk // TILE
        t, s = self.places()
        same = t // TILE == s // TILE
        row, column = (lax.broadcasted_iota(jnp.int32, (TILE, size), axis) for axis in range(2))
        column = column % TILE
        found = []
        for x in matrices:
            x = jnp.where(same, x, 0.0)
            x = functools.reduce(jnp.add, [x[i * TILE : (i + 1) * TILE] for i in range(count)])
            spread = jnp.concatenate([jnp.where(column == j, x, 0.0) for j in range(TILE - 1)], axis=0)
            spread = product(parts_of(spread, self.layout.parts), [same.astype(jnp.bfloat16)])
            found.append((jnp.where(row == column, 1.0, 0.0), spread))
        solved = [x for x, _ in found]
        for j in range(TILE - 1):
            rows = slice(j * TILE, (j + 1) * TILE)
            solved = [x - of_row[rows] * x[j : j + 1] for x, (_, of_row) in zip(solved, found, strict=True)]
        return [jnp.where(same, jnp.concatenate([x] * count, axis=0), 0.0) for x in solved]


class Halves(NamedTuple):
    """The right halves of the blocks of 2 width rows of a matrix.

    Attributes:
      width: Rows of a half.
    """

    width: int

    @property
    def apart(self) -> bool:
        """Whether halves are whole tiles, which cost nothing to take apart."""
        return self.width % TILE == 0

    def right(self, x):
        """Those rows, one half below the other; all rows if halves are no tiles."""
        return jnp.concatenate(self._halves(x)[1::2], axis=0) if self.apart else x

    def with_right(self, x, right):
        """x with other rows in place of those."""
        if not self.apart:
            return right
        halves = self._halves(x)
        for i in range(len(halves) // 2):
            halves[2 * i + 1] = right[i * self.width : (i + 1) * self.width]
        return jnp.concatenate(halves, axis=0)

    def _halves(self, x) -> list:
        return [x[i : i + self.width] for i in range(0, x.shape[0], self.width)]


class Pairs(NamedTuple):
    """What a chunk's tokens are to one another, of a head, and to the state that the chunk starts from.

    Attributes:
      attend: At (t, s) the product of query t and key s across the decay between them; 0 for s > t.
      overlap: Likewise of keys, 0 for s >= t; None without the delta rule.
      query, key: In parts, with the decay since the chunk's start where that is one a channel.
      factor: That decay where it is one number a head, [tokens, 1]; None otherwise.
      left: The decay up to the chunk's end, likewise.
      left_key: Keys with the decay up to the chunk's end, where that is one a channel.
      total: The whole chunk's decay, [1, 1] or [1, key_dim]; None without one.
    """

    attend: Any
    overlap: Any
    query: list
    key: list
    factor: Any
    left: Any
    left_key: list | None
    total: Any
