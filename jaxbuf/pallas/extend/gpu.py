"""`extend` on NVIDIA GPUs (Hopper), in one launch: Pallas Mosaic GPU.

A multiprocessor runs one block of up to three warpgroups. Each is a lane: it serves one item (a head of a row) after
the other, independently of the others. While one lane computes, checkpoints are copied to the shared memory of the
others. The package's docstring explains the terms.

A lane serves an item in these steps:
1. It appends the new tokens' keys and gates to the ring.
2. It sums the gates of the entries to decays.
3. If the row folds, it adds the entries to the checkpoint in shared memory, from where a copy back to the pool starts.
4. Otherwise it sums what the entries add to the outputs, chunk by chunk. It multiplies the 2 T probes with the chunk's
   keys on the tensor cores, and these products with the updates: a thread for each row of the state [value_dim,
   key_dim], or on the tensor cores (`gpu_entries` says when). The probes are multiplied with the new keys, too, whether
   the row folds or not.
5. It multiplies the state with the probes, band by band. As soon as a band is done with, the copy of the next item's
   begins.
6. It substitutes forward over the T tokens, which gives their outputs and their updates, and appends the updates.

Modules: `gpu_schedule` arranges a call; `gpu_lane` is a lane and how what an item needs is brought to it; `gpu_sums`
does step 2, `gpu_fold` step 3, `gpu_entries` step 4; `gpu_products` has the products that all of them use. Launches of
one token on short rings are served by another kernel, `gpu_step`.

Floor: (checkpoint · (1 + folds per step) + live entries + appends + inputs and outputs) / read bandwidth.

Precision: float32 operands of products on the tensor cores are two bfloat16 halves (2^-16 relative); all sums are
float32. The order of a sum does not depend on which entries are committed and which are pending. That is why T tokens
at once and one by one store the same bits with a float32 checkpoint. With a narrower checkpoint they may not: how often
a fold rounds it depends on T.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxbuf.axes import Array
from jaxbuf.pallas.extend.call import FOLDING, ROW_FIELDS, Call, Integers
from jaxbuf.pallas.extend.gpu_channel import extend_channels
from jaxbuf.pallas.extend.gpu_channel_lane import padded_entries
from jaxbuf.pallas.extend.gpu_entries import add_all, weight
from jaxbuf.pallas.extend.gpu_fold import fold
from jaxbuf.pallas.extend.gpu_lane import Item, Lane, Upcoming, name_arrays, read_item
from jaxbuf.pallas.extend.gpu_products import STATE, STATE_LEFT, VECTORS, ZERO, cut, join, multiply_state, where, zeros
from jaxbuf.pallas.extend.gpu_schedule import BAND, CHUNK, SPACING, Schedule, arrange
from jaxbuf.pallas.extend.gpu_step import extend_step, serves
from jaxbuf.pallas.extend.gpu_sums import factor, on_path, parts, sum_decays, sum_path
from jaxbuf.pallas.instructions import count_up, publish, round_now, synchronize
from jaxbuf.pallas.threads import COMPILER, THREADS, load, store, store_rows


def extend(
    call: Call,
    integers: Integers,
    arrays: tuple[Array, ...],
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """`jaxbuf.recurrence.pool.extend_pool` for every decay; `supports` says for which sizes.

    Args:
      call: The call's sizes and dtypes.
      integers: Where each row's memory lies; rows that fold are put `row_spacing` lines apart.
      arrays: Checkpoints, keys, updates and gates as in `Pool`, and behind them `Pool.low` if checkpoints are split,
        and `Pool.low_scales` if its numbers are int8. They are written in place.
      q, k: [rows, T, key_heads, key_dim] in call.probe; k is rounded to the entries' dtype.
      v: [rows, T, heads, value_dim].
      log_decay: f32 [rows, T, heads], 0 where entries have none; [rows, T, heads, key_dim] if it is one a channel.
      beta: f32 [rows, T, heads].
      interpret: Run in Pallas' GPU interpreter.

    Returns:
      out [rows, T, heads, value_dim] in call.out, and the arrays.
    """
    checkpoints, entries, low = arrays[0], arrays[1:4], arrays[4:]
    keys, updates, gates = entries
    flat = [x.reshape(-1, *x.shape[2:]) for x in (keys, updates)]
    # No kernel takes an array without numbers, which the gates of a DeltaNet are.
    of_entry = gates.shape[2:] if call.decay == "channel" else (call.gates,)
    flat.append(gates.reshape(-1, *of_entry) if call.gates else jnp.zeros((1, 1)))
    given, by_step = call, serves(call)
    call = window(call) if by_step else call if call.decay == "channel" else stack(call)
    heads = call.value_axes
    v, flat[1] = v.reshape(*v.shape[:2], *heads), flat[1].reshape(-1, *heads)
    checkpoints, *low = (x.reshape(-1, *heads, *x.shape[3:]) for x in (checkpoints, *low))
    if by_step or call.decay == "channel":
        refs = [jax.new_ref(x) for x in (checkpoints, *flat, *low)]
        if not by_step:
            integers = integers._replace(entries=_padded(integers.entries, padded_entries(call)))
        kernel = extend_step if by_step else extend_channels
        out = kernel(call, integers, refs, q, k, v, log_decay, beta, interpret=interpret)
        return out.reshape(*out.shape[:2], given.heads, given.value_dim), _frozen(refs, arrays)
    schedule = arrange(call)
    positions = _padded(integers.entries, schedule.padded_entries)
    refs = [jax.new_ref(x) for x in (checkpoints, *flat, *low)]
    counter = [jax.new_ref(jnp.zeros(1, jnp.int32))] if schedule.draws and not interpret else []
    paths = [] if integers.paths is None else [integers.paths]
    tokens = q, k, v, log_decay, beta
    out = _kernel(schedule, interpret)(
        integers.fields, positions, integers.append, *tokens, *refs[:4], *paths, *refs[4:], *counter
    )
    return out.reshape(*out.shape[:2], given.heads, given.value_dim), _frozen(refs, arrays)


def _padded(positions: Array, length: int) -> Array:
    """The positions of entries, cut or padded with zeros."""
    positions = positions[:, :length]
    return jnp.pad(positions, ((0, 0), (0, length - positions.shape[1])))


def window(call: Call, wide: bool = False) -> Call:
    """The call with windows of 64 or 128 values in place of heads, if heads have other numbers of values; with keys of
    256 numbers of 64, as a lane has shared memory for so many rows of a state.

    Rows of a state do not depend on each other, and the states of all heads of a key head lie one behind the other. So
    a window is served like a head. It has rows of several heads if a head's values are no whole windows.

    Args:
      call: With heads.
      wide: Whether such windows may have 128 values, if that pays off: an item of 128 takes less than twice as long as
        one of 64. The last window of a key head may then have 64 values in common with the one before.
    """
    widths = (BAND, THREADS) if call.key_dim <= THREADS else (BAND,)
    if call.value_dim in widths:
        return call
    whole = max((n for n in widths if call.value_dim % n == 0), default=0)
    if whole:
        return _with_windows(call, whole, 1)
    narrow = _with_windows(call, BAND, 2)
    if not wide or THREADS not in widths:
        return narrow
    firsts = range(0, call.heads_per_key * call.value_dim - THREADS + 1, BAND)
    heads = max((first + THREADS - 1) // call.value_dim - first // call.value_dim + 1 for first in firsts)
    widened = _with_windows(call, THREADS, heads)
    return widened if _pays(widened, narrow) else narrow


def _with_windows(call: Call, width: int, heads: int) -> Call:
    """The call with windows of so many values, with rows of so many heads at most."""
    of_key = call.heads_per_key * call.value_dim
    sizes = {"heads": call.key_heads * pl.cdiv(of_key, width), "value_dim": width, "stacked": heads}
    key_values = of_key if of_key % width else 0
    return dataclasses.replace(call, **sizes, head_values=call.value_dim, key_values=key_values)


def _pays(wide: Call, narrow: Call) -> bool:
    """Whether wide windows are served faster than narrow ones: there is shared memory for as many rows of states, at
    least two lanes a multiprocessor have some, and every lane has several items. (Measured: 256 rows of one token.)"""
    if wide.passed_words > THREADS:
        return False
    few, many = arrange(wide), arrange(narrow)
    holds = few.warpgroups >= 2 and many.warpgroups * narrow.value_dim <= few.warpgroups * wide.value_dim
    return holds and wide.items >= 2 * few.lanes


def has_windows(call: Call) -> bool:
    """Whether the values of a key head's heads are whole windows of 64."""
    return call.value_dim >= BAND and call.heads_per_key * call.value_dim % BAND == 0


