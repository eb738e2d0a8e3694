"""How requests enter the compiled loop and leave it: `init_carry`, `admit`, `release`.

`admit` reads prompts, or chunks of them, into rows that are empty, and lets those run whose prompt has ended; whatever
else is in the carry stays as it is. All are pure. Whatever differs between requests is data (sampling settings, seeds,
stop tokens, lengths, fold limits), so one program serves every batch of the same shape.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxbuf.arguments import distinct_slots
from jaxbuf.axes import Array, Float, Int, Int32
from jaxbuf.memory.ownership import NOWHERE
from jaxbuf.models import decoder
from jaxbuf.models.cache import Plans, fold_limits, with_kv_limits, with_limits
from jaxbuf.models.config import LayerConfig, ModelConfig
from jaxbuf.models.scoring import Logprobs, fitting_block, hidden_logprobs
from jaxbuf.serving.arrivals import Arrivals, Beginning
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
    return admit_chunk(model, carry, arrivals, drafter)


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """Where a chunk of prompts is read into, as it was decided before the first layer.

    Attributes:
      rows: Of the carry; NOWHERE where nothing is read.
      before: The model's hidden states of the tokens before the chunk.
      plans: Of the layers.
    """

    rows: Int32[Array, "prompts"]
    before: Float[Array, "prompts hidden"]
    plans: Plans

    def shared_by(self, layers: Iterable[LayerConfig]) -> "Placed":
        """The same with plans from `decoder.share_plans`, for layers that are programs of their own."""
        return dataclasses.replace(self, plans=decoder.share_plans(layers, self.plans))


def admit_chunk(
    model: decoder.Decoder, carry: Carry, arrivals: Arrivals, drafter: Drafter | None, *, empty: bool = False
) -> Carry:
    """`admit` for a program that does more than that; empty: whether no row of the carry holds anything."""
    carry, placed, x = begin_chunk(model, carry, arrivals, empty=empty)
    x, memories = decoder.apply_layers(model.config.mesh, model.layers, x, carry.cache.layers, placed.plans)
    return end_chunk(model, with_memories(carry, memories), placed, x, arrivals, drafter)


def with_memories(carry: Carry, memories: tuple[Any, ...]) -> Carry:
    """The carry with other memories of the layers."""
    return dataclasses.replace(carry, cache=dataclasses.replace(carry.cache, layers=memories))


def begin_chunk(
    model: decoder.Decoder, carry: Carry, arrivals: Arrivals, *, empty: bool
) -> tuple[Carry, Placed, Float[Array, "prompts time hidden"]]:
    """What `admit` does before the layers.

    Args:
      model, carry, arrivals: As in `admit`.
      empty: Whether no row of the carry holds anything (static).

    Returns:
      The carry, whose memory has the integers that it will have behind the layers; where the chunk goes; and what the
      first layer reads.
    """
    row = _checked(arrivals.rows, carry)
    position, state, before = get_rows((carry.position, carry.state, carry.hidden), row)
    expected = (row < NOWHERE) & (position == arrivals.start) & (state == EMPTY)
    row = jnp.where(expected, row, NOWHERE)
    fits = arrivals.start + arrivals.lengths <= carry.history.tokens.shape[1]
    slots, wanted = slots_of(row), jnp.where(expected & fits, arrivals.lengths, 0)
    keep, cache = with_kv_limits(carry.cache, slots, arrivals.kv_limit)
    if not isinstance(keep, int):
        keep = jnp.where(arrivals.start + wanted <= keep, keep, 0)
    given = {"lengths": wanted, "slots": slots, "keep": keep, "empty": empty}
    plans, cache = decoder.begin_prefill(cache, arrivals.tokens, **given)
    placed = Placed(row, before, plans)
    return dataclasses.replace(carry, cache=cache), placed, decoder.embed(model, arrivals.tokens)


def end_chunk(
    model: decoder.Decoder,
    carry: Carry,
    placed: Placed,
    x: Float[Array, "prompts time hidden"],
    arrivals: Arrivals,
    drafter: Drafter | None,
) -> Carry:
    """What `admit` does behind the layers.

    Args:
      model, arrivals, drafter: As in `admit`.
      carry: From `begin_chunk`, with the memories that the layers returned.
      placed: From `begin_chunk`.
      x: What the last layer returned.
    """
    carry, reading = _read(model, carry, placed, x, arrivals)
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


def _read(model: decoder.Decoder, carry: Carry, placed: Placed, x: Array, arrivals: Arrivals) -> tuple[Carry, Reading]:
    """Writes down what the layers read of a chunk: its text, hidden states and log-probabilities."""
    row, before, hidden = placed.rows, placed.before, decoder.final_norm(model, x)
    held = carry.cache.sequences.committed[slots_of(row)]
    read = jnp.where(row < NOWHERE, held - arrivals.start, 0)
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
