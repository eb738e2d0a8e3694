"""What must hold of the kernels around the recurrence: of softmax attention, projections and the residual stream.

As in `checks.py`, which has those of the recurrence.
"""

import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.attention import chunk
from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.latent import append_and_attend_latent
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.attention.rotary import Rotary
from jaxbuf.bench.measure import worst_errors
from jaxbuf.models.experts import Router, mixture
from jaxbuf.models.layers import Norm
from jaxbuf.models.norm_and_rotate import norm_and_rotate
from jaxbuf.models.projections import (
    gated_project,
    product_or_summands,
    project,
    project_rows,
    squared_relu_project,
    summed,
)
from jaxbuf.models.residual import add_and_norm
from jaxbuf.pallas.attend.gpu_rows import REAL_ROWS
from tests.attention import latent_launches, launches
from tests.gpu.checks import BOUNDS, Figures, same_bits

# Relative to the norm, where parts of a softmax are merged, of a head and of all outputs together: each part was
# rounded itself, by some 1.6e-3 of its norm in bfloat16 and an eighth of that in float16, before the sum is; and parts
# may nearly cancel.
MERGED, ALL = {"float16": 1e-3, "bfloat16": 6e-3}, {"float16": 4e-4, "bfloat16": 3e-3}


def check_attention(rng) -> Figures:
    """What softmax layers give of launches of all kinds, against float64: of each head, and in the mean, in which it
    is as near as exact outputs are that are rounded; the pages bit for bit."""
    lengths, found = (9, 1024, 1000, 63, 64, 65, 0, 300), {}
    shapes = (16, 4, 256, 1), (16, 4, 256, 16), (32, 8, 128, 5), (40, 8, 128, 1), (8, 4, 64, 4)
    shapes += (16, 4, 256, 7), (24, 8, 128, 3), (14, 2, 64, 12), (4, 1, 128, 1)
    for heads, kv_heads, head_dim, time in shapes:
        for dtype, trees in (("bfloat16", False), ("bfloat16", True), ("float16", True)):
            sizes = launches.Sizes(lengths, time, heads, kv_heads, head_dim, trees=trees, dtype=dtype)
            launch = launches.make_launch(rng, sizes)
            out, kv = append_and_attend(*launch.arrays, **launch.integers, implementation="gpu")
            errors = {
                f"{dtype}, a head": (launches.worst_error(out, launch), BOUNDS[dtype]),
                f"{dtype}, mean": (
                    launches.mean_error(out, launch),
                    launches.AS_ROUNDED * launches.rounding_error(launch),
                ),
            }
            _hold(errors, found, str(sizes))
            assert same_bits(kv.keys, launch.pool.keys) and same_bits(kv.values, launch.pool.values), f"{sizes}: pages"
    return found


def _hold(errors: dict[str, tuple[float, float]], found: Figures, what: str) -> None:
    """Compares errors with their bounds, and notes the largest in `found`."""
    for name, (error, bound) in errors.items():
        assert error <= bound, f"{what}, {name}: {error}, at most {bound}"
        found[name] = max(found.get(name, 0.0), float(error))


def check_latent_attention(rng) -> Figures:
    """What latent attention gives of launches of all kinds, against float64: of each head, of all together, and of few
    queries in the mean, in which it is as near as exact outputs are that are rounded; the pages bit for bit."""
    committed, found = (9, 1024, 1000, 63, 64, 65, 0, 300), {}
    shapes = (32, 1, 16), (32, 5, 16), (32, 16, 64), (128, 1, 32), (128, 3, 8), (16, 2, 16), (4, 1, 16)
    for heads, time, page_size in shapes:
        for dtype, trees in (("bfloat16", False), ("bfloat16", True), ("float16", True)):
            what = f"{heads} heads, {time} tokens at once, {dtype}, {trees=}"
            kind = {"trees": trees, "page_size": page_size}
            launch, given = latent_launches.absorbed_launch(rng, heads, time, committed, dtype, **kind)
            out, pages = append_and_attend_latent(*given, **launch.integers, implementation="gpu")
            errors = {
                f"{dtype}, a head": (launches.worst_error(out, launch), BOUNDS[dtype]),
                f"{dtype}, all": (launches.error_of_all(out, launch), ALL[dtype]),
            }
            if heads * time <= REAL_ROWS:
                bound = launches.AS_ROUNDED * launches.rounding_error(launch)
                errors[f"{dtype}, mean of few queries"] = launches.mean_error(out, launch), bound
            _hold(errors, found, what)
            assert same_bits(pages.latents, launch.pool.keys), f"{what}: pages"
    return found


