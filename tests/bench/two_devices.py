"""Runs `jaxbuf bench step` on one of two simulated devices and on both, once the parameters there were compared.

A program of its own, because XLA makes the devices when it starts. Its arguments are the file for the figures, and
options of the benchmark.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.bench import step
from jaxbuf.bench.random_model import configuration, random_model, spread_model
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading.sharding import stored_order


def check_parameters() -> None:
    """A random model on a mesh has the parameters of the one on a device, key heads that both need included."""
    sizes = {"layers": 3, "hidden": 32, "ffn": 42, "vocabulary": 65, "heads": 4, "key_heads": 1, "dim": 8}
    config = configuration(**sizes, attention_heads=4, kv_heads=1, attention_dim=8)
    mesh, dtype = jax.make_mesh((2,), ("tensor",)), jnp.dtype("bfloat16")
    alone = random_model(config, dtype)
    for spread in (random_model(config, dtype, mesh=mesh), spread_model(alone, mesh)):
        assert spread.config.mesh is not None and spread.dtype == dtype
        found = named_parameters(spread.model)
        for name, param in named_parameters(alone.model).items():
            array = found[name][...]
            assert len(array.sharding.device_set) == 2, name
            assert np.array_equal(stored_order(np.asarray(array), param, mesh), param[...]), name
        assert found["layers.0.mixers.0.in_proj_qkv"][...].shape[0] == 4 * 8 + 2 * 2 * 8


if __name__ == "__main__":
    warnings.simplefilter("error")
    check_parameters()
    sys.exit(step.main(["--devices", "1,2", "--json", *sys.argv[1:]]))
