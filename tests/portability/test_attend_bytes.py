"""The bytes that the TPU kernels of softmax attention move, counted in the interpreter, against what must be moved."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.attention import gated
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


def test_gated_attention_moves_what_it_must_and_little_more(rng):
    """Lists of which each head has another length, and the latest tokens, behind a prompt; then one new token a row."""
    rows, heads, kv_heads, head_dim, time = 2, 16, 4, 128, 900
    how = {"slots": rows, "kv_heads": kv_heads, "head_dim": head_dim, "max_pending": 8, "window": 128}
    cache = gated.init(**how, pages=rows * kv_heads * 60, page_size=16, dtype=jnp.bfloat16)
    where = {"slots": np.array([2, 1]), "threshold": 0.1}

    def drawn(time):
        of = heads, kv_heads, kv_heads
        q, k, v = (jnp.asarray(rng.standard_normal((rows, time, n, head_dim)), jnp.bfloat16) for n in of)
        return q, k, v, jnp.asarray(rng.uniform(size=(rows, time, kv_heads)) ** 1.2, jnp.float32)

    _, cache = gated.prefill(cache, *drawn(time), **where, lengths=np.array([time, 700]))
    by = {"implementation": "tpu", "interpret": pltpu.InterpretParams(dma_execution_mode="eager")}
    given = drawn(1)
    moved, (_, after) = count_dma_bytes(lambda: gated.extend(cache, *given, **where, **by))
    listed = int(after.layer.counts.sum())
    committed, frontier = (np.asarray(x)[1:] for x in (cache.sequences.committed, after.shared.frontier))
    latest = kv_heads * int((committed - frontier).sum())
    token = 2 * 2 * head_dim  # bytes of a head's key and value
    least = token * (listed + latest + rows * kv_heads) + 2 * given[0].nbytes
    assert least < moved.bytes <= 1.05 * least, (moved.bytes / least, listed, latest)
