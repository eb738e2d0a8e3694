"""What a checkpoint's small files may hold: every value of a wrong type or range is an error that names file and field,
and no file outside the directory is read."""

import dataclasses
import json
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxbuf
from jaxbuf.models.families import config_from_dict, config_json
from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.planning.model_sizes import find_sizes
from tests.models.model_directory import CONFIG, EOS, INDEX, VOCAB, change, fails, nest, put
from tests.models.model_directory import directory as directory  # a fresh copy of the tiny model; a fixture
from tests.models.model_directory import written as written

NAN, INFINITY = float("nan"), float("inf")
BLOB = "model-00001-of-00003.safetensors"


def test_the_model_of_these_tests_is_loaded(directory):
    lm = load(directory)
    assert lm.config == CONFIG and lm.stop_ids == (EOS, 0) and len(list(directory.glob("*.safetensors"))) == 3
    assert lm.decode(lm.encode("hé <|endoftext|>")) == "hé " and lm.chat([{"role": "user", "content": "Hi"}])
    jaxbuf.SamplingParams(**lm.sampling_defaults)
    put(directory, "config.json", nest(config_json(CONFIG)))
    assert load(directory).config == CONFIG


SIZES = [None, "64", 64.0, -1, 0, True, [64], {}, NAN, 2**31, 10**30, "x" * 5000]
WRONG = {
    "rms_norm_eps": ("x", None, -1, 0, NAN, INFINITY, 2, True, [1e-6], 10**400),
    "rope_parameters__rope_theta": (0, NAN, -1.0, "10000", None, INFINITY, 1e39, 1e-46, False),
    "rope_parameters__partial_rotary_factor": (0, -0.25, 1.5, "0.25", None, NAN),
    "rope_parameters": (5, "default", [], [1]),
    "initializer_range": ("x", None, -1, NAN),
    "tie_word_embeddings": ("yes", None, 1, []),
    "mtp_num_hidden_layers": ("1", None, 1.0, -1, 2, True),
    "max_position_embeddings": SIZES,
    "linear_conv_kernel_dim": SIZES,
    "num_hidden_layers": SIZES,
    "layer_types": (5, "full_attention", {}, [1, 2], [["full_attention"], "full_attention"], [None, None], [], ["a"]),
    "eos_token_id": (10**12, -1, VOCAB, "2", 2.0, True, [[2]], [2, None], [2, VOCAB], {}, NAN),
    "vocab_size": SIZES,
    "hidden_size": SIZES,
    "head_dim": SIZES,
    "num_attention_heads": SIZES,
    "linear_key_head_dim": SIZES,
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_in_the_configuration_is_an_error_that_names_it(directory, field, nested):
    flat = json.loads((directory / "config.json").read_text())
    name = field.replace("__", ".")
    within = "text_config." if nested and field != "tie_word_embeddings" else ""
    for value in WRONG[field]:
        put(directory, "config.json", flat)
        change(directory, "config.json", **{field: value})
        if nested:
            put(directory, "config.json", nest(json.loads((directory / "config.json").read_text())))
        if field == "layer_types" and value in ([], ["a"]):
            fails(directory, "config.json", r"layer_types (must be a non-empty list out of|has \d entries, num_hidden)")
        else:
            fails(directory, "config.json", re.escape(within + name) + " must be .*, got .")


def test_a_value_is_shown_however_long_it_is(directory):
    change(directory, "config.json", hidden_size="x" * 10**6)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    assert len(str(error.value)) < 400
    with pytest.raises(ValueError, match=r"hidden_size must be .*, got a int of more than 4,000 digits"):
        config_from_dict(config_json(CONFIG) | {"hidden_size": 10**5000})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_attention_interval": 0}, r"full_attention_interval must be a whole number in \[1, .*, got 0"),
        ({"full_attention_interval": "4"}, "full_attention_interval must be"),
        ({"full_attention_interval": None}, "full_attention_interval must be"),
        ({"num_hidden_layers": 1025}, r"num_hidden_layers must be a whole number in \[1, 1024\], got 1025"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be"),
    ],
)
def test_layers_from_a_wrong_interval(directory, changes, message):
    data = json.loads((directory / "config.json").read_text()) | {"layer_types": None}
    put(directory, "config.json", data | changes)
    fails(directory, "config.json", message)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 2**28, "vocab_size": 2**20}, r"vocab_size \(1048576\) times hidden_size \(\d+\) must be"),
        ({"vocab_size": 2**31 - 1}, r"vocab_size .* at most 2\*\*40 elements in at most 2\*\*28 rows"),
        ({"num_attention_heads": 2**20, "head_dim": 2**20}, r"num_attention_heads .* times head_dim"),
        ({"linear_value_head_dim": 2**30}, "linear_num_value_heads .* times linear_value_head_dim"),
        ({"linear_conv_kernel_dim": 2**31 - 1, "linear_num_key_heads": 2, "linear_key_head_dim": 2**20}, "linear_num"),
    ],
)
def test_arrays_that_nobody_could_hold_are_refused_before_anything_is_made(directory, sizes, message):
    change(directory, "config.json", **sizes)
    fails(directory, "config.json", message)
    with pytest.raises(ValueError, match=message):
        config_from_dict(json.loads((directory / "config.json").read_text()))


