"""Runs the GPU's kernel of `chunked` in Pallas' interpreter where windows of a head share a block, and asserts what it
must give. A program of its own, as `attending` is: windows wait for one another."""

from functools import partial
from unittest import mock

import jax.numpy as jnp
import numpy as np

from jaxbuf.pallas.chunked import gpu_walk
from jaxbuf.recurrence import RecurrenceSpec, chunked
from tests.pallas.chunking import inputs, spoil
from tests.recurrence import definition

LENGTHS = np.array([140, 64], np.int32)
CASES = (
    RecurrenceSpec(heads=2, key_heads=1, key_dim=64, value_dim=128),
    RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=128, decay="channel"),
    RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=256, decay="channel", delta=False),
)


def main() -> None:
    by_kernel = partial(chunked, lengths=LENGTHS, return_updates=True, implementation="gpu", interpret=True)
    for spec in CASES:
        arrays = inputs(np.random.default_rng(), spec, 2, max(LENGTHS), jnp.bfloat16, mean_log_decay=-0.05)
        exact = definition.run_batch(spec, *(np.asarray(x, np.float64) for x in arrays), LENGTHS)
        with mock.patch.object(gpu_walk, "PROCESSORS", 0):  # fewer than there are heads
            found = by_kernel(spec, arrays[0], *(spoil(x, LENGTHS) for x in arrays[1:]))
        errors = [definition.error(x, y) for x, y in zip(found, exact, strict=True)]
        assert all(x < bound for x, bound in zip(errors, (2**-8, 2e-5, 2e-5), strict=True)), f"{spec}: {errors}"
        print(f"{spec}: {errors}", flush=True)


if __name__ == "__main__":
    main()
