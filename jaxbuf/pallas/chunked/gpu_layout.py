"""Sizes that the two GPU kernels of `chunked` share."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.instructions import synchronize
from jaxbuf.pallas.sums import WGMMA

CHUNK = 64  # tokens that are solved together: a warpgroup's products have so many rows
RING = 2  # chunks that the walk has in shared memory
WINDOW = 64  # values of a head that a warpgroup has
# What is known of a chunk's tokens and a head, CHUNK numbers each. Sums of log decays from the chunk's start up to each
# token are in two parts, both of which are exact, so that differences are; then write strengths, the decay since the
# chunk's start, and that up to its end.
HIGH, LOW, STRENGTH, SINCE, LEFT, GATES = range(6)
# Warpgroups that share a chunk's keys and queries where pairs are computed, and of a block: with 128 registers a thread
# four fit on a multiprocessor, and their waits fill each other.
MOST_TOGETHER, MOST_WARPGROUPS = 2, 4
LEAST = -32.0  # log decays below it are replaced by it: e^-32 of a state is lost among what follows' rounding errors
SHARED_MEMORY = 226 * 2**10  # of a multiprocessor


def place(i):
    """The place of chunk i in the ring."""
    return lax.rem(i, np.int32(RING))


def forget_dead(ref, alive, interpret: bool) -> None:
    """Zeros in place of what belongs to tokens past a row's end, which may be anything.

    Warpgroups that share it may all do so: they write the same.

    Args:
      ref: bfloat16 [CHUNK, n] in shared memory, a `tile`.
      alive: How many of the tokens are the row's.
      interpret: Whether this runs in Pallas' interpreter.
    """

    @pl.when(alive < CHUNK)
    def _():
        synchronize(interpret)
        token = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=WGMMA)
        x = plgpu.load(ref, layout=WGMMA)
        ref[...] = jnp.where(token < alive, x, jnp.zeros_like(x))
        plgpu.commit_smem()


def tile(*dims: int):
    """Shared memory for matrices of bfloat16, in the order in which the tensor cores read them."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(dims, jnp.bfloat16, transforms=transforms)
