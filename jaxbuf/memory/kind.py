"""What every kind of memory can do, so that a model's cache need not know which kinds there are."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jaxbuf.memory.claims import Claim
from jaxbuf.memory.sequences import Commit, Launch

type Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the memories of all kinds are made for; see `jaxbuf.models.cache.init_cache`."""

    slots: int
    capacity: int
    limit: Any
    max_pending: int
    block_size: int
    page_size: int
    trees: bool
    states: int | None
    blocks: int | None
    pages: int | None

    @property
    def shares(self) -> bool:
        """Whether slots take rows of the pools when they need them, and share them after a fork."""
        return any(count is not None for count in (self.states, self.blocks, self.pages))


class MemoryKind[Shared, Layer](Protocol):
    """A kind of memory: what all of a model's layers of the kind share, and what each layer has.

    Everything is a pure function on pytrees of arrays. A launch has two phases. `claim` says what each row needs of
    pools that slots share, and changes nothing; rows that are granted less than all of it are taken out of the launch.
    Then `begin` can't fail.
    """

    def init(self, mixers: Sequence[Any], sizes: Sizes) -> Shared:
        """What empty layers share."""
        ...

    def claim(self, shared: Shared, launch: Launch) -> tuple[Claim, ...]:
        """What a launch takes from pools that slots share, a claim each; () where nothing can run out."""
        ...

    def claim_fork(self, shared: Shared, source: Array, target: Array, committed: Array) -> tuple[Claim, ...]:
        """What a fork takes; of the pools in the order of `claim`."""
        ...

    def note_missing(self, shared: Shared, missing: Sequence[Array]) -> Shared:
        """The same, with a note of how many rows of each pool (int32 scalars, as claimed) were missing.

        Raises:
          PoolExhausted: Some were, where that is known.
        """
        ...

    def raise_missing(self, shared: Shared) -> None:
        """Raises PoolExhausted if something was missing since the last reset; on the host."""
        ...

    def whole(self, time: int, lengths: Array | None, chunk_size: int) -> Any:
        """The plan of a mixer for sequences that start from nothing, without a memory."""
        ...

    def begin(self, shared: Shared, launch: Launch) -> tuple[Any, Shared]:
        """The plan of a mixer for a launch, finished, and what is shared after it."""
        ...

    def commit(self, shared: Shared, done: Commit) -> Shared:
        """Makes pending tokens committed ones; only integers move."""
        ...

    def rollback(self, shared: Shared, slots: Array, count: Array) -> Shared:
        """Makes the last `count` committed tokens of each slot pending again; int32 [rows] both.

        Raises:
          ValueError: The memory can't.
        """
        ...

    def fork(
        self, shared: Shared, layers: Sequence[Layer], source: Array, target: Array, committed: Array
    ) -> tuple[Shared, tuple[Layer, ...]]:
        """Gives each target slot what its source committed.

        Args:
          shared, layers: The memory.
          source, target: int32 [rows]; target 0: the row is left out. No target twice.
          committed: int32 [rows], the tokens of each source.
        """
        ...

    def reset(self, shared: Shared, slots: Array) -> Shared:
        """Empties slots (int32 [rows], each once) and gives back what they had; only integers move."""
        ...
