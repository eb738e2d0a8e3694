"""Write-gated attention: a query sees the keys of a local window, and of those before it the ones that a gate admits.

`attend_sequence` has no memory, for training and whole sequences. `GatedState` is the memory of a single layer: its
latest tokens, and on pages of one head each the keys that were admitted before those, so that every head keeps as many
as it needs. A request: `init`; `prefill` of its prompt, in as many chunks as one likes; then, step by step, `extend`
with the newest token and its drafts, and `commit` of how many were right. Rejecting drafts moves an integer.

The three forms agree: with one threshold, `prefill` of any split and `extend` and `commit` of any number of tokens give
what `attend_sequence` gives of the whole text.

A model's cache holds the same memory in many layers: see `jaxbuf.attention.gated_memory`.

Source: Write-Gated KV (2025), sections 3.1 to 3.4.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes, checked_fork, distinct_slots
from jaxbuf.attention.gated_memory import GatedMemory
from jaxbuf.attention.gated_pages import GatedKV, GatedTable, WhenFull, init_gated_kv, init_gated_table
from jaxbuf.attention.gated_sequence import FLOOR, attend_sequence, check_gated
from jaxbuf.axes import Array, Bool, Float, Float32, Int, Int32
from jaxbuf.memory import sequences
from jaxbuf.memory.claims import Claim, after, grant, grant_all
from jaxbuf.memory.ownership import PoolExhausted
from jaxbuf.memory.sequences import Launch, Sequences, put
from jaxbuf.target import Target, resolve_target

__all__ = [
    "FLOOR",
    "GatedState",
    "attend_sequence",
    "commit",
    "extend",
    "fork",
    "init",
    "prefill",
    "raise_missing",
    "reset",
    "rollback",
]

_KIND = GatedMemory()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatedState:
    """The memory of one layer. Slot 0 is null: its rows give zeros and write nothing.

    Attributes:
      sequences: The tokens of every slot, committed and pending.
      shared: The local pages, the frontiers, and who owns which page.
      layer: Keys, values and gates, and the lists of what was admitted.
      missing: How many pages the last launch of each slot lacked: if any, it rested, and nothing of it was written.
    """

    sequences: Sequences
    shared: GatedTable
    layer: GatedKV
    missing: Int32[Array, "slots"]


def init(
    *,
    slots: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    max_pending: int,
    pages: int,
    page_size: int = 16,
    dtype: jnp.dtype,
    capacity: int | None = None,
    trees: bool = True,
    when_full: WhenFull = "rest",
) -> GatedState:
    """The memory of empty slots 1 to `slots`.

    Args:
      slots: Beside the null slot.
      kv_heads, head_dim: Of keys and values.
      window: A query sees the latest so many tokens, itself among them, whatever their gates are.
      max_pending: The most tokens that one launch may leave pending.
      pages: For admitted keys, beside the null page: each holds `page_size` of one slot and one head. The latest
        tokens of all slots have pages of their own, which always suffice.
      page_size: Tokens of a page.
      dtype: Of keys and values; gates are float32.
      capacity: The most tokens of a slot; None: as many as one head could keep if it had all pages.
      trees: Whether launches may have parents; without them slots need fewer local pages.
      when_full: What happens where pages do not suffice. "rest": slots share them, and a row that lacks some is not
        served, and says how many it lacked. "evict": each slot has an equal share of the pages for good, for all its
        heads; when they are full the keys of the lowest gates leave, see `jaxbuf.attention.gated_budget`. "raise": the
        same, and the slot's threshold is at least the lowest gate that stayed from then on.

    Raises:
      ValueError: A size is below 1 or not a whole number, there are more tokens than int32 can number, or when_full is
        another.
    """
    given = {"slots": slots, "window": window, "max_pending": max_pending, "pages": pages, "page_size": page_size}
    how = {"trees": trees, "capacity": capacity}
    shared = init_gated_table(**given, **how, layers=1, kv_heads=kv_heads, when_full=when_full)
    layer = init_gated_kv(shared, head_dim=head_dim, dtype=dtype)
    held = sequences.init_sequences(slots=slots, max_pending=max_pending, trees=trees)
    return GatedState(held, shared, layer, jnp.zeros(slots + 1, jnp.int32))


def prefill(
    cache: GatedState,
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    gates: Float32[Array, "rows time kv_heads"],
    *,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"] | None = None,
    threshold: float | Float[Array, "rows"],
) -> tuple[Float[Array, "rows time heads head_dim"], GatedState]:
    """Takes in a prompt, or the next chunk of one: its tokens are committed, pending ones are dropped.

    Keys that are `max_pending` tokens behind the window leave it at once: to the pages of admitted keys, or for good.

    Args:
      cache: The memory.
      q, k, v, gates: As in `attend_sequence`. k and v are rounded to the memory's dtype before they are read.
      slots: The physical slot of each row; the null slot 0 gives zeros and writes nothing; no other slot twice (under
        jit its first row counts).
      lengths: The real tokens of each row, in [0, time]; None: all.
      threshold: A head keeps a key behind the window if its gate reaches it: a number, or one a row. A slot is meant to
        have the same one in all of its launches: it decides about the keys that a launch moves, for good.

    Returns:
      out in q's dtype (zeros past `lengths` and for slot 0), and the memory. A row for which pages do not suffice
      rests: its output is zeros, nothing of it is written, and `missing` says how many pages it lacked.

    Raises:
      ValueError: A shape or dtype does not fit, or slots or lengths are out of range or a slot is repeated, where that
        is known; under jit lengths are clamped.

    Source: Write-Gated KV (2025), section 3.4; without its blocks: a query sees exactly its window.
    """
    return _launched(cache, q, k, v, gates, slots, lengths, threshold, keep=0)


def extend(
    cache: GatedState,
    q: Float[Array, "rows time heads head_dim"],
    k: Float[Array, "rows time kv_heads head_dim"],
    v: Float[Array, "rows time kv_heads head_dim"],
    gates: Float32[Array, "rows time kv_heads"],
    *,
    slots: Int[Array, "rows"],
    lengths: Int[Array, "rows"] | None = None,
    threshold: float | Float[Array, "rows"],
    parents: Int[Array, "rows time"] | None = None,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> tuple[Float[Array, "rows time heads head_dim"], GatedState]:
    """Appends up to max_pending pending tokens; pending ones of before are dropped, and `commit` makes these real.

    Committed tokens that are max_pending tokens behind the window are moved first. Nothing pending is ever moved: a
    draft that is rejected has admitted nothing.

    A NaN or infinity in v of one of the launch's tokens may reach the outputs of the row's other tokens in the same
    launch; it reaches no other row, and, once the token is rejected, nothing in later launches.

    Args:
      cache, q, k, v, gates, slots, lengths, threshold: As in `prefill`, with at most max_pending tokens.
      parents: For a tree: the token before each one, of a lower index; -1 is the committed tail. A token's position is
        its depth, and it sees what was committed and its ancestors. None: each token follows the one before.
      implementation, interpret: As in `jaxbuf.attention.gated_launch.LaunchedGated.attend`.
      target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      As `prefill`.

    Raises:
      ValueError: As in `prefill`; or more than max_pending tokens, parents in a memory without trees, or the
        implementation asked for can't serve the call; it says why.
    """
    if parents is not None and not cache.sequences.trees:
        raise ValueError("parents need a memory made with trees=True, got one without")
    by = implementation, interpret
    target = resolve_target(target, q)
    return _launched(cache, q, k, v, gates, slots, lengths, threshold, by=by, parents=parents, target=target)


def commit(
    cache: GatedState,
    accepted: Int[Array, "rows"],
    *,
    slots: Int[Array, "rows"],
    path: Int[Array, "rows n"] | None = None,
) -> GatedState:
    """Makes the first `accepted` pending tokens of each slot, or of a path, real; the others cease to exist.

    Only integers move.

    Args:
      cache: After `extend`.
      accepted: How many, in [0, pending].
      slots: No slot but 0 twice (under jit its first row counts).
      path: For a tree: the accepted nodes from the root to a leaf, of which the first `accepted` count.

    Raises:
      ValueError: One of them does not fit, or is out of range, where that is known (under jit accepted is clamped); or
        a path, and the memory has no trees.
    """
    held = cache.sequences
    if path is not None and not held.trees:
        raise ValueError("path needs a memory made with trees=True, got one without")
    done = sequences.make_commit(held.pending, held.committed, held.max_pending, accepted, slots, path)
    return dataclasses.replace(cache, sequences=sequences.commit(held, done), shared=_KIND.commit(cache.shared, done))


def rollback(cache: GatedState, count: Int[Array, "rows"], *, slots: Int[Array, "rows"]) -> GatedState:
    """Makes the last `count` committed tokens of each slot pending again, in place of what was; only integers move.

    Args:
      cache: The memory.
      count: At most max_pending in all since the slot's last launch. Tokens on a page that a fork shares stay.
      slots: As in `commit`.

    Raises:
      ValueError: count or slots do not fit or are out of range, where that is known (under jit count is clamped).
    """
    slots = distinct_slots(slots, cache.missing.shape[0])
    fewest = _KIND.fewest_tokens(cache.shared, slots, alone=True)
    _, held = sequences.rollback(cache.sequences, count, slots, fewest)
    return dataclasses.replace(cache, sequences=held)


def fork(cache: GatedState, source: Int[Array, "..."] | int, target: Int[Array, "..."] | int) -> GatedState:
    """Makes each target slot hold what its source committed (beams, several samples of one prompt).

    Full pages are shared, and copied by nobody; those that both slots will write to are copied at once: the last page
    of each list, and the local pages with an open place. It is done for all rows or, where pages do not suffice, for
    none, and `missing` of the targets says how many each lacked.

    Args:
      cache: What targets had pending or committed is dropped.
      source, target: One a row, or one number. A row with a 0, or whose source is its target, is left out.

    Raises:
      ValueError: The two do not fit each other, or (where that is known) a slot is out of range or a target repeated.
        Under jit such a row is left out.
    """
    source, target = jnp.atleast_1d(jnp.asarray(source)), jnp.atleast_1d(jnp.asarray(target))
    if source.shape == (1,):
        source = jnp.broadcast_to(source, target.shape)
    return _fork(cache, *checked_fork(source, target, cache.missing.shape[0]))


def reset(cache: GatedState, slots: Int[Array, "rows"]) -> GatedState:
    """Empties slots for their next owner, and gives their pages back; only integers move.

    Raises:
      ValueError: A slot is out of range, where that is known.
    """
    return _reset(cache, sequences.emptied_slots(slots, cache.missing.shape[0]))


def raise_missing(cache: GatedState) -> None:
    """Raises if the last launch, or fork, of a slot rested because pages did not suffice; on the host.

    Raises:
      PoolExhausted: Says which slots, how many pages they lacked, and what to raise.
    """
    missing = [int(count) for count in cache.missing]
    if any(missing):
        lacking = {slot: count for slot, count in enumerate(missing) if count}
        pages = cache.shared.admitted.owners.shape[1] - 1
        raise PoolExhausted(
            f"the pool of pages ran out: slots lacked pages ({lacking}: slot and number) of {pages}; nothing of their "
            f"launch was written. Make it with pages={pages + sum(missing)} or more, or reset slots that are done"
        )


def _launched(
    cache: GatedState,
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    slots,
    lengths,
    threshold,
    by=("auto", False),
    **how: Any,
) -> tuple[Array, GatedState]:
    rows, time = check_gated(q, k, v, gates, threshold, lengths)
    token, held = k.shape[2:], cache.layer.keys.shape[2:]
    if token != held:
        raise ValueError(f"(kv_heads, head_dim) of k must be the memory's {held}, got {token}")
    check_sizes(time=time)
    lengths = jnp.full(rows, time, jnp.int32) if lengths is None else lengths
    of = cache.sequences
    launch = sequences.make_launch(of.committed, of.max_pending, slots, lengths, time, **how)
    if launch.slots.shape != (rows,):
        raise ValueError(f"slots must be int32 [{rows}], one for each row of q, got shape {launch.slots.shape}")
    threshold = jnp.broadcast_to(jnp.asarray(threshold, jnp.float32), (rows,))
    return _launch(by, cache, q, k, v, gates, launch, threshold)


@partial(jax.jit, static_argnums=0)
def _launch(
    by: tuple[str, bool],
    cache: GatedState,
    q: Array,
    k: Array,
    v: Array,
    gates: Array,
    launch: Launch,
    threshold: Float32[Array, "rows"],
) -> tuple[Array, GatedState]:
    layers = (cache.layer,)
    shared = _KIND.settle(cache.shared, layers)
    asked = dataclasses.replace(shared, threshold=put(shared.threshold, launch.slots, threshold))
    admitted: tuple[Bool[Array, "rows time kv_heads"], ...] = (gates >= threshold[:, None, None],)
    launch, missing = _rest(_KIND.claim(asked, layers, launch, admitted), launch)
    served = launch.lengths > 0
    changed = jnp.where(served, threshold, shared.threshold[launch.slots])
    shared = dataclasses.replace(shared, threshold=put(shared.threshold, launch.slots, changed))
    plan, shared, (layer,) = _KIND.begin(shared, layers, launch, admitted)
    out, layer = plan.attend(layer, q, k, v, gates, implementation=by[0], interpret=by[1])
    held = sequences.begin(cache.sequences, launch)
    return out, GatedState(held, shared, layer, put(cache.missing, launch.slots, missing))


def _rest(claims: Sequence[Claim], launch: Launch) -> tuple[Launch, Int32[Array, "rows"]]:
    """The launch without the rows that were not granted all they need, and how many pages each of these lacks."""
    if not claims:
        return launch, jnp.zeros_like(launch.slots)
    granted = grant(claims)
    (claim,), (left,) = claims, after(claims, granted)
    missing = jnp.where(granted, 0, claim.needs - left)
    return dataclasses.replace(launch, lengths=jnp.where(granted, launch.lengths, 0)), missing


@jax.jit
def _fork(cache: GatedState, source: Array, target: Array) -> GatedState:
    committed = cache.sequences.committed[source]
    layers = (cache.layer,)
    shared = _KIND.settle(cache.shared, layers)
    claims = _KIND.claim_fork(shared, layers, source, target, committed)
    served, missing = grant_all(claims), jnp.zeros_like(target)
    if claims:
        missing = jnp.where(served, 0, claims[0].needs)
    missing = put(cache.missing, target, missing)
    target = jnp.where(served, target, 0)
    shared, (layer,) = _KIND.fork(shared, layers, source, target, committed)
    return GatedState(sequences.fork(cache.sequences, committed, target), shared, layer, missing)


@jax.jit
def _reset(cache: GatedState, slots: Array) -> GatedState:
    shared, (layer,) = _KIND.reset(cache.shared, (cache.layer,), slots)
    missing = put(cache.missing, slots, jnp.zeros_like(slots))
    return GatedState(sequences.reset(cache.sequences, slots), shared, layer, missing)
