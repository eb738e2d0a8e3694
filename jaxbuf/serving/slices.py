"""Long device loops, run a slice at a time, so that Python stays in charge of them.

A compiled loop can't be interrupted. If a generation of minutes were one call, a Ctrl-C would end Python's wait for it
but not the loop, which then holds the device until its end. So whoever runs a loop runs it in slices of a fraction of a
second, and looks in between: a Ctrl-C, or an error of the caller, leaves at most one slice behind on the device.
"""

import time
from collections.abc import Callable

SECONDS = 0.2  # of a slice: long enough that the pause between two is nothing beside it
GROWTH = 4  # a slice has at most this many times the steps of the one before


def run_slices[Carry](
    run: Callable[[Carry, int], Carry], carry: Carry, steps: int, look: Callable[[Carry], bool], *, first: int = 1
) -> tuple[Carry, int]:
    """Runs a loop for up to `steps` steps, in slices of about SECONDS each.

    Args:
      run: (carry, number) -> the carry after up to that many steps; may return before the device is done.
      carry: What the loop carries.
      steps: The most steps.
      look: Waits for the device; whether the loop is to go on.
      first: Steps of the first slice: 1, or what an earlier call returned.

    Returns:
      The carry, and the steps of a slice that takes SECONDS, for the next call.
    """
    number, compiled = first, first > 1
    while steps > 0:
        number = max(1, min(number, steps))
        began = time.monotonic()
        carry = run(carry, number)
        going = look(carry)
        seconds = time.monotonic() - began
        steps -= number
        if compiled or seconds < SECONDS:  # else compilation was in it, and says nothing about the next slice
            number = max(1, min(GROWTH * number, int(number * SECONDS / max(seconds, 1e-9))))
        compiled = True
        if not going:
            break
    return carry, number
