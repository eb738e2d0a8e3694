"""Speculative decoding: what a drafter is, and which of its drafts the model keeps after it read them all at once."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxbuf.models import qwen3_5
from jaxbuf.recurrence.tree import ancestors, check_parents
from jaxbuf.serving.acceptance import accept, accept_tree, log_distribution, path_of
from jaxbuf.serving.carry import RUNNING, Carry
from jaxbuf.serving.sampling import adjust, keys

type Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one step.

    Attributes:
      drafts: int32 [rows, draft_tokens]: without parents the tokens after the newest one, in their order.
      count: int32 [rows], how many of them are real, in [0, draft_tokens].
      log_q: f32 [rows, draft_tokens, vocab], the log-probabilities that the drafts were drawn from, greedy rows' aside,
        and of a tree given the siblings before (see `acceptance.accept_tree`); None for drafts that were not drawn.
      parents: int32 [rows, draft_tokens], for a tree: the draft before each one, of a lower index; -1 is the newest
        token. None: each follows the one before.
    """

    drafts: Array
    count: Array
    log_q: Array | None = None
    parents: Array | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens inside the compiled loop: a registered dataclass whose functions are pure.

    Its arrays are arguments of the compiled programs, what changes is its state in the carry. Whatever it proposes, the
    tokens are distributed as without it, if each draft was drawn from `log_q`, with numbers that nothing else uses, or
    chosen without any. One whose proposals have parents says so by an attribute `trees` (static) that is True; one with
    an attribute `adaptive` that is True gets a program whose steps read one token a row when no row has drafts.
    """

    @property
    def draft_tokens(self) -> int:
        """The most drafts of one step (static)."""
        ...

    def start(self, model: qwen3_5.Qwen3_5, carry: Carry, hidden: Array, *, capacity: int, limit: int) -> Any:
        """The state after the prompts were read and the first tokens chosen.

        Args:
          model: The one that verifies.
          carry: Its speculation is not there yet. With carry.samples several rows continue one prompt, which need be
            read only once: carry.prompts_read has each prompt once.
          hidden: [prompts, bucket, D], the model's hidden states of the prompts; carry.samples.prompt says which prompt
            each row continues, without samples each has its own.
          capacity: The most tokens of a row.
          limit: Entries from which a buffered recurrence of the drafter's folds.
        """
        ...

    def propose(self, model: qwen3_5.Qwen3_5, carry: Carry, most: Array) -> tuple[Proposal, Any]:
        """Drafts tokens that may follow carry.last; carry.speculation.state is the drafter's.

        Args:
          model: The one that verifies.
          carry: Before the step.
          most: int32 [rows], how many drafts in a chain a row can use, at most draft_tokens; 0 for rows that do not
            run.

        Returns:
          The proposal, and the state. The count is at most `most`; of a tree it is 0 where `most` is, and drafts that
          lie deeper are never kept (see `within_depth`).
        """
        ...

    def settle(self, model: qwen3_5.Qwen3_5, state: Any, hidden: Array, tokens: Array, number: Array) -> Any:
        """The state after the step.

        Args:
          model: The one that verified.
          state: From `propose`.
          hidden: [rows, 1 + draft_tokens, D], the model's hidden states of the newest token and the drafts; of a tree,
            of the newest token and the path that was kept.
          tokens: int32 [rows, 1 + draft_tokens], the new tokens: accepted drafts and one more.
          number: int32 [rows], how many of them are real; 0 for rows that did not run. Of the tokens read (on the
            path), as many were committed.
        """
        ...


def drafts_trees(drafter: Drafter | None) -> bool:
    """Whether the cache must serve a drafter's trees."""
    return bool(getattr(drafter, "trees", False))


def most_drafts(carry: Carry, draft_tokens: int) -> Array:
    """int32 [rows]: how many drafts a row can use, that no step go past max_new_tokens; 0 if it does not run."""
    left = jnp.clip(carry.max_new_tokens - carry.history.count - 1, 0, draft_tokens)
    return jnp.where(carry.state == RUNNING, left, 0)


def within_depth(parents: Array, count: Array, most: Array) -> Array:
    """int32 [rows]: how many of a tree's drafts precede the first that more than `most` - 1 (int32 [rows]) precede.

    A tree in the order of depth is so cut to what `most` drafts in a chain can keep.

    Args:
      parents, count: As in `Proposal`.
    """
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)[None]
    shallow = jnp.sum(ancestors(parents), axis=2, dtype=jnp.int32) <= most[:, None]
    return jnp.sum(jnp.cumprod((shallow & (nodes < count[:, None])).astype(jnp.int32), axis=1), axis=1)


def with_root(parents: Array) -> Array:
    """int32 [rows, T]: the parents that `extend` takes, of the newest token and the drafts, from a proposal's."""
    return jnp.pad(parents + 1, ((0, 0), (1, 0)), constant_values=-1)


