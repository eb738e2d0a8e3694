"""Configuration, forward, loss and cache of the model itself; that the numbers are right is test_parity's."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jaxbuf.attention.rotary import Rotary
from jaxbuf.models import decoder, mtp
from jaxbuf.models.config import ATTENTION, RECURRENCE
from jaxbuf.models.families import config_from_dict, config_json
from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.models.layers import cast, named_parameters, replace_parameters
from jaxbuf.models.loading.checkpoint import save
from jaxbuf.train import losses
from tests.tiny import abstract, changed, random_model

LINEAR, FULL = "linear_attention", "full_attention"
CONFIG = Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    layer_types=(LINEAR, FULL),
    mtp_num_hidden_layers=1,
    initializer_range=0.3,
    # A head's output is tiny where a query happens to be across all keys: at 1e-6 its rounding error would be amplified
    # a thousand times, which exceeds any tolerance for a few random models.
    rms_norm_eps=1e-2,
).model()
ROWS, TIME, PENDING = 4, 100, 5


@jax.jit
def run_forward(model, tokens, lengths):
    return decoder.forward(model, tokens, lengths=lengths)


ALL_SLOTS, NO_KEEP = np.arange(1, ROWS + 1, dtype=np.int32), np.zeros(ROWS, np.int32)
WHOLE = np.full(ROWS, TIME, np.int32)


@jax.jit
def run_prefill(model, cache, tokens, lengths, slots, keep):
    return decoder.prefill(model, cache, tokens, lengths=lengths, slots=slots, keep=keep)


@jax.jit
def run_extend(model, cache, tokens, lengths, slots, accepted):
    hidden, cache = decoder.extend(model, cache, tokens, lengths=lengths, slots=slots)
    return hidden, decoder.commit(cache, accepted, slots=slots)


# Unoptimised: the largest program here, and only its numbers matter.
run_loss = jax.jit(
    jax.value_and_grad(partial(losses.language_model_loss, mtp_weight=0.3), has_aux=True),
    compiler_options={"xla_backend_optimization_level": 0},
)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture
def tokens(rng):
    return rng.integers(0, CONFIG.vocab_size, (ROWS, TIME), dtype=np.int32)


@pytest.fixture
def hidden(model, tokens):
    return np.asarray(run_forward(model, tokens, WHOLE))


def test_model_is_a_tree_of_named_parameters(model):
    names = named_parameters(model)
    assert len(names) == len(jax.tree.leaves(model)) == 1 + 14 + 11 + 1 + 1 + 15
    assert {"layers.0.mixers.0.A_log", "layers.1.mixers.0.q_norm", "mtp.layers.0.mlp.up_proj", "lm_head"} <= set(names)
    for param in names.values():
        assert len(param.axes) == param[...].ndim
    doubled = replace_parameters(model, [2.0 * leaf for leaf in jax.tree.leaves(model)])
    np.testing.assert_array_equal(doubled.norm[...], 2.0 * model.norm[...])
    assert jax.tree.structure(doubled) == jax.tree.structure(model)


def test_a_new_model_starts_where_training_can():
    config = changed(CONFIG, layer_types=(LINEAR,), mtp_num_hidden_layers=0)
    seed = np.random.SeedSequence().generate_state(1)[0]
    layer = jax.jit(lambda key: decoder.Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(seed)).layers[0]
    np.testing.assert_array_equal(layer.before_mixers[...], 0.0)  # scales of one: these are centred at zero
    np.testing.assert_array_equal(layer.mixers[0].norm[...], 1.0)
    assert 0.2 < np.std(layer.mlp.up_proj[...]) < 0.4  # initializer_range 0.3
    rate, step = np.exp(layer.mixers[0].A_log[...]), np.log1p(np.exp(layer.mixers[0].dt_bias[...]))
    assert (rate >= 0.999).all() and (rate <= 16.001).all()
    assert (step >= 0.999e-3).all() and (step <= 0.1001).all()


def test_gates_stay_float32(model):
    half = cast(model, jnp.bfloat16)
    dtypes = {name: param[...].dtype for name, param in named_parameters(half).items()}
    kept = {name for name, dtype in dtypes.items() if dtype == jnp.float32}
    assert kept == {"layers.0.mixers.0.A_log", "layers.0.mixers.0.dt_bias"}


def test_padding_changes_nothing_before_it(model, tokens, hidden):
    lengths = np.array([100, 1, 64, 65], np.int32)
    padded = np.where(np.arange(TIME)[None] < lengths[:, None], tokens, 0)
    out = np.asarray(run_forward(model, padded, lengths))
    assert np.isfinite(out).all()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], hidden[row, :length], atol=1e-5)


def test_no_token_sees_a_later_one(model, tokens, hidden):
    changed = tokens.copy()
    changed[:, 70] = (changed[:, 70] + 1) % CONFIG.vocab_size
    out = np.asarray(run_forward(model, changed, WHOLE))
    np.testing.assert_allclose(out[:, :70], hidden[:, :70], atol=1e-5)
    assert (np.abs(out[:, 70] - hidden[:, 70]).max(axis=-1) > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [False, True], ids=["", "poisoned"])
def test_cache_under_random_schedules(model, tokens, hidden, rng, poisoned):
    """Prefill and pending tokens, accepted in part, slots in any order: always the forward over what was committed."""
    cache = decoder.init_cache(CONFIG, slots=ROWS, capacity=TIME, limit=16, max_pending=PENDING)
    pages = jnp.asarray(rng.permutation(np.arange(1, cache.layers[1].keys.shape[0], dtype=np.int32)))
    shared = cache.shared[ATTENTION]
    shared = dataclasses.replace(shared, table=shared.table.at[1:].set(pages.reshape(ROWS, -1)))
    cache = dataclasses.replace(cache, shared=cache.shared | {ATTENTION: shared})
    if poisoned:  # whoever had the slots before
        cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, cache)
    slots = rng.permutation(np.arange(1, ROWS + 1)).astype(np.int32)
    position = rng.integers(1, 33, ROWS, dtype=np.int32)
    out, cache = run_prefill(model, cache, tokens[:, :32], position, slots, NO_KEEP)
    for row, length in enumerate(position):
        np.testing.assert_allclose(out[row, :length], hidden[row, :length], atol=2e-4)
    for _ in range(30):
        lengths = np.minimum(rng.integers(0, PENDING + 1, ROWS), TIME - position).astype(np.int32)
        accepted = rng.integers(0, lengths + 1).astype(np.int32)
        offsets = np.minimum(position[:, None] + np.arange(PENDING), TIME - 1)
        launch = np.take_along_axis(tokens, offsets, axis=1)
        launch[np.arange(PENDING)[None] >= lengths[:, None]] = 0
        out, cache = run_extend(model, cache, launch, lengths, slots, accepted)
        assert np.isfinite(out).all()
        for row in range(ROWS):
            real = slice(position[row], position[row] + lengths[row])
            np.testing.assert_allclose(out[row, : lengths[row]], hidden[row, real], atol=2e-4)
        position += accepted
        np.testing.assert_array_equal(cache.sequences.committed[slots], position)


def test_prompts_in_pieces_and_kept_entries(model, tokens, hidden):
    cache = decoder.init_cache(CONFIG, slots=ROWS, capacity=TIME, limit=16, max_pending=PENDING)
    first = np.array([32, 7, 0, 20], np.int32)
    _, cache = run_prefill(model, cache, tokens[:, :32], first, ALL_SLOTS, NO_KEEP)
    offsets = first[:, None] + np.arange(32)
    piece = np.take_along_axis(tokens, offsets, axis=1)
    keep = np.array([0, 3, 16, 8], np.int32)
    out, cache = run_prefill(model, cache, piece, np.full(ROWS, 32, np.int32), ALL_SLOTS, keep)
    np.testing.assert_array_equal(cache.shared[RECURRENCE].cursor.length[1:], keep)
    np.testing.assert_allclose(out, np.take_along_axis(hidden, offsets[..., None], axis=1), atol=2e-4)
    read = np.take_along_axis(tokens, (first + 32)[:, None] + np.arange(PENDING), axis=1)
    full = np.full(ROWS, PENDING, np.int32)
    out, _ = run_extend(model, cache, read, full, ALL_SLOTS, full)
    expected = np.take_along_axis(hidden, ((first + 32)[:, None] + np.arange(PENDING))[..., None], axis=1)
    np.testing.assert_allclose(out, expected, atol=2e-4)


def test_null_rows_disturb_nobody(model, tokens, hidden):
    cache = decoder.init_cache(CONFIG, slots=ROWS, capacity=TIME, limit=16, max_pending=PENDING)
    slots = np.array([2, 0, 4, 0], np.int32)
    lengths = np.full(ROWS, 32, np.int32)
    before = jax.tree.map(np.asarray, cache)
    out, cache = run_prefill(model, cache, tokens[:, :32], lengths, slots, NO_KEEP)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(np.asarray(out)[[0, 2]], hidden[[0, 2], :32], atol=2e-4)
    np.testing.assert_array_equal(cache.sequences.committed, [0, 0, 32, 0, 32])
    ring, pool = cache.layers[0].ring, cache.layers[0].pool
    for slot in (0, 1, 3):
        np.testing.assert_array_equal(ring[slot], before.layers[0].ring[slot])
        np.testing.assert_array_equal(pool.checkpoints[slot], before.layers[0].pool.checkpoints[slot])
    for slot in (1, 3):
        pages = before.shared[ATTENTION].table[slot]
        np.testing.assert_array_equal(cache.layers[1].keys[pages], before.layers[1].keys[pages])
    np.testing.assert_array_equal(cache.layers[1].keys[0], 0.0)


def test_what_a_cache_refuses(model, tokens):
    cache = decoder.init_cache(CONFIG, slots=ROWS, capacity=TIME, max_pending=PENDING)
    with pytest.raises(ValueError, match=r"tokens must have one row a slot \(4\), got shape \(3, 5\)"):
        decoder.extend(model, cache, tokens[:3, :PENDING])
    with pytest.raises(ValueError, match=r"max_pending \(5\)"):
        decoder.extend(model, cache, tokens[:, : PENDING + 1])


def cross_entropy(scores, targets, mask):
    scores = np.asarray(scores, np.float64)
    scores = scores - scores.max(axis=-1, keepdims=True)
    nats = np.log(np.exp(scores).sum(axis=-1)) - np.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return (nats * mask).sum() / mask.sum()


@pytest.mark.slow
def test_loss_counts_what_the_mask_says(model, tokens, hidden, rng):
    mask = rng.random(tokens.shape) < 0.7
    (loss, metrics), _ = run_loss(model, tokens, mask=mask)

    @jax.jit
    def run(model, hidden, tokens):
        further = mtp.mtp_forward(model, hidden[:, :-1], tokens[:, 1:])
        return decoder.logits(model, hidden), decoder.logits(model, further)

    scores, further = run(model, hidden, tokens)
    expected = cross_entropy(scores[:, :-1], tokens[:, 1:], mask[:, 1:])
    expected_mtp = cross_entropy(further[:, :-1], tokens[:, 2:], mask[:, 2:])
    np.testing.assert_allclose(metrics["next_token_loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["mtp_loss"], expected_mtp, rtol=1e-4)
    np.testing.assert_allclose(loss, expected + 0.3 * expected_mtp, rtol=1e-4)
    assert float(metrics["tokens"]) == mask[:, 1:].sum()
    is_target = np.arange(CONFIG.vocab_size) == tokens[:, 1:, None]
    lead = [np.where(these, scores[:, :-1], -np.inf).max(axis=-1)[mask[:, 1:]] for these in (is_target, ~is_target)]
    # A target that is as good as another token up to the difference of two programs may count or not.
    fewest, most = ((lead[0] - lead[1] > near).mean() for near in (1e-4, -1e-4))
    assert (1 - 1e-5) * fewest <= metrics["next_token_accuracy"] <= (1 + 1e-5) * most


def test_every_parameter_has_a_finite_gradient_that_points_downhill(model, tokens):
    mask = np.ones(tokens.shape, bool)
    (loss, _), gradient = run_loss(model, tokens, mask=mask)
    for name, leaf in named_parameters(gradient).items():
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 0, name
    step = 1e-3 / np.sqrt(sum(np.square(leaf).sum() for leaf in map(np.asarray, jax.tree.leaves(gradient))))
    moved = jax.tree.map(lambda p, g: jnp.asarray(np.asarray(p) - np.float32(step) * np.asarray(g)), model, gradient)
    (lower, _), _ = run_loss(moved, tokens, mask=mask)
    assert lower < loss


def test_a_model_without_mtp_has_neither_its_loss_nor_its_forward(tokens):
    plain = abstract(changed(CONFIG, mtp_num_hidden_layers=0))
    _, metrics = jax.eval_shape(losses.language_model_loss, plain, tokens)
    assert set(metrics) == {"next_token_loss", "next_token_accuracy", "tokens"}
    with pytest.raises(ValueError, match="no MTP layer"):
        mtp.mtp_forward(plain, jnp.zeros((ROWS, TIME, CONFIG.hidden_size)), tokens)


def test_configuration_survives_its_file():
    assert config_from_dict(config_json(CONFIG)) == CONFIG
    several = changed(CONFIG, eos_token_ids=(3, 4), rope_theta=5e5, partial_rotary_factor=0.5)
    assert config_from_dict(config_json(several)) == several


def test_layers_from_an_interval():
    data = config_json(CONFIG) | {"num_hidden_layers": 5, "full_attention_interval": 2}
    del data["layer_types"]
    assert config_from_dict(data).source.layer_types == (LINEAR, FULL, LINEAR, FULL, LINEAR)
    del data["full_attention_interval"]
    assert config_from_dict(data).source.layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)


def test_rotary_settings_at_the_top_level():
    data = config_json(CONFIG) | {"rope_theta": 123.0, "partial_rotary_factor": 0.5, "rope_parameters": None}
    config = config_from_dict(data)
    source = config.source
    assert (source.rope_theta, source.partial_rotary_factor, source.rotary_dim) == (123.0, 0.5, 8)
    assert config.layers[1].mixers[0].rotary == Rotary(8, 123.0)


def test_vision_language_configuration_nests_the_text_model():
    text = config_json(CONFIG) | {"tie_word_embeddings": False, "eos_token_id": 7}
    config = config_from_dict({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True})
    assert config.tied, "the root's flag counts"
    assert config.eos_token_ids == (7,)
    assert changed(config, tie_word_embeddings=False, eos_token_ids=()) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type must be one of \('.*'llama', .* \(jaxbuf serves .* dense text models of the .*\), got 'gpt2'",
        ),
        ({"model_type": "qwen3_5"}, "lacks text_config"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
        ({"num_hidden_layers": 3}, "layer_types has 2 entries, num_hidden_layers is 3"),
        ({"layer_types": ["mamba", FULL]}, "layer_types must be a non-empty list out of"),
        (
            {"linear_num_value_heads": 5},
            r"linear_num_value_heads \(5\) must be a multiple of linear_num_key_heads \(2\)",
        ),
        ({"num_attention_heads": 3}, r"num_attention_heads \(3\) must be a multiple of num_key_value_heads \(2\)"),
        ({"head_dim": 20}, "even number of channels, got 5"),
        ({"vocab_size": 0}, r"vocab_size must be a whole number in \[1, 2147483647\], got 0"),
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers must be a whole number in \[0, 1\], got 2"),
    ],
)
def test_configurations_that_are_not_served(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(config_json(CONFIG) | changes)


def test_fields_that_are_missing_are_all_named():
    data = config_json(CONFIG)
    for name in ("hidden_size", "head_dim", "layer_types", "num_hidden_layers"):
        del data[name]
    with pytest.raises(ValueError, match="lacks hidden_size, head_dim, layer_types or num_hidden_layers"):
        config_from_dict(data)


SHARDED = """
import json, sys, warnings
warnings.simplefilter("error")
import jax, numpy as np
from jax.sharding import Mesh
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters
mesh = Mesh(np.array(jax.devices()), ("tensor",))
lm = load(sys.argv[1], mesh=mesh)
shard = {n: list(p[...].sharding.shard_shape(p[...].shape)) for n, p in named_parameters(lm.model).items()}
np.save(sys.argv[3], lm.logits(np.load(sys.argv[2])))
try:
    load(sys.argv[1], mesh=Mesh(np.array(jax.devices()), ("data",)))
