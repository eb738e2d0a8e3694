"""Qwen3.5, dense text model: parameters, the plain forward, the MTP layer and its loss, and serving from a cache.

Letters in shapes: b batch, t time, D hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.paged import append, attend
from jaxbuf.attention.pages import advance_order
from jaxbuf.models.cache import Cache as Cache
from jaxbuf.models.cache import RecurrentCache, all_slots, take_pages
from jaxbuf.models.cache import commit as commit
from jaxbuf.models.cache import fork as fork
from jaxbuf.models.cache import init_cache as init_cache
from jaxbuf.models.cache import raise_exhausted as raise_exhausted
from jaxbuf.models.cache import reset as reset
from jaxbuf.models.gated_attention import GatedAttention, gated_attention
from jaxbuf.models.gated_delta_net import GatedDeltaNet, gated_delta_net
from jaxbuf.models.layers import (
    GatedMLP,
    gated_mlp,
    linear,
    linear_float32,
    normal,
    parameter,
    rms_norm,
    rotary_angles,
    zeros,
)
from jaxbuf.models.qwen3_5_config import Config, LayerType
from jaxbuf.recurrence import buffered, chunked
from jaxbuf.recurrence.prepare import prepare, prepare_sequence

type Array = jax.Array


class DecoderLayer(nnx.Module):
    """One layer: a mixer (`linear_attn` or `self_attn`, the other is None) and a gated MLP, each behind a norm."""

    def __init__(self, config: Config, kind: LayerType, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.eps = config.rms_norm_eps
        hidden, initializer = config.hidden_size, normal(config.initializer_range)
        shared = {"eps": config.rms_norm_eps, "initializer": initializer, "rngs": rngs, "dtype": dtype}
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config.spec, hidden, width=config.linear_conv_kernel_dim, **shared)
            self.self_attn = None
        else:
            self.linear_attn = None
            self.self_attn = GatedAttention(
                hidden,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                **shared,
            )
        self.mlp = GatedMLP(hidden, config.intermediate_size, initializer=initializer, rngs=rngs, dtype=dtype)
        self.input_layernorm = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype)
        self.post_attention_layernorm = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype)

    @property
    def mixer(self) -> GatedDeltaNet | GatedAttention:
        """Whichever of the two this layer has."""
        mixer = self.linear_attn or self.self_attn
        assert mixer is not None
        return mixer


class MultiTokenPrediction(nnx.Module):
    """The layer that predicts one token further: fc [D, 2D], three norms and one softmax layer."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        hidden = config.hidden_size
        initializer = normal(config.initializer_range)
        self.fc = parameter(rngs, (hidden, 2 * hidden), (None, None), initializer, dtype=dtype)
        self.pre_fc_norm_embedding = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype)
        self.pre_fc_norm_hidden = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, "full_attention", rngs=rngs, dtype=dtype)])
        self.norm = parameter(rngs, (hidden,), (None,), zeros, dtype=dtype)


class Qwen3_5(nnx.Module):
    """The model's parameters. A pytree: pass it to jit, grad and tree.map as it is.

    Attributes:
      config: Static.
      embed_tokens: [V, D].
      layers: One DecoderLayer a layer type.
      norm: [D].
      lm_head: [V, D], or None when the embedding is the head.
      mtp: MultiTokenPrediction, or None.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        table, axes = (config.vocab_size, config.hidden_size), ("vocab", None)
        initializer = normal(config.initializer_range)
        self.embed_tokens = parameter(rngs, table, axes, initializer, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, kind, rngs=rngs, dtype=dtype) for kind in config.layer_types])
        self.norm = parameter(rngs, (config.hidden_size,), (None,), zeros, dtype=dtype)
        untied = not config.tie_word_embeddings
        self.lm_head = parameter(rngs, table, axes, initializer, dtype=dtype) if untied else None
        self.mtp = MultiTokenPrediction(config, rngs=rngs, dtype=dtype) if config.mtp_num_hidden_layers else None


def decoder_layer(layer: DecoderLayer, x: Array, mix: Callable[[Array], tuple[Array, Any]]) -> tuple[Array, Any]:
    """x + mixer(norm x), then x + MLP(norm x); mix gives the mixer's output and its memory, which is handed through."""
    mixed, memory = mix(rms_norm(x, layer.input_layernorm, eps=layer.eps))
    x = x + mixed
    with jax.named_scope("mlp"):
        return x + gated_mlp(layer.mlp, rms_norm(x, layer.post_attention_layernorm, eps=layer.eps)), memory


