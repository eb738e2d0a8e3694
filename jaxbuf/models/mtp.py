"""The MTP layer: its forward, its memory, and the chain of tokens that it drafts.

Position t of the layer reads the hidden state h_t and the token
x_{t+1}, and its own hidden state there scores x_{t+2}.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes, checked_fork
from jaxbuf.attention import paged
from jaxbuf.attention.attention_plan import LaunchedAttention
from jaxbuf.attention.paged import TokenPages
from jaxbuf.attention.paged_memory import init_pages
from jaxbuf.axes import Array, Float, Float32, Int, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.memory.sequences import Launch
from jaxbuf.models.cache import Dtypes, Plans, init_memories, whole_plans
from jaxbuf.models.config import ATTENTION, ModelConfig
from jaxbuf.models.decoder import Decoder, apply_layers, embed, last_hidden, logits
from jaxbuf.models.layers import linear, rms_norm
from jaxbuf.target import Target, resolve_target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MTPCache:
    """Memory of the MTP layer, beside the model's `Cache`.

    What the layer keeps of a token lies at the token's position. How many there are is not stored: callers say where
    they write and how far they read.

    Attributes:
      kv: The layer's pages, of keys and values or of latents.
      table: The pages of each slot, which it has for good.
      target: What launches on it are compiled for (static).
    """

    kv: TokenPages
    table: Int32[Array, "slots max_pages"]
    target: Target = dataclasses.field(metadata={"static": True})


def init_mtp(
    config: ModelConfig,
    *,
    slots: int,
    capacity: int,
    max_pending: int = 8,
    page_size: int = 16,
    dtype: jnp.dtype = jnp.float32,
    target: Target | str | None = None,
) -> MTPCache:
    """An empty memory of the MTP layer. Its slots are those of the model's cache.

    Args:
      config: With an MTP layer.
      slots: Requests at once.
      capacity: Committed tokens of each.
      max_pending: Tokens that are verified at once: a chain of drafts goes that far past the capacity at most.
      page_size: Tokens of one page.
      dtype: The compute dtype.
      target: As in `init_cache`.

    Raises:
      ValueError: The model has no MTP layer, or a size below 1 or not a whole number.
    """
    check_sizes(slots=slots, capacity=capacity, max_pending=max_pending, page_size=page_size)
    if config.mtp is None:
        raise ValueError("the model has no MTP layer (mtp_num_hidden_layers is 0)")
    pages = init_pages(slots=slots, capacity=capacity + max_pending, page_size=page_size)
    kv, *_ = init_memories(config.mesh, config.mtp.mixers, {ATTENTION: pages}, Dtypes(dtype, dtype, dtype))
    return MTPCache(kv, pages.table, resolve_target(target))


def fork_mtp(memory: MTPCache, source: Int[Array, "rows"], target: Int[Array, "rows"]) -> MTPCache:
    """Gives each slot in `target` what the slot in `source` holds; all are read before any is written.

    Args:
      memory: Of the MTP layer.
      source, target: A row with a 0, or whose source is its target, is left out. No target twice (under jit its first
        row counts).

    Raises:
      ValueError: The two do not fit each other, or (where they are known) a slot is out of range or a target repeated.
    """
    source, target = checked_fork(source, target, memory.table.shape[0])
    read, written = memory.table[source], memory.table[target]
    written = jnp.where(written > 0, written, NOWHERE)
    return dataclasses.replace(memory, kv=paged.fork(memory.kv, (read, written)))


def mtp_forward(
    model: Decoder,
    hidden: Float[Array, "batch time hidden"],
    next_tokens: Int[Array, "batch time"],
    *,
    lengths: Int[Array, "batch"] | None = None,
    target: Target | str | None = None,
) -> Float[Array, "batch time hidden"]:
    """Runs the MTP layer over whole sequences: from h_t and x_{t+1} to a hidden state whose logits are x_{t+2}'s.

    Args:
      model: With an MTP layer.
      hidden: From `forward` (after the final norm), or from here, to predict a token further.
      next_tokens: The one at i follows the token that hidden[:, i] read.
      lengths: Real positions of each row; None: all.
      target: As in `forward`.

    Returns:
      Hidden states after the MTP layer's norm; `logits` turns it into the prediction.

    Raises:
      ValueError: The model has no MTP layer.

    Source: DeepSeek-V3 (2024), section 2.2, with the embedding first as Qwen3.5 has it.
    """
    plans = whole_plans(next_tokens.shape[1], lengths, target=resolve_target(target, model.norm.get_raw_value()))
    return _mtp_layer(model, hidden, next_tokens, None, plans)[0]


def _mtp_layer(model: Decoder, hidden: Array, next_tokens: Array, memory: Any, plans: Plans) -> tuple[Array, Any]:
    """The MTP layer on some memory; see `mtp_forward`."""
    mtp, norm = model.mtp, model.config.norm
    if mtp is None:
        raise ValueError("the model has no MTP layer (mtp_num_hidden_layers is 0)")
    with jax.named_scope("mtp"):
        embedding = rms_norm(embed(model, next_tokens), mtp.pre_fc_norm_embedding, norm)
        hidden = rms_norm(hidden, mtp.pre_fc_norm_hidden, norm)
        x = linear(jnp.concatenate([embedding, hidden], axis=-1), mtp.fc)
        x, (memory,) = apply_layers(model.config.mesh, mtp.layers, x, [memory], plans)
        return rms_norm(x, mtp.norm, norm), memory


def mtp_extend(
    model: Decoder,
    memory: MTPCache,
    hidden: Float[Array, "rows time hidden"],
    next_tokens: Int[Array, "rows time"],
    *,
    start: Int32[Array, "rows"],
    lengths: Int[Array, "rows"] | None = None,
    slots: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows time hidden"], MTPCache]:
    """Reads T positions a row: the cached form of `mtp_forward`.

    Nothing is committed or dropped: what lies at or past `start` in the memory before the call is dead, so whoever
    rejects drafts goes on from a smaller start, and a slot's next owner from 0.

    Args:
      model: With an MTP layer.
      memory: Written at the positions start .. start + lengths - 1; what would lie past its capacity is dropped.
      hidden: Those at the positions from start on: the model's (after its final norm), or this layer's own from the
        position before, to predict a token further.
      next_tokens: The token after each of these positions.
      start: Of each row.
      lengths: Real positions of each row; None: all T. A row with 0 reads and writes nothing.
      slots: Physical slots (0 is null and holds nothing); None: all slots in order.

    Returns:
      Hidden states after the layer's norm (finite and unspecified past the lengths), and the memory.

    Raises:
      ValueError: The model has no MTP layer, a shape does not fit, or slots is None and there are not as many rows as
        slots.

    Source: DeepSeek-V3 (2024), section 2.2, with the embedding first as Qwen3.5 has it.
    """
    rows = jnp.arange(1, memory.table.shape[0], dtype=jnp.int32) if slots is None else slots
    if hidden.shape[:2] != next_tokens.shape or rows.shape[0] != next_tokens.shape[0]:
        raise ValueError(
            f"hidden and next_tokens must have one row a slot ({rows.shape[0]}) and as many positions, got shapes "
            f"{hidden.shape} and {next_tokens.shape}"
        )
    time = next_tokens.shape[1]
    lengths = jnp.full(rows.shape, time, jnp.int32) if lengths is None else lengths
    launch = Launch(rows, start, lengths, time, target=memory.target)
    plans = {ATTENTION: LaunchedAttention(launch, memory.table)}
    further, kv = _mtp_layer(model, hidden, next_tokens, memory.kv, plans)
    return further, dataclasses.replace(memory, kv=kv)


def most_probable(
    scores: Float32[Array, "rows vocab"], number: Int32[Array, ""], state: Any
) -> tuple[Int32[Array, "rows"], Float32[Array, "rows vocab"], Any]:
    """The best token of each row, and the scores; the greedy `choose` of `draft_mtp`."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores, state


