"""Rows that lack memory, between two calls of the compiled loop: who gives some back, and who ends."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array
from jaxbuf.models import decoder
from jaxbuf.serving.carry import EMPTY, RUNNING, STARVED, Carry, slots_of


def make_room(carry: Carry) -> Carry:
    """Lets rows go on that rested for want of memory.

    Rows that have ended give their memory back; their text stays until `release`. If no row that has ended holds
    memory, and no running row could end and give some back, the last of the rows that rest is ended, and the others get
    its memory. A row whose prompt could not be read ends in any case. Rows that end here are STARVED.

    Args:
      carry: After `admit` or `generate_tokens`; donated if something changes.
    """
    state, lacking = jax.device_get((carry.state, carry.lacking))
    if not lacking.any():
        return carry
    starved, running = lacking & (state == EMPTY), state == RUNNING
    resting = np.flatnonzero(running & lacking)
    gives = np.zeros_like(starved)
    if len(resting):
        gives = ~running & (state != EMPTY) & (np.asarray(carry.position) > 0)
        if not gives.any() and not (running & ~lacking).any():
            starved[resting[-1]] = True
    if not (starved | gives).any():
        return carry
    return _end(carry, starved, starved | gives)


@partial(jax.jit, donate_argnames="carry")
def _end(carry: Carry, starved: Array, gives: Array) -> Carry:
    """Ends the rows that are `starved`, and empties the memory of those that give it back: bool [rows] both."""
    rows = jnp.arange(gives.shape[0], dtype=jnp.int32)
    return dataclasses.replace(
        carry,
        cache=decoder.reset(carry.cache, slots_of(jnp.where(gives, rows, -1))),
        state=jnp.where(starved, STARVED, carry.state),
        lacking=carry.lacking & ~starved,
    )
