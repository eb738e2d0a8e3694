"""How probable a model finds tokens and texts, without ever holding the logits of more than a few positions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Float, Float32, Int, Int32
from jaxbuf.models import decoder
from jaxbuf.models.shapes import power_of_two_from, power_of_two_to
from jaxbuf.target import Target, resolve_target

if TYPE_CHECKING:
    from jaxbuf.models.language_model import LanguageModel

PIECE = 1024  # the most tokens of a row that one launch reads
SHORTEST = 64  # the fewest tokens that a cache is made for
ROWS = 8  # the most rows at once
CACHED = 2**17  # the most tokens of all rows together that a cache is made for, unless one row has more
LOGITS = 2**25  # float32 numbers of one block of logits


@dataclasses.dataclass(frozen=True)
class TextScore:
    """What a model makes of a text. Scores of several texts add up.

    Attributes:
      tokens: How many were scored: all of the text's.
      bytes: Of the text in UTF-8.
      log_likelihood: Natural logarithm of the tokens' joint probability.
    """

    tokens: int
    bytes: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        """Per token: exp of the mean negative log-probability."""
        return math.exp(-self.log_likelihood / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return -self.log_likelihood / math.log(2) / self.bytes

    def __add__(self, other: "TextScore") -> "TextScore":
        return TextScore(
            self.tokens + other.tokens, self.bytes + other.bytes, self.log_likelihood + other.log_likelihood
        )


@dataclasses.dataclass(frozen=True)
class Window:
    """A stretch of one document: `tokens` are read, those from index `first` on are scored."""

    tokens: np.ndarray
    first: int


def windows(tokens: np.ndarray, context: int, first: int = 1) -> list[Window]:
    """Cuts [start tokens, document...] into windows of at most `context` tokens that score every token once.

    Windows overlap by half, so that in all but the first each scored token has at least context // 2 tokens before it.

    Args:
      tokens: The document, behind what stands before it and is not scored.
      context: As said.
      first: How many tokens stand before the document.

    Raises:
      ValueError: context is below 2, or leaves no place for a token of the document.
    """
    if context < 2 or context <= first:
        raise ValueError(f"context must be at least {max(2, first + 1)}, got {context}")
    found = [Window(tokens[:context], first)]
    done = min(context, tokens.size)
    stride = context - context // 2
    while done < tokens.size:
        end = min(done + stride, tokens.size)
        start = max(end - context, 0)
        found.append(Window(tokens[start:end], done - start))
        done = end
    return found


def score_text(
    lm: "LanguageModel",
    text: str | Sequence[int],
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TextScore:
    """Scores a text of any length, or token ids.

    The first token follows what the model's tokenizer puts before a text, as Llama's does with its begin-of-text token;
    with other tokenizers, and with token ids, the end-of-text token of config.json, as between documents. What stands
    before a text so is read, but not counted.

    Args:
      lm: With a tokenizer, unless `text` is token ids.
      text: A text, or token ids, whose bytes nobody knows: the score's `bytes` is 0 then. What is longer than the
        context is read in windows that overlap by half, see `windows`.
      context: Tokens of a window; None: the model's max_length.
      progress: Called before the first and after each piece with how many tokens were read, and how many will be.

    Raises:
      ValueError: An empty text, a context that does not fit, no tokenizer, nothing that a text could follow, or an id
        outside the vocabulary.
    """
    context = lm.max_length if context is None else context
    if not 2 <= context <= lm.max_length:
        raise ValueError(f"context must be in [2, {lm.max_length}], up to the model's max_length, got {context}")
    before = list(lm.config.eos_token_ids[:1])
    if isinstance(text, str):
        before = _put_before(lm) or before
        ids, size = lm.encode(text, add_special_tokens=False), len(text.encode())
    else:
        ids, size = text, 0
    if not before:
        raise ValueError(f"the model {lm.name!r} has no eos_token_id in its config.json, which a text would follow")
    if not ids:
        raise ValueError(f"text must hold at least one token, got {text!r}")
    outside = [token for token in ids if not 0 <= token < lm.vocab_size]
    if outside:
        raise ValueError(f"token ids must be in [0, {lm.vocab_size}), got {outside[0]}")
    tokens = np.asarray([*before, *ids], np.int32)
    found = windows(tokens, context, len(before))
    total, done = sum(window.tokens.size for window in found), 0
    report = progress or (lambda done, total: None)
    report(0, total)

    def advance(read: int) -> None:
        nonlocal done
        done += read
        report(done, total)

    likelihood = 0.0
    for window in found:
        scores = score_tokens(lm.model, window.tokens[None], target=lm.target, progress=advance)
        likelihood += float(np.sum(scores[0, window.first :], dtype=np.float64))
    return TextScore(len(ids), size, likelihood)


def _put_before(lm: "LanguageModel") -> list[int]:
    """The special tokens that the model's tokenizer puts before a text."""
    bare, whole = (lm.encode("a", add_special_tokens=added) for added in (False, True))
    places = (place for place in range(len(whole) - len(bare) + 1) if whole[place : place + len(bare)] == bare)
    return whole[: next(places, 0)]