def check_projections(rng) -> Figures:
    """Products of a Qwen3.5-4B layer's tokens with its weights, and the residual sum and its norm, against float64."""
    sizes, kept, hidden = (8192, 4096, 32, 1000), (False, False, True, False), 2560
    weights = [hidden**-0.5 * rng.standard_normal((n, hidden), np.float32) for n in (*sizes, 9216, 9216)]
    found: Figures = {}

    def compare(name: str, out, expected, bound: float) -> None:
        out = np.asarray(out, np.float64).reshape(expected.shape)
        error = float(np.max(np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))
        assert error <= bound, f"{name}: {error}, at most {bound}"
        found[name] = max(found.get(name, 0.0), error)

    for dtype, bound in (("bfloat16", 2e-3), ("float16", 3e-4)):
        *several, gate, up = (jnp.asarray(w, dtype) for w in weights)
        for tokens in (1, 5, 64, 100, 128, 200, 256):
            x = jnp.asarray(rng.standard_normal((tokens, 1, hidden)), dtype)
            exact, *wide = (np.asarray(a, np.float64) for a in (x[:, 0], *several, gate, up))
            products = [exact @ w.T for w in wide]
            outs = project(x, several, float32=kept, implementation="gpu")
            for out, expected, single in zip(outs, products, kept, strict=False):
                compare(f"project, {'float32' if single else dtype}", out, expected, 1e-5 if single else bound)
            back = summed(product_or_summands(x, several[0]))  # by a kernel or by the library, in slices or not
            compare(f"product_or_summands, {dtype}", back, products[0], bound)
            apart = project_rows(x, jnp.concatenate(several), sizes, float32=kept, implementation="gpu")
            assert all(map(same_bits, apart, outs)), "the rows of one weight are other products"
            squares = np.square(np.maximum(products[-1], 0))
            compare(f"squared_relu_project, {dtype}", squared_relu_project(x, up, implementation="gpu"), squares, bound)
            gated = products[-2] / (1 + np.exp(-products[-2])) * products[-1]
            compare(f"gated_project, {dtype}", gated_project(x, gate, up, implementation="gpu"), gated, bound)
            total, normed = add_and_norm(x, 2 * x, several[0][0], Norm(1e-6, 1.0), implementation="gpu")
            assert same_bits(total, x + 2 * x), "the sum is not XLA's"
            rounded = np.asarray(total, np.float64)[:, 0]
            root = np.sqrt(np.mean(rounded**2, axis=-1, keepdims=True) + 1e-6)
            compare(f"add_and_norm, {dtype}", normed, rounded / root * (1 + wide[0][0]), bound)
            # Of a width that is no multiple of 256: Nemotron-3-Nano-4B's.
            x, weight = (jnp.asarray(rng.standard_normal(n), dtype) for n in ((tokens, 1, 3136), (3136,)))
            total, normed = add_and_norm(x, 2 * x, weight, Norm(1e-6), implementation="gpu")
            assert same_bits(total, x + 2 * x), "the sum of 3136 is not XLA's"
            rounded = np.asarray(total, np.float64)[:, 0]
            root = np.sqrt(np.mean(rounded**2, axis=-1, keepdims=True) + 1e-6)
            compare(f"add_and_norm of 3136, {dtype}", normed, rounded / root * np.asarray(weight, np.float64), bound)
    return found


