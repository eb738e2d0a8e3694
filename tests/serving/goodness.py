"""Counts against a distribution, judged by a bound that holds for any of them."""

import math

import numpy as np

# Some forty counts are judged in a run of all tests: one in two million runs fails by chance. Mutants are below 1e-9.
RARE = 1e-8


def tail_bound(counts: dict, expected: dict) -> float:
    """What the probability of counts at least this far from the expected ones cannot exceed; 0 where a cell that can't
    occur did.

    How far is the relative entropy, which is half of Pearson's statistic where all cells are large. The tail of that
    statistic's distribution is no bound: a cell of few counts strays further.

    Args:
      counts: How often each cell occurred.
      expected: How often it should have, as much in all; cells expected less than 5 times are pooled.

    Source: Agrawal, Finite-sample concentration of the multinomial in relative entropy (2020), theorem 1.2.
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
    distance, free = (found * np.log(np.maximum(found, 1) / wanted)).sum(), len(cells) - 1
    if distance <= free or not free:
        return 1.0
    return math.exp(free - distance + free * math.log(distance / free))
