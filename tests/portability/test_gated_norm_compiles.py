"""The TPU kernel of `gated_norm`, compiled for every generation at the sizes of real models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.gated_norm import gated_norm
from jaxbuf.tpu_compiler import GENERATIONS, compile_for
from tests.pallas.test_gated_norm import new_arrays

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]

CASES = [
    *((generation, 64, 1, 32, "bfloat16") for generation in GENERATIONS),
    ("v4", 3, 200, 32, "float32"),
    ("tpu7x", 64, 5, 4, "bfloat16"),  # on one of 8 chips
]


@pytest.mark.parametrize("generation, rows, time, heads, dtype", CASES)
def test_the_gated_norm_compiles(generation, rows, time, heads, dtype):
    arrays = jax.eval_shape(lambda: new_arrays(np.random.default_rng(0), rows, time, heads, jnp.dtype(dtype)))
    how = {"eps": 1e-6, "implementation": "tpu", "target": generation}
    compiled = compile_for(generation, lambda *arrays: gated_norm(*arrays, **how), *arrays)
    assert compiled.as_text().count("tpu_custom_call") >= 1
