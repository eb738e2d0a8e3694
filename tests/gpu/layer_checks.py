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
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.bench.measure import worst_errors
from jaxbuf.models.experts import mixture
from jaxbuf.models.layers import Norm
from jaxbuf.models.projections import gated_project, project
from jaxbuf.models.residual import add_and_norm
from jaxbuf.recurrence import RecurrenceSpec, prepare
from jaxbuf.recurrence.convolution import extend_ring, init_ring
from jaxbuf.recurrence.gated_norm import gated_norm, grouped_norm
from tests.attention import launches
from tests.gpu.checks import BOUNDS, QWEN, Figures, same_bits
from tests.gpu.program import pool_sized_writes

# Relative to the norm, where parts of a softmax are merged, of a head and of all outputs together: each part was
# rounded itself, by some 1.6e-3 of its norm in bfloat16 and an eighth of that in float16, before the sum is; and parts
# may nearly cancel.
MERGED, MERGED_ALL = {"float16": 1e-3, "bfloat16": 6e-3}, {"float16": 4e-4, "bfloat16": 3e-3}


def check_attention(rng) -> Figures:
    """What softmax layers give of launches of all kinds, against float64; the pages bit for bit."""
    lengths, found = (9, 1024, 1000, 63, 64, 65, 0, 300), {}
    shapes = (16, 4, 256, 1), (16, 4, 256, 16), (32, 8, 128, 5), (40, 8, 128, 1), (8, 4, 64, 3)
    for heads, kv_heads, head_dim, time in shapes:
        for dtype, trees in (("bfloat16", False), ("bfloat16", True), ("float16", True)):
            sizes = launches.Sizes(lengths, time, heads, kv_heads, head_dim, trees=trees, dtype=dtype)
            launch = launches.make_launch(rng, sizes)
            out, kv = append_and_attend(*launch.arrays, **launch.integers, implementation="gpu")
            error, bound = launches.worst_error(out, launch), BOUNDS[dtype]
            assert error <= bound, f"{sizes}: {error}, at most {bound}"
            assert same_bits(kv.keys, launch.pool.keys) and same_bits(kv.values, launch.pool.values), f"{sizes}: pages"
            found[dtype] = max(found.get(dtype, 0.0), error)
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
            gated = products[-2] / (1 + np.exp(-products[-2])) * products[-1]
            compare(f"gated_project, {dtype}", gated_project(x, gate, up, implementation="gpu"), gated, bound)
            total, normed = add_and_norm(x, 2 * x, several[0][0], Norm(1e-6, 1.0), implementation="gpu")
            assert same_bits(total, x + 2 * x), "the sum is not XLA's"
            rounded = np.asarray(total, np.float64)[:, 0]
            root = np.sqrt(np.mean(rounded**2, axis=-1, keepdims=True) + 1e-6)
            compare(f"add_and_norm, {dtype}", normed, rounded / root * (1 + wide[0][0]), bound)
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
                bound = (MERGED if name.endswith("head") else MERGED_ALL)[dtype]
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
    """Mixtures of experts with a gate and without, of one token and of many, against float64."""
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
            for tokens in (1, 5, 32, 300):
                x = jnp.asarray(rng.standard_normal((tokens, hidden)), dtype)
                picked = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
                share = rng.dirichlet(np.ones(chosen), tokens).astype(np.float32)
                out = mixture(x, *weights, jnp.asarray(picked), jnp.asarray(share), gated=gated, implementation="gpu")
                expected, exact = np.zeros((tokens, hidden)), np.asarray(x, np.float64)
                for expert in range(experts):
                    token, place = np.nonzero(picked == expert)
                    inner = exact[token] @ wide[0][expert].T
                    if gated:
                        gate, up = np.split(inner, 2, axis=-1)
                        inner = gate / (1 + np.exp(-gate)) * up
                    else:
                        inner = np.maximum(inner, 0) ** 2
                    expected[token] += share[token, place, None] * (inner @ wide[1][expert].T)
                gaps = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=-1)
                error = float(np.max(gaps / np.linalg.norm(expected, axis=-1)))
                name = f"{dtype}, {'gated' if gated else 'squared ReLU'}"
                assert error <= bound, f"{name}, {tokens} tokens of {hidden}: {error}, at most {bound}"
                found[name] = max(found.get(name, 0.0), error)
    return found


