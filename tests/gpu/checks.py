"""What must hold of the kernels and can be seen on a GPU alone: functions that raise AssertionError if it does not.

They need no pytest: `scripts/check_gpu` runs them where there is none. Each returns the figures it has looked at.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxbuf.recurrence import RecurrenceSpec, buffered, prepare
from jaxbuf.recurrence.convolution import init_ring
from jaxbuf.recurrence.state_format import decode
from tests.gpu.program import pool_sized_writes

QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
MAMBA = RecurrenceSpec(heads=32, key_heads=4, key_dim=128, value_dim=64, delta=False)
KDA = RecurrenceSpec(heads=8, key_heads=8, key_dim=128, value_dim=128, decay="channel")
GLA = dataclasses.replace(KDA, key_heads=4, delta=False)
# Nemotron-3-Nano-4B's, in windows of 64 or 128 values. With few key heads all products of a token's query may be
# small, where halves of bfloat16 lose relatively much.
NANO = RecurrenceSpec(heads=96, key_heads=8, key_dim=128, value_dim=80, delta=False)
WIDE = RecurrenceSpec(heads=16, key_heads=16, key_dim=128, value_dim=256)  # in windows of 128
# Falcon-H1-7B's. It has one key head, so float32 entries are compared with more of them.
FALCON = RecurrenceSpec(heads=24, key_heads=1, key_dim=256, value_dim=128, delta=False)
FALCON_8 = dataclasses.replace(FALCON, key_heads=8)
LARGE = RecurrenceSpec(heads=16, key_heads=16, key_dim=256, value_dim=256)  # a delta rule on states of 256 by 256
DELTA_NET, LINEAR = (dataclasses.replace(spec, decay="none") for spec in (QWEN, MAMBA))
OTHERS = {"DeltaNet": DELTA_NET, "linear attention": LINEAR, "GLA": GLA}
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
    shape = spec.decay_shape(rows, time)
    log_decay = None if shape is None else jnp.asarray(-0.3 * np.abs(rng.standard_normal(shape)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0.1, 1.0, v.shape[:3]), jnp.float32)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), log_decay, beta


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
def extend(spec, cache, inputs, slots, lengths, parents=None, *, implementation, interpret=False):
    how = {"implementation": implementation, "interpret": interpret}
    return buffered.extend(spec, cache, *inputs, slots=slots, lengths=lengths, parents=parents, **how)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("implementation", "interpret"))
def fold(spec, cache, slots, *, implementation, interpret=False):
    return buffered.fold(spec, cache, slots=slots, implementation=implementation, interpret=interpret)


def ring_arrays(spec: RecurrenceSpec) -> tuple[str, ...]:
    """The names of a pool's arrays that hold a ring's entries; without a decay there are no gates."""
    return ("keys", "updates") if spec.decay == "none" else ("keys", "updates", "gates")


def of_each(specs: dict[str, RecurrenceSpec], check: Callable[[RecurrenceSpec], Figures]) -> Figures:
    """What a check finds of each recurrence, under its name."""
    return {f"{name}, {figure}": value for name, spec in specs.items() for figure, value in check(spec).items()}


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
    tree: bool = False,
    **sizes,
) -> Figures:
    """The worst errors over ragged steps with rejections and folds; every step starts from XLA's memory.

    With `tree` the tokens are those of random trees, of which a part of the path to the last one is accepted.
    """
    found = {"out": 0.0, "entries": 0.0, "checkpoints": 0.0}
    cache = poisoned(spec, entry_dtype=jnp.dtype(entry), state_dtype=state, **sizes)
    slots, folds = jnp.asarray(rng.permutation(ROWS) + 1, jnp.int32), 0
    for _ in range(24):
        inputs = new_inputs(rng, spec, ROWS, time, jnp.dtype("float32" if entry == "float32" else "bfloat16"))
        lengths = rng.integers(0, time + 1, ROWS)
        rows = (slots, jnp.asarray(lengths, jnp.int32))
        if tree:
            parents = np.array([[rng.integers(-1, max(t, 0)) if t else -1 for t in range(time)] for _ in range(ROWS)])
            rows += (jnp.asarray(parents, jnp.int32),)
        expected, reference = extend(spec, cache, inputs, *rows, implementation="xla")
        out, after = extend(spec, cache, inputs, *rows, implementation=implementation)
        found["out"] = max(found["out"], worst(out, expected))
        for name in ("keys", "gates"):
            assert same_bits(getattr(after.pool, name), getattr(reference.pool, name)), f"{name} differ"
        found["entries"] = max(found["entries"], worst(after.pool.updates, reference.pool.updates))
        states = [decode(x.pool.checkpoints, x.pool.low, x.pool.low_scales) for x in (after, reference)]
        found["checkpoints"] = max(found["checkpoints"], worst(*states))
        folds += int(np.sum(np.asarray(reference.cursor.folded > cache.cursor.folded)))
        path = None
        if tree:
            paths = [_path_to(row, length - 1) for row, length in zip(parents, lengths, strict=True)]
            lengths = np.array([len(nodes) for nodes in paths])
            path = jnp.asarray([nodes + [0] * (time - len(nodes)) for nodes in paths], jnp.int32)
        accepted = jnp.asarray(rng.integers((lengths + 1) // 2, lengths + 1), jnp.int32)
        cache = buffered.commit(reference, accepted, slots=slots, path=path)
    assert folds > 0, "no row folded"
    return found


def _path_to(parents: np.ndarray, node: int) -> list[int]:
    """The nodes of a tree from its root to one; none to -1."""
    return [] if node < 0 else [*_path_to(parents, int(parents[node])), int(node)]


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
        if log_decay is not None:
            extreme = rng.choice(np.array([0, -1e-6, -20, -130, -np.inf], np.float32), log_decay.shape)
            log_decay = jnp.where(rng.random(log_decay.shape) < 0.03, extreme, log_decay)
        inputs = *inputs, log_decay, beta
        _, at_once = extend(spec, cache, inputs, slots, time * ones, implementation=implementation)
        one_by_one = cache
        for t in range(time):
            token = jax.tree.map(lambda x, t=t: x[:, t : t + 1], inputs)
            _, one_by_one = extend(spec, one_by_one, token, slots, ones, implementation=implementation)
            one_by_one = buffered.commit(one_by_one, ones, slots=slots)
        for name in ring_arrays(spec):
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
        inputs = jax.tree.map(lambda x, past=~real: replaced(x, past, jnp.nan), inputs)
        rows = jnp.asarray(slots, jnp.int32), jnp.asarray(lengths, jnp.int32)
        out, after = extend(spec, cache, inputs, *rows, implementation=implementation)
        out = np.asarray(out, np.float32)
        assert np.isfinite(out[real]).all(), "the output of a token is not finite"
        assert (out[~real] == 0).all(), "the output past a row's tokens is not zero"
        resting = np.setdiff1d(np.arange(ROWS + 1), slots[(lengths > 0) & (slots > 0)])
        blocks = np.asarray(cache.cursor.block_table)[resting].ravel()
        for name, held in (("checkpoints", resting), *((name, blocks) for name in ring_arrays(spec))):
            old, new = (np.asarray(getattr(x.pool, name))[held] for x in (cache, after))
            assert same_bits(old, new), f"{name} of a slot that rested, or of the null slot, changed"
        accepted = jnp.asarray(np.where(slots > 0, lengths, 0), jnp.int32)
        cache = buffered.commit(after, accepted, slots=rows[0])
    return {}


def spoil(rng, x, where: np.ndarray):
    """x [rows, T, ...] with NaN and infinities in the tokens `where` (bool [rows, T])."""
    bad = jnp.asarray(rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), x.shape), x.dtype)
    return replaced(x, where, bad)


def replaced(x, where: np.ndarray, by):
    """x [rows, T, ...] with other numbers in the tokens `where` (bool [rows, T])."""
    return jnp.where(jnp.asarray(where).reshape(*where.shape, *[1] * (x.ndim - 2)), by, x)


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
        spoiled = jax.tree.map(lambda x, rejected=rejected: spoil(rng, x, rejected), inputs)
        _, after = extend(spec, spoil_uncommitted(rng, sick), spoiled, *launch, **how)
        sick = commit(after, jnp.asarray(accepted, jnp.int32), slots=launch[0])
        sick = spoil_uncommitted(rng, sick)
        # The next launch, of which nothing is kept.
        inputs = new_inputs(rng, spec, rows, time, jnp.bfloat16)
        expected, _ = extend(spec, clean, inputs, *launch, **how)
        spoiled = jax.tree.map(lambda x, past=past: spoil(rng, x, past), inputs)
        found, _ = extend(spec, sick, spoiled, *launch, **how)
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
    found = pool_sized_writes(loop.lower(cache, inputs).compile().as_text(), large_arrays(cache.pool))
    assert not found, "\n".join(found)
    return {"instructions": 0.0}


def large_arrays(pool: buffered.Pool):
    """Without the gates, which may be written whole."""
    return dataclasses.replace(pool, gates=())


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
    "a_step_with_heads_of_80_is_xlas": lambda rng: {
        f"{entry}, {name}": error for entry in BOUNDS for name, error in check_errors(rng, entry, spec=NANO).items()
    },
    "a_step_with_heads_of_80_is_xlas_with_split_checkpoints": lambda rng: {
        f"{state}, {name}": error
        for state in ("split", "split8")
        for name, error in check_errors(rng, "bfloat16", state, spec=NANO).items()
    },
    "a_recurrent_step_with_heads_of_80_is_xlas": lambda rng: (
        check_recurrent(rng, "bfloat16", spec=NANO) | check_recurrent(rng, "float32", "split", spec=NANO)
    ),
    "tokens_at_once_with_heads_of_80_store_the_bits_of_one_by_one": lambda rng: check_at_once(
        rng, "bfloat16", spec=NANO
    ),
    "nan_reaches_no_row_with_heads_of_80_that_it_does_not_belong_to": lambda rng: check_poison(rng, NANO),
    "no_pool_sized_write_in_a_loop_of_steps_with_heads_of_80": lambda rng: check_loop(NANO),
    "a_step_with_heads_of_256_is_xlas": lambda rng: (
        check_errors(rng, "bfloat16", spec=WIDE) | check_recurrent(rng, "bfloat16", spec=WIDE)
    ),
    "a_step_with_keys_of_256_is_xlas": lambda rng: {
        f"{entry}, {name}": error for entry in BOUNDS for name, error in check_errors(rng, entry, spec=FALCON_8).items()
    },
    "a_step_with_keys_of_256_and_the_delta_rule_is_xlas": lambda rng: {
        f"{entry}, {name}": error for entry in BOUNDS for name, error in check_errors(rng, entry, spec=LARGE).items()
    },
    "a_step_with_keys_of_256_is_xlas_with_narrower_checkpoints": lambda rng: {
        f"{spec.value_dim}, {state}, {name}": error
        for spec in (FALCON, LARGE)
        for state in ("bfloat16", "split", "split8")
        for name, error in check_errors(rng, "bfloat16", state, spec=spec).items()
    },
    "a_step_of_16_tokens_with_keys_of_256_is_xlas": lambda rng: check_errors(
        rng, "bfloat16", times=(9, 16), spec=FALCON, max_pending=16, limit=16
    ),
    "a_step_with_keys_of_256_is_xlas_with_rows_of_every_kind": lambda rng: (
        check_long_rings(rng, MIXED, spec=FALCON, most=32)
        | check_long_rings(rng, LONG[1:2], spec=LARGE, most=32, state_dtype="split")
    ),
    "a_step_with_keys_of_256_is_xlas_where_tokens_only_come_one_by_one": lambda rng: check_long_rings(
        rng, ALONE, max_pending=1, spec=FALCON, most=32
    ),
    "a_recurrent_step_with_keys_of_256_is_xlas": lambda rng: (
        check_recurrent(rng, "float32", spec=FALCON)
        | check_recurrent(rng, "bfloat16", "split", spec=FALCON)
        | check_recurrent(rng, "bfloat16", spec=LARGE)
    ),
    "tokens_at_once_with_keys_of_256_store_the_bits_of_one_by_one": lambda rng: (
        check_at_once(rng, "bfloat16", spec=LARGE)
        | check_at_once(rng, "float32", spec=LARGE)
        | check_at_once(rng, "bfloat16", 80, spec=LARGE)
    ),
    "nan_reaches_no_row_with_keys_of_256_that_it_does_not_belong_to": lambda rng: check_poison(rng, FALCON),
    "rejected_drafts_with_keys_of_256_that_are_not_finite_change_no_bit": lambda rng: (
        check_rejected(rng, spec=LARGE) | check_rejected(rng, spec=FALCON, entry="float32", state_dtype="split")
    ),
    "no_pool_sized_write_in_a_loop_of_steps_with_keys_of_256": lambda rng: check_loop(FALCON),
    "a_step_of_a_tree_with_keys_of_256_is_xlas": lambda rng: check_errors(
        rng, "float32", times=(5, 8), spec=FALCON_8, tree=True
    ),
    "a_kda_step_is_xlas": lambda rng: {
        f"{entry}, {name}": error for entry in BOUNDS for name, error in check_errors(rng, entry, spec=KDA).items()
    },
    "a_kda_step_is_xlas_with_a_bfloat16_checkpoint": lambda rng: check_errors(rng, "bfloat16", "bfloat16", spec=KDA),
    "a_kda_step_is_xlas_with_split_checkpoints": lambda rng: {
        f"{state}, {name}": error
        for state in ("split", "split8")
        for name, error in check_errors(rng, "bfloat16", state, spec=KDA).items()
    },
    "a_kda_step_is_xlas_with_a_split_checkpoint_and_many_entries": lambda rng: check_long_rings(
        rng, MIXED, spec=KDA, state_dtype="split"
    ),
    "a_kda_step_is_xlas_with_a_split8_checkpoint_and_many_entries": lambda rng: check_long_rings(
        rng, LONG[1:], spec=KDA, state_dtype="split8"
    ),
    "a_recurrent_kda_step_is_xlas_with_a_split_checkpoint": lambda rng: check_recurrent(
        rng, "bfloat16", "split", spec=KDA
    ),
    "kda_tokens_at_once_store_the_bits_of_one_by_one_with_a_split_checkpoint": lambda rng: check_at_once(
        rng, "bfloat16", spec=KDA, state_dtype="split"
    ),
    "rejected_kda_drafts_that_are_not_finite_change_no_bit_with_a_split_checkpoint": lambda rng: (
        check_rejected(rng, spec=KDA, state_dtype="split")
        | check_rejected(rng, time=1, spec=KDA, state_dtype="split", steps=40)
    ),
    "no_pool_sized_write_in_a_loop_of_kda_steps_with_split_checkpoints": lambda rng: check_loop(
        KDA, state_dtype="split"
    ),
    "a_kda_step_of_16_tokens_is_xlas": lambda rng: check_errors(
        rng, "bfloat16", times=(9, 16), spec=KDA, max_pending=16, limit=16
    ),
    "a_kda_step_is_xlas_with_rows_of_every_kind": lambda rng: check_long_rings(rng, MIXED, spec=KDA),
    "a_kda_step_is_xlas_where_tokens_only_come_one_by_one": lambda rng: check_long_rings(
        rng, ALONE, max_pending=1, spec=KDA
    ),
    "a_recurrent_kda_step_is_xlas": lambda rng: check_recurrent(rng, "bfloat16", spec=KDA),
    "kda_tokens_at_once_store_the_bits_of_one_by_one": lambda rng: (
        check_at_once(rng, "bfloat16", spec=KDA) | check_at_once(rng, "bfloat16", 80, spec=KDA)
    ),
    "nan_reaches_no_kda_row_that_it_does_not_belong_to": lambda rng: check_poison(rng, KDA),
    "rejected_kda_drafts_that_are_not_finite_change_no_bit": lambda rng: check_rejected(rng, spec=KDA),
    "no_pool_sized_write_in_a_loop_of_kda_steps": lambda rng: check_loop(KDA),
    "a_gla_step_is_xlas": lambda rng: check_errors(rng, "float32", spec=GLA) | check_errors(rng, "bfloat16", spec=GLA),
    "a_recurrent_gla_step_is_xlas": lambda rng: check_recurrent(rng, "float32", spec=GLA),
    "a_gla_step_is_xlas_with_split_checkpoints": lambda rng: {
        f"{state}, {name}": error
        for state in ("split", "split8")
        for name, error in (
            check_errors(rng, "bfloat16", state, spec=GLA) | check_recurrent(rng, "bfloat16", state, spec=GLA)
        ).items()
    },
    "a_step_without_a_decay_is_xlas": lambda rng: (
        check_errors(rng, "float32", spec=DELTA_NET) | check_errors(rng, "bfloat16", "split", spec=LINEAR)
    ),
    "tokens_at_once_of_the_other_families_store_the_bits_of_one_by_one": lambda rng: of_each(
        OTHERS, lambda spec: check_at_once(rng, "bfloat16", spec=spec)
    ),
    "nan_reaches_no_row_of_the_other_families_that_it_does_not_belong_to": lambda rng: of_each(
        OTHERS, lambda spec: check_poison(rng, spec)
    ),
    "rejected_drafts_of_the_other_families_that_are_not_finite_change_no_bit": lambda rng: of_each(
        OTHERS, lambda spec: check_rejected(rng, spec=spec)
    ),
    "a_recurrent_step_without_a_decay_is_xlas": lambda rng: (
        check_recurrent(rng, "float32", spec=DELTA_NET) | check_recurrent(rng, "float32", spec=LINEAR)
    ),
    "a_step_of_a_tree_is_xlas": lambda rng: {
        f"{name}, {entry}, {state}": error
        for entry, state in (("float32", "float32"), ("bfloat16", "split"))
        for name, error in check_errors(rng, entry, state, (5, 8), tree=True).items()
    },
    "a_mamba_2_step_of_a_tree_is_xlas": lambda rng: check_errors(
        rng, "float32", times=(5, 16), spec=MAMBA, tree=True, max_pending=16, limit=16
    ),
    "a_step_of_a_tree_of_the_other_families_is_xlas": lambda rng: of_each(
        OTHERS | {"heads of 80": NANO},
        lambda spec: check_errors(rng, "float32", times=(5, 8), spec=spec, tree=True),
    ),
    "a_kda_step_of_a_tree_is_xlas": lambda rng: check_errors(rng, "float32", times=(5, 8), spec=KDA, tree=True),
}
