"""Checks of the integers that every memory is given: its sizes, and the slots of a launch.

Values are checked where they are known. Under jit they are not: what would be an error then writes nothing instead.
"""

from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Int, Int32, Shaped

MOST = 2**30  # of any size; what sizes make together is numbered by int32


def check_sizes(*, least: int = 1, most: int = MOST, **sizes: object) -> None:
    """Raises a ValueError that names the first of the sizes that is not a whole number in [least, most].

    numpy's integers are whole numbers; True, 1.0 and "1" are not.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise ValueError(f"{name} must be a whole number, got {size!r}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        if size > most:
            raise ValueError(f"{name} must be at most {most}, got {size}")


def check_range(
    name: str, values: object, low: int | Int[Array, "..."], high: int | Int[Array, "..."] | np.ndarray
) -> None:
    """Raises a ValueError unless all `values` (integers [rows]) lie in [low, high], where they are known.

    Args:
      name: Of the argument.
      values: What was given for it.
      low, high: The least and the most, one number or one a row.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (values, low, high)):
        return
    given = np.asarray(values)
    least, most = (np.broadcast_to(np.asarray(x), given.shape) for x in (low, high))
    wrong = (given < least) | (given > most)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"{name} must be in [{least[row]}, {most[row]}], got {given[row]} at row {row}")


def check_rows(name: str, array: Shaped[Array, "..."], rows: int) -> None:
    """Raises a ValueError unless `array` is an integer vector with one number a row."""
    if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be int32 [{rows}], one number a row, got {array.dtype} {array.shape}")


def checked_slots(slots: object, count: int, *, name: str = "slots", once: bool = False) -> Int32[Array, "rows"]:
    """The slots of a launch's rows, all of them in [0, count).

    Args:
      slots: integers [rows], physical slots; 0 is null.
      count: How many there are, the null slot included.
      name: Of the argument, for errors.
      once: Whether each slot but the null one may be in one row only. See `distinct_slots` for what is not known.

    Returns:
      The slots. Under jit a slot out of range becomes 0, so that its row reads zeros and writes nothing: an index that
      is negative or past the end would be another slot's.

    Raises:
      ValueError: Not a vector of integers; or, where the values are known, a slot is out of range or repeated.
    """
    known = not isinstance(slots, jax.core.Tracer)
    given = np.asarray(slots) if known else jnp.asarray(slots)
    if given.ndim != 1 or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"{name} must be int32 [rows], got {given.dtype} {given.shape}")
    if not known:
        return jnp.where((given >= 0) & (given < count), given, jnp.zeros_like(given)).astype(jnp.int32)
    check_range(name, given, 0, count - 1)
    if once:
        _refuse_repeated(name, np.asarray(given))
    return cast(Array, np.asarray(given, np.int32))  # known under jit, too: see `jaxbuf.memory.sequences.put`


def distinct_slots(slots: object, count: int, *, name: str = "slots") -> Int32[Array, "rows"]:
    """`checked_slots` for functions that take rows of a pool or give them back, which may be done once a slot.

    Under jit the first row of a slot counts; later rows of the same slot become rows of slot 0.

    Raises:
      ValueError: As in `checked_slots` with `once`.
    """
    checked = checked_slots(slots, count, name=name, once=True)
    return first_rows(checked) if isinstance(slots, jax.core.Tracer) else checked


def first_rows(slots: Int32[Array, "rows"]) -> Int32[Array, "rows"]:
    """Each slot in its first row, and 0 in later rows of the same slot."""
    row = jnp.arange(slots.shape[0], dtype=jnp.int32)
    earlier = (slots[:, None] == slots[None]) & (row[None] < row[:, None])
    return jnp.where(jnp.any(earlier, axis=1), 0, slots)


def checked_fork(source: object, target: object, count: int) -> tuple[Int32[Array, "rows"], Int32[Array, "rows"]]:
    """The slots that a fork reads and writes.

    Args:
      source, target: integers [rows], physical slots.
      count: How many slots there are, the null slot included.

    Returns:
      source and target, with target 0 in rows that are left out: where one of the two is 0, and where both are the same
      slot. Under jit also where a slot is out of range, and in later rows of a target.

    Raises:
      ValueError: The two are not as long as each other; or, where the values are known, a slot is out of range, or one
        is the target of two rows.
    """
    known = not isinstance(source, jax.core.Tracer) and not isinstance(target, jax.core.Tracer)
    # Slots that are known and all different stay so when rows are left out.
    different = not isinstance(target, jax.core.Tracer) and not _repeated(np.asarray(target)).any()
    source = checked_slots(source, count, name="source")
    target = checked_slots(target, count, name="target")
    if source.shape != target.shape:
        raise ValueError(f"target must be int32 [{source.shape[0]}], one for each source, got shape {target.shape}")
    target = jnp.where((source > 0) & (source != target), target, 0)
    if known and not isinstance(target, jax.core.Tracer):
        _refuse_repeated("target", np.asarray(target))
    return source, target if different else first_rows(target)


def _repeated(slots: np.ndarray) -> np.ndarray:
    """The slots but the null one that are in more than one row."""
    values, counts = np.unique(slots, return_counts=True)
    return values[(counts > 1) & (values > 0)]


def _refuse_repeated(name: str, slots: np.ndarray) -> None:
    repeated = _repeated(slots)
    if repeated.size:
        rows = int(np.sum(slots == repeated[0]))
        raise ValueError(f"{name} must have each slot once, got slot {repeated[0]} in {rows} rows")
