"""The kernel of `attend_gated`, and what it can serve."""

import importlib
from typing import Any

import numpy as np

from jaxbuf.pallas.attend_gated.call import Call
from jaxbuf.pallas.attend_gated.tpu_arrange import arrange, needs

__all__ = ["Call", "supports", "tpu"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """The kernel is imported when it is asked for: it imports a platform's part of Pallas."""
    if name == "tpu":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def supports(call: Call, *, q: np.dtype, generation: str = "") -> str | None:
    """Whether the TPU kernel serves a call whose queries have this dtype.

    Args:
      call: The call.
      q: The dtype.
      generation: Of the TPU, whose memory decides; as in `jaxbuf.target.Target`.

    Returns:
      None if it does; else what it needs, and what came instead.
    """
    same = q == call.dtype, f"q in the pages' {call.dtype.name}, got {np.dtype(q).name}"
    found = (*needs(arrange(call, generation)), same)
    return next((f"it needs {need}" for met, need in found if not met), None)
