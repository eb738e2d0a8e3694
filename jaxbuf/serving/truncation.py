"""Which tokens top_k and top_p leave, without sorting the vocabulary.

Tokens have an order: the more probable first, and of equally probable ones the lower id. What top_k and top_p leave of
a row are the first tokens of that order, up to the last one that stays (`Cutoff`).

The first CANDIDATES tokens are found exactly, see `most_probable`. If they include all that stays of a row, the row is
closed: nothing else is looked at but the sum of all probabilities. Other rows take a search over all tokens, of some
twenty passes (`find_cutoff`). What a row keeps does not depend on whether another one needed the search.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Float32, Int32, UInt32

CANDIDATES = 64
GROUP = 16  # numbers of which one maximum is taken
FEW = CANDIDATES * GROUP  # numbers that are sorted at once; in a smaller vocabulary all tokens are candidates
CODE = 32  # bits of a code
DIGIT = 2  # bits of it that a pass of the search finds

type Scale = Callable[[Array, Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cutoff:
    """The last token, in the order, that stays of each row.

    Attributes:
      code: Of its log-probability, see `encode`.
      token: Its id.
    """

    code: UInt32[Array, "rows"]
    token: Int32[Array, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The first tokens of each row, in the order, and which of them stay.

    Attributes:
      best: The greatest logit; infinite if one is NaN.
      value: Unnormalised log-probabilities; 0 for the most probable token.
      token: Ids.
      kept: Which ones min_p, top_k and top_p leave. It means nothing in rows that are not closed.
      closed: Whether all that stays of a row is among the candidates.
      all_tokens: Whether the candidates are the whole vocabulary (static); all rows are closed then.
    """

    best: Float32[Array, "rows 1"]
    value: Float32[Array, "rows n"]
    token: Int32[Array, "rows n"]
    kept: Bool[Array, "rows n"]
    closed: Bool[Array, "rows"]
    all_tokens: bool = dataclasses.field(metadata={"static": True})

    @property
    def cutoff(self) -> Cutoff:
        """Of the closed rows."""
        last = jnp.max(jnp.where(self.kept, _ids(self.token.shape[1]), 0), axis=1)[:, None]
        value, token = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (self.value, self.token))
        return Cutoff(encode(value), token)


def encode(value: Float32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Numbers that grow as log-probabilities of at most 0 fall; equal ones, 0 and -0 too, have equal numbers."""
    return jax.lax.bitcast_convert_type(jnp.abs(value), jnp.uint32)


def decode(code: UInt32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The log-probabilities of codes."""
    return -jax.lax.bitcast_convert_type(code, jnp.float32)


def greatest(x: Float32[Array, "*n vocab"]) -> Float32[Array, "*n"]:
    """The greatest number of the last axis; infinity where one is NaN, which XLA's maximum passes over on a CPU."""
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1)


def keep(scaled: Float32[Array, "rows vocab"], cutoff: Cutoff) -> Float32[Array, "rows vocab"]:
    """Log-probabilities of at most 0, with -inf for each token behind the cutoff."""
    code, last = encode(scaled), cutoff.code[:, None]
    stays = (code < last) | ((code == last) & (_ids(scaled.shape[1]) <= cutoff.token[:, None]))
    return jnp.where(stays, scaled, -jnp.inf)


def candidates(
    logits: Float32[Array, "rows vocab"], scale: Scale, top_k: Int32[Array, "rows"], top_p: Float32[Array, "rows"]
) -> Candidates:
    """The most probable tokens, and which of them top_k and then top_p leave.

    Args:
      logits: Of all tokens.
      scale: Makes log-probabilities of at most 0, [rows, n], from logits [rows, n] and the greatest of each row,
        [rows, 1]. A greater logit never has a smaller one.
      top_k: How many tokens to leave; 0: all.
      top_p: As in `SamplingParams`; 1: all.
    """
    best, value, token = most_probable(logits, scale)
    count, vocab, rank = token.shape[1], logits.shape[1], _ids(token.shape[1])
    number = _number(top_k, vocab)[:, None]
    weight = jnp.where(rank < number, jnp.exp(value), 0.0)
    total, known = jnp.sum(weight, axis=1, keepdims=True), number <= count
    if count < vocab:
        total = jnp.where(known, total, _sum(_grouped(jnp.exp(scale(logits, best)), FEW, 0.0))[:, None])
        # A top_k between the two numbers leaves tokens whose sum is not known, unless min_p leaves fewer.
        known |= (number == vocab) | (value[:, -1:] == -jnp.inf)
    probability = weight / total
    before = jnp.cumsum(probability, axis=1) - probability
    # Whatever rounding does to `before`: the first token stays, and top_p 1 leaves all.
    kept = (before < jnp.where(top_p < 1, top_p, jnp.inf)[:, None]) | (rank == 0)
    kept &= (rank < number) & (value > -jnp.inf)
    closed = known & ((number <= count) | ~kept[:, -1:])
    return Candidates(best, value, token, kept, closed[:, 0], all_tokens=count == vocab)


