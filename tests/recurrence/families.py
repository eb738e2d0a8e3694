"""DESIGN's families of the recurrence, each as what it passes: one small shape for all of them."""

import numpy as np

from jaxbuf.recurrence import RecurrenceSpec
from tests.recurrence import definition


def _spec(decay, delta):
    return RecurrenceSpec(heads=4, key_heads=2, key_dim=16, value_dim=24, decay=decay, delta=delta)


FAMILIES = {
    "linear attention": _spec("none", False),
    "retention": _spec("head", False),
    "Mamba-2": _spec("head", False),
    "GLA": _spec("channel", False),
    "DeltaNet": _spec("none", True),
    "Gated DeltaNet": _spec("head", True),
    "KDA": _spec("channel", True),
}
# Means of log_decay, and a decay that forgets nearly everything at six tokens of seven.
REGIMES = (-0.001, -0.05, -0.5, "strong")


def inputs(rng, family, batch, time):
    """q, k, v, log_decay, beta of a family in float32; row i of the batch decays as REGIMES[i % 4]."""
    spec = FAMILIES[family]
    q, k, v, log_decay, beta = definition.inputs(rng, spec, batch, time, mean_log_decay=-1.0)
    if family == "Mamba-2":  # beta is the step size dt, log_decay a rate of the head times dt
        beta = (2 * beta**2).astype(np.float32)
        log_decay = -beta * rng.uniform(0.5, 2, (1, 1, spec.heads)).astype(np.float32)
    elif family == "retention":  # a constant per head
        log_decay = np.broadcast_to(-(2.0 ** -np.arange(spec.heads, dtype=np.float32)), beta.shape)
    if family in ("linear attention", "retention"):
        beta = None
    if log_decay is not None:
        log_decay = log_decay.copy()
        for row in range(batch):
            regime = REGIMES[row % len(REGIMES)]
            if regime == "strong":
                log_decay[row] = -20.0
                log_decay[row, ::7] = -1e-3
            else:
                log_decay[row] *= -regime
    return q, k, v, log_decay, beta


def worst_row(actual, expected):
    """The largest relative error of a row: no regime hides behind another's norm."""
    return max(definition.error(a, e) for a, e in zip(np.asarray(actual), expected, strict=True))
