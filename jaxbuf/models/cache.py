"""The memory of a whole model: how many tokens each slot has, what the layers of a kind share, and every layer's own.

Which kinds there are is in one table, `KINDS`. Nothing else here knows them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxbuf.arguments import check_range, check_rows, check_sizes, checked_fork, distinct_slots
from jaxbuf.attention.gated_memory import Admitted, GatedMemory, admissions_so_far
from jaxbuf.attention.paged_memory import PagedMemory
from jaxbuf.axes import Array, Int, Int32
from jaxbuf.memory import sequences
from jaxbuf.memory.claims import Claim, after, grant, grant_all
from jaxbuf.memory.kind import MemoryKind, Sizes
from jaxbuf.memory.sequences import Launch, Sequences
from jaxbuf.models.config import ATTENTION, GATED, RECURRENCE, Mixer, ModelConfig
from jaxbuf.models.tensor_parallel import TENSOR, devices_of, on_devices
from jaxbuf.recurrence import recurrent_memory
from jaxbuf.recurrence.cursor import checked_limits
from jaxbuf.recurrence.recurrent_memory import RecurrentMemory, Work
from jaxbuf.recurrence.traffic import BLOCK_SIZE, ring_entries
from jaxbuf.target import Target, resolve_target

type Plans = Mapping[str, Any]  # a plan for each kind of memory

KINDS: dict[str, MemoryKind] = {
    RECURRENCE: RecurrentMemory(),
    ATTENTION: PagedMemory(),
    GATED: GatedMemory(),
}


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """How the numbers of a layer's memory are kept.

    Attributes:
      dtype: Of keys and values and of a convolution's inputs.
      entry_dtype, state_dtype: Of a recurrence's entries and states, see `jaxbuf.recurrence.buffered.init_pool`.
    """

    dtype: Any
    entry_dtype: Any
    state_dtype: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Memory of a whole model: donate it to the jitted function that changes it.

    Attributes:
      sequences: How many tokens each slot has.
      shared: What all layers of a kind share, by kind: those that the model's layers have.
      layers: The memory of each mixer, layer after layer.
      kinds: That of each mixer (static).
      rows: Slots that run: those from 1 on. The others, behind them, hold prefixes (static).
      target: What launches on it are compiled for (static).
    """

    sequences: Sequences
    shared: dict[str, Any]
    layers: tuple[Any, ...]
    kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    target: Target = dataclasses.field(metadata={"static": True})

    @property
    def trees(self) -> bool:
        """Whether the memory serves trees of tokens."""
        return self.sequences.trees


