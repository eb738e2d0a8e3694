"""Sampling against independent numpy definitions."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.sampling import SamplingParams, adjust, pack, sample
from tests.serving.goodness import RARE, tail_bound
from tests.serving.texts import history_of

ROWS, VOCAB = 4096, 12
draw = jax.jit(sample)
change = jax.jit(adjust)


def probabilities(logits, temperature, top_k, top_p, min_p=0.0):
    """The distribution that one row should be drawn from, in float64."""
    scaled = np.float64(logits) / temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    p[p < min_p] = 0
    p[order[top_k or len(p) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def is_clear(logits, temperature, top_k, top_p, min_p=0.0):
    """Whether rounding decides nothing in `probabilities`: no token is near a limit, and no two are nearly equal.

    What is compared with a limit has an error of a few 1e-7 in float32.
    """
    narrower, wider = 1 - 1e-5, 1 + 1e-5
    fewer = probabilities(logits, temperature, top_k, top_p * narrower if top_p < 1 else 1, min_p * wider) > 0
    more = probabilities(logits, temperature, top_k, top_p * wider if top_p < 1 else 1, min_p * narrower) > 0
    return (fewer == more).all() and np.diff(np.sort(logits)).min() > 1e-5 * temperature


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 5, 1.0, 0.0),
        (1.4, 0, 0.7, 0.0),
        (1.0, 6, 0.8, 0.0),
        (1.3, 0, 0.9, 0.2),
        (1, 4, 1, 0.4),
    ],
)
def test_draws_follow_the_distribution(rng, temperature, top_k, top_p, min_p):
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = (rng.standard_normal(VOCAB).astype(np.float32) * 1.5 for _ in itertools.count())
    logits = next(some for some in drawn if is_clear(some, **settings))
    counts, rounds = np.zeros(VOCAB, int), 10
    for i in range(rounds):
        params = [SamplingParams(**settings, seed=s) for s in rng.choice(2**32, ROWS, replace=False).tolist()]
        tokens = draw(jnp.tile(logits, (ROWS, 1)), pack(params), jnp.full(ROWS, i, jnp.int32))
        counts += np.bincount(tokens, minlength=VOCAB)
    found = {token: int(number) for token, number in enumerate(counts) if number}
    assert tail_bound(found, dict(enumerate(rounds * ROWS * probabilities(logits, **settings)))) > RARE


def test_rows_mix_settings_and_do_not_see_each_other(rng):
    logits = jnp.asarray(rng.standard_normal((6, VOCAB)), jnp.float32)
    position = jnp.arange(6, dtype=jnp.int32) + 40
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1, seed=3),
        SamplingParams(temperature=1.0, top_p=1e-6, seed=4),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.0, top_k=3),
        SamplingParams(temperature=2.0, top_k=4, top_p=0.9, seed=2**32 - 1),
    ]
    together = np.asarray(draw(logits, pack(params), position))
    best = np.argmax(np.asarray(logits), axis=-1)
    assert (together[[0, 1, 2, 4]] == best[[0, 1, 2, 4]]).all()
    for row in range(6):
        alone = draw(logits[row : row + 1], pack(params[row : row + 1]), position[row : row + 1])
        assert int(alone[0]) == together[row]


def test_a_tiny_temperature_is_greedy(rng):
    logits = jnp.asarray(30 * rng.standard_normal((4, VOCAB)), jnp.float32)
    params = [SamplingParams(temperature=temperature, min_p=0.1) for temperature in (1e-38, 1e-30, 1e-9, 1e-6)]
    best = np.argmax(np.asarray(logits), axis=-1)
    np.testing.assert_array_equal(draw(logits, pack(params), jnp.arange(4, dtype=jnp.int32)), best)


def test_the_random_numbers_belong_to_seed_and_position():
    logits = jnp.zeros((64, 500))

    def tokens(seed, position):
        params = pack([SamplingParams(seed=seed)] * 64)
        return np.asarray(draw(logits, params, jnp.full(64, position, jnp.int32)))

    assert (tokens(1, 7) == tokens(1, 7)[0]).all()
    assert len({int(tokens(seed, p)[0]) for seed in range(4) for p in range(4)}) > 8


def test_penalties_biases_and_min_tokens_are_the_definition(rng):
    """Against loops over tokens in numpy, every row with settings of its own."""
    rows, vocab, bucket, room = 6, 50, 9, 12
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    prompts, tokens = rng.integers(0, vocab, (rows, bucket)), rng.integers(0, 8, (rows, room))
    lengths, count = rng.integers(1, bucket + 1, rows), np.array([0, 1, 5, 12, 7, 3])
    stop_ids = np.tile([7, 49, -1], (rows, 1))
    params = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.9, frequency_penalty=-0.4),
        SamplingParams(logit_bias={0: 4.0, 49: -2.5, 11: -np.inf, 3: 1.0, 4: 1.0}),
        SamplingParams(frequency_penalty=1.1, repetition_penalty=0.8, min_tokens=8, logit_bias={7: 100.0}),
        SamplingParams(min_tokens=3),
    ]
    expected = logits.astype(np.float64)
    for row, p in enumerate(params):
        for token, bias in p.logit_bias.items():
            expected[row, token] += bias
        if count[row] < p.min_tokens:
            expected[row, [7, 49]] = -np.inf
        generated = tokens[row, : count[row]].tolist()
        for token in {*generated, *prompts[row, : lengths[row]].tolist()}:
            score = expected[row, token]
            expected[row, token] = score / p.repetition_penalty if score > 0 else score * p.repetition_penalty
        for token in set(generated):
            expected[row, token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    history = history_of(prompts, lengths, tokens, count, stop_ids)
    actual = np.asarray(change(jnp.asarray(logits), pack(params), history))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert (actual[0] == logits[0]).all() and (actual[5] == logits[5]).all()


WRONG = {
    "temperature": [-0.1, float("nan"), float("inf"), 1e39, "hot", None],
    "top_k": [-1, 2.5, True],
    "top_p": [0.0, 1.1, float("nan"), None],
    "min_p": [-0.1, 1.2, "0.1"],
    "presence_penalty": [float("inf"), None],
    "frequency_penalty": [float("nan"), True],
    "repetition_penalty": [0.0, -1.0, float("inf")],
    "logit_bias": [{-1: 2.0}, {3: float("inf")}, {3: float("nan")}, {"3": 1.0}, {3: "much"}, [3], None],
    "min_tokens": [-1, 1.0],
    "seed": [-1, 2**32, 0.5, None],
    "stop": [("fine", ""), "", 7, None, [b"bytes"]],
    "stop_token_ids": [(-2,), (1.5,), 3, "end", None],
    "ignore_eos": [1, None],
    "logprobs": [21, -1, 2.0, True],
    "prompt_logprobs": [21, -1, 2.0, True],
    "logprobs_mode": ["sampled", None, True, 0],
    "n": [0, -1, 2.0, True, "3", None, 1025],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_parameter_out_of_range_is_named(name):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got {re.escape(repr(value))}$"):
            SamplingParams(**{name: value})


def test_every_parameter_is_checked():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(WRONG)


def test_what_is_at_the_edge_of_its_range_is_taken():
    edges = {"temperature": 0, "top_p": 1, "min_p": 1, "seed": 2**32 - 1, "logprobs": 20, "prompt_logprobs": 0}
    params = SamplingParams(**edges, logit_bias={0: -np.inf}, top_k=2**40, min_tokens=2**40, stop=["a"])
    packed = pack([params])
    assert (int(packed.top_k[0]), int(packed.min_tokens[0]), int(packed.seed[0])) == (2**31 - 1, 2**31 - 1, 2**32 - 1)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 0.6, "eos_token_id": 3}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": True, "top_p": 0.9, "top_k": None}, {"top_p": 0.9}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        ),
    ],
)
def test_the_defaults_of_a_checkpoint_are_settings(lm, file, expected):
    found = dataclasses.replace(lm, generation_config=file).sampling_defaults
    assert SamplingParams(**found) == SamplingParams(**expected)