def embed(model: Qwen3_5, tokens: Array) -> Array:
    """Rows of the embedding table, [b, t, D]."""
    with jax.named_scope("embedding"):
        return model.embed_tokens[...][tokens]


def forward(model: Qwen3_5, tokens: Array, *, lengths: Array | None = None, chunk_size: int = 64) -> Array:
    """Runs the model over whole sequences, without a cache. Differentiable.

    Args:
      model: The parameters; their dtype is the compute dtype.
      tokens: int32 [b, t], right-padded.
      lengths: int32 [b], real tokens of each row; None: all. Hidden states past a length are finite and unspecified.
      chunk_size: Of the chunk-parallel recurrence.

    Returns:
      Hidden states [b, t, D] after the final norm.
    """
    config = model.config
    angles = _angles(config, tokens)
    x = embed(model, tokens)
    for number, layer in enumerate(model.layers):
        with jax.named_scope(f"layer_{number}"):
            x, _ = decoder_layer(layer, x, _mix_whole(layer, angles, lengths, chunk_size))
    return rms_norm(x, model.norm, eps=config.rms_norm_eps)


def _mix_whole(layer: DecoderLayer, angles: tuple[Array, Array], lengths: Array | None, chunk_size: int):
    """The mixer of `layer` over a whole sequence that starts from nothing."""

    def prepare(*inputs):
        return prepare_sequence(*inputs), None

    def recur(spec, *inputs):
        out, state, *_ = chunked(spec, None, *inputs, chunk_size=chunk_size, lengths=lengths)
        return out, state

    def attend(q, k, v):
        return causal_attention(q, k, v, lengths=lengths), None

    if isinstance(layer.mixer, GatedDeltaNet):
        return partial(gated_delta_net, layer.mixer, prepare=prepare, recur=recur, implementation="xla")
    return partial(gated_attention, layer.mixer, angles=angles, attend=attend)


def _angles(config: Config, tokens: Array) -> tuple[Array, Array]:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return rotary_angles(positions, dim=config.rotary_dim, theta=config.rope_theta)


def last_hidden(hidden: Array, lengths: Array) -> Array:
    """[b, 1, D]: the hidden state at each row's last real position, of hidden states [b, t, D] and int32 lengths [b].

    A row without one gets what stands at its first position.
    """
    return jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)


def logits(model: Qwen3_5, hidden: Array) -> Array:
    """f32 [..., V] of hidden states [..., D]: by the model's own head if it has one, else by its embedding."""
    with jax.named_scope("head"):
        head = model.embed_tokens if model.lm_head is None else model.lm_head
        return linear_float32(hidden, head)


def mtp_forward(model: Qwen3_5, hidden: Array, next_tokens: Array, *, lengths: Array | None = None) -> Array:
    """Runs the MTP layer over whole sequences: from h_t and x_{t+1} to a hidden state whose logits are x_{t+2}'s.

    Args:
      model: With an MTP layer.
      hidden: [b, t, D] from `forward` (after the final norm), or from here, to predict a token further.
      next_tokens: int32 [b, t]; next_tokens[:, i] follows the token that hidden[:, i] read.
      lengths: int32 [b], real positions of each row; None: all.

    Returns:
      [b, t, D] after the MTP layer's norm; `logits` turns it into the prediction.

    Raises:
      ValueError: The model has no MTP layer.

    Source: DeepSeek-V3 (2024), section 2.2, with the embedding first as Qwen3.5 has it.
    """
    angles = _angles(model.config, next_tokens)

    def mix(layer, x):
        return _mix_whole(layer, angles, lengths, chunk_size=64)(x)

    return mtp_layer(model, hidden, next_tokens, mix)[0]


