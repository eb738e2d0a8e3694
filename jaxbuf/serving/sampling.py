"""How the next token is chosen, as data: one compiled program serves every mix of settings."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Float32, Int32, Key, UInt32
from jaxbuf.models.shapes import power_of_two_from
from jaxbuf.serving.token_masks import only
from jaxbuf.serving.truncation import candidates, find_cutoff, greatest, keep

MOST_LOGPROBS = 20
MOST_SAMPLES = 1024  # of a prompt: a mistake beyond, which would take all memory
BIASES = 4  # the fewest biased tokens that are compiled for

type LogprobsMode = Literal["raw", "processed"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, when it stops, and what is told about it.

    Logits are changed in this order: logit_bias and min_tokens, the penalties, temperature, min_p, top_k, top_p. All of
    it but the last four changes greedy choices too.

    Attributes:
      temperature: Logits are divided by it; 0 takes the most probable token (greedy).
      top_k: Only the k most probable tokens; 0: all.
      top_p: Only the most probable tokens that together reach this probability (the one that reaches it included).
      min_p: Only tokens at least this times as probable as the most probable one.
      presence_penalty: Subtracted from the logit of every token generated before.
      frequency_penalty: Subtracted from a token's logit once for each time it was generated.
      repetition_penalty: Logits of tokens in the prompt or generated before are divided by it where positive and
        multiplied by it where negative; 1: none.
      logit_bias: Added to the logits of these token ids; -inf forbids a token.
      min_tokens: No stop token before this many tokens (stop strings do end a request earlier).
      seed: Of the request's random numbers: the token at position p draws from fold_in(seed, p), so it depends neither
        on the other requests nor on how the generation is cut into calls. Two requests of one prompt and one seed give
        one text.
      stop: Texts that end the request: it ends as soon as its text holds one, and the text is cut before that one.
      stop_token_ids: Tokens that end the request, beside the model's own.
      ignore_eos: Do not stop at the model's own end tokens.
      logprobs: None, or how many of the most probable tokens to report at each step, beside the chosen one (0 to 20).
      logprobs_mode: Which distribution `logprobs` reports. "raw" is the model's own, before any setting changes it:
        what `lm.score` gives. "processed" is the one that the token was drawn from, after all settings (what
        reinforcement learning needs); a greedy token has probability 1 in it. Tokens of probability 0 are left out.
      prompt_logprobs: None, or how many of the most probable tokens to report at each token of the prompt, beside that
        token itself (0 to 20). They are always raw.
      n: How many samples of the prompt, at most 1,024; the prompt is read once. Sample j draws as a request with the
        seed (seed + j) mod 2**32 does; greedy ones are all the same.

    Raises:
      ValueError: A value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logprobs_mode: LogprobsMode = "raw"

    def __post_init__(self):
        if isinstance(self.stop_token_ids, np.ndarray | jax.Array) and self.stop_token_ids.ndim == 1:
            object.__setattr__(self, "stop_token_ids", tuple(np.asarray(self.stop_token_ids).tolist()))
        positive = "a finite number above 0"
        checks = {
            "temperature": (is_finite(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            "top_k": (_count(self.top_k), "a whole number of at least 0 (0: all tokens)"),
            "top_p": (is_finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (is_finite(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            "presence_penalty": (is_finite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (is_finite(self.frequency_penalty), "a finite number"),
            "repetition_penalty": (is_finite(self.repetition_penalty) and self.repetition_penalty > 0, positive),
            "logit_bias": (_biases(self.logit_bias), "token ids to finite numbers or -inf"),
            "min_tokens": (_count(self.min_tokens), "a whole number of at least 0"),
            "seed": (_count(self.seed) and self.seed < 2**32, "a whole number in [0, 2**32)"),
            "stop": (
                isinstance(self.stop, str | Sequence) and all(isinstance(x, str) and x for x in self.stop_texts),
                "a text or texts, none of them empty",
            ),
            "stop_token_ids": (
                isinstance(self.stop_token_ids, Sequence) and all(map(_count, self.stop_token_ids)),
                "token ids of at least 0",
            ),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "True or False"),
            "logprobs": (_top(self.logprobs), f"None or a whole number in [0, {MOST_LOGPROBS}]"),
            "prompt_logprobs": (_top(self.prompt_logprobs), f"None or a whole number in [0, {MOST_LOGPROBS}]"),
            "logprobs_mode": (self.logprobs_mode in get_args(LogprobsMode.__value__), '"raw" or "processed"'),
            "n": (_count(self.n) and 1 <= self.n <= MOST_SAMPLES, f"a whole number in [1, {MOST_SAMPLES}]"),
        }
        for name, (fits, expected) in checks.items():
            if not fits:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def samples(self) -> "list[SamplingParams]":
        """The settings of each of the n samples alone."""
        if self.n == 1:
            return [self]
        return [dataclasses.replace(self, seed=(self.seed + j) % 2**32, n=1) for j in range(self.n)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings of each row.

    Attributes:
      temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, min_tokens, seed: As in
        `SamplingParams`.
      bias_ids, bias: Padded with id -1.
      top_logprobs: How many of the most probable tokens are reported; 0 also where nothing is.
      processed_logprobs: Whether log-probabilities are those of the distribution that is drawn from.
    """

    temperature: Float32[Array, "rows"]
    top_k: Int32[Array, "rows"]
    top_p: Float32[Array, "rows"]
    min_p: Float32[Array, "rows"]
    presence_penalty: Float32[Array, "rows"]
    frequency_penalty: Float32[Array, "rows"]
    repetition_penalty: Float32[Array, "rows"]
    bias_ids: Int32[Array, "rows n"]
    bias: Float32[Array, "rows n"]
    min_tokens: Int32[Array, "rows"]
    seed: UInt32[Array, "rows"]
    top_logprobs: Int32[Array, "rows"]
    processed_logprobs: Bool[Array, "rows"]


