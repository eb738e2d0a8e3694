"""The kernel of routed experts: it lowers for its platform at the real sizes, and is the mixture that XLA computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.experts import Router, mixture
from jaxbuf.pallas.experts import STEP, Call, gpu, gpu_few, gpu_places, tpu
from jaxbuf.pallas.project.gpu import SHARED_MEMORY, TILE

SIZES = {"experts": 6, "inputs": 64, "inner": 72, "outputs": 64}


def new_arrays(rng, tokens, chosen, dtype=jnp.bfloat16, *, experts, inputs, inner, outputs, gated=True):
    """x, the two projections, the chosen experts and their weights; numbers of size 1."""
    shapes = (tokens, inputs), (experts, (1 + gated) * inner, inputs), (experts, outputs, inner)
    x, first, second = (rng.standard_normal(shape) * shape[-1] ** -0.5 for shape in shapes)
    picked = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen]
    arrays = jnp.asarray(inputs**0.5 * x, dtype), jnp.asarray(first, dtype), jnp.asarray(second, dtype)
    return *arrays, jnp.asarray(picked, jnp.int32), jnp.asarray(rng.random((tokens, chosen)), jnp.float32)


def defined(x, first, second, chosen, weights, *, gated=True, here=None):
    """The mixture in float64, token by token, of the experts `here`: numbers of chosen; None: all."""
    x, first, second, weights = (np.asarray(a, np.float64) for a in (x, first, second, weights))
    out = np.zeros((len(x), second.shape[1]))
    for token, (experts, shares) in enumerate(zip(np.asarray(chosen), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if here is not None and expert not in here:
                continue
            expert = expert if here is None else here.index(expert)
            inner = first[expert] @ x[token]
            if gated:
                gate, up = np.split(inner, 2)
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                inner = np.maximum(inner, 0) ** 2
            out[token] += share * (second[expert] @ inner)
    return out


def error(found, known):
    return np.linalg.norm(np.asarray(found, np.float64) - known) / np.linalg.norm(known)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(256, 8, 1), (512, 10, 128), (512, 10, 4096)])
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(experts, chosen, tokens):
    sizes = [(tokens, 2048), (experts, 1024, 2048), (experts, 2048, 512)]
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    arrays += [jax.ShapeDtypeStruct((tokens, chosen), dtype) for dtype in (jnp.int32, jnp.float32)]
    traced = jax.jit(partial(mixture, implementation="gpu", target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == (2 if tokens == 1 else 4)


@pytest.mark.parametrize(("inner", "kernels"), [(64, 3), (72, 0)])
def test_it_is_taken_where_it_serves_both_products(inner, kernels, rng):
    arrays = new_arrays(rng, 2, 2, **SIZES | {"inner": inner})
    traced = jax.jit(partial(mixture, target="H100")).trace(*arrays)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == kernels


@pytest.fixture
def few_processors(monkeypatch):
    """So that a call has few blocks for the interpreter."""
    monkeypatch.setattr(gpu, "PROCESSORS", 2)
    monkeypatch.setattr(gpu, "BLOCKS", 2)
    monkeypatch.setattr(gpu_few, "PROCESSORS", 2)
    monkeypatch.setattr(gpu_few, "BUSY", 2)


@pytest.mark.parametrize(
    ("tokens", "chosen", "gated"),
    [
        pytest.param(9, 3, True),
        pytest.param(1, 2, False, marks=pytest.mark.exhaustive),
        pytest.param(60, 2, True, marks=pytest.mark.exhaustive),
        pytest.param(200, 3, False, marks=pytest.mark.exhaustive),
        pytest.param(180, 2, True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_gpu_kernel_is_the_mixture(tokens, chosen, gated, rng, few_processors):
    """Groups of few rows, and of more than one visit has; some of them empty; visits for up to three warpgroups, some
    of which have no rows; tiles that are multiplied in halves."""
    sizes = SIZES | {"inner": 128 if tokens == 1 else 64, "outputs": {200: 208, 180: 256}.get(tokens, 64)}
    arrays = new_arrays(rng, tokens, chosen, gated=gated, **sizes)
    if tokens == 60:
        arrays = *arrays[:3], jnp.where(arrays[3] == 4, 5, arrays[3]), arrays[4]
    found = mixture(*arrays, gated=gated, implementation="gpu", interpret=True)
    assert found.dtype == jnp.bfloat16 and error(found, defined(*arrays, gated=gated)) < 1e-2


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "gated", "dtype"),
    [
        (3, 2, 40, True, "bfloat16"),
        pytest.param(1, 10, 24, False, "float16", marks=pytest.mark.exhaustive),
        pytest.param(9, 1, 64, True, "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernels_of_few_tokens_are_the_mixture(tokens, chosen, experts, gated, dtype, rng, few_processors):
    """Weights of a token's experts in more pieces than the ring has; more experts than eight; tokens that share one."""
    sizes = SIZES | {"experts": experts, "inner": 128, "inputs": 256}
    x, first, second, picked, weights = new_arrays(rng, tokens, chosen, jnp.dtype(dtype), gated=gated, **sizes)
    picked = picked.at[:, 0].set(picked[0, 0]) if chosen == 1 else picked
    call = Call(picked.size, 256, 128, experts, np.dtype(x.dtype), gated)
    assert gpu_few.serves(tokens, (call, Call(picked.size, 128, 64, experts, np.dtype(x.dtype))))
    arrays = x, first, second, picked, weights
    found = mixture(*arrays, gated=gated, implementation="gpu", interpret=True)
    assert found.dtype == dtype and error(found, defined(*arrays, gated=gated)) < 1e-2


