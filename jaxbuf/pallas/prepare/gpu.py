"""`prepare` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves four heads, of q, k or v, of one row: a warp a head, four channels a thread. A thread convolves its own
channels, of which it reads the last inputs from the ring and appends the new ones; only a key head's norm is a sum over
threads, those of one warp. The blocks of v make the gates of their heads as well.

Floor: (3 inputs of the ring + T new ones + T appends + T outputs + gates) / read bandwidth, which a launch's own 2 to 3
us exceed below some 64 rows; the taps stay in the cache.

Precision: what the definition rounds to the inputs' dtype is rounded here, all between is float32.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.pallas.lanes import COMPILER, load

type Array = jax.Array

HEADS = 4  # of a block: one a warp
DIM = 128  # channels of a head: four a thread
WIDTH = 4  # taps of a channel
MOST_TOKENS = 16

# A channel's taps come in one read, so a thread's four channels lie 32 apart.
TAPS = plgpu.Layout.TILED(plgpu.Tiling(((HEADS, DIM, WIDTH), (32, WIDTH))), (-5,), (-2,), -1)
CHANNELS = TAPS.reduce(2)
HEAD = CHANNELS.reduce(1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of one kernel.

    Attributes:
      rows, time: Of the launch.
      heads, key_heads: Of the recurrence; key_dim and value_dim are 128.
      ring: Inputs that a slot's ring holds.
      eps: Of the norms of q and k.
      dtype, stored: Of the inputs and outputs, and of the ring.
    """

    rows: int
    time: int
    heads: int
    key_heads: int
    ring: int
    eps: float
    dtype: np.dtype
    stored: np.dtype

    @property
    def all_heads(self) -> int:
        """Heads of q, k and v together, in this order."""
        return 2 * self.key_heads + self.heads


