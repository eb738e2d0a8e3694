"""The causal convolution and its ring against a float64 loop over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence.convolution import LONG, causal_convolution, extend_ring, init_ring

WIDTH, CHANNELS, MAX_PENDING, TIME = 4, 10, 8, 60

run_extend = jax.jit(extend_ring)


def convolve(x, weight):
    """float64 [time, channels]: every position from the inputs up to it; before the first there is nothing."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    out = np.zeros_like(x)
    for position in range(x.shape[0]):
        for tap in range(weight.shape[1]):
            source = position - (weight.shape[1] - 1) + tap
            if source >= 0:
                out[position] += weight[:, tap] * x[source]
    return out


@pytest.fixture
def weight(rng):
    return rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32)


@pytest.fixture
def sequences(rng):
    return rng.standard_normal((5, TIME, CHANNELS)).astype(np.float32)


def test_convolution_is_the_definition(sequences, weight):
    expected = np.stack([convolve(row, weight) for row in sequences])
    np.testing.assert_allclose(causal_convolution(sequences, weight), expected, atol=1e-5)


def test_previous_inputs_continue_a_sequence(sequences, weight):
    expected = np.stack([convolve(row, weight)[20:] for row in sequences])
    y = causal_convolution(sequences[:, 20:], weight, sequences[:, 20 - WIDTH + 1 : 20])
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_many_inputs_are_convolved_alike(rng, weight):
    """From LONG on, without an array of all inputs; outputs and gradients."""
    x = rng.standard_normal((2, LONG + 30, CHANNELS)).astype(np.float32)
    expected = np.stack([convolve(row, weight)[20:] for row in x])
    long, before = x[:, 20:], x[:, 20 - WIDTH + 1 : 20]
    np.testing.assert_allclose(causal_convolution(long, weight, before), expected, atol=1e-5)
    direction = rng.standard_normal(long.shape).astype(np.float32)

    def loss(x, weight, before, cut):  # in two parts, of which each is short; or whole
        parts = [causal_convolution(x[:, :cut], weight, before)]
        if cut < x.shape[1]:
            parts.append(causal_convolution(x[:, cut:], weight, x[:, cut - WIDTH + 1 : cut]))
        return jnp.vdot(jnp.concatenate(parts, axis=1), direction)

    found, wanted = (jax.grad(loss, (0, 1, 2))(long, weight, before, cut) for cut in (long.shape[1], LONG - 20))
    for actual, short in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, short, atol=1e-4)


def test_half_precision_inputs_are_summed_in_float32(sequences, weight):
    x, taps = jnp.asarray(sequences, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    expected = np.stack([convolve(np.asarray(row, np.float64), np.asarray(taps, np.float64)) for row in x])
    y = causal_convolution(x, taps)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-5)


def poison(ring, slots, positions):
    """NaN in every row of the ring that no later output may depend on: all but the last width - 1 committed inputs."""
    ring = np.array(ring)
    size = ring.shape[1]
    for slot, position in zip(slots, positions, strict=True):
        needed = {p % size for p in range(max(0, position - WIDTH + 1), position)}
        stale = [row for row in range(size) if row not in needed]
        ring[slot, stale] = np.nan
    return jnp.asarray(ring)


@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
def test_ring_under_random_schedules(sequences, weight, rng, poisoned):
    """Prefills of any length, pending inputs, partial acceptance: always the convolution of what was committed."""
    rows = sequences.shape[0]
    expected = np.stack([convolve(row, weight) for row in sequences])
    ring = init_ring(slots=rows, channels=CHANNELS, width=WIDTH, max_pending=MAX_PENDING, dtype=jnp.float32)
    if poisoned:
        ring = jnp.full_like(ring, jnp.nan)
    slots = rng.permutation(np.arange(1, rows + 1)).astype(np.int32)
    position = np.zeros(rows, np.int64)
    launches = [25, 5, 1, 5, 5, 1, 1, 5, 25, 5]
    for time in launches:
        offsets = position[:, None] + np.arange(time)
        x = np.take_along_axis(sequences, np.minimum(offsets, TIME - 1)[..., None], axis=1)
        lengths = np.minimum(rng.integers(0, time + 1, rows), TIME - position)
        x[np.arange(time)[None] >= lengths[:, None]] = np.nan if poisoned else 9.0
        y, ring = run_extend(
            ring, weight, x, slots=slots, start=position.astype(np.int32), lengths=lengths.astype(np.int32)
        )
        for row in range(rows):
            real = slice(position[row], position[row] + lengths[row])
            np.testing.assert_allclose(y[row, : lengths[row]], expected[row, real], atol=1e-5)
            np.testing.assert_array_equal(y[row, lengths[row] :], 0.0)
        # A prefill longer than max_pending is committed whole; fewer inputs may be rejected from any point on.
        position += lengths if time > MAX_PENDING else rng.integers(0, lengths + 1)
        if poisoned:
            ring = poison(ring, slots, position)


