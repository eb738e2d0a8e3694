"""Speculative decoding: who drafts tokens, and which of them the model keeps after it read them all at once."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxbuf.models import qwen3_5
from jaxbuf.models.cache import MTPCache, init_mtp
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.qwen3_5_mtp import draft_mtp, mtp_extend
from jaxbuf.serving.acceptance import accept, draft_keys, draw, log_distribution
from jaxbuf.serving.carry import RUNNING, Carry, append_token
from jaxbuf.serving.drafting import propose_ngram
from jaxbuf.serving.sampling import History, adjust, keys, whole

type Array = jax.Array

MOST_DRAFTS = 15  # with the newest token 16: the most that the kernels read at once
NEVER = 2**31 - 1  # a fold threshold that no ring reaches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one step.

    Attributes:
      drafts: int32 [rows, draft_tokens], the tokens after the newest one.
      count: int32 [rows], how many of them are real, in [0, draft_tokens].
      log_q: f32 [rows, draft_tokens, vocab], the log-probabilities that the drafts were drawn from, greedy rows' aside;
        None for drafts that were not drawn.
    """

    drafts: Array
    count: Array
    log_q: Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens inside the compiled loop: a registered dataclass whose functions are pure.

    Its arrays are arguments of the compiled programs, what changes is its state in the carry. Whatever it proposes, the
    tokens are distributed as without it, if each draft was drawn from `log_q`, with numbers that nothing else uses, or
    chosen without any.
    """

    @property
    def draft_tokens(self) -> int:
        """The most drafts of one step (static)."""
        ...

    def start(self, model: qwen3_5.Qwen3_5, carry: Carry, hidden: Array, *, capacity: int, limit: int) -> Any:
        """The state after the prompts were read and the first tokens chosen.

        Args:
          model: The one that verifies.
          carry: Its speculation is not there yet.
          hidden: [rows, bucket, D], the model's hidden states of the prompts.
          capacity: The most tokens of a row.
          limit: Entries from which a buffered recurrence of the drafter's folds.
        """
        ...

    def propose(self, model: qwen3_5.Qwen3_5, carry: Carry, most: Array) -> tuple[Proposal, Any]:
        """Drafts tokens that may follow carry.last; carry.speculation.state is the drafter's.

        Args:
          model: The one that verifies.
          carry: Before the step.
          most: int32 [rows], how many drafts a row can use, at most draft_tokens; 0 for rows that do not run.

        Returns:
          The proposal, whose count is at most `most`, and the state.
        """
        ...

    def settle(self, model: qwen3_5.Qwen3_5, state: Any, hidden: Array, tokens: Array, number: Array) -> Any:
        """The state after the step.

        Args:
          model: The one that verified.
          state: From `propose`.
          hidden: [rows, 1 + draft_tokens, D], the model's hidden states of the newest token and the drafts.
          tokens: int32 [rows, 1 + draft_tokens], the new tokens: accepted drafts and one more.
          number: int32 [rows], how many of them are real; 0 for rows that did not run. Of the tokens read, as many were
            committed.
        """
        ...


def make_drafter(lm: LanguageModel, drafter: object, draft_tokens: int) -> Drafter | None:
    """The drafter that `generate` was asked for; errors as there."""
    if isinstance(drafter, LanguageModel):
        if drafter.vocab_size != lm.vocab_size:
            raise ValueError(
                f"drafter must have the model's vocabulary ({lm.vocab_size} tokens), got {drafter!r} with "
                f"{drafter.vocab_size}"
            )
        return DraftModel(drafter.model, draft_tokens)
    if drafter == "mtp":
        if lm.model.mtp is None:
            raise ValueError(f'drafter "mtp" needs a model with an MTP layer, {lm.name!r} has none')
        return MTP(draft_tokens)
    if drafter == "ngram":
        return NGram(draft_tokens)
    if isinstance(drafter, Drafter):
        check_draft_tokens(drafter.draft_tokens)
        return drafter
    if drafter is None:
        return None
    raise ValueError(f'drafter must be None, "ngram", "mtp", a LanguageModel or a Drafter, got {drafter!r}')


def check_draft_tokens(draft_tokens: int) -> None:
    """Raises ValueError unless it is in [1, MOST_DRAFTS]."""
    if not whole(draft_tokens) or not 1 <= draft_tokens <= MOST_DRAFTS:
        raise ValueError(f"draft_tokens must be a whole number in [1, {MOST_DRAFTS}], got {draft_tokens!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGram:
    """Drafts what followed the row's last tokens where they occurred before; see `drafting.propose_ngram`."""

    draft_tokens: int = dataclasses.field(metadata={"static": True})

    def start(self, model, carry, hidden, *, capacity, limit):
        return ()

    def propose(self, model, carry, most):
        drafts, count = propose_ngram(carry.history, self.draft_tokens)
        return Proposal(drafts, jnp.minimum(count, most)), ()

    def settle(self, model, state, hidden, tokens, number):
        return ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPState:
    """The MTP layer's memory, and what the model read last, which the layer reads before it drafts.

    Attributes:
      memory: Positions before those of `hidden` are final; the rest is dead.
      hidden: [rows, 1 + draft_tokens, D], the model's hidden states, of which `number` (int32 [rows]) are real.
      tokens: int32 [rows, 1 + draft_tokens], the token after each; the last real one is the newest.
    """

    memory: MTPCache
    hidden: Array
    tokens: Array
    number: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTP:
    """Drafts with the model's MTP layer, which reads its own hidden states for every draft after the first.

    Source: DeepSeek-V3 (2024), section 2.2.
    """

    draft_tokens: int = dataclasses.field(metadata={"static": True})

    def start(self, model, carry, hidden, *, capacity, limit):
        prompts, lengths = carry.history.prompts, carry.history.lengths
        sizes = {"slots": prompts.shape[0], "capacity": capacity, "max_pending": 1 + self.draft_tokens}
        memory = init_mtp(model.config, **sizes, dtype=model.embed_tokens[...].dtype)
        following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
        known = jnp.maximum(lengths - 1, 0)
        _, memory = mtp_extend(model, memory, hidden, following, start=jnp.zeros_like(lengths), lengths=known)
        wide = ((0, 0), (0, self.draft_tokens))
        newest = jnp.pad(jnp.take_along_axis(hidden, known[:, None, None], axis=1), (*wide, (0, 0)))
        return MTPState(memory, newest, jnp.pad(carry.last[:, None], wide), jnp.minimum(lengths, 1))

    def propose(self, model, carry, most):
        state, running = carry.speculation.state, carry.state == RUNNING

        def choose(scores, number, history):
            draft, log_q = draw_draft(carry, history, scores, number)
            return draft, log_q, append_token(history, draft, running)

        drafts, log_q, memory = draft_mtp(
            model,
            state.memory,
            state.hidden,
            state.tokens,
            start=carry.position - state.number,
            draft_tokens=self.draft_tokens,
            lengths=jnp.where(running, state.number, 0),
            choose=choose,
            state=carry.history,
        )
        return Proposal(drafts, most, log_q), dataclasses.replace(state, memory=memory)

    def settle(self, model, state, hidden, tokens, number):
        return MTPState(state.memory, hidden, tokens, number)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with another model of the same vocabulary; its state is a cache of its own.

    It reads the newest token and every draft, one at a time, and commits as many of them as the model that verifies.
    """

    model: qwen3_5.Qwen3_5
    draft_tokens: int = dataclasses.field(metadata={"static": True})

    def start(self, model, carry, hidden, *, capacity, limit):
        prompts, lengths = carry.history.prompts, carry.history.lengths
        sizes = {"slots": prompts.shape[0], "capacity": capacity, "limit": limit, "max_pending": 1 + self.draft_tokens}
        cache = qwen3_5.init_cache(self.model.config, **sizes, dtype=self.model.embed_tokens[...].dtype)
        return qwen3_5.prefill(self.model, cache, prompts, lengths=lengths)[1]

    def propose(self, model, carry, most):
        cache, running = carry.speculation.state, carry.state == RUNNING
        limit = cache.cursor.limit

        def step(chain, number):
            token, history, cache = chain
            # A draft that was folded could not leave again: the first of these launches folds for all of them.
            threshold = jnp.where(number == 0, jnp.maximum(limit - self.draft_tokens, 1), NEVER)
            cache = dataclasses.replace(cache, cursor=dataclasses.replace(cache.cursor, limit=threshold))
            read = (running & (number <= most)).astype(jnp.int32)
            hidden, cache = qwen3_5.extend(self.model, cache, token[:, None], lengths=read)
            cache = qwen3_5.commit(cache, read)

            def draft():
                return draw_draft(carry, history, qwen3_5.logits(self.model, hidden[:, 0]), number)

            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draft))
            token, log_q = jax.lax.cond(number < self.draft_tokens, draft, lambda: nothing)
            return (token, append_token(history, token, running), cache), (token, log_q)

        numbers = jnp.arange(1 + self.draft_tokens, dtype=jnp.int32)
        (_, _, cache), (drafts, log_q) = jax.lax.scan(step, (carry.last, carry.history, cache), numbers)
        read = jnp.pad(jnp.where(running, most + 1, 0), (1, 0))
        cursor = dataclasses.replace(cache.cursor, limit=limit, length=cache.cursor.length - read, pending=read)
        drafts, log_q = (jnp.moveaxis(x[: self.draft_tokens], 0, 1) for x in (drafts, log_q))
        return Proposal(drafts, most, log_q), dataclasses.replace(cache, cursor=cursor)

    def settle(self, model, state, hidden, tokens, number):
        return qwen3_5.commit(state, number)


def draw_draft(carry: Carry, history: History, logits: Array, number: Array) -> tuple[Array, Array]:
    """Draws a row's draft under the settings that its tokens are chosen by.

    Args:
      carry: Before the step.
      history: With the drafts before this one counted as generated.
      logits: f32 [rows, vocab], the drafter's.
      number: int32 scalar, of the draft, from 0.

    Returns:
      int32 [rows], and f32 [rows, vocab]: the log-probabilities it was drawn from, zeros if no row is sampled.
    """
    with jax.named_scope("sample"):
        adjusted = adjust(jnp.where(carry.allowed[None], logits, -jnp.inf), carry.sampling, history)

        def drawn():
            log_q = log_distribution(adjusted, carry.sampling)
            return draw(log_q, draft_keys(keys(carry.sampling, carry.position + 1 + number), 0)), log_q

        def most_probable():
            return jnp.argmax(adjusted, axis=-1).astype(jnp.int32), jnp.zeros_like(adjusted)

        return jax.lax.cond(jnp.any(carry.sampling.temperature > 0), drawn, most_probable)


def most_drafts(carry: Carry, draft_tokens: int) -> Array:
    """int32 [rows]: how many drafts a row can use, that no step go past max_new_tokens; 0 if it does not run."""
    left = jnp.clip(carry.max_new_tokens - carry.history.count - 1, 0, draft_tokens)
    return jnp.where(carry.state == RUNNING, left, 0)


def verify(carry: Carry, proposal: Proposal, logits: Array) -> tuple[Array, Array, Array]:
    """Chooses the next tokens of every row: the drafts that the model keeps, and one more.

    Args:
      carry: Before the step; its cache may be after it, not committed.
      proposal: Of T - 1 drafts.
      logits: f32 [rows, T, vocab], the model's after the newest token and after each draft.

    Returns:
      tokens: int32 [rows, T].
      number: int32 [rows], how many of them are real: nothing after a stop token, 0 for a row that does not run.
      accepted: int32 [rows], how many of those are drafts.
    """
    drafts, count = proposal.drafts, proposal.count
    length = drafts.shape[1]
    with jax.named_scope("sample"):
        adjusted = _adjust_all(carry, drafts, jnp.where(carry.allowed[None, None], logits, -jnp.inf))
        accepted, token = jax.lax.cond(
            jnp.any(carry.sampling.temperature > 0),
            lambda: accept(
                log_distribution(adjusted, carry.sampling),
                proposal.log_q,
                drafts,
                count,
                keys(carry.sampling, carry.position + 1),
            ),
            lambda: _accept_greedy(adjusted, drafts, count),
        )
        index = jnp.arange(length + 1, dtype=jnp.int32)[None]
        padded = jnp.pad(drafts, ((0, 0), (0, 1)))
        tokens = jnp.where(index < accepted[:, None], padded, token[:, None])
        stop = jnp.any(tokens[:, :, None] == carry.history.stop_ids[:, None], axis=-1)
        first = jnp.min(jnp.where(stop, index, length), axis=1)
        number = jnp.where(carry.state == RUNNING, jnp.minimum(accepted, first) + 1, 0)
        return tokens, number, jnp.minimum(accepted, number)


def _accept_greedy(adjusted: Array, drafts: Array, count: Array) -> tuple[Array, Array]:
    """`acceptance.accept` where every row is greedy: drafts are kept while each is the most probable token."""
    best = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    real = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < count[:, None]
    kept = jnp.cumprod(((drafts == best[:, :-1]) & real).astype(jnp.int32), axis=1)
    accepted = jnp.sum(kept, axis=1)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def _adjust_all(carry: Carry, drafts: Array, logits: Array) -> Array:
    """`sampling.adjust` of logits f32 [rows, T, vocab]: at each place the drafts before it count as generated."""
    sampling, history = carry.sampling, carry.history
    rows, length, vocab = logits.shape

    def flat(x):
        return jnp.repeat(x, length, axis=0)

    def adjusted():
        place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] - history.count[:, None]
        nearest = jnp.clip(place, 0, length - 2)
        drafted = (place >= 0) & (place < length - 1)
        tokens = jnp.where(drafted, jnp.take_along_axis(drafts, nearest, axis=1), history.tokens)
        more = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
        then = jax.tree.map(flat, dataclasses.replace(history, tokens=tokens))
        then = dataclasses.replace(then, count=then.count + more)
        return adjust(logits.reshape(-1, vocab), jax.tree.map(flat, sampling), then).reshape(logits.shape)

    asked = (
        jnp.any(sampling.bias_ids >= 0)
        | jnp.any(sampling.min_tokens > 0)
        | jnp.any(sampling.repetition_penalty != 1)
        | jnp.any((sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0))
    )
    return jax.lax.cond(asked, adjusted, lambda: logits)
