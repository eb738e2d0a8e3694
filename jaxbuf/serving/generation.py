"""Text in, text out: what people call, over the compiled programs of `prompts.py`, `admit.py` and `loop.py`."""

import dataclasses
import logging
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Literal, overload

import jax
import numpy as np

from jaxbuf.compilation import without_cache
from jaxbuf.directory import make_directory
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.packed import pack
from jaxbuf.progress import Report, check_progress, progress_bar, say_nothing
from jaxbuf.serving import loop
from jaxbuf.serving.admit import admit
from jaxbuf.serving.ahead import compile_ahead
from jaxbuf.serving.arrivals import Arrivals
from jaxbuf.serving.batch import DRAFT_TOKENS, GREEDY, Batch, Decoding, Form, Prompt, list_prompts, make_batch
from jaxbuf.serving.carry import RUNNING, Carry, CarrySizes
from jaxbuf.serving.profiling import trace
from jaxbuf.serving.prompts import read_first_chunk, start
from jaxbuf.serving.result import Event, GenerationResult, Reader
from jaxbuf.serving.room import make_room
from jaxbuf.serving.sampling import SamplingParams, whole
from jaxbuf.serving.slices import run_slices
from jaxbuf.serving.speculation import Drafter

SEGMENT = 16
log = logging.getLogger("jaxbuf")

type Speculator = Literal["ngram", "mtp"] | LanguageModel | Drafter