CONVOLUTIONS = {  # channels, tokens at once, dtype, whether trees, whether a bias, parts of the output
    "Nemotron-H-8B": (10240, 1, "bfloat16", False, True, (8192, 1024, 1024)),
    "Nemotron-3-Nano-4B": (9728, 5, "bfloat16", True, True, (7680, 1024, 1024)),
    "Granite-4.0-H-Small": (8448, 16, "bfloat16", True, True, (8192, 128, 128)),
    "Falcon-H1-7B": (3584, 5, "float32", False, True, (3072, 256, 256)),
    "Kimi-Linear": (12288, 16, "float32", True, False, ()),
    "one of 8 devices": (1216, 3, "bfloat16", False, False, (960, 128, 128)),
    "few channels": (202, 4, "bfloat16", True, True, (101, 101)),
}
KIMI = RecurrenceSpec(heads=32, key_heads=32, key_dim=128, value_dim=128, decay="channel")
# Of a token's numbers, relative to XLA's path: as `jaxbuf.bench.companions` has it, for the same roundings.
CONVOLVED = {"bfloat16": 1.2e-2, "float32": 5e-6}


def check_convolutions(
    rng, convolutions=CONVOLUTIONS, rows: int = 8, steps: int = 4, implementation: str = "gpu", interpret: bool = False
) -> Figures:
    """The convolution alone beside XLA's, over ragged steps with null slots, rejections and NaN in all that is dead:
    what tokens get, zeros elsewhere, and the ring bit for bit. Tokens at once and one by one are the same bits."""
    found: Figures = {}
    how = {"implementation": implementation, "interpret": interpret}
    for name, (channels, time, dtype, tree, biased, parts) in convolutions.items():
        given = {"channels": channels, "width": 4, "max_pending": max(time, 8)}
        ring = init_ring(slots=rows, **given, dtype=jnp.dtype(dtype))
        ring, order = jnp.full_like(ring, jnp.nan), None
        if tree:
            order = np.tile(np.arange(ring.shape[1], dtype=np.int32), (rows + 1, 1))
            order = jnp.asarray(rng.permuted(order, axis=1))
        weight, bias = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((channels, 4), (channels,)))
        more = {"bias": bias if biased else None, "activation": "silu", "order": order, "parts": parts}
        start, largest = np.zeros(rows + 1, np.int32), 0.0
        for _ in range(steps):
            slots = np.where(rng.random(rows) < 0.2, 0, rng.permutation(rows) + 1)
            lengths = rng.integers(0, time + 1, rows)
            real = (np.arange(time) < lengths[:, None]) & (slots > 0)[:, None]
            x = jnp.asarray(rng.standard_normal((rows, time, channels)), dtype)
            x = jnp.where(jnp.asarray(np.arange(time) < lengths[:, None])[..., None], x, jnp.nan)
            where = {"slots": slots, "start": start[slots], "lengths": lengths}
            if tree:
                parents = [[rng.integers(-1, t) if t else -1 for t in range(time)] for _ in range(rows)]
                where["parents"] = np.array(parents)
            where = {key: jnp.asarray(value, jnp.int32) for key, value in where.items()} | more
            expected, after = extend_ring(ring, weight, x, **where, implementation="xla")
            y, ring = extend_ring(ring, weight, x, **where, **how)
            assert same_bits(ring, after), f"{name}: the rings differ"
            assert [part.shape[-1] for part in y] == list(parts) if parts else y.shape == x.shape, f"{name}: the parts"
            y, expected = (_whole(out) for out in (y, expected))
            assert (y[~real] == 0).all() and np.isfinite(y[real]).all(), f"{name}: dead tokens, or NaN among others"
            errors = np.linalg.norm(y - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-3)
            largest = max(largest, float(errors.max(initial=0.0)))
            start[slots] += rng.integers(0, np.where(slots > 0, lengths, 0) + 1).astype(np.int32)
            start[0] = 0
        assert largest <= CONVOLVED[dtype], f"{name}: {largest}, at most {CONVOLVED[dtype]}"
        found[name] = largest
        _compare_one_by_one(rng, weight, more, ring, how)
    return found


def _whole(y) -> np.ndarray:
    """The output of a convolution, which may be in parts, as one array."""
    return np.concatenate([np.asarray(part, np.float32) for part in (y if isinstance(y, tuple) else (y,))], axis=-1)


