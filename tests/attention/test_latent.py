"""Latent attention against its definition in float64, which makes every key and value: in launches on pages, with NaN
wherever nothing live lies, and over whole sequences."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from jaxbuf.attention import latent, paged
from jaxbuf.attention.latent import LatentPages, append_and_attend_latent, causal_latent_attention, init_latent
from tests.attention.latent_launches import COMMITTED, Dims, definition, random_launch
from tests.attention.launches import worst_error
from tests.pallas.attending import EARLY, LATE
from tests.pallas.attending_latent import CASES as LATENT_CASES
from tests.pallas.own_process import lines_of

SMALL, WIDE = Dims(4, 12, 4, 8, 24), Dims(4, 12, 4, 20, 24)
# In bfloat16 a head of few numbers has errors that vary much: keys and values, or queries and outputs, are rounded once
# more than in attention over pages of keys and values.
LARGE = Dims(2, 64, 32, 64, 128)
CASES = {"float32": (SMALL, 1e-5), "bfloat16": (LARGE, 8e-3)}
TIME = 21  # tokens of a chunk, and of a piece of what is committed


@jax.jit
def run(given, integers):
    # In the program, because it is traced once for each shape.
    with mock.patch.object(latent, "TOKENS", 1):
        return append_and_attend_latent(*given, **integers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "time, kind",
    [
        (1, {}),
        (4, {}),
        (4, {"trees": True}),
        (TIME, {}),
        (TIME, {"trees": True, "in_a_row": True}),
        (TIME, {"trees": True}),
    ],
    ids=["decoding", "drafts", "a tree", "a chunk", "a chunk out of order", "a large tree"],
)
@pytest.mark.parametrize("dtype", CASES)
def test_launches_are_the_definition_in_float64(rng, dtype, time, kind):
    """Rows with fewer tokens, or none, behind nothing and behind several pieces; what is dead is NaN."""
    dims, bound = CASES[dtype]
    launch, given = random_launch(rng, dims, time, dtype, **kind)
    out, pages = run(given, launch.integers)
    assert out.dtype == dtype and worst_error(out, launch) <= bound
    assert np.asarray(pages.latents).tobytes() == np.asarray(launch.pool.keys).tobytes()


@pytest.mark.parametrize(
    "how, dtype, time, kind",
    [
        (LATE, "float32", 3, {"trees": True, "page_size": 8}),
        (EARLY, "bfloat16", 1, {}),
    ],
)
def test_the_tpu_kernel_is_the_definition_in_float64(rng, how, dtype, time, kind):
    dims, bound = CASES[dtype]
    launch, given = random_launch(rng, dims, time, dtype, **kind)
    out, pages = append_and_attend_latent(*given, **launch.integers, implementation="tpu", interpret=how)
    assert out.dtype == dtype and worst_error(out, launch) <= bound
    assert np.asarray(pages.latents).tobytes() == np.asarray(launch.pool.keys).tobytes()
    assert not interpreter.races.races_found


def test_absorbed_is_expanded(rng):
    """Tokens in a row, said as a tree."""
    launch, given = random_launch(rng, SMALL, TIME, trees=True, in_a_row=True)
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((TIME, TIME), bool)), (len(COMMITTED), TIME, TIME))
    expanded, absorbed = (run(given, launch.integers | more)[0][launch.real] for more in ({}, {"ancestors": seen}))
    assert np.any(expanded != absorbed)
    np.testing.assert_allclose(expanded, absorbed, atol=1e-5)


@pytest.mark.parametrize("rejected", [1.0, np.nan, np.inf])
def test_rejected_drafts_leave_no_trace(rng, rejected):
    launch, (q, latents, pages, *rest) = random_launch(rng, SMALL, 4)
    wanted, _ = run((q, latents, pages, *rest), launch.integers)
    everything = launch.integers | {"lengths": jnp.full(len(COMMITTED), 4, jnp.int32)}
    _, pages = run((q, jnp.full_like(latents, rejected), pages, *rest), everything)
    out, _ = run((q, latents, pages, *rest), launch.integers)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims, dtype, bound",
    [(SMALL, "float32", 1e-5), (WIDE, "float32", 1e-5), (LARGE, "bfloat16", 8e-3)],
    ids=["values narrower than keys", "values wider than keys", "bfloat16"],
)
def test_whole_sequences_are_the_definition_in_float64(rng, dims, dtype, bound):
    up, lengths = dims.up(rng, dtype), np.array([30, 7], np.int32)
    q, latents = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((2, 30, dims.heads, dims.query), (2, 30, dims.latent))
    )
    dead = np.arange(30)[None, :, None] >= lengths[:, None, None]
    out = causal_latent_attention(q, jnp.where(dead, jnp.nan, latents), up, lengths=lengths)
    assert out.shape == (2, 30, dims.heads, dims.value_dim) and np.isfinite(out).all()
    for row, length in enumerate(lengths):
        for i in range(length):
            wanted = definition(q[row, i], latents[row, : i + 1], up)
            error = np.linalg.norm(np.asarray(out[row, i], np.float64) - wanted, axis=-1)
            assert (error <= bound * np.linalg.norm(wanted, axis=-1)).all()


def test_a_chunk_with_values_wider_than_keys(rng):
    launch, given = random_launch(rng, WIDE, TIME)
    assert worst_error(run(given, launch.integers)[0], launch) <= 1e-5


def test_gradients_are_those_of_the_definition(rng):
    up, time, key_dim, rank = SMALL.up(rng), 20, SMALL.key_dim, SMALL.rank
    shapes = (1, time, SMALL.heads, SMALL.query), (1, time, SMALL.latent), (1, time, SMALL.heads, SMALL.value_dim)
    q, latents, weigh = (rng.standard_normal(shape) for shape in shapes)

    def plain(q, latents, up):
        made = jnp.einsum("hcr,bnr->bnhc", up, latents[..., :rank])
        scores = jnp.einsum("bthc,bnhc->bhtn", q[..., :key_dim], made[..., :key_dim])
        scores += jnp.einsum("bthc,bnc->bhtn", q[..., key_dim:], latents[..., rank:])
        scores = jnp.where(np.tril(np.ones((1, 1, time, time), bool)), scores / SMALL.query**0.5, -jnp.inf)
        return jnp.einsum("bhtn,bnhc->bthc", jax.nn.softmax(scores), made[..., key_dim:])

    def gradients(function, dtype):
        inputs = [jnp.asarray(np.asarray(x), dtype) for x in (q, latents, up)]
        weighed = jax.grad(lambda *x: jnp.sum(function(*x) * jnp.asarray(weigh, dtype)), argnums=(0, 1, 2))
        return jax.jit(weighed)(*inputs)

    with jax.enable_x64():
        wanted = [np.asarray(x) for x in gradients(plain, jnp.float64)]
    for found, expected in zip(gradients(causal_latent_attention, jnp.float32), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_a_fork_copies_pages_of_latents(rng):
    pages = LatentPages(jnp.asarray(rng.standard_normal((6, 4, 1, SMALL.latent)), jnp.float32), SMALL.rank)
    after = paged.fork(pages, (jnp.asarray([[1, 2]]), jnp.asarray([[2, 9]])))
    np.testing.assert_array_equal(after.latents, pages.latents[np.array([0, 1, 1, 3, 4, 5])])
    assert after.rank == SMALL.rank


@pytest.mark.parametrize("time", [4, TIME])
def test_no_launch_copies_the_pool(time):
    """What a launch needs beside its pool, which is written in place, does not depend on how large that is."""

    def needs(pages):
        given, where = shapes(2, time, SMALL, pages=pages, dtype="float32")
        run = jax.jit(lambda *x: append_and_attend_latent(*x[:-1], **x[-1]), donate_argnums=2).lower(*given, where)
        found = run.compile().memory_analysis()
        assert found.alias_size_in_bytes == given[2].latents.size * 4
        return found.temp_size_in_bytes

    assert needs(2**12) == needs(2**14)


KIMI = Dims(32, 128, 64, 128, 512)


def shapes(rows, time, dims=KIMI, *, pages=65, tree=False, dtype="bfloat16"):
    def make(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    where = {name: make(rows) for name in ("slots", "start", "lengths")}
    where |= {"ancestors": make(rows, time, time, dtype="bool")} if tree else {}
    q, latents = (make(rows, time, *n, dtype=dtype) for n in ((dims.heads, dims.query), (dims.latent,)))
    pool = LatentPages(make(pages, 16, 1, dims.latent, dtype=dtype), dims.rank)
    up = make(dims.heads, dims.key_dim + dims.value_dim, dims.rank, dtype=dtype)
    return (q, latents, pool, up, make(rows + 1, 32)), where


def lowered(given, **how):
    """The program for a GPU, as text."""
    given, where = given
    run = jax.jit(lambda *x: append_and_attend_latent(*x[:-1], **x[-1], **how), donate_argnums=2)
    return run.trace(*given, where).lower(lowering_platforms=("cuda",)).as_text()


def calls(given, **how):
    """The masks of the flash kernel's calls in the program for a GPU."""
    lines = lowered(given, **how).splitlines()
    return [line.split("mask_type")[1].split(",")[0].strip('\\": 2') for line in lines if "cudnn$" in line]


