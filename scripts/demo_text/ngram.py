"""An interpolated byte n-gram: the yardstick for the embedded model's bits per byte.

Interpolated Kneser-Ney over orders 1 to n, down to the uniform distribution over 256 bytes:

    P_m(c | h) = max(N(h c) − D_m, 0) / N(h) + D_m · distinct(h) / N(h) · P_{m-1}(c | h less its first byte)

N counts occurrences at the highest order and distinct left neighbours below it; D_m = n1 / (n1 + 2 n2) with n1, n2 the
number of m-grams that count one and two. A context that never occurred hands over to the shorter one whole. The
context of a document's first bytes is padded with NUL, which no document may contain.

Source: Chen and Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1998), section 3.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

HIGHEST_ORDER = 7


@dataclasses.dataclass(frozen=True)
class Level:
    """The counts of one order, as sorted arrays.

    Attributes:
      grams: int64, the m-grams that occur, m bytes packed big-endian.
      counts: int64, N of each.
      contexts: int64, the (m - 1)-byte contexts that occur.
      totals, distinct: int64, sum of N over, and number of, the bytes seen after each context.
      discount: D_m.
    """

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    distinct: np.ndarray
    discount: float


@dataclasses.dataclass(frozen=True)
class NGram:
    """A trained model; `levels[m - 1]` is order m."""

    levels: tuple[Level, ...]

    @property
    def order(self) -> int:
        """The highest order: one byte more than the longest context."""
        return len(self.levels)


def train(documents: Iterable[bytes], order: int = 6) -> NGram:
    """Counts n-grams that end inside a document and never cross its start.

    Raises:
      ValueError: order is not in [1, 7], there is no text, or a document contains a NUL byte.
    """
    grams, counts = np.unique(_grams(documents, order), return_counts=True)
    if not grams.size:
        raise ValueError("the training text is empty")
    levels = []
    for length in range(order, 0, -1):
        levels.append(_level(grams, counts))
        grams, counts = np.unique(grams & ((1 << 8 * (length - 1)) - 1), return_counts=True)
    return NGram(tuple(reversed(levels)))


def probabilities(model: NGram, grams: np.ndarray) -> np.ndarray:
    """Probability of the last byte of each `order`-gram given the bytes before it.

    Args:
      model: The n-gram.
      grams: int64 [n], `model.order` bytes packed big-endian, NULs before a document's start.

    Returns:
      float64 [n]; over the 256 last bytes of one context they sum to 1.
    """
    result = np.full(grams.shape, 1 / 256)
    for length, level in enumerate(model.levels, 1):
        gram = grams & ((1 << 8 * length) - 1)
        count = _look_up(level.grams, level.counts, gram)
        total = _look_up(level.contexts, level.totals, gram >> 8)
        distinct = _look_up(level.contexts, level.distinct, gram >> 8)
        known = total > 0
        divisor = np.where(known, total, 1)
        kept = np.maximum(count - level.discount, 0.0) / divisor
        result = np.where(known, kept + level.discount * distinct / divisor * result, result)
    return result


def bits_per_byte(model: NGram, documents: Iterable[bytes]) -> float:
    """Mean −log2 probability of the documents' bytes, each document on its own.

    Raises:
      ValueError: There is no text, or a document contains a NUL byte.
    """
    grams = _grams(documents, model.order)
    if not grams.size:
        raise ValueError("there is no text to score")
    order = np.argsort(grams)  # neighbours in a sorted table are looked up much faster
    return float(-np.log2(probabilities(model, grams[order])).mean())


def _grams(documents: Iterable[bytes], order: int) -> np.ndarray:
    """int64: the packed n-gram that ends at each byte of each document."""
    if not 1 <= order <= HIGHEST_ORDER:
        raise ValueError(f"order must be in [1, {HIGHEST_ORDER}], got {order}")
    pad = b"\0" * (order - 1)
    parts = [pad + document for document in documents if document]
    stream = np.frombuffer(b"".join(parts), np.uint8)
    if stream.size and np.count_nonzero(stream == 0) != len(pad) * len(parts):
        raise ValueError("documents must not contain NUL bytes, which mark a document's start")
    packed = np.zeros(max(stream.size - order + 1, 0), np.int64)
    for offset in range(order):
        packed = (packed << 8) | stream[offset : offset + packed.size]
    return packed[stream[order - 1 :] != 0]


def _level(grams: np.ndarray, counts: np.ndarray) -> Level:
    contexts, first, distinct = np.unique(grams >> 8, return_index=True, return_counts=True)
    ones, twos = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = ones / (ones + 2 * twos) if ones and twos else 0.5
    return Level(grams, counts, contexts, np.add.reduceat(counts, first), distinct, discount)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values at the wanted keys, 0 where the sorted keys do not hold one."""
    index = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[index] == wanted, values[index], 0)