def _compare_one_by_one(rng, weight, more, ring, how) -> None:
    time, one = 3, jnp.ones(1, jnp.int32)
    x = jnp.asarray(rng.standard_normal((1, time, weight.shape[0])), weight.dtype)
    where = {"slots": one, "start": 5 * one, "lengths": time * one} | more
    ring = jnp.zeros_like(ring)
    at_once, after = extend_ring(ring, weight, x, **where, **how)
    for t in range(time):
        where |= {"start": (5 + t) * one, "lengths": one}
        y, ring = extend_ring(ring, weight, x[:, t : t + 1], **where, **how)
        assert same_bits(_whole(y)[:, 0], _whole(at_once)[:, t]), "tokens at once are not those one by one"
    assert same_bits(ring, after), "the rings of tokens at once and one by one differ"


def check_prepared_trees(
    rng,
    spec: RecurrenceSpec = QWEN,
    times=(1, 5, 16),
    rows: int = 8,
    lower_bound: float | None = None,
    implementation: str = "gpu",
    interpret: bool = False,
) -> Figures:
    """`prepare` of trees beside XLA's, over permuted rings, with null slots and NaN in all that is dead; the ring bit
    for bit."""
    found: Figures = {}
    channels, heads = spec.channels, spec.heads
    for dtype in CONVOLVED:
        shapes = (channels, 4), heads, heads * (spec.key_dim if spec.decay == "channel" else 1)
        taps, *rates = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
        weights = prepare.Weights(taps.astype(dtype), *rates)
        for time in times:
            ring = init_ring(slots=rows, channels=channels, width=4, max_pending=time, dtype=jnp.dtype(dtype))
            ring = jnp.full_like(ring, jnp.nan)
            order = rng.permuted(np.tile(np.arange(ring.shape[1]), (rows + 1, 1)), axis=1)
            start = np.zeros(rows + 1, np.int32)
            for _ in range(3):
                slots = np.where(rng.random(rows) < 0.2, 0, rng.permutation(rows) + 1)
                lengths = rng.integers(0, time + 1, rows)
                real = (np.arange(time) < lengths[:, None]) & (slots > 0)[:, None]
                parents = [[rng.integers(-1, t) if t else -1 for t in range(time)] for _ in range(rows)]
                qkv = jnp.asarray(rng.standard_normal((rows, time, channels)), dtype)
                qkv = jnp.where(jnp.asarray(real)[..., None], qkv, jnp.nan)
                shapes = spec.decay_shape(rows, time), (rows, time, heads)
                gates = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
                where = {"slots": slots, "start": start[slots], "lengths": lengths, "order": order, "parents": parents}
                where = {name: jnp.asarray(value, jnp.int32) for name, value in where.items()}
                where["lower_bound"] = lower_bound
                how = {"implementation": implementation, "interpret": interpret}
                expected, after = prepare.prepare(spec, weights, ring, qkv, *gates, **where, implementation="xla")
                got, ring = prepare.prepare(spec, weights, ring, qkv, *gates, **where, **how)
                assert same_bits(ring, after), "the rings differ"
                for x, y in zip(got[:3], expected[:3], strict=True):
                    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
                    assert (x[~real] == 0).all() and np.isfinite(x[real]).all(), "dead tokens, or NaN among others"
                    errors = np.linalg.norm(x - y, axis=-1) / np.maximum(np.linalg.norm(y, axis=-1), 1e-3)
                    found[dtype] = max(found.get(dtype, 0.0), float(errors.max(initial=0.0)))
                for x, y in zip(got[3:], expected[3:], strict=True):
                    error = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))
                    found["gates"] = max(found.get("gates", 0.0), error)
                start[slots] += rng.integers(0, np.where(slots > 0, lengths, 0) + 1).astype(np.int32)
                start[0] = 0
        assert found[dtype] <= CONVOLVED[dtype], f"{dtype}: {found[dtype]}, at most {CONVOLVED[dtype]}"
    assert found["gates"] <= CONVOLVED["float32"], f"gates: {found['gates']}, at most {CONVOLVED['float32']}"
    return found


def check_convolution_loop(rng, channels: int = 9728, rows: int = 8) -> Figures:
    """A loop of convolutions with a donated ring writes nothing of the ring's size."""
    slots, dtype = jnp.arange(1, rows + 1, dtype=jnp.int32), jnp.bfloat16
    ring = jax.eval_shape(lambda: init_ring(slots=rows, channels=channels, width=4, max_pending=8, dtype=dtype))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(ring, weight, x):
        def step(i, carry):
            ring, y = carry
            where = {"slots": slots, "start": jnp.full_like(slots, i), "lengths": jnp.ones_like(slots)}
            y, ring = extend_ring(ring, weight, y, **where, activation="silu", implementation="gpu")
            return ring, y

        return jax.lax.fori_loop(0, 32, step, (ring, x))

    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((channels, 4), (rows, 1, channels)))
    found = pool_sized_writes(loop.lower(ring, *arrays).compile().as_text(), ring)
    assert not found, "\n".join(found)
    return {"instructions": 0.0}


