"""The convolution with its ring alone on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A block serves some channels of one row, and of each of its tokens: a thread has sixteen bytes of an input, or fewer
where there are few channels. It reads the last inputs from the ring, convolves them with the new ones, adds the bias,
applies the activation, and appends the new inputs to the ring. If the channels do not fill the last block, it begins
where it ends with the last channel: two blocks then write the same numbers twice.

Floor: (width - 1 inputs of the ring + T new ones + T appends + T outputs) / read bandwidth; the taps stay in the cache.
Below some 64 rows, the 2 to 3 us that any launch takes are more.

Precision: where the definition rounds to the inputs' dtype, the kernel does, too. All numbers in between are float32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.prepare import gpu_inputs
from jaxbuf.pallas.prepare.call import Convolution
from jaxbuf.pallas.prepare.gpu_inputs import find_row, read_windows, select, sigmoid
from jaxbuf.pallas.threads import COMPILER, THREADS, WARP, load, load_columns, store, store_parts

LEAST_CHANNELS = THREADS  # one for each thread
MOST_WIDTH = 4  # taps of a channel


def count_per_thread(call: Convolution) -> int:
    """Neighbouring channels that a thread has: sixteen bytes of them, if there are so many, and rows and parts of the
    output begin at a multiple of them."""
    count = 16 // call.dtype.itemsize
    while any(size % count for size in (call.channels, *call.parts)) or call.channels < THREADS * count:
        count //= 2
    return count


def convolve(
    call: Convolution,
    ring: Array,
    weight: Array,
    x: Array,
    integers: tuple[Array, Array, Array],
    *,
    bias: Array | None = None,
    order: Array | None = None,
    parents: Array | None = None,
    silu: bool = False,
    interpret: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """`jaxbuf.recurrence.convolution.extend_ring`; `convolution_reason` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      ring: [slots + 1, call.ring, ...], an input's channels in the last two axes. It is written in place.
      weight: [channels, width].
      x: [rows, T, channels].
      integers: slots, start and lengths, int32 [rows].
      bias: [channels], or None.
      order: int32 [slots + 1, call.ring], or None.
      parents: int32 [rows, T], or None.
      silu: Whether SiLU is applied.
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      The output's parts, [rows, T, part] each in call.dtype, or all of it as one; and the ring.
    """
    ref = jax.new_ref(ring.reshape(*ring.shape[:2], call.channels))
    given = {"bias": bias, "order": order, "parents": parents}
    given = {name: array for name, array in given.items() if array is not None}
    out = _kernel(call, tuple(given), silu, interpret)(*integers, weight.reshape(-1), x, *given.values(), ref)
    return tuple(out), jax.freeze(ref).reshape(ring.shape)


def _kernel(call: Convolution, given: tuple[str, ...], silu: bool, interpret: bool):
    count = count_per_thread(call)
    size, sizes = THREADS * count, call.parts or (call.channels,)
    layout = plgpu.Layout.TILED(plgpu.Tiling(((size,), (WARP * count,), (count,))), (-3,), (-2,), -1)

    def convolve_channels(slots, start, lengths, weight, x, *refs):  # A profile shows this name.
        *optional, ring = refs[: len(given) + 1]
        outs = refs[len(given) + 1 :]
        at = dict(zip(given, optional, strict=True))
        row, first = lax.axis_index("row"), size * lax.axis_index("part")
        if call.channels % size:
            first = jnp.minimum(first, call.channels - size)
        channels = pl.ds(first, size)
        taps = load_columns(weight.at[pl.ds(call.width * first, call.width * size)], call.width, layout, interpret)
        taps = [tap.astype(jnp.float32) for tap in taps]
        bias = load(at["bias"].at[channels], layout).astype(jnp.float32) if "bias" in at else None
        found = find_row(call, row, slots, start, lengths, at.get("order"))
        new, windows = read_windows(
            call,
            row,
            found,
            lambda t: load(x.at[row, t, channels], layout),
            lambda place: load(ring.at[found.slot, place, channels], layout),
            at.get("parents"),
        )
        places = found.places[call.width - 1 :]
        for t, (own, window) in enumerate(zip(new, windows, strict=True)):

            @pl.when(found.real[t])
            def _(t=t, own=own):
                store(ring.at[found.slot, places[t], channels], own)

            y = gpu_inputs.convolve(window, taps).astype(call.dtype)
            if bias is not None:
                y = (y.astype(jnp.float32) + bias).astype(call.dtype)
            if silu:
                wide = y.astype(jnp.float32)
                y = (wide * sigmoid(wide)).astype(call.dtype)
            y = select(found.real[t], y)
            if call.parts:
                store_parts(y, layout, [out.at[row, t] for out in outs], first, interpret)
            else:
                store(outs[0].at[row, t, channels], y)

    return plgpu.kernel(
        convolve_channels,
        out_type=[jax.ShapeDtypeStruct((call.rows, call.time, size), call.dtype) for size in sizes],
        grid=(call.rows, pl.cdiv(call.channels, size)),
        grid_names=("row", "part"),
        compiler_params=COMPILER,  # There are no barriers: no thread reads what another one wrote.
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )
