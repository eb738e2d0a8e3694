"""The memory of write-gated attention: random schedules against a definition in float64, and who owns which page."""

import dataclasses
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from jaxbuf.attention import gated
from jaxbuf.pallas.attend import tpu_call
from jaxbuf.pallas.attend_gated import tpu_arrange
from tests.pallas.attending import EARLY, LATE

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SLOTS, CHUNK = 4, 23
EVERY = np.arange(1, SLOTS + 1, dtype=np.int32)
TOLERANCE = 1e-5


@dataclasses.dataclass
class Token:
    """What one token brings: arrays [heads, head_dim] and gates [kv_heads]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gate: np.ndarray


def draw_token(rng):
    q, k, v = (rng.standard_normal((heads, HEAD_DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return Token(2 * q, k, v, rng.uniform(size=KV_HEADS).astype(np.float32))


def definition(before, token, window, keeps):
    """What the token gives after the tokens `before` it, in float64; keeps(j, other, head): whether it sees the other
    token, number j, from behind the window."""
    text, out = [*before, token], np.zeros((HEADS, HEAD_DIM))
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        seen = [other for j, other in enumerate(text) if len(before) - j < window or keeps(j, other, of)]
        scores = np.array([other.k[of].astype(np.float64) @ token.q[head] for other in seen]) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        out[head] = weights @ np.array([other.v[of] for other in seen], np.float64) / weights.sum()
    return out


def stacked(rows, time):
    """q, k, v and gates [rows, time, ...] of lists of tokens, NaN behind them."""
    shapes = {"q": (HEADS, HEAD_DIM), "k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, HEAD_DIM), "gate": (KV_HEADS,)}
    arrays = {name: np.full((len(rows), time, *shape), np.nan, np.float32) for name, shape in shapes.items()}
    for row, tokens in enumerate(rows):
        for i, token in enumerate(tokens):
            for name, array in arrays.items():
                array[row, i] = getattr(token, name)
    return tuple(arrays.values())


class Schedule:
    """A memory, and beside it the text of every slot."""

    def __init__(self, rng, *, window, threshold, page_size, pages=400, max_pending=5, **how):
        sizes = {"slots": SLOTS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_pending": max_pending}
        self.cache = gated.init(**sizes, window=window, pages=pages, page_size=page_size, dtype=jnp.float32, **how)
        self.rng, self.window, self.max_pending = rng, window, max_pending
        self.threshold = np.broadcast_to(np.asarray(threshold, np.float32), (SLOTS,)).copy()
        self.text = {slot: [] for slot in EVERY}
        self.pending = {slot: [] for slot in EVERY}  # the path to each pending token
        self.rested, self.lacking = 0, None
        self.by = {}  # what computes launches that commit nothing
        self.check()

    def launch(self, lengths, time, parents=None, *, commits):
        """Launches on all slots in a random order; returns which were served."""
        order = self.rng.permutation(SLOTS)
        slots = EVERY[order]
        rows = [[draw_token(self.rng) for _ in range(lengths[slot - 1])] for slot in slots]
        given = {"slots": slots, "lengths": lengths[order], "threshold": self.threshold[order]}
        if commits:
            out, cache = gated.prefill(self.cache, *stacked(rows, time), **given)
        else:
            tree = None if parents is None else parents[order]
            out, cache = gated.extend(self.cache, *stacked(rows, time), **given, parents=tree, **self.by)
        missing, before, self.cache = np.asarray(cache.missing), self.cache, cache
        for row, slot in enumerate(slots):
            tokens, paths = rows[row], []
            self.pending[slot] = []
            if missing[slot]:
                assert not np.asarray(out[row]).any()
                self.rested, self.lacking = self.rested + 1, cache
                continue
            self.begin(slot, len(tokens))
            for i, token in enumerate(tokens):
                parent = i - 1 if parents is None else int(parents[slot - 1, i])
                path = paths[parent] if parent >= 0 else []
                expected = definition(self.text[slot] + path, token, self.window, partial(self.keeps, slot))
                np.testing.assert_allclose(out[row, i], expected, atol=TOLERANCE)
                paths.append([*path, token])
            assert not np.asarray(out[row, len(tokens) :]).any()
            if commits:
                self.text[slot] = self.text[slot] + tokens
                self.end(slot, len(tokens))
            else:
                self.pending[slot] = paths
        self.check()
        return before

    def begin(self, slot, length):
        """Called before the outputs of a row that was served are looked at."""

    def end(self, slot, length):
        """Called when its tokens are committed."""

    def keeps(self, slot, j, token, head):
        return token.gate[head] >= self.threshold[slot - 1]

    def prefill(self):
        lengths = self.rng.integers(0, CHUNK + 1, SLOTS).astype(np.int32)
        self.launch(lengths, CHUNK, commits=True)

    def extend(self, time, *, tree=False):
        lengths = self.rng.integers(0, time + 1, SLOTS).astype(np.int32)
        parents = None
        if tree:
            parents = np.stack([self.rng.integers(-1, np.arange(time), size=(time,)) for _ in EVERY]).astype(np.int32)
        self.launch(lengths, time, parents, commits=False)
        accepted, path = np.zeros(SLOTS, np.int32), np.zeros((SLOTS, self.max_pending), np.int32)
        for slot in EVERY:
            paths = self.pending[slot]
            if paths and self.rng.uniform() < 0.9:
                chosen = int(self.rng.integers(len(paths)))
                nodes, node = [], chosen
                while node >= 0:
                    nodes.append(node)
                    node = node - 1 if parents is None else int(parents[slot - 1, node])
                nodes.reverse()
                accepted[slot - 1] = len(nodes)
                path[slot - 1, : len(nodes)] = nodes
                self.text[slot] = self.text[slot] + paths[chosen]
            self.pending[slot] = []
        self.cache = gated.commit(self.cache, accepted, slots=EVERY, path=path if tree else None)
        self.check()

    def rollback(self):
        fewest = np.asarray(gated._KIND.fewest_tokens(self.cache.shared, EVERY, alone=True))
        held = np.array([len(self.text[slot]) for slot in EVERY])
        frontier = np.asarray(self.cache.shared.frontier)[1:]
        assert (frontier <= np.maximum(held - self.window + 1, 0)).all()
        most = np.minimum(np.maximum(held - fewest, 0), self.max_pending)
        count = self.rng.integers(0, most + 1).astype(np.int32)
        self.cache = gated.rollback(self.cache, count, slots=EVERY)
        back = np.array([self.rng.integers(0, n + 1) for n in count], np.int32)
        self.cache = gated.commit(self.cache, back, slots=EVERY)  # some of them are right after all
        for slot in EVERY:
            self.text[slot] = self.text[slot][: held[slot - 1] - count[slot - 1] + back[slot - 1]]
        self.check()

    def fork(self):
        """A permutation at random, in which one slot may be the source of several."""
        source, target = self.rng.integers(1, SLOTS + 1, SLOTS).astype(np.int32), self.rng.permutation(EVERY)
        chosen = self.rng.uniform(size=SLOTS) < 0.6
        target = np.where(chosen, target, 0)
        self.cache = gated.fork(self.cache, source, target)
        copied = target[(target > 0) & (target != source)]
        if not np.asarray(self.cache.missing)[copied].any():  # other slots' are of their last launch
            texts, threshold = dict(self.text), self.threshold.copy()
            for row, slot in enumerate(target):
                if slot and slot != source[row]:
                    self.text[slot] = list(texts[source[row]])
                    self.threshold[slot - 1] = threshold[source[row] - 1]
        self.check()
        return source, target

    def reset(self):
        slot = int(self.rng.integers(1, SLOTS + 1))
        self.cache = gated.reset(self.cache, np.array([slot], np.int32))
        self.text[slot] = []
        self.check()
        return slot

    def check(self):
        """Every page has as many owners as name it, and what nobody owns holds NaN."""
        shared, layer = self.cache.shared, self.cache.layer
        used = -(-np.asarray(layer.counts) // layer.page_size)
        lists = np.where(np.arange(layer.lists.shape[2]) < used[..., None], layer.lists, 0)
        admitted = self.admitted(used, lists)
        for owners, table in ((shared.owners, shared.table), (admitted, lists)):
            counts = np.bincount(np.asarray(table).ravel(), minlength=owners.owners.shape[0])
            counts[0] = 0
            np.testing.assert_array_equal(owners.owners, counts)
            free = np.asarray(owners.free)[: int(owners.left)]
            assert sorted(free) == sorted(np.flatnonzero(counts[1:] == 0) + 1)
        committed = np.asarray(self.cache.sequences.committed)
        assert [len(self.text[slot]) for slot in EVERY] == list(committed[1:])
        position, frontier = np.asarray(shared.position), np.asarray(shared.frontier)
        for slot in EVERY:
            live = position[slot][(position[slot] >= frontier[slot]) & (position[slot] < committed[slot])]
            assert sorted(live) == list(range(frontier[slot], committed[slot]))
        self.cache = dataclasses.replace(self.cache, layer=poisoned(layer, shared.owners, admitted))

    def admitted(self, used, lists):
        """The owners of the pages of admitted keys."""
        np.testing.assert_array_equal(self.cache.shared.owned[0], used)
        return jax.tree.map(lambda x: x[0], self.cache.shared.admitted)


class BudgetSchedule(Schedule):
    """With pages of its own for each slot, and beside it what its lists must hold: numbers of tokens."""

    def __init__(self, rng, **given):
        empty = [[] for _ in range(KV_HEADS)]
        self.lists = {slot: empty for slot in EVERY}
        self.frontier, self.floor = dict.fromkeys(EVERY, 0), dict.fromkeys(EVERY, np.float32(0))
        self.dropped = 0
        super().__init__(rng, **given)

    def limit(self, slot):
        """The threshold of the slot's launch."""
        given = self.threshold[slot - 1]
        return max(given, self.floor[slot]) if self.cache.shared.when_full == "raise" else given

    def append(self, slot, numbers):
        """Tokens of these numbers leave the local pages."""
        text, limit = self.text[slot], self.limits[slot]
        lists = [
            [*held, *(j for j in numbers if text[j].gate[head] >= limit)] for head, held in enumerate(self.lists[slot])
        ]
        size, budget = self.cache.layer.page_size, self.cache.layer.budget.pages

        def pages():
            return sum(-(-len(held) // size) for held in lists)

        if pages() > budget:
            while pages() > budget - budget // 16:
                gate, head, j = min((text[j].gate[head], head, j) for head in range(KV_HEADS) for j in lists[head])
                lists[head].remove(j)
                self.dropped += 1
            kept = [text[j].gate[head] for head in range(KV_HEADS) for j in lists[head]]
            floor = min(kept, default=np.nextafter(gate, np.float32(np.inf)))
            self.floor[slot] = max(self.floor[slot], floor)
        self.lists[slot] = lists

    def begin(self, slot, length):
        if not length:
            return
        self.limits = {slot: self.limit(slot)}
        before, start = self.frontier[slot], len(self.text[slot])
        self.frontier[slot] = max(before, start - self.max_pending - self.window + 1)
        self.append(slot, range(before, self.frontier[slot]))

    def end(self, slot, length):
        if not length:
            return
        before, start = self.frontier[slot], len(self.text[slot]) - length
        end = self.frontier[slot] = max(before, start + length - self.max_pending - self.window + 1)
        self.append(slot, range(before, min(end, start)))
        self.append(slot, range(max(before, start), end))

    def keeps(self, slot, j, token, head):
        if j < self.frontier[slot]:
            return j in self.lists[slot][head]
        return token.gate[head] >= self.limits[slot]

    def fork(self):
        held = self.lists, self.frontier, self.floor
        source, target = super().fork()
        self.lists, self.frontier, self.floor = (
            {slot: given[by] for slot, by in zip(EVERY, moved(source, target), strict=True)} for given in held
        )

    def reset(self):
        slot = super().reset()
        self.lists[slot], self.frontier[slot], self.floor[slot] = [[] for _ in range(KV_HEADS)], 0, np.float32(0)

    def admitted(self, used, lists):
        layer, shared = self.cache.layer, self.cache.shared
        budget = layer.budget.pages
        for slot in EVERY:
            own = lists[slot][lists[slot] > 0]
            assert len(set(own)) == len(own) == used[slot].sum() <= budget
            assert ((own - 1) // budget == slot - 1).all()
        counts = np.bincount(lists.ravel(), minlength=1 + SLOTS * budget)
        counts[0] = 0
        free = np.flatnonzero(counts[1:] == 0) + 1
        admitted = jax.tree.map(lambda x: x[0], shared.admitted)
        return dataclasses.replace(
            admitted,
            owners=jnp.asarray(counts, jnp.int32),
            free=jnp.pad(jnp.asarray(free, jnp.int32), (0, len(counts) - len(free))),
            left=jnp.asarray(len(free), jnp.int32),
        )


def moved(source, target):
    """Whose text each slot has after a fork, in the order of the slots."""
    by = {int(slot): int(slot) for slot in EVERY}
    return (by | {int(slot): int(source[row]) for row, slot in enumerate(target) if slot}).values()


@jax.jit
def poisoned(layer, local, admitted):
    def of(pool, owners):
        free = (owners.owners == 0).reshape(-1, *(1,) * (pool.ndim - 1))
        return jnp.where(free, jnp.nan, pool)

    changed = {name: of(getattr(layer, name), local) for name in ("keys", "values", "gates")}
    for name in ("admitted_keys", "admitted_values", "admitted_gates"):
        changed[name] = of(getattr(layer, name), admitted)
    return dataclasses.replace(layer, **changed)


CASES = [
    # window, threshold of each slot, page size, pages
    (6, [0.0, 1.5, 0.3, 0.7], 4, 400),
    pytest.param(30, 0.4, 8, 400, marks=pytest.mark.exhaustive),
    pytest.param(1, [0.5, 0.2, 0.8, 0.5], 4, 400, marks=pytest.mark.exhaustive),
    pytest.param(300, 0.5, 16, 400, marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
def test_launches_of_many_tokens(rng):
    schedule = Schedule(rng, window=20, threshold=[0.0, 1.5, 0.3, 0.7], page_size=8, max_pending=16)
    play(schedule, rng, 10)


@pytest.mark.slow
@pytest.mark.parametrize("when_full", [pytest.param("evict", marks=pytest.mark.exhaustive), "raise"])
def test_keys_of_the_lowest_gates_leave_full_pages(rng, when_full):
    how = {"window": 6, "page_size": 4, "pages": 4 * 18, "when_full": when_full, "max_pending": 4}
    schedule = BudgetSchedule(rng, threshold=[0.1, 0.3, 0.0, 0.6], **how)
    for _ in range(20):
        play(schedule, rng, 8)
        if schedule.dropped > 50:
            break
    assert schedule.dropped > 50
    assert not schedule.rested
    layer = schedule.cache.layer
    np.testing.assert_array_equal(layer.counts[1:], [[len(held) for held in schedule.lists[slot]] for slot in EVERY])
    np.testing.assert_array_equal(layer.budget.floor[1:], [schedule.floor[slot] for slot in EVERY])


@pytest.mark.slow
@pytest.mark.parametrize(("window", "threshold", "page_size", "pages"), CASES)
def test_random_schedules_give_what_the_definition_gives(rng, window, threshold, page_size, pages):
    schedule = Schedule(rng, window=window, threshold=threshold, page_size=page_size, pages=pages)
    play(schedule, rng, 18)
    assert not schedule.rested


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(LATE, marks=pytest.mark.exhaustive), EARLY])
def test_random_schedules_on_a_tpu_give_what_the_definition_gives(rng, monkeypatch, how):
    """Of one list several blocks are read, and of the local pages, too."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 64)
    monkeypatch.setattr(tpu_arrange, "MOST_LISTED", 8)
    monkeypatch.setattr(tpu_call, "LEAST_KEYS", 16)
    monkeypatch.setattr(tpu_call, "MOST_KEYS", 16)
    schedule = Schedule(rng, window=20, threshold=[0.0, 1.5, 0.3, 0.7], page_size=8, trees=True)
    schedule.by = {"implementation": "tpu", "interpret": how}
    schedule.prefill()
    schedule.prefill()
    for tree in (False, True, False):
        schedule.extend(schedule.max_pending, tree=tree)
    schedule.fork()
    schedule.extend(schedule.max_pending, tree=True)
    assert not interpreter.races.races_found and not schedule.rested


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_tpu_kernel_gives_what_xla_gives_in_bfloat16(rng, kv_heads):
    """Two heads that share words, or one whose tokens share tiles; three rows, of which one is empty."""
    slots, lengths = np.array([2, 0, 1], np.int32), np.array([1, 1, 1], np.int32)
    how = {"slots": 2, "kv_heads": kv_heads, "head_dim": 64, "max_pending": 4, "window": 9}
    cache = gated.init(**how, pages=60, page_size=8, dtype=jnp.bfloat16)

    def drawn(time):
        q, k, v = (jnp.asarray(rng.standard_normal((3, time, n, 64)), jnp.bfloat16) for n in (4, kv_heads, kv_heads))
        return q, k, v, jnp.asarray(rng.uniform(size=(3, time, kv_heads)), jnp.float32)

    _, cache = gated.prefill(cache, *drawn(50), slots=slots, lengths=np.array([50, 3, 0]), threshold=0.4)
    given = drawn(1)
    found, expected = (
        gated.extend(cache, *given, slots=slots, lengths=lengths, threshold=0.4, **by)[0].astype(jnp.float32)
        for by in ({"implementation": "tpu", "interpret": LATE}, {"implementation": "xla"})
    )
    assert not interpreter.races.races_found
    assert not np.asarray(found)[1].any()
    for x, y in zip(np.asarray(found)[[0, 2]], np.asarray(expected)[[0, 2]], strict=True):
        assert np.linalg.norm(x - y) <= 6e-3 * np.linalg.norm(y)


@pytest.mark.slow
def test_rows_that_lack_pages_rest_and_say_how_many(rng):
    schedule = Schedule(rng, window=6, threshold=0.1, page_size=4, pages=24)
    for _ in range(10):
        play(schedule, rng, 8)
        if schedule.rested:
            break
    assert schedule.rested > 0
    with pytest.raises(gated.PoolExhausted, match=r"the pool of pages ran out: slots lacked pages"):
        gated.raise_missing(schedule.lacking)


def play(schedule, rng, steps):
    actions = {
        "prefill": schedule.prefill,
        "extend": lambda: schedule.extend(schedule.max_pending),
        "tree": lambda: schedule.extend(schedule.max_pending, tree=True),
        "one": lambda: schedule.extend(1),
        "rollback": schedule.rollback,
        "fork": schedule.fork,
        "reset": schedule.reset,
    }
    odds = np.array([3, 4, 4, 4, 2, 2, 0.5])
    schedule.prefill()
    for name in rng.choice(list(actions), size=steps, p=odds / odds.sum()):
        actions[name]()


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["rest", pytest.param("evict", marks=pytest.mark.exhaustive)])
def test_a_launch_copies_no_pool(when_full):
    sizes = {"slots": 3, "kv_heads": 2, "head_dim": 8, "window": 5, "max_pending": 4, "pages": 70, "page_size": 4}
    how = {"dtype": jnp.float32, "capacity": 64, "when_full": when_full}
    cache = jax.eval_shape(lambda: gated.init(**sizes, **how))
    for time, call in ((4, gated.extend), (12, gated.prefill)):
        shapes = (3, time, 4, 8), (3, time, 2, 8), (3, time, 2, 8), (3, time, 2)
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        step = jax.jit(lambda cache, *x, call=call: call(cache, *x, slots=EVERY[:3], threshold=0.5), donate_argnums=0)
        text = step.lower(cache, *given).compile().as_text()
        assert "input_output_alias" in text
        for name in ("keys", "values", "gates", "admitted_keys", "admitted_values", "admitted_gates", "lists"):
            shape = ",".join(map(str, getattr(cache.layer, name).shape))
            assert not re.search(rf"\[{shape}\][^=]* copy\(", text), name
