"""`prepare` on TPUs, and the convolution with its ring alone, in one launch: Pallas Mosaic TPU.

A program serves some rows of the launch:

1. It starts the copies of the last inputs that the next program needs from the rings, one by one, and waits for its
   own, which the program before has started. Inputs before a text's first token are zeros, and are not copied.
2. It starts the copies of its rows' new inputs into the rings, from where they lie.
3. For one token after the other it convolves all channels: an input is rows of 128 channels, of which the vector unit
   takes eight at once. `prepare` goes on with them: SiLU, the norms of q and k, each head of which is one row, and, for
   all tokens of the program at once, the gates.

Floor: (width - 1 inputs of the ring + T new ones + T appends + T outputs + gates) / read bandwidth; the taps are read
once a launch. `tests/portability/test_prepare_bytes.py` counts them.

Precision: where the definition rounds to the inputs' dtype, the kernel does, too. All numbers in between are float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.prepare.call import Call, Convolution
from jaxbuf.pallas.tpu_memory import padded_bytes, vmem_bytes

LANES = 128  # channels of a head, and of a row of the ring
MOST_TOKENS = 16  # new tokens of a row
MOST_ROWS = 8  # that a program serves
SCALARS = 512 * 1024  # bytes of scalar memory for the integers of all rows


class Places(NamedTuple):
    """Where the inputs of each row lie, in a ring whose first two axes are one.

    Attributes:
      sources: int32 [rows, width - 1], the inputs before the new ones, oldest first; -1: before the text.
      targets: int32 [rows, T], the new ones; -1: not real.
      parents: int32 [rows, T], the new input before each one, -1 for the last source; None: they follow one another.
    """

    sources: Array
    targets: Array
    parents: Array | None = None


def count_words(call: Convolution) -> int:
    """Integers of a launch that lie in scalar memory."""
    return -(-call.rows // MOST_ROWS) * MOST_ROWS * _row_words(call)


def _row_words(call: Convolution) -> int:
    return call.width - 1 + call.time * (2 if call.tree else 1)


def program_rows(call: Convolution, generation: str) -> int:
    """Rows that a program serves, for which half of the VMEM has room; 0: not even for one."""
    of_token = padded_bytes((-(-call.channels // LANES), LANES), call.dtype.itemsize)
    # Of a token, twice each: its input, its output, and its place in the window.
    of_row = 2 * of_token * (3 * call.time + call.width - 1)
    fitting = vmem_bytes(generation) // 2 // of_row
    return 1 << min(MOST_ROWS, fitting, max(1, call.rows)).bit_length() - 1 if fitting else 0


def convolve(
    call: Convolution,
    ring: Array,
    weight: Array,
    x: Array,
    places: Places,
    *,
    generation: str = "",
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`jaxbuf.recurrence.convolution.extend_ring`; `convolution_reason` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      ring: [slots + 1, call.ring, channels / 128, 128]. It is written in place.
      weight: [channels, width].
      x: [rows, T, channels].
      places: Where inputs lie.
      generation: Of the TPU, as in `jaxbuf.target.Target`: its VMEM decides how many rows a program takes.
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      [rows, T, channels] in call.dtype, and the ring.
    """
    shape = (call.rows, call.time, call.channels // LANES, LANES)

    def write(outs, row, token, y):
        (out,) = outs
        out[row, token] = y.astype(call.dtype)

    (y,), ring = _launch(
        call,
        generation,
        interpret,
        "convolve",
        ring,
        (weight, x),
        places,
        write=write,
        out_shapes=[jax.ShapeDtypeStruct(shape, call.dtype)],
    )
    return y.reshape(x.shape), ring


def prepare(
    call: Call,
    ring: Array,
    weights: tuple[Array, Array, Array],
    inputs: tuple[Array, Array, Array],
    places: Places,
    *,
    generation: str = "",
    interpret: Any = False,
) -> tuple[tuple[Array, ...], Array]:
    """`jaxbuf.recurrence.prepare.prepare`; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      ring, places, generation, interpret: As in `convolve`.
      weights: The convolution's [channels, width], A_log and dt_bias f32 [heads].
      inputs: qkv [rows, T, channels]; a and b f32 [rows, T, heads].

    Returns:
      q and k [rows, T, key_heads, 128] and v [rows, T, heads, 128] in call.dtype, log_decay and beta
      f32 [rows, T, heads]; and the ring.
    """
    keys, dims = call.key_heads, (call.rows, call.time)
    (convolution, A_log, dt_bias), (qkv, a, b) = weights, inputs

    def write(outs, row, token, y):
        q_ref, k_ref, v_ref, *_ = outs
        y = y.astype(call.dtype).astype(jnp.float32)
        y = (y / (1 + jnp.exp(-y))).astype(call.dtype).astype(jnp.float32)
        vectors = y[: 2 * keys]
        factor = lax.rsqrt(jnp.sum(vectors * vectors, axis=1, keepdims=True) + np.float32(call.eps))
        q_ref[row, token] = (vectors[:keys] * (factor[:keys] * np.float32(LANES**-0.5))).astype(call.dtype)
        k_ref[row, token] = (vectors[keys:] * factor[keys:]).astype(call.dtype)
        v_ref[row, token] = y[2 * keys :].astype(call.dtype)

    def gates(rates, outs):
        A_log_ref, dt_bias_ref, a_ref, b_ref = rates
        *_, log_decay_ref, beta_ref = outs
        rate, bias = jnp.exp(A_log_ref[...])[None], dt_bias_ref[...][None]
        log_decay_ref[...] = -rate * _softplus(a_ref[...] + bias)
        beta_ref[...] = 1 / (1 + jnp.exp(-b_ref[...]))

    vectors = [jax.ShapeDtypeStruct((*dims, heads, LANES), call.dtype) for heads in (keys, keys, call.heads)]
    gate = jax.ShapeDtypeStruct((*dims, call.heads), jnp.float32)
    return _launch(
        call,
        generation,
        interpret,
        "prepare",
        ring,
        (convolution, qkv),
        places,
        write=write,
        gates=gates,
        rates=(A_log[None], dt_bias[None], a, b),
        out_shapes=[*vectors, gate, gate],
    )


def _launch(
    call: Convolution,
    generation: str,
    interpret: Any,
    name: str,
    ring: Array,
    inputs: tuple[Array, Array],
    places: Places,
    *,
    write: Any,
    out_shapes: list[jax.ShapeDtypeStruct],
    gates: Any = None,
    rates: tuple[Array, ...] = (),
) -> tuple[tuple[Array, ...], Array]:
    """Convolves and appends.

    Args:
      call, generation, interpret, ring, places: As in `convolve`.
      name: Of the kernel, which a profile shows.
      inputs: The taps [channels, width], and the new inputs.
      write: Takes the outputs' refs, a row of the program, a token and what it was convolved to, f32
        [channels / 128, 128].
      gates: Takes the refs of rates and of the outputs; it is called once in each program.
      rates: More inputs: of [1, n] all, of [rows, ...] those of the program's rows.
      out_shapes: Of the outputs, [rows, T, ...] each.

    Returns:
      The outputs, and the ring.
    """
    weight, x = inputs
    groups, history, time = call.channels // LANES, call.width - 1, call.time
    count = program_rows(call, generation)
    programs = pl.cdiv(call.rows, count)
    flat = ring.reshape(-1, groups, LANES)
    words = jnp.concatenate([integers for integers in places if integers is not None], axis=1)
    words = jnp.pad(words, ((0, programs * count - call.rows), (0, 0)), constant_values=-1)
    taps = jnp.swapaxes(weight.astype(jnp.float32), 0, 1).reshape(call.width, groups, LANES)
    x = x.reshape(call.rows, time, groups, LANES)

    def of_rows(array):
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec((count, *array.shape[1:]), lambda i, *_: (i, *zeros))

    def whole(array):
        zeros = (0,) * array.ndim
        return pl.BlockSpec(array.shape, lambda *_: zeros)

    def body(words, ring, taps, x, *refs):
        rates_refs, (*outs, written, window, arrived, appended) = refs[: len(rates)], refs[len(rates) :]
        program = _Program(call, count, words, ring, taps, x, written, window, arrived, appended)
        program.copy_sources()
        program.append(start=True)
        if gates is not None:
            gates(rates_refs, outs)
        program.convolve(functools.partial(write, outs), outs)
        program.append(start=False)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    found = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(programs,),
            in_specs=[hbm, whole(taps), of_rows(x), *[whole(r) if r.ndim == 2 else of_rows(r) for r in rates]],
            out_specs=[*map(of_rows, out_shapes), hbm],
            scratch_shapes=[
                pltpu.VMEM((2, count, history + time, groups, LANES), call.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[*out_shapes, pltpu.HBM(flat.shape, flat.dtype)],
        input_output_aliases={1: len(out_shapes)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes(generation) * 15 // 16
        ),
        interpret=interpret,
        name=name,
    )(words.reshape(-1), flat, taps, x, *rates)
    *outs, flat = found
    return tuple(outs), flat.reshape(ring.shape)


class _Program:
    """What a program does for its rows.

    Attributes:
      call: The call.
      rows: Rows of a program.
      words: In scalar memory, row by row: sources, targets and, in trees, parents.
      ring, written: The rings, where they are read and where they are written.
      taps: f32 [width, channels / 128, 128].
      x: [rows, T, channels / 128, 128], the new inputs.
      window: [2, rows, width - 1 + T, channels / 128, 128], the inputs before the new ones and these. Programs take
        turns with its halves.
      arrived, appended: Semaphores of the copies from and to the rings.
    """

    def __init__(self, call: Convolution, rows: int, words, ring, taps, x, written, window, arrived, appended):
        self.call, self.rows, self.words = call, rows, words
        self.ring, self.taps, self.x, self.written = ring, taps, x, written
        self.window, self.arrived, self.appended = window, arrived, appended
        self.history, self.time = call.width - 1, call.time
        self.step, self.steps = pl.program_id(0), pl.num_programs(0)
        self.half = lax.rem(self.step, 2)

    def word(self, row, number, step=None):
        step = self.step if step is None else step
        return self.words[(step * self.rows + row) * _row_words(self.call) + number]

    def copy_sources(self) -> None:
        """Starts the next program's copies from the rings, and waits for this one's."""

        @pl.when(self.step == 0)
        def _():
            self._sources(self.step, start=True)

        @pl.when(self.step + 1 < self.steps)
        def _():
            self._sources(self.step + 1, start=True)

        self._sources(self.step, start=False)

    def _sources(self, step, *, start: bool) -> None:
        half = lax.rem(step, 2)

        def row(r, _):
            def input_before(i, _):
                source, there = self.word(r, i, step), self.window.at[half, r, i]

                @pl.when(source >= 0)
                def _():
                    copy = pltpu.make_async_copy(self.ring.at[source], there, self.arrived.at[half])
                    copy.start() if start else copy.wait()

                if not start:

                    @pl.when(source < 0)
                    def _():
                        there[...] = jnp.zeros(there.shape, there.dtype)

            lax.fori_loop(0, self.history, input_before, None)

        lax.fori_loop(0, self.rows, row, None)

    def append(self, *, start: bool) -> None:
        """Starts the copies of the new inputs into the rings, or waits for them."""

        def row(r, _):
            def token(t, _):
                target = self.word(r, self.history + t)

                @pl.when(target >= 0)
                def _():
                    copy = pltpu.make_async_copy(self.x.at[r, t], self.written.at[target], self.appended)
                    copy.start() if start else copy.wait()

            lax.fori_loop(0, self.time, token, None)

        lax.fori_loop(0, self.rows, row, None)

    def convolve(self, write, outs) -> None:
        """Convolves one token after the other; of tokens that are not real, vectors are zeros."""
        vectors = [out for out in outs if out.ndim == 4]

        def row(r, _):
            self.window[self.half, r, self.history :] = self.x[r]

            def token(t, _):
                real = self.word(r, self.history + t) >= 0

                @pl.when(real)
                def _():
                    taps = self.taps[...]
                    places = self._path(r, t)
                    y = self._input(r, places[0]) * taps[0]
                    for i in range(1, self.call.width):
                        y = y + self._input(r, places[i]) * taps[i]
                    write(r, t, y)

                @pl.when(jnp.logical_not(real))
                def _():
                    for out in vectors:
                        out[r, t] = jnp.zeros(out.shape[2:], out.dtype)

            lax.fori_loop(0, self.time, token, None)

        lax.fori_loop(0, self.rows, row, None)

    def _input(self, row, place) -> Array:
        return self.window[self.half, row, place].astype(jnp.float32)

    def _path(self, row, token) -> list:
        """The places in the window of a token's inputs, its own last."""
        if not self.call.tree:
            return [token + i for i in range(self.call.width)]
        node, path = token, [token + self.history]
        for _ in range(self.history):
            parent = self.word(row, self.history + self.time + jnp.maximum(node, 0))
            node = jnp.where(node >= 0, parent, node - 1)
            path.insert(0, node + self.history)
        return path


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)), which does not overflow."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
