"""What a generation is between two steps: the arrays that the compiled programs carry, and how tokens enter them.

A row is a place in these arrays: a request that runs. A slot is a place in the memories, of which there are more: slot
0 is null, row r has slot r + 1 for good (`slots_of`), and the slots behind those of all rows hold prefixes, never run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Float, Float32, Int32, Shaped
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots
from jaxbuf.models.scoring import Logprobs, token_logprobs
from jaxbuf.serving.acceptance import log_distribution
from jaxbuf.serving.sampling import MOST_LOGPROBS, History, Sampling
from jaxbuf.target import Target

# What a row does: it runs, or why it ended: a stop token, its max_new_tokens, logits from which no token can be chosen,
# or memory that did not suffice. An empty row has no request yet, or one whose prompt is being read.
RUNNING, STOPPED, FULL, FAILED, EMPTY, STARVED = 0, 1, 2, 3, 4, 5


@dataclasses.dataclass(frozen=True)
class CarrySizes:
    """What a carry is made for. Static: each is a program of its own.

    Attributes:
      rows: Requests at once.
      capacity: Tokens of each row's text, prompt and generation together.
      limit: The largest fold threshold that the rings have room for.
      kv_limit: The most entries up to which a row that never folded may read no checkpoint; None: none does.
      stop_ids, biases: Stop tokens and entries of logit_bias of a row, at most.
      logprobs: Whether log-probabilities are reported.
      holds, states, blocks, pages: As in `decoder.init_cache`.
      dtype: The compute dtype, that of the model's parameters.
      entry_dtype, state_dtype, target: As in `decoder.init_cache`.
    """

    rows: int
    capacity: int
    limit: int = 16
    kv_limit: int | None = None
    stop_ids: int = 4
    biases: int = 4
    logprobs: bool = False
    holds: int = 0
    states: int | None = None
    blocks: int | None = None
    pages: int | None = None
    dtype: Any = jnp.float32
    entry_dtype: Any = None
    state_dtype: str = "float32"
    target: Target | str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """What `stats.Stats` is made from."""

    steps: Int32[Array, "rows"]
    folds: Int32[Array, "rows"]
    checkpoint_reads: Int32[Array, "rows"]
    live_entries: Int32[Array, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """What a drafter adds to the carry.

    Attributes:
      state: The drafter's own, any pytree of arrays.
      drafted, accepted: Drafts that were verified so far, and those of them that became tokens.
    """

    state: Any
    drafted: Int32[Array, "rows"]
    accepted: Int32[Array, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """A generation between two calls of a program.

    Attributes:
      cache: The model's memory.
      history: The text of every row, its prompt and what was generated so far, and its stop tokens.
      last: The newest token, which the model has not read yet.
      hidden: The model's hidden state of the last prompt token that it read, which scores the one after it.
      state: EMPTY, RUNNING, STOPPED (at a stop token, which is in the text), FULL (max_new_tokens), FAILED (no token
        could be chosen after the last one) or STARVED (memory did not suffice for the next one).
      max_new_tokens: Of each row.
      sampling: The settings of each row.
      allowed: The tokens that each row may sample, as bits (see `token_masks`): ids that the tokenizer lacks may not
        be.
      logprobs: Of the token at each place of the text. A prompt's are in the model's own
        distribution, generated ones in the one that the row's settings ask for. [rows, 0] if nobody asked.
      counters: What was done so far.
      lacking: Rows that rested in the last launch, because a pool of memory had no room for them; and empty ones that
        could not read a prompt, or continue one that was not read, see `admit`.
      speculation: None without a drafter.
    """

    cache: decoder.Cache
    history: History
    last: Int32[Array, "rows"]
    hidden: Float[Array, "rows hidden"]
    state: Int32[Array, "rows"]
    max_new_tokens: Int32[Array, "rows"]
    sampling: Sampling
    allowed: Int32[Array, "rows words"]
    logprobs: Logprobs
    counters: Counters
    lacking: Bool[Array, "rows"]
    speculation: Speculation | None = None

    @property
    def active(self) -> Bool[Array, "rows"]:
        """Which rows run, and had the memory for it in the last step."""
        return (self.state == RUNNING) & ~self.lacking

    @property
    def position(self) -> Int32[Array, "rows"]:
        """The position of the newest token, as many as the model has committed."""
        return self.cache.sequences.committed[all_slots(self.cache)]


def slots_of(rows: Int32[Array, "n"]) -> Int32[Array, "n"]:
    """The slot of each row; the null slot for what is no row (NOWHERE, or a negative number)."""
    return jnp.where((rows >= 0) & (rows < NOWHERE), rows + 1, 0)


def put_rows[T](old: T, rows: Int32[Array, "n"], new: T) -> T:
    """Arrays [rows, ...] with `new` [n, ...] at n of the rows; a row that is NOWHERE is dropped."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), old, new)