def most_probable(
    logits: Float32[Array, "rows vocab"], scale: Scale
) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows n"], Int32[Array, "rows n"]]:
    """The first tokens of the order: CANDIDATES, or all of at most FEW.

    Groups of neighbours, ordered by their maxima and then by place, are enough: each of the first n groups has a token
    that comes before all tokens of the groups behind, so that those have none of the first n tokens. So the maxima of
    groups of groups are sorted, then those of the groups in the first ones, and so on down to the tokens.

    Args:
      logits: Of all tokens.
      scale: As in `candidates`.

    Returns:
      The greatest logit (infinite if one is NaN), and the tokens' log-probabilities and ids, in the order.
    """
    levels = [logits]
    while levels[-1].shape[1] > FEW:
        # Without the barrier XLA makes a maximum of maxima one of all numbers, in a pass of its own.
        levels.append(jax.lax.optimization_barrier(greatest(_grouped(levels[-1], GROUP, -jnp.inf))))
    top = levels.pop()
    best = greatest(top)[:, None]
    code, index = _sort(scale(top, best), jnp.broadcast_to(_ids(top.shape[1]), top.shape))
    for level in reversed(levels):
        member = jnp.arange(GROUP, dtype=jnp.int32)[None, None]
        index = (GROUP * index[:, :CANDIDATES, None] + member).reshape(index.shape[0], -1)
        row = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
        code, index = _sort(scale(level.at[row, index].get(mode="fill", fill_value=-jnp.inf), best), index)
    count = CANDIDATES if levels else logits.shape[1]
    return best, decode(code[:, :count]), index[:, :count]


def _grouped(x: Array, size: int, fill: Array | float) -> Array:
    """[rows, ceil(n / size), size] of [rows, n]."""
    rows, number = x.shape
    return jnp.pad(x, ((0, 0), (0, -number % size)), constant_values=fill).reshape(rows, -1, size)


def _sum(x: Array) -> Array:
    """[rows] of [rows, n, size]: a CPU adds one number after the other, and sums of sums are rounded less."""
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(x, axis=2)), axis=1)


def _sort(value: Array, index: Array) -> tuple[Array, Array]:
    """Codes and indices in the order."""
    code, index = jax.lax.sort((encode(value), index), num_keys=2, is_stable=False)
    return code, index


def find_cutoff(
    scaled: Float32[Array, "rows vocab"],
    found: Candidates,
    top_k: Int32[Array, "rows"],
    top_p: Float32[Array, "rows"],
    asked: Bool[Array, "rows"],
) -> Cutoff:
    """Up to which token each row stays: what the candidates say of closed rows, and a search of the others.

    Args:
      scaled: Log-probabilities of all tokens, at most 0.
      found: Of the same.
      top_k, top_p: As in `candidates`.
      asked: In other rows all tokens stay.
    """
    cutoff = found.cutoff
    if not found.all_tokens:
        wanted = asked & ~found.closed

        def searched():
            return _where(wanted, search_cutoff(scaled, top_k, top_p, wanted), cutoff)

        cutoff = jax.lax.cond(jnp.any(wanted), searched, lambda: cutoff)
    return _where(asked, cutoff, _everything(scaled.shape[0]))


