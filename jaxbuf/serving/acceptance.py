"""Which drafts are kept, and the token after them, so that the tokens are distributed as without drafts."""

import jax
import jax.numpy as jnp

from jaxbuf.axes import Array, Bool, Float32, Int32, Key
from jaxbuf.memory.tree import check_parents
from jaxbuf.serving.sampling import Sampling, narrow, noise

UNNORMALISED = 1e-3  # of the logarithm of a sum of probabilities: rounding stays below, at any vocabulary
# Folded into a row's key, it gives the random numbers that decide whether drafts are kept. The key itself draws the
# token, and `draft_keys` folds in the numbers below this one: so none of the three shares random numbers with another.
COINS = 2**32 - 1


def log_distribution(logits: Float32[Array, "rows *n vocab"], sampling: Sampling) -> Float32[Array, "rows *n vocab"]:
    """What `sample` draws from.

    Args:
      logits: As `adjust` leaves them.
      sampling: The settings of each row.

    Returns:
      Log-probabilities after temperature, min_p, top_k and top_p; a greedy row's are 0 at the most probable token and
      -inf elsewhere.
    """
    best = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    greedy = jnp.where(_tokens(logits) == best, 0.0, -jnp.inf)
    sampled = sampling.temperature > 0
    drawn = jax.lax.cond(
        jnp.any(sampled),
        lambda: jax.nn.log_softmax(narrow(logits, sampling), axis=-1),
        lambda: greedy,
    )
    return jnp.where(sampled.reshape(-1, *[1] * (logits.ndim - 1)), drawn, greedy)


def accept(
    target: Float32[Array, "rows places vocab"],
    draft: Float32[Array, "rows drafts vocab"] | None,
    drafts: Int32[Array, "rows drafts"],
    count: Int32[Array, "rows"],
    key: Key[Array, "rows"],
) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
    """Keeps the drafts up to the first that is rejected, and draws the token after them.

    A draft x is kept with probability min(1, p(x) / q(x)), and what follows a rejected one is drawn from max(0, p - q),
    normalised: the tokens are distributed as if each had been drawn from p, whatever the drafts are. On greedy rows
    these are the drafts that equal the most probable token. Without drafts the token is the one that `sample` draws
    (from the same key, and but for rounding).

    Args:
      target: The log-probabilities p after the newest token and after each draft, from `log_distribution`.
      draft: The log-probabilities q that each draft was drawn from; None for drafts that were not drawn, but chosen (q
        is 1 at the draft).
      drafts: After the newest token, in their order.
      count: In [0, drafts], how many of its drafts a row has; what lies past them is not looked at.
      key: From `sampling.keys` at the position after the newest token. The drafts must not have been drawn from the
        same ones, but from `draft_keys`, say.

    Returns:
      accepted, in [0, count], and the token which follows them.

    Raises:
      ValueError: A shape or dtype does not fit.

    Source: Leviathan et al., Fast inference from transformers via speculative decoding (2023), algorithm 1; Chen et
    al., Accelerating large language model decoding with speculative sampling (2023), algorithm 2.
    """
    _check(target, draft, drafts, count, key)
    rows, length = drafts.shape
    if not length:
        return jnp.zeros(rows, jnp.int32), draw(target[:, 0], key)
    log_p = _of(target[:, :-1], drafts)
    log_q = jnp.zeros_like(log_p) if draft is None else _of(draft, drafts)
    kept = passes(log_p, log_q, coins(key, length)) & (jnp.arange(length, dtype=jnp.int32)[None] < count[:, None])
    accepted = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
    row = jnp.arange(rows, dtype=jnp.int32)
    after, first = target[row, accepted], jnp.minimum(accepted, length - 1)
    chosen_from = _point(drafts[row, first], after) if draft is None else draft[row, first]
    left = jnp.where((accepted < count)[:, None], residual(after, chosen_from), after)
    return accepted, draw(left, key)


