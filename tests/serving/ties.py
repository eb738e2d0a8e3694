"""Which rows of a generation chose every token clearly, so that another program must choose the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.serving.batch import Decoding, make_batch, pack_prompts
from jaxbuf.serving.sampling import History, adjust, narrow, sample

TIE = 1e-4  # of two logits; those of two programs differ by 1e-5 at most


@jax.jit
def _is_clear(logits, sampling, history, position, token):
    """bool [rows]: whether `token` is chosen at a disadvantage, too: lowered, and with all that is left out raised."""
    adjusted = adjust(logits, sampling, history)
    row = jnp.arange(token.shape[0], dtype=jnp.int32)
    lowered = adjusted.at[row, token].add(-TIE)
    raised = jnp.where(narrow(adjusted, sampling) == -jnp.inf, adjusted + TIE, adjusted)
    clear = jnp.ones(token.shape, bool)
    for changed, factor in ((lowered, 1 - TIE), (raised, 1 + TIE)):
        top_p = jnp.where(sampling.top_p < 1, sampling.top_p * factor, 1.0)
        clear &= sample(changed, dataclasses.replace(sampling, top_p=top_p), position) == token
    return clear


def are_clear(lm, prompts, results, settings):
    """For each result of a generation whether none of its tokens is near a tie.

    Args:
      settings: One of each prompt, for one sample.
    """
    new = max(len(result.tokens) for result in results)
    begins = make_batch(lm, prompts, settings, Decoding(new)).begins
    packed, lengths = pack_prompts(prompts)
    rows, time = len(lengths), packed.shape[1] + new
    texts, tokens, number = np.zeros((rows, time), np.int32), np.zeros((rows, new), np.int32), np.zeros(rows, np.int32)
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        number[row] = len(result.tokens)
        tokens[row, : number[row]] = result.tokens
        texts[row, : len(prompt) + number[row]] = [*prompt, *result.tokens]
    logits = np.where(lm.known_ids, lm.logits(texts), -np.inf)
    clear = np.ones(rows, bool)
    for place in range(new):
        position = np.maximum(lengths, 1) + place
        history = History(texts, lengths, lengths + np.int32(place), begins.stop_ids)
        found = _is_clear(logits[np.arange(rows), position - 1], begins.sampling, history, position, tokens[:, place])
        clear &= np.asarray(found) | (place >= number)
    return clear[: len(prompts)].tolist()
