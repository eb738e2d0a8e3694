"""How many tokens each slot holds, whatever the layers of a model are, and which tokens a launch reads.

A slot is the place of one sequence in every memory of a model. Its first `committed` tokens are its text; `pending`
ones lie behind them, drafts for example, until `commit` says how many of them are right.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.arguments import check_range, check_rows, checked_slots, distinct_slots, first_rows
from jaxbuf.axes import Array, Bool, Int, Int32, Shaped
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.memory.tree import ancestors, check_parents, check_path, path_first
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """The tokens of every slot. Slot 0 is null and stays empty.

    Attributes:
      committed, pending: Of each slot.
      max_pending: The most tokens that one launch may leave pending (static).
      trees: Whether launches may have parents (static).
    """

    committed: Int32[Array, "slots"]
    pending: Int32[Array, "slots"]
    max_pending: int = dataclasses.field(metadata={"static": True})
    trees: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Launch:
    """Which tokens a launch reads.

    Attributes:
      slots: Each of them once but for the null slot 0.
      start: The tokens that each row's slot committed before.
      lengths: Its tokens in this launch, in [0, time]; 0 for the null slot.
      time: The most tokens of a row (static).
      keep: None: the tokens stay pending. Else they are committed, and the last `keep` of each row stay entries of a
        recurrence.
      parents: The token before each new one, -1 for the committed tail; None: each follows the one before.
      ancestors: At (i, j) whether new token j is on i's path, i itself included; None likewise.
      target: What the launch is compiled for (static); None: what is resolved for each operation.
      empty: Whether no slot of a row holds anything before (static): the memories then need not read what they hold.
    """

    slots: Int32[Array, "rows"]
    start: Int32[Array, "rows"]
    lengths: Int32[Array, "rows"]
    time: int = dataclasses.field(metadata={"static": True})
    keep: int | Int[Array, "rows"] | None = None
    parents: Int32[Array, "rows time"] | None = None
    ancestors: Bool[Array, "rows time time"] | None = None
    target: Target | None = dataclasses.field(default=None, metadata={"static": True})
    empty: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def commits(self) -> bool:
        """Whether the tokens are committed at once."""
        return self.keep is not None

    @property
    def depth(self) -> Int32[Array, "#rows time"]:
        """How many of the new tokens precede each one."""
        if self.ancestors is None:
            return jnp.arange(self.time, dtype=jnp.int32)[None]
        return jnp.sum(self.ancestors, axis=2, dtype=jnp.int32) - 1


@dataclasses.dataclass(frozen=True)
class Commit:
    """What a commit does, for every memory.

    Attributes:
      slots: Of each row.
      start: The tokens committed before.
      accepted: How many pending tokens become committed ones.
      path: For a tree: the accepted nodes, of which the first `accepted` count; None: the first ones.
      permutation: The accepted nodes first and the others in their order; None without path.
    """

    slots: Int32[Array, "rows"]
    start: Int32[Array, "rows"]
    accepted: Int32[Array, "rows"]
    path: Int32[Array, "rows n"] | None = None
    permutation: Int32[Array, "rows max_pending"] | None = None


def init_sequences(*, slots: int, max_pending: int, trees: bool = False) -> Sequences:
    """Empty sequences: slots 1 to `slots`, and the null slot."""
    return Sequences(jnp.zeros(slots + 1, jnp.int32), jnp.zeros(slots + 1, jnp.int32), max_pending, trees)


def make_launch(
    positions: Int32[Array, "slots"],
    max_pending: int,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"],
    time: int | None,
    *,
    keep: int | Array | None = None,
    parents: Int[Array, "rows time"] | None = None,
    target: Target | None = None,
    empty: bool = False,
) -> Launch:
    """A checked launch on slots that committed `positions` tokens.

    Args:
      positions, max_pending: Of the sequences.
      slots, lengths: Of each row.
      time: The most tokens of a row; None: whatever `lengths` say.
      keep, parents, target, empty: As in `Launch`.

    Raises:
      ValueError: time is 0 or above max_pending for tokens that stay pending; or slots, lengths or parents do not fit,
        or are out of range or repeated, or a slot that should be empty is not, where that is known. Under jit lengths
        are clamped, and the first row of a slot counts.
    """
    if keep is None and time is not None:
        if time < 1:
            raise ValueError(f"time must be at least 1 token, got {time}")
        if time > max_pending:
            raise ValueError(f"time ({time} tokens at once) must be at most max_pending ({max_pending})")
    most = np.iinfo(np.int32).max if time is None else time
    slots, given = distinct_slots(slots, positions.shape[0]), jnp.asarray(lengths)
    check_rows("lengths", given, slots.shape[0])
    check_range("lengths", lengths, 0, most)
    lengths = jnp.where(slots > 0, jnp.clip(given.astype(jnp.int32), 0, most), 0)
    if parents is not None:
        parents = check_parents(parents, slots.shape[0], most)
        parents = None if time == 1 else parents  # one token makes no tree
    reach = None if parents is None else ancestors(parents)
    start = positions[slots]
    if empty:
        check_range("the tokens that an empty slot committed", start, 0, 0)
        start = jnp.zeros_like(slots)
    return Launch(slots, start, lengths, most, keep, parents, reach, target, empty)


def begin(sequences: Sequences, launch: Launch) -> Sequences:
    """The sequences once a launch's tokens are there; what was pending before is dropped."""
    committed, pending = sequences.committed, launch.lengths
    if launch.commits:
        committed, pending = put(committed, launch.slots, launch.start + launch.lengths), jnp.zeros_like(pending)
    return dataclasses.replace(sequences, committed=committed, pending=put(sequences.pending, launch.slots, pending))