def test_chunks_have_the_targets_flash_kernel():
    assert calls(shapes(2, 64), target="H100") == ["CAUSAL", "PADDING"]
    assert calls(shapes(2, 64), target="H100", implementation="gpu") == ["CAUSAL", "PADDING"]
    for given in (shapes(2, 64, tree=True), shapes(2, 64, dtype="float32")):
        assert calls(given, target="H100") == []
    assert calls(shapes(2, 64), target="A100") == [], "192 numbers are too many there"
    with pytest.raises(ValueError, match="serve this attend_chunk: it needs tokens in a row, got a tree"):
        calls(shapes(2, 64, tree=True), target="H100", implementation="gpu")
    with pytest.raises(ValueError, match=r"serve this attend_chunk: it needs head_dim .* at most 128 .*, got 192"):
        calls(shapes(2, 64), target="A100", implementation="gpu")


@pytest.mark.parametrize(
    "rows, time, heads, trees",
    [
        (128, 1, 32, False),  # Kimi-Linear, Ling 3.0
        pytest.param(64, 5, 32, True, marks=pytest.mark.slow),
        pytest.param(64, 1, 128, False, marks=pytest.mark.slow),  # DeepSeek-V3
        pytest.param(64, 2, 16, False, marks=pytest.mark.slow),  # one of 8 devices
        pytest.param(2, 16, 128, True, marks=pytest.mark.slow),
    ],
)
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(rows, time, heads, trees):
    given, where = shapes(rows, time, dataclasses.replace(KIMI, heads=heads), tree=trees)
    where |= {"order": jax.ShapeDtypeStruct((rows + 1, 16), jnp.int32)} if trees else {}
    text = lowered((given, where), target="H100")
    assert text.count("@mosaic_gpu") == 2, "the kernel, and the one that joins"
    assert text.count("output_operand_alias<output_tuple_indices") >= 2, "the pages and the outputs, in place"


