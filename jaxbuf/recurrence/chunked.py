"""The recurrence chunk by chunk: parallel inside a chunk, for prefill and training.

Inside a chunk that starts from state S, with G_t the sum of log_decay up to t and D_ts = exp(sum over (s, t]):

    u_t = beta_t (v_t − e^{G_t} S k_t − Σ_{s<t} D_ts (k_t·k_s) u_s)      one unit triangular system a head
    o_t = e^{G_t} S q_t + Σ_{s≤t} D_ts (q_t·k_s) u_s
    S'  = e^{G_C} S + Σ_s D_Cs u_s ⊗ k_s

The system's matrix does not contain S, so every chunk's is solved at once and only three products a chunk are serial.
"""

import jax
import jax.numpy as jnp

from jaxbuf.recurrence.recurrent import HIGHEST, real_positions
from jaxbuf.recurrence.spec import Array, RecurrenceSpec, check_implementation, check_inputs


def chunked(
    spec: RecurrenceSpec,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    *,
    chunk_size: int = 64,
    lengths: Array | None = None,
    return_updates: bool = False,
    implementation: str = "auto",
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Computes what `recurrent` computes, `chunk_size` tokens at a time. Differentiable; memory is linear in time.

    Args:
      spec: The family; decay="channel" is not served by this form yet.
      state, q, k, v, log_decay, beta, lengths: As in `recurrent`.
      chunk_size: Tokens solved together; the cost inside a chunk grows with its square.
      return_updates: Also return u, what each token adds to the state (zero past `lengths`).
      implementation: "auto" or "xla".

    Returns:
      out [batch, time, heads, value_dim] in v's dtype, the final state f32 [batch, heads, value_dim, key_dim], and with
      return_updates u f32 [batch, time, heads, value_dim].

    Raises:
      ValueError: An argument's shape or dtype does not fit `spec`, chunk_size is below 1, or decay="channel".

    Source: Yang et al., Gated Delta Networks (2024), section 3.3; KVBuffer, eq. 15.
    """
    check_implementation("chunked", implementation)
    out, state, updates = solve_chunks(spec, state, q, k, v, log_decay, beta, chunk_size=chunk_size, lengths=lengths)
    return (out, state, updates) if return_updates else (out, state)


@jax.named_scope("recurrence")
def solve_chunks(
    spec: RecurrenceSpec,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    *,
    chunk_size: int,
    lengths: Array | None,
) -> tuple[Array, Array, Array]:
    """`chunked` with its updates; arguments and errors as there."""
    check_inputs(spec, q, k, v, log_decay, beta)
    if spec.decay == "channel":
        raise ValueError('decay="channel" is not served by chunked yet, use recurrent; expected "none" or "head"')
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    batch, time = v.shape[:2]
    size = min(chunk_size, max(time, 1))
    chunks = -(-time // size)
    real = real_positions(batch, time, lengths)
    dtype, groups = v.dtype, (spec.key_heads, spec.group)

    def split(x, *head):
        """f32 [batch, time, heads.., d..] -> [chunks, batch, *head, size, d..]; dead positions become zeros."""
        x = jnp.where(jnp.reshape(real, real.shape + (1,) * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
        x = jnp.pad(x, [(0, 0), (0, chunks * size - time)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, chunks, size, *head, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 2, 2 + len(head)), 1, 0)

    zero = jnp.zeros((batch, time, spec.heads), jnp.float32)
    q, k = split(q, spec.key_heads), split(k, spec.key_heads)  # [n, b, g, c, key_dim]
    v = split(v, *groups)  # [n, b, g, r, c, value_dim]
    log_decay = split(zero if log_decay is None else log_decay, *groups)  # [n, b, g, r, c]
    beta = split(zero + 1.0 if beta is None else beta, *groups)

    pair = segment_decay(log_decay)  # D_ts, zero above the diagonal
    since_start = jnp.exp(jnp.cumsum(log_decay, axis=-1))  # e^{G_t}
    to_end = pair[..., -1, :]  # D_Cs
    if spec.delta:
        keys = jnp.einsum("nbgtd,nbgsd->nbgts", k, k, precision=HIGHEST)[:, :, :, None]
        matrix = jnp.where(
            lower(size, pair.ndim, -1), beta[..., None] * pair * keys, 0.0
        )  # the solver adds the diagonal
        recalled = (beta * since_start)[..., None] * k[:, :, :, None]
        right = jnp.concatenate([beta[..., None] * v, recalled], axis=-1)
        solved = jax.lax.linalg.triangular_solve(matrix, right, left_side=True, lower=True, unit_diagonal=True)
        value, recall = jnp.split(solved, [spec.value_dim], axis=-1)
    else:
        value, recall = beta[..., None] * v, None
    weights = pair * jnp.einsum("nbgtd,nbgsd->nbgts", q, k, precision=HIGHEST)[:, :, :, None]

    def chunk(state, inputs):
        q, k, value, recall, weights, since_start, to_end = inputs
        update = value
        if recall is not None:
            update = value - jnp.einsum("bgrtd,bgrvd->bgrtv", recall, state, precision=HIGHEST)
        carried = jnp.einsum("bgtd,bgrvd->bgrtv", q, state, precision=HIGHEST)
        out = since_start[..., None] * carried + jnp.einsum("bgrts,bgrsv->bgrtv", weights, update, precision=HIGHEST)
        added = jnp.einsum("bgrsv,bgsd->bgrvd", to_end[..., None] * update, k, precision=HIGHEST)
        return since_start[..., -1][..., None, None] * state + added, (out, update)

    grouped = (batch, *groups, spec.value_dim, spec.key_dim)
    state = jnp.zeros(grouped, jnp.float32) if state is None else state.astype(jnp.float32).reshape(grouped)
    state, (out, update) = jax.lax.scan(chunk, state, (q, k, value, recall, weights, since_start, to_end))

    def join(x):
        """[chunks, batch, key_heads, group, size, d] -> [batch, time, heads, d]."""
        x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), 4, 2)
        return x.reshape(batch, chunks * size, spec.heads, spec.value_dim)[:, :time]

    return join(out).astype(dtype), state.reshape(batch, *spec.state_shape), join(update)


def segment_decay(log_decay: Array) -> Array:
    """[..., c] -> [..., c, c]: at (t, s) exp of the sum of log_decay over (s, t], and 0 for s > t.

    The sums run from s itself, so that no difference of two long cumulative sums is ever taken; they are masked before
    exp, so that gradients are finite at any decay.
    """
    size, ndim = log_decay.shape[-1], log_decay.ndim + 1
    sums = jnp.cumsum(jnp.where(lower(size, ndim, -1), log_decay[..., :, None], 0.0), axis=-2)
    return jnp.exp(jnp.where(lower(size, ndim, 0), sums, -jnp.inf))


def lower(size: int, ndim: int, diagonal: int) -> Array:
    """bool [1, .., size, size] of rank ndim: True on and below the given diagonal."""
    return jnp.tril(jnp.ones((size, size), bool), diagonal).reshape((1,) * (ndim - 2) + (size, size))
