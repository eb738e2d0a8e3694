"""The loss that a language model is trained with."""

import jax.numpy as jnp
import optax

from jaxbuf.axes import Array, Bool, Float32, Int
from jaxbuf.models.decoder import Decoder, forward, logits
from jaxbuf.models.mtp import mtp_forward


def language_model_loss(
    model: Decoder,
    tokens: Int[Array, "batch time"],
    *,
    mask: Bool[Array, "batch time"] | None = None,
    mtp_weight: float = 0.3,
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Next-token cross entropy, plus that of the MTP layer (the token after the next) if the model has one.

    Args:
      model: The parameters.
      tokens: Rows of at least 3 with an MTP layer, else 2.
      mask: Which tokens count as targets; None: all. They are all read.
      mtp_weight: Weight of the MTP layer's loss in the sum.

    Returns:
      The loss in nats per token, and metrics: "next_token_loss", "next_token_accuracy",
      "tokens" (counted targets), and with an MTP layer "mtp_loss" and "mtp_accuracy".
    """
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    hidden = forward(model, tokens)
    loss, accuracy, count = _cross_entropy(logits(model, hidden[:, :-1]), tokens[:, 1:], mask[:, 1:])
    metrics = {"next_token_loss": loss, "next_token_accuracy": accuracy, "tokens": count}
    if model.mtp is not None:
        further = mtp_forward(model, hidden[:, :-1], tokens[:, 1:])
        mtp_loss, accuracy, _ = _cross_entropy(logits(model, further[:, :-1]), tokens[:, 2:], mask[:, 2:])
        metrics |= {"mtp_loss": mtp_loss, "mtp_accuracy": accuracy}
        loss = loss + mtp_weight * mtp_loss
    return loss, metrics


def _cross_entropy(scores: Array, targets: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Mean nats, mean agreement of the best token, and the count, over the targets under the mask."""
    weight = mask.astype(jnp.float32)
    count = jnp.sum(weight)
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(scores, targets)
    agree = (jnp.argmax(scores, axis=-1) == targets).astype(jnp.float32)
    share = 1.0 / jnp.maximum(count, 1.0)
    return jnp.sum(nats * weight) * share, jnp.sum(agree * weight) * share, count
