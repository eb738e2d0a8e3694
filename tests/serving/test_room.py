"""Loops of one's own over memory that is too small: who rests, who ends, and what everybody else gets."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models import decoder
from jaxbuf.serving import SamplingParams, admit, generate, generate_tokens, init_carry, make_room, release
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.carry import EMPTY, FULL, RUNNING, STARVED
from jaxbuf.serving.drafters import DraftModel
from jaxbuf.serving.generation import read_prompts, run_batch
from tests.models.test_memory_kinds import pools_of
from tests.recurrence.twin import assert_owned
from tests.serving.speculating import Scripted, model_named
from tests.serving.test_admit import GREEDY, clear, draw_prompts, lack

PAGE = 16
PLAIN = dataclasses.replace(GREEDY, logprobs=None, prompt_logprobs=None)


def free_pages(cache):
    ((owned, _),) = pools_of(cache)
    return int(owned.left)


def expect(lm, rng, lengths, new, setting=GREEDY):
    """Prompts, and the results that they have alone."""
    while True:
        prompts = draw_prompts(rng, lengths)
        expected = generate(lm, prompts, new, dataclasses.replace(setting, logprobs=2))
        if clear([sample for result in expected for sample in result.samples]):
            return prompts, expected


@pytest.mark.exhaustive
def test_samples_of_a_prompt_that_there_is_no_memory_for_end_with_it(rng):
    """Neither the row that would read the prompt begins nor those that would continue it."""
    lm, twice = model_named("llama", 3), dataclasses.replace(GREEDY, n=2)
    prompts, expected = expect(lm, rng, (2 * PAGE + 8, 5), 8, twice)
    batch, found = lack(make_batch(lm, prompts, twice, Decoding(8)), pages=2), {}
    for number, event in enumerate(run_batch(batch, 4)):
        found[event.index, event.sample] = event.result
        assert number < 20, "the generation does not end"
    for sample in range(2):
        unread, read = found[0, sample], found[1, sample]
        assert (unread.finish_reason, unread.tokens, unread.prompt_logprobs) == ("memory", [], None)
        assert (read.finish_reason, read.tokens) == ("length", expected[1].samples[sample].tokens)
        np.testing.assert_allclose(read.prompt_logprobs[1:], expected[1].prompt_logprobs[1:], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_what_a_row_had_that_ends_for_want_of_memory_serves_the_others_at_once(rng):
    lm = model_named("llama", 3)
    prompts, expected = expect(lm, rng, (30, 29), 60, PLAIN)
    batch = lack(make_batch(lm, prompts, PLAIN, Decoding(60)), pages=8)
    carry = read_prompts(lm, batch.sizes, batch.arrivals)
    carry = generate_tokens(lm.model, carry, np.int32(100))
    assert carry.lacking.tolist() == [True, True] and free_pages(carry.cache) == 0
    carry = make_room(carry)
    assert carry.state.tolist() == [RUNNING, STARVED] and free_pages(carry.cache) == 4
    told = jax.device_get(carry.history)
    tokens = told.tokens[1, told.prompt_length[1] : told.length[1]].tolist()
    assert len(tokens) > 20 and tokens == expected[1].tokens[: len(tokens)]
    carry = generate_tokens(lm.model, carry, np.int32(100))
    assert carry.state.tolist() == [FULL, STARVED] and not carry.lacking.any()
    history = jax.device_get(carry.history)
    assert history.tokens[0, history.prompt_length[0] : history.length[0]].tolist() == expected[0].tokens
    assert make_room(carry) is carry  # nobody rests
    carry = release(carry, np.int32([0, 1]))
    assert carry.state.tolist() == [EMPTY, EMPTY] and free_pages(carry.cache) == 8


@pytest.mark.slow
def test_a_text_is_no_longer_than_the_carry_has_room_for(rng):
    """A generation ends there; a prompt that is longer rests; one that fills all of it gets no token."""
    lm = model_named("llama", 3)
    prompts, (expected, *_) = expect(lm, rng, (10, 17, 16), 12, PLAIN)
    batch = make_batch(lm, prompts, PLAIN, Decoding(12))
    carry = read_prompts(lm, dataclasses.replace(batch.sizes, capacity=PAGE), batch.arrivals)
    assert carry.lacking.tolist() == [False, True, False, False]
    carry = generate_tokens(lm.model, carry, np.int32(30))
    assert carry.state.tolist() == [FULL, EMPTY, FULL, EMPTY]
    assert carry.history.count.tolist() == [6, 0, 0, 0]
    assert carry.history.tokens[0, 10:].tolist() == expected.tokens[:6]
    assert make_room(carry).state.tolist() == [FULL, STARVED, FULL, EMPTY]


@pytest.mark.slow
def test_rows_begin_where_their_prompt_is_or_not_at_all(rng):
    """Without forks a row continues no prompt of another; with them, no row that is reading one of its own."""
    lm = model_named("llama", 3)
    batch = make_batch(lm, [[1, 2, 3]] * 2, dataclasses.replace(PLAIN, n=2), Decoding(8))
    (whole,) = batch.arrivals
    assert whole.begins.forks and whole.rows.tolist() == [0, 2]
    first = dataclasses.replace(whole, rows=np.int32([0, -1]))
    alone = dataclasses.replace(first, begins=dataclasses.replace(first.begins, forks=False))
    carry = admit(lm.model, init_carry(lm.config, batch.sizes), alone)
    assert carry.state.tolist() == [RUNNING, EMPTY, EMPTY, EMPTY] and not carry.lacking.any()
    half = dataclasses.replace(first, rows=np.int32([1, -1]), last=np.zeros(2, bool), begins=None)
    carry = admit(lm.model, init_carry(lm.config, batch.sizes), half)
    carry = admit(lm.model, carry, first)
    assert carry.state.tolist() == [RUNNING, EMPTY, EMPTY, EMPTY]
    assert carry.position.tolist() == [3, 3, 0, 0]


@pytest.mark.slow
def test_rows_without_a_request_ask_for_nothing(rng):
    """So that the settings of requests that are gone cost later ones nothing."""
    lm = model_named("llama", 3)
    setting = SamplingParams(temperature=1.0, repetition_penalty=1.3, top_k=3, logit_bias={1: 2.0}, seed=7)
    batch = make_batch(lm, [[1, 2], [3, 4]], [setting, PLAIN], Decoding(8))
    empty, carry = init_carry(lm.config, batch.sizes), read_prompts(lm, batch.sizes, batch.arrivals)
    assert carry.sampling.temperature.tolist() == [1, 0]
    carry = release(carry, np.int32([0]))
    chex.assert_trees_all_equal(*(jax.tree.map(lambda leaf: leaf[0], x.sampling) for x in (carry, empty)))


@pytest.mark.exhaustive
def test_a_draft_model_catches_up_after_it_had_no_memory(rng):
    """Its own model drafts, so every draft is right. What it missed it reads later, and gives back what rows had."""
    lm = model_named("llama", 3)
    drafter = DraftModel(lm.model, 3)
    prompts, expected = expect(lm, rng, (30, 29), 60, PLAIN)
    batch = lack(make_batch(lm, prompts, PLAIN, Decoding(60, drafter=drafter)), pages=9)
    carry = read_prompts(lm, batch.sizes, batch.arrivals, drafter)
    state = decoder.reset(carry.speculation.state, np.int32([1]))
    carry = dataclasses.replace(carry, speculation=dataclasses.replace(carry.speculation, state=state))

    def steps(carry, number):
        carry = generate_tokens(lm.model, carry, np.int32(number), drafter)
        for cache in (carry.cache, carry.speculation.state):
            for owned, table in pools_of(cache):
                assert_owned(owned, np.asarray(table)[1:])
        told = jax.device_get(carry.history)
        for row, alone in enumerate(expected):
            tokens = told.tokens[row, told.prompt_length[row] : told.length[row]].tolist()
            assert tokens == alone.tokens[: len(tokens)]
        return carry

    def positions(carry):
        return carry.speculation.state.sequences.committed[1:].tolist()

    carry = steps(carry, 1)
    assert positions(carry) == [4, 33] and carry.speculation.drafted.tolist() == [0, 3]
    carry = steps(carry, 100)  # until no row can go on; row 0 has caught up, and drafted since
    assert positions(carry) == carry.position.tolist() and carry.speculation.drafted[0] > 5
    assert carry.speculation.drafted.tolist() == carry.speculation.accepted.tolist()
    assert carry.lacking.tolist() == [True, True]
    before = carry.speculation.drafted.tolist()
    carry = steps(make_room(carry), 100)
    assert carry.state.tolist() == [FULL, STARVED] and carry.speculation.drafted[0] > before[0]
    assert carry.speculation.drafted.tolist() == carry.speculation.accepted.tolist()
    assert positions(carry) == carry.position.tolist()
    carry = release(carry, np.int32([0, 1]))
    carry = admit(lm.model, carry, batch.arrivals[0], drafter)
    assert positions(carry) == carry.position.tolist() == [30, 29]
    assert free_pages(carry.speculation.state) == free_pages(carry.cache) == 5


@pytest.mark.exhaustive
def test_drafts_that_memory_left_unread_say_nothing_of_the_drafter(rng):
    lm, new = model_named("llama", 3), 40
    prompts, expected = expect(lm, rng, (29, 29), new, PLAIN)
    right = jnp.asarray([result.tokens + [0] * 20 for result in expected], jnp.int32)
    four = jnp.full((2, new), 4, jnp.int32)
    drafter = Adaptive(Scripted(right, four, four, 4), cost=0.01)
    batch = lack(make_batch(lm, prompts, PLAIN, Decoding(new, drafter=drafter)), pages=5)
    carry = read_prompts(lm, batch.sizes, batch.arrivals, batch.drafter)
    for _ in range(3):  # a page is left: the first row takes it, and the other one reads no drafts
        carry = generate_tokens(lm.model, carry, np.int32(1), batch.drafter)
    kept, judged = carry.speculation.state.kept, carry.speculation.state.judged
    assert carry.speculation.drafted.tolist() == [12, 0]
    assert kept.tolist() == judged.tolist() and kept[0] > 7 and kept[1] == 0