def score_tokens(
    model: decoder.Decoder,
    tokens: np.ndarray,
    *,
    lengths: np.ndarray | None = None,
    target: Target | None = None,
    progress: Callable[[int], None] | None = None,
    _piece: int | None = None,
) -> np.ndarray:
    """`LanguageModel.score` of checked tokens: f32 [batch, time].

    The rows are read through a cache, some at a time, in pieces of one shape; a piece's logits exist in blocks. Beside
    the cache the memory does not grow with time. Shapes are powers of two, so few are compiled.

    Args:
      model: The parameters.
      tokens: int32 [batch, time].
      lengths: int32 [batch], the real tokens of each row; None: all.
      target: What it is compiled for; None: what the parameters lie on.
      progress: Called after each piece with the tokens that it read.
      _piece: Tokens of a piece, a power of two; None: PIECE, or the capacity if that is less.
    """
    batch, time = tokens.shape
    capacity = power_of_two_from(time, SHORTEST)
    rows = min(ROWS, power_of_two_from(batch), power_of_two_to(CACHED // capacity))
    piece = _piece or min(PIECE, capacity)
    block = fitting_block(rows, piece, model.config.vocab_size)
    given = {"dtype": model.embed_tokens[...].dtype, "target": resolve_target(target, model.norm.get_raw_value())}
    scores = np.zeros((batch, time), np.float32)
    for top in range(0, batch, rows):
        group = tokens[top : top + rows]
        real = np.zeros(rows, np.int32)
        real[: len(group)] = time if lengths is None else lengths[top : top + rows]
        cache = decoder.init_cache(
            model.config, slots=rows, capacity=capacity, limit=1, max_pending=1, block_size=1, **given
        )
        padded = np.zeros((rows, -(-time // piece) * piece + 1), np.int32)
        padded[: len(group), :time] = group
        for start in range(0, time, piece):
            read = np.clip(real - start, 0, piece)
            if not read.any():
                break
            inputs, targets = padded[:, start : start + piece], padded[:, start + 1 : start + piece + 1]
            found, cache = _score_piece(model, cache, inputs, targets, read, block=block)
            known = min(start + 1 + piece, time)  # the last token has nothing after it to score
            scores[top : top + rows, start + 1 : known] = np.asarray(found)[: len(group), : known - start - 1]
            if progress:
                progress(int(read.sum()))
    if lengths is not None:
        scores[np.arange(time)[None] >= lengths[:, None]] = 0.0
    return scores


@partial(jax.jit, static_argnames="block", donate_argnames="cache")
def _score_piece(
    model: decoder.Decoder, cache: decoder.Cache, tokens: Array, targets: Array, lengths: Array, *, block: int
) -> tuple[Array, decoder.Cache]:
    """Reads tokens int32 [rows, piece] and gives the log-probability of each target, f32 [rows, piece]."""
    hidden, cache = decoder.prefill(model, cache, tokens, lengths=lengths)
    return hidden_logprobs(model, hidden, targets, block=block).chosen, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities in the model's own distribution, natural logarithms.

    Attributes:
      chosen: Of the token at each place.
      top_ids, top: The most probable tokens there, best first.
    """

    chosen: Float32[Array, "..."]
    top_ids: Int32[Array, "... n"]
    top: Float32[Array, "... n"]


def token_logprobs(
    logits: Float32[Array, "*n vocab"], tokens: Int[Array, "*n"], top: int = 0, *, wanted: Bool[Array, ""] | None = None
) -> Logprobs:
    """Of tokens under logits, with the `top` most probable ones beside each.

    Args:
      logits, tokens: As said.
      top: How many (static), at most the vocabulary.
      wanted: Whether anybody asks for the most probable ones, which are zeros otherwise; None: yes.
    """
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - norm
    top = min(top, logits.shape[-1])

    def most_probable():
        best, ids = jax.lax.top_k(logits, top)
        return best - norm, ids.astype(jnp.int32)

    def nothing():
        shape = (*tokens.shape, top)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)

    best, ids = most_probable() if wanted is None else jax.lax.cond(wanted, most_probable, nothing)
    return Logprobs(chosen[..., 0], ids, best)


def sequence_logprobs(
    model: decoder.Decoder,
    tokens: Int[Array, "batch time"],
    lengths: Int[Array, "batch"] | None = None,
    *,
    temperature: float = 1.0,
    target: Target | str | None = None,
) -> Float32[Array, "batch time"]:
    """Log-probability of each token given those before it in its row, for a training loop: differentiable in the
    model's parameters, and with tokens that jit traces.

    The rows are read at once, without a cache, and each block of logits is computed again for the gradient. Without a
    gradient `LanguageModel.score` takes longer rows. What generation noted as `logprobs` of a token is the same number,
    where it sampled at this temperature, with logprobs_mode="processed", and top_k, top_p, min_p and penalties as they
    are by default.

    Args:
      model: The parameters, as `LanguageModel.model` is.
      tokens: Right-padded. One outside the vocabulary has NaN.
      lengths: Real tokens of each row; None: all.
      temperature: Logits are divided by it; above 0.
      target: As in `jaxbuf.models.decoder.forward`.

    Returns:
      Natural logarithms. The first column is 0, for nothing comes before it; so is what lies past a row's length.

    Raises:
      ValueError: model is none, tokens are no rows of integers, lengths are not one a row, or temperature is not above
        0.
    """
    if not isinstance(model, decoder.Decoder):
        raise ValueError(f"model must be a model's parameters, as lm.model is, got a {type(model).__name__}")
    tokens = _integers("tokens", tokens)
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(f"tokens must be [batch, time] with at least one token, got shape {tokens.shape}")
    rows, time = tokens.shape
    lengths = None if lengths is None else _integers("lengths", lengths)
    if lengths is not None and lengths.shape != (rows,):
        raise ValueError(f"lengths must have shape {(rows,)}, one for each row of tokens, got {lengths.shape}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    hidden = decoder.forward(model, tokens, lengths=lengths, target=target)
    block = fitting_block(rows, power_of_two_from(time), model.config.vocab_size)
    more = -time % block
    hidden = jnp.pad(hidden, ((0, 0), (0, more), (0, 0)))
    targets = jnp.pad(jnp.roll(tokens, -1, axis=1), ((0, 0), (0, more)))
    found = hidden_logprobs(model, hidden, targets, block=block, temperature=temperature, remat=True).chosen
    found = jnp.roll(found[:, :time], 1, axis=1)
    at = jnp.arange(time)[None]
    return jnp.where((at > 0) & (at < (time if lengths is None else lengths[:, None])), found, 0.0)


def _integers(name: str, given: object) -> Array:
    """What was given, lists too, as an array of integers."""
    try:
        found = jnp.asarray(given)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of integers, rows of one length, got {type(given).__name__}"
        ) from None
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {found.dtype}")
    return found


def hidden_logprobs(
    model: decoder.Decoder,
    hidden: Float[Array, "rows time hidden"],
    targets: Int[Array, "rows time"],
    *,
    block: int,
    top: int = 0,
    wanted: Bool[Array, ""] | None = None,
    temperature: float = 1.0,
    remat: bool = False,
) -> Logprobs:
    """`token_logprobs` of targets under the logits of hidden states, divided by a temperature.

    Logits exist for `block` places of each row at a time, which must divide time; with `remat` for a gradient, too,
    which computes them again.
    """

    def one_block(_, inputs):
        hidden, targets = inputs
        logits = decoder.logits(model, hidden)
        logits = logits if temperature == 1.0 else logits / temperature
        return None, token_logprobs(logits, targets, top, wanted=wanted)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(*targets.shape, *x.shape[3:])

    step = jax.checkpoint(one_block) if remat else one_block
    _, found = jax.lax.scan(step, None, (split(hidden), split(targets)))
    return jax.tree.map(join, found)


def fitting_block(rows: int, time: int, vocab: int) -> int:
    """The places of a block of logits f32 [rows, block, vocab] that fits; it divides time if that is a power of two."""
    return min(time, power_of_two_to(LOGITS // (rows * vocab)))
