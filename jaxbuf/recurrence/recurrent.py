"""The recurrence token by token: the definition that every other form must reproduce."""

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_rows
from jaxbuf.axes import Array, Bool, Float, Float32, Int
from jaxbuf.recurrence.spec import RecurrenceSpec, check_inputs, check_state

HIGHEST = jax.lax.Precision.HIGHEST


@jax.named_scope("recurrence")
def recurrent(
    spec: RecurrenceSpec,
    state: Float[Array, "batch heads value_dim key_dim"] | None,
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    log_decay: Float32[Array, "batch time heads ..."] | None = None,
    beta: Float32[Array, "batch time heads"] | None = None,
    *,
    lengths: Int[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], Float32[Array, "batch heads value_dim key_dim"]]:
    """Runs the recurrence one token after the other, reading and writing the whole state each time.

    Args:
      spec: The family.
      state: Before the first token, computed with in float32; None for zeros.
      q, k: Already scaled and normalised as the family asks.
      v: The values.
      log_decay: At most 0, which is not checked: above 0 the state grows. For decay="channel" it has a further axis,
        key_dim; for "none" it is None.
      beta: The write strength; None means 1.
      lengths: Positions from there on change no state and give zeros. None: all are real.

    Returns:
      out in v's dtype, and the state after each row's last real token.

    Raises:
      ValueError: An argument's shape or dtype does not fit `spec`.

    Source: Yang et al., Gated Delta Networks (2024), eq. 10; KVBuffer, eqs. 11-12.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    if state is not None:
        check_state(state, v.shape[0], spec.state_shape)
    batch, time = v.shape[:2]
    real = real_positions(batch, time, lengths)
    state = jnp.zeros((batch, *spec.state_shape), jnp.float32) if state is None else state.astype(jnp.float32)

    def token(state, inputs):
        q, k, v, log_decay, beta = inputs
        decayed = state
        if log_decay is not None:
            per_head = log_decay[..., None, None] if spec.decay == "head" else log_decay[..., None, :]
            decayed = state * jnp.exp(per_head)
        update = v
        if spec.delta:
            update = v - jnp.einsum("bhvd,bhd->bhv", decayed, k, precision=HIGHEST)
        if beta is not None:
            update = beta[..., None] * update
        state = decayed + update[..., :, None] * k[..., None, :]
        return state, jnp.einsum("bhvd,bhd->bhv", state, q, precision=HIGHEST)

    def by_time(x):
        """[batch, time, ...] -> [time, batch, ...]; zeros in dead positions, which leave the state as it is."""
        if x is None:
            return None
        return jnp.moveaxis(jnp.where(real.reshape(batch, time, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x)), 1, 0)

    inputs = per_head_keys(spec, q), per_head_keys(spec, k), v.astype(jnp.float32), log_decay, beta
    state, out = jax.lax.scan(token, state, [by_time(x) for x in inputs])
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def per_head_keys(
    spec: RecurrenceSpec, x: Float[Array, "... key_heads key_dim"]
) -> Float32[Array, "... heads key_dim"]:
    """Repeats q or k to all heads, in float32."""
    return jnp.repeat(x.astype(jnp.float32), spec.group, axis=-2)


def real_positions(batch: int, time: int, lengths: Int[Array, "{batch}"] | None) -> Bool[Array, "{batch} {time}"]:
    """Which positions lie before each row's length."""
    if lengths is None:
        return jnp.ones((batch, time), bool)
    lengths = jnp.asarray(lengths)
    check_rows("lengths", lengths, batch)
    return jnp.arange(time, dtype=lengths.dtype)[None] < lengths[:, None]
