"""Drawn changes to the files of a valid model: each loads a usable one, or raises a documented error that names the
file, and no file outside the directory is opened."""

import copy
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import jaxbuf
from jaxbuf.models.families import config_from_dict, config_json
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError
from jaxbuf.planning.model_sizes import find_sizes
from tests.models.model_directory import CONFIG, INDEX, nest, write_model

OUTSIDE = "outside.safetensors"  # a whole shard beside the directory, for names that lead out of it
DOCUMENTED = (CheckpointError, FileNotFoundError, ValueError)
ODD = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 0.0, -0.0, 0.5, 1.5, 64.0, 1e-6, 1e-46, 1e39, 1e308),
    *(float("nan"), float("inf"), float("-inf"), 2**31 - 1, 2**31, 2**32, 2**63, 10**12, 10**30),
    *("", "x", "64", "\0", "\ud800", "é" * 300, "x" * 5000, "full_attention", "default", "(["),
    *(".", "..", f"../{OUTSIDE}", f"sub/../../{OUTSIDE}", "/etc/hostname", "config.json", "qwen3_5", "qwen3_5_text"),
    *([], {}, [1], ["x"], [[1]], [None], {"a": 1}, {"content": 5}, {"type": "default"}, {"Regex": "(["}),
]
CONTENTS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"NaN",
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b"{" * 50_000,
    b'{"a": ' + b"[" * 50_000,
]

watched: list[str] | None = None  # what is opened while a model is loaded


def watch(event, arguments):
    if event == "open" and watched is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        watched.append(os.path.abspath(os.fsdecode(arguments[0])))


@pytest.fixture(scope="module", autouse=True)
def watching():
    sys.addaudithook(watch)  # for good; it does nothing outside the tests of this module


@pytest.fixture
def directory(tmp_path):
    directory = write_model(tmp_path / "model")
    shutil.copy(sorted(directory.glob("*.safetensors"))[0], tmp_path / OUTSIDE)
    return directory


