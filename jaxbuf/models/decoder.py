"""The one decoder: parameters, the plain forward, and serving from a cache, of whatever `ModelConfig` describes."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxbuf.axes import Array, Float, Float32, Int
from jaxbuf.models.cache import Cache as Cache
from jaxbuf.models.cache import Plans, all_slots, begin, make_launch, memory_partitions, whole_plans
from jaxbuf.models.cache import commit as commit
from jaxbuf.models.cache import fork as fork
from jaxbuf.models.cache import init_cache as init_cache
from jaxbuf.models.cache import raise_exhausted as raise_exhausted
from jaxbuf.models.cache import reset as reset
from jaxbuf.models.cache import rollback as rollback
from jaxbuf.models.config import GATED, LayerConfig, ModelConfig
from jaxbuf.models.layers import (
    Initializer,
    Norm,
    linear_float32,
    norm_weight,
    normal,
    parameter,
    rms_norm,
    scaled,
)
from jaxbuf.models.projections import Summands, summed
from jaxbuf.models.residual import add_and_norm
from jaxbuf.models.tensor_parallel import AXES, Part, devices_of, on_devices, partition
from jaxbuf.target import Target, resolve_target


class DecoderLayer(nnx.Module):
    """The parameters of one layer.

    Attributes:
      config: Static.
      mixers: Those of each mixer.
      mlp: Those of its feed-forward, or None.
      before_mixers, after_mixers, before_mlp, after_mlp: [hidden], the norms around the two; None where there is none.
    """

    def __init__(self, config: LayerConfig, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype):
        given = {"initializer": initializer, "rngs": rngs, "dtype": dtype}

        def weight(norm, part):
            return norm_weight(rngs, hidden, norm, dtype=dtype) if norm and part else None

        mlp = config.feed_forward
        self.config = config
        self.mixers = nnx.List([mixer.parameters(hidden, **given) for mixer in config.mixers])
        self.mlp = mlp.parameters(hidden, **given) if mlp else None
        self.before_mixers, self.after_mixers = (weight(norm, config.mixers) for norm in (config.before, config.after))
        self.before_mlp, self.after_mlp = (weight(norm, mlp) for norm in (config.before, config.after))


class MultiTokenPrediction(nnx.Module):
    """The parameters of the layer that predicts one token further: fc [hidden, 2 · hidden], three norms, one layer."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        hidden, initializer = config.hidden_size, normal(config.initializer_range)
        given = {"rngs": rngs, "dtype": dtype}
        self.fc = parameter(rngs, (hidden, 2 * hidden), (None, None), initializer, dtype=dtype)
        self.pre_fc_norm_embedding = norm_weight(rngs, hidden, config.norm, dtype=dtype)
        self.pre_fc_norm_hidden = norm_weight(rngs, hidden, config.norm, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(layer, hidden, initializer=initializer, **given)])
        self.norm = norm_weight(rngs, hidden, config.norm, dtype=dtype)


