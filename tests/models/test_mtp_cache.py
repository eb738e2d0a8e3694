"""The MTP layer with a memory: always its plain forward over whole sequences, whatever was rejected before."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models import decoder, mtp
from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.models.mixers.latent_attention import LatentAttention
from jaxbuf.models.mtp import fork_mtp, init_mtp
from tests.tiny import SIZES, abstract, changed, random_model

CONFIG = Config(**SIZES, layer_types=("full_attention",), mtp_num_hidden_layers=1).model()
SLOTS, PENDING, DRAFTS, TIME = 4, 4, 3, 40  # PENDING = 1 + DRAFTS, and a null row beside the slots: a batch has 5
ROWS, TOLERANCE = SLOTS + 1, 2e-3
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def shifted_choice(scores, number, state):
    """The best token moved by the draft's number: tells which number each draft got, and what was read after it."""
    best, _, _ = mtp.most_probable(scores, number, state)
    return (best + number) % CONFIG.vocab_size, scores, state


@_jit
def run_whole(model, hidden, next_tokens, lengths):
    further = mtp.mtp_forward(model, hidden, next_tokens, lengths=lengths)
    return further, decoder.logits(model, further)


@_jit
def run_extend(model, memory, hidden, next_tokens, start, lengths, slots):
    return mtp.mtp_extend(model, memory, hidden, next_tokens, start=start, lengths=lengths, slots=slots)


@_jit
def run_draft(model, memory, hidden, next_tokens, start, lengths, slots, most=DRAFTS):
    settings = {"draft_tokens": DRAFTS, "most": most, "choose": shifted_choice}
    return mtp.draft_mtp(model, memory, hidden, next_tokens, start=start, lengths=lengths, slots=slots, **settings)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def with_latents():
    """The same model with latent attention in its MTP layer."""
    assert CONFIG.mtp is not None
    mixer = LatentAttention(4, 8, 4, 6, 10, Rotary(4, 1e4), latent_eps=1e-2)
    return dataclasses.replace(CONFIG, mtp=dataclasses.replace(CONFIG.mtp, mixers=(mixer,)))


def new_memory(config=CONFIG):
    return init_mtp(config, slots=SLOTS, capacity=TIME, max_pending=PENDING, page_size=4)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def used_memory(rng, config=CONFIG):
    """One with something at every place."""
    return jax.tree.map(lambda x: x if x.dtype == jnp.int32 else jnp.asarray(normal(rng, *x.shape)), new_memory(config))


@pytest.fixture
def sequences(rng):
    """Hidden states and next tokens of each slot; row 0 is the null slot's."""
    return normal(rng, ROWS, TIME, CONFIG.hidden_size), rng.integers(0, CONFIG.vocab_size, (ROWS, TIME), dtype=np.int32)


def gather(sequences, slots, start, lengths, rng):
    """What each row reads from `start` on: of its sequence the first `lengths`, then anything."""
    hidden = normal(rng, ROWS, PENDING, CONFIG.hidden_size)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, PENDING), dtype=np.int32)
    for row, slot in enumerate(slots):
        part = slice(start[row], start[row] + lengths[row])
        hidden[row, : lengths[row]], tokens[row, : lengths[row]] = sequences[0][slot, part], sequences[1][slot, part]
    return hidden, tokens


def pages_of(memory, slot):
    pages = np.asarray(memory.table)[slot]
    return [np.asarray(held)[pages] for held in jax.tree.leaves(memory.kv)]


