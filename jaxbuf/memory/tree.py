"""Trees of pending tokens: who precedes whom, and how the accepted path comes first without anything moving."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Int, Int32
from jaxbuf.memory.ownership import NOWHERE


def check_parents(parents: Int[Array, "{rows} {time}"], rows: int, time: int) -> Int32[Array, "{rows} {time}"]:
    """The parents as int32, each below its own index; -1 is the committed tail.

    Raises:
      ValueError: Another shape or dtype, or (where the values are known) a parent out of range. Under jit such a node
        hangs on the committed tail.
    """
    parents = jnp.asarray(parents)
    if parents.shape != (rows, time) or not jnp.issubdtype(parents.dtype, jnp.integer):
        raise ValueError(f"parents must be int32 [{rows}, {time}], got {parents.dtype} {parents.shape}")
    node = np.arange(time, dtype=np.int32)[None]
    if not isinstance(parents, jax.core.Tracer):
        given = np.asarray(parents)
        wrong = np.argwhere((given < -1) | (given >= node))
        if wrong.size:
            row, i = wrong[0]
            raise ValueError(f"parents[:, {i}] must be in [-1, {i - 1}], got {given[row, i]} at row {row}")
    parents = parents.astype(jnp.int32)
    return jnp.where((parents >= 0) & (parents < node), parents, -1)


def ancestors(parents: Int32[Array, "rows time"]) -> Bool[Array, "rows time time"]:
    """At (i, j) whether node j lies on the path from the root to i, i itself included."""
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)
    reach = (node[:, None] == node[None])[None] | (parents[..., None] == node[None, None])
    steps = 1
    while steps < parents.shape[1]:  # each round doubles how far back it reaches
        reach = jnp.any(reach[..., None] & reach[:, None], axis=2)
        steps *= 2
    return reach


def check_path(
    path: Int[Array, "rows n"], accepted: Int32[Array, "rows"], pending: Int32[Array, "rows"], max_pending: int
) -> Int32[Array, "rows n"]:
    """The path as int32; n at most max_pending.

    Raises:
      ValueError: Another shape or dtype, or (where the values are known) one of the first `accepted` nodes is not
        pending, or there twice.
    """
    path, rows = jnp.asarray(path), accepted.shape[0]
    fits = path.ndim == 2 and path.shape[0] == rows and path.shape[1] <= max_pending
    if not fits or not jnp.issubdtype(path.dtype, jnp.integer):
        raise ValueError(f"path must be int32 [{rows}, at most {max_pending}], got {path.dtype} {path.shape}")
    if not any(isinstance(x, jax.core.Tracer) for x in (path, accepted, pending)):
        for row, (nodes, count, there) in enumerate(zip(*map(np.asarray, (path, accepted, pending)), strict=True)):
            if count > path.shape[1]:
                raise ValueError(f"accepted must be at most path's width ({path.shape[1]}), got {count} at row {row}")
            nodes = nodes[:count]
            if (np.diff(nodes) <= 0).any() or (count and (nodes[0] < 0 or nodes[-1] >= there)):
                raise ValueError(f"path must rise within [0, {there - 1}], got {nodes.tolist()} at row {row}")
    return path.astype(jnp.int32)


def path_first(path: Int32[Array, "rows n"], accepted: Int32[Array, "rows"], size: int) -> Int32[Array, "rows {size}"]:
    """The nodes 0 .. size - 1 with the first `accepted` of `path` before the others.

    A permutation whatever `path` says; the others keep their order.
    """
    node = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    place = jnp.arange(path.shape[1], dtype=jnp.int32)[None, None]
    on_path = (path[:, None] == node) & (place < accepted[:, None, None])
    rank = jnp.min(jnp.where(on_path, place, size), axis=2, initial=size)
    return jnp.argsort(jnp.where(rank < size, rank, size + node[..., 0]), axis=1).astype(jnp.int32)


def permute(
    order: Int32[Array, "slots ring"],
    slots: Int32[Array, "rows"],
    first: Int32[Array, "rows"],
    permutation: Int32[Array, "rows n"],
) -> Int32[Array, "slots ring"]:
    """Logical place first + i of each slot's ring takes the ring position of place first + permutation[i].

    Args:
      order: Logical to ring position; places are taken modulo the ring.
      slots, first: Slot 0 is left as it is.
      permutation: At most as wide as the ring.
    """
    index = jnp.arange(permutation.shape[1], dtype=jnp.int32)[None]
    old = (first[:, None] + permutation) % order.shape[1]
    new = (first[:, None] + index) % order.shape[1]
    moved = jnp.take_along_axis(order[slots], old, axis=1)
    return order.at[jnp.where(slots > 0, slots, NOWHERE)[:, None], new].set(moved, mode="drop")
