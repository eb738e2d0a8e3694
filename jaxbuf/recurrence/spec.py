"""The static description of a recurrence, and the checks that every form makes of its inputs."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Shaped


@dataclasses.dataclass(frozen=True)
class RecurrenceSpec:
    """A family of linear attention as data (all families are one recurrence, with state S [value_dim, key_dim] a head):

        S̃ = S · diag(exp(log_decay))
        u = beta · (v − S̃ k)            with the delta rule; without it u = beta · v
        S ← S̃ + u ⊗ k
        o = S q

    Attributes:
      heads: Value heads; each has a state of its own.
      key_heads: Heads of q and k; head h reads key head h // (heads // key_heads).
      key_dim: Size of a key (columns of the state).
      value_dim: Size of a value (rows of the state).
      decay: "none", one number a head ("head"), or one a head and key channel ("channel").
      delta: Whether the update subtracts what the state already recalls for k.

    The families, by what they set (`beta` is the write strength in all of them, None means 1):

        linear attention          decay="none",    delta=False   unnormalised
        retention, lightning      decay="head",    delta=False   log_decay: a constant a head
        Mamba-2                   decay="head",    delta=False   q, k, v, beta: C, B, x, dt
        gated linear attention    decay="channel", delta=False
        DeltaNet                  decay="none",    delta=True
        Gated DeltaNet            decay="head",    delta=True    the default
        Kimi Delta Attention      decay="channel", delta=True

    Linear attention's normaliser is a column of ones in v. Mamba-2's log_decay is A·dt; its D·x is added outside.
    Scale and norm of q and k are the caller's. With the delta rule, models give k unit norm (the state may grow without
    bound where beta times the square of that norm exceeds 2), and q unit norm times key_dim^-0.5.

    Raises:
      ValueError: A size below 1 or not a whole number, heads that key_heads does not divide, or an unknown decay.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    decay: Literal["none", "head", "channel"] = "head"
    delta: bool = True

    def __post_init__(self):
        check_sizes(**{name: getattr(self, name) for name in ("heads", "key_heads", "key_dim", "value_dim")})
        if self.heads % self.key_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of key_heads ({self.key_heads})")
        if self.decay not in ("none", "head", "channel"):
            raise ValueError(f'decay must be "none", "head" or "channel", got {self.decay!r}')

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.heads // self.key_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one request's state: (heads, value_dim, key_dim)."""
        return (self.heads, self.value_dim, self.key_dim)

    @property
    def channels(self) -> int:
        """Numbers of q, k and v of a token together."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def decay_width(self) -> int:
        """Numbers of log_decay a token and head carry: 0, 1 or key_dim."""
        return {"none": 0, "head": 1, "channel": self.key_dim}[self.decay]

    def decay_shape(self, batch: int, time: int) -> tuple[int, ...] | None:
        """Shape of log_decay of so many tokens (time) of so many rows (batch); None without a decay."""
        head = (batch, time, self.heads)
        return {"none": None, "head": head, "channel": (*head, self.key_dim)}[self.decay]


def check_inputs(
    spec: RecurrenceSpec,
    q: Shaped[Array, "..."],
    k: Shaped[Array, "..."],
    v: Shaped[Array, "..."],
    log_decay: Shaped[Array, "..."] | None,
    beta: Shaped[Array, "..."] | None,
) -> None:
    """Raises a ValueError that names the first argument whose kind, shape or dtype does not fit `spec`."""
    for name, array in {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}.items():
        if array is None and name in ("log_decay", "beta"):
            continue
        dtype = getattr(array, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or name in ("log_decay", "beta")):
            raise ValueError(f"{name} must be an array of floating-point numbers, got {dtype or type(array).__name__}")
    if v.ndim != 4:
        raise ValueError(f"v must be [batch, time, heads, value_dim], got shape {v.shape}")
    batch, time = v.shape[:2]
    head = (batch, time, spec.heads)
    decay_shape = spec.decay_shape(batch, time)
    if (log_decay is None) != (decay_shape is None):
        raise ValueError(
            f"log_decay must be {'None' if decay_shape is None else f'f32 {decay_shape}'} for decay={spec.decay!r}, "
            f"got {'None' if log_decay is None else log_decay.shape}"
        )
    expected = {
        "q": (q, (batch, time, spec.key_heads, spec.key_dim)),
        "k": (k, (batch, time, spec.key_heads, spec.key_dim)),
        "v": (v, (*head, spec.value_dim)),
        "log_decay": (log_decay, decay_shape),
        "beta": (beta, head),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            words = "" if name == "v" else " (batch and time are those of v)"
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}{words}")
    for name, gate in (("log_decay", log_decay), ("beta", beta)):
        if gate is not None and gate.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 (rounded gates drift over long decodes), got {gate.dtype}")


def check_state(state: Shaped[Array, "..."], rows: int, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless `state` is an array of floating-point numbers [rows, *shape]."""
    dtype, shape = getattr(state, "dtype", None), (rows, *shape)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"state must be an array of floating-point numbers, got {dtype or type(state).__name__}")
    if state.shape != shape:
        raise ValueError(f"state must have shape {shape}, got {state.shape}")
