"""One layer of a launch on write-gated memory: its queries attend to all that they see, and its tokens are kept."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxbuf.attention.attention_plan import LaunchPositions, WholePositions
from jaxbuf.attention.contraction import contract
from jaxbuf.attention.flash import OnlineSoftmax, in_blocks, merge, split_heads
from jaxbuf.attention.gated_budget import admit_within
from jaxbuf.attention.gated_kernel import attend_gated
from jaxbuf.attention.gated_lists import add_pages, admit
from jaxbuf.attention.gated_pages import GatedKV, Places, tokens_at
from jaxbuf.attention.gated_sequence import Mixture, Soft, attend_admitted, attend_mixture, attend_sequence
from jaxbuf.attention.paged import BLOCK, as_tokens, write_tokens
from jaxbuf.attention.rotary import Rotary
from jaxbuf.attention.selection import Selection
from jaxbuf.axes import Array, Float, Float32
from jaxbuf.pallas.dispatch import Asked, ask


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths", "shared"],
    meta_fields=["time", "target", "window", "threshold", "soft"],
)
@dataclasses.dataclass(frozen=True)
class WholeGated(WholePositions):
    """Sequences that start from nothing, without a memory. Differentiable.

    In the memory's place each layer returns its gates, for losses of them.

    Attributes:
      window, threshold: As in `attend_sequence`, those of the mixers (static).
      soft: How gates without a threshold count, as in `attend_sequence`, or those of whole heads (static).
    """

    window: int = 1
    threshold: float | None = None
    soft: Soft | Mixture = "bias"

    def shared_by(self, mixers: Iterable[Any]) -> Self:
        """As in `LaunchPositions`; and the window, the threshold and how gates are soft are these mixers'."""
        mixers = list(mixers)
        changed = super().shared_by(mixers)
        if not mixers:  # a model without gated layers
            return changed
        rule = common_rule(mixers)
        soft = rule.score.terms.soft or rule.soft
        return dataclasses.replace(changed, window=rule.window, threshold=rule.threshold, soft=soft)

    def attend(
        self,
        memory: None,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
        gates: Float32[Array, "rows time kv_heads"],
    ) -> tuple[Float[Array, "rows time heads head_dim"], Float32[Array, "rows time kv_heads"]]:
        """`attend_sequence`, or `attend_mixture` where that is how gates are soft; and the gates."""
        how: dict[str, Any] = {"window": self.window, "lengths": self.lengths}
        if isinstance(self.soft, Mixture):
            if self.threshold is None:
                return attend_mixture(q, k, v, gates, **how, sinks=self.soft.sinks, target=self.target), gates
            return attend_sequence(q, k, v, gates, **how, threshold=self.threshold), gates
        return attend_sequence(q, k, v, gates, **how, threshold=self.threshold, soft=self.soft), gates

    def attend_selected(
        self,
        memory: None,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
        gates: Float32[Array, "rows time kv_heads"],
        selection: Selection,
        rotary: Rotary | None,
    ) -> tuple[Float[Array, "rows time heads head_dim"], Float32[Array, "rows time kv_heads"]]:
        """`Selection.attend_sequence`, and the gates."""
        how: dict[str, Any] = {"window": self.window, "threshold": self.threshold, "lengths": self.lengths}
        return selection.attend_sequence(q, k, v, rotary, gates=gates, **how), gates


def common_rule(mixers: Iterable[Any]) -> Any:
    """The admission of these mixers, at least one, which may differ in the score and in nothing else.

    Raises:
      ValueError: They do, or scores are soft in different ways.
    """
    names = "window", "threshold", "keep", "when_full"
    found = [mixer.admission for mixer in mixers]
    rules = {(*(getattr(each, name) for name in names), each.score.terms.soft or each.soft) for each in found}
    if len(rules) > 1:
        raise ValueError(
            f"gated layers must have one {', one '.join(names)} and one kind of softness, got {sorted(rules, key=repr)}"
        )
    return found[0]


