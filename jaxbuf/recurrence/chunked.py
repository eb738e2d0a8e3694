"""The recurrence chunk by chunk: parallel inside a chunk, for prefill and training.

Inside a chunk that starts from state S, with G_t the sum of log_decay up to t and D_ts = exp(sum over (s, t]), which
is a number a head or, with decay="channel", diagonal:

    u_t = beta_t (v_t − S e^{G_t} k_t − Σ_{s<t} (k_t · D_ts k_s) u_s)      one unit triangular system a head
    o_t = S e^{G_t} q_t + Σ_{s≤t} (q_t · D_ts k_s) u_s
    S'  = S e^{G_C} + Σ_s u_s ⊗ D_Cs k_s

The system's matrix does not contain S, so that the chunks of a segment are solved at once, by products of matrices,
and only two products a chunk are serial. Differentiation keeps a segment's inputs and the state it starts from, and
computes what lies between once more.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxbuf.arguments import check_sizes
from jaxbuf.axes import Array, Bool, Float, Float32, Int
from jaxbuf.pallas.dispatch import Asked, ask
from jaxbuf.pallas.gradient import differentiable
from jaxbuf.recurrence.recurrent import HIGHEST, real_positions
from jaxbuf.recurrence.spec import RecurrenceSpec, check_inputs, check_state
from jaxbuf.target import Target

# Tokens of a row that are worked on at once: enough to fill a device, few enough that memory stays small.
SEGMENT = 1024
# Triangular blocks of up to this size are inverted whole; larger ones from halves.
BLOCK = 16

einsum = partial(jnp.einsum, precision=HIGHEST)
matmul = partial(jnp.matmul, precision=HIGHEST)


def chunked(
    spec: RecurrenceSpec,
    state: Float[Array, "batch heads value_dim key_dim"] | None,
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    log_decay: Float32[Array, "batch time heads ..."] | None = None,
    beta: Float32[Array, "batch time heads"] | None = None,
    *,
    chunk_size: int = 64,
    lengths: Int[Array, "batch"] | None = None,
    return_updates: bool = False,
    implementation: str = "auto",
    interpret: bool = False,
    target: Target | str | None = None,
) -> (
    tuple[Float[Array, "batch time heads value_dim"], Float32[Array, "batch heads value_dim key_dim"]]
    | tuple[
        Float[Array, "batch time heads value_dim"],
        Float32[Array, "batch heads value_dim key_dim"],
        Float32[Array, "batch time heads value_dim"],
    ]
):
    """Computes what `recurrent` computes, `chunk_size` tokens at a time. Differentiable; memory is linear in time.

    No decay is too strong: every weight is a product of factors at most 1, -inf included.

    A NaN or infinity of one token may reach the outputs of earlier tokens of its row, which `recurrent` would give
    right: inside a chunk, what a token must not see is multiplied by a weight of zero. Other rows, and what lies past
    `lengths`, are apart: nothing of them reaches a row, whatever it is.

    Args:
      spec: The family.
      state, q, k, v, log_decay, beta, lengths: As in `recurrent`.
      chunk_size: Tokens solved together, rounded up to a power of two; the cost inside a chunk grows with its square.
        A kernel has a size of its own.
      return_updates: Also return u, what each token adds to the state (zero past `lengths`).
      implementation: "xla", "gpu", "tpu", or "auto": the target's kernel where it serves the call, else "xla". The
        gradient of a kernel is that of XLA's path.
      interpret, target: As in `jaxbuf.recurrence.launch.extend_pool`.

    Returns:
      out in v's dtype, the final state, and with return_updates u.

    Raises:
      ValueError: An argument's shape or dtype does not fit `spec`, chunk_size is below 1 or not a whole number, or the
        implementation asked for can't serve the call; it says why.

    Source: Yang et al., Gated Delta Networks (2024), section 3.3; Kimi Team, Kimi Linear (2025), section 3; KVBuffer,
    eq. 15.
    """
    check_inputs(spec, q, k, v, log_decay, beta)
    if state is not None:
        check_state(state, v.shape[0], spec.state_shape)
    check_sizes(chunk_size=chunk_size)
    asked = ask("chunked", implementation, target, (v,), interpret=interpret)
    how = spec, asked, chunk_size, return_updates
    out, state, updates = _chunked(*how, state, q, k, v, log_decay, beta, lengths)
    return (out, state) if updates is None else (out, state, updates)


def _chunked(
    spec: RecurrenceSpec,
    asked: Asked | None,
    chunk_size: int,
    return_updates: bool,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    lengths: Array | None,
) -> tuple[Array, Array, Array | None]:
    """`chunked`, which has checked the arguments; None in place of updates if they are not returned."""
    inputs = state, q, k, v, log_decay, beta, lengths

    def defined(state, q, k, v, log_decay, beta, lengths):
        sizes = {"chunk_size": chunk_size, "lengths": lengths}
        out, state, updates = solve_chunks(spec, state, q, k, v, log_decay, beta, **sizes)
        return out, state, updates if return_updates else None

    if asked is not None:
        # Imported here: Pallas takes a while, and a CPU has no use for it.
        from jaxbuf.pallas.chunked import supports

        updates = v.shape[1] if return_updates else 0
        call = kernel_call(spec, q, k, v, beta, has_state=state is not None, updates=updates)
        if asked.takes(supports(call, platform=asked.platform, generation=asked.generation)):

            def kernel(*inputs):
                return solve_by_kernel(asked, call, *inputs)[:3]

            return differentiable(kernel, defined)(*inputs)
    return defined(*inputs)


def kernel_call(
    spec: RecurrenceSpec,
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None,
    *,
    has_state: bool = True,
    updates: int = 0,
    cut: bool = False,
):
    """What a kernel is asked to solve, a `jaxbuf.pallas.chunked.Call`.

    Args:
      spec, q, k, v, beta: As in `chunked`.
      has_state, updates, cut: As in `jaxbuf.pallas.chunked.Call`.
    """
    from jaxbuf.pallas.chunked import Call

    return Call(
        rows=v.shape[0],
        time=v.shape[1],
        heads=spec.heads,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        q=jnp.dtype(q.dtype),
        k=jnp.dtype(k.dtype),
        v=jnp.dtype(v.dtype),
        decay=spec.decay,
        delta=spec.delta,
        has_state=has_state,
        has_beta=beta is not None,
        cut=cut,
        updates=updates,
    )


@partial(jax.jit, static_argnums=(0, 1))
@jax.named_scope("recurrence")
def solve_by_kernel(
    asked: Asked,
    call,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    lengths: Array | None,
    cut: Array | None = None,
) -> tuple[Array, Array, Array | None, Array]:
    """The kernel on what it has said it serves: see `solve` of `jaxbuf.pallas.chunked.tpu`, whose results it returns,
    and int32 [rows], which token of each row the first of the updates is that of.

    Args:
      asked: Which kernel.
      call: From `kernel_call`.
      state, q, k, v, log_decay, beta, lengths: As in `chunked`.
      cut: After how many tokens of each row the state is returned; None: after all.
    """
    state = None if state is None else state.astype(jnp.float32)
    lengths = jnp.full(v.shape[0], v.shape[1], jnp.int32) if lengths is None else lengths
    inputs = state, q, k, v, log_decay, beta, lengths, cut
    if asked.platform == "gpu":
        from jaxbuf.pallas.chunked import gpu

        found = gpu.solve(call, *inputs, interpret=asked.interpret)
        first_update = gpu.first_update
    else:
        from jaxbuf.pallas.chunked import tpu

        found = tpu.solve(call, *inputs, generation=asked.generation, interpret=asked.interpret)
        first_update = partial(tpu.first_update, generation=asked.generation)
    if cut is None or call.updates == call.time:
        return *found, jnp.zeros_like(lengths)
    return *found, first_update(call, cut)


@jax.named_scope("recurrence")
def solve_chunks(
    spec: RecurrenceSpec,
    state: Float[Array, "batch heads value_dim key_dim"] | None,
    q: Float[Array, "batch time key_heads key_dim"],
    k: Float[Array, "batch time key_heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    log_decay: Float32[Array, "batch time heads ..."] | None,
    beta: Float32[Array, "batch time heads"] | None,
    *,
    chunk_size: int,
    lengths: Int[Array, "batch"] | None,
) -> tuple[
    Float[Array, "batch time heads value_dim"],
    Float32[Array, "batch heads value_dim key_dim"],
    Float32[Array, "batch time heads value_dim"],
]:
    """`chunked` with its updates; arguments and errors as there."""
    check_inputs(spec, q, k, v, log_decay, beta)
    if state is not None:
        check_state(state, v.shape[0], spec.state_shape)
    check_sizes(chunk_size=chunk_size)
    batch, time = v.shape[:2]
    size = 1 << (min(chunk_size, max(time, 1)) - 1).bit_length()
    total = -(-time // size)
    segments = max(1, -(-total // max(1, SEGMENT // size)))
    chunks = -(-total // segments)
    padding = segments * chunks * size - time
    real = real_positions(batch, time, lengths)[..., None, None]

    def split(x, *heads):
        """[batch, time, heads, d] -> [segments, chunks, batch, *heads, size, d]; dead positions become zeros."""
        x = jnp.pad(jnp.where(real, x, jnp.zeros_like(x)), [(0, 0), (0, padding), (0, 0), (0, 0)])
        x = x.reshape(batch, segments, chunks, size, *heads, x.shape[-1])
        return jnp.moveaxis(x, (1, 2, 0, 3), (0, 1, 2, -2))

    def join(x):
        """[segments, chunks, batch, key_heads, group, size, d] -> [batch, time, heads, d]."""
        x = jnp.moveaxis(x, (2, -2), (0, 3))
        return x.reshape(batch, time + padding, spec.heads, spec.value_dim)[:, :time]

    gate = (batch, time, spec.heads, 1)
    beta = jnp.ones(gate, jnp.float32) if beta is None else beta[..., None]
    if log_decay is None:
        log_decay = jnp.zeros(gate, jnp.float32)
    elif spec.decay == "head":
        log_decay = log_decay[..., None]
    groups = (spec.key_heads, spec.group)
    inputs = *(split(x, spec.key_heads, 1) for x in (q, k)), *(split(x, *groups) for x in (v, log_decay, beta))
    grouped = (batch, *groups, spec.value_dim, spec.key_dim)
    state = jnp.zeros(grouped, jnp.float32) if state is None else state.astype(jnp.float32).reshape(grouped)
    segment = jax.checkpoint(partial(_segment, spec), prevent_cse=False)
    state, (out, updates) = jax.lax.scan(segment, state, inputs)
    return join(out).astype(v.dtype), state.reshape(batch, *spec.state_shape), join(updates)


def _segment(spec: RecurrenceSpec, state: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
    """The chunks of one segment.

    Args:
      state: f32 [batch, key_heads, group, value_dim, key_dim].
      inputs: q, k [chunks, batch, key_heads, 1, size, key_dim], and with group in place of the 1: v [..., value_dim],
        log_decay [..., 1 or key_dim], beta [..., 1].

    Returns:
      The state after it; out and u, in v's shape.
    """
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in inputs)
    pairs = _channel_pairs if spec.decay == "channel" else _head_pairs
    (attend, *overlap), since_start, to_end = pairs((q, k) if spec.delta else (q,), k, log_decay)
    query, key, total = since_start * q, to_end * k, since_start[..., -1:, :]
    value, recall = beta * v, None
    if spec.delta:
        inverse = unit_lower_inverse(beta * overlap[0])
        value, recall = matmul(inverse, value), matmul(inverse, beta * since_start * k)

    def chunk(state, inputs):
        value, recall, key, total = inputs
        update = value if recall is None else value - einsum("...td,...vd->...tv", recall, state)
        return total * state + einsum("...sv,...sd->...vd", update, key), (state, update)

    state, (starts, update) = jax.lax.scan(chunk, state, (value, recall, key, total))
    out = einsum("...td,...vd->...tv", query, starts) + matmul(attend, update)
    return state, (out, update)


def _head_pairs(rows: Sequence[Array], keys: Array, log_decay: Array) -> tuple[list[Array], Array, Array]:
    """Products of rows and keys across the decay between them, where that is one number a head.

    Args:
      rows: Arrays like keys.
      keys: [..., size, d].
      log_decay: [..., size, 1].

    Returns:
      For each of the rows, row_t · D_ts key_s [..., size, size], 0 for s > t; then e^{G_t} and D_Cs [..., size, 1].
    """
    decay = decay_between(log_decay[..., 0])
    since_start = jnp.exp(log_decay[..., :1, :]) * decay[..., :1]
    products = [decay * einsum("...td,...sd->...ts", x, keys) for x in rows]
    return products, since_start, jnp.swapaxes(decay[..., -1:, :], -1, -2)


def _channel_pairs(rows: Sequence[Array], keys: Array, log_decay: Array) -> tuple[list[Array], Array, Array]:
    """`_head_pairs` where every channel has a decay of its own, log_decay [..., size, d].

    Blocks on the diagonal grow from one token to all of them, by doubling: from s in a left half to t in the right half
    beside it, the decay is that from s to the boundary times that from the boundary to t. Both factors are at most 1,
    so one matrix product gives all these pairs, and the sums that they come from only ever add terms of one sign.
    """
    to_here, from_here = log_decay, jnp.zeros_like(log_decay)  # sums from the token's block's start, and to its end
    products = [jnp.broadcast_to(jnp.sum(x * keys, -1), log_decay.shape[:-1])[..., None, None] for x in rows]
    for width in (1 << level for level in range(keys.shape[-2].bit_length() - 1)):
        (here_left, here_right), (end_left, end_right) = _halves(to_here, width), _halves(from_here, width)
        until = jnp.exp(end_left) * _halves(keys, width)[0]
        for i, x in enumerate(rows):
            since = jnp.exp(here_right) * _halves(x, width)[1]
            corner = einsum("...td,...sd->...ts", since, until)
            products[i] = _joined(products[i][..., ::2, :, :], corner, products[i][..., 1::2, :, :])
        whole_left, whole_right = here_left[..., -1:, :], here_right[..., -1:, :]
        to_here = jnp.stack([here_left, whole_left + here_right], -3).reshape(log_decay.shape)
        from_here = jnp.stack([end_left + whole_right, end_right], -3).reshape(log_decay.shape)
    return [x[..., 0, :, :] for x in products], jnp.exp(to_here), jnp.exp(from_here)


@jax.custom_jvp
def unit_lower_inverse(matrix: Float32[Array, "... n n"]) -> Float32[Array, "... n n"]:
    """The inverse of a unit lower triangular matrix, by matrix products alone.

    Both halves of the diagonal are inverted first; the corner is then −D⁻¹ C A⁻¹. Every step is an exact elimination,
    so that the error is that of forward substitution (a series in powers of the matrix would cancel), and unlike a
    triangular solve it does not go through a library of the CPU, whose threads wait for those of XLA.

    Args:
      matrix: Its size is a power of two; only what is below the diagonal is read.
    """
    size, leading = matrix.shape[-1], (1,) * (matrix.ndim - 2)
    if size > BLOCK:
        half = size // 2
        left, right = unit_lower_inverse(jnp.stack([matrix[..., :half, :half], matrix[..., half:, half:]]))
        return _joined(left, -matmul(right, matmul(matrix[..., half:, :half], left)), right)
    identity = jnp.eye(size, dtype=matrix.dtype)
    inverse = jnp.broadcast_to(identity.reshape(*leading, size, size), matrix.shape)
    for width in (1 << level for level in range(size.bit_length() - 1)):
        block = jnp.arange(size) // width
        corners = (block[:, None] == block[None] + 1) & (block[None] % 2 == 0)
        corners = jnp.where(corners.reshape(*leading, size, size), matrix, 0.0)
        inverse -= corners if width == 1 else matmul(inverse, matmul(corners, inverse))
    return inverse


@unit_lower_inverse.defjvp
def _(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -matmul(inverse, matmul(jnp.tril(tangents[0], -1), inverse))


def _halves(x: Array, width: int) -> tuple[Array, Array]:
    """[..., size, d] -> left and right halves [..., size / (2 width), width, d] of the blocks of 2 width."""
    x = x.reshape(*x.shape[:-2], -1, 2, width, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _joined(left: Array, corner: Array, right: Array) -> Array:
    """The block lower triangular matrix [[left, 0], [corner, right]]."""
    top = jnp.concatenate([left, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, right], axis=-1)], axis=-2)


def decay_between(log_decay: Float32[Array, "... n"]) -> Float32[Array, "... n n"]:
    """At (t, s) exp of the sum of log_decay over (s, t], and 0 for s > t.

    The sums run from s itself, so that no difference of two long cumulative sums is ever taken; they are masked before
    exp, so that gradients are finite at any decay.
    """
    size, ndim = log_decay.shape[-1], log_decay.ndim + 1
    sums = jnp.cumsum(jnp.where(lower(size, ndim, -1), log_decay[..., :, None], 0.0), axis=-2)
    return jnp.exp(jnp.where(lower(size, ndim, 0), sums, -jnp.inf))


def lower(size: int, ndim: int, diagonal: int) -> Bool[Array, "..."]:
    """bool [1, .., size, size] of rank ndim: True on and below the given diagonal."""
    return jnp.tril(jnp.ones((size, size), bool), diagonal).reshape((1,) * (ndim - 2) + (size, size))
