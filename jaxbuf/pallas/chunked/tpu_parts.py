"""Products of float32 matrices on a matrix unit that multiplies bfloat16 numbers and adds in float32."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

type Parts = Sequence  # bfloat16 arrays of one shape, whose sum is an array


def parts_of(x, count: int) -> list:
    """bfloat16 arrays whose sum is x: one if x is bfloat16 already; else `count`, of which each takes eight bits.

    The sum of three is exact. That of two is off by up to 2**-18 of a number.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    found = []
    for left in range(count - 1, 0, -1):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        if left == 1:
            bits = bits + np.int32(2**15)  # rounds; with more parts behind it, cutting off loses nothing
        high = lax.bitcast_convert_type(bits & np.int32(-(2**16)), jnp.float32)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*found, x.astype(jnp.bfloat16)]


def product(a: Parts, b: Parts, of_a: int = 1, of_b: int = 0):
    """The product of the matrices that are the sums of a and of b, over axis `of_a` of a and `of_b` of b, in float32.

    Products of two parts that are smaller than what the parts of either matrix leave out are left out.
    """
    most = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    dims = (((of_a,), (of_b,)), ((), ()))
    terms = [
        lax.dot_general(a[i], b[j], dims, preferred_element_type=jnp.float32)
        for i, j in sorted(pairs, key=sum, reverse=True)  # the smallest are added first
    ]
    return functools.reduce(jnp.add, terms)
