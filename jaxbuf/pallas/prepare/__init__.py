"""The kernels of `prepare` and of its convolution alone, and what they can serve."""

import importlib
from typing import Any

import jax.numpy as jnp

from jaxbuf.pallas.prepare.call import Call, Convolution

__all__ = ["Call", "Convolution", "convolution_reason", "gpu", "gpu_convolve", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A platform's kernel is imported when it is asked for: each imports that platform's part of Pallas."""
    if name in ("gpu", "gpu_convolve", "tpu"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(call: Call, *, platform: str = "gpu", generation: str = "") -> str | None:
    """Whether a platform's kernel serves a call.

    Args:
      call: The call.
      platform: "gpu" or "tpu".
      generation: Of the TPU, as in `jaxbuf.target.Target`.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    if platform == "tpu":
        from jaxbuf.pallas.prepare import tpu

        dims = (call.key_dim, call.value_dim)
        if (call.decay, call.lower_bound) != ("head", None):
            return f"it needs a decay for each head without a lower bound, got one for each {call.decay}"
        if dims != (tpu.LANES, tpu.LANES):
            return f"it needs key_dim and value_dim {tpu.LANES}, got {dims[0]}, {dims[1]}"
        return convolution_reason(call, generation=generation)
    from jaxbuf.pallas.prepare import gpu, gpu_inputs

    most = min(gpu_inputs.MOST_TOKENS, call.ring - gpu.WIDTH + 1)
    dims = f"key_dim and value_dim {gpu.DIM}, got {call.key_dim}, {call.value_dim}"
    return _first_unmet(
        (call.key_dim == call.value_dim == gpu.DIM, dims),
        (call.key_heads % gpu.HEADS == 0, f"key heads in fours, got {call.key_heads}"),
        (call.width == gpu.WIDTH, f"a convolution of width {gpu.WIDTH}, got {call.width}"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
        *_dtype_needs(call),
    )


def convolution_reason(call: Convolution, *, platform: str = "gpu", generation: str = "") -> str | None:
    """Whether a platform's kernel serves a call of the convolution alone; as `supports`."""
    if platform == "tpu":
        from jaxbuf.pallas.prepare import tpu

        most, words = min(tpu.MOST_TOKENS, call.ring - call.width + 1), tpu.count_words(call)
        return _first_unmet(
            (call.channels % tpu.LANES == 0, f"channels that are a multiple of {tpu.LANES}, got {call.channels}"),
            (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
            *_dtype_needs(call),
            (4 * words <= tpu.SCALARS, f"at most {tpu.SCALARS // 1024} KiB of integers, got {call.rows} rows"),
            (
                tpu.program_rows(call, generation) > 0,
                f"a row in VMEM, got {call.channels} channels and {call.time} tokens",
            ),
        )
    from jaxbuf.pallas.prepare import gpu_convolve, gpu_inputs

    least, widest = gpu_convolve.LEAST_CHANNELS, gpu_convolve.MOST_WIDTH
    most = min(gpu_inputs.MOST_TOKENS, call.ring - call.width + 1)
    return _first_unmet(
        (call.channels >= least, f"at least {least} channels, got {call.channels}"),
        (call.width <= widest, f"a convolution of width 2 to {widest}, got {call.width}"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
        *_dtype_needs(call),
    )


def _dtype_needs(call: Convolution) -> tuple[tuple[bool, str], ...]:
    return (
        (call.dtype in (jnp.float32, jnp.bfloat16), f"float32 or bfloat16 inputs, got {call.dtype.name}"),
        (call.stored == call.dtype, f"a ring of the inputs' dtype {call.dtype.name}, got {call.stored.name}"),
    )


def _first_unmet(*needs: tuple[bool, str]) -> str | None:
    return next((f"it needs {need}" for met, need in needs if not met), None)
