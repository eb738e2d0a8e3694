"""What the embedded model is worth: bits per byte of whole documents, and how often the MTP layer agrees with it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array
from jaxbuf.models import decoder
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.mtp import mtp_forward
from jaxbuf.models.scoring import windows

END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Scores:
    """Sums over all scored documents.

    Attributes:
      bits: −log2 probability of the documents' tokens.
      bytes: Of the original text in UTF-8.
      tokens: Scored tokens.
      accuracy: Share of tokens that were the model's first choice.
      mtp_agreement: Share of positions where the MTP layer, told h_t and x_{t+1}, has the same first choice for x_{t+2}
        as the model itself once it has read x_{t+1}; NaN without an MTP layer.
    """

    bits: float
    bytes: int
    tokens: int
    accuracy: float
    mtp_agreement: float

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return self.bits / self.bytes


@partial(jax.jit, static_argnames="block")
def _score(model: decoder.Decoder, tokens: Array, first: Array, lengths: Array, *, block: int = 256) -> Array:
    """f32 [4]: nats, hits, MTP agreements and MTP positions of tokens [rows, time] from index `first` on."""
    hidden = decoder.forward(model, tokens, lengths=lengths)
    targets = jnp.roll(tokens, -1, axis=1)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    counted = (position + 1 >= first[:, None]) & (position + 1 < lengths[:, None])
    has_mtp = model.mtp is not None
    further = mtp_forward(model, hidden, targets, lengths=lengths - 1) if has_mtp else hidden

    def part(_, inputs):
        hidden, further, targets = inputs
        scores = decoder.logits(model, hidden)
        best = jnp.argmax(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        drafted = jnp.argmax(decoder.logits(model, further), axis=-1)
        return None, (jax.nn.logsumexp(scores, axis=-1) - chosen, best, drafted)

    def split(x):  # time in blocks, so that the logits of long windows need not all exist at once
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(tokens.shape)

    _, parts = jax.lax.scan(part, None, (split(hidden), split(further), split(targets)))
    nats, best, drafted = (join(x) for x in parts)
    # position t: the draft of (h_t, x_{t+1}) against the model's choice after x_{t+1}; both x_{t+1} and x_{t+2} counted
    both = counted[:, :-1] & counted[:, 1:]
    agree = drafted[:, :-1] == best[:, 1:]
    sums = [jnp.where(counted, nats, 0.0), counted & (best == targets), both & agree, both]
    return jnp.stack([jnp.sum(x.astype(jnp.float32)) for x in sums])


def score(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    context: int = 4096,
    rows: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores documents, each on its own: its first token follows the end-of-text token, as in training.

    Args:
      lm: With a tokenizer that has the end-of-text token.
      texts: The documents; every byte of them is counted.
      context: Tokens of a window, a power of two of at least 64, at most the model's longest sequence.
      rows: Windows at once.
      progress: Called before the first windows and after each `rows` with how many are done and how many there are.

    Raises:
      ValueError: No text, a context that does not fit, or no tokenizer with the end-of-text token.
    """
    if not any(texts):
        raise ValueError("there is no text to score")
    if context < 64 or context & (context - 1) or context > lm.max_length:
        raise ValueError(f"context must be a power of two in [64, {lm.max_length}], got {context}")
    start = None if lm.tokenizer is None else lm.tokenizer.token_to_id(END_OF_TEXT)
    if start is None:
        raise ValueError(f"the model's tokenizer must have the token {END_OF_TEXT}")
    encoded = [np.asarray([start, *lm.encode(text)], np.int32) for text in texts if text]
    found = sorted((window for tokens in encoded for window in windows(tokens, context)), key=lambda w: w.tokens.size)
    sizes = sorted({min(size, context) for size in (64, 256, 1024, 4096, context)})  # few shapes to compile for
    totals = np.zeros(4)
    report = progress or (lambda done, total: None)
    report(0, len(found))
    for index in range(0, len(found), rows):
        group = found[index : index + rows]
        time = min(size for size in sizes if size >= max(window.tokens.size for window in group))
        tokens = np.zeros((rows, time), np.int32)
        first, lengths = np.zeros(rows, np.int32), np.ones(rows, np.int32)
        for row, window in enumerate(group):
            tokens[row, : window.tokens.size] = window.tokens
            first[row], lengths[row] = window.first, window.tokens.size
        inputs = (jnp.asarray(tokens), jnp.asarray(first), jnp.asarray(lengths))
        totals += np.asarray(_score(lm.model, *inputs, block=min(256, time)), np.float64)
        report(index + len(group), len(found))
    nats, hits, agreements, pairs = totals
    count = sum(tokens.size - 1 for tokens in encoded)
    return Scores(
        bits=float(nats / math.log(2.0)),
        bytes=sum(len(text.encode()) for text in texts),
        tokens=count,
        accuracy=float(hits / count),
        mtp_agreement=float("nan") if lm.model.mtp is None else float(agreements / max(pairs, 1)),
    )
