import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.train import demo
from jaxbuf.train.schedule import Phase, Rate, StepPace

CONFIG = Config(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    layer_types=("linear_attention",),  # the MTP layer is a softmax layer
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
    eos_token_ids=(0,),
).model()
RECIPE = demo.Recipe(
    phases=(Phase(0.5, 16, 4), Phase(1.0, 16, 4)), rate=Rate(1e-2, warmup=0.1), block=2, evaluate_every=0.5
)


def text():
    """A period of 12 tokens, which a model learns in a few steps."""
    return np.tile(np.random.default_rng(3).integers(1, 48, 12), 40)


def leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
@pytest.mark.foreign
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    held_out = {"heldout": text()[:34].reshape(2, 17)}
    whole, curve = None, []
    start = demo.init_state(CONFIG, RECIPE)
    for state, position, metrics in demo.run(start, text(), RECIPE, StepPace(12), held_out=held_out):
        curve.append(metrics)
        if position.progress == 0.5 or position.steps == 8:
            demo.save_checkpoint(tmp_path, state, position, [metrics])
    whole = leaves(state)
    assert position.steps == 12 and position.rows == [24, 24]
    assert all(np.isfinite(leaf).all() for leaf in whole)

    restored = demo.restore_checkpoint(tmp_path, demo.init_state(CONFIG, RECIPE))
    assert restored is not None
    start, position, saved = restored
    assert position.steps == 8 and saved[0]["next_token_loss"] == curve[3]["next_token_loss"]
    again = []
    for state, _, metrics in demo.run(start, text(), RECIPE, StepPace(12), position=position, held_out=held_out):
        again.append(metrics)
        last = state
    chex.assert_trees_all_equal(leaves(last), whole)
    assert again == curve[4:]

    losses = [metrics["next_token_loss"] for metrics in curve]
    assert losses[0] > 3.5 and losses[-1] < losses[0] - 0.3
    assert ["heldout_loss" in metrics for metrics in curve] == [False, False, True, False, False, True]
    assert demo.restore_checkpoint(tmp_path / "nothing", state) is None


@pytest.mark.foreign
def test_weight_decay_and_clipping_touch_what_they_should():
    recipe = dataclasses.replace(RECIPE, weight_decay=0.5)
    state = demo.init_state(CONFIG, RECIPE)  # of the compiled recipe; moments are the same in any
    values = demo.parameters(state.model)
    zero = {name: jnp.zeros_like(value) for name, value in values.items()}
    updates, _ = jax.jit(demo.optimiser(recipe).update)(zero, state.moments, values)
    for name, value in values.items():
        matrix = value.ndim == 2 and "conv1d" not in name
        assert demo.decays(name, value) == matrix
        np.testing.assert_allclose(updates[name], 0.5 * value if matrix else 0.0 * value)
    assert not any(demo.decays(name, v) for name, v in values.items() if "norm" in name or "A_log" in name)


def test_every_epoch_reads_the_whole_ring_once():
    batches = demo.Batches(105, 10, seed=5)
    epochs = [batches.starts(10 * i, 10) for i in range(3)]
    for starts in epochs:
        covered = (starts[:, None] + np.arange(10)) % 105
        assert len(np.unique(covered)) == 100
    assert not np.array_equal(np.sort(epochs[0]), np.sort(epochs[1]))
    again = demo.Batches(105, 10, seed=5)
    np.testing.assert_array_equal(again.starts(17, 6), np.concatenate(epochs)[17:23])
    with pytest.raises(ValueError, match="the text has 9 tokens, a sequence needs 10"):
        demo.Batches(9, 10, seed=0)


def test_sequences_run_over_the_end_of_the_ring():
    tokens = np.arange(20) + 1
    stream = demo.ring(tokens, (Phase(1.0, 4, 1),))
    rows = demo.cut(stream, jnp.asarray([0, 18], jnp.int32), 4)
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, [[1, 2, 3, 4], [19, 20, 1, 2]])


def test_the_embedded_model_fits_its_budget():
    model = jax.eval_shape(lambda: demo.decoder.Decoder(demo.demo_config(), rngs=demo.nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert count == 7_883_056
    assert demo.demo_config().max_length >= 8192