def test_few_tokens_of_few_experts_are_sorted():
    """There most experts have several tokens, for each of which the kernels of few tokens would read them."""

    def serves(tokens, chosen, experts):
        calls = (Call(tokens * chosen, *sizes, experts, np.dtype("bfloat16")) for sizes in ((2048, 512), (512, 2048)))
        return gpu_few.serves(tokens, tuple(calls))

    assert serves(1, 8, 256) and serves(1, 2, 8) and serves(8, 8, 256)
    assert not serves(9, 8, 256) and not serves(4, 2, 8) and not serves(1, 17, 256)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5])
def test_of_experts_elsewhere_the_kernel_computes_nothing(tokens, rng, few_processors):
    check_experts_elsewhere(rng, "gpu", SIZES | {"inner": 64, "outputs": 256}, tokens)


def check_experts_elsewhere(rng, implementation, sizes, tokens=5):
    """Three devices have two experts each; what lies in no group is whatever memory held."""
    x, first, second, chosen, weights = new_arrays(rng, tokens, 3, **sizes)
    for begin in (0, 2, 4):
        here = slice(begin, begin + 2)
        how = {"begin": begin, "implementation": implementation, "interpret": True}
        found = mixture(x, first[here], second[here], chosen, weights, **how)
        known = defined(x, first[here], second[here], chosen, weights, here=[begin, begin + 1])
        assert np.linalg.norm(np.asarray(found, np.float64) - known) <= 1e-2 * np.linalg.norm(known)


@pytest.mark.exhaustive
def test_it_has_the_gradient_of_the_definition(rng, few_processors):
    check_gradient(rng, "gpu", SIZES | {"inner": 64})


def check_gradient(rng, implementation, sizes):
    x, first, second, chosen, weights = new_arrays(rng, 3, 2, **sizes)

    def summed(x, first, second, weights, **how):
        return jnp.sum(jnp.sin(mixture(x, first, second, chosen, weights, **how).astype(jnp.float32)))

    grad = jax.grad(summed, (0, 1, 2, 3))
    found = grad(x, first, second, weights, implementation=implementation, interpret=True)
    for mine, theirs in zip(found, grad(x, first, second, weights), strict=True):
        assert error(mine, np.asarray(theirs, np.float64)) < 2e-2


