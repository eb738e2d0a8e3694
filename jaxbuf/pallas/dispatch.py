"""The one table of kernels: which operation has one, on which platform and generations of its chips.

A kernel is one of ours or a library's; both are asked for in the same way.

What else a kernel needs of a call its package says: `Call` describes a call there, and `supports` gives the reason why
one can't be served. An operation's module resolves what to ask with `ask` before it is traced, imports the package only
if there is something to ask (Pallas' GPU part takes a while, and a CPU has no use for it), and goes by `Asked.takes`.
"""

import dataclasses
import itertools
from typing import Any

from jaxbuf.pallas.ptxas import remember_ptxas_version
from jaxbuf.target import Target, resolve_target


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of an operation on one platform.

    Attributes:
      package: Where it is.
      generations: Of the chips that it was written for, as in `Target`.
      chips: Their names.
      library: Whose it is, if it is not ours; Pallas' interpreter can't run it then.
    """

    package: str
    generations: tuple[str, ...]
    chips: str
    library: str | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """A kernel that is asked whether it takes a call. Static.

    Attributes:
      operation, platform: In the table.
      named: Whether the caller named it, so that it is an error if it can't serve the call.
      interpret: Whether it runs in Pallas' interpreter.
      generation: Of the chips that the program is compiled for.
    """

    operation: str
    platform: str
    named: bool
    interpret: bool
    generation: str = ""

    def takes(self, reason: str | None) -> bool:
        """Whether it takes the call: there is no reason against it, of its `supports` for example.

        Raises:
          ValueError: There is, and the kernel was named.
        """
        if reason is not None and self.named:
            raise ValueError(f'implementation="{self.platform}" can not serve this {self.operation}: {reason}')
        return reason is None


def _hopper(package: str) -> dict[str, Kernel]:
    return {"gpu": Kernel(f"jaxbuf.pallas.{package}", ("Hopper",), "NVIDIA Hopper GPUs (H100, H200)")}


def _cudnn(package: str) -> dict[str, Kernel]:
    chips = ("Ampere", "Ada", "Hopper", "Blackwell"), "NVIDIA GPUs from Ampere on"
    return {"gpu": Kernel(f"jaxbuf.pallas.{package}", *chips, library="cuDNN")}


GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def _tpu(package: str) -> dict[str, Kernel]:
    return {"tpu": Kernel(f"jaxbuf.pallas.{package}", GENERATIONS, "TPUs from v4 on")}


# operation -> platform, which is what `implementation` names -> kernel
KERNELS: dict[str, dict[str, Kernel]] = {
    "extend": _hopper("extend") | _tpu("extend"),
    "fold": _hopper("extend") | _tpu("extend"),  # one new token, which is appended nowhere
    "prepare": _hopper("prepare") | _tpu("prepare"),
    "convolve": _hopper("prepare") | _tpu("prepare"),
    "put_rows": _tpu("put"),  # of prompts: steps are written by the kernels that read them
    "gated_norm": _hopper("gated_norm") | _tpu("gated_norm"),
    "project": _hopper("project"),
    "gated_project": _hopper("project"),
    "add_and_norm": _hopper("add_and_norm"),
    "norm_and_rotate": _hopper("norm_and_rotate"),
    "experts": _hopper("experts") | _tpu("experts"),  # on TPUs a library's, which is interpreted like ours
    "prefill": _hopper("chunked")
    | _tpu("chunked"),  # which returns the state before the tokens that stay entries, and their updates
    "chunked": _hopper("chunked") | _tpu("chunked"),
    "attend": {},
    "append_and_attend": _hopper("attend") | _tpu("attend"),
    "append_and_attend_latent": _hopper("attend") | _tpu("attend"),  # of a chunk of a prompt: attend_chunk
    "attend_gated": _tpu("attend_gated"),
    "append": {},
    "attend_chunk": _cudnn("flash"),
    "causal_attention": _cudnn("flash"),
}


def ask(
    operation: str,
    implementation: str,
    target: Target | str | None = None,
    arrays: tuple[Any, ...] = (),
    *,
    interpret: bool = False,
) -> Asked | None:
    """The kernel to be asked; None: the operation is XLA's.

    Args:
      operation: In the table.
      implementation: "xla", a platform whose kernel is named, or "auto": the kernel of the target, if it has one.
      target, arrays: What the operation is compiled for, as in `resolve_target`.
      interpret: Whether a kernel that is named runs in Pallas' interpreter, for any target.

    Raises:
      ValueError: No such implementation or target, or the kernel that was named is for other chips.
    """
    kernels = KERNELS[operation]
    known = [f'"{name}"' for name in ("auto", "xla", *kernels)]
    if implementation in {"gpu", "tpu"}.difference(kernels):
        expected = ", ".join(known[:-1]) + f" or {known[-1]}"
        raise ValueError(f'implementation="{implementation}" has no kernel for {operation} yet, expected {expected}')
    if implementation not in ("auto", "xla", *kernels):
        raise ValueError(f"implementation must be one of {', '.join(known)}, got {implementation!r}")
    found, named = resolve_target(target, *arrays), implementation in kernels
    if implementation == "xla" or not (named or found.kernels):
        return None
    platform = implementation if named else found.platform
    asked, reason = Asked(operation, platform, named, interpret, found.generation), unserved(operation, platform, found)
    if named and interpret:
        library = kernels[platform].library
        reason = library and f"its kernel is {library}'s, which Pallas' interpreter can not run"
    if not asked.takes(reason):
        return None
    if platform == "gpu" and not interpret:
        remember_ptxas_version()
    return asked


def unserved(operation: str, platform: str, target: Target) -> str | None:
    """Why the kernel of an operation on a platform does not run on a target; None if it does."""
    kernel = KERNELS[operation].get(platform)
    if kernel is None:
        return f"there is no kernel of it for {target}"
    if platform == target.platform and target.generation in kernel.generations:
        return None
    return f"its kernel is written for {kernel.chips}, and the target is {target}"


def told(target: Target) -> str | None:
    """What XLA compiles on a GPU or TPU, and why, in a sentence for its user; None if every kernel that is there runs,
    and on a CPU, where nobody expects one."""
    if target.platform == "cpu":
        return None
    if not target.kernels:
        return f"everything is compiled by XLA on {target}: its kernels are left out, as the target says"
    left_out: dict[str, list[str]] = {}
    served = 0
    for operation, kernels in KERNELS.items():
        if target.platform in kernels and unserved(operation, target.platform, target) is None:
            served += 1
        # What TPUs alone have kernels for, no user of a GPU expects.
        elif "gpu" in kernels or (kernels and target.platform == "tpu"):
            left_out.setdefault(" and ".join(kernel.chips for kernel in kernels.values()), []).append(operation)
    if not left_out:
        return None
    if target.platform == "tpu":  # there it tells nothing which GPUs have them
        words = "there is no kernel for " + ", ".join(itertools.chain(*left_out.values()))
    else:
        words = "; ".join(
            f"{', '.join(operations)} have kernels for {which} alone" for which, operations in left_out.items()
        )
    lacking = sum(map(len, left_out.values()))
    share = "everything" if not served else "most" if lacking > served else "some of it"
    return f"{share} is compiled by XLA on {target}: {words}"