class LocalPages(NamedTuple):
    """The latest tokens of each row's slot, as a launch reads them.

    Attributes:
      table: int32 [rows, columns], the local pages.
      position: int32 [rows, places], of the token at each of their places.
      frontier: int32 [rows]; tokens before have left these pages, and are on the lists where they were admitted.
      end: int32 [rows], the frontier after the launch: if it commits its tokens, those before leave when it is done.
      threshold: float32 [rows].
    """

    table: Array
    position: Array
    frontier: Array
    end: Array
    threshold: Array


class Incoming(NamedTuple):
    """What every layer moves to its lists before it attends, and the pages that it has for this and for what follows.

    Attributes:
      token: int32 [rows, max_pending], tokens that leave the local pages, where they lie in the pools.
      kept: bool [layers, rows, max_pending, kv_heads], which of them are admitted.
      taken: int32 [layers, rows, kv_heads, n], new pages of each list; 0 where there is none. None where each slot has
        pages of its own: the layer chooses among them.
    """

    token: Array
    kept: Array
    taken: Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["launch", "local", "incoming", "places", "shared"],
    meta_fields=["window"],
)
@dataclasses.dataclass(frozen=True)
class LaunchedGated(LaunchPositions):
    """A launch on a cache whose layers have `GatedKV`.

    Attributes:
      launch: The launch.
      local: What is read of the latest tokens.
      incoming: What is moved to the lists at once.
      places: Where the new tokens are written.
      window: The latest tokens that a query sees whatever their gates are (static).
    """

    local: LocalPages
    incoming: Incoming
    places: Places
    window: int

    def attend(
        self,
        memory: GatedKV,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
        gates: Float32[Array, "rows time kv_heads"],
        *,
        implementation: str = "auto",
        interpret: bool = False,
    ) -> tuple[Float[Array, "rows time heads head_dim"], GatedKV]:
        """What the queries see, zeros past the launch's lengths, and the memory with its tokens.

        Args:
          memory: Of the layer, as the kind's `begin` returned it.
          q, k, v, gates: Of the new tokens, as in `jaxbuf.attention.gated.attend_sequence`.
          implementation: "xla", "tpu", or "auto": the kernel of the launch's target where it serves the call, else
            "xla".
          interpret: Run the kernel that was named in Pallas' interpreter, on any platform: slow, for tests.

        Raises:
          ValueError: The implementation asked for can't serve the call; it says why.
        """
        asked = ask("attend_gated", implementation, self.launch.target, (q,), interpret=interpret)
        return _attend(asked, self, memory, q, k, v, gates)


@partial(jax.jit, static_argnums=0)  # so that layers share a trace
def _attend(
    asked: Asked | None, plan: LaunchedGated, memory: GatedKV, q: Array, k: Array, v: Array, gates: Array
) -> tuple[Array, GatedKV]:
    launch = plan.launch
    time = q.shape[1]
    real = jnp.arange(time, dtype=jnp.int32)[None] < launch.lengths[:, None]
    # As they are read later.
    k, v = (jnp.where(real[..., None, None], x, jnp.zeros((), x.dtype)).astype(memory.keys.dtype) for x in (k, v))
    gates = jnp.where(real[..., None], gates, 0.0)
    memory = _take_in(plan, memory)
    out = None if asked is None else attend_gated(asked, plan, memory, q, k, v, gates)
    out = _attend_all(plan, memory, q, k, v, gates) if out is None else out
    out = jnp.where(real[..., None, None], out, 0.0).astype(q.dtype)
    # What follows is written where something was read: with an order between the two nothing has to be copied for it.
    out, at = jax.lax.optimization_barrier((out, plan.places.token))
    if launch.commits:
        memory, at = _admit_leaving(plan, memory, k, v, gates, at)
    return out, _write(plan, memory, k, v, gates, at)


