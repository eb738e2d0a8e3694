"""Who drafts tokens: repetition in the text, the model's own MTP layer, or another model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Float, Float32, Int32
from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots, fold_limits, with_limits
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.mtp import MTPCache, draft_mtp, fork_mtp, init_mtp, mtp_extend
from jaxbuf.serving.acceptance import draft_keys, log_distribution
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.carry import RUNNING, Carry, append_token, get_rows, slots_of
from jaxbuf.serving.drafting import propose_ngram, propose_ngram_tree
from jaxbuf.serving.own_drafter import check_draft_tokens, fit_drafter
from jaxbuf.serving.sampling import History, adjust, keys, noise, whole
from jaxbuf.serving.speculation import Drafter, Proposal, within_depth
from jaxbuf.serving.token_masks import only

DRAFT_TOKENS = 4
NEVER = 2**31 - 1  # a fold threshold that no ring reaches


def make_drafter(
    lm: LanguageModel, drafter: object, draft_tokens: int, adaptive_drafts: bool = False
) -> Drafter | None:
    """The drafter that `generate` was asked for; errors as there."""
    if not isinstance(adaptive_drafts, bool):
        raise ValueError(f"adaptive_drafts must be True or False, got {adaptive_drafts!r}")
    if adaptive_drafts:
        inner = make_drafter(lm, drafter, draft_tokens)
        if inner is None:
            raise ValueError("adaptive_drafts needs a drafter, got None")
        return inner if isinstance(inner, Adaptive) else Adaptive(inner)
    if isinstance(drafter, LanguageModel):
        if drafter.vocab_size != lm.vocab_size:
            raise ValueError(
                f"drafter must have the model's vocabulary ({lm.vocab_size} tokens), got {drafter!r} with "
                f"{drafter.vocab_size}"
            )
        return DraftModel(drafter.model, draft_tokens)
    if drafter == "mtp":
        drafter = MTP(draft_tokens)
    if drafter == "ngram":
        return NGram(draft_tokens)
    who: object = drafter.drafter if isinstance(drafter, Adaptive) else drafter
    if isinstance(who, MTP) and lm.model.mtp is None:
        raise ValueError(f'drafter "mtp" needs a model with an MTP layer, {lm.name!r} has none')
    if isinstance(who, DraftModel):
        _check_draft_model(lm, who.model)
    if isinstance(who, Drafter) and isinstance(drafter, Drafter) and not isinstance(who, type):
        fitting = fit_drafter(who)
        return dataclasses.replace(drafter, drafter=fitting) if isinstance(drafter, Adaptive) else fitting
    if drafter is None:
        return None
    told = repr(who) if isinstance(who, str | int | float | type | None) else f"a {type(who).__name__}"
    lacks = [name for name in ("draft_tokens", "init", "admit", "propose", "settle") if not hasattr(who, name)]
    what = f"{told} in an Adaptive" if isinstance(drafter, Adaptive) else told
    without = f" without {', '.join(lacks)}" if lacks and len(lacks) < 5 else ""
    raise ValueError(
        f'drafter must be None, "ngram", "mtp", a LanguageModel or a Drafter (an object, not its class), got {what}'
        f"{without}"
    )


def _check_draft_model(lm: LanguageModel, model: object) -> None:
    if not isinstance(model, decoder.Decoder):
        raise ValueError(f"model of a DraftModel must be the `model` of a LanguageModel, got a {type(model).__name__}")
    if model.config.vocab_size != lm.model.config.vocab_size:
        raise ValueError(
            f"drafter must have the model's vocabulary ({lm.model.config.vocab_size} tokens), got a DraftModel with "
            f"{model.config.vocab_size}"
        )


def check_branches(branches: int, draft_tokens: int) -> None:
    """Raises ValueError unless draft_tokens is as in `check_draft_tokens`, and branches in [1, draft_tokens]."""
    check_draft_tokens(draft_tokens)
    if not whole(branches) or not 1 <= branches <= draft_tokens:
        raise ValueError(
            f"branches must be a whole number in [1, {draft_tokens}], up to draft_tokens, got {branches!r}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGram:
    """Drafts what followed the row's last tokens where they occurred before.

    Attributes:
      draft_tokens: The most drafts of a step (static).
      branches: How many occurrences it follows at once; with more than one the drafts are a tree (static).

    Raises:
      ValueError: A number is out of range.

    Source: Saxena, Prompt lookup decoding (2023); see `drafting.propose_ngram` and `propose_ngram_tree`.
    """

    draft_tokens: int = dataclasses.field(default=DRAFT_TOKENS, metadata={"static": True})
    branches: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self):
        check_branches(self.branches, self.draft_tokens)

    @property
    def trees(self) -> bool:
        """Whether the drafts are a tree."""
        return self.branches > 1

    def init(self, config, sizes):
        """Keeps nothing: the text is in the carry; see `Drafter.init`."""
        return ()

    def admit(self, model, carry, reading):
        """Keeps nothing; see `Drafter.admit`."""
        return ()

    def propose(self, model, carry, most):
        """Drafts what followed earlier occurrences of the last tokens, a chain or a tree; see `Drafter.propose`."""
        if not self.trees:
            drafts, count = propose_ngram(carry.history, self.draft_tokens)
            return Proposal(drafts, jnp.minimum(count, most)), ()
        drafts, parents, count = propose_ngram_tree(carry.history, self.draft_tokens, self.branches)
        return Proposal(drafts, within_depth(parents, count, most), parents=parents), ()

    def settle(self, model, state, hidden, tokens, number):
        """Keeps nothing; see `Drafter.settle`."""
        return ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPState:
    """The MTP layer's memory, and what the model read last, which the layer reads before it drafts.

    Attributes:
      memory: Positions before those of `hidden` are final; the rest is dead.
      hidden: The model's hidden states, of which `number` are real.
      tokens: The token after each; the last real one is the newest.
    """

    memory: MTPCache
    hidden: Float[Array, "rows places hidden"]
    tokens: Int32[Array, "rows places"]
    number: Int32[Array, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTP:
    """Drafts with the model's MTP layer, which reads its own hidden states for every draft after the first.

    With more than one branch the drafts are a tree: a chain, and beside each of its first draft_tokens // (1 +
    branches) drafts (at least one) the next-best branches - 1 tokens there; on sampled rows they are drawn, without
    replacement.

    Attributes:
      draft_tokens: The most drafts of a step, those beside the chain included (static).
      branches: Candidates at each of those places (static).

    Raises:
      ValueError: A number is out of range.

    Source: DeepSeek-V3 (2024), section 2.2; Chen et al., Sequoia (2024), for siblings without replacement.
    """

    draft_tokens: int = dataclasses.field(default=DRAFT_TOKENS, metadata={"static": True})
    branches: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self):
        check_branches(self.branches, self.draft_tokens)

    @property
    def trees(self) -> bool:
        """Whether the drafts are a tree."""
        return self.branches > 1

    @property
    def places(self) -> np.ndarray:
        """Of each draft in order, int32 [draft_tokens]: how many of the chain precede it."""
        wide = max(1, self.draft_tokens // (1 + self.branches)) if self.trees else 0
        chain = self.draft_tokens - wide * (self.branches - 1)
        width = np.where(np.arange(chain) < wide, self.branches, 1)
        return np.repeat(np.arange(chain, dtype=np.int32), width)

    def init(self, config, sizes):
        """An empty memory of the layer; see `Drafter.init`."""
        width = 1 + self.draft_tokens
        given = {"capacity": sizes.capacity, "dtype": sizes.dtype, "target": sizes.target}
        memory = init_mtp(config, slots=sizes.rows, max_pending=width, **given)
        none = jnp.zeros((sizes.rows, width), jnp.int32)
        hidden = jnp.zeros((sizes.rows, width, config.hidden_size), sizes.dtype)
        return MTPState(memory, hidden, none, none[:, 0])

    def admit(self, model, carry, reading):
        """Reads the prompts up to their last position, which is left for the first `propose`.

        A position needs the token after it, so the last one of a chunk is read with the next; see `Drafter.admit`.
        """
        state, new = carry.speculation.state, reading.start == 0
        before = jnp.concatenate([reading.before[:, None], reading.hidden[:, :-1]], axis=1)
        hidden = jnp.where(new[:, None, None], reading.hidden, before)
        following = jnp.where(new[:, None], jnp.roll(reading.tokens, -1, axis=1), reading.tokens)
        read = {"lengths": jnp.maximum(reading.lengths - new.astype(jnp.int32), 0), "slots": reading.slots}
        read["start"] = jnp.maximum(reading.start - 1, 0)
        _, memory = mtp_extend(model, state.memory, hidden, following, **read)
        if reading.forks:
            memory = fork_mtp(memory, slots_of(reading.source), slots_of(reading.begins))
        newest, tokens = get_rows((carry.hidden, carry.last), reading.begins)
        wide = ((0, 0), (0, self.draft_tokens))
        newest, tokens = jnp.pad(newest[:, None], (*wide, (0, 0))), jnp.pad(tokens[:, None], wide)
        kept = reading.begun(
            (state.hidden, state.tokens, state.number), (newest, tokens, jnp.ones_like(reading.begins))
        )
        return MTPState(memory, *kept)

    def propose(self, model, carry, most):
        """Reads what the model read last, then drafts a chain or a tree; see `Drafter.propose`."""
        state, running = carry.speculation.state, carry.state == RUNNING

        def choose(scores, number, history):
            candidates, log_q = draw_drafts(carry, history, scores, number, self.branches)
            return candidates[:, 0], (candidates, log_q), append_token(history, candidates[:, 0], running)

        place = self.places
        _, (candidates, log_q), memory = draft_mtp(
            model,
            state.memory,
            state.hidden,
            state.tokens,
            start=carry.position - state.number,
            draft_tokens=int(place[-1]) + 1,
            most=jnp.max(most),
            lengths=jnp.where(running, state.number, 0),
            choose=choose,
            state=carry.history,
        )
        state = dataclasses.replace(state, memory=memory)
        if not self.trees:
            return Proposal(candidates[:, :, 0], most, log_q), state
        first = np.searchsorted(place, place)  # of each draft's siblings, the one on the chain
        rank = np.arange(len(place)) - first
        parents = np.where(place > 0, np.searchsorted(place, place - 1), -1).astype(np.int32)
        parents = jnp.broadcast_to(jnp.asarray(parents)[None], (most.shape[0], len(place)))
        log_q = jax.lax.cond(
            jnp.any(carry.sampling.temperature > 0),
            lambda: without_siblings(log_q[:, place], candidates[:, place], rank),
            lambda: log_q[:, place],
        )
        count = within_depth(parents, jnp.full_like(most, len(place)), most)
        return Proposal(candidates[:, place, rank], count, log_q, parents), state

    def settle(self, model, state, hidden, tokens, number):
        """Keeps what the model read, for the next `propose`, and the memory as it is; see `Drafter.settle`."""
        rested = number == 0  # its next turn starts where this one did
        hidden = jnp.where(rested[:, None, None], state.hidden, hidden)
        tokens = jnp.where(rested[:, None], state.tokens, tokens)
        return MTPState(state.memory, hidden, tokens, jnp.where(rested, state.number, number))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with another model of the same vocabulary; its state is a cache of its own.

    It reads the newest token and every draft, one at a time, and commits as many of them as the model that verifies.

    Attributes:
      model: The parameters of the model that drafts, `model` of a `LanguageModel`.
      draft_tokens: The most drafts of a step (static).
    """

    model: decoder.Decoder
    draft_tokens: int = dataclasses.field(metadata={"static": True})

    def init(self, config, sizes):
        """An empty cache of its own; see `Drafter.init`."""
        return decoder.init_cache(
            self.model.config,
            slots=sizes.rows,
            capacity=sizes.capacity,
            limit=sizes.limit,
            max_pending=1 + self.draft_tokens,
            states=sizes.states,
            blocks=sizes.blocks,
            pages=sizes.pages,
            dtype=self.model.embed_tokens[...].dtype,
            target=sizes.target,
        )

    def admit(self, model, carry, reading):
        """Reads the chunk into its cache, which forgets a row's earlier request first; see `Drafter.admit`."""
        cache = decoder.reset(carry.speculation.state, jnp.where(reading.start == 0, reading.slots, 0))
        read = {"lengths": reading.lengths, "slots": reading.slots}
        _, cache = decoder.prefill(self.model, cache, reading.tokens, **read)
        if reading.forks:
            cache = decoder.fork(cache, slots_of(reading.source), slots_of(reading.begins))
        return cache

    def propose(self, model, carry, most):
        """Reads the newest token and every draft, which stay pending in its cache; see `Drafter.propose`."""
        cache, running = _without_idle(carry.speculation.state, carry), carry.state == RUNNING
        limit, slots, first = fold_limits(cache), all_slots(cache), cache.sequences.committed[all_slots(cache)]
        missed = jnp.where(running, carry.position - first, 0)

        def step(number, chain):
            history, cache, drafts, log_qs = chain
            # A draft that was folded could not leave again: the first of these launches folds for all of them.
            threshold = jnp.where(number == 0, jnp.maximum(limit - self.draft_tokens, 1), NEVER)
            place, ahead = first + number, number - missed  # of the token to read; of the draft behind it
            reads = running & (cache.sequences.committed[slots] == place) & (ahead <= most)
            token = jnp.take_along_axis(history.tokens, place[:, None], axis=1, mode="clip")
            lengths = reads.astype(jnp.int32)
            hidden, cache = decoder.extend(self.model, with_limits(cache, threshold), token, lengths=lengths)
            cache = decoder.commit(cache, lengths)
            real = (ahead >= 0) & (cache.sequences.committed[slots] > place)

            def draft():
                candidates, log_q = draw_drafts(carry, history, decoder.logits(self.model, hidden[:, 0]), ahead)
                return candidates[:, 0], log_q

            token, log_q = jax.lax.cond(number < self.draft_tokens, draft, lambda: (token[:, 0], log_qs[0]))
            drafts, log_qs = (x.at[number].set(new, mode="drop") for x, new in ((drafts, token), (log_qs, log_q)))
            return append_token(history, token, real), cache, drafts, log_qs

        drafts = jnp.zeros((self.draft_tokens, most.shape[0]), jnp.int32)
        log_qs = jnp.zeros((*drafts.shape, model.config.vocab_size), jnp.float32)
        launches = jnp.minimum(jnp.max(most + missed), self.draft_tokens) + 1
        chain = carry.history, cache, drafts, log_qs
        _, cache, drafts, log_qs = jax.lax.fori_loop(0, launches, step, chain)
        read = jnp.where(running, cache.sequences.committed[slots] - carry.position, 0)  # the newest token and drafts
        cache = decoder.rollback(with_limits(cache, limit), jnp.maximum(read, 0))
        found = drafts, log_qs
        found = jax.lax.cond(jnp.any(missed > 0), lambda: _later(found, missed), lambda: found)
        drafts, log_q = (jnp.moveaxis(x, 0, 1) for x in found)
        count = jnp.clip(jnp.minimum(read, self.draft_tokens - missed), 0, most)
        return Proposal(drafts, count, log_q), cache

    def settle(self, model, state, hidden, tokens, number):
        """Commits as many of the tokens that it read as the model did; see `Drafter.settle`."""
        return decoder.commit(state, number)


