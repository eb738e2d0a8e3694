"""Generation on meshes of simulated devices gives the tokens of one device: with drafters, samples, beams, scores.

Each device holds its part of the parameters and of the memory, and what was saved from a mesh is what was loaded.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.serving.speculating import MODELS

ALL = "plain,n-grams,samples,chunks,beams,score"
MORE = [(name, devices, ALL) for name in MODELS for devices in (2, 4)]


@pytest.mark.parametrize(
    ("architecture", "devices", "names"),
    [pytest.param("qwen3_5", 4, "mtp,chunks", marks=pytest.mark.slow)]
    + [pytest.param("mamba2", 4, "plain,score", marks=pytest.mark.slow)]
    + [pytest.param("qwen3_next", 4, "mtp", marks=pytest.mark.slow)]
    + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE],
)
def test_tokens_on_a_mesh_are_those_of_one_device(architecture, devices, names):
    assert run(architecture, devices, names) == []


@pytest.mark.slow
def test_a_kernel_on_a_mesh_sees_what_its_device_has():
    """The demo's four heads, two of keys, on two devices, lowered for H100s: q, k, v, log-decays, betas; the pool."""
    (shapes,) = run("demo", 2, "")
    assert shapes[:5] == ["8x1x1x64", "8x1x1x64", "8x1x2x64", "8x1x2", "8x1x2"]
    assert [shape.split("x", 1)[1] for shape in shapes[5:]] == ["2x64x64", "1x64", "2x64", "2"]


def run(architecture, devices, names):
    """What `on_mesh.py` prints."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    command = [sys.executable, "tests/serving/on_mesh.py", architecture, str(devices), names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
