"""A batch of prompts on its way in and out: checked, packed into arrays, and read back as results."""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import loop
from jaxbuf.serving.sampling import SamplingParams, pack, whole
from jaxbuf.serving.stats import Stats, state_traffic
from jaxbuf.serving.text import cut_at_stop

log = logging.getLogger("jaxbuf")

type Prompt = str | Sequence[int]
type FinishReason = Literal["stop", "length", "unfinished"]
type Form = Literal["auto", "recurrent", "buffered"]

GREEDY = SamplingParams(temperature=0.0)
PROMPT_BUCKET = 64  # the smallest shapes that are compiled; larger ones are powers of two
ROOM = 16
STOP_IDS = 4
TOP = (0, 1, 5, 20)  # numbers of top tokens that are compiled for


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What one prompt led to.

    Attributes:
      text: The generated text, without stop and other special tokens, cut before a stop string; "" if the model has no
        tokenizer.
      tokens: The generated tokens, a stop token and the tokens of a stop string included.
      finish_reason: "stop" (a stop token or stop string), "length" (max_new_tokens), or "unfinished" (a stream that was
        cut short).
      stats: What decoding did and moved.
      logprobs: Log-probability of each token in the model's own distribution, before any setting changes it; None
        unless SamplingParams.logprobs asks.
      top_logprobs: For each token, the most probable tokens at its place with their log-probabilities, best first; None
        likewise.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments of a batch: what `loop.start` takes, and what its results are read with."""

    lm: LanguageModel
    prompts: list[list[int]]
    settings: list[SamplingParams]
    entry_dtype: jnp.dtype
    arguments: dict[str, Any]

    @property
    def has_stop_texts(self) -> bool:
        """Whether some prompt's text has to be looked at while it is generated."""
        return any(setting.stop_texts for setting in self.settings)


