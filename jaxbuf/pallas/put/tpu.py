"""`put_rows` on TPUs: Pallas Mosaic TPU.

One program starts a copy for each new row, from where it lies to its place in the pool, and then waits for all of them.

Floor: (read + write of the new rows) / bandwidth.

Why it is not left to XLA: XLA compiles a scatter, and decides by its own estimate where the pool lies meanwhile. A pool
that fits into a chip's VMEM it fetches whole, scatters there, and writes all of it back, which moves the rows of slots
that nobody asked for. Here the pool is one operand, which the output is aliased to, in HBM.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array


def put_rows(pool: Array, new: Array, rows: Array, *, interpret: Any = False) -> Array:
    """`jaxbuf.recurrence.put.put_rows`; `supports` says for which sizes.

    Args:
      pool: [n, ..., a multiple of 128]. It is written in place.
      new: [m, ...] in the pool's dtype.
      rows: int32 [m].
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      The pool.
    """
    count, most = new.shape[0], pool.shape[0]

    def put_rows_in_place(places, new, _, written, done):  # A profile shows this name.
        def each(start):
            def one(i, _):
                place = places[i]

                @pl.when((place >= 0) & (place < most))
                def _():
                    copy = pltpu.make_async_copy(new.at[i], written.at[place], done)
                    copy.start() if start else copy.wait()

            lax.fori_loop(0, count, one, None)

        each(True)
        each(False)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    found = pl.pallas_call(
        put_rows_in_place,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=pltpu.HBM(pool.shape, pool.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="put_rows",
    )(jnp.asarray(rows, jnp.int32), new, pool)
    return lax.optimization_barrier(found)  # or XLA refuses a program that is this kernel and nothing else
