"""What a checkpoint's small files may hold: every value of a wrong type or range is an error that names file and field,
and no file outside the directory is read."""

import json
import os
import re
import shutil
import struct
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxbuf
from jaxbuf.models.checkpoint import CheckpointError
from jaxbuf.models.language_model import load
from jaxbuf.models.memory_shape import find_shape
from jaxbuf.models.qwen3_5_config import Config
from tests.models.model_directory import CONFIG, EOS, INDEX, VOCAB, change, nest, put, write_model

NAN, INFINITY = float("nan"), float("inf")
BLOB = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("written") / "model")


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


def fails(directory, file, message, error=CheckpointError):
    """Loading raises an error that begins with the file's name and goes on like `message`."""
    with pytest.raises(error) as raised:
        load(directory)
    assert re.match(re.escape(str(directory / file)) + r":? " + message, str(raised.value)), raised.value


def test_the_model_of_these_tests_is_loaded(directory):
    lm = load(directory)
    assert lm.config == CONFIG and lm.stop_ids == (EOS, 0) and len(list(directory.glob("*.safetensors"))) == 3
    assert lm.decode(lm.encode("hé <|endoftext|>")) == "hé " and lm.chat([{"role": "user", "content": "Hi"}])
    jaxbuf.SamplingParams(**lm.sampling_defaults)
    put(directory, "config.json", nest(CONFIG.to_dict()))
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
        Config.from_dict(CONFIG.to_dict() | {"hidden_size": 10**5000})


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
        Config.from_dict(json.loads((directory / "config.json").read_text()))


def test_more_layers_than_tensors_are_told_before_they_are_traced(directory, monkeypatch):
    change(directory, "config.json", layer_types=None, num_hidden_layers=1000)
    monkeypatch.setattr(jax, "eval_shape", None)
    fails(directory, "config.json", r"has 1000 layers, and the files there have \d+ tensors")


def test_configurations_made_by_hand_are_checked_too():
    data = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
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
            Config.from_dict(value)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe", 5, None, ["qwen3_5"], {}])
def test_an_architecture_that_is_not_served_names_the_file_and_those_that_are(directory, model_type):
    change(directory, "config.json", model_type=model_type)
    served = r"\('qwen3_5', 'qwen3_5_text'\) \(jaxbuf serves dense text models of the Qwen3\.5 architecture\)"
    message = f"model_type must be one of {served}, got {re.escape(repr(model_type))}"
    fails(directory, "config.json", message, ValueError)
    with pytest.raises(ValueError, match=rf"config\.json: {message}; the shapes known by name are Qwen3"):
        find_shape(directory)


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


@pytest.mark.parametrize("value", [10**12, -1, VOCAB, "2", 2.5, True, [[2]], [None], {}, NAN])
def test_an_end_token_of_the_generation_config_is_of_the_vocabulary(directory, value):
    change(directory, "generation_config.json", eos_token_id=value)
    expected = rf"eos_token_id must be a token id in \[0, {VOCAB}\) or a list of them, got"
    fails(directory, "generation_config.json", expected)


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("temperature", ("hot", -1, NAN, True, [0.6], 1e39), "a finite number of at least 0"),
        ("top_k", (3.5, "20", -1, True, [20]), "a whole number of at least 0"),
        ("top_p", (2, 0, "x", NAN, False), "a finite number above 0 and at most 1"),
        ("min_p", (-0.1, 1.5, "x"), r"a finite number in \[0, 1\]"),
        ("repetition_penalty", (0, -1, "x", INFINITY), "a finite number above 0"),
        ("do_sample", ("yes", 1, []), "true or false"),
    ],
)
def test_wrong_sampling_settings_are_told_when_they_are_asked_for(directory, field, values, expected):
    given = json.loads((directory / "generation_config.json").read_text())
    for value in values:
        put(directory, "generation_config.json", given | {field: value})
        lm = load(directory)
        assert json.dumps(lm.generation_config) == json.dumps(given | {field: value})  # the file as it is
        with pytest.raises(CheckpointError) as error:
            _ = lm.sampling_defaults
        place = re.escape(str(directory / "generation_config.json"))
        assert re.match(f"{place}: {field} must be {expected}, got", str(error.value)), error.value


