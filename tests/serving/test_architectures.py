"""What holds for every architecture: forms, drafts, trees, samples and beams change no token.

For each but the first, which the other files test in full; `scripts/test --exhaustive` has those tests for all.
"""

import dataclasses

import numpy as np
import pytest

from jaxbuf.serving import SamplingParams, beam_search, generate
from jaxbuf.serving.drafters import NGram
from tests.serving import test_beams
from tests.serving.goodness import RARE
from tests.serving.speculating import (
    GREEDY,
    NEW,
    OTHERS,
    check_equal,
    p_value,
    script,
    tiny_models,
)
from tests.serving.speculating import greedy as greedy
from tests.serving.speculating import lm as lm
from tests.serving.speculating import prompts as prompts
from tests.serving.test_trees import plant

SAMPLES = 4


# For which a test runs under `scripts/test --all`, which has to end soon; for the others by hand.
OF_EACH = {
    "test_drafts_that_are_right_wrong_or_both_change_no_token": ("llama",),
    "test_trees_of_drafts_change_no_token": ("llama",),
    "test_no_score_depends_on_what_is_kept": ("falcon_h1",),
}


def pytest_generate_tests(metafunc):
    """Which architectures a test is for, and for which of them by hand."""
    if "architecture" in metafunc.fixturenames:
        always = OF_EACH.get(metafunc.function.__name__, ())
        params = [x if x in always else pytest.param(x, marks=pytest.mark.exhaustive) for x in OTHERS]
        metafunc.parametrize("architecture", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def architecture(request):
    return request.param


@pytest.mark.checks("drafters")
@pytest.mark.slow
def test_drafts_that_are_right_wrong_or_both_change_no_token(lm, prompts, greedy):
    """In every form: what is rejected leaves no trace, in whatever memories the architecture has."""
    drafter = script(greedy, [[4, 0], [0, 4], [2, 2], [4, 4], [3, 3], [0, 0], [1, 3], [4, 1]])
    for settings in ({}, {"form": "recurrent"}, {"limit": 5}):
        results = generate(lm, prompts, NEW, GREEDY, drafter=drafter, **settings)
        assert check_equal(lm, prompts, results, greedy) == 0
        folds = [result.stats.folds for result in results]
        assert any(folds) == (lm.config.spec is not None)


@pytest.mark.checks("forms")
@pytest.mark.slow
def test_forms_and_limits_change_no_token(lm, prompts, greedy):
    for settings in ({"form": "recurrent"}, {"limit": 1}, {"limit": 7}):
        check_equal(lm, prompts, generate(lm, prompts, NEW, GREEDY, **settings), greedy)


@pytest.mark.checks("trees")
@pytest.mark.slow
def test_trees_of_drafts_change_no_token(lm, prompts, greedy, rng):
    for drafter in (plant(greedy, rng), NGram(6, branches=3)):
        results = generate(lm, prompts, NEW, GREEDY, drafter=drafter)
        assert check_equal(lm, prompts, results, greedy) == 0


@pytest.mark.checks("drafters")
@pytest.mark.slow
def test_the_model_drafts_for_itself(lm, prompts, greedy):
    """As a draft model it has a memory of its own, which goes on from what was accepted."""
    results = generate(lm, prompts, NEW, GREEDY, drafter=lm)
    check_equal(lm, prompts, results, greedy)
    accepted, drafted = (sum(getattr(r.stats, name) for r in results) for name in ("accepted", "drafted"))
    assert accepted == drafted > 0


@pytest.mark.checks("drafters")
@pytest.mark.slow
def test_sampled_tokens_are_distributed_as_by_exact_enumeration(architecture, rng, monkeypatch):
    p = p_value(tiny_models(architecture)[0], "ngram", rng, monkeypatch)
    print(f"p = {p:.3g}")
    assert p > RARE


@pytest.mark.checks("samples")
@pytest.mark.slow
def test_samples_are_the_requests_with_the_seeds_that_follow(lm, prompts):
    """Their rows share what the prompt left, and what they write is their own."""
    some = prompts[:3]
    settings = [SamplingParams(temperature=1.0, seed=5 + i, n=SAMPLES, ignore_eos=True) for i in range(len(some))]
    own = [dataclasses.replace(each, n=1, seed=each.seed + j) for each in settings for j in range(SAMPLES)]
    expected = generate(lm, [prompt for prompt in some for _ in range(SAMPLES)], NEW, own)
    found = [sample for result in generate(lm, some, NEW, settings) for sample in result.samples]
    assert [sample.tokens for sample in found] == [result.tokens for result in expected]
    assert len({tuple(sample.tokens) for sample in found}) == len(found)


@pytest.mark.checks("beams")
@pytest.mark.slow
def test_beams_are_those_of_the_search_over_the_plain_forward(lm, rng):
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in test_beams.LENGTHS]
        expected, near = zip(*(test_beams.search(lm, prompt, stops=(256,)) for prompt in prompts), strict=True)
        if min(near) > test_beams.TIE:
            break
    found = beam_search(lm, prompts, test_beams.NEW, beams=test_beams.BEAMS, limit=test_beams.LIMIT)
    for beams, plain in zip(found, expected, strict=True):
        test_beams.check(beams, plain, (256,))


@pytest.mark.slow
@pytest.mark.checks("forms")
def test_no_score_depends_on_what_is_kept(lm, prompts):
    """`score` reads through a cache, `logits` does not."""
    tokens = np.array(prompts[-1] + prompts[-2][:7])
    logits = np.asarray(lm.logits(tokens), np.float64)[:-1]
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    expected = np.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(lm.score(tokens)[1:], expected, rtol=0, atol=1e-4)
