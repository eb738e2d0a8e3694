"""The one table of kernels: which operation has one, on which platform and generation of its chips.

What else a kernel needs of a call its package says: `Call` describes a call there, and `supports` gives the reason why
one can't be served. An operation's module asks `asks_kernel` first, imports the package only then (Pallas' GPU part
takes a while, and a CPU has no use for it), and goes by `takes_call`.
"""

import dataclasses
from collections.abc import Callable

from jaxbuf.pallas.platform import has_hopper


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of an operation on one platform.

    Attributes:
      package: Where it is.
      generation: The chips that it was written for.
      runs_here: Whether this process has such a chip, and may take kernels.
    """

    package: str
    generation: str
    runs_here: Callable[[], bool]


def _hopper(package: str) -> dict[str, Kernel]:
    return {"gpu": Kernel(f"jaxbuf.pallas.{package}", "NVIDIA Hopper", has_hopper)}


# operation -> platform, which is what `implementation` names -> kernel
KERNELS: dict[str, dict[str, Kernel]] = {
    "extend": _hopper("extend"),
    "fold": _hopper("extend"),  # one new token, which is appended nowhere
    "prepare": _hopper("prepare"),
    "gated_norm": _hopper("gated_norm"),
    "prefill": {},
    "chunked": {},
}


def check_implementation(operation: str, implementation: str) -> None:
    """Raises a ValueError unless `implementation` is "auto", "xla", or the platform of a kernel of the operation."""
    known = [f'"{name}"' for name in ("auto", "xla", *KERNELS[operation])]
    if implementation in {"gpu", "tpu"}.difference(KERNELS[operation]):
        expected = ", ".join(known[:-1]) + f" or {known[-1]}"
        raise ValueError(f'implementation="{implementation}" has no kernel for {operation} yet, expected {expected}')
    if implementation not in ("auto", "xla", *KERNELS[operation]):
        raise ValueError(f"implementation must be one of {', '.join(known)}, got {implementation!r}")


def asks_kernel(operation: str, implementation: str) -> str | None:
    """The platform whose kernel is to be asked: the one that was named, or with "auto" the one that runs here.

    None: it is XLA's. Errors as in `check_implementation`.
    """
    check_implementation(operation, implementation)
    kernels = KERNELS[operation]
    if implementation == "auto":
        return next((platform for platform, kernel in kernels.items() if kernel.runs_here()), None)
    return implementation if implementation in kernels else None


def takes_call(operation: str, implementation: str, reason: str | None) -> bool:
    """Whether the kernel that was asked takes the call: its `supports` gave no reason against it.

    Raises:
      ValueError: It did, and the kernel was named.
    """
    if reason is not None and implementation in KERNELS[operation]:
        raise ValueError(f'implementation="{implementation}" can not serve this {operation}: {reason}')
    return reason is None
