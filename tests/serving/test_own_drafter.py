"""Drafters that people write: plain classes work, and what can't be used is named with what to add."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.serving import generate
from jaxbuf.serving.adaptive import Adaptive
from jaxbuf.serving.own_drafter import Unregistered, fit_drafter
from jaxbuf.serving.speculation import Drafter, Proposal
from tests.serving.five_tokens import NEW, PROMPTS, five_token_model, greedy


class Plain:
    """Drafts its own numbers."""

    draft_tokens = 2

    def __init__(self, numbers=(1, 2)):
        self.numbers = np.atleast_2d(np.asarray(numbers, np.int32))

    def init(self, config, sizes):
        return ()

    def admit(self, model, carry, reading):
        return ()

    def propose(self, model, carry, most):
        return Proposal(jnp.broadcast_to(jnp.asarray(self.numbers), (most.shape[0], 2)), most), ()

    def settle(self, model, state, hidden, tokens, number):
        return ()


@dataclasses.dataclass
class Unhashable(Plain):
    numbers: tuple = (1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Registered(Plain):
    numbers: object = (1, 2)


@pytest.mark.slow
def test_a_drafter_of_a_plain_class_changes_no_greedy_token():
    """Its drafts are tokens in two rows, and outside the vocabulary in the others: those are never read."""
    lm, settings = five_token_model(), greedy()
    expected = [result.tokens for result in generate(lm, PROMPTS, NEW, settings)]
    numbers = [(1, 2), (3, 0), (-1, 10**9), (5, 1)]
    found = generate(lm, PROMPTS, NEW, settings, drafter=Plain(numbers))
    assert [result.tokens for result in found] == expected
    assert [result.stats.drafted > 0 for result in found] == [True, True, False, False]


def test_a_plain_class_is_a_constant_and_a_registered_one_is_arguments():
    plain = Plain()
    fitted = fit_drafter(plain)
    assert isinstance(fitted, Unregistered) and isinstance(fitted, Drafter)
    assert jax.tree.leaves(fitted) == [] and fitted == fit_drafter(plain) != fit_drafter(Plain())
    registered = Registered(jnp.arange(2))
    assert fit_drafter(registered) is registered and len(jax.tree.leaves(registered)) == 1


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Unhashable(), "a drafter of a plain class must be hashable, and a Unhashable is not .*register_dataclass"),
        (Registered(("text", 3)), "every attribute of the drafter Registered must be an array or static, got a str"),
        (Registered(np.array([None])), "every attribute of the drafter Registered must be .*, got a ndarray"),
        (Adaptive(Unhashable()), "a drafter of a plain class must be hashable, and a Unhashable is not"),
        (Plain, r"drafter must be .* a Drafter \(an object, not its class\), got <class"),
        (3, "drafter must be .*, got 3"),
        (SimpleNamespace(draft_tokens=3, init=1, admit=1, propose=2), "got a SimpleNamespace without settle"),
    ],
)
def test_what_is_no_drafter_is_named_with_what_to_add(drafter, message):
    with pytest.raises(ValueError, match=message):
        generate(five_token_model(), PROMPTS, NEW, drafter=drafter)


class Alone(Plain):
    def propose(self, model, carry, most):
        return super().propose(model, carry, most)[0]


@pytest.mark.slow
def test_a_proposal_without_a_state_is_an_error_that_names_the_drafter():
    expected = "propose of the drafter Alone must return a Proposal and its state, got a Proposal"
    with pytest.raises(ValueError, match=expected):
        generate(five_token_model(), PROMPTS, NEW, drafter=Alone())


@pytest.mark.parametrize("number", [0, 16, 2.0, True, "4", None])
def test_the_number_of_drafts_of_a_drafter_is_checked(number):
    drafter = Plain()
    drafter.draft_tokens = number
    with pytest.raises(ValueError, match=r"draft_tokens must be .* in \[1, 15\], got .* \(of the drafter Plain\)"):
        generate(five_token_model(), PROMPTS, NEW, drafter=drafter)
