"""Which tokens top_k and top_p leave, without sorting the vocabulary.

Tokens are in an order: the more probable first, and of equally probable ones the lower id. top_k and top_p both leave
the first tokens of that order, so that the last one which they leave says all (`Cutoff`).

The first CANDIDATES tokens are found exactly, see `most_probable`; where top_k and top_p leave no more of a row, nothing
else is looked at. Other rows take a search over all tokens (`find_cutoff`), a few passes each; a row's result does not
depend on whether another one needed it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Float32, Int32, UInt32

CANDIDATES = 64
GROUP = 16  # numbers of which one maximum is taken
FEW = 1024  # numbers that are sorted at once: CANDIDATES * GROUP
DIGIT = 4  # bits of a code that a pass of the search finds
CODE = 32  # bits of a code

type Scale = Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cutoff:
    """The last token, in the order, that each row keeps.

    Attributes:
      code: Of its log-probability, see `encode`.
      token: Its id. Of equally probable tokens those up to it are kept.
    """

    code: UInt32[Array, "rows"]
    token: Int32[Array, "rows"]

    def keeps(self, code: UInt32[Array, "rows n"], token: Int32[Array, "#rows n"]) -> Bool[Array, "rows n"]:
        """Which tokens are left, of codes and ids."""
        last = self.code[:, None]
        return (code < last) | ((code == last) & (token <= self.token[:, None]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The most probable tokens, in the order, and what is left of them.

    Attributes:
      value: Unnormalised log-probabilities; 0 for the most probable one.
      token: Ids. Past the last token of a small vocabulary there are none.
      kept: Which ones min_p, top_k and top_p leave.
      closed: Whether all that they leave of a row is among the candidates. If not, `kept` means nothing.
    """

    value: Float32[Array, "rows n"]
    token: Int32[Array, "rows n"]
    kept: Bool[Array, "rows n"]
    closed: Bool[Array, "rows"]

    @property
    def cutoff(self) -> Cutoff:
        """What the closed rows keep."""
        rank = jnp.arange(self.token.shape[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(self.kept, rank, 0), axis=1)[:, None]
        value, token = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (self.value, self.token))
        return Cutoff(encode(value), token)


def everything(rows: int) -> Cutoff:
    """What leaves out no token."""
    return Cutoff(jnp.full(rows, 2**CODE - 1, jnp.uint32), jnp.zeros(rows, jnp.int32))


def encode(value: Float32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Integers in the order of log-probabilities of at most 0, the greatest first."""
    return jax.lax.bitcast_convert_type(jnp.abs(value), jnp.uint32)


def decode(code: UInt32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The log-probabilities of codes."""
    return -jax.lax.bitcast_convert_type(code, jnp.float32)


def keep(scaled: Float32[Array, "rows vocab"], cutoff: Cutoff) -> Float32[Array, "rows vocab"]:
    """Log-probabilities of at most 0, -inf for each token that is left out."""
    return jnp.where(cutoff.keeps(encode(scaled), _ids(scaled.shape[1])), scaled, -jnp.inf)


def candidates(
    logits: Float32[Array, "rows vocab"], scale: Scale, top_k: Int32[Array, "rows"], top_p: Float32[Array, "rows"]
) -> Candidates:
    """Which of the most probable tokens top_k and then top_p leave.

    Args:
      logits: Of all tokens.
      scale: Makes log-probabilities, at most 0, of logits and the greatest logit of each row, [rows, 1]; must not
        decrease as a logit grows.
      top_k: How many tokens to leave; 0: all.
      top_p: As in `SamplingParams`; from 1 on all.
    """
    best, value, token = most_probable(logits, scale)
    vocab, count = logits.shape[1], token.shape[1]
    rank = jnp.arange(count, dtype=jnp.int32)[None]
    top_k = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)[:, None]
    weight = jnp.where(rank < top_k, jnp.exp(value), 0.0)
    all_of_them = jnp.sum(jnp.exp(scale(logits, best)), axis=1, keepdims=True)
    probability = weight / jnp.where(top_k <= count, jnp.sum(weight, axis=1, keepdims=True), all_of_them)
    kept = (value > -jnp.inf) & (rank < top_k) & _reaches(probability, top_p[:, None])
    # Between the candidates' number and the vocabulary, top_k leaves tokens whose sum is not known here.
    known = (top_k <= count) | (top_k == vocab) | (value[:, -1:] == -jnp.inf)
    closed = known & ((top_k <= count) | ~kept[:, -1:])
    return Candidates(value, token, kept, closed[:, 0])


def _reaches(probability: Array, top_p: Array) -> Array:
    """Which tokens top_p leaves, of probabilities in the order."""
    before = jnp.cumsum(probability, axis=1) - probability
    first = jnp.arange(probability.shape[1], dtype=jnp.int32)[None] == 0  # kept, whatever rounding does to `before`
    return (before < top_p) | (top_p >= 1) | first


