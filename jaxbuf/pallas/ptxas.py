"""The version of ptxas, NVIDIA's assembler, which Mosaic GPU asks for while it lowers a kernel."""

import functools
import importlib
from types import ModuleType
from typing import Any

# Where `jax._src.lib.mosaic_gpu` looks for Mosaic GPU's C++ part, in its order.
PARENTS = "jaxlib.mosaic.gpu", "jax_cuda12_plugin", "jax_cuda13_plugin"
VERSION = "_get_ptxas_isa_version"  # in jax 0.11 and 0.12


@functools.cache
def remember_ptxas_version() -> None:
    """Lets Mosaic GPU start ptxas once a process, where it starts ptxas for every conversion from or to eight bits or
    fewer.

    Each start takes 10 ms, and `pl.when` converts a bool: the two programs of Qwen3.5-4B would start ptxas 191 times.
    """
    extension = _find_extension()
    ask = getattr(extension, VERSION, None)
    if ask is not None:
        setattr(extension, VERSION, functools.cache(ask))


def ptxas_version() -> Any:
    """The newest version of PTX that ptxas reads, as Mosaic GPU has it; None where it is not installed."""
    remember_ptxas_version()
    ask = getattr(_find_extension(), VERSION, None)
    return None if ask is None else ask()


def _find_extension() -> ModuleType | None:
    for parent in PARENTS:
        try:
            return importlib.import_module(f"{parent}._mosaic_gpu_ext")
        except ImportError:
            continue
    return None