def draw_place(rng, data):
    """A container of the JSON tree and a key of it; deep ones are as likely as flat ones with many keys."""
    while True:
        keys = list(data) if isinstance(data, dict) else range(len(data))
        key = keys[rng.integers(len(keys))]
        inner = data[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            return data, key
        data = inner


def change_tree(rng, data):
    """One change somewhere in a JSON tree."""
    place, key = draw_place(rng, data)
    value = place[key]
    match rng.integers(9):
        case 0:
            del place[key]
        case 1:
            other, another = draw_place(rng, data)
            place[key], other[another] = copy.deepcopy(other[another]), copy.deepcopy(value)
        case 2:
            place[key] = [value]
        case 3:
            place[key] = {"content": value}
        case 4:
            for _ in range(int(rng.choice([3, 60, 200]))):
                value = [value] if rng.random() < 0.5 else {"a": value}
            place[key] = value
        case 5 if isinstance(value, int | float):
            place[key] = [-value, value + 1, value * 2, value / 3, str(value), value * 10**9][rng.integers(6)]
        case 5 if isinstance(place, dict):
            place[f"{key}_"] = place.pop(key)
        case _:
            place[key] = copy.deepcopy(ODD[rng.integers(len(ODD))])
    return data


def change_content(rng, content):
    """One change of a file's bytes."""
    at = int(rng.integers(len(content)))
    first = bytes([rng.integers(256)])
    return [
        content[:at],
        content[:at] + first + content[at + 1 :],
        content[:at] + first + content[at:],
        content[at:] + content[:at],
        b"\xef\xbb\xbf" + content,
        content[: len(content) - 1] + b', "model_type": "qwen3_5_text", "model_type": 5}',
        CONTENTS[rng.integers(len(CONTENTS))],
    ][rng.integers(7)]


def draw_files(rng, valid):
    """A file's name and what it holds instead; now and then it is no file."""
    name = str(rng.choice(list(valid), p=[0.35, 0.15, 0.2, 0.15, 0.15]))
    content = valid[name]
    if name == "config.json" and rng.random() < 0.5:
        content = json.dumps(nest(json.loads(content))).encode()
    if rng.random() < 0.2:
        return name, change_content(rng, content)
    if rng.random() < 0.03:
        return name, str(rng.choice(["absent", "folder", "link", "circle"]))
    data = json.loads(content)
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        data = change_tree(rng, data) if data else data
    return name, json.dumps(data).encode()


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content != "absent":
        path.symlink_to({"link": "nowhere", "circle": path.name}[content])


def remove(path):
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def check_usable(lm, directory, forward):
    """What a user does first either works or raises a documented error that names the file."""
    assert config_from_dict(json.loads(json.dumps(config_json(lm.config)))) == lm.config
    assert all(isinstance(token, int) and 0 <= token < lm.vocab_size for token in lm.stop_ids)
    assert lm.known_ids.shape == (lm.vocab_size,)
    attempts = {
        "config.json": lambda: find_sizes(directory),
        "generation_config.json": lambda: jaxbuf.SamplingParams(**lm.sampling_defaults),
        "tokenizer.json": lambda: lm.decode([*check_ids(lm, lm.encode("hé <|endoftext|>")), 0]),
        "tokenizer_config.json": lambda: lm.chat([{"role": "user", "content": "Hi"}]),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except DOCUMENTED as error:
            nothing = "has no tokenizer.json" in str(error) or "has no chat template" in str(error)
            assert nothing or str(directory / name) in str(error), error
    if forward:
        length = min(5, lm.max_length)
        assert lm.logits(np.zeros((1, length), np.int32)).shape == (1, length, lm.vocab_size)


def check_ids(lm, ids):
    assert all(0 <= token < lm.vocab_size for token in ids)
    return ids


SYSTEM = ("/proc", "/sys", "/dev", sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())


def is_foreign(path, directory):
    homes = (*SYSTEM, str(directory), str(Path(jaxbuf.__file__).parent))
    return not path.startswith(tuple(f"{home}/" for home in homes))


def fuzz(rng, directory, draws):
    """Counts of the models that were loaded and of those that were refused."""
    global watched
    valid = {
        name: (directory / name).read_bytes()
        for name in ("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json")
    }
    loaded, refused, compiled = 0, 0, {CONFIG}
    for draw in range(draws):
        name, content = draw_files(rng, valid)
        remove(directory / name)
        write(directory / name, content)
        watched = []
        try:
            lm = load(directory)
        except DOCUMENTED as error:
            lm = None
            assert str(directory) in str(error), (draw, name, content, error)
            assert len(str(error)) < 20_000, (draw, name, content)
        except BaseException as error:
            raise AssertionError((draw, name, content[:2000])) from error
        finally:
            opened, watched = watched, None
        assert [path for path in opened if is_foreign(path, directory)] == [], (draw, name, content)
        assert str(directory / "config.json") in opened or lm is None  # so that what is watched is what is opened
        if lm is None:
            refused += 1
        else:
            loaded += 1
            known = len(compiled)
            if known < 4:
                compiled.add(lm.config)
            try:
                check_usable(lm, directory, forward=lm.config in compiled and (len(compiled) > known or loaded < 20))
            except BaseException as error:
                raise AssertionError((draw, name, content[:2000])) from error
        remove(directory / name)
        (directory / name).write_bytes(valid[name])
    return loaded, refused


def test_a_changed_file_loads_a_usable_model_or_is_an_error_that_names_it(rng, directory):
    loaded, refused = fuzz(rng, directory, 150)
    assert loaded > 10 and refused > 40


@pytest.mark.exhaustive
def test_two_thousand_changed_files_load_a_usable_model_or_are_an_error(rng, directory):
    loaded, refused = fuzz(rng, directory, 2000)
    assert loaded > 300 and refused > 700
