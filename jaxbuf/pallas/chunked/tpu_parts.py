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

    Products of two parts that are smaller than what the parts of either matrix leave out are left out. A part of b goes
    to the matrix unit once, as that takes as long as 128 rows of a.
    """
    dims, most = (((of_a,), (of_b,)), ((), ())), max(len(a), len(b))
    terms = []
    for j, right in enumerate(b):
        left = a[: most - j]
        together = [jnp.concatenate(left, axis=0)] if of_a == 1 and len(left) > 1 else left
        found = [lax.dot_general(x, right, dims, preferred_element_type=jnp.float32) for x in together]
        rows = a[0].shape[1 - of_a]
        terms += [
            (i + j, found[0][i * rows : (i + 1) * rows] if len(together) == 1 else found[i]) for i in range(len(left))
        ]
    smallest_first = sorted(terms, key=lambda term: term[0], reverse=True)
    return functools.reduce(jnp.add, [term for _, term in smallest_first])


def products(several: Sequence[Parts], b: Parts, of_b: int = 0) -> list:
    """`product` of several matrices of one shape with b, at once if they have equally many parts."""
    if len({len(a) for a in several}) > 1:
        return [product(a, b, 1, of_b) for a in several]
    found = product([jnp.concatenate(parts, axis=0) for parts in zip(*several, strict=True)], b, 1, of_b)
    rows = several[0][0].shape[0]
    return [found[i * rows : (i + 1) * rows] for i in range(len(several))]
