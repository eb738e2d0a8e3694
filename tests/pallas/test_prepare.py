"""The kernels of `prepare`: they lower for their platform at the real sizes, and compute what the XLA path computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec
from jaxbuf.recurrence.convolution import extend_ring, init_ring, init_ring_order
from jaxbuf.recurrence.prepare import Inputs, Weights, prepare
from tests.gpu import around_checks, checks

SMALL = RecurrenceSpec(heads=4, key_heads=4, key_dim=128, value_dim=128)
QWEN = RecurrenceSpec(heads=32, key_heads=16, key_dim=128, value_dim=128)
CHANNEL = dataclasses.replace(SMALL, decay="channel")
KIMI = around_checks.KIMI
ROWS, TIME, MAX_PENDING = 3, 3, 4


def channels(spec):
    return 2 * spec.key_heads * spec.key_dim + spec.heads * spec.value_dim


def new_weights(rng, spec, dtype):
    taps = jnp.asarray(rng.standard_normal((channels(spec), 4)), dtype)
    biases = spec.heads * (spec.key_dim if spec.decay == "channel" else 1)
    A_log, dt_bias = np.log(rng.uniform(1, 16, spec.heads)), rng.standard_normal(biases)
    return Weights(taps, jnp.asarray(A_log, jnp.float32), jnp.asarray(dt_bias, jnp.float32))


def new_raw(rng, spec, rows, time, dtype):
    """qkv, a and b; the gates of two heads are far out."""
    gates = [5 * rng.standard_normal(shape) for shape in (spec.decay_shape(rows, time), (rows, time, spec.heads))]
    for gate in gates:
        gate[..., :2] = 200, -200
    qkv = rng.standard_normal((rows, time, channels(spec)))
    return jnp.asarray(qkv, dtype), *(jnp.asarray(x, jnp.float32) for x in gates)


def new_ring(spec, rows, dtype, max_pending=MAX_PENDING):
    ring = init_ring(slots=rows, channels=channels(spec), width=4, max_pending=max_pending, dtype=dtype)
    return jnp.full_like(ring, jnp.nan)  # what no slot has written reaches nothing


@pytest.mark.parametrize(
    "spec, time, rows, dtype, tree",
    [
        (QWEN, 1, 256, "bfloat16", False),
        (QWEN, 5, 1, "float32", False),
        (QWEN, 16, 128, "bfloat16", False),
        (QWEN, 5, 64, "bfloat16", True),
        (QWEN, 16, 2, "float32", True),
        (KIMI, 1, 64, "bfloat16", False),
        (KIMI, 16, 2, "float32", True),
    ],
)
def test_the_gpu_kernel_lowers_for_cuda_at_the_real_sizes(spec, time, rows, dtype, tree):
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    weights = jax.eval_shape(lambda: new_weights(rng, spec, dtype))
    raw = jax.eval_shape(lambda: new_raw(rng, spec, rows, time, dtype))
    ring = jax.eval_shape(lambda: new_ring(spec, rows, dtype, max_pending=max(8, time)))
    shapes = (rows,), (rows,), (rows,), ring.shape[:2], (rows, time)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def step(ring, weights, raw, slots, start, lengths, order, parents):
        where = {"slots": slots, "start": start, "lengths": lengths}
        where |= {"order": order, "parents": parents} if tree else {}
        return prepare(spec, weights, ring, *raw, **where, target="H100")

    traced = jax.jit(step, donate_argnums=0).trace(ring, weights, raw, *integers)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu") == 1
    assert "output_operand_alias<output_tuple_indices = [5]" in lowered  # the ring, in place


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation, spec, lower_bound",
    [("gpu", SMALL, None), ("tpu", SMALL, None), ("gpu", CHANNEL, None), ("gpu", CHANNEL, -5.0)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_is_the_xla_path_over_ragged_steps(rng, dtype, implementation, spec, lower_bound):
    weights, ring, slots = new_weights(rng, spec, dtype), new_ring(spec, ROWS, dtype), jnp.array([2, 0, 3])
    start = np.zeros(ROWS, np.int32)
    # A null slot, no token, fewer than all; in the later steps the ring has come round.
    for lengths, accepted in (
        ([3, 3, 1], [3, 0, 1]),
        ([2, 3, 0], [1, 0, 0]),
        ([3, 1, 3], [3, 0, 3]),
        ([3, 0, 3], [0] * 3),
    ):
        raw = new_raw(rng, spec, ROWS, TIME, dtype)
        raw = (jnp.where(np.arange(TIME)[None, :, None] < np.array(lengths)[:, None, None], raw[0], jnp.nan), *raw[1:])
        where = {"slots": slots, "start": jnp.asarray(start), "lengths": jnp.array(lengths), "lower_bound": lower_bound}
        expected, ring_expected = prepare(spec, weights, ring, *raw, **where, implementation="xla")
        how = {"implementation": implementation, "interpret": True}
        found, ring = prepare(spec, weights, ring, *raw, **where, **how)
        np.testing.assert_array_equal(np.asarray(ring, np.float32), np.asarray(ring_expected, np.float32))
        for name, x, y in zip(Inputs._fields, found, expected, strict=True):
            assert x.dtype == y.dtype
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            if dtype == jnp.float32 or name in ("log_decay", "beta"):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
                continue
            # A rounding to bfloat16 is by up to 2**-8. XLA rounds the sigmoid and its product, the kernel the product:
            # three in v, and in q and k, and in the norm of these; and each rounds q and k once more: eight.
            np.testing.assert_allclose(x, y, rtol=2**-6 if name == "v" else 2**-5, atol=1e-6)
            assert np.linalg.norm(x - y) < 2**-7 * np.linalg.norm(y), "roundings do not all go one way"
        start = start + np.array(accepted, np.int32)


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
def test_tokens_at_once_and_one_by_one_are_the_same_bits(rng, implementation):
    how = {"implementation": implementation, "interpret": True}
    weights, ring = new_weights(rng, SMALL, jnp.bfloat16), jnp.zeros_like(new_ring(SMALL, 1, jnp.bfloat16))
    raw, one = new_raw(rng, SMALL, 1, TIME, jnp.bfloat16), jnp.ones(1, jnp.int32)
    where = {"slots": one, "start": 5 * one, "lengths": TIME * one}
    at_once, ring_at_once = prepare(SMALL, weights, ring, *raw, **where, **how)
    for t in range(TIME):
        token, where = [x[:, t : t + 1] for x in raw], {"slots": one, "start": (5 + t) * one, "lengths": one}
        found, ring = prepare(SMALL, weights, ring, *token, **where, **how)
        *vectors, log_decay, beta = zip(found, at_once, strict=True)
        for x, y in vectors:
            np.testing.assert_array_equal(x[:, 0], y[:, t])
        for x, y in (log_decay, beta):  # A CPU's exponentials may differ in the last bit with the length of an array.
            np.testing.assert_array_max_ulp(np.asarray(x[:, 0]), np.asarray(y[:, t]), maxulp=1)
    np.testing.assert_array_equal(ring, ring_at_once)


@pytest.mark.parametrize(
    "spec, time, change, reason",
    [
        (RecurrenceSpec(4, 4, 64, 64), 1, {}, "key_dim and value_dim 128, got 64, 64"),
        (RecurrenceSpec(4, 2, 128, 128), 1, {}, "key heads in fours, got 2"),
        (SMALL, MAX_PENDING + 1, {}, "1 to 4 tokens at once, got 5"),
        (SMALL, 1, {"ring": jnp.bfloat16}, "a ring of the inputs' dtype float32, got bfloat16"),
    ],
)
def test_what_the_gpu_kernel_cannot_serve_is_an_error_that_says_why(rng, spec, time, change, reason):
    weights, raw = new_weights(rng, spec, jnp.float32), new_raw(rng, spec, 1, time, jnp.float32)
    where = {name: jnp.ones(1, jnp.int32) for name in ("slots", "start", "lengths")}
    ring = new_ring(spec, 1, change.get("ring", jnp.float32))
    with pytest.raises(ValueError, match=f'implementation="gpu" can not serve this prepare: it needs {reason}'):
        prepare(spec, weights, ring, *raw, **where, implementation="gpu", target="H100")


@pytest.mark.parametrize(
    "spec, time, change, reason",
    [
        (RecurrenceSpec(4, 4, 64, 64), 1, {}, "key_dim and value_dim 128, got 64, 64"),
        (CHANNEL, 1, {}, "a decay for each head without a lower bound, got one for each channel"),
        (SMALL, MAX_PENDING + 1, {}, "1 to 4 tokens at once, got 5"),
        (SMALL, 1, {"ring": jnp.bfloat16}, "a ring of the inputs' dtype float32, got bfloat16"),
    ],
)
def test_what_the_tpu_kernel_cannot_serve_is_an_error_that_says_why(rng, spec, time, change, reason):
    weights, raw = new_weights(rng, spec, jnp.float32), new_raw(rng, spec, 1, time, jnp.float32)
    where = {name: jnp.ones(1, jnp.int32) for name in ("slots", "start", "lengths")}
    ring = new_ring(spec, 1, change.get("ring", jnp.float32))
    with pytest.raises(ValueError, match=f'implementation="tpu" can not serve this prepare: it needs {reason}'):
        prepare(spec, weights, ring, *raw, **where, implementation="tpu", target="v6e")


@pytest.mark.parametrize(
    "channels, integers, reason",
    [
        (200, ROWS, "channels that are a multiple of 128, got 200"),
        (256, 40_000, "at most 512 KiB of integers, got 40000 rows"),
    ],
)
def test_which_convolutions_the_tpu_kernel_cannot_serve(channels, integers, reason):
    shapes = (integers, 1, channels), (channels, 4), (integers,)
    x, weight, where = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    ring = jax.eval_shape(lambda: init_ring(slots=2, channels=channels, width=4, max_pending=4, dtype=jnp.float32))

    def run(ring, weight, x, where):
        slots = jnp.zeros(integers, jnp.int32)
        lengths = where.astype(jnp.int32)
        return extend_ring(
            ring, weight, x, slots=slots, start=lengths, lengths=lengths, implementation="tpu", target="v6e"
        )

    with pytest.raises(ValueError, match=f"can not serve this convolve: it needs {reason}"):
        jax.eval_shape(run, ring, weight, x, where)


@pytest.mark.slow
@pytest.mark.parametrize("platform, finish", [("tpu", False), ("tpu", True), ("gpu", True)])
def test_a_kernel_follows_trees_over_permuted_rings(rng, platform, finish):
    """Several programs, the last of which has rows to spare; null slots, dead tokens, NaN in what is dead."""
    rows, time, dtype = 11, 4, jnp.float32
    weights, ring = new_weights(rng, SMALL, dtype), new_ring(SMALL, rows, dtype)
    order = init_ring_order(slots=rows, width=4, max_pending=MAX_PENDING)
    order = jnp.asarray(rng.permuted(np.asarray(order), axis=1), jnp.int32)
    slots = np.where(rng.random(rows) < 0.2, 0, rng.permutation(rows) + 1)
    parents = np.array([[rng.integers(-1, t) if t else -1 for t in range(time)] for _ in range(rows)])
    start = np.zeros(rows, np.int32)
    for _ in range(3):
        lengths = rng.integers(0, time + 1, rows)
        raw = new_raw(rng, SMALL, rows, time, dtype)
        raw = (jnp.where(np.arange(time)[None, :, None] < lengths[:, None, None], raw[0], jnp.nan), *raw[1:])
        integers = {"slots": slots, "start": start, "lengths": lengths, "parents": parents}
        where = {name: jnp.asarray(x, jnp.int32) for name, x in integers.items()} | {"order": order}
        both = []
        for how in ({"implementation": "xla"}, {"implementation": platform, "interpret": True}):
            if finish:
                found, after = prepare(SMALL, weights, ring, *raw, **where, **how)
            else:
                found, after = extend_ring(ring, weights.convolution, raw[0], **where, **how)
            both.append((jax.tree.leaves(found), after))
        (expected, ring), (found, after) = both
        np.testing.assert_array_equal(after, ring)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        start = start + np.where(slots > 0, rng.integers(0, lengths + 1), 0)


@pytest.mark.slow
def test_the_check_of_trees_on_a_gpu_holds_in_the_interpreter(rng):
    around_checks.check_prepared_trees(rng, SMALL, (4,), rows=3, interpret=True)


@pytest.mark.parametrize("target, words", [("H100", "@mosaic_gpu"), ("v6e", "tpu_custom_call")])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_where_no_kernel_prepares_one_convolves(target, words, decay):
    """Heads of 64; on a TPU also decays of key channels."""
    spec = RecurrenceSpec(heads=4, key_heads=4, key_dim=64, value_dim=64, decay=decay)
    rng, one = np.random.default_rng(0), jnp.ones(1, jnp.int32)
    arrays = new_ring(spec, 1, jnp.float32), new_weights(rng, spec, jnp.float32), new_raw(rng, spec, 1, 1, jnp.float32)

    def step(ring, weights, raw):
        return prepare(spec, weights, ring, *raw, slots=one, start=one, lengths=one, target=target)

    lowered = jax.jit(step).trace(*arrays).lower(lowering_platforms=("cuda" if target == "H100" else "tpu",))
    assert lowered.as_text().count(words) == 1


@pytest.mark.slow
def test_rejected_inputs_that_are_not_finite_change_no_bit(rng):
    checks.check_rejected_inputs(rng, spec=SMALL, implementation="gpu", interpret=True, steps=2)