def mtp_layer(
    model: Qwen3_5, hidden: Array, next_tokens: Array, mix: Callable[[DecoderLayer, Array], tuple[Array, Any]]
) -> tuple[Array, Any]:
    """The MTP layer around its mixer, which `mix` runs and whose memory is handed through; see `mtp_forward`."""
    mtp, eps = model.mtp, model.config.rms_norm_eps
    if mtp is None:
        raise ValueError("the model has no MTP layer (mtp_num_hidden_layers is 0)")
    with jax.named_scope("mtp"):
        embedding = rms_norm(embed(model, next_tokens), mtp.pre_fc_norm_embedding, eps=eps)
        hidden = rms_norm(hidden, mtp.pre_fc_norm_hidden, eps=eps)
        x = linear(jnp.concatenate([embedding, hidden], axis=-1), mtp.fc)
        layer = mtp.layers[0]
        x, memory = decoder_layer(layer, x, partial(mix, layer))
        return rms_norm(x, mtp.norm, eps=eps), memory


def language_model_loss(
    model: Qwen3_5, tokens: Array, *, mask: Array | None = None, mtp_weight: float = 0.3
) -> tuple[Array, dict[str, Array]]:
    """Next-token cross entropy, plus that of the MTP layer (the token after the next) if the model has one.

    Args:
      model: The parameters.
      tokens: int32 [b, t], t at least 3 with an MTP layer, else 2.
      mask: bool [b, t], which tokens count as targets; None: all. They are all read.
      mtp_weight: Weight of the MTP layer's loss in the sum.

    Returns:
      The loss, a f32 scalar in nats per token, and metrics (f32 scalars): "next_token_loss", "next_token_accuracy",
      "tokens" (counted targets), and with an MTP layer "mtp_loss" and "mtp_accuracy".
    """
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    hidden = forward(model, tokens)
    loss, accuracy, count = _cross_entropy(logits(model, hidden[:, :-1]), tokens[:, 1:], mask[:, 1:])
    metrics = {"next_token_loss": loss, "next_token_accuracy": accuracy, "tokens": count}
    if model.mtp is not None:
        further = mtp_forward(model, hidden[:, :-1], tokens[:, 1:])
        mtp_loss, accuracy, _ = _cross_entropy(logits(model, further[:, :-1]), tokens[:, 2:], mask[:, 2:])
        metrics |= {"mtp_loss": mtp_loss, "mtp_accuracy": accuracy}
        loss = loss + mtp_weight * mtp_loss
    return loss, metrics


