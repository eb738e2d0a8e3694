"""Requests that come and go: prompts in chunks, rows that begin while others run, and memory that is too small."""

import collections
import dataclasses

import chex
import jax
import numpy as np
import pytest

from jaxbuf.serving import Arrivals, SamplingParams, admit, generate, generate_tokens, init_carry, release
from jaxbuf.serving import batch as batches
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.arrivals import Beginning
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.carry import EMPTY, RUNNING
from jaxbuf.serving.drafters import MTP, DraftModel, NGram
from jaxbuf.serving.generation import read_prompts, run_batch
from tests.models.test_memory_kinds import pools_of
from tests.recurrence.twin import assert_owned
from tests.serving.speculating import model_named, random_qwen3_5

CHUNK, NEW, ROWS = 16, 12, 4
KV_LIMIT, DRAFTS = 32, 3
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
# Each compiles programs of its own, so the rest has those memories and drafters that the first lacks.
PAIRS = [
    ("qwen3_5", "none"),
    ("qwen3_5", "adaptive"),
    pytest.param("mamba2", "a model", marks=pytest.mark.exhaustive),
    pytest.param("llama", "a model", marks=pytest.mark.exhaustive),
    pytest.param("qwen3_5", "n-grams", marks=pytest.mark.exhaustive),
    pytest.param("qwen3_5", "mtp", marks=pytest.mark.exhaustive),
]
WITHOUT = [PAIRS[0], pytest.param("qwen3_5", "adaptive", marks=pytest.mark.exhaustive), *PAIRS[2:]]


def draw_prompts(rng, lengths):
    return [rng.integers(0, 256, n).tolist() for n in lengths]


def clear(results, gap=1e-4):
    """Whether no token of the results was hardly better than another."""
    tops = [list(top.values()) for result in results for top in result.top_logprobs]
    return min(top[0] - top[1] for top in tops) > gap


def drafter_named(name, lm):
    drafters = {"n-grams": NGram(3, branches=2), "a model": DraftModel(lm.model, 3), "mtp": MTP(3)}
    return Adaptive(MTP(3)) if name == "adaptive" else drafters.get(name)


LENGTHS = (1, CHUNK, CHUNK + 1, 4 * CHUNK - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), WITHOUT)
def test_prompts_in_chunks_are_as_prompts_read_at_once(architecture, name, rng, monkeypatch):
    """Tokens, log-probabilities of both, and what a drafter knows of the prompt: as many of its drafts are kept."""
    lm = model_named(architecture, 3)
    drafter = drafter_named(name, lm)
    decoding = Decoding(NEW, drafter=drafter, draft_tokens=DRAFTS)
    while True:
        prompts = draw_prompts(rng, LENGTHS)
        (arrivals,) = make_batch(lm, prompts, GREEDY, decoding).arrivals
        assert arrivals.tokens.shape[1] == 4 * CHUNK
        whole = generate(lm, prompts, NEW, GREEDY, drafter=drafter)
        if clear(whole):
            break
    monkeypatch.setattr(batches, "LEAST_CHUNK", CHUNK)
    monkeypatch.setattr(batches, "CHUNK_TOKENS", CHUNK)
    chunks = make_batch(lm, prompts, GREEDY, decoding).arrivals
    assert [chunk.tokens.shape for chunk in chunks] == [(4, CHUNK)] * 4
    assert [chunk.rows.tolist() for chunk in chunks] == [[0, 1, 2, 3], [-1, -1, 2, 3], [-1, -1, -1, 3], [-1, -1, -1, 3]]
    for ours, theirs in zip(generate(lm, prompts, NEW, GREEDY, drafter=drafter), whole, strict=True):
        assert ours.tokens == theirs.tokens
        assert (ours.stats.drafted, ours.stats.accepted) == (theirs.stats.drafted, theirs.stats.accepted)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-4)
        assert ours.prompt_logprobs[0] is theirs.prompt_logprobs[0] is None
        np.testing.assert_allclose(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], rtol=0, atol=1e-4)


