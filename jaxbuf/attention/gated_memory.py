"""The memory of write-gated layers as a kind among others: their latest tokens on local pages whose places all layers
share, and in each layer a list a slot and head of the keys that were admitted before those."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jaxbuf.attention.gated_launch import Incoming, LaunchedGated, LocalPages, WholeGated
from jaxbuf.attention.gated_pages import (
    ForkedLists,
    GatedKV,
    GatedTable,
    Moves,
    admissions,
    count_pages,
    find_moves,
    forget_rejected,
    fork_lists,
    fork_owners,
    fork_table,
    init_gated_table,
    pages_between,
    pages_needed,
    partial_lists,
    place_tokens,
    put_rows,
    reset_table,
    take_pages,
)
from jaxbuf.axes import Array, Bool, Int32
from jaxbuf.memory.claims import Claim
from jaxbuf.memory.kind import Sizes
from jaxbuf.memory.ownership import Ownership, PoolExhausted, clear_flag, flag_missing, is_shared, release_rows
from jaxbuf.memory.sequences import Commit, Launch, put
from jaxbuf.target import Target


class GatedMemory:
    """The kind: see `jaxbuf.memory.kind.MemoryKind`.

    A launch that commits its tokens, a chunk of prompts, moves most of them to the lists at once, when it is done. How
    many that will be depends on gates that are computed in between: it claims pages for all of them, and the next
    launch gives back those that hold no key.
    """

    def init(self, mixers: Sequence[Any], sizes: Sizes) -> GatedTable:
        admission, heads = {mixer.admission for mixer in mixers}, {mixer.kv_heads for mixer in mixers}
        rules = {(each.window, each.threshold) for each in admission}
        if len(rules) > 1 or len(heads) > 1:
            raise ValueError(
                f"gated layers must have one window, threshold and number of kv_heads, got {rules}, {heads}"
            )
        ((window, threshold),), (kv_heads,) = rules, heads
        if threshold is None:
            raise ValueError("threshold must be a number where there is a memory, got None: that is for training")
        pages = sizes.pages
        if pages is None:
            pages = sizes.slots * -(-sizes.capacity // sizes.page_size)
        names = "slots", "max_pending", "page_size", "trees", "capacity"
        given = {name: getattr(sizes, name) for name in names}
        return init_gated_table(
            **given, layers=len(mixers), kv_heads=kv_heads, window=window, threshold=threshold, pages=pages * kv_heads
        )

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
        kept, held, more = _incoming(shared, layers, launch, moves, admitted)
        most = shared.max_pending
        if launch.commits:
            most = most + shared.window + shared.max_pending + launch.time
        needed = pages_needed(held, more, shared.page_size)
        needed = jnp.where(served[None, :, None], needed, 0)
        taken, owners = take_pages(shared.admitted, needed, -(-most // shared.page_size) + 1)
        incoming = Incoming(moves.token, kept, taken)
        reads = LocalPages(shared.table[slots], shared.position[slots], moves.frontier, end, shared.threshold[slots])
        where = slots, start, launch.lengths, start[:, None] + launch.depth
        places, shared = place_tokens(shared, *where, end, commits=launch.commits)
        surplus = shared.surplus
        if launch.commits and admitted is None:
            surplus = put(surplus, slots, served)
        owned = put_rows(shared.owned, slots, count_pages(held, shared.page_size) + needed)
        frontier = put(shared.frontier, slots, end)
        shared = dataclasses.replace(shared, admitted=owners, owned=owned, surplus=surplus, frontier=frontier)
        return LaunchedGated(launch, reads, incoming, places, shared.window), shared, tuple(layers)

    def settle(self, shared: GatedTable, layers: Sequence[GatedKV]) -> GatedTable:
        """Gives back the pages that chunks of prompts claimed and that hold no key."""

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
        pages, shared = fork_owners(shared, layers, source, target)

        def forked(layer: GatedKV, new: ForkedLists) -> GatedKV:
            names = "keys", "values", "gates"
            local = {name: getattr(layer, name) for name in names}
            local = {name: x.at[written].set(x[read], mode="drop") for name, x in local.items()}
            return dataclasses.replace(fork_lists(layer, new, source, target), **local)

        layers = tuple(
            forked(layer, jax.tree.map(lambda x, number=number: x[number], pages))
            for number, layer in enumerate(layers)
        )
        return shared, layers

    def reset(
        self, shared: GatedTable, layers: Sequence[GatedKV], slots: Array
    ) -> tuple[GatedTable, tuple[GatedKV, ...]]:
        owned = jnp.where((slots > 0)[None, :, None], shared.owned[:, slots], 0)
        held = pages_between(jnp.stack([layer.lists[slots] for layer in layers]), jnp.zeros_like(owned), owned)
        owners = jax.vmap(release_rows)(shared.admitted, held)
        layers = tuple(
            dataclasses.replace(layer, counts=put(layer.counts, slots, jnp.zeros_like(layer.counts[slots])))
            for layer in layers
        )
        return dataclasses.replace(reset_table(shared, slots), admitted=clear_flag(owners)), layers


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
