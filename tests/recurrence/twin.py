"""A buffered memory beside the float64 states that it should hold, and what must be true of it after every call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.memory.ownership import NOWHERE, PoolExhausted
from jaxbuf.recurrence import buffered
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES, worst_row
from tests.recurrence.families import inputs as inputs_of

SLOTS, ROWS, TIME, PROMPT = 6, 4, 6, 26  # every launch has these shapes: compiling is what costs
LIMITS = (1, 5, 16, 16, 40, 40)  # recurrent, buffered, and two that stay KV-only for a while
SHARED = {"states": 5, "blocks": 20}  # fewer than six slots could use: they run out now and then

_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
prefill = _jit(buffered.prefill, static_argnums=0)
extend = _jit(buffered.extend, static_argnums=0, static_argnames=("implementation", "interpret"))
begin = _jit(buffered.begin, static_argnums=3)
commit, fork, reset, load = (_jit(call) for call in (buffered.commit, buffered.fork, buffered.reset, buffered.load))
fold = _jit(buffered.fold, static_argnums=0, static_argnames=("implementation", "interpret"))
read = _jit(buffered.read, static_argnums=0)
INTERPRETED = {"implementation": "tpu", "interpret": True}  # how `extend` and `fold` run by a TPU's kernel on a CPU
entries_of = _jit(lambda cursor: buffered.held(cursor, jnp.arange(cursor.length.shape[0])).entries)


def grow(spec, state, inputs, parents):
    """Outputs and states of every node of one row's tree: each continues from its parent's state alone."""
    outs, states = [], []
    for node, parent in enumerate(parents):
        token = [None if x is None else x[node : node + 1] for x in inputs]
        out, after, _ = definition.run(spec, state if parent < 0 else states[parent], *token)
        outs.append(out[0])
        states.append(after)
    return np.stack(outs), states


def path_to(parents, leaf):
    """Nodes from the root to the leaf."""
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def random_parents(rng, rows=ROWS, time=TIME):
    return np.stack([[rng.integers(-1, max(i, 0)) if i else -1 for i in range(time)] for _ in range(rows)]).astype("i4")


def first_rows(slots):
    """Each slot in its first row, 0 elsewhere: what a compiled call makes of slots that are repeated or don't exist."""
    found = np.zeros(len(slots), np.int32)
    for row, slot in enumerate(slots):
        if 0 < slot <= SLOTS and slot not in found:
            found[row] = slot
    return found


