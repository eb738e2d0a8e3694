"""A drafter that a caller wrote: what is wrong with it is said before anything is compiled, and a plain class works."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxbuf.serving.sampling import whole
from jaxbuf.serving.speculation import Drafter, drafter_name, drafts_trees

MOST_DRAFTS = 15  # with the newest token 16: the most that the kernels read at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unregistered:
    """A drafter whose class JAX does not know: one constant of the compiled programs.

    Attributes:
      inner: The drafter; programs are compiled once for each (static).
    """

    inner: Drafter = dataclasses.field(metadata={"static": True})

    @property
    def draft_tokens(self) -> int:
        """The most drafts of one step."""
        return self.inner.draft_tokens

    @property
    def trees(self) -> bool:
        """Whether the drafts are a tree."""
        return drafts_trees(self.inner)

    @property
    def adaptive(self) -> bool:
        """Whether there is a program of its own for steps without drafts."""
        return bool(getattr(self.inner, "adaptive", False))

    def init(self, config, sizes):
        """As the drafter; see `Drafter.init`."""
        return self.inner.init(config, sizes)

    def admit(self, model, carry, reading):
        """As the drafter; see `Drafter.admit`."""
        return self.inner.admit(model, carry, reading)

    def propose(self, model, carry, most):
        """As the drafter; see `Drafter.propose`."""
        return self.inner.propose(model, carry, most)

    def settle(self, model, state, hidden, tokens, number):
        """As the drafter; see `Drafter.settle`."""
        return self.inner.settle(model, state, hidden, tokens, number)


def check_draft_tokens(draft_tokens: int, owner: str = "") -> None:
    """Raises ValueError unless it is in [1, MOST_DRAFTS]; `owner` says in the message whose it is."""
    if not whole(draft_tokens) or not 1 <= draft_tokens <= MOST_DRAFTS:
        raise ValueError(f"draft_tokens must be a whole number in [1, {MOST_DRAFTS}], got {draft_tokens!r}{owner}")


def fit_drafter(drafter: Drafter) -> Drafter:
    """The drafter as compiled programs take it: itself, or an `Unregistered` around one of a plain class.

    Raises:
      ValueError: draft_tokens is no whole number in [1, MOST_DRAFTS], an attribute is neither an array nor static, or
        an object of a plain class can't be hashed. The message names the drafter and says what to add.
    """
    name = drafter_name(drafter)
    check_draft_tokens(drafter.draft_tokens, f" (of the drafter {name})")
    leaves = jax.tree.leaves(drafter)
    if any(leaf is drafter for leaf in leaves):
        try:
            hash(drafter)
        except TypeError as error:
            raise ValueError(
                f"a drafter of a plain class must be hashable, and a {name} is not ({error}): decorate the class with "
                "@jax.tree_util.register_dataclass and @dataclasses.dataclass(frozen=True), with "
                'dataclasses.field(metadata={"static": True}) for what is not an array'
            ) from error
        return Unregistered(drafter)
    for leaf in leaves:
        if not _is_array(leaf):
            raise ValueError(
                f"every attribute of the drafter {name} must be an array or static, got a {type(leaf).__name__}: "
                'declare it with dataclasses.field(metadata={"static": True})'
            )
    return drafter


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSU"  # of objects or texts
    return isinstance(leaf, jax.Array | bool | int | float | np.number)
