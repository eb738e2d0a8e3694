"""`extend` on NVIDIA GPUs (Hopper) for families whose decay is one number a key channel: KDA, gated linear attention.

A multiprocessor runs one block of up to three warpgroups. Each is a lane: it serves one item (a head of a row) after
the other, independently of the others. While a lane computes, the states of the others, and then the next one of its
own, are copied to shared memory.

An entry's decay differs from channel to channel, so it belongs to the entry's key and not to the product with a probe:
a decayed key is the key times the exponential of the decay up to a token, and a decayed probe is a new key or a query
times the exponential of the decay since the checkpoint. A short item, of few tokens and few entries, is copied to
shared memory while the item before is served, all but its state. A lane serves it in these steps:
1. It appends the new tokens' keys and gates to the ring.
2. A thread for each channel overwrites the entries' gates with the sums of the gates behind them; or, if the row folds,
   with the decayed keys.
3. If the row folds, the lane multiplies the state in shared memory with the decay of all entries, adds update ⊗ decayed
   key of each, and starts to copy it back. Of a split state, shared memory holds the high half alone: a fold loads the
   low half to registers, where it makes the sum, and stores it from there.
4. Otherwise a warp for each entry decays its key, for every new token, and multiplies it with the token's probes: the
   entry's weights. New tokens have weights for each other in the same way. Places that hold no entry are left out,
   `PART` at a time.
5. A thread for each row of the state adds the updates, times their weights, entry by entry.
6. The state is multiplied with the decayed probes on the tensor cores, band by band. As soon as a band has been read,
   the copy of the next item's begins.
7. A thread for each row of the state substitutes forward over the new tokens.

The entries of other items come from global memory, a chunk at a time: a thread for each channel writes the chunk's
decayed keys to shared memory for each new token again, and warps multiply these with the probes.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth. An entry has
as many gates as a key has numbers, in float32: half of the bytes of an entry.

Precision: the state's and the probes' halves in products on the tensor cores lose 2^-16; all else is float32. Gates are
summed as whole numbers, which is exact in any order, and the exponential is that of the whole sum between an entry and
a token: so T tokens at once and one by one store the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import Call, Integers
from jaxbuf.pallas.extend.gpu_channel_entries import add_entries, add_short, decay_probes, weigh_new
from jaxbuf.pallas.extend.gpu_channel_keys import sum_gates
from jaxbuf.pallas.extend.gpu_channel_lane import Lane, count_blocks, count_warpgroups, shared_memory
from jaxbuf.pallas.extend.gpu_channel_state import fold, read_state
from jaxbuf.pallas.extend.gpu_channel_sums import narrow
from jaxbuf.pallas.extend.gpu_channel_weights import DIM
from jaxbuf.pallas.extend.gpu_lane import Item, name_arrays
from jaxbuf.pallas.extend.gpu_products import where
from jaxbuf.pallas.extend.gpu_schedule import CHUNK, MAX_DEALT_ROUNDS
from jaxbuf.pallas.extend.gpu_sums import on_path
from jaxbuf.pallas.instructions import count_up, synchronize
from jaxbuf.pallas.threads import COMPILER, PER_THREAD, load, store


def extend_channels(
    call: Call,
    integers: Integers,
    refs: list,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    interpret: bool = False,
) -> Array:
    """`jaxbuf.pallas.extend.gpu.extend` for decay="channel".

    Args:
      call, integers, q, k, v, beta, interpret: As there. Entries are padded to whole chunks.
      log_decay: f32 [rows, T, heads, key_dim].
      refs: References to the checkpoints; to the keys, updates and gates, with blocks and block_size as one axis; and
        to the low halves and their scales, as far as there are some.

    Returns:
      The outputs.
    """
    paths = [] if integers.paths is None else [integers.paths]
    warpgroups = count_warpgroups(call)
    lanes = warpgroups * count_blocks(call, warpgroups)
    draws = pl.cdiv(call.items, lanes) > MAX_DEALT_ROUNDS and not interpret
    counter = [jax.new_ref(jnp.zeros(1, jnp.int32))] if draws else []
    tokens = q, k, v, log_decay, beta
    return _kernel(call, warpgroups, draws, interpret)(*integers[:3], *tokens, *refs[:4], *paths, *refs[4:], *counter)


def _kernel(call: Call, warpgroups: int, draws: bool, interpret: bool):
    blocks = count_blocks(call, warpgroups)
    lanes = warpgroups * blocks

    def extend_channels(*refs):  # A profile shows this name.
        *refs, out, memory = refs
        arrays, counter = name_arrays(call, refs)
        warpgroup = lax.axis_index("warpgroup")
        lane = Lane(call, interpret, arrays, out, memory, warpgroup)

        def draw():
            """Draws a number, in one thread."""
            return count_up(*counter) if draws else None

        def find_after(following):
            """The number of the item after the next: the one that was drawn, or the one that is dealt."""
            return 2 * lanes + lane.drawn() if draws else following + lanes

        first = warpgroup * blocks + lax.axis_index("block")

        @pl.when(first < call.items)
        def _():
            lane.keep_words(lane.ask_for_words(first))
            lane.fetch(first)
            lane.copy_short(first)
            asked = (lane.ask_for_words(first + lanes), draw()) if lane.early else None
            serve = functools.partial(serve_item, lane, draw, find_after)
            start = first, first + lanes, jnp.int32(0), asked
            lax.while_loop(lambda carry: carry[0] < call.items, lambda carry: serve(*carry), start)
            lane.await_copies()  # for an item that is not there
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_channels,
        out_type=jax.ShapeDtypeStruct((call.rows, call.time, call.heads, DIM), call.out),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[shared_memory(call, warpgroups)],
        # The compiler's sums across warps would need scratch memory; there are none.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def serve_item(lane: Lane, draw: Callable, find_after: Callable, number: Array, following: Array, buffer: Array, asked):
    """Serves an item; starts to copy the state of the one that follows, and what else it needs.

    Args:
      lane: The lane.
      draw, find_after: Draw the number of the item after the next, and find it when all threads have been told.
      number, following: Numbers of the item and of the one that follows.
      buffer: Which of the lane's words are the item's.
      asked: If copies are early, what `ask_for_words` returned for the item that follows, and `draw`; else None.

    Returns:
      The last four for the item that follows.
    """
    call, arrays, time = lane.call, lane.arrays, range(lane.call.time)
    lane.look_at(buffer)
    words, drawn = asked if lane.early else (lane.ask_for_words(following), draw())
    item = lane.read_item(number)
    append = [lane.append_to(t) for t in time]
    paths = [lane.path(t) for t in time] if call.tree else None

    def copy_next():
        if drawn is not None:
            lane.tell_drawn(drawn)
        lane.look_at(1 - buffer)
        lane.keep_words(words)
        lane.copy_short(following)
        lane.look_at(buffer)
        return find_after(following)

    if lane.short:
        lane.await_short()
        for t, entry in enumerate([new_entry(lane, item, t) for t in time]):  # All loads come before the first store.
            append_entry(lane, item, t, *entry)
        values = [load(lane.values.at[t], PER_THREAD) for t in time]
        if lane.early:
            after = copy_next()
            words = lane.ask_for_words(after)
        added = add_short(lane, item)
    else:
        first = lane.load_chunk(item, 0) if lane.one_token or call.max_live <= CHUNK else None
        values = [load(arrays.v.at[item.row, t, item.head], PER_THREAD) for t in time]
        total = sum_gates(lane, item, first)
        pl.when(item.folds)(functools.partial(fold, lane, item, narrow(total), first, total))
        added = add_entries(lane, item, first, total)
        weigh_new(lane, item)
        decay_probes(lane, item, where(~item.folds, narrow(total)))
        lane.each_token(lambda t: append_entry(lane, item, t, *new_entry(lane, item, t)))
    betas = [lane.new_beta(item, t) for t in time]
    if lane.early:
        asked = words, draw()
    else:
        # They arrive while the state is multiplied. A load would not: the assembler has few counters for loads, so that
        # a later load from shared memory would wait for it.
        after = copy_next()
    lane.look_at(1 - buffer)
    read_state(lane, item, following)
    synchronize(lane.interpret)  # All threads see what the probes read.
    substitute(lane, item, added, values, betas, append, paths)
    return following, after, 1 - buffer, asked


def new_entry(lane: Lane, item: Item, t: Array | int) -> tuple[Array, Array]:
    """The gates and the key of a new token, one number a thread."""
    return load(lane.new_gates(item, t), PER_THREAD), load(lane.new_probes(item, t)[0], PER_THREAD)


def append_entry(lane: Lane, item: Item, t: Array | int, gates: Array, key: Array) -> None:
    """Writes a new token's gates to the ring, without the delta rule its beta, too; and its key, if the head is the
    first of its key head's."""
    call, arrays, to = lane.call, lane.arrays, lane.append_to(t)
    head, key_head = item.head, item.head // call.heads_per_key

    @pl.when(to >= 0)
    def _():
        store(arrays.gates.at[to, head, lane.channels], gates)
        if not call.delta:
            store(arrays.gates.at[to, head, DIM], lane.new_beta(item, t))

        @pl.when(lax.rem(head, call.heads_per_key) == 0)
        def _():
            store(arrays.keys.at[to, key_head], key.astype(call.entry))


