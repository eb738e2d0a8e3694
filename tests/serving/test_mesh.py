"""Generation on meshes of simulated devices gives the tokens of one device: with drafters, samples, beams, scores.

Each device holds its part of the parameters and of the memory, and what was saved from a mesh is what was loaded.
"""

import json
import os
import subprocess
import sys

import pytest

ALL = "plain,n-grams,samples,chunks,beams,score"
MORE = [(name, devices, ALL) for name in ("qwen3_5", "llama", "mamba2", "qwen3") for devices in (2, 4)]


@pytest.mark.parametrize(
    ("architecture", "devices", "names"),
    [pytest.param("qwen3_5", 4, "mtp,chunks", marks=pytest.mark.slow)]
    + [pytest.param("mamba2", 4, "plain,score", marks=pytest.mark.slow)]
    + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE],
)
def test_tokens_on_a_mesh_are_those_of_one_device(architecture, devices, names):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    command = [sys.executable, "tests/serving/on_mesh.py", architecture, str(devices), names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []
