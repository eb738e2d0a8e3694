"""The bytes that a slot of a softmax memory holds, counted from its arrays: of write-gated layers, and of paged ones.

Everything that a slot has is counted: pages, whole ones even where they are filled in part, with their gates; their
owners; and the slot's own integers, such as lists and tables, as long as they were allocated. A page that several
slots share counts for each of them. Null pages and the null slot are nobody's.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jaxbuf.attention.gated_lists import count_pages
from jaxbuf.attention.gated_pages import GatedKV, GatedTable
from jaxbuf.attention.paged_memory import PageTable
from jaxbuf.axes import Array, Int32
from jaxbuf.memory.ownership import Ownership


def gated_slot_bytes(shared: GatedTable, layers: Sequence[GatedKV]) -> np.ndarray:
    """The bytes of each slot in all write-gated layers: int64 [slots], 0 for the null slot.

    Pages that a chunk of a prompt claimed and that hold no key are left out: the next launch gives them back.

    Args:
      shared: What the layers share.
      layers: Each layer's memory.
    """
    local = np.sum(np.asarray(shared.table) > 0, axis=1)
    total = local * _owner_bytes(shared.owners)
    for layer in layers:
        near = layer.keys, layer.values, layer.gates
        far = layer.admitted_keys, layer.admitted_values, layer.admitted_gates
        pages = np.sum(np.asarray(count_pages(layer.counts, layer.page_size)), axis=1)
        total += local * sum(map(_row_bytes, near)) + pages * sum(map(_row_bytes, far))
        total += _row_bytes(layer.lists) + _row_bytes(layer.counts)
        if layer.budget is None:
            total += pages * _owner_bytes(jax.tree.map(lambda x: x[0], shared.admitted))
            total += shared.owned.nbytes // shared.owned.shape[0] // shared.owned.shape[1]
        else:  # a slot's pages are its own for good
            total += sum(map(_row_bytes, jax.tree.leaves(layer.budget)))
    own = shared.table, shared.position, shared.latest, shared.frontier, shared.threshold, shared.surplus
    return _without_null(total + sum(_row_bytes(array) for array in own if array is not None))


def paged_slot_bytes(shared: PageTable, layers: Sequence[object], committed: Int32[Array, "slots"]) -> np.ndarray:
    """The bytes of each slot in all layers that keep every key: int64 [slots], 0 for the null slot.

    Args:
      shared: What the layers share.
      layers: Each layer's memory, `PagedKV` or one of latents, whose arrays all have the pages first.
      committed: How many tokens each slot holds. The pages that these lie on are counted, and not those that a slot
        without shared pages has in reserve.
    """
    pages = -(-np.asarray(committed, np.int64) // shared.page_size)
    total = pages * (0 if shared.owners is None else _owner_bytes(shared.owners))
    for layer in layers:
        total += pages * sum(map(_row_bytes, jax.tree.leaves(layer)))
    own = shared.table, shared.order
    return _without_null(total + sum(_row_bytes(array) for array in own if array is not None))


def _row_bytes(array: Array) -> int:
    """Of one page of a pool, or of one slot's entries."""
    return array.nbytes // array.shape[0]


def _owner_bytes(owners: Ownership) -> int:
    """What a page's ownership takes."""
    return _row_bytes(owners.owners) + _row_bytes(owners.free)


def _without_null(total: np.ndarray) -> np.ndarray:
    total = np.array(total, np.int64)
    total[0] = 0
    return total
