"""What stands between the projections and the recurrence, against a float64 definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.convolution import init_ring, init_ring_order
from jaxbuf.recurrence.prepare import Inputs, Weights, prepare, prepare_sequence

SPEC = RecurrenceSpec(heads=4, key_heads=2, key_dim=6, value_dim=5)
CHANNELS, WIDTH, ROWS, TIME, MAX_PENDING = 2 * 2 * 6 + 4 * 5, 4, 3, 12, 4


def float64(x):
    return np.asarray(x, np.float64)


def convolve(qkv, taps):
    """float64 [rows, time, channels]: of each channel, the sum of the last inputs times its taps."""
    padded = np.pad(float64(qkv), ((0, 0), (WIDTH - 1, 0), (0, 0)))
    return sum(padded[:, i : i + qkv.shape[1]] * float64(taps)[:, i] for i in range(WIDTH))


def by_head(spec, mixed):
    """q, k and v [rows, time, heads, dim] of all channels."""
    keys = spec.key_heads * spec.key_dim
    heads = spec.key_heads, spec.key_heads, spec.heads
    parts = zip(np.split(mixed, [keys, 2 * keys], axis=-1), heads, strict=True)
    return [x.reshape(*mixed.shape[:2], count, -1) for x, count in parts]


def silu(x):
    return x / (1 + np.exp(-x))


def norms(x):
    return np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def definition(spec, weights, qkv, a, b, lower_bound=None):
    """float64: q, k, v, log_decay and beta of whole sequences."""
    convolution, A_log, dt_bias = (float64(x) for x in weights)
    q, k, v = by_head(spec, silu(convolve(qkv, convolution)))
    rate, a = np.exp(A_log), float64(a)
    if spec.decay == "channel":
        rate, dt_bias = rate[:, None], dt_bias.reshape(spec.heads, spec.key_dim)
    log_decay = -rate * np.logaddexp(0, a + dt_bias)
    if lower_bound is not None:
        log_decay = lower_bound / (1 + np.exp(-rate * (a + dt_bias)))
    return q / norms(q) / np.sqrt(spec.key_dim), k / norms(k), v, log_decay, 1 / (1 + np.exp(-float64(b)))


def apart(spec, weights, qkv):
    """How far q, k and v of two programs in float32 may be from each other, elementwise.

    With u = 2^-24: a sum of four products, in whatever order, is within 4u of the sum of their sizes; SiLU is no
    steeper than 1.1 and adds 4u of its own (exp, sum, quotient, product); there are two programs: 17u of the sizes.
    What that moves a normalised vector by is at most its norm over the vector's; normalising adds up to 12u.
    """
    u = 2.0**-24
    q, k, _ = by_head(spec, silu(convolve(qkv, weights.convolution)))
    errors = by_head(spec, 17 * u * convolve(np.abs(qkv), np.abs(weights.convolution)))
    pairs = zip(errors[:2], (q, k), strict=True)
    of_q, of_k = (np.linalg.norm(error, axis=-1, keepdims=True) / norms(x) + 12 * u for error, x in pairs)
    return [np.broadcast_to(of_q / np.sqrt(spec.key_dim), q.shape), np.broadcast_to(of_k, k.shape), errors[2]]


@pytest.fixture
def weights(rng):
    taps = rng.standard_normal((CHANNELS, WIDTH))
    A_log, dt_bias = np.log(rng.uniform(1, 16, SPEC.heads)), rng.standard_normal(SPEC.heads)
    return Weights(*(jnp.asarray(x, jnp.float32) for x in (taps, A_log, dt_bias)))


@pytest.fixture
def raw(rng):
    """qkv, a and b of a few sequences."""
    wide, narrow = (ROWS, TIME, CHANNELS), (ROWS, TIME, SPEC.heads)
    return [
        jnp.asarray(scale * rng.standard_normal(x), jnp.float32) for scale, x in ((1, wide), (5, narrow), (3, narrow))
    ]


def empty_ring():
    return init_ring(slots=ROWS, channels=CHANNELS, width=WIDTH, max_pending=MAX_PENDING, dtype=jnp.float32)


def test_whole_sequences_are_the_definition(weights, raw):
    for found, expected in zip(prepare_sequence(SPEC, weights, *raw), definition(SPEC, weights, *raw), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decays_of_key_channels_are_the_definition(weights, raw, rng, lower_bound):
    spec = dataclasses.replace(SPEC, decay="channel")
    weights = weights._replace(dt_bias=jnp.asarray(rng.standard_normal(spec.heads * spec.key_dim), jnp.float32))
    qkv, _, b = raw
    a = jnp.asarray(rng.standard_normal(spec.decay_shape(ROWS, TIME)), jnp.float32)
    expected = definition(spec, weights, qkv, a, b, lower_bound)
    for x, y in zip(prepare_sequence(spec, weights, qkv, a, b, lower_bound=lower_bound), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-5)
    assert lower_bound is None or expected[3].min() >= lower_bound
    # And the first step of a ring.
    where = {"slots": jnp.arange(1, ROWS + 1), "start": jnp.zeros(ROWS, jnp.int32), "lengths": jnp.full(ROWS, 2)}
    step = (x[:, :2] for x in (qkv, a, b))
    found, _ = prepare(spec, weights, empty_ring(), *step, **where, lower_bound=lower_bound)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y[:, :2], atol=2e-6, rtol=2e-5)


def test_half_precision_inputs_give_half_precision_and_float32_gates(weights, raw):
    weights, raw = weights._replace(convolution=weights.convolution.astype(jnp.bfloat16)), list(raw)
    raw[0] = raw[0].astype(jnp.bfloat16)
    found = prepare_sequence(SPEC, weights, *raw)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 3 + [jnp.float32] * 2
    found = dict(zip(Inputs._fields, map(float64, found), strict=True))
    for name, expected in zip(found, definition(SPEC, weights, *raw), strict=True):
        if name in ("log_decay", "beta"):
            np.testing.assert_allclose(found[name], expected, atol=2e-6, rtol=2e-5)
            continue
        # A rounding to bfloat16 is by up to u = 2**-8. v has three: after the convolution, of SiLU's sigmoid and of its
        # product. SiLU makes 1.3 of the first, and more only where it is so small that atol covers it: 3.3u. q and k
        # have these in an element and in the norm that divides it, and one after: 7.6u.
        np.testing.assert_allclose(found[name], expected, atol=2e-3, rtol=2**-6 if name == "v" else 2**-5)
        error = np.linalg.norm(found[name] - expected)
        assert error < 2**-7 * np.linalg.norm(expected), "roundings do not all go one way"


def test_steps_with_rejections_are_the_whole_sequence(weights, raw, rng):
    """Whatever was accepted before, the real tokens of a step get what they get in the sequence at once."""
    expected = prepare_sequence(SPEC, weights, *raw)
    bounds = [*apart(SPEC, weights, raw[0]), *(np.full(x.shape, 1e-6) for x in expected[3:])]
    ring, slots = jnp.full_like(empty_ring(), jnp.nan), rng.permutation(np.arange(1, ROWS + 1)).astype(np.int32)
    start = np.zeros(ROWS, np.int32)
    for _ in range(6):
        lengths = np.minimum(rng.integers(0, MAX_PENDING + 1, ROWS), TIME - start).astype(np.int32)
        places = start[:, None] + np.arange(MAX_PENDING)
        at = np.arange(ROWS)[:, None], np.minimum(places, TIME - 1)
        found, ring = prepare(SPEC, weights, ring, *(x[at] for x in raw), slots=slots, start=start, lengths=lengths)
        for row, length in enumerate(lengths):
            real = row, slice(start[row], start[row] + length)
            for x, y, bound in zip(found, expected, bounds, strict=True):
                assert (np.abs(float64(x[row, :length]) - float64(y[real])) <= bound[real]).all()
            for x in found[:3]:
                np.testing.assert_array_equal(x[row, length:], 0)
        start = start + rng.integers(0, lengths + 1).astype(np.int32)


def test_the_null_slot_gives_zeros_and_writes_nothing(weights, raw):
    raw = [x[:, :MAX_PENDING] for x in raw]
    ring = jnp.full_like(empty_ring(), jnp.nan)
    integers = {"slots": jnp.zeros(ROWS, jnp.int32), "start": jnp.full(ROWS, 9), "lengths": jnp.full(ROWS, MAX_PENDING)}
    found, after = prepare(SPEC, weights, ring, *raw, **integers)
    assert isinstance(found, Inputs)
    for x in found[:3]:
        np.testing.assert_array_equal(x, 0)
    assert np.isnan(after).all()


def test_branches_of_a_tree_are_the_sequences_they_continue(weights, raw):
    """Two children of the committed tail get what each would get alone."""
    where = {name: jnp.full(ROWS, value, jnp.int32) for name, value in (("lengths", 2), ("start", 3))}
    where |= {"slots": jnp.arange(1, ROWS + 1), "parents": jnp.full((ROWS, 2), -1)}
    order = init_ring_order(slots=ROWS, width=WIDTH, max_pending=MAX_PENDING)
    found, _ = prepare(SPEC, weights, jnp.ones_like(empty_ring()), *(x[:, :2] for x in raw), **where, order=order)
    where = {**where, "lengths": jnp.ones(ROWS, jnp.int32), "parents": None}
    for node in range(2):
        token = [x[:, node : node + 1] for x in raw]
        alone, _ = prepare(SPEC, weights, jnp.ones_like(empty_ring()), *token, **where)
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_allclose(x[:, node], y[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qkv": (3, 4, 43)}, r"qkv must be \[batch, time, 44\], got shape \(3, 4, 43\)"),
        ({"a": (3, 4, 3)}, r"a must be float32 \(3, 4, 4\), got float32 \(3, 4, 3\)"),
        ({"dt_bias": (3,)}, r"dt_bias must be float32 \(4,\), got float32 \(3,\)"),
        ({"convolution": (43, 4)}, r"convolution must be \[44, width\], got shape \(43, 4\)"),
        ({"ring": (4, 7, 1, 43)}, r"ring must be \[slots \+ 1, ring, 1, 44\], got shape \(4, 7, 1, 43\)"),
        ({"start": (3,)}, r"start must be int32 \[3\], one number a row, got float32 \(3,\)"),
        ({"decay": "none"}, """spec.decay must be "head" or "channel", got 'none'"""),
        ({"decay": "channel"}, r"a must be float32 \(3, 4, 4, 6\), got float32 \(3, 4, 4\)"),
        ({"decay": "channel", "a": (3, 4, 4, 6)}, r"dt_bias must be float32 \(24,\), got float32 \(4,\)"),
        ({"implementation": "tpu"}, 'implementation="tpu" can not serve this prepare: its kernel is written for TPUs'),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(change, message):
    shapes = {"qkv": (3, 4, 44), "a": (3, 4, 4), "b": (3, 4, 4), "ring": (4, 7, 1, 44)}
    shapes |= {"convolution": (44, 4), "A_log": (4,), "dt_bias": (4,)}
    words = {name: change.pop(name) for name in ("decay", "implementation") if name in change}
    arrays = {
        name: jnp.zeros(shape) for name, shape in (shapes | {x: y for x, y in change.items() if x in shapes}).items()
    }
    weights = Weights(*(arrays.pop(name) for name in Weights._fields))
    integers = {name: jnp.zeros(3, jnp.int32) for name in ("slots", "start", "lengths")}
    integers |= {name: jnp.zeros(shape) for name, shape in change.items() if name in integers}
    spec = RecurrenceSpec(4, 2, 6, 5, decay=words.pop("decay", "head"))
    with pytest.raises(ValueError, match=message):
        prepare(spec, weights, **arrays, **integers, **words)


def test_gradients_go_through_whole_sequences(weights, raw, rng):
    """Along one direction, the derivative is the definition's difference quotient."""
    directions = [rng.standard_normal(x.shape) for x in (*weights, *raw)]
    signs = [rng.standard_normal(x.shape) for x in definition(SPEC, weights, *raw)]

    def at(step):
        moved = [float64(x) + step * d for x, d in zip((*weights, *raw), directions, strict=True)]
        return sum(np.sum(x * s) for x, s in zip(definition(SPEC, moved[:3], *moved[3:]), signs, strict=True))

    def total(weights, raw):
        out = prepare_sequence(SPEC, weights, *raw)
        return sum(jnp.sum(x * jnp.asarray(s, jnp.float32)) for x, s in zip(out, signs, strict=True))

    gradients = jax.tree.leaves(jax.grad(total, argnums=(0, 1))(weights, raw))
    slope = sum(np.sum(float64(g) * d) for g, d in zip(gradients, directions, strict=True))
    scale = sum(np.sum(np.abs(float64(g) * d)) for g, d in zip(gradients, directions, strict=True))
    assert abs(slope - (at(1e-5) - at(-1e-5)) / 2e-5) < 1e-5 * scale