except ValueError as e:
    wrong = str(e)
print(json.dumps({"shard": shard, "devices": jax.device_count(), "wrong": wrong}))
"""


def run_sharded(tmp_path, model, tokens, devices):
    save(model, CONFIG, tmp_path, dtype=jnp.float32)
    np.save(tmp_path / "tokens.npy", tokens)
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", SHARDED, *(str(tmp_path / file) for file in (".", "tokens.npy", "logits.npy"))]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300)
    if result.returncode:
        return result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_parameters_spread_over_a_mesh_give_the_same_logits(model, tokens, hidden, tmp_path):
    found = run_sharded(tmp_path, model, tokens, 2)
    assert isinstance(found, dict), found
    assert found["devices"] == 2
    assert found["shard"]["layers.0.mixers.0.in_proj_z"] == [6 * 24 // 2, 32]
    assert found["shard"]["layers.0.mixers.0.A_log"] == [3]
    assert found["shard"]["layers.1.mixers.0.o_proj"] == [32, 6 * 16 // 2]
    assert found["shard"]["layers.1.mlp.down_proj"] == [32, 24]
    assert found["shard"]["embed_tokens"] == [61, 32], "an odd vocabulary is replicated"
    assert found["shard"]["norm"] == [32]
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), decoder.logits(model, hidden), atol=1e-4)
    assert found["wrong"] == 'mesh must have an axis "tensor" or "expert", got (\'data\',)'


def test_value_heads_must_divide_over_the_mesh():
    mesh = AbstractMesh((4,), ("tensor",))
    with pytest.raises(
        ValueError, match=r'value heads of the linear layers \(6\) must be a multiple of the mesh axis "tensor" \(4\)'
    ):
        _ = dataclasses.replace(CONFIG, mesh=mesh).on_device
