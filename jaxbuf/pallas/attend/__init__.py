"""The kernels of `append_and_attend` and `append_and_attend_latent`, and what they can serve."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbuf.pallas.attend import tpu_call
from jaxbuf.pallas.attend.call import MOST_TILES, TILE, Call, Integers

__all__ = ["Call", "Integers", "gpu", "gpu_latent", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """A platform's kernel is imported when it is asked for: each imports that platform's part of Pallas."""
    if name in ("gpu", "gpu_latent", "tpu"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(
    call: Call,
    *,
    q: np.dtype,
    k: np.dtype,
    v: np.dtype,
    platform: str = "gpu",
    generation: str = "",
    rank: int | None = None,
) -> str | None:
    """Whether a platform's kernel serves a call whose inputs have these dtypes.

    Args:
      call: The call.
      q, k, v: The dtypes.
      platform: "gpu" or "tpu".
      generation: Of a TPU, whose memory decides; as in `jaxbuf.target.Target`.
      rank: Values are the first so many numbers of the keys; None: they have their pages.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    inputs = ", ".join(np.dtype(x).name for x in (q, k, v))
    if platform == "gpu":
        needs = _gpu_needs(call) if rank is None else _gpu_latent_needs(call, rank)
    else:
        needs = tpu_call.needs(call, tpu_call.arrange(call, generation, rank=rank))
    same = all(x == call.dtype for x in (q, k, v)), f"q, k and v in the pages' {call.dtype.name}, got {inputs}"
    return next((f"it needs {need}" for met, need in (*needs, same) if not met), None)


def _gpu_needs(call: Call) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.attend import gpu

    return (
        (call.head_dim in gpu.HEAD_DIMS, f"head_dim 64, 128 or 256, got {call.head_dim}"),
        *_gpu_page_needs(call),
        (
            call.tiles <= MOST_TILES,
            f"tokens · heads / kv_heads at most {MOST_TILES * TILE}, got {call.time} · {call.group}",
        ),
    )


def _gpu_latent_needs(call: Call, rank: int) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.attend import gpu_latent

    latent, most, queries = call.head_dim, gpu_latent.MOST_LATENT, gpu_latent.MOST_QUERIES
    return (
        (rank in gpu_latent.RANKS, f"a rank of 128, 256 or 512, got {rank}"),
        (latent % 64 == 0 and latent <= most, f"latents of a multiple of 64 and at most {most} numbers, got {latent}"),
        *_gpu_page_needs(call),
        (call.queries <= queries, f"tokens · heads at most {queries}, got {call.time} · {call.heads}"),
    )


def _gpu_page_needs(call: Call) -> tuple[tuple[bool, str], ...]:
    from jaxbuf.pallas.attend import gpu_parts

    most, dtypes = gpu_parts.MOST_TOKENS, (jnp.bfloat16, jnp.float16)
    return (
        (call.dtype in dtypes, f"pages in bfloat16 or float16, got {call.dtype.name}"),
        (call.page_size in gpu_parts.PAGE_SIZES, f"pages of 8, 16, 32 or 64, got {call.page_size}"),
        (1 <= call.time <= most, f"1 to {most} tokens at once, got {call.time}"),
    )
