"""Pearson's test of counts against a distribution."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc


def chi_square_tail(counts: dict, expected: dict) -> float:
    """The probability of counts at least this far from the expected ones; 0 where a cell that can't occur did.

    Args:
      counts: How often each cell occurred.
      expected: How often it should have, as much in all; cells expected less than 5 times are pooled.
    """
    if not counts.keys() <= {cell for cell, number in expected.items() if number > 0}:
        return 0.0
    pooled, cells = np.zeros(2), []
    for cell, number in sorted(expected.items(), key=lambda item: -item[1]):
        pooled += counts.get(cell, 0), number
        if pooled[1] >= 5:
            cells.append(pooled)
            pooled = np.zeros(2)
    cells[-1] = cells[-1] + pooled
    found, wanted = np.array(cells).T
    assert abs(found.sum() - wanted.sum()) < 1e-6 * wanted.sum()
    if len(cells) == 1:
        return 1.0
    statistic = ((found - wanted) ** 2 / wanted).sum()
    return float(gammaincc(jnp.float32((len(cells) - 1) / 2), jnp.float32(statistic / 2)))
