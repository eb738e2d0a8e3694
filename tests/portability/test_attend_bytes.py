"""The bytes that the TPU kernels of softmax attention move, counted in the interpreter, against what must be moved."""

from unittest import mock

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.pallas.attend.tpu_pages import TokenTiles
from tests.attention.launches import Sizes, make_launch
from tests.portability.dma import count_dma_bytes

ROWS = (9, 1003, 517, 700)  # committed tokens; the first row has the null slot


def least_bytes(launch):
    """Queries and outputs; the keys and values of committed tokens; of new ones, read and written."""
    q, k, v, *_ = launch.arrays
    token = (k.nbytes + v.nbytes) // (k.shape[0] * k.shape[1])
    asked = np.asarray(launch.integers["slots"]) * np.asarray(launch.integers["lengths"]) > 0
    committed = int(np.asarray(launch.integers["start"])[asked].sum())
    return 2 * q.nbytes + token * (committed + k.shape[0] * k.shape[1] + int(launch.real.sum()))


def moved_share(launch):
    how = {"implementation": "tpu", "interpret": pltpu.InterpretParams(dma_execution_mode="eager")}
    moved, _ = count_dma_bytes(lambda: append_and_attend(*launch.arrays, **launch.integers, **how))
    return moved.bytes / least_bytes(launch)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(ROWS, 1, 32, 8, 128),
        Sizes(ROWS, 5, 16, 4, 256, trees=True),
        # Where tokens share tiles, eight tokens are read and written for each that is appended.
        Sizes((9, 1800, 900, 1301), 1, 4, 1, 128, page_size=64),
    ],
)
def test_attention_moves_what_it_must_and_little_more(rng, sizes):
    assert moved_share(make_launch(rng, sizes)) <= 1.05


def test_whole_pages_would_be_too_many_bytes(rng):
    sizes = Sizes((9, 130, 70, 200), 1, 4, 2, 128, page_size=64)
    launch = make_launch(rng, sizes)
    assert moved_share(launch) <= 1.05
    with mock.patch.object(TokenTiles, "least", 64):
        assert moved_share(launch) > 1.1
