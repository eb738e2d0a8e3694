"""Rotary positions: queries and keys are turned by angles that grow with their position."""

import dataclasses
import math
from typing import ClassVar, Protocol

import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Float, Float32, Int32


class Scaling(Protocol):
    """How positions are stretched, so that a model trained on short texts reads long ones.

    Attributes:
      kind: Its rope_type in config.json.
    """

    kind: ClassVar[str]

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied with; 1: they are left alone."""
        ...

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        """f64 [dim // 2]: radians a position of each pair of channels."""
        ...


def _unscaled(dim: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All channels turn `factor` times as slowly.

    Source: Chen et al., Extending Context Window via Positional Interpolation (2023), section 3.2.
    """

    factor: float

    kind: ClassVar = "linear"

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        return _unscaled(dim, theta) / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3 stretches the positions of a model that was trained on short texts.

    Channels whose period is longer than context / low turn `factor` times as slowly, those with one shorter than
    context / high as before, and those between by a mixture.

    Source: Llama 3.1's released code, as config.json's rope_type "llama3" names the numbers.
    """

    factor: float
    low: float
    high: float
    context: int

    kind: ClassVar = "llama3"

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        frequency = _unscaled(dim, theta)
        turns = self.context * frequency / (2 * math.pi)  # within the original context
        mixture = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (mixture + (1 - mixture) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs that turn often within the original context keep their pace, slow ones are stretched.

    Attributes:
      factor: Slow pairs turn so many times as slowly.
      context: Tokens of the texts that the model was trained on.
      amplitude: Cosines and sines are multiplied with it, so attention's scores with its square.
      fast, slow: Pairs that turn at least `fast` times within the context keep their pace, those that turn at most
        `slow` times are stretched. Between the two, by the pairs' numbers, it is a mixture.
      whole: Whether the numbers of these two pairs are rounded, away from each other, to whole ones.

    Source: Peng et al., YaRN (2023), section 3, with the ramp over pair numbers of its released code.
    """

    factor: float
    context: int
    amplitude: float
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True

    kind: ClassVar = "yarn"

    def frequencies(self, dim: int, theta: float) -> np.ndarray:
        frequency = _unscaled(dim, theta)
        first, last = (self._pair(turns, dim, theta) for turns in (self.fast, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        # The upper bound counts channels, not pairs: so the released code has it, and models were tuned with it.
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first if last != first else 1e-3
        stretched = np.clip((np.arange(dim // 2) - first) / width, 0, 1)
        return frequency * (stretched / self.factor + 1 - stretched)

    def _pair(self, turns: float, dim: int, theta: float) -> float:
        """The number of the pair, a fraction between two, that turns so many times within the context."""
        return dim * math.log(self.context / (2 * math.pi * turns)) / (2 * math.log(theta))


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """The amplitude that YaRN proposes for a factor; `scale` is what some configurations call mscale.

    Source: Peng et al., YaRN (2023), eq. 22.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Which channels of a head are turned, and how fast.

    Attributes:
      dim: The first so many channels are turned, in pairs: half against half. Even.
      theta: The base of the frequencies.
      scaling: How positions are stretched; None: they are not.

    Source: Su et al., RoFormer (2021), eq. 34, in the half-split order of GPT-NeoX.
    """

    dim: int
    theta: float
    scaling: Scaling | None = None

    def angles(
        self, positions: Int32[Array, "rows time"]
    ) -> tuple[Float32[Array, "rows time 1 n"], Float32[Array, "rows time 1 n"]]:
        """Cosines and sines of positions, times the scaling's amplitude; n is dim // 2."""
        amplitude = 1.0
        if self.scaling is None:
            frequency = self.theta ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)
        else:
            frequency = jnp.asarray(self.scaling.frequencies(self.dim, self.theta), jnp.float32)
            amplitude = self.scaling.amplitude
        angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return (cos, sin) if amplitude == 1 else (amplitude * cos, amplitude * sin)


def rotate(
    x: Float[Array, "batch time heads head_dim"],
    angles: tuple[Float32[Array, "#batch time 1 n"], Float32[Array, "#batch time 1 n"]],
) -> Float[Array, "batch time heads head_dim"]:
    """Turns the first 2 · (angles' width) channels of x, half against half."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), rest], axis=-1)