def make_commit(
    pending: Int32[Array, "slots"],
    positions: Int32[Array, "slots"],
    max_pending: int,
    accepted: Int[Array, "rows"],
    slots: Int[Array, "rows"],
    path: Int[Array, "rows n"] | None = None,
) -> Commit:
    """A checked commit of the first `accepted` of the slots' pending tokens, or of a tree's path.

    Args:
      pending, positions: The tokens that every slot has pending and committed.
      max_pending: Of the sequences.
      accepted, slots, path: As in `Commit`.

    Raises:
      ValueError: One of them does not fit, or is out of range or repeated, where that is known; under jit `accepted` is
        clamped.
    """
    slots = distinct_slots(slots, positions.shape[0])
    accepted, there = jnp.asarray(accepted), pending[slots]
    check_rows("accepted", accepted, slots.shape[0])
    check_range("accepted", accepted, 0, there)
    accepted, permutation = jnp.clip(accepted.astype(jnp.int32), 0, there), None
    if path is not None:
        path = check_path(path, accepted, there, max_pending)
        permutation = path_first(path, accepted, max_pending)
    return Commit(slots, positions[slots], accepted, path, permutation)


def commit(sequences: Sequences, done: Commit) -> Sequences:
    """The sequences after a commit: what it did not accept ceases to exist."""
    return dataclasses.replace(
        sequences,
        committed=put(sequences.committed, done.slots, done.start + done.accepted),
        pending=put(sequences.pending, done.slots, jnp.zeros_like(done.accepted)),
    )


def rollback(
    sequences: Sequences, count: Int[Array, "rows"], slots: Int32[Array, "rows"], fewest: Int32[Array, "rows"]
) -> tuple[Int32[Array, "rows"], Sequences]:
    """Makes the last `count` committed tokens of each slot pending again, in place of what was.

    Args:
      sequences: Changed.
      count: As said.
      slots: None but 0 twice.
      fewest: How many tokens must stay committed.

    Returns:
      count as it was done, and the sequences.

    Raises:
      ValueError: count is negative, above max_pending or leaves fewer tokens, where that is known; under jit it is
        clamped.
    """
    given = jnp.asarray(count)
    check_rows("count", given, slots.shape[0])
    committed = sequences.committed[slots]
    most = jnp.clip(committed - fewest, 0, sequences.max_pending)
    check_range("count", given, 0, most)
    count = jnp.clip(given.astype(jnp.int32), 0, most)
    after = dataclasses.replace(
        sequences,
        committed=put(sequences.committed, slots, committed - count),
        pending=put(sequences.pending, slots, count),
    )
    return count, after


def fork(sequences: Sequences, committed: Int32[Array, "rows"], target: Int32[Array, "rows"]) -> Sequences:
    """Each target (0: nothing) has committed so many tokens, and none is pending there."""
    committed = put(sequences.committed, target, committed)
    return dataclasses.replace(
        sequences, committed=committed, pending=put(sequences.pending, target, jnp.zeros_like(target))
    )


def reset(sequences: Sequences, slots: Int32[Array, "rows"]) -> Sequences:
    """Empties slots."""
    zero = jnp.zeros_like(slots)
    return dataclasses.replace(
        sequences, committed=put(sequences.committed, slots, zero), pending=put(sequences.pending, slots, zero)
    )


def emptied_slots(slots: Int[Array, "rows"], count: int) -> Int32[Array, "rows"]:
    """The slots of a reset, of `count` in all: each once, for a slot that gave back twice would take from others."""
    return first_rows(checked_slots(slots, count))


def put(
    array: Shaped[Array, "slots ..."], slots: Int32[Array, "rows"], new: Shaped[Array, "rows ..."]
) -> Shaped[Array, "slots ..."]:
    """Writes per-row values to their slots; the null slot's are dropped."""
    if _in_order(slots):  # A GPU makes one kernel of many such joins, and one kernel of each scatter.
        return jnp.concatenate([array[:1], new.astype(array.dtype), array[1 + len(slots) :]])
    return array.at[jnp.where(slots > 0, slots, NOWHERE)].set(new, mode="drop")


def _in_order(slots: Array) -> bool:
    """Whether slots are known, and those from 1 on."""
    return isinstance(slots, np.ndarray) and np.array_equal(slots, np.arange(1, len(slots) + 1))


def slots_in_order(number: int) -> Int32[Array, "{number}"]:
    """The physical slots from 1 on."""
    # An array of numpy is known under jit, too: no decoding step has to look for slots that are there twice.
    return cast(Array, np.arange(1, number + 1, dtype=np.int32))
