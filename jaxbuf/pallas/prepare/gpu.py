"""`prepare` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves four heads of one row, each with one warp: heads of q, of k or of v. A thread has four channels of its
head. It reads their last inputs from the ring, convolves them with the new ones, and appends the new ones to the ring.
Only the norms of q and k are sums over threads, those of one warp. The blocks that serve heads of v also make the gates
of these heads.

Floor: (3 inputs of the ring + T new ones + T appends + T outputs + gates) / read bandwidth; the taps stay in the cache.
Below some 64 rows, the 2 to 3 us that any launch takes are more.

Precision: where the definition rounds to the inputs' dtype, the kernel does, too. All numbers in between are float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.prepare.call import Call
from jaxbuf.pallas.prepare.gpu_inputs import convolve, find_row, read_windows, select, sigmoid
from jaxbuf.pallas.threads import COMPILER, load, store

HEADS = 4  # heads that a block serves, one with each warp
DIM = 128  # channels of a head, four for each thread
WIDTH = 4  # taps of a channel

# The layouts of taps [HEADS, DIM, WIDTH], of channels [HEADS, DIM] and of numbers [HEADS]. A thread reads the taps of a
# channel at once, so that its four channels lie 32 apart.
TAPS = plgpu.Layout.TILED(plgpu.Tiling(((HEADS, DIM, WIDTH), (32, WIDTH))), (-5,), (-2,), -1)
CHANNELS = TAPS.reduce(2)
HEAD = CHANNELS.reduce(1)


def prepare(
    call: Call,
    ring: Array,
    weights: tuple[Array, Array, Array],
    inputs: tuple[Array, Array, Array],
    integers: tuple[Array, Array, Array],
    *,
    order: Array | None = None,
    parents: Array | None = None,
    interpret: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """`jaxbuf.recurrence.prepare.prepare`; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      ring: [slots + 1, call.ring, channels / 128, 128]. It is written in place.
      weights: The convolution's [channels, 4]; A_log f32 [heads]; dt_bias f32 [heads], or [heads · 128] for decays of
        key channels.
      inputs: qkv [rows, T, channels]; a and b f32 [rows, T, heads], but a [rows, T, heads, 128] for decays of key
        channels.
      integers: slots, start and lengths, int32 [rows].
      order: int32 [slots + 1, call.ring], or None.
      parents: int32 [rows, T], or None.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      q and k [rows, T, key_heads, 128] and v [rows, T, heads, 128] in call.dtype, log_decay in the shape
      of a and beta f32 [rows, T, heads]; and the ring.
    """
    by_head = call.all_heads, DIM
    (convolution, A_log, dt_bias), (qkv, *gates) = weights, inputs
    ref = jax.new_ref(ring)  # a head has 128 channels, and the ring rows of as many
    rates = A_log, dt_bias.reshape(gates[0].shape[2:])
    arrays = convolution.reshape(*by_head, WIDTH), *rates, qkv.reshape(call.rows, call.time, *by_head), *gates
    given = {name: array for name, array in (("order", order), ("parents", parents)) if array is not None}
    out = _kernel(call, tuple(given), interpret)(*integers, *arrays, *given.values(), ref)
    return tuple(out), jax.freeze(ref)


def _kernel(call: Call, given: tuple[str, ...], interpret: bool):
    time = call.time

    def spread(x: Array) -> Array:
        """A number for each head, repeated along its channels: [HEADS, DIM]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (HEADS, DIM), [0]), CHANNELS)

    def prepare_heads(slots, start, lengths, weight, A_log, dt_bias, qkv, a, b, *refs):  # A profile shows this name.
        *optional, ring, q_ref, k_ref, v_ref, log_decay_ref, beta_ref = refs
        at = dict(zip(given, optional, strict=True))
        row, head = lax.axis_index("row"), HEADS * lax.axis_index("heads")
        heads = pl.ds(head, HEADS)
        found = find_row(call, row, slots, start, lengths, at.get("order"))
        new, windows = read_windows(
            call,
            row,
            found,
            lambda t: load(qkv.at[row, t, heads], CHANNELS),
            lambda place: load(ring.at[found.slot, place, heads], CHANNELS),
            at.get("parents"),
        )
        all_taps = load(weight.at[heads], TAPS).astype(jnp.float32)

        @pl.when(head >= 2 * call.key_heads)
        def _():
            own = pl.ds(head - 2 * call.key_heads, HEADS)
            decay_layout = HEAD if call.decay == "head" else CHANNELS
            rate, bias = jnp.exp(load(A_log.at[own], HEAD)), load(dt_bias.at[own], decay_layout)
            if call.decay == "channel":
                rate = spread(rate)
            # All tokens are read before the first is written: no read has to wait for a write.
            decays = [load(a.at[row, t, own], decay_layout) for t in range(time)]
            strengths = [load(b.at[row, t, own], HEAD) for t in range(time)]
            for t, (decay, strength) in enumerate(zip(decays, strengths, strict=True)):
                raw = decay + bias
                if call.lower_bound is None:
                    log_decay = -rate * _softplus(raw)
                else:
                    log_decay = np.float32(call.lower_bound) * sigmoid(rate * raw)
                store(log_decay_ref.at[row, t, own], log_decay)
                store(beta_ref.at[row, t, own], sigmoid(strength))

        for t, x in enumerate(new):

            @pl.when(found.real[t])
            def _(t=t, x=x):
                store(ring.at[found.slot, found.places[WIDTH - 1 + t], heads], x)

        number = plgpu.broadcasted_iota(jnp.int32, all_taps.shape, 2, layout=TAPS)
        # These sums pick one tap each. The compiler leaves the additions out, for it knows that x + -0 is x.
        taps = [jnp.sum(jnp.where(number == i, all_taps, np.float32(-0.0)), axis=2) for i in range(WIDTH)]
        tokens = []
        for t, window in enumerate(windows):
            y = convolve(window, taps).astype(call.dtype).astype(jnp.float32)
            tokens.append(select(found.real[t], (y * sigmoid(y)).astype(call.dtype)))

        def write(out_ref, first_head, scale=None):
            for t, y in enumerate(tokens):
                if scale is not None:
                    y = y.astype(jnp.float32)
                    factor = lax.rsqrt(jnp.sum(y * y, axis=1) + np.float32(call.eps)) * np.float32(scale)
                    y = (y * spread(factor)).astype(call.dtype)
                store(out_ref.at[row, t, pl.ds(head - first_head, HEADS)], y)

        is_q, is_v = head < call.key_heads, head >= 2 * call.key_heads
        pl.when(is_q)(partial(write, q_ref, 0, DIM**-0.5))
        pl.when(~is_q & ~is_v)(partial(write, k_ref, call.key_heads, 1.0))
        pl.when(is_v)(partial(write, v_ref, 2 * call.key_heads))

    dims = call.rows, call.time
    keys = jax.ShapeDtypeStruct((*dims, call.key_heads, DIM), call.dtype)
    values = jax.ShapeDtypeStruct((*dims, call.heads, DIM), call.dtype)
    gate = jax.ShapeDtypeStruct((*dims, call.heads), jnp.float32)
    decay = gate if call.decay == "head" else jax.ShapeDtypeStruct((*dims, call.heads, DIM), jnp.float32)
    return plgpu.kernel(
        prepare_heads,
        out_type=(keys, keys, values, decay, gate),
        grid=(call.rows, call.all_heads // HEADS),
        grid_names=("row", "heads"),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)) = max(x, 0) + log(1 + e), where e = exp(-|x|).

    The logarithm is computed as 2 artanh(e / (2 + e)), which is accurate for small e, too.
    """
    e = jnp.exp(-jnp.abs(x))
    ratio = e / (e + np.float32(2))
    square = ratio * ratio
    series = np.float32(1 / 15) * square
    for odd in range(13, 1, -2):  # The ratio is at most 1/3, so the terms that are left out are below 2e-9 of the sum.
        series = (series + np.float32(1 / odd)) * square
    return jnp.maximum(x, np.float32(0)) + np.float32(2) * ratio * (series + np.float32(1))