def check(lm, prompts, max_new_tokens, sampling, limit, form, entry_dtype) -> Request:
    """Checks and packs the arguments of `generate`; errors as there. prompts: a list, or a dict of names to prompts."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of texts or token lists, got one text: [{prompts[:20]!r}...]")
    for name, value in (("max_new_tokens", max_new_tokens), ("limit", limit)):
        if not whole(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if form not in ("auto", "recurrent", "buffered"):
        raise ValueError(f'form must be "auto", "recurrent" or "buffered", got {form!r}')
    if entry_dtype not in (None, "bfloat16", "float16", "float32"):
        raise ValueError(f'entry_dtype must be None, "bfloat16", "float16" or "float32", got {entry_dtype!r}')
    named = prompts if isinstance(prompts, dict) else {f"prompts[{i}]": prompt for i, prompt in enumerate(prompts)}
    encoded = [_encode(lm, prompt, name, max_new_tokens) for name, prompt in named.items()]
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(settings) != len(prompts):
        raise ValueError(f"sampling must be one SamplingParams or one a prompt ({len(prompts)}), got {len(settings)}")

    for i, setting in enumerate(settings):
        outside = [token for token in setting.logit_bias if token >= lm.vocab_size]
        if outside:
            raise ValueError(f"logit_bias must name token ids in [0, {lm.vocab_size}), got {outside[0]} (prompt {i})")
        if setting.stop_texts and lm.tokenizer is None:
            raise ValueError(f"stop must be empty for a model without a tokenizer, got {setting.stop!r} (prompt {i})")

    rows = _power_of_two(len(encoded), 1)
    bucket = _power_of_two(max(map(len, encoded)), PROMPT_BUCKET)
    room = _power_of_two(max_new_tokens, ROOM)
    padding = rows - len(encoded)
    tokens = np.zeros((rows, bucket), np.int32)
    for row, prompt in enumerate(encoded):
        tokens[row, : len(prompt)] = prompt
    stops = [tuple(s.stop_token_ids) + (() if s.ignore_eos else tuple(lm.stop_ids)) for s in settings]
    stop_ids = np.full((rows, _power_of_two(max(map(len, stops)), STOP_IDS)), -1, np.int32)
    for row, ids in enumerate(stops):
        stop_ids[row, : len(ids)] = ids
    asked = max((s.logprobs for s in settings if s.logprobs is not None), default=None)
    dtype = jnp.dtype(lm.dtype if entry_dtype is None else entry_dtype)
    shape = (rows, bucket, room, limit, dtype.name)
    log.debug("generating: rows %d, prompt bucket %d, room %d, limit %d, entries %s", *shape)
    arguments = {
        "prompts": tokens,
        "lengths": np.array([len(p) for p in encoded] + [0] * padding, np.int32),
        "limit": np.full(rows, 1 if form == "recurrent" else limit, np.int32),
        "max_new_tokens": np.full(rows, max_new_tokens, np.int32),
        "sampling": pack(settings + [GREEDY] * padding),
        "stop_ids": stop_ids,
        "allowed": lm.known_ids,
        "capacity": bucket + room,
        "room": room,
        "ring_limit": limit,
        "entry_dtype": dtype,
        "top": None if asked is None else min(top for top in TOP if top >= asked),
    }
    return Request(lm, encoded, settings, dtype, arguments)


def _encode(lm: LanguageModel, prompt: Prompt, name: str, max_new_tokens: int) -> list[int]:
    if not isinstance(prompt, str) and not (isinstance(prompt, Iterable) and all(map(whole, prompt))):
        raise ValueError(f"{name} must be a text or a list of token ids, got {prompt!r}")
    tokens = lm.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not tokens:
        raise ValueError(f"{name} must hold at least one token, got {prompt!r}")
    outside = [token for token in tokens if not 0 <= token < lm.vocab_size]
    if outside:
        raise ValueError(f"{name} must hold token ids in [0, {lm.vocab_size}), got {outside[0]}")
    if len(tokens) + max_new_tokens > lm.max_length:
        raise ValueError(
            f"{name} ({len(tokens)} tokens) and max_new_tokens ({max_new_tokens}) together must be at most "
            f"max_position_embeddings ({lm.max_length})"
        )
    return tokens


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length()) if number > 0 else least


def results(request: Request, carry: loop.Carry) -> tuple[list[GenerationResult], np.ndarray]:
    """What every prompt led to so far, and the rows' states with those added that a stop string ends."""
    fetched = (carry.history.tokens, carry.history.count, carry.state, carry.counters)
    tokens, count, state, counters = jax.device_get(fetched)
    logprobs, top_ids, top_logprobs = jax.device_get((carry.logprobs, carry.top_ids, carry.top_logprobs))
    reasons: dict[int, FinishReason] = {loop.RUNNING: "unfinished", loop.STOPPED: "stop", loop.FULL: "length"}
    state, found = state.copy(), []
    for row, (prompt, setting) in enumerate(zip(request.prompts, request.settings, strict=True)):
        new = tokens[row, : count[row]].tolist()
        text = request.lm.decode(new) if request.lm.tokenizer is not None else ""
        if setting.stop_texts:
            text, new, stopped = cut_at_stop(text, new, setting.stop_texts, request.lm.decode)
            state[row] = loop.STOPPED if stopped else state[row]
        names = ("steps", "folds", "checkpoint_reads", "live_entries")
        stats = _stats(request, len(prompt), len(new), **{name: int(getattr(counters, name)[row]) for name in names})
        result = GenerationResult(text, new, reasons[int(state[row])], stats)
        if setting.logprobs is not None:
            pairs = zip(top_ids[row, : len(new)].tolist(), top_logprobs[row, : len(new)].tolist(), strict=True)
            top = [dict(list(zip(ids, values, strict=True))[: setting.logprobs]) for ids, values in pairs]
            result = dataclasses.replace(result, logprobs=logprobs[row, : len(new)].tolist(), top_logprobs=top)
        found.append(result)
    return found, state


def _stats(request: Request, prompt_tokens: int, new_tokens: int, **counted: int) -> Stats:
    config = request.lm.config
    traffic = state_traffic(
        config.spec,
        config.layer_types.count("linear_attention"),
        **counted,
        state_dtype=jnp.float32,
        entry_dtype=request.entry_dtype,
    )
    return Stats(prompt_tokens, new_tokens, **counted, drafted=0, accepted=0, bytes=traffic)
