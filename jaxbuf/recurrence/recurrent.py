"""The recurrence token by token: the definition that every other form must reproduce."""

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_rows
from jaxbuf.axes import Array
from jaxbuf.recurrence.spec import RecurrenceSpec, check_inputs, check_state

HIGHEST = jax.lax.Precision.HIGHEST


@jax.named_scope("recurrence")
def recurrent(
    spec: RecurrenceSpec,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    lengths: Array | None = None,
) -> tuple[Array, Array]:
    """Runs the recurrence one token after the other, reading and writing the whole state each time.

    Args:
      spec: The family.
      state: [batch, heads, value_dim, key_dim], computed with in float32; None for zeros.
      q, k: [batch, time, key_heads, key_dim], already scaled and normalised as the family asks.
      v: [batch, time, heads, value_dim].
      log_decay: f32 [batch, time, heads] (or [..., key_dim] for decay="channel", None for "none"), at most 0, which is
        not checked: above 0 the state grows.
      beta: f32 [batch, time, heads], the write strength; None means 1.
      lengths: int32 [batch]; positions from there on change no state and give zeros. None: all are real.

    Returns:
      out [batch, time, heads, value_dim] in v's dtype, and the state after each row's last real token, f32.

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


def per_head_keys(spec: RecurrenceSpec, x: Array) -> Array:
    """Repeats q or k [..., key_heads, key_dim] to f32 [..., heads, key_dim]."""
    return jnp.repeat(x.astype(jnp.float32), spec.group, axis=-2)


def real_positions(batch: int, time: int, lengths: Array | None) -> Array:
    """bool [batch, time]: which positions lie before each row's length."""
    if lengths is None:
        return jnp.ones((batch, time), bool)
    lengths = jnp.asarray(lengths)
    check_rows("lengths", lengths, batch)
    return jnp.arange(time, dtype=lengths.dtype)[None] < lengths[:, None]
