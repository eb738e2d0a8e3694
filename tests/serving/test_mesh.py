"""Generation on meshes of simulated devices gives the tokens of one device: with drafters, samples, beams, scores.

Each device holds its part of the parameters and of the memory, and what was saved from a mesh is what was loaded. The
logits of whole sequences differ by a root mean square of 1e-4 at most.
"""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.compiling import flags_for
from tests.serving.speculating import MODELS

ALL = "plain,n-grams,samples,chunks,beams,score,logits"
MORE = [(name, {"tensor": devices}, ALL) for name in MODELS for devices in (2, 4)]
WITH_EXPERTS = (
    *("qwen3_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h_moe", "granitemoehybrid_moe"),
    *("kimi_linear", "bailing_hybrid"),
)
EXPERT_MESHES = {"expert": 2}, {"expert": 4}, {"tensor": 2, "expert": 2}, {"expert": 4, "tensor": 2}
MORE += [(name, axes, "logits,plain,n-grams") for name in WITH_EXPERTS for axes in EXPERT_MESHES]
MORE += [("qwen3_next", {"tensor": 2, "expert": 4}, ALL), ("qwen3_5_moe", {"expert": 2}, "mtp")]
# Along an axis that a model has nothing to spread over, devices do the same.
MORE += [("llama", {"expert": 2}, "plain"), ("qwen3_5", {"data": 2, "tensor": 2}, "plain")]


@pytest.mark.checks("mesh")
@pytest.mark.parametrize(
    ("architecture", "axes", "names"),
    [pytest.param("qwen3_5", {"tensor": 4}, "mtp,chunks", marks=pytest.mark.exhaustive)]
    + [pytest.param("mamba2", {"tensor": 4}, "plain,score", marks=pytest.mark.exhaustive)]
    + [pytest.param("qwen3_next", {"tensor": 4}, "mtp", marks=pytest.mark.exhaustive)]
    + [pytest.param("qwen3_next", {"expert": 2, "tensor": 2}, "logits,plain", marks=pytest.mark.slow)]
    + [pytest.param("olmo_hybrid", {"tensor": 4}, "plain", marks=pytest.mark.exhaustive)]
    + [pytest.param("nemotron_h_moe", {"tensor": 4}, "plain", marks=pytest.mark.exhaustive)]
    + [pytest.param("kimi_linear", {"tensor": 4}, "plain", marks=pytest.mark.exhaustive)]
    + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE],
    ids=lambda value: "x".join(f"{n} {name}" for name, n in value.items()) if isinstance(value, dict) else None,
)
def test_tokens_on_a_mesh_are_those_of_one_device(architecture, axes, names):
    assert run(architecture, axes, names) == []


@pytest.mark.slow
def test_a_kernel_on_a_mesh_sees_what_its_device_has():
    """The demo's four heads, two of keys, on two devices, lowered for H100s."""
    kernels = dict(run("demo", {"tensor": 2}, ""))
    window, memory = kernels["extend_heads"][:5], kernels["extend_heads"][5:]
    assert window == ["8x1x1x64", "8x1x1x64", "8x1x2x64", "8x1x2", "8x1x2"], "q, k, v, log-decays, betas"
    assert [shape.split("x", 1)[1] for shape in memory] == ["2x64x64", "1x64", "2x64", "2"], "the pool"
    assert kernels["convolve_channels"] == ["1024", "8x1x256", "9x4x256"], "256 channels of 512: weights, inputs, rings"
    assert kernels["gated_norm_heads"] == ["16x64", "16x64", "1x64"], "two heads of eight rows: outputs, gates, weights"


def run(architecture, axes, names):
    """What `on_mesh.py` prints, on a mesh with so many devices along each axis."""
    devices = math.prod(axes.values())
    environment = os.environ | {"XLA_FLAGS": flags_for(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    command = [sys.executable, "tests/serving/on_mesh.py", architecture, json.dumps(axes), names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
