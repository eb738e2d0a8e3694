"""Drafts from the text itself: what followed the latest earlier occurrence of its last tokens."""

import jax
import jax.numpy as jnp

from jaxbuf.serving.sampling import History

type Array = jax.Array


def propose_ngram(history: History, draft_tokens: int, longest: int = 3) -> tuple[Array, Array]:
    """Drafts the tokens that followed the last time that a row's last tokens occurred in its prompt and generation.

    The longest occurrence counts, of at most `longest` tokens, and of these the latest. Where it lies so near the end
    that fewer than draft_tokens follow, they are repeated: text of a short period is drafted on in that period.

    Args:
      history: The prompts and generated tokens.
      draft_tokens: How many to draft (static).
      longest: The most tokens that are looked for (static).

    Returns:
      drafts int32 [rows, draft_tokens], and count int32 [rows]: draft_tokens, or 0 where not even the last token
      occurred before (its drafts are 0).

    Raises:
      ValueError: draft_tokens is negative, or longest is not positive.

    Source: Saxena, Prompt lookup decoding (2023); the repetition is that of Lempel and Ziv's copies (1977).
    """
    if draft_tokens < 0:
        raise ValueError(f"draft_tokens must be at least 0, got {draft_tokens}")
    if longest < 1:
        raise ValueError(f"longest must be at least 1, got {longest}")
    text, number = _text(history)
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    matched = jnp.zeros_like(text)
    for back in range(min(longest, text.shape[1])):
        # The token `back` places before each place and before the last: -1 and -2 where there is none.
        token = jnp.pad(text[:, : text.shape[1] - back], ((0, 0), (back, 0)), constant_values=-1)
        last = jnp.take_along_axis(text, jnp.maximum(number - 1 - back, 0), axis=1)
        same = token == jnp.where(number > back, last, -2)
        matched = matched + ((matched == back) & same).astype(jnp.int32)
    matched = jnp.where(place < number - 1, matched, 0)
    score = jnp.where(matched > 0, matched * text.shape[1] + place, -1)
    found = jnp.max(score, axis=1, keepdims=True) >= 0
    follows = jnp.argmax(score, axis=1, keepdims=True).astype(jnp.int32) + 1
    ahead = jnp.arange(draft_tokens, dtype=jnp.int32)[None] % jnp.maximum(number - follows, 1)
    index = jnp.where(found, follows + ahead, 0)
    drafts = jnp.where(found, jnp.take_along_axis(text, index, axis=1), 0)
    return drafts, jnp.where(found[:, 0], draft_tokens, 0).astype(jnp.int32)


def _text(history: History) -> tuple[Array, Array]:
    """Each row's prompt and generated tokens in one, int32 [rows, bucket + room], and their number int32 [rows, 1].

    What lies past them is not cleared.
    """
    bucket, lengths = history.prompts.shape[1], history.lengths[:, None]
    both = jnp.concatenate([history.prompts, history.tokens], axis=1)
    place = jnp.arange(both.shape[1], dtype=jnp.int32)[None]
    source = jnp.where(place < lengths, place, jnp.minimum(bucket - lengths + place, both.shape[1] - 1))
    return jnp.take_along_axis(both, source, axis=1), lengths + history.count[:, None]
