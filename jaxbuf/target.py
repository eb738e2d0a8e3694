"""What a program is compiled for, which decides what kernels it has: a static value, so that jit's key holds it.

It is resolved once, where a computation begins (`resolve_target`), and handed down. So a CPU compiles for a chip that
it does not have, and programs for two chips in one process are two programs.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer


@dataclasses.dataclass(frozen=True)
class Target:
    """The chips that a program is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      generation: Of the chips: "Hopper" or "Ampere" (or, of GPUs that have no such name here, what JAX calls their
        compute capability); "v5e" or "v6e"; "" for a CPU.
      kernels: Whether implementation="auto" takes kernels; without, everything is compiled by XLA.
    """

    platform: str
    generation: str = ""
    kernels: bool = True

    def without_kernels(self) -> "Target":
        """The same, with everything compiled by XLA."""
        return dataclasses.replace(self, kernels=False)

    def __str__(self) -> str:
        if self.platform == "cpu":
            return "a CPU"
        if self.platform == "tpu":
            return f"a TPU {self.generation}"
        if self.generation in CAPABILITIES.values():
            return f"an NVIDIA {self.generation} GPU"
        return f"a GPU of compute capability {self.generation}"


# Compute capabilities of NVIDIA's GPUs, by the number that a generation begins with where it has several.
CAPABILITIES = {"7.0": "Volta", "7.5": "Turing", "8.9": "Ada", "8": "Ampere", "9": "Hopper", "10": "Blackwell"}
CAPABILITIES |= {"11": "Blackwell", "12": "Blackwell"}
CHIPS = {
    "CPU": Target("cpu"),
    **{name: Target("gpu", "Ampere") for name in ("A100", "A10", "A40")},
    **{name: Target("gpu", "Ada") for name in ("L4", "L40S")},
    **{name: Target("gpu", "Hopper") for name in ("H100", "H200", "GH200", "H20")},
    **{name: Target("gpu", "Blackwell") for name in ("B200", "B300", "GB200")},
    **{name: Target("tpu", name) for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")},
}
# Of each generation of TPUs what JAX calls a device, and how many cores it has.
TPU_DEVICES = {"v4": ("TPU v4", 2), "v5e": ("TPU v5 lite", 1), "v5p": ("TPU v5", 2), "v6e": ("TPU v6 lite", 1)}
TPU_DEVICES |= {"tpu7x": ("TPU7x", 1)}
# How a TPU's device_kind goes on behind "TPU", lower case and without spaces.
TPU_KINDS = {"v5lite": "v5e", "v5": "v5p", "v6lite": "v6e", "7x": "tpu7x", "v7x": "tpu7x"}


def as_target(target: Target | str) -> Target:
    """A target as it is, or that of a chip's name ("H100", "v6e", "cpu").

    Raises:
      ValueError: It is no such name.
    """
    if isinstance(target, Target):
        return target
    names = {name.lower(): found for name, found in CHIPS.items()}
    if not isinstance(target, str) or target.lower() not in names:
        raise ValueError(f"target must be a Target or one of {', '.join(CHIPS)}, got {target!r}")
    return names[target.lower()]


def resolve_target(target: Target | str | None, *arrays: Any) -> Target:
    """The target that was given; else that of the devices that arrays lie on, the first that lies somewhere; else that
    of the mesh in use, or of JAX's default device.

    Arrays that are being traced lie nowhere yet. What is left then, the mesh in use and the default device, is in
    jit's own key.

    Raises:
      ValueError: As in `as_target`.
    """
    if target is not None:
        return as_target(target)
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            return device_target(next(iter(array.devices())))
        mesh = getattr(getattr(array, "sharding", None), "mesh", None)  # of a ShapeDtypeStruct, or a traced array
        device = getattr(mesh, "abstract_device", None)
        if device is not None:
            return device_target(device)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        device = jax.devices(device)[0] if device is None or isinstance(device, str) else device
    return device_target(device)


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Within it, programs are traced and lowered for a TPU that this process does not have: Pallas asks JAX what chip
    it writes a kernel for. For other targets it changes nothing."""
    if target.platform != "tpu" or target.generation not in TPU_DEVICES:
        yield
        return
    device = jax.sharding.AbstractDevice(*TPU_DEVICES[target.generation], "tpu")
    axes = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": device}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("tensor",), **axes)):
        yield


def device_target(device: Any) -> Target:
    """The target that a device is, or an abstract one: by its `platform`, its `device_kind`, and its
    `compute_capability`, if it has one."""
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    if platform == "gpu":
        return Target("gpu", _gpu_generation(getattr(device, "compute_capability", None), device.device_kind))
    if platform == "tpu":
        kind: str = device.device_kind.lower().removeprefix("tpu").replace(" ", "")
        return Target("tpu", TPU_KINDS.get(kind, kind))
    return Target(platform)


def _gpu_generation(capability: object, kind: str) -> str:
    if capability is None:
        words = re.findall(r"[A-Z]+\d+[A-Z]*", kind)  # NVIDIA H100 80GB HBM3
        return next((CHIPS[word].generation for word in words if word in CHIPS), kind)
    number = str(capability)
    return CAPABILITIES.get(number, CAPABILITIES.get(number.split(".")[0], number))
