"""The kernels of `gated_norm`, and what they can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.gated_norm import gpu


def supports(shape: gpu.Shape, *, value_dim: int) -> str | None:
    """None if the GPU kernel serves the call, else what it would need and what came."""
    needs = (
        (value_dim == gpu.DIM, f"value_dim {gpu.DIM}, got {value_dim}"),
        (shape.heads % gpu.HEADS == 0, f"rows · time · heads in fours, got {shape.heads}"),
        (shape.dtype in (jnp.float32, jnp.bfloat16), f"out in float32 or bfloat16, got {shape.dtype.name}"),
        (shape.gate in (jnp.float32, jnp.bfloat16), f"z in float32 or bfloat16, got {shape.gate.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