def test_reading_with_rejections_equals_whole_sequences(model, sequences, rng):
    """Rows in any order, each with as many real positions as it likes; some are rejected, also far back, and the NaNs
    that a row left where all was rejected reach nobody."""
    whole, _ = run_whole(model, *sequences, np.full(ROWS, TIME, np.int32))
    memory, position, read = new_memory(), np.zeros(ROWS, np.int32), 0
    while read < 150:
        slots = rng.permutation(ROWS).astype(np.int32)
        start = position[slots]
        lengths = np.minimum(rng.integers(0, PENDING + 1, ROWS), TIME - start).astype(np.int32)
        right = rng.integers(0, lengths + 1).astype(np.int32)
        hidden, tokens = gather(sequences, slots, start, right, rng)
        hidden[right == 0] = np.nan
        further, memory = run_extend(model, memory, hidden, tokens, start, lengths, slots)
        for row, slot in enumerate(slots):
            if slot:
                expected = whole[slot, start[row] : start[row] + right[row]]
                np.testing.assert_allclose(further[row, : right[row]], expected, atol=TOLERANCE)
                read += right[row]
        position[slots] += right
        back = rng.random(ROWS) < 0.1  # a smaller start is all that a rollback is
        position[back] = rng.integers(0, position[back] + 1)
        position[position == TIME] = 0  # the slot's next owner


@pytest.mark.slow
def test_drafts_are_a_chain_over_what_was_committed(model, sequences, rng):
    """A generation by the docstring's scheme with random acceptance: each score equals that of the plain forward over
    the model's hidden states, then the layer's own."""
    memory, slots = new_memory(), np.arange(ROWS, dtype=np.int32)
    count = np.array([0, *rng.integers(2, PENDING + 2, SLOTS)], np.int32)  # committed; the null slot has nothing
    hidden, tokens = gather(sequences, slots, np.zeros(ROWS, np.int32), np.maximum(count - 1, 0), rng)
    _, memory = run_extend(model, memory, hidden, tokens, np.zeros(ROWS, np.int32), np.maximum(count - 1, 0), slots)
    pending = np.minimum(count, 1)
    for _ in range(6):
        hidden, tokens = gather(sequences, slots, count - pending, pending, rng)
        drafts, scores, memory = run_draft(model, memory, hidden, tokens, count - pending, pending, slots)
        most = rng.integers(1, DRAFTS + 1)  # fewer of them are the first of them
        few, some, _ = run_draft(model, memory, hidden, tokens, count - pending, pending, slots, most)
        real = np.arange(DRAFTS) < most
        np.testing.assert_array_equal(few, np.where(real, drafts, 0))
        np.testing.assert_array_equal(some, np.where(real[:, None], scores, 0))
        best = np.argmax(np.asarray(scores), axis=-1)
        np.testing.assert_array_equal(drafts, (best + np.arange(DRAFTS)) % CONFIG.vocab_size)
        states, following = (x.copy() for x in sequences)
        rows = np.arange(1, ROWS)
        for number in range(DRAFTS):
            further, expected = run_whole(model, states, following, np.maximum(count, 1) + number)
            last = count[1:] + number - 1
            np.testing.assert_allclose(scores[1:, number], np.asarray(expected)[rows, last], atol=TOLERANCE)
            states[rows, last + 1] = np.asarray(further)[rows, last]
            following[rows, last + 1] = drafts[1:, number]
        pending = np.array([0, *rng.integers(1, PENDING + 1, SLOTS)], np.int32)  # 1 + accepted drafts
        count += pending


def test_rows_that_read_nothing_change_nothing(model, rng):
    """The null slot, and rows of no length, whatever they bring and wherever they start."""
    memory = used_memory(rng)
    hidden = np.full((ROWS, PENDING, CONFIG.hidden_size), np.nan, np.float32)
    tokens, start = np.zeros((ROWS, PENDING), np.int32), np.array([0, -1, 7, TIME, 3], np.int32)
    nothing, whole, null = np.zeros(ROWS, np.int32), np.full(ROWS, PENDING, np.int32), np.zeros(ROWS, np.int32)
    for lengths, slots in ((nothing, np.arange(ROWS, dtype=np.int32)), (whole, null)):
        _, after = run_extend(model, memory, hidden, tokens, start, lengths, slots)
        chex.assert_trees_all_equal(after, memory)
        _, _, after = run_draft(model, memory, hidden, tokens, start, lengths, slots)
        chex.assert_trees_all_equal(after, memory)