def _without_idle(cache: decoder.Cache, carry: Carry) -> decoder.Cache:
    """A draft model's cache without what it holds of rows that have nothing in the model's: they were released."""
    slots = all_slots(cache)
    idle = (carry.position == 0) & (cache.sequences.committed[slots] > 0)
    integers = dataclasses.replace(cache, layers=())  # so that no branch returns a layer's memory
    after = jax.lax.cond(jnp.any(idle), lambda: decoder.reset(integers, jnp.where(idle, slots, 0)), lambda: integers)
    return dataclasses.replace(after, layers=cache.layers)


def _later[T](arrays: T, number: Array) -> T:
    """Arrays [n, rows, ...] whose first entry of each row is the one that was behind `number` (int32 [rows]) others."""

    def shifted(x: Array) -> Array:
        place = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] + number[None]
        return x.at[place, jnp.arange(x.shape[1], dtype=jnp.int32)[None]].get(mode="clip")

    return jax.tree.map(shifted, arrays)


def draw_drafts(
    carry: Carry,
    history: History,
    logits: Float32[Array, "rows vocab"],
    number: Int32[Array, ""] | Int32[Array, "rows"],
    branches: int = 1,
) -> tuple[Int32[Array, "rows {branches}"], Float32[Array, "rows vocab"]]:
    """Draws a row's candidates for one place, without replacement, under the settings that its tokens are chosen by.

    Args:
      carry: Before the step.
      history: With the drafts before this place counted as generated.
      logits: The drafter's.
      number: Of the place, from 0.
      branches: How many candidates.

    Returns:
      The candidates, and the log-probabilities that the first was drawn from, zeros if no
      row is sampled. On greedy rows, and past the last token that has any probability, they are the most probable of
      the others.
    """
    with jax.named_scope("sample"):
        adjusted = adjust(only(carry.allowed, logits), carry.sampling, history)

        def drawn():
            log_q = log_distribution(adjusted, carry.sampling)
            key = draft_keys(keys(carry.sampling, carry.position + 1 + number), 0)
            return _best(log_q + noise(key, log_q.shape[-1]), adjusted, branches), log_q

        def most_probable():
            return _best(adjusted, adjusted, branches), jnp.zeros_like(adjusted)

        return jax.lax.cond(jnp.any(carry.sampling.temperature > 0), drawn, most_probable)


