"""Reading and writing checkpoints: what is read is what was written, and every way of not fitting is an error."""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.models.language_model import load
from jaxbuf.models.layers import named_parameters
from jaxbuf.models.loading import checkpoint, replacing
from jaxbuf.models.loading.checkpoint import CheckpointError, save
from tests.tiny import changed, random_model

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
).model()


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


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
    assert not lm.config.tied
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
    assert lm.config.source.mtp_num_hidden_layers == 1 and lm.model.mtp is not None


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
    with pytest.raises(FileNotFoundError, match="no model 'demmo': expected \"demo\", a directory with a config"):
        load("demmo")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        load(directory)


def test_configurations_that_cannot_be_read(directory):
    change_config(directory, model_type="gpt2")
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
    with pytest.raises(
        ValueError, match=r"tokens must be int32 \[batch, time\] or \[time\] and not empty, got int64 \(\)"
    ):
        lm.logits(3)
    with pytest.raises(ValueError, match="not empty"):
        lm.logits(np.zeros((2, 0), np.int32))
    with pytest.raises(ValueError, match="not empty, got float32"):
        lm.logits(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 37\), got 1 to 37"):
        lm.logits([[1, 37]])
    with pytest.raises(ValueError, match=r"at most max_length \(128\) long, got 129"):
        lm.logits(np.zeros((1, 129), np.int32))


def test_saving_needs_no_more_than_the_parameters_say(model, tmp_path):
    tied = changed(CONFIG, tie_word_embeddings=True, mtp_num_hidden_layers=0)
    small = random_model(tied)
    save(small, tied, tmp_path, dtype=jnp.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    lm = load(tmp_path)
    assert lm.config == tied
    chex.assert_trees_all_equal(lm.model, small)


def test_progress_counts_the_bytes_of_the_checkpoint(model, tmp_path):
    save(model, CONFIG, tmp_path, shard_bytes=4000)
    calls = []
    load(tmp_path, progress=lambda done, of: calls.append((done, of)))
    total = sum(tensor.nbytes for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    done = [call[0] for call in calls]
    assert done == sorted(set(done)) and len(done) == len(named_parameters(model)) + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_longer_than_a_piece_are_read_whole(model, directory, monkeypatch, dtype):
    monkeypatch.setattr(checkpoint, "PIECE", 100)
    assert_same(load(directory, dtype=dtype).model, model, jnp.dtype(dtype))


def test_what_was_loaded_does_not_change_with_the_file(model, directory):
    lm = load(directory, dtype="bfloat16")
    file = directory / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-5000, os.SEEK_END)
        opened.write(bytes(5000))
    assert_same(lm.model, model, jnp.bfloat16)


def leftovers(folder):
    return [entry for entry in folder.iterdir() if entry.name.startswith(".")]


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Saves checkpoint argv[1] as argv[2] and, with "stop", says so and waits when the second shard is about to be written;
# without it saves again and again, with weights that are all of one save.
SAVER = """
import dataclasses, sys, time
import jax
from jaxbuf.models.loading import checkpoint
from jaxbuf.models.language_model import load
lm = load(sys.argv[1])
write, files = checkpoint.save_file, []
def slow(tensors, file, metadata):
    if len(files) == 1:
        print("writing", flush=True)
        time.sleep(600)
    files.append(file)
    write(tensors, file, metadata=metadata)
if sys.argv[3] == "stop":
    checkpoint.save_file = slow
for number in range(10 ** 9):
    model = jax.tree.map(lambda leaf: (leaf * 0 + number % 100).astype(leaf.dtype), lm.model)
    dataclasses.replace(lm, model=model).save(sys.argv[2], shard_bytes=40_000)
    print(number, flush=True)
"""


@pytest.fixture
def start_saving(directory):
    started = []

    def start(target, mode):
        command = [sys.executable, "-c", SAVER, str(directory), str(target), mode]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("there_before", [False, True])
def test_a_save_that_is_killed_leaves_what_was_there(model, tmp_path, start_saving, there_before):
    target = tmp_path / "target"
    if there_before:
        save(model, CONFIG, target)
        (target / "notes.txt").write_text("mine")
        before = contents(target)
    process = start_saving(target, "stop")
    assert process.stdout.readline() == "writing\n"
    (unfinished,) = leftovers(tmp_path)
    assert any(name.endswith(".safetensors") for name in contents(unfinished))

    other = tmp_path / "other"
    save(model, CONFIG, other)
    if there_before:  # a save of another process beside it does not take the living one's files for leftovers
        save(model, CONFIG, target)
        assert leftovers(tmp_path) == [unfinished] and contents(target) == before

    process.send_signal(signal.SIGKILL)
    process.wait()
    assert leftovers(tmp_path) == [unfinished]
    assert target.exists() == there_before
    if there_before:
        assert contents(target) == before
        assert_same(load(target).model, model, jnp.float32)
    save(model, CONFIG, other)
    assert leftovers(tmp_path) == [unfinished]  # it is of another name
    save(model, CONFIG, target)
    assert leftovers(tmp_path) == []
    assert_same(load(target).model, model, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))])
