"""Windows on values of heads that are no whole bands, which the GPU kernel of `extend` serves like heads: every value
is one window's, and every row has its own head's decay. What comes of them is in test_extend.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.extend import gpu
from jaxbuf.pallas.extend.call import Call
from jaxbuf.pallas.extend.gpu_schedule import BAND, arrange

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
# A step of Nemotron-3-Nano-4B with 256 rows.
NANO = Call(256, 1, 96, 8, 128, 80, 24, 8, F32, BF16, BF16, BF16, delta=False)
SPLIT = {"state": BF16, "low": BF16}


def sizes():
    """(values of a head, heads of a key head) of which a key head has whole bands."""
    for value_dim in (72, 80, 96, 112, 120, 144, 160, 176, 224, 328):
        yield from ((value_dim, heads) for heads in (2, 4, 6, 8, 12) if value_dim * heads % BAND == 0)


def test_every_value_is_one_windows_and_has_its_own_head(monkeypatch):
    monkeypatch.setattr(gpu, "_pays", lambda wide, narrow: True)
    kinds = set()
    for value_dim, per_key in sizes():
        of_key, key_heads = value_dim * per_key, 2
        call = dataclasses.replace(NANO, heads=key_heads * per_key, key_heads=key_heads, value_dim=value_dim)
        for found in (gpu.window(call), gpu.window(call, wide=True)):
            if found.head_values % found.value_dim == 0:
                continue
            owned = np.zeros(key_heads * of_key, np.int32)
            for stack in range(found.heads):
                first = int(found.first_value(stack))
                values = first + np.arange(found.value_dim)
                assert first % BAND == 0 and np.all(values // of_key == stack // found.heads_per_key)
                ends = found.first_rows(stack) + found.head_rows * np.arange(found.stacked)
                number = np.searchsorted(np.asarray(ends), np.arange(found.value_dim), side="right")
                assert np.all(number < found.stacked), "rows of more heads than are stacked"
                heads = np.asarray([int(found.head(stack, i)) for i in range(found.stacked)])
                np.testing.assert_array_equal(heads[number], values // value_dim)
                owned[values[int(found.first_own(stack)) :]] += 1
            assert np.all(owned == 1)
            assert found.all_heads == call.heads
            kinds.add((found.value_dim, found.stacked, bool(found.key_values)))
    assert {(64, 2, False), (128, 3, False), (128, 3, True), (128, 2, True)} <= kinds


@pytest.mark.parametrize("state", [{}, SPLIT, SPLIT | {"low": np.dtype(np.int8)}], ids=["float32", "split", "split8"])
@pytest.mark.parametrize("time, tree", [(1, False), (5, False), (16, False), (16, True)])
def test_wide_windows_are_taken_where_they_cost_no_lane_and_there_is_work(state, time, tree):
    for rows, entry in ((1, BF16), (8, BF16), (64, F32), (256, BF16)):
        kinds = {"entry": entry, "probe": entry, "time": time, "tree": tree, "ring": 48, "max_pending": 16}
        call = dataclasses.replace(NANO, rows=rows, **kinds, **state)
        found, narrow = arrange(gpu.stack(call)), arrange(gpu.window(call))
        held = [each.warpgroups * each.call.value_dim for each in (found, narrow)]
        assert held[0] >= held[1] and (found.warpgroups >= 2 or narrow.warpgroups == 1)
        assert found.later_size == narrow.later_size, "a fold's sums have another order"
        if found.call.value_dim > BAND:
            assert found.call.items >= 2 * found.lanes
    assert gpu.stack(dataclasses.replace(NANO, **state)).value_dim == 2 * BAND
    assert gpu.stack(dataclasses.replace(NANO, rows=8, **state)).value_dim == BAND
    assert gpu.stack(dataclasses.replace(NANO, time=16, tree=True, ring=32, max_pending=16)).value_dim == BAND
