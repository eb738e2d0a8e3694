"""Tensor and expert parallelism: each device has some of every layer's heads, with their parameters and their memory,
and some of its experts.

A mesh says which devices, by its axes "tensor" and "expert"; it may have both. All layers run under one `shard_map`: a
device computes with what it has as if that were the whole model, with fewer heads and experts, and the kernels see no
more than that. After a mixer and after an MLP the devices add up what each has. The embedding, the head over the
vocabulary and sampling are left to XLA's partitioner.

Along "tensor" devices share the heads, the inner numbers of MLPs and of every expert, and the vocabulary. Along
"expert" each has experts / devices of a layer's routed experts, and multiplies the tokens that chose them; what all of
them make is summed up over both axes at once. Everything else, memory and shared experts among it, devices along
"expert" have several times, and all do the same with it: of a model with many experts that is a small part (of
Qwen3-Next-80B-A3B 3 to 4 of 160 GB), and no token travels. A model without experts is whole on each of them, so that a
small draft model can lie on the mesh of its target.

A parameter says by `Part`s how its rows or columns are spread (`Param.axes`). An array on a mesh has what the first
device holds, then what the second one holds: where projections are fused, that is the first device's q | k | v, and key
heads that several devices need are there several times. `jaxbuf.models.loading.sharding` goes between this order and
that of checkpoints.

Source: Shoeybi et al., Megatron-LM (2019), section 3; experts on devices of their own as in Lepikhin et al., GShard
(2020), section 3.2, but with the tokens on every device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxbuf.axes import Array, Float

TENSOR, EXPERT = AXES = "tensor", "expert"  # of a mesh


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a parameter's rows or columns: `count` equal blocks in order, which are spread over devices.

    Attributes:
      kind: Of the blocks. "heads": every device has as many. "key_heads": the same, and where there are fewer than
        devices, each of the devices that need one has it. "channels", of an MLP or a vocabulary: spread where the
        number of devices divides them, else every device has all. "experts", of a layer: spread over the axis "expert",
        as many on every device; the other kinds are spread over "tensor".
      count: Of blocks.
      size: Rows or columns of each.
    """

    kind: Literal["heads", "key_heads", "channels", "experts"]
    count: int
    size: int = 1

    @property
    def length(self) -> int:
        """Rows or columns of all blocks."""
        return self.count * self.size

    def blocks(self, device: int, devices: int) -> range:
        """Which blocks a device has, of so many devices."""
        if self.kind == "channels" and self.count % devices:
            return range(self.count)
        each = share(self.kind, self.count, devices, repeated=self.kind == "key_heads")
        first = device * self.count // devices
        return range(first, first + each)

    def is_spread(self, devices: int) -> bool:
        """Whether devices have different blocks, or copies that count as such."""
        return self.kind != "channels" or self.count % devices == 0


type Parts = tuple[Part, ...]
type Axis = Parts | None  # of an array's axis: what its rows or columns are; None: every device has all of them


def share(name: str, count: int, devices: int, *, repeated: bool = False, axis: str = TENSOR) -> int:
    """How many of `count` heads or experts each device has, of so many devices.

    Args:
      name: Of the heads, for errors.
      count, devices: How many there are.
      repeated: Whether fewer heads than devices are repeated, so that each device has one.
      axis: Of the mesh, for errors.

    Raises:
      ValueError: They can't be shared like that.
    """
    if count % devices == 0:
        return count // devices
    if repeated and devices % count == 0:
        return 1
    words = "a multiple or a divisor" if repeated else "a multiple"
    raise ValueError(f'the {name} ({count}) must be {words} of the mesh axis "{axis}" ({devices})')


def devices_of(mesh: Mesh | None, axis: str = TENSOR) -> int:
    """Over how many devices a mesh spreads the heads, or with the axis "expert" the experts; 1 without such
    an axis, and without a mesh."""
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes over which the compiler spreads what programs compute, "tensor" always among them.

    `jax.make_mesh` makes explicit axes unless told otherwise: with those every operation of a program would have to say
    where its result lies. Where there is no axis "tensor", one of a single device is added.
    """
    devices, names = mesh.devices, mesh.axis_names
    if TENSOR not in names:
        devices, names = devices[..., None], (*names, TENSOR)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def spread_over(parts: Axis, mesh: Mesh | AbstractMesh | None) -> str | None:
    """The axis of a mesh over which these rows or columns are spread; None: every device has all of them."""
    if mesh is None or not parts:
        return None
    axis = EXPERT if parts[0].kind == "experts" else TENSOR
    return axis if axis in mesh.shape and parts[0].is_spread(mesh.shape[axis]) else None


def partition(axes: Sequence[Axis], mesh: Mesh | None) -> PartitionSpec:
    """How an array with these axes lies on a mesh."""
    return PartitionSpec(*(spread_over(parts, mesh) for parts in axes))


def add_devices(
    x: Float[Array, "*n"], devices: int, *, among: int | None = None, expert_devices: int = 1
) -> Float[Array, "*n"]:
    """The sum of what each of so many devices has; for functions that `on_devices` runs.

    Args:
      x: Of this device.
      devices: How many there are along the axis "tensor".
      among: Neighbours that add up theirs, which divide the devices; None: all of them.
      expert_devices: How many there are along the axis "expert" that add up theirs, too; without `among`.
    """
    if expert_devices > 1:
        return jax.lax.psum(x, EXPERT if devices == 1 else AXES)
    if devices == 1 or among == 1:
        return x
    if among is None or among == devices:
        return jax.lax.psum(x, TENSOR)
    each = jax.lax.all_gather(x, TENSOR).reshape(devices // among, among, *x.shape)
    return each[jax.lax.axis_index(TENSOR) // among].sum(axis=0)


def on_devices(
    mesh: Mesh,
    function: Callable[..., Any],
    trees: Sequence[Any],
    partitions: Sequence[Sequence[PartitionSpec] | PartitionSpec],
    out: Any,
) -> Any:
    """Runs function(*trees) on every device of a mesh, with what the device has of each leaf.

    Args:
      mesh: With the axis "tensor", see `automatic`; over axes that no partition names devices do the same.
      function: Closes over no arrays.
      trees: Of arrays.
      partitions: For each tree, those of its leaves in order, or one for all.
      out: The PartitionSpecs of what is returned, or the beginning of such a tree.
    """
    flat = [jax.tree.flatten(tree) for tree in trees]

    def run(*held):
        return function(
            *(jax.tree.unflatten(structure, leaves) for (_, structure), leaves in zip(flat, held, strict=True))
        )

    # Whether results are the same on all devices is not checked: the kernels' calls do not say it.
    each = tuple(found if isinstance(found, PartitionSpec) else list(found) for found in partitions)
    return jax.shard_map(run, mesh=mesh, in_specs=each, out_specs=out, check_vma=False)(*(x for x, _ in flat))
