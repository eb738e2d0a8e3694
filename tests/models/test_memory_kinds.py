"""Every combination of memories that a model can have, and pools that are too small: always the plain forward.

Served rows have exactly the hidden states of their tokens alone; rows that lack something rest untouched.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.attention.rotary import Rotary
from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, Rule, Score, WriteGate
from jaxbuf.models.config import ATTENTION, GATED, RECURRENCE, LayerConfig, ModelConfig
from jaxbuf.models.families import mamba2
from jaxbuf.models.layers import Norm, linear, parameter
from jaxbuf.models.mixers.latent_attention import LatentAttention
from jaxbuf.models.mixers.recurrent_mixer import RecurrentMixer
from jaxbuf.recurrence.spec import RecurrenceSpec
from tests.models.test_cache import CONFIG
from tests.recurrence.twin import assert_owned
from tests.tiny import LLAMA, random_model

ROWS, TIME, PENDING, PROMPT, HOLDS = 3, 48, 4, 12, 1
SLOTS = np.arange(1, ROWS + 1, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class LinearAttention(RecurrentMixer):
    """A recurrence and nothing in front of it: no convolution, no gates."""

    def parameters(self, hidden, *, initializer, rngs, dtype):
        return Projections(self.spec, hidden, initializer, rngs, dtype)

    def __call__(self, parameters: Any, x, memory, plan):
        spec, (batch, time) = self.spec, x.shape[:2]
        keys = spec.key_heads * spec.key_dim
        q, k, v = jnp.split(linear(x, parameters.qkv), [keys, 2 * keys], axis=-1)
        q, k = (y.reshape(batch, time, spec.key_heads, spec.key_dim) for y in (q, k))
        v = v.reshape(batch, time, spec.heads, spec.value_dim)
        out, memory = plan.recur(memory, spec, q, k, v, None, None)
        return linear(out.reshape(batch, time, -1), parameters.out), memory


class Projections(nnx.Module):
    def __init__(self, spec, hidden, initializer, rngs, dtype):
        self.qkv = parameter(rngs, (spec.channels, hidden), (None, None), initializer, dtype=dtype)
        self.out = parameter(rngs, (hidden, spec.heads * spec.value_dim), (None, None), initializer, dtype=dtype)


def without_convolution() -> ModelConfig:
    spec = RecurrenceSpec(2, 2, 8, 8, decay="none", delta=False)
    norm = Norm(1e-2)
    layer = LayerConfig((LinearAttention(spec, 0, 1e-2),), None, norm)
    return dataclasses.replace(CONFIG, hidden_size=16, layers=(layer,) * 2, norm=norm, tied=True, mtp=None)


def with_latents() -> ModelConfig:
    """Layers that keep keys and values, and layers that keep latents, in one table of pages."""
    config = LLAMA.model()
    mixer = LatentAttention(4, 8, 4, 6, 10, Rotary(4, 1e4), head_gate=True, latent_eps=1e-2)
    first, second = config.layers
    return dataclasses.replace(config, layers=(first, dataclasses.replace(second, mixers=(mixer,))))


def with_gates() -> ModelConfig:
    """Layers that keep the keys which their scores admit."""
    config = LLAMA.model()
    first, second = config.layers

    def gated(layer: LayerConfig, score: Score) -> LayerConfig:
        mixer = dataclasses.replace(layer.mixers[0], admission=Admission(score, 6, 0.87))  # pyright: ignore[reportCallIssue]
        return dataclasses.replace(layer, mixers=(mixer,))

    layers = gated(first, WriteGate(5)), gated(second, Rule("random", sinks=2, seed=3))
    return dataclasses.replace(config, layers=layers)


class Case(NamedTuple):
    """A model, and pools that are too small in one way each."""

    config: ModelConfig
    pools: tuple[dict[str, int], ...]


MAMBA2 = mamba2.Config(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=8,
    state_size=8,
    n_groups=2,
    layer_norm_epsilon=1e-2,
)
SMALL = {"states": 3, "blocks": 6, "pages": 14}
CASES = {
    "both": lambda: Case(CONFIG, ({"pages": 10}, {"states": 2}, {"blocks": 4}, SMALL)),
    "softmax": lambda: Case(LLAMA.model(), ({"pages": 10},)),
    "recurrence": lambda: Case(MAMBA2.model(), ({"states": 2}, {"blocks": 4})),
    "latents": lambda: Case(with_latents(), ({"pages": 10},)),
    # In 10 pages all rows may become full, as gates keep few keys: then none asks for more, and none rests.
    "gated": lambda: Case(with_gates(), ({"pages": 8},)),
    "no convolution": lambda: Case(without_convolution(), ({"states": 2, "blocks": 5},)),
}
SOME = "both", "latents", "gated"  # these have every kind of memory; the others run by hand
EACH = [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward, prefill = _jit(decoder.forward), _jit(decoder.prefill)
extend = _jit(partial(decoder.extend, drafts=True))
commit, fork, reset, rollback = (_jit(call) for call in (decoder.commit, decoder.fork, decoder.reset, decoder.rollback))


def pools_of(cache):
    """Each pool that slots share, and what refers to its rows."""
    if RECURRENCE in cache.shared:
        cursor = cache.shared[RECURRENCE].cursor
        if cursor.sharing is not None:
            yield cursor.sharing.states, cursor.checkpoint_of
            yield cursor.sharing.blocks, cursor.block_table
    if GATED in cache.shared:
        shared = cache.shared[GATED]
        yield shared.owners, shared.table
        for layer in cache.layers:
            owned = np.arange(layer.lists.shape[2]) < np.asarray(shared.owned)[int(layer.number), ..., None]
            owners = jax.tree.map(lambda x, number=layer.number: x[number], shared.admitted)
            yield owners, np.where(owned, layer.lists, 0)
    if ATTENTION in cache.shared and cache.shared[ATTENTION].owners is not None:
        yield cache.shared[ATTENTION].owners, cache.shared[ATTENTION].table


class Twin:
    """A cache, and the tokens that each slot committed."""

    def __init__(self, config, rng, **pools):
        self.rng, self.model, self.vocab = rng, random_model(config), config.vocab_size
        sizes = {"slots": ROWS, "capacity": TIME, "limit": np.array([1, 5, 16]), "max_pending": PENDING}
        self.cache = decoder.init_cache(config, **sizes, page_size=4, block_size=4, holds=HOLDS, **pools)
        self.tokens: list[list[int]] = [[] for _ in range(ROWS + HOLDS + 1)]
        self.rested = self.served = self.taken_back = 0

    def read_prompts(self):
        prompts = self.rng.integers(0, self.vocab, (ROWS, PROMPT), dtype=np.int32)
        lengths = self._fitting(self.rng.integers(0, PROMPT + 1, ROWS))
        before = np.asarray(self.cache.sequences.committed)
        hidden, self.cache = prefill(self.model, self.cache, prompts, lengths=lengths)
        self._take(hidden, prompts, (self.cache.sequences.committed - before)[1 : 1 + ROWS], lengths, (0,))
        for row, slot in enumerate(SLOTS):
            self.tokens[slot] += prompts[row, : int(self.cache.sequences.committed[slot] - before[slot])].tolist()
        self.verify()

    def step(self):
        """A launch, part of it committed, and part of that taken back and committed again."""
        tokens = self.rng.integers(0, self.vocab, (ROWS, PENDING), dtype=np.int32)
        lengths = self._fitting(self.rng.integers(0, PENDING + 1, ROWS))
        hidden, self.cache = extend(self.model, self.cache, tokens, lengths=lengths)
        granted = self._take(hidden, tokens, self.cache.sequences.pending[1 : 1 + ROWS], lengths, (0, 1))
        accepted = self.rng.integers(0, granted + 1).astype(np.int32)
        self.cache = commit(self.cache, accepted)
        back = self.rng.integers(0, accepted + 1).astype(np.int32)
        self.cache = rollback(self.cache, back)
        np.testing.assert_array_equal(self.cache.sequences.pending[1 : 1 + ROWS], back)
        kept = self.rng.integers(0, back + 1).astype(np.int32)
        self.cache = commit(self.cache, kept)
        for row, slot in enumerate(SLOTS):
            self.tokens[slot] += tokens[row, : accepted[row] - back[row] + kept[row]].tolist()
        self.verify()

    def take_back(self):
        """Asks for some of the newest tokens back: as many come as every memory holds, and the rest stays as it was."""
        wanted = self.rng.integers(0, PENDING + 1, ROWS).astype(np.int32)
        self.cache = rollback(self.cache, wanted)
        back = np.asarray(self.cache.sequences.pending[1 : 1 + ROWS])
        assert (back <= wanted).all()
        self.cache = commit(self.cache, np.zeros_like(back))
        for slot, number in zip(SLOTS, back, strict=True):
            self.tokens[slot] = self.tokens[slot][: len(self.tokens[slot]) - number]
        self.taken_back += back.sum()
        self.verify()

    def fork(self, source, target):
        if len(self.tokens[source]) == len(self.tokens[target]):
            return  # whether it was done could not be told from the lengths
        self.cache = fork(self.cache, np.int32([source]), np.int32([target]))
        if int(self.cache.sequences.committed[target]) == len(self.tokens[source]):
            self.tokens[target] = list(self.tokens[source])
        self.verify()

    def reset(self, slot):
        self.cache, self.tokens[slot] = reset(self.cache, np.int32([slot])), []
        decoder.raise_exhausted(self.cache)
        self.verify()

    def verify(self):
        np.testing.assert_array_equal(self.cache.sequences.committed, [len(tokens) for tokens in self.tokens])
        for owned, table in pools_of(self.cache):
            assert_owned(owned, np.asarray(table)[1:])
        if RECURRENCE in self.cache.shared:
            np.testing.assert_array_equal(self.cache.shared[RECURRENCE].cursor.position, self.cache.sequences.committed)

    @property
    def lacking(self):
        return any(int(owned.lacking) for owned, _ in pools_of(self.cache))

    def _fitting(self, lengths):
        room = TIME - np.array([len(self.tokens[slot]) for slot in SLOTS])
        return np.minimum(lengths, room).astype(np.int32)

    def _take(self, hidden, tokens, granted, lengths, less):
        """What rows were served, after their hidden states were compared with those of all their tokens alone."""
        granted = np.asarray(granted)
        assert all(got == asked or got in less for got, asked in zip(granted, lengths, strict=True))
        assert self.lacking or (granted == lengths).all()
        self.rested, self.served = self.rested + np.sum(granted < lengths), self.served + np.sum(granted > 0)
        alone = np.zeros((ROWS, TIME), np.int32)
        for row, slot in enumerate(SLOTS):
            text = self.tokens[slot] + tokens[row, : granted[row]].tolist()
            alone[row, : len(text)] = text
        expected = np.asarray(forward(self.model, alone))
        for row, slot in enumerate(SLOTS):
            start = len(self.tokens[slot])
            found = np.asarray(hidden)[row, : granted[row]]
            np.testing.assert_allclose(found, expected[row, start : start + granted[row]], atol=3e-4)
        return granted


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_any_memories_under_random_schedules(name, rng):
    config, _ = CASES[name]()
    twin = Twin(config, rng)
    twin.read_prompts()
    for number in range(10):
        twin.step()
        twin.take_back()
        if number % 3 == 1:
            twin.fork(*rng.permutation(SLOTS)[:2])
        if number % 4 == 2:
            twin.reset(int(rng.choice(SLOTS)))
    assert not twin.rested and twin.taken_back > 0


def each_pools():
    """Every case of pools that are too small: each compiles programs of its own."""
    for name in CASES:
        *others, last = CASES[name]().pools
        yield pytest.param(name, last, marks=pytest.mark.slow if name in SOME else pytest.mark.exhaustive)
        yield from (pytest.param(name, pools, marks=pytest.mark.exhaustive) for pools in others)


@pytest.mark.parametrize(("name", "pools"), [*each_pools()])
def test_rows_that_lack_memory_rest_and_the_others_go_on(name, pools, rng):
    twin = Twin(CASES[name]().config, rng, **pools)
    for number in range(400):
        if number >= 40 and twin.rested > 2 and twin.served > 20:  # Few schedules need more.
            break
        twin.read_prompts() if number % 8 == 0 else twin.step()
        if number % 5 == 1:
            source, target = rng.permutation(SLOTS)[:2]
            twin.fork(*((source, ROWS + 1), (ROWS + 1, target), (source, target))[rng.integers(3)])
            twin.take_back()
        if twin.lacking and rng.random() < 0.5:
            with pytest.raises(PoolExhausted, match=r"the pool of \w+ ran out: \d+ more needed"):
                decoder.raise_exhausted(twin.cache)
            twin.reset(int(np.argmax([len(tokens) for tokens in twin.tokens])))
    assert twin.rested > 2 and twin.served > 20
    for slot in range(1, ROWS + HOLDS + 1):
        twin.reset(slot)
    for owned, _ in pools_of(twin.cache):
        assert int(owned.left) == owned.owners.shape[0] - 1


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == "both" else pytest.mark.exhaustive) for x in CASES]
)
def test_a_held_prefix_is_adopted_and_dropped(name, rng):
    """Held rows never run: launches are of the others alone."""
    twin = Twin(CASES[name]().config, rng, pages=60, states=8)
    twin.read_prompts()
    twin.step()
    twin.fork(1, ROWS + 1)
    twin.reset(1)
    twin.step()
    twin.fork(ROWS + 1, 2)
    twin.reset(ROWS + 1)
    twin.step()
    assert not twin.rested


def test_tokens_are_not_taken_back_where_it_is_not_known_where_they_lie():
    cache = decoder.init_cache(CONFIG, slots=1, capacity=8, trees=True)
    with pytest.raises(ValueError, match="rollback needs a cache made without trees"):
        decoder.rollback(cache, np.int32([0]))
    cache = decoder.init_cache(CONFIG, slots=1, capacity=8)
    with pytest.raises(ValueError, match=r"count must be in \[0, 0\], got 1 at row 0"):
        decoder.rollback(cache, np.int32([1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("softmax", marks=pytest.mark.exhaustive), "recurrence"])
def test_tokens_are_not_taken_back_where_another_slot_reads_them(name, rng):
    """A full page or block that a fork shares can't be written again, until its other owner is gone."""
    config, slots = CASES[name]().config, np.int32([1, 2])
    pools = {"pages": 20, "states": 4, "blocks": 20}
    cache = decoder.init_cache(config, slots=2, capacity=16, max_pending=4, page_size=4, block_size=4, **pools)
    tokens = rng.integers(0, config.vocab_size, (2, 4), dtype=np.int32)
    model = random_model(config)
    for lengths in ([4, 0], [3, 0]):
        _, cache = extend(model, cache, tokens, lengths=np.int32(lengths))
        cache = commit(cache, np.int32(lengths))
    cache = fork(cache, slots[:1], slots[1:])
    for slot in slots:
        assert decoder.rollback(cache, np.int32([3]), slots=slots[slot - 1 : slot]).sequences.committed[slot] == 4
        with pytest.raises(ValueError, match=r"count must be in \[0, 3\], got 4 at row 0"):
            decoder.rollback(cache, np.int32([4]), slots=slots[slot - 1 : slot])
    cache = reset(cache, slots[1:])
    assert decoder.rollback(cache, np.int32([4]), slots=slots[:1]).sequences.committed[1] == 3


