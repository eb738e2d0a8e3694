"""A program of the TPU kernel of `extend`: what is copied and computed for a row, or for a block of its heads."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.pallas.extend.call import CHECKPOINT, FOLD_TO, HAS_CHECKPOINT, LENGTH, LIVE
from jaxbuf.pallas.extend.tpu_plan import LANES, Plan
from jaxbuf.pallas.extend.tpu_vectors import (
    aligned_rows,
    bfloat16_parts,
    column_of,
    dot_of_parts,
    exact_dot,
    later,
    load_rows,
    lying,
    match_all,
    rounded_to,
    store_rows,
    upright,
)

LARGEST = 127  # of int8, as in `jaxbuf.recurrence.state_format`


class Refs(NamedTuple):
    """What a program is given.

    Attributes:
      words: In scalar memory, row by row, what `Integers` says of it: fields, entries, append and paths.
      pool: The arrays of the pool, in HBM: "checkpoints", and flat "keys", "updates" and, of a decay a channel,
        "gates"; "low" and "low_scales" where checkpoints are split.
      inputs: Blocks of the row's new tokens: "q", "k", "v"; "new_beta"; of a decay a channel, "new_gates" as entries
        have them. Else "new_decay", and for live entries "ring_decay" and "ring_beta", f32 [1, places, heads], as far
        as entries have them.
      out: The outputs' block.
      written: The pool's arrays again, where they are written.
      scratch: What `Plan.arrays` and `Plan.scratch_names` say.
    """

    words: Any
    pool: dict
    inputs: dict
    out: Any
    written: dict
    scratch: dict


class Row:
    """A program.

    Attributes:
      plan, call, refs: What it was given.
      row, block: Of the launch, and of the row's heads.
      step: Which program of the launch it is.
      slot, entry_slot: Where its checkpoint and its entries lie; those of the next program lie in the other one.
      length, live: The row's new tokens, and its live entries.
      folds, works: Whether it folds, and whether it has new tokens.
      base: The place of its first new entry. New entries of a row that folds lie behind all places of the ring: the
        other blocks of heads still read the entries that it folds.
      first_head: Of the block.
    """

    def __init__(self, plan: Plan, refs: Refs):
        self.plan, self.call, self.refs = plan, plan.call, refs
        self.row, self.block = pl.program_id(0), pl.program_id(1)
        self.step = self.row * plan.blocks + self.block
        self.slot, self.entry_slot = lax.rem(self.step, 2), lax.rem(self.row, 2)
        self.length, self.live = self.field(LENGTH), self.field(LIVE)
        self.folds = self.field(FOLD_TO) >= 0
        self.works = self.length > 0
        self.base = jnp.where(self.folds, plan.places, self.live)
        self.first_head = self.block * plan.heads

    def word(self, array: str, i, row: Any = None):
        """Number i of a row, this one if none is named, in an array of `Integers`."""
        row = self.row if row is None else row
        return self.refs.words[row * self.plan.words + self.plan.word_places[array] + i]

    def field(self, column: int, row: Any = None):
        return self.word("fields", column, row)

    def run(self) -> None:
        plan = self.plan
        last = pl.num_programs(0) * plan.blocks - 1

        @pl.when(self.step > 0)
        def _():
            self.wait_writes(self.step - 1)

        # The next program's memory is on its way while this one computes; nobody has sent for that of the first.
        first = jnp.where(self.step == 0, 0, self.step + 1)
        end = jnp.minimum(self.step + 2, last + 1)
        lax.fori_loop(first, end, lambda step, _: self.copy_in(step, start=True), None)
        self.copy_in(self.step, start=False)

        @pl.when(self.works)
        def _():
            self.compute()

        @pl.when((self.block == plan.blocks - 1) & jnp.logical_not(self.works))
        def _():
            self.refs.out[...] = jnp.zeros(self.refs.out.shape, self.refs.out.dtype)

        @pl.when(self.step == last)
        def _():
            self.wait_writes(self.step)

    # Copies

    def copy_in(self, step, *, start: bool) -> None:
        """Starts the copies that program `step` needs, or waits for them."""
        plan, refs, s = self.plan, self.refs, self.refs.scratch
        row, block = lax.div(step, plan.blocks), lax.rem(step, plan.blocks)
        slot, entry_slot = lax.rem(step, 2), lax.rem(row, 2)
        heads = pl.ds(block * plan.heads, plan.heads)

        def copy(source, target, semaphore):
            found = pltpu.make_async_copy(source, target, semaphore)
            return found.start() if start else found.wait()

        @pl.when(self.field(HAS_CHECKPOINT, row) > 0)
        def _():
            state = self.field(CHECKPOINT, row)
            copy(refs.pool["checkpoints"].at[state, heads], s["state"].at[slot], s["read"].at[slot])
            if self.call.low is not None:

                @pl.when(self.field(FOLD_TO, row) >= 0)
                def _():
                    for name in plan.low_names:
                        copy(refs.pool[name].at[state, heads], s[name].at[slot], s["read"].at[slot])

        @pl.when(block == 0)
        def _():
            def entry(i, _):
                position = self.word("entries", i, row)
                for name in plan.entry_names:
                    copy(refs.pool[name].at[position], s[name].at[entry_slot, i], s["read"].at[2 + entry_slot])

            lax.fori_loop(0, self.field(LIVE, row), entry, None)

    def wait_writes(self, step) -> None:
        """Waits until what program `step` wrote has left VMEM, where others want to put theirs."""
        plan = self.plan
        row, block = lax.div(step, plan.blocks), lax.rem(step, plan.blocks)

        @pl.when((self.field(LENGTH, row) > 0) & (self.field(FOLD_TO, row) >= 0))
        def _():
            self.copy_state(step, start=False)

        @pl.when((self.field(LENGTH, row) > 0) & (block == plan.blocks - 1))
        def _():
            self.copy_entries(row, start=False)

    def copy_state(self, step, *, start: bool) -> None:
        plan, refs, s = self.plan, self.refs, self.refs.scratch
        row, block, slot = lax.div(step, plan.blocks), lax.rem(step, plan.blocks), lax.rem(step, 2)
        target = self.field(FOLD_TO, row)
        heads = pl.ds(block * plan.heads, plan.heads)
        for name in ("checkpoints", *plan.low_names):
            source = s["state" if name == "checkpoints" else name].at[slot]
            found = pltpu.make_async_copy(source, refs.written[name].at[target, heads], s["write"].at[0])
            found.start() if start else found.wait()

    def copy_entries(self, row, *, start: bool) -> None:
        refs, s = self.refs, self.refs.scratch

        def entry(t, _):
            position = self.word("append", t, row)

            @pl.when(position >= 0)
            def _():
                for name in self.plan.entry_names:
                    found = pltpu.make_async_copy(
                        s[f"new_{name}"].at[t], refs.written[name].at[position], s["write"].at[1]
                    )
                    found.start() if start else found.wait()

        lax.fori_loop(0, self.field(LENGTH, row), entry, None)

    # Computation

    def compute(self) -> None:
        plan = self.plan

        @pl.when(self.block == 0)
        def _():
            self.prepare()

        @pl.when(self.folds)
        def _():
            self.fold()
            self.copy_state(self.step, start=True)

        has_state = (self.field(HAS_CHECKPOINT) > 0) | self.folds
        if self.call.decay == "channel":

            @pl.when(has_state)
            def _():
                lax.fori_loop(0, self.length, lambda t, _: self.sum_channels(t, weights=False), None)

        @pl.when(has_state)
        def _():
            self.each_head(self.multiply_state)

        @pl.when(jnp.logical_not(has_state))
        def _():
            products = self.refs.scratch["products"]
            products[...] = jnp.zeros(products.shape, jnp.float32)

        lax.fori_loop(0, self.length, lambda t, _: self.token(t), None)

        @pl.when(self.block == plan.blocks - 1)
        def _():
            self.finish()

    def prepare(self) -> None:
        """The row's live entries and new tokens as float32 numbers, a row of `plan.*_rows` for each head and place."""
        plan, call, refs, s = self.plan, self.call, self.refs, self.refs.scratch
        heads, key_heads = plan.all_heads, plan.all_key_heads

        def put(name, place, x, rows):
            store_rows(s[f"all_{name}"], place * rows, x.astype(jnp.float32))

        def entry(i, _):
            for name in plan.entry_names:
                put(name, i, s[name][self.entry_slot, i], key_heads if name == "keys" else heads)

        lax.fori_loop(0, self.live, entry, None)
        s["out"][...] = jnp.zeros(s["out"].shape, jnp.float32)
        if "table" in s:
            for name in plan.table_names:
                s[f"all_{name}"][: plan.ring_rows, :] = refs.inputs[f"ring_{name}"][0]

        def token(t, _):
            k = refs.inputs["k"][0, t]
            s["new_keys"][t] = k.astype(call.entry)
            put("keys", self.base + t, k, key_heads)
            store_rows(s["all_q"], t * key_heads, refs.inputs["q"][0, t].astype(jnp.float32))
            s["all_v"][t] = refs.inputs["v"][0, t].astype(jnp.float32)
            if "gates" in plan.entry_names:
                gates = refs.inputs["new_gates"][0, t]
                s["new_gates"][t] = gates
                put("gates", self.base + t, gates, heads)
            for name in plan.table_names:
                s[f"all_{name}"][pl.ds(self.base + t, 1), :] = refs.inputs[f"new_{name}"][0, pl.ds(t, 1), :]

        lax.fori_loop(0, call.time, token, None)

    def on_path(self, t, first, count: int):
        """bool [count, 1]: which of the places from `first` on are those of token t's path, its own included."""
        place = first + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
        node = place - self.base
        bit = lax.shift_right_logical(jnp.full_like(node, self.word("paths", t)), jnp.clip(node, 0, 31)) & 1
        of_launch = (node >= 0) & (node < self.call.time) & (bit > 0)
        return of_launch | ((place < self.live) & jnp.logical_not(self.folds))

    def sum_decays(self, on):
        """From each place on: the sum of its and later decays, f32 [all places, heads], where `on`; and the weights."""
        plan, s = self.plan, self.refs.scratch
        if self.call.decay == "head":
            total = jnp.where(on, s["all_decay"][...], 0.0)
            step = 1
            while step < plan.all_places:
                total = total + later(total, step)
                step *= 2
            weights = jnp.where(on, jnp.exp(later(total, 1)), 0.0)
            since = jnp.exp(total[:1])
        else:
            weights = jnp.where(on, jnp.ones((plan.all_places, self.call.heads), jnp.float32), 0.0)
            since = jnp.ones((1, self.call.heads), jnp.float32)
        if not self.call.delta:
            weights = weights * jnp.where(on, s["all_beta"][...], 0.0)
        return since, weights

    def sum_channels(self, t, *, weights: bool) -> None:
        """From the newest entry to the oldest: each one's weight if `weights`, else what is left of the checkpoint."""
        call, plan, s = self.call, self.plan, self.refs.scratch
        heads, path = plan.all_heads, self.word("paths", t)

        def add(place, total):
            if weights:
                store_rows(s["table"], place * heads, jnp.exp(total))
            return total + load_rows(s["all_gates"], place * heads, heads, call.key_dim)

        def token(i, total):
            node = t - i
            on = lax.shift_right_logical(path, node) & 1
            return lax.cond(on > 0, lambda x: add(self.base + node, x), lambda x: x, total)

        total = lax.fori_loop(0, t + 1, token, jnp.zeros((heads, call.key_dim), jnp.float32))
        count = jnp.where(self.folds, 0, self.live)
        total = lax.fori_loop(0, count, lambda i, x: add(self.live - 1 - i, x), total)
        if not weights:
            store_rows(s["since"], t * heads, jnp.exp(total))

    def rows_of(self, name: str, first, head, count: int):
        """Of `count` places from `first` on: the numbers of one head, [count, width]."""
        plan, call = self.plan, self.call
        stride = plan.all_key_heads if name in ("keys", "q") else plan.all_heads
        width = call.value_dim if name == "updates" else call.key_dim
        ref = self.refs.scratch[name if name in ("table", "since") else f"all_{name}"]
        return load_rows(ref, first * stride + head, count, width, stride)

    def betas_of(self, first, head, count: int):
        """The write strengths of entries of a decay a channel, [count, 1]: they lie behind their decays."""
        stride, (slab, lane) = self.plan.all_heads, divmod(self.call.key_dim, LANES)
        rows = pl.ds(first * stride + head, count, stride=stride)
        return self.refs.scratch["all_gates"].at[slab][rows, :][:, lane : lane + 1]

    def each_head(self, of_heads) -> None:
        """Calls `of_heads` with the numbers in the block of some heads that are computed together, for all heads."""
        together = self.plan.together
        count = self.plan.heads // together
        lax.fori_loop(0, count, lambda i, _: of_heads([i * together + j for j in range(together)]), None)

    def multiply_state(self, local) -> None:
        """The products of the heads' states with all new keys and queries."""
        call, plan, s = self.call, self.plan, self.refs.scratch
        heads, time = [self.first_head + i for i in local], call.time
        shared = 1 if call.decay == "channel" else min(call.heads_per_key, len(heads))
        for n, head in enumerate(heads[::shared]):
            key_head = lax.div(head, call.heads_per_key)
            probes = [self.rows_of("keys", self.base, key_head, time), self.rows_of("q", 0, key_head, time)]
            if call.decay == "channel":
                since = self.rows_of("since", 0, head, time)
                probes = [since * x for x in probes]
            for place, x in enumerate(probes):
                s["probes"][n, place * time : (place + 1) * time, :] = x
        # All loads come before all stores, or the compiler could not compute the heads side by side.
        stacked = [jnp.concatenate(bfloat16_parts(s["probes"][n], 3), axis=0) for n in range(len(heads[::shared]))]
        found = []
        for n, i in enumerate(local):
            state = s["state"][self.slot, i].astype(jnp.float32)
            # The smallest products are added first.
            parts = reversed(bfloat16_parts(state, 3 if call.state == jnp.float32 else 1))
            products = functools.reduce(jnp.add, [dot_of_parts(stacked[n // shared], part) for part in parts])
            found.append(sum(products[n * plan.probes : (n + 1) * plan.probes] for n in reversed(range(3))))
        for i, products in zip(local, found, strict=True):
            s["products"][i] = products

    def token(self, t) -> None:
        """Output and update of a new token, of all heads of the block."""
        call, plan, s = self.call, self.plan, self.refs.scratch
        chunk, channel = plan.chunk, call.decay == "channel"
        since = None
        if channel:
            self.sum_channels(t, weights=True)
        else:
            since, weights = self.sum_decays(self.on_path(t, 0, plan.all_places))
            s["table"][...] = weights
        first = jnp.where(self.folds, plan.places // chunk, 0)
        end = lax.div(self.base + t, chunk) + 1
        new_beta = self.refs.inputs["new_beta"][0, pl.ds(t, 1), :] if "new_beta" in self.refs.inputs else None

        def of_heads(local):
            heads = [self.first_head + i for i in local]
            # Heads that are computed together and read the same key head come one after another.
            shared = min(call.heads_per_key, len(heads))
            key_heads = [lax.div(head, call.heads_per_key) for head in heads[::shared]]
            probes = [
                (self.rows_of("keys", self.base + t, key_head, 1), self.rows_of("q", t, key_head, 1))
                for key_head in key_heads
            ]

            def add(c, sums):
                start = c * chunk
                place = start + lax.broadcasted_iota(jnp.int32, (chunk, 1), 0)
                before = self.on_path(t, start, chunk) & (place < self.base + t)
                keys = [self.rows_of("keys", start, key_head, chunk) for key_head in key_heads]
                if not channel:
                    table = s["table"][aligned_rows(start, chunk), :]
                    plain = [match_all(x, of_key) for x, of_key in zip(keys, probes, strict=True)]
                found = []
                for i, head in enumerate(heads):
                    if channel:
                        decayed = keys[i // shared] * self.rows_of("table", start, head, chunk)
                        matches = match_all(decayed, probes[i // shared])
                        weight = None if call.delta else self.betas_of(start, head, chunk)
                    else:
                        matches, weight = plain[i // shared], column_of(table, head)
                    updates = self.rows_of("updates", start, head, chunk)
                    for n, match in enumerate(matches):
                        match = match if weight is None else match * weight
                        live = jnp.where(before, match * updates, 0.0)
                        found.append(sums[2 * i + n] + jnp.sum(live, axis=0, keepdims=True))
                return tuple(found)

            zero = jnp.zeros((1, call.value_dim), jnp.float32)
            sums = lax.fori_loop(first, end, add, (zero,) * (2 * len(heads)))
            found = []
            for i, head in enumerate(heads):
                recalled, out = sums[2 * i : 2 * i + 2]
                from_state = [s["products"][local[i], pl.ds(n * call.time + t, 1), :] for n in range(2)]
                if call.decay == "head":
                    factor = column_of(since, head)
                    from_state = [factor * x for x in from_state]
                value = s["all_v"][t, pl.ds(head, 1), :]
                beta = self.betas_of(self.base + t, head, 1) if new_beta is None else column_of(new_beta, head)
                entry = beta * (value - (from_state[0] + recalled)) if call.delta else value
                entry = rounded_to(entry, call.entry)
                key, query = probes[i // shared]
                own = jnp.sum(key * query, axis=1, keepdims=True)
                own = own if call.delta else own * beta
                found.append((entry, from_state[1] + out + own * entry))
            for head, (entry, out) in zip(heads, found, strict=True):
                store_rows(s["all_updates"], (self.base + t) * plan.all_heads + head, entry)
                s["out"][t, pl.ds(head, 1), :] = out

        self.each_head(of_heads)

    def fold(self) -> None:
        """The state after all live entries, in place of the checkpoint."""
        call, plan, s = self.call, self.plan, self.refs.scratch
        place = lax.broadcasted_iota(jnp.int32, (plan.all_places, 1), 0)
        has = self.field(HAS_CHECKPOINT) > 0
        since = None
        if call.decay == "channel":
            heads = plan.all_heads

            def back(i, total):
                first = (self.live - 1 - i) * heads
                store_rows(s["table"], first, jnp.exp(total))
                return total + load_rows(s["all_gates"], first, heads, call.key_dim)

            total = lax.fori_loop(0, self.live, back, jnp.zeros((heads, call.key_dim), jnp.float32))
            store_rows(s["since"], 0, jnp.exp(total))
        else:
            since, weights = self.sum_decays(place < self.live)
            s["table"][...] = weights
        chunk = plan.chunk
        end = lax.div(self.live + chunk - 1, chunk)

        def of_head(i, _):
            head = self.first_head + i
            key_head = lax.div(head, call.heads_per_key)
            factor = self.rows_of("since", 0, head, 1) if since is None else column_of(since, head)

            def kept():
                state = s["state"][self.slot, i].astype(jnp.float32)
                if call.low is not None:
                    rest = s["low"][self.slot, i].astype(jnp.float32)
                    if call.low == jnp.int8:
                        rest = rest * upright(s["low_scales"][self.slot, pl.ds(i, 1), :])
                    state = state + rest
                return state * factor

            shape = call.value_dim, call.key_dim
            state = lax.cond(has, kept, lambda: jnp.zeros(shape, jnp.float32))

            def add(c, state):
                start = c * chunk
                alive = start + lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < self.live
                keys = self.rows_of("keys", start, key_head, chunk)
                if call.decay == "channel":
                    keys = keys * self.rows_of("table", start, head, chunk)
                    if not call.delta:
                        keys = keys * self.betas_of(start, head, chunk)
                else:
                    keys = keys * column_of(s["table"][pl.ds(pl.multiple_of(start, 8), chunk), :], head)
                updates = jnp.where(alive, self.rows_of("updates", start, head, chunk), 0.0)
                return state + exact_dot(updates, jnp.where(alive, keys, 0.0), 0, 0)

            self.store_state(i, lax.fori_loop(0, end, add, state))

        lax.fori_loop(0, plan.heads, of_head, None)

    def store_state(self, i, state) -> None:
        call, s = self.call, self.refs.scratch
        s["state"][self.slot, i] = state.astype(call.state)
        if call.low is None:
            return
        rest = state - rounded_to(state, call.state)
        if call.low == jnp.int8:
            scale = jnp.max(jnp.abs(rest), axis=1, keepdims=True) * np.float32(1 / LARGEST)
            steps = jnp.round(rest / jnp.where(scale > 0, scale, np.float32(1)))
            rest = jnp.clip(steps, -LARGEST, LARGEST).astype(jnp.int32)
            s["low_scales"][self.slot, pl.ds(i, 1), :] = lying(scale)
        s["low"][self.slot, i] = rest.astype(call.low)

    def finish(self) -> None:
        """The outputs as they are returned, and the entries on their way into the pool."""
        call, plan, refs, s = self.call, self.plan, self.refs, self.refs.scratch

        def token(t, _):
            refs.out[0, t] = s["out"][t].astype(call.out)
            updates = load_rows(s["all_updates"], (self.base + t) * plan.all_heads, call.heads, call.value_dim)
            s["new_updates"][t] = updates.astype(call.entry)

        lax.fori_loop(0, call.time, token, None)
        self.copy_entries(self.row, start=True)
