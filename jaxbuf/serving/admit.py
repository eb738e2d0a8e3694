"""How requests enter the compiled loop and leave it: `init_carry`, `admit`, `release`.

`admit` reads prompts, or chunks of them, into rows that are empty, and lets those run whose prompt has ended; whatever
else is in the carry stays as it is. All are pure. Whatever differs between requests is data (sampling settings, seeds,
stop tokens, lengths, fold limits), so one program serves every batch of the same shape.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import distinct_slots
from jaxbuf.axes import Array, Bool, Int, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.models import decoder
from jaxbuf.models.cache import fold_limits, with_kv_limits, with_limits
from jaxbuf.models.config import ModelConfig
from jaxbuf.models.scoring import Logprobs, fitting_block, hidden_logprobs
from jaxbuf.serving.carry import (
    EMPTY,
    RUNNING,
    Carry,
    CarrySizes,
    Counters,
    Speculation,
    chosen_logprobs,
    get_rows,
    put_places,
    put_rows,
    record,
    reports,
    slots_of,
)
from jaxbuf.serving.kept_programs import keep
from jaxbuf.serving.sampling import (
    MOST_LOGPROBS,
    History,
    Sampling,
    SamplingParams,
    adjust,
    choose,
    pack,
)
from jaxbuf.serving.speculation import Drafter, Reading, drafts_trees
from jaxbuf.serving.token_masks import mask_words, only


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginning:
    """Rows that begin to run as soon as the prompts are read that they continue.

    Attributes:
      rows: The rows, none twice; a negative number: nothing.
      prompt: The place in `Arrivals` of the prompt that each continues.
      limit: The entries from which each folds, at most the carry's: 1 is the recurrent form.
      max_new_tokens: A row gets no more than the carry's capacity has room for behind its prompt.
      sampling: Of these rows.
      stop_ids: Padded with -1; n is the carry's.
      allowed: As in `Carry`.
      forks: Whether some row continues a prompt that is read into another row (static).
    """

    rows: Int32[Array, "begins"]
    prompt: Int32[Array, "begins"]
    limit: Int32[Array, "begins"]
    max_new_tokens: Int32[Array, "begins"]
    sampling: Sampling
    stop_ids: Int32[Array, "begins n"]
    allowed: Int32[Array, "begins words"]
    forks: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """A chunk of each of some prompts.

    Attributes:
      rows: The empty row that each prompt is read into, none twice; a negative number: nothing.
      tokens: Right-padded.
      lengths: The real ones.
      start: How many tokens of the prompt earlier chunks had. A row that has not read exactly so many rests.
      last: Whether the prompt ends with this chunk.
      begins: The rows that begin to run where a prompt ends; None: no token is drawn, and the rows stay empty. Who
        reads prompts for another loop finds in `Carry.hidden` what scores the next token.
      prompt_top: How many of the most probable tokens are reported beside each prompt token at most.
      kv_limit: Up to this many entries, at most the carry's, rows that continue a prompt read no checkpoint. Rows with
        a longer prompt fold all of it. None: every row has a checkpoint.
      report_prompt: Whether the log-probabilities of the prompts' tokens are reported (static).
    """

    rows: Int32[Array, "prompts"]
    tokens: Int32[Array, "prompts time"]
    lengths: Int32[Array, "prompts"]
    start: Int32[Array, "prompts"]
    last: Bool[Array, "prompts"]
    begins: Beginning | None = None
    prompt_top: Int32[Array, ""] | int = 0
    kv_limit: Int32[Array, "prompts"] | None = None
    report_prompt: bool = dataclasses.field(default=False, metadata={"static": True})


@partial(jax.jit, static_argnames=("config", "sizes"))
def init_carry(config: ModelConfig, sizes: CarrySizes, drafter: Drafter | None = None) -> Carry:
    """A carry whose rows are all empty.

    Args:
      config: The model's (static).
      sizes: What there is room for (static).
      drafter: Who will draft tokens; None: nobody.
    """
    rows, vocab = sizes.rows, config.vocab_size
    pools = {name: getattr(sizes, name) for name in ("kv_limit", "holds", "states", "blocks", "pages")}
    dtypes = {name: getattr(sizes, name) for name in ("dtype", "entry_dtype", "state_dtype", "target")}
    cache = decoder.init_cache(
        config,
        slots=rows,
        capacity=sizes.capacity,
        limit=sizes.limit,
        max_pending=1 if drafter is None else 1 + drafter.draft_tokens,
        trees=drafts_trees(drafter),
        **pools,
        **dtypes,
    )

    def integers(*shape: int) -> Array:
        return jnp.zeros((rows, *shape), jnp.int32)

    best = (rows, sizes.capacity if sizes.logprobs else 0, min(MOST_LOGPROBS, vocab))
    speculation = None
    if drafter is not None:
        speculation = Speculation(drafter.init(config, sizes), integers(), integers())
    return Carry(
        cache=cache,
        history=History(integers(sizes.capacity), integers(), integers(), integers(sizes.stop_ids) - 1),
        last=integers(),
        hidden=jnp.zeros((rows, config.hidden_size), sizes.dtype),
        state=integers() + EMPTY,
        max_new_tokens=integers(),
        sampling=_greedy(rows, sizes.biases),
        allowed=integers(mask_words(vocab)),
        logprobs=Logprobs(jnp.zeros(best[:2]), jnp.zeros(best, jnp.int32), jnp.zeros(best)),
        counters=Counters(integers(), integers(), integers(), integers()),
        lacking=jnp.zeros(rows, bool),
        speculation=speculation,
    )


@partial(jax.jit, donate_argnames="carry")
def admit(model: decoder.Decoder, carry: Carry, arrivals: Arrivals, drafter: Drafter | None = None) -> Carry:
    """Reads a chunk of prompts, and lets the rows run whose prompts end with it: each draws its first token.

    A row for which a pool of memory has no room, or whose text would be longer than the carry's capacity, reads nothing
    of the chunk and is in `carry.lacking`, as are the rows that would continue its prompt. Later chunks of it rest as
    well. Its position says how far it is, and the same chunk can come again once there is room; rows that read it the
    first time are left alone then.

    Forks of a chunk are done for all rows or, without room, for none: rows that read their own prompts run, and those
    that continue another's are lacking, stay empty, and can only read the prompt themselves.

    Args:
      model: The parameters.
      carry: Donated: the argument must not be used again.
      arrivals: The chunk. No activation is longer than it.
      drafter: The one that `init_carry` had.
    """
    return _admit(model, carry, arrivals, drafter)


def _new_carry(model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None) -> Carry:
    return init_carry(model.config, sizes, drafter)


@partial(jax.jit, static_argnames="sizes")
@keep(like=_new_carry)
def start(model: decoder.Decoder, sizes: CarrySizes, arrivals: Arrivals, drafter: Drafter | None = None) -> Carry:
    """`init_carry` and `admit` of the first chunk, compiled as one program."""
    return _admit(model, _new_carry(model, sizes, arrivals, drafter), arrivals, drafter, empty=True)


@partial(jax.jit, donate_argnames="carry")
def release(carry: Carry, rows: Int[Array, "n"]) -> Carry:
    """Empties rows for the next requests, and gives their memory back.

    Args:
      carry: Donated.
      rows: A negative number: nothing.
    """
    row = _checked(rows, carry)
    none = jnp.zeros_like(row)
    history = carry.history
    cleared = put_rows((history.prompt_length, history.length, carry.state), row, (none, none, none + EMPTY))
    return dataclasses.replace(
        carry,
        cache=decoder.reset(carry.cache, slots_of(row)),
        history=dataclasses.replace(history, prompt_length=cleared[0], length=cleared[1]),
        state=cleared[2],
        # What no row asks for is skipped, as long as no row's settings ask for it.
        sampling=put_rows(carry.sampling, row, _greedy(row.shape[0], carry.sampling.bias_ids.shape[1])),
        lacking=put_rows(carry.lacking, row, none > 0),
    )


def _greedy(rows: int, biases: int) -> Sampling:
    """The settings of rows that have no request."""
    return pack([SamplingParams(temperature=0.0)] * rows, biases=biases)


def _checked(rows: Array, carry: Carry) -> Array:
    """The rows int32 [n], with NOWHERE in place of what is no row, and of a row that was there before."""
    number = carry.last.shape[0]
    given = jnp.asarray(rows, jnp.int32)
    slots = distinct_slots(jnp.where((given >= 0) & (given < number), given + 1, 0), number + 1)
    return jnp.where(slots > 0, slots - 1, NOWHERE)


def _admit(
    model: decoder.Decoder, carry: Carry, arrivals: Arrivals, drafter: Drafter | None, *, empty: bool = False
) -> Carry:
    carry, reading = _read(model, carry, arrivals, empty=empty)
    if arrivals.begins is not None:
        carry, reading = _fork(carry, arrivals, arrivals.begins, reading)
        carry = _begin(model, carry, arrivals.begins, reading)
    if drafter is None:
        return carry
    speculation = carry.speculation
    assert speculation is not None
    none = jnp.zeros_like(reading.begins)
    counted = put_rows((speculation.drafted, speculation.accepted), reading.begins, (none, none))
    state = drafter.admit(model, carry, reading)
    return dataclasses.replace(carry, speculation=Speculation(state, *counted))


def _read(model: decoder.Decoder, carry: Carry, arrivals: Arrivals, *, empty: bool) -> tuple[Carry, Reading]:
    """Reads the chunk into the rows' memory and text; empty: whether no row of the carry holds anything."""
    row = _checked(arrivals.rows, carry)
    position, state, before = get_rows((carry.position, carry.state, carry.hidden), row)
    expected = (row < NOWHERE) & (position == arrivals.start) & (state == EMPTY)
    row = jnp.where(expected, row, NOWHERE)
    fits = arrivals.start + arrivals.lengths <= carry.history.tokens.shape[1]
    slots, wanted = slots_of(row), jnp.where(expected & fits, arrivals.lengths, 0)
    keep, cache = with_kv_limits(carry.cache, slots, arrivals.kv_limit)
    if not isinstance(keep, int):
        keep = jnp.where(arrivals.start + wanted <= keep, keep, 0)
    hidden, cache = decoder.prefill(model, cache, arrivals.tokens, lengths=wanted, slots=slots, keep=keep, empty=empty)
    read = jnp.where(expected, cache.sequences.committed[slots] - arrivals.start, 0)
    history = carry.history
    text = put_places(history.tokens, arrivals.tokens, arrivals.start, read, row)
    logprobs = carry.logprobs
    if arrivals.report_prompt:
        scoring = jnp.concatenate([before[:, None], hidden[:, :-1]], axis=1)  # each token is scored by the one before
        number, time = arrivals.tokens.shape
        block = fitting_block(number, time, model.config.vocab_size)
        top = {"top": MOST_LOGPROBS, "wanted": jnp.asarray(arrivals.prompt_top, jnp.int32) > 0}
        found = hidden_logprobs(model, scoring, arrivals.tokens, block=block, **top)
        logprobs = jax.tree.map(lambda old, new: put_places(old, new, arrivals.start, read, row), logprobs, found)
    newest = decoder.last_hidden(hidden, read)[:, 0]
    newest = put_rows(carry.hidden, jnp.where(read > 0, row, NOWHERE), newest)
    carry = dataclasses.replace(
        carry,
        cache=cache,
        history=dataclasses.replace(history, tokens=text),
        hidden=newest,
        logprobs=logprobs,
        lacking=put_rows(carry.lacking, row, read < arrivals.lengths),
    )
    nobody = jnp.zeros(0, jnp.int32)
    return carry, Reading(row, arrivals.tokens, arrivals.start, read, hidden, before, begins=nobody, source=nobody)


