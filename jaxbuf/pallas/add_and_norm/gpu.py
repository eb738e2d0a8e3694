"""`add_and_norm` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves a token; its numbers stay in registers between the sum and the norm.

Floor: (x + y + both results) / read bandwidth. Below some 512 tokens, the 2 to 3 us that any launch takes are more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.add_and_norm.call import Call
from jaxbuf.pallas.threads import COMPILER, THREADS, load, store

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


def _kernel(call: Call, interpret: bool):
    vector = next(n for n in (8, 4, 2) if call.hidden % (n * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((call.hidden,), vector)

    def add_and_norm_tokens(x, y, weight, total, normed):  # A profile shows this name.
        token = lax.axis_index("token")
        if call.summands:
            parts = [load(y.at[i, token], layout) for i in range(call.summands)]
            added = functools.reduce(jnp.add, parts).astype(call.dtype)
        else:
            added = load(y.at[token], layout)
        new = (load(x.at[token], layout).astype(jnp.float32) + added.astype(jnp.float32)).astype(call.dtype)
        scale = load(weight, layout).astype(jnp.float32) + np.float32(call.offset)
        store(total.at[token], new)
        wide = new.astype(jnp.float32)
        root = lax.rsqrt(jnp.sum(wide * wide) * np.float32(1 / call.hidden) + np.float32(call.eps))
        store(normed.at[token], (wide * root * scale).astype(call.dtype))

    out = jax.ShapeDtypeStruct((call.tokens, call.hidden), call.dtype)
    return plgpu.kernel(
        add_and_norm_tokens,
        out_type=(out, out),
        grid=(call.tokens,),
        grid_names=("token",),
        compiler_params=COMPILER,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