@pytest.mark.exhaustive
def test_samples_of_prompts_in_chunks_share_what_they_read(rng, monkeypatch):
    lm, sampling = model_named("qwen3_5", 3), dataclasses.replace(GREEDY, temperature=0.8, seed=5, n=3)
    prompts = draw_prompts(rng, (CHUNK + 3, 2 * CHUNK, 3))
    whole = generate(lm, prompts, NEW, sampling, drafter=MTP(2))
    monkeypatch.setattr(batches, "LEAST_CHUNK", CHUNK)
    monkeypatch.setattr(batches, "CHUNK_TOKENS", CHUNK)
    chunked = generate(lm, prompts, NEW, sampling, drafter=MTP(2))
    equal = [
        a.tokens == b.tokens
        for ours, theirs in zip(chunked, whole, strict=True)
        for a, b in zip(ours.samples, theirs.samples, strict=True)
    ]
    assert sum(equal) >= len(equal) - 1  # one may be a tie


class Server:
    """Requests into rows as they come free, by the compiled programs alone.

    Every third request is recurrent, buffered with a limit of its own, and without a checkpoint up to KV_LIMIT tokens.
    """

    def __init__(self, lm, drafter, rng):
        self.lm, self.rng, self.drafter = lm, rng, drafter
        self.batch = make_batch(lm, [[1]] * ROWS, GREEDY, Decoding(NEW, drafter=drafter))
        self.kv_limit = None if lm.config.spec is None else KV_LIMIT
        sizes = dataclasses.replace(self.batch.sizes, capacity=5 * CHUNK, kv_limit=self.kv_limit)
        self.limit = sizes.limit
        self.with_drafter = () if self.batch.drafter is None else (self.batch.drafter,)
        self.carry = init_carry(lm.config, sizes, *self.with_drafter)
        self.request, self.told, self.limits, self.counters = [-1] * ROWS, {}, {}, {}

    def run(self, prompts):
        """The tokens of every prompt; each waits for a row, and is read chunk by chunk while others are decoded."""
        waiting, reading = collections.deque(enumerate(prompts)), {}
        while len(self.told) < len(prompts):
            state = np.asarray(self.carry.state)
            for row in range(ROWS):
                if state[row] not in (EMPTY, RUNNING):
                    self._tell(row)
                if self.request[row] < 0 and waiting and self.rng.random() < 0.7:
                    self.request[row], prompt = waiting.popleft()
                    reading[row] = (prompt, 0)
            if reading:
                self._admit(reading)
            self.carry = generate_tokens(
                self.lm.model, self.carry, np.int32(self.rng.integers(0, 6)), *self.with_drafter
            )
        return [self.told[index] for index in range(len(prompts))]

    def _admit(self, reading):
        """A chunk of some of the prompts, in no order."""
        tokens, numbers = np.zeros((ROWS, CHUNK), np.int32), np.zeros((3, ROWS), np.int32)
        rows, last = np.full(ROWS, -1, np.int32), np.zeros(ROWS, bool)
        limits, kv_limits = np.ones(ROWS, np.int32), np.zeros(ROWS, np.int32)
        for place, row in enumerate(self.rng.permutation(list(reading)).tolist()):
            prompt, start = reading.pop(row)
            piece = prompt[start : start + self.rng.integers(1, CHUNK + 1)]
            tokens[place, : len(piece)], rows[place] = piece, row
            numbers[:, place] = len(piece), start, place
            limits[place], kv_limits[place] = self._limits(self.request[row])
            last[place] = start + len(piece) == len(prompt)
            if not last[place]:
                reading[row] = (prompt, start + len(piece))
        begins = dataclasses.replace(self.batch.begins, rows=rows, prompt=numbers[2], limit=limits)
        kv_limits = None if self.kv_limit is None else kv_limits
        arrivals = Arrivals(rows, tokens, numbers[0], numbers[1], last, begins, np.int32(0), kv_limits)
        self.carry = admit(self.lm.model, self.carry, arrivals, *self.with_drafter)

    def _limits(self, request):
        """The entries from which a request's row folds, and up to which it reads no checkpoint."""
        if request not in self.limits:
            buffered = int(self.rng.integers(2, self.limit + 1))
            self.limits[request] = [(buffered, KV_LIMIT), (1, 0), (buffered, 0)][request % 3]
        return self.limits[request]

    def _tell(self, row):
        history, counters = jax.device_get((self.carry.history, self.carry.counters))
        self.told[self.request[row]] = history.tokens[row, history.prompt_length[row] : history.length[row]].tolist()
        self.counters[self.request[row]] = jax.tree.map(lambda counted: int(counted[row]), counters)
        self.carry, self.request[row] = release(self.carry, np.int32([row, -1])), -1


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), PAIRS[1:])
def test_rows_come_and_go_and_none_sees_another(architecture, name, rng):
    """Random chunks into rows that others left, while the rest decodes: the tokens of each prompt alone.

    Recurrent, buffered and KV-only rows are in one program; those that stay short read no checkpoint, others always do.
    """
    lm = model_named(architecture, 3)
    while True:
        prompts = draw_prompts(rng, [*LENGTHS, *rng.integers(1, 4 * CHUNK, 5)])
        expected = generate(lm, prompts, NEW, GREEDY)
        if clear(expected):
            break
    server = Server(lm, drafter_named(name, lm), rng)
    assert server.run(prompts) == [result.tokens for result in expected]
    for request, counted in server.counters.items():
        (limit, kv_limit), length = server.limits[request], len(prompts[request])
        assert length > kv_limit or counted.checkpoint_reads < counted.steps
        assert length <= kv_limit or counted.checkpoint_reads == counted.steps
        if length + NEW + DRAFTS <= kv_limit:
            assert counted.checkpoint_reads == counted.folds == 0
        assert limit > 1 or counted.folds >= counted.steps - 1  # behind a prompt the ring is empty
    for row in range(ROWS):
        if server.request[row] >= 0:
            server.carry = release(server.carry, np.int32([row, -1]))
    assert not np.asarray(server.carry.cache.sequences.committed).any()