def test_drafts_past_the_capacity_leave_other_slots_alone(model, rng):
    memory = used_memory(rng)
    end = memory.table.shape[1] * 4
    assert end >= TIME + DRAFTS
    inputs = normal(rng, ROWS, PENDING, CONFIG.hidden_size), np.zeros((ROWS, PENDING), np.int32)
    start, lengths = np.full(ROWS, end - 2, np.int32), np.array([0, 0, PENDING, 0, 0], np.int32)
    drafts, scores, after = run_draft(model, memory, *inputs, start, lengths, np.arange(ROWS, dtype=np.int32))
    assert np.all(np.isfinite(scores)) and np.all((drafts >= 0) & (drafts < CONFIG.vocab_size))
    for slot in range(ROWS):
        same = [np.array_equal(x, y) for x, y in zip(pages_of(memory, slot), pages_of(after, slot), strict=True)]
        assert same == [slot != 2] * 2


@pytest.mark.parametrize("config", [CONFIG, with_latents()], ids=["keys and values", "latents"])
def test_a_fork_holds_what_its_source_held(rng, config):
    memory = used_memory(rng, config)
    after = fork_mtp(memory, np.array([3, 1, 2], np.int32), np.array([1, 2, 0], np.int32))
    for slot, source in enumerate([0, 3, 1, 3, 4]):
        np.testing.assert_array_equal(pages_of(after, slot), pages_of(memory, source))


@pytest.mark.parametrize("config", [CONFIG, with_latents()], ids=["keys and values", "latents"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_call_changes_the_shape_of_a_memory(dtype, config):
    """Whatever comes out goes in again, without `slots` too: loops on the device carry it."""
    model = abstract(config, dtype)
    memory = jax.eval_shape(lambda: init_mtp(config, slots=SLOTS, capacity=TIME, dtype=dtype))
    hidden = jax.ShapeDtypeStruct((SLOTS, PENDING, CONFIG.hidden_size), dtype)
    tokens, start = jax.ShapeDtypeStruct((SLOTS, PENDING), jnp.int32), jax.ShapeDtypeStruct((SLOTS,), jnp.int32)

    def extend(model, memory, hidden, tokens, start):
        return mtp.mtp_extend(model, memory, hidden, tokens, start=start)

    def draft(model, memory, hidden, tokens, start, draft_tokens):
        return mtp.draft_mtp(model, memory, hidden, tokens, start=start, draft_tokens=draft_tokens)

    further, after = jax.eval_shape(extend, model, memory, hidden, tokens, start)
    assert (further, after) == (hidden, memory)
    for number in (1, 2, 5):
        drafts, scores, after = jax.eval_shape(
            partial(draft, draft_tokens=number), model, memory, hidden, tokens, start
        )
        assert drafts == jax.ShapeDtypeStruct((SLOTS, number), jnp.int32)
        assert scores == jax.ShapeDtypeStruct((SLOTS, number, CONFIG.vocab_size), jnp.float32)
        assert after == memory


def test_errors_say_what_is_wrong(model):
    memory, without = new_memory(), abstract(changed(CONFIG, mtp_num_hidden_layers=0))
    hidden, tokens = np.zeros((SLOTS, 2, CONFIG.hidden_size), np.float32), np.zeros((SLOTS, 2), np.int32)
    start = np.zeros(SLOTS, np.int32)
    with pytest.raises(ValueError, match="no MTP layer"):
        init_mtp(without.config, slots=SLOTS, capacity=TIME)
    with pytest.raises(ValueError, match="no MTP layer"):
        jax.eval_shape(lambda *x: mtp.mtp_extend(*x, start=start), without, memory, hidden, tokens)
    with pytest.raises(ValueError, match="draft_tokens must be at least 1, got 0"):
        mtp.draft_mtp(model, memory, hidden, tokens, start=start, draft_tokens=0)
    for few in ((hidden[:3], tokens[:3]), (hidden, tokens[:, :1])):
        with pytest.raises(ValueError, match=r"one row a slot \(4\) and as many positions, got shapes"):
            mtp.mtp_extend(model, memory, *few, start=start)