def pack(params: Sequence[SamplingParams], *, biases: int | None = None) -> Sampling:
    """The settings of a batch as arrays, one row each; `biases` is the width of logit_bias; None: what they need."""

    def column(name, dtype):
        most = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.inf
        return jnp.asarray(np.array([min(getattr(p, name), most) for p in params], dtype))

    width = most_biases(params) if biases is None else biases
    bias_ids, bias = np.full((len(params), width), -1, np.int32), np.zeros((len(params), width), np.float32)
    for row, p in enumerate(params):
        for place, (token, value) in enumerate(p.logit_bias.items()):
            bias_ids[row, place], bias[row, place] = token, value
    floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return Sampling(
        **{name: column(name, np.float32) for name in floats},
        **{name: column(name, np.int32) for name in ("top_k", "min_tokens")},
        bias_ids=jnp.asarray(bias_ids),
        bias=jnp.asarray(bias),
        seed=column("seed", np.uint32),
        top_logprobs=jnp.asarray(np.array([p.logprobs or 0 for p in params], np.int32)),
        processed_logprobs=jnp.asarray(
            np.array([p.logprobs is not None and p.logprobs_mode == "processed" for p in params])
        ),
    )


def most_biases(params: Sequence[SamplingParams]) -> int:
    """The width of logit_bias in which all of these settings fit: a power of two."""
    return power_of_two_from(max(len(p.logit_bias) for p in params), BIASES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The text of every row, which penalties, stop tokens and drafters look at.

    Attributes:
      tokens: The prompt, then what was generated. What lies past the length is not cleared.
      prompt_length: Tokens of the prompt.
      length: Of both.
      stop_ids: Padded with -1: forbidden until min_tokens were generated.
    """

    tokens: Int32[Array, "rows capacity"]
    prompt_length: Int32[Array, "rows"]
    length: Int32[Array, "rows"]
    stop_ids: Int32[Array, "rows n"]

    @property
    def count(self) -> Int32[Array, "rows"]:
        """The tokens that were generated."""
        return self.length - self.prompt_length


def adjust(
    logits: Float32[Array, "rows vocab"],
    sampling: Sampling,
    history: History,
    allowed: Int32[Array, "rows words"] | None = None,
) -> Float32[Array, "rows vocab"]:
    """Applies logit_bias, min_tokens and the penalties to logits.

    Nothing is counted unless some row asks for it: then the counts are made anew from the tokens, so that no counter as
    large as the vocabulary is kept.

    Args:
      logits: The model's.
      sampling, history: Of the rows.
      allowed: The tokens that each row may sample, see `token_masks`; all others get -inf. None: all.

    Source: Keskar et al., CTRL (2019), section 4.1, for repetition; the OpenAI API for presence and frequency.
    """
    rows, vocab = logits.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    early = _forbidden_stops(sampling, history)

    def counts(first):
        place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None]
        real = (place >= first[:, None]) & (place < history.length[:, None])
        ids = jnp.where(real, history.tokens, vocab)
        return jnp.zeros((rows, vocab), jnp.float32).at[row, ids].add(1.0, mode="drop")

    def permitted():
        return logits if allowed is None else only(allowed, logits)

    def penalised():
        logits = permitted()
        biased = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, vocab)
        logits = logits.at[row, biased].add(sampling.bias, mode="drop")
        logits = logits.at[row, jnp.where(early, history.stop_ids, vocab)].set(-jnp.inf, mode="drop")
        generated, seen = counts(history.prompt_length), counts(jnp.zeros_like(history.length)) > 0
        factor = sampling.repetition_penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - sampling.frequency_penalty[:, None] * generated
        return logits - sampling.presence_penalty[:, None] * (generated > 0).astype(jnp.float32)

    # Each branch makes its result from the model's logits: one that was handed through would be copied.
    return jax.lax.cond(adjusts(sampling, history), penalised, permitted)


def adjusts(sampling: Sampling, history: History) -> Bool[Array, ""]:
    """Whether some row asks for what `adjust` does."""
    return _adjusts_always(sampling) | jnp.any(_forbidden_stops(sampling, history))


def asks_for_more(sampling: Sampling) -> Bool[Array, ""]:
    """Whether at any step some row may ask for another token than the most probable one of the model's logits."""
    return _adjusts_always(sampling) | jnp.any((sampling.temperature > 0) | (sampling.min_tokens > 0))


def _adjusts_always(sampling: Sampling) -> Array:
    penalised = (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0)
    return jnp.any(sampling.bias_ids >= 0) | jnp.any(penalised | (sampling.repetition_penalty != 1))


def _forbidden_stops(sampling: Sampling, history: History) -> Array:
    """bool [rows, n]: the stop tokens that are forbidden until min_tokens were generated."""
    return (history.count < sampling.min_tokens)[:, None] & (history.stop_ids >= 0)


def choose(
    logits: Float32[Array, "rows vocab"],
    allowed: Int32[Array, "rows words"],
    sampling: Sampling,
    history: History,
    position: Int32[Array, "rows"],
    asked: Bool[Array, ""] | None = None,
) -> tuple[Int32[Array, "rows"], Bool[Array, "rows"]]:
    """Chooses a token for each row: `sample` of the logits as `adjust` leaves them, from tokens that are allowed.

    Where all rows are greedy and none ever adjusts anything, the logits are read, and none are written.

    Args:
      logits: The model's.
      allowed: The tokens that each row may sample, see `token_masks`.
      sampling, history: Of the rows.
      position: As in `sample`.
      asked: `asks_for_more(sampling)`, from a loop of steps, which finds it out once; None: found out here.

    Returns:
      The tokens, and whether there was a candidate.
    """

    def as_asked():
        return _sample(adjust(logits, sampling, history, allowed), sampling, position)

    asked = asks_for_more(sampling) if asked is None else asked
    return jax.lax.cond(asked, as_asked, lambda: _most_probable(only(allowed, logits)))


def has_candidate(logits: Float32[Array, "*n vocab"]) -> Bool[Array, "*n"]:
    """Whether a token can be chosen from logits, as `adjust` leaves them.

    It can't where all tokens are forbidden (-inf), and where a candidate's logit is NaN or infinite.
    """
    return jnp.isfinite(greatest(logits))


def sample(
    logits: Float32[Array, "rows vocab"], sampling: Sampling, position: Int32[Array, "rows"]
) -> Int32[Array, "rows"]:
    """Chooses a token for each row; a row without a candidate (see `has_candidate`) gets a meaningless one.

    Args:
      logits: As `adjust` leaves them.
      sampling: The settings of each row.
      position: The position that the token will have: it selects the row's random numbers.
    """
    return _sample(logits, sampling, position)[0]


def _sample(logits: Array, sampling: Sampling, position: Array) -> tuple[Array, Array]:
    """A token of each row, int32, and whether there was a candidate."""
    drawn = sampling.temperature > 0
    truncated = drawn & _truncates(sampling)
    kinds = (
        lambda: _most_probable(logits),
        lambda: _draw(logits, sampling, position),
        lambda: _draw_truncated(logits, sampling, position, truncated),
    )
    return jax.lax.switch(jnp.where(jnp.any(truncated), 2, jnp.any(drawn).astype(jnp.int32)), kinds)


def _most_probable(logits: Array) -> tuple[Array, Array]:
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # NaN counts as the largest
    return best, has_candidate(jnp.take_along_axis(logits, best[:, None], axis=1))


def _draw(logits: Array, sampling: Sampling, position: Array) -> tuple[Array, Array]:
    """Draws by the Gumbel-max rule where nobody asks for top_k or top_p; greedy rows get their most probable token."""
    greedy, possible = _most_probable(logits)
    scaled = scale(sampling, logits, jnp.take_along_axis(logits, greedy[:, None], axis=1))
    return _draw_from_all(scaled, greedy, sampling, position), possible


def _draw_from_all(scaled: Array, greedy: Array, sampling: Sampling, position: Array) -> Array:
    noisy = scaled + noise(keys(sampling, position), scaled.shape[1])
    return jnp.where(sampling.temperature > 0, jnp.argmax(noisy, axis=1).astype(jnp.int32), greedy)


def _draw_truncated(logits: Array, sampling: Sampling, position: Array, truncated: Array) -> tuple[Array, Array]:
    """As `_draw`, with top_k and top_p in the rows where `truncated`.

    The noise belongs to the token, so that leaving tokens out changes no other's. Where the candidates are all that is
    left of the rows that draw, they alone are looked at.
    """
    found = candidates(logits, partial(scale, sampling), sampling.top_k, sampling.top_p)
    greedy, drawn = found.token[:, 0], sampling.temperature > 0

    def from_candidates():
        noisy = jnp.where(found.kept, found.value, -jnp.inf) + noise_of(keys(sampling, position), found.token)
        best = noisy == jnp.max(noisy, axis=1, keepdims=True)
        token = jnp.min(jnp.where(best, found.token, logits.shape[1]), axis=1)
        return jnp.where(drawn, token, greedy)

    def from_all():
        scaled = scale(sampling, logits, found.best)
        cutoff = find_cutoff(scaled, found, sampling.top_k, sampling.top_p, truncated)
        return _draw_from_all(keep(scaled, cutoff), greedy, sampling, position)

    if found.all_tokens:
        token = from_candidates()
    else:
        token = jax.lax.cond(jnp.all(found.closed | ~drawn), from_candidates, from_all)
    return token, has_candidate(found.best)


def keys(sampling: Sampling, position: Int32[Array, "rows"]) -> Key[Array, "rows"]:
    """Random keys: what a row draws the token at `position` from."""
    return jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(sampling.seed, position)


def noise(key: Key[Array, "rows"], vocab: int) -> Float32[Array, "rows {vocab}"]:
    """Gumbel noise of keys, for every token."""
    return noise_of(key, jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32)[None], (key.shape[0], vocab)))


