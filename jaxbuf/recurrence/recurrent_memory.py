"""The memory of recurrent layers as a kind among others: one cursor, and a pool and a convolution's ring a layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Float, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.kind import Sizes
from jaxbuf.memory.sequences import Commit, Launch, put
from jaxbuf.memory.tree import permute
from jaxbuf.recurrence import buffered
from jaxbuf.recurrence.begin import begin_launch, begin_prompt, claim
from jaxbuf.recurrence.buffered import Pool
from jaxbuf.recurrence.convolution import init_ring, init_ring_order
from jaxbuf.recurrence.cursor import Cursor, checked_limits, commit_entries, init_cursor, rollback_entries
from jaxbuf.recurrence.recurrent_plan import LaunchedRecurrence, WholeRecurrence
from jaxbuf.recurrence.shared_rows import note_missing, raise_missing_rows
from jaxbuf.recurrence.slots import claim_fork, fewest_tokens, fork_cursor, reset_cursor
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentShared:
    """What all recurrent layers share.

    Attributes:
      cursor: The integers of the buffered states.
      ring_order: The rows of the convolutions' rings; None without trees or convolutions.
      reach: How many tokens the convolutions' rings were written up to since the slot was emptied, those among them
        that were not committed; None with trees, which are not cut, and without convolutions.
    """

    cursor: Cursor
    ring_order: Int32[Array, "slots ring"] | None = None
    reach: Int32[Array, "slots"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """Memory of one recurrent layer.

    Attributes:
      pool: Of the buffered state.
      ring: The convolution's last inputs; None for a layer without a convolution.
    """

    pool: Pool
    ring: Float[Array, "slots ring channel_rows lanes"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a launch did to the recurrent states of each row.

    Attributes:
      folds: 1 where a state was written.
      checkpoint_reads: 1 where the slot had a checkpoint to read.
      live_entries: Entries of the ring that it had.
    """

    folds: Int32[Array, "rows"]
    checkpoint_reads: Int32[Array, "rows"]
    live_entries: Int32[Array, "rows"]


def init_recurrent(
    spec: RecurrenceSpec, cursor: Cursor, *, channels: int, width: int, dtype, entry_dtype, state_dtype: object
) -> RecurrentCache:
    """An empty memory of a layer.

    Args:
      spec: Its recurrence.
      cursor: The integers of all recurrent layers.
      channels, width: Of its convolution: channels and taps; width 0: it has none.
      dtype: Of the convolution's inputs.
      entry_dtype, state_dtype: As in `buffered.init_pool`.
    """
    sizes = {"slots": cursor.length.shape[0] - 1, "max_pending": cursor.max_pending}
    return RecurrentCache(
        pool=buffered.init_pool(spec, cursor, state_dtype=state_dtype, entry_dtype=entry_dtype),
        ring=init_ring(**sizes, channels=channels, width=width, dtype=dtype) if width else None,
    )


def work(before: RecurrentShared, after: RecurrentShared, slots: Int32[Array, "rows"]) -> Work:
    """What the launch between the two did to slots."""
    was, now = before.cursor, after.cursor
    folds = now.folded[slots] > was.folded[slots]
    return Work(folds.astype(jnp.int32), (was.folded[slots] > 0).astype(jnp.int32), was.length[slots])


def with_limits(
    shared: RecurrentShared,
    slots: Int32[Array, "rows"],
    limits: Int32[Array, "rows"] | Int32[Array, ""] | int,
    name: Literal["limit", "kv_limit"] = "limit",
) -> RecurrentShared:
    """The same with other fold thresholds, at most what the rings were made for."""
    changed = getattr(shared.cursor, name).at[slots].set(limits, mode="drop")
    return dataclasses.replace(shared, cursor=dataclasses.replace(shared.cursor, **{name: changed}))


