"""What every test runs under: no silent rank or dtype promotion; warnings are errors (pyproject.toml)."""

import collections
import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import numpy as np
import pytest
from jax._src import callback as jax_callback

from tests import array_checks

# Before anything imports jaxbuf: every function of it is checked against its annotations of arrays.
jaxtyping.install_import_hook("jaxbuf", f"{array_checks.__name__}.check")

jax.config.update("jax_numpy_rank_promotion", "raise")


GPU_INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.shared_memory"  # takes seconds to import, which few tests need


def call_with_numpy(*arguments, callback, **_):
    """A callback gets numpy arrays, which JAX would put on a device first: most of the time that Pallas' interpreters
    take, which call back for every load and store. They are copied, as XLA's memory is only lent for the call."""
    if GPU_INTERPRETER in sys.modules:
        sys.modules[GPU_INTERPRETER]._to_int = place_in_mesh
    return jax.tree.map(np.asarray, callback(*map(np.array, arguments)))


def place_in_mesh(x):
    """What a thread of the GPU interpreter is called: numbers, also where these come as numpy arrays."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


jax_callback.io_callback_impl = call_with_numpy

# Imports jaxbuf.
from tests import recording  # noqa: E402

# What one worker process or an earlier run compiled is taken from here. A limit of its size makes the processes take
# turns (JAX then locks the directory).
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "compilations"))
jax.config.update("jax_compilation_cache_max_size", 2**31)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Of several processes one would otherwise begin these when the others are done: they come first.
LONG_FILES = ()


def pytest_addoption(parser):
    recording.add_options(parser)


def pytest_configure(config):
    if (config.option.record or config.option.record_in) and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="jaxbuf-checks-")
        config.add_cleanup(folder.cleanup)
        config.pluginmanager.register(recording.Recorder(Path(folder.name), config.option.record_in))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Long files first, the others in their order."""
    recording.note_items(config, items)
    rank = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.location[0], len(rank)))


def pytest_terminal_summary(terminalreporter):
    """Which files take the time: set-up, tests and tear-down together, in whichever process they ran."""
    seconds = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for name, total in seconds.most_common(15):
            terminalreporter.line(f"{total:7.1f} s  {name}")


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
