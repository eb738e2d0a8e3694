"""Beam search: the most probable continuations, by one compiled loop over beams that share what they have in common."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Float, Float32, Int, Int32
from jaxbuf.models import decoder
from jaxbuf.models.cache import all_slots, with_limits
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.packed import Packed, pack, unpacked
from jaxbuf.models.shapes import power_of_two_from
from jaxbuf.progress import progress_bar
from jaxbuf.serving.batch import (
    ROOM,
    Decoding,
    Form,
    Prompt,
    check_model,
    check_settings,
    check_token_ids,
    choose_form,
    choose_ring,
    choose_state_dtype,
    data,
    encode_prompts,
    padded_sizes,
    shared_sizes,
    split_prompts,
)
from jaxbuf.serving.carry import FULL, RUNNING, STOPPED, CarrySizes
from jaxbuf.serving.generation import read_prompts
from jaxbuf.serving.sampling import SamplingParams, has_candidate, is_finite, whole
from jaxbuf.serving.slices import run_slices
from jaxbuf.serving.text import TextStream
from jaxbuf.serving.token_masks import only, pack_mask

log = logging.getLogger("jaxbuf")

STEEPEST = 5  # of length penalties: length ** penalty stays a float32
MOST_BEAMS = 256  # of a prompt: a mistake beyond, which would take all memory


@dataclasses.dataclass(frozen=True)
class Beam:
    """One continuation that beam search found.

    Attributes:
      text: Without the stop token and special tokens; "" if the model has no tokenizer.
      tokens: The generated tokens, a stop token included.
      score: The sum of their log-probabilities (natural logarithms) in the model's own distribution.
      ranking_score: score / len(tokens) ** length_penalty, by which beams are ordered.
      finish_reason: "stop" (a stop token) or "length" (max_new_tokens).
    """

    text: str
    tokens: list[int]
    score: float
    ranking_score: float
    finish_reason: Literal["stop", "length"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ended:
    """The best hypotheses of each prompt that ended at a stop token, best first.

    Attributes:
      rank: The ranking score; -inf where there is none.
      score: f32.
      length: Its tokens, the stop token included.
      parent, token: The beam that it ended from, and the stop token.
    """

    rank: Float32[Array, "prompts beams"]
    score: Float32[Array, "prompts beams"]
    length: Int32[Array, "prompts beams"]
    parent: Int32[Array, "prompts beams"]
    token: Int32[Array, "prompts beams"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """A beam search between two steps. Beam b of prompt p has the slot 1 + p · beams + b.

    Attributes:
      cache: The model's memory.
      last: The newest token of each beam, which the model has not read yet.
      score: Best first; -inf for a beam that is not alive.
      tokens, parents: Of each step the token that every beam went on with, and the beam of the step before that it went
        on from.
      length: Tokens of each beam of a running prompt.
      state: RUNNING, STOPPED (the ended hypotheses are the result) or FULL (the beams compete, too).
      ended: What ended so far.
      stop_ids: Padded with -1.
      allowed: The tokens that may be chosen, as bits (see `token_masks`).
      max_new_tokens, length_penalty, early_stopping: As in `beam_search`.
      failed: Whether some hypothesis was given up because the logits after it were NaN or infinite.
    """

    cache: decoder.Cache
    last: Int32[Array, "prompts beams"]
    score: Float32[Array, "prompts beams"]
    tokens: Int32[Array, "room prompts beams"]
    parents: Int32[Array, "room prompts beams"]
    length: Int32[Array, ""]
    state: Int32[Array, "prompts"]
    ended: Ended
    stop_ids: Int32[Array, "n"]
    allowed: Int32[Array, "prompts words"]
    max_new_tokens: Int32[Array, ""]
    length_penalty: Float32[Array, ""]
    early_stopping: Bool[Array, ""]
    failed: Bool[Array, ""]


def beam_search(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    max_new_tokens: int = 64,
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool = True,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    state_dtype: str | None = None,
    progress: bool | None = None,
) -> list[list[Beam]]:
    """Searches the continuations of highest probability of every prompt, all of them in one batch and one loop.

    Each step extends the `beams` best hypotheses of a prompt by every token and looks at the best of all of these. What
    ends in a stop token and is among the best `beams` is put aside as ended; the best `beams` that do not end go on.
    Ended ones are ranked by score / length ** length_penalty, where the score is the sum of the log-probabilities and
    the length counts the generated tokens with the stop token; the best `beams` of them are kept. Of equal scores the
    one of the better beam comes first, then the lower token id; of equal ranks the one that ended earlier.

    The search of a prompt ends as soon as `beams` hypotheses have ended. With early_stopping=False it goes on until no
    running beam could rank above the worst of these, even if each of its further tokens had probability 1 (as many as
    max_new_tokens allows; for a negative penalty, one). At max_new_tokens it ends in any case, and what did not end is
    ranked with what did. So one beam is greedy decoding, with the default early stopping.

    A prompt is read once. Beams share the memory of what they have in common: going on from another beam copies what
    is partly filled (a page of each softmax layer, two blocks of entries and the convolution's inputs of each recurrent
    one), no state. Compilation happens once for a shape: the numbers of prompts, beams and stop tokens, the longest
    prompt and max_new_tokens. Penalty and stop tokens are data; the
    recurrent form is a program of its own.

    Args:
      lm: From `jaxbuf.load`.
      prompts: As in `generate`.
      max_new_tokens: The most tokens of a continuation.
      beams: How many hypotheses go on, and how many come back; at most 256.
      length_penalty: The exponent of the length, in [-5, 5]. 0 ranks by probability alone, which favours short ones; 1
        by the mean log-probability of a token.
      early_stopping: Whether to end when `beams` hypotheses have ended, though a longer one might rank above them.
      stop_token_ids: Tokens that end a hypothesis, beside the model's own.
      ignore_eos: Do not end at the model's own end tokens.
      limit, form, entry_dtype, state_dtype, progress: As in `generate`; but beams always have a checkpoint, and "kv" is
        "buffered" here.

    Returns:
      For each prompt, in order, its beams, best ranking score first: `beams` of them, fewer only where the vocabulary
      has no more, or where the model's logits are NaN or infinite: such a hypothesis is given up, with a warning in the
      log.

    Raises:
      ValueError: A setting out of range, or a prompt that `generate` would not take.
    """
    check_model(lm)
    check_settings(Decoding(max_new_tokens, limit, form, entry_dtype, state_dtype))
    check_beams(beams, length_penalty)
    if not isinstance(early_stopping, bool):
        raise ValueError(f"early_stopping must be True or False, got {early_stopping!r}")
    setting = SamplingParams(stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)  # checks them
    check_token_ids(lm, "stop_token_ids", setting.stop_token_ids)
    encoded = encode_prompts(lm, prompts, max_new_tokens)
    if not encoded:
        return []
    number, bucket = padded_sizes(encoded)
    room = power_of_two_from(max_new_tokens, ROOM)
    capacity = bucket + room
    stops = [*setting.stop_token_ids, *(() if ignore_eos else lm.stop_ids)]
    form = choose_form(lm, form, len(encoded) * beams)
    sizes = CarrySizes(
        rows=number * beams,
        capacity=capacity,
        limit=choose_ring(form, limit, capacity),
        dtype=lm.model.embed_tokens[...].dtype,
        entry_dtype=jnp.dtype(lm.dtype if entry_dtype is None else entry_dtype),
        state_dtype=choose_state_dtype(state_dtype),
        target=lm.target,
    )
    if beams > 1:
        sizes = shared_sizes(sizes, prompts=number, prompt_tokens=bucket, again=True)
    settings = Settings(
        limit=data(np.int32(1 if form == "recurrent" else min(limit, capacity))),
        stop_ids=data(np.array(stops + [-1] * (power_of_two_from(len(stops)) - len(stops)), np.int32)),
        allowed=data(np.tile(pack_mask(lm.known_ids), (number, 1))),
        max_new_tokens=data(np.int32(max_new_tokens)),
        length_penalty=data(np.float32(length_penalty)),
        early_stopping=data(np.bool_(early_stopping)),
    )
    with progress_bar(max_new_tokens, progress) as report:
        report("compiling, reading prompts", 0)
        readers = range(0, beams * len(encoded), beams)
        carry = read_prompts(lm, sizes, list(split_prompts(encoded, readers)))
        search = start_beams(lm.model, carry.cache, carry.hidden, settings, beams=beams, room=room)

        def look(search: Search) -> bool:
            state, length = jax.device_get((search.state, search.length))
            report("searching", int(length))
            return bool((state == RUNNING).any())

        model = pack(lm.model)

        def run(search: Search, steps: int) -> Search:
            return search_beams(model, search, np.int32(steps))

        search, _ = run_slices(run, search, max_new_tokens, look)
    decoder.raise_exhausted(search.cache)
    if bool(search.failed):
        log.warning("beam search gave hypotheses up: the model's logits after them are NaN or infinite")
    return _read(lm, search, len(encoded))


def check_beams(beams: int, length_penalty: float = 1.0) -> None:
    """Raises ValueError as `beam_search` does."""
    if not whole(beams) or not 1 <= beams <= MOST_BEAMS:
        raise ValueError(f"beams must be a whole number in [1, {MOST_BEAMS}], got {beams!r}")
    if not is_finite(length_penalty) or abs(length_penalty) > STEEPEST:
        raise ValueError(f"length_penalty must be a number in [-{STEEPEST}, {STEEPEST}], got {length_penalty!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """What a search is asked for.

    Attributes:
      limit: Entries from which slots fold.
      stop_ids: Padded with -1.
      allowed, max_new_tokens, length_penalty, early_stopping: As in `Search`.
    """

    limit: Int32[Array, ""]
    stop_ids: Int32[Array, "n"]
    allowed: Int32[Array, "prompts words"]
    max_new_tokens: Int32[Array, ""]
    length_penalty: Float32[Array, ""]
    early_stopping: Bool[Array, ""]


@partial(jax.jit, static_argnames=("beams", "room"), donate_argnames="cache")
def start_beams(
    model: decoder.Decoder,
    cache: decoder.Cache,
    hidden: Float[Array, "rows hidden"],
    settings: Settings,
    *,
    beams: int,
    room: int,
) -> Search:
    """Chooses the first token of every beam.

    Args:
      model: The parameters.
      cache: After `admit` read every prompt into the row of its first beam; rows that none was read into are padding.
        Donated.
      hidden: The carry's.
      settings: What is asked for.
      beams: Of each prompt (static, as the following).
      room: Tokens that can be generated.
    """
    number = hidden.shape[0] // beams
    read = cache.sequences.committed[1::beams] > 0
    logits = decoder.logits(model, hidden[::beams, None])

    def integers(*shape):
        return jnp.zeros(shape, jnp.int32)

    nothing = jnp.full((number, beams), -jnp.inf)
    each = [integers(number, beams) for _ in range(3)]
    search = Search(
        cache=with_limits(cache, settings.limit),
        last=integers(number, beams),
        score=nothing.at[:, 0].set(0.0),
        tokens=integers(room, number, beams),
        parents=integers(room, number, beams),
        length=integers(),
        state=jnp.where(read, RUNNING, STOPPED).astype(jnp.int32),
        ended=Ended(nothing, nothing, *each),
        stop_ids=settings.stop_ids,
        allowed=settings.allowed,
        max_new_tokens=settings.max_new_tokens,
        length_penalty=settings.length_penalty,
        early_stopping=settings.early_stopping,
        failed=jnp.asarray(False),
    )
    return _advance(search, logits)


@partial(jax.jit, donate_argnames="search")
def search_beams(
    model: decoder.Decoder | Packed[decoder.Decoder], search: Search, steps: Int[Array, ""] | int
) -> Search:
    """Runs up to `steps` steps of a search: one `lax.while_loop`, inside which nothing returns to the host.

    Args:
      model: The parameters, the same as `start_beams` had; packed or not, as `generate_tokens` has them.
      search: From there, or from here. Its memory is reused (it is donated, so the argument must not be used again).
      steps: Data: another number does not compile again.
    """
    model = unpacked(model)

    def running(loop):
        left, search = loop
        return (left > 0) & jnp.any(search.state == RUNNING)

    def step(loop):
        left, search = loop
        alive = _alive(search).reshape(-1).astype(jnp.int32)
        hidden, cache = decoder.extend(model, search.cache, search.last.reshape(-1, 1), lengths=alive)
        logits = decoder.logits(model, hidden[:, 0]).reshape(*search.last.shape, -1)
        return left - 1, _advance(dataclasses.replace(search, cache=decoder.commit(cache, alive)), logits)

    return jax.lax.while_loop(running, step, (jnp.asarray(steps, jnp.int32), search))[1]


def _alive(search: Search) -> Array:
    """bool [prompts, beams]: which beams go on."""
    return (search.state == RUNNING)[:, None] & (search.score > -jnp.inf)


def _advance(search: Search, logits: Array) -> Search:
    """The next token of every beam, from f32 [prompts, n, vocab] after each of the first n beams, and their memory."""
    with jax.named_scope("beams"):
        search, parent = _choose(search, logits)
        prompts, beams = search.last.shape
        if beams == 1:
            return search
        slot = 1 + beams * jnp.arange(prompts, dtype=jnp.int32)[:, None] + parent
        source = jnp.where(_alive(search), slot, 0)
        return dataclasses.replace(
            search, cache=decoder.fork(search.cache, source.reshape(-1), all_slots(search.cache))
        )


def _choose(search: Search, logits: Array) -> tuple[Search, Array]:
    """The search after a step, but for its memory, and int32 [prompts, beams] the beam that each one goes on from."""
    (prompts, beams), (_, number, vocab) = search.last.shape, logits.shape
    alive = (search.state == RUNNING)[:, None] & (search.score[:, :number] > -jnp.inf)
    possible = has_candidate(logits)
    score = search.score[:, :number, None] + jax.nn.log_softmax(logits, axis=-1)
    score = only(search.allowed, jnp.where(possible[..., None], score, -jnp.inf))
    score = score.reshape(prompts, number * vocab)
    # Of the best of all, at most one a beam and stop token ends: so many hold the best `beams` that do not end.
    most = (1 + search.stop_ids.shape[0]) * beams
    score = jnp.pad(score, ((0, 0), (0, max(most - number * vocab, 0))), constant_values=-jnp.inf)
    score, place = jax.lax.top_k(score, most)
    parent, token = jnp.minimum(place // vocab, number - 1), place % vocab
    ends = jnp.any(token[..., None] == search.stop_ids[None, None], axis=-1)
    length = search.length + 1

    ended = jnp.where(ends[:, :beams], score[:, :beams], -jnp.inf)
    new = Ended(
        _rank(search, ended, length),
        ended,
        jnp.full((prompts, beams), length),
        parent[:, :beams],
        token[:, :beams],
    )
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), search.ended, new)
    _, best = jax.lax.top_k(both.rank, beams)
    ended = jax.tree.map(lambda x: jnp.take_along_axis(x, best, axis=1), both)

    score, best = jax.lax.top_k(jnp.where(ends, -jnp.inf, score), beams)
    parent, token = (jnp.take_along_axis(x, best, axis=1) for x in (parent, token))

    # The score can only fall, so this length ranks a beam's best continuation best.
    most_favourable = jnp.where(search.length_penalty < 0, length + 1, search.max_new_tokens)
    longest = jnp.minimum(most_favourable, search.max_new_tokens)
    worst = ended.rank[:, -1]
    settled = (worst > -jnp.inf) & (search.early_stopping | (_rank(search, score[:, 0], longest) <= worst))
    state = jnp.where(length >= search.max_new_tokens, FULL, RUNNING)
    state = jnp.where(settled | (score[:, 0] == -jnp.inf), STOPPED, state).astype(jnp.int32)

    running = search.state == RUNNING

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(running.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)

    after = dataclasses.replace(
        search,
        last=keep(token, search.last),
        score=keep(score, search.score),
        tokens=search.tokens.at[search.length].set(token),
        parents=search.parents.at[search.length].set(parent),
        length=length,
        state=keep(state, search.state),
        ended=keep(ended, search.ended),
        failed=search.failed | jnp.any(alive & ~possible),
    )
    return after, parent


def _rank(search: Search, score: Array, length: Array) -> Array:
    """score / length ** length_penalty."""
    return score / length.astype(jnp.float32) ** search.length_penalty


def _read(lm: LanguageModel, search: Search, prompts: int) -> list[list[Beam]]:
    """The results, from the arrays of a search that has ended."""
    rank = _rank(search, search.score, search.max_new_tokens)
    fetched = search.tokens, search.parents, search.state, search.score, rank, search.ended
    tokens, parents, state, score, rank, ended = jax.device_get(fetched)
    length, beams = int(search.max_new_tokens), score.shape[1]

    def trace(prompt: int, length: int, beam: int) -> list[int]:
        """The first `length` tokens of a beam of that step."""
        found = []
        for step in reversed(range(length)):
            found.append(int(tokens[step, prompt, beam]))
            beam = int(parents[step, prompt, beam])
        return found[::-1]

    def make(found: list[int], score: float, rank: float, stopped: bool) -> Beam:
        text = TextStream(lm.tokenizer).extend(found[: len(found) - stopped], last=True)
        return Beam(text, found, float(score), float(rank), "stop" if stopped else "length")

    def read(prompt: int) -> list[Beam]:
        found = []
        for i in np.flatnonzero(ended.rank[prompt] > -np.inf):
            parent, token = int(ended.parent[prompt, i]), int(ended.token[prompt, i])
            text = [*trace(prompt, int(ended.length[prompt, i]) - 1, parent), token]
            found.append(make(text, ended.score[prompt, i], ended.rank[prompt, i], True))
        if state[prompt] == FULL:
            for i in np.flatnonzero(score[prompt] > -np.inf):
                found.append(make(trace(prompt, length, int(i)), score[prompt, i], rank[prompt, i], False))
        return sorted(found, key=lambda beam: -beam.ranking_score)[:beams]

    return [read(prompt) for prompt in range(prompts)]
