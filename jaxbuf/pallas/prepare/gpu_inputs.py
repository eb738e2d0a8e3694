"""Which inputs a token's convolution reads on NVIDIA GPUs, and where a row's inputs lie in the ring.

A token follows the one before it, or its parent in a tree. The paths of a tree are found in scalars, which all threads
of a block share; an ancestor's input is read again from the launch, where it lies in the cache by then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbuf.axes import Array
from jaxbuf.pallas.prepare.call import Convolution

MOST_TOKENS = 16  # new tokens of a row


class Row(NamedTuple):
    """A row of the launch, in scalars.

    Attributes:
      slot: Its slot.
      places: The ring rows of the width - 1 inputs before the new ones, oldest first, and of the new ones.
      known: Of the inputs before the new ones, whether they are behind the text's beginning.
      real: Of the new ones, whether they are real.
    """

    slot: Array
    places: list[Array]
    known: list[Array]
    real: list[Array]


def find_row(call: Convolution, row, slots, start, lengths, order) -> Row:
    """Reads what the launch says of a row.

    Args:
      call: The call's sizes.
      row: Its number.
      slots, start, lengths: References to int32 [rows].
      order: A reference to int32 [slots + 1, call.ring]; None: inputs lie where their positions say.
    """
    slot, first, length, history = slots[row], start[row], lengths[row], call.width - 1
    begin = lax.rem(first, np.int32(call.ring))
    places = []
    for t in range(-history, call.time):  # The ring has room for all of these, so that it comes round once at most.
        place = begin + t
        place = jnp.where(place < 0, place + call.ring, jnp.where(place >= call.ring, place - call.ring, place))
        places.append(place if order is None else order[slot, place])
    known = [(first >= age) & (slot > 0) for age in range(history, 0, -1)]
    real = [(t < length) & (slot > 0) for t in range(call.time)]
    return Row(slot, places, known, real)


def read_windows(
    call: Convolution,
    row,
    found: Row,
    new_input: Callable[[Any], Array],
    held_input: Callable[[Any], Array],
    parents,
) -> tuple[list[Array], list[list[Array]]]:
    """Reads the inputs that the new tokens' convolutions need.

    Args:
      call: The call's sizes.
      row: The row's number.
      found: The row.
      new_input: Reads the input of a new token, by its number in the row.
      held_input: Reads an input in the slot's ring, by its ring row.
      parents: A reference to int32 [rows, T]; None: each token follows the one before it.

    Returns:
      The inputs of the new tokens; and of each those that its taps meet, its own last. They stay in their dtype, in
      which they take the fewest registers, until `convolve`.
    """
    history = call.width - 1
    new = [new_input(t) for t in range(call.time)]
    past = [select(known, held_input(place)) for known, place in zip(found.known, found.places, strict=False)]
    if parents is None:
        in_a_row = past + new
        return new, [in_a_row[t : t + call.width] for t in range(call.time)]
    windows = []
    for t in range(call.time):
        node, window = parents[row, t], [new[t]]
        for age in range(1, history + 1):
            x = past[-1]
            for before in range(2, age + 1):
                x = jnp.where(jnp.broadcast_to(node == -before, x.shape), past[-before], x)
            if t >= age:  # Of the new tokens, as many are before this one.
                ancestor = new_input(jnp.maximum(node, 0))
                x = jnp.where(jnp.broadcast_to(node >= 0, x.shape), ancestor, x)
            window.insert(0, x)
            node = jnp.where(node >= 0, parents[row, jnp.maximum(node, 0)], node - 1)
        windows.append(window)
    return new, windows


def convolve(window: list[Array], taps: list[Array]) -> Array:
    """The sum of products in float32, from the oldest input on."""
    y = window[0].astype(jnp.float32) * taps[0]
    for x, tap in zip(window[1:], taps[1:], strict=True):
        y = y + x.astype(jnp.float32) * tap
    return y


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), as the square of a reciprocal root: that takes one instruction, and a division takes ten."""
    root = lax.rsqrt(np.float32(1) + jnp.exp(-x))
    return root * root


def select(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros. They are selected, not multiplied: x may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
