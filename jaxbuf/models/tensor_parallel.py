"""Tensor parallelism: each device has some of every layer's heads, with their parameters and their memory.

A mesh's axis "tensor" says which devices. All layers run under one `shard_map`: a device computes with what it has as
if that were the whole model, with fewer heads, and the kernels see no more than that. After a mixer and after an MLP
the devices add up what each has. The embedding, the head over the vocabulary and sampling are left to XLA's
partitioner.

A parameter says by `Part`s how its rows or columns are spread (`Param.axes`). An array on a mesh has what the first
device holds, then what the second one holds: where projections are fused, that is the first device's q | k | v, and key
heads that several devices need are there several times. `jaxbuf.models.loading.sharding` goes between this order and
that of checkpoints.

Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxbuf.axes import Array, Float

TENSOR = "tensor"


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a parameter's rows or columns: `count` equal blocks in order, which are spread over devices.

    Attributes:
      kind: Of the blocks. "heads": every device has as many. "key_heads": the same, and where there are fewer than
        devices, each of the devices that need one has it. "channels", of an MLP or a vocabulary: spread where the
        number of devices divides them, else every device has all.
      count: Of blocks.
      size: Rows or columns of each.
    """

    kind: Literal["heads", "key_heads", "channels"]
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


def share(name: str, count: int, devices: int, *, repeated: bool = False) -> int:
    """How many of `count` heads each device has, of so many devices.

    Args:
      name: Of the heads, for errors.
      count, devices: How many there are.
      repeated: Whether fewer heads than devices are repeated, so that each device has one.

    Raises:
      ValueError: They can't be shared like that.
    """
    if count % devices == 0:
        return count // devices
    if repeated and devices % count == 0:
        return 1
    words = "a multiple or a divisor" if repeated else "a multiple"
    raise ValueError(f'the {name} ({count}) must be {words} of the mesh axis "{TENSOR}" ({devices})')


def devices_of(mesh: Mesh | None) -> int:
    """Over how many devices a mesh spreads the heads; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[TENSOR]


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes over which the compiler spreads what programs compute.

    `jax.make_mesh` makes explicit axes unless told otherwise: with those every operation of a program would have to say
    where its result lies.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def partition(axes: Sequence[Axis], devices: int) -> PartitionSpec:
    """How an array with these axes lies on a mesh."""
    return PartitionSpec(*(TENSOR if parts and parts[0].is_spread(devices) else None for parts in axes))


def add_devices(x: Float[Array, "*n"], devices: int, *, among: int | None = None) -> Float[Array, "*n"]:
    """The sum of what each of so many devices has; for functions that `on_devices` runs.

    Args:
      x: Of this device.
      devices: How many there are.
      among: Neighbours that add up theirs, which divide the devices; None: all of them.
    """
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
      mesh: With the axis "tensor"; over its other axes, if it has some, devices do the same.
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