class RecurrentMemory:
    """The kind: see `jaxbuf.memory.kind.MemoryKind`."""

    def init(self, mixers: Sequence[Any], sizes: Sizes) -> RecurrentShared:
        given = {name: getattr(sizes, name) for name in ("block_size", "states", "blocks", "shares")}
        lists, limits = {"slots": sizes.slots, "max_pending": sizes.max_pending}, {}
        for name in ("limit", "kv_limit"):
            if (limit := getattr(sizes, name)) is not None:
                longest = sizes.capacity + sizes.max_pending
                limits[name] = checked_limits(limit, sizes.slots, longest=longest, name=name)
        cursor = init_cursor(**lists, **given, **limits)
        widths = {mixer.width for mixer in mixers} - {0}
        if len(widths) > 1:
            raise ValueError(f"the convolutions of all layers must have as many taps, got {sorted(widths)}")
        if not widths:
            return RecurrentShared(cursor)
        if sizes.trees:
            return RecurrentShared(cursor, ring_order=init_ring_order(width=widths.pop(), **lists))
        return RecurrentShared(cursor, reach=jnp.zeros(sizes.slots + 1, jnp.int32))

    def head_axes(self, layer: RecurrentCache) -> RecurrentCache:
        axes = {"checkpoints": 1, "keys": 2, "updates": 2, "gates": 2, "low": 1, "low_scales": 1}
        there = {name: None if getattr(layer.pool, name) is None else axis for name, axis in axes.items()}
        return RecurrentCache(Pool(**there), None if layer.ring is None else 2)  # pyright: ignore[reportArgumentType]

    def claim(self, shared: RecurrentShared, layers: Sequence[RecurrentCache], launch: Launch) -> tuple[Claim, ...]:
        return claim(shared.cursor, launch)

    def claim_fork(
        self,
        shared: RecurrentShared,
        layers: Sequence[RecurrentCache],
        source: Array,
        target: Array,
        committed: Array,
    ) -> tuple[Claim, ...]:
        return claim_fork(shared.cursor, source, target, committed)

    def fewest_tokens(self, shared: RecurrentShared, slots: Array, *, alone: bool) -> Array:
        fewest = fewest_tokens(shared.cursor, slots, alone=alone)
        if shared.reach is None:
            return fewest
        return jnp.maximum(fewest, shared.reach[slots] - shared.cursor.max_pending)  # older inputs were overwritten

    def note_missing(self, shared: RecurrentShared, missing: Sequence[Array]) -> RecurrentShared:
        if shared.cursor.sharing is None:
            return shared
        noted = note_missing(shared.cursor.sharing, *missing)
        return dataclasses.replace(shared, cursor=dataclasses.replace(shared.cursor, sharing=noted))

    def raise_missing(self, shared: RecurrentShared) -> None:
        raise_missing_rows(shared.cursor.sharing)

    def whole(self, time: int, lengths: Array | None, chunk_size: int, target: Target | None) -> WholeRecurrence:
        return WholeRecurrence(lengths, chunk_size, target)

    def begin(
        self, shared: RecurrentShared, layers: Sequence[RecurrentCache], launch: Launch
    ) -> tuple[LaunchedRecurrence, RecurrentShared, tuple[RecurrentCache, ...]]:
        plan, cursor = (begin_prompt if launch.commits else begin_launch)(shared.cursor, launch)
        reach = shared.reach
        if reach is not None:
            reach = put(reach, launch.slots, jnp.maximum(reach[launch.slots], launch.start + launch.lengths))
        plan = LaunchedRecurrence(plan, shared.ring_order, launch.target)
        return plan, dataclasses.replace(shared, cursor=cursor, reach=reach), tuple(layers)

    def commit(self, shared: RecurrentShared, done: Commit) -> RecurrentShared:
        order = shared.ring_order
        if order is not None and done.permutation is not None:
            order = permute(order, done.slots, done.start, done.permutation)
        return dataclasses.replace(shared, cursor=commit_entries(shared.cursor, done), ring_order=order)

    def rollback(self, shared: RecurrentShared, slots: Array, count: Array) -> RecurrentShared:
        return dataclasses.replace(shared, cursor=rollback_entries(shared.cursor, slots, count))

    def fork(
        self,
        shared: RecurrentShared,
        layers: Sequence[RecurrentCache],
        source: Array,
        target: Array,
        committed: Array,
    ) -> tuple[RecurrentShared, tuple[RecurrentCache, ...]]:
        copies, cursor = fork_cursor(shared.cursor, source, target, committed)
        places = {"ring_order": shared.ring_order, "reach": shared.reach}
        places = {name: None if held is None else put(held, target, held[source]) for name, held in places.items()}

        def fork_layer(layer: RecurrentCache) -> RecurrentCache:
            ring = None if layer.ring is None else put(layer.ring, target, layer.ring[source])
            return RecurrentCache(buffered.fork_pool(layer.pool, copies), ring)

        return RecurrentShared(cursor, **places), tuple(fork_layer(layer) for layer in layers)

    def reset(
        self, shared: RecurrentShared, layers: Sequence[RecurrentCache], slots: Array
    ) -> tuple[RecurrentShared, tuple[RecurrentCache, ...]]:
        reach = None if shared.reach is None else put(shared.reach, slots, jnp.zeros_like(slots))
        shared = dataclasses.replace(shared, cursor=reset_cursor(shared.cursor, slots), reach=reach)
        return shared, tuple(layers)
