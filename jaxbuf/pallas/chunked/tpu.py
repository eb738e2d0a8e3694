"""`chunked` on TPUs, in one launch: Pallas Mosaic TPU.

A program solves a chunk of a row, for all heads or, where these do not fit into VMEM, a block of them (`tpu_layout`).
The pipeline brings the next chunk's queries, keys, values and gates while one is solved. What a program does is in
`tpu_chunk`:

1. With a row's first chunk it takes the state that the row starts from; the state then stays in VMEM, where the last
   chunk's program leaves it to be written.
2. It sums the decays by products with matrices of ones, since Mosaic has no cumulative sum. Every sum is over exactly
   the tokens that it is of, whose numbers have one sign; one of -infinity is as good as -1e30, which times 0 is 0.
3. It multiplies queries and keys with keys, once for heads that are computed side by side and read the same, and with
   the decay between them. With a decay a channel, blocks of tokens are doubled, as in `jaxbuf.recurrence.chunked`.
4. With the delta rule it inverts the system: blocks of 16 by forward substitution, all of a head at once, and from
   there on the corners of blocks that double.
5. It multiplies queries and keys with the state, and has the updates, the outputs and the next state.

Where a state is to be returned that is not the last (`prefill` keeps some tokens as entries), the chunk in which it
lies is solved in two parts, of which the second continues from the first.

Floor: (q, k, v, gates of real tokens + outputs + states in and out) / read bandwidth. The copies are these, and gates
of one number a head again for each block of heads; `tests/portability/test_chunked_bytes.py` counts them. The products
take longer, by what the compiler's schedule says of a v5e: of Gated DeltaNet with 32 heads of 128 by 128, in bfloat16,
1,137 cycles a head and chunk of 128 tokens, some 36,400 for all heads, 24 us at 1.5 GHz, where the chunk's bytes take
3.9 us at 819 GB/s. Of a decay a channel it is 2,983 cycles.

Why it is so:
- A float32 operand is two bfloat16 parts where queries, keys and values are bfloat16 (off by 2**-18, the outputs are
  rounded to 2**-9), and three, which are exact, where one of them is float32, or nothing dampens what the delta rule
  recalls; a bfloat16 operand is one. So a product takes one to six passes. A head's chunk takes 51 passes of 128 by 128
  by 128, if the whole inverse is made by doubling, and 36 of them are the inverse's. Each pass loads 128 rows of one
  operand, which takes as long as to stream 128 rows of the other. With substitution in the diagonal blocks (numbers are
  spread over lanes by one product with ones for all 15 steps), corners of half as many rows, and parts that share the
  loaded operand, the matrix unit is busy for 815 cycles a head, down from 1,493, and the head takes 1,137, down from
  1,604. What is left waits for results of products, and for registers that are spilled.
- Chunks have 128 tokens: with 64, products fill half of a 128 by 128 unit's rows, and the state is loaded twice as
  often: the schedule says 649 cycles a head and 64 tokens, 14 % more a token. With 256 the inverse would have a level
  more.
- Tokens' heads lie side by side in one row of numbers, as projections give them and the norm behind takes them: a head
  of 128 is whole vectors, and narrower heads are not padded. Heads are taken in units that begin at multiples of 128
  numbers (24 heads of 80, in Nemotron), and four are computed side by side: two at once take 1,400 cycles a head.
- A row of the grid that has nothing to compute keeps the block that was read last. For that, rows must come in order:
  they may go to two cores only where a device has two (v4, v5p).
"""

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