def check_queries_and_keys(rng) -> Figures:
    """Norms of queries and keys, and their rotary positions, against float64: each number is within what is rounded,
    the normed numbers and then their turned pairs. (Float32's sums get a hundredth more.)"""
    found: Figures = {}
    shapes = (16, 4, 256, 512, 64), (32, 8, 128, 128, 128), (4, 1, 64, 64, 32)
    for heads, kv_heads, head_dim, width, dim in shapes:
        for dtype in ("bfloat16", "float16"):
            half_place, least = (float(x) / 2 for x in (jnp.finfo(dtype).eps, jnp.finfo(dtype).smallest_subnormal))
            for tokens in (1, 7, 256):
                q, k = (rng.standard_normal((tokens, 1, *n)) for n in ((heads, width), (kv_heads, head_dim)))
                scales = [rng.standard_normal(head_dim) for _ in range(2)]
                q, k, *weights = (jnp.asarray(x, dtype) for x in (q, k, *scales))
                angles = Rotary(dim, 1e4).angles(jnp.asarray(rng.integers(0, 4096, (tokens, 1)), jnp.int32))
                both = norm_and_rotate(q, k, angles, Norm(1e-6, 1.0), tuple(weights), implementation="gpu")
                cos, sin = (np.asarray(x, np.float64) for x in angles)
                for out, given, weight in zip(both, (q, k), weights, strict=True):
                    normed = np.asarray(given, np.float64)[..., :head_dim]
                    normed /= np.sqrt(np.mean(normed**2, axis=-1, keepdims=True) + 1e-6)
                    normed *= 1 + np.asarray(weight, np.float64)
                    first, second, rest = np.split(normed, [dim // 2, dim], axis=-1)
                    pairs = [(first * cos, -second * sin), (second * cos, first * sin)]
                    exact = np.concatenate([*(a + b for a, b in pairs), rest], axis=-1)
                    terms = np.concatenate([*(abs(a) + abs(b) for a, b in pairs), 0 * rest], axis=-1)
                    rounded = half_place * (terms + (1 + half_place) * abs(exact)) + 3 * least
                    error = float(np.max(abs(np.asarray(out, np.float64) - exact) / rounded))
                    assert error <= 1.01, f"{dtype}, {tokens} tokens, heads of {head_dim}: {error} of what is rounded"
                    found[dtype] = max(found.get(dtype, 0.0), error)
    return found


def check_chunks(rng) -> Figures:
    """Chunks of prompts behind nothing and behind some pieces of committed tokens, against float64; NaN wherever
    nothing live lies; the pages bit for bit."""
    found = {}
    for heads, kv_heads, head_dim, time in ((16, 4, 256, 17), (8, 2, 256, 130), (8, 2, 128, 65)):
        for dtype, order in (("bfloat16", False), ("float16", True)):
            lengths = (9, 0, 300, 63)
            sizes = launches.Sizes(lengths, time, heads, kv_heads, head_dim, trees=order, in_a_row=True, dtype=dtype)
            launch = launches.make_launch(rng, sizes)
            # Several pieces, and the second of them for one row alone.
            with mock.patch.object(chunk, "piece_size", lambda rows, time: 200):
                out, kv = append_and_attend(*launch.arrays, **launch.integers, implementation="gpu")
            got, wanted = np.asarray(out, np.float64)[launch.real], launch.out[launch.real]
            errors = {
                f"{dtype}, a head": launches.worst_error(out, launch),
                f"{dtype}, all": float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)),
            }
            for name, error in errors.items():
                bound = (MERGED if name.endswith("head") else ALL)[dtype]
                assert error <= bound, f"{sizes}, {name}: {error}, at most {bound}"
                found[name] = max(found.get(name, 0.0), error)
            assert same_bits(kv.keys, launch.pool.keys) and same_bits(kv.values, launch.pool.values), f"{sizes}: pages"
    return found