def _attend_all(plan: LaunchedGated, memory: GatedKV, q: Array, k: Array, v: Array, gates: Array) -> Array:
    """What the queries see in the memory and in the launch itself, in float32."""
    launch, (rows, time) = plan.launch, q.shape[:2]
    out, lse = _own(plan, q, k.astype(q.dtype), v.astype(q.dtype), gates)
    query = jnp.broadcast_to(plan.positions, (rows, time))

    def with_memory():
        if time <= BLOCK:
            past = _past(plan, memory, q, query)
        else:

            def of_block(q: Array, query: Array) -> tuple[Array, Array]:
                past, lse = _past(plan, memory, q, query)
                return past, jnp.swapaxes(lse, 1, 2)

            past, past_lse = in_blocks(of_block, BLOCK, q, query)
            past = past, jnp.swapaxes(past_lse, 1, 2)
        return merge(out, lse, *past)[0]

    return jax.lax.cond(jnp.any((launch.start > 0) & (launch.lengths > 0)), with_memory, lambda: out)


def _take_in(plan: LaunchedGated, memory: GatedKV) -> GatedKV:
    """Moves what leaves the local pages before the launch to the lists."""
    slots, (token, kept, taken) = plan.launch.slots, plan.incoming
    if taken is not None:
        memory = add_pages(memory, slots, taken[memory.number])
    k, v, gates = (as_tokens(x)[token] for x in (memory.keys, memory.values, memory.gates))
    return _appended(memory, slots, k, v, gates, kept[memory.number])


def _appended(memory: GatedKV, *tokens: Any) -> GatedKV:
    return admit(memory, *tokens) if memory.budget is None else admit_within(memory, *tokens)


def _own(plan: LaunchedGated, q: Array, k: Array, v: Array, gates: Array) -> tuple[Array, Array]:
    """The launch's own keys: float32 outputs and log-sum-exps, as of `flash`."""
    launch, heads = plan.launch, k.shape[2]
    if launch.ancestors is None and q.shape[1] > BLOCK:
        out, lse = attend_admitted(
            q, k, v, gates, window=plan.window, threshold=plan.local.threshold, lengths=launch.lengths
        )
        return out.astype(jnp.float32), lse
    rows, time = q.shape[:2]
    depth = jnp.broadcast_to(launch.depth, (rows, time))
    distance = depth[:, :, None] - depth[:, None]
    seen = jnp.tril(jnp.ones((time, time), bool))[None] if launch.ancestors is None else launch.ancestors
    local = (distance < plan.window)[:, None]
    admitted = jnp.moveaxis(gates >= plan.local.threshold[:, None, None], 1, 2)[:, :, None]
    token = jnp.arange(time, dtype=jnp.int32)
    # Queries that are not real see themselves, so that every log-sum-exp is finite.
    itself = (token[:, None] == token[None])[None]
    live = (token[None] < launch.lengths[:, None])[:, None] | itself
    visible = (seen & live)[:, None] & (local | admitted)
    return _empty(q, heads).add(_scores("btkgd,bskd->bkgts", q, k, heads), visible[:, :, None], v).result()


