"""Causal softmax attention, written out in float64."""

import numpy as np


def attention(q, k, v):
    """Each query [time, heads, head_dim] over the keys [time, kv_heads, head_dim] up to its own position."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for time in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[: time + 1, head // group], v[: time + 1, head // group]
            scores = keys @ q[time, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[time, head] = weights @ values / weights.sum()
    return out
