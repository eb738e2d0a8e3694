"""`chunked` on TPUs, in one launch: Pallas Mosaic TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.axes import Array
from jaxbuf.pallas.chunked.call import Call
from jaxbuf.pallas.chunked.tpu_chunk import (
    FIELDS,
    FIRST_BLOCK,
    FIRST_CHUNK,
    FIRST_UPDATES,
    LAST_BLOCK,
    LAST_CHUNK,
    ROW,
    Chunk,
    Refs,
)
from jaxbuf.pallas.chunked.tpu_layout import Layout, make_layout
from jaxbuf.target import TPU_DEVICES


def solve(
    call: Call,
    state: Array | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    lengths: Array,
    cut: Array | None = None,
    *,
    generation: str = "",
    interpret: Any = False,
) -> tuple[Array, Array, Array | None]:
    """`jaxbuf.recurrence.chunked.solve_chunks`; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      state: f32 [rows, heads, value_dim, key_dim]; None: zeros.
      q, k, v, log_decay, beta: As in `chunked`.
      lengths: int32 [rows]: of each row, how many tokens are real.
      cut: int32 [rows], at most lengths: after how many tokens the state is returned; None: after all.
      generation: Of the TPU, as in `jaxbuf.target.Target`: its VMEM decides how many heads a program takes.
      interpret: Run in Pallas' interpreter; or how.

    Returns:
      out [rows, time, heads, value_dim], 0 past lengths; the states; and the updates f32 [rows, n, heads, value_dim],
      None if call.updates is 0. n is time if call.updates is; else the first of them is that of the token at
      `first_update`.
    """
    layout = make_layout(call, generation)
    assert isinstance(layout, Layout), layout
    rows, time, chunk = call.rows, call.time, layout.chunk
    padded = max(time, chunk)

    def flat(x):
        """[rows, time, ...] -> [rows, time, all], of a chunk at least."""
        x = x.reshape(rows, time, -1)
        return jnp.pad(x, ((0, 0), (0, padded - time), (0, 0))) if padded > time else x

    inputs = {"q": flat(q), "k": flat(k), "v": flat(v)}
    if log_decay is not None:
        inputs["log_decay"] = flat(log_decay)
    if beta is not None:
        inputs["beta"] = flat(beta)
    widths = {"q": layout.key_heads * call.key_dim, "v": layout.heads * call.value_dim}
    widths["k"], widths["out"], widths["updates"] = widths["q"], widths["v"], widths["v"]
    if call.decay == "channel":
        widths["log_decay"] = layout.heads * call.key_dim

    def read(row, block, at, words):
        """Of which row, chunk and block of heads the inputs are that a program reads: the last that was read, where
        there is nothing to compute."""
        field = functools.partial(_field, words, row)
        at, block = (
            _clip(at, field(FIRST_CHUNK), field(LAST_CHUNK)),
            _clip(block, field(FIRST_BLOCK), field(LAST_BLOCK)),
        )
        return field(ROW), at, block

    def read_keys(*where):
        row, at, block = read(*where)
        return row, at, block * layout.heads // call.heads_per_key // layout.key_heads

    def tokens(name, x):
        if name in widths:
            return pl.BlockSpec((1, chunk, widths[name]), read_keys if name in ("q", "k") else read)
        return pl.BlockSpec((1, chunk, x.shape[2]), lambda *where: (*read(*where)[:2], 0))

    states = pl.BlockSpec((1, layout.heads, call.value_dim, call.key_dim), lambda row, block, *_: (row, block, 0, 0))
    in_specs = [tokens(name, x) for name, x in inputs.items()]
    if state is not None:
        inputs["state"] = state
        in_specs.append(states)
    out_shape = [
        jax.ShapeDtypeStruct((rows, padded, call.heads * call.value_dim), call.v),
        jax.ShapeDtypeStruct((rows, call.heads, call.value_dim, call.key_dim), jnp.float32),
    ]
    out_specs = [pl.BlockSpec((1, chunk, widths["out"]), lambda row, block, at, _: (row, at, block)), states]
    if call.updates:
        last = layout.update_chunks - 1
        count = padded if call.updates == time else layout.update_chunks * chunk

        def updated(row, block, at, words):
            if call.updates == time:
                return row, at, block
            at = jnp.minimum(at, jnp.maximum(_field(words, row, LAST_CHUNK), 0))
            return row, _clip(at - _field(words, row, FIRST_UPDATES), 0, last), block

        out_shape.append(jax.ShapeDtypeStruct((rows, count, call.heads * call.value_dim), jnp.float32))
        out_specs.append(pl.BlockSpec((1, chunk, widths["updates"]), updated))
    scratch = _scratch(layout)
    # Rows and blocks of heads may go to two cores where a device has two; in order, a row without tokens reads nothing.
    cores = TPU_DEVICES.get(generation, ("", 1))[1]
    across = "parallel" if cores > 1 else "arbitrary"
    found = pl.pallas_call(
        functools.partial(_body, layout, tuple(inputs), tuple(scratch)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, layout.blocks, layout.chunks),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[*scratch.values()],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(across, across, "arbitrary"), vmem_limit_bytes=layout.vmem_limit
        ),
        interpret=interpret,
        name="chunked",
    )(_integers(layout, lengths, cut), *inputs.values())
    out = found[0][:, :time].reshape(v.shape)
    if not call.updates:
        return out, found[1], None
    updates = found[2][:, :time] if call.updates == time else found[2]
    return out, found[1], updates.reshape(*updates.shape[:2], *v.shape[2:])


def first_update(call: Call, cut: Array, *, generation: str = "") -> Array:
    """int32 [rows]: the token whose update is the first that is returned of a row, if not all are."""
    layout = make_layout(call, generation)
    assert isinstance(layout, Layout), layout
    return cut // layout.chunk * layout.chunk


def _scratch(layout: Layout) -> dict[str, Any]:
    """Arrays in VMEM that programs keep, see `Refs`."""
    call, chunk = layout.call, layout.chunk
    levels = 2 + (layout.levels if call.decay == "channel" else 0)
    found = {"ones": pltpu.VMEM((levels, chunk, chunk), jnp.bfloat16)}
    if call.cut:
        found["running"] = pltpu.VMEM((1, layout.heads, call.value_dim, call.key_dim), jnp.float32)
    names = (*(("gates", "since", "left") if call.decay == "head" else ()), *(("beta",) if call.has_beta else ()))
    return found | {name: pltpu.VMEM((chunk, call.heads), jnp.float32) for name in names}


def _integers(layout: Layout, lengths: Array, cut: Array | None) -> Array:
    """FIELDS words a row, one row behind the other."""
    rows = layout.call.rows
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, layout.call.time)
    index = jnp.arange(rows, dtype=jnp.int32)
    live = lengths > 0
    last = jnp.maximum(-(-lengths // layout.chunk) - 1, 0)
    # A row without tokens reads what the row before it has read last; before all others, what the first will.
    before = jax.lax.cummax(jnp.where(live, index, -1))
    row = jnp.where(before < 0, jnp.argmax(live).astype(jnp.int32), before)
    ended = ~live & (before >= 0)
    chunk = last[row]
    cut = lengths if cut is None else jnp.clip(cut.astype(jnp.int32), 0, lengths)
    fields = [
        lengths,
        cut,
        row,
        jnp.where(ended, chunk, 0),
        jnp.where(live | ended, chunk, 0),
        jnp.where(ended, layout.blocks - 1, 0),
        jnp.where(live | ended, layout.blocks - 1, 0),
        cut // layout.chunk,
    ]
    return jnp.stack(fields, axis=1).reshape(-1)


def _field(words, row, column: int):
    return words[row * FIELDS + column]


def _clip(x, low, high):
    return jnp.minimum(jnp.maximum(x, low), high)


def _body(layout: Layout, input_names: tuple[str, ...], scratch_names: tuple[str, ...], *refs: Any) -> None:
    """A program: it names what it is given, scalars, inputs, outputs and scratch one behind the other."""
    given = iter(refs)
    words, inputs = next(given), {name: next(given) for name in input_names}
    out, state = next(given), next(given)
    updates = next(given) if layout.call.updates else None
    Chunk(layout, Refs(words, inputs, out, state, updates, dict(zip(scratch_names, given, strict=True)))).run()
