"""What `jaxbuf bench write_gate` measures of one way to keep keys: answers, likelihood and the bytes of its memory.

Sequences are read by `decoder.prefill` into the memory that generation uses, so that the keys that a query sees are
those of the memory, and the bytes are those of its arrays afterwards.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.gated_bytes import gated_slot_bytes, paged_slot_bytes
from jaxbuf.axes import Array
from jaxbuf.bench.admission_ways import Way
from jaxbuf.models import decoder
from jaxbuf.models.cache import Cache
from jaxbuf.models.config import ATTENTION, GATED
from jaxbuf.models.scoring import fitting_block, hidden_logprobs
from jaxbuf.models.shapes import power_of_two_from


class Reading(NamedTuple):
    """What a way makes of sequences.

    Attributes:
      logprobs: float64 [rows, time], of the token after each position; 0 for the last.
      best: int32 [rows, time], the most probable token after each position.
      bytes: int64 [rows], what each sequence's slot holds in all softmax layers once it is read.
      kept: float64 [rows], the share of the keys behind the windows that were kept; nan where none is behind.
    """

    logprobs: np.ndarray
    best: np.ndarray
    bytes: np.ndarray
    kept: np.ndarray


def read(way: Way, tokens: np.ndarray) -> Reading:
    """Reads int32 [rows, time] tokens, all of them at once."""
    given = jnp.asarray(tokens, jnp.int32)
    held = way if way.held is None else dataclasses.replace(way, lm=way.held, held=None)
    logprobs, best, cache = _read(held.lm.model, _empty(held, *tokens.shape), given)
    if way.held is not None:
        logprobs, best = _read_whole(way.lm.model, given)
    logprobs = np.asarray(logprobs, np.float64)
    logprobs[:, -1] = 0.0
    return Reading(logprobs, np.asarray(best), softmax_bytes(cache), _kept(cache))


def softmax_bytes(cache: Cache) -> np.ndarray:
    """int64 [rows]: what each slot that runs holds in the memories of all softmax layers; see
    `jaxbuf.attention.gated_bytes`."""
    total = np.zeros(cache.rows + 1, np.int64)
    if GATED in cache.shared:
        total += gated_slot_bytes(cache.shared[GATED], _layers(cache, GATED))
    if ATTENTION in cache.shared:
        total += paged_slot_bytes(cache.shared[ATTENTION], _layers(cache, ATTENTION), cache.sequences.committed)
    return total[1:]


def count_different(way: Way, tokens: np.ndarray, asked: np.ndarray, tail: int) -> tuple[int, int]:
    """How many answers are others when the last tokens are decoded one by one, as in generation, and of how many.

    Args:
      way: How keys are kept.
      tokens: int32 [rows, time].
      asked: bool [rows, time], the positions whose next token is looked at.
      tail: How many last tokens are decoded.
    """
    whole = read(way, tokens).best[:, -tail:]
    best = np.asarray(_decode(way.lm.model, _empty(way, *tokens.shape), jnp.asarray(tokens, jnp.int32), tail))
    looked = asked[:, -tail:]
    return int(np.sum((best != whole) & looked)), int(np.sum(looked))


@partial(jax.jit, donate_argnames="cache")
def _read(model: decoder.Decoder, cache: Cache, tokens: Array) -> tuple[Array, Array, Cache]:
    hidden, cache = decoder.prefill(model, cache, tokens)
    return *_next(model, hidden, tokens), cache


@jax.jit
def _read_whole(model: decoder.Decoder, tokens: Array) -> tuple[Array, Array]:
    return _next(model, decoder.forward(model, tokens), tokens)


def _next(model: decoder.Decoder, hidden: Array, tokens: Array) -> tuple[Array, Array]:
    """The log-probability of the token after each position, and the most probable one."""
    rows, time = tokens.shape
    targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    # Logits exist for a block of positions at a time.
    length = power_of_two_from(time)
    block = fitting_block(rows, length, model.config.vocab_size)
    more = (0, 0), (0, length - time)
    found = hidden_logprobs(model, jnp.pad(hidden, (*more, (0, 0))), jnp.pad(targets, more), block=block, top=1)
    return found.chosen[:, :time], found.top_ids[:, :time, 0]


@partial(jax.jit, static_argnames="tail")
def _decode(model: decoder.Decoder, cache: Cache, tokens: Array, tail: int) -> Array:
    _, cache = decoder.prefill(model, cache, tokens[:, :-tail])
    ones = jnp.ones(tokens.shape[0], jnp.int32)

    def step(cache: Cache, token: Array) -> tuple[Cache, Array]:
        hidden, cache = decoder.extend(model, cache, token[:, None])
        best = jnp.argmax(decoder.logits(model, hidden[:, 0]), axis=-1).astype(jnp.int32)
        return decoder.commit(cache, ones), best

    return jax.lax.scan(step, cache, tokens[:, -tail:].T)[1].T


def _empty(way: Way, rows: int, time: int) -> Cache:
    """The memory that generation without drafts makes for so many tokens, with the way's threshold."""
    sizes = {"slots": rows, "capacity": time, "max_pending": 1, "limit": min(16, time), "dtype": way.lm.dtype}
    cache = decoder.init_cache(way.lm.config, **sizes)
    if way.threshold is None:
        return cache
    gated = cache.shared[GATED]
    gated = dataclasses.replace(gated, threshold=jnp.full_like(gated.threshold, way.threshold))
    return dataclasses.replace(cache, shared=cache.shared | {GATED: gated})


def _kept(cache: Cache) -> np.ndarray:
    if GATED not in cache.shared:
        return np.ones(cache.rows)
    behind = np.asarray(cache.shared[GATED].frontier, np.float64)[1:]
    counts = [np.mean(np.asarray(layer.counts), axis=1) for layer in _layers(cache, GATED)]
    return np.mean(counts, axis=0)[1:] / np.where(behind > 0, behind, np.nan)


def _layers(cache: Cache, kind: str) -> list:
    return [layer for layer, of in zip(cache.layers, cache.kinds, strict=True) if of == kind]
