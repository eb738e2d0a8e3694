"""Texts of rows, made of prompts and what was generated."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.serving.sampling import History


def history_of(prompts, lengths, tokens, count, stop_ids) -> History:
    """Of prompts int [rows, bucket] and generated tokens int [rows, room], as far as lengths and count [rows] say."""
    prompts, lengths, tokens, count = (np.asarray(x, np.int32) for x in (prompts, lengths, tokens, count))
    text = np.concatenate([prompts, tokens], axis=1)
    for row, (length, number) in enumerate(zip(lengths, count, strict=True)):
        text[row, length : length + number] = tokens[row, :number]
    return History(*(jnp.asarray(x, jnp.int32) for x in (text, lengths, lengths + count, stop_ids)))
