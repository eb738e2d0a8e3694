"""Text in, text out: what people call, over the two compiled programs of `loop.py`."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.qwen3_5_config import Config
from jaxbuf.serving import loop
from jaxbuf.serving.sampling import SamplingParams, pack
from jaxbuf.serving.stats import Stats, state_traffic

log = logging.getLogger("jaxbuf")

type Prompt = str | Sequence[int]
type FinishReason = Literal["stop", "length", "unfinished"]
type Form = Literal["auto", "recurrent", "buffered"]

GREEDY = SamplingParams(temperature=0.0)
PROMPT_BUCKET = 64  # the smallest shapes that are compiled; larger ones are powers of two
ROOM = 16
STOP_IDS = 4


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What one prompt led to.

    Attributes:
      text: The generated text, without stop and other special tokens; "" if the model has no tokenizer.
      tokens: The generated tokens, a stop token included.
      finish_reason: "stop" (a stop token), "length" (max_new_tokens), or "unfinished" (a stream that was cut short).
      stats: What decoding did and moved.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of a stream: new text, the tokens behind it, and the result so far (`done` on the last event)."""

    text: str
    tokens: list[int]
    result: GenerationResult
    done: bool


@dataclasses.dataclass(frozen=True)
class _Request:
    """Checked arguments of a batch, and the settings that its results are counted with."""

    lm: LanguageModel
    prompts: list[list[int]]
    entry_dtype: jnp.dtype
    arguments: dict


def generate(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 64,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
) -> list[GenerationResult]:
    """Continues every prompt, all of them in one batch and one compiled loop.

    Compilation happens once for a shape: the number of prompts, the longest prompt and max_new_tokens, each rounded up
    to a power of two. Sampling settings, seeds, stop tokens and the form are data.

    Args:
      lm: From `jaxbuf.load`.
      prompts: Texts, or token lists; lengths may differ.
      max_new_tokens: The most tokens to generate for each.
      sampling: One for all prompts, or one each; greedy by default.
      limit: Entries from which the buffered form folds its ring into the checkpoint.
      form: "recurrent" writes the state every step; "buffered" every `limit` steps. The tokens are the same up to
        rounding. "auto" is "buffered" for now.
      entry_dtype: "bfloat16", "float16" or "float32" for the ring's keys and updates; None: the compute dtype.

    Returns:
      One result a prompt, in order.

    Raises:
      ValueError: An empty prompt, one that with max_new_tokens exceeds the model's max_position_embeddings, a token
        outside the vocabulary, or a setting out of range.
    """
    if not prompts:
        return []
    request = _check(lm, prompts, max_new_tokens, sampling, limit, form, entry_dtype)
    carry = loop.start(lm.model, **request.arguments)
    carry = loop.generate_tokens(lm.model, carry, np.int32(max_new_tokens - 1))
    return _results(request, carry)


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int = 64,
    sampling: SamplingParams = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    segment: int = 16,
) -> Iterator[Event]:
    """Continues one prompt and yields the text as it comes, `segment` tokens at a time from the same compiled program.

    Text that ends inside a character (its bytes are split over tokens) is held back until it is whole, so the pieces
    together are exactly `generate`'s text. Arguments and errors are `generate`'s.

    Args:
      segment: Tokens between two events, at least 1.
    """
    if segment < 1:
        raise ValueError(f"segment must be at least 1, got {segment}")
    return _events(_check(lm, [prompt], max_new_tokens, sampling, limit, form, entry_dtype), segment)


def _events(request: _Request, segment: int) -> Iterator[Event]:
    lm = request.lm
    carry = loop.start(lm.model, **request.arguments)
    said, seen = "", 0
    while True:
        (result,) = _results(request, carry)
        done = result.finish_reason != "unfinished"
        whole = result.text if done else result.text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield Event(whole[len(said) :], result.tokens[seen:], result, done)
        if done:
            return
        said, seen = whole, len(result.tokens)
        carry = loop.generate_tokens(lm.model, carry, np.int32(segment))


def _check(lm, prompts, max_new_tokens, sampling, limit, form, entry_dtype) -> _Request:
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list of texts or token lists, got one text: [{prompts[:20]!r}...]")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if form not in ("auto", "recurrent", "buffered"):
        raise ValueError(f'form must be "auto", "recurrent" or "buffered", got {form!r}')
    if entry_dtype not in (None, "bfloat16", "float16", "float32"):
        raise ValueError(f'entry_dtype must be None, "bfloat16", "float16" or "float32", got {entry_dtype!r}')
    encoded = [_encode(lm, prompt, f"prompts[{i}]", max_new_tokens) for i, prompt in enumerate(prompts)]
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(settings) != len(prompts):
        raise ValueError(f"sampling must be one SamplingParams or one a prompt ({len(prompts)}), got {len(settings)}")

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
        "capacity": bucket + room,
        "room": room,
        "ring_limit": limit,
        "entry_dtype": dtype,
    }
    return _Request(lm, encoded, dtype, arguments)


def _encode(lm: LanguageModel, prompt: Prompt, name: str, max_new_tokens: int) -> list[int]:
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


def _results(request: _Request, carry: loop.Carry) -> list[GenerationResult]:
    tokens, count, state, counters = jax.device_get((carry.tokens, carry.count, carry.state, carry.counters))
    reasons: dict[int, FinishReason] = {loop.RUNNING: "unfinished", loop.STOPPED: "stop", loop.FULL: "length"}
    results = []
    for row, prompt in enumerate(request.prompts):
        new = tokens[row, : count[row]].tolist()
        counted = {
            "steps": int(counters.steps[row]),
            "folds": int(counters.folds[row]),
            "checkpoint_reads": int(counters.checkpoint_reads[row]),
            "live_entries": int(counters.live_entries[row]),
        }
        config: Config = request.lm.config
        traffic = state_traffic(
            config.spec,
            config.layer_types.count("linear_attention"),
            **counted,
            state_dtype=jnp.float32,
            entry_dtype=request.entry_dtype,
        )
        stats = Stats(prompt_tokens=len(prompt), new_tokens=len(new), **counted, drafted=0, accepted=0, bytes=traffic)
        text = request.lm.decode(new) if request.lm.tokenizer is not None else ""
        results.append(GenerationResult(text, new, reasons[int(state[row])], stats))
    return results