def accept_tree(
    target: Float32[Array, "rows places vocab"],
    draft: Float32[Array, "rows nodes vocab"] | None,
    drafts: Int32[Array, "rows nodes"],
    parents: Int32[Array, "rows nodes"],
    key: Key[Array, "rows"],
    count: Int32[Array, "rows"] | None = None,
) -> tuple[Int32[Array, "rows nodes"], Int32[Array, "rows"], Int32[Array, "rows"]]:
    """Goes down a tree of drafts, from each kept one to the first kept of its children, and draws the token after them.

    The children of a node are tried in their order. The first is judged as in `accept`; once it is rejected, the next
    is judged by the residual in the place of p, and so on: the tokens are distributed as if each had been drawn from p.

    Args:
      target: The log-probabilities p after the newest token (the root) and after each node, from `log_distribution`.
      draft: The log-probabilities q that each node was drawn from, given the siblings before it: for siblings drawn
        without replacement those have none. None for drafts that were not drawn, but chosen.
      drafts: The nodes' tokens.
      parents: Of a lower index than the node; -1 is the root.
      key: As in `accept`.
      count: How many nodes a row has; what lies past them is not looked at. None: all.

    Returns:
      path, the accepted nodes from the root down, -1 past them; accepted, their number; the token which follows them.

    Raises:
      ValueError: A shape or dtype does not fit, or (where the values are known) a parent is out of range.

    Source: Miao et al., SpecInfer (2023), multi-step speculative sampling; Chen et al., Sequoia (2024), for siblings
    without replacement.
    """
    rows, nodes = drafts.shape if drafts.ndim == 2 else (0, 0)
    count = jnp.full(rows, nodes, jnp.int32) if count is None else count
    _check(target, draft, drafts, count, key)
    parents = check_parents(parents, rows, nodes)
    if not nodes:
        return jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32), draw(target[:, 0], key)
    node = jnp.arange(nodes, dtype=jnp.int32)[None]
    parents = jnp.where(node < count[:, None], parents, nodes)  # past `count` no one's child
    coin = coins(key, nodes)
    if draft is None:
        kept, left = _walk_chosen(target, drafts, parents, coin)
    else:
        kept, left = _walk_drawn(target, draft, drafts, parents, coin)
    return *path_of(kept), draw(left, key)


def path_of(kept: Bool[Array, "rows nodes"]) -> tuple[Int32[Array, "rows nodes"], Int32[Array, "rows"]]:
    """The path (-1 past its end) and its length, of the nodes that were kept."""
    accepted = jnp.sum(kept.astype(jnp.int32), axis=1)
    path = jnp.argsort(~kept, axis=1).astype(jnp.int32)
    index = jnp.arange(kept.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index < accepted[:, None], path, -1), accepted


def _walk_drawn(target: Array, draft: Array, drafts: Array, parents: Array, coin: Array) -> tuple[Array, Array]:
    """Which nodes are kept, bool [rows, nodes], and log-weights [rows, vocab] of the token after them."""

    def visit(state, i):
        at, left = state
        log_q, token = draft[:, i], drafts[:, i, None]
        child = parents[:, i] == at
        log_p_token, log_q_token = (jnp.take_along_axis(x, token, axis=-1)[:, 0] for x in (left, log_q))
        kept = child & passes(log_p_token, log_q_token, coin[:, i])
        tried = jax.nn.log_softmax(residual(left, log_q), axis=-1)
        left = jnp.where(kept[:, None], target[:, i + 1], jnp.where(child[:, None], tried, left))
        return (jnp.where(kept, i, at), left), kept

    rows, nodes = drafts.shape
    start = jnp.full(rows, -1, jnp.int32), target[:, 0]
    (_, left), kept = jax.lax.scan(visit, start, jnp.arange(nodes, dtype=jnp.int32))
    return kept.T, left


def _walk_chosen(target: Array, drafts: Array, parents: Array, coin: Array) -> tuple[Array, Array]:
    """As `_walk_drawn`, of drafts with q = 1: all that a rejected one changes is its own probability, to 0."""
    rows, nodes = drafts.shape
    row, node = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(nodes, dtype=jnp.int32)
    same = (parents[:, :, None] == parents[:, None]) & (drafts[:, :, None] == drafts[:, None])
    again = jnp.any(same & (node[None] < node[:, None])[None], axis=2)
    weight = jnp.where(again, 0.0, jnp.exp(target[row, jnp.minimum(parents, nodes - 1) + 1, drafts]))

    def visit(state, i):
        at, mass = state  # mass: the probability that p has left once those of the rejected children are taken away
        child = parents[:, i] == at
        kept = child & (coin[:, i] * mass < weight[:, i])
        mass = jnp.where(kept, 1.0, jnp.where(child, jnp.maximum(mass - weight[:, i], 0.0), mass))
        return (jnp.where(kept, i, at), mass), kept

    start = jnp.full(rows, -1, jnp.int32), jnp.ones(rows, jnp.float32)
    (at, _), kept = jax.lax.scan(visit, start, node)
    after = target[row[:, 0], at + 1]
    rejected = jnp.where(parents == at[:, None], drafts, after.shape[1])
    left = after.at[row, rejected].set(-jnp.inf, mode="drop")
    return kept.T, jnp.where(jnp.any(left > -jnp.inf, axis=-1, keepdims=True), left, after)


