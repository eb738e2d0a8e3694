"""A row from whose logits no token can be chosen ends with an error: no token is made up, no other row is harmed."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.layers import replace_parameters
from jaxbuf.serving import SamplingParams, generate
from jaxbuf.serving.drafters import NGram
from tests.serving.five_tokens import NEW, PROMPTS, five_token_model, greedy
from tests.serving.speculating import VOCAB
from tests.tiny import abstract

NOTHING = {"logit_bias": dict.fromkeys(range(VOCAB), -np.inf)}
OPEN = {"logit_bias": {VOCAB - 1: 0.0, 0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}}  # as many biases: the same program


@pytest.fixture(scope="module")
def lm():
    return five_token_model()


def poisoned(lm, token):
    """The same model with a NaN in the embedding of one token: whoever reads it has no finite logits any more."""
    embedding = lm.model.embed_tokens[...]
    values = [leaf.at[token, 0].set(jnp.nan) if leaf is embedding else leaf for leaf in jax.tree.leaves(lm.model)]
    model = replace_parameters(abstract(lm.config), values)
    assert bool(jnp.isnan(model.embed_tokens[...]).any())
    return dataclasses.replace(lm, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, NGram(2)])
def test_a_row_without_an_allowed_token_ends_with_an_error_and_no_token(lm, drafter, caplog):
    settings = [greedy(**OPEN), greedy(**NOTHING), SamplingParams(seed=1, logprobs=3, ignore_eos=True, **OPEN)]
    settings.append(SamplingParams(seed=2, logprobs=0, **NOTHING))
    with caplog.at_level(logging.WARNING, logger="jaxbuf"):
        results = generate(lm, PROMPTS, NEW, settings, drafter=drafter)
    for result, setting in zip(results, settings, strict=True):
        failed = setting.logit_bias == NOTHING["logit_bias"]
        assert result.finish_reason == ("error" if failed else "length")
        assert (len(result.tokens), len(result.logprobs)) == ((0, 0) if failed else (NEW, NEW))
        assert result.stop_reason is None
    warnings = [record.getMessage() for record in caplog.records if "without a token to choose" in record.getMessage()]
    assert [warning.split()[1] for warning in warnings] == ["1", "3"]


@pytest.mark.parametrize("drafter", [None, pytest.param(NGram(2), marks=pytest.mark.slow)])
def test_a_row_whose_logits_are_not_finite_ends_where_they_begin(lm, drafter):
    """Tokens up to the one that is not to be read are those of the sound model; rows that don't come to it go on."""
    settings = [greedy(**OPEN), *(SamplingParams(seed=i, logprobs=3, ignore_eos=True, **OPEN) for i in range(3))]
    sound = generate(lm, PROMPTS, NEW, settings)
    token = sound[1].tokens[3]
    prompts = [[t for t in prompt if t != token] or [(token + 1) % VOCAB] for prompt in PROMPTS]
    sound = generate(lm, prompts, NEW, settings)
    assert any(token in result.tokens[:-1] for result in sound)
    found = generate(poisoned(lm, token), prompts, NEW, settings, drafter=drafter)
    for result, whole in zip(found, sound, strict=True):
        ends = whole.tokens.index(token) + 1 if token in whole.tokens[:-1] else NEW
        if drafter is None:  # drafts draw from other numbers, so that sampled rows differ
            assert result.tokens == whole.tokens[:ends]
            assert result.finish_reason == ("error" if ends < NEW else "length")
        else:
            assert token not in result.tokens[:-1]
            assert result.finish_reason == (
                "error" if result.tokens[-1] == token and len(result.tokens) < NEW else "length"
            )
        assert np.isfinite(result.logprobs).all()
