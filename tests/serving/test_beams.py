"""Beam search: exhaustive where it can be, else the same search written down plainly over the whole model."""

import dataclasses
import itertools
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import replace_parameters
from jaxbuf.serving import CarrySizes, SamplingParams, batch, beam_search, beams, generate, init_carry
from jaxbuf.serving.batch import pack_prompts
from jaxbuf.serving.token_masks import pack_mask
from tests.serving.conftest import CONFIG
from tests.serving.program import check_on_device, check_reused, made_in_loops, written_in_loops
from tests.serving.speculating import TINY, VOCAB, near_tie
from tests.tiny import random_model

NEW, BEAMS, LIMIT = 24, 3, 6  # several folds, and pages that fill up while beams fork
LENGTHS = (63, 1, 37)
TIE = 1e-4


def log_probabilities(lm, texts):
    """After each of some texts of one length, float64 [texts, vocab]."""
    padded = np.zeros((BEAMS, max(LENGTHS) + NEW), np.int32)
    padded[: len(texts), : len(texts[0])] = texts
    logits = np.asarray(lm.logits(padded), np.float64)[: len(texts), len(texts[0]) - 1]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def search(lm, prompt, **settings):
    """`plain_search` over the whole model."""

    def after(texts):
        return log_probabilities(lm, [prompt + text for text in texts])

    return plain_search(after, lm.known_ids, **settings)


