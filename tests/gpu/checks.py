"""What must hold of the kernels and can be seen on a GPU alone: functions that raise AssertionError if it does not.

They need no pytest: `scripts/check_gpu` runs them where there is none. Each returns the figures it has looked at.
"""

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.bench import companions
from jaxbuf.bench.random_model import configuration, random_model
from jaxbuf.models.experts import mixture
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import Norm
from jaxbuf.models.projections import gated_project, project
from jaxbuf.models.residual import add_and_norm
from jaxbuf.pallas.extend import gpu_schedule
from jaxbuf.recurrence import RecurrenceSpec, buffered, prepare
from jaxbuf.recurrence.convolution import init_ring
from jaxbuf.recurrence.state_format import decode
from jaxbuf.serving import SamplingParams, generate_tokens, init_carry
from jaxbuf.serving.batch import Decoding, make_batch
from tests.attention import launches
from tests.gpu.program import pool_sized_writes

QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
MAMBA = RecurrenceSpec(heads=32, key_heads=4, key_dim=128, value_dim=64, delta=False)
SMALL = RecurrenceSpec(heads=4, key_heads=2, key_dim=128, value_dim=128)
BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}  # of a vector, relative to XLA's path; by entry dtype
KEPT = {"split": 1e-4, "split8": 4e-4}  # of a state with both its halves
ROWS, LIMIT, MAX_PENDING = 8, 6, 8
WRITTEN = ("updates", "checkpoints")  # arrays of a pool that a kernel computes

type Figures = dict[str, float]


def new_inputs(rng, spec: RecurrenceSpec, rows: int, time: int, dtype) -> tuple[jax.Array, ...]:
    """q, k (normalised), v; log_decay and beta in float32."""
    q, k = rng.standard_normal((2, rows, time, spec.key_heads, spec.key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((rows, time, spec.heads, spec.value_dim))
    log_decay, beta = -0.3 * np.abs(rng.standard_normal(v.shape[:3])), rng.uniform(0.1, 1.0, v.shape[:3])
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), *(jnp.asarray(x, jnp.float32) for x in (log_decay, beta))


def poisoned(
    spec: RecurrenceSpec, slots: int = ROWS, limit: int | jax.Array = LIMIT, **settings
) -> buffered.BufferedState:
    """A memory in which everything that no slot has written is NaN."""
    cache = buffered.init(spec, slots=slots, limit=limit, **({"max_pending": MAX_PENDING} | settings))
    return buffered.BufferedState(cache.cursor, jax.tree.map(spoiled, cache.pool))


def spoiled(x):
    """NaN in place of every number; of integers, which have none, 99."""
    return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 99)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("implementation", "interpret"))
def extend(spec, cache, inputs, slots, lengths, *, implementation, interpret=False):
    how = {"implementation": implementation, "interpret": interpret}
    return buffered.extend(spec, cache, *inputs, slots=slots, lengths=lengths, **how)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("implementation", "interpret"))
def fold(spec, cache, slots, *, implementation, interpret=False):
    return buffered.fold(spec, cache, slots=slots, implementation=implementation, interpret=interpret)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def worst(found, expected) -> float:
    """The largest relative error of what all heads have of a token, or one of a state; NaN must be where expected."""
    largest, same = _compare(found, expected)
    assert same, "a NaN reached what is not its own"
    return float(largest)


@jax.jit
def _compare(found, expected):
    found, expected = (jnp.asarray(x, jnp.float32) for x in (found, expected))
    same = jnp.array_equal(jnp.isnan(found), jnp.isnan(expected))
    found, expected = (jnp.where(jnp.isnan(x), 0, x) for x in (found, expected))
    norm, error = (jnp.sqrt(jnp.sum(x**2, axis=(-2, -1))) for x in (expected, found - expected))
    return jnp.max(error / jnp.maximum(norm, 1e-3)), same


