"""Speculative decoding: what a drafter is, and which of its drafts the model keeps after it read them all at once."""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Float, Float32, Int32
from jaxbuf.memory.tree import ancestors, check_parents
from jaxbuf.models import decoder
from jaxbuf.models.config import ModelConfig
from jaxbuf.serving.acceptance import accept, accept_tree, log_distribution, path_of, usable_log_q
from jaxbuf.serving.carry import RUNNING, Carry, CarrySizes, put_rows, slots_of
from jaxbuf.serving.sampling import History, Sampling, adjust, adjusts, has_candidate, keys
from jaxbuf.serving.token_masks import has_tokens, only

JUDGED_BYTES = 2**25  # of the logits of the rows that are judged together on a TPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one step.

    The program that verifies takes nothing on trust: see `usable`, and `acceptance.usable_log_q`.

    Attributes:
      drafts: Without parents the tokens after the newest one, in their order.
      count: How many of them are real, in [0, draft_tokens].
      log_q: The log-probabilities that each draft was drawn from; in a tree those given the siblings before it (see
        `acceptance.accept_tree`). Of greedy rows they do not matter. None: no draft was drawn, each was chosen.
      parents: For a tree: the draft before each one, of a lower index; -1 is the newest token. None: each follows the
        one before.
    """

    drafts: Int32[Array, "rows drafts"]
    count: Int32[Array, "rows"]
    log_q: Float32[Array, "rows drafts vocab"] | None = None
    parents: Int32[Array, "rows drafts"] | None = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """A chunk of prompts that the model has read.

    Attributes:
      rows: The row that each was read into; NOWHERE, past all rows, where nothing was.
      tokens: The chunk.
      start: How many tokens of the prompt came before; 0: the row has a new prompt.
      lengths: How many of the tokens were read: real ones, or none where memory did not suffice.
      hidden: The model's hidden states of the tokens.
      before: Of the token before them; anything where start is 0.
      begins: The rows that begin to run; NOWHERE where none does.
      source: The row that read the prompt of each, most often the same.
      forks: Whether some may be another (static).
    """

    rows: Int32[Array, "prompts"]
    tokens: Int32[Array, "prompts time"]
    start: Int32[Array, "prompts"]
    lengths: Int32[Array, "prompts"]
    hidden: Float[Array, "prompts time hidden"]
    before: Float[Array, "prompts hidden"]
    begins: Int32[Array, "begins"]
    source: Int32[Array, "begins"]
    forks: bool = False

    @property
    def slots(self) -> Int32[Array, "prompts"]:
        """The slots of `rows`."""
        return slots_of(self.rows)

    def begun[T](self, old: T, new: T) -> T:
        """Arrays [rows, ...] with `new`, [m, ...], in the rows that begin."""
        return put_rows(old, self.begins, new)


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens inside the compiled loop. Its functions are pure: JAX traces them, and what changes is its state
    in the carry.

    Its state is made for all rows at once, before any has a request (`init`); prompts come in chunks (`admit`), of some
    rows while others may be running.

    A drafter is an object with these methods. If its class is a registered dataclass
    (`jax.tree_util.register_dataclass`), its arrays are arguments of the compiled programs. `generate` takes an object
    of any other class, too, as long as it can be hashed: then all that it holds is a constant of the program, which is
    compiled once for the object, and does not see later changes to it. `examples/drafter.py` has one.

    Whatever it proposes, the tokens are distributed as without it, if each draft was drawn from `log_q`, with numbers
    that nothing else uses, or chosen without any. A drafter whose proposals have parents says so by an attribute
    `trees` (static) that is True; one with an attribute `adaptive` that is True gets a program whose steps read one
    token a row when no row has drafts.
    """

    @property
    def draft_tokens(self) -> int:
        """The most drafts of one step (static)."""
        ...

    def init(self, config: ModelConfig, sizes: CarrySizes) -> Any:
        """The state while all rows are empty: a pytree of arrays that keeps its structure, shapes and dtypes.

        Args:
          config: Of the model that verifies.
          sizes: What the carry has room for.
        """
        ...

    def admit(self, model: decoder.Decoder, carry: Carry, reading: Reading) -> Any:
        """The state after a chunk of prompts was read, and rows began; carry.speculation.state is what it was before.

        Args:
          model: The one that verifies.
          carry: Of rows that begin, `last` is their first token, and `hidden` what scored it.
          reading: What was read, and which rows begin. A row may have had another request before.
        """
        ...

    def propose(self, model: decoder.Decoder, carry: Carry, most: Int32[Array, "rows"]) -> tuple[Proposal, Any]:
        """Drafts tokens that may follow carry.last; carry.speculation.state is the drafter's.

        Args:
          model: The one that verifies.
          carry: Before the step.
          most: How many drafts in a chain a row can use, at most draft_tokens; 0 for rows that do not run.

        Returns:
          The proposal, and the state. The count is at most `most`; of a tree it is 0 where `most` is, and drafts that
          lie deeper are never kept (see `within_depth`).
        """
        ...

    def settle(
        self,
        model: decoder.Decoder,
        state: Any,
        hidden: Float[Array, "rows places hidden"],
        tokens: Int32[Array, "rows places"],
        number: Int32[Array, "rows"],
    ) -> Any:
        """The state after the step.

        Args:
          model: The one that verified.
          state: From `propose`.
          hidden: The model's hidden states of the newest token and the drafts; of a tree, of the newest token and the
            path that was kept.
          tokens: The new tokens: accepted drafts and one more.
          number: How many of them are real; 0 for rows that did not run. Of the tokens read (on the path), as many were
            committed.
        """
        ...


