"""What one process compiled, the next one finds."""

import os
import re
import subprocess
import sys

import pytest

from jaxbuf.compilation import cache_compilations
from jaxbuf.serving.profiling import time_by_scope

PROGRAM = """
import sys, time
import jaxbuf
if sys.argv[1:]:
    jaxbuf.cache_compilations(*sys.argv[1:])
import jax
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
lm = jaxbuf.load("demo")
clocks = time.perf_counter, time.process_time  # the latter of all threads; what else the machine does is not in it
started = [clock() for clock in clocks]
jaxbuf.generate(lm, ["The configuration file"], 8)
print(*(clock() - start for clock, start in zip(clocks, started)))
print(*(events.count(f"/jax/compilation_cache/cache_{name}") for name in ("hits", "misses")))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path, pytestconfig):
    def run() -> tuple[float, float, int, int]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
        environment.pop("XLA_FLAGS", None)  # the README has the times
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        wall, processors, hits, misses = done.stdout.split()
        return float(wall), float(processors), int(hits), int(misses)

    (*first, hits, misses), (*second, hits_again, misses_again) = run(), run()
    for name, (wall, processors) in (("first", first), ("second", second)):
        pytestconfig.get_terminal_writer().line(f"\n{name} {wall:.1f} s, {processors:.1f} s of processors")
    assert misses >= 2 and hits == 0
    assert misses_again == 0 and hits_again == misses
    assert second[1] < first[1]


@pytest.mark.exhaustive
def test_the_command_keeps_what_it_compiles(tmp_path):
    command = [sys.executable, "-m", "jaxbuf.cli", "--compilation-cache", str(tmp_path / "cache"), "generate", "The"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "--max-new-tokens", "2"], env=environment, check=True, capture_output=True, timeout=300)
    names = " ".join(path.name for path in (tmp_path / "cache").iterdir())
    assert re.search("jit_start-", names) and re.search("jit_generate_tokens-", names)

    # A profile needs the operations' names, which what comes out of the cache has lost.
    profile = ["--max-new-tokens", "2", "--profile", str(tmp_path / "trace")]
    subprocess.run([*command, *profile], env=environment, check=True, capture_output=True, timeout=300)
    assert {"recurrence", "mlp"} <= {row.scope for row in time_by_scope(tmp_path / "trace")}


def test_a_directory_that_cannot_be_is_an_error_that_names_the_argument(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="directory must be a directory to write to"):
        cache_compilations(tmp_path / "file" / "cache")
