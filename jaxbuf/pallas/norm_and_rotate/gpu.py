"""`norm_and_rotate` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A warp serves a query or key, or several short ones; a thread has eight neighbouring channels. The other half of a pair
lies in another thread of the warp. If the vectors do not fill the last block, its other warps serve the last one, too.

Floor: (queries, keys, and both again) / read bandwidth. Below some 256 rows, the 2 to 3 us that any launch takes are
more.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.norm_and_rotate.call import Call
from jaxbuf.pallas.threads import (
    COMPILER,
    WARP,
    exchange,
    gather_vectors,
    load,
    scatter_vectors,
    vectors_layout,
)

HEAD_DIMS = 64, 128, 256
PIECE = 8  # neighbouring numbers that a thread has


def norm_and_rotate(
    call: Call, q: Array, k: Array, weights: tuple[Array, ...], cos: Array, sin: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """`jaxbuf.models.norm_and_rotate.norm_and_rotate`; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtype.
      q: [tokens · heads, width].
      k: [tokens · kv_heads, head_dim].
      weights: Of the norms of queries and of keys, [head_dim] each; or none.
      cos, sin: f32 [tokens, half].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      The queries [tokens · heads, head_dim], and the keys [tokens · kv_heads, head_dim].
    """
    queries, keys = _kernel(call, interpret)(q, k, cos, sin, *weights)
    return queries, keys


def _kernel(call: Call, interpret: bool):
    layout = vectors_layout(call.head_dim, call.dtype)
    count = 4 * max(1, WARP * PIECE // call.head_dim)  # vectors of a block
    dims, counts = (count, call.head_dim), (call.tokens * call.heads, call.tokens * call.kv_heads)
    blocks = [pl.cdiv(n, count) for n in counts]

    def spread(x: Array, axis: int) -> Array:
        """[count] (axis 0) or [head_dim] (axis 1), repeated along the other axis."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, [axis]), layout)

    def serve(block, source, target, heads: int, n: int, cos, sin, weight) -> None:
        vector = block * count + plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout.reduce(1))
        vector = jnp.minimum(vector, np.int32(n - 1))
        x = gather_vectors(source.at[:, pl.ds(0, call.head_dim)], vector, layout, interpret)
        if weight is not None:
            wide = x.astype(jnp.float32)
            mean = jnp.sum(wide * wide, axis=1) * np.float32(1 / call.head_dim)
            scale = load(weight, layout.reduce(0)).astype(jnp.float32) + np.float32(call.offset)
            wide = wide * spread(lax.rsqrt(mean + np.float32(call.eps)), 0) * spread(scale, 1)
            x = wide.astype(call.dtype)
        wide = x.astype(jnp.float32)
        other = exchange(wide, call.half // PIECE, layout, interpret)  # the other half of each pair
        token = vector // np.int32(heads)
        cosines, sines = (gather_vectors(ref, token, layout, interpret, call.head_dim) for ref in (cos, sin))
        channel = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=layout)
        turned = wide * cosines + jnp.where(channel < call.half, -other, other) * sines
        scatter_vectors(
            jnp.where(channel < 2 * call.half, turned, wide).astype(call.dtype), target, vector, layout, interpret
        )

    def norm_and_rotate_heads(q, k, cos, sin, *refs):  # A profile shows this name.
        *weights, queries, keys = refs
        of_queries, of_keys = weights or (None, None)
        block = lax.axis_index("block")

        @pl.when(block < blocks[0])
        def _():
            serve(block, q, queries, call.heads, counts[0], cos, sin, of_queries)

        @pl.when(block >= blocks[0])
        def _():
            serve(block - blocks[0], k, keys, call.kv_heads, counts[1], cos, sin, of_keys)

    return plgpu.kernel(
        norm_and_rotate_heads,
        out_type=[jax.ShapeDtypeStruct((n, call.head_dim), call.dtype) for n in counts],
        grid=(sum(blocks),),
        grid_names=("block",),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
