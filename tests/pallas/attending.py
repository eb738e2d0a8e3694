"""Runs the kernel of `append_and_attend` in Pallas' interpreter on random launches, and asserts what it must give.

A program of its own: the kernel's warpgroups wait for one another, each in a thread of XLA's pool, which has as many as
the machine has cores when XLA starts. On two cores all of them may wait for a thread to compute with. `NPROC` says how
many there are.
"""

from unittest import mock

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.pallas.attend import gpu
from tests.attention.launches import AS_ROUNDED, Sizes, make_launch, mean_error, rounding_error, worst_error

BOUNDS = {"bfloat16": 4e-3, "float16": 1e-3}  # as those of `tests.gpu.checks`
# How the TPU kernel is interpreted: as plain JAX; or with what its memories hold, copies that are late or early, and
# races found. Copies have clocks, of so many: where two have one, waiting for either of them seems to be enough.
LATE, EARLY = (
    pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, vector_clock_size=256)
    for mode in ("on_wait", "eager")
)
CASES = (
    Sizes((9, 0, 64, 130), 1, 4, 2, 64),
    Sizes((9, 1, 63, 150), 5, 8, 2, 64, trees=True),
    Sizes((9, 200, 40), 2, 4, 1, 256, page_size=32, trees=True, dtype="float16"),
    Sizes((9, 70, 129), 10, 8, 1, 64, page_size=8),  # two warpgroups multiply
    Sizes((9, 70, 41), 7, 8, 2, 64),  # four groups of queries in a tile
    Sizes((9, 41, 70), 9, 8, 2, 64),  # one tile, whose queries lie one below the other
)


def main() -> None:
    rng = np.random.default_rng()
    for sizes in CASES:
        with mock.patch.object(gpu, "PROCESSORS", 2):  # so that workers share items
            launch = make_launch(rng, sizes)
            out, kv = append_and_attend(*launch.arrays, **launch.integers, implementation="gpu", interpret=True)
        error, mean, rounded = worst_error(out, launch), mean_error(out, launch), rounding_error(launch)
        assert error <= BOUNDS[sizes.dtype], f"{sizes}: {error}"
        assert mean <= AS_ROUNDED * rounded, f"{sizes}: {mean} in the mean, exact outputs that are rounded {rounded}"
        for found, expected in ((kv.keys, launch.pool.keys), (kv.values, launch.pool.values)):
            assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), f"{sizes}: pages"
        print(f"{sizes}: {error:.1e}, in the mean {mean:.1e}", flush=True)


if __name__ == "__main__":
    main()
