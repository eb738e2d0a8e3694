"""The two compiled programs of a generation: `start` reads the prompts, `generate_tokens` decodes.

Whatever differs between requests is data in the carry (sampling settings, seeds, stop tokens, lengths, fold limits), so
one pair of programs serves every batch of the same shape.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots, recurrent_work, with_limits
from jaxbuf.models.scoring import Logprobs, fitting_block, hidden_logprobs
from jaxbuf.serving.carry import FAILED as FAILED
from jaxbuf.serving.carry import FULL as FULL
from jaxbuf.serving.carry import RUNNING as RUNNING
from jaxbuf.serving.carry import STOPPED as STOPPED
from jaxbuf.serving.carry import Carry as Carry
from jaxbuf.serving.carry import Counters as Counters
from jaxbuf.serving.carry import Speculation, record
from jaxbuf.serving.samples import Samples, fork_rows, init_cache
from jaxbuf.serving.sampling import MOST_LOGPROBS, History, Sampling, adjust, has_candidate, sample
from jaxbuf.serving.speculation import (
    Drafter,
    Proposal,
    check_state,
    drafts_trees,
    propose,
    verify,
    with_root,
)
from jaxbuf.serving.token_masks import only

type Array = jax.Array


@partial(
    jax.jit, static_argnames=("capacity", "room", "ring_limit", "entry_dtype", "state_dtype", "report", "report_prompt")
)
def start(
    model: decoder.Decoder,
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
    state_dtype: str = "float32",
    report: bool = False,
    report_prompt: bool = False,
    prompt_top: Array | int = 0,
    drafter: Drafter | None = None,
    samples: Samples | None = None,
) -> Carry:
    """Reads the prompts into a new cache and samples the first token of each row.

    Args:
      model: The parameters; their dtype is the compute dtype.
      prompts: int32 [prompts, bucket], right-padded.
      lengths: int32 [prompts], the prompts' tokens; 0 for a padding prompt, which rounds the batch up.
      limit: int32 [rows], at most ring_limit. A row folds when its committed entries and the new tokens together would
        be more than this: 1 is the recurrent form.
      max_new_tokens, sampling, allowed: As in `Carry`.
      stop_ids: int32 [rows, n], padded with -1.
      capacity: Tokens the softmax layers hold for each row (static, as the following).
      room: Tokens that can be generated.
      ring_limit: The largest limit that the rings have room for.
      entry_dtype: Of the ring's keys and updates.
      state_dtype: Of the checkpoints, see `init_pool`.
      report: Whether log-probabilities of the generated tokens are reported (static): each row's settings say which.
      report_prompt: Whether those of the prompts' tokens are (static).
      prompt_top: int32 scalar, of how many of the most probable tokens at most beside each; data.
      drafter: Who drafts tokens in `generate_tokens`, which must be given the same; None: nobody.
      samples: Which rows continue which prompt: each is read once, and the rows share what they do not write. None: as
        many rows as prompts, and each has its own memory.
    """
    rows, (number, bucket) = limit.shape[0], prompts.shape
    dtype = model.embed_tokens[...].dtype
    cache = init_cache(
        model.config,
        samples,
        rows=rows,
        bucket=bucket,
        capacity=capacity,
        limit=ring_limit,
        max_pending=1 if drafter is None else 1 + drafter.draft_tokens,
        trees=drafts_trees(drafter),
        dtype=dtype,
        entry_dtype=entry_dtype,
        state_dtype=state_dtype,
    )
    slots = None if samples is None else samples.readers
    hidden, cache = decoder.prefill(model, cache, prompts, lengths=lengths, slots=slots)
    logits = decoder.logits(model, decoder.last_hidden(hidden, lengths)[:, 0])

    def zero():
        return jnp.zeros(rows, jnp.int32)

    vocab = model.config.vocab_size
    if report_prompt:
        following, wanted = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1))), jnp.asarray(prompt_top, jnp.int32) > 0
        block = fitting_block(number, bucket, vocab)
        prompt_logprobs = hidden_logprobs(model, hidden, following, block=block, top=MOST_LOGPROBS, wanted=wanted)
    else:
        prompt_logprobs = _no_logprobs(number, 0, vocab)
    if samples is not None:
        cache = fork_rows(cache, samples)
        prompts, logits = prompts[samples.prompt], logits[samples.prompt]
        lengths = jnp.where(samples.source > 0, lengths[samples.prompt], 0)
    carry = Carry(
        cache=with_limits(cache, limit),
        history=History(prompts, lengths, jnp.zeros((rows, room), jnp.int32), zero(), stop_ids),
        last=zero(),
        state=jnp.where(lengths > 0, RUNNING, FULL).astype(jnp.int32),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        allowed=allowed,
        logprobs=_no_logprobs(rows, room if report else 0, vocab),
        prompt_logprobs=prompt_logprobs,
        counters=Counters(zero(), zero(), zero(), zero()),
        lacking=jnp.zeros(rows, bool),
        samples=samples,
    )
    carry = _record_next(carry, logits, carry.position)
    if drafter is None:
        return carry
    state = drafter.start(model, carry, hidden, capacity=capacity, limit=ring_limit)
    return dataclasses.replace(carry, speculation=Speculation(state, zero(), zero()))


@partial(jax.jit, donate_argnames="carry")
def generate_tokens(model: decoder.Decoder, carry: Carry, steps: Array | int, drafter: Drafter | None = None) -> Carry:
    """Runs up to `steps` decoding steps; ends early when no row runs.

    A step gives every running row one token, or with a drafter up to 1 + draft_tokens. A row for which a pool of memory
    has no room rests, and gets none; when all running rows do, the call ends. All is one `lax.while_loop`:
    nothing returns to the host inside it, and the carry's memory is reused (it is donated, so the argument must not be
    used again). Call it again on what it returned to go on: the tokens do not depend on how a generation is cut into
    calls.

    Args:
      model: The parameters, the same as `start` had.
      carry: From `start`, or from here.
      steps: int32 scalar, data: another number does not compile again.
      drafter: The one that `start` had.
    """

    def running(loop):
        left, served, carry = loop
        return (left > 0) & served & jnp.any(carry.state == RUNNING)

    def step(loop):
        left, _, carry = loop
        after = _step(model, carry, drafter)
        return left - 1, jnp.any((carry.state == RUNNING) & ~after.lacking), after

    first = jnp.asarray(steps, jnp.int32), jnp.asarray(True), carry
    return jax.lax.while_loop(running, step, first)[2]


def _step(model: decoder.Decoder, carry: Carry, drafter: Drafter | None) -> Carry:
    """One step: the newest token of each running row is read, with drafts of what may follow it.

    The last token that a row gets is not read yet. So as many of the tokens that were read are committed as the row
    gets new ones; the drafts beyond them stay uncommitted, which is all that rejecting them takes.
    """
    active = (carry.state == RUNNING).astype(jnp.int32)
    if drafter is None:
        hidden, read, after = _read(model, carry, carry.last[:, None], active)
        logits = decoder.logits(model, hidden[:, 0])
        after = dataclasses.replace(after, cache=decoder.commit(after.cache, read))
        return _record_next(after, logits, carry.position + 1)
    proposal, state = propose(drafter, model, carry)
    if not getattr(drafter, "adaptive", False):
        return _verify_drafts(model, carry, drafter, proposal, state)
    none = jnp.zeros_like(carry.last)
    nothing = Proposal(none[:, None][:, :0], none)
    return jax.lax.cond(
        jnp.any(proposal.count > 0),
        lambda: _verify_drafts(model, carry, drafter, proposal, state),
        lambda: _verify_drafts(model, carry, drafter, nothing, state),
    )


def _verify_drafts(model: decoder.Decoder, carry: Carry, drafter: Drafter, proposal: Proposal, state: Any) -> Carry:
    """The step after `propose`, which gave `proposal` and `state`."""
    active = (carry.state == RUNNING).astype(jnp.int32)
    parents = None if proposal.parents is None else with_root(proposal.parents)
    read = jnp.concatenate([carry.last[:, None], proposal.drafts], axis=1)
    hidden, granted, after = _read(model, carry, read, active * (1 + proposal.count), parents)
    proposal = dataclasses.replace(proposal, count=jnp.minimum(proposal.count, jnp.maximum(granted - 1, 0)))
    logits = decoder.logits(model, hidden)
    tokens, number, accepted, path, failed, adjusted = verify(after, proposal, logits)
    if path is not None:
        hidden, logits, adjusted = (jnp.take_along_axis(x, path[..., None], axis=1) for x in (hidden, logits, adjusted))
    missing = ((0, 0), (0, 1 + drafter.draft_tokens - read.shape[1]))
    state = drafter.settle(model, state, jnp.pad(hidden, (*missing, (0, 0))), jnp.pad(tokens, missing), number)
    after = dataclasses.replace(after, speculation=_count_drafts(carry, drafter, state, proposal, accepted))
    after = dataclasses.replace(after, cache=decoder.commit(after.cache, number, path=path))
    return record(after, tokens, number, failed, logits, adjusted)


def _read(
    model: decoder.Decoder, carry: Carry, tokens: Array, lengths: Array, parents: Array | None = None
) -> tuple[Array, Array, Carry]:
    """Reads the first `lengths` of tokens int32 [rows, T], which stay pending.

    Returns:
      Their hidden states; how many tokens of each row were read, int32 [rows]: 1 where memory did not suffice for the
      drafts, 0 where it did not for the first token; and the carry.
    """
    hidden, cache = decoder.extend(model, carry.cache, tokens, lengths=lengths, parents=parents, drafts=True)
    read = cache.sequences.pending[all_slots(cache)]
    active, counters = jnp.minimum(read, 1), carry.counters
    found = {"steps": counters.steps + active}
    if (work := recurrent_work(carry.cache, cache)) is not None:
        for field in dataclasses.fields(work):
            found[field.name] = getattr(counters, field.name) + active * getattr(work, field.name)
    counters = dataclasses.replace(counters, **found)
    lacking = (lengths > 0) & (read == 0)
    return hidden, read, dataclasses.replace(carry, cache=cache, counters=counters, lacking=lacking)


def _count_drafts(carry: Carry, drafter: Drafter, state: Any, proposal: Proposal, accepted: Array) -> Speculation:
    assert carry.speculation is not None
    counted = carry.speculation
    check_state(drafter, counted.state, state)
    drafted = jnp.where(carry.state == RUNNING, proposal.count, 0)
    return Speculation(state, counted.drafted + drafted, counted.accepted + accepted)


def _record_next(carry: Carry, logits: Array, position: Array) -> Carry:
    """Chooses a token for every running row from its logits [rows, vocab], and writes it down.

    `position` is the one that the token will have, int32 [rows].
    """
    with jax.named_scope("sample"):
        adjusted = adjust(only(carry.allowed, logits), carry.sampling, carry.history)
        token = sample(adjusted, carry.sampling, position)
    failed = carry.active & ~has_candidate(adjusted)
    number = (carry.active & ~failed).astype(jnp.int32)
    return record(carry, token[:, None], number, failed, logits[:, None], adjusted[:, None])


def _no_logprobs(rows: int, room: int, vocab: int) -> Logprobs:
    best = (rows, room, min(MOST_LOGPROBS, vocab))
    return Logprobs(jnp.zeros((rows, room), jnp.float32), jnp.zeros(best, jnp.int32), jnp.zeros(best, jnp.float32))