def lack(batch, **pools):
    """The batch with pools that all rows share, smaller than what they need."""
    return dataclasses.replace(batch, sizes=dataclasses.replace(batch.sizes, **pools))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "drafter", "pools"),
    [
        ("qwen3_5", None, {"pages": 9, "states": 4, "blocks": 9}),
        pytest.param("qwen3_5", NGram(3), {"pages": 9}, marks=pytest.mark.exhaustive),
        pytest.param("llama", None, {"pages": 9}, marks=pytest.mark.exhaustive),
        pytest.param("mamba2", NGram(3), {"states": 3, "blocks": 5}, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_that_lack_memory_end_with_that_reason_and_the_others_are_right(architecture, pools, drafter, rng):
    lm = model_named(architecture, 3)
    while True:
        prompts = draw_prompts(rng, [*rng.integers(1, 40, 5), 3])
        settings = [dataclasses.replace(GREEDY, stop_token_ids=[int(rng.integers(256))]) for _ in prompts]
        expected = generate(lm, prompts, 32, settings)
        if clear(expected):
            break
    batch = lack(make_batch(lm, prompts, settings, Decoding(32, drafter=drafter, draft_tokens=DRAFTS)), **pools)
    found = {event.index: event.result for event in run_batch(batch, 5)}
    reasons = [found[row].finish_reason for row in range(len(prompts))]
    print(reasons)
    assert "memory" in reasons and set(reasons) - {"memory"}
    for row, alone in enumerate(expected):
        assert found[row].tokens == alone.tokens[: len(found[row].tokens)]
        assert reasons[row] == "memory" or found[row].tokens == alone.tokens


@pytest.mark.slow
def test_owners_are_as_many_as_references_after_every_call(rng):
    lm = model_named("qwen3_5", 3)
    batch = lack(make_batch(lm, draw_prompts(rng, (9, 30, 20, 5)), GREEDY, Decoding(NEW)), pages=8, states=4, blocks=6)
    carry = read_prompts(lm, batch.sizes, batch.arrivals)
    rested = 0
    for number in range(12):
        for owned, table in pools_of(carry.cache):
            assert_owned(owned, np.asarray(table)[1:])
        rested += int(np.asarray(carry.lacking).sum())
        if number % 4 == 3:
            carry = release(carry, np.int32([number // 4, number // 4, 99, -5]))
        carry = generate_tokens(lm.model, carry, np.int32(3))
    assert rested
    carry = release(carry, np.arange(4, dtype=np.int32))
    assert all(int(owned.left) == owned.owners.shape[0] - 1 for owned, _ in pools_of(carry.cache))


@pytest.mark.slow
def test_what_no_row_waits_for_is_not_read(rng):
    """Rows that run, rows that are there twice or nowhere, and chunks out of turn: nothing of them changes anything."""
    lm = model_named("qwen3_5", 3)
    batch = make_batch(lm, draw_prompts(rng, (9, 30, 20)), GREEDY, Decoding(NEW))
    (arrivals,) = batch.arrivals
    carry = read_prompts(lm, batch.sizes, [arrivals])
    before = jax.device_get(carry)

    def check(given):
        nonlocal carry
        carry = admit(lm.model, carry, given)
        after = jax.device_get(carry)
        kept = [(x.history, x.state, x.last, x.sampling, x.cache.sequences) for x in (before, after)]
        chex.assert_trees_all_equal(*kept)

    check(arrivals)  # its rows run; the last one of the batch is empty, and nothing comes to it
    nowhere = np.int32([4, 7, -1, 2**30])
    check(dataclasses.replace(arrivals, rows=nowhere, begins=dataclasses.replace(arrivals.begins, rows=nowhere)))
    late = dataclasses.replace(arrivals, rows=np.int32([3, 3, 3, 3]), start=np.full(4, 5, np.int32))
    check(late)
    twice = dataclasses.replace(late, start=np.zeros(4, np.int32))
    begins = Beginning(**{**vars(arrivals.begins), "rows": np.full(4, 3, np.int32)})
    carry = admit(lm.model, carry, dataclasses.replace(twice, begins=begins))
    assert int(carry.cache.sequences.committed[4]) == 9 and int(carry.state[3]) == RUNNING
    assert carry.last[3] == carry.last[0]


LONG = 32768


def long_prompt(rng, monkeypatch, chunk):
    """A batch of one prompt of 32k tokens that is read in chunks."""
    monkeypatch.setattr(batches, "LEAST_CHUNK", chunk)
    monkeypatch.setattr(batches, "CHUNK_TOKENS", chunk)
    lm = random_qwen3_5(3, max_position_embeddings=2 * LONG)
    return make_batch(lm, draw_prompts(rng, [LONG - 7]), GREEDY, Decoding(16))


@pytest.mark.exhaustive
def test_a_long_prompt_needs_no_activations_of_its_length(rng, monkeypatch):
    """At most 1.3 times the carry, the parameters, and what reading a prompt of one chunk needs."""

    def memory(batch):
        shape = jax.eval_shape(lambda: init_carry(batch.lm.config, batch.sizes))
        found = admit.lower(batch.lm.model, shape, batch.arrivals[0]).compile().memory_analysis()
        assert found.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shape))
        return found.argument_size_in_bytes, found.temp_size_in_bytes

    batch = long_prompt(rng, monkeypatch, 512)
    assert len(batch.arrivals) == LONG // 512
    held, temporary = memory(batch)
    _, of_one_chunk = memory(make_batch(batch.lm, [batch.prompts[0][:512]], GREEDY, Decoding(16)))
    _, of_all = memory(long_prompt(rng, monkeypatch, LONG))
    print(f"peak {held + temporary}, held {held}, of one chunk {of_one_chunk}, read at once {of_all}")
    assert held + temporary <= 1.3 * (held + of_one_chunk) < of_all


@pytest.mark.exhaustive
def test_a_long_prompt_in_chunks_gives_the_tokens_of_reading_it_whole(rng, monkeypatch):
    batch = long_prompt(rng, monkeypatch, 2048)
    (chunked,) = generate(batch.lm, batch.prompts, 16, GREEDY)
    monkeypatch.setattr(batches, "LEAST_CHUNK", LONG)
    (whole,) = generate(batch.lm, batch.prompts, 16, GREEDY)
    assert chunked.tokens == whole.tokens or not clear([whole])
