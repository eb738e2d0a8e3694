"""Drafts of `propose_ngram` and `propose_ngram_tree` against their definitions in plain Python."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.drafting import propose_ngram, propose_ngram_tree
from jaxbuf.serving.sampling import History
from tests.serving.texts import history_of

ROWS, BUCKET, ROOM, DRAFTS = 512, 14, 12, 5
propose = jax.jit(partial(propose_ngram, draft_tokens=DRAFTS))


def reference(text, draft_tokens, longest):
    """The tokens after the longest of the text's ends where it occurred before: where the same token followed most
    often, and the latest of those; repeated where too few."""
    for size in range(min(longest, len(text)), 0, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends:
            follows = [text[end] for end in ends]
            end = max(ends, key=lambda end: (follows.count(text[end]), end))
            drafts = text[end:] * draft_tokens
            return drafts[:draft_tokens], draft_tokens
    return [0] * draft_tokens, 0


def random_history(rng, alphabet):
    """Rows of every length; what lies past a row's tokens is of the same alphabet."""
    prompts, tokens = (rng.integers(0, alphabet, (ROWS, width)) for width in (BUCKET, ROOM))
    lengths, count = rng.integers(0, BUCKET + 1, ROWS), rng.integers(0, ROOM + 1, ROWS)
    lengths[:4], count[:4] = [0, 0, 1, BUCKET], [0, 1, 0, ROOM]
    return history_of(prompts, lengths, tokens, count, np.full((ROWS, 1), -1))


def texts(history):
    tokens, length = np.asarray(history.tokens), np.asarray(history.length)
    return [tokens[row, : length[row]].tolist() for row in range(ROWS)]


@pytest.mark.parametrize(("alphabet", "longest"), [(1, 3), (2, 3), (3, 3), (30, 3), (2, 1), (2, 7)])
def test_drafts_are_the_definition(rng, alphabet, longest):
    history = random_history(rng, alphabet)
    extra = {} if longest == 3 else {"longest": longest}
    drafts, count = propose(history) if not extra else jax.jit(partial(propose_ngram, draft_tokens=2, **extra))(history)
    assert drafts.dtype == count.dtype == jnp.int32
    for row, text in enumerate(texts(history)):
        expected = reference(text, drafts.shape[1], longest)
        assert (drafts[row].tolist(), int(count[row])) == expected, f"row {row}: {text}"
    if alphabet == 30:
        assert {int(x) for x in np.asarray(count)} == {0, DRAFTS}


def test_nothing_past_the_real_tokens_is_read(rng):
    history = random_history(rng, 3)
    past = np.arange(BUCKET + ROOM)[None] >= np.asarray(history.length)[:, None]
    changed = dataclasses.replace(history, tokens=jnp.where(past, random_history(rng, 3).tokens, history.tokens))
    for one, two in zip(propose(history), propose(changed), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_period_is_drafted_on():
    """Of text that repeats, all drafts continue it, however short its period."""
    periods = 1 + np.arange(ROWS) % 6
    prompts = np.arange(BUCKET)[None] % periods[:, None]
    full = jnp.full(ROWS, BUCKET, jnp.int32)
    blank = jnp.full((ROWS, ROOM), 7, jnp.int32)
    drafts, count = propose(History(jnp.asarray(prompts, jnp.int32), full, full, blank[:, :1]))
    expected = (BUCKET + np.arange(DRAFTS))[None] % periods[:, None]
    np.testing.assert_array_equal(drafts, expected)
    assert (np.asarray(count) == DRAFTS).all()


def test_text_may_be_shorter_than_what_is_looked_for():
    texts = jnp.asarray([[4, 4], [4, 4], [4, 5]], jnp.int32)
    lengths = jnp.asarray([2, 1, 2], jnp.int32)
    drafts, count = propose_ngram(History(texts, lengths, lengths, texts[:, :1]), 2, longest=9)
    assert (drafts.tolist(), count.tolist()) == ([[4, 4], [0, 0], [0, 0]], [2, 0, 0])


def test_wrong_arguments_are_named(rng):
    history = random_history(rng, 2)
    with pytest.raises(ValueError, match=r"^draft_tokens must be at least 0, got -1$"):
        propose_ngram(history, -1)
    with pytest.raises(ValueError, match=r"^longest must be at least 1, got 0$"):
        propose_ngram(history, 2, longest=0)
    with pytest.raises(ValueError, match=r"^branches must be at least 1, got 0$"):
        propose_ngram_tree(history, 2, 0)


def tree_reference(text, draft_tokens, branches, longest):
    """The trie of what followed the best occurrences, breadth first; nodes as (path of tokens), in order."""
    ends = []
    for size in range(min(longest, len(text)), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:] and start + size not in ends:
                ends.append(start + size)
    follows = [(text[end:] * draft_tokens)[:draft_tokens] for end in ends[:branches]]
    nodes = []
    for depth in range(1, draft_tokens + 1):
        for tokens in follows:
            if tuple(tokens[:depth]) not in nodes:
                nodes.append(tuple(tokens[:depth]))
    return nodes[:draft_tokens]


@pytest.mark.parametrize(("alphabet", "branches", "longest"), [(1, 2, 3), (2, 3, 3), (3, 2, 2), (3, 4, 3), (30, 2, 3)])
def test_trees_of_drafts_are_the_definition(rng, alphabet, branches, longest):
    history = random_history(rng, alphabet)
    draft = jax.jit(partial(propose_ngram_tree, draft_tokens=DRAFTS, branches=branches, longest=longest))
    drafts, parents, count = map(np.asarray, draft(history))
    assert drafts.dtype == parents.dtype == count.dtype == np.int32
    for row, text in enumerate(texts(history)):
        paths = []
        for node in range(count[row]):
            assert -1 <= parents[row, node] < node
            before = paths[parents[row, node]] if parents[row, node] >= 0 else ()
            paths.append((*before, drafts[row, node]))
        assert paths == tree_reference(text, DRAFTS, branches, longest), f"row {row}: {text}"
    if alphabet == 3:
        assert (parents[count == DRAFTS] == np.arange(DRAFTS) - 1).all(1).mean() < 0.9  # not all of them are chains


def test_a_tree_of_one_branch_is_the_chain(rng):
    history = random_history(rng, 3)
    drafts, parents, count = propose_ngram_tree(history, DRAFTS, 1)
    chain, number = propose(history)
    np.testing.assert_array_equal(count, number)
    np.testing.assert_array_equal(drafts, chain)
    assert (np.asarray(parents)[np.asarray(count) > 0] == np.arange(DRAFTS) - 1).all()
