"""StreamingLLM's positions, against a cache that is filled and turned anew for every query, in float64."""

import numpy as np
import pytest

from jaxbuf.attention.rotary import Rotary, YarnScaling, rotate
from jaxbuf.attention.streaming import Streaming, attend_streaming_sequence

ROWS, TIME, HEADS, KV_HEADS, HEAD_DIM = 2, 40, 4, 2, 8
LENGTHS = np.array([40, 11], np.int32)


def turned(x, position, rotary):
    """x [..., head_dim] at a position, half against half."""
    half = rotary.dim // 2
    frequency, amplitude = rotary.theta ** (-np.arange(half) * 2 / rotary.dim), 1.0
    if rotary.scaling is not None:
        frequency, amplitude = rotary.scaling.frequencies(rotary.dim, rotary.theta), rotary.scaling.amplitude
    cos, sin = amplitude * np.cos(position * frequency), amplitude * np.sin(position * frequency)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def definition(q, k, v, rotary, window, sinks):
    """Of one row: keys and queries before they are turned, each at its index in the cache that the query finds."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros_like(q), HEADS // KV_HEADS
    for i in range(len(q)):
        cache = [j for j in range(i + 1) if j < sinks or i - j < window]
        for head in range(HEADS):
            keys = np.array([turned(k[j, head // group], place, rotary) for place, j in enumerate(cache)])
            scores = keys @ turned(q[i, head], len(cache) - 1, rotary) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[cache, head // group] / weights.sum()
    return out


@pytest.mark.parametrize(
    "rotary, window, sinks",
    [
        pytest.param(Rotary(8, 100.0), 5, 3, marks=pytest.mark.exhaustive),
        (Rotary(4, 100.0, YarnScaling(4.0, 16, 1.3)), 9, 2),
        pytest.param(Rotary(8, 100.0), 30, 60, marks=pytest.mark.exhaustive),
    ],
)
def test_a_query_stands_behind_what_its_cache_holds(rng, rotary, window, sinks):
    q, k, v = (rng.standard_normal((ROWS, TIME, n, HEAD_DIM)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    angles = rotary.angles(np.arange(TIME, dtype=np.int32)[None])
    given = rotate(2 * q, angles), rotate(k, angles), v
    found = np.asarray(attend_streaming_sequence(*given, rotary, Streaming(window, sinks), lengths=LENGTHS))
    for row, length in enumerate(LENGTHS):
        expected = definition(*(x[row, :length] for x in (2 * q, k, v)), rotary, window, sinks)
        np.testing.assert_allclose(found[row, :length], expected, atol=2e-5)
        assert not found[row, length:].any()
