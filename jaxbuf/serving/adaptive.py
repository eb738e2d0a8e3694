"""How many tokens to draft, from how many were kept: each row's own number, by what a draft costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float32, Int32
from jaxbuf.memory.tree import ancestors
from jaxbuf.serving.carry import RUNNING, Carry, Speculation
from jaxbuf.serving.sampling import is_finite
from jaxbuf.serving.speculation import Drafter, drafts_trees, usable

COST = 0.1  # of one more draft, as a fraction of a step without drafts; see `Adaptive`
DISCOUNT = 0.9  # what was counted before is multiplied by this at each step that had drafts
PRIOR = 0.7  # the probability of a draft to be kept that is assumed at first; it counts as one draft that was judged
PROBE = 8  # where no draft pays, every so many steps of a row draft one token all the same


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """What was kept so far.

    Attributes:
      inner: The state of the drafter that drafts.
      kept, judged: Drafts that were kept, and those that were judged: the kept ones and, if there was one, the first
        that was not; older ones count less.
      depth: How many drafts in a chain the last proposal had.
      verified, accepted: The counts of `Speculation` that `kept` and `judged` know of.
    """

    inner: Any
    kept: Float32[Array, "rows"]
    judged: Float32[Array, "rows"]
    depth: Int32[Array, "rows"]
    verified: Int32[Array, "rows"]
    accepted: Int32[Array, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Lets another drafter draft as many tokens as pay, by how many of the row's drafts were kept so far.

    If each draft is kept with probability a, k drafts give 1 + a + ... + a**k tokens in a step that costs 1 + cost * k
    steps without drafts. The k in [0, draft_tokens] with the most tokens for the cost is a row's number; a is what was
    kept of the drafts that were judged, older steps counting less. Where k is 0, every eighth step of the row drafts
    one token, to find out whether that still holds. A step in which no row drafts reads one token a row, as without a
    drafter. All of it looks at the past alone, so that tokens are distributed as without it; greedy ones are the same.

    Attributes:
      drafter: Who drafts.
      cost: Of one more draft in a chain (drafting and reading it), as a fraction of a step without drafts (static). The
        default is meant for steps that are bound by memory; on a CPU, where reading a token is work, the embedded model
        takes 0.3 or more.

    Raises:
      ValueError: A cost that is no finite number of at least 0.

    Source: the tokens of a step are Leviathan et al. (2023), equation 1, and their cost is that of theorem 3.8, with
    the verification's added.
    """

    drafter: Drafter
    cost: float = dataclasses.field(default=COST, metadata={"static": True})

    adaptive = True

    def __post_init__(self):
        if not is_finite(self.cost) or self.cost < 0:
            raise ValueError(f"cost must be a finite number of at least 0, got {self.cost!r}")

    @property
    def draft_tokens(self) -> int:
        """The most drafts of one step."""
        return self.drafter.draft_tokens

    @property
    def trees(self) -> bool:
        """Whether the drafts are a tree."""
        return drafts_trees(self.drafter)

    def init(self, config, sizes):
        """The inner drafter's state, and nothing counted yet; see `Drafter.init`."""
        none, nothing = jnp.zeros(sizes.rows, jnp.int32), jnp.zeros(sizes.rows)
        return AdaptiveState(self.drafter.init(config, sizes), nothing, nothing, none, none, none)

    def admit(self, model, carry, reading):
        """Admits to the inner drafter, and forgets what a row's earlier request counted; see `Drafter.admit`."""
        state = dataclasses.replace(carry.speculation.state, inner=None)
        none = jax.tree.map(lambda x: jnp.zeros(reading.begins.shape, x.dtype), state)
        inner = self.drafter.admit(model, _inside(carry), reading)
        return dataclasses.replace(reading.begun(state, none), inner=inner)

    def propose(self, model, carry, most):
        """Has the inner drafter draft as many tokens as pay on each row; see `Drafter.propose`."""
        state, steps = _judge(carry.speculation), carry.counters.steps
        share = (state.kept + PRIOR) / (state.judged + 1)
        length = best_length(share, self.draft_tokens, self.cost)
        length = jnp.where((length == 0) & (steps % PROBE == PROBE - 1), 1, length)
        carry = _inside(carry)
        proposal, inner = self.drafter.propose(model, carry, jnp.minimum(most, length))
        proposal = usable(proposal, self.drafter, carry, model.config.vocab_size)
        depth = proposal.count
        if proposal.parents is not None:
            real = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None] < proposal.count[:, None]
            depth = jnp.sum(ancestors(proposal.parents), axis=2, dtype=jnp.int32)
            depth = jnp.max(jnp.where(real, depth, 0), axis=1)
        depth = jnp.where(carry.state == RUNNING, depth, 0)
        return proposal, dataclasses.replace(state, inner=inner, depth=depth)

    def settle(self, model, state, hidden, tokens, number):
        """Settles the inner drafter; the next `propose` counts what became of the drafts; see `Drafter.settle`."""
        return dataclasses.replace(state, inner=self.drafter.settle(model, state.inner, hidden, tokens, number))


def _judge(speculation: Speculation) -> AdaptiveState:
    """The state that has counted what became of the last step's drafts. Those that were not verified, for which there
    was no memory, say nothing."""
    state = speculation.state
    verified = speculation.drafted > state.verified
    kept = speculation.accepted - state.accepted
    judged = jnp.minimum(kept + 1, state.depth)

    def count(old: Array, new: Array) -> Array:
        return jnp.where(verified, DISCOUNT * old + new.astype(jnp.float32), old)

    return dataclasses.replace(
        state,
        kept=count(state.kept, kept),
        judged=count(state.judged, judged),
        verified=speculation.drafted,
        accepted=speculation.accepted,
    )


def _inside(carry: Carry) -> Carry:
    """The carry as the inner drafter sees it."""
    assert carry.speculation is not None
    inner = dataclasses.replace(carry.speculation, state=carry.speculation.state.inner)
    return dataclasses.replace(carry, speculation=inner)


def best_length(share: Float32[Array, "rows"], most: int, cost: float) -> Int32[Array, "rows"]:
    """The number of drafts in [0, most] with the most tokens for the cost; the least of equals.

    Args:
      share: The probability that a draft is kept.
      most: At least 1.
      cost: As in `Adaptive`.
    """
    number = jnp.arange(most + 1, dtype=jnp.float32)[None]
    tokens = jnp.cumsum(share[:, None] ** number, axis=1)
    return jnp.argmax(tokens / (1 + cost * number), axis=1).astype(jnp.int32)
