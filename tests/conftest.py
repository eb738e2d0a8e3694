"""What every test runs under: no silent rank or dtype promotion; warnings are errors (pyproject.toml)."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Our own functions never promote dtypes implicitly; tests marked `foreign` call libraries that do (optax)."""
    if request.node.get_closest_marker("foreign"):
        yield
    else:
        with jax.numpy_dtype_promotion("strict"):
            yield


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Forgets compiled programs when there are very many: Linux lets a process map 65,530 pieces of memory
    (vm.max_map_count), XLA takes some for every program, and a compilation that gets none crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng(request):
    """Fresh random numbers in every run; the seed is in the report of a test that fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    request.node.add_report_section("call", "seed", f"rng seed: {seed}")
    return np.random.default_rng(seed)
