"""The kernel of `append_and_attend`: it lowers for its platform at the real sizes, and computes what float64 does."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from jaxbuf.attention.kernel_integers import divide_blocks
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.pallas.attend import gpu, tpu, tpu_call
from tests.attention.launches import Sizes, make_launch, worst_error
from tests.pallas.attending import BOUNDS, CASES, EARLY, LATE
from tests.pallas.own_process import lines_of

TPU_CASES = [
    (True, Sizes((9, 0, 64, 330), 1, 4, 2, 64)),
    (LATE, Sizes((9, 1, 63, 350), 5, 8, 2, 64, page_size=8, trees=True, dtype="float32")),
    (EARLY, Sizes((9, 200, 140), 2, 4, 4, 256, page_size=32, trees=True)),
    (LATE, Sizes((9, 70, 129), 16, 16, 8, 128, trees=True, in_a_row=True)),
    (LATE, Sizes((9, 0, 63, 200), 9, 4, 1, 128, trees=True)),  # tokens share tiles, as in the next ones
    pytest.param(
        EARLY, Sizes((9, 0, 64, 130), 4, 6, 3, 128, page_size=8, trees=True, dtype="float32"), marks=pytest.mark.slow
    ),
]


def shapes(rows, time, heads, kv_heads, head_dim, *, max_pages=68, trees=False, dtype=jnp.bfloat16):
    def make(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = make(1 + rows * max_pages, 16, kv_heads, head_dim, dtype=dtype)
    inputs = [make(rows, time, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    where = {name: make(rows) for name in ("slots", "start", "lengths")}
    if trees:
        where |= {"order": make(rows + 1, 16), "ancestors": make(rows, time, time, dtype=jnp.bool_)}
    return *inputs, PagedKV(pages, pages), make(rows + 1, max_pages), where


def step(q, k, v, kv, table, where, **how):
    return append_and_attend(q, k, v, kv, table, **where, **how)


@pytest.mark.parametrize("n", range(1, 65))
def test_a_copy_brings_all_rows_of_an_item(n):
    """The copy engine counts rows within a tile of eight, and what is beyond its last one is zeros."""
    starts = gpu.pitch(n) * np.arange(9)
    assert np.all((starts % 8 == 0) | (starts % 8 + n <= 8))
    rows = gpu.item_rows(jnp.ones((9, n, 64)), False)
    assert rows.shape[0] % 8 == 0 and rows.shape[0] >= starts[-1] + n


def test_queries_of_one_token_are_taken_as_they_lie():
    q, k = (jax.ShapeDtypeStruct((256 * 4, n, 256), jnp.bfloat16) for n in (4, 1))
    jaxpr = str(jax.make_jaxpr(lambda q, k: (gpu.item_rows(q, False), gpu.item_rows(k, False)))(q, k))
    assert "pad" not in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, trees",
    [
        ((128, 1, 16, 4, 256), False),
        ((8, 16, 16, 4, 256), True),
        ((64, 5, 32, 8, 128), True),
        ((2, 16, 16, 2, 64), False),
    ],
)
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(sizes, trees):
    traced = jax.jit(lambda *given: step(*given, target="H100"), donate_argnums=3).trace(*shapes(*sizes, trees=trees))
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == 2
    assert lowered.count("output_operand_alias<output_tuple_indices") >= 2, "keys and values, in place"


@pytest.mark.slow
def test_the_gpu_kernel_is_attention_in_float64():
    assert len(lines_of("tests/pallas/attending.py")) == len(CASES)


@pytest.mark.parametrize("trees", [False, True])
def test_xlas_path_is_attention_in_float64(rng, trees):
    launch = make_launch(rng, Sizes((9, 0, 64, 130), 3, 4, 2, 16, trees=trees, dtype="float32"))
    out, kv = append_and_attend(*launch.arrays, **launch.integers)
    assert worst_error(out, launch) <= 1e-5
    np.testing.assert_array_equal(kv.keys, launch.pool.keys)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("workers", [1, 5, 264])
def test_workers_share_all_blocks_equally(rng, workers, alike):
    blocks, heads = rng.integers(1, 30, 7), 3
    shares, joins = map(np.asarray, divide_blocks(jnp.asarray(blocks, jnp.int32), heads, workers, alike=alike))
    units = [(row, head, block) for row in range(7) for head in range(heads) for block in range(blocks[row])]
    read, at = [[] for _ in range(workers)], 0
    for worker, (row, head, block, count, segments) in enumerate(shares):
        if count:
            assert units[at] == (row, head, block)
            read[worker] = units[at : at + count]
            assert len({unit[:2] for unit in read[worker]}) == segments
        at += count
    assert at == len(units)
    counts, most = shares[shares[:, 3] > 0, 3], -(-len(units) // workers)
    assert (counts[:-1] == most).all() and counts[-1] <= most if alike else counts.max() - counts.min() <= 1
    by_item = {}
    for worker, its in enumerate(read):
        for row, head, _ in its:
            by_item.setdefault(row * heads + head, []).append(worker)
    shared = {item: (min(its), max(its)) for item, its in by_item.items() if min(its) < max(its)}
    assert {item: (first, last) for item, first, last in joins if item >= 0} == shared
    assert all(joins[first + 1, 0] == item for item, (first, _) in shared.items())


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": jnp.float32}, "pages in bfloat16 or float16, got float32"),
        ({"head_dim": 96}, "head_dim 64, 128 or 256, got 96"),
        ({"heads": 64, "time": 5}, "tokens · heads / kv_heads at most 128, got 5 · 32"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(change, reason):
    sizes = {"rows": 2, "time": 1, "heads": 4, "kv_heads": 2, "head_dim": 64} | change
    given = shapes(**sizes)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda *given: step(*given, implementation="gpu", target="H100"), *given)


@pytest.mark.parametrize("how, sizes", TPU_CASES)
def test_the_tpu_kernel_is_attention_in_float64(rng, how, sizes):
    launch = make_launch(rng, sizes)
    out, kv = append_and_attend(*launch.arrays, **launch.integers, implementation="tpu", interpret=how)
    assert worst_error(out, launch) <= (BOUNDS | {"float32": 1e-5})[sizes.dtype]
    assert how is True or not interpreter.races.races_found
    same_pages(kv, launch.pool)
    if sizes.dtype == "float32":
        defined, _ = append_and_attend(*launch.arrays, **launch.integers, implementation="xla")
        real = launch.real[..., None, None]
        np.testing.assert_allclose(np.where(real, out, 0), np.where(real, defined, 0), rtol=0, atol=1e-5)


def same_pages(found, expected):
    for x, y in ((found.keys, expected.keys), (found.values, expected.values)):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_tpu_kernel_gives_what_xla_gives_where_pages_are_missing(rng, kv_heads):
    """A page among those of committed tokens, and the last ones, of which a new token wants one; a slot that is full;
    a slot that does not exist."""
    launch = make_launch(rng, Sizes((9, 40, 21, 30, 77), 3, 4, kv_heads, 64, page_size=8, dtype="float32"))
    q, k, v, kv, table = launch.arrays
    slots = launch.integers["slots"]
    table = table.at[slots[1], 2].set(0).at[slots[2], 2:].set(0)
    start = launch.integers["start"].at[3].set(8 * table.shape[1] - 1)
    where = launch.integers | {"start": start, "lengths": jnp.full(5, 3, jnp.int32)}
    clean = [jnp.where(jnp.isnan(x), 0.5, x) for x in (q, k, v)]
    kv = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0.25, x), kv)
    by = {"tpu": {"interpret": LATE}, "xla": {}}
    found, expected = (
        jax.jit(
            lambda where, name=name, how=how: append_and_attend(*clean, kv, table, **where, implementation=name, **how)
        )(where | {"slots": slots.at[4].set(99)})
        for name, how in by.items()
    )
    assert not interpreter.races.races_found
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    same_pages(found[1], expected[1])


@pytest.mark.parametrize("how", [LATE, EARLY])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_tpu_kernel_waits_for_its_copies_and_stays_in_bounds(rng, how, kv_heads):
    """Two cores share the rows, and blocks are small, so that many are in flight."""
    sizes = Sizes((9, 0, 40, 17, 33, 0, 50), 2, 4, kv_heads, 64, page_size=8, trees=True, in_a_row=True)
    launch = make_launch(rng, sizes)
    named = {"implementation": "tpu", "interpret": dataclasses.replace(how, num_cores_or_threads=2), "target": "v4"}
    with mock.patch.multiple(tpu_call, LEAST_KEYS=16, MOST_KEYS=16):
        out, kv = append_and_attend(*launch.arrays, **launch.integers, **named)
    assert worst_error(out, launch) <= BOUNDS["bfloat16"]
    same_pages(kv, launch.pool)
    assert not interpreter.races.races_found


def test_tokens_that_are_appended_before_their_row_was_read_are_a_race(rng):
    """The control: the TPU kernel does not wait for a row's pages."""
    launch = make_launch(rng, Sizes((9, 40, 17), 1, 2, 2, 64, page_size=8))
    plain = tpu.Core.copy_block

    def hasty(core, unit, start):
        if start:
            plain(core, unit, start)

    with mock.patch.object(tpu.Core, "copy_block", hasty), mock.patch.object(tpu_call, "LEAST_KEYS", 32):
        append_and_attend(*launch.arrays, **launch.integers, implementation="tpu", interpret=EARLY)
    assert interpreter.races.races_found


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": jnp.float16}, "pages in bfloat16 or float32, got float16"),
        ({"head_dim": 96}, "head_dim 64, 128 or 256, got 96"),
        ({"max_pages": 40_000}, "at most 512 KiB of integers, got 2 rows and 40000 pages of a slot"),
        ({"heads": 256, "kv_heads": 128, "head_dim": 256, "time": 16}, "buffers that fit in 16384 KiB of VMEM, got"),
    ],
)
def test_what_the_tpu_kernel_cannot_serve_is_an_error_that_says_why(change, reason):
    sizes = {"rows": 2, "time": 1, "heads": 4, "kv_heads": 2, "head_dim": 64} | change
    given = shapes(**sizes)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda *given: step(*given, implementation="tpu", target="v4"), *given)
    assert jax.eval_shape(lambda *given: step(*given, target="v4"), *given)[0].shape == given[0].shape
