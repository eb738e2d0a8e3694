"""What must hold of the kernels that stand around the recurrence: the convolution, `prepare` of trees, gated norms.

As in `checks.py`, which has those of the recurrence.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.extend.gpu_products import VECTORS
from jaxbuf.pallas.instructions import end_copies, synchronize, wait_for_copies
from jaxbuf.pallas.threads import COMPILER, copy_vector, load, store
from jaxbuf.recurrence import RecurrenceSpec, prepare
from jaxbuf.recurrence.convolution import extend_ring, init_ring
from jaxbuf.recurrence.gated_norm import gated_norm, grouped_norm
from tests.gpu.checks import QWEN, Figures, same_bits
from tests.gpu.program import pool_sized_writes

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


def check_copied_vectors(rng, interpret: bool = False) -> Figures:
    """Vectors that threads copy to shared memory arrive whole, whichever thread begins."""
    firsts, differ = (0, 16, 80, 112, 127), 0
    for length, dtype in ((128, "bfloat16"), (128, "float32"), (256, "bfloat16"), (256, "float32"), (64, "bfloat16")):
        layout = VECTORS[length]

        def copy(given, out, memory, layout=layout):
            for i, first in enumerate(firsts):
                copy_vector(given.at[i], memory.at[i], first, interpret)
            end_copies(interpret)
            wait_for_copies(0, interpret)
            synchronize(interpret)
            for i in range(len(firsts)):
                store(out.at[i], load(memory.at[i], layout))

        given = jnp.asarray(rng.standard_normal((len(firsts), length)), dtype)
        found = plgpu.kernel(
            copy,
            out_type=jax.ShapeDtypeStruct(given.shape, given.dtype),
            grid=(1,),
            grid_names=("block",),
            scratch_types=[plgpu.SMEM(given.shape, given.dtype)],
            compiler_params=COMPILER,
            interpret=plgpu.InterpretGPUParams() if interpret else False,
        )(given)
        differ += int(jnp.sum(found != given))
    assert not differ, f"{differ} numbers were not copied"
    return {"different numbers": 0.0}


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "vectors_that_threads_copy_arrive_whole": check_copied_vectors,
    "convolutions_are_xlas": check_convolutions,
    "no_ring_sized_write_in_a_loop_of_convolutions": check_convolution_loop,
    "prepared_trees_are_xlas": check_prepared_trees,
    "prepared_trees_of_kda_are_xlas": lambda rng: {
        f"{name}, {'bounded' if bound else 'no bound'}": error
        for bound in (None, -5.0)
        for name, error in check_prepared_trees(rng, KIMI, lower_bound=bound).items()
    },
    "gated_norms_are_those_of_float64": check_gated_norms,
}
