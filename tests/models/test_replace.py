"""Other parameters in a model that is there."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxbuf.models.layers import replace_parameters
from jaxbuf.serving import SamplingParams, generate
from tests.serving.program import programs_compiled
from tests.serving.speculating import random_llama, random_qwen3_5

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.slow
def test_what_was_compiled_serves_other_parameters():
    lm, other = random_qwen3_5(3), random_qwen3_5(4)
    expected = generate(other, [[1, 2, 3]], 8, GREEDY)[0].tokens
    before = programs_compiled()
    changed = lm.replace(model=other.model)
    assert generate(changed, [[1, 2, 3]], 8, GREEDY)[0].tokens == expected
    assert programs_compiled() == before
    assert changed == dataclasses.replace(lm, model=other.model) and lm.model is not changed.model


def test_a_model_that_does_not_fit_is_refused_with_what_differs():
    lm = random_qwen3_5(3)
    with pytest.raises(ValueError, match=r"model must be a Decoder, as LanguageModel\.model is, got 'demo'"):
        lm.replace(model="demo")
    for other in (random_llama(3), random_qwen3_5(3, num_hidden_layers=4)):
        with pytest.raises(ValueError, match=r"model must have the structure of LanguageModel\('tiny', 2 layers"):
            lm.replace(model=other.model)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(lm.model)]
    leaves[0] = leaves[0][..., :-1]
    with pytest.raises(ValueError, match=r"\w+ must be float32 \(.*\), got float32 \("):
        lm.replace(model=replace_parameters(lm.model, leaves))
