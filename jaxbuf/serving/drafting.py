"""Drafts from the text itself: what followed earlier occurrences of its last tokens."""

import jax.numpy as jnp

from jaxbuf.axes import Array, Int32
from jaxbuf.serving.sampling import History

REMAINDERS = 4096  # counters of the tokens that followed: ids that are equal modulo this share one
MOST_VOTES = 255  # the most that a counter tells


def propose_ngram(
    history: History, draft_tokens: int, longest: int = 3
) -> tuple[Int32[Array, "rows {draft_tokens}"], Int32[Array, "rows"]]:
    """Drafts the tokens that followed when a row's last tokens occurred before in its prompt and generation.

    The longest occurrences count, of at most `longest` tokens; of these the ones that the same token follows most
    often, and of these the latest. Where it lies so near the end that fewer than draft_tokens follow, they are
    repeated: text of a short period is drafted on in that period.

    Args:
      history: The text of every row.
      draft_tokens: How many to draft (static).
      longest: The most tokens that are looked for (static).

    Returns:
      drafts, and count: draft_tokens, or 0 where not even the last token
      occurred before (its drafts are 0).

    Raises:
      ValueError: draft_tokens is negative, or longest is not positive.

    Source: Saxena, Prompt lookup decoding (2023); the repetition is that of Lempel and Ziv's copies (1977).
    """
    follows, found = _continuations(history, 1, draft_tokens, longest, voting=True)
    return follows[:, 0], jnp.where(found[:, 0], draft_tokens, 0).astype(jnp.int32)


def propose_ngram_tree(
    history: History, draft_tokens: int, branches: int, longest: int = 3
) -> tuple[Int32[Array, "rows {draft_tokens}"], Int32[Array, "rows {draft_tokens}"], Int32[Array, "rows"]]:
    """Drafts what followed several earlier occurrences of a row's last tokens, as a tree.

    The occurrences are the longest `branches`, and of equally long ones the latest: a tree has room for what follows
    less often. With one branch it is the chain of `propose_ngram`.
    What follows them is merged where it begins alike. The tree is filled from its root down, in each depth the better
    occurrences first, until it has draft_tokens nodes: where all occurrences agree it is the chain of `propose_ngram`.

    Args:
      history, draft_tokens, longest: As in `propose_ngram`.
      branches: At least 1 (static).

    Returns:
      drafts, their parents (-1: the last token), and count, how many there are.

    Raises:
      ValueError: branches is below 1, or as in `propose_ngram`.
    """
    if branches < 1:
        raise ValueError(f"branches must be at least 1, got {branches}")
    follows, found = _continuations(history, branches, draft_tokens, longest, voting=branches == 1)
    rows, number, length = follows.shape
    # A node stands for all branches that begin with the same tokens, and belongs to the first of them.
    alike = (follows[:, :, None] == follows[:, None]) & found[:, None, :, None]
    alike = jnp.cumprod(alike.astype(jnp.int32), axis=3)
    first = jnp.argmax(alike, axis=2).astype(jnp.int32)
    new = found[..., None] & (first == jnp.arange(number, dtype=jnp.int32)[None, :, None])
    by_depth = jnp.moveaxis(new, 1, 2).reshape(rows, -1).astype(jnp.int32)
    index = jnp.moveaxis((jnp.cumsum(by_depth, axis=1) - 1).reshape(rows, length, number), 1, 2)
    node = jnp.take_along_axis(index, first, axis=1)
    parent = jnp.pad(node[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)[..., :length]
    place = jnp.where(new, index, draft_tokens).reshape(rows, -1)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    empty = jnp.zeros((rows, draft_tokens), jnp.int32)
    drafts = empty.at[row, place].set(follows.reshape(rows, -1), mode="drop")
    parents = (empty - 1).at[row, place].set(parent.reshape(rows, -1), mode="drop")
    return drafts, parents, jnp.minimum(jnp.sum(by_depth, axis=1), draft_tokens)


def _continuations(
    history: History, number: int, draft_tokens: int, longest: int, *, voting: bool
) -> tuple[Array, Array]:
    """What followed the `number` best occurrences, int32 [rows, number, draft_tokens], and whether there are so many,
    bool [rows, number]."""
    if draft_tokens < 0:
        raise ValueError(f"draft_tokens must be at least 0, got {draft_tokens}")
    if longest < 1:
        raise ValueError(f"longest must be at least 1, got {longest}")
    text, length = history.tokens, history.length[:, None]
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    matched = jnp.zeros_like(text)
    for back in range(min(longest, text.shape[1])):
        # The token `back` places before each place and before the last: -1 and -2 where there is none.
        token = jnp.pad(text[:, : text.shape[1] - back], ((0, 0), (back, 0)), constant_values=-1)
        last = jnp.take_along_axis(text, jnp.maximum(length - 1 - back, 0), axis=1)
        same = token == jnp.where(length > back, last, -2)
        matched = matched + ((matched == back) & same).astype(jnp.int32)
    matched = jnp.where(place < length - 1, matched, 0)
    rank = matched * (MOST_VOTES + 1) + _votes(text, matched) if voting else matched
    score = jnp.where(matched > 0, rank * text.shape[1] + place, -1)
    places = []
    for _ in range(number):
        best = jnp.argmax(score, axis=1, keepdims=True).astype(jnp.int32)
        places.append(jnp.where(jnp.max(score, axis=1, keepdims=True) >= 0, best, -1))
        score = jnp.where(place == best, -1, score)
    at = jnp.concatenate(places, axis=1)
    found, follows = at >= 0, at + 1
    ahead = jnp.arange(draft_tokens, dtype=jnp.int32)[None, None]
    ahead = ahead % jnp.maximum(length - follows, 1)[..., None]
    index = jnp.where(found[..., None], follows[..., None] + ahead, 0)
    drafts = jnp.take_along_axis(text, index.reshape(text.shape[0], -1), axis=1).reshape(index.shape)
    return jnp.where(found[..., None], drafts, 0), found


def _votes(text: Array, matched: Array) -> Array:
    """How many of a row's longest occurrences the same token follows as this place, int32 [rows, places], up to
    MOST_VOTES."""
    row = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
    longest = (matched > 0) & (matched == jnp.max(matched, axis=1, keepdims=True))
    # Counted by remainder: a table of the whole vocabulary would be large, and tokens that meet spoil a guess at most.
    remainder = jnp.pad(text[:, 1:], ((0, 0), (0, 1))) % REMAINDERS
    counts = jnp.zeros((text.shape[0], REMAINDERS), jnp.int32).at[row, remainder].add(longest.astype(jnp.int32))
    return jnp.minimum(counts[row, remainder], MOST_VOTES)