def _best(scores: Array, otherwise: Array, number: int) -> Array:
    """int32 [rows, number]: the best of scores f32 [rows, vocab], one after another; of `otherwise` where no score is
    left above -inf."""
    token, chosen = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1), []
    for _ in range(number):
        some = jnp.any(scores > -jnp.inf, axis=1, keepdims=True)
        chosen.append(jnp.argmax(jnp.where(some, scores, otherwise), axis=1, keepdims=True).astype(jnp.int32))
        scores, otherwise = (jnp.where(token == chosen[-1], -jnp.inf, x) for x in (scores, otherwise))
    return jnp.concatenate(chosen, axis=1)


def without_siblings(
    log_q: Float32[Array, "rows n vocab"], candidates: Int32[Array, "rows n branches"], rank: np.ndarray
) -> Float32[Array, "rows n vocab"]:
    """What each of several candidates was drawn from, once those before it were taken away.

    Args:
      log_q: What the first candidate of each draft's place was drawn from.
      candidates: Of that place.
      rank: [n], which of them the draft is.

    Returns:
      Log-probabilities; 0 at the candidate alone where nothing was left to draw from.
    """
    token = jax.lax.broadcasted_iota(jnp.int32, log_q.shape, 2)
    left = log_q
    for before in range(candidates.shape[2] - 1):
        taken = (before < rank)[None, :, None] & (token == candidates[:, :, before, None])
        left = jnp.where(taken, -jnp.inf, left)
    own = jnp.take_along_axis(candidates, jnp.asarray(rank, jnp.int32)[None, :, None], axis=2)
    some = jnp.any(left > -jnp.inf, axis=2, keepdims=True)
    point = jnp.where(token == own, 0.0, -jnp.inf)
    return jnp.where(some, jax.nn.log_softmax(jnp.where(some, left, 0.0), axis=2), point)
