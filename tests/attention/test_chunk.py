"""Attention of chunks of prompts, in parts that are merged, against float64; XLA's flash attention stands in for the
kernel's. And that a program for an H100 calls the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.chunk import attend_parts
from jaxbuf.attention.flash import flash
from jaxbuf.attention.paged import PagedKV, append
from jaxbuf.attention.paged_launch import AT_ONCE, append_and_attend
from jaxbuf.pallas.attend import gpu_parts
from tests.attention.launches import Sizes, make_launch, worst_error

PIECE = 40  # tokens: not in whole pages


def unspecified(q, k, v, *, causal=False, lengths=None):
    """`flash`, with NaN where a kernel may give anything: in rows that have no key."""
    out, lse = flash(q, k, v, causal=causal, lengths=lengths)
    if lengths is None:
        return out, lse
    some = lengths > 0
    return jnp.where(some[:, None, None, None], out, jnp.nan), jnp.where(some[:, None, None], lse, jnp.nan)


def in_parts(launch, **how):
    q, k, v, kv, table = launch.arrays
    kv = append(kv, table, k, v, **launch.integers)
    return attend_parts(unspecified, q, k, v, kv, table, **launch.integers, **how), kv


@pytest.mark.slow
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 8e-3)])
def test_parts_of_a_softmax_merge_to_that_of_float64(rng, dtype, bound, order):
    """Rows behind nothing, less than a piece, whole pieces and several; rows with fewer tokens, or none; null slots;
    places out of order; NaN wherever nothing live lies."""
    lengths = (9, 0, 130, PIECE, 2 * PIECE - 1)
    sizes = Sizes(lengths, 21, 4, 2, 16, trees=order, in_a_row=True, dtype=dtype)
    launch = make_launch(rng, sizes)
    out, kv = in_parts(launch, piece=PIECE)
    assert worst_error(out, launch) <= bound
    assert np.asarray(kv.keys).tobytes() == np.asarray(launch.pool.keys).tobytes()
    assert not np.asarray(out, np.float32)[~launch.real].any()


def test_a_chunk_behind_nothing_is_attention_in_float64(rng):
    launch = make_launch(rng, Sizes((0, 0, 0, 0, 0), 21, 4, 2, 16, dtype="float32"))
    assert worst_error(in_parts(launch, piece=PIECE)[0], launch) <= 1e-5


@pytest.mark.parametrize("order", [False, True])
def test_without_a_kernel_a_chunk_is_attention_in_float64(rng, order):
    launch = make_launch(rng, Sizes((9, 0, 130, 40, 79), 21, 4, 2, 16, trees=order, in_a_row=True, dtype="float32"))
    out, kv = append_and_attend(*launch.arrays, **launch.integers)
    assert worst_error(out, launch) <= 1e-5
    assert np.asarray(kv.values).tobytes() == np.asarray(launch.pool.values).tobytes()


def test_flash_attention_over_some_keys_is_that_of_float64(rng):
    """More queries than a block has; rows that see all keys, some, and none."""
    q, k, v = (rng.standard_normal((3, n, h, 8)).astype(np.float32) for n, h in ((300, 4), (50, 2), (50, 2)))
    lengths = np.array([50, 7, 0], np.int32)
    out, lse = jax.jit(flash)(q, k, v, lengths=lengths)
    for row, length in enumerate(lengths):
        keys, values = (np.repeat(x[row, :length].astype(np.float64), 2, axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->ths", q[row], keys) / np.sqrt(8)
        total = np.exp(scores).sum(axis=-1)
        wanted = np.einsum("ths,shd->thd", np.exp(scores), values) / np.maximum(total, 1e-30)[..., None]
        np.testing.assert_allclose(out[row], wanted, atol=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[row], np.log(total).T, atol=1e-5)


def shapes(rows, time, heads=16, kv_heads=4, head_dim=256, *, max_pages=64, order=False, tree=False, dtype="bfloat16"):
    def make(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pages = make(1 + rows * max_pages, 16, kv_heads, head_dim, dtype=dtype)
    where = {name: make(rows) for name in ("slots", "start", "lengths")}
    where |= {"order": make(rows + 1, 16)} if order else {}
    where |= {"ancestors": make(rows, time, time, dtype="bool")} if tree else {}
    inputs = [make(rows, time, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    return *inputs, PagedKV(pages, pages), make(rows + 1, max_pages), where


def traced(given, **how):
    def step(q, k, v, kv, table, where):
        return append_and_attend(q, k, v, kv, table, **where, **how)

    return jax.jit(step, donate_argnums=3).trace(*given)


def calls(traced) -> list[str]:
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "f64" not in text
    return [line.split("mask_type")[1].split(",")[0].strip('\\": 2') for line in text.splitlines() if "cudnn$" in line]


@pytest.mark.parametrize("order", [False, True])
def test_a_cpu_lowers_a_chunk_for_an_h100_with_the_kernels_calls(order):
    given = shapes(2, 512, order=order)
    for how in ({"target": "H100"}, {"target": "H200", "implementation": "gpu"}):
        assert calls(traced(given, **how)) == ["CAUSAL", "PADDING"]
    for how in ({}, {"target": "cpu"}, {"target": "v6e"}, {"target": "H100", "implementation": "xla"}):
        assert calls(traced(given, **how)) == []
    assert len(calls(traced(shapes(2, 64, head_dim=128), target="A100"))) == 2


def test_the_kernel_is_called_from_more_tokens_on_than_decoding_has():
    assert gpu_parts.MOST_TOKENS == AT_ONCE
    assert len(calls(traced(shapes(2, AT_ONCE + 1), target="H100"))) == 2
    assert calls(traced(shapes(2, AT_ONCE), target="H100")) == []


@pytest.mark.parametrize(
    "change, target, reason",
    [
        ({"dtype": "float32"}, "H100", "q, k and v in bfloat16 or float16, all in one, got float32, float32, float32"),
        ({"head_dim": 264}, "H100", "head_dim a multiple of 8, at most 256 on Hopper GPUs, got 264"),
        ({"head_dim": 256}, "A100", "head_dim a multiple of 8, at most 128 on Ampere GPUs, got 256"),
        ({"tree": True}, "H100", "tokens in a row, got a tree"),
    ],
)
def test_what_the_kernel_can_not_serve_is_xlas_or_an_error_that_says_why(change, target, reason):
    given = shapes(2, 64, **change)
    assert calls(traced(given, target=target)) == []
    with pytest.raises(ValueError, match=f"can not serve this attend_chunk: it needs {reason}"):
        traced(given, target=target, implementation="gpu")


def test_whole_sequences_and_their_gradient_call_the_kernel():
    q, k = (jax.ShapeDtypeStruct((2, 128, heads, 256), jnp.bfloat16) for heads in (16, 4))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def gradients(q, k, v, lengths, **how):
        def summed(*inputs):
            return jnp.sum(causal_attention(*inputs, lengths=lengths, **how).astype(jnp.float32))

        return jax.grad(summed, argnums=(0, 1, 2))(q, k, v)

    def text(**how):
        run = jax.jit(lambda *inputs: gradients(*inputs, **how)).trace(q, k, k, lengths)
        return run.lower(lowering_platforms=("cuda",)).as_text()

    for how in ({"target": "H100"}, {"target": "H100", "implementation": "gpu"}):
        assert text(**how).count("@__cudnn$fmhaSoftmax(") == text(**how).count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert "cudnn" not in text() and "cudnn" not in text(target="A100")
    with pytest.raises(ValueError, match=r"this causal_attention: .* at most 128 on Ampere GPUs, got 256"):
        text(target="A100", implementation="gpu")