def most_probable(
    logits: Float32[Array, "rows vocab"], scale: Scale
) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows n"], Int32[Array, "rows n"]]:
    """The most probable tokens, CANDIDATES of them or the whole vocabulary.

    Groups of neighbours are in the same order by their maxima; a group that is not among the first n has none of the
    first n tokens, since each of those groups has one that comes before. So groups of groups are sorted, then the
    groups of the first ones, and so on down to tokens, a few at once.

    Args:
      logits: Of all tokens.
      scale: As in `candidates`.

    Returns:
      The greatest logit, and the tokens' log-probabilities and ids, in the order.
    """
    levels = [logits]
    while levels[-1].shape[1] > FEW:
        levels.append(_group_maxima(levels[-1]))
    best = jnp.max(levels[-1], axis=1, keepdims=True)
    index = jnp.broadcast_to(_ids(levels[-1].shape[1]), levels[-1].shape)
    code = encode(scale(levels[-1], best))
    for level in reversed(levels):
        if level is not levels[-1]:
            member = jnp.arange(GROUP, dtype=jnp.int32)[None, None]
            index = (GROUP * index[:, :, None] + member).reshape(index.shape[0], -1)
            found = level.at[jnp.arange(level.shape[0], dtype=jnp.int32)[:, None], index].get(
                mode="fill", fill_value=-jnp.inf
            )
            code = encode(scale(found, best))
        code, index = jax.lax.sort((code, index), num_keys=2, is_stable=False)
        code, index = code[:, :CANDIDATES], index[:, :CANDIDATES]
    return best, decode(code), index


def _group_maxima(x: Array) -> Array:
    """[rows, ceil(n / GROUP)] of [rows, n]."""
    rows, number = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -number % GROUP)), constant_values=-jnp.inf)
    return jnp.max(padded.reshape(rows, -1, GROUP), axis=2)


def find_cutoff(
    scaled: Float32[Array, "rows vocab"],
    top_k: Int32[Array, "rows"],
    top_p: Float32[Array, "rows"],
    wanted: Bool[Array, "rows"],
) -> Cutoff:
    """What top_k and then top_p leave, by a search over all tokens.

    A token stays if the tokens before it weigh less than a target: each of them 1 and the target top_k, then each its
    probability and the target top_p.

    Args:
      scaled: Log-probabilities of at most 0.
      top_k, top_p: As in `candidates`.
      wanted: The rows whose results are looked at.
    """
    rows, vocab = scaled.shape
    number = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    code, ids = encode(scaled), _ids(vocab)

    def step(i, cutoff):
        by_mass = i == 1
        each = jnp.where(by_mass, jnp.exp(scaled), 1.0)
        weight = jnp.where(cutoff.keeps(code, ids), each, 0.0)
        mass = jnp.where(top_p < 1, top_p * jnp.sum(weight, axis=1), jnp.inf)
        target = jnp.where(by_mass, mass, number.astype(jnp.float32))
        last, before = _search(code, weight, target)
        of_one = jnp.where(by_mass, jnp.exp(decode(last)), 1.0)
        equal = jnp.maximum(jnp.ceil((target - before) / of_one), 1.0)  # at least: the first token is always kept
        token = _nth(code == last[:, None], jnp.minimum(equal, vocab).astype(jnp.int32))
        lower = (last < cutoff.code) | ((last == cutoff.code) & (token < cutoff.token))
        return Cutoff(jnp.where(lower, last, cutoff.code), jnp.where(lower, token, cutoff.token))

    # Without a top_k there is one search.
    first = jnp.where(jnp.any(wanted & (number < vocab)), 0, 1)
    return jax.lax.fori_loop(first, 2, step, everything(rows))


def _search(code: Array, weight: Array, target: Array) -> tuple[Array, Array]:
    """The greatest number for which the codes below it weigh less than the target; and what they weigh."""

    def pass_over(i, found):
        number, below = found
        shift = jnp.uint32(CODE - DIGIT) - jnp.uint32(DIGIT) * i.astype(jnp.uint32)
        tried = [number + (jnp.uint32(digit) << shift) for digit in range(1, 2**DIGIT)]
        parts = [jnp.where(code < limit[:, None], weight, 0.0) for limit in tried]
        # One reduction of all, so that one pass over the tokens does.
        sums = jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), _add, (1,))
        for limit, total in zip(tried, sums, strict=True):
            less = total < target
            number, below = jnp.where(less, limit, number), jnp.where(less, total, below)
        return number, below

    start = jnp.zeros(code.shape[0], jnp.uint32), jnp.zeros(code.shape[0], jnp.float32)
    return jax.lax.fori_loop(0, CODE // DIGIT, pass_over, start)


def _add(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _nth(mask: Array, n: Array) -> Array:
    """The index of the nth (from 1) that is True in each row; what is past the end where there are fewer."""
    rows, number = mask.shape
    grouped = jnp.pad(mask, ((0, 0), (0, -number % FEW))).reshape(rows, -1, FEW)
    ends = jnp.cumsum(jnp.sum(grouped, axis=2, dtype=jnp.int32), axis=1)
    group = jnp.sum(ends < n[:, None], axis=1, dtype=jnp.int32)
    within = jnp.minimum(group, ends.shape[1] - 1)
    counts = jnp.cumsum(jnp.take_along_axis(grouped, within[:, None, None], axis=1)[:, 0], axis=1, dtype=jnp.int32)
    earlier = jnp.take_along_axis(ends, within[:, None], axis=1) - counts[:, -1:]
    return FEW * group + jnp.sum(earlier + counts < n[:, None], axis=1, dtype=jnp.int32)


def _ids(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.int32)[None]
