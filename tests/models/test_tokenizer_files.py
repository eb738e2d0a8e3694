"""What generation_config.json and a tokenizer's files may hold, and what they do to a text."""

import json
import re

import pytest

from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError
from tests.models.model_directory import VOCAB, change, fails, put
from tests.models.model_directory import directory as directory  # a fresh copy of the tiny model; a fixture
from tests.models.model_directory import written as written

NAN, INFINITY = float("nan"), float("inf")


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