def noise_of(key: Key[Array, "rows"], tokens: Int32[Array, "rows n"]) -> Float32[Array, "rows n"]:
    """Gumbel noise of keys and tokens: what `jax.random.gumbel` would give, for these tokens alone."""
    folded = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key, tokens.astype(jnp.uint32))
    words = jax.random.key_data(folded)
    one = jnp.uint32(0x3F800000)  # the bits of 1.0, below which a mantissa goes
    bits = jax.lax.shift_right_logical(words[..., 0] ^ words[..., 1], jnp.uint32(9)) | one
    uniform = jax.lax.bitcast_convert_type(bits, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))


def narrow(logits: Float32[Array, "rows *n vocab"], sampling: Sampling) -> Float32[Array, "rows *n vocab"]:
    """Applies temperature, min_p, top_k and top_p: -inf for each token left out, 0 for the most probable one.

    Args:
      logits: As `adjust` leaves them.
      sampling: The settings of each row. A greedy row's logits are taken at temperature 1.

    Returns:
      Unnormalised log-probabilities.
    """
    each = math.prod(logits.shape[1:-1])
    flat = logits.reshape(-1, logits.shape[-1])
    settings = jax.tree.map(lambda x: jnp.repeat(x, each, axis=0), sampling)

    truncated = _truncates(settings)

    def most_probable():
        found = candidates(flat, partial(scale, settings), settings.top_k, settings.top_p)
        scaled = scale(settings, flat, found.best)
        return keep(scaled, find_cutoff(scaled, found, settings.top_k, settings.top_p, truncated))

    def all_tokens():
        return scale(settings, flat, greatest(flat)[:, None])

    return jax.lax.cond(jnp.any(truncated), most_probable, all_tokens).reshape(logits.shape)


def scale(
    sampling: Sampling, logits: Float32[Array, "rows vocab"], best: Float32[Array, "rows 1"]
) -> Float32[Array, "rows vocab"]:
    """Applies temperature and min_p: 0 for the most probable token, -inf for those left out.

    Where `best` is NaN or infinite, it leaves out all.

    Args:
      sampling: The settings of each row. A greedy row's logits are taken at temperature 1.
      logits: As `adjust` leaves them, of any tokens.
      best: The greatest of each row.
    """
    # The best token's is 0: divided by however small a temperature, it stays.
    scaled = (logits - best) / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    return jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)


def _truncates(sampling: Sampling) -> Array:
    """bool [rows]: which ask for top_k or top_p."""
    return (sampling.top_k > 0) | (sampling.top_p < 1)


def whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer (bools are not)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(value: object) -> TypeGuard[int]:
    return whole(value) and value >= 0


def is_finite(value: object) -> bool:
    """Whether a value is a number that float32 holds."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    return bool(abs(value) <= float(np.finfo(np.float32).max))


def _biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(_count(i) and (is_finite(b) or b == -np.inf) for i, b in value.items())


def _top(value: object) -> bool:
    return value is None or (_count(value) and value <= MOST_LOGPROBS)