class Twin:
    """Memory and truth. Every method makes one call of the memory and checks all there is to check about it.

    Every call is compiled: slots may be there twice or not exist, and lengths may be out of range.
    """

    def __init__(self, family, rng, *, limits=LIMITS, state_dtype="float32", bounds=(1e-4, 1e-4), how=None, **sizes):
        """`bounds`: what outputs and states may differ by, as a part of their norm in a row. `how`: INTERPRETED, or
        None for XLA."""
        self.how = {} if how is None else how
        self.family, self.spec, self.rng = family, FAMILIES[family], rng
        self.out_bound, self.state_bound = bounds
        options = {"limit": np.array(limits), "max_pending": TIME, "entry_dtype": jnp.float32}
        options["state_dtype"] = state_dtype
        self.cache = buffered.init(self.spec, slots=SLOTS, **options, **sizes)
        self.states, self.tokens = np.zeros((SLOTS + 1, *self.spec.state_shape)), np.zeros(SLOTS + 1, int)

    def prefill(self, slots, lengths, keep):
        inputs = inputs_of(self.rng, self.family, ROWS, PROMPT)
        given, slots, keep = (slots, np.asarray(lengths, np.int32)), first_rows(slots), np.asarray(keep, np.int32)
        lengths = np.clip(given[1], 0, PROMPT)

        def call(cache):
            return prefill(self.spec, cache, *inputs, slots=given[0], lengths=given[1], keep=keep)

        before = np.asarray(self.cache.cursor.position)
        out, served = self._run(call, slots)
        real = np.where(slots > 0, lengths, 0)
        real = self._granted(np.asarray(self.cache.cursor.position - before)[slots], real, served)
        expected, after, _ = definition.run_batch(self.spec, self.states[slots], *inputs, real)
        self._take(out, expected)
        self.states[slots], self.tokens[slots] = after, self.tokens[slots] + real
        return self._verify()

    def extend(self, slots, lengths, parents=None, leaf=None, accepted=None):
        """A launch of a tree (None: a chain), and the first `accepted` nodes of each row's path to `leaf` committed.

        Both are cut to what the row has. None: random ones.
        """
        inputs = inputs_of(self.rng, self.family, ROWS, TIME)
        leaf = self.rng.integers(0, TIME, ROWS) if leaf is None else leaf
        wanted = self.rng.integers(0, TIME + 1, ROWS) if accepted is None else accepted
        given, slots = (slots, np.asarray(lengths, np.int32)), first_rows(slots)
        lengths = np.where(slots > 0, np.clip(given[1], 0, TIME), 0).astype(np.int32)
        chain = np.broadcast_to(np.arange(-1, TIME - 1, dtype=np.int32), (ROWS, TIME))

        def call(cache):
            return extend(self.spec, cache, *inputs, slots=given[0], lengths=given[1], parents=parents, **self.how)

        step, _ = begin(self.cache.cursor, *given, TIME)
        assert_apart(step, self.cache.pool.keys.shape[1])
        out, served = self._run(call, slots)
        lengths = self._granted(np.where(slots > 0, self.cache.cursor.pending[slots], 0), lengths, served)
        expected, accepted, paths = np.zeros(out.shape), np.zeros(ROWS, np.int32), np.zeros((ROWS, TIME), np.int32)
        for row, slot in enumerate(slots):
            of_row = [None if x is None else x[row] for x in inputs]
            nodes = (chain if parents is None else parents)[row]
            found, states = grow(self.spec, self.states[slot], of_row, nodes)
            expected[row, : lengths[row]] = found[: lengths[row]]
            if not lengths[row]:
                continue
            path = path_to(nodes, min(int(leaf[row]), int(lengths[row]) - 1))
            accepted[row] = min(int(wanted[row]), len(path))
            paths[row, : len(path)] = path
            if accepted[row]:
                self.states[slot] = states[path[accepted[row] - 1]]
        self._take(out, expected)
        self.tokens[slots] += accepted
        accepted = np.where(slots > 0, accepted, wanted).astype(np.int32)
        self.cache = commit(self.cache, accepted, slots=given[0], path=None if parents is None else paths)
        return self._verify()

    def fold(self, slots):
        self._run(lambda cache: (None, fold(self.spec, cache, slots=slots, **self.how)), first_rows(slots))
        return self._verify()

    def load(self, slots, tokens):
        state = self.rng.standard_normal((ROWS, *self.spec.state_shape)).astype(np.float32)
        given, slots, tokens = slots, first_rows(slots), np.asarray(tokens, np.int32)
        _, served = self._run(lambda cache: (None, load(cache, state, tokens, given)), slots, loads=True)
        if served:
            self.states[slots] = np.where((tokens > 0)[:, None, None, None], state, 0)
            self.tokens[slots] = np.maximum(tokens, 0)
        return self._verify()

    def reset(self, slots):
        given, slots = slots, first_rows(slots)
        self._run(lambda cache: (None, reset(cache, given)), slots)
        self.states[slots], self.tokens[slots] = 0, 0
        return self._verify()

    def fork(self, source, target):
        source, target = np.asarray(source, np.int32), np.asarray(target, np.int32)
        given = source, target
        target = first_rows(np.where((source > 0) & (source <= SLOTS) & (source != target), target, 0))
        _, served = self._run(lambda cache: (None, fork(cache, *given)), target)
        real = (target > 0) & served
        self.states[target[real]], self.tokens[target[real]] = self.states[source[real]], self.tokens[source[real]]
        return self._verify()

    def _granted(self, found, lengths, served):
        """The rows' lengths in a launch: what was asked, or 0 for a row that lacked something."""
        assert np.isin(found - lengths, (0, *-lengths)).all() and ((found == lengths) | (found == 0)).all()
        assert not served or (found == lengths).all()
        return found.astype(lengths.dtype)

    def contents(self):
        """The bits of everything that each slot has committed."""
        cursor, pool = self.cache.cursor, self.cache.pool
        entries, length, folded = (np.asarray(x) for x in (entries_of(cursor), cursor.length, cursor.folded))
        flat = [np.concatenate(np.asarray(x)) for x in (pool.keys, pool.updates, pool.gates)]
        stored = [x for x in (pool.checkpoints, pool.low, pool.low_scales) if x is not None]
        checkpoints = [np.asarray(x)[np.asarray(cursor.checkpoint_of)] for x in stored]
        return [
            [x[entries[slot, : length[slot]]].tobytes() for x in flat]
            + [x[slot].tobytes() if folded[slot] else b"" for x in checkpoints]
            for slot in range(SLOTS + 1)
        ]

    def _run(self, call, slots, *, loads=False):
        """One call: other slots keep every bit, and so does whatever has several owners. Whether it was served.

        A call that loads states empties its slots first: what only they own may be written.
        """
        before, others = self.cache, sorted({*range(SLOTS + 1)} - {*slots.tolist()})
        contents = self.contents()
        out, self.cache = call(self.cache)
        sharing = before.cursor.sharing
        served = True
        if sharing is not None:
            held = before.cursor.checkpoint_of, before.cursor.block_table
            states = [name for name in ("checkpoints", "low", "low_scales") if getattr(before.pool, name) is not None]
            pools = (sharing.states, held[0], states), (sharing.blocks, held[1], ["keys", "updates", "gates"])
            for owned, table, names in pools:
                several = np.flatnonzero(np.asarray(owned.owners) > 1)
                if loads:
                    several = np.intersect1d(several, np.asarray(table)[others])
                for name in names:
                    old, new = (np.asarray(getattr(c.pool, name))[several] for c in (before, self.cache))
                    assert old.tobytes() == new.tobytes(), f"{name} with several owners were written"
            now = self.cache.cursor.sharing
            served = not (int(now.states.lacking) or int(now.blocks.lacking))
        after = self.contents()
        for slot in others:
            assert slot == 0 or after[slot] == contents[slot], f"slot {slot} changed"
        return out, served

    def _take(self, out, expected):
        assert worst_row(out, expected) < self.out_bound

    def _verify(self):
        """States, positions, owners and free rows are what they should be. Frees a slot where rows ran out."""
        cursor, everyone = self.cache.cursor, np.arange(SLOTS + 1, dtype=np.int32)
        self.states[0], self.tokens[0] = 0, 0
        np.testing.assert_array_equal(cursor.position, self.tokens)
        assert worst_row(read(self.spec, self.cache, everyone), self.states) < self.state_bound
        order = np.sort(np.asarray(cursor.order), axis=1)
        np.testing.assert_array_equal(order, np.broadcast_to(np.arange(cursor.ring), order.shape))
        if cursor.sharing is None:
            return self
        for owned, held in ((cursor.sharing.states, cursor.checkpoint_of), (cursor.sharing.blocks, cursor.block_table)):
            assert_owned(owned, np.asarray(held)[1:])
        if int(cursor.sharing.states.lacking) or int(cursor.sharing.blocks.lacking):
            with pytest.raises(PoolExhausted, match=r"ran out: .* more needed, it has"):
                buffered.raise_exhausted(self.cache)
            self.reset(np.array([self.rng.choice(np.flatnonzero(self.tokens))], np.int32))
            buffered.raise_exhausted(self.cache)
        return self


def assert_owned(owned, held):
    """The counts are those of the tables, and the free stack has every other row once."""
    count = owned.owners.shape[0]
    expected = np.bincount(held[held > 0].ravel(), minlength=count)
    np.testing.assert_array_equal(owned.owners, expected)
    free = np.sort(np.asarray(owned.free)[: int(owned.left)])
    np.testing.assert_array_equal(free, np.flatnonzero(expected == 0)[1:])


def assert_apart(step, block_size):
    """No row writes what another reads in the same launch, or what it reads itself and does not fold in place."""
    before = step.before
    live = np.arange(before.entries.shape[1])[None] < np.asarray(before.live)[:, None]
    written = np.asarray(step.append)[np.asarray(step.append) < NOWHERE]
    assert (written >= block_size).all() and np.unique(written).size == written.size
    assert not np.isin(written, np.asarray(before.entries)[live]).any()
    for row in np.flatnonzero(np.asarray(step.folds)):
        others = np.asarray(before.has_checkpoint) & (np.arange(live.shape[0]) != row)
        assert step.write[row] > 0 and step.write[row] not in np.asarray(before.checkpoint)[others]
