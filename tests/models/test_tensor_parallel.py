"""Who has which rows of a parameter, and the way to a mesh and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.models.loading.sharding import check_mesh, held_ranges, spread_shape, stored_order, stored_shape
from jaxbuf.models.tensor_parallel import Part, automatic, devices_of, partition, share


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_rows_of_a_fused_projection_go_to_a_mesh_and_back(devices, rng):
    keys, values = Part("key_heads", 2, 3), Part("heads", 8, 5)
    parts = (keys, keys, values)
    stored = rng.standard_normal((2 * 6 + 40, 7))
    param = nnx.Param(jnp.asarray(stored, jnp.float32), axes=(parts, None))
    mesh = jax.sharding.AbstractMesh((devices,), ("tensor",))
    each = [[stored[start:stop] for start, stop in held_ranges(parts, i, devices)] for i in range(devices)]
    group = 8 // 2
    for device, (q, k, v) in enumerate(each):
        assert v.shape[0] == 40 // devices and q.shape == k.shape
        np.testing.assert_array_equal(v, stored[12:][device * len(v) : (device + 1) * len(v)])
        for head in range(device * 8 // devices, (device + 1) * 8 // devices):
            place = head // group - device * 8 // devices // group  # among the key heads of the device
            for mine, first in ((q, 0), (k, 6)):
                expected = stored[first + 3 * (head // group) : first + 3 * (head // group) + 3]
                np.testing.assert_array_equal(mine[3 * place : 3 * place + 3], expected)
    there = np.concatenate([rows for mine in each for rows in mine])
    assert spread_shape(param, mesh) == there.shape == ((40 + 6 * max(2, devices)), 7)
    np.testing.assert_array_equal(stored_order(there, param, mesh), stored)


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (1, 4), (2, 4), (4, 2), (3, 1)])
def test_experts_go_to_a_mesh_and_back(tensor, expert, rng):
    """Devices that have the same experts have different rows of them, where the axis "tensor" divides the rows."""
    stored = rng.standard_normal((8, 2 * 4, 5))
    axes = ((Part("experts", 8),), (Part("channels", 4),) * 2, None)
    param = nnx.Param(jnp.asarray(stored, jnp.float32), axes=axes)
    mesh = jax.sharding.AbstractMesh((expert, tensor), ("expert", "tensor"))
    assert spread_shape(param, mesh) == stored.shape == stored_shape(param)
    inner = "tensor" if tensor != 3 else None
    assert partition(axes, mesh) == jax.P("expert", inner, None)
    rows = [
        np.concatenate([stored[:, start:stop] for start, stop in held_ranges(axes[1], i, tensor)], axis=1)
        for i in range(tensor)
    ]
    there = np.concatenate(rows, axis=1) if inner else stored
    np.testing.assert_array_equal(stored_order(there, param, mesh), stored)
    for lacking in (None, jax.sharding.AbstractMesh((2,), ("data",))):
        assert partition(axes, lacking) == jax.P(None, None, None)
        np.testing.assert_array_equal(stored_order(stored, param, lacking), stored)


def test_a_mesh_gets_an_axis_for_heads_and_must_have_one_of_the_two():
    mesh = jax.make_mesh((1,), ("expert",))
    assert dict(automatic(mesh).shape) == {"expert": 1, "tensor": 1} and devices_of(mesh) == devices_of(None) == 1
    check_mesh(mesh)
    with pytest.raises(ValueError, match=r"""mesh must have an axis "tensor" or "expert", got \('data',\)"""):
        check_mesh(jax.make_mesh((1,), ("data",)))


def test_channels_that_devices_do_not_divide_are_on_all_of_them():
    odd, even = (Part("channels", 9),), (Part("channels", 8),)
    assert [held_ranges(odd, device, 2) for device in (0, 1)] == [[(0, 9)], [(0, 9)]]
    assert [held_ranges(even, device, 2) for device in (0, 1)] == [[(0, 4)], [(4, 8)]]


@pytest.mark.parametrize(
    ("count", "devices", "repeated", "message"),
    [
        (6, 4, False, r'the heads \(6\) must be a multiple of the mesh axis "tensor" \(4\)'),
        (2, 4, False, r'the heads \(2\) must be a multiple of the mesh axis "tensor" \(4\)'),
        (3, 4, True, r'the heads \(3\) must be a multiple or a divisor of the mesh axis "tensor" \(4\)'),
    ],
)
def test_heads_that_can_not_be_shared(count, devices, repeated, message):
    with pytest.raises(ValueError, match=message):
        share("heads", count, devices, repeated=repeated)
    assert share("heads", 2, 4, repeated=True) == 1
