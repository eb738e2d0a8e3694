"""What every kind of memory can do, so that a model's cache need not know which kinds there are."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from jaxbuf.axes import Array, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.sequences import Commit, Launch
from jaxbuf.target import Target


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the memories of all kinds are made for: arguments of `jaxbuf.models.cache.init_cache`, explained there.

    Attributes:
      slots: All of them, those that hold prefixes included.
      capacity, max_pending, page_size, block_size, trees: As given there.
      limit, kv_limit: Of each slot, or one number for all; kv_limit None: the same as limit.
      states, blocks, pages: As given there; None for all: every slot has its own memory for good.
    """

    slots: int
    capacity: int
    limit: Any
    kv_limit: Any
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
        """What empty layers share, from their mixers and the sizes of the cache."""
        ...

    def head_axes(self, layer: Layer) -> Layer:
        """A layer's memory with the number of the axis in each array's place that counts heads, or their channels."""
        ...

    def claim(self, shared: Shared, layers: Sequence[Layer], launch: Launch) -> tuple[Claim, ...]:
        """What a launch takes from pools that slots share, a claim for each pool; () where nothing can run out.

        What depends on numbers that the launch has still to compute is claimed for the worst case; a later `begin`
        gives back what was not needed.

        Args:
          shared, layers: The memory: what all layers of the kind share, and each layer's own.
          launch: With all rows that want to be served.
        """
        ...

    def claim_fork(
        self,
        shared: Shared,
        layers: Sequence[Layer],
        source: Int32[Array, "rows"],
        target: Int32[Array, "rows"],
        committed: Int32[Array, "rows"],
    ) -> tuple[Claim, ...]:
        """What a fork takes; of the pools in the order of `claim`.

        Args:
          shared, layers: The memory.
          source, target, committed: As `fork` is given them.
        """
        ...

    def fewest_tokens(self, shared: Shared, slots: Int32[Array, "rows"], *, alone: bool) -> Int32[Array, "rows"]:
        """How many of its committed tokens a slot can be cut back to at least.

        Args:
          shared: What all layers of the kind share.
          slots: Of each row.
          alone: Whether the slot itself loses the others and writes new ones there, so that they must not lie where
            other slots read them, too. Else it is the source of a fork.
        """
        ...

    def note_missing(self, shared: Shared, missing: Sequence[Array]) -> Shared:
        """What is shared, with a note of how many rows of each pool (`missing`) were missing.

        Raises:
          PoolExhausted: Some were, where that is known.
        """
        ...

    def raise_missing(self, shared: Shared) -> None:
        """Raises PoolExhausted if something in `shared` was missing since the last reset; on the host."""
        ...

    def whole(self, time: int, lengths: Int32[Array, "rows"] | None, chunk_size: int, target: Target | None) -> Any:
        """The plan of a mixer for sequences that start from nothing, without a memory.

        Args:
          time: Tokens of a row.
          lengths: How many of them are real; None: all.
          chunk_size: Of the chunked form.
          target: As in `Launch`.
        """
        ...

    def begin(self, shared: Shared, layers: Sequence[Layer], launch: Launch) -> tuple[Any, Shared, tuple[Layer, ...]]:
        """The plan of a mixer for a launch, finished; what is shared after it; and the layers as mixers are to find
        them."""
        ...

    def commit(self, shared: Shared, done: Commit) -> Shared:
        """What is shared once the commit `done` made pending tokens committed ones; only integers move."""
        ...

    def rollback(self, shared: Shared, slots: Int32[Array, "rows"], count: Int32[Array, "rows"]) -> Shared:
        """What is shared once the last `count` committed tokens of `slots` are pending again; at least
        `fewest_tokens` are left."""
        ...

    def fork(
        self,
        shared: Shared,
        layers: Sequence[Layer],
        source: Int32[Array, "rows"],
        target: Int32[Array, "rows"],
        committed: Int32[Array, "rows"],
    ) -> tuple[Shared, tuple[Layer, ...]]:
        """Gives each target slot what its source committed, or the first tokens of that.

        Args:
          shared, layers: The memory.
          source, target: Where target is 0, the row is left out. No target twice.
          committed: The tokens that each target gets: all that its source has, or the first ones.
        """
        ...

    def reset(
        self, shared: Shared, layers: Sequence[Layer], slots: Int32[Array, "rows"]
    ) -> tuple[Shared, tuple[Layer, ...]]:
        """The memory (`shared` and `layers`) once slots, each there once, are empty, and gave back what they had."""
        ...