def test_more_layers_than_tensors_are_told_before_they_are_traced(directory, monkeypatch):
    change(directory, "config.json", layer_types=None, num_hidden_layers=1000)
    monkeypatch.setattr(jax, "eval_shape", None)
    fails(directory, "config.json", r"has 1000 layers, and the files there have \d+ tensors")


def test_configurations_made_by_hand_are_checked_too():
    data = {field.name: getattr(CONFIG.source, field.name) for field in dataclasses.fields(CONFIG.source)}
    assert Config(**data | {"vocab_size": np.int64(VOCAB), "rope_theta": np.float32(5)}).vocab_size == VOCAB
    for name, value in [
        ("hidden_size", "x"),
        ("hidden_size", None),
        ("rms_norm_eps", NAN),
        ("rope_theta", 0),
        ("layer_types", 5),
        ("layer_types", ("full_attention",) * 1025),
        ("tie_word_embeddings", None),
        ("eos_token_ids", (-1,)),
    ]:
        with pytest.raises(ValueError, match=f"^{name} must "):
            Config(**data | {name: value})
    for value in (None, 5, [("vocab_size", 5)]):
        with pytest.raises(ValueError, match="a configuration must be a mapping of names to values, got"):
            config_from_dict(value)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_omni_moe", 5, None, ["qwen3_5"], {}])
def test_an_architecture_that_is_not_served_names_the_file_and_those_that_are(directory, model_type):
    change(directory, "config.json", model_type=model_type)
    served = r"\(.*'qwen3_5', 'qwen3_5_text'.*\) \(jaxbuf serves .*dense text models of the Qwen3\.5 architecture.*\)"
    message = f"model_type must be one of {served}, got {re.escape(repr(model_type))}"
    fails(directory, "config.json", message, ValueError)
    with pytest.raises(ValueError, match=rf"config\.json: {message}; the shapes known by name are Qwen3"):
        find_sizes(directory)


@pytest.mark.parametrize("value", [[], [1], 5, "x", None])
def test_a_text_configuration_that_is_no_object(directory, value):
    put(directory, "config.json", {"model_type": "qwen3_5", "text_config": value})
    fails(directory, "config.json", "text_config must be an object, got")
    put(directory, "config.json", {"model_type": "qwen3_5"})
    fails(directory, "config.json", "lacks text_config")
    change(directory, "config.json", text_config={"vocab_size": 5})
    fails(directory, "config.json", "lacks text_config.hidden_size, .* text_config.layer_types or text_config.num_hid")


