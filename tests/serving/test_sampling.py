"""Sampling against independent numpy definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.sampling import History, SamplingParams, adjust, pack, sample

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
    logits = rng.standard_normal(VOCAB).astype(np.float32) * 1.5
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = probabilities(logits, **settings)
    counts, rounds = np.zeros(VOCAB), 10
    for i in range(rounds):
        params = [SamplingParams(**settings, seed=s) for s in range(ROWS)]
        tokens = draw(jnp.tile(logits, (ROWS, 1)), pack(params), jnp.full(ROWS, i, jnp.int32))
        counts += np.bincount(tokens, minlength=VOCAB)
    total = rounds * ROWS
    assert (counts[expected == 0] == 0).all()
    alive = expected > 0
    chi_square = ((counts - total * expected)[alive] ** 2 / (total * expected[alive])).sum()
    # Mean dof, deviation sqrt(2 dof): eight deviations do not happen by chance.
    dof = alive.sum() - 1
    assert chi_square < dof + 8 * np.sqrt(2 * dof) + 8


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
    history = History(*(jnp.asarray(x, jnp.int32) for x in (prompts, lengths, tokens, count, stop_ids)))
    actual = np.asarray(change(jnp.asarray(logits), pack(params), history))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert (actual[0] == logits[0]).all() and (actual[5] == logits[5]).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**32),
        ("stop_token_ids", (-2,)),
        ("min_p", 1.2),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {3: float("inf")}),
        ("min_tokens", -1),
        ("stop", ("fine", "")),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_parameter_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got"):
        SamplingParams(**{name: value})