@pytest.mark.parametrize("rows, experts", [(8, 256), (1024, 256), (40, 6), (40960, 512)])
def test_visits_have_every_row_of_every_group_once(rows, experts, rng):
    for share in (np.full(experts, 1 / experts), rng.dirichlet(np.full(experts, 0.05)), np.eye(experts)[-1]):
        counts = rng.multinomial(rows, share)
        groups = -(-counts // gpu.ALIGNED) * gpu.ALIGNED
        visits, used = map(np.asarray, gpu.plan_visits(jnp.asarray(groups, jnp.int32), rows))
        assert len(visits) == gpu.most_visits(rows, experts)
        assert (visits[: used[0], 2] > visits[: used[0], 1]).all() and not visits[used[0] :].any()
        ends, seen = np.cumsum(groups), []
        for expert, first, end in visits:
            assert 0 <= end - first <= gpu.visited_rows(rows, experts) and first % gpu.ALIGNED == 0
            if end > first:
                assert ends[expert] - groups[expert] <= first and end <= ends[expert]
                assert first + gpu.visited_rows(rows, experts) <= gpu.aligned_rows(rows, experts)
            seen += range(first, end)
        assert sorted(seen) == list(range(ends[-1]))


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("most_compared", [0, 4096])
def test_rows_lie_in_the_groups_of_their_experts(begin, most_compared, rng, monkeypatch):
    """Compared in pairs or sorted; experts from `begin` on are here, and rows of the others are in no group."""
    monkeypatch.setattr(gpu, "MOST_COMPARED", most_compared)
    experts, here, rows = 16, 8, 90
    by_expert = np.asarray(rng.integers(0, experts, rows) - begin, np.int32)
    places, groups = (np.asarray(x) for x in gpu.arrange_rows(jnp.asarray(by_expert), here))
    inside = (by_expert >= 0) & (by_expert < here)
    counts = np.bincount(by_expert[inside], minlength=here)
    np.testing.assert_array_equal(groups, -(-counts // gpu.ALIGNED) * gpu.ALIGNED)
    first = np.cumsum(groups) - groups
    for expert in range(here):
        expected = first[expert] + np.arange(counts[expert])
        np.testing.assert_array_equal(places[by_expert == expert], expected)
    assert (places[~inside] == gpu.aligned_rows(rows, here)).all()


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(9, 3, 40), (200, 2, 6)])
def test_the_kernel_that_places_rows_says_what_xla_does(tokens, chosen, experts, rng):
    """Some experts are elsewhere; of each place the token is the one whose row lies there."""
    picked = jnp.asarray(rng.integers(-1, experts + 1, (tokens, chosen)), jnp.int32)
    picked = picked.at[0].set(-1).at[1].set(experts)
    places, sources, visits, used = map(np.asarray, gpu_places.place_rows(picked, experts, interpret=True))
    known, groups = map(np.asarray, gpu.arrange_rows(picked.reshape(-1), experts))
    np.testing.assert_array_equal(places, known)
    for found, expected in zip((visits, used), gpu.plan_visits(jnp.asarray(groups), picked.size), strict=True):
        np.testing.assert_array_equal(found, expected)
    inside = np.flatnonzero(places < len(sources))
    np.testing.assert_array_equal(sources[places[inside]], inside // chosen)
    assert not np.delete(sources, places[inside]).any() and len(inside) < picked.size


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("outputs", [256, 1280])
def test_the_kernel_that_sums_rows(everywhere, outputs, rng, monkeypatch):
    """Rows of no group are nowhere; what lies in other rows is not read."""
    monkeypatch.setattr(gpu_places, "LOADED", 2 * outputs)
    each = rng.standard_normal((40, outputs)).astype(jnp.bfloat16)
    places = rng.permutation(40)[:15].astype(np.int32)
    each[np.delete(np.arange(40), places)] = np.nan
    if not everywhere:
        places[[1, 7]] = 40
    weights = rng.random((5, 3)).astype(np.float32)
    arrays = jnp.asarray(each), jnp.asarray(places), jnp.asarray(weights)
    found = gpu_places.sum_rows(*arrays, everywhere=everywhere, interpret=True)
    rows = np.append(each.astype(np.float64), np.zeros((1, outputs)), axis=0)[places].reshape(5, 3, -1)
    assert error(found, np.sum(rows * weights[:, :, None], axis=1)) < 4e-3


def test_a_schedule_fits_a_multiprocessor():
    assert STEP == gpu.STEP
    for rows in (8, 80, 256, 1024, 1280, 32_768, 40_960):
        for gated, inputs, outputs in ((True, 2048, 512), (False, 512, 2048)):
            call = Call(rows, inputs, outputs, 256, np.dtype(jnp.bfloat16), gated)
            schedule = gpu.arrange(call)
            assert schedule.rows * schedule.tiles == outputs and schedule.ring >= 4
            if rows == 8:  # a token's experts keep nearly all multiprocessors busy
                assert 112 <= schedule.visits * schedule.tiles <= 264


@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 8), (1, 10), (1, 16), (3, 10), (8, 8)])
def test_a_schedule_of_few_tokens_fits_a_multiprocessor(tokens, chosen):
    for hidden, inner in ((2048, 512), (2304, 1024), (7168, 2048), (2688, 1856), (64, 64)):
        for gated in (True, False):
            first = Call(tokens * chosen, hidden, inner, 256, np.dtype(jnp.bfloat16), gated)
            second = Call(tokens * chosen, inner, hidden, 256, np.dtype(jnp.bfloat16))
            padded = -(-chosen // 8) * 8
            schedules = gpu_few.arrange(first, tokens * chosen), gpu_few.arrange(second, tokens, padded)
            held = schedules[0].ring * 8, inner // schedules[1].columns * padded
            for call, schedule, rows in zip((first, second), schedules, held, strict=True):
                assert schedule.rows * schedule.tiles == call.outputs
                assert call.inputs % schedule.columns == 0 and schedule.columns % STEP == 0
                weights = schedule.ring * schedule.rows * (1 + call.gated)
                assert 2 * schedule.columns * (weights + rows + TILE - 8) < SHARED_MEMORY
                assert gpu_few.LEAST_PIECES <= schedule.ring <= 32
                if (hidden, inner, tokens) == (2048, 512, 1) and chosen >= 8:
                    assert 2 * schedule.columns * weights >= 2**16, "so many bytes are on their way"


CHOICES = {
    "softmax": (1, Router(40, 3)),
    "softmax, as it is": (5, Router(40, 5, renormalised=False, scale=0.7)),
    "softmax, biased": (3, Router(20, 20, bias=True)),
    "softmax, groups": (3, Router(128, 2, groups=4, chosen_groups=2)),
    "sigmoid": (2, Router(96, 4, scores="sigmoid", scale=2.5)),
    "sigmoid, groups": (6, Router(96, 4, scores="sigmoid", bias=True, groups=3, chosen_groups=2, scale=1.5)),
    "one of one": (1, Router(1, 1)),
}


OFTEN = {"softmax", "sigmoid, groups"}  # the others are slow, as there are many


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in CHOICES]
)
def test_the_kernel_chooses_as_the_router_does(name, rng):
    """Some experts have equal scores; of the weights the gradient is the same, too."""
    tokens, router = CHOICES[name]
    logits = rng.standard_normal((tokens, router.experts)).astype(np.float32)
    logits[0, 3:7] = logits[-1, ::7] = 1.5
    bias = jnp.asarray(rng.integers(0, 2, router.experts), jnp.float32) if router.bias else None

    def weighed(logits, **how):
        chosen, weights = router(logits, bias, **how)
        return jnp.sum(weights * jnp.arange(1.0, router.chosen + 1)[None]), (chosen, weights)

    run = jax.value_and_grad(weighed, has_aux=True)
    (_, (chosen, weights)), slope = run(jnp.asarray(logits), implementation="gpu", interpret=True)
    (_, (known, expected)), known_slope = run(jnp.asarray(logits))
    np.testing.assert_array_equal(chosen, known)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    np.testing.assert_allclose(slope, known_slope, atol=1e-6)


