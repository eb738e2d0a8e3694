"""The bytes of a slot, against a count by hand of what it was given to hold."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.attention import gated
from jaxbuf.attention.gated_bytes import gated_slot_bytes, paged_slot_bytes
from jaxbuf.attention.paged import init_kv
from jaxbuf.attention.paged_memory import init_pages

SIZE, HEADS, DIM, WINDOW, PENDING = 4, 2, 8, 6, 2
LENGTHS, CAPACITY = np.array([29, 3, 17]), 32


def test_whole_pages_of_each_head_and_the_integers_are_counted(rng):
    rows, time = 3, 29
    given = {"kv_heads": HEADS, "head_dim": DIM, "window": WINDOW, "max_pending": PENDING, "page_size": SIZE}
    cache = gated.init(slots=rows, pages=64, dtype=jnp.bfloat16, capacity=CAPACITY, trees=False, **given)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, time, HEADS, DIM)), jnp.float32) for _ in range(3))
    gates = rng.uniform(size=(rows, time, HEADS)).astype(np.float32)
    gates[2, :, 1] = 0.0  # a head that keeps nothing
    slots = jnp.asarray([2, 1, 3], jnp.int32)
    _, cache = gated.prefill(
        cache, q, k, v, jnp.asarray(gates), slots=slots, lengths=jnp.asarray(LENGTHS, jnp.int32), threshold=0.4
    )
    found = gated_slot_bytes(cache.shared, [cache.layer])

    local_columns = -(-(WINDOW + 2 * PENDING - 1) // SIZE) + 1
    owner = 2 * 4  # how many own a page, and its place among the free ones
    near = SIZE * HEADS * (2 * DIM * 2 + 4) + owner
    far = SIZE * (2 * DIM * 2 + 4) + owner
    lists = HEADS * (-(-CAPACITY // SIZE) * 4 + 4 + 4)  # pages, how many keys, how many pages
    integers = local_columns * 4 + local_columns * SIZE * 4 + 4 + 4 + 1  # frontier, threshold, surplus
    for row, slot in enumerate(np.asarray(slots)):
        frontier = max(0, LENGTHS[row] - PENDING - WINDOW + 1)
        kept = (gates[row, :frontier] >= np.float32(0.4)).sum(0)
        local = -(-(LENGTHS[row] - frontier) // SIZE)
        assert found[slot] == local * near + sum(-(-kept // SIZE)) * far + lists + integers
    assert found[0] == 0


def test_a_paged_slot_holds_the_pages_of_its_tokens():
    shared = init_pages(slots=3, capacity=CAPACITY, page_size=SIZE)
    layers = [init_kv(pages=shared.pages, kv_heads=HEADS, head_dim=DIM, dtype=jnp.bfloat16, page_size=SIZE)] * 2
    found = paged_slot_bytes(shared, layers, jnp.asarray([0, *LENGTHS], jnp.int32))
    page, table = SIZE * HEADS * 2 * DIM * 2, CAPACITY // SIZE * 4
    np.testing.assert_array_equal(found, [0, 8 * 2 * page + table, 2 * page + table, 5 * 2 * page + table])
    owned = init_pages(slots=3, capacity=CAPACITY, page_size=SIZE, shares=True)
    more = paged_slot_bytes(owned, layers, jnp.asarray([0, *LENGTHS], jnp.int32))
    np.testing.assert_array_equal(more - found, [0, 8 * 8, 1 * 8, 5 * 8])