@pytest.mark.slow
def test_the_gpu_kernel_is_the_definition_in_float64():
    assert len(lines_of("tests/pallas/attending_latent.py")) == len(LATENT_CASES)


def test_the_gpu_kernel_is_left_out_where_it_does_not_serve():
    assert "mosaic_gpu" in lowered(shapes(2, 4), target="H100", implementation="gpu")
    for given, how in (
        (shapes(2, 4), {"target": "A100"}),
        (shapes(2, 4), {"target": "H100", "implementation": "xla"}),
        (shapes(2, 4, dtype="float32"), {"target": "H100"}),
        (shapes(2, 16, dataclasses.replace(KIMI, heads=129)), {"target": "H100"}),
    ):
        assert "mosaic_gpu" not in lowered(given, **how)


@pytest.mark.parametrize(
    "change, more, reason",
    [
        ({"rank": 384}, {}, "a rank of 128, 256 or 512, got 384"),
        ({"shared": 128}, {}, "latents of a multiple of 64 and at most 576 numbers, got 640"),
        ({"rank": 256, "shared": 32}, {}, "latents of a multiple of 64 and at most 576 numbers, got 288"),
        ({"heads": 256}, {"time": 9}, r"tokens · heads at most 2048, got 9 · 256"),
        ({}, {"dtype": "float32"}, "pages in bfloat16 or float16, got float32"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(change, more, reason):
    given, where = shapes(**({"rows": 2, "time": 4} | more), dims=dataclasses.replace(KIMI, **change))
    how = {"implementation": "gpu", "target": "H100"}
    with pytest.raises(ValueError, match=f"serve this append_and_attend_latent: it needs {reason}"):
        jax.eval_shape(lambda *x: append_and_attend_latent(*x[:-1], **x[-1], **how), *given, where)


@pytest.mark.parametrize("name", ["pages", "rank", "shared_dim", "page_size"])
def test_sizes_that_make_no_pool(name):
    sizes = {"pages": 2, "rank": 4, "shared_dim": 2, "page_size": 3}
    pages = init_latent(**sizes, dtype=jnp.bfloat16)
    assert pages.latents.shape == (2, 3, 1, 6) and pages.latents.dtype == jnp.bfloat16 and pages.rank == 4
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        init_latent(**(sizes | {name: 0}), dtype=jnp.float32)


def test_what_does_not_fit_is_named(rng):
    launch, (q, latents, pages, up, table) = random_launch(rng, SMALL, 1)
    where = launch.integers
    for change, message in (
        ({"latents": latents[:, :, :-1]}, r"latents must have the pool's 28 numbers a token, got 27"),
        ({"latents": latents[:3]}, r"latents must have q's rows and tokens \(5, 1\), got \(3, 1\)"),
        ({"q": q[..., :3]}, r"latents must have the rank \(24\) and up to q's head_dim \(3\) numbers a token, got 28"),
        ({"up": up[:3]}, r"up must have q's heads \(4\) and the rank \(24\), got shape \(3, 20, 24\)"),
        ({"up": up[..., 1:]}, r"up must have q's heads \(4\) and the rank \(24\), got shape \(4, 20, 23\)"),
        ({"up": up[:, :12]}, r"up must have more than 12 rows a head, those for keys, got 12"),
        ({"up": up.astype(jnp.bfloat16)}, r"up must have q's dtype float32, got bfloat16"),
        ({"start": where["start"][:4]}, r"start must have shape \(5,\), one a row, got \(4,\)"),
        ({"ancestors": jnp.ones((5, 1, 1), jnp.int32)}, r"ancestors must be bool \(5, 1, 1\), got int32"),
        ({"slots": jnp.full(5, 9, jnp.int32)}, r"slots must be in \[0, 5\], got 9 at row 0"),
    ):
        given = {"q": q, "latents": latents, "pages": pages, "up": up, "table": table} | where | change
        with pytest.raises(ValueError, match=message):
            append_and_attend_latent(**given)