def test_a_setting_that_is_not_served_names_the_file(directory):
    change(directory, "config.json", hidden_act="gelu")
    fails(directory, "config.json", "hidden_act must be 'silu', got 'gelu'", ValueError)
    change(directory, "config.json", hidden_act="silu", rope_parameters__rope_type=["yarn"])
    fails(directory, "config.json", "rope_parameters.rope_type must be 'default', got", ValueError)


# Of each file, as text: what JSON's own rules forbid, and what Python's parser says in other ways.
NOT_JSON = {
    "deep": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not valid JSON: it is nested too deeply"),
    "digits": ('{"a": ' + "1" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
    "byte order mark": ("\ufeff{}", "is not valid JSON: .*BOM"),
    "a key twice": ('{"a": {"b": 1, "c": 2, "b": 3}}', "is not valid JSON: an object has the key 'b' twice"),
    "cut off": ('{"a": ', "is not valid JSON"),
    "empty": ("", "is not valid JSON"),
    "a list": ("[]", "must hold a JSON object, got list"),
    "a constant": ("NaN", "must hold a JSON object, got float"),
}
SMALL = ("config.json", "generation_config.json", INDEX, "tokenizer_config.json")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("fault", NOT_JSON)
def test_a_file_that_is_no_json_object(directory, name, fault):
    content, message = NOT_JSON[fault]
    (directory / name).write_text(content)
    fails(directory, name, message)


def test_constants_that_released_configurations_have_are_taken_where_nothing_reads_them(directory):
    change(directory, "config.json", time_step_limit=[0.0, INFINITY])
    change(directory, "generation_config.json", other=NAN)
    assert np.isnan(load(directory).generation_config["other"])


ALL = (*SMALL, "tokenizer.json", "chat_template.jinja", BLOB)


@pytest.mark.parametrize("name", ALL)
def test_a_file_that_is_something_else(directory, name):
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    fails(directory, name, "must be a file, got a directory")
    (directory / name).rmdir()
    (directory / name).symlink_to("nowhere")
    fails(directory, name, r"is a link to a file that is not there \(nowhere\)")
    (directory / name).unlink()
    (directory / name).symlink_to(name)
    fails(directory, name, "cannot be read: Too many levels of symbolic links")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    fails(directory, name, "must be a file, got a special file")
    (directory / name).unlink()
    (directory / name).write_bytes(b'{"\xff": 1}')
    fails(directory, name, "is not valid UTF-8" if name != BLOB else "cannot be read, it may be cut off")


def test_shards_without_an_index_that_are_something_else(directory):
    (directory / INDEX).unlink()
    (directory / "more.safetensors").mkdir()
    fails(directory, "more.safetensors", "must be a file, got a directory")


def test_a_file_that_may_not_be_read(written):
    # In a directory of its own, for those of the tests are closed to everybody else, and root may read everything.
    with tempfile.TemporaryDirectory() as folder:
        directory = shutil.copytree(written, Path(folder) / "model")
        Path(folder).chmod(0o755)
        for name in ALL:
            (directory / name).touch()
            (directory / name).chmod(0)
            root = os.geteuid() == 0
            if root:
                os.seteuid(65534)
            try:
                fails(directory, name, "cannot be read: Permission denied")
            finally:
                if root:
                    os.seteuid(0)
            (directory / name).chmod(0o644)
            if name == "chat_template.jinja":
                (directory / name).unlink()


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.safetensors", "sub/../../outside.safetensors", f"sub/../{BLOB}", "absolute"),
        *("..\\outside.safetensors", "C:\\outside.safetensors", "\\\\host\\outside.safetensors"),
        *("..", ".", "./", "", " ", "a\0b", "\ud800"),
    ],
)
def test_an_index_that_names_a_file_outside_the_directory_is_refused_by_name(directory, name):
    shutil.copy(directory / BLOB, directory.parent / "outside.safetensors")
    name = str(directory.parent / "outside.safetensors") if name == "absolute" else name
    weights = json.loads((directory / INDEX).read_text())["weight_map"]
    (directory / BLOB).unlink()
    moved = [tensor for tensor, file in weights.items() if file == BLOB]
    change(directory, INDEX, weight_map=weights | dict.fromkeys(moved, name))
    fails(directory, INDEX, "weight_map must name files in the directory of the index, got .* for 'model.embed_tokens")


