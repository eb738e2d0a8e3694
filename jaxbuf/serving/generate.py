"""Text in, text out: what people call, over the two compiled programs of `loop.py`."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxbuf.models.language_model import LanguageModel
from jaxbuf.serving import loop
from jaxbuf.serving.request import GREEDY, Form, GenerationResult, Prompt, Request, check, results
from jaxbuf.serving.sampling import SamplingParams
from jaxbuf.serving.text import settled

SEGMENT = 16  # tokens between two looks at the text


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of a stream: new text, the tokens behind it, and the result so far (`done` on the last event)."""

    text: str
    tokens: list[int]
    result: GenerationResult
    done: bool


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
    request = check(lm, prompts, max_new_tokens, sampling, limit, form, entry_dtype)
    if request.has_stop_texts:
        *_, found = _in_segments(request, SEGMENT)
        return found
    carry = loop.start(lm.model, **request.arguments)
    carry = loop.generate_tokens(lm.model, carry, np.int32(max_new_tokens - 1))
    return results(request, carry)[0]


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int = 64,
    sampling: SamplingParams = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    segment: int = SEGMENT,
) -> Iterator[Event]:
    """Continues one prompt and yields the text as it comes, `segment` tokens at a time from the same compiled program.

    Text that ends inside a character (its bytes are split over tokens) is held back until it is whole, so the pieces
    together are exactly `generate`'s text. Arguments and errors are `generate`'s.

    Args:
      segment: Tokens between two events, at least 1.
    """
    if segment < 1:
        raise ValueError(f"segment must be at least 1, got {segment}")
    return _events(check(lm, {"prompt": prompt}, max_new_tokens, sampling, limit, form, entry_dtype), segment)


def _events(request: Request, segment: int) -> Iterator[Event]:
    said, seen = "", 0
    for (result,) in _in_segments(request, segment):
        done = result.finish_reason != "unfinished"
        whole = result.text if done else result.text[: settled(result.text, request.settings[0].stop_texts)]
        yield Event(whole[len(said) :], result.tokens[seen:], result, done)
        said, seen = whole, len(result.tokens)


def _in_segments(request: Request, segment: int) -> Iterator[list[GenerationResult]]:
    """Runs the loop `segment` tokens at a time and looks for stop strings in between."""
    carry = loop.start(request.lm.model, **request.arguments)
    while True:
        found, state = results(request, carry)
        yield found
        if all(result.finish_reason != "unfinished" for result in found):
            return
        carry = dataclasses.replace(carry, state=jnp.asarray(state))
        carry = loop.generate_tokens(request.lm.model, carry, np.int32(segment))