def stack(call: Call) -> Call:
    """The call in windows, if it needs some; or with two heads of 64 values as one of 128, if they read the same key
    head and differ in decays alone."""
    call = window(call, wide=True)
    together = not call.delta and call.decay != "channel" and call.heads_per_key % 2 == 0 and not call.head_values
    if not together or 2 * call.value_dim != THREADS or call.key_dim > THREADS:
        return call
    return dataclasses.replace(call, heads=call.heads // 2, value_dim=THREADS, stacked=2)


def _frozen(refs: list, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """What the references hold, in the arrays' shapes; an array without numbers as it was."""
    found = [jax.freeze(ref) for ref in refs]
    return tuple(x.reshape(old.shape) if old.size else old for x, old in zip(found, arrays, strict=True))


def row_spacing(call: Call) -> int:
    """One line of `Integers` in so many, or in fewer, should be a row's that folds; 1: all of these come first."""
    return SPACING if call.decay == "channel" else arrange(stack(call)).spacing


class _Carry(NamedTuple):
    """What a lane has in registers when it begins to serve an item.

    Attributes:
      turn: How many items it has served.
      exists: Whether there is an item to serve; if not, the lane ends.
      line, head, fields: The item, as `read_item` takes it.
      upcoming: The item after it.
      values: The item's values: [value_dim] each.
      new_keys: Its new keys, as `Lane.admit` returns them: [key_dim] each.
    """

    turn: Array | int
    exists: Array
    line: Array
    head: Array
    fields: list[Array]
    upcoming: Upcoming
    values: list[Array]
    new_keys: list[Array]


def _kernel(schedule: Schedule, interpret: bool):
    call = schedule.call
    draws = schedule.draws and not interpret  # The interpreter knows no atomics.

    def extend_heads(*refs):  # A profile shows this name.
        *refs, out, memory = refs
        arrays, counter = name_arrays(call, refs)
        lane = Lane(schedule, interpret, arrays, memory)
        drawn_word = schedule.padded_entries  # the index in `lane.decays` of the number that the lane drew last

        # Items that fold come early, because they take longest. Items are drawn from a counter, by lanes that have
        # served their last one, which makes up for the multiprocessors' unequal shares of the bandwidth; or, if there
        # are few rounds, they are dealt. (The interpreter deals items that should be drawn, so in another order.)
        folding = arrays.fields[0, FOLDING] * call.heads

        def shifted(rounds):
            # Rows that fold are some lines apart. Without the shift, the same lanes may serve several of them in the
            # first three rounds, whose items are not drawn.
            return lax.rem(lane.number + rounds * (schedule.lanes // SPACING), schedule.lanes)

        def read_tokens():
            """The new tokens' log decays and betas, for each head of a stack, their positions, and in a tree their
            paths, else None."""
            kinds = [jnp.float32] * (2 * call.stacked) + [jnp.int32] * (1 + call.tree)
            found = [lane.read_words(ROW_FIELDS + i * call.time, call.time, kind) for i, kind in enumerate(kinds)]
            gates, betas, rest = (
                found[: call.stacked],
                found[call.stacked : 2 * call.stacked],
                found[2 * call.stacked :],
            )
            return gates, betas, rest[0], rest[1] if call.tree else None

        def locate_after_next(turn):
            if not draws:
                return lane.locate(lane.deal(turn + 2, folding))
            # This number was drawn a turn ago. The lane would have to wait for one that it draws in this turn.
            drawn = lax.bitcast_convert_type(lane.decays[0, drawn_word], jnp.int32)
            return lane.locate(3 * schedule.lanes + drawn)

        def serve(carry):
            """Serves an item; asks for the next one's inputs, and for where those of the one after that lie."""
            next_turn = carry.turn + 1
            item, following = read_item(carry.line, carry.head, carry.fields), carry.upcoming
            lane.first_rows = call.first_rows(item.head)
            number = count_up(*counter) if draws else None

            next_fields = lane.read_words(0, ROW_FIELDS, jnp.int32)
            gates, betas, append, paths = read_tokens()
            if not (schedule.one_token or schedule.reads_late):
                after_next = locate_after_next(carry.turn)
            _append_keys(lane, item, append, gates, betas, carry.new_keys)
            gates = [[parts(lane, gate) for gate in of_head] for of_head in gates]
            # For a fold, decays reach up to the last entry, not up to the new token.
            new_gates = [[jnp.where(item.folds, ZERO, x) for x in gate] for gate, *_ in gates]
            totals = sum_decays(lane, item.live, new_gates if schedule.one_token else None)
            pl.when(item.folds)(functools.partial(fold, lane, item, totals, functools.partial(_read_folded, lane)))
            totals = [[jnp.where(item.folds, ZERO, x) for x in total] for total in totals]
            if schedule.reads_late:  # What the fold left no registers for.
                next_fields = lane.read_words(0, ROW_FIELDS, jnp.int32)
                if not schedule.one_token:
                    after_next = locate_after_next(carry.turn)
            # If there are registers, inputs are asked for early: they then arrive while the item is served. But not
            # before the fold, which would wait for these loads.
            loaded = lane.load_inputs(following, next_fields) if schedule.one_token else None
            added = add_all(lane, item, gates, paths)
            if schedule.one_token:
                after_next = locate_after_next(carry.turn)
            if loaded is None:
                loaded = lane.load_inputs(following, next_fields)
            if schedule.reads_late and not schedule.one_token:
                _, betas, append, paths = read_tokens()
            if schedule.stages:
                lane.keep(following)
                synchronize(interpret)  # All threads are done with the entries.
                lane.copy_ahead(following.exists, following, next_fields)
            # More probes than fit into registers are loaded again for each band.
            loaded_once = schedule.probe_columns * pl.cdiv(call.key_dim, THREADS) <= CHUNK
            probes = [lane.load_probes(strip) for strip in schedule.state_strips] if loaded_once else None

            def read_band(i):
                _read_state(lane, item, i, probes)
                pl.when(following.exists)(functools.partial(lane.fetch, i, following.head, next_fields))

            lane.each_band(read_band)
            _substitute(lane, item, out, added, totals, gates, betas, append, paths, carry.values)
            if number is not None:
                publish(number, lane.decays.at[0, drawn_word])
            synchronize(interpret)  # All threads have read what the next item overwrites.
            admitted = lane.admit(following.all_positions, loaded, after_next.fields)
            return _Carry(
                next_turn, following.exists, following.line, following.head, next_fields, after_next, *admitted
            )

        start = lane.locate(lane.number)

        @pl.when(start.exists)
        def _():
            fields = [arrays.fields[start.line, i] for i in range(ROW_FIELDS)]
            lane.each_band(lambda i: lane.fetch(i, start.head, fields))
            loaded = lane.load_inputs(start, fields)
            if schedule.stages:
                lane.keep(start)
                synchronize(interpret)
                lane.copy_ahead(True, start, fields)
            following = lane.locate(schedule.lanes + shifted(1) if draws else lane.deal(1, folding))
            if draws:  # Numbers from the counter begin with the fourth round. This one gives the lane's third item.
                lane.decays[0, drawn_word] = lax.bitcast_convert_type(shifted(2) - schedule.lanes, jnp.float32)
            admitted = lane.admit(start.all_positions, loaded, following.fields)
            first = _Carry(0, start.exists, start.line, start.head, fields, following, *admitted)
            lax.while_loop(lambda carry: carry.exists, serve, first)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        extend_heads,
        out_type=jax.ShapeDtypeStruct((call.rows, call.time, *call.value_axes), call.out),
        grid=(schedule.blocks,),
        grid_names=("block",),
        num_threads=schedule.warpgroups,
        thread_name="warpgroup",
        scratch_types=[schedule.shared_memory()],
        # The compiler's sums across warps would need scratch memory; there are none.
        compiler_params=dataclasses.replace(COMPILER, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )


def _append_keys(
    lane: Lane,
    item: Item,
    append: list[Array],
    gates: list[list[Array]],
    betas: list[list[Array]],
    new_keys: list[Array],
) -> None:
    """Writes the new tokens' log decays to the ring, if entries have some, without the delta rule their betas, too;
    and, if the item's head is the first of its key head's, their keys."""
    call = lane.call
    for t, to in enumerate(append):

        @pl.when(to >= 0)
        def _(t=t, to=to):
            for i in range(call.stacked):
                if call.decay_width:
                    store(lane.arrays.gates.at[to, call.log_decay(item.head, i)], gates[i][t])
                if not call.delta:
                    store(lane.arrays.gates.at[to, call.beta(item.head, i)], betas[i][t])

            @pl.when(lax.rem(item.head, call.heads_per_key) == 0)
            def _():
                probe = lane.vectors.at[0, CHUNK + t, pl.ds(0, call.key_dim)]
                key = new_keys[t] if new_keys else load(probe, VECTORS[call.key_dim])
                store(lane.arrays.keys.at[to, item.head // call.heads_per_key], key.astype(call.entry))


def _multiply_band(lane: Lane, state, band, probes: list[list[Array]] | None, reads) -> None:
    """Writes the products of a band of the state with the probes to `reads`."""
    schedule = lane.schedule
    # Two sums, because products into one sum wait for each other.
    sums = [zeros((BAND, schedule.probe_columns), STATE)] * 2
    for j, strip in enumerate(schedule.state_strips):
        right = probes[j] if probes else lane.load_probes(strip)
        for left in cut(load(state.at[:, strip], STATE_LEFT)):
            sums = [sums[1], multiply_state(sums[0], left, right, lane.interpret)]
    read = sums[0] + sums[1]
    if schedule.one_token:
        store_rows(read, STATE, 1, reads.at[:, band], lane.interpret)
    else:
        store(reads.at[band, pl.ds(0, schedule.probe_columns)], read)


def _read_folded(lane: Lane, i: Array) -> None:
    """Multiplies band i of a folded split state, whose high half `Lane.halves` names, with the probes."""
    (_, state, _), *_ = lane.halves()
    reads = lane.fold_reads if lane.schedule.one_token else lane.reads
    _multiply_band(lane, state, pl.ds(i * BAND, BAND), None, reads)


def _read_state(lane: Lane, item: Item, i: Array, probes: list[list[Array]] | None) -> None:
    """Multiplies band i of the state with the probes; then its shared memory may be overwritten.

    Args:
      lane: Its `reads` get the products.
      item: The item that is served.
      i: The band.
      probes: All probes, one strip each, if they are in registers.
    """
    schedule = lane.schedule
    band, state, barrier = lane.band(i)
    waits = lane.and_own(item.has_checkpoint & ~item.folds, item.head, i)
    pl.when(waits)(lambda: plgpu.barrier_wait(barrier))
    is_split = lane.arrays.low is not None  # Then the fold has multiplied the state.
    multiply_band = functools.partial(_multiply_band, lane, state, band, probes, lane.reads)
    if is_split and not schedule.one_token:
        pl.when(item.has_checkpoint & ~item.folds)(multiply_band)
    elif schedule.stages:  # With rings longer than a chunk, a row may well have no checkpoint: then this saves work.
        pl.when(item.has_state)(multiply_band)
    else:
        multiply_band()
    # Before band i is overwritten, the copies of it that a fold started must have read it. Copies end in the order in
    # which they started: those of the bands behind it may still be on their way.
    if is_split:
        pl.when(item.folds & jnp.equal(i, 0))(functools.partial(plgpu.wait_smem_to_gmem, 0, wait_read_only=True))
    else:
        for behind, _ in enumerate(schedule.bands):
            last = item.folds & (i == len(schedule.bands) - 1 - behind)
            pl.when(last)(functools.partial(plgpu.wait_smem_to_gmem, behind, wait_read_only=True))
    synchronize(lane.interpret)


def _substitute(lane: Lane, item: Item, out, added, totals, gates, betas, append, paths, values) -> None:
    """Substitutes forward over the T tokens: writes their outputs, and their updates to the ring.

    Without the delta rule an update is the value, and what is added for it the value times beta.

    Args:
      lane: Its `reads` have the state times each probe, its `products` each probe times each new key.
      item: The item that is served.
      out: The reference to the outputs.
      added: From `add_all`.
      totals: For each head of a stack the sum of the entries' gates, in parts; 0 if the item folds.
      gates, betas: Likewise the new tokens' gates, each in parts, and their betas.
      append, paths, values: The new tokens' flat positions in the ring (-1: none), in a tree their paths, and their
        values [value_dim].
    """
    call, schedule = lane.call, lane.schedule
    time, vector = call.time, VECTORS[call.value_dim]

    def read(i):
        """What probe i reads from the state."""
        if not schedule.one_token:
            return where(item.has_state, load(lane.reads.at[:, i], vector))
        found = load(lane.reads.at[i], vector)
        if lane.fold_reads is not None:
            folded = load(lane.fold_reads.at[i], vector)
            found = jnp.where(jnp.broadcast_to(item.folds, found.shape), folded, found)
        return where(item.has_state, found)

    since_state = [sum_path(total, of_head, paths) for total, of_head in zip(totals, gates, strict=True)]
    decays = [lane.by_row([factor(since[t]) for since in since_state]) for t in range(time)]
    recalls, outs = added[:time], added[time:]
    for t, to in enumerate(append):
        beta, stored = lane.by_row([of_head[t] for of_head in betas]), values[t]
        if call.delta:
            recalled = recalls[t] + decays[t] * read(t)
            stored = beta * (stored.astype(jnp.float32) - recalled)
        stored = stored.astype(call.entry)
        update = stored.astype(jnp.float32)
        if schedule.planes == 2:  # A later launch will read the update as two halves; here it must be the same number.
            update = join(cut(round_now(update, vector, lane.interpret)))
        if not call.delta:
            update = beta * update
        for i in range(t, time):
            column = schedule.entry_columns + t
            if i > t and call.delta:
                recalls[i] = on_path(paths, i, t, recalls[i] + weight(lane, i, column) * update, recalls[i])
            outs[i] = on_path(paths, i, t, outs[i] + weight(lane, time + i, column) * update, outs[i])
        result = outs[t] + decays[t] * read(time + t)
        place = lane.place(item.head)
        result = where(t < item.length, result).astype(call.out)
        lane.store_values(result, out.at[(item.row, t, *place)], item.head)

        @pl.when(to >= 0)
        def _(to=to, stored=stored, place=place):
            lane.store_values(stored, lane.arrays.updates.at[(to, *place)], item.head)
