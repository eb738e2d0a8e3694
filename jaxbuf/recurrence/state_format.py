"""How checkpoints store the state: as float32 or bfloat16 numbers, or split into a high and a low half.

A step of the buffered form only reads the checkpoint, and what it reads need not be all of it. A split checkpoint keeps
each number S as high = bfloat16(S) and low = S - high. Steps read the high half; a fold reads both, adds the entries in
float32, and writes both. So a step moves the bytes of a bfloat16 state, and the state keeps what a bfloat16 one would
lose at every fold. "split" stores the low half as bfloat16, "split8" as int8 with a float32 scale for each row (the
key_dim numbers of one value).

A form that writes the state in every step gains nothing from it.

There is no int8 high half. It would halve what a step reads once more, but in a trial on XLA's path (a scale for each
row, a bfloat16 low half, limit 16, bfloat16 entries, 4,096 steps, 4 heads of 128 by 128) the mean error of a step came
to 7.3e-3 and the worst to 3.4e-2, where split states have 2.6e-3 and 8.4e-3, though it did not grow either. The
embedded model's likelihood stayed within 0.0034 % in each quarter of 4 x 4,096 held-out tokens; the next token's
distribution diverged from the recurrence's by 4e-5 nats, ten times as far as with a split state, and 8 of 100 greedy
continuations differed, of split states none.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Float, Float32, Shaped
from jaxbuf.recurrence.spec import RecurrenceSpec

SPLIT = {"split": jnp.dtype(jnp.bfloat16), "split8": jnp.dtype(jnp.int8)}
LARGEST = 127  # of int8, with either sign
SCALE = 4  # bytes of a scale: float32


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """The dtypes of a checkpoint's arrays.

    Attributes:
      name: "float32", "bfloat16" or another floating-point dtype's; "split" or "split8".
      high: Of the numbers that a step reads: all of the state, or its high half.
      low: Of the low half, bfloat16 or int8; None if the state is not split.
    """

    name: str
    high: np.dtype
    low: np.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether the low half has a scale for each row."""
        return self.low == jnp.int8

    @property
    def written_each_step(self) -> "StateFormat":
        """What a design that writes the state in every step has in its place: float32 for a split one."""
        return self if self.low is None else state_format(jnp.float32)

    def read_bytes(self, spec: RecurrenceSpec) -> int:
        """Bytes of a checkpoint that a step reads."""
        return math.prod(spec.state_shape) * self.high.itemsize

    def low_bytes(self, spec: RecurrenceSpec) -> int:
        """Bytes of a checkpoint that only folds and prefill read: 0 if it is not split."""
        numbers, scales = math.prod(spec.state_shape), spec.heads * spec.value_dim
        return (numbers * self.low.itemsize if self.low is not None else 0) + (scales * SCALE if self.scaled else 0)

    def stored_bytes(self, spec: RecurrenceSpec) -> int:
        """Bytes that a checkpoint takes."""
        return self.read_bytes(spec) + self.low_bytes(spec)

    def fold_bytes(self, spec: RecurrenceSpec) -> int:
        """Bytes that a fold moves beside what its step reads anyway: the low half is read, and everything written."""
        return self.low_bytes(spec) + self.stored_bytes(spec)


def state_format(state_dtype: object) -> StateFormat:
    """The format that a `state_dtype` names: a dtype of floating-point numbers, "split" or "split8".

    Raises:
      ValueError: It is something else.
    """
    if isinstance(state_dtype, StateFormat):
        return state_dtype
    if isinstance(state_dtype, str) and state_dtype in SPLIT:
        return StateFormat(state_dtype, jnp.dtype(jnp.bfloat16), SPLIT[state_dtype])
    try:
        dtype = jnp.dtype(state_dtype)  # pyright: ignore
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        found = repr(state_dtype) if dtype is None else dtype.name
        raise ValueError(f'state_dtype must be a dtype of floating-point numbers, "split" or "split8", got {found}')
    return StateFormat(dtype.name, dtype)


def format_of(
    checkpoints: Float[Array, "states heads value_dim key_dim"], low: Shaped[Array, "... key_dim"] | None
) -> StateFormat:
    """The format of a pool's arrays."""
    names = {dtype: name for name, dtype in SPLIT.items()}
    return state_format(checkpoints.dtype if low is None else names[jnp.dtype(low.dtype)])


def encode(
    state: Float[Array, "... key_dim"], form: StateFormat
) -> tuple[Float[Array, "... key_dim"], Shaped[Array, "... key_dim"] | None, Float32[Array, "..."] | None]:
    """A state as it is stored.

    The high half is what steps read, and has to stay that number. The sum of both halves is not kept as one number: it
    could be rounded to another high half.

    Args:
      state: The state.
      form: The format.

    Returns:
      The numbers or the high half; the low half; and its scales. None for what there is not.
    """
    if form.low is None:
        return state.astype(form.high), None, None
    state = state.astype(jnp.float32)
    high = rounded(state, form.high)
    rest = state - high
    if not form.scaled:
        return high.astype(form.high), rest.astype(form.low), None
    scale = jnp.max(jnp.abs(rest), axis=-1) * np.float32(1 / LARGEST)
    steps = rest / jnp.where(scale > 0, scale, np.float32(1))[..., None]
    return high.astype(form.high), jnp.clip(jnp.round(steps), -LARGEST, LARGEST).astype(form.low), scale


def decode(
    high: Float[Array, "... key_dim"], low: Shaped[Array, "... key_dim"] | None, scale: Float32[Array, "..."] | None
) -> Float32[Array, "... key_dim"]:
    """The state that `encode` stored."""
    if low is None:
        return high.astype(jnp.float32)
    rest = low.astype(jnp.float32)
    return high.astype(jnp.float32) + (rest if scale is None else rest * scale[..., None])


def rounded(x: Float[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """f32 array of x as `dtype` stores it. XLA may drop a conversion there and back (xla_allow_excess_precision)."""
    limits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), limits.nexp, limits.nmant)