def test_the_router_and_experts_of_a_token_are_three_kernels():
    """Besides the product that gives the logits: nothing is sorted, gathered or added up by XLA."""
    sizes = [(1, 256), (1, 2048), (256, 1024, 2048), (256, 2048, 512)]
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16 if i else jnp.float32) for i, size in enumerate(sizes)]

    def run(logits, *arrays):
        return mixture(*arrays, *Router(256, 8)(logits, target="H100"), target="H100")

    lowered = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == 3
    assert not [
        name for name in ("sort", "top_k", "gather", "scatter", "dot", "reduce") if f"stablehlo.{name}" in lowered
    ]


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (Router(1056, 8), "at most 1024 experts, got 1056"),
        (Router(64, 33), "chosen at most 32, got 33"),
        (Router(40, 2, groups=2), "groups of experts in 32s, got 20 in each"),
    ],
)
def test_choices_that_the_kernel_cannot_serve(router, reason):
    logits = jnp.zeros((2, router.experts))
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this experts: it needs {reason}'):
        router(logits, implementation="gpu", target="H100")
    assert router(logits)[0].tolist() == [[*range(router.chosen)]] * 2


TPU_SIZES = {"experts": 6, "inputs": 128, "inner": 128, "outputs": 256}


@pytest.mark.parametrize(
    ("tokens", "chosen", "gated"),
    [(9, 3, True), (1, 2, False), pytest.param(300, 3, True, marks=pytest.mark.slow)],
)
def test_the_tpu_kernel_is_the_mixture(tokens, chosen, gated, rng, monkeypatch):
    """Also where a weight comes in parts, and some groups are empty or end within what is multiplied at once."""
    monkeypatch.setattr(tpu, "WEIGHT", 2 * 128 * 128)
    arrays = new_arrays(rng, tokens, chosen, gated=gated, **TPU_SIZES)
    arrays = *arrays[:3], jnp.where(arrays[3] == 4, 5, arrays[3]), arrays[4]
    found = mixture(*arrays, gated=gated, implementation="tpu", interpret=True)
    assert found.dtype == jnp.bfloat16 and error(found, defined(*arrays, gated=gated)) < 1e-2


