"""Reading and writing checkpoints: what is read is what was written, and every way of not fitting is an error."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxbuf.models.checkpoint import CheckpointError, save
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.qwen3_5 import Config, Qwen3_5

CONFIG = Config(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=("linear_attention", "full_attention"),
    max_position_embeddings=128,
    mtp_num_hidden_layers=1,
    eos_token_ids=(2,),
)


@pytest.fixture(scope="module")
def model():
    return make(CONFIG)


def make(config):
    """A model with random numbers everywhere, drawn by numpy: nothing to compile."""
    rng = np.random.default_rng()
    abstract = jax.eval_shape(lambda: Qwen3_5(config, rngs=nnx.Rngs(0)))
    values = [0.3 * rng.standard_normal(leaf.shape) for leaf in jax.tree.leaves(abstract)]
    return replace_parameters(abstract, [jnp.asarray(value, jnp.float32) for value in values])


@pytest.fixture
def directory(model, tmp_path):
    save(model, CONFIG, tmp_path / "model")
    return tmp_path / "model"


def change_tensors(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same(found, expected, dtype):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    parameters = named_parameters(expected)
    for name, param in named_parameters(found).items():
        want = parameters[name][...].astype(jnp.float32 if param.keep_float32 else jnp.bfloat16)
        assert param[...].dtype == (jnp.float32 if param.keep_float32 else dtype), name
        np.testing.assert_array_equal(param[...], want.astype(param[...].dtype), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_what_is_read_is_what_was_saved(model, directory, dtype):
    lm = load(directory, dtype=dtype)
    assert lm.config == CONFIG
    assert lm.name == "model" and lm.vocab_size == 37 and lm.max_length == 128
    expected = jnp.dtype("float32" if dtype is None else dtype)  # on a CPU None computes in float32
    assert lm.dtype == expected
    if dtype != "float16":  # which cannot hold every bfloat16
        assert_same(lm.model, model, expected)


def test_saved_names_and_shapes_are_those_of_released_checkpoints(directory):
    tensors = load_file(directory / "model.safetensors")
    assert tensors["model.layers.0.linear_attn.conv1d.weight"].shape == (2 * 8 + 24, 1, 4)
    assert tensors["model.layers.0.linear_attn.A_log"].dtype == np.float32
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (2 * 2 * 16, 16)
    assert tensors["mtp.fc.weight"].shape == (16, 32)
    assert sum(name.startswith("mtp.") for name in tensors) == 15
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(tensors)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3_5_text"


def test_shards_with_an_index(model, tmp_path):
    save(model, CONFIG, tmp_path, shard_bytes=4000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert_same(load(tmp_path).model, model, jnp.float32)

    save(model, CONFIG, tmp_path)  # into the same directory: no shard and no index of before is left
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_same(load(tmp_path).model, model, jnp.float32)


def test_several_files_without_an_index(model, directory):
    tensors = load_file(directory / "model.safetensors")
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    save_file(tensors, directory / "model.safetensors")
    save_file(mtp, directory / "mtp.safetensors")
    assert_same(load(directory).model, model, jnp.float32)
    save_file(mtp | {"model.norm.weight": tensors["model.norm.weight"]}, directory / "mtp.safetensors")
    with pytest.raises(CheckpointError, match=r"repeats tensors of another file: model\.norm\.weight"):
        load(directory)


def test_vision_language_names(model, directory, caplog):
    def rename(tensors):
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros((4, 4), np.float32)
        tensors["model.visual.pos_embed.weight"] = np.zeros((4, 4), np.float32)

    change_tensors(directory, rename)
    text = json.loads((directory / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(nested))
    with caplog.at_level(logging.INFO, logger="jaxbuf"):
        lm = load(directory)
    assert_same(lm.model, model, jnp.float32)
    lines = [
        record.getMessage() for record in caplog.records if record.name == "jaxbuf" and "visual" in record.getMessage()
    ]
    assert len(lines) == 1 and "2 tensors" in lines[0]


def test_a_head_that_is_there_counts_whatever_the_flag_says(model, directory):
    change_config(directory, tie_word_embeddings=True)
    lm = load(directory)
    assert not lm.config.tie_word_embeddings
    np.testing.assert_array_equal(lm.model.lm_head[...], model.lm_head[...].astype(jnp.bfloat16).astype(jnp.float32))


def test_a_head_that_is_not_there_is_tied_or_missing(directory):
    change_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight$"):
        load(directory)
    change_config(directory, tie_word_embeddings=True)
    assert load(directory).model.lm_head is None


def test_an_mtp_layer_that_is_there_counts_whatever_the_configuration_says(directory):
    change_config(directory, mtp_num_hidden_layers=0)
    lm = load(directory)
    assert lm.config.mtp_num_hidden_layers == 1 and lm.model.mtp is not None


def test_an_mtp_layer_that_is_not_there_is_missing_or_not_asked_for(directory):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    change_tensors(directory, drop)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    assert str(error.value).count("mtp.") == 15
    change_config(directory, mtp_num_hidden_layers=0)
    assert load(directory).model.mtp is None


def test_every_tensor_that_does_not_fit_is_listed(directory):
    def spoil(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["mtp.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["score.weight"] = np.zeros(2, np.float32)
        tensors["model.norm.weight"] = np.zeros(17, np.float32)
        tensors["model.layers.0.linear_attn.conv1d.weight"] = np.zeros((40, 4), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((37, 16), np.int8)

    change_tensors(directory, spoil)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    message = str(error.value)
    assert "missing: model.layers.0.mlp.up_proj.weight, mtp.norm.weight" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight, score.weight" in message
    assert "model.norm.weight (found [17], expected [16])" in message
    assert "model.layers.0.linear_attn.conv1d.weight (found [40, 4], expected [40, 1, 4])" in message
    assert "not floating point: model.embed_tokens.weight (found I8)" in message
    assert str(directory) in message


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_file_that_is_cut_off(directory, kept):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read, it may be cut off"):
        load(directory)


def test_an_index_that_names_what_is_not_there(model, tmp_path):
    save(model, CONFIG, tmp_path, shard_bytes=4000)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"names files that are not there: {lost.name}"):
        load(tmp_path)


def test_an_index_that_lists_a_tensor_no_file_has(model, tmp_path):
    save(model, CONFIG, tmp_path, shard_bytes=4000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra.weight"] = sorted(tmp_path.glob("*.safetensors"))[0].name
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists tensors that no file has: model\.extra\.weight"):
        load(tmp_path)


def test_sources_that_are_no_model(tmp_path, directory):
    with pytest.raises(FileNotFoundError, match="no model 'demmo': expected \"demo\" or a directory"):
        load("demmo")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        load(directory)


def test_configurations_that_cannot_be_read(directory):
    change_config(directory, model_type="llama")
    with pytest.raises(ValueError, match="model_type must be one of"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load(directory)
    (directory / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object, got list"):
        load(directory)


@pytest.mark.parametrize("dtype", ["float33", "int8", "float64", "", 3])
def test_dtypes_that_are_not_served(directory, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16 or None, got "):
        load(directory, dtype=dtype)


def test_stop_ids_come_from_generation_config_first(directory):
    assert load(directory).stop_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "top_k": 20}')
    lm = load(directory)
    assert lm.stop_ids == (5, 6) and lm.generation_config["top_k"] == 20
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert load(directory).stop_ids == (0,)
    (directory / "generation_config.json").write_text('{"top_k": 20}')
    assert load(directory).stop_ids == (2,)


def test_text_goes_through_the_tokenizer(directory):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load(directory).encode("a")
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    lm = load(directory)
    assert lm.encode("two one three") == [1, 0, 2]
    assert lm.decode(np.array([1, 0])) == "two one"
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load(directory)


def test_logits_do_not_depend_on_what_comes_later(directory, rng):
    lm = load(directory)
    tokens = rng.integers(0, 37, (2, 20))
    whole = lm.logits(tokens)
    assert whole.shape == (2, 20, 37) and whole.dtype == jnp.float32
    np.testing.assert_allclose(lm.logits(tokens[:, :7]), whole[:, :7], atol=1e-5)


def test_tokens_that_logits_refuses(directory):
    lm = load(directory)
    with pytest.raises(ValueError, match=r"tokens must be int32 \[batch, time\] and not empty, got int64 \(3,\)"):
        lm.logits([1, 2, 3])
    with pytest.raises(ValueError, match="not empty"):
        lm.logits(np.zeros((2, 0), np.int32))
    with pytest.raises(ValueError, match="not empty, got float32"):
        lm.logits(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 37\), got 1 to 37"):
        lm.logits([[1, 37]])
    with pytest.raises(ValueError, match=r"at most max_length \(128\) long, got 129"):
        lm.logits(np.zeros((1, 129), np.int32))


def test_saving_needs_no_more_than_the_parameters_say(model, tmp_path):
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True, mtp_num_hidden_layers=0)
    small = make(tied)
    save(small, tied, tmp_path, dtype=jnp.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    lm = load(tmp_path)
    assert lm.config == tied
    for name, param in named_parameters(lm.model).items():
        np.testing.assert_array_equal(param[...], named_parameters(small)[name][...])
