"""How far a run is, and what that means: learning rate, context length, and the pace set by steps or by a clock.

Everything hangs on `progress`, the done share of the budget in [0, 1], so that a run bounded by time decays its
learning rate just as fully as one bounded by steps.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

COUNTS = 2**20  # of a whole run, where optax would count steps


@dataclasses.dataclass(frozen=True)
class Rate:
    """Linear warm-up to `peak`, then a cosine down to `peak * final`.

    Attributes:
      peak: The highest learning rate.
      warmup: Share of the run that warms up.
      final: What is left of the peak at the end.
    """

    peak: float
    warmup: float = 0.02
    final: float = 0.01

    def __call__(self, progress: jax.Array) -> jax.Array:
        """The learning rate at `progress` (f32, any shape)."""
        warmup, end = round(self.warmup * COUNTS), self.peak * self.final
        schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, self.peak, warmup, COUNTS, end)
        return jnp.asarray(schedule(progress * COUNTS))


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of a run with one batch shape.

    Attributes:
      until: Progress at which it ends.
      length: Tokens of a sequence.
      rows: Sequences of a batch.
    """

    until: float
    length: int
    rows: int


def phase_at(phases: tuple[Phase, ...], progress: float) -> int:
    """The index of the phase that `progress` lies in.

    Raises:
      ValueError: The phases do not end at 1 in increasing order.
    """
    ends = [phase.until for phase in phases]
    if not ends or ends != sorted(ends) or ends[-1] != 1.0:
        raise ValueError(f"phases must end in increasing order, the last at 1.0, got {ends}")
    return next(i for i, end in enumerate(ends) if progress < end or i == len(ends) - 1)


@dataclasses.dataclass(frozen=True)
class StepPace:
    """A run of `steps` optimiser steps: reproducible, and the same when it is interrupted and resumed."""

    steps: int

    def advance(self, progress: float, until: float, block: int) -> tuple[int, float]:
        """How many steps (at most `block`) to take next, and the progress after them."""
        done = round(progress * self.steps)
        last = max(round(until * self.steps), done + 1)
        count = min(block, last - done)
        return count, until if done + count == last else (done + count) / self.steps


class ClockPace:
    """A run of `seconds`: each block advances by its share of the phase's remaining time, and the last one ends at 1.

    Args:
      seconds: From now to the end of the last block.
      clock: Monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._seconds, self._start = clock, seconds, clock()
        self._last_call = self._start
        self._until: float | None = None
        self._taken: collections.deque[float] = collections.deque(maxlen=5)

    def advance(self, progress: float, until: float, block: int) -> tuple[int, float]:
        """Always `block` steps; the progress after them follows from the median time of the phase's last blocks."""
        now = self._clock()
        if self._until == until:
            self._taken.append(now - self._last_call)
        else:
            self._taken.clear()
        self._last_call, self._until = now, until
        left = self._start + until * self._seconds - now
        if not self._taken:  # nothing measured yet: a small step, which the following ones make up for
            return block, progress + 0.002 * (until - progress) if left > 0 else until
        blocks = max(1, math.floor(left / statistics.median(self._taken)))
        return block, until if blocks == 1 else progress + (until - progress) / blocks
