"""Random launches on pages, and what they give in float64: any lengths, null slots, trees, NaN where nothing is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbuf.attention.paged import PagedKV

MANY = 40  # committed tokens of the rows of which `mean_error` tells
AS_ROUNDED = 1.1  # times `rounding_error` a kernel may be off; it is 1.25 times where weights are rounded, too
LISTED = 16  # places in a slot's list of next tokens, where launches are trees


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a launch; `lengths` are the committed tokens of each row, of which the first has the null slot. `trees`: the
    places of next tokens are out of order; unless they are `in_a_row`, the tokens are a tree, too."""

    lengths: tuple[int, ...]
    time: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    trees: bool = False
    in_a_row: bool = False
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The arguments of `append_and_attend`, and what it gives: out float64, and the pool bit for bit; `real` bool
    [rows, time] says of which queries."""

    arrays: tuple[Any, ...]
    integers: dict[str, Any]
    out: np.ndarray
    real: np.ndarray
    pool: PagedKV


def make_launch(
    rng: np.random.Generator,
    sizes: Sizes,
    attend: Callable[..., np.ndarray] | None = None,
    value_dim: int | None = None,
) -> Launch:
    """A random launch; `attend` gives a query's output [heads, value_dim] as `attention` does, which it is if None."""
    attend = attention if attend is None else attend
    rows, time, size = len(sizes.lengths), sizes.time, sizes.page_size
    start, dtype = np.array(sizes.lengths), jnp.dtype(sizes.dtype)
    max_pages = -(-(int(start.max()) + max(LISTED, time)) // size) + 1
    own = rng.permutation(np.arange(1, 1 + rows * max_pages)).reshape(rows, max_pages)
    table = np.concatenate([np.zeros((1, max_pages), int), own]).astype(np.int32)
    slots = np.concatenate([[0], 1 + rng.permutation(rows)[: rows - 1]])
    lengths = rng.integers(0, time + 1, rows)
    lengths[-1] = time

    def rounded(*shape):
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype))

    pool = [np.full((1 + rows * max_pages, size, sizes.kv_heads, sizes.head_dim), np.nan, dtype) for _ in range(2)]
    q, k, v = (rounded(rows, time, heads, sizes.head_dim) for heads in (sizes.heads, *[sizes.kv_heads] * 2))
    real = (np.arange(time)[None] < lengths[:, None]) & (slots > 0)[:, None]
    k[~real] = v[~real] = np.nan
    order, ancestors = np.tile(np.arange(LISTED, dtype=np.int32), (rows + 1, 1)), np.zeros((rows, time, time), bool)
    out, after = np.zeros((*q.shape[:3], value_dim or sizes.head_dim)), None
    places = []
    for row, slot in enumerate(slots):
        listed = np.arange(start[row], start[row] + LISTED)
        if sizes.trees:  # some places further ahead are committed, and some behind them are open
            last = start[row] + LISTED - 1
            free = np.arange(max(0, last - 30), last)
            listed = np.sort(np.append(rng.choice(free, LISTED - 1, replace=False), last))
        order[slot] = listed if slot else order[slot]
        committed = np.setdiff1d(np.arange(start[row] + LISTED), listed)
        places.append((np.append(listed, np.arange(start[row] + LISTED, start[row] + time)), committed))
        for i in range(time):
            parent = rng.integers(-1, i) if sizes.trees and not sizes.in_a_row else i - 1
            ancestors[row, i] = ancestors[row, parent] if parent >= 0 else False
            ancestors[row, i, i] = True
        if slot:
            for x in pool:
                x[table[slot, committed // size], committed % size] = rounded(
                    len(committed), sizes.kv_heads, sizes.head_dim
                )
    after = [x.copy() for x in pool]
    for row, slot in enumerate(slots):
        listed, committed = places[row]
        for t in range(time):
            if real[row, t]:
                at = table[slot, listed[t] // size], listed[t] % size
                after[0][at], after[1][at] = k[row, t], v[row, t]
        for t in np.flatnonzero(real[row]):
            seen = [j for j in range(time) if ancestors[row, t, j] and real[row, j]]
            at = table[slot, committed // size], committed % size
            keys, values = (
                np.concatenate([x[at], new[row, seen]]).astype(np.float64) for x, new in zip(pool, (k, v), strict=True)
            )
            out[row, t] = attend(q[row, t].astype(np.float64), keys, values)
    arrays = *(jnp.asarray(x) for x in (q, k, v)), PagedKV(*map(jnp.asarray, pool)), jnp.asarray(table)
    integers: dict[str, Any] = {"slots": slots, "start": start, "lengths": lengths}
    integers = {name: jnp.asarray(x, jnp.int32) for name, x in integers.items()}
    if sizes.trees:
        integers["order"] = jnp.asarray(order)
    if sizes.trees and not sizes.in_a_row:
        integers["ancestors"] = jnp.asarray(ancestors)
    return Launch(arrays, integers, out, real, PagedKV(*map(jnp.asarray, after)))


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One query [heads, head_dim] over the keys and values [tokens, kv_heads, head_dim] that it sees."""
    keys, values = (np.repeat(x, q.shape[0] // keys.shape[1], axis=1) for x in (keys, values))
    scores = np.einsum("hd,shd->hs", q, keys) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def error_of_all(out, launch: Launch) -> float:
    """The error of all outputs of real queries together, relative to their norm."""
    found, wanted = np.asarray(out, np.float64)[launch.real], launch.out[launch.real]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def mean_error(out, launch: Launch) -> float:
    """The root mean square of the relative errors of heads' outputs, of real queries in rows of MANY tokens or more:
    with few keys a kernel that rounds weights hardly differs from one that does not."""
    real = launch.real & (np.asarray(launch.integers["start"]) >= MANY)[:, None]
    return float(np.sqrt(np.mean(_head_errors(np.asarray(out, np.float64), launch, real) ** 2)))


def rounding_error(launch: Launch) -> float:
    """`mean_error` of the exact outputs, rounded to the dtype of the launch's queries."""
    return mean_error(jnp.asarray(launch.out, launch.arrays[0].dtype), launch)


def worst_error(out, launch: Launch) -> float:
    """The largest error of a head's output of a real query, relative to its norm; outputs of the null slot are zeros,
    and none is NaN."""
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all(), "an output is not finite"
    assert not found[np.asarray(launch.integers["slots"]) == 0].any(), "the null slot's outputs are not zeros"
    return float(np.max(_head_errors(found, launch, launch.real)))


def _head_errors(found: np.ndarray, launch: Launch, real: np.ndarray) -> np.ndarray:
    """The error of each head's output of the queries that are `real`, relative to its norm."""
    wanted = launch.out[real]
    return np.linalg.norm(found[real] - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
