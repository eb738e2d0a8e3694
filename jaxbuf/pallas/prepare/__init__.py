"""The kernels of `prepare`, and what they can serve."""

import jax.numpy as jnp

from jaxbuf.pallas.prepare import gpu


def supports(shape: gpu.Shape, *, key_dim: int, value_dim: int, width: int, tree: bool) -> str | None:
    """None if the GPU kernel serves the call, else what it would need and what came."""
    most = min(gpu.MOST_TOKENS, shape.ring - gpu.WIDTH + 1)
    needs = (
        ((key_dim, value_dim) == (gpu.DIM, gpu.DIM), f"key_dim and value_dim {gpu.DIM}, got {key_dim}, {value_dim}"),
        (shape.key_heads % gpu.HEADS == 0, f"key heads in fours, got {shape.key_heads}"),
        (width == gpu.WIDTH, f"a convolution of width {gpu.WIDTH}, got {width}"),
        (not tree, "tokens in sequence, got order or parents"),
        (1 <= shape.time <= most, f"1 to {most} tokens at once, got {shape.time}"),
        (shape.dtype in (jnp.float32, jnp.bfloat16), f"float32 or bfloat16 inputs, got {shape.dtype.name}"),
        (shape.stored == shape.dtype, f"a ring of the inputs' dtype {shape.dtype.name}, got {shape.stored.name}"),
    )
    return next((f"it needs {need}" for met, need in needs if not met), None)