def _fork(carry: Carry, arrivals: Arrivals, begins: Beginning, reading: Reading) -> tuple[Carry, Reading]:
    """Gives rows that continue another row's prompt its memory and text, as soon as it was read to its end."""
    reader, row = _checked(arrivals.rows, carry), _checked(begins.rows, carry)
    ended = arrivals.last & (reading.lengths > 0)
    state, lacking = get_rows((carry.state, carry.lacking), reader)
    unread = arrivals.last & (reader < NOWHERE) & (state == EMPTY) & lacking
    source, unread = jnp.where(ended, reader, NOWHERE)[begins.prompt], unread[begins.prompt]
    state, position = get_rows((carry.state, carry.position), row)
    # Another row than the one that read the prompt may be in the midst of reading its own.
    free = (row == source) | (begins.forks & (position == 0))
    row = jnp.where(free & (state == EMPTY), row, NOWHERE)
    lacking = put_rows(carry.lacking, jnp.where(unread, row, NOWHERE), unread)
    carry, row = dataclasses.replace(carry, lacking=lacking), jnp.where(source < NOWHERE, row, NOWHERE)
    if begins.forks:
        cache = decoder.fork(carry.cache, slots_of(jnp.where(row < NOWHERE, source, NOWHERE)), slots_of(row))
        held = cache.sequences.committed
        served = held[slots_of(row)] == held[slots_of(source)]
        lacking = put_rows(carry.lacking, row, ~served)
        row = jnp.where(served, row, NOWHERE)
        both = carry.history.tokens, carry.hidden
        text, hidden = put_rows(both, row, get_rows(both, source))
        history = dataclasses.replace(carry.history, tokens=text)
        carry = dataclasses.replace(carry, cache=cache, history=history, hidden=hidden, lacking=lacking)
    return carry, dataclasses.replace(reading, begins=row, source=source, forks=begins.forks)


