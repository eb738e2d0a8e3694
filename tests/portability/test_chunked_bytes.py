"""The bytes that the TPU kernel of `chunked` moves, counted in the interpreter, against its floor."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.pallas.chunked import tpu, tpu_chunk, tpu_layout
from jaxbuf.recurrence import RecurrenceSpec, chunked
from jaxbuf.recurrence.chunked import kernel_call
from tests.portability.dma import count_dma_bytes
from tests.recurrence import definition

# A few heads of each, for what is counted is a multiple of them; all else is as the models have it.
GDN = RecurrenceSpec(heads=2, key_heads=1, key_dim=128, value_dim=128)
MAMBA = RecurrenceSpec(heads=4, key_heads=1, key_dim=128, value_dim=64, delta=False)
KDA = RecurrenceSpec(heads=2, key_heads=2, key_dim=128, value_dim=128, decay="channel")
CHUNK = 16
LENGTHS = np.array([0, 6, 2, 0, 5, 0], np.int32) * CHUNK  # rows without tokens, before all others, between and behind
TIME = 7 * CHUNK  # the last chunk is dead in all rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a few tokens are many chunks: what is moved of a token does not depend on their size."""
    monkeypatch.setattr(tpu_layout, "MOST_CHUNK", CHUNK)


@pytest.fixture
def without_computing(monkeypatch):
    """The pipeline alone moves blocks, whatever is computed with them, which would take a while to compile."""

    def leave(chunk, start, end):
        chunk.refs.out[...] = jnp.ones(chunk.refs.out.shape, chunk.refs.out.dtype)

    monkeypatch.setattr(tpu_chunk.Chunk, "solve", leave)


def read_prompts(spec):
    """What one call moved, and its floor: q, k, v and gates of real tokens, outputs of all, and states twice."""
    rng = np.random.default_rng(0)
    q, k, v, *gates = definition.inputs(rng, spec, len(LENGTHS), TIME)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    state = jnp.asarray(rng.standard_normal((len(LENGTHS), *spec.state_shape)), jnp.float32)
    how = {"lengths": LENGTHS, "implementation": "tpu", "interpret": True}
    moved, (out, _) = count_dma_bytes(lambda: chunked(spec, state, q, k, v, *gates, **how))
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 0)
    assert np.abs(np.asarray(out[1], np.float32)).max() > 0
    inputs = sum(x.nbytes for x in (q, k, v, *gates) if x is not None)
    floor = inputs * LENGTHS.sum() // (len(LENGTHS) * TIME) + out.nbytes + 2 * state.nbytes
    return moved, floor


@pytest.mark.parametrize(
    "spec", [pytest.param(GDN, id="GDN"), pytest.param(MAMBA, id="Mamba-2"), pytest.param(KDA, id="KDA")]
)
def test_a_prompt_is_read_once_and_its_dead_chunks_not_at_all(spec, without_computing):
    moved, floor = read_prompts(spec)
    print(f"{moved}: {moved.bytes / floor:.4f} of the floor")
    assert moved.bytes == floor


def test_what_a_kernel_computes_moves_nothing_more():
    moved, floor = read_prompts(GDN)
    assert moved.bytes == floor


def test_a_kernel_that_reads_dead_chunks_moves_too_much(monkeypatch, without_computing):
    """The control: blocks that follow the grid, whatever the rows' lengths."""
    plain = tpu._integers

    def all_chunks(layout, lengths, cut):
        fields = plain(layout, lengths, cut).reshape(-1, tpu_chunk.FIELDS)
        rows = jnp.arange(fields.shape[0], dtype=jnp.int32)
        fields = fields.at[:, tpu_chunk.ROW].set(rows).at[:, tpu_chunk.FIRST_CHUNK].set(0)
        return fields.at[:, tpu_chunk.LAST_CHUNK].set(layout.chunks - 1).reshape(-1)

    monkeypatch.setattr(tpu, "_integers", all_chunks)
    moved, floor = read_prompts(GDN)
    assert moved.bytes > 1.1 * floor, f"{moved}: {moved.bytes / floor:.4f} of the floor"


def test_a_group_of_heads_that_is_cut_reads_its_keys_once_for_each_part(monkeypatch, without_computing):
    whole, floor = read_prompts(GDN)
    monkeypatch.setattr(tpu_layout.Layout, "vmem", lambda layout: 0 if layout.heads == 1 else 2**40)
    moved, _ = read_prompts(GDN)
    tokens = int(LENGTHS.sum())
    keys_and_gates = tokens * (2 * GDN.key_dim * 2 + 2 * GDN.heads * 4)
    assert moved.bytes - whole.bytes == keys_and_gates, f"{moved.bytes} and {whole.bytes}, floor {floor}"


def test_updates_are_written_for_the_tokens_that_stay_entries_alone():
    """A chunk more than those tokens fill at most, of all the chunks of a row."""
    shapes = [jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 2048, 1, 128), (1, 2048, 1, 128), (1, 2048, 2, 128))]
    call = kernel_call(GDN, *shapes, None, cut=True, updates=20)
    layout = tpu_layout.make_layout(call, "v5e")
    assert isinstance(layout, tpu_layout.Layout) and layout.update_chunks == 3 and layout.chunks == 128