def check_long_chunk(rng, time: int = 1024, committed: int = 3000, rows: int = 2) -> Figures:
    """A long chunk, and a whole sequence as long, of Qwen3.5-4B's heads, against XLA in float32; of a whole sequence
    the gradient, too. Relative to the norm of a head's output, and of a whole gradient."""
    draw = jax.random.split(jax.random.key(int(rng.integers(2**31))), 6)
    pages = 1 + rows * -(-(committed + time) // 16)
    shapes = ((rows, time, heads, 256) for heads in (16, 4, 4, 16))
    q, k, v, weigh = (jax.random.normal(*each, jnp.bfloat16) for each in zip(draw[:4], shapes, strict=True))
    kv = PagedKV(*(jax.random.normal(key, (pages, 16, 4, 256), jnp.bfloat16) for key in draw[4:]))
    table = jnp.asarray(np.r_[np.zeros((1, (pages - 1) // rows)), rng.permutation(pages - 1).reshape(rows, -1) + 1])
    slots = jnp.arange(1, rows + 1, dtype=jnp.int32)
    where = {"slots": slots, "start": jnp.asarray([committed, 100], jnp.int32)}

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(q, k, v, kv, weigh, implementation):
        at = append_and_attend(q, k, v, kv, table.astype(jnp.int32), **where, implementation=implementation)[0]

        def weighed(*inputs):
            whole = causal_attention(*inputs, implementation=implementation)
            return jnp.sum(whole.astype(jnp.float32) * weigh), whole

        gradients, whole = jax.grad(weighed, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return at, whole, gradients

    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, kv, weigh))
    wanted, got = run(*exact, implementation="xla"), run(q, k, v, kv, exact[-1], implementation="gpu")
    found = dict(zip(("chunk", "whole"), map(float, worst_errors(got[:2], wanted[:2])), strict=True))
    for name, x, y in zip(("dq", "dk", "dv"), got[2], wanted[2], strict=True):
        found[name] = float(jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(y))
    bounds = {"chunk": MERGED["bfloat16"], "whole": BOUNDS["bfloat16"]} | dict.fromkeys(("dq", "dk", "dv"), 1e-2)
    assert all(found[name] <= bounds[name] for name in found), f"{found}, at most {bounds}"
    return found


def check_experts(rng) -> Figures:
    """Mixtures of experts with a gate and without, of one token and of many, against float64; some of the experts too,
    as a device of several has them, and tokens that prefer one of them."""
    found: Figures = {}
    shapes = (512, 64, 8, 256, True), (2048, 128, 8, 512, True), (320, 16, 4, 192, False)
    for hidden, experts, chosen, size, gated in shapes:
        first, second = (
            rng.standard_normal((experts, *shape), np.float32) * shape[-1] ** -0.5
            for shape in (((2 if gated else 1) * size, hidden), (hidden, size))
        )
        for dtype, bound in (("bfloat16", 1.2e-2), ("float16", 1.5e-3)):
            weights = [jnp.asarray(w, dtype) for w in (first, second)]
            wide = [np.asarray(w, np.float64) for w in weights]
            for tokens, begin in ((1, 0), (2, 0), (5, 0), (32, 0), (300, 0), (1500, 0), (1, 8), (32, 8), (300, 8)):
                if tokens == 1500 and hidden == 2048:  # the definition would take long
                    continue
                x = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
                picked = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
                if tokens == 300:  # the last expert has all of them
                    picked[:, -1] = np.where((picked == experts - 1).any(axis=1), picked[:, -1], experts - 1)
                share = rng.dirichlet(np.ones(chosen), tokens).astype(np.float32)
                given = x, *(w[begin:] for w in weights), jnp.asarray(picked), jnp.asarray(share)
                out = mixture(*given, gated=gated, begin=begin or None, implementation="gpu")
                expected, exact = np.zeros((tokens, hidden)), np.asarray(x, np.float64)
                for expert in range(begin, experts):
                    token, place = np.nonzero(picked == expert)
                    inner = exact[token] @ wide[0][expert].T
                    if gated:
                        gate, up = np.split(inner, 2, axis=-1)
                        inner = gate / (1 + np.exp(-gate)) * up
                    else:
                        inner = np.maximum(inner, 0) ** 2
                    expected[token] += share[token, place, None] * (inner @ wide[1][expert].T)
                gaps = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=-1)
                sizes = np.linalg.norm(expected, axis=-1)
                error = float(np.max(gaps / np.where(sizes > 0, sizes, 1)))  # a token may have none of the experts here
                name = f"{dtype}, {'gated' if gated else 'squared ReLU'}"
                assert error <= bound, f"{name}, {tokens} tokens of {hidden}: {error}, at most {bound}"
                found[name] = max(found.get(name, 0.0), error)
    return found


def check_choices(rng) -> Figures:
    """The router's kernel against float64: each expert it takes is as good as the one in its place, and its weights."""
    found: Figures = {}
    routers = {
        "softmax": Router(256, 8),
        "softmax, as it is": Router(500, 10, renormalised=False, scale=2.0),
        "sigmoid, biased, groups": Router(256, 8, scores="sigmoid", bias=True, groups=8, chosen_groups=4, scale=2.5),
    }
    for name, router in routers.items():
        for tokens in (1, 7, 4096):
            logits = (2 * rng.standard_normal((tokens, router.experts))).astype(np.float32)
            logits[0, 40:44] = 9.0  # equal ones, which are taken in their order
            bias = rng.standard_normal(router.experts).astype(np.float32) if router.bias else None
            given = jnp.asarray(logits), None if bias is None else jnp.asarray(bias)
            chosen, weights = map(np.asarray, router(*given, implementation="gpu"))
            exact = logits.astype(np.float64)
            powers = np.exp(exact - exact.max(axis=1, keepdims=True))
            softmax = router.scores == "softmax"
            scores = powers / powers.sum(axis=1, keepdims=True) if softmax else 1 / (1 + np.exp(-exact))
            preferred = scores if bias is None else scores + bias
            if router.groups > 1:
                grouped = preferred.reshape(tokens, router.groups, -1)
                sums = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
                closed = np.argsort(-sums, axis=1, kind="stable")[:, router.chosen_groups :]
                np.put_along_axis(grouped, closed[:, :, None], -np.inf, axis=1)
            best = -np.sort(-preferred, axis=1)[:, : router.chosen]
            gap = float(np.abs(np.take_along_axis(preferred, chosen, axis=1) - best).max())
            assert gap <= 2e-6 and all(len(set(row)) == router.chosen for row in chosen), f"{name}, {tokens}: {gap}"
            if bias is None:
                assert chosen[0, :4].tolist() == [40, 41, 42, 43], f"{name}: {chosen[0]}"
            expected = np.take_along_axis(scores, chosen, axis=1)
            if router.renormalised:
                expected /= expected.sum(axis=1, keepdims=True)
            error = float(np.abs(weights / (router.scale * expected) - 1).max())
            assert error <= 1e-5, f"{name}, {tokens} tokens: {error}, at most 1e-5"
            found[name] = max(found.get(name, 0.0), error)
    return found


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "experts_are_those_of_float64": check_experts,
    "choices_of_experts_are_those_of_float64": check_choices,
    "attention_is_that_of_float64": check_attention,
    "latent_attention_is_that_of_float64": check_latent_attention,
    "projections_are_those_of_float64": check_projections,
    "queries_and_keys_are_normed_and_turned_as_those_of_float64": check_queries_and_keys,
    "attention_of_chunks_is_that_of_float64": check_chunks,
    "attention_of_long_chunks_and_its_gradient_are_xlas_in_float32": check_long_chunk,
}