def plain_search(after, allowed, *, stops, penalty=1.0, early=True, new=NEW, number=BEAMS):
    """Beam search, written down: (tokens, score, rank) best first, and how near a decision was to a tie.

    Without early stopping it never stops before `new` tokens. How near two ranks are is told in the units of scores,
    which are what has the errors: a rank is a score divided by length**penalty.

    Args:
      after: Texts to the log-probabilities after them, float64 [texts, vocab].
      allowed: bool [vocab].
    """
    live, ended, nearest, vocab = [([], 0.0)], [], np.inf, len(allowed)

    def apart(better, worse):
        return (better[2] - worse[2]) / max(float(len(found[0])) ** -penalty for found in (better, worse))

    for length in range(1, new + 1):
        total = after([tokens for tokens, _ in live]) + np.array([score for _, score in live])[:, None]
        total = np.where(allowed, total, -np.inf).reshape(-1)
        order = np.argsort(-total, kind="stable")[:200]
        order = order[total[order] > -np.inf]
        candidates = [(live[place // vocab][0] + [int(place % vocab)], total[place]) for place in order]
        going = [candidate for candidate in candidates if candidate[0][-1] not in stops]
        for some in (candidates, going):
            if len(some) > number:
                nearest = min(nearest, some[number - 1][1] - some[number][1])
        new_ones = [candidate for candidate in candidates[:number] if candidate[0][-1] in stops]
        ended = ended + [(tokens, score, score / length**penalty) for tokens, score in new_ones]
        ended = sorted(ended, key=lambda found: -found[2])
        ended, left_out = ended[:number], ended[number:]
        if left_out:
            nearest = min(nearest, apart(ended[-1], left_out[0]))
        live = going[:number]
        if not live or (early and len(ended) == number):
            break
    else:
        ended += [(tokens, score, score / new**penalty) for tokens, score in live]
        ended = sorted(ended, key=lambda found: -found[2])
    gaps = [apart(*pair) for pair in itertools.pairwise(ended[: number + 1])]
    return ended[:number], min([nearest, *gaps])


def check(found, expected, stops):
    assert [beam.tokens for beam in found] == [tokens for tokens, *_ in expected]
    np.testing.assert_allclose([beam.score for beam in found], [score for _, score, _ in expected], atol=1e-3)
    np.testing.assert_allclose([beam.ranking_score for beam in found], [rank for *_, rank in expected], atol=1e-3)
    for beam in found:
        assert (beam.finish_reason == "stop") == (beam.tokens[-1] in stops)


@pytest.fixture(scope="module")
def case(lm):
    """Prompts, four stop tokens that end hypotheses of several lengths, and what SEARCHES find, with no tie near."""
    rng = np.random.default_rng()
    while True:
        prompts = [rng.integers(0, 256, n).tolist() for n in LENGTHS]
        plain = [search(lm, prompt, stops=()) for prompt in prompts]
        first = [found[rng.integers(0, BEAMS)][0] for found, _ in plain]
        stops = (*(int(tokens[place]) for tokens, place in zip(first, (4, 9, 15), strict=True)), 256)
        searches = [[search(lm, prompt, stops=stops, **settings) for prompt in prompts] for settings in SEARCHES]
        expected = [[found for found, _ in some] for some in searches]
        lengths = {len(tokens) for some in expected for found in some for tokens, *_ in found}
        stopped = any(tokens[-1] in stops for found in expected[0] for tokens, *_ in found)
        near = min(nearest for some in (plain, *searches) for _, nearest in some) <= TIE
        if len(lengths) > 2 and stopped and not near:
            return prompts, stops, expected


SEARCHES = [
    {},
    {"penalty": 0.0},
    {"penalty": 2.0, "early": False},
    {"penalty": -0.5, "early": False},
    {"penalty": -0.5},
]


def ours(lm, prompts, stops, *, penalty=1.0, early=True, **arguments):
    settings = {"length_penalty": penalty, "early_stopping": early, "stop_token_ids": stops[:3]}
    return beam_search(lm, prompts, NEW, beams=BEAMS, limit=LIMIT, **settings, **arguments)


@pytest.mark.slow
@pytest.mark.checks("beams", family="qwen3_5")
@pytest.mark.parametrize("form", ["buffered", pytest.param("recurrent", marks=pytest.mark.exhaustive)])
def test_it_is_the_search_over_the_plain_forward(lm, case, form):
    """Of several prompts at once, some of which end before others; without early stopping nothing is missed by it."""
    prompts, stops, searches = case
    lengths = set()
    for settings, expected in zip(SEARCHES, searches, strict=True):
        for found, beams_expected in zip(ours(lm, prompts, stops, **settings, form=form), expected, strict=True):
            check(found, beams_expected, stops)
            lengths |= {len(beam.tokens) for beam in found}
    assert len(lengths) > 2
    reasons = {beam.finish_reason for found in ours(lm, prompts, stops, form=form) for beam in found}
    assert "stop" in reasons


@pytest.mark.slow
@pytest.mark.checks("beams", family="qwen3_5")
def test_a_score_is_the_sum_of_the_models_log_probabilities(lm, case):
    prompts, stops, _ = case
    for prompt, found in zip(prompts, ours(lm, prompts, stops), strict=True):
        padded = np.array([(prompt + beam.tokens + [0] * 128)[:128] for beam in found])
        scores = np.asarray(lm.score(padded))
        for row, beam in enumerate(found):
            total = scores[row, len(prompt) : len(prompt) + len(beam.tokens)].sum()
            np.testing.assert_allclose(beam.score, total, rtol=0, atol=1e-3)
            np.testing.assert_allclose(beam.ranking_score, beam.score / len(beam.tokens), rtol=1e-5)
            stopped = beam.finish_reason == "stop"
            assert beam.text == lm.decode(beam.tokens[: len(beam.tokens) - stopped])
        assert [beam.ranking_score for beam in found] == sorted((b.ranking_score for b in found), reverse=True)


def test_equal_scores_take_the_better_beam_and_the_lower_token(lm):
    """Without an embedding every token is as probable as any other."""
    leaves, _ = jax.tree.flatten(lm.model)
    shapes = jax.eval_shape(lambda: lm.model)
    model = replace_parameters(shapes, leaves)
    model.embed_tokens[...] = jnp.zeros_like(model.embed_tokens[...])
    uniform = dataclasses.replace(lm, model=model)
    stops = (1, 5, 7, 256)
    prompts = [[3] * length for length in LENGTHS]
    for settings in ({}, {"penalty": 0.0}):
        expected, _ = search(uniform, prompts[1], stops=stops, **settings)
        for found in ours(uniform, prompts, stops, **settings):
            check(found, expected, stops)
    found = ours(uniform, prompts, (257, 258, 257), penalty=0.0)[0]
    assert [beam.tokens for beam in found] == [[0] * (NEW - 1) + [last] for last in range(BEAMS)]


def test_hypotheses_whose_logits_are_not_finite_are_given_up_with_a_warning(lm, case, caplog):
    prompts, stops, _ = case
    leaves, _ = jax.tree.flatten(lm.model)
    model = replace_parameters(jax.eval_shape(lambda: lm.model), leaves)
    model.embed_tokens[...] = model.embed_tokens[...].at[3, 0].set(jnp.nan)
    with caplog.at_level(logging.WARNING, logger="jaxbuf"):
        assert ours(dataclasses.replace(lm, model=model), prompts, stops) == [[]] * len(prompts)
    assert any("gave hypotheses up" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_a_search_is_one_compilation(lm, case):
    """The same one whatever the penalty, the form, the stop tokens, the prompts and the number of tokens."""
    prompts, stops, _ = case
    ours(lm, prompts, stops)
    before = beams.start_beams._cache_size(), beams.search_beams._cache_size()
    ours(lm, prompts[::-1] + prompts[:1], (1, 2, 3), penalty=0.3, early=False, form="recurrent")
    beam_search(lm, [prompt[:5] for prompt in prompts], 17, beams=BEAMS, limit=LIMIT, stop_token_ids=(1, 2, 3))
    assert (beams.start_beams._cache_size(), beams.search_beams._cache_size()) == before


def shape_of(lm, prompts, number):
    """A search after its start, in shapes."""
    sizes = CarrySizes(rows=len(prompts) * number, capacity=pack_prompts(prompts)[0].shape[1] + 32)
    if number > 1:
        sizes = batch.shared_sizes(sizes, prompts=len(prompts), prompt_tokens=sizes.capacity - 32, again=True)
    given = np.int32(6), np.full(4, -1, np.int32), np.tile(pack_mask(lm.known_ids), (len(prompts), 1)), np.int32(24)
    settings = beams.Settings(*given, np.float32(1), np.bool_(True))
    carry = jax.eval_shape(lambda: init_carry(lm.config, sizes))
    start = partial(beams.start_beams, beams=number, room=32)
    return jax.eval_shape(start, lm.model, carry.cache, carry.hidden, settings)


@pytest.mark.slow
def test_the_loop_transfers_nothing_and_copies_no_pool(lm):
    carry = shape_of(lm, [[1] * 900] * 2, 4)
    text = beams.search_beams.lower(lm.model, carry, np.int32(9)).compile().as_text()
    check_on_device(text)
    assert written_in_loops(text, lm.config.spec.state_shape) == []
    assert made_in_loops(text, carry.cache.layers[1].keys.size) == []
    check_reused(text, carry)


def test_beams_of_a_long_prompt_share_its_pages(lm):
    """A bucket of 1,024 tokens, and 32 new ones: 63 pages are shared, each beam adds 3 and, to be forked, one more."""
    pages = [shape_of(lm, [[1] * 900], number).cache.layers[1].keys.shape[0] - 1 for number in (1, 4)]
    assert pages == [66, 63 + 4 * 4]


SHORT, EOS = 4, TINY["eos_token_id"]
MANY = VOCAB ** (SHORT - 1)


@pytest.fixture(scope="module")
def tiny():
    """A model of five tokens, of which the last one ends a text."""
    config = config_from_dict(CONFIG | TINY)
    return LanguageModel(random_model(config), config, None, {}, jnp.dtype("float32"), "tiny")


def everything(lm, prompt, stops, new):
    """All hypotheses of a prompt with their scores, float64."""
    texts = np.zeros((VOCAB**SHORT, 6 + SHORT), np.int32)  # one shape for all
    texts[:, : len(prompt)] = prompt
    texts[:, len(prompt) : len(prompt) + SHORT] = list(itertools.product(range(VOCAB), repeat=SHORT))
    logits = np.asarray(lm.logits(texts), np.float64)[:, len(prompt) - 1 :]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = {}
    for text, rows in zip(texts[:, len(prompt) : len(prompt) + new].tolist(), log_p, strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token in stops), new)
        found[tuple(text[:end])] = sum(rows[i, token] for i, token in enumerate(text[:end]))
    return found


@pytest.fixture
def small_shapes(monkeypatch):
    monkeypatch.setattr(batch, "PROMPT_BUCKET", 8)
    monkeypatch.setattr(beams, "ROOM", 8)


@pytest.mark.parametrize(
    "form",
    [pytest.param("buffered", marks=pytest.mark.exhaustive), pytest.param("recurrent", marks=pytest.mark.exhaustive)],
)
def test_with_as_many_beams_as_texts_it_finds_the_best_of_all(tiny, rng, small_shapes, form):
    """Until the last step no text falls out, so what comes back are the best of all texts there are."""
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 6)]
    settings = {"beams": MANY, "form": form, "ignore_eos": True}
    cases = ((0.0, (4,), 4), (1.0, (4,), 4), (-1.0, (2, 4), 3), (2.0, (0, 1, 2, 3), 4), (1.0, (1, 3), 1))
    for penalty, stops, new in cases:
        ids = (*stops, *stops, *stops, *stops)[:4]
        found = beam_search(tiny, prompts, new, length_penalty=penalty, stop_token_ids=ids, **settings)
        for prompt, ours in zip(prompts, found, strict=True):
            scores = everything(tiny, prompt, stops, new)
            ranks = {tokens: score / len(tokens) ** penalty for tokens, score in scores.items()}
            best = sorted(ranks.values(), reverse=True)[:MANY]
            assert len(ours) == len(best) == min(MANY, len(ranks))
            np.testing.assert_allclose([beam.ranking_score for beam in ours], best, rtol=0, atol=1e-3)
            exact = [scores[tuple(beam.tokens)] for beam in ours]
            np.testing.assert_allclose([beam.score for beam in ours], exact, rtol=0, atol=1e-3)
            assert len({tuple(beam.tokens) for beam in ours}) == len(ours)
            assert all((beam.finish_reason == "stop") == (beam.tokens[-1] in stops) for beam in ours)


CHAINS, WORDS, STEPS = 256, 6, 8


def markov_search(tables, stops, penalty, early, new):
    """The search without a model: what comes after a token depends on its place and nothing else.

    Args:
      tables: f32 [STEPS, CHAINS, WORDS + 1, WORDS], logits after each word, and after none.
    """
    nothing, integers = jnp.full((CHAINS, BEAMS), -jnp.inf), jnp.zeros((CHAINS, BEAMS), jnp.int32)
    state = beams.Search(
        cache=None,
        last=integers,
        score=nothing.at[:, 0].set(0.0),
        tokens=jnp.zeros((STEPS, CHAINS, BEAMS), jnp.int32),
        parents=jnp.zeros((STEPS, CHAINS, BEAMS), jnp.int32),
        length=jnp.int32(0),
        state=jnp.zeros(CHAINS, jnp.int32),
        ended=beams.Ended(nothing, nothing, integers, integers, integers),
        stop_ids=jnp.asarray(stops, jnp.int32),
        allowed=jnp.asarray(np.tile(pack_mask(np.arange(WORDS) != 5), (CHAINS, 1))),
        max_new_tokens=jnp.int32(new),
        length_penalty=jnp.float32(penalty),
        early_stopping=jnp.asarray(early),
        failed=jnp.asarray(False),
    )
    state = choose(state, tables[0, :, -1:])[0]
    while (state.state == 0).any():
        state = choose(state, jnp.take_along_axis(tables[state.length], state.last[..., None], axis=1))[0]
    return state


choose = jax.jit(beams._choose)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("penalty", "early", "new"),
    [
        (1.0, True, 8),
        (0.0, True, 7),
        (1.0, False, 8),
        (3.0, False, 6),
        (-0.1, False, 4),
        (-2.0, False, 8),
        (0.5, False, 1),
    ],
)
def test_decisions_are_those_of_a_plain_search(tiny, rng, penalty, early, new):
    """Many searches over random Markov chains, in some of which a word may not follow another or has no rival."""
    tables = 2 * rng.standard_normal((STEPS, CHAINS, WORDS + 1, WORDS))
    tables[..., 4] += rng.normal(0, 2, (CHAINS, 1))  # stop tokens that come soon, and late
    tables = np.where(rng.random(tables.shape) < 0.5, -np.inf, tables).astype(np.float32)
    tables[..., 5] = 0.0  # which may not be chosen
    log_p = tables - np.log(np.exp(tables.astype(np.float64)).sum(-1, keepdims=True))
    found = beams._read(tiny, markov_search(jnp.asarray(tables), (4, -1), penalty, early, new), CHAINS)
    checked, reasons, numbers = 0, set(), set()
    for ours, rows in zip(found, np.moveaxis(log_p, 1, 0), strict=True):
        expected, nearest = plain_search(
            lambda texts, rows=rows: rows[len(texts[0]), [text[-1] if text else WORDS for text in texts]],
            np.arange(WORDS) != 5,
            stops=(4,),
            penalty=penalty,
            early=early,
            new=new,
        )
        if nearest > TIE:
            check(ours, expected, (4,))
            checked += 1
            reasons.add(tuple(sorted(beam.finish_reason for beam in ours)))
            numbers.add(len(ours))
    assert checked > 0.7 * CHAINS and len(numbers) > 1 and len(reasons) > 2


