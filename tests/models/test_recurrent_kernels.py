"""A decoding step of a recurrent mixer goes through the kernels that are there for it."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxbuf.models.layers import uniform
from jaxbuf.models.mixers.kimi_delta_attention import KimiDeltaAttention
from jaxbuf.models.mixers.mamba2_mixer import Mamba2
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.recurrence.convolution import init_ring
from jaxbuf.recurrence.recurrent_memory import RecurrentCache
from jaxbuf.recurrence.recurrent_plan import LaunchedRecurrence
from jaxbuf.target import as_target

ROWS, HIDDEN = 4, 256
# Kernels of a layer, but for its projections.
AROUND = {"prepare_heads", "convolve_channels", "extend_heads", "extend_channels"}
AROUND |= {"gated_norm_heads", "gated_norm_groups"}
KIMI = RecurrenceSpec(4, 4, 128, 128, decay="channel")
MAMBA, WIDE = (RecurrenceSpec(heads, 4, 128, dim, delta=False) for heads, dim in ((16, 64), (48, 80)))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    "mixer, kernels",
    [
        (KimiDeltaAttention(KIMI, 4, 1e-5, rank=128), {"prepare_heads", "extend_channels", "gated_norm_heads"}),
        (Mamba2(MAMBA, 4, 1e-5), {"convolve_channels", "extend_heads", "gated_norm_groups"}),
        (Mamba2(MAMBA, 4, 1e-5, norm=None), {"convolve_channels", "extend_heads"}),
        (Mamba2(WIDE, 4, 1e-5), {"convolve_channels", "extend_heads", "gated_norm_groups"}),
    ],
)
def test_a_step_takes_each_kernel_once(mixer, kernels):
    spec, dtype = mixer.spec, jnp.bfloat16
    made = nnx.eval_shape(
        lambda: mixer.parameters(HIDDEN, initializer=uniform(0.1), rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype))
    )
    graph, parameters = nnx.split(made)
    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, max_pending=8, limit=16))
    ring = jax.eval_shape(
        lambda: init_ring(slots=ROWS, channels=spec.channels, width=4, max_pending=8, dtype=jnp.dtype(dtype))
    )
    slots = jnp.arange(1, ROWS + 1)

    def step(parameters, cache, ring, x):
        launch, _ = buffered.begin(cache.cursor, slots, jnp.ones_like(slots), 1)
        memory, plan = RecurrentCache(cache.pool, ring), LaunchedRecurrence(launch, None, as_target("H100"))
        return mixer(nnx.merge(graph, parameters), x, memory, plan)

    x = jax.ShapeDtypeStruct((ROWS, 1, HIDDEN), dtype)
    traced = jax.jit(step, donate_argnums=(1, 2)).trace(parameters, cache, ring, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    found = collections.Counter(name for line in calls for name in re.findall(r"\\00(\w+?)_mosaic_gpu\\00", line))
    assert {name: times for name, times in found.items() if name in AROUND} == dict.fromkeys(kernels, 1)