class Decoder(nnx.Module):
    """The model's parameters. A pytree: pass it to jit, grad and tree.map as it is.

    Attributes:
      config: Static.
      embed_tokens: [vocab, hidden].
      layers: One DecoderLayer a layer.
      norm: [hidden].
      lm_head: [vocab, hidden], or None when the embedding is the head.
      mtp: MultiTokenPrediction, or None.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        table, axes = (config.vocab_size, config.hidden_size), ((Part("channels", config.vocab_size),), None)
        initializer = normal(config.initializer_range)
        given = {"initializer": initializer, "rngs": rngs, "dtype": dtype}
        self.embed_tokens = parameter(rngs, table, axes, initializer, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(layer, config.hidden_size, **given) for layer in config.layers])
        self.norm = norm_weight(rngs, config.hidden_size, config.norm, dtype=dtype)
        self.lm_head = None if config.tied else parameter(rngs, table, axes, initializer, dtype=dtype)
        mtp = config.mtp
        self.mtp = None if mtp is None else MultiTokenPrediction(config, mtp, rngs=rngs, dtype=dtype)


def embed(model: Decoder, tokens: Int[Array, "rows time"]) -> Float[Array, "rows time hidden"]:
    """Rows of the embedding table."""
    with jax.named_scope("embedding"):
        return scaled(model.embed_tokens[...][tokens], model.config.embedding_scale)


def apply_layers(
    mesh: Mesh | None,
    layers: Sequence[DecoderLayer],
    x: Float[Array, "rows time hidden"],
    memories: Iterable[Any],
    plans: Plans,
    *,
    remat: bool = False,
) -> tuple[Float[Array, "rows time hidden"], tuple]:
    """Layers in order on x, with a memory for each of their mixers; returns them with what was read.

    On a mesh every device has the parameters of its heads and experts, its heads' part of the memories, and all of x.
    With remat each layer is computed again for its gradient, in place of being kept.
    """
    held = tuple(memories)
    if mesh is None:
        return _apply_layers(layers, x, held, plans, None, remat=remat)
    kinds = [mixer.kind for layer in layers for mixer in layer.config.mixers]
    parameters = jax.tree.leaves(list(layers), is_leaf=lambda node: isinstance(node, nnx.Param))
    spread = memory_partitions(kinds, held)
    partitions = [[partition(p.axes, mesh) for p in parameters], spread, PartitionSpec()]

    def run(layers, memories, same):
        x, plans = same
        return _apply_layers(layers, x, memories, plans, mesh, remat=remat)

    out = PartitionSpec(), jax.tree.unflatten(jax.tree.structure(held), spread)
    return on_devices(mesh, run, (list(layers), held, (x, plans)), partitions, out)


def share_plans(layers: Iterable[LayerConfig], plans: Plans) -> Plans:
    """Plans with what the layers share (angles of positions, for one), which is computed here, before the first."""
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    return {kind: plan.shared_by([each for each in mixers if each.kind == kind]) for kind, plan in plans.items()}


def apply_layer(
    config: LayerConfig, layer: DecoderLayer, x: Float[Array, "rows time hidden"], memories: tuple, plans: Plans
) -> tuple[Float[Array, "rows time hidden"], tuple]:
    """One layer, its sum included, so that nothing but its kind and its shapes tells its program from another layer's.

    Args:
      config: The layer's (static under jit).
      layer: Its parameters.
      x: What it reads.
      memories: One for each of its mixers.
      plans: From `share_plans`, at least those of its mixers' kinds; any for a layer without mixers.

    Returns:
      What the next layer reads, in x's dtype, and the memories.
    """
    x, added, after = _apply_layer(config, layer, x, None, memories, plans)
    return x if added is None else x + summed(added), tuple(after)


def apply_one_by_one[X](
    apply: Callable[[LayerConfig, DecoderLayer, X, tuple, Plans], tuple[X, tuple]],
    layers: Sequence[DecoderLayer],
    x: X,
    memories: Iterable[Any],
    plans: Plans,
) -> tuple[X, tuple]:
    """`apply_layers` without a mesh, by a call for each layer: of a jitted `apply_layer`, outside jit.

    All layers of a kind are then one small program, which XLA compiles once; in the program of `apply_layers` it
    compiles each layer again.

    Args:
      apply: Called as `apply_layer` is, for each layer in order.
      layers, x, memories: As in `apply_layers`; only `apply` looks at the arrays.
      plans: From `share_plans`.
    """
    left, after = iter(memories), []
    for layer in layers:
        # What other kinds of layers plan is not passed: the program would be another one wherever that is.
        own = {mixer.kind: plans[mixer.kind] for mixer in layer.config.mixers} or plans
        x, found = apply(layer.config, layer, x, tuple(next(left) for _ in layer.config.mixers), own)
        after += found
    return x, tuple(after)


def _apply_layers(
    layers: Sequence[DecoderLayer],
    x: Array,
    memories: Sequence[Any],
    plans: Plans,
    mesh: Mesh | None,
    *,
    remat: bool,
) -> tuple[Array, tuple]:
    left, after, added = iter(memories), [], None
    apply = jax.checkpoint(_apply_layer, static_argnums=0) if remat else _apply_layer
    devices = [devices_of(mesh, axis) for axis in AXES]
    configs = [layer.config.spread(*devices) for layer in layers]
    plans = share_plans(configs, plans)
    for number, (config, layer) in enumerate(zip(configs, layers, strict=True)):
        with jax.named_scope(f"layer_{number}"):
            x, added, found = apply(config, layer, x, added, [next(left) for _ in config.mixers], plans)
        after += found
    return x if added is None else x + summed(added), tuple(after)


@functools.partial(jax.jit, static_argnums=0)  # Layers of one kind are traced and lowered once.
def _apply_layer(
    config: LayerConfig,
    layer: DecoderLayer,
    x: Array,
    added: Array | Summands | None,
    memories: Sequence[Any],
    plans: Plans,
) -> tuple[Array, Array | Summands | None, list]:
    """A layer of x + added: what a layer adds is summed up where it is read next, together with the norm there.

    Returns:
      x and what is still to be added to it, and the memories.
    """
    target, after = next((plan.target for plan in plans.values()), None), []  # all have the same

    def read(weight: nnx.Param | None, norm: Norm | None) -> tuple[Array, Array]:
        """The sum, and what the mixers or the MLP read of it."""
        if added is not None and weight is not None and norm is not None:
            return add_and_norm(x, added, weight[...], norm, target=target)
        total = x if added is None else x + summed(added)
        return total, total if weight is None or norm is None else rms_norm(total, weight, norm)

    def changed(y: Array | Summands, weight: nnx.Param | None) -> Array | Summands:
        """What the mixers or the MLP add."""
        if weight is not None and config.after is not None:
            y = rms_norm(summed(y), weight, config.after)
        return y if config.residual_scale == 1 else scaled(summed(y), config.residual_scale)

    if config.mixers:
        (x, y), outs = read(layer.before_mixers, config.before), []
        for mixer, parameters, memory in zip(config.mixers, layer.mixers, memories, strict=True):
            out, memory = mixer(parameters, y, memory, plans[mixer.kind])
            outs.append(out)
            after.append(memory)
        together = outs[0] if len(outs) == 1 else functools.reduce(jnp.add, map(summed, outs))
        added = changed(together, layer.after_mixers)
    if config.feed_forward is not None:
        x, y = read(layer.before_mlp, config.before)
        with jax.named_scope("mlp"):
            y = config.feed_forward(layer.mlp, y, target)
        added = changed(y, layer.after_mlp)
    return x, added, after


def _run(
    model: Decoder, tokens: Array, memories: Iterable[Any], plans: Plans, *, remat: bool = False
) -> tuple[Array, tuple]:
    """All layers: hidden states after the final norm, and the memories, one a mixer."""
    x, after = apply_layers(model.config.mesh, model.layers, embed(model, tokens), memories, plans, remat=remat)
    return final_norm(model, x), after


def final_norm(model: Decoder, x: Float[Array, "rows time hidden"]) -> Float[Array, "rows time hidden"]:
    """Hidden states: the norm of what the last layer leaves."""
    return rms_norm(x, model.norm, model.config.norm)


def forward(
    model: Decoder,
    tokens: Int[Array, "batch time"],
    *,
    lengths: Int[Array, "batch"] | None = None,
    chunk_size: int = 64,
    target: Target | str | None = None,
) -> Float[Array, "batch time hidden"]:
    """Runs the model over whole sequences, without a cache. Differentiable.

    Args:
      model: The parameters; their dtype is the compute dtype.
      tokens: Right-padded.
      lengths: Real tokens of each row; None: all. Hidden states past a length are finite and unspecified.
      chunk_size: Of the chunk-parallel recurrence.
      target: What it is compiled for, as in `init_cache`; None: what the parameters lie on, where that is known.

    Returns:
      Hidden states after the final norm.
    """
    memories = [None for _ in model.config.mixers]
    found = resolve_target(target, model.norm.get_raw_value())
    return _run(model, tokens, memories, whole_plans(tokens.shape[1], lengths, chunk_size, found))[0]


def forward_with_gates(
    model: Decoder,
    tokens: Int[Array, "batch time"],
    *,
    remat: bool = False,
    chunk_size: int = 64,
    target: Target | str | None = None,
) -> tuple[Float[Array, "batch time hidden"], Float32[Array, "layers batch time kv_heads"]]:
    """`forward` of a model with gates, and the gates of all keys, one layer after the other.

    Args:
      model: Its gated layers' heads are as many in each.
      tokens: Of whole rows.
      remat: Whether each layer is computed again for its gradient, in place of being kept.
      chunk_size, target: As in `forward`.

    Raises:
      ValueError: The model has no gates.
    """
    kinds = [mixer.kind for mixer in model.config.mixers]
    if GATED not in kinds:
        raise ValueError("model must have gates, got one without")
    found = resolve_target(target, model.norm.get_raw_value())
    plans = whole_plans(tokens.shape[1], None, chunk_size, found)
    hidden, after = _run(model, tokens, [None] * len(kinds), plans, remat=remat)
    return hidden, jnp.stack([gate for gate, kind in zip(after, kinds, strict=True) if kind == GATED])


def last_hidden(hidden: Float[Array, "rows time hidden"], lengths: Int[Array, "rows"]) -> Float[Array, "rows 1 hidden"]:
    """The hidden state at each row's last real position.

    A row without one gets what stands at its first position.
    """
    return jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)


def logits(model: Decoder, hidden: Float[Array, "... hidden"]) -> Float32[Array, "... vocab"]:
    """The logits of hidden states: by the model's own head if it has one, else by its embedding."""
    with jax.named_scope("head"):
        head = model.embed_tokens if model.lm_head is None else model.lm_head
        return scaled(linear_float32(hidden, head), model.config.logits_scale)