def test_links_out_of_the_directory_and_folders_in_it_are_followed(directory):
    for file in [*directory.glob("*.json"), directory / BLOB]:  # as in huggingface-hub's cache
        file.rename(directory.parent / file.name)
        file.symlink_to(f"../{file.name}")
    assert load(directory).config == CONFIG
    (directory / "sub").mkdir()
    (directory / BLOB).rename(directory / "sub" / BLOB)
    (directory / "sub" / BLOB).unlink()
    (directory.parent / BLOB).rename(directory / "sub" / BLOB)
    weights = json.loads((directory / INDEX).read_text())["weight_map"]
    renamed = {tensor: f"sub/{file}" if file == BLOB else file for tensor, file in weights.items()}
    change(directory, INDEX, weight_map=renamed)
    assert load(directory).config == CONFIG


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "lacks weight_map"),
        ({"weight_map": ["a"]}, r"weight_map must be an object, got \['a'\]"),
        ({"weight_map": None}, "weight_map must be an object, got None"),
        ({"weight_map": {}}, "weight_map must name the file of each tensor, got none"),
        ({"weight_map": {"model.norm.weight": 5}}, "weight_map.model.norm.weight must be a text, got 5"),
        ({"weight_map": {"model.norm.weight": [BLOB]}}, "weight_map.model.norm.weight must be a text"),
        ({"weight_map": {"model.norm.weight": "x" * 5000}}, "cannot be read: File name too long"),
        ({"weight_map": {"model.norm.weight": "config.json"}}, "cannot be read, it may be cut off"),
    ],
)
def test_an_index_of_another_form(directory, index, message):
    put(directory, INDEX, index)
    file = INDEX if "cannot" not in message else index["weight_map"]["model.norm.weight"]
    fails(directory, file, message)


def test_an_index_with_more_to_say_is_read(directory):
    change(directory, INDEX, metadata=[5], more={"a": None})
    assert load(directory).config == CONFIG


def test_an_index_that_names_the_wrong_shard(directory):
    weights = json.loads((directory / INDEX).read_text())["weight_map"]
    name = next(tensor for tensor, file in weights.items() if file != BLOB)
    change(directory, INDEX, weight_map=weights | {name: BLOB})
    fails(directory, INDEX, rf"lists tensors in files that do not hold them: {name} \(in model-.*, not {BLOB}\)$")


LIES = {
    "more than all memory": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
    "more than the file": {"dtype": "F32", "shape": [2**34], "data_offsets": [0, 2**36]},
    "a negative shape": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
    "another dtype": {"dtype": "F64", "shape": [1], "data_offsets": [0, 4]},
    "no dtype": {"dtype": "X32", "shape": [1], "data_offsets": [0, 4]},
    "offsets the wrong way": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
    "no tensor": 5,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_of_tensors_that_lies(directory, lie):
    write_header(directory / BLOB, {"model.embed_tokens.weight": LIES[lie]})
    fails(directory, BLOB, "cannot be read, it may be cut off: ")


def test_headers_whose_tensors_overlap_or_are_of_no_use(directory):
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_header(directory / BLOB, {"a": whole, "b": whole})
    fails(directory, BLOB, "cannot be read, it may be cut off: ")
    (directory / INDEX).unlink()
    (directory / BLOB).unlink()
    last = sorted(directory.glob("*.safetensors"))[-1]
    tensors = load_file(last)
    for tensor in (np.zeros(8, np.complex64), np.zeros((0, 2**40), np.float32), np.float32(3), np.zeros(8, bool)):
        save_file(tensors | {"model.norm.weight": np.asarray(tensor)}, last)
        with pytest.raises(CheckpointError, match=r"(misshapen|not floating point): model\.norm\.weight \(found"):
            load(directory)


def write_header(path, tensors):
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
