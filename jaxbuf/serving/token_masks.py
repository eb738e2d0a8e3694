"""Sets of tokens as bit masks: what may be sampled, one set a row, an eighth of a byte a token."""

import jax.numpy as jnp
import numpy as np

from jaxbuf.axes import Array, Bool, Float32, Int32

BITS = 32  # of a word


def mask_words(vocab: int) -> int:
    """Words of a mask."""
    return -(-vocab // BITS)


def pack_mask(tokens: np.ndarray) -> np.ndarray:
    """int32 [..., ceil(vocab / 32)] of bool [..., vocab]: token t is bit t % 32 of word t // 32."""
    tokens = np.asarray(tokens, bool)
    padded = np.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, -tokens.shape[-1] % BITS)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4").astype(np.int32)


def unpack_mask(mask: Int32[Array, "rows words"], vocab: int) -> Bool[Array, "rows {vocab}"]:
    """Which tokens each row's mask has."""
    bits = (mask[..., None] >> jnp.arange(BITS, dtype=jnp.int32)[None, None]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab] > 0


def has_tokens(mask: Int32[Array, "rows words"], tokens: Int32[Array, "rows n"]) -> Bool[Array, "rows n"]:
    """Whether each row's mask has its tokens.

    No mask has a token below 0 or past its last word.
    """
    inside = (tokens >= 0) & (tokens < BITS * mask.shape[1])
    known = jnp.where(inside, tokens, 0)
    word = jnp.take_along_axis(mask, known // BITS, axis=1)
    return inside & ((word >> (known % BITS)) & 1 > 0)


def only(mask: Int32[Array, "rows words"], logits: Float32[Array, "rows *n vocab"]) -> Float32[Array, "rows *n vocab"]:
    """Logits, of which those that are not in their row's mask are -inf."""
    allowed = unpack_mask(mask, logits.shape[-1])
    allowed = allowed.reshape(allowed.shape[0], *[1] * (logits.ndim - 2), allowed.shape[1])
    return jnp.where(allowed, logits, -jnp.inf)