def usable_log_q(
    log_q: Float32[Array, "rows drafts vocab"], drafts: Int32[Array, "rows drafts"]
) -> Float32[Array, "rows drafts vocab"]:
    """What drafts were drawn from, as far as that can be: a draft that can't have been is taken for a chosen one.

    Where log_q is no distribution (NaN, infinite, not normalised), or gives the draft no probability, it becomes 0 at
    the draft and -inf elsewhere: of a draft that was chosen in whatever way, the tokens keep their distribution.

    Args:
      log_q: What the drafter gives for it.
      drafts: The drafts.
    """
    total = jax.nn.logsumexp(log_q, axis=-1)
    drawn = (jnp.abs(total) < UNNORMALISED) & (_of(log_q, drafts) > -jnp.inf)
    return jnp.where(drawn[..., None], log_q, jnp.where(_tokens(log_q) == drafts[..., None], 0.0, -jnp.inf))


def draft_keys(key: Key[Array, "rows"], place: Int32[Array, ""] | int) -> Key[Array, "rows"]:
    """Random keys to draw the drafts of a place from, independent of what `accept` draws from `key`.

    Args:
      key: Of each row.
      place: Which draft, from 0.
    """
    data = jnp.uint32(COINS - 1) - jnp.asarray(place).astype(jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(key, data)


def draw(log_weights: Float32[Array, "rows vocab"], key: Key[Array, "rows"]) -> Int32[Array, "rows"]:
    """A token of each row, from log-weights (need not be normalised) and random keys."""
    # Where all rows are greedy no random numbers are made.
    choices = jnp.any(jnp.sum((log_weights > -jnp.inf).astype(jnp.int32), axis=-1) > 1)
    noisy = jax.lax.cond(choices, lambda: log_weights + noise(key, log_weights.shape[-1]), lambda: log_weights)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def coins(key: Key[Array, "rows"], number: int) -> Float32[Array, "rows {number}"]:
    """Uniform numbers in [0, 1), of keys whose noise draws a token too."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, jnp.uint32(COINS)), (number,)))(key)


def passes(log_p: Float32[Array, "*n"], log_q: Float32[Array, "*n"], coin: Float32[Array, "*n"]) -> Bool[Array, "*n"]:
    """Whether a draft is kept: with probability min(1, p / q) of its own p and q; never one of p = 0."""
    return coin < jnp.exp(jnp.where(log_p > -jnp.inf, log_p - log_q, -jnp.inf))


def residual(log_p: Float32[Array, "*n vocab"], log_q: Float32[Array, "*n vocab"]) -> Float32[Array, "*n vocab"]:
    """Log of max(0, p - q), unnormalised, over the last axis; of p where rounding leaves nothing."""
    above = log_q < log_p
    left = jnp.where(above, log_p + jnp.log(-jnp.expm1(jnp.where(above, log_q - log_p, -1.0))), -jnp.inf)
    return jnp.where(jnp.any(left > -jnp.inf, axis=-1, keepdims=True), left, log_p)


def _point(token: Array, like: Array) -> Array:
    """Log-probabilities [rows, vocab] of the token int32 [rows] alone."""
    return jnp.where(_tokens(like) == token[:, None], 0.0, -jnp.inf)


def _of(log_probabilities: Array, tokens: Array) -> Array:
    """[rows, n] of the tokens int32 [rows, n], from [rows, n, vocab]."""
    return jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1)[..., 0]


def _tokens(like: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


def _check(target: Array, draft: Array | None, drafts: Array, count: Array, key: Array):
    if drafts.ndim != 2 or drafts.dtype != jnp.int32:
        raise ValueError(f"drafts must be int32 [rows, drafts], got {drafts.dtype} {drafts.shape}")
    rows, length = drafts.shape
    vocab = target.shape[-1] if target.ndim else 0
    for name, given, number in (("target", target, length + 1), ("draft", draft, length)):
        if given is not None and (given.shape != (rows, number, vocab) or given.dtype != jnp.float32):
            raise ValueError(f"{name} must be float32 [{rows}, {number}, {vocab}], got {given.dtype} {given.shape}")
    if count.dtype != jnp.int32 or count.shape != (rows,):
        raise ValueError(f"count must be int32 [{rows}], got {count.dtype} {count.shape}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != (rows,):
        raise ValueError(f"key must be random keys [{rows}], got {key.dtype} {key.shape}")