def get_rows[T](arrays: T, rows: Int32[Array, "n"]) -> T:
    """What belongs to rows in arrays [rows, ...]: [n, ...]; that of some row where one is NOWHERE."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), arrays)


def append_token(history: History, token: Int32[Array, "rows"], real: Bool[Array, "rows"]) -> History:
    """The history with one more token in the rows where `real`."""
    return _append(history, token[:, None], real.astype(jnp.int32))


def _append(history: History, tokens: Array, number: Array) -> History:
    """The history with the first `number` (int32 [rows]) of tokens int32 [rows, T] more."""
    text = put_places(history.tokens, tokens, history.length, number)
    return dataclasses.replace(history, tokens=text, length=history.length + number)


def put_places(
    old: Shaped[Array, "rows capacity ..."],
    new: Shaped[Array, "n time ..."],
    start: Int32[Array, "n"],
    number: Int32[Array, "n"],
    rows: Int32[Array, "n"] | None = None,
) -> Shaped[Array, "rows capacity ..."]:
    """Writes the first `number` of each row of `new` to the places from `start` on.

    Args:
      old: Of all rows.
      new, start, number: As said; nothing is written past the capacity.
      rows: Whose places; None: all in order.
    """
    ahead = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(ahead < number[:, None], start[:, None] + ahead, NOWHERE)
    row = jnp.arange(new.shape[0], dtype=jnp.int32) if rows is None else rows
    return old.at[row[:, None], place].set(new, mode="drop")


def record(
    carry: Carry,
    tokens: Int32[Array, "rows time"],
    number: Int32[Array, "rows"],
    failed: Bool[Array, "rows"],
    logprobs: Logprobs | None = None,
) -> Carry:
    """Writes down what was chosen, and decides which rows are done.

    Args:
      carry: Changed in its history, last, state and logprobs.
      tokens: What was chosen.
      number: How many of the T tokens are real: 0 for a row that does not run. A stop token is the last.
      failed: The rows that have no candidate for the token after those.
      logprobs: Of those tokens, if they are reported.
    """
    found = carry.logprobs
    if logprobs is not None:
        length = carry.history.length
        found = jax.tree.map(lambda old, new: put_places(old, new, length, number), found, logprobs)
    newest = jnp.take_along_axis(tokens, jnp.maximum(number - 1, 0)[:, None], axis=1)[:, 0]
    last, history = jnp.where(number > 0, newest, carry.last), _append(carry.history, tokens, number)
    stopped = (number > 0) & jnp.any(last[:, None] == history.stop_ids, axis=-1)
    reason = jnp.where(stopped, STOPPED, jnp.where(history.count >= carry.max_new_tokens, FULL, RUNNING))
    reason = jnp.where(failed, FAILED, reason)
    state = jnp.where(carry.state == RUNNING, reason, carry.state).astype(jnp.int32)
    return dataclasses.replace(carry, history=history, last=last, state=state, logprobs=found)


def reports(carry: Carry) -> bool:
    """Whether log-probabilities are kept (static)."""
    return carry.logprobs.chosen.shape[1] > 0


def chosen_logprobs(
    sampling: Sampling,
    tokens: Int32[Array, "rows time"],
    logits: Float32[Array, "rows time vocab"],
    adjusted: Callable[[], Array],
) -> Logprobs:
    """What rows report of the tokens, in the distribution that each row asks for.

    Args:
      sampling: The settings of the rows.
      tokens: What was chosen.
      logits: The model's own, that the tokens were chosen from.
      adjusted: Makes the same as the settings changed them, see `sampling.adjust`, if some row asks for it.
    """
    processed = sampling.processed_logprobs

    def drawn_from():
        return jnp.where(processed[:, None, None], log_distribution(adjusted(), sampling), logits)

    scores = jax.lax.cond(jnp.any(processed), drawn_from, lambda: logits)
    return token_logprobs(scores, tokens, MOST_LOGPROBS, wanted=jnp.any(sampling.top_logprobs > 0))
