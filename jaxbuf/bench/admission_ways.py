"""The ways to keep keys that `jaxbuf bench write_gate` compares, each as a model: all keys, files of gates, rules."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.selection import Quest
from jaxbuf.attention.streaming import Streaming
from jaxbuf.models.admission import Admission, HeadScore, Rule, Score
from jaxbuf.models.gates import (
    admission_of,
    gate_parameters,
    load_gates,
    with_gates,
    with_selection,
    with_threshold,
    without_gates,
)
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters

type Kind = Literal["full", "gates", "heads", "random", "local", "streaming", "quest"]

HALF = 0.5  # a threshold between the two numbers that a rule gives


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to keep keys.

    Attributes:
      kind: "full", "gates" or "heads" of files, "random", "local", "streaming" or "quest".
      line: What it is called; ways of one line differ in their setting.
      setting: By what they do: a threshold, a window or a share.
      seed: Which of the line's files it is.
      lm: The model. Its own threshold is not used, so that ways that differ in nothing else share a program.
      threshold: Keys whose scores reach it are kept behind the window; None: there are no gates, all keys are kept.
      held: The model in whose memory the keys lie, where `lm` reads whole sequences, query by query; None: `lm` reads
        through its own memory.
    """

    kind: Kind
    line: str
    setting: str
    seed: int
    lm: LanguageModel
    threshold: float | None
    held: LanguageModel | None = None


def full_way(lm: LanguageModel) -> Way:
    """All keys."""
    return Way("full", "full", "all keys", 0, without_gates(lm), None)


def local_ways(lm: LanguageModel, windows: Sequence[int], sinks: int) -> list[Way]:
    """The first tokens of a text, and a window of the latest ones: the positions are those in the text."""
    rule = Rule(keeps="none", sinks=sinks)
    return [Way("local", "local", f"window {window}", 0, _ruled(lm, rule, window), HALF) for window in windows]


def streaming_ways(lm: LanguageModel, windows: Sequence[int], sinks: int) -> list[Way]:
    """The keys that `local_ways` keep, at their positions within the cache: StreamingLLM's."""
    plain, found = without_gates(lm), []
    for local in local_ways(lm, windows, sinks):
        reads = with_selection(plain, Streaming(admission_of(local.lm).window, sinks))
        found.append(dataclasses.replace(local, kind="streaming", line="streaming", lm=reads, held=local.lm))
    return found


def quest_ways(ways: Sequence[Way], budgets: Sequence[int]) -> list[Way]:
    """Quest over what each of these ways, "full" or "gates", keeps: all that is held, and a query reads few of it."""
    found = []
    for way in ways:
        placed = way.lm if way.threshold is None else with_threshold(way.lm, way.threshold)
        for budget in budgets:
            line = "quest" if way.kind == "full" else f"{way.line}, quest"
            setting = f"budget {budget}" if way.kind == "full" else f"{way.setting}, budget {budget}"
            reads = with_selection(placed, Quest(budget))
            found.append(dataclasses.replace(way, kind="quest", line=line, setting=setting, lm=reads, held=way.lm))
    return found


def random_ways(lm: LanguageModel, rates: Sequence[float], window: int) -> list[Way]:
    """A window, and behind it a share of the keys that is drawn at random."""
    rules = {f"rate {rate:.3g}": Rule(keeps="random", rate=rate) for rate in rates}
    return [Way("random", "random", told, 0, _ruled(lm, rule, window), HALF) for told, rule in rules.items()]


def file_ways(
    lm: LanguageModel,
    files: Mapping[str, Sequence[Path]],
    thresholds: Sequence[float],
    head_shares: Sequence[float],
    window: int | None = None,
) -> list[Way]:
    """Files of gates, each with several thresholds; of heads' scores, each with several shares of heads.

    Args:
      lm: The model that they were trained for.
      files: By name: those of one recipe and several seeds. What precedes a colon is the line's name, which several
        recipes may have.
      thresholds: Of gates; empty: each file's own.
      head_shares: Shares of the heads, those with the highest scores, that keep all keys.
      window: In place of each file's own.

    Raises:
      FileNotFoundError: There is no such file.
      CheckpointError: It is no file of gates for the model.
    """
    found = []
    for name, paths in files.items():
        line, _, recipe = name.partition(":")
        for seed, path in enumerate(paths):
            gated = load_gates(lm, path)
            given = admission_of(gated)
            placed = _with_window(gated, given.score, given.window if window is None else window)
            told = f"{recipe}, " if recipe else ""
            if isinstance(given.score, HeadScore):
                for share in head_shares:
                    model = highest_heads(placed, share)
                    found.append(Way("heads", line, f"{told}{share:.0%} of heads", seed, model, HALF))
                continue
            own = () if given.threshold is None else (given.threshold,)
            for threshold in thresholds or own:
                found.append(Way("gates", line, f"{told}threshold {threshold:g}", seed, placed, threshold))
    return found


def highest_heads(lm: LanguageModel, share: float) -> LanguageModel:
    """The model with scores of heads of which this share, the highest ones, become 1 and the others 0.

    Of equal scores those of the first layers come first.

    Source: DuoAttention (2024), section 2.3, which thresholds at a quantile of all heads.
    """
    scores = {name: np.asarray(param[...]) for name, param in gate_parameters(lm.model).items()}
    every = np.concatenate([each.ravel() for each in scores.values()])
    chosen = np.argsort(-np.clip(every, 0, 1), kind="stable")[: round(share * every.size)]
    kept = np.zeros(every.size, np.float32)
    kept[chosen] = 1.0
    pieces = np.split(kept, np.cumsum([each.size for each in scores.values()])[:-1])
    return _with_values(lm, dict(zip(scores, pieces, strict=True)))


def _ruled(lm: LanguageModel, rule: Rule, window: int) -> LanguageModel:
    return with_gates(lm, Admission(rule, window, HALF))


def _with_window(gated: LanguageModel, score: Score, window: int) -> LanguageModel:
    """The same scores with another window, and a threshold that is the same for all."""
    placed = with_gates(gated, Admission(score, window, HALF))
    return _with_values(placed, {name: np.asarray(param[...]) for name, param in gate_parameters(gated.model).items()})


def _with_values(lm: LanguageModel, values: Mapping[str, np.ndarray]) -> LanguageModel:
    held = named_parameters(lm.model)
    arrays = [jnp.asarray(values[name]) if name in values else param[...] for name, param in held.items()]
    return lm.replace(model=replace_parameters(lm.model, arrays))