def _cross_entropy(scores: Array, targets: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Mean nats, mean agreement of the best token, and the count, over the targets under the mask."""
    weight = mask.astype(jnp.float32)
    count = jnp.sum(weight)
    nats = jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    agree = (jnp.argmax(scores, axis=-1) == targets).astype(jnp.float32)
    share = 1.0 / jnp.maximum(count, 1.0)
    return jnp.sum(nats * weight) * share, jnp.sum(agree * weight) * share, count


def prefill(
    model: Qwen3_5,
    cache: Cache,
    tokens: Array,
    *,
    lengths: Array | None = None,
    slots: Array | None = None,
    keep: int | Array = 0,
) -> tuple[Array, Cache]:
    """Reads prompts, or more of them, and commits what it read.

    Args:
      model: The parameters.
      cache: Each row goes on from its slot's own position.
      tokens: int32 [rows, T], right-padded.
      lengths: int32 [rows], real tokens of each row, in [0, T]; None: all T.
      slots: int32 [rows], physical slots (0 is null and holds nothing), no other slot twice; None: all slots in order.
      keep: How many last tokens stay as entries of the recurrence, unfolded.

    Returns:
      Hidden states [rows, T, D] after the final norm (finite and unspecified past the lengths), and the cache.

    Raises:
      ValueError: slots is None and there are not as many rows as slots; a shape or dtype does not fit; or slots,
        lengths or keep are out of range or a slot is repeated, where they are known. Under jit lengths and keep are
        clamped, the first row of a slot counts, and rows of a slot out of range are as rows of slot 0.
    """
    cache, rows, lengths = _rows(cache, tokens, slots, lengths)
    step, cursor = buffered.begin_prefill(cache.cursor, rows, lengths, keep, time=tokens.shape[1])
    hidden, after = _serve(model, cache, tokens, step, cursor, buffered.prefill_pool)
    if cache.page_order is None:
        return hidden, after
    order = advance_order(cache.page_order, step.slots, step.start, step.lengths)
    return hidden, dataclasses.replace(after, page_order=order)


def extend(
    model: Qwen3_5,
    cache: Cache,
    tokens: Array,
    *,
    lengths: Array | None = None,
    slots: Array | None = None,
    parents: Array | None = None,
) -> tuple[Array, Cache]:
    """Reads T pending tokens a row; `commit` makes the first of them real. Earlier pending tokens are dropped.

    Args:
      model: The parameters.
      cache: Changed only past each slot's committed position (and by folds, which change no output).
      tokens: int32 [rows, T], T at most the cache's max_pending.
      lengths, slots: As in `prefill`.
      parents: int32 [rows, T], for a tree of tokens: the one before each, of a lower index; -1 is the committed tail. A
        token sees what was committed and its ancestors, and its position follows theirs. Needs a cache made with
        trees=True. None: each token follows the one before.

    Returns:
      Hidden states [rows, T, D] after the final norm, and the cache. A draft whose embedding is not finite may make
      the hidden states of other tokens of its row NaN, and with them what later layers keep of these, see
      `buffered.extend`: tokens must be ids of the vocabulary.

    Raises:
      ValueError: T exceeds max_pending, slots is None and there are not as many rows as slots, a shape or dtype does
        not fit, or (where that is known) parents, lengths or slots are out of range or a slot is repeated; under jit
        as in `prefill`.
      PoolExhausted: Shared rows, blocks or pages ran out, where that is known; see `raise_exhausted`.
    """
    if parents is not None and cache.page_order is None:
        raise ValueError("parents need a cache made with trees=True, got one without")
    cache, rows, lengths = _rows(cache, tokens, slots, lengths)
    step, cursor = buffered.begin(cache.cursor, rows, lengths, tokens.shape[1], parents)
    return _serve(model, cache, tokens, step, cursor, buffered.extend_pool)


def _rows(cache: Cache, tokens: Array, slots: Array | None, lengths: Array | None) -> tuple[Cache, Array, Array]:
    """The physical slot and the number of real tokens of each row, and the cache with pages for them."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be int32 [rows, T], got {tokens.dtype} {tokens.shape}")
    rows = all_slots(cache) if slots is None else slots
    if jnp.shape(rows) != tokens.shape[:1]:
        number = len(rows) if jnp.ndim(rows) else 1
        raise ValueError(f"tokens must have one row a slot ({number}), got shape {tokens.shape}")
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    cache, lengths = take_pages(cache, rows, lengths, tokens.shape[1])
    return cache, rows, lengths


def _serve(model, cache, tokens, step, cursor, recur_pool) -> tuple[Array, Cache]:
    """The layers over a cache; `step` has the integers of the launch, `recur_pool` runs one recurrence on them."""
    config = model.config
    parents, ancestors = (step.parents, step.ancestors) if isinstance(step, buffered.Step) else (None, None)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if ancestors is None else step.depth
    positions = step.start[:, None] + offset
    angles = rotary_angles(positions, dim=config.rotary_dim, theta=config.rope_theta)
    where = {"slots": step.slots, "start": step.start, "lengths": step.lengths}

    def mix(layer, memory, x):
        def prepare_cached(spec, weights, *inputs):
            return prepare(spec, weights, memory.ring, *inputs, **where, order=cache.ring_order, parents=parents)

        def recur(spec, *inputs):
            return recur_pool(spec, memory.pool, step, *inputs)

        def attend_cached(q, k, v):
            kv = append(memory, cache.table, k, v, **where, order=cache.page_order)
            return attend(q, kv, cache.table, **where, order=cache.page_order, ancestors=ancestors), kv

        if isinstance(layer.mixer, GatedDeltaNet):
            x, (ring, pool) = gated_delta_net(layer.mixer, x, prepare=prepare_cached, recur=recur)
            return x, RecurrentCache(pool, ring)
        return gated_attention(layer.mixer, x, angles=angles, attend=attend_cached)

    x, memories = embed(model, tokens), []
    for number, (layer, memory) in enumerate(zip(model.layers, cache.layers, strict=True)):
        with jax.named_scope(f"layer_{number}"):
            x, memory = decoder_layer(layer, x, partial(mix, layer, memory))
        memories.append(memory)
    after = dataclasses.replace(cache, cursor=cursor, layers=tuple(memories))
    return rms_norm(x, model.norm, eps=config.rms_norm_eps), after