def test_many_at_once_and_one_by_one_are_the_same_bits(sequences, weight):
    slots = np.array([2, 1], np.int32)
    start = np.array([7, 0], np.int32)
    ring = init_ring(slots=2, channels=CHANNELS, width=WIDTH, max_pending=MAX_PENDING, dtype=jnp.float32)
    _, ring = run_extend(
        ring, weight, sequences[:2, :25], slots=slots, start=np.zeros(2, np.int32), lengths=np.array([7, 0], np.int32)
    )
    x = sequences[:2, 30:35]
    together, ring_together = run_extend(ring, weight, x, slots=slots, start=start, lengths=np.full(2, 5, np.int32))
    for step in range(5):
        one = np.ones(2, np.int32)
        y, ring = run_extend(ring, weight, x[:, step : step + 1], slots=slots, start=start + step, lengths=one)
        np.testing.assert_array_equal(y[:, 0], together[:, step])
    np.testing.assert_array_equal(ring, ring_together)


def test_null_slot_reads_zeros_and_writes_nothing(sequences, weight, rng):
    ring = rng.standard_normal((4, WIDTH - 1 + MAX_PENDING, 1, CHANNELS)).astype(np.float32)
    ring[0] = np.nan
    slots, start = np.array([0, 2, 0, 1, 0], np.int32), np.full(5, 9, np.int32)
    y, after = run_extend(ring, weight, sequences[:, :5], slots=slots, start=start, lengths=np.full(5, 5, np.int32))
    np.testing.assert_array_equal(y[slots == 0], 0.0)
    assert np.isfinite(y).all() and np.abs(y[slots > 0]).min() > 0
    np.testing.assert_array_equal(after[0], ring[0])
    np.testing.assert_array_equal(after[3], ring[3])


def test_gradients_are_those_of_the_definition(sequences, weight, rng):
    direction = rng.standard_normal(sequences.shape).astype(np.float32)

    def product(x, weight):
        return jnp.sum(causal_convolution(x, weight) * direction)

    by_input, by_weight = jax.grad(product, argnums=(0, 1))(sequences, weight)
    unit = np.zeros((CHANNELS, WIDTH))
    expected = np.zeros((CHANNELS, WIDTH))
    for tap in range(WIDTH):
        unit[:] = 0.0
        unit[:, tap] = 1.0
        shifted = np.stack([convolve(row, unit) for row in sequences])
        expected[:, tap] = np.sum(shifted * direction, axis=(0, 1))
    np.testing.assert_allclose(by_weight, expected, rtol=1e-4, atol=1e-4)
    backwards = np.stack([convolve(row[::-1], weight)[::-1] for row in direction])
    np.testing.assert_allclose(by_input, backwards, atol=1e-5)


def test_an_input_lies_in_rows_of_128_channels():
    sizes = {"slots": 2, "width": 4, "max_pending": 5, "dtype": jnp.float32}
    assert init_ring(channels=384, **sizes).shape == (3, 8, 3, 128)
    assert init_ring(channels=200, **sizes).shape == (3, 8, 1, 200)


@pytest.mark.parametrize("name", ["slots", "channels", "width", "max_pending"])
def test_sizes_that_make_no_ring(name):
    sizes = {"slots": 1, "channels": 1, "width": 2, "max_pending": 1}
    init_ring(**sizes, dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"{name} must be at least {sizes[name]}, got {sizes[name] - 1}"):
        init_ring(**(sizes | {name: sizes[name] - 1}), dtype=jnp.float32)


def test_shapes_that_do_not_fit(sequences, weight):
    with pytest.raises(ValueError, match=r"got \(5, 60, 10\) and \(4, 10\)"):
        causal_convolution(sequences, weight.T)
    with pytest.raises(ValueError, match=r"previous must have shape \(5, 3, 10\), got \(5, 4, 10\)"):
        causal_convolution(sequences, weight, sequences[:, :4])
