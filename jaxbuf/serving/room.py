"""Rows that lack memory, between two calls of the compiled loop: who gives some back, and who ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.serving.admit import release
from jaxbuf.serving.carry import EMPTY, RUNNING, STARVED, Carry


def make_room(carry: Carry) -> Carry:
    """Lets rows go on that rested for want of memory.

    The memory of rows that have ended is given back (their text is no longer told, so it must have been read). If there
    are none, and no row runs that could end, one of those that rested ends, the last: what it had serves the others.
    A row whose prompt could not be read ends in any case.

    Args:
      carry: After `admit` or `generate_tokens`; donated if something changes.
    """
    state, lacking = jax.device_get((carry.state, carry.lacking))
    unread, resting = lacking & (state == EMPTY), lacking & (state == RUNNING)
    starved = unread.copy()
    if resting.any():
        ended = np.flatnonzero((state != RUNNING) & (state != EMPTY))
        if len(ended):
            carry = release(carry, np.pad(ended, (0, len(state) - len(ended)), constant_values=-1).astype(np.int32))
        elif not ((state == RUNNING) & ~lacking).any():
            starved[np.flatnonzero(resting)[-1]] = True
    if not starved.any():
        return carry
    # By operations on the old arrays: the results lie where the program was compiled for.
    after = jnp.where(starved, STARVED, carry.state), jnp.where(starved, False, carry.lacking)
    return dataclasses.replace(carry, state=after[0], lacking=after[1])
