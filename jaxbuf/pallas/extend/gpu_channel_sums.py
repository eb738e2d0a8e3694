"""Exact sums of gates, for `extend` on a GPU with a decay a channel."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array

# A gate is rounded to a multiple of 2^-23, and a sum of gates is an int32 that counts these. Gates are at most 0, and a
# sum below -128, whose exponential is 0, counts as -128: so any order of additions gives the same bits.
UNITS = np.float32(2**23)
LEAST_GATE, LEAST = np.float32(-128), np.int32(-(2**30))
TO_BASE_2 = np.float32(np.log2(np.e) / 2**23)
# What gates are taken away from again is the sum modulo 2^32, which is right down to -256, and beside it a sum of gates
# rounded to multiples of 2^-4, which tells whether the sum is in [-256, -128]. It is off by at most 2^-5 a gate.
COARSE, LEAST_COARSE = np.float32(2**4), np.int32(-192 * 2**4)
HALF = np.float32(0.5)

type Sum = Array  # of gates: int32 of any shape
type Wide = list[Array]  # a sum that gates can be taken away from: int32, the sum modulo 2^32 and the coarse one


def nothing(dims: tuple[int, ...], layout) -> Sum:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.int32), layout)


def cut(gate: Array) -> Sum:
    """A gate as a sum of one."""
    return _round(jnp.maximum(gate, LEAST_GATE) * UNITS)


def cut_wide(gate: Array) -> Wide:
    return [cut(gate), _round(jnp.maximum(gate, LEAST_GATE) * COARSE)]


def _round(x: Array) -> Array:
    """int32 of x, which is at most 0: rounded, as a conversion cuts digits off."""
    return (x - HALF).astype(jnp.int32)


def plus(a: Sum, b: Sum) -> Sum:
    return jnp.maximum(a + b, LEAST)


def plus_wide(a: Wide, b: Wide) -> Wide:
    return [x + y for x, y in zip(a, b, strict=True)]


def minus_wide(a: Wide, b: Wide) -> Wide:
    return [x - y for x, y in zip(a, b, strict=True)]


def narrow(sum: Wide) -> Sum:
    """What `plus` would have added up to."""
    modular, coarse = sum
    # Mosaic takes the result for signed if the first choice is known to be; a constant is not.
    return jnp.where(coarse >= LEAST_COARSE, jnp.maximum(modular, LEAST), LEAST)


def factor(sum: Sum) -> Array:
    """The exponential of a sum of gates."""
    return jnp.exp2(sum.astype(jnp.float32) * TO_BASE_2)
