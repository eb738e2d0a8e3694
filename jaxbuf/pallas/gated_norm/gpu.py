"""`gated_norm` and `grouped_norm` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A warp serves a vector, or several short ones, and a block four times as many; a thread has neighbouring numbers. If the
vectors do not fill the last block, it begins where it ends with the last vector: two blocks then write the same numbers
twice. Of long vectors a block serves one.

Floor: (out + z + result) / read bandwidth. Below some 256 rows, the 2 to 3 us that any launch takes are more.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.gated_norm.call import Call
from jaxbuf.pallas.threads import COMPILER, THREADS, WARP, load, load_repeated, store

PIECE = 8  # neighbouring numbers that a thread has at most
LONG, LONGEST = 512, 8192  # Vectors in multiples of LONG are served by a block each.
SHORTEST, SHORT = 16, 256  # Up to SHORT, multiples of SHORTEST are served by a warp;
MIDDLE, MIDDLEST = 64, 1024  # beyond, multiples of MIDDLE.


class Share(NamedTuple):
    """What a block serves.

    Attributes:
      vectors: How many vectors; 0: one, with all its warps.
      layout: Of these.
    """

    vectors: int
    layout: Any


def share(call: Call) -> Share:
    """What a block serves, of vectors of a length that `supports` takes."""
    most = 16 // max(call.out.itemsize, call.z.itemsize)  # neighbouring numbers that a thread loads at once
    if call.dim % LONG == 0:
        count = most if call.dim % (THREADS * most) == 0 else LONG // THREADS
        return Share(0, plgpu.Layout.WG_STRIDED((call.dim,), count))
    power = min(call.dim & -call.dim, WARP * most)
    count = max(2, power // WARP)
    threads = power // count
    vectors = WARP // threads  # of a warp
    if vectors == 1:
        tiling, warps, lanes = plgpu.Tiling(((4, power), (count,))), (-3,), (-2,)
    else:
        tiling, warps, lanes = plgpu.Tiling(((4 * vectors, power), (vectors, count))), (-4,), (-2, -3)
    return Share(4 * vectors, plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=lanes, vector_dim=-1))


def gated_norm(call: Call, out: Array, z: Array, weight: Array, *skip: Array, interpret: bool = False) -> Array:
    """`gated_norm` and `grouped_norm` of `jaxbuf.recurrence.gated_norm`; `supports` says for which sizes.

    Args:
      call: The call's size and dtypes.
      out: [rows, T, heads, value_dim] in call.out.
      z: [rows, T, heads · value_dim] in call.z.
      weight: [call.groups · call.dim].
      skip: Nothing; or D f32 [heads] and values [rows, T, heads, value_dim] in call.values.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      [rows, T, heads · value_dim] in call.result.
    """
    flat = call.vectors, call.dim
    arrays = [out.reshape(flat), z.reshape(flat), weight.reshape(call.groups, call.dim)]
    if skip:
        D, values = skip
        arrays += [D.reshape(call.groups, -1), values.reshape(flat)]
    return _kernel(call, interpret)(*arrays).reshape(z.shape)


def _kernel(call: Call, interpret: bool):
    count, layout = share(call)

    def spread(x: Array, axis: int) -> Array:
        """[count] (axis 0) or [dim] (axis 1), repeated along the other axis: [count, dim]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (count, call.dim), [axis]), layout)

    def norm(out_ref, z_ref, weight_ref, *refs):
        *skip, result_ref = refs
        number = lax.axis_index("vectors")
        first = number * max(1, count)
        if count and call.vectors % count:
            first = jnp.minimum(first, call.vectors - count)
        group = lax.rem(first, np.int32(call.groups))
        at = pl.ds(first, count) if count else number

        def load_of_groups(ref, load) -> Array:
            """What `load` makes of a reference [groups, ...], for each of the block's vectors."""
            if count and call.groups == 1:
                return spread(load(ref.at[0], layout.reduce(0)).astype(jnp.float32), 1)
            return load(ref.at[pl.ds(group, count) if count else group], layout).astype(jnp.float32)

        weight = load_of_groups(weight_ref, load)
        x = load(out_ref.at[at], layout).astype(jnp.float32)
        if skip:
            D_ref, values_ref = skip
            D = load_of_groups(D_ref, lambda ref, each: load_repeated(ref, call.value_dim, each, interpret))
            more = (D * load(values_ref.at[at], layout).astype(jnp.float32)).astype(call.out).astype(jnp.float32)
            x = (x + more).astype(call.out).astype(jnp.float32)
        z = load(z_ref.at[at], layout).astype(jnp.float32)
        root = lax.rsqrt(np.float32(1) + jnp.exp(-z))  # Its square is the sigmoid. A division takes ten instructions.
        gate = root * root if call.activation == "sigmoid" else z * (root * root)
        if call.form == "gated":
            x = x * gate
        mean = jnp.sum(x * x, axis=None if count == 0 else 1) * np.float32(1 / call.dim)
        scale = lax.rsqrt(mean + np.float32(call.eps))
        x = x * (scale if count == 0 else spread(scale, 0)) * weight
        if call.form == "head":
            x = x.astype(call.out).astype(jnp.float32)
        if call.form != "gated":
            x = x * gate
        store(result_ref.at[at], x.astype(call.result))

    def gated_norm_heads(*refs):  # A profile shows these names.
        norm(*refs)

    def gated_norm_groups(*refs):
        norm(*refs)

    return plgpu.kernel(
        gated_norm_heads if call.form == "head" else gated_norm_groups,
        out_type=jax.ShapeDtypeStruct((call.vectors, call.dim), call.result),
        grid=(pl.cdiv(call.vectors, max(1, count)),),
        grid_names=("vectors",),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
