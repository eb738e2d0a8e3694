"""Exact sums of gates, for `extend` on a GPU with a decay a channel."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.gpu_sums import LEAST_GATE
from jaxbuf.pallas.threads import PER_THREAD, THREADS

# A gate is cut to a multiple of 2^-13 and one of 2^-24, and both are whole numbers then. 1.5 · 2^23, added to a float32
# below 2^22, rounds it to a whole number, which the last bits of the sum then are.
HIGH, LOW, WHOLE = (np.float32(x) for x in (2**13, 2**24, 1.5 * 2**23))
WHOLE_BITS = np.int32(WHOLE.view(np.int32))
LEAST = np.int32(-(2**22) + 1)  # LEAST · 2^-13 is -512, whose exponential is 0

type Sum = list[Array]  # of gates: int32 [THREADS] of their first parts and of their second parts


def nothing() -> Sum:
    return [plgpu.layout_cast(jnp.zeros((THREADS,), jnp.int32), PER_THREAD)] * 2


def cut_gate(interpret: bool, gate: Array) -> Sum:
    """A gate in two parts, multiples of 2^-13 and of 2^-24."""
    gate = jnp.maximum(gate, LEAST_GATE)
    high, number = _whole(interpret, gate * HIGH)
    low, _ = _whole(interpret, (gate - number * (1 / HIGH)) * LOW)
    return [high, low]


def _whole(interpret: bool, x: Array) -> tuple[Array, Array]:
    """float32 x, of less than 2^22, rounded to a whole number: as int32 and as float32."""
    if interpret:  # XLA would simplify what is below.
        return jnp.round(x).astype(jnp.int32), jnp.round(x)
    x = x + WHOLE
    return lax.bitcast_convert_type(x, jnp.int32) - WHOLE_BITS, x - WHOLE


def factor(interpret: bool, sum: Sum) -> Array:
    """The exponential of a sum of gates."""
    high, low = sum
    high = jnp.maximum(high, LEAST)
    if interpret:
        numbers = [x.astype(jnp.float32) for x in (high, low)]
    else:
        numbers = [lax.bitcast_convert_type(x + WHOLE_BITS, jnp.float32) - WHOLE for x in (high, low)]
    return jnp.exp(numbers[0] * (1 / HIGH) + numbers[1] * (1 / LOW))


def plus(a: Sum, b: Sum) -> Sum:
    return [x + y for x, y in zip(a, b, strict=True)]


def minus(a: Sum, b: Sum) -> Sum:
    return [x - y for x, y in zip(a, b, strict=True)]