def prepare(
    shape: Shape,
    ring: Array,
    weights: tuple[Array, Array, Array],
    inputs: tuple[Array, Array, Array],
    integers: tuple[Array, Array, Array],
    *,
    interpret: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """`jaxbuf.recurrence.prepare.prepare`; `supports` says for which sizes.

    Args:
      shape: Static.
      ring: [slots + 1, shape.ring, channels]; what is returned takes its place in memory.
      weights: The convolution's [channels, 4], A_log and dt_bias f32 [heads].
      inputs: qkv [rows, T, channels]; a and b f32 [rows, T, heads].
      integers: slots, start and lengths, int32 [rows].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      q and k [rows, T, key_heads, 128] and v [rows, T, heads, 128] in shape.dtype, log_decay and beta
      f32 [rows, T, heads]; and the ring.
    """
    by_head = shape.all_heads, DIM
    (convolution, *rates), (qkv, *gates) = weights, inputs
    ref = jax.new_ref(ring.reshape(*ring.shape[:2], *by_head))
    arrays = convolution.reshape(*by_head, WIDTH), *rates, qkv.reshape(shape.rows, shape.time, *by_head), *gates
    out = _kernel(shape, interpret)(*integers, *arrays, ref)
    return tuple(out), jax.freeze(ref).reshape(ring.shape)


def _kernel(shape: Shape, interpret: bool):
    time, history = shape.time, WIDTH - 1

    def prepare_heads(  # a profile shows this name
        slots, start, lengths, weight, A_log, dt_bias, qkv, a, b, ring, q_ref, k_ref, v_ref, log_decay_ref, beta_ref
    ):
        row, head = lax.axis_index("row"), HEADS * lax.axis_index("heads")
        heads = pl.ds(head, HEADS)
        slot, first, length = slots[row], start[row], lengths[row]
        new = [load(qkv.at[row, t, heads], CHANNELS) for t in range(time)]
        all_taps = load(weight.at[heads], TAPS).astype(jnp.float32)
        past = []
        for t in range(-history, 0):
            position = first + t
            there = ring.at[slot, lax.rem(jnp.maximum(position, 0), shape.ring), heads]
            past.append(_where((position >= 0) & (slot > 0), load(there, CHANNELS)))

        @pl.when(head >= 2 * shape.key_heads)
        def _():
            own = pl.ds(head - 2 * shape.key_heads, HEADS)
            rate, bias = jnp.exp(load(A_log.at[own], HEAD)), load(dt_bias.at[own], HEAD)
            # All reads before the first write: none has to wait for one.
            decays, strengths = ([load(ref.at[row, t, own], HEAD) for t in range(time)] for ref in (a, b))
            for t, (decay, strength) in enumerate(zip(decays, strengths, strict=True)):
                log_decay_ref[row, t, own] = -rate * _softplus(decay + bias)
                beta_ref[row, t, own] = _sigmoid(strength)

        real = [(t < length) & (slot > 0) for t in range(time)]
        for t, x in enumerate(new):

            @pl.when(real[t])
            def _(t=t, x=x):
                ring[slot, lax.rem(first + t, shape.ring), heads] = x

        number = plgpu.broadcasted_iota(jnp.int32, all_taps.shape, 2, layout=TAPS)
        # Picks them: the compiler knows that x + -0 is x.
        taps = [jnp.sum(jnp.where(number == i, all_taps, np.float32(-0.0)), axis=2) for i in range(WIDTH)]
        window = [x.astype(jnp.float32) for x in (*past, *new)]
        tokens = []
        for t in range(time):
            y = window[t] * taps[0]
            for i in range(1, WIDTH):
                y = y + window[t + i] * taps[i]
            y = y.astype(shape.dtype).astype(jnp.float32)
            tokens.append(_where(real[t], (y * _sigmoid(y)).astype(shape.dtype)))

        def write(out_ref, first_head, scale=None):
            for t, y in enumerate(tokens):
                if scale is not None:
                    y = y.astype(jnp.float32)
                    factor = lax.rsqrt(jnp.sum(y * y, axis=1) + np.float32(shape.eps)) * np.float32(scale)
                    factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, y.shape, [0]), CHANNELS)
                    y = (y * factor).astype(shape.dtype)
                out_ref[row, t, pl.ds(head - first_head, HEADS)] = y

        is_q, is_v = head < shape.key_heads, head >= 2 * shape.key_heads
        pl.when(is_q)(partial(write, q_ref, 0, DIM**-0.5))
        pl.when(~is_q & ~is_v)(partial(write, k_ref, shape.key_heads, 1.0))
        pl.when(is_v)(partial(write, v_ref, 2 * shape.key_heads))

    dims = shape.rows, shape.time
    keys = jax.ShapeDtypeStruct((*dims, shape.key_heads, DIM), shape.dtype)
    values = jax.ShapeDtypeStruct((*dims, shape.heads, DIM), shape.dtype)
    gate = jax.ShapeDtypeStruct((*dims, shape.heads), jnp.float32)
    return plgpu.kernel(
        prepare_heads,
        out_type=(keys, keys, values, gate, gate),
        grid=(shape.rows, shape.all_heads // HEADS),
        grid_names=("row", "heads"),
        compiler_params=COMPILER,  # and no barrier: no thread reads what another wrote
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by a root of one instruction and a product: a division takes ten."""
    root = lax.rsqrt(np.float32(1) + jnp.exp(-x))
    return root * root


def _softplus(x: Array) -> Array:
    """max(x, 0) + log(1 + e), e = exp(-|x|), the logarithm as 2 artanh(e / (2 + e)): exact where e is small, too."""
    e = jnp.exp(-jnp.abs(x))
    ratio = e / (e + np.float32(2))
    square = ratio * ratio
    series = np.float32(1 / 15) * square
    for odd in range(13, 1, -2):  # the ratio is at most 1/3: what is left out is below 2e-9 of the sum
        series = (series + np.float32(1 / odd)) * square
    return jnp.maximum(x, np.float32(0)) + np.float32(2) * ratio * (series + np.float32(1))


def _where(flag: Array, x: Array) -> Array:
    """x if the scalar flag is set, else zeros: selected, because what x was read from may be another owner's NaN."""
    return jnp.where(jnp.broadcast_to(flag, x.shape), x, jnp.zeros_like(x))
