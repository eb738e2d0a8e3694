"""Arguments of `load`, `plan` and `save` that are no model, dtype, mesh or directory."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxbuf
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.planning.model_sizes import find_sizes
from tests.models.model_directory import CONFIG, change
from tests.models.model_directory import directory as directory  # a fresh copy of the tiny model; a fixture
from tests.models.model_directory import written as written


@pytest.mark.parametrize("find", [load, find_sizes, partial(jaxbuf.plan, memory_bytes=10**9)])
@pytest.mark.parametrize("source", ["", None, 5, True, b"demo", ["demo"], {}, 1.5])
def test_what_is_no_name_of_a_model(find, source, directory, monkeypatch):
    monkeypatch.chdir(directory)  # whose name is not ""
    with pytest.raises(ValueError, match=r'a model must be "demo", a directory .* or "org/name@revision", got '):
        find(source)


@pytest.mark.parametrize("find", [load, find_sizes])
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
        find_sizes(directory)


def test_a_flat_configuration_may_have_a_text_configuration_that_nobody_reads(directory):
    change(directory, "config.json", text_config=[1], torch_dtype="float16", dtype=None)
    assert find_sizes(directory).dtype == "float16" and load(directory).config == CONFIG


def test_shapes_name_what_is_wrong_in_a_configuration(directory):
    change(directory, "config.json", hidden_size="x")
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size must be"):
        find_sizes(directory)


@pytest.mark.parametrize("dtype", [object(), {}, [1], "f4,f4", "((((", True, np.float64, b"\xff", "\ud800"])
def test_odd_dtypes(directory, dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16 or None, got"):
        load(directory, dtype=dtype)


def test_odd_meshes(directory):
    for mesh in (5, "tensor", jax.devices(), jax.sharding.AbstractMesh((1,), ("tensor",))):
        with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh or None, got "):
            load(directory, mesh=mesh)
    for mesh in (jax.make_mesh((1,), ("data",)), jax.sharding.Mesh(np.array([], object).reshape(0), ("data",))):
        with pytest.raises(ValueError, match='mesh must have an axis "tensor" or "expert", got'):
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
