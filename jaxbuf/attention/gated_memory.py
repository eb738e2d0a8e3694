"""The memory of write-gated layers as a kind among others: their latest tokens on local pages whose places all layers
share, and in each layer a list a slot and head of the keys that were admitted before those."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jaxbuf.attention.gated_budget import forget_dropped, fork_within, raised_thresholds
from jaxbuf.attention.gated_launch import Incoming, LaunchedGated, LocalPages, WholeGated, common_rule
from jaxbuf.attention.gated_lists import (
    ForkedLists,
    admissions,
    count_pages,
    fork_lists,
    fork_owners,
    pages_between,
    pages_needed,
    partial_lists,
    take_pages,
)
from jaxbuf.attention.gated_pages import (
    GatedKV,
    GatedTable,
    Moves,
    find_moves,
    forget_rejected,
    fork_table,
    init_gated_table,
    place_tokens,
    put_rows,
    reset_table,
)
from jaxbuf.axes import Array, Bool, Float32, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.kind import Sizes
from jaxbuf.memory.ownership import Ownership, PoolExhausted, clear_flag, flag_missing, is_shared, release_rows
from jaxbuf.memory.sequences import Commit, Launch, put
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admitted:
    """What the lists of slots hold.

    Attributes:
      passed: Tokens that have left the local pages: their keys were admitted or are gone.
      kept: Keys on each list.
      dropped: Keys that each list had to let go, see `jaxbuf.attention.gated_budget`.
      threshold: Which gates have to reach to be admitted.
    """

    passed: Int32[Array, "rows"]
    kept: Int32[Array, "rows layers kv_heads"]
    dropped: Int32[Array, "rows layers kv_heads"]
    threshold: Float32[Array, "rows"]


class GatedMemory:
    """The kind: see `jaxbuf.memory.kind.MemoryKind`.

    A launch that commits its tokens, a chunk of prompts, moves most of them to the lists at once, when it is done. How
    many that will be depends on gates that are computed in between: it claims pages for all of them, and the next
    launch gives back those that hold no key.
    """

    def init(self, mixers: Sequence[Any], sizes: Sizes) -> GatedTable:
        heads = {mixer.kv_heads for mixer in mixers}
        if len(heads) > 1:
            raise ValueError(f"gated layers must have one number of kv_heads, got {sorted(heads)}")
        (kv_heads,), rule = heads, common_rule(mixers)
        if rule.threshold is None:
            raise ValueError("threshold must be a number where there is a memory, got None: that is for training")
        each = math.ceil(rule.keep * -(-sizes.capacity // sizes.page_size) * kv_heads)
        pages = sizes.slots * each
        if sizes.pages is not None and rule.when_full == "rest":  # else slots share none
            pages = math.ceil(rule.keep * sizes.pages * kv_heads)
        names = "slots", "max_pending", "page_size", "trees", "capacity"
        given = {name: getattr(sizes, name) for name in names} | {"window": rule.window, "when_full": rule.when_full}
        return init_gated_table(**given, layers=len(mixers), kv_heads=kv_heads, threshold=rule.threshold, pages=pages)

    def whole(self, time: int, lengths: Array | None, chunk_size: int, target: Target | None) -> WholeGated:
        return WholeGated(time, lengths, target)

    def head_axes(self, layer: GatedKV) -> Any:
        raise ValueError("a mesh must have no axis that layers with an admission share: their lists lie on one device")

    def claim(
        self,
        shared: GatedTable,
        layers: Sequence[GatedKV],
        launch: Launch,
        admitted: Sequence[Bool[Array, "rows time kv_heads"]] | None = None,
    ) -> tuple[Claim, ...]:
        """As in `MemoryKind`, a claim for each layer.

        Args:
          shared: What all layers share.
          layers: Each layer's memory.
          launch: With all rows that want to be served.
          admitted: For each layer which of the launch's tokens its heads admit, where that is known; None: all.
        """
        if shared.budget is not None:
            return ()
        served = launch.lengths > 0
        moves = find_moves(shared, launch.slots, launch.start, served)
        _, held, more = _incoming(shared, layers, launch, moves, admitted)
        needs = jnp.sum(pages_needed(held, more, shared.page_size), axis=2)
        # What no list has room for is more than the pool has.
        fits = jnp.all(held + more <= layers[0].lists.shape[2] * shared.page_size, axis=2)
        needs = jnp.where(served[None], jnp.where(fits, needs, shared.admitted.owners.shape[1]), 0)
        return tuple(Claim(needs[number], shared.admitted.left[number]) for number in range(len(layers)))

    def claim_fork(
        self, shared: GatedTable, layers: Sequence[GatedKV], source: Array, target: Array, committed: Array
    ) -> tuple[Claim, ...]:
        if shared.budget is not None:
            return ()
        return tuple(
            Claim(jnp.sum(partial_lists(layer, source, target), axis=1, dtype=jnp.int32), shared.admitted.left[number])
            for number, layer in enumerate(layers)
        )

    def fewest_tokens(self, shared: GatedTable, slots: Array, *, alone: bool) -> Array:
        frontier = shared.frontier[slots]
        # A query sees its window, which must not reach behind the frontier.
        fewest = jnp.where(frontier > 0, frontier + shared.window - 1, 0)
        if alone:
            table = shared.table[slots]
            theirs = jnp.repeat(is_shared(shared.owners, table), shared.page_size, axis=1)
            fewest = jnp.maximum(fewest, jnp.max(jnp.where(theirs, shared.position[slots] + 1, 0), axis=1))
        return fewest

    def note_missing(self, shared: GatedTable, missing: Sequence[Array]) -> GatedTable:
        if shared.budget is not None:
            return shared
        lacking = jnp.stack(list(missing))
        cleared, noted = clear_flag(shared.admitted), jax.vmap(flag_missing)
        self.raise_missing(dataclasses.replace(shared, admitted=noted(cleared, lacking)))
        return dataclasses.replace(shared, admitted=noted(shared.admitted, lacking))

    def raise_missing(self, shared: GatedTable) -> None:
        owners = shared.admitted
        if isinstance(owners.lacking, jax.core.Tracer):
            return
        number = int(jnp.argmax(owners.lacking))
        if lacking := int(owners.lacking[number]):
            pages = owners.owners.shape[1] - 1
            raise PoolExhausted(
                f"the pool of pages ran out: {lacking} more needed for admitted keys, each of one head, in gated layer "
                f"{number}, which has {pages}; nothing was written there. Make it with more pages, keep fewer keys (a "
                "higher threshold), or serve fewer requests at once (reset gives theirs back)"
            )

    def begin(
        self,
        shared: GatedTable,
        layers: Sequence[GatedKV],
        launch: Launch,
        admitted: Sequence[Bool[Array, "rows time kv_heads"]] | None = None,
    ) -> tuple[LaunchedGated, GatedTable, tuple[GatedKV, ...]]:
        """As in `MemoryKind`; `admitted` as in `claim`.

        Only integers change here. A layer moves its own keys when it attends, by what the plan says.
        """
        shared = self.settle(shared, layers)
        slots, start, served = launch.slots, launch.start, launch.lengths > 0
        moves = find_moves(shared, slots, start, served)
        end = _end(shared, launch, moves.frontier)
        if shared.budget is None:
            kept, taken, shared = _with_pages(shared, layers, launch, moves, admitted)
        else:
            kept, taken = jnp.stack([admissions(layer, moves, shared.threshold[slots]) for layer in layers]), None
        incoming = Incoming(moves.token, kept, taken)
        reads = LocalPages(shared.table[slots], shared.position[slots], moves.frontier, end, shared.threshold[slots])
        where = slots, start, launch.lengths, start[:, None] + launch.depth
        places, shared = place_tokens(shared, *where, end, commits=launch.commits)
        shared = dataclasses.replace(shared, frontier=put(shared.frontier, slots, end))
        return LaunchedGated(launch, reads, incoming, places, shared.window), shared, tuple(layers)

    def settle(self, shared: GatedTable, layers: Sequence[GatedKV]) -> GatedTable:
        """What is shared once the layers are done with the launch before: pages that a chunk of a prompt claimed and
        that hold no key are given back, and thresholds are raised where keys had to leave."""
        if shared.when_full == "raise":
            return dataclasses.replace(shared, threshold=raised_thresholds(layers, shared.threshold))
        if shared.when_full == "evict":
            return shared

        def returned(owners: Ownership, owned: Array) -> tuple[Ownership, Array]:
            used = count_pages(jnp.stack([layer.counts for layer in layers]), shared.page_size)
            spare = pages_between(jnp.stack([layer.lists for layer in layers]), used, owned)
            return jax.vmap(release_rows)(owners, spare), used

        owners, owned = jax.lax.cond(
            jnp.any(shared.surplus), returned, lambda *same: same, shared.admitted, shared.owned
        )
        return dataclasses.replace(shared, admitted=owners, owned=owned, surplus=jnp.zeros_like(shared.surplus))

    def commit(self, shared: GatedTable, done: Commit) -> GatedTable:
        return forget_rejected(shared, done.slots, done.accepted, done.permutation)

    def rollback(self, shared: GatedTable, slots: Array, count: Array) -> GatedTable:
        return shared

    def fork(
        self, shared: GatedTable, layers: Sequence[GatedKV], source: Array, target: Array, committed: Array
    ) -> tuple[GatedTable, tuple[GatedKV, ...]]:
        shared = self.settle(shared, layers)
        (read, written), shared = fork_table(shared, source, target, committed)

        def with_local(layer: GatedKV) -> GatedKV:
            local = {name: getattr(layer, name) for name in ("keys", "values", "gates")}
            local = {name: x.at[written].set(x[read], mode="drop") for name, x in local.items()}
            return dataclasses.replace(layer, **local)

        layers = tuple(with_local(layer) for layer in layers)
        if shared.budget is not None:
            return shared, tuple(fork_within(layer, source, target) for layer in layers)
        pages, shared = fork_owners(shared, layers, source, target)
        each: list[ForkedLists] = [
            jax.tree.map(lambda x, number=number: x[number], pages) for number in range(len(layers))
        ]
        return shared, tuple(fork_lists(layer, new, source, target) for layer, new in zip(layers, each, strict=True))

    def reset(
        self, shared: GatedTable, layers: Sequence[GatedKV], slots: Array
    ) -> tuple[GatedTable, tuple[GatedKV, ...]]:
        owned = jnp.where((slots > 0)[None, :, None], shared.owned[:, slots], 0)
        held = pages_between(jnp.stack([layer.lists[slots] for layer in layers]), jnp.zeros_like(owned), owned)
        owners = jax.vmap(release_rows)(shared.admitted, held)
        layers = tuple(
            dataclasses.replace(
                forget_dropped(layer, slots), counts=put(layer.counts, slots, jnp.zeros_like(layer.counts[slots]))
            )
            for layer in layers
        )
        return dataclasses.replace(reset_table(shared, slots), admitted=clear_flag(owners)), layers


def admissions_so_far(shared: GatedTable, layers: Sequence[GatedKV], slots: Int32[Array, "rows"]) -> Admitted:
    """What slots keep, as it was when their last launch was done."""
    none = jnp.zeros((slots.shape[0], layers[0].counts.shape[1]), jnp.int32)
    return Admitted(
        passed=shared.frontier[slots],
        kept=jnp.stack([layer.counts[slots] for layer in layers], axis=1),
        dropped=jnp.stack([none if layer.budget is None else layer.budget.dropped[slots] for layer in layers], axis=1),
        threshold=GatedMemory().settle(shared, layers).threshold[slots],
    )


def _with_pages(
    shared: GatedTable,
    layers: Sequence[GatedKV],
    launch: Launch,
    moves: Moves,
    admitted: Sequence[Bool[Array, "rows time kv_heads"]] | None,
) -> tuple[Bool[Array, "layers rows max_pending kv_heads"], Int32[Array, "layers rows kv_heads n"], GatedTable]:
    """Which of the tokens that leave are admitted, and new pages for the lists, from those that slots share."""
    slots, served = launch.slots, launch.lengths > 0
    kept, held, more = _incoming(shared, layers, launch, moves, admitted)
    most = shared.max_pending
    if launch.commits:
        most = most + shared.window + shared.max_pending + launch.time
    needed = pages_needed(held, more, shared.page_size)
    needed = jnp.where(served[None, :, None], needed, 0)
    taken, owners = take_pages(shared.admitted, needed, -(-most // shared.page_size) + 1)
    surplus = shared.surplus
    if launch.commits and admitted is None:
        surplus = put(surplus, slots, served)
    owned = put_rows(shared.owned, slots, count_pages(held, shared.page_size) + needed)
    return kept, taken, dataclasses.replace(shared, admitted=owners, owned=owned, surplus=surplus)


def _incoming(
    shared: GatedTable,
    layers: Sequence[GatedKV],
    launch: Launch,
    moves: Moves,
    admitted: Sequence[Bool[Array, "rows time kv_heads"]] | None,
) -> tuple[
    Bool[Array, "layers rows max_pending kv_heads"],
    Int32[Array, "layers rows kv_heads"],
    Int32[Array, "layers rows kv_heads"],
]:
    """Which of the tokens that leave when a launch begins are admitted; how many keys the lists hold, and how many they
    may take in until it is done."""
    slots, threshold = launch.slots, shared.threshold[launch.slots]
    kept = jnp.stack([admissions(layer, moves, threshold) for layer in layers])
    held = jnp.stack([layer.counts[slots] for layer in layers])
    more = jnp.sum(kept, axis=2, dtype=jnp.int32)
    if not launch.commits:
        return kept, held, more
    end = _end(shared, launch, moves.frontier)
    if admitted is None:
        return kept, held, more + (end - moves.frontier)[None, :, None]
    position = shared.position[slots]
    older = (position >= moves.frontier[:, None]) & (position < jnp.minimum(end, launch.start)[:, None])
    own = launch.start[:, None] + jnp.arange(launch.time, dtype=jnp.int32)[None] < end[:, None]
    table = shared.table[slots]
    for number, (layer, known) in enumerate(zip(layers, admitted, strict=True)):
        reached = layer.gates[table].reshape(*position.shape, -1) >= threshold[:, None, None]
        for leaves, which in ((older, reached), (own, known)):
            more = more.at[number].add(jnp.sum(leaves[..., None] & which, axis=1, dtype=jnp.int32))
    return kept, held, more


def _end(shared: GatedTable, launch: Launch, frontier: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """The frontier after a launch whose tokens leave `frontier` when it begins."""
    if not launch.commits:
        return frontier
    behind = launch.start + launch.lengths - shared.max_pending - shared.window + 1
    return jnp.where(launch.lengths > 0, jnp.maximum(frontier, behind), frontier)
