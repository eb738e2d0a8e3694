"""How the next token is chosen, as data: one compiled program serves every mix of settings."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Attributes:
      temperature: Logits are divided by it; 0 takes the most probable token (greedy).
      top_k: Only the k most probable tokens; 0: all.
      top_p: Only the most probable tokens that together reach this probability (the one that reaches it included).
      seed: Of the request's random numbers: the token at position p draws from fold_in(seed, p), so it depends neither
        on the other requests nor on how the generation is cut into calls.
      stop_token_ids: Tokens that end the request, beside the model's own.
      ignore_eos: Do not stop at the model's own end tokens.

    Raises:
      ValueError: A value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        checks = {
            "temperature": (self.temperature >= 0 and np.isfinite(self.temperature), "a finite number of at least 0"),
            "top_k": (_whole(self.top_k) and self.top_k >= 0, "a whole number of at least 0 (0: all tokens)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "seed": (_whole(self.seed) and 0 <= self.seed < 2**32, "a whole number in [0, 2**32)"),
            "stop_token_ids": (all(_whole(i) and i >= 0 for i in self.stop_token_ids), "token ids of at least 0"),
        }
        for name, (fits, expected) in checks.items():
            if not fits:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_k", "top_p", "seed"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings of each row: temperature and top_p f32 [rows], top_k int32 [rows], seed uint32 [rows]."""

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array


def pack(params: Sequence[SamplingParams]) -> Sampling:
    """The settings of a batch as arrays, one row each."""

    def column(name, dtype):
        return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

    top_k = jnp.asarray(np.minimum([p.top_k for p in params], np.iinfo(np.int32).max).astype(np.int32))
    return Sampling(column("temperature", np.float32), top_k, column("top_p", np.float32), column("seed", np.uint32))


def sample(logits: Array, sampling: Sampling, position: Array) -> Array:
    """Chooses a token for each row.

    Args:
      logits: f32 [rows, vocab].
      sampling: The settings of each row.
      position: int32 [rows], the position that the token will have: it selects the row's random numbers.

    Returns:
      int32 [rows].
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    chosen = jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: _draw(logits, sampling, position),
        lambda: greedy,
    )
    return jnp.where(sampling.temperature > 0, chosen, greedy)


def _draw(logits: Array, sampling: Sampling, position: Array) -> Array:
    """Draws by the Gumbel-max rule; the noise belongs to the token, so that leaving tokens out changes no other's."""
    vocab = logits.shape[-1]
    scaled = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]

    def noise(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,), jnp.float32)

    noisy = scaled + jax.vmap(noise)(sampling.seed, position)

    def all_tokens():
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    def most_probable():
        order = jnp.argsort(scaled, axis=-1, descending=True)
        rank = jnp.arange(vocab, dtype=jnp.int32)[None]
        top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None]
        ranked = jnp.take_along_axis(scaled, order, axis=-1)
        probability = jax.nn.softmax(jnp.where(rank < top_k, ranked, -jnp.inf), axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        # The first token is always kept, whatever rounding does to its `before`.
        kept = (rank < top_k) & ((before < sampling.top_p[:, None]) | (rank == 0))
        best = jnp.argmax(jnp.where(kept, jnp.take_along_axis(noisy, order, axis=-1), -jnp.inf), axis=-1)
        return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)

    return jax.lax.cond(jnp.any((sampling.top_k > 0) | (sampling.top_p < 1)), most_probable, all_tokens)


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
