"""Runs the GPU kernel of `append_and_attend_latent` in Pallas' interpreter on random launches, and asserts what it must
give: what float64 does, and about what XLA's path does; of few queries as exactly as outputs that are rounded.

A program of its own, as `attending.py`, which says why.
"""

import sys
from unittest import mock

import numpy as np

from jaxbuf.attention.latent import append_and_attend_latent
from jaxbuf.pallas.attend import gpu_latent
from tests.attention.latent_launches import Dims, absorbed_launch, random_launch
from tests.attention.launches import AS_ROUNDED, mean_error, rounding_error, worst_error

# Heads, numbers of a key, of the shared part, of a value, and the rank; new tokens; committed ones; how many workers.
CASES = (
    (Dims(4, 64, 64, 64, 128), 1, (9, 0, 64, 190), 3, "bfloat16", {}),
    (Dims(4, 64, 64, 64, 128), 2, (9, 230), 7, "bfloat16", {}),  # workers that have a part in the middle
    (Dims(8, 64, 0, 64, 128), 5, (9, 1, 63, 150), 2, "bfloat16", {"trees": True, "page_size": 8}),
    (Dims(40, 64, 64, 64, 256), 2, (9, 200, 40), 5, "float16", {"trees": True, "page_size": 32}),  # two tiles
    (Dims(4, 64, 64, 64, 128), 16, (9, 70, 129), 1, "bfloat16", {"page_size": 64}),
    (Dims(40, 64, 64, 64, 128), 1, (9, 0, 130), 2, "bfloat16", {}),  # a thread has two queries
)
BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3}  # queries and outputs are rounded once more than over keys and values


def main(numbers: list[int]) -> None:
    rng = np.random.default_rng()
    for number in numbers:
        dims, time, committed, workers, dtype, kind = CASES[number]
        launch, given = random_launch(rng, dims, time, dtype, committed, **kind)
        with mock.patch.object(gpu_latent, "PROCESSORS", workers):  # so that they share rows
            how = {"implementation": "gpu", "interpret": True}
            out, pages = append_and_attend_latent(*given, **launch.integers, **how)
        error = worst_error(out, launch)
        assert error <= BOUNDS[dtype], f"{CASES[number]}: {error}"
        assert np.asarray(pages.latents).tobytes() == np.asarray(launch.pool.keys).tobytes(), f"{CASES[number]}: pages"
        defined, _ = append_and_attend_latent(*given, **launch.integers, implementation="xla")
        by_xla = worst_error(defined, launch)
        assert error <= 2 * by_xla, f"{CASES[number]}: {error}, XLA's {by_xla}"
        print(f"{CASES[number]}: {error:.1e}, XLA's {by_xla:.1e}", flush=True)
    launch, given = absorbed_launch(rng, 4, 1, (9, 64, 190), rank=128)
    out, _ = append_and_attend_latent(*given, **launch.integers, implementation="gpu", interpret=True)
    mean, rounded = mean_error(out, launch), rounding_error(launch)
    assert mean <= AS_ROUNDED * rounded, f"{mean} in the mean, exact outputs that are rounded {rounded}"


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(range(len(CASES))))
