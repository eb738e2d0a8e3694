"""Products of groups of rows with an expert's weight each, on TPUs: JAX's Megablox, a library's kernel.

It goes through the groups that have rows, and reads of each the weight as it is stored, [out, in], in parts that fit
into VMEM. XLA's own ragged product wants weights [in, out]: it would lay out all experts of a model anew in every call
of a program, in memory that takes as many bytes again.

Floor: (the weights of the experts that have rows + rows read and written) / bandwidth.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import gmm

from jaxbuf.axes import Array
from jaxbuf.pallas.experts.call import Call

LANES = 128  # numbers of a tile's row: parts are multiples of it
PACKED = 16  # rows that 16-bit numbers have in a tile
MOST_INPUTS = 4096  # numbers of a row that are multiplied at once
WEIGHT = 3 * 2**20  # bytes of a part of a weight, of which two are in VMEM
# Rows that are multiplied at once; the many where groups are so large that a weight would be read often for few.
ROWS, MANY_ROWS = 128, 512


def tiles(call: Call) -> tuple[int, int, int]:
    """Rows, inputs and outputs of what is multiplied at once: all of an axis, or a multiple of a tile."""
    rows = MANY_ROWS if call.rows >= MANY_ROWS * call.experts else min(ROWS, -(-call.rows // PACKED) * PACKED)
    inputs = call.inputs
    if inputs > MOST_INPUTS:
        even = -(-inputs // -(-inputs // MOST_INPUTS))
        inputs = -(-even // LANES) * LANES
    room = WEIGHT // (inputs * np.dtype(call.dtype).itemsize) // LANES * LANES
    return rows, inputs, min(max(LANES, room), (1 + call.gated) * call.outputs)


def multiply_groups(call: Call, x: Array, weights: Array, groups: Array, *, interpret: bool = False) -> Array:
    """x's first rows times the first of the weights, the next ones times the second, and so on.

    Args:
      call: What `supports` said can be served.
      x: [rows, in], sorted by group.
      weights: [experts, out, in].
      groups: int32 [experts], how many rows each has; the rest of x is in no group.
      interpret: Run in Pallas' interpreter.

    Returns:
      [rows, out] in x's dtype; anything in rows of no group.
    """
    most = tiles(call)
    padded = jnp.pad(x, ((0, -call.rows % most[0]), (0, 0)))
    found = gmm(
        padded,
        weights,
        groups,
        preferred_element_type=x.dtype,
        tiling=most,
        transpose_rhs=True,
        interpret=interpret,
    )
    return jax.lax.slice_in_dim(found, 0, call.rows)
