"""Loads, sums and products of the TPU kernel of `extend`."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxbuf.pallas.extend.tpu_plan import LANES, SUBLANES

HIGHEST = lax.Precision.HIGHEST


def load_rows(ref, first, count: int, width: int, stride: int = 1):
    """`count` rows of `width` numbers, from row `first` on, of an array that was cut into slabs of 128 columns.

    Rows that lie apart are loaded by one instruction each tile, but only from arrays of 128 columns.
    """
    rows = pl.ds(first, count, stride=stride) if stride > 1 and count > 1 else aligned_rows(first, count)
    slabs = [ref.at[i][rows, :] for i in range(-(-width // LANES))]
    found = slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=1)
    return found[:, :width]


def store_rows(ref, first, x) -> None:
    """Stores x [rows, width] where `load_rows` finds it."""
    for i in range(-(-x.shape[1] // LANES)):
        part = x[:, i * LANES : (i + 1) * LANES]
        ref[i, aligned_rows(first, x.shape[0]), : part.shape[1]] = part


def aligned_rows(first, count: int):
    """`count` rows from `first` on: a multiple of a tile's, unless it is one row."""
    return pl.ds(first if count == 1 or isinstance(first, int) else pl.multiple_of(first, SUBLANES), count)


def later(x, count: int):
    """Row i is x's row i + count, and zeros at the end."""
    return jnp.concatenate([x[count:], jnp.zeros((count, x.shape[1]), x.dtype)], axis=0)


def column_of(x, index):
    """Column `index` of x [rows, columns], as [rows, 1]."""
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(column == index, x, 0.0), axis=1, keepdims=True)


def match_all(keys, probes):
    """Of entries' keys [entries, key_dim] with each probe [1, key_dim]: [entries, 1]."""
    return [jnp.sum(keys * probe, axis=1, keepdims=True) for probe in probes]


def diagonal(size: int):
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in range(2))
    return rows == columns


def upright(x):
    """[1, n] as [n, 1]."""
    size = x.shape[1]
    return jnp.sum(jnp.where(diagonal(size), jnp.broadcast_to(x, (size, size)), 0.0), axis=1, keepdims=True)


def lying(x):
    """[n, 1] as [1, n]."""
    size = x.shape[0]
    return jnp.sum(jnp.where(diagonal(size), jnp.broadcast_to(x, (size, size)), 0.0), axis=0, keepdims=True)


def exact_dot(a, b, of_a: int, of_b: int):
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), precision=HIGHEST, preferred_element_type=jnp.float32)


def bfloat16_parts(x, count: int):
    """bfloat16 numbers whose sum is x: one where x is bfloat16 already, three of any float32 number.

    They are cut off, not rounded, which takes fewer instructions and is as exact.
    """
    found = []
    for left in range(count - 1, -1, -1):
        part = x
        if left:
            bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(2**16))
            part = lax.bitcast_convert_type(bits, jnp.float32)
            x = x - part
        found.append(part.astype(jnp.bfloat16))
    return found


def dot_of_parts(a, b):
    """[m, k] and [n, k] in bfloat16, whose products are exact: their sums over k, [m, n] in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def rounded_to(x, dtype):
    if dtype == jnp.float32:
        return x
    limits = jnp.finfo(dtype)
    return lax.reduce_precision(x, limits.nexp, limits.nmant)
