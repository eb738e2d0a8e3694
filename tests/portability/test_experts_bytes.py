"""What the TPU's kernel of routed experts moves, in the interpreter: the weights of those that have tokens, once."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.models.experts import mixture
from tests.portability.dma import count_dma_bytes

TOKENS, CHOSEN, EXPERTS, INPUTS, INNER = 12, 2, 16, 512, 256


def moved_and_floor(rng, touched: int):
    """Bytes of a mixture whose tokens have the first `touched` experts, and the least that they could be."""
    x = jnp.asarray(rng.standard_normal((TOKENS, INPUTS)), jnp.bfloat16)
    shapes = (EXPERTS, 2 * INNER, INPUTS), (EXPERTS, INPUTS, INNER)
    first, second = (jnp.asarray(rng.standard_normal(shape) / 16, jnp.bfloat16) for shape in shapes)
    chosen = jnp.asarray(np.arange(TOKENS * CHOSEN).reshape(TOKENS, CHOSEN) % touched, jnp.int32)
    weights = jnp.asarray(rng.random((TOKENS, CHOSEN)), jnp.float32)
    arrays = x, first, second, chosen, weights
    moved, found = count_dma_bytes(lambda: mixture(*arrays, implementation="tpu", interpret=True))
    known = np.asarray(mixture(*arrays), np.float64)
    assert np.linalg.norm(np.asarray(found, np.float64) - known) < 1e-2 * np.linalg.norm(known)
    rows = TOKENS * CHOSEN * (INPUTS + 2 * INNER + INNER + INPUTS)
    return moved.bytes, 2 * (touched * (3 * INNER * INPUTS) + rows)


def test_weights_of_experts_with_tokens_are_read_once(rng):
    for touched in (12, 3):
        moved, floor = moved_and_floor(rng, touched)
        assert 1.0 <= moved / floor <= 1.05


def test_reading_all_experts_would_be_seen(rng):
    moved, _ = moved_and_floor(rng, 3)
    _, floor_of_all = moved_and_floor(rng, EXPERTS)
    assert moved < 0.25 * floor_of_all