def prefill(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "rows time"],
    *,
    lengths: Int[Array, "rows"] | None = None,
    slots: Int[Array, "rows"] | None = None,
    keep: int | Array = 0,
    empty: bool = False,
) -> tuple[Float[Array, "rows time hidden"], Cache]:
    """Reads prompts, or more of them, and commits what it read.

    Args:
      model: The parameters.
      cache: Each row goes on from its slot's own position.
      tokens: Right-padded.
      lengths: Real tokens of each row, in [0, time]; None: all.
      slots: Physical slots (0 is null and holds nothing), no other slot twice; None: all slots in order.
      keep: How many last tokens stay as entries of the recurrence, unfolded.
      empty: Whether no slot of a row holds anything yet (static): the program is then smaller. Under jit a slot that
        does hold something is not noticed, and its memory is wrong afterwards.

    Returns:
      Hidden states after the final norm (finite and unspecified past the lengths), and the cache.

    Raises:
      ValueError: slots is None and there are not as many rows as slots; a shape or dtype does not fit; or slots,
        lengths or keep are out of range or a slot is repeated, where they are known. Under jit lengths and keep are
        clamped, the first row of a slot counts, and rows of a slot out of range are as rows of slot 0.
      PoolExhausted: As in `extend`; under jit `cache.sequences.committed` says which rows were read.
    """
    plans, cache = begin_prefill(cache, tokens, lengths=lengths, slots=slots, keep=keep, empty=empty)
    return _serve(model, tokens, plans, cache)


