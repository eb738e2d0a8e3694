"""Which distribution log-probabilities are of: the model's own, or the one that a token was drawn from."""

import dataclasses

import numpy as np
import pytest

from jaxbuf.serving import SamplingParams, generate
from jaxbuf.serving.drafters import NGram
from tests.serving.five_tokens import NEW, PROMPTS, distribution, five_token_model, greedy
from tests.serving.program import programs_compiled

PROCESSED = "processed"
SETTINGS = [
    SamplingParams(seed=1, temperature=0.7, top_k=3, ignore_eos=True, logprobs=5, logprobs_mode="processed"),
    SamplingParams(
        seed=2,
        temperature=1.3,
        top_p=0.8,
        frequency_penalty=0.4,
        ignore_eos=True,
        logprobs=2,
        logprobs_mode="processed",
    ),
    SamplingParams(seed=3, temperature=0.5, top_p=0.9, ignore_eos=True, logprobs=5),
    greedy(logprobs_mode="processed", frequency_penalty=0.5, logit_bias={0: 0.3, 1: 0.0, 2: 0.0, 3: 0.0, 4: -0.5}),
]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, NGram(2)])
def test_processed_log_probabilities_are_of_what_a_token_was_drawn_from(drafter):
    """By the definition, from the plain forward's logits: with drafts as without, and raw ones beside them."""
    lm = five_token_model()
    results = generate(lm, PROMPTS, NEW, SETTINGS, drafter=drafter)
    for prompt, setting, result in zip(PROMPTS, SETTINGS, results, strict=True):
        logits = np.asarray(lm.logits(prompt + result.tokens), np.float64)[len(prompt) - 1 : -1]
        raw = np.exp(logits - logits.max(-1, keepdims=True))
        raw /= raw.sum(-1, keepdims=True)
        for place, token in enumerate(result.tokens):
            processed = setting.logprobs_mode == "processed"
            p = distribution(logits[place], setting, result.tokens[:place]) if processed else raw[place]
            assert abs(result.logprobs[place] - np.log(p[token])) < 1e-4
            best = [token for token in np.argsort(-p)[: setting.logprobs] if p[token] > 0]
            assert [*result.top_logprobs[place]] == best
            np.testing.assert_allclose([*result.top_logprobs[place].values()], np.log(p[best]), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_how_many_and_which_log_probabilities_are_reported_is_data():
    lm = five_token_model()
    generate(lm, PROMPTS, NEW, greedy(logprobs=0))
    before = programs_compiled()
    for changes in ({"logprobs": 5}, {"logprobs": 20, "prompt_logprobs": 4}, {"logprobs_mode": "processed"}):
        setting = dataclasses.replace(greedy(logprobs=0), **changes)
        for result in generate(lm, PROMPTS, NEW, setting):
            assert [*map(len, result.top_logprobs)] == [
                min(setting.logprobs, 5)
            ] * NEW or setting.logprobs_mode != "raw"
            assert [*map(len, result.prompt_top_logprobs[1:])] == [setting.prompt_logprobs] * (
                result.stats.prompt_tokens - 1
            )
    assert programs_compiled() == before


@pytest.mark.parametrize("mode", ["sampled", None, 1, True])
def test_another_mode_is_named(mode):
    with pytest.raises(ValueError, match='logprobs_mode must be "raw" or "processed", got '):
        SamplingParams(logprobs_mode=mode)
