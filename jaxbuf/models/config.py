"""What an architecture is: frozen descriptions, from which the one decoder is built and run.

A family's config reader makes them (`jaxbuf.models.families`). They are static: hashable, and part of jit's key.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, Self

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxbuf.axes import Array, Float
from jaxbuf.models.layers import (
    GatedMLP,
    Initializer,
    Norm,
    PlainMLP,
    gated_mlp,
    scaled,
    squared_relu_mlp,
)
from jaxbuf.models.projections import Summands, summed
from jaxbuf.models.tensor_parallel import AXES, devices_of
from jaxbuf.recurrence.spec import RecurrenceSpec
from jaxbuf.target import Target

RECURRENCE, ATTENTION, GATED = "recurrence", "attention", "gated"  # kinds of memory


class Mixer(Protocol):
    """What mixes the tokens of a sequence in a layer: its sizes, its parameters, its mathematics and its memory.

    The same code serves training, prefill and decoding. What differs between them is the plan that it is called with:
    `jaxbuf.recurrence.recurrent_plan` and `jaxbuf.attention.attention_plan` have one for whole sequences without a
    memory, and one for a launch on a cache.
    """

    @property
    def kind(self) -> str:
        """Of its memory, RECURRENCE, ATTENTION or GATED: which plan it is called with."""
        ...

    @property
    def width(self) -> int:
        """Taps of its convolution; 0 without one."""
        ...

    @property
    def channels(self) -> int:
        """Channels of its convolution; 0 without one."""
        ...

    @property
    def kv_numbers(self) -> int:
        """Numbers that its memory keeps for each token; 0 for a recurrence, whose memory does not grow."""
        ...

    def spread(self, devices: int) -> "Mixer":
        """What each of so many devices has of it, see `jaxbuf.models.tensor_parallel`.

        Raises:
          ValueError: Its heads can't be shared by so many.
        """
        ...

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype) -> nnx.Module:
        """New parameters for inputs [..., hidden]."""
        ...

    def memory(self, shared: Any, dtypes: Any, number: int) -> Any:
        """An empty memory of a layer: `shared` is what all layers of the kind share, `dtypes` are
        `jaxbuf.models.cache.Dtypes`, and `number` is which of the kind it is, from 0 on."""
        ...

    def __call__(
        self, parameters: Any, x: Float[Array, "rows time hidden"], memory: Any, plan: Any
    ) -> tuple[Float[Array, "rows time hidden"] | Summands, Any]:
        """Mixes x; returns an array like it, and the memory with what was read."""
        ...


class FeedForward(Protocol):
    """What a layer does to each token by itself: its sizes, its parameters and its mathematics."""

    def spread(self, devices: int, expert_devices: int = 1) -> "FeedForward":
        """What each of so many devices has of it, along the axes "tensor" and "expert"; all, if they can't share it.

        Raises:
          ValueError: Its experts can't be shared by so many.
        """
        ...

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype) -> nnx.Module:
        """New parameters for inputs [..., hidden]."""
        ...

    def __call__(
        self, parameters: Any, x: Float[Array, "rows time hidden"], target: Target | None = None
    ) -> Float[Array, "rows time hidden"] | Summands:
        """An array like x. What it is compiled for: `target`; None: for what x lies on."""
        ...


@dataclasses.dataclass(frozen=True)
class _Channels:
    """What MLPs have in common; `MLP` says what the attributes are."""

    size: int
    bias: bool = False
    devices: int = 1

    def spread(self, devices: int, expert_devices: int = 1) -> Self:
        """What each of so many devices has of it: all, if they do not divide it. `expert_devices`, those along the axis
        "expert", have the same."""
        if self.size % devices:
            return self
        return dataclasses.replace(self, size=self.size // devices, devices=devices)


@dataclasses.dataclass(frozen=True)
class MLP(_Channels):
    """output_scale · down(silu(gate_scale · gate x) · up x).

    Attributes:
      size: Numbers between the projections.
      bias: Whether each of the projections adds one.
      devices: Who share its numbers; the size is then that of one.
      fused: Whether gate and up are one matrix.
      gate_scale, output_scale: Factors of what the gate projection gives, and of the output.
    """

    fused: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype) -> GatedMLP:
        """As in `FeedForward.parameters`."""
        given = {"initializer": initializer, "rngs": rngs, "dtype": dtype}
        return GatedMLP(hidden, self.size, bias=self.bias, fused=self.fused, **given)

    def __call__(
        self, parameters: GatedMLP, x: Float[Array, "rows time hidden"], target: Target | None = None
    ) -> Float[Array, "rows time hidden"] | Summands:
        """As in `FeedForward.__call__`."""
        y = gated_mlp(parameters, x, self.devices, target, self.gate_scale)
        return y if self.output_scale == 1 else scaled(summed(y), self.output_scale)


@dataclasses.dataclass(frozen=True)
class SquaredReluMLP(_Channels):
    """down(relu(up x)²), without a gate.

    Attributes:
      size, bias, devices: As in `MLP`.
    """

    def parameters(self, hidden: int, *, initializer: Initializer, rngs: nnx.Rngs, dtype: jnp.dtype) -> PlainMLP:
        """As in `FeedForward.parameters`."""
        return PlainMLP(hidden, self.size, bias=self.bias, initializer=initializer, rngs=rngs, dtype=dtype)

    def __call__(
        self, parameters: PlainMLP, x: Float[Array, "rows time hidden"], target: Target | None = None
    ) -> Float[Array, "rows time hidden"] | Summands:
        """As in `FeedForward.__call__`."""
        return squared_relu_mlp(parameters, x, self.devices, target)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """A layer: x + residual_scale · mixers(x), then x + residual_scale · feed_forward(x).

    Attributes:
      mixers: They read the same input, and their outputs are added; without one a layer is its feed_forward alone.
      feed_forward: None: the layer has none.
      before, after: The norms in front of and behind each of the two; None: there is none.
      residual_scale: Of what is added to x.
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    before: Norm | None
    after: Norm | None = None
    residual_scale: float = 1.0

    def spread(self, devices: int, expert_devices: int = 1) -> "LayerConfig":
        """What each of so many devices has of it, along the axes "tensor" and "expert"; errors as in `Mixer.spread` and
        `FeedForward.spread`."""
        if devices == expert_devices == 1:
            return self
        mixers, mlp = tuple(mixer.spread(devices) for mixer in self.mixers), self.feed_forward
        mlp = None if mlp is None else mlp.spread(devices, expert_devices)
        return dataclasses.replace(self, mixers=mixers, feed_forward=mlp)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model: everything that its parameters' shapes and its forward depend on.

    Attributes:
      family: The module of `jaxbuf.models.families` that made it and knows its files.
      source: What the family's config.json said, as the family keeps it.
      vocab_size, hidden_size: Of the embedding table.
      layers: In order.
      norm: The last one.
      tied: Whether the embedding table is the head, too.
      mtp: The layer of the multi-token-prediction module; None without one.
      max_length: The most tokens of a sequence; None: as many as you like.
      eos_token_ids: Tokens that end a text.
      embedding_scale, logits_scale: Embeddings and logits are multiplied with them.
      initializer_range: Standard deviation of new weights.
      mesh: Over whose axis "tensor" the layers' heads are spread, and over whose axis "expert" their experts; None:
        over none. `load` sets it, for it decides in which order the parameters' rows lie.
    """

    family: str
    source: Any
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: Norm
    tied: bool
    mtp: LayerConfig | None = None
    max_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    initializer_range: float = 0.02
    mesh: Mesh | None = None

    @property
    def on_device(self) -> "ModelConfig":
        """What each device of the mesh has; without one it is the same.

        Raises:
          ValueError: The heads or experts can't be shared by so many.
        """
        return self.spread(*(devices_of(self.mesh, axis) for axis in AXES))

    def spread(self, devices: int, expert_devices: int = 1) -> "ModelConfig":
        """What each of so many devices has of it.

        Args:
          devices: Along the axis "tensor", which share the heads.
          expert_devices: Along the axis "expert", which share the experts.

        Raises:
          ValueError: The heads or experts can't be shared by so many.
        """
        each = devices, expert_devices
        layers = tuple(layer.spread(*each) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, mtp=self.mtp and self.mtp.spread(*each), mesh=None)

    @property
    def mixers(self) -> Iterator[Mixer]:
        """The mixers of all layers, in the order of the memories in a `Cache`."""
        return (mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def specs(self) -> tuple[RecurrenceSpec, ...]:
        """The recurrence of each recurrent mixer."""
        return tuple(mixer.spec for mixer in self.mixers if mixer.kind == RECURRENCE)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def spec(self) -> RecurrenceSpec | None:
        """The recurrence that all recurrent mixers share; None without one."""
        return next(iter(self.specs), None)

    @property
    def kv_numbers(self) -> int:
        """Numbers that all softmax layers together keep for each token."""
        return sum(mixer.kv_numbers for mixer in self.mixers)