def test_a_search_ends_when_no_beam_is_left():
    tables = np.full((STEPS, CHAINS, WORDS + 1, WORDS), -np.inf, np.float32)
    tables[..., 4] = tables[:, : CHAINS // 2, :, 1] = 0.0  # half of the chains have nothing but the stop token
    state = markov_search(jnp.asarray(tables), (4, -1), 1.0, False, 2)
    assert state.state.tolist() == [beams.FULL] * (CHAINS // 2) + [beams.STOPPED] * (CHAINS // 2)
    tables[..., 1] = -np.inf
    assert int(markov_search(jnp.asarray(tables), (4, -1), 1.0, False, 3).length) == 1


@pytest.mark.exhaustive
def test_one_beam_is_greedy_decoding(tiny, rng, small_shapes, monkeypatch):
    monkeypatch.setattr(batch, "ROOM", 8)
    while True:
        prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 8, 5, 3)]
        greedy = generate(tiny, prompts, 8, SamplingParams(temperature=0.0, logprobs=2))
        if not any(near_tie(tiny, result) for result in greedy):
            break
    for penalty in (0.0, 1.0, 3.0):
        for (beam,), result in zip(beam_search(tiny, prompts, 8, beams=1, length_penalty=penalty), greedy, strict=True):
            assert (beam.tokens, beam.finish_reason) == (result.tokens, result.finish_reason)
            np.testing.assert_allclose(beam.score, sum(result.logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beams": 0}, r"beams must be a whole number in \[1, 256\], got 0"),
        ({"beams": 2.0}, r"beams must be a whole number in \[1, 256\], got 2.0"),
        ({"length_penalty": np.inf}, r"length_penalty must be a number in \[-5, 5\], got inf"),
        ({"length_penalty": -6}, r"length_penalty must be a number in \[-5, 5\], got -6"),
        ({"length_penalty": "1"}, r"length_penalty must be a number in \[-5, 5\], got '1'"),
        ({"early_stopping": 1}, "early_stopping must be True or False, got 1"),
        ({"stop_token_ids": [259]}, r"stop_token_ids must name token ids in \[0, 259\), got 259"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids of at least 0, got"),
        ({"ignore_eos": None}, "ignore_eos must be True or False, got None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ({"limit": 0}, "limit must be a whole number of at least 1, got 0"),
        ({"form": "linear"}, "form must be .* got 'linear'"),
        ({"entry_dtype": "int8"}, "entry_dtype must be .* got 'int8'"),
        ({"prompts": "text"}, "prompts must be a list of texts or token lists"),
        ({"prompts": [[]]}, r"prompts\[0\] must hold at least one token, got \[\]"),
        ({"prompts": [[1] * 1000]}, r"prompts\[0\] \(1000 tokens\).*\(64\).*at most.*\(1024\)"),
    ],
)
def test_a_wrong_argument_is_named(lm, arguments, message):
    with pytest.raises(ValueError, match=message):
        beam_search(lm, **{"prompts": [[1]], **arguments})


def test_no_prompt_gives_nothing(lm):
    assert beam_search(lm, []) == []
