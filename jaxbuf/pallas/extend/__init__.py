"""The kernels of `extend`, and what they can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.extend import gpu


def supports(shape: gpu.Shape, *, decay: str, delta: bool) -> str | None:
    """None if the GPU kernel serves the call, else what it would need and what came."""
    needs = (
        (decay == "head" and delta, f'decay="head" and delta=True, got {decay!r} and {delta}'),
        (
            shape.key_dim in gpu.VECTORS and shape.value_dim in gpu.VECTORS,
            f"key_dim and value_dim 64 or 128, got {shape.key_dim} and {shape.value_dim}",
        ),
        (1 <= shape.time <= 16, f"1 to 16 tokens at once, got {shape.time}"),
        (shape.ring <= 1024, f"a ring of at most 1024 entries, got {shape.ring}"),
        (shape.state in (jnp.float32, jnp.bfloat16), f"a float32 or bfloat16 checkpoint, got {shape.state.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
