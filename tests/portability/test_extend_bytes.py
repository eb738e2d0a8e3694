"""The bytes that the TPU kernel of `extend` moves, counted in the interpreter, against its floor."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxbuf.pallas.extend import tpu, tpu_row
from jaxbuf.pallas.extend.call import CHECKPOINT
from jaxbuf.recurrence import RecurrenceSpec, buffered
from jaxbuf.recurrence.traffic import state_traffic, token_bytes
from tests.gpu.checks import new_inputs
from tests.portability.dma import count_dma_bytes

# A few heads of each, for what is counted is a multiple of them; all else is as the models have it.
GDN = RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=128)
MAMBA = RecurrenceSpec(heads=4, key_heads=1, key_dim=128, value_dim=64, delta=False)
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=128, decay="channel")
LIMIT = 16


def decode(spec, rows, *, kv_only=0, **settings):
    """One step of `rows` requests, each with another number of live entries, up to all that a ring holds before a
    fold; the first `kv_only` never folded. What was moved, and the floor."""
    rng = np.random.default_rng(0)
    state = settings.get("state_dtype", jnp.float32)
    cache = buffered.init(spec, slots=rows, limit=LIMIT, max_pending=8, **settings)
    slots = jnp.arange(1, rows + 1)
    prompt = new_inputs(rng, spec, rows, LIMIT, jnp.bfloat16)
    folded = jnp.where(jnp.arange(rows) < kv_only, 0, LIMIT)
    _, cache = buffered.prefill(spec, cache, *prompt, slots=slots, lengths=folded)
    live = 1 + jnp.arange(rows, dtype=jnp.int32) % LIMIT
    _, cache = buffered.prefill(spec, cache, *prompt, slots=slots, lengths=live, keep=live)
    np.testing.assert_array_equal(cache.cursor.length[1:], live)
    inputs = new_inputs(rng, spec, rows, 1, jnp.bfloat16)
    how = {"slots": slots, "implementation": "tpu", "interpret": True}
    moved, (_, after) = count_dma_bytes(lambda: buffered.extend(spec, cache, *inputs, **how))
    before = np.asarray(cache.cursor.folded[1:])
    work = {
        "checkpoint_reads": int((before > 0).sum()),
        "folds": int((np.asarray(after.cursor.folded[1:]) > before).sum()),
        "live_entries": int(live.sum()),
        "appended": rows,
    }
    assert work["folds"] > 0
    return moved, state_traffic(spec, **work, state_dtype=state) + rows * token_bytes(spec)


@pytest.mark.parametrize(
    "spec, most", [pytest.param(GDN, 1.05, id="GDN"), pytest.param(MAMBA, 1.08, id="Mamba-2"), (KDA, 1.08)]
)
def test_a_step_moves_what_it_must_and_little_more(spec, most):
    """Sixteen rows, of which one folds: as a batch of 64 at limit 16 has them."""
    moved, floor = decode(spec, LIMIT)
    assert 0.99 * floor < moved.bytes < most * floor, f"{moved}: {moved.bytes / floor:.4f} of the floor"


def test_rows_without_a_checkpoint_read_none_and_split_ones_half():
    moved, floor = decode(GDN, LIMIT, kv_only=4, state_dtype="split")
    assert 0.99 * floor < moved.bytes < 1.05 * floor, f"{moved}: {moved.bytes / floor:.4f} of the floor"


def test_a_kernel_that_reads_its_checkpoint_twice_moves_too_much(monkeypatch):
    class Twice(tpu_row.Row):
        def compute(self):
            source = self.refs.pool["checkpoints"].at[self.field(CHECKPOINT)]
            pltpu.sync_copy(source, self.refs.scratch["state"].at[self.slot])
            super().compute()

    monkeypatch.setattr(tpu, "Row", Twice)
    moved, floor = decode(GDN, LIMIT)
    assert moved.bytes > 1.5 * floor
