"""The kernel of `chunked` and of `prefill`, and what it can serve.

`Call` describes a call, `supports` says whether a kernel serves it, and `gpu.solve` and `tpu.solve` are the kernels.
"""

import jax.numpy as jnp

from jaxbuf.pallas.chunked.call import Call

__all__ = ["Call", "supports"]


def supports(call: Call, *, platform: str = "tpu", generation: str = "") -> str | None:
    """Whether a platform's kernel serves a call.

    Args:
      call: The call.
      platform: "gpu" or "tpu".
      generation: Of a TPU, whose VMEM decides; as in `jaxbuf.target.Target`.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    needs = (_gpu_needs if platform == "gpu" else _tpu_needs)(call)
    unmet = next((need for met, need in needs if not met), None)
    if unmet is None and platform == "tpu":
        from jaxbuf.pallas.chunked.tpu_layout import Layout, make_layout

        layout = make_layout(call, generation)
        unmet = None if isinstance(layout, Layout) else layout
    return None if unmet is None else f"it needs {unmet}"


def _gpu_needs(call: Call) -> list[tuple[bool, str]]:
    """What the GPU's kernel needs, and whether the call has it."""
    return [
        *_tokens(call),
        (
            call.decay != "channel" or call.key_dim == 128,
            f"a key_dim of 128 for a decay a key channel, got {call.key_dim}",
        ),
        # Nothing dampens there what is recalled, and errors of 2^-16 grow a hundredfold.
        (not (call.delta and call.decay == "none"), "a decay with the delta rule, got none"),
        (call.key_dim in (64, 128), f"a key_dim of 64 or 128, got {call.key_dim}"),
        (call.value_dim % 16 == 0, f"a value_dim that is a multiple of 16, got {call.value_dim}"),
        (all(x == jnp.bfloat16 for x in (call.q, call.k, call.v)), f"q, k and v in bfloat16, got {_dtypes(call)}"),
    ]


def _tpu_needs(call: Call) -> list[tuple[bool, str]]:
    """What the TPU's kernel needs, and whether the call has it."""
    floats = jnp.float32, jnp.bfloat16
    return [
        *_tokens(call),
        (call.key_dim % 64 == 0, f"a key_dim that is a multiple of 64, got {call.key_dim}"),
        (call.value_dim % 16 == 0, f"a value_dim that is a multiple of 16, got {call.value_dim}"),
        (all(x in floats for x in (call.q, call.k, call.v)), f"q, k and v in float32 or bfloat16, got {_dtypes(call)}"),
    ]


def _tokens(call: Call) -> list[tuple[bool, str]]:
    return [(call.time > 0 and call.rows > 0, f"rows and tokens, got {call.rows} rows of {call.time}")]


def _dtypes(call: Call) -> str:
    return ", ".join(x.name for x in (call.q, call.k, call.v))
