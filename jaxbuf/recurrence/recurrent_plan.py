"""What a recurrent mixer does with its memory: on whole sequences without one, or in a launch on a cache.

Both plans have the same functions, so that a mixer is written once: `prepare` (the inputs of Gated DeltaNet and Kimi
Delta Attention, the convolution among them), `convolve` (the convolution alone) and `recur`.
"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import jax

from jaxbuf.axes import Array, Float, Int32
from jaxbuf.recurrence import buffered
from jaxbuf.recurrence.begin import PrefillStep, Step
from jaxbuf.recurrence.chunked import chunked
from jaxbuf.recurrence.convolution import activated, causal_convolution, extend_ring, split_channels
from jaxbuf.recurrence.prepare import Inputs, Weights, prepare, prepare_sequence
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.target import Target

if TYPE_CHECKING:
    from jaxbuf.recurrence.recurrent_memory import RecurrentCache


class _Plan:
    def shared_by(self, mixers: Iterable[Any]) -> Self:
        """The same plan: layers share nothing that is not in it."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholeRecurrence(_Plan):
    """Sequences that start from nothing, without a memory: it is None. Differentiable.

    Attributes:
      lengths: Real tokens of each row; None: all.
      chunk_size: Of the chunk-parallel recurrence (static).
      target: What the program is compiled for (static); None: what is resolved for each operation.
    """

    lengths: Int32[Array, "rows"] | None = None
    chunk_size: int = dataclasses.field(default=64, metadata={"static": True})
    target: Target | None = dataclasses.field(default=None, metadata={"static": True})

    def prepare(
        self, memory: None, spec: RecurrenceSpec, weights: Weights, *inputs: Array, lower_bound: float | None = None
    ) -> tuple[Inputs, None]:
        """The recurrence's inputs from projections, see `prepare_sequence`."""
        return prepare_sequence(spec, weights, *inputs, lower_bound=lower_bound), None

    def convolve(
        self,
        memory: None,
        weight: Float[Array, "channels width"],
        bias: Float[Array, "channels"] | None,
        x: Float[Array, "rows time channels"],
        parts: tuple[int, ...],
    ) -> tuple[tuple[Array, ...], None]:
        """SiLU of the causal convolution of x, plus the bias if there is one; in parts of so many channels each."""
        return split_channels(activated(causal_convolution(x, weight), bias, "silu"), parts), None

    def recur(
        self, memory: None, spec: RecurrenceSpec, *inputs: Any
    ) -> tuple[Float[Array, "rows time heads value_dim"], None]:
        """The outputs for q, k, v, log_decay and beta."""
        how = {"chunk_size": self.chunk_size, "lengths": self.lengths, "target": self.target}
        out, *_ = chunked(spec, None, *inputs, **how)
        return out, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LaunchedRecurrence(_Plan):
    """A launch on a cache: its memory is a RecurrentCache.

    Attributes:
      step: The launch's integers: of an `extend`, or of a `prefill`.
      ring_order: The rows of the convolutions' rings; None without trees.
      target: As in `WholeRecurrence`.
    """

    step: Step | PrefillStep
    ring_order: Int32[Array, "slots ring"] | None = None
    target: Target | None = dataclasses.field(default=None, metadata={"static": True})

    def prepare(
        self,
        memory: "RecurrentCache",
        spec: RecurrenceSpec,
        weights: Weights,
        *inputs: Array,
        lower_bound: float | None = None,
    ) -> tuple[Inputs, "RecurrentCache"]:
        """The recurrence's inputs from projections, see `jaxbuf.recurrence.prepare.prepare`."""
        assert memory.ring is not None  # a mixer with a convolution has made it
        how = {"lower_bound": lower_bound, "target": self.target}
        found, ring = prepare(spec, weights, memory.ring, *inputs, **self._where, **how)
        return found, dataclasses.replace(memory, ring=ring)

    def convolve(
        self,
        memory: "RecurrentCache",
        weight: Float[Array, "channels width"],
        bias: Float[Array, "channels"] | None,
        x: Float[Array, "rows time channels"],
        parts: tuple[int, ...],
    ) -> tuple[tuple[Array, ...], "RecurrentCache"]:
        """SiLU of the causal convolution of x, plus the bias if there is one; in parts of so many channels each."""
        assert memory.ring is not None  # a mixer with a convolution has made it
        how = {"bias": bias, "activation": "silu", "parts": parts, "target": self.target}
        y, ring = extend_ring(memory.ring, weight, x, **self._where, **how)
        return y, dataclasses.replace(memory, ring=ring)

    def recur(
        self, memory: "RecurrentCache", spec: RecurrenceSpec, *inputs: Any
    ) -> tuple[Float[Array, "rows time heads value_dim"], "RecurrentCache"]:
        """The outputs for q, k, v, log_decay and beta."""
        if isinstance(self.step, Step):
            out, pool = buffered.extend_pool(spec, memory.pool, self.step, *inputs, target=self.target)
        else:
            out, pool = buffered.prefill_pool(spec, memory.pool, self.step, *inputs, target=self.target)
        return out, dataclasses.replace(memory, pool=pool)

    @property
    def _where(self) -> dict[str, Any]:
        step = self.step
        parents = step.parents if isinstance(step, Step) else None
        launch = {"slots": step.slots, "start": step.start, "lengths": step.lengths}
        return launch | {"order": self.ring_order, "parents": parents}