def init_cache(
    config: ModelConfig,
    *,
    slots: int,
    capacity: int,
    limit: int | Int[Array, "n"] = 16,
    max_pending: int = 8,
    block_size: int = BLOCK_SIZE,
    page_size: int = 16,
    trees: bool = False,
    holds: int = 0,
    states: int | None = None,
    blocks: int | None = None,
    pages: int | None = None,
    dtype: jnp.dtype = jnp.float32,
    entry_dtype: jnp.dtype | None = None,
    state_dtype: object = jnp.float32,
    target: Target | str | None = None,
    kv_limit: int | Int[Array, "n"] | None = None,
) -> Cache:
    """An empty cache. Requests have the physical slots 1 to `slots`; slot 0 is null.

    Args:
      config: The model's.
      slots: Requests at once.
      capacity: Tokens that a softmax layer holds for each, rounded up to whole pages (with trees, after adding the
        max_pending - 1 places that a tree may leave open).
      limit: As in `buffered.init`. A limit above capacity + max_pending counts as that number: a slot never has more
        entries than tokens, so that its ring need not be longer.
      max_pending, block_size: Of the buffered recurrence, see `buffered.init`.
      page_size: Tokens of one page of the softmax layers. A page of admitted keys (see `Attention.admission`) holds
        one head's, so that those layers have as many pages as `pages` times the heads of keys and values, times the
        admission's `keep`.
      trees: Whether `extend` takes `parents`: keeps the index lists that trees need in the softmax layers and the
        convolutions.
      holds: Further slots that never run, behind the others: `fork` to one of them holds a prefix, `fork` from it
        adopts it, `reset` drops it.
      states, blocks, pages: How many checkpoint rows, blocks and pages the slots take from when they need one, and
        share after a `fork`, see `buffered.init`. With one of them given, the others' defaults are what all slots could
        use at once. None for all: every slot has its own for good, nothing can run out, and a fork copies.
      dtype: Of keys and values and of the convolution's inputs: the compute dtype.
      entry_dtype: Of the recurrence's buffered entries; None: dtype.
      state_dtype: Of the recurrent states: a dtype, "split" or "split8", see `init_pool`.
      target: What programs on it are compiled for, which decides their kernels: a Target or a chip's name ("H100").
        None: JAX's default device, or the devices of the mesh in use.
      kv_limit: Entries up to which a slot that never folded reads no checkpoint, see `buffered.init`. None: as many as
        limit says.

    Raises:
      ValueError: A size below 1 or not a whole number, or as in `buffered.init`.
    """
    check_sizes(slots=slots, capacity=capacity, max_pending=max_pending, page_size=page_size)
    check_sizes(holds=holds, least=0)
    given = {"states": states, "blocks": blocks, "pages": pages}
    check_sizes(**{name: count for name, count in given.items() if count is not None})
    limits = {"limit": limit, "kv_limit": kv_limit}
    for name, wanted in limits.items():
        if wanted is not None:
            found = checked_limits(wanted, slots, longest=capacity + max_pending, name=name)
            held = np.full(holds if found.ndim else 0, found.max(), np.int32)
            limits[name] = np.concatenate([found, held]) if held.size else found
    every = slots + holds
    sizes = Sizes(
        slots=every,
        capacity=capacity,
        max_pending=max_pending,
        block_size=block_size,
        page_size=page_size,
        trees=trees,
        **limits,
        **given,
    )
    dtypes = Dtypes(dtype, dtype if entry_dtype is None else entry_dtype, state_dtype)
    mixers = tuple(config.mixers)
    kinds = tuple(mixer.kind for mixer in mixers)
    of_kind = {kind: [mixer for mixer in mixers if mixer.kind == kind] for kind in kinds}
    shared = {kind: KINDS[kind].init(found, sizes) for kind, found in of_kind.items()}
    return Cache(
        sequences=sequences.init_sequences(slots=every, max_pending=max_pending, trees=trees),
        shared=shared,
        layers=init_memories(config.mesh, mixers, shared, dtypes),
        kinds=kinds,
        rows=slots,
        target=resolve_target(target),
    )


def init_memories(
    mesh: Mesh | None, mixers: Sequence[Mixer], shared: Mapping[str, Any], dtypes: Dtypes
) -> tuple[Any, ...]:
    """An empty memory for each mixer, spread over a mesh; `shared` is what the layers of each kind share."""
    each = [mixer if mesh is None else mixer.spread(devices_of(mesh)) for mixer in mixers]

    def make():
        numbers: dict[str, Iterator[int]] = {mixer.kind: itertools.count() for mixer in each}
        return tuple(mixer.memory(shared[mixer.kind], dtypes, next(numbers[mixer.kind])) for mixer in each)

    if mesh is None:
        return make()
    shapes = jax.eval_shape(make)
    partitions = memory_partitions([mixer.kind for mixer in mixers], shapes)
    return on_devices(mesh, make, (), (), jax.tree.unflatten(jax.tree.structure(shapes), partitions))


def memory_partitions(kinds: Sequence[str], memories: Sequence[Any]) -> list[PartitionSpec]:
    """How each leaf of the memories of these kinds lies on a mesh; a memory that is None has no leaves."""
    axes = [KINDS[kind].head_axes(memory) for kind, memory in zip(kinds, memories, strict=True) if memory is not None]
    return [PartitionSpec(*[None] * axis, TENSOR) for axis in jax.tree.leaves(axes)]