def draft_mtp(
    model: Decoder,
    memory: MTPCache,
    hidden: Float[Array, "rows time hidden"],
    next_tokens: Int[Array, "rows time"],
    *,
    start: Int32[Array, "rows"],
    draft_tokens: int,
    lengths: Int[Array, "rows"] | None = None,
    slots: Int[Array, "rows"] | None = None,
    most: Int32[Array, ""] | int | None = None,
    choose: Callable[[Array, Array, Any], tuple[Array, Any, Any]] = most_probable,
    state: Any = (),
) -> tuple[Int32[Array, "rows {draft_tokens}"], Any, MTPCache]:
    """Reads what was committed since the last drafts, then drafts `draft_tokens` tokens in a chain.

    With the model's h_0 .. h_{n-1} (it committed n tokens) and x_0 .. x_n (the newest, x_n, it has not read), the layer
    reads `lengths` positions that end at n - 1, from the model's own hidden states. Its hidden state at n - 1 scores
    x_{n+1}: the first draft. Each later draft reads one position more, from the layer's own hidden state and the draft
    before: those entries, at the positions n .. n + draft_tokens - 2, are provisional. The next call starts at or
    before n and so drops them: nothing that was made from a draft stays, whether it was accepted or not.

    A step of speculative decoding: draft from (h, x_n); let the model verify x_n and the drafts, 1 + draft_tokens
    tokens, which gives h_n, h_{n+1} ..; accept a drafts, which with a token y make x_{n+1} .. x_{n+a+1}. The next call
    has start n, lengths a + 1, these hidden states and the tokens from x_{n+1} on (drafts, then y at index a). After a
    prefill of n tokens, `mtp_extend` reads positions 0 .. n - 2, and the first call has start n - 1 and lengths 1.

    Args:
      model: With an MTP layer.
      memory: What lies at or past `start` in it is dead; written at start .. start + lengths + draft_tokens - 2.
      hidden: The model's hidden states (after its final norm) at the positions from start on.
      next_tokens: The token after each of these positions; index lengths - 1 is the newest token.
      start: Of each row.
      draft_tokens: At least 1 (static).
      lengths: Positions of each row to read; None: all T. A row with 0 reads and writes nothing, and its drafts and
        scores are unspecified.
      slots: As in `mtp_extend`.
      most: How many drafts are needed: those past them, and past the first, are not made but 0; None: all.
      choose: (scores f32 [rows, vocab], int32 number of the draft from 0, state) -> the drafts int32 [rows], what to
        return of them (arrays [rows, ...]), and the state for the next.
      state: What `choose` begins with.

    Returns:
      The drafts, what `choose` gave of each [rows, draft_tokens, ...] (by default the scores
      that they were chosen from), and the memory.

    Raises:
      ValueError: draft_tokens is below 1, or as in `mtp_extend`.

    Source: DeepSeek-V3 (2024), section 2.2, with one layer that takes every further step.
    """
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1, got {draft_tokens}")
    lengths = jnp.full(start.shape, next_tokens.shape[1], jnp.int32) if lengths is None else lengths
    further, memory = mtp_extend(model, memory, hidden, next_tokens, start=start, lengths=lengths, slots=slots)
    own = last_hidden(further, lengths)
    draft, told, state = choose(logits(model, own[:, 0]), jnp.int32(0), state)
    reading = jnp.minimum(lengths, 1)

    def put(found, number, new):
        return jax.tree.map(lambda x, y: x.at[:, number].set(y), found, new)

    def step(number, carry):
        own, draft, memory, state, found = carry
        position = start + lengths + number - 1
        own, memory = mtp_extend(model, memory, own, draft[:, None], start=position, lengths=reading, slots=slots)
        draft, told, state = choose(logits(model, own[:, 0]), number, state)
        return own, draft, memory, state, put(found, number, (draft, told))

    empty = jax.tree.map(lambda x: jnp.zeros((x.shape[0], draft_tokens, *x.shape[1:]), x.dtype), (draft, told))
    found = put(empty, 0, (draft, told))
    end = draft_tokens if most is None else jnp.minimum(most, draft_tokens)
    _, _, memory, _, (drafts, told) = jax.lax.fori_loop(1, end, step, (own, draft, memory, state, found))
    return drafts, told, memory
