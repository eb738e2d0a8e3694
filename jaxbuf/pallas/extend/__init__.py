"""The kernels of `extend`, and what they can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.extend import gpu


def supports(shape: gpu.Shape, *, value_dim: int, decay: str, delta: bool) -> str | None:
    """None if the GPU kernel serves the call, else what it would need and what came."""
    needs = (
        (decay == "head" and delta, f'decay="head" and delta=True, got {decay!r} and {delta}'),
        ((value_dim, shape.key_dim) == (gpu.ROWS, 128), f"value_dim and key_dim 128, got {value_dim}, {shape.key_dim}"),
        (shape.heads % gpu.GATES == 0, f"heads in fours, got {shape.heads}"),
        (1 <= shape.time <= 16, f"1 to 16 tokens at once, got {shape.time}"),
        (shape.block_size % 8 == 0, f"a block_size that 8 divides, got {shape.block_size}"),
        (shape.state in (jnp.float32, jnp.bfloat16), f"a float32 or bfloat16 checkpoint, got {shape.state.name}"),
        (shape.bytes <= gpu.MEMORY, f"a ring that fits in shared memory, got one of {shape.ring} entries"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