def test_a_save_that_is_killed_at_any_time_leaves_one_whole_checkpoint(tmp_path, start_saving, rng, attempt):
    target = tmp_path / "target"
    process = start_saving(target, "go")
    first = [process.stdout.readline() for _ in range(3)]
    time.sleep(rng.uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    leaves = jax.tree.leaves(load(target).model)
    (value,) = {float(number) for leaf in leaves for number in np.unique(leaf)}
    last = int([*first, *process.stdout.read().split()][-1])
    # Of the save that was told last, or of the next one; on a busy machine there may be more than a hundred by now.
    assert value in (last % 100, (last + 1) % 100)


def test_everything_is_on_the_disk_before_the_name_changes(model, directory, monkeypatch):
    synced, at_the_swap = set(), []
    fsync, swap = os.fsync, replacing._swap
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))

    def watched(new, *others):
        at_the_swap.append({str(path) for path in [new, *new.rglob("*")]})
        assert at_the_swap[0] <= synced
        swap(new, *others)

    monkeypatch.setattr(replacing, "_swap", watched)
    save(model, CONFIG, directory, shard_bytes=4000)
    assert len(at_the_swap[0]) > 5 and str(directory.parent) in synced


def test_without_an_exchange_of_names_the_old_checkpoint_is_never_lost(model, directory, monkeypatch):
    before = contents(directory)
    monkeypatch.setattr(replacing, "_exchange", lambda *names: False)
    (directory / "notes.txt").write_text("mine")
    save(model, CONFIG, directory, shard_bytes=4000)
    assert (directory / "model.safetensors.index.json").exists() and (directory / "notes.txt").read_text() == "mine"
    assert leftovers(directory.parent) == []

    # as a process leaves it that dies between the two names
    scratch = directory.parent / f".{directory.name}.abcd1234.saving"
    (scratch / "new").mkdir(parents=True)
    directory.rename(scratch / "old")
    with pytest.raises(RuntimeError), replacing.replacing(directory):
        assert (directory / "model.safetensors.index.json").exists()
        raise RuntimeError
    assert leftovers(directory.parent) == [] and (directory / "notes.txt").exists()
    save(model, CONFIG, directory)
    assert contents(directory) == before | {"notes.txt": b"mine"}


def test_a_save_that_fails_leaves_what_was_there(model, directory, monkeypatch):
    before = contents(directory)

    def fail(*arguments, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save(model, CONFIG, directory)
    assert contents(directory) == before and leftovers(directory.parent) == []


def test_files_that_are_not_the_checkpoints_stay(model, directory):
    (directory / "tokenizer.json").write_text("{}")
    (directory / "plots").mkdir()
    (directory / "plots" / "loss.txt").write_text("falling")
    (directory / "link").symlink_to("plots/loss.txt")
    save_file({"extra": np.zeros(3, np.float32)}, directory / "mtp.safetensors")
    save(model, CONFIG, directory)
    assert sorted(contents(directory)) == [
        "config.json",
        "link",
        "model.safetensors",
        "plots/loss.txt",
        "tokenizer.json",
    ]
    assert (directory / "link").is_symlink() and (directory / "link").read_text() == "falling"


def test_names_that_save_refuses(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds files, but none of a checkpoint \(thesis\.tex, \.\.\.\)"):
        save(model, CONFIG, tmp_path)
    with pytest.raises(NotADirectoryError, match=r"thesis\.tex must be a directory or not exist"):
        save(model, CONFIG, tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="shard_bytes must be a whole number of at least 1, got 0"):
        save(model, CONFIG, tmp_path / "model", dtype="float32", shard_bytes=0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        save(model, CONFIG, tmp_path / "model", dtype="int8")
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


def test_a_link_stays_a_link_and_modes_stay_modes(model, directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    directory.chmod(0o750)
    save(model, CONFIG, tmp_path / "link", dtype=jnp.float32)
    assert (tmp_path / "link").is_symlink() and load_file(directory / "model.safetensors")[
        "mtp.fc.weight"
    ].itemsize == 4
    assert directory.stat().st_mode & 0o777 == 0o750
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_loaded_model_is_saved_with_all_its_files(tmp_path):
    demo = load("demo")
    demo.save(tmp_path / "copy")
    copy = load(tmp_path / "copy")
    assert copy.dtype == demo.dtype and copy.config == demo.config and copy.generation_config == demo.generation_config
    text = "def f(x): return 'é'"
    assert copy.encode(text) == demo.encode(text)
    chex.assert_trees_all_equal(copy.model, demo.model)
    config = "tokenizer_config.json"
    assert (tmp_path / "copy" / config).read_bytes() == (demo.directory / config).read_bytes()

    copy.save(tmp_path / "copy", dtype="bfloat16", shard_bytes=10_000_000)  # over itself
    again = load(tmp_path / "copy", dtype="bfloat16")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1 and again.encode(text) == demo.encode(text)
    assert sorted(path.name for path in again.directory.glob("*.json")) == sorted(
        ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", config]
    )


def test_a_model_without_a_tokenizer_keeps_none_of_another(directory, tmp_path):
    load("demo").save(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    bare = dataclasses.replace(load(directory), generation_config={"top_k": 3})
    bare.save(tmp_path / "other")
    assert sorted(contents(tmp_path / "other")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert load(tmp_path / "other").generation_config == {"top_k": 3}


@pytest.mark.slow
def test_loading_takes_little_more_than_the_parameters(tmp_path):
    root = Path(__file__).parents[2]
    sizes = "--layers 4 --hidden 1024 --vocab 65536 --shard-mb 100".split()
    command = [sys.executable, str(root / "scripts/bench_load"), *sizes, "--json", str(tmp_path / "load.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "load.json").read_text())["figures"]
    assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
    assert all(row["parameters"] <= row["over_baseline"] <= row["bound"] for row in rows)
