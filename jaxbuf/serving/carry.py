"""What a generation is between two steps: the arrays that the compiled loop carries, and how tokens enter them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots
from jaxbuf.models.scoring import Logprobs, token_logprobs
from jaxbuf.serving.acceptance import log_distribution
from jaxbuf.serving.samples import Samples
from jaxbuf.serving.sampling import MOST_LOGPROBS, History, Sampling

type Array = jax.Array

# Why a row ended: a stop token, its max_new_tokens, or logits from which no token can be chosen.
RUNNING, STOPPED, FULL, FAILED = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """int32 [rows] each: what `stats.Stats` is made from."""

    steps: Array
    folds: Array
    checkpoint_reads: Array
    live_entries: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """What a drafter adds to the carry.

    Attributes:
      state: The drafter's own, any pytree of arrays.
      drafted, accepted: int32 [rows], drafts that were verified so far, and those of them that became tokens.
    """

    state: Any
    drafted: Array
    accepted: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """A generation between two calls of the program; the row of a request is its slot - 1.

    Attributes:
      cache: The model's memory.
      history: The prompts, what was generated so far (history.tokens, int32 [rows, room], of which history.count, int32
        [rows], are real) and the stop tokens.
      last: int32 [rows], the newest token, which the model has not read yet.
      state: int32 [rows]: RUNNING, STOPPED (at a stop token, which is in tokens), FULL, or FAILED (no token could be
        chosen after the last one).
      max_new_tokens: int32 [rows], at most room.
      sampling: The settings of each row.
      allowed: int32 [rows, ceil(vocab / 32)], the tokens that each row may sample, as bits (see `token_masks`): ids
        that the tokenizer lacks may not be.
      logprobs: [rows, room] of the generated tokens, in the distribution that each row's settings ask for; [rows, 0] if
        nobody asked.
      prompt_logprobs: [prompts, bucket], the same for the prompts' tokens: entry i is of token i + 1 of the prompt.
      counters: What was done so far.
      lacking: bool [rows], running rows that rested in the last step, because a pool of memory had no room for them.
      speculation: None without a drafter.
      samples: Which rows continue which prompt; None: each row has a prompt of its own.
    """

    cache: decoder.Cache
    history: History
    last: Array
    state: Array
    max_new_tokens: Array
    sampling: Sampling
    allowed: Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    counters: Counters
    lacking: Array
    speculation: Speculation | None = None
    samples: Samples | None = None

    @property
    def active(self) -> Array:
        """bool [rows]: which rows run, and had the memory for it in the last step."""
        return (self.state == RUNNING) & ~self.lacking

    @property
    def position(self) -> Array:
        """int32 [rows]: the position of the newest token, as many as the model has committed."""
        return self.cache.sequences.committed[all_slots(self.cache)]

    @property
    def prompts_read(self) -> tuple[Array, Array, Array | None]:
        """The prompts, each once: int32 [prompts, bucket] and their lengths int32 [prompts], and int32 [prompts] the
        slots that read them; None: all in order."""
        history, samples = self.history, self.samples
        if samples is None:
            return history.prompts, history.lengths, None
        row = jnp.maximum(samples.readers - 1, 0)
        return history.prompts[row], jnp.where(samples.readers > 0, history.lengths[row], 0), samples.readers


def append_token(history: History, token: Array, real: Array) -> History:
    """The history with one more generated token (int32 [rows]) in the rows where `real` (bool [rows])."""
    place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] == history.count[:, None]
    tokens = jnp.where(place & real[:, None], token[:, None], history.tokens)
    return dataclasses.replace(history, tokens=tokens, count=history.count + real.astype(jnp.int32))


def record(carry: Carry, tokens: Array, number: Array, failed: Array, logits: Array, adjusted: Array) -> Carry:
    """Writes down what was chosen, and decides which rows are done.

    Args:
      carry: Changed in its history, last, state and logprobs.
      tokens: int32 [rows, T].
      number: int32 [rows], how many of the T tokens are real: 0 for a row that does not run. A stop token is the last.
      failed: bool [rows], the rows that have no candidate for the token after those.
      logits: f32 [rows, T, vocab], the model's own, that the tokens were chosen from.
      adjusted: The same as the settings changed them, see `sampling.adjust`.
    """
    history, last, logprobs = carry.history, carry.last, carry.logprobs
    found = _logprobs(carry, tokens, logits, adjusted) if logprobs.chosen.shape[1] else None
    for t in range(tokens.shape[1]):
        real = t < number
        if found is not None:
            logprobs = _write(logprobs, jax.tree.map(lambda x, t=t: x[:, t], found), history.count, real)
        history = append_token(history, tokens[:, t], real)
        last = jnp.where(real, tokens[:, t], last)
    stopped = jnp.any(last[:, None] == history.stop_ids, axis=-1)
    reason = jnp.where(stopped, STOPPED, jnp.where(history.count >= carry.max_new_tokens, FULL, RUNNING))
    reason = jnp.where(failed, FAILED, reason)
    state = jnp.where(carry.state == RUNNING, reason, carry.state).astype(jnp.int32)
    return dataclasses.replace(carry, history=history, last=last, state=state, logprobs=logprobs)


def _logprobs(carry: Carry, tokens: Array, logits: Array, adjusted: Array) -> Logprobs:
    """What rows report of the tokens int32 [rows, T]: [rows, T], in the distribution that each row asks for."""
    processed = carry.sampling.processed_logprobs

    def drawn_from():
        return jnp.where(processed[:, None, None], log_distribution(adjusted, carry.sampling), logits)

    scores = jax.lax.cond(jnp.any(processed), drawn_from, lambda: logits)
    return token_logprobs(scores, tokens, MOST_LOGPROBS, wanted=jnp.any(carry.sampling.top_logprobs > 0))


def _write(logprobs: Logprobs, found: Logprobs, count: Array, real: Array) -> Logprobs:
    """The log-probabilities of one token of each row, [rows, ...], put at place `count` of the rows where `real`."""
    place = jnp.arange(logprobs.chosen.shape[1], dtype=jnp.int32)[None] == count[:, None]
    place = place & real[:, None]

    def write(old, new):
        return jnp.where(place.reshape(*place.shape, *[1] * (old.ndim - 2)), new[:, None], old)

    return jax.tree.map(write, logprobs, found)