def test_sampling_settings_that_are_not_used_are_not_checked(directory):
    change(directory, "generation_config.json", do_sample=False, temperature="hot", top_k=None)
    assert load(directory).sampling_defaults == {
        "temperature": 0.0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def tokenizer_of(directory, **changes):
    change(directory, "tokenizer.json", **changes)
    return load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}},
        {"model": None},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 10**12}, "merges": []}},
        {"model__merges": [["a", "never"]]},
        {"added_tokens": 5},
        {"version": "7.0"},
    ],
)
def test_a_tokenizer_that_cannot_be_read_names_its_file(directory, changes):
    change(directory, "tokenizer.json", **changes)
    fails(directory, "tokenizer.json", "cannot be read: ")


def test_a_tokenizer_that_is_nested_too_deeply(directory):
    (directory / "tokenizer.json").write_text('{"a": ' + "[" * 100_000)
    fails(directory, "tokenizer.json", "cannot be read: ")


def test_a_token_outside_the_vocabulary_is_an_error_of_the_text_that_has_it(directory):
    lm = tokenizer_of(directory, model__vocab=json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    assert lm.encode("a") and lm.known_ids.sum() == 257
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    for found in (VOCAB, 10**9):
        lm = tokenizer_of(directory, model__vocab=vocab | {"a": found})
        assert lm.decode(lm.encode("b")) == "b" and lm.known_ids.shape == (VOCAB,)
        with pytest.raises(CheckpointError) as error:
            lm.encode("bab")
        words = f"has id {found} for 'a', and the model's ids are below vocab_size ({VOCAB})"
        assert str(error.value) == f"{directory / 'tokenizer.json'} {words}"
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"[X]": {"id": "[X]", "ids": [VOCAB], "tokens": ["[X]"]}}
    single = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, pair[0]]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    lm = tokenizer_of(directory, model__vocab=vocab, post_processor=template)
    assert lm.encode("b", add_special_tokens=False)
    with pytest.raises(CheckpointError, match=rf"has id {VOCAB} for '\[X\]'"):
        lm.encode("b")


def test_a_tokenizer_that_fails_names_its_file(directory):
    """With an error, and with a panic, which is no Exception."""
    lm = tokenizer_of(directory, model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"})
    with pytest.raises(CheckpointError, match=r"model/tokenizer\.json cannot encode the text: .*Missing \[UNK\]"):
        lm.encode("b")
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    lm = tokenizer_of(directory, pre_tokenizer=slow)
    with pytest.raises(CheckpointError, match=r"model/tokenizer\.json cannot encode the text: .*retry-limit"):
        lm.encode("a" * 30 + "b")


def test_a_tokenizer_neither_cuts_nor_fills_a_text(directory):
    plain = load(directory).encode("hello")
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    lm = tokenizer_of(directory, padding=padding, truncation=truncation)
    assert lm.encode("hello") == plain and len(plain) == 5


def test_what_is_no_text_and_what_are_no_ids(directory):
    lm = load(directory)
    for text in (5, None, ["a"], b"a", "\ud800"):
        with pytest.raises(ValueError, match="text must be a text that UTF-8 can encode, got"):
            lm.encode(text)
    for ids in ([-1], [10**12], [1.5], ["a"], [None], 5, None):
        with pytest.raises(ValueError, match=rf"ids must be token ids in \[0, {VOCAB}\), got"):
            lm.decode(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": {"lstrip": False}}, "lacks eos_token.content"),
        ({"eos_token": {"content": 5}}, "eos_token.content must be a text, got 5"),
        ({"bos_token": 5}, 'bos_token must be a text or an object with its "content", got 5'),
        ({"pad_token": ["a"]}, "pad_token must be a text or"),
        ({"mask_token": True}, "mask_token must be a text or"),
        ({"chat_template": 7}, "chat_template must be a text or a list of named ones, got 7"),
        ({"chat_template": {"default": "x"}}, "chat_template must be a text or a list of named ones"),
        ({"chat_template": ["x"]}, r"chat_template must be a list of objects, got \['x'\]"),
        ({"chat_template": [{"template": "x"}]}, r"lacks chat_template\[0\].name"),
        ({"chat_template": [{"name": "default"}]}, r"lacks chat_template\[0\].template"),
        ({"chat_template": [{"name": 5, "template": "x"}]}, r"chat_template\[0\].name must be a text, got 5"),
        ({"chat_template": [{"name": "default", "template": None}]}, r"chat_template\[0\].template must be a text"),
        ({"chat_template": [{"name": ["default"], "template": "x"}]}, r"chat_template\[0\].name must be a text"),
        ({"chat_template": []}, 'no chat_template is named "default", only none'),
    ],
)
def test_a_wrong_value_in_the_tokenizers_configuration_is_an_error_that_names_it(directory, changes, message):
    change(directory, "tokenizer_config.json", **changes)
    fails(directory, "tokenizer_config.json", message)


