"""`add_and_norm` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves a token; its numbers stay in registers between the sum and the norm. All threads have equally many, at
least two: what is over lies in a second piece, the last numbers of the token. It begins within the first, of which it
computes and writes some numbers once more, and leaves them out of the mean.

Floor: (x + y + both results) / read bandwidth. Below some 512 tokens, the 2 to 3 us that any launch takes are more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.add_and_norm.call import Call
from jaxbuf.pallas.threads import COMPILER, THREADS, load, store

LEAST = 2 * THREADS
MOST = 16384  # numbers of a token: what a block's registers hold


def add_and_norm(call: Call, x: Array, y: Array, weight: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """`jaxbuf.models.residual.add_and_norm`; `supports` says for which sizes.

    Args:
      call: The call's size and dtype.
      x, y: [tokens, hidden]; y in float32 [summands, tokens, hidden], if there are some.
      weight: [hidden].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      The sum and its norm, [tokens, hidden] each.
    """
    total, normed = _kernel(call, interpret)(x, y, weight)
    return total, normed


def cut(hidden: int) -> list[tuple[int, int, int]]:
    """A token's pieces: the first number of each, how many it has, and how many of them the one before has, too."""
    whole = hidden // LEAST * LEAST
    return [(0, whole, 0)] + ([(hidden - LEAST, LEAST, LEAST - hidden + whole)] if whole < hidden else [])


def layout_of(size: int):
    """A piece's: a thread's numbers are loaded in vectors of 16 bytes where all have so many."""
    vector = next(n for n in (8, 4, 2) if size % (n * THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vector)


def _kernel(call: Call, interpret: bool):
    pieces = [(pl.ds(first, size), layout_of(size), again) for first, size, again in cut(call.hidden)]

    def add_and_norm_tokens(x, y, weight, total, normed):  # A profile shows this name.
        token = lax.axis_index("token")

        def add(numbers, layout):
            if call.summands:
                parts = [load(y.at[i, token, numbers], layout) for i in range(call.summands)]
                added = functools.reduce(jnp.add, parts).astype(call.dtype)
            else:
                added = load(y.at[token, numbers], layout)
            new = load(x.at[token, numbers], layout).astype(jnp.float32) + added.astype(jnp.float32)
            return new.astype(call.dtype)

        sums = [add(numbers, layout) for numbers, layout, _ in pieces]
        scales = [load(weight.at[numbers], layout).astype(jnp.float32) for numbers, layout, _ in pieces]
        squares = np.float32(0)
        for (numbers, layout, again), new in zip(pieces, sums, strict=True):
            store(total.at[token, numbers], new)
            squared = jnp.square(new.astype(jnp.float32))
            if again:
                place = plgpu.broadcasted_iota(jnp.int32, squared.shape, 0, layout=layout)
                squared = jnp.where(place >= again, squared, np.float32(0))
            squares += jnp.sum(squared)
        root = lax.rsqrt(squares * np.float32(1 / call.hidden) + np.float32(call.eps))
        for (numbers, _, _), new, scale in zip(pieces, sums, scales, strict=True):
            found = new.astype(jnp.float32) * root * (scale + np.float32(call.offset))
            store(normed.at[token, numbers], found.astype(call.dtype))

    out = jax.ShapeDtypeStruct((call.tokens, call.hidden), call.dtype)
    return plgpu.kernel(
        add_and_norm_tokens,
        out_type=(out, out),
        grid=(call.tokens,),
        grid_names=("token",),
        compiler_params=COMPILER,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
