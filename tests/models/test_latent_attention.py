"""The mixer of latent attention against its definition in float64: whole sequences, and launches on a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxbuf.attention import latent
from jaxbuf.attention.attention_plan import LaunchedAttention, WholeAttention
from jaxbuf.attention.paged_memory import init_pages
from jaxbuf.attention.rotary import LinearScaling, Rotary
from jaxbuf.memory.sequences import Launch
from jaxbuf.models.cache import Dtypes, memory_partitions
from jaxbuf.models.config import ATTENTION
from jaxbuf.models.layers import named_parameters, replace_parameters, zeros
from jaxbuf.models.mixers.latent_attention import LatentAttention
from jaxbuf.models.tensor_parallel import Part

HIDDEN, ROWS, TIME, CHUNK, PENDING = 20, 3, 75, 30, 4
PLAIN = LatentAttention(4, 12, 6, 10, 16, None, latent_eps=1e-2)
EVERYTHING = dataclasses.replace(
    PLAIN, rotary=Rotary(6, 1e3, LinearScaling(2.0)), query_rank=14, head_gate=True, bias=True
)
MIXERS = {"without positions": PLAIN, "with everything": EVERYTHING}
apply = jax.jit(lambda mixer, *given: mixer(*given), static_argnums=0)


def random_parameters(mixer, rng):
    made = nnx.eval_shape(lambda: mixer.parameters(HIDDEN, initializer=zeros, rngs=nnx.Rngs(0), dtype=jnp.float32))
    values = [rng.standard_normal(p.shape) / p.shape[-1] ** 0.5 for p in named_parameters(made).values()]
    return replace_parameters(made, [jnp.asarray(value, jnp.float32) for value in values])


def definition(mixer, parameters, x):
    """The layer's output for one sequence x [time, hidden]."""
    p = {name: np.asarray(value[...], np.float64) for name, value in named_parameters(parameters).items()}
    x = np.asarray(x, np.float64)

    def norm(y, weight):
        return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + mixer.latent_eps) * weight

    def turn(y):
        """Neighbours are the two parts of a complex number."""
        if mixer.rotary is None:
            return y
        pace = mixer.rotary.theta ** (-np.arange(0, 6, 2) / 6) / mixer.rotary.scaling.factor
        turned = (y[..., ::2] + 1j * y[..., 1::2]) * np.exp(1j * np.arange(len(y))[:, None, None] * pace)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(y.shape)

    q = x
    if mixer.query_rank is not None:
        q = norm(x @ p["q_down"].T + p.get("q_down_bias", 0), p["q_norm"])
    q = (q @ p["q_proj"].T).reshape(len(x), mixer.heads, -1)
    down = x @ p["kv_down"].T + p.get("kv_down_bias", 0)
    made = (norm(down[:, : mixer.rank], p["kv_norm"]) @ p["kv_up"].T).reshape(len(x), mixer.heads, -1)
    shared = np.repeat(turn(down[:, None, mixer.rank :]), mixer.heads, axis=1)
    q = np.concatenate([q[..., : mixer.key_dim], turn(q[..., mixer.key_dim :])], axis=-1)
    k, v = np.concatenate([made[..., : mixer.key_dim], shared], axis=-1), made[..., mixer.key_dim :]
    scores = np.einsum("thc,shc->hts", q, k) / np.sqrt(mixer.key_dim + mixer.shared_dim)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * np.tril(np.ones((len(x), len(x))))
    out = np.einsum("hts,shc->thc", weights / weights.sum(axis=-1, keepdims=True), v)
    if mixer.head_gate:
        out = out / (1 + np.exp(-x @ p["gate"].T))[..., None]
    return out.reshape(len(x), -1) @ p["o_proj"].T + p.get("o_bias", 0)


