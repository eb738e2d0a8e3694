"""The recurrence in float64 numpy, written from DESIGN's equations and from nothing in the package."""

import numpy as np


def run(spec, state, q, k, v, log_decay, beta, length=None):
    """One sequence: q, k [t, key_heads, key_dim], v [t, heads, value_dim] -> out, state, u, all float64."""
    time, heads = v.shape[:2]
    length = time if length is None else length
    state = np.zeros((heads, spec.value_dim, spec.key_dim)) if state is None else np.array(state, np.float64)
    out, updates = np.zeros((2, time, heads, spec.value_dim))
    for t in range(length):
        for h in range(heads):
            group = h // (heads // spec.key_heads)
            key, query = np.float64(k[t, group]), np.float64(q[t, group])
            decayed = state[h] if log_decay is None else state[h] * np.exp(np.float64(log_decay[t, h]))
            strength = 1.0 if beta is None else np.float64(beta[t, h])
            recalled = decayed @ key if spec.delta else 0.0
            updates[t, h] = strength * (np.float64(v[t, h]) - recalled)
            state[h] = decayed + np.outer(updates[t, h], key)
            out[t, h] = state[h] @ query
    return out, state, updates


def run_batch(spec, state, q, k, v, log_decay, beta, lengths=None):
    """`run` for every row of a batch."""

    def pick(array, row):
        return None if array is None else np.asarray(array)[row]

    rows = [
        run(spec, *(pick(x, row) for x in (state, q, k, v, log_decay, beta)), None if lengths is None else lengths[row])
        for row in range(np.shape(v)[0])
    ]
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def inputs(rng, spec, batch, time, *, mean_log_decay=-0.3):
    """Random q, k (unit norm), v, log_decay, beta in float32, as `recurrent` takes them."""
    q, k = rng.standard_normal((2, batch, time, spec.key_heads, spec.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    # A token that finds an empty state gives (q · k) u: of a q orthogonal to k, all of it is rounding. None is.
    orthogonal = np.abs(np.sum(q * k, axis=-1)) < 0.01
    q[orthogonal] = (q + k)[orthogonal] * np.sqrt(0.5)
    v = rng.standard_normal((batch, time, spec.heads, spec.value_dim))
    shape = (batch, time, spec.heads, *((spec.key_dim,) if spec.decay == "channel" else ()))
    log_decay = None if spec.decay == "none" else (mean_log_decay * rng.exponential(size=shape)).astype(np.float32)
    beta = rng.uniform(0.05, 0.95, (batch, time, spec.heads)).astype(np.float32)
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), log_decay, beta


def error(actual, expected):
    """Relative error by norm; not a number never passes."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)