def drafter_name(drafter: object) -> str:
    """What errors call a drafter: its class."""
    return type(getattr(drafter, "inner", drafter)).__name__


def drafts_trees(drafter: Drafter | None) -> bool:
    """Whether the cache must serve a drafter's trees."""
    return bool(getattr(drafter, "trees", False))


def most_drafts(carry: Carry, draft_tokens: int) -> Int32[Array, "rows"]:
    """How many drafts a row can use, that no step go past max_new_tokens; 0 if it does not run."""
    left = jnp.clip(carry.max_new_tokens - carry.history.count - 1, 0, draft_tokens)
    return jnp.where(carry.state == RUNNING, left, 0)


def within_depth(
    parents: Int32[Array, "rows nodes"], count: Int32[Array, "rows"], most: Int32[Array, "rows"]
) -> Int32[Array, "rows"]:
    """How many of a tree's drafts come before the first one that lies deeper than `most`.

    The drafts of a tree are in the order of their depth, so these are the ones that `most` new tokens can keep.

    Args:
      parents, count: As in `Proposal`.
    """
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)[None]
    shallow = jnp.sum(ancestors(parents), axis=2, dtype=jnp.int32) <= most[:, None]
    return jnp.sum(jnp.cumprod((shallow & (nodes < count[:, None])).astype(jnp.int32), axis=1), axis=1)


def with_root(parents: Int32[Array, "rows nodes"]) -> Int32[Array, "rows nodes+1"]:
    """The parents that `extend` takes, of the newest token and the drafts, from a proposal's."""
    return jnp.pad(parents + 1, ((0, 0), (1, 0)), constant_values=-1)


def usable(proposal: Proposal, drafter: Drafter, carry: Carry, vocab: int) -> Proposal:
    """The part of a drafter's proposal that can be verified, whatever it holds.

    A count outside [0, draft_tokens] is a proposal of no drafts. Drafts count up to the first that is no token that may
    be sampled (outside the vocabulary, say): no model ever reads that one, and none of those behind it. A parent that
    does not come before its draft is the newest token.

    Args:
      proposal: From the drafter.
      drafter: Named in errors.
      carry: Before the step.
      vocab: Of the model.

    Raises:
      ValueError: The proposal is no `Proposal`, or an array of it has another shape or dtype than stated there.
    """
    _check_arrays(proposal, drafter, carry, vocab)
    drafts, count = proposal.drafts, proposal.count
    known = has_tokens(carry.allowed, drafts)
    first_wrong = jnp.sum(jnp.cumprod(known.astype(jnp.int32), axis=1), axis=1)
    drafts = jnp.where((drafts >= 0) & (drafts < vocab), drafts, 0)
    in_range = (count >= 0) & (count <= drafts.shape[1])
    count = jnp.where(in_range, jnp.minimum(count, first_wrong), 0)
    parents = proposal.parents
    if parents is None:
        count = jnp.minimum(count, most_drafts(carry, drafts.shape[1]))
    else:
        parents = check_parents(parents, *drafts.shape)
    return Proposal(drafts, count, proposal.log_q, parents)


def propose(drafter: Drafter, model: decoder.Decoder, carry: Carry) -> tuple[Proposal, Any]:
    """What a drafter proposes for a step, as far as it can be verified, and its state.

    Raises:
      ValueError: As `usable`; or the drafter's `propose` returns something else than a pair.
    """
    found = drafter.propose(model, carry, most_drafts(carry, drafter.draft_tokens))
    if not isinstance(found, tuple) or len(found) != 2:
        told = f"{len(found)} things" if isinstance(found, tuple) else f"a {type(found).__name__}"
        name = drafter_name(drafter)
        raise ValueError(f"propose of the drafter {name} must return a Proposal and its state, got {told}")
    return usable(found[0], drafter, carry, model.config.vocab_size), found[1]


