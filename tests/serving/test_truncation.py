"""top_k and top_p without a sort, against sorting in float64; and noise that belongs to single tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving import truncation
from jaxbuf.serving.acceptance import log_distribution
from jaxbuf.serving.sampling import SamplingParams, has_candidate, keys, narrow, noise, noise_of, pack, sample, scale

VOCABULARIES = [37, 1500, 16_411]  # fewer than are sorted at once; two and three levels of groups, the last not full
ROWS = 24
ROUNDING = 1e-5  # of a sum of probabilities in float32
SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 64, "top_p": 0.999},
    {"top_k": 65},
    {"top_k": 2000, "top_p": 0.9},
    {"top_k": 100_000},
    {"top_p": 1e-6},
    {"top_p": 0.3, "min_p": 0.01},
    {"top_p": 0.95},
    {"top_p": 0.99999},
    {"top_k": 5, "temperature": 0.0},
]

narrowed, chosen, scaled = jax.jit(narrow), jax.jit(sample), jax.jit(scale)


@jax.jit
def first_tokens(logits, sampling):
    return truncation.most_probable(logits, functools.partial(scale, sampling))


def drawn_rows(rng, rows, vocab):
    """Logits of rows from flat to peaked: without ties, with a few, and of two values alone; some tokens forbidden."""
    logits = rng.standard_normal((rows, vocab)) * np.exp(rng.uniform(-3, 2.3, (rows, 1)))
    kind = rng.integers(0, 4, (rows, 1))
    logits = np.where(kind == 1, np.round(4 * logits) / 4, np.where(kind == 2, logits > 0, logits))
    forbidden = rng.random((rows, vocab)) < rng.choice([0, 0.5, 0.999], (rows, 1))
    forbidden[np.arange(rows), rng.integers(0, vocab, rows)] = False
    return np.where(forbidden, -np.inf, logits).astype(np.float32)


def drawn_settings(rng, rows):
    """All SETTINGS equally often, in any order."""
    temperatures, seeds = rng.choice([0.3, 0.8, 1.0, 2.5], rows).tolist(), rng.integers(0, 2**32, rows).tolist()
    chosen = rng.permutation(np.resize(SETTINGS, rows))
    return [
        SamplingParams(**{"temperature": temperature, "seed": seed} | setting)
        for temperature, seed, setting in zip(temperatures, seeds, chosen, strict=True)
    ]


def scaled_by_hand(logits, p):
    value = np.float64(logits - logits.max()) / (p.temperature or 1.0)
    return np.where(value >= (np.log(p.min_p) if p.min_p else -np.inf), value, -np.inf)


def left_of(value, p):
    """The tokens of a row in the order of float32 log-probabilities, and the fewest and the most of them that stay."""
    order = np.argsort(-value, kind="stable")
    probability = np.exp(np.float64(value[order]))
    number = min(p.top_k or len(order), int((probability > 0).sum()))
    probability = probability[:number] / probability[:number].sum()
    before = np.concatenate([[0.0], np.cumsum(probability)[:-1]])
    fewest, most = (
        number if p.top_p == 1 else max(1, int(np.sum(before < p.top_p * factor)))
        for factor in (1 - ROUNDING, 1 + ROUNDING)
    )
    return order, fewest, most


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_what_is_left_is_what_sorting_leaves(rng, vocab):
    clear, searched = 0, 0
    for _ in range(3):
        logits, settings = drawn_rows(rng, ROWS, vocab), drawn_settings(rng, ROWS)
        sampling = pack(settings)
        found = np.asarray(narrowed(logits, sampling))
        values = np.asarray(scaled(sampling, logits, logits.max(axis=1, keepdims=True)))
        for row, p in enumerate(settings):
            np.testing.assert_allclose(values[row], scaled_by_hand(logits[row], p), rtol=1e-6)
            order, fewest, most = left_of(values[row], p)
            kept = found[row] > -np.inf
            number = int(kept.sum())
            assert fewest <= number <= most, (p, number, fewest, most)
            assert kept[order[:number]].all(), p
            np.testing.assert_array_equal(found[row][kept], values[row][kept])
            clear += fewest == most
            searched += truncation.CANDIDATES < number < (values[row] > -np.inf).sum()
    assert clear > 2 * ROWS, "rounding may decide the number in few rows"
    assert searched > 5 or vocab < truncation.FEW


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_candidates_are_the_first_tokens_of_the_order(rng, vocab):
    logits, sampling = drawn_rows(rng, ROWS, vocab), pack(drawn_settings(rng, ROWS))
    best, value, token = first_tokens(logits, sampling)
    everything = np.asarray(scaled(sampling, logits, best))
    count = truncation.CANDIDATES if vocab > truncation.FEW else vocab
    order = np.argsort(-everything, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(token, order)
    np.testing.assert_array_equal(value, np.take_along_axis(everything, order, axis=1))
    np.testing.assert_array_equal(best[:, 0], logits.max(axis=1))


def test_the_search_finds_what_the_candidates_say(rng):
    """Of closed rows, of which no search is asked for otherwise."""

    @jax.jit
    def both(logits, sampling):
        found = truncation.candidates(logits, functools.partial(scale, sampling), sampling.top_k, sampling.top_p)
        values = scale(sampling, logits, found.best)
        searched = truncation.search_cutoff(values, sampling.top_k, sampling.top_p, jnp.ones(ROWS, bool))
        return found.closed, values, truncation.keep(values, found.cutoff), truncation.keep(values, searched)

    logits, settings = drawn_rows(rng, ROWS, VOCABULARIES[-1]), drawn_settings(rng, ROWS)
    closed, values, *kept = (np.asarray(x) for x in both(logits, pack(settings)))
    same = np.array([(a == b).all() for a, b in zip(*kept, strict=True)])
    clear = np.array([fewest == most for _, fewest, most in map(left_of, values, settings)])
    assert np.sum(closed & clear) > 5 and np.sum(~closed) > 2
    assert same[closed & clear].all()


def test_a_row_without_a_candidate_keeps_no_token(rng):
    for vocab in VOCABULARIES:
        logits = drawn_rows(rng, ROWS, vocab)
        logits[:4] = -np.inf
        logits[4:8, rng.integers(vocab)] = np.nan
        logits[8:12, rng.integers(vocab)] = np.inf
        settings = drawn_settings(rng, ROWS)
        found = np.asarray(narrowed(logits, pack(settings)))
        assert (found[:12] == -np.inf).all() and (found[12:].max(axis=1) == 0).all()
        assert (np.asarray(narrowed(logits, pack([SamplingParams()] * ROWS)))[:12] == -np.inf).all()
        np.testing.assert_array_equal(has_candidate(logits), np.arange(ROWS) >= 12)
        alone = np.asarray(narrowed(np.tile(logits[12:], (2, 1))[:ROWS], pack((settings[12:] * 2)[:ROWS])))
        np.testing.assert_array_equal(found[12:], alone[: ROWS - 12])


def test_one_token_that_is_allowed_is_left_and_drawn(rng):
    vocab = VOCABULARIES[-1]
    only = rng.integers(0, vocab, ROWS)
    logits = np.full((ROWS, vocab), -np.inf, np.float32)
    logits[np.arange(ROWS), only] = rng.standard_normal(ROWS)
    sampling = pack(drawn_settings(rng, ROWS))
    np.testing.assert_array_equal(np.flatnonzero(narrowed(logits, sampling) == 0), np.arange(ROWS) * vocab + only)
    np.testing.assert_array_equal(chosen(logits, sampling, jnp.arange(ROWS, dtype=jnp.int32)), only)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_token_is_drawn_with_gumbel_noise_of_all(rng, vocab):
    """Whether the candidates alone are looked at, or all tokens because one row needs it."""
    logits, settings = drawn_rows(rng, ROWS, vocab), drawn_settings(rng, ROWS)
    closed = [p if p.top_k == 50 else SamplingParams(temperature=1.0, top_k=50, seed=p.seed) for p in settings]
    position = jnp.asarray(rng.integers(0, 1000, ROWS), jnp.int32)
    for some in (closed, [*closed[:-1], SamplingParams(top_p=0.99999)], settings):
        sampling = pack(some)
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys(sampling, position))
        expected = np.argmax(np.asarray(narrowed(logits, sampling)) + np.asarray(gumbel), axis=1)
        expected = np.where(sampling.temperature > 0, expected, np.argmax(logits, axis=1))
        np.testing.assert_array_equal(chosen(logits, sampling, position), expected)


def test_noise_is_jax_random_gumbel_of_every_token(rng):
    key = jax.vmap(jax.random.key)(jnp.asarray(rng.integers(0, 2**32, 2), jnp.uint32))
    all_of_them = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (248_320,)))(key))
    np.testing.assert_array_equal(jax.jit(noise, static_argnums=1)(key, 248_320), all_of_them)
    some = rng.integers(0, 248_320, (2, 64)).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(noise_of)(key, some), np.take_along_axis(all_of_them, some, axis=1))


def test_places_of_a_row_share_its_settings(rng):
    vocab, rows, places = 300, 16, 3
    logits, sampling = (
        drawn_rows(rng, rows * places, vocab).reshape(rows, places, vocab),
        pack(drawn_settings(rng, rows)),
    )
    distribution = jax.jit(log_distribution)
    found = np.asarray(distribution(logits, sampling))
    for place in range(places):
        np.testing.assert_allclose(found[:, place], distribution(logits[:, place], sampling), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [narrow, functools.partial(sample, position=jnp.zeros(2, jnp.int32))])
def test_nothing_as_long_as_the_vocabulary_is_sorted(function):
    logits, sampling = jnp.zeros((2, VOCABULARIES[-1])), pack([SamplingParams(top_k=50, top_p=0.9)] * 2)
    lengths = [*sorted_lengths(jax.make_jaxpr(lambda logits, s: function(logits, s))(logits, sampling).jaxpr)]
    assert lengths and max(lengths) <= truncation.FEW


def sorted_lengths(jaxpr):
    """The lengths of what a program sorts."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("sort", "top_k", "approx_top_k"):
            yield equation.invars[0].aval.shape[-1]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr"):
                yield from sorted_lengths(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from sorted_lengths(inner)
