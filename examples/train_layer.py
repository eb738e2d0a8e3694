"""A Gated DeltaNet layer learns to recall: it reads keys and values, and is asked for values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbuf.recurrence import RecurrenceSpec, chunked
from jaxbuf.recurrence.convolution import causal_convolution

# Keys are tokens 0 to 15, values 16 to 31.
SYMBOLS, PAIRS, BATCH, STEPS, HIDDEN = 16, 8, 64, 75, 32
optimiser = optax.adam(1e-2)
# The delta rule, and a decay for each head.
spec = RecurrenceSpec(heads=2, key_heads=2, key_dim=16, value_dim=16)
rng = np.random.default_rng(0)


def examples(number):
    """Texts "k1 v1 k2 v2 ...", then the keys in another order, and the values that belong."""
    symbols = np.tile(np.arange(SYMBOLS, dtype=np.int32), (2, number, 1))
    pairs = rng.permuted(symbols, axis=2)[:, :, :PAIRS]
    # One order for all these texts, and another one the next time.
    asked, answers = rng.permutation(pairs, axis=2)
    told = np.stack([pairs[0], pairs[1] + SYMBOLS], axis=2).reshape(number, 2 * PAIRS)
    return np.concatenate([told, asked], axis=1), answers


def loss(weights, tokens, answers):
    """A layer between embedding and head: projections, a short convolution, the recurrence."""
    x = weights["embedding"][tokens]
    # By the convolution a value's token sees its key's.
    qkv = jax.nn.silu(causal_convolution(x @ weights["qkv"], weights["taps"]))
    q, k, v = jnp.split(qkv.reshape(*tokens.shape, 3 * spec.heads, -1), 3, axis=2)
    q, k = (y / jnp.linalg.norm(y + 1e-6, axis=3, keepdims=True) for y in (q, k))
    # Of each head: how much stays, and how much is written.
    decay, beta = jnp.split(x @ weights["gates"], 2, axis=2)
    out, _ = chunked(spec, None, q, k, v, jax.nn.log_sigmoid(decay + 4.0), jax.nn.sigmoid(beta))
    # [texts, asked keys, values]
    logits = out[:, 2 * PAIRS :].reshape(*answers.shape, -1) @ weights["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    return losses.mean(), (logits.argmax(2) == answers).mean()


@jax.jit
def step(weights, moments, tokens, answers):
    (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(weights, tokens, answers)
    updates, moments = optimiser.update(gradient, moments)
    return optax.apply_updates(weights, updates), moments, value, right


shapes = {"embedding": (32, HIDDEN), "qkv": (HIDDEN, 96), "taps": (96, 4), "gates": (HIDDEN, 4)}
shapes["head"] = (32, SYMBOLS)
drawn = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
weights = {name: jnp.asarray(numbers, jnp.float32) for name, numbers in drawn.items()}
moments = optimiser.init(weights)
for number in range(STEPS):
    weights, moments, value, right = step(weights, moments, *examples(BATCH))
    # Who knows which values came, but not with which key, has 1 / PAIRS.
    if number % 25 == 0 or number == STEPS - 1:
        print(f"step {number}: loss {value:.3f}, {right:.1%} right, by chance {1 / PAIRS:.1%}")
