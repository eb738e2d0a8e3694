"""What generations have led to, read from the carry of the loop while they go on."""

import dataclasses
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.gated_memory import Admitted
from jaxbuf.models.cache import admitted_keys
from jaxbuf.models.scoring import Logprobs
from jaxbuf.recurrence.state_format import state_format
from jaxbuf.serving import carry as rows
from jaxbuf.serving.batch import Batch, reading_rows
from jaxbuf.serving.carry import EMPTY, RUNNING, STOPPED, Carry
from jaxbuf.serving.sampling import SamplingParams
from jaxbuf.serving.stats import Stats, snapshot_traffic, state_traffic
from jaxbuf.serving.text import TextStream

log = logging.getLogger("jaxbuf")

type FinishReason = Literal["stop", "length", "error", "memory", "unfinished"]

REASONS: dict[int, FinishReason] = {
    rows.EMPTY: "unfinished",
    rows.RUNNING: "unfinished",
    rows.STOPPED: "stop",
    rows.FULL: "length",
    rows.FAILED: "error",
    rows.STARVED: "memory",
}


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What one prompt led to, or one sample of it.

    Attributes:
      text: The generated text, without the stop token and special tokens, cut before a stop string; "" if the model has
        no tokenizer.
      tokens: The generated tokens, a stop token and the tokens of a stop string included.
      finish_reason: "stop" (a stop token or stop string), "length" (max_new_tokens), "error" (no token could be chosen
        after the last one: the settings forbid all of them, or the model's logits are NaN or infinite), "memory" (the
        memory that requests share did not suffice for the next token; `generate` alone always makes enough), or
        "unfinished" (a stream that goes on, or was cut short).
      stats: What decoding did and moved.
      logprobs: Log-probability (natural logarithm) of each token, in the distribution that SamplingParams.logprobs_mode
        says: the model's own unless told otherwise. None unless SamplingParams.logprobs asks.
      top_logprobs: For each token, the most probable tokens at its place with their log-probabilities, best first; None
        likewise.
      prompt_logprobs, prompt_top_logprobs: The same of the prompt's tokens. The first of each is None, for nothing
        comes before it; both are None unless SamplingParams.prompt_logprobs asks, and of a prompt that there was no
        memory to read.
      stop_reason: With finish_reason "stop", what stopped: the stop string, or the id of the stop token; else None.
      other_samples: With SamplingParams.n, the samples after this one, the prompt's first; see `samples`. A sample has
        none itself.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    stop_reason: str | int | None = None
    other_samples: "tuple[GenerationResult, ...]" = ()

    @property
    def samples(self) -> "tuple[GenerationResult, ...]":
        """All samples of the prompt in order, SamplingParams.n of them: the first is this result itself."""
        return (self, *self.other_samples)


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of a stream.

    Attributes:
      index: Of the prompt in `prompts`.
      text: What is new of the sample's text; the pieces together are the text of its last result.
      tokens: The new tokens. Their text may come with a later event; if that completes a stop string, the result's
        tokens end with it, although there were more.
      result: What the sample led to so far.
      done: Whether this is the sample's last event.
      sample: Which of the prompt's samples it is, from 0; see SamplingParams.n.
    """

    index: int
    text: str
    tokens: list[int]
    result: GenerationResult
    done: bool
    sample: int = 0


class Row:
    """One sample's part of a generation, read piece by piece.

    Attributes:
      running: Whether there is more to come.
      seen: How many tokens were read.
      reader: The row that reads the prompt.
    """

    def __init__(self, batch: Batch, row: int, index: int, sample: int, reader: int):
        self.running = True
        self.seen = 0
        self.prompt_tokens = len(batch.prompts[index])
        self.reader = reader
        self._batch, self._row = batch, row
        self._index, self._sample = index, sample
        self._setting: SamplingParams = batch.settings[index]
        self._text = TextStream(batch.lm.tokenizer, self._setting.stop_texts)
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._prompt: dict[str, Any] = {}

    def read(
        self,
        new: list[int],
        state: int,
        logprobs: Logprobs,
        counted: dict[str, int],
        admitted: Admitted | None,
        *,
        prompt_read: bool,
    ) -> Event:
        """Adds the tokens since the last call and what belongs to them.

        Args:
          new: The tokens.
          state: The row's, after them.
          logprobs: Of all rows and places of their texts.
          counted: The row's counters, and how many drafts it had and kept.
          admitted: What gated layers keep, of all rows; None without such layers.
          prompt_read: Whether the prompt was read to its end, in this row or another.
        """
        self.running = state in (RUNNING, EMPTY)
        stop_token = new[-1:] if state == STOPPED else []
        text = self._text.extend(new[: len(new) - len(stop_token)], last=not self.running)
        reason, stop = REASONS[state], next(iter(stop_token), None)
        if self._text.stop is not None:
            self.running, reason, stop, stop_token = False, "stop", self._text.stop, []
        if reason == "error":
            log.warning(
                "prompt %d ended without a token to choose after %d tokens: all are forbidden, or the model's logits "
                "are NaN or infinite",
                self._index,
                len(self._text.tokens),
            )
        tokens = [*self._text.tokens, *stop_token]
        told = {}
        if self._setting.logprobs is not None:
            places = slice(self.prompt_tokens + self.seen, self.prompt_tokens + len(tokens))
            chosen, top = _read(logprobs, self._row, places, self._setting.logprobs)
            self._logprobs += chosen
            self._top_logprobs += top
            told = {"logprobs": self._logprobs[: len(tokens)], "top_logprobs": self._top_logprobs[: len(tokens)]}
        if self._setting.prompt_logprobs is not None and prompt_read and not self._prompt:
            places = slice(1, self.prompt_tokens)
            chosen, top = _read(logprobs, self.reader, places, self._setting.prompt_logprobs)
            self._prompt = {"prompt_logprobs": [None, *chosen], "prompt_top_logprobs": [None, *top]}
        stats = self._stats(len(tokens), counted, admitted)
        result = GenerationResult(self._text.text, tokens, reason, stats, **told, **self._prompt, stop_reason=stop)
        seen, self.seen = self.seen, len(tokens)
        return Event(self._index, text, tokens[seen:], result, done=not self.running, sample=self._sample)

    def _stats(self, new_tokens: int, counted: dict[str, int], admitted: Admitted | None) -> Stats:
        config, batch = self._batch.lm.config, self._batch
        spec, layers = config.spec, len(config.specs)
        work = {name: number for name, number in counted.items() if name != "accepted"}
        dtypes = {"state_dtype": batch.sizes.state_dtype, "entry_dtype": batch.sizes.entry_dtype}
        moved = 0 if spec is None else state_traffic(spec, layers, **work, **dtypes)
        work = {name: counted[name] for name in ("steps", "drafted")}
        state_dtype = state_format(batch.sizes.state_dtype).written_each_step
        snapshots = 0 if spec is None else snapshot_traffic(spec, layers, **work, state_dtype=state_dtype)
        told = counted | {"form": batch.form, "bytes": moved, "snapshot_bytes": snapshots}
        return Stats(self.prompt_tokens, new_tokens, **told, **_admissions(admitted, self._row))


class Reader:
    """Reads a generation between two calls of the loop, every token once."""

    def __init__(self, batch: Batch):
        readers = reading_rows([setting.n for setting in batch.settings])
        self._rows = [Row(batch, row, *which, readers[which[0]]) for row, which in enumerate(batch.rows)]

    @property
    def running(self) -> bool:
        """Whether some row goes on."""
        return any(row.running for row in self._rows)

    def read(self, carry: Carry) -> tuple[Carry, list[Event]]:
        """The carry with the rows stopped that met a stop string, and an event of each row that ran until now."""
        counters = {field.name: getattr(carry.counters, field.name) for field in dataclasses.fields(carry.counters)}
        counters |= {name: getattr(carry.speculation, name, None) for name in ("drafted", "accepted")}
        admitted = admitted_keys(carry.cache)
        fetched = (carry.history.tokens, carry.history.length, carry.state, carry.logprobs, counters, admitted)
        tokens, length, state, logprobs, counters, admitted = jax.device_get(fetched)
        events, met_stop = [], np.zeros(state.shape, bool)
        for place, row in enumerate(self._rows):
            if not row.running:
                continue
            counted = {name: 0 if counts is None else int(counts[place]) for name, counts in counters.items()}
            new = tokens[place, row.prompt_tokens + row.seen : length[place]].tolist()
            prompt_read = bool(length[row.reader] > 0)
            events.append(row.read(new, int(state[place]), logprobs, counted, admitted, prompt_read=prompt_read))
            met_stop[place] = state[place] == RUNNING and not row.running
        if met_stop.any():  # by an operation on the old state: its result lies where the program was compiled for
            carry = dataclasses.replace(carry, state=jnp.where(met_stop, STOPPED, carry.state))
        return carry, events


def _admissions(admitted: Admitted | None, row: int) -> dict[str, Any]:
    """What `Stats` tells of a row's gated layers."""
    if admitted is None:
        return {}
    of = {"kept_keys": admitted.kept, "dropped_keys": admitted.dropped}
    keys = {name: tuple(map(tuple, counts[row].tolist())) for name, counts in of.items()}
    return keys | {"passed_tokens": int(admitted.passed[row]), "threshold": float(admitted.threshold[row])}


def _read(logprobs: Logprobs, row: int, places: slice, top: int) -> tuple[list[float], list[dict[int, float]]]:
    """The chosen tokens' log-probabilities at places of a row, and the `top` most probable tokens' at each."""
    ids, best = logprobs.top_ids[row, places, :top].tolist(), logprobs.top[row, places, :top].tolist()
    pairs = [
        {token: found for token, found in zip(*pair, strict=True) if found > -np.inf}
        for pair in zip(ids, best, strict=True)
    ]
    return logprobs.chosen[row, places].tolist(), pairs
