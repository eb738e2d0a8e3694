"""Whatever a drafter proposes, tokens are distributed as without it, and none is outside the vocabulary."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving.acceptance import usable_log_q
from jaxbuf.serving.carry import RUNNING
from jaxbuf.serving.speculation import Proposal, check_state, usable
from jaxbuf.serving.token_masks import pack_mask
from tests.serving.goodness import RARE
from tests.serving.speculating import EACH, VOCAB, p_value, tiny_models
from tests.serving.speculating import architecture as architecture

STEPS, DRAFTS = 5, 3
EXTREMES = [-(2**31), -5, -1, VOCAB, VOCAB + 1, 2**31 - 1]
# What is wrong with log_q, as numpy functions of it and of the draft; None: nothing.
SPOILED = [
    None,
    None,
    lambda log_q, draft: np.full_like(log_q, np.nan),
    lambda log_q, draft: np.where(np.arange(VOCAB) == (draft + 1) % VOCAB, np.nan, log_q),
    lambda log_q, draft: np.where(np.arange(VOCAB) == draft, -np.inf, 0.0),
    lambda log_q, draft: np.full_like(log_q, np.inf),
    lambda log_q, draft: np.full_like(log_q, -np.inf),
    lambda log_q, draft: log_q + 1,
    lambda log_q, draft: log_q * 1e30,
    lambda log_q, draft: np.zeros_like(log_q),
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wild:
    """Proposes what its tables hold at the step, int32 or f32 [STEPS, rows, ...]; its state counts the steps."""

    drafts: jax.Array
    count: jax.Array
    log_q: jax.Array
    parents: jax.Array | None = None

    draft_tokens = DRAFTS

    @property
    def trees(self):
        return self.parents is not None

    def init(self, config, sizes):
        return jnp.zeros((), jnp.int32)

    def admit(self, model, carry, reading):
        return carry.speculation.state

    def propose(self, model, carry, most):
        step = carry.speculation.state % STEPS
        parents = None if self.parents is None else self.parents[step]
        return Proposal(self.drafts[step], self.count[step], self.log_q[step], parents), step

    def settle(self, model, state, hidden, tokens, number):
        return state + 1


def wild(rng, rows, *, tree=False):
    """Half of the drafts are drawn from the log_q beside them; the rest is anything, log_q included."""
    shape = (STEPS, rows, DRAFTS)
    log_q = rng.standard_normal((*shape, VOCAB))
    log_q -= np.log(np.exp(log_q).sum(-1, keepdims=True))
    drafts = np.argmax(log_q + rng.gumbel(size=log_q.shape), axis=-1)
    kind = rng.integers(0, len(SPOILED), shape)
    for number, spoil in enumerate(SPOILED):
        if spoil is not None:
            log_q = np.where((kind == number)[..., None], spoil(log_q, drafts[..., None]), log_q)
    drafts = np.where(rng.random(shape) < 0.1, rng.choice(EXTREMES, shape), drafts)
    count = np.where(
        rng.random(shape[:2]) < 0.3, rng.choice([*EXTREMES, DRAFTS + 1], shape[:2]), rng.integers(1, 4, shape[:2])
    )
    parents = rng.integers(-1, np.arange(DRAFTS), shape)
    parents = np.where(rng.random(shape) < 0.1, rng.choice(EXTREMES, shape), parents)
    tables = *(jnp.asarray(x, jnp.int32) for x in (drafts, count)), jnp.asarray(log_q, jnp.float32)
    return Wild(*tables, jnp.asarray(parents, jnp.int32) if tree else None)


@pytest.mark.checks("drafters")
@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="chains"),
        pytest.param(True, marks=pytest.mark.exhaustive, id="trees"),
    ],
)
def test_tokens_are_distributed_as_without_a_drafter(architecture, rng, monkeypatch, tree):
    """By exact enumeration, as of other drafters; a token outside the vocabulary would be an impossible cell."""
    lm, _ = tiny_models(architecture)
    for _ in range(3):  # each with other tables
        p = p_value(lm, wild(rng, EACH, tree=tree), rng, monkeypatch, batches=1)
        print(f"p = {p:.3g}")
        assert p > RARE


def carry_of(rows, new=4):
    """What `usable` looks at of a carry: running rows of a vocabulary whose last token may not be sampled."""
    history = SimpleNamespace(count=jnp.zeros(rows, jnp.int32))
    return SimpleNamespace(
        last=jnp.zeros(rows, jnp.int32),
        allowed=jnp.asarray(np.tile(pack_mask(np.arange(VOCAB) < VOCAB - 1), (rows, 1))),
        state=jnp.full(rows, RUNNING),
        max_new_tokens=jnp.full(rows, new),
        history=history,
    )


def test_a_proposal_is_used_up_to_the_first_draft_that_is_no_token(rng):
    rows = 500
    for tree in (False, True):
        drafter = wild(rng, rows, tree=tree)
        given = jax.tree.map(lambda table: table[0], drafter)
        proposal = Proposal(given.drafts, given.count, given.log_q, given.parents)
        found = jax.jit(partial(usable, drafter=drafter, carry=carry_of(rows), vocab=VOCAB))(proposal)
        for row in range(rows):
            drafts, count = np.asarray(given.drafts[row]), int(given.count[row])
            real = drafts[: count if 0 <= count <= DRAFTS else 0]
            known = (real >= 0) & (real < VOCAB - 1)
            expected = int(np.argmin(known)) if not known.all() else len(real)
            assert int(found.count[row]) == expected
            np.testing.assert_array_equal(found.drafts[row, :expected], drafts[:expected])
        assert int(found.drafts.min()) >= 0 and int(found.drafts.max()) < VOCAB
        if tree:
            below = np.asarray(found.parents) < np.arange(DRAFTS)
            assert below.all() and int(found.parents.min()) >= -1


def test_a_chain_is_no_longer_than_what_a_row_can_use():
    drafts, three = jnp.zeros((2, DRAFTS), jnp.int32), jnp.full(2, 3, jnp.int32)
    for new, expected in ((1, 0), (2, 1), (3, 2), (4, 3), (9, 3)):
        found = usable(Proposal(drafts, three), SimpleNamespace(draft_tokens=DRAFTS), carry_of(2, new), VOCAB)
        assert found.count.tolist() == [expected] * 2


def test_a_draft_that_was_not_drawn_from_its_distribution_counts_as_chosen(rng):
    """Every other log_q stays, to the bit."""
    drafter = wild(rng, 200)
    drafts = jnp.clip(drafter.drafts[0], 0, VOCAB - 1)
    found = np.asarray(usable_log_q(drafter.log_q[0], drafts))
    given = np.asarray(drafter.log_q[0], np.float64)
    point = np.where(np.arange(VOCAB) == np.asarray(drafts)[..., None], 0.0, -np.inf)
    with np.errstate(all="ignore"):
        own = np.take_along_axis(given, np.asarray(drafts)[..., None], axis=-1)[..., 0]
        drawn = (np.abs(np.exp(given).sum(-1) - 1) < 1e-4) & (own > -np.inf)
    assert 0.1 < drawn.mean() < 0.5
    np.testing.assert_array_equal(found, np.where(drawn[..., None], given, point).astype(np.float32))


def a_proposal(**changes):
    fields = {
        "drafts": jnp.zeros((2, DRAFTS), jnp.int32),
        "count": jnp.zeros(2, jnp.int32),
        "log_q": jnp.zeros((2, DRAFTS, VOCAB)),
        "parents": jnp.full((2, DRAFTS), -1, jnp.int32),
    }
    return Proposal(**fields | changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "propose of the drafter Wild must return a Proposal and its state, got a NoneType"),
        (
            a_proposal(drafts=jnp.zeros((2, 4), jnp.int32)),
            r"drafts .* Wild must be int32 \(2, 3\) .*, got int32 \(2, 4\)",
        ),
        (a_proposal(drafts=jnp.zeros((2, 3))), r"drafts .* must be int32 \(2, 3\) .*, got float32 \(2, 3\)"),
        (a_proposal(drafts=[[0] * 3] * 2), r"drafts .* must be int32 \(2, 3\) .*, got a list"),
        (a_proposal(count=jnp.zeros((2, 1), jnp.int32)), r"count .* must be int32 \(2,\) .*, got int32 \(2, 1\)"),
        (a_proposal(count=jnp.zeros(2, bool)), r"count .* must be int32 \(2,\) .*, got bool \(2,\)"),
        (a_proposal(count=None), r"count .* must be int32 \(2,\) .*, got a NoneType"),
        (a_proposal(log_q=jnp.zeros((2, 3, 9))), r"log_q .* must be float32 \(2, 3, 5\) .*, got float32 \(2, 3, 9\)"),
        (a_proposal(log_q=jnp.zeros((2, 3, 5), jnp.bfloat16)), r"log_q .* must be float32 .*, got bfloat16"),
        (a_proposal(parents=jnp.zeros(3, jnp.int32)), r"parents .* must be int32 \(2, 3\) .*, got int32 \(3,\)"),
        (a_proposal(), "a drafter whose proposals have parents must have trees = True, got Wild without"),
    ],
)
def test_a_proposal_of_another_kind_width_or_dtype_names_the_drafter(rng, given, message):
    with pytest.raises(ValueError, match=message):
        usable(given, wild(rng, 2), carry_of(2), VOCAB)


def test_a_state_that_changes_its_shape_names_the_drafter(rng):
    state = {"a": jnp.zeros(3), "b": jnp.zeros((), jnp.int32)}
    drafter = wild(rng, 2)
    check_state(drafter, state, {"a": jnp.ones(3), "b": jnp.ones((), jnp.int32)})
    for other in ({"a": jnp.zeros(3)}, {"a": jnp.zeros(4), "b": state["b"]}, {"a": state["a"], "b": jnp.zeros(())}, ()):
        with pytest.raises(
            ValueError, match="the state of the drafter Wild must keep its structure, shapes and dtypes"
        ):
            check_state(drafter, state, other)
