"""What training needs of `chunked`: the recurrent form's gradients, at any decay, in memory linear in time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.recurrence import RecurrenceSpec, chunked, recurrent
from tests.compiling import MANY_STEPS
from tests.recurrence import definition
from tests.recurrence.families import FAMILIES, inputs

TIME = 200
LENGTHS = np.array([TIME, 131, TIME, 70], np.int32)
NAMES = ("state", "q", "k", "v", "log_decay", "beta")
FAST = [("Gated DeltaNet", 64), ("KDA", 16)]
OTHERS = ("Gated DeltaNet", "KDA", "GLA", "Mamba-2", "DeltaNet")
CASES = [(name, size) for name in OTHERS for size in (16, 64) if (name, size) not in FAST]


@partial(jax.jit, static_argnums=(0, 1), compiler_options=MANY_STEPS)
def gradients(form, spec, arguments, cotangents):
    """Of the outputs and the final state together, by every argument."""

    def loss(state, *arguments):
        out, state = form(spec, state, *arguments, lengths=LENGTHS)
        return jnp.sum(out * cotangents[0]) + jnp.sum(state * cotangents[1])

    return jax.grad(loss, argnums=tuple(i for i, x in enumerate(arguments) if x is not None))(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chunk_size"),
    FAST + [pytest.param(*case, marks=pytest.mark.slow if case[1] == 64 else pytest.mark.exhaustive) for case in CASES],
)
def test_chunked_has_the_recurrent_forms_gradients(family, chunk_size, rng):
    """Ragged rows, from an initial state; row by row the decay is weak to strong, and then without end."""
    spec = FAMILIES[family]
    state = rng.standard_normal((4, *spec.state_shape)).astype(np.float32)
    arguments = state, *inputs(rng, family, 4, TIME)
    cotangents = [rng.standard_normal(x.shape).astype(np.float32) for x in (arguments[3], state)]
    form = partial(chunked, chunk_size=chunk_size)

    def check():
        names = [name for name, x in zip(NAMES, arguments, strict=True) if x is not None]
        both = gradients(form, spec, arguments, cotangents), gradients(recurrent, spec, arguments, cotangents)
        for name, actual, expected in zip(names, *both, strict=True):
            for row in range(4):
                assert definition.error(actual[row], np.asarray(expected[row])) < 1e-4, (name, row)

    check()
    q, k, v, log_decay = arguments[1:5]
    if log_decay is not None:
        log_decay[:, ::50] = -np.inf
    for x in (q, k, v):
        for row, length in enumerate(LENGTHS):
            x[row, length:] = np.nan
    check()


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def shapes(spec, time):
    head = (1, time, spec.heads)
    keys = jax.ShapeDtypeStruct((1, time, spec.key_heads, spec.key_dim), jnp.float32)
    log_decay = (*head, spec.key_dim) if spec.decay == "channel" else head
    return keys, keys, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*head, spec.value_dim), log_decay, head))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_what_the_backward_pass_keeps_is_linear_in_time_and_the_size_of_the_inputs(decay):
    spec = RecurrenceSpec(heads=4, key_heads=2, key_dim=64, value_dim=64, decay=decay)

    def kept(form, time):
        return bytes_of(jax.eval_shape(lambda *x: jax.vjp(partial(form, spec, None), *x)[1], *shapes(spec, time)))

    few, many = kept(chunked, 2048), kept(chunked, 4096)
    assert many <= 2 * few
    assert many < 3 * bytes_of(shapes(spec, 4096))
    assert many < kept(recurrent, 4096) / 20  # which keeps a state a token


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "chunk_size"), [("head", 64), ("channel", 16)])
def test_the_compiled_gradient_works_in_memory_bounded_by_a_segment(decay, chunk_size):
    spec = RecurrenceSpec(heads=4, key_heads=2, key_dim=64, value_dim=64, decay=decay)

    def temporary(time):
        form = partial(chunked, spec, None, chunk_size=chunk_size)
        gradient = jax.grad(lambda *x: jnp.sum(form(*x)[0]), argnums=range(5))
        return jax.jit(gradient).lower(*shapes(spec, time)).compile().memory_analysis().temp_size_in_bytes

    one, four = temporary(1024), temporary(4096)
    print(f"{decay}: {one / 1e6:.1f} MB for 1,024 tokens, {four / 1e6:.1f} MB for 4,096")
    assert four < 2 * one
    assert four < one + 4 * bytes_of(shapes(spec, 4096))
