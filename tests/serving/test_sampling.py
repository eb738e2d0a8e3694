"""Sampling against independent numpy definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.sampling import SamplingParams, pack, sample

ROWS, VOCAB = 4096, 12
draw = jax.jit(sample)


def probabilities(logits, temperature, top_k, top_p):
    """The distribution that one row should be drawn from, in float64."""
    scaled = np.float64(logits) / temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    p[order[top_k or len(p) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 5, 1.0), (1.4, 0, 0.7), (1.0, 6, 0.8)]
)
def test_draws_follow_the_distribution(rng, temperature, top_k, top_p):
    logits = rng.standard_normal(VOCAB).astype(np.float32) * 1.5
    expected = probabilities(logits, temperature, top_k, top_p)
    counts, rounds = np.zeros(VOCAB), 10
    for i in range(rounds):
        params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=s) for s in range(ROWS)]
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
    ],
)
def test_a_parameter_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got"):
        SamplingParams(**{name: value})
