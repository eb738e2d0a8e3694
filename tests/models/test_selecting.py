"""Models whose layers select what they read: whole sequences, launches on a cache, and generation agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.attention.selection import Quest
from jaxbuf.attention.streaming import Streaming
from jaxbuf.models import decoder
from jaxbuf.models.admission import Admission, Rule, WriteGate
from jaxbuf.models.gates import with_gates, with_selection
from tests.tiny import llama_model

PROMPT, PENDING = 21, 4
QUEST = Quest(8, 4, behind=PENDING, dense=1, prompt=PROMPT)


@pytest.fixture(scope="module")
def lm():
    return llama_model(2)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(0, 61, 60).astype(np.int32)


def test_launches_select_what_whole_sequences_do_however_tokens_are_launched(lm, tokens, rng):
    selecting = with_selection(lm, QUEST)
    assert [layer.mixers[0].selection for layer in selecting.config.layers] == [None, QUEST]
    expected = np.asarray(decoder.forward(selecting.model, jnp.asarray(tokens[None])))[0]
    assert np.abs(expected - np.asarray(decoder.forward(lm.model, jnp.asarray(tokens[None])))[0]).max() > 1e-2

    sizes = {"slots": 1, "capacity": 80, "max_pending": PENDING, "page_size": 4}
    cache = decoder.init_cache(selecting.config, **sizes)
    _, cache = decoder.prefill(selecting.model, cache, jnp.asarray(tokens[None, :PROMPT]))
    extend = jax.jit(decoder.extend)
    done = PROMPT
    while done < 56:
        given = tokens[done : done + PENDING].copy()
        kept = int(rng.integers(1, PENDING + 1))
        given[kept:] = rng.integers(0, 61, PENDING - kept)  # drafts that are rejected
        hidden, cache = extend(selecting.model, cache, jnp.asarray(given[None]))
        np.testing.assert_allclose(hidden[0, :kept], expected[done : done + kept], atol=1e-4)
        cache = decoder.commit(cache, jnp.array([kept], jnp.int32))
        done += kept


@pytest.mark.exhaustive
def test_drafts_change_no_token_of_a_model_that_selects(lm, tokens):
    selecting = with_selection(lm, Quest(32, 16, behind=5, dense=0, prompt=40))
    prompt = [tokens[:40].tolist()]
    greedy = jaxbuf.generate(selecting, prompt, max_new_tokens=30)[0].tokens
    assert jaxbuf.generate(selecting, prompt, max_new_tokens=30, drafter="ngram")[0].tokens == greedy
    found = np.asarray(selecting.logits(np.array(prompt[0] + greedy)))[39:-1]
    assert (found.max(1) - found[np.arange(30), greedy] < 1e-4).all()


def test_the_positions_of_a_cache_are_those_of_a_short_text(lm, tokens):
    """While the cache holds everything nothing changes; later it differs from local attention by positions alone."""
    streaming = np.asarray(with_selection(lm, Streaming(6, 2)).logits(tokens))
    local = np.asarray(with_gates(lm, Admission(Rule("none", sinks=2), 6)).logits(tokens))
    np.testing.assert_allclose(streaming[:8], np.asarray(lm.logits(tokens))[:8], atol=1e-4)
    np.testing.assert_allclose(streaming[:8], local[:8], atol=1e-4)
    assert np.abs(streaming[20:] - local[20:]).max() > 1e-3


def test_what_no_memory_serves_is_refused_by_name(lm, tokens):
    gated = with_selection(with_gates(lm, Admission(WriteGate(4), 4, 0.5)), QUEST)
    assert np.isfinite(gated.logits(tokens)).all()
    assert with_selection(gated, None).config == with_gates(lm, Admission(WriteGate(4), 4, 0.5)).config
    for model in (gated, with_selection(lm, Streaming(6))):
        with pytest.raises(ValueError, match="selection must be a Quest without gates where there is a memory"):
            decoder.init_cache(model.config, slots=1, capacity=32)
    with pytest.raises(ValueError, match="gates must be None where positions are those within a cache"):
        with_selection(gated, Streaming(6)).logits(tokens)
    for sizes, message in (
        ({"page_size": 8}, r"page_size must be that of the pool \(8\), got 4"),
        ({"page_size": 4, "max_pending": 8}, r"behind must be at least the tokens of a launch \(5\), got 4"),
        ({"page_size": 4, "trees": True}, "trees must be False where a selection reads pages"),
    ):
        model = with_selection(lm, QUEST)
        cache = decoder.init_cache(model.config, slots=1, capacity=32, **sizes)
        with pytest.raises(ValueError, match=message):
            decoder.extend(model.model, cache, jnp.asarray(tokens[None, :5]))