@overload
def generate(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    max_new_tokens: int = 64,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    state_dtype: str | None = None,
    drafter: Speculator | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    adaptive_drafts: bool = False,
    stream: Literal[False] = False,
    segment: int = SEGMENT,
    profile: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[GenerationResult]: ...
@overload
def generate(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    max_new_tokens: int = 64,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    state_dtype: str | None = None,
    drafter: Speculator | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    adaptive_drafts: bool = False,
    stream: Literal[True],
    segment: int = SEGMENT,
    profile: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Generator[Event, None, None]: ...
def generate(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    max_new_tokens: int = 64,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    limit: int = 16,
    form: Form = "auto",
    entry_dtype: str | None = None,
    state_dtype: str | None = None,
    drafter: Speculator | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    adaptive_drafts: bool = False,
    stream: bool = False,
    segment: int = SEGMENT,
    profile: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[GenerationResult] | Generator[Event, None, None]:
    """Continues every prompt, all of them in one batch and one compiled loop.

    Compilation happens once for a shape: the number of prompts, that of their samples, the longest prompt and
    max_new_tokens, each rounded up to a power of two; the drafter with draft_tokens; and whether log-probabilities are
    reported, and stop strings looked for. Other sampling settings, seeds, stop tokens and the form are data; on a
    Hopper GPU the recurrent form without a drafter is a program of its own, whose rings hold one entry.

    A prompt with several samples (`SamplingParams.n`) is read once; its samples share the memory of it. Long prompts
    are read in chunks, of 65,536 tokens in all rows together (at least 512 a row), so that no activation is longer.

    Args:
      lm: From `jaxbuf.load`.
      prompts: Texts, or token ids as lists or integer arrays of one dimension; lengths may differ. Any iterable of
        them, or an integer array [prompts, time].
      max_new_tokens: The most tokens to generate for each.
      sampling: One for all prompts, or one each; greedy by default.
      limit: Entries from which the buffered form folds its ring into the checkpoint. A limit beyond a prompt's tokens
        and the new ones is never reached.
      form: "recurrent" writes the state every step; "buffered" every `limit` steps; "kv" reads and writes none as long
        as a text is short, its entries being all that is read, and goes on as "buffered" behind that. The tokens are
        the same up to rounding. "auto" is the form that was measured to be the faster one for so many prompts, on this
        kind of device (`jaxbuf.serving.forms` has the table), and "buffered" where nothing was measured; short texts
        are "kv" where a kernel serves them. `stats.form` says which ran. A model without recurrent layers takes every
        form, and none changes anything.
      entry_dtype: "bfloat16", "float16" or "float32" for the ring's keys and updates; None: the compute dtype.
      state_dtype: How the recurrent states are kept between folds: "float32", "bfloat16" (which drifts where the decay
        is weak), or "split" or "split8", of which a step reads two bytes a number and which do not drift. Steps see
        bfloat16 numbers then, so that greedy tokens may depend on form, limit and drafter where two are nearly equal.
        None: "float32".
      drafter: Who drafts tokens, which the model reads all at once to keep those that it would have chosen itself.
        Greedy tokens are those without a drafter (up to rounding, as with `form`); sampled ones are distributed as
        without, but a seed gives others. "ngram" copies what followed the last tokens where they occurred before, "mtp"
        is the model's own MTP layer, another model drafts with a memory of its own, and a `Drafter` is one that you
        wrote, or one of `jaxbuf.serving.drafters`, whose own draft_tokens counts: `NGram(8, branches=2)` and
        `MTP(6, branches=2)` draft trees. None: no
        drafts, each step reads one token.
      draft_tokens: The most drafts of a step, at most 15.
      adaptive_drafts: Let each prompt draft as many tokens as pay by what was kept of its drafts so far, and none where
        none do (see `Adaptive`). What holds of the tokens does not change.
      stream: Return an iterator of events, which hold the text as it comes, in place of a list of results. Nothing runs
        until it is read, and its `close` ends the generation.
      segment: Steps between two looks at the text, which streams and stop strings need. A step gives each prompt one
        token, or with a drafter up to 1 + draft_tokens. The text and the tokens do not depend on it. However long it
        is, the compiled loop runs a fraction of a second at a time, so that a Ctrl-C ends it.
      profile: A directory to write a jax.profiler trace to; None: no trace. The programs are compiled, and run once,
        before it begins: a program's first run is slower than all others.
      progress: Whether to show a bar on standard error, for compilation and for the tokens; not with stream. None: on a
        terminal and in a notebook.

    Returns:
      One result a prompt, in order: that of its first sample, which has all of them in `samples`. With stream, an
      iterator of `Event`: one a sample for its first token, and then one every `segment` steps until the sample is
      done. The pieces of a sample's text together are the text that its result has without stream; they never split a
      character.

    Raises:
      ValueError: prompts that are no list, an empty prompt, one that with max_new_tokens exceeds the model's
        max_position_embeddings, a token outside the vocabulary, a setting out of range, a drafter that does not fit
        (see `jaxbuf.serving.speculation.Drafter`), or a profile directory that cannot be written to.
    """
    if not whole(segment) or segment < 1:
        raise ValueError(f"segment must be a whole number of at least 1, got {segment!r}")
    if not isinstance(stream, bool):
        raise ValueError(f"stream must be True or False, got {stream!r}")
    check_progress(progress)
    if stream and progress:
        raise ValueError("progress must be None or False with stream=True, whose events tell it, got True")
    prompts = list_prompts(prompts)
    if not prompts:
        return (event for event in ()) if stream else []
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        limit=limit,
        form=form,
        entry_dtype=entry_dtype,
        state_dtype=state_dtype,
        drafter=drafter,
        draft_tokens=draft_tokens,
        adaptive_drafts=adaptive_drafts,
    )
    batch = make_batch(lm, prompts, sampling, decoding)
    _tell_of_copies(batch)
    if profile is not None:
        make_directory(profile, "profile")
    if stream:
        return _events(batch, segment, profile, say_nothing)
    with progress_bar(max_new_tokens * len(batch.rows), progress) as report:
        report("compiling, reading prompts", 0)
        events = _events(batch, segment if batch.has_stop_texts else max_new_tokens, profile, report)
        results = {(event.index, event.sample): event.result for event in events}
    found = []
    for index, setting in enumerate(batch.settings):
        first, *others = (results[index, sample] for sample in range(setting.n))
        found.append(dataclasses.replace(first, other_samples=tuple(others)) if others else first)
    return found


def _tell_of_copies(batch: Batch) -> None:
    """Warns where two prompts are the same and draw the same: a loop that means to sample a prompt several times."""
    alike: dict[tuple, int] = {}  # the first of the prompts that are the same
    seen: dict[tuple[int, int], int] = {}
    for i, (prompt, setting) in enumerate(zip(batch.prompts, batch.settings, strict=True)):
        if setting.temperature == 0:
            continue
        how = setting.temperature, setting.top_k, setting.top_p, setting.min_p
        same = alike.setdefault((tuple(prompt), *how), i)
        for sample in setting.samples:
            first = seen.setdefault((same, sample.seed), i)
            if first != i:
                log.warning(
                    "prompts %d and %d are the same and have samples of the same seed, %d: their texts will be the "
                    "same, too. SamplingParams(n=...) draws several texts of a prompt; sample j has the seed + j",
                    first,
                    i,
                    sample.seed,
                )
                return


def _events(
    batch: Batch, segment: int, profile: str | os.PathLike[str] | None, report: Report
) -> Generator[Event, None, None]:
    """Runs the loop `segment` steps at a time, and tells in between what came."""
    if profile is None:
        yield from run_batch(batch, segment, report)
        return
    with without_cache():
        _decoder(batch)(read_prompts(batch.lm, batch.sizes, batch.arrivals, batch.drafter), 1)
        with trace(profile):
            yield from run_batch(batch, segment, report)


def read_prompts(
    lm: LanguageModel, sizes: CarrySizes, arrivals: Sequence[Arrivals], drafter: Drafter | None = None
) -> Carry:
    """A new carry that has read chunks of prompts, one after another."""
    with_drafter = () if drafter is None else (drafter,)
    read = read_first_chunk if lm.config.mesh is None else start
    carry = read(lm.model, sizes, arrivals[0], *with_drafter)
    for chunk in arrivals[1:]:
        carry = admit(lm.model, carry, chunk, *with_drafter)
    return carry


def run_batch(batch: Batch, segment: int, report: Report = say_nothing) -> Generator[Event, None, None]:
    """Generates, and tells after every `segment` steps what came."""
    if max(batch.begins.max_new_tokens) > 1:
        compile_ahead(batch.lm, batch.sizes, batch.arrivals, batch.drafter)
    carry = read_prompts(batch.lm, batch.sizes, batch.arrivals, batch.drafter)
    reader, decode, steps = Reader(batch), _decoder(batch), 1

    def look(carry: Carry) -> bool:
        history = carry.history
        fetched = carry.state, carry.lacking, history.length, history.prompt_length
        state, lacking, length, prompt_length = jax.device_get(fetched)
        report("generating", int((length - prompt_length).sum()))
        return bool(((state == RUNNING) & ~lacking).any())

    while True:
        carry, events = reader.read(carry)
        yield from events
        if not reader.running:
            return
        carry, steps = run_slices(decode, make_room(carry), segment, look, first=steps)


def _decoder(batch: Batch) -> Callable[[Carry, int], Carry]:
    """Up to so many steps of the compiled loop. The model and the drafter are flattened here, once for all calls."""
    model, *drafter = (pack(each) for each in (batch.lm.model, batch.drafter) if each is not None)
    return lambda carry, steps: loop.generate_tokens(model, carry, np.int32(steps), *drafter)
