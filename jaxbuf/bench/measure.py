"""What measuring a kernel takes: wall and device times, the bandwidth of this run, and errors against a reference."""

import collections
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.bench.kernel_figures import Row
from jaxbuf.serving.profiling import trace

OURS = re.compile("mosaic_gpu")  # in the names of a launch's kernels
TUNING = re.compile("stream_executor")  # in those with which XLA tries what it compiles, in another thread
ATTEMPTS = 10  # at a trace without them


def timed(call: Callable, carry, directory: Path | None) -> tuple[Any, float, dict[str, list[float]]]:
    """Runs once to compile, three times for the wall clock (seconds, median) and once for the kernels' durations.

    The last is done again if XLA tried kernels of other programs meanwhile, which takes their time from what is timed.

    Raises:
      RuntimeError: It did so each of ATTEMPTS times.
    """
    carry, walls = call(carry), []
    for _ in range(3):
        start = time.perf_counter()
        carry = call(carry)
        walls.append(time.perf_counter() - start)
    with tempfile.TemporaryDirectory(prefix="jaxbuf-kernels-") as temporary:
        directory = directory or Path(temporary)
        for _ in range(ATTEMPTS):
            with trace(directory):
                carry = call(carry)
            found = durations(directory)
            if not any(TUNING.search(name) for name in found):
                return carry, float(np.median(walls)), found
    raise RuntimeError(f"XLA was trying kernels of other programs in {ATTEMPTS} traces: what else is compiled?")


def durations(directory: Path) -> dict[str, list[float]]:
    """Microseconds of every run of every kernel on a GPU, by name, in the newest trace of a directory."""
    found = collections.defaultdict(list)
    newest = max(directory.glob("plugins/profile/*/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    found[event.name].append(event.duration_ns / 1e3)
    return dict(found)


def device_time(kernels: dict[str, list[float]], calls: int, implementation: str, second: str | None = None) -> Row:
    """Microseconds of device time a call, nothing without a GPU's kernels.

    XLA's path is all kernels of the loop. Ours is the longest that Mosaic made, and, if `second` is given, those whose
    names begin with it. Means count, so that an event which the profiler lost does not.
    """
    if implementation == "xla":
        total = sum(map(sum, kernels.values()))
        return {"device_us": total / calls, "launches": sum(map(len, kernels.values())) / calls} if kernels else {}
    ours = {name: taken for name, taken in kernels.items() if OURS.search(name)}
    behind = [time for name in list(ours) if second and name.startswith(second) for time in ours.pop(name)]
    if not ours:
        return {}
    name = max(ours, key=lambda name: sum(ours[name]))
    taken, each = np.array(ours[name]), max(1, round(len(ours[name]) / calls))
    rest = (sum(map(sum, kernels.values())) - taken.sum() - sum(behind)) / calls
    spread = {"least_us": taken.min(), "median_us": np.median(taken), "most_us": taken.max(), "rest_us": rest}
    if second:
        spread["second_us"] = np.mean(behind) if behind else 0.0
    found = {"device_us": each * taken.mean() + spread.get("second_us", 0.0)} | spread
    found["launches"] = (len(taken) + len(behind)) / calls
    return {"kernel": name} | {key: float(value) for key, value in found.items()}


def program_bytes(program) -> dict[str, int]:
    """Bytes that a compiled program needs at once on each device: in all, and for what it makes on the way."""
    needs = program.memory_analysis()
    sizes = [getattr(needs, f"{name}_size_in_bytes", 0) for name in ("argument", "output", "temp")]
    total = sum(sizes) - getattr(needs, "alias_size_in_bytes", 0)
    return {"program_bytes": total, "temporary_bytes": sizes[2]}


def bandwidths() -> Row:
    """Bytes a second that a sum reads, and that a copy reads and writes."""
    x = jnp.full(2**30 if jax.default_backend() == "gpu" else 2**24, 0.5, jnp.float32)
    found = {}
    for name, operation, moved in (("read", jnp.sum, x.nbytes), ("copy", jnp.negative, 2 * x.nbytes)):
        compiled, times = jax.jit(operation), 8

        def call(_, compiled=compiled, times=times):
            for _ in range(times):
                out = jax.block_until_ready(compiled(x))
            return out

        _, wall, kernels = timed(call, None, None)
        taken = device_time(kernels, times, "xla").get("device_us", 1e6 * wall / times)
        found[f"{name}_bytes_per_s"] = 1e6 * moved / taken
    return found


def bare_passes(sizes: Sequence[int], footprint: float) -> list[Row]:
    """What XLA takes to sum float32 arrays of these sizes, and to add 1 to them in place: microseconds.

    A bandwidth is that of gigabytes: these also have the start and the end of a launch, as a step of a layer has.

    Args:
      sizes: Bytes.
      footprint: Bytes of all arrays that take turns, so that the cache does not hold them.
    """
    found = []
    for size in sizes:
        arrays = [jnp.full(size // 4, 0.5, jnp.float32) for _ in range(max(2, -(-int(footprint) // size)))]
        row: Row = {"bytes": size}
        for name, operation in (
            ("read_us", jax.jit(jnp.sum)),
            ("update_us", jax.jit(lambda x: x + 1, donate_argnums=0)),
        ):

            def call(arrays, name=name, operation=operation):
                for _ in range(4):
                    outs = [operation(x) for x in arrays]
                    arrays = outs if name == "update_us" else arrays
                return jax.block_until_ready((outs, arrays))[1]

            arrays, wall, kernels = timed(call, arrays, None)
            calls = 4 * len(arrays)
            row[name] = device_time(kernels, calls, "xla").get("device_us", 1e6 * wall / calls)
        found.append(row)
    return found


def worst_errors(found, wanted):
    """The largest error of a row of each array against its own norm, float32; infinite if it is not a number."""

    def worst(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error = jnp.linalg.norm(a - b, axis=-1) / jnp.maximum(jnp.linalg.norm(b, axis=-1), 1e-6)
        return jnp.max(jnp.where(jnp.isfinite(error), error, jnp.inf))

    return jax.tree.map(worst, found, wanted)


def measure_torch(what: str, cases: Sequence[Any], seconds: float = 200) -> list[Row]:
    """The rows of `jaxbuf.bench.torch_peer`, from a process of its own: two profilers in one get in each other's way.

    Args:
      what: "products", "attention", "prompts" or "chunked".
      cases: The arguments of the function of that name, for each case.
      seconds: After which it is ended.

    Returns:
      Its rows; one with an "error" if there are none.
    """
    command = [sys.executable, "-m", "jaxbuf.bench.torch_peer", what, json.dumps(cases)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [{"error": f"it took more than {seconds:.0f} s"}]
    if done.returncode:
        return [{"error": "its process failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1]}]
    return json.loads(done.stdout.splitlines()[-1])