def _past(plan: LaunchedGated, memory: GatedKV, q: Array, query: Array) -> tuple[Array, Array]:
    """The memory's keys, for queries at positions `query` (int32 [rows, time]): as `_own` gives its own."""
    launch, local, size = plan.launch, plan.local, memory.page_size
    heads, pages = memory.keys.shape[2], max(1, BLOCK // memory.page_size)
    span = pages * size
    asked = launch.lengths > 0
    counts = jnp.where(asked[:, None], memory.counts[launch.slots], 0)
    lists = _padded(memory.lists[launch.slots], pages)
    table = _padded(local.table, pages)
    rest = table.shape[1] * size - local.position.shape[1]
    position = jnp.pad(local.position, ((0, 0), (0, rest)), constant_values=-1)
    live = (position >= local.frontier[:, None]) & (position < jnp.where(asked, launch.start, 0)[:, None])
    dtype = q.dtype

    def add_listed(i, softmax):
        page = jax.lax.dynamic_slice_in_dim(lists, i * pages, pages, axis=2)
        k, v = (
            x[page].reshape(*page.shape[:2], span, -1).astype(dtype)
            for x in (memory.admitted_keys, memory.admitted_values)
        )
        there = i * span + jnp.arange(span, dtype=jnp.int32)[None, None] < counts[..., None]
        v = jnp.where(there[..., None], v, jnp.zeros((), dtype))
        scores = _scores("btkgd,bksd->bkgts", q, k, heads)
        return softmax.add(scores, there[:, :, None, None], v, "bkgts,bksd->bkgtd")

    def add_local(i, softmax):
        page = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        k, v = (x[page].reshape(page.shape[0], span, heads, -1).astype(dtype) for x in (memory.keys, memory.values))
        gates = memory.gates[page].reshape(page.shape[0], span, heads)
        here, there = (jax.lax.dynamic_slice_in_dim(x, i * span, span, axis=1) for x in (position, live))
        v = jnp.where(there[..., None, None], v, jnp.zeros((), dtype))
        near = (query[:, :, None] - here[:, None] < plan.window)[:, None]
        admitted = jnp.moveaxis(gates >= local.threshold[:, None, None], 1, 2)[:, :, None]
        visible = there[:, None, None] & (near | admitted)
        return softmax.add(_scores("btkgd,bskd->bkgts", q, k, heads), visible[:, :, None], v)

    softmax = jax.lax.fori_loop(0, -(-jnp.max(counts) // span), add_listed, _empty(q, heads))
    return jax.lax.fori_loop(0, table.shape[1] // pages, add_local, softmax).result()


def _padded(table: Array, pages: int) -> Array:
    """A table with null pages behind, to whole blocks of `pages`."""
    rest = -table.shape[-1] % pages
    return jnp.pad(table, (*((0, 0),) * (table.ndim - 1), (0, rest)))


def _empty(q: Array, kv_heads: int) -> OnlineSoftmax:
    rows, time, heads, head_dim = q.shape
    return OnlineSoftmax.empty(rows, kv_heads, heads // kv_heads, time, head_dim)


def _scores(products: str, q: Array, k: Array, kv_heads: int) -> Array:
    return contract(products, split_heads(q, kv_heads), k) * q.shape[-1] ** -0.5


def _admit_leaving(
    plan: LaunchedGated, memory: GatedKV, k: Array, v: Array, gates: Array, at: Array
) -> tuple[GatedKV, Array]:
    """Appends what leaves when the launch is done to the lists: older tokens from local pages, and its own.

    Returns `at` as it was, to be used once they are read.
    """
    slots, start, local = plan.launch.slots, plan.launch.start, plan.local
    threshold, position = local.threshold[:, None, None], local.position
    place = jnp.broadcast_to(jnp.arange(position.shape[1], dtype=jnp.int32)[None], position.shape)
    token = tokens_at(local.table, place, memory.page_size)
    leaves = (position >= local.frontier[:, None]) & (position < jnp.minimum(local.end, start)[:, None])

    older = tuple(as_tokens(x)[token] for x in (memory.keys, memory.values, memory.gates))
    (older_k, older_v, older_gates), at = jax.lax.optimization_barrier((older, at))
    older_kept = leaves[..., None] & (older_gates >= threshold)
    memory = _appended(memory, slots, older_k, older_v, older_gates, older_kept)
    own = start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None] < local.end[:, None]
    return _appended(memory, slots, k, v, gates, own[..., None] & (gates >= threshold)), at


def _write(plan: LaunchedGated, memory: GatedKV, k: Array, v: Array, gates: Array, at: Array) -> GatedKV:
    """Writes the new tokens that stay on the local pages, to places `at`."""
    source = plan.places.source

    def written(pool: Array, new: Any) -> Array:
        index = source.reshape(*source.shape, *(1,) * (new.ndim - 2))
        return write_tokens(pool, at, jnp.take_along_axis(new, index, axis=1))

    return dataclasses.replace(
        memory,
        keys=written(memory.keys, k),
        values=written(memory.values, v),
        gates=written(memory.gates, gates),
    )
