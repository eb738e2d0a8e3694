"""Adaptive drafts: each row drafts as many tokens as its past says will pay, and no token changes for it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving import generate, generate_tokens
from jaxbuf.serving.adaptive import COST, DISCOUNT, PRIOR, PROBE, Adaptive, best_length
from jaxbuf.serving.batch import Decoding, make_batch
from jaxbuf.serving.drafters import MTP
from tests.serving.goodness import RARE
from tests.serving.program import carry_shape, check_reused, computations, generate_batch, operation, written_in_loops
from tests.serving.speculating import (
    DRAFTS,
    GREEDY,
    NEW,
    ROWS,
    Scripted,
    check_equal,
    p_value,
    script,
    tiny_models,
)
from tests.serving.speculating import architecture as architecture
from tests.serving.speculating import greedy as greedy
from tests.serving.speculating import lm as lm
from tests.serving.speculating import prompts as prompts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watching(Scripted):
    """Counts the steps in which the model read nothing but the newest tokens: no hidden state follows theirs."""

    def init(self, config, sizes):
        return jnp.zeros((2, sizes.rows), jnp.int32)

    def admit(self, model, carry, reading):
        return jnp.stack([carry.history.count, jnp.zeros(ROWS, jnp.int32)])

    def propose(self, model, carry, most):
        inside = dataclasses.replace(carry.speculation, state=carry.speculation.state[0])
        return super().propose(model, dataclasses.replace(carry, speculation=inside), most)[0], carry.speculation.state

    def settle(self, model, state, hidden, tokens, number):
        narrow = jnp.all(hidden[:, 1:] == 0).astype(jnp.int32)
        return state + jnp.stack([number, jnp.broadcast_to(narrow, number.shape)])


def watch(results, right, count=DRAFTS) -> Watching:
    return Watching(**vars(script(results, right, count)))


def rates_of(share, most, cost):
    """The definition: tokens of a step for what it costs, by the number of drafts."""
    return [sum(share**i for i in range(k + 1)) / (1 + cost * k) for k in range(most + 1)]


def best_number(share, most, cost):
    rates = rates_of(share, most, cost)
    return rates.index(max(rates))


def test_the_length_is_the_one_with_the_most_tokens_for_the_cost(rng):
    share = rng.random(300).astype(np.float32)
    for most, cost in ((4, 0.1), (15, 0.03), (8, 0.5), (1, 0.2)):
        found = np.asarray(best_length(jnp.asarray(share), most, cost))
        for x, number in zip(share, found, strict=True):
            rates = rates_of(float(x), most, cost)
            # The best one, or equal to it up to the rounding of some thirty operations in float32.
            assert number == rates.index(max(rates)) or rates[number] > (1 - 30 * 2**-24) * max(rates)
        assert (found[share < cost] == 0).all() and (found[share > 1.01 * cost] > 0).all()
    assert best_length(jnp.ones(1), 15, 0.1).tolist() == [15]
    assert best_length(jnp.ones(1), 15, 0.0).tolist() == [15]


def count_by_hand(right, count, new):
    """The steps, drafts and kept drafts of a row, and how many steps had none."""
    tokens, steps, drafted, accepted, without = 1, 0, 0, 0, 0
    kept = judged = 0.0
    while tokens < new:
        length = best_number((kept + PRIOR) / (judged + 1), DRAFTS, COST)
        if length == 0 and steps % PROBE == PROBE - 1:
            length = 1
        drafts = min(count[tokens % 2], length, new - tokens - 1)
        good = min(right[tokens % 2], drafts)
        if drafts:
            kept, judged = DISCOUNT * kept + good, DISCOUNT * judged + min(good + 1, drafts)
        tokens, steps, without = tokens + good + 1, steps + 1, without + (drafts == 0)
        drafted, accepted = drafted + drafts, accepted + good
    return steps, drafted, accepted, without


@pytest.mark.checks("drafters")
@pytest.mark.slow
def test_rows_draft_by_what_was_kept_of_theirs_and_no_token_changes(lm, prompts, greedy):
    """By row: all right, all wrong, half of them, in turns, and a drafter that has few or none."""
    right = [[4, 4], [0, 0], [2, 2], [4, 0], [0, 4], [1, 1], [4, 4], [1, 3]]
    count = [[4, 4], [4, 4], [4, 4], [4, 4], [4, 4], [4, 4], [0, 0], [4, 1]]
    drafter = watch(greedy, right, count)
    results = generate(lm, prompts, NEW, GREEDY, drafter=drafter, adaptive_drafts=True)
    assert check_equal(lm, prompts, results, greedy) == 0
    for row, result in enumerate(results):
        stats = result.stats
        *expected, _ = count_by_hand(right[row], count[row], NEW)
        assert [stats.steps, stats.drafted, stats.accepted] == expected, row
    best, worst = results[0].stats, results[1].stats
    assert best.drafted == best.accepted and best.steps == -(-(NEW - 1) // (1 + DRAFTS))
    assert worst.drafted < worst.steps / 2


@pytest.mark.slow
def test_a_step_in_which_no_row_drafts_reads_one_token(lm, prompts, greedy):
    """All rows are wrong, so most steps are such; log-probabilities and state traffic are those without a drafter."""
    results = generate(lm, prompts, NEW, GREEDY, drafter=watch(greedy, 0), adaptive_drafts=True)
    assert check_equal(lm, prompts, results, greedy) == 0
    steps, drafted, _, without = count_by_hand([0, 0], [4, 4], NEW)
    for result, plain in zip(results, greedy, strict=True):
        assert (result.stats.steps, result.stats.drafted) == (steps, drafted)
        np.testing.assert_allclose(result.logprobs, plain.logprobs, rtol=0, atol=1e-4)
    carry = generate_batch(make_batch(lm, prompts, GREEDY, Decoding(NEW, drafter=Adaptive(watch(greedy, 0)))))
    assert np.asarray(carry.speculation.state.inner[1]).tolist() == [without] * ROWS and without > 20
    settings = [dataclasses.replace(GREEDY, temperature=0.0, frequency_penalty=0.5 * (i % 2)) for i in range(ROWS)]
    plain = generate(lm, prompts, NEW, settings)
    results = generate(lm, prompts, NEW, settings, drafter=watch(greedy, 0), adaptive_drafts=True)
    assert sum(a.tokens == b.tokens for a, b in zip(results, plain, strict=True)) >= ROWS - 1  # one may be a tie


def test_wrong_arguments_are_named(lm):
    with pytest.raises(ValueError, match="adaptive_drafts needs a drafter, got None"):
        generate(lm, [[1]], adaptive_drafts=True)
    with pytest.raises(ValueError, match="adaptive_drafts must be True or False, got 'no'"):
        generate(lm, [[1]], drafter="ngram", adaptive_drafts="no")
    with pytest.raises(ValueError, match=r"drafter must be .* got 'mtp' in an Adaptive"):
        generate(lm, [[1]], drafter=Adaptive("mtp"))
    for cost in (-0.1, float("nan"), float("inf"), "0.1"):
        with pytest.raises(ValueError, match=f"cost must be a finite number of at least 0, got {cost!r}"):
            Adaptive(MTP(4), cost=cost)


@pytest.mark.exhaustive
def test_the_program_copies_no_pool(lm, prompts, greedy):
    """Not in either of the two branches; what the memory of a whole model holds is written in place."""
    drafter = Adaptive(MTP(DRAFTS))
    carry = carry_shape(make_batch(lm, prompts, GREEDY, Decoding(NEW, drafter=drafter)))
    text = generate_tokens.lower(lm.model, carry, np.int32(9), drafter).compile().as_text()
    assert written_in_loops(text, lm.config.spec.state_shape) == []
    recurrent, softmax = carry.cache.layers
    pools = recurrent.pool.checkpoints, recurrent.pool.keys, recurrent.pool.updates, softmax.keys
    shapes = [re.escape(f"[{','.join(map(str, pool.shape))}]") for pool in pools]
    lines = [line for lines in computations(text).values() for line in lines if operation(line)[1].startswith("copy")]
    assert not [line for line in lines if any(re.search(shape, operation(line)[0]) for shape in shapes)]
    check_reused(text, carry)


@pytest.mark.checks("drafters")
@pytest.mark.exhaustive
def test_sampled_tokens_are_distributed_as_by_exact_enumeration(architecture, rng, monkeypatch):
    """With trees of the MTP layer, at a cost that lets rows differ in how many drafts they have."""
    drafter, model = Adaptive(MTP(4, branches=2), cost=0.3), tiny_models(architecture)[0]
    if model.model.mtp is None:
        pytest.skip("the architecture has no MTP layer")
    p = p_value(model, drafter, rng, monkeypatch)
    print(f"p = {p:.3g}")
    assert p > RARE
