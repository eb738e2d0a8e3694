"""The two compiled programs of a generation: `start` reads the prompts, `generate_tokens` decodes.

Whatever differs between requests is data in the carry (sampling settings, seeds, stop tokens, lengths, fold limits), so
one pair of programs serves every batch of the same shape.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.models import qwen3_5
from jaxbuf.models.scoring import Logprobs, fitting_block, hidden_logprobs, token_logprobs
from jaxbuf.serving.sampling import History, Sampling, adjust, sample

type Array = jax.Array

RUNNING, STOPPED, FULL = 0, 1, 2  # why a row stopped: a stop token, or its max_new_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """int32 [rows] each: what `stats.Stats` is made from."""

    steps: Array
    folds: Array
    checkpoint_reads: Array
    live_entries: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """A generation between two calls of the program; the row of a request is its slot - 1.

    Attributes:
      cache: The model's memory.
      history: The prompts, what was generated so far (history.tokens, int32 [rows, room], of which history.count, int32
        [rows], are real) and the stop tokens.
      last: int32 [rows], the newest token, which the model has not read yet.
      state: int32 [rows]: RUNNING, STOPPED (at a stop token, which is in tokens) or FULL.
      max_new_tokens: int32 [rows], at most room.
      sampling: The settings of each row.
      allowed: bool [vocab], the tokens that may be sampled: ids that the tokenizer lacks may not.
      logprobs: [rows, room] of the generated tokens, in the model's own distribution (before any setting changes it);
        [rows, 0] if nobody asked.
      prompt_logprobs: [rows, bucket] of the prompts' tokens likewise; the token at i + 1 has its own at i.
      counters: What was done so far.
    """

    cache: qwen3_5.Cache
    history: History
    last: Array
    state: Array
    max_new_tokens: Array
    sampling: Sampling
    allowed: Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    counters: Counters


@partial(jax.jit, static_argnames=("capacity", "room", "ring_limit", "entry_dtype", "top", "prompt_top"))
def start(
    model: qwen3_5.Qwen3_5,
    prompts: Array,
    lengths: Array,
    limit: Array,
    max_new_tokens: Array,
    sampling: Sampling,
    stop_ids: Array,
    allowed: Array,
    *,
    capacity: int,
    room: int,
    ring_limit: int,
    entry_dtype,
    top: int | None = None,
    prompt_top: int | None = None,
) -> Carry:
    """Reads the prompts into a new cache and samples the first token of each.

    Args:
      model: The parameters; their dtype is the compute dtype.
      prompts: int32 [rows, bucket], right-padded.
      lengths: int32 [rows]; 0 for a row that is only there to fill the batch.
      limit: int32 [rows], entries from which the row folds, at most ring_limit: 1 is the recurrent form.
      max_new_tokens, sampling, allowed: As in `Carry`.
      stop_ids: int32 [rows, n], padded with -1.
      capacity: Tokens the softmax layers hold for each row (static, as the following).
      room: Tokens that can be generated.
      ring_limit: What the rings are made for.
      entry_dtype: Of the ring's keys and updates.
      top: How many top tokens to report at each step, beside the chosen one's log-probability; None: neither.
      prompt_top: The same for each token of the prompts.
    """
    rows, bucket = prompts.shape
    dtype = model.embed_tokens[...].dtype
    cache = qwen3_5.init_cache(
        model.config,
        slots=rows,
        capacity=capacity,
        limit=ring_limit,
        max_pending=1,
        dtype=dtype,
        entry_dtype=entry_dtype,
    )
    limits = jnp.concatenate([jnp.ones(1, jnp.int32), limit])
    cache = dataclasses.replace(cache, cursor=dataclasses.replace(cache.cursor, limit=limits))
    hidden, cache = qwen3_5.prefill(model, cache, prompts, lengths=lengths)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    logits = qwen3_5.logits(model, jnp.take_along_axis(hidden, last, axis=1)[:, 0])

    def zero():
        return jnp.zeros(rows, jnp.int32)

    if prompt_top is None:
        prompt_logprobs = _no_logprobs(rows, 0, 0)
    else:
        following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
        block = fitting_block(rows, bucket, model.config.vocab_size)
        prompt_logprobs = hidden_logprobs(model, hidden, following, block=block, top=prompt_top)
    carry = Carry(
        cache=cache,
        history=History(prompts, lengths, jnp.zeros((rows, room), jnp.int32), zero(), stop_ids),
        last=zero(),
        state=jnp.where(lengths > 0, RUNNING, FULL).astype(jnp.int32),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        allowed=allowed,
        logprobs=_no_logprobs(rows, 0 if top is None else room, top or 0),
        prompt_logprobs=prompt_logprobs,
        counters=Counters(zero(), zero(), zero(), zero()),
    )
    return _choose(carry, logits)


@partial(jax.jit, donate_argnames="carry")
def generate_tokens(model: qwen3_5.Qwen3_5, carry: Carry, steps: Array | int) -> Carry:
    """Decodes up to `steps` more tokens for every running row; ends early when no row runs.

    One `lax.while_loop`: nothing returns to the host inside it, and the carry's memory is reused (it is donated, so the
    argument must not be used again). Call it again on what it returned to go on: the tokens do not depend on how a
    generation is cut into calls.

    Args:
      model: The parameters, the same as `start` had.
      carry: From `start`, or from here.
      steps: int32 scalar, data: another number does not compile again.
    """

    def running(loop):
        left, carry = loop
        return (left > 0) & jnp.any(carry.state == RUNNING)

    def step(loop):
        left, carry = loop
        return left - 1, _decode(model, carry)

    _, carry = jax.lax.while_loop(running, step, (jnp.asarray(steps, jnp.int32), carry))
    return carry


def _decode(model: qwen3_5.Qwen3_5, carry: Carry) -> Carry:
    """One step: the newest token of each running row is read, committed and followed by another."""
    active = (carry.state == RUNNING).astype(jnp.int32)
    before = carry.cache.cursor
    hidden, cache = qwen3_5.extend(model, carry.cache, carry.last[:, None], lengths=active)
    folds = (cache.cursor.folded > before.folded)[1:].astype(jnp.int32)
    cache = qwen3_5.commit(cache, active)
    counters = Counters(
        steps=carry.counters.steps + active,
        folds=carry.counters.folds + folds,
        checkpoint_reads=carry.counters.checkpoint_reads + active * (before.folded > 0)[1:].astype(jnp.int32),
        live_entries=carry.counters.live_entries + active * before.length[1:],
    )
    return _choose(dataclasses.replace(carry, cache=cache, counters=counters), qwen3_5.logits(model, hidden[:, 0]))


def _choose(carry: Carry, logits: Array) -> Carry:
    """Samples a token for every running row from its logits [rows, vocab], and decides which rows are done."""
    history = carry.history
    with jax.named_scope("sample"):
        adjusted = adjust(jnp.where(carry.allowed[None], logits, -jnp.inf), carry.sampling, history)
        token = sample(adjusted, carry.sampling, carry.cache.cursor.position[1:])
    running = carry.state == RUNNING
    place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None] == history.count[:, None]
    place = place & running[:, None]
    if carry.logprobs.chosen.shape[1]:
        carry = _report(carry, logits, token, place)
    tokens = jnp.where(place, token[:, None], history.tokens)
    count = history.count + running.astype(jnp.int32)
    stopped = jnp.any(token[:, None] == history.stop_ids, axis=-1)
    reason = jnp.where(stopped, STOPPED, jnp.where(count >= carry.max_new_tokens, FULL, RUNNING))
    return dataclasses.replace(
        carry,
        history=dataclasses.replace(history, tokens=tokens, count=count),
        last=jnp.where(running, token, carry.last),
        state=jnp.where(running, reason, carry.state).astype(jnp.int32),
    )


def _no_logprobs(rows: int, room: int, top: int) -> Logprobs:
    best = (rows, room, top)
    return Logprobs(jnp.zeros((rows, room), jnp.float32), jnp.zeros(best, jnp.int32), jnp.zeros(best, jnp.float32))


def _report(carry: Carry, logits: Array, token: Array, place: Array) -> Carry:
    """Writes down the log-probabilities of the chosen and of the most probable tokens, where `place` says."""
    found = token_logprobs(logits, token, carry.logprobs.top.shape[2])

    def write(old, new):
        return jnp.where(place.reshape(*place.shape, *[1] * (old.ndim - 2)), new[:, None], old)

    return dataclasses.replace(carry, logprobs=jax.tree.map(write, carry.logprobs, found))