def _check_arrays(proposal: object, drafter: Drafter, carry: Carry, vocab: int) -> None:
    name, rows, length = drafter_name(drafter), carry.last.shape[0], drafter.draft_tokens
    if not isinstance(proposal, Proposal):
        raise ValueError(
            f"propose of the drafter {name} must return a Proposal and its state, got a {type(proposal).__name__}"
        )
    arrays = {
        "drafts": ((rows, length), jnp.int32),
        "count": ((rows,), jnp.int32),
        "log_q": ((rows, length, vocab), jnp.float32),
        "parents": ((rows, length), jnp.int32),
    }
    for field, (shape, dtype) in arrays.items():
        found = getattr(proposal, field)
        if found is None and field in ("log_q", "parents"):
            continue
        if getattr(found, "shape", None) != shape or getattr(found, "dtype", None) != dtype:
            known = isinstance(found, np.ndarray | jax.Array)
            got = f"{found.dtype} {found.shape}" if known else f"a {type(found).__name__}"
            raise ValueError(
                f"{field} in a proposal of the drafter {name} must be {jnp.dtype(dtype).name} {shape} (draft_tokens is "
                f"{length}), got {got}"
            )
    if proposal.parents is not None and not drafts_trees(drafter):
        raise ValueError(f"a drafter whose proposals have parents must have trees = True, got {name} without")


def check_state(drafter: Drafter, before: Any, after: Any) -> None:
    """Raises ValueError unless a drafter's state after a step has the structure, shapes and dtypes that it had."""

    def described(state):
        return jax.tree.map(lambda x: f"{jnp.result_type(x)} {jnp.shape(x)}", state)

    was, now = described(before), described(after)
    if was != now:
        raise ValueError(
            f"the state of the drafter {drafter_name(drafter)} must keep its structure, shapes and dtypes: before a "
            f"step it is {was}, and settle returns {now}"
        )


class Verified(NamedTuple):
    """What became of a step's drafts.

    Attributes:
      tokens: The new ones.
      number: How many of them are real: nothing after a stop token, 0 for a row that does not run.
      accepted: How many of those are drafts.
      path: For a tree, else None: the place in the logits that each token was chosen from. The tokens
        that were read there are what to commit.
      failed: Running rows that have no candidate for their next token.
    """

    tokens: Int32[Array, "rows places"]
    number: Int32[Array, "rows"]
    accepted: Int32[Array, "rows"]
    path: Int32[Array, "rows places"] | None
    failed: Bool[Array, "rows"]


class Judged(NamedTuple):
    """What rows are judged by, as it is in `Carry`, `Proposal` and the model's logits; every array begins with rows."""

    sampling: Sampling
    history: History
    allowed: Int32[Array, "rows words"]
    position: Int32[Array, "rows"]
    proposal: Proposal
    logits: Float32[Array, "rows places vocab"]


def verify(carry: Carry, proposal: Proposal, logits: Float32[Array, "rows places vocab"]) -> Verified:
    """Chooses the next tokens of every row: the drafts that the model keeps, and one more.

    A row that has no candidate behind one of its drafts keeps no draft in this step: so the place without a candidate
    is met again, as the next token, unless the row takes another turn.

    Where all rows are greedy and none adjusts anything, the logits are read, and none are written.

    Args:
      carry: Before the step; its cache may be after it, not committed.
      proposal: Of T - 1 drafts; see `usable`.
      logits: The model's after the newest token and after each draft.
    """
    drafts, length = proposal.drafts, proposal.drafts.shape[1]
    index = jnp.arange(length + 1, dtype=jnp.int32)[None]
    with jax.named_scope("sample"):
        judged = Judged(carry.sampling, carry.history, carry.allowed, carry.position, proposal, logits)
        # XLA keeps some twenty arrays of the logits' size at once on a TPU. A GPU would wait for each block's branches.
        found = jax.lax.platform_dependent(judged, tpu=judge_in_blocks, default=judge)
        *path, accepted, token, possible = found
        along, path = drafts, path[0] if path else None
        if path is not None:
            along = jnp.take_along_axis(drafts, jnp.maximum(path, 0), axis=1)
            path = with_root(path)
            path = path.at[:, 0].set(0)
        padded = jnp.pad(along, ((0, 0), (0, 1)))
        tokens = jnp.where(index < accepted[:, None], padded, token[:, None])
        stop = jnp.any(tokens[:, :, None] == carry.history.stop_ids[:, None], axis=-1)
        first = jnp.min(jnp.where(stop, index, most_drafts(carry, length)[:, None]), axis=1)
        failed = carry.active & ~possible
        number = jnp.where(carry.active & ~failed, jnp.minimum(accepted, first) + 1, 0)
        return Verified(tokens, number, jnp.minimum(accepted, number), path, failed)


