"""Rotary positions: queries and keys are turned by angles that grow with their position."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Float, Float32, Int32


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

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        """f64, like `frequency`: radians a position of each pair of channels."""
        turns = self.context * frequency / (2 * math.pi)  # within the original context
        mixture = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (mixture + (1 - mixture) / self.factor)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Which channels of a head are turned, and how fast.

    Attributes:
      dim: The first so many channels are turned, in pairs: half against half. Even.
      theta: The base of the frequencies.
      scaling: Of the frequencies; None: none.

    Source: Su et al., RoFormer (2021), eq. 34, in the half-split order of GPT-NeoX.
    """

    dim: int
    theta: float
    scaling: Llama3Scaling | None = None

    def angles(
        self, positions: Int32[Array, "rows time"]
    ) -> tuple[Float32[Array, "rows time 1 n"], Float32[Array, "rows time 1 n"]]:
        """Cosines and sines of positions; n is dim // 2."""
        if self.scaling is None:
            frequency = self.theta ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)
        else:
            exact = self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
            frequency = jnp.asarray(self.scaling.scaled(exact), jnp.float32)
        angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
        return jnp.cos(angle), jnp.sin(angle)


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