def errors(
    rng,
    entry: str,
    state: str = "float32",
    time: int = 5,
    spec: RecurrenceSpec = QWEN,
    implementation: str = "gpu",
    **sizes,
) -> Figures:
    """The worst errors over ragged steps with rejections and folds; every step starts from XLA's memory."""
    found = {"out": 0.0, "entries": 0.0, "checkpoints": 0.0}
    cache = poisoned(spec, entry_dtype=jnp.dtype(entry), state_dtype=state, **sizes)
    slots, folds = jnp.asarray(rng.permutation(ROWS) + 1, jnp.int32), 0
    for _ in range(24):
        inputs = new_inputs(rng, spec, ROWS, time, jnp.dtype("float32" if entry == "float32" else "bfloat16"))
        lengths = rng.integers(0, time + 1, ROWS)
        rows = slots, jnp.asarray(lengths, jnp.int32)
        expected, reference = extend(spec, cache, inputs, *rows, implementation="xla")
        out, after = extend(spec, cache, inputs, *rows, implementation=implementation)
        found["out"] = max(found["out"], worst(out, expected))
        for name in ("keys", "gates"):
            assert same_bits(getattr(after.pool, name), getattr(reference.pool, name)), f"{name} differ"
        found["entries"] = max(found["entries"], worst(after.pool.updates, reference.pool.updates))
        states = [decode(x.pool.checkpoints, x.pool.low, x.pool.low_scales) for x in (after, reference)]
        found["checkpoints"] = max(found["checkpoints"], worst(*states))
        folds += int(np.sum(np.asarray(reference.cursor.folded > cache.cursor.folded)))
        accepted = jnp.asarray(rng.integers((lengths + 1) // 2, lengths + 1), jnp.int32)
        cache = buffered.commit(reference, accepted, slots=slots)
    assert folds > 0, "no row folded"
    return found


def check_errors(rng, entry: str, state: str = "float32", times: tuple[int, ...] = (1, 5), **settings) -> Figures:
    found = {}
    for time in times:
        figures = errors(rng, entry, state, time, **settings)
        bounds = dict.fromkeys(figures, BOUNDS[entry])
        if state == "bfloat16":
            bounds["checkpoints"] = BOUNDS["bfloat16"]
        if state in KEPT:
            bounds["checkpoints"] = KEPT[state]
        if entry == "float16":  # the outputs themselves are bfloat16
            bounds["out"] = BOUNDS["bfloat16"]
        assert all(figures[name] <= bounds[name] for name in figures), f"{time} at once: {figures}, at most {bounds}"
        found |= {f"{name}, {time} at once": error for name, error in figures.items()}
    return found


def check_recurrent(rng, entry: str, state: str = "float32", **settings) -> Figures:
    """At limit 1, tokens come one by one and every step folds."""
    return check_errors(rng, entry, state, times=(1,), limit=1, max_pending=1, **settings)


# Limits, tokens at once and rows: few are dealt, many drawn.
LONG = ((32,), 5, ROWS), ((32,), 9, 64), ((100,), 1, 64)  # one later chunk, two and more
MIXED = ((250, 20, 60), 1, ROWS), ((250, 20, 100), 3, 64)  # rows that fold, hold a checkpoint, or do not, side by side
ALONE = ((250, 20, 100), 1, 64), ((90, 20, 50), 1, ROWS)  # likewise, if tokens only come one by one


def check_long_rings(
    rng,
    sizes=(*LONG, *MIXED),
    max_pending: int = 16,
    spec: RecurrenceSpec = QWEN,
    implementation: str = "gpu",
    most: int = 64,
    state_dtype: str = "float32",
) -> Figures:
    """A step at every filling of a ring; `most` rows at most."""
    found = {}
    for limits, time, rows in sizes:
        limit, rows = max(limits), min(rows, most)
        given = {"max_pending": max_pending, "state_dtype": state_dtype}
        cache = poisoned(spec, rows, jnp.asarray(np.resize(limits, rows), jnp.int32), **given)
        slots, figures = jnp.arange(1, rows + 1, dtype=jnp.int32), []
        at_once = min(8, max_pending)
        begun = jnp.asarray(rng.integers(0, 9, rows), jnp.int32)  # rows do not go in step
        prompts = new_inputs(rng, spec, rows, 8, jnp.bfloat16)
        _, cache = buffered.prefill(spec, cache, *prompts, slots=slots, lengths=begun, keep=begun)
        for _ in range(limit // 5 + 3):  # at least limit + 11 tokens
            for _ in range(8 // at_once):
                inputs = new_inputs(rng, spec, rows, at_once, jnp.bfloat16)
                lengths = jnp.asarray(rng.integers(5, 9, rows) if at_once > 1 else np.ones(rows), jnp.int32)
                _, cache = extend(spec, cache, inputs, slots, lengths, implementation="xla")
                cache = buffered.commit(cache, lengths, slots=slots)
            step = spec, cache, new_inputs(rng, spec, rows, time, jnp.bfloat16), slots, jnp.full_like(slots, time)
            (expected, reference), (out, after) = (extend(*step, implementation=x) for x in ("xla", implementation))
            pairs = [(out, expected), *((getattr(x.pool, name) for x in (after, reference)) for name in WRITTEN)]
            figures += [worst(*pair) for pair in pairs]
        assert int(jnp.min(cache.cursor.folded[1:])) > 0, "a row has not folded"
        what = f"limit {limit}, {time} at once, {rows} rows"
        assert max(figures) <= BOUNDS["bfloat16"], f"{what}: {max(figures)}, at most {BOUNDS['bfloat16']}"
        found[what] = max(figures)
    return found


def check_at_once(
    rng,
    entry: str,
    held: int = 0,
    spec: RecurrenceSpec = QWEN,
    implementation: str = "gpu",
    state_dtype: str = "float32",
) -> Figures:
    """T tokens at once and one by one store the same bits, behind `held` entries and behind more, with gates near 0
    and far from it."""
    time, cache = 5, poisoned(spec, limit=held + 32, entry_dtype=jnp.dtype(entry), state_dtype=state_dtype)
    slots, ones = jnp.arange(1, ROWS + 1, dtype=jnp.int32), jnp.ones(ROWS, jnp.int32)
    for _ in range(held // MAX_PENDING):
        inputs = new_inputs(rng, spec, ROWS, MAX_PENDING, jnp.bfloat16)
        _, cache = extend(spec, cache, inputs, slots, MAX_PENDING * ones, implementation="xla")
        cache = buffered.commit(cache, MAX_PENDING * ones, slots=slots)
    for _ in range(5):  # up to 30 entries: more than one chunk, and no fold
        *inputs, log_decay, beta = new_inputs(rng, spec, ROWS, time, jnp.bfloat16)
        extreme = rng.choice(np.array([0, -1e-6, -20, -130, -np.inf], np.float32), log_decay.shape)
        log_decay = jnp.where(rng.random(log_decay.shape) < 0.03, extreme, log_decay)
        inputs = *inputs, log_decay, beta
        _, at_once = extend(spec, cache, inputs, slots, time * ones, implementation=implementation)
        one_by_one = cache
        for t in range(time):
            token = tuple(x[:, t : t + 1] for x in inputs)
            _, one_by_one = extend(spec, one_by_one, token, slots, ones, implementation=implementation)
            one_by_one = buffered.commit(one_by_one, ones, slots=slots)
        for name in ("keys", "updates", "gates"):
            found, expected = (np.asarray(getattr(x.pool, name)) for x in (at_once, one_by_one))
            different = np.unpackbits(np.bitwise_xor(found.view(np.uint8), expected.view(np.uint8))).sum()
            with np.errstate(invalid="ignore"):  # -inf less -inf
                largest = np.nanmax(np.abs(found.astype(np.float32) - expected.astype(np.float32)))
            assert different == 0, f"{different} bits of {name} differ, by at most {largest:.1e}"
        kept = jnp.asarray(rng.integers(1, time + 1, ROWS), jnp.int32)
        cache = buffered.commit(at_once, kept, slots=slots)
    return {"different bits": 0.0}


def check_poison(rng, spec: RecurrenceSpec = QWEN, implementation: str = "gpu") -> Figures:
    """Ragged steps of some slots among NaN: finite where there are tokens, zero elsewhere, other slots untouched."""
    time, cache = 5, poisoned(spec)
    for _ in range(6):
        inputs = new_inputs(rng, spec, ROWS, time, jnp.bfloat16)
        slots = np.where(rng.random(ROWS) < 0.3, 0, rng.permutation(ROWS) + 1)
        lengths = rng.integers(0, time + 1, ROWS)
        real = (np.arange(time) < lengths[:, None]) & (slots > 0)[:, None]
        inputs = tuple(
            jnp.where(jnp.asarray(real).reshape(ROWS, time, *[1] * (x.ndim - 2)), x, jnp.nan) for x in inputs
        )
        rows = jnp.asarray(slots, jnp.int32), jnp.asarray(lengths, jnp.int32)
        out, after = extend(spec, cache, inputs, *rows, implementation=implementation)
        out = np.asarray(out, np.float32)
        assert np.isfinite(out[real]).all(), "the output of a token is not finite"
        assert (out[~real] == 0).all(), "the output past a row's tokens is not zero"
        resting = np.setdiff1d(np.arange(ROWS + 1), slots[(lengths > 0) & (slots > 0)])
        blocks = np.asarray(cache.cursor.block_table)[resting].ravel()
        for name, held in (("checkpoints", resting), ("keys", blocks), ("updates", blocks), ("gates", blocks)):
            old, new = (np.asarray(getattr(x.pool, name))[held] for x in (cache, after))
            assert same_bits(old, new), f"{name} of a slot that rested, or of the null slot, changed"
        accepted = jnp.asarray(np.where(slots > 0, lengths, 0), jnp.int32)
        cache = buffered.commit(after, accepted, slots=rows[0])
    return {}


def spoil(rng, x, where: np.ndarray):
    """x [rows, T, ...] with NaN and infinities in the tokens `where` (bool [rows, T])."""
    bad = jnp.asarray(rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape), x.dtype)
    return jnp.where(jnp.asarray(where).reshape(*where.shape, *[1] * (x.ndim - 2)), bad, x)


@jax.jit
def before_launch(cursor: buffered.Cursor):
    """Where the committed state of every slot lies."""
    everyone = jnp.arange(1, cursor.length.shape[0])
    return buffered.begin(cursor, everyone, jnp.zeros_like(everyone), 1)[0].before


read = jax.jit(buffered.read, static_argnums=0)


@jax.jit
def commit(cache, accepted, *, slots):
    return buffered.commit(cache, accepted, slots=slots)


def spoil_uncommitted(rng, cache: buffered.BufferedState) -> buffered.BufferedState:
    """NaN and infinities in all that no slot has committed: rejected and dead entries, the null row and block."""
    cursor, pool = cache.cursor, cache.pool
    where = before_launch(cursor)
    live = np.arange(where.entries.shape[1])[None] < np.asarray(where.live)[:, None]
    shape = pool.keys.shape[:2]
    dead = ~np.isin(np.arange(np.prod(shape)), np.asarray(where.entries)[live]).reshape(shape)
    held = np.asarray(where.checkpoint)[np.asarray(where.has_checkpoint)]
    empty = ~np.isin(np.arange(pool.checkpoints.shape[0]), held)
    entries = (spoil(rng, x, dead) for x in (pool.keys, pool.updates, pool.gates))
    states = (pool.checkpoints, pool.low, pool.low_scales)
    checkpoints, low, scales = (
        x if x is None or x.dtype == jnp.int8 else spoil(rng, x[:, None], empty[:, None])[:, 0] for x in states
    )
    return buffered.BufferedState(cursor, buffered.Pool(checkpoints, *entries, low, scales))


def check_rejected(
    rng,
    time: int = 5,
    limit: int = LIMIT,
    spec: RecurrenceSpec = QWEN,
    implementation: str = "gpu",
    interpret: bool = False,
    steps: int = 12,
    rows: int = ROWS,
    entry: str = "bfloat16",
    state_dtype: str = "float32",
) -> Figures:
    """Drafts that are rejected, and whatever else was never committed, may be NaN or infinite: the next launches give
    the bits that they give without, and so do folds inside a step and forced ones."""
    how, sizes = {"implementation": implementation, "interpret": interpret}, {"limit": limit, "max_pending": time}
    clean = sick = buffered.init(spec, slots=rows, **sizes, entry_dtype=jnp.dtype(entry), state_dtype=state_dtype)
    everyone, folds = jnp.arange(1, rows + 1, dtype=jnp.int32), 0

    def compare(found, expected, what):
        assert same_bits(found, expected), f"{what} differs where what is not committed is not finite"
        assert np.isfinite(np.asarray(found, np.float32)).all(), f"{what} is not finite"

    for step in range(steps):
        inputs = new_inputs(rng, spec, rows, time, jnp.bfloat16)
        slots = np.where(rng.random(rows) < 0.2, 0, rng.permutation(rows) + 1)
        lengths = rng.integers(0, time + 1, rows)
        accepted = np.where(slots > 0, rng.integers(0, lengths + 1), 0)
        if step < 2:  # Rows with short rings fold for certain.
            slots, lengths, accepted = np.arange(1, rows + 1), np.full(rows, time), np.full(rows, time)
        rejected, past = (np.arange(time)[None] >= count[:, None] for count in (accepted, lengths))
        launch = jnp.asarray(slots, jnp.int32), jnp.asarray(lengths, jnp.int32)
        _, after = extend(spec, clean, inputs, *launch, **how)
        folds += int(np.sum(np.asarray(after.cursor.folded > clean.cursor.folded)))
        clean = commit(after, jnp.asarray(accepted, jnp.int32), slots=launch[0])
        spoiled = tuple(spoil(rng, x, rejected) for x in inputs)
        _, after = extend(spec, spoil_uncommitted(rng, sick), spoiled, *launch, **how)
        sick = commit(after, jnp.asarray(accepted, jnp.int32), slots=launch[0])
        sick = spoil_uncommitted(rng, sick)
        # The next launch, of which nothing is kept.
        inputs = new_inputs(rng, spec, rows, time, jnp.bfloat16)
        expected, _ = extend(spec, clean, inputs, *launch, **how)
        found, _ = extend(spec, sick, tuple(spoil(rng, x, past) for x in inputs), *launch, **how)
        compare(found, expected, "an output")
        compare(*(read(spec, x, everyone) for x in (sick, clean)), "a state")
    assert folds > 0, "no row folded"
    clean, sick = (fold(spec, x, everyone, **how) for x in (clean, sick))
    compare(*(read(spec, x, everyone) for x in (sick, clean)), "a state after a forced fold")
    return {"folds": float(folds)}


def check_rejected_inputs(
    rng,
    spec: RecurrenceSpec = QWEN,
    implementation: str = "gpu",
    interpret: bool = False,
    steps: int = 12,
) -> Figures:
    """The same of the convolution's ring: what `prepare` gives real tokens, bit for bit."""
    time, width, how = 5, 4, {"implementation": implementation, "interpret": interpret}
    channels = 2 * spec.key_heads * spec.key_dim + spec.heads * spec.value_dim
    taps, (A_log, dt_bias) = rng.standard_normal((channels, width)), rng.standard_normal((2, spec.heads))
    gates = (jnp.asarray(x, jnp.float32) for x in (A_log, dt_bias))
    weights = prepare.Weights(jnp.asarray(taps, jnp.bfloat16), *gates)
    ring = init_ring(slots=ROWS, channels=channels, width=width, max_pending=time, dtype=jnp.bfloat16)
    rings, start = [ring, jnp.full_like(ring, jnp.nan)], np.zeros(ROWS + 1, np.int32)
    for _ in range(steps):
        slots = np.where(rng.random(ROWS) < 0.2, 0, rng.permutation(ROWS) + 1)
        lengths = np.where(slots > 0, rng.integers(0, time + 1, ROWS), 0)
        accepted = rng.integers(0, lengths + 1)
        for kept in (accepted, lengths):  # a launch with rejected drafts, and the next one, of which nothing is kept
            raw = jnp.asarray(rng.standard_normal((ROWS, time, channels)), jnp.bfloat16)
            raw = raw, *jnp.asarray(rng.standard_normal((2, ROWS, time, spec.heads)), jnp.float32)
            spoiled = tuple(spoil(rng, x, np.arange(time)[None] >= kept[:, None]) for x in raw)
            integers = {"slots": slots, "start": start[slots], "lengths": lengths}
            where = {name: jnp.asarray(x, jnp.int32) for name, x in integers.items()}
            (expected, clean), (found, sick) = (
                prepare.prepare(spec, weights, ring, *x, **where, **how)
                for ring, x in zip(rings, (raw, spoiled), strict=True)
            )
            real = np.arange(time)[None] < kept[:, None]
            for name, x, y in zip(prepare.Inputs._fields, found, expected, strict=True):
                assert same_bits(np.asarray(x)[real], np.asarray(y)[real]), f"{name} differs"
                assert np.isfinite(np.asarray(x, np.float32)[real]).all(), f"{name} is not finite"
            if kept is accepted:
                rings, start[slots] = [clean, sick], start[slots] + accepted
                start[0] = 0
    return {}


def check_loop(spec: RecurrenceSpec = QWEN, implementation: str = "gpu", state_dtype: str = "float32") -> Figures:
    """A loop of steps with a donated memory writes nothing of a pool's size."""
    slots = jnp.arange(1, ROWS + 1, dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, inputs):
        def step(_, carry):
            cache, _ = carry
            out, cache = buffered.extend(spec, cache, *inputs, slots=slots, implementation=implementation)
            return buffered.commit(cache, jnp.ones_like(slots), slots=slots), out

        return jax.lax.fori_loop(0, 32, step, (cache, inputs[2]))

    cache = jax.eval_shape(lambda: buffered.init(spec, slots=ROWS, limit=LIMIT, max_pending=1, state_dtype=state_dtype))
    inputs = jax.eval_shape(lambda: new_inputs(np.random.default_rng(0), spec, ROWS, 1, jnp.bfloat16))
    found = pool_sized_writes(loop.lower(cache, inputs).compile().as_text(), _pools(cache.pool))
    assert not found, "\n".join(found)
    return {"instructions": 0.0}


def _pools(pool: buffered.Pool):
    """Without the gates, which may be written whole."""
    return dataclasses.replace(pool, gates=())


def two_layers(dtype: str = "float32") -> LanguageModel:
    """A recurrent layer of 128 by 128 heads and a softmax layer, with all parameters random."""
    sizes = {"layers": 2, "hidden": 64, "ffn": 96, "vocabulary": 259, "heads": 4, "key_heads": 2, "dim": 128}
    config = configuration(**sizes, attention_heads=4, kv_heads=2, attention_dim=16)
    lm = random_model(config, jnp.dtype(dtype))
    leaves, tree = jax.tree.flatten(lm.model)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + (0.15 * jax.random.normal(key, x.shape)).astype(x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return dataclasses.replace(lm, model=jax.tree.unflatten(tree, noisy))


def demo() -> LanguageModel:
    return jaxbuf.load("demo", dtype="float32")


def check_program(lm: LanguageModel) -> Figures:
    """The whole decoding program writes nothing as large as a recurrent layer's pools or a softmax layer's pages."""
    batch = make_batch(lm, [[1] * 30] * ROWS, SamplingParams(temperature=0.5), Decoding(200, form="buffered"))
    carry = jax.eval_shape(lambda: init_carry(lm.config, batch.sizes))
    program = jax.jit(generate_tokens.__wrapped__, donate_argnums=1)
    hlo = program.lower(lm.model, carry, np.int32(9)).compile().as_text()
    pools = [_pools(layer.pool) if hasattr(layer, "pool") else layer for layer in carry.cache.layers]
    found = pool_sized_writes(hlo, pools)
    assert not found, "\n".join(found)
    return {"instructions": 0.0}


def without_kernels(lm: LanguageModel) -> LanguageModel:
    """The same model, compiled by XLA alone."""
    return dataclasses.replace(lm, compiled_for=lm.target.without_kernels())


def check_tokens(lm: LanguageModel, tokens: int = 64) -> Figures:
    """Greedy tokens of jaxbuf.generate are those without kernels, in float32 and both forms."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, lm.vocab_size, length).tolist() for length in (3, 17, 40, 5)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def generated(lm):
        forms = ("recurrent", "buffered")
        runs = [jaxbuf.generate(lm, prompts, tokens, sampling, form=form) for form in forms]
        return {form: [result.tokens for result in run] for form, run in zip(forms, runs, strict=True)}

    found, expected = generated(lm), generated(without_kernels(lm))
    assert found == expected, "the tokens differ"
    return {"tokens": 2.0 * tokens * len(prompts)}


def greedy(lm: LanguageModel, tokens: int, form: str = "auto") -> list[tuple[np.ndarray, np.ndarray]]:
    """Of some random prompts the greedy tokens and their log-probabilities."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, lm.vocab_size, length).tolist() for length in (3, 17, 40, 5)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
    results = jaxbuf.generate(lm, prompts, tokens, sampling, form=form)
    return [(np.array(result.tokens), np.array(result.logprobs)) for result in results]


def compared(found, expected) -> tuple[float, float]:
    """The largest difference of log-probabilities as long as all tokens before are the same, and how many those are."""
    worst, same = 0.0, 0
    for (taken, logprobs), (others, wanted) in zip(found, expected, strict=True):
        until = int(np.argmin(np.append(taken == others, False)))
        same += until
        worst = max(worst, float(np.abs(logprobs - wanted)[: until + 1].max()))
    return worst, float(same)


def check_logprobs(lm: LanguageModel, tokens: int = 32) -> Figures:
    """jaxbuf.generate with kernels differs from the same without by no more than the two forms do without kernels.

    For a model in bfloat16, of which greedy tokens differ where two are as good as each other. There may be twice the
    forms' own largest difference.
    """
    found = greedy(lm, tokens, "buffered")
    expected, recurrent = (greedy(without_kernels(lm), tokens, form) for form in ("buffered", "recurrent"))
    (worst, same), (allowed, others) = compared(found, expected), compared(recurrent, expected)
    assert worst <= 2 * allowed, f"log-probabilities differ by {worst}, those of the forms by {allowed}"
    figures = {"log-probabilities": worst, "of the forms": allowed, "tokens": float(tokens * len(found))}
    return figures | {"tokens until they differ": same, "of the forms, until they differ": others}


def check_rounding(lm: LanguageModel, tokens: int = 32) -> Figures:
    """jaxbuf.generate with kernels is as close to float32 as without: the largest difference may be twice that of XLA's
    path in the model's dtype."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == lm.dtype else x, lm.model)
    exact = without_kernels(dataclasses.replace(lm, model=wide, dtype=jnp.dtype("float32")))
    expected = greedy(exact, tokens)
    figures: Figures = {"tokens": float(tokens * len(expected))}
    for name, model in (("with kernels", lm), ("without", without_kernels(lm))):
        worst, same = compared(greedy(model, tokens), expected)
        figures |= {f"log-probabilities {name}": worst, f"tokens until they differ {name}": same}
    worst, allowed = (figures[f"log-probabilities {name}"] for name in ("with kernels", "without"))
    assert worst <= 2 * allowed, f"log-probabilities differ from float32's by {worst}, without kernels by {allowed}"
    return figures


def check_family(name: str, **sizes: int) -> Figures:
    """A random model in bfloat16, of a known one's first layers."""
    return check_rounding(random_model(configuration(name, vocabulary=4096, **sizes), jnp.dtype("bfloat16")))


@mock.patch.object(gpu_schedule, "PROCESSORS", 1)  # a warpgroup serves several heads
def tiny(implementation: str = "gpu") -> Figures:
    """A few steps of three small rows: folds, several tokens at once, short rings and long ones of either kind; and
    the kernels around them: what compute-sanitizer is run on."""
    rng = np.random.default_rng(0)
    sizes = (1, 1, ()), (3, 3, ()), (60, 3, (57, 40, 3)), (32, 9, (30, 17, 1)), (150, 1, (149, 90, 5))
    cases = [(*size, "float32") for size in sizes]
    cases += [(*size, state) for size in (*sizes[:3], sizes[4]) for state in ("split", "split8")]
    for case in cases:
        tiny_steps(rng, SMALL, *case, implementation)
    for case in cases:
        if case[0] in (3, 60) and case[3] != "split8":
            tiny_steps(rng, dataclasses.replace(SMALL, value_dim=64, delta=False), *case, implementation)
    spec = dataclasses.replace(SMALL, key_heads=4)
    for operation in companions.OPERATIONS:
        print(operation, flush=True)
        case = companions.Case(operation, batch=3, time=3, implementation=implementation)
        with jax.default_device(jax.devices("cpu")[0]):
            layer = companions.make_layer(spec, case, "bfloat16", jax.random.key(0))
        layer = jax.device_put(layer, jax.devices()[0])
        where = companions.odd_integers(case, rng)
        jax.block_until_ready(companions.call(spec, operation, implementation, layer, where))
    tiny_layers(rng, implementation)
    return {}


def tiny_steps(rng, spec: RecurrenceSpec, limit: int, max_pending: int, held: tuple, state: str, implementation: str):
    """Steps of three rows, of which `held` says how many entries each has, with folds among them."""
    family, slots = "Gated DeltaNet" if spec.delta else "Mamba-2", np.arange(1, 4, dtype=np.int32)
    print(f"{family}, limit {limit}, at most {max_pending} tokens at once, {state} checkpoints", flush=True)
    # The tools would look at every program of the GPU, and the compiler tries many.
    with jax.default_device(jax.devices("cpu")[0]):
        cache = poisoned(spec, slots=3, limit=limit, max_pending=max_pending, state_dtype=state)
        if held:  # all in the ring
            prompts, lengths = new_inputs(rng, spec, 3, max(held), jnp.bfloat16), jnp.array(held)
            rows = {"slots": slots, "lengths": lengths, "keep": lengths, "implementation": "xla"}
            _, cache = buffered.prefill(spec, cache, *prompts, **rows)
    cache = jax.device_put(cache, jax.devices()[0])
    for time, accepted in ((1, 1), (max_pending, 2), (1, 1), (max_pending, 3), (1, 1)):
        inputs = new_inputs(rng, spec, 3, time, jnp.bfloat16)
        lengths = jnp.array([time, max(1, time - 1), time])
        out, cache = extend(spec, cache, inputs, slots, lengths, implementation=implementation)
        cache = buffered.commit(cache, jnp.minimum(lengths, accepted), slots=slots)
        jax.block_until_ready((out, cache))
    assert int(cache.cursor.folded.max()) > 0, f"no row folded at limit {limit}"


def tiny_layers(rng, implementation: str) -> None:
    """Attention, projections, the residual sum with its norm, and experts, of few tokens."""
    for head_dim, time, trees in ((64, 1, False), (128, 5, True), (256, 16, True)):
        print(f"attention of heads of {head_dim}, {time} tokens at once", flush=True)
        with jax.default_device(jax.devices("cpu")[0]):
            sizes = launches.Sizes((9, 70, 33), time, 4, 2, head_dim, trees=trees)
            launch = launches.make_launch(rng, sizes)
        arrays, integers = jax.device_put((launch.arrays, launch.integers), jax.devices()[0])
        jax.block_until_ready(append_and_attend(*arrays, **integers, implementation=implementation))
    hidden = 256

    def draw(*shape):
        return jax.device_put(np.asarray(hidden**-0.5 * rng.standard_normal(shape), jnp.bfloat16))

    experts = functools.partial(mixture, implementation=implementation)
    several = [draw(n, hidden) for n in (256, 64, 40)]
    for tokens in (1, 5, 70):
        print(f"projections, residual and experts of {tokens} tokens", flush=True)
        x = draw(tokens, 1, hidden)
        picked = np.stack([rng.permutation(8)[:2] for _ in range(tokens)]).astype(np.int32)
        share = np.full(picked.shape, 0.5, np.float32)
        outs = (
            project(x, several, float32=(False, False, True), implementation=implementation),
            gated_project(x, draw(256, hidden), draw(256, hidden), implementation=implementation),
            add_and_norm(x, x, draw(hidden), Norm(1e-6, 1.0), implementation=implementation),
            experts(x[:, 0], draw(8, 128, hidden), draw(8, hidden, 64), picked, share, gated=True),
            experts(x[:, 0], draw(8, 64, hidden), draw(8, hidden, 64), picked, share, gated=False),
        )
        jax.block_until_ready(outs)


CHECKS: dict[str, Callable[[np.random.Generator], Figures]] = {
    "a_step_is_xlas_with_float32_entries": lambda rng: check_errors(rng, "float32"),
    "a_step_is_xlas_with_bfloat16_entries": lambda rng: check_errors(rng, "bfloat16"),
    "a_step_is_xlas_with_float16_entries": lambda rng: check_errors(rng, "float16"),
    "a_step_is_xlas_with_a_bfloat16_checkpoint": lambda rng: check_errors(rng, "bfloat16", "bfloat16"),
    "a_step_is_xlas_with_a_split_checkpoint": lambda rng: check_errors(rng, "bfloat16", "split"),
    "a_step_is_xlas_with_a_split8_checkpoint": lambda rng: check_errors(rng, "bfloat16", "split8"),
    "a_step_is_xlas_with_a_split_checkpoint_and_many_entries": lambda rng: check_long_rings(
        rng, LONG[1:], state_dtype="split"
    ),
    "a_step_is_xlas_with_a_split8_checkpoint_and_many_entries": lambda rng: check_long_rings(
        rng, MIXED, state_dtype="split8"
    ),
    "a_recurrent_step_is_xlas_with_a_split_checkpoint": lambda rng: check_recurrent(rng, "bfloat16", "split"),
    "a_recurrent_step_is_xlas_with_a_split8_checkpoint": lambda rng: check_recurrent(rng, "bfloat16", "split8"),
    "tokens_at_once_store_the_bits_of_one_by_one_with_a_split_checkpoint": lambda rng: check_at_once(
        rng, "bfloat16", state_dtype="split"
    ),
    "a_step_is_xlas_with_more_entries_than_a_chunk": lambda rng: check_long_rings(rng, LONG),
    "a_step_is_xlas_with_rows_of_every_kind": lambda rng: check_long_rings(rng, MIXED),
    "a_step_is_xlas_where_tokens_only_come_one_by_one": lambda rng: check_long_rings(rng, ALONE, max_pending=1),
    "a_recurrent_step_is_xlas_with_float32_entries": lambda rng: check_recurrent(rng, "float32"),
    "a_recurrent_step_is_xlas_with_a_bfloat16_checkpoint": lambda rng: check_recurrent(rng, "bfloat16", "bfloat16"),
    "tokens_at_once_store_the_bits_of_one_by_one_bfloat16": lambda rng: check_at_once(rng, "bfloat16"),
    "tokens_at_once_store_the_bits_of_one_by_one_float32": lambda rng: check_at_once(rng, "float32"),
    "tokens_at_once_behind_many_entries_store_the_bits_of_one_by_one": lambda rng: check_at_once(rng, "bfloat16", 80),
    "tokens_at_once_behind_200_entries_store_the_bits_of_one_by_one": lambda rng: check_at_once(rng, "bfloat16", 200),
    "nan_reaches_no_row_that_it_does_not_belong_to": check_poison,
    "rejected_drafts_that_are_not_finite_change_no_bit": check_rejected,
    "rejected_drafts_that_are_not_finite_change_no_bit_with_float32_entries": lambda rng: check_rejected(
        rng, entry="float32"
    ),
    "rejected_drafts_that_are_not_finite_change_no_bit_behind_many_entries": lambda rng: check_rejected(
        rng, limit=60, steps=100
    ),
    "rejected_tokens_that_are_not_finite_change_no_bit_of_recurrent_steps": lambda rng: check_rejected(
        rng, time=1, limit=1
    ),
    "rejected_inputs_that_are_not_finite_change_no_bit": check_rejected_inputs,
    "rejected_drafts_that_are_not_finite_change_no_bit_with_a_split_checkpoint": lambda rng: check_rejected(
        rng, state_dtype="split"
    ),
    "no_pool_sized_write_in_a_loop_of_steps": lambda rng: check_loop(),
    "no_pool_sized_write_in_a_loop_of_steps_with_split_checkpoints": lambda rng: check_loop(state_dtype="split"),
    "no_pool_sized_write_in_a_loop_of_steps_with_split8_checkpoints": lambda rng: check_loop(state_dtype="split8"),
    "no_pool_sized_write_in_the_program_of_two_layers": lambda rng: check_program(two_layers()),
    "no_pool_sized_write_in_the_program_of_the_demo_model": lambda rng: check_program(demo()),
    "greedy_tokens_of_two_layers_are_those_without_kernels": lambda rng: check_tokens(two_layers()),
    "greedy_tokens_of_the_demo_model_are_those_without_kernels": lambda rng: check_tokens(demo()),
    "a_random_qwen3_5_4b_generates_as_without_kernels": lambda rng: check_logprobs(
        random_model(configuration(), jnp.dtype("bfloat16"))
    ),
    "the_tiny_program_runs": lambda rng: tiny(),
    "a_mamba_2_step_is_xlas": lambda rng: {
        f"{entry}, {name}": error for entry in BOUNDS for name, error in check_errors(rng, entry, spec=MAMBA).items()
    },
    "a_mamba_2_step_is_xlas_with_a_split_checkpoint": lambda rng: check_errors(rng, "bfloat16", "split", spec=MAMBA),
    "a_mamba_2_step_is_xlas_with_a_split8_checkpoint": lambda rng: check_errors(rng, "bfloat16", "split8", spec=MAMBA),
    "a_mamba_2_step_of_16_tokens_is_xlas": lambda rng: check_errors(
        rng, "bfloat16", times=(9, 16), spec=MAMBA, max_pending=16, limit=16
    ),
    "a_mamba_2_step_is_xlas_with_rows_of_every_kind": lambda rng: check_long_rings(rng, MIXED, spec=MAMBA),
    "a_mamba_2_step_is_xlas_where_tokens_only_come_one_by_one": lambda rng: check_long_rings(
        rng, ALONE, max_pending=1, spec=MAMBA
    ),
    "a_recurrent_mamba_2_step_is_xlas": lambda rng: check_recurrent(rng, "bfloat16", spec=MAMBA),
    "mamba_2_tokens_at_once_store_the_bits_of_one_by_one": lambda rng: check_at_once(rng, "bfloat16", spec=MAMBA),
    "nan_reaches_no_mamba_2_row_that_it_does_not_belong_to": lambda rng: check_poison(rng, MAMBA),
    "rejected_mamba_2_drafts_that_are_not_finite_change_no_bit": lambda rng: check_rejected(rng, spec=MAMBA),
    "no_pool_sized_write_in_a_loop_of_mamba_2_steps": lambda rng: check_loop(MAMBA),
}
# A model of each family, and how many of its layers, so that each kind of them is there; of experts some.
FEW_LAYERS: dict[str, tuple[str, dict[str, int]]] = {
    "bailing_hybrid": ("Ling-3.0-Flash", {"layers": 5, "experts": 64}),
    "falcon_h1": ("Falcon-H1-0.5B", {"layers": 3}),
    "granitemoehybrid": ("Granite-4.0-H-Tiny", {"layers": 4}),
    "kimi_linear": ("Kimi-Linear-48B-A3B", {"layers": 4, "experts": 64}),
    "llama": ("Llama-3.1-8B", {"layers": 3}),
    "mamba2": ("Mamba-2-2.7B", {"layers": 4}),
    "nemotron_h": ("Nemotron-3-Nano-30B-A3B", {"layers": 4}),
    "olmo_hybrid": ("Olmo-Hybrid-7B", {"layers": 4}),
    "qwen2": ("Qwen2.5-7B", {"layers": 3}),
    "qwen3": ("Qwen3-8B", {"layers": 3}),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B", {"layers": 4, "experts": 64}),
    "qwen3_moe": ("Qwen3-30B-A3B", {"layers": 3, "experts": 64}),
    "qwen3_next": ("Qwen3-Next-80B-A3B", {"layers": 4, "experts": 64}),
}
OF_FEW_LAYERS = {
    f"a_random_{family}_of_few_layers_generates_as_without_kernels": (family, *given)
    for family, given in FEW_LAYERS.items()
}
CHECKS |= {
    check: lambda rng, name=name, sizes=sizes: check_family(name, **sizes)
    for check, (_, name, sizes) in OF_FEW_LAYERS.items()
}
# Those of whole models, by the family: jaxbuf/models/checked.json notes them.
OF_FAMILY: dict[str, str] = dict.fromkeys(
    (
        "no_pool_sized_write_in_the_program_of_two_layers",
        "no_pool_sized_write_in_the_program_of_the_demo_model",
        "greedy_tokens_of_two_layers_are_those_without_kernels",
        "greedy_tokens_of_the_demo_model_are_those_without_kernels",
        "a_random_qwen3_5_4b_generates_as_without_kernels",
    ),
    "qwen3_5",
) | {check: family for check, (family, _, _) in OF_FEW_LAYERS.items()}