@pytest.mark.slow
def test_tokens_are_not_taken_back_where_a_convolution_forgot_what_came_before(rng):
    """Tokens that were read in vain have overwritten the oldest inputs, committed or not."""
    config, slots = CASES["recurrence"]().config, np.int32([1])
    cache = decoder.init_cache(config, slots=2, capacity=16, limit=12, max_pending=4)
    tokens = rng.integers(0, config.vocab_size, (2, 10), dtype=np.int32)
    model = random_model(config)
    _, cache = _jit(partial(decoder.prefill, keep=8))(model, cache, tokens)
    assert decoder.fork(cache, slots, slots + 1, tokens=np.int32([6])).sequences.committed[2] == 6
    _, cache = extend(model, cache, tokens[:, :3], lengths=np.int32([3, 0]))
    for taken, least in ((0, 9), (2, 9)):
        after = commit(cache, np.int32([taken, 0]))
        with pytest.raises(ValueError, match=rf"tokens must be in \[{least}, {10 + taken}\], got 8 at row 0"):
            decoder.fork(after, slots, slots + 1, tokens=np.int32([8]))
        with pytest.raises(ValueError, match=rf"count must be in \[0, {10 + taken - least}\], got 4 at row 0"):
            decoder.rollback(after, np.int32([4]), slots=slots)
        assert decoder.rollback(after, np.int32([1]), slots=slots).sequences.committed[1] == 9 + taken


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x == "both" else pytest.mark.exhaustive) for x in CASES]
)
@pytest.mark.parametrize("pools", [{}, {"blocks": 24, "states": 8, "pages": 60}], ids=["own", "shared"])
def test_a_fork_may_take_the_first_tokens_alone(name, pools, rng):
    """What both hold then is as if each had read its own; neither sees what the other reads."""
    twin = Twin(CASES[name]().config, rng, **pools)
    cut = _jit(decoder.fork)
    for _ in range(4):
        prompts = rng.integers(0, twin.vocab, (ROWS, PROMPT), dtype=np.int32)
        _, twin.cache = _jit(partial(decoder.prefill, keep=PENDING))(twin.model, twin.cache, prompts)
        for row, slot in enumerate(SLOTS):
            twin.tokens[slot] += prompts[row].tolist()
        source, *target = rng.permutation(SLOTS)
        most = len(twin.tokens[source])
        tokens = most - rng.integers(0, PENDING + 1, 2).astype(np.int32)
        twin.cache = cut(twin.cache, np.int32([source] * 2), np.int32(target), tokens=tokens)
        for slot, number in zip(target, tokens, strict=True):
            twin.tokens[slot] = twin.tokens[source][:number]
        twin.verify()
        twin.step()
        for slot in SLOTS:
            twin.reset(int(slot)) if len(twin.tokens[slot]) > TIME - 2 * PROMPT else None


@pytest.mark.slow
def test_a_fork_is_not_cut_where_the_memory_does_not_reach(rng):
    config = CASES["both"]().config
    cache = decoder.init_cache(config, slots=2, capacity=16, limit=8, max_pending=4)
    model = random_model(config)
    _, cache = decoder.prefill(model, cache, np.zeros((2, 10), np.int32), keep=3)
    for tokens, message in ((6, r"\[7, 10\], got 6 at row 0"), (11, r"\[7, 10\], got 11 at row 0")):
        with pytest.raises(ValueError, match=f"tokens must be in {message}"):
            decoder.fork(cache, np.int32([1]), np.int32([2]), tokens=np.int32([tokens]))
        same = jax.jit(decoder.fork)(cache, np.int32([1]), np.int32([2]), tokens=np.int32([tokens]))
        chex.assert_trees_all_equal(same, cache)
    assert decoder.fork(cache, np.int32([1]), np.int32([2]), tokens=np.int32([7])).sequences.committed.tolist()[2] == 7
    with pytest.raises(ValueError, match="tokens need a cache made without trees"):
        trees = decoder.init_cache(config, slots=2, capacity=16, trees=True)
        decoder.fork(trees, np.int32([1]), np.int32([2]), tokens=np.int32([0]))