def _begin(model: decoder.Decoder, carry: Carry, begins: Beginning, reading: Reading) -> Carry:
    """Gives the rows that begin their settings, and draws the first token of each."""
    row = reading.begins
    length, hidden = get_rows((carry.position, carry.hidden), row)
    most = jnp.minimum(begins.max_new_tokens, carry.history.tokens.shape[1] - length)

    def put(old: Any, new: Any) -> Any:
        return put_rows(old, row, new)

    none, old = jnp.zeros_like(row), carry.history
    carry = dataclasses.replace(
        carry,
        cache=with_limits(carry.cache, put(fold_limits(carry.cache), begins.limit)),
        history=History(
            tokens=old.tokens,
            prompt_length=put(old.prompt_length, length),
            length=put(old.length, length),
            stop_ids=put(old.stop_ids, begins.stop_ids),
        ),
        state=put(carry.state, none + RUNNING),
        max_new_tokens=put(carry.max_new_tokens, most),
        sampling=put(carry.sampling, begins.sampling),
        allowed=put(carry.allowed, begins.allowed),
        counters=put(carry.counters, Counters(none, none, none, none)),
    )
    logits = decoder.logits(model, hidden)
    with jax.named_scope("sample"):
        history = get_rows(carry.history, row)
        token, possible = choose(logits, begins.allowed, begins.sampling, history, length)
    real = (row < NOWHERE) & (most > 0)
    rows = jnp.zeros_like(carry.last)
    number, failed = put(rows, (possible & real).astype(jnp.int32)), put(rows > 0, ~possible & real)
    found = None
    if reports(carry):

        def adjusted():
            return adjust(only(begins.allowed, logits), begins.sampling, history)[:, None]

        theirs = chosen_logprobs(begins.sampling, token[:, None], logits[:, None], adjusted)
        blank = jax.tree.map(lambda x: jnp.zeros((rows.shape[0], *x.shape[1:]), x.dtype), theirs)
        found = put(blank, theirs)
    return record(carry, put(rows, token)[:, None], number, failed, found)
