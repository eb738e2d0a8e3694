"""Trees, shared pages and forks of paged attention against float64, with NaN wherever nothing live lies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention import paged
from jaxbuf.attention.pages import (
    advance_order,
    claim_pages,
    fork_pages,
    init_order,
    note_missing,
    places,
    release_pages,
    take_pages,
    touched_pages,
)
from jaxbuf.memory.claims import grant
from jaxbuf.memory.ownership import PoolExhausted, clear_flag, init_ownership, raise_missing
from tests.attention.definition import attention

SLOTS, TIME, PAGE_SIZE, MAX_PAGES = 4, 6, 4, 40
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ALL = np.arange(1, SLOTS + 1, dtype=np.int32)


@jax.jit
def launch(kv, table, order, pages, q, k, v, start, lengths, ancestors):
    place = places(order, ALL, start, q.shape[1])
    touched = partial(touched_pages, place, slots=ALL, pages=MAX_PAGES, page_size=PAGE_SIZE)
    claim = claim_pages(pages, table, ALL, touched(lengths=lengths))
    lengths = jnp.where(grant([claim]), lengths, 0)
    table, pages = take_pages(note_missing(pages, claim.missing), table, ALL, touched(lengths=lengths))
    where = {"slots": ALL, "start": start, "lengths": lengths, "order": order}
    kv = paged.append(kv, table, k, v, **where)
    return paged.attend(q, kv, table, **where, ancestors=ancestors), kv, table, pages, lengths


@jax.jit
def fork(kv, table, order, pages, source, target, length):
    where = {"source": source, "target": target, "length": length, "page_size": PAGE_SIZE}
    served, copies, table, pages = fork_pages(pages, table, order, **where)
    order = order.at[jnp.where(served, target, 0)].set(order[source]).at[0].set(jnp.arange(TIME, dtype=jnp.int32))
    return served, paged.fork(kv, copies), table, order, pages


advance, release = jax.jit(advance_order), jax.jit(release_pages)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A page of keys is scored at once, so that there are many blocks of them."""
    monkeypatch.setattr(paged, "BLOCK", PAGE_SIZE)