def substitute(lane: Lane, item: Item, added: list[Array], values, betas, append, paths) -> None:
    """Substitutes forward over the T tokens: writes their outputs, and their updates to the ring."""
    call, time = lane.call, lane.call.time

    def load_read(i):
        """What probe i reads from the state."""
        return where(item.has_state, load(lane.numbers.at[i, lane.channels], PER_THREAD))

    reads = [load_read(i) for i in range(2 * time)] if lane.short else []

    def read(i):
        return reads[i] if reads else load_read(i)

    def load_weights(t):
        return lane.load_weights(lane.first_new + t)

    recalls, outs = added[:time], added[time:]
    loaded = [load_weights(t) for t in range(time)] if lane.short else []  # before a store: no load comes past it
    for t, to in enumerate(append):
        weights = loaded[t] if loaded else load_weights(t)
        stored = values[t]
        if call.delta:
            stored = betas[t] * (stored.astype(jnp.float32) - (recalls[t] + read(t)))
        stored = stored.astype(call.entry)
        update = stored.astype(jnp.float32)
        if not call.delta:
            update = betas[t] * update
        for i in range(t, time):
            for sums, weight in ((recalls, weights[i] if i > t else None), (outs, weights[time + i])):
                if weight is not None:
                    sums[i] = on_path(paths, i, t, sums[i] + weight * update, sums[i])
        result = where(t < item.length, outs[t] + read(time + t))
        store(lane.out.at[item.row, t, item.head], result.astype(call.out))

        @pl.when(to >= 0)
        def _(to=to, stored=stored):
            store(lane.arrays.updates.at[to, item.head], stored)