def test_of_experts_elsewhere_the_tpu_kernel_reads_nothing(rng):
    check_experts_elsewhere(rng, "tpu", TPU_SIZES)


@pytest.mark.slow
def test_the_tpu_kernel_has_the_gradient_of_the_definition(rng):
    check_gradient(rng, "tpu", TPU_SIZES)


def test_what_a_tpu_multiplies_at_once_fits_its_memory():
    """Of the smallest generation, whose kernels have 16 MiB: two of each part that comes or goes, and the sums."""
    for rows in (8, 256, 1024, 40_960, 262_144):
        for gated, inputs, outputs in ((True, 2048, 512), (False, 512, 2048), (True, 2304, 1024), (False, 7168, 2048)):
            most, inner, outer = tpu.tiles(Call(rows, inputs, outputs, 256, np.dtype(jnp.bfloat16), gated))
            assert most % tpu.PACKED == inner % tpu.LANES == outer % tpu.LANES == 0
            assert 2 * 2 * (most * inner + inner * outer + most * outer) + 4 * most * outer < 14 * 2**20
            assert inner * -(-inputs // inner) < inputs + inner


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"inputs": 96}, "bfloat16", "in, the numbers of a row, in 64s, got 96"),
        ({"inner": 64, "outputs": 12}, "bfloat16", "out, the rows of an expert's weight, in eights, got 12"),
        ({}, "float32", "x and weights in bfloat16 or float16, got float32"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error_that_says_why(changes, dtype, reason, rng):
    arrays = new_arrays(rng, 2, 2, dtype, **SIZES | {"inner": 64} | changes)
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this experts: it needs {reason}'):
        mixture(*arrays, implementation="gpu", target="H100")


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"inputs": 192}, "bfloat16", "in, the numbers of a row, in 128s, got 192"),
        ({"inner": 64}, "bfloat16", "out, the rows of an expert's weight, in 128s, got 64"),
        ({}, "float16", "x and weights in bfloat16, got float16"),
    ],
)
def test_what_the_tpu_kernel_cannot_serve_is_an_error_that_says_why(changes, dtype, reason, rng):
    arrays = new_arrays(rng, 2, 2, dtype, **TPU_SIZES | changes)
    with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this experts: it needs {reason}'):
        mixture(*arrays, implementation="tpu", target="v6e")
