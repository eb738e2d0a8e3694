"""The compiled loop of a generation: `generate_tokens` decodes the rows that `admit` let run."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Int
from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots, recurrent_work
from jaxbuf.models.packed import Packed, unpacked
from jaxbuf.serving.carry import RUNNING, Carry, Speculation, chosen_logprobs, record, reports
from jaxbuf.serving.kept_programs import keep
from jaxbuf.serving.sampling import adjust, asks_for_more, choose
from jaxbuf.serving.speculation import Drafter, Proposal, adjusted, check_state, propose, verify, with_root
from jaxbuf.serving.token_masks import only


@partial(jax.jit, donate_argnames="carry")
@keep(like=lambda model, carry, steps, drafter=None: carry)
def generate_tokens(
    model: decoder.Decoder | Packed[decoder.Decoder],
    carry: Carry,
    steps: Int[Array, ""] | int,
    drafter: Drafter | Packed[Drafter] | None = None,
) -> Carry:
    """Runs up to `steps` decoding steps; ends early when no row runs.

    A step gives every running row one token, or with a drafter up to 1 + draft_tokens. A row for which a pool of memory
    has no room rests, and gets none; when all running rows do, the call ends. All is one `lax.while_loop`:
    nothing returns to the host inside it, and the carry's memory is reused (it is donated, so the argument must not be
    used again). Call it again on what it returned to go on: the tokens do not depend on how a generation is cut into
    calls.

    Args:
      model: The parameters, the same as `admit` had. Who calls often passes them packed (`jaxbuf.models.packed`).
      carry: From `admit`, or from here.
      steps: Data: another number does not compile again.
      drafter: The one that `admit` had; packed, if it holds parameters.
    """
    model, drafter = unpacked(model), unpacked(drafter)
    asked, like = asks_for_more(carry.sampling), jax.eval_shape(lambda: carry)

    def running(loop):
        left, served, joined = loop
        return (left > 0) & served & jnp.any(_apart(like, joined).state == RUNNING)

    def step(loop):
        left, _, joined = loop
        carry = _apart(like, joined)
        after = _step(model, carry, drafter, asked)
        return left - 1, jnp.any((carry.state == RUNNING) & ~after.lacking), _join(after)

    first = jnp.asarray(steps, jnp.int32), jnp.asarray(True), _join(carry)
    return _apart(like, jax.lax.while_loop(running, step, first)[2])


def _is_of_slots(carry: Carry, x: Array | jax.ShapeDtypeStruct) -> bool:
    return x.dtype == jnp.int32 and x.shape == carry.cache.sequences.committed.shape


def _join(carry: Carry) -> tuple[Array, list[Array]]:
    """A carry as the loop has it: what is one integer of each slot, one below the other, and all other arrays.

    Each array that a step changes is a kernel of its own on a GPU, and often a copy before it, and a step changes some
    eight of these. Of one array they are one kernel.
    """
    leaves = jax.tree.leaves(carry)
    integers = jnp.stack([x for x in leaves if _is_of_slots(carry, x)])
    return integers, [x for x in leaves if not _is_of_slots(carry, x)]


def _apart(like: Carry, joined: tuple[Array, list[Array]]) -> Carry:
    """The carry, whose shapes `like` has, that `_join` made one array of."""
    leaves, tree = jax.tree.flatten(like)
    integers, others = (iter(x) for x in joined)
    return tree.unflatten([next(integers if _is_of_slots(like, x) else others) for x in leaves])


def _step(model: decoder.Decoder, carry: Carry, drafter: Drafter | None, asked: Array) -> Carry:
    """One step: the newest token of each running row is read, with drafts of what may follow it.

    The last token that a row gets is not read yet. So as many of the tokens that were read are committed as the row
    gets new ones; the drafts beyond them stay uncommitted, which is all that rejecting them takes. `asked` is that of
    `choose`.
    """
    active = (carry.state == RUNNING).astype(jnp.int32)
    if drafter is None:
        hidden, read, after = _read(model, carry, carry.last[:, None], active)
        logits = decoder.logits(model, hidden[:, 0])
        after = dataclasses.replace(after, cache=decoder.commit(after.cache, read))
        return _record_next(after, logits, carry.position + 1, asked)
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
    tokens, number, accepted, path, failed = verify(after, proposal, logits)

    def along_path(x):
        return x if path is None else jnp.take_along_axis(x, path[..., None], axis=1)

    hidden = along_path(hidden)
    missing = ((0, 0), (0, 1 + drafter.draft_tokens - read.shape[1]))
    state = drafter.settle(model, state, jnp.pad(hidden, (*missing, (0, 0))), jnp.pad(tokens, missing), number)
    after = dataclasses.replace(after, speculation=_count_drafts(carry, drafter, state, proposal, accepted))
    after = dataclasses.replace(after, cache=decoder.commit(after.cache, number, path=path))
    found = None
    if reports(carry):

        def changed():
            return along_path(adjusted(carry, proposal, logits))

        found = chosen_logprobs(carry.sampling, tokens, along_path(logits), changed)
    return record(after, tokens, number, failed, found)


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
    lacking = jnp.where(carry.state == RUNNING, (lengths > 0) & (read == 0), carry.lacking)
    return hidden, read, dataclasses.replace(carry, cache=cache, counters=counters, lacking=lacking)


def _count_drafts(carry: Carry, drafter: Drafter, state: Any, proposal: Proposal, accepted: Array) -> Speculation:
    assert carry.speculation is not None
    counted = carry.speculation
    check_state(drafter, counted.state, state)
    drafted = jnp.where(carry.state == RUNNING, proposal.count, 0)
    return Speculation(state, counted.drafted + drafted, counted.accepted + accepted)


def _record_next(carry: Carry, logits: Array, position: Array, asked: Array) -> Carry:
    """Chooses a token for every running row from its logits [rows, vocab], and writes it down.

    `position` is the one that the token will have, int32 [rows]; `asked` is that of `choose`.
    """
    with jax.named_scope("sample"):
        token, possible = choose(logits, carry.allowed, carry.sampling, carry.history, position, asked)
    failed = carry.active & ~possible
    number = (carry.active & ~failed).astype(jnp.int32)
    found = None
    if reports(carry):

        def adjusted():
            return adjust(only(carry.allowed, logits), carry.sampling, carry.history)[:, None]

        found = chosen_logprobs(carry.sampling, token[:, None], logits[:, None], adjusted)
    return record(carry, token[:, None], number, failed, found)
