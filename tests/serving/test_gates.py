"""Generation with gates: what a memory that keeps few keys gives is what whole sequences give."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.gates import with_gates, with_room, with_threshold
from tests.tiny import llama_model

NEW = 20


@pytest.fixture(scope="module")
def lm():
    return with_gates(llama_model(3), Admission(WriteGate(5), 4, 0.88), seed=1)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 61, n).tolist() for n in (30, 3)]


@pytest.fixture(scope="module")
def greedy(lm, prompts):
    return jaxbuf.generate(lm, prompts, max_new_tokens=NEW)


def test_greedy_tokens_are_those_of_whole_sequences_and_some_keys_are_kept(lm, prompts, greedy):
    from jaxbuf.models import decoder

    for prompt, result in zip(prompts, greedy, strict=True):
        text = np.array(prompt + result.tokens)
        found = np.asarray(lm.logits(text))[len(prompt) - 1 : -1]
        assert (np.max(found, axis=1) - found[np.arange(NEW), result.tokens] < 1e-4).all()
    kept = np.asarray(decoder.forward_with_gates(lm.model, jnp.asarray(text[None]))[1]) >= 0.88
    assert 0.1 < kept.mean() < 0.9


def test_statistics_tell_which_keys_are_kept(lm, prompts, greedy):
    from jaxbuf.models import decoder

    for prompt, result in zip(prompts, greedy, strict=True):
        text = np.array([prompt + result.tokens])
        gates = np.asarray(decoder.forward_with_gates(lm.model, jnp.asarray(text))[1])[:, 0]
        passed = result.stats.passed_tokens
        assert len(prompt) + NEW - 4 - 8 <= passed or passed == 0
        kept = np.sum(gates[:, :passed] >= 0.88, axis=1)
        np.testing.assert_array_equal(result.stats.kept_keys, kept)
        np.testing.assert_allclose(result.stats.kept_shares, kept / max(passed, 1))
        assert not np.any(result.stats.dropped_keys)
        assert result.stats.threshold == pytest.approx(0.88)


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["evict", pytest.param("raise", marks=pytest.mark.exhaustive)])
def test_room_for_few_keys_is_each_requests_own(lm, when_full):
    prompts = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (150, 140)]
    small = with_room(with_threshold(lm, 0.0), keep=0.2, when_full=when_full)
    results = jaxbuf.generate(small, prompts, max_new_tokens=NEW)
    (alone,) = jaxbuf.generate(small, prompts[1:], max_new_tokens=NEW)
    assert results[1].tokens == alone.tokens
    for result in results:
        stats = result.stats
        assert result.finish_reason == "length"
        kept, dropped = np.array(stats.kept_keys), np.array(stats.dropped_keys)
        if when_full == "evict":
            np.testing.assert_array_equal(kept + dropped, np.full((2, 2), stats.passed_tokens))
            assert stats.threshold == 0
        else:
            assert stats.threshold > 0.5
        assert (dropped.sum(axis=1) > 0).all()
        assert (kept.sum(axis=1) <= 0.2 * 2 * 320).all()  # a capacity of 320 tokens or less
        assert (kept.sum(axis=1) > 0).all()


@pytest.mark.slow
def test_drafts_and_trees_change_no_token(lm, prompts, greedy):
    from jaxbuf.serving.drafters import NGram

    for drafter in ("ngram", NGram(4, branches=2)):
        results = jaxbuf.generate(lm, prompts, max_new_tokens=NEW, drafter=drafter)
        assert [result.tokens for result in results] == [result.tokens for result in greedy]


@pytest.mark.slow
def test_samples_share_a_prompt_and_are_those_of_their_seeds(lm, prompts):
    def sampled(seed, n):
        sampling = jaxbuf.SamplingParams(temperature=1.0, seed=seed, n=n)
        return jaxbuf.generate(lm, prompts, max_new_tokens=NEW, sampling=sampling)

    alone = [sampled(seed, 1) for seed in (7, 8)]
    for row, result in enumerate(sampled(7, 2)):
        assert [sample.tokens for sample in result.samples] == [each[row].tokens for each in alone]


@pytest.mark.slow
def test_the_scores_of_beams_are_those_of_whole_sequences(lm, prompts):
    for prompt, beams in zip(prompts, jaxbuf.beam_search(lm, prompts, 8, beams=3), strict=True):
        for beam in beams:
            scores = np.asarray(lm.score(np.array(prompt + beam.tokens)))[len(prompt) :]
            assert beam.score == pytest.approx(scores.sum(), abs=1e-3)