def test_a_template_that_is_no_jinja_is_told_when_it_is_rendered(directory):
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"the chat template of .*model/chat_template\.jinja failed: Expected"):
        load(directory).chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("find", [load, find_shape, partial(jaxbuf.plan, memory_bytes=10**9)])
@pytest.mark.parametrize("source", ["", None, 5, True, b"demo", ["demo"], {}, 1.5])
def test_what_is_no_name_of_a_model(find, source, directory, monkeypatch):
    monkeypatch.chdir(directory)  # whose name is not ""
    with pytest.raises(ValueError, match=r'a model must be "demo", a directory .* or "org/name@revision", got '):
        find(source)


@pytest.mark.parametrize("find", [load, find_shape])
def test_names_of_no_model(find, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    sources = [
        "a\0b",
        "a/\0",
        Path("a\0b"),
        "x" * 5000,
        Path("x" * 5000),
        "org/" + "n" * 5000,
        "file",
        tmp_path / "file",
    ]
    for source in (*sources, "org/name@a\0b", "org/name@\ud800", "org/name@../../x"):
        with pytest.raises(FileNotFoundError, match=r"no model .*: (expected|no such directory, and not to be had)"):
            find(source)
    with pytest.raises(FileNotFoundError, match=r" has no config\.json"):
        find(".")


def test_a_file_is_said_to_be_one(directory):
    with pytest.raises(FileNotFoundError, match=r"no model .*config\.json' \(it is a file\): expected"):
        load(directory / "config.json")


@pytest.mark.parametrize("value", [["bfloat16"], 5, {}, True])
def test_a_shape_of_a_wrong_dtype(directory, value):
    change(directory, "config.json", dtype=value)
    with pytest.raises(CheckpointError, match=r"config\.json: dtype must be a text, got"):
        find_shape(directory)


def test_a_flat_configuration_may_have_a_text_configuration_that_nobody_reads(directory):
    change(directory, "config.json", text_config=[1], torch_dtype="float16", dtype=None)
    assert find_shape(directory).dtype == "float16" and load(directory).config == CONFIG


def test_shapes_name_what_is_wrong_in_a_configuration(directory):
    change(directory, "config.json", hidden_size="x")
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size must be"):
        find_shape(directory)


@pytest.mark.parametrize("dtype", [object(), {}, [1], "f4,f4", "((((", True, np.float64, b"\xff", "\ud800"])
def test_odd_dtypes(directory, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16 or None, got"):
        load(directory, dtype=dtype)


def test_odd_meshes(directory):
    for mesh in (5, "tensor", jax.devices(), jax.sharding.AbstractMesh((1,), ("tensor",))):
        with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh or None, got "):
            load(directory, mesh=mesh)
    for mesh in (jax.make_mesh((1,), ("data",)), jax.sharding.Mesh(np.array([], object).reshape(0), ("data",))):
        with pytest.raises(ValueError, match='mesh must have an axis "tensor", got'):
            load(directory, mesh=mesh)


def test_odd_arguments_of_save(directory, tmp_path, monkeypatch):
    lm = load(directory)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for shard_bytes in ("5", True, 5e9, None, 0, -1, [5]):
        with pytest.raises(ValueError, match="shard_bytes must be a whole number of at least 1, got"):
            lm.save("there", shard_bytes=shard_bytes)
    for name in ("", None, 5, b"there", "a\0b", ["there"]):
        with pytest.raises(ValueError, match="directory must be the name of one, got"):
            lm.save(name)
    for dtype in ({}, object(), "float64"):
        with pytest.raises(ValueError, match="dtype must be one of"):
            lm.save("there", dtype=dtype)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_folder_among_the_tokenizers_files_is_not_saved(directory, tmp_path):
    (directory / "tokenizer_parts.json").mkdir()
    load(directory).save(tmp_path / "copy")
    assert load(tmp_path / "copy").config == CONFIG