@pytest.fixture(params=MIXERS)
def layer(request, rng):
    """A mixer, its parameters, sequences, and what the mixer makes of them."""
    mixer = MIXERS[request.param]
    parameters, x = random_parameters(mixer, rng), rng.standard_normal((ROWS, TIME, HIDDEN)).astype(np.float32)
    return mixer, parameters, x, np.stack([definition(mixer, parameters, each) for each in x])


def test_whole_sequences_are_the_definition(layer):
    mixer, parameters, x, expected = layer
    lengths = np.array([TIME, 1, 40], np.int32)
    dead = np.arange(TIME)[None] >= lengths[:, None]
    x = np.where(dead[..., None], np.nan, x)
    out, memory = apply(mixer, parameters, x, None, WholeAttention(TIME, lengths).shared_by([mixer]))
    assert memory is None
    np.testing.assert_allclose(np.where(dead[..., None], 0, out), np.where(dead[..., None], 0, expected), atol=2e-5)


@pytest.mark.slow
def test_launches_with_rejected_drafts_are_the_definition(layer, rng, monkeypatch):
    """Chunks behind what is committed, in several pieces; tokens that are verified, accepted in part."""
    monkeypatch.setattr(latent, "TOKENS", 1)
    mixer, parameters, x, expected = layer
    shared = init_pages(slots=ROWS, capacity=TIME, page_size=4)
    memory = mixer.memory(shared, Dtypes(*[jnp.float32] * 3), 0)
    memory = jax.tree.map(lambda held: jnp.full_like(held, jnp.nan), memory)
    assert memory.latents.shape[2:] == (1, mixer.kv_numbers)
    slots, start = np.append(rng.permutation(ROWS) + 1, 0).astype(np.int32), np.zeros(ROWS + 1, np.int32)
    for number, time in enumerate([CHUNK, *[PENDING] * 4, CHUNK, *[PENDING] * 20]):
        least = CHUNK if number == 0 else 0
        lengths = np.minimum(rng.integers(least, time + 1, ROWS + 1), TIME - start).astype(np.int32)
        lengths = np.where(slots > 0, lengths, time)
        given = np.full((ROWS + 1, time, HIDDEN), np.nan, np.float32)
        for row in range(ROWS):
            given[row, : lengths[row]] = x[row, start[row] : start[row] + lengths[row]]
        plan = LaunchedAttention(Launch(slots, start, lengths, time), shared.table).shared_by([mixer])
        right = rng.integers(least, lengths + 1)
        drafts = rng.standard_normal(given.shape).astype(np.float32)
        given = np.where(np.arange(time)[None, :, None] < right[:, None, None], given, drafts)
        given[-1] = np.nan
        out, memory = apply(mixer, parameters, given, memory, plan)
        for row in range(ROWS):
            wanted = expected[row, start[row] : start[row] + right[row]]
            np.testing.assert_allclose(out[row, : right[row]], wanted, atol=2e-5)
        start[:ROWS] += right[:ROWS].astype(np.int32)


def test_devices_share_the_heads_and_each_has_the_latents():
    half = EVERYTHING.spread(2)
    assert (half.heads, half.devices, half.kv_numbers) == (2, 2, EVERYTHING.kv_numbers)
    memory = half.memory(init_pages(slots=1, capacity=8, page_size=4), Dtypes(*[jnp.float32] * 3), 0)
    assert memory_partitions([ATTENTION], [memory]) == [jax.P(None, None, "tensor")]
    parameters = EVERYTHING.parameters(HIDDEN, initializer=zeros, rngs=nnx.Rngs(0), dtype=jnp.float32)
    spread = {name: p.axes for name, p in named_parameters(parameters).items() if any(p.axes)}
    own, made, values = (Part("heads", 4, size) for size in (18, 22, 10))
    assert spread == {
        "q_proj": ((own,), None),
        "kv_up": ((made,), None),
        "o_proj": (None, (values,)),
        "gate": ((Part("heads", 4),), None),
    }
    with pytest.raises(ValueError, match=r'the query heads \(4\) must be a multiple of the mesh axis "tensor" \(3\)'):
        EVERYTHING.spread(3)
