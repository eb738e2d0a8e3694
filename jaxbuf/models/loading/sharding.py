"""Tensor parallelism: where on a mesh each parameter lies, from the logical names of its axes."""

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbuf.models.config import ModelConfig

TENSOR = "tensor"


def check_mesh(mesh: Mesh | None) -> None:
    """Raises a ValueError unless it is None, or a mesh of devices with an axis "tensor"."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}")
    _check_axis(mesh)


def parameter_sharding(param: nnx.Param, config: ModelConfig, mesh: Mesh | None) -> jax.sharding.Sharding | None:
    """Where a parameter goes: its heads, MLP channels or vocabulary spread over the mesh's axis "tensor".

    What the axis does not divide (few key or KV heads, an odd vocabulary) is replicated. Without a mesh the answer is
    None: the default device.

    Raises:
      ValueError: The mesh has no axis "tensor", or its size does not divide the value heads of the linear layers.
    """
    if mesh is None:
        return None
    _check_axis(mesh)
    size, counts = mesh.shape[TENSOR], config.axes
    if counts.get("heads", 0) % size:
        raise ValueError(
            f'the value heads of the linear layers ({counts["heads"]}) must be a multiple of the mesh axis "{TENSOR}" '
            f"({size})"
        )
    split = [TENSOR if axis is not None and counts[axis] % size == 0 else None for axis in param.axes]
    return NamedSharding(_automatic(mesh), PartitionSpec(*split))


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes over which the compiler spreads what programs compute.

    `jax.make_mesh` makes explicit axes unless told otherwise: with those every operation of a program would have to say
    where its result lies.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _check_axis(mesh: Mesh) -> None:
    if TENSOR not in mesh.shape:
        raise ValueError(f'mesh must have an axis "{TENSOR}", got {tuple(mesh.axis_names)}')
