"""The reader of a checkpoint's values: what is read is what the file says, and an error says where and what."""

import json

import numpy as np
import pytest

from jaxbuf.models.loading.fields import CheckpointError, Fields, is_there, read_fields
from jaxbuf.shown import shown

DATA = {
    "size": 64,
    "share": 0.25,
    "whole": 3,
    "flag": False,
    "text": "",
    "names": ["a", "b"],
    "nothing": None,
    "end": [3, 0],
    "inner": {"deep": {"size": "64"}},
    "rows": [{"name": "a"}, {"name": 5}],
}


@pytest.fixture
def fields(tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(DATA))
    return read_fields(tmp_path / "file.json")


def test_values_are_read_as_they_are(fields):
    assert (fields.size("size"), fields.number("share"), fields.number("whole")) == (64, 0.25, 3.0)
    assert isinstance(fields.number("whole"), float)
    assert (fields.flag("flag"), fields.text("text"), fields.texts("names")) == (False, "", ("a", "b"))
    assert fields.numbers("end", (1.0, 2.0)) == (3.0, 0.0) and fields.numbers("absent", (1.0, 2.0)) == (1.0, 2.0)
    assert fields.token_ids("end", vocab_size=4) == (3, 0) and fields.token_ids("size", vocab_size=65) == (64,)
    assert fields.token_ids("nothing", vocab_size=4) == fields.token_ids("absent", vocab_size=4) == ()
    assert fields.items("rows")[0].text("name") == "a" and fields.serve("whole", 2, 3) == 3
    assert Fields({"n": np.int32(5), "x": np.float32(0.5)}).size("n") == 5


def test_a_default_is_of_what_is_absent_and_not_of_what_is_null(fields):
    assert (fields.size("absent", 4), fields.number("absent", 1e-6, above=0), fields.flag("absent", True)) == (
        4,
        1e-6,
        True,
    )
    assert fields.text("absent", "x") == "x" and fields.serve("absent", "a", default="a") == "a"
    assert not fields.has("nothing") and not fields.has("absent") and fields.has("flag")
    for read in (fields.size, fields.number, fields.flag, fields.text):
        with pytest.raises(CheckpointError, match=r"file\.json: nothing must be .*, got None"):
            read("nothing", 1)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.size("share"), r"share must be a whole number in \[1, 2147483647\], got 0\.25"),
        (lambda f: f.size("flag"), "flag must be a whole number .*, got False"),
        (lambda f: f.integer("size", most=8), "size must be a whole number of at most 8, got 64"),
        (lambda f: f.integer("size", least=65), "size must be a whole number of at least 65, got 64"),
        (lambda f: f.integer("names"), r"names must be a whole number, got \['a', 'b'\]"),
        (lambda f: f.number("flag"), "flag must be a finite number, got False"),
        (lambda f: f.number("share", above=0.25), r"share must be a finite number above 0\.25, got 0\.25"),
        (lambda f: f.number("size", above=0, most=1), "size must be a finite number above 0 and at most 1, got 64"),
        (lambda f: f.numbers("end", (0.0,)), r"end must be a list of 1 finite numbers, got \[3, 0\]"),
        (lambda f: f.numbers("names", (0.0, 0.0)), "names must be a list of 2 finite numbers, got"),
        (lambda f: f.flag("whole"), "whole must be true or false, got 3"),
        (lambda f: f.text("names"), "names must be a text, got"),
        (lambda f: f.texts("text"), "text must be a list of texts, got ''"),
        (
            lambda f: f.token_ids("end", vocab_size=3),
            r"end must be a token id in \[0, 3\) or .*, got \[3, 0\]",
        ),
        (lambda f: f.nested("names"), "names must be an object, got"),
        (lambda f: f.nested("inner").nested("deep").size("size"), r"inner\.deep\.size must be .*, got '64'"),
        (lambda f: f.items("names"), "names must be a list of objects, got"),
        (lambda f: f.items("rows")[1].text("name"), r"rows\[1\]\.name must be a text, got 5"),
    ],
)
def test_an_error_names_the_file_and_the_field(fields, read, message):
    with pytest.raises(CheckpointError, match=rf"file\.json: {message}"):
        read(fields)
    with pytest.raises(ValueError, match=f"^{message}"):  # where no file is known
        read(Fields(DATA))


def test_all_that_is_absent_is_named_at_once(fields):
    fields.require("size", ("absent", "names"))
    with pytest.raises(CheckpointError, match=r"file\.json lacks a, b or c$"):
        fields.require("size", "a", ("b", "c"))
    with pytest.raises(ValueError, match=r"the configuration lacks inner\.a$"):
        Fields(DATA["inner"], path="inner.").size("a")


def test_what_is_not_served_is_no_fault_of_the_file(fields):
    with pytest.raises(ValueError, match=r"file\.json: flag must be True \(as everywhere\), got False"):
        fields.serve("flag", True, words=" (as everywhere)")
    with pytest.raises(ValueError, match=r"flag must be one of \(0, 1\), got False"):
        fields.serve("flag", 0, 1)


def test_what_is_shown_is_short():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    values = [deep, ["x" * 1000] * 1000, "x" * 10**6, 10**4000, 10**9000, {i: i for i in range(1000)}]
    assert all(len(shown(value)) < 700 for value in values)
    assert shown("x") == "'x'" and shown("\ud800").isascii()


def test_a_file_that_is_absent_is_no_error(tmp_path):
    assert not is_there(tmp_path / "absent") and not is_there(tmp_path / "absent" / "below")
    (tmp_path / "file").touch()
    assert is_there(tmp_path / "file") and not is_there(tmp_path / "file" / "below")
