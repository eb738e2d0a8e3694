"""Where on a mesh each parameter lies, and the way between its order there and a checkpoint's."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxbuf.models.tensor_parallel import AXES, Parts, automatic, partition, spread_over


def check_mesh(mesh: Mesh | None) -> None:
    """Raises a ValueError unless it is None, or a mesh of devices with an axis "tensor" or "expert", or both."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}")
    if not set(AXES).intersection(mesh.shape):
        expected = " or ".join(f'"{axis}"' for axis in AXES)
        raise ValueError(f"mesh must have an axis {expected}, got {tuple(mesh.axis_names)}")


def parameter_sharding(param: nnx.Param, mesh: Mesh | None) -> jax.sharding.Sharding | None:
    """Where a parameter goes: its heads, MLP channels or vocabulary spread over the mesh's axis "tensor", its experts
    over "expert".

    Key heads that are fewer than the devices are repeated, and channels that the devices do not divide are on all of
    them. Without a mesh the answer is None: the default device.
    """
    return None if mesh is None else NamedSharding(automatic(mesh), partition(param.axes, mesh))


def spread_shape(param: nnx.Param, mesh: Mesh | None) -> tuple[int, ...]:
    """The shape of a parameter on a mesh: where heads are repeated it is larger than the checkpoint's."""
    shape = list(param.get_raw_value().shape)
    for axis, parts, devices in _spread_axes(param, mesh):
        shape[axis] = devices * sum(stop - start for start, stop in held_ranges(parts, 0, devices))
    return tuple(shape)


def stored_shape(param: nnx.Param) -> tuple[int, ...]:
    """The shape that a parameter has in a checkpoint's order, wherever it lies."""
    return tuple(
        sum(part.length for part in parts) if parts else size
        for size, parts in zip(param.get_raw_value().shape, param.axes, strict=True)
    )


def held_ranges(parts: Parts, device: int, devices: int) -> list[tuple[int, int]]:
    """The rows (or columns) of a checkpoint's tensor that a device has, from and to, in its order."""
    found, start = [], 0
    for part in parts:
        blocks = part.blocks(device, devices)
        found.append((start + part.size * blocks.start, start + part.size * blocks.stop))
        start += part.length
    return found


def placed(array: jax.Array, param: nnx.Param, mesh: Mesh | None) -> jax.Array:
    """A parameter's value in a checkpoint's order, moved to where it belongs, in the order that it has there.

    `stored_order` goes the other way. Without a mesh the array stays where it is.

    Args:
      array: On one device.
      param: Says how its axes are spread.
      mesh: As `check_mesh` wants it.
    """
    if mesh is None:
        return array
    for axis, parts, devices in _spread_axes(param, mesh):
        ranges = [held for device in range(devices) for held in held_ranges(parts, device, devices)]
        order = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        if not np.array_equal(order, np.arange(array.shape[axis])):
            array = jnp.take(array, order, axis=axis, mode="clip")
    return jax.device_put(array, parameter_sharding(param, mesh))


def stored_order(array: np.ndarray, param: nnx.Param, mesh: Mesh | None) -> np.ndarray:
    """A parameter's value on a mesh as a checkpoint has it; where a head is there several times, one of them."""
    for axis, parts, devices in _spread_axes(param, mesh):
        rows, each = np.moveaxis(array, axis, 0), array.shape[axis] // devices
        stored = np.empty((sum(part.length for part in parts), *rows.shape[1:]), rows.dtype)
        for device in range(devices):
            place = device * each
            for start, stop in held_ranges(parts, device, devices):
                stored[start:stop] = rows[place : place + stop - start]
                place += stop - start
        array = np.moveaxis(stored, 0, axis)
    return array


def _spread_axes(param: nnx.Param, mesh: Mesh | None) -> Iterator[tuple[int, Parts, int]]:
    """Of the axes of a parameter that a mesh spreads the number, the parts, and over how many devices."""
    for axis, parts in enumerate(param.axes):
        over = spread_over(parts, mesh)
        if mesh is not None and over is not None:
            yield axis, parts, mesh.shape[over]