def search_cutoff(
    scaled: Float32[Array, "rows vocab"],
    top_k: Int32[Array, "rows"],
    top_p: Float32[Array, "rows"],
    wanted: Bool[Array, "rows"],
) -> Cutoff:
    """Up to which token each row stays, by searches over all tokens.

    A token stays if those before it weigh less than a target: first each of them 1, and the target top_k; then, among
    those that stayed, each its probability, and the target top_p.

    Args:
      scaled, top_k, top_p: As in `find_cutoff`.
      wanted: The rows whose results are looked at.
    """
    rows, vocab = scaled.shape
    number = _number(top_k, vocab)

    def step(i, cutoff):
        by_mass, left = i == 1, _grouped(keep(scaled, cutoff), FEW, -jnp.inf)
        mass = jnp.where(top_p < 1, top_p * _sum(jnp.exp(left)), jnp.inf)
        target = jnp.where(by_mass, mass, number.astype(jnp.float32))
        code, before = _search(left, by_mass, target)
        each = jnp.where(by_mass, jnp.exp(decode(code)), 1.0)
        equal = jnp.clip(jnp.ceil((target - before) / each), 1, vocab)  # at least 1: the first token stays
        token = _nth(encode(left) == code[:, None, None], equal.astype(jnp.int32))
        earlier = (code < cutoff.code) | ((code == cutoff.code) & (token < cutoff.token))
        return _where(earlier, Cutoff(code, token), cutoff)

    # Without a top_k there is one search.
    first = jnp.where(jnp.any(wanted & (number < vocab)), 0, 1)
    return jax.lax.fori_loop(first, 2, step, _everything(rows))


def _search(scaled: Array, by_mass: Array, target: Array) -> tuple[Array, Array]:
    """The greatest number of which the tokens of smaller codes weigh less than the target; and what they weigh.

    Args:
      scaled: Of tokens in groups, [rows, n, size].
      by_mass: Whether a token weighs its probability, and not 1.
      target: float32 [rows].
    """

    def find_digit(i, found):
        # The barrier keeps XLA from computing weights ahead of the loop: a pass would read two arrays, not one.
        now, (number, below) = jax.lax.optimization_barrier((scaled, found))
        code, weight = encode(now), jnp.where(by_mass, jnp.exp(now), 1.0)
        shift = jnp.uint32(CODE - DIGIT) - jnp.uint32(DIGIT) * i.astype(jnp.uint32)
        tried = [number + (jnp.uint32(digit) << shift) for digit in range(1, 2**DIGIT)]
        parts = [jnp.where(code < limit[:, None, None], weight, 0.0) for limit in tried]
        sums = jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), _add, (2,))  # in one pass
        for limit, of_groups in zip(tried, jax.lax.optimization_barrier(sums), strict=True):
            total = jnp.sum(of_groups, axis=1)
            number, below = (jnp.where(total < target, *x) for x in ((limit, number), (total, below)))
        return number, below

    start = jnp.zeros(target.shape, jnp.uint32), jnp.zeros(target.shape, jnp.float32)
    return jax.lax.fori_loop(0, CODE // DIGIT, find_digit, start)


def _add(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _nth(mask: Array, n: Array) -> Array:
    """Where the nth (from 1) True of each row of [rows, n, size] is, int32; past the end of a row that has fewer."""
    size = mask.shape[2]
    ends = jnp.cumsum(jnp.sum(mask, axis=2, dtype=jnp.int32), axis=1)
    group = jnp.sum(ends < n[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.minimum(group, ends.shape[1] - 1)[:, None]
    counts = jnp.cumsum(jnp.take_along_axis(mask, inside[:, :, None], axis=1)[:, 0], axis=1, dtype=jnp.int32)
    before = jnp.take_along_axis(ends, inside, axis=1) - counts[:, -1:]
    return size * group + jnp.sum(before + counts < n[:, None], axis=1, dtype=jnp.int32)


def _number(top_k: Array, vocab: int) -> Array:
    """How many tokens top_k leaves."""
    return jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)


def _everything(rows: int) -> Cutoff:
    """Behind all tokens."""
    return Cutoff(jnp.full(rows, 2**CODE - 1, jnp.uint32), jnp.zeros(rows, jnp.int32))


def _where(condition: Array, a: Cutoff, b: Cutoff) -> Cutoff:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _ids(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.int32)[None]