GROUPED = {  # heads, value_dim, groups
    "Nemotron-H-8B": (128, 64, 8),
    "Nemotron-3-Nano-4B": (96, 80, 8),
    "Nemotron-3-Nano-30B-A3B": (64, 64, 8),
    "Granite-4.0-H-Small": (128, 64, 1),
    "Granite-4.0-H-Tiny": (48, 64, 1),
    "Granite-4.0-H-350M": (24, 64, 1),
}
HEADS = (32, 64), (32, 80), (32, 128), (16, 256)  # heads, value_dim
NORMED = {"float32": 1e-5, "bfloat16": 8e-3}  # of a token's numbers, relative to float64: two roundings by up to 2**-8


def check_gated_norms(rng) -> Figures:
    """Norms of heads and of groups, with their gates, of few and many tokens, against float64."""
    found: Figures = {}

    def compare(name: str, dtype: str, y, expected) -> None:
        y = np.asarray(y, np.float64)
        error = float(np.max(np.linalg.norm(y - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))
        assert error <= NORMED[dtype], f"{name}, {dtype}: {error}, at most {NORMED[dtype]}"
        found[f"{name}, {dtype}"] = max(found.get(f"{name}, {dtype}", 0.0), error)

    def root(x):
        return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    sizes = [(f"heads of {dim}", heads, dim, 0) for heads, dim in HEADS]
    sizes += [(name, *size) for name, size in GROUPED.items()]
    for name, heads, dim, groups in sizes:
        for dtype in NORMED:
            for rows, time in ((1, 1), (3, 16), (64, 1), (7, 5)):
                flat = rows, time, heads * dim
                shapes = (0.1, (*flat[:2], heads, dim)), (4, flat), (1, (flat[2] if groups else dim,))
                arrays = [jnp.asarray(scale * rng.standard_normal(shape), dtype) for scale, shape in shapes]
                out, z, weight = (np.asarray(x, np.float64) for x in arrays)
                gate = z / (1 + np.exp(-z))
                if not groups:
                    expected = (out / root(out) * weight).reshape(flat)
                    for activation, factor in (("silu", gate), ("sigmoid", 1 / (1 + np.exp(-z)))):
                        y = gated_norm(*arrays, eps=1e-5, activation=activation, implementation="gpu")
                        compare(name, dtype, y, expected * factor)
                    continue
                D = jnp.asarray(rng.standard_normal(heads), jnp.float32)
                values = jnp.asarray(rng.standard_normal(out.shape), dtype)
                # The sum is rounded twice, and of that the norm is computed in float64.
                added = arrays[0] + (D[None, None, :, None] * values.astype(jnp.float32)).astype(dtype)
                for form, before, after, skip in (
                    ("gated", gate, 1, None),
                    ("gated after", 1, gate, None),
                    ("gated", gate, 1, (D, values)),
                ):
                    out = np.asarray(arrays[0] if skip is None else added, np.float64)
                    grouped = (out.reshape(flat) * before).reshape(*flat[:2], groups, -1)
                    expected = (grouped / root(grouped)).reshape(flat) * weight * after
                    how = {"groups": groups, "eps": 1e-5, "form": form, "skip": skip}
                    compare(name, dtype, grouped_norm(*arrays, **how, implementation="gpu"), expected)
    return found


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "experts_are_those_of_float64": check_experts,
    "attention_is_that_of_float64": check_attention,
    "convolutions_are_xlas": check_convolutions,
    "gated_norms_are_those_of_float64": check_gated_norms,
    "prepared_trees_are_xlas": check_prepared_trees,
    "prepared_trees_of_kda_are_xlas": lambda rng: {
        f"{name}, {'bounded' if bound else 'no bound'}": error
        for bound in (None, -5.0)
        for name, error in check_prepared_trees(rng, KIMI, lower_bound=bound).items()
    },
    "no_ring_sized_write_in_a_loop_of_convolutions": check_convolution_loop,
    "projections_are_those_of_float64": check_projections,
    "attention_of_chunks_is_that_of_float64": check_chunks,
    "attention_of_long_chunks_and_its_gradient_are_xlas_in_float32": check_long_chunk,
}
