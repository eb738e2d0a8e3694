"""The kernel of `chunked` and of `prefill`, and what it can serve.

`Call` describes a call, `supports` says whether the kernel serves it, and `tpu.solve` is the kernel, for TPUs.
"""

import jax.numpy as jnp

from jaxbuf.pallas.chunked.call import Call

__all__ = ["Call", "supports"]


def supports(call: Call, *, platform: str = "tpu", generation: str = "") -> str | None:
    """Whether a platform's kernel serves a call.

    Args:
      call: The call.
      platform: "tpu".
      generation: Of a TPU, whose VMEM decides; as in `jaxbuf.target.Target`.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    from jaxbuf.pallas.chunked.tpu_layout import Layout, make_layout

    assert platform == "tpu", platform
    floats = jnp.float32, jnp.bfloat16
    dtypes = ", ".join(x.name for x in (call.q, call.k, call.v))
    needs: list[tuple[bool, str]] = [
        (call.time > 0 and call.rows > 0, f"rows and tokens, got {call.rows} rows of {call.time}"),
        (call.key_dim % 64 == 0, f"a key_dim that is a multiple of 64, got {call.key_dim}"),
        (call.value_dim % 16 == 0, f"a value_dim that is a multiple of 16, got {call.value_dim}"),
        (all(x in floats for x in (call.q, call.k, call.v)), f"q, k and v in float32 or bfloat16, got {dtypes}"),
    ]
    unmet = next((need for met, need in needs if not met), None)
    if unmet is None:
        layout = make_layout(call, generation)
        unmet = None if isinstance(layout, Layout) else layout
    return None if unmet is None else f"it needs {unmet}"
