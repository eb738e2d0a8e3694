"""Generation with gates: what a memory that keeps few keys gives is what whole sequences give."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.models.admission import Admission, WriteGate
from jaxbuf.models.families import llama
from jaxbuf.models.gates import with_gates
from jaxbuf.models.language_model import LanguageModel
from tests.tiny import random_model

NEW = 20


@pytest.fixture(scope="module")
def lm():
    config = llama.Config(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-2,
    ).model()
    base = LanguageModel(random_model(config, seed=3), config, None, {}, jnp.dtype("float32"), "tiny")
    return with_gates(base, Admission(WriteGate(5), 4, 0.88), seed=1)


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