def forked_sizes(
    *,
    slots: int,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    limit: int = 16,
    max_pending: int = 8,
    block_size: int = BLOCK_SIZE,
    page_size: int = 16,
    trees: bool = False,
    again: bool = False,
) -> dict[str, int]:
    """The `states`, `blocks` and `pages` with which `init_cache` makes a memory that can't run out, for prompts that
    are read once, with keep=0, and forked to all slots.

    Args:
      slots: Of all prompts together.
      prompts: How many are read, each into one of the slots.
      prompt_tokens, new_tokens: The most that a prompt has, and the most that each slot adds to it.
      limit, max_pending, block_size, page_size, trees: As `init_cache` is given them.
      again: Whether slots are forked later on, too, all of them at once at worst (beams).

    Raises:
      ValueError: A size below 1 (new_tokens below 0) or not a whole number.
    """
    check_sizes(slots=slots, prompts=prompts, prompt_tokens=prompt_tokens, page_size=page_size)
    check_sizes(new_tokens=new_tokens, least=0)
    longest = prompt_tokens + new_tokens + max_pending
    limits = checked_limits(limit, slots, longest=longest)
    width = ring_entries(int(limits.max()), max_pending, block_size) // block_size
    # Prefill leaves one checkpoint a prompt. A slot's first fold needs a row of its own, and where slots fold together
    # what they share is given back only after it: then each of their groups, of two slots or more, has one row more.
    groups = slots // 2 if again else min(prompts, slots // 2)
    # Prefill leaves no entry, so a ring fills with its own blocks. A fork copies the two that are partly alive, one at
    # each end, before it gives back what the target had.
    blocks = slots * (width + (min(width, 2) if again else 0))
    # Full pages of a prompt are shared. The page that it ends in, and those after it, are each slot's own: most of them
    # where `rest` or more of its tokens are on that last page, the most pages in all if it is as long as can be, too.
    added = new_tokens + (max_pending - 1 if trees else 0)
    own, whole = -(-(page_size - 1 + added) // page_size), -(-(prompt_tokens + added) // page_size)
    rest = page_size * (own - 1) - added + 1
    shared = max(prompt_tokens - rest, 0) // page_size
    # A later fork copies the last page of each slot before it gives back what the target had.
    pages = min(prompts * shared + slots * own, slots * whole) + (slots if again else 0)
    return {"states": slots + groups, "blocks": blocks, "pages": pages}


def make_launch(
    cache: Cache,
    slots: Int[Array, "rows"] | None,
    lengths: Int[Array, "rows"] | None,
    time: int,
    *,
    keep: int | Array | None = None,
    parents: Int[Array, "rows time"] | None = None,
    empty: bool = False,
) -> Launch:
    """A checked launch; slots None: all that run, in order; lengths None: `time` of each. Errors as in
    `jaxbuf.models.decoder.prefill` and `extend`."""
    if parents is not None and not cache.trees:
        raise ValueError("parents need a cache made with trees=True, got one without")
    slots, held = all_slots(cache) if slots is None else slots, cache.sequences
    if lengths is None:
        lengths = jnp.full(jnp.shape(slots)[:1], time, jnp.int32)
    given = {"keep": keep, "parents": parents, "target": cache.target, "empty": empty}
    return sequences.make_launch(held.committed, held.max_pending, slots, lengths, time, **given)


def begin(cache: Cache, launch: Launch, *, drafts: bool = False) -> tuple[Plans, Cache]:
    """Decides a launch in every memory: the plans that mixers are called with, and the cache with all integers as they
    are after it.

    A row that lacks something in a pool rests, alone and untouched: nothing of it becomes pending, or committed.

    Args:
      cache: Before the launch.
      launch: From `make_launch`.
      drafts: Whether a row that has no room for all its tokens reads the first alone, the others being drafts.

    Raises:
      PoolExhausted: A row lacks something, where that is known.
    """
    launch, shared = _granted(cache, launch, drafts)
    plans, found = {}, {}
    for kind, held in shared.items():
        plans[kind], shared[kind], found[kind] = KINDS[kind].begin(held, _layers_of(cache, kind), launch)
    held = sequences.begin(cache.sequences, launch)
    return plans, dataclasses.replace(cache, sequences=held, shared=shared, layers=_in_order(cache, found))


def whole_plans(
    time: int, lengths: Int[Array, "batch"] | None = None, chunk_size: int = 64, target: Target | None = None
) -> Plans:
    """Plans for sequences of `time` tokens that start from nothing, without a cache; their memories are None."""
    return {kind: memory.whole(time, lengths, chunk_size, target) for kind, memory in KINDS.items()}


def commit(
    cache: Cache,
    accepted: Int[Array, "rows"],
    *,
    slots: Int[Array, "rows"] | None = None,
    path: Int[Array, "rows n"] | None = None,
) -> Cache:
    """Makes the first `accepted` pending tokens of each slot real; only integers move.

    Args:
      cache: After `extend`.
      accepted: How many, in [0, pending].
      slots: Physical slots, none but 0 twice (under jit the first row of a slot counts); None: all that run, in order.
      path: For a tree: the accepted nodes from the root to a leaf, of which the first `accepted` count.

    Raises:
      ValueError: `accepted`, `path` or a slot is out of range, or a slot is repeated, where that is known; or a path,
        and the cache has no trees.
    """
    held = cache.sequences
    if path is not None and not cache.trees:
        raise ValueError("path needs a cache made with trees=True, got one without")
    slots = all_slots(cache) if slots is None else slots
    done = sequences.make_commit(held.pending, held.committed, held.max_pending, accepted, slots, path)
    shared = {kind: KINDS[kind].commit(own, done) for kind, own in cache.shared.items()}
    return dataclasses.replace(cache, sequences=sequences.commit(held, done), shared=shared)


def rollback(cache: Cache, count: Int[Array, "rows"], *, slots: Int[Array, "rows"] | None = None) -> Cache:
    """Makes the last `count` committed tokens of each slot pending again, in place of what was; only integers move.

    Args:
      cache: Made without trees.
      count: At most max_pending, and at most what every memory can take back: a recurrence its entries that are not
        folded, a convolution's ring the inputs of the latest max_pending tokens, rejected ones included. Tokens on
        pages or in blocks that a fork shares stay committed, since nothing is written there again.
      slots: As in `commit`.

    Raises:
      ValueError: count or slots do not fit or are out of range, where that is known (under jit count is clamped); or a
        cache with trees.
    """
    if cache.trees:  # where committed tokens lie is not remembered
        raise ValueError("rollback needs a cache made without trees, got one with trees=True")
    slots = distinct_slots(all_slots(cache) if slots is None else slots, cache.sequences.committed.shape[0])
    fewest = _fewest_tokens(cache, slots, alone=True)
    count, held = sequences.rollback(cache.sequences, count, slots, fewest)
    shared = {kind: KINDS[kind].rollback(own, slots, count) for kind, own in cache.shared.items()}
    return dataclasses.replace(cache, sequences=held, shared=shared)


def fork(
    cache: Cache, source: Int[Array, "..."], target: Int[Array, "..."], *, tokens: Int[Array, "rows"] | None = None
) -> Cache:
    """Makes each target slot hold what its source committed (beams, several samples of one prompt, held prefixes).

    Checkpoints, full blocks and full pages are shared, if the cache was made for it (see `init_cache`); what both slots
    will write to is copied: partly filled blocks and pages, and the convolutions' rings. It is done for all rows or,
    where some pool does not suffice, for none.

    Args:
      cache: Without pending tokens in the targets that are still wanted: they are dropped.
      source, target: One a row, or one number, as in `buffered.fork`.
      tokens: How many of the source's tokens each target gets, the first ones; None: all. A recurrent layer can be cut
        where it has a checkpoint at or before that token and the entries up to it (see `keep` of `prefill`). Its
        convolution's ring must hold the inputs before that token: it keeps those of the latest max_pending tokens,
        rejected ones included. Without recurrent layers any number does. Not for a cache with trees.

    Raises:
      ValueError: The arguments do not fit, or (where that is known) a slot is out of range, a target is repeated, or a
        source can't be cut at that token; under jit such a row is left out.
      PoolExhausted: Blocks or pages ran out, where that is known; inside jit nothing is changed but a flag that
        `raise_exhausted` finds.
    """
    source, target = jnp.atleast_1d(jnp.asarray(source)), jnp.atleast_1d(jnp.asarray(target))
    if source.shape == (1,):
        source = jnp.broadcast_to(source, target.shape)
    source, target = checked_fork(source, target, cache.sequences.committed.shape[0])
    committed = cache.sequences.committed[source]
    if tokens is not None:
        target, committed = _cut(cache, source, target, committed, tokens)
    claims = {
        kind: KINDS[kind].claim_fork(held, _layers_of(cache, kind), source, target, committed)
        for kind, held in cache.shared.items()
    }
    shared, found = _noted(cache, claims), {}
    if any(claims.values()):
        target = jnp.where(grant_all([claim for found in claims.values() for claim in found]), target, 0)
    for kind, held in shared.items():
        shared[kind], found[kind] = KINDS[kind].fork(held, _layers_of(cache, kind), source, target, committed)
    held = sequences.fork(cache.sequences, committed, target)
    return dataclasses.replace(cache, sequences=held, shared=shared, layers=_in_order(cache, found))


def reset(cache: Cache, slots: Int[Array, "rows"]) -> Cache:
    """Empties slots for their next owner; only integers move. Shared rows, blocks and pages are given
    back, and the note of what was missing is cleared. A slot that is there several times is emptied once.

    Raises:
      ValueError: A slot is out of range, where that is known.
    """
    slots = sequences.emptied_slots(slots, cache.sequences.committed.shape[0])
    shared, found = {}, {}
    for kind, held in cache.shared.items():
        shared[kind], found[kind] = KINDS[kind].reset(held, _layers_of(cache, kind), slots)
    held = sequences.reset(cache.sequences, slots)
    return dataclasses.replace(cache, sequences=held, shared=shared, layers=_in_order(cache, found))


def raise_exhausted(cache: Cache) -> None:
    """Raises if checkpoint rows, blocks or pages were missing since the last reset; see `buffered.raise_exhausted`.

    Raises:
      PoolExhausted: Says which, how many there are, how many were missing, and what to raise.
    """
    for kind, held in cache.shared.items():
        KINDS[kind].raise_missing(held)


def with_limits(cache: Cache, limits: Int32[Array, "rows"] | Int32[Array, ""] | int) -> Cache:
    """The cache whose slots fold from other numbers of entries on, at most what it was made for.

    Args:
      cache: Of any model; without recurrent layers nothing changes.
      limits: Of the slots that run in order, or one number for all.
    """
    if RECURRENCE not in cache.shared:
        return cache
    changed = recurrent_memory.with_limits(cache.shared[RECURRENCE], all_slots(cache), limits)
    return dataclasses.replace(cache, shared=cache.shared | {RECURRENCE: changed})


def with_kv_limits(
    cache: Cache, slots: Int32[Array, "rows"], limits: Int32[Array, "rows"] | None
) -> tuple[Int32[Array, "rows"] | int, Cache]:
    """Slots that read prompts stay KV-only up to other numbers of entries, at most what the cache was made for.

    Args:
      cache: Without recurrent layers, or made without kv_limit, nothing changes.
      slots: Each of them empty, or in the midst of its prompt.
      limits: None: the slots are not KV-only beyond their limit.

    Returns:
      What `keep` has to be in `prefill`, and the cache.
    """
    if RECURRENCE not in cache.shared or cache.shared[RECURRENCE].cursor.kv_limit is None:
        return 0, cache
    given = jnp.zeros_like(slots) if limits is None else jnp.asarray(limits, jnp.int32)
    changed = recurrent_memory.with_limits(cache.shared[RECURRENCE], slots, given, "kv_limit")
    shared = cache.shared | {RECURRENCE: changed}
    return jnp.clip(given, 0, changed.cursor.room), dataclasses.replace(cache, shared=shared)


def fold_limits(cache: Cache) -> Int32[Array, "rows"]:
    """The entries from which each slot that runs folds; ones for a model without recurrent layers."""
    slots = all_slots(cache)
    if RECURRENCE not in cache.shared:
        return jnp.ones_like(slots)
    return cache.shared[RECURRENCE].cursor.limit[slots]


def recurrent_work(before: Cache, after: Cache) -> Work | None:
    """What the launch between the two did to the recurrent states; None for a model without recurrent layers."""
    if RECURRENCE not in before.shared:
        return None
    return recurrent_memory.work(before.shared[RECURRENCE], after.shared[RECURRENCE], all_slots(before))


def admitted_keys(cache: Cache) -> Admitted | None:
    """What the gated layers keep for each slot that runs; None for a model without such layers."""
    if GATED not in cache.shared:
        return None
    return _admitted_keys(cache.shared[GATED], _layers_of(cache, GATED), all_slots(cache))


def all_slots(cache: Cache) -> Int32[Array, "rows"]:
    """Every physical slot that runs, in order."""
    return sequences.slots_in_order(cache.rows)


_admitted_keys = jax.jit(admissions_so_far)


def _cut(cache: Cache, source: Array, target: Array, committed: Array, tokens: Array) -> tuple[Array, Array]:
    """The targets of a fork at `tokens`, 0 where the source can't be cut there, and what each then has committed."""
    if cache.trees:
        raise ValueError("tokens need a cache made without trees, got one with trees=True")
    given = jnp.asarray(tokens)
    check_rows("tokens", given, source.shape[0])
    least = _fewest_tokens(cache, source, alone=False)
    check_range("tokens", jnp.where(target > 0, given, committed), least, committed)
    given = given.astype(jnp.int32)
    possible = (given >= least) & (given <= committed)
    return jnp.where(possible, target, 0), jnp.where(possible, given, committed)


def _fewest_tokens(cache: Cache, slots: Array, *, alone: bool) -> Array:
    """int32 [rows]: how many tokens slots can be cut back to in every memory; see `MemoryKind.fewest_tokens`."""
    fewest = jnp.zeros_like(slots)
    for kind, held in cache.shared.items():
        fewest = jnp.maximum(fewest, KINDS[kind].fewest_tokens(held, slots, alone=alone))
    return fewest


def _claims(cache: Cache, launch: Launch) -> dict[str, tuple[Claim, ...]]:
    return {kind: KINDS[kind].claim(held, _layers_of(cache, kind), launch) for kind, held in cache.shared.items()}


def _layers_of(cache: Cache, kind: str) -> tuple[Any, ...]:
    """The memories of a kind; none where the cache was left without them, for its integers alone."""
    return tuple(layer for layer, of in zip(cache.layers, cache.kinds, strict=False) if of == kind)


def _in_order(cache: Cache, found: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
    """The memories of all kinds, from those of each."""
    left = {kind: iter(layers) for kind, layers in found.items()}
    return tuple(next(left[kind]) for kind in cache.kinds[: len(cache.layers)])


def _noted(cache: Cache, claims: Mapping[str, tuple[Claim, ...]]) -> dict[str, Any]:
    """What is shared, with a note of what is missing; raises where that is known."""
    missing = {kind: [claim.missing for claim in found] for kind, found in claims.items()}
    return {kind: KINDS[kind].note_missing(held, missing[kind]) for kind, held in cache.shared.items()}


def _granted(cache: Cache, launch: Launch, drafts: bool) -> tuple[Launch, dict[str, Any]]:
    """The launch in which rows that lack something rest, and what is shared with a note of what is missing."""
    by_kind = _claims(cache, launch)
    claims = [claim for found in by_kind.values() for claim in found]
    if not claims:
        return launch, dict(cache.shared)
    granted = grant(claims)
    lengths = jnp.where(granted, launch.lengths, 0)
    if drafts and launch.time > 1:
        one = dataclasses.replace(launch, lengths=jnp.where(granted, 0, jnp.minimum(launch.lengths, 1)))
        first = [claim for found in _claims(cache, one).values() for claim in found]
        left = after(claims, granted)
        first = [claim._replace(left=there) for claim, there in zip(first, left, strict=True)]
        lengths = jnp.where(grant(first), lengths + one.lengths, lengths)
    return dataclasses.replace(launch, lengths=lengths), _noted(cache, by_kind)
