"""The kernel of `put_rows`, and what it can serve.

`Call` describes a call, `supports` says whether the kernel serves it, and `tpu.put_rows` is the kernel, for TPUs.
"""

from jaxbuf.pallas.put.call import Call

__all__ = ["Call", "supports"]

LANES = 128  # numbers of a tile's row
SCALARS = 512 * 1024  # bytes of scalar memory for the places of all rows


def supports(call: Call) -> str | None:
    """Whether the kernel serves a call.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (
        # Else rows share tiles with their neighbours, or XLA keeps the pool in another order of axes.
        (len(call.pool) >= 3, f"a pool of three axes or more, got {len(call.pool)}"),
        (call.pool[-1] % LANES == 0, f"a last axis that is a multiple of {LANES}, got {call.pool[-1]}"),
        (call.rows > 0, "new rows, got none"),
        (4 * call.rows <= SCALARS, f"at most {SCALARS // 4} rows, got {call.rows}"),
        (call.dtype == call.stored, f"rows of the pool's dtype {call.stored.name}, got {call.dtype.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