def verify(carry: Carry, proposal: Proposal, logits: Array) -> tuple[Array, Array, Array, Array | None]:
    """Chooses the next tokens of every row: the drafts that the model keeps, and one more.

    Args:
      carry: Before the step; its cache may be after it, not committed.
      proposal: Of T - 1 drafts.
      logits: f32 [rows, T, vocab], the model's after the newest token and after each draft.

    Returns:
      tokens: int32 [rows, T].
      number: int32 [rows], how many of them are real: nothing after a stop token, 0 for a row that does not run.
      accepted: int32 [rows], how many of those are drafts.
      path: int32 [rows, T] for a tree, else None: the place in the logits that each token was chosen from. The tokens
        that were read there are what to commit.
    """
    drafts, count = proposal.drafts, proposal.count
    rows, length = drafts.shape
    parents = None if proposal.parents is None else check_parents(proposal.parents, rows, length)
    with jax.named_scope("sample"):
        masked = jnp.where(carry.allowed[None, None], logits, -jnp.inf)
        adjusted = _adjust_all(carry, drafts, parents, masked)
        sampled, key = jnp.any(carry.sampling.temperature > 0), keys(carry.sampling, carry.position + 1)

        def target():
            return log_distribution(adjusted, carry.sampling)

        if parents is None:
            along, path = drafts, None
            accepted, token = jax.lax.cond(
                sampled,
                lambda: accept(target(), proposal.log_q, drafts, count, key),
                lambda: _accept_greedy(adjusted, drafts, count),
            )
        else:
            path, accepted, token = jax.lax.cond(
                sampled,
                lambda: accept_tree(target(), proposal.log_q, drafts, parents, key, count),
                lambda: _accept_greedy_tree(adjusted, drafts, parents, count),
            )
            along = jnp.take_along_axis(drafts, jnp.maximum(path, 0), axis=1)
            path = with_root(path)
            path = path.at[:, 0].set(0)
        index = jnp.arange(length + 1, dtype=jnp.int32)[None]
        padded = jnp.pad(along, ((0, 0), (0, 1)))
        tokens = jnp.where(index < accepted[:, None], padded, token[:, None])
        stop = jnp.any(tokens[:, :, None] == carry.history.stop_ids[:, None], axis=-1)
        first = jnp.min(jnp.where(stop, index, most_drafts(carry, length)[:, None]), axis=1)
        number = jnp.where(carry.state == RUNNING, jnp.minimum(accepted, first) + 1, 0)
        return tokens, number, jnp.minimum(accepted, number), path


def _accept_greedy(adjusted: Array, drafts: Array, count: Array) -> tuple[Array, Array]:
    """`acceptance.accept` where every row is greedy: drafts are kept while each is the most probable token."""
    best = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    real = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < count[:, None]
    kept = jnp.cumprod(((drafts == best[:, :-1]) & real).astype(jnp.int32), axis=1)
    accepted = jnp.sum(kept, axis=1)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def _accept_greedy_tree(adjusted: Array, drafts: Array, parents: Array, count: Array) -> tuple[Array, Array, Array]:
    """`acceptance.accept_tree` where every row is greedy."""
    best = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    node = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    right = (drafts == jnp.take_along_axis(best, parents + 1, axis=1)) & (node[None] < count[:, None])

    def visit(at, i):
        kept = right[:, i] & (parents[:, i] == at)
        return jnp.where(kept, i, at), kept

    at, kept = jax.lax.scan(visit, jnp.full(drafts.shape[0], -1, jnp.int32), node)
    return *path_of(kept.T), jnp.take_along_axis(best, at[:, None] + 1, axis=1)[:, 0]


def _adjust_all(carry: Carry, drafts: Array, parents: Array | None, logits: Array) -> Array:
    """`sampling.adjust` of logits f32 [rows, T, vocab]: at each place the drafts on its path count as generated."""
    sampling, history = carry.sampling, carry.history
    rows, length, vocab = logits.shape

    def flat(x):
        return jnp.repeat(x, length, axis=0)

    def adjusted():
        if length == 1:
            return adjust(logits[:, 0], sampling, history)[:, None]
        if parents is None:
            depth = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
            path = flat(drafts)
        else:
            reach = ancestors(with_root(parents))
            depths = jnp.sum(reach, axis=2, dtype=jnp.int32) - 1
            level = jnp.arange(1, length, dtype=jnp.int32)[None, None, :, None]
            there = reach[:, :, None] & (depths[:, None, None] == level)  # [rows, place, level, node]
            path = jnp.sum(jnp.where(there[..., 1:], drafts[:, None, None], 0), axis=3).reshape(-1, length - 1)
            depth = depths.reshape(-1)
        then = jax.tree.map(flat, history)
        place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] - then.count[:, None]
        drafted = (place >= 0) & (place < depth[:, None])
        near = jnp.take_along_axis(path, jnp.clip(place, 0, length - 2), axis=1)
        tokens = jnp.where(drafted, near, then.tokens)
        then = dataclasses.replace(then, tokens=tokens, count=then.count + depth)
        return adjust(logits.reshape(-1, vocab), jax.tree.map(flat, sampling), then).reshape(logits.shape)

    asked = (
        jnp.any(sampling.bias_ids >= 0)
        | jnp.any(sampling.min_tokens > 0)
        | jnp.any(sampling.repetition_penalty != 1)
        | jnp.any((sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0))
    )
    return jax.lax.cond(asked, adjusted, lambda: logits)
