"""Log-probabilities in pieces are those of the whole logits, and the scores of texts are their sums."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from jaxbuf.models import decoder, scoring
from jaxbuf.models.language_model import load
from jaxbuf.models.shapes import power_of_two_from, power_of_two_to
from tests.serving.conftest import EOS
from tests.serving.conftest import lm as lm  # the tiny random model; a fixture
from tests.tiny import changed

TOLERANCE = 1e-4


def whole(lm, tokens):
    """f32 [batch, time - 1]: log-softmax of all logits at once, at the tokens that came."""
    found = np.asarray(jax.nn.log_softmax(lm.logits(tokens), axis=-1))
    return np.take_along_axis(found[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def draw(lm, rng, *shape):
    return rng.integers(0, lm.vocab_size, shape, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "time"), [(3, 100), pytest.param(3, 2, marks=pytest.mark.exhaustive)])
def test_scores_are_the_log_softmax_of_the_logits(lm, rng, batch, time):
    tokens = draw(lm, rng, batch, time)
    scores = lm.score(tokens)
    assert scores.shape == (batch, time) and scores.dtype == np.float32
    np.testing.assert_allclose(scores[:, 1:], whole(lm, tokens), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(scores[:, 0], 0)


@pytest.mark.parametrize("time", [32, 33, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (31, 64, 100))])
def test_pieces_change_nothing_wherever_the_last_one_ends(lm, rng, time):
    tokens = draw(lm, rng, 3, time)
    scores = scoring.score_tokens(lm.model, tokens, _piece=32)
    np.testing.assert_allclose(scores[:, 1:], whole(lm, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "value"), [pytest.param("ROWS", 2, marks=pytest.mark.exhaustive), ("CACHED", 2 * 64)]
)
def test_rows_are_read_some_at_a_time_in_blocks_of_few_logits(lm, rng, monkeypatch, bound, value):
    monkeypatch.setattr(scoring, bound, value)
    monkeypatch.setattr(scoring, "LOGITS", 2 * lm.vocab_size * 8)
    tokens = draw(lm, rng, 5, 50)
    seen = []
    compiled = scoring._score_piece

    def watched(*arguments, block):
        seen.append((arguments[2].shape, block))
        return compiled(*arguments, block=block)

    monkeypatch.setattr(scoring, "_score_piece", watched)
    scores = scoring.score_tokens(lm.model, tokens, _piece=32)
    np.testing.assert_allclose(scores[:, 1:], whole(lm, tokens), rtol=0, atol=TOLERANCE)
    assert seen == [((2, 32), 8)] * 6


def test_the_most_probable_tokens_are_found_in_blocks(lm, rng):
    hidden = rng.standard_normal((2, 16, lm.config.hidden_size), dtype=np.float32)
    targets = draw(lm, rng, 2, 16)
    found = jax.jit(scoring.hidden_logprobs, static_argnames=("block", "top"))(
        lm.model, hidden, targets, block=4, top=3
    )
    logits = hidden.astype(np.float64) @ np.asarray(lm.model.embed_tokens[...], np.float64).T
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    best = np.sort(expected, axis=-1)[..., :-4:-1]
    np.testing.assert_allclose(
        found.chosen, np.take_along_axis(expected, targets[..., None], -1)[..., 0], atol=TOLERANCE
    )
    np.testing.assert_allclose(found.top, best, atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(expected, found.top_ids, -1), best, atol=TOLERANCE)


@pytest.mark.exhaustive
def test_a_hundred_thousand_tokens_fit_at_a_vocabulary_of_248_320(lm, monkeypatch):
    config = changed(lm.config, vocab_size=248_320, max_position_embeddings=2**17)
    model = decoder.Decoder(config, rngs=nnx.Rngs(0))
    program, needed = scoring._score_piece, []

    def compile_only(model, cache, tokens, *arguments, block):
        if not needed:
            compiled = program.lower(model, cache, tokens, *arguments, block=block).compile()
            needed.append(compiled.memory_analysis().temp_size_in_bytes)
        return np.zeros(tokens.shape, np.float32), cache

    monkeypatch.setattr(scoring, "_score_piece", compile_only)
    scoring.score_tokens(model, np.zeros((2, 100_000), np.int32))
    assert needed[0] < 1.2 * 4 * scoring.LOGITS < 100_000 * 248_320 * 4 / 600  # bytes, beside parameters and cache


def test_a_token_that_is_all_but_impossible_has_a_finite_score(lm, rng):
    sharp = jax.tree.map(lambda x: x * 30 if x.shape == (lm.vocab_size, lm.config.hidden_size) else x, lm.model)
    scores = scoring.score_tokens(sharp, draw(lm, rng, 2, 64))
    assert np.isfinite(scores).all() and scores.min() < -50


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (3, r"tokens must be int32 \[batch, time\] or \[time\] and not empty, got int64 \(\)"),
        ([[[1, 2]]], r"tokens must be int32 \[batch, time\]"),
        ([True, False], r"tokens must be int32 \[batch, time\]"),
        ("text", r"tokens must be ids, int32 \[batch, time\] or \[time\], got a text"),
        (None, r"tokens must be int32 \[batch, time\]"),
        ([[]], r"tokens must be int32 \[batch, time\] or \[time\] and not empty, got float64 \(1, 0\)"),
        ([[0.5, 1.0]], r"tokens must be int32 \[batch, time\]"),
        ([[0, 259]], r"tokens must be in \[0, 259\), got 0 to 259"),
        ([[-1, 0]], r"tokens must be in \[0, 259\), got -1 to 0"),
        ([[0] * 1025], r"tokens must be at most max_length \(1024\) long, got 1025"),
    ],
)
def test_what_cannot_be_scored_is_refused(lm, tokens, message):
    with pytest.raises(ValueError, match=message):
        lm.score(tokens)
    with pytest.raises(ValueError, match=message):
        lm.logits(tokens)


@pytest.mark.slow
def test_a_text_follows_the_end_of_text_token(lm):
    text = "naïve — text"
    tokens = np.asarray([[EOS, *lm.encode(text)]], np.int32)
    expected = whole(lm, tokens).sum(dtype=np.float64)
    found = scoring.score_text(lm, text)
    assert (found.tokens, found.bytes) == (tokens.size - 1, len(text.encode()))
    np.testing.assert_allclose(found.log_likelihood, expected, rtol=1e-5)
    np.testing.assert_allclose(found.perplexity, math.exp(-expected / found.tokens), rtol=1e-4)
    np.testing.assert_allclose(found.bits_per_byte, -expected / math.log(2) / found.bytes, rtol=1e-5)


@pytest.mark.slow
def test_a_text_follows_what_the_tokenizer_puts_before_it(lm):
    """Two tokens before it and one behind, which are read or left out, but not counted: every token of the text is."""
    tokenizer = Tokenizer.from_str(lm.tokenizer.to_str())
    names = [tokenizer.id_to_token(id) for id in (7, 9, 11)]
    special = list(zip(names, (7, 9, 11), strict=True))
    tokenizer.post_processor = TemplateProcessing(single=f"{names[0]} {names[1]} $A {names[2]}", special_tokens=special)
    around = dataclasses.replace(lm, tokenizer=tokenizer)
    text = "some text, which is not long"
    bare = lm.encode(text)
    assert around.encode(text) == [7, 9, *bare, 11]
    tokens = np.asarray([[7, 9, *bare]], np.int32)
    found = scoring.score_text(around, text)
    assert found.tokens == len(bare)
    np.testing.assert_allclose(
        found.log_likelihood, np.asarray(whole(lm, tokens))[:, 1:].sum(dtype=np.float64), rtol=1e-5
    )
    np.testing.assert_allclose(
        found.log_likelihood, np.asarray(lm.score(tokens))[:, 2:].sum(dtype=np.float64), rtol=1e-5
    )
    with pytest.raises(ValueError, match="context must be at least 3, got 2"):
        scoring.score_text(around, text, context=2)


def test_a_long_text_is_scored_in_windows_that_overlap_by_half(lm):
    text = "some text " * 15
    tokens = np.asarray([EOS, *lm.encode(text)], np.int32)
    expected, done, calls = 0.0, 64, []
    expected += whole(lm, tokens[None, :64]).sum(dtype=np.float64)
    while done < tokens.size:
        end = min(done + 32, tokens.size)
        start = end - 64
        expected += whole(lm, tokens[None, start:end])[0, done - start - 1 :].sum(dtype=np.float64)
        done = end
    found = scoring.score_text(lm, text, context=64, progress=lambda *call: calls.append(call))
    assert found.tokens == tokens.size - 1
    np.testing.assert_allclose(found.log_likelihood, expected, rtol=1e-5)
    totals = {total for _, total in calls}
    assert calls[0][0] == 0 and calls[-1] == (max(totals), max(totals)) and len(totals) == 1


def test_scores_of_texts_add_up():
    both = scoring.TextScore(3, 10, -4.0) + scoring.TextScore(5, 22, -12.0)
    assert both == scoring.TextScore(8, 32, -16.0)
    assert both.perplexity == math.exp(2) and math.isclose(both.bits_per_byte, 0.5 / math.log(2))


def test_texts_that_cannot_be_scored_are_refused(lm):
    with pytest.raises(ValueError, match="text must hold at least one token, got ''"):
        scoring.score_text(lm, "")
    with pytest.raises(ValueError, match=r"context must be in \[2, 1024\], up to the model's max_length, got 1025"):
        scoring.score_text(lm, "text", context=1025)
    with pytest.raises(ValueError, match=r"context must be in \[2, 1024\]"):
        scoring.score_text(lm, "text", context=1)


@pytest.mark.slow
def test_the_embedded_model_scores_as_its_logits_say():
    demo = load("demo", dtype="float32")
    text = "The configuration file is read when the server starts. Unknown keys are errors — naïve ones too.\n" * 3
    tokens = np.asarray([[*demo.config.eos_token_ids[:1], *demo.encode(text)]], np.int32)
    np.testing.assert_allclose(demo.score(tokens)[:, 1:], whole(demo, tokens), rtol=0, atol=TOLERANCE)


def test_sizes_are_rounded_to_powers_of_two():
    assert [power_of_two_from(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [power_of_two_from(n, 16) for n in (0, 16, 17)] == [16, 16, 32]
    assert [power_of_two_to(n) for n in (0, 1, 3, 64, 127)] == [1, 1, 2, 64, 64]


@pytest.mark.slow
def test_rows_of_several_lengths_are_scored_one_by_one(lm, rng):
    """As lists, and as an array with lengths, whatever stands behind them; one row alone loses its axis."""
    rows = [draw(lm, rng, 1, n)[0].tolist() for n in (3, 70, 1, 25)]
    found = np.asarray(lm.score(rows))
    assert found.shape == (4, 70)
    for row, scores in zip(rows, found, strict=True):
        alone = np.asarray(lm.score(row))
        assert alone.shape == (len(row),)
        np.testing.assert_allclose(scores[: len(row)], alone, rtol=0, atol=TOLERANCE)
        assert not scores[len(row) :].any()
    lengths = [len(row) for row in rows]
    padded = np.array([row + [-7] * (70 - len(row)) for row in rows])
    for array in (padded, jnp.asarray(padded)):
        np.testing.assert_array_equal(lm.score(array, lengths=jnp.asarray(lengths)), found)
    np.testing.assert_allclose(lm.logits(rows[3]), lm.logits([rows[3]])[0], rtol=0, atol=1e-6)


def test_what_is_no_length_of_a_row_is_named(lm):
    for lengths, message in (
        ([4], r"lengths must be int32 \[2\], one a row, got int64 \(1,\)"),
        ([1.0, 2.0], r"lengths must be int32 \[2\], one a row, got float64"),
        ([3, 0], r"lengths must be in \[1, 3\], got 0 at row 1"),
        ([4, 1], r"lengths must be in \[1, 3\], got 4 at row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.score([[1, 2, 3], [4, 5, 6]], lengths=lengths)
    with pytest.raises(ValueError, match="tokens must have rows of one length"):
        lm.logits([[1, 2, 3], [4]])


@pytest.mark.parametrize("temperature", [pytest.param(t, marks=pytest.mark.slow) for t in (1.0, 0.7)])
def test_a_training_loop_gets_log_probabilities_and_their_gradient(lm, rng, temperature, monkeypatch):
    """Under jit, with blocks of logits that do not divide the time: those of all logits at once, and their gradient."""
    monkeypatch.setattr(scoring, "LOGITS", 3 * 8 * lm.vocab_size)  # blocks of 8
    tokens, lengths = jnp.asarray(draw(lm, rng, 3, 29)), jnp.asarray([29, 1, 17])
    weights = jnp.asarray(rng.standard_normal(tokens.shape), jnp.float32)
    real = (np.arange(29) > 0) & (np.arange(29) < np.asarray(lengths)[:, None])

    def found(model, tokens, lengths):
        scores = scoring.sequence_logprobs(model, tokens, lengths, temperature=temperature)
        return jnp.sum(scores * weights), scores

    def defined(model, tokens, lengths):
        logits = decoder.logits(model, decoder.forward(model, tokens, lengths=lengths)) / temperature
        scores = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        scores = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        scores = jnp.where(real, jnp.pad(scores, ((0, 0), (1, 0))), 0.0)
        return jnp.sum(scores * weights), scores

    ours, theirs = (jax.jit(jax.grad(f, has_aux=True))(lm.model, tokens, lengths) for f in (found, defined))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(ours[1])[~real], 0)
    for one, other in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max()) + 1e-9)


def test_log_probabilities_for_training_say_what_is_wrong(lm):
    tokens = jnp.zeros((2, 3), jnp.int32)
    for match, given, named in (
        (r"tokens must be \[batch, time\] with at least one token, got shape \(3,\)", (tokens[0],), {}),
        (
            r"lengths must have shape \(2,\), one for each row of tokens, got \(3,\)",
            (tokens, jnp.ones(3, jnp.int32)),
            {},
        ),
        ("temperature must be above 0, got 0.0", (tokens,), {"temperature": 0.0}),
        ("tokens must be integers, got float32", (tokens.astype(jnp.float32),), {}),
        ("tokens must be an array of integers, rows of one length, got list", ([[1], [1, 2]],), {}),
    ):
        with pytest.raises(ValueError, match=match):
            scoring.sequence_logprobs(lm.model, *given, **named)
    with pytest.raises(ValueError, match=r"model must be a model's parameters, as lm.model is, got a LanguageModel"):
        scoring.sequence_logprobs(lm, tokens)
    with pytest.raises(ValueError, match=r"tokens must be ids, .* got a text: lm.encode\(text\) makes them"):
        lm.score("a text")