class Twin:
    """Four slots' pages, and the keys and values that each slot has committed."""

    def __init__(self, rng, pages):
        self.rng = rng
        pool = np.full((pages + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM), np.nan, np.float32)
        self.kv, self.table = paged.PagedKV(pool, pool.copy()), np.zeros((SLOTS + 1, MAX_PAGES), np.int32)
        self.order, self.pages = init_order(slots=SLOTS, max_pending=TIME), init_ownership(pages + 1)
        self.tokens = [np.zeros((2, 0, KV_HEADS, HEAD_DIM)) for _ in range(SLOTS + 1)]

    def lengths(self):
        return np.array([len(self.tokens[slot][0]) for slot in range(SLOTS + 1)], np.int32)

    def step(self):
        """A launch of random trees; every node sees what was committed and its own path. Whether pages sufficed."""
        q, k, v = (self.rng.standard_normal((SLOTS, TIME, n, HEAD_DIM)).astype("f4") for n in (HEADS, 2, 2))
        parents = np.stack([[self.rng.integers(-1, max(i, 0)) if i else -1 for i in range(TIME)] for _ in ALL])
        paths = [[path_to(parents[row], node) for node in range(TIME)] for row in range(SLOTS)]
        ancestors = np.array([[np.isin(np.arange(TIME), path) for path in row] for row in paths])
        start, lengths = self.lengths()[1:], self.rng.integers(0, TIME + 1, SLOTS).astype(np.int32)
        for row in range(SLOTS):  # what is not real reaches nobody
            k[row, lengths[row] :] = v[row, lengths[row] :] = np.nan
        shared = np.flatnonzero(np.asarray(self.pages.owners) > 1)
        before = np.asarray(self.kv.keys)[shared].tobytes()
        arguments = self.kv, self.table, self.order, self.pages, q, k, v, start, lengths, ancestors
        out, self.kv, self.table, self.pages, granted = launch(*arguments)
        assert np.asarray(self.kv.keys)[shared].tobytes() == before, "a page with several owners was written"
        lacking, lengths = bool(int(self.pages.lacking)), self._granted(lengths, granted)
        accepted, permutation = np.zeros(SLOTS, np.int32), np.zeros((SLOTS, TIME), np.int32)
        for row in range(SLOTS):
            for node in range(lengths[row]):
                keys, values = (
                    np.concatenate([old, new[row, paths[row][node]]])
                    for old, new in zip(self.tokens[row + 1], (k, v), strict=True)
                )
                query = np.concatenate([np.zeros((len(keys) - 1, HEADS, HEAD_DIM)), q[row, node][None]])
                np.testing.assert_allclose(out[row, node], attention(query, keys, values)[-1], atol=1e-5)
            path = paths[row][self.rng.integers(0, lengths[row])] if lengths[row] else []
            path = path[: self.rng.integers(0, len(path) + 1)]
            accepted[row] = len(path)
            permutation[row] = path + [node for node in range(TIME) if node not in path]
            new = np.stack([x[row, path] for x in (k, v)])
            self.tokens[row + 1] = np.concatenate([self.tokens[row + 1], new], axis=1)
        self._spoil_rejected(start, lengths, accepted, permutation)
        self.order = advance(self.order, ALL, start, accepted, permutation)
        return not lacking

    def _granted(self, asked, granted):
        """What rows were served; those that rest have no page too few for nothing."""
        granted = np.asarray(granted)
        assert ((granted == asked) | (granted == 0)).all()
        assert int(self.pages.lacking) or (granted == asked).all()
        return granted

    def _spoil_rejected(self, start, lengths, accepted, permutation):
        """The rejected tokens were not finite, as far as later launches can know."""
        place, (keys, values) = places(self.order, ALL, start, TIME), (np.array(self.kv.keys), np.array(self.kv.values))
        for row, slot in enumerate(ALL):
            rejected = [node for node in permutation[row, accepted[row] :] if node < lengths[row]]
            for node in rejected:
                page, offset = np.asarray(self.table)[slot, place[row, node] // PAGE_SIZE], place[row, node] % PAGE_SIZE
                keys[page, offset], values[page, offset] = self.rng.choice([np.nan, np.inf, -np.inf], 2)
        self.kv = paged.PagedKV(jnp.asarray(keys), jnp.asarray(values))

    def probe(self):
        """A launch of one token that is never committed, fewer than the list has places: it sees what was committed."""
        q, k, v = (self.rng.standard_normal((SLOTS, 1, n, HEAD_DIM)).astype("f4") for n in (HEADS, 2, 2))
        state = self.kv, self.table, self.order, self.pages
        out, *_, granted = launch(*state, q, k, v, self.lengths()[1:], np.ones(SLOTS, np.int32), None)
        for row in np.flatnonzero(granted):
            keys, values = (
                np.concatenate([old, new[row]]) for old, new in zip(self.tokens[row + 1], (k, v), strict=True)
            )
            query = np.concatenate([np.zeros((len(keys) - 1, HEADS, HEAD_DIM)), q[row]])
            np.testing.assert_allclose(out[row, 0], attention(query, keys, values)[-1], atol=1e-5)

    def fork(self, source, target):
        source, target = np.array([source], np.int32), np.array([target], np.int32)
        arguments = self.kv, self.table, self.order, self.pages, source, target, self.lengths()[source]
        served, self.kv, self.table, self.order, self.pages = fork(*arguments)
        if served:
            self.tokens[target[0]] = self.tokens[source[0]]

    def free(self, slot):
        self.table, pages = release(self.pages, self.table, np.array([slot], np.int32))
        self.pages = clear_flag(pages)
        self.order, self.tokens[slot] = self.order.at[slot].set(np.arange(TIME, dtype=np.int32)), self.tokens[0]


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


@pytest.mark.slow
def test_trees_and_forks_equal_their_branches_alone(rng):
    """Trees, accepted paths with gaps, forks and resets, until there are too few pages, and on from there."""
    pages = 30
    twin = Twin(rng, pages)
    for _ in range(40):
        twin.probe()
        if not twin.step():
            with pytest.raises(PoolExhausted, match=rf"the pool of pages ran out: .* more needed, it has {pages}"):
                raise_missing(pages=twin.pages)
            twin.free(int(np.argmax(twin.lengths())))
        elif rng.random() < 0.3:
            source, target = rng.permutation(ALL)[:2]
            twin.fork(source, target)
        held = np.asarray(twin.table)[1:]
        np.testing.assert_array_equal(twin.pages.owners, np.bincount(held[held > 0], minlength=pages + 1))
    for slot in ALL:
        twin.free(slot)
    assert int(twin.pages.left) == pages


def test_the_places_of_a_chain_are_its_positions(rng):
    """Whoever accepts no path with gaps has the list that nobody needs."""
    order, start = init_order(slots=SLOTS, max_pending=TIME), np.zeros(SLOTS, np.int32)
    for _ in range(5):
        np.testing.assert_array_equal(places(order, ALL, start, 20), start[:, None] + np.arange(20))
        accepted = rng.integers(0, 9, SLOTS).astype(np.int32)
        order, start = advance(order, ALL, start, accepted), start + accepted


def test_a_fork_of_slots_that_own_their_pages_copies_what_is_committed(rng):
    length = np.array([9], np.int32)
    table = np.asarray(paged.init_table(slots=2, capacity=16, page_size=PAGE_SIZE))
    kv = paged.PagedKV(*jnp.asarray(rng.standard_normal((2, 9, PAGE_SIZE, KV_HEADS, HEAD_DIM)), jnp.float32))
    where = {"source": np.array([1]), "target": np.array([2]), "length": length, "page_size": PAGE_SIZE}
    served, copies, after, pages = fork_pages(None, jnp.asarray(table), None, **where)
    copied = paged.fork(kv, copies)
    assert served and pages is None and (np.asarray(after) == table).all()
    np.testing.assert_array_equal(copied.keys[table[2, :3]], kv.keys[table[1, :3]])
    np.testing.assert_array_equal(copied.values[table[2, 3]], kv.values[table[2, 3]])


def test_appends_and_reads_of_slots_that_do_not_exist_touch_no_page(rng):
    """Compiled, they are rows of the null slot; a slot that is there twice changes its own pages alone."""
    table = jnp.asarray(paged.init_table(slots=SLOTS, capacity=16, page_size=PAGE_SIZE))
    kv = paged.PagedKV(*jnp.asarray(rng.standard_normal((2, 17, PAGE_SIZE, KV_HEADS, HEAD_DIM)), jnp.float32))
    q, k, v = (rng.standard_normal((6, 2, n, HEAD_DIM)).astype("f4") for n in (HEADS, KV_HEADS, KV_HEADS))
    slots, start = np.int32([99, -1, 5, 2, 2, 3]), np.int32([3, 3, 3, 3, 9, -1])
    where = {"start": start, "lengths": np.full(6, 2, np.int32)}
    after = jax.jit(paged.append)(kv, table, k, v, slots=slots, **where)
    changed = np.flatnonzero((np.asarray(after.keys) != np.asarray(kv.keys)).any(axis=(2, 3)).ravel())
    places_of = [PAGE_SIZE * int(table[slot, p // PAGE_SIZE]) + p % PAGE_SIZE for slot, p in ((2, 3), (2, 4), (3, 0))]
    places_of += [PAGE_SIZE * int(table[2, p // PAGE_SIZE]) + p % PAGE_SIZE for p in (9, 10)]
    assert sorted(changed) == sorted(places_of), "the token before the first of slot 3 lies nowhere"
    out = np.asarray(jax.jit(paged.attend)(q, kv, table, slots=slots, **where))
    assert (out[:3] == 0).all() and (np.abs(out[3:5]).max(axis=(1, 2, 3)) > 0).all()
    with pytest.raises(ValueError, match="slots must have each slot once, got slot 2 in 2 rows"):
        paged.append(kv, table, k[3:], v[3:], slots=slots[3:], **{name: x[3:] for name, x in where.items()})
    with pytest.raises(ValueError, match=r"slots must be in \[0, 4\], got 99 at row 0"):
        paged.attend(q, kv, table, slots=slots, **where)


def test_integers_that_are_none_are_refused(rng):
    table = jnp.asarray(paged.init_table(slots=SLOTS, capacity=16, page_size=PAGE_SIZE))
    kv = paged.init_kv(pages=17, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32, page_size=PAGE_SIZE)
    q, k = (np.zeros((1, 2, n, HEAD_DIM), np.float32) for n in (HEADS, KV_HEADS))
    where = {name: np.ones(1, np.int32) for name in ("slots", "start", "lengths")}
    for name in where:
        with pytest.raises(ValueError, match=rf"{name} must be int32 .*float32"):
            paged.append(kv, table, k, k, **(where | {name: np.ones(1, np.float32)}))
    with pytest.raises(ValueError, match=r"ancestors must be bool \(1, 2, 2\), got int32 \(1, 2, 2\)"):
        paged.attend(q, kv, table, **where, ancestors=np.ones((1, 2, 2), np.int32))
    for slots in (np.ones(1, np.float32), [1.0]):
        with pytest.raises(ValueError, match=r"slots must be int32 \[rows\], got float"):
            release_pages(init_ownership(17), table, slots)


def test_no_fork_of_own_pages_copies_to_a_slot_that_does_not_exist(rng):
    table = jnp.asarray(paged.init_table(slots=SLOTS, capacity=16, page_size=PAGE_SIZE))
    where = {"source": np.int32([1, 1, 99]), "target": np.int32([99, -1, 2]), "length": np.full(3, 9, np.int32)}
    compiled = jax.jit(lambda **where: fork_pages(None, table, None, page_size=PAGE_SIZE, **where)[1][1])
    assert (np.asarray(compiled(**where)) > 16).all(), "past the pool: nothing is copied"