def begin_prefill(
    cache: Cache,
    tokens: Int[Array, "rows time"],
    *,
    lengths: Int[Array, "rows"] | None = None,
    slots: Int[Array, "rows"] | None = None,
    keep: int | Array = 0,
    empty: bool = False,
) -> tuple[Plans, Cache]:
    """What `prefill` does before the first layer: the plans of the layers, and the cache with all integers as they are
    after it. Arguments and errors as there."""
    _check_tokens(cache, tokens, slots)
    return begin(cache, make_launch(cache, slots, lengths, tokens.shape[1], keep=keep, empty=empty))


def extend(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "rows time"],
    *,
    lengths: Int[Array, "rows"] | None = None,
    slots: Int[Array, "rows"] | None = None,
    parents: Int[Array, "rows time"] | None = None,
    drafts: bool = False,
) -> tuple[Float[Array, "rows time hidden"], Cache]:
    """Reads T pending tokens a row; `commit` makes the first of them real. Earlier pending tokens are dropped.

    Args:
      model: The parameters.
      cache: Changed only past each slot's committed position (and by folds, which change no output).
      tokens: T of each row, at most the cache's max_pending.
      lengths, slots: As in `prefill`.
      parents: For a tree of tokens: the one before each, of a lower index; -1 is the committed tail. A token sees what
        was committed and its ancestors, and its position follows theirs. Needs a cache made with trees=True. None: each
        token follows the one before.
      drafts: Whether a row that lacks room for all its tokens reads the first one alone (static).

    Returns:
      Hidden states after the final norm, and the cache. A draft whose embedding is not finite may make
      the hidden states of other tokens of its row NaN, and with them what later layers keep of these, see
      `buffered.extend`: tokens must be ids of the vocabulary.

    Raises:
      ValueError: T exceeds max_pending, slots is None and there are not as many rows as slots, a shape or dtype does
        not fit, or (where that is known) parents, lengths or slots are out of range or a slot is repeated; under jit
        as in `prefill`.
      PoolExhausted: Shared rows, blocks or pages do not suffice for all rows, where that is known. Under jit the rows
        that lack some rest, and `cache.sequences.pending` says how many tokens of each slot were read.
    """
    _check_tokens(cache, tokens, slots)
    launch = make_launch(cache, slots, lengths, tokens.shape[1], parents=parents)
    plans, cache = begin(cache, launch, drafts=drafts)
    return _serve(model, tokens, plans, cache)


def _check_tokens(cache: Cache, tokens: Array, slots: Array | None) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be int32 [rows, T], got {tokens.dtype} {tokens.shape}")
    rows = all_slots(cache) if slots is None else slots
    if jnp.shape(rows) != tokens.shape[:1]:
        number = len(rows) if jnp.ndim(rows) else 1
        raise ValueError(f"tokens must have one row a slot ({number}), got shape {tokens.shape}")


def _serve(model: Decoder, tokens: Array, plans: Plans, cache: Cache) -> tuple[Array, Cache]:
    """The layers over a cache in which a launch has begun."""
    hidden, memories = _run(model, tokens, cache.layers, plans)
    return hidden, dataclasses.replace(cache, layers=memories)