def judge_in_blocks(judged: Judged) -> tuple[Array, ...]:
    """`judge` of as many rows at a time as have logits of JUDGED_BYTES, or of one. No row looks at another, so that
    the numbers are the same."""
    rows, places, vocab = judged.logits.shape
    most = max(1, JUDGED_BYTES // (4 * places * vocab))
    size = max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)
    if size == rows:
        return judge(judged)
    blocks = jax.tree.map(lambda x: x.reshape(rows // size, size, *x.shape[1:]), judged)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), jax.lax.map(judge, blocks))


def judge(judged: Judged) -> tuple[Array, ...]:
    """The drafts that each row keeps: of a tree the path, as `accept_tree` returns it; how many they are; the token
    behind them; and whether there was a candidate for the first place."""
    sampling, history, allowed, position, proposal, logits = judged
    drafts, parents = proposal.drafts, proposal.parents
    index = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None]

    def looked_at(possible):
        """How many drafts of a row are looked at."""
        return jnp.where(jnp.all(possible | (index > proposal.count[:, None]), axis=1), proposal.count, 0)

    def greedy(logits):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # NaN counts as the largest
        possible = has_candidate(jnp.take_along_axis(logits, best[..., None], axis=-1))
        count = looked_at(possible)
        if parents is None:
            return *_accept_greedy(best, drafts, count), possible[:, 0]
        return *_accept_greedy_tree(best, drafts, parents, count), possible[:, 0]

    def as_asked():
        changed = adjusted(judged, proposal, logits)

        def drawn():
            possible = has_candidate(changed)
            count, key = looked_at(possible), keys(sampling, position + 1)
            p = log_distribution(changed, sampling)
            q = None if proposal.log_q is None else usable_log_q(proposal.log_q, drafts)
            if parents is None:
                return *accept(p, q, drafts, count, key), possible[:, 0]
            return *accept_tree(p, q, drafts, parents, key, count), possible[:, 0]

        return jax.lax.cond(sampled, drawn, lambda: greedy(changed))

    sampled = jnp.any(sampling.temperature > 0)
    asked = sampled | adjusts(sampling, history)
    return jax.lax.cond(asked, as_asked, lambda: greedy(only(allowed, logits)))


def _accept_greedy(best: Array, drafts: Array, count: Array) -> tuple[Array, Array]:
    """`acceptance.accept` where every row is greedy: drafts are kept while each is the most probable token."""
    real = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < count[:, None]
    kept = jnp.cumprod(((drafts == best[:, :-1]) & real).astype(jnp.int32), axis=1)
    accepted = jnp.sum(kept, axis=1)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def _accept_greedy_tree(best: Array, drafts: Array, parents: Array, count: Array) -> tuple[Array, Array, Array]:
    """`acceptance.accept_tree` where every row is greedy."""
    node = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    right = (drafts == jnp.take_along_axis(best, parents + 1, axis=1)) & (node[None] < count[:, None])

    def visit(at, i):
        kept = right[:, i] & (parents[:, i] == at)
        return jnp.where(kept, i, at), kept

    at, kept = jax.lax.scan(visit, jnp.full(drafts.shape[0], -1, jnp.int32), node)
    return *path_of(kept.T), jnp.take_along_axis(best, at[:, None] + 1, axis=1)[:, 0]


def adjusted(
    of: Carry | Judged, proposal: Proposal, logits: Float32[Array, "rows places vocab"]
) -> Float32[Array, "rows places vocab"]:
    """`sampling.adjust` of logits: at each place the drafts on its path count as generated.

    Args:
      of: Whose settings, texts and allowed tokens these are.
      proposal, logits: As in `verify`.
    """
    drafts, parents = proposal.drafts, proposal.parents
    sampling, history = of.sampling, of.history
    rows, length, vocab = logits.shape

    def flat(x):
        return jnp.repeat(x, length, axis=0)

    def permitted():
        return only(of.allowed, logits)

    def penalised():
        if length == 1:
            return adjust(permitted()[:, 0], sampling, history)[:, None]
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
        place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] - then.length[:, None]
        drafted = (place >= 0) & (place < depth[:, None])
        near = jnp.take_along_axis(path, jnp.clip(place, 0, length - 2), axis=1)
        tokens = jnp.where(drafted, near, then.tokens)
        then = dataclasses.replace(then, tokens=tokens, length=then.length + depth)
        return adjust(permitted().reshape(-1, vocab), jax.tree.map(flat, sampling), then).reshape(logits.shape)

    # What nothing adjusts at the newest token is not adjusted behind drafts: these only add to what min_tokens counts.
    return jax.lax.cond(adjusts(sampling, history), penalised, permitted)
