"""Models by their Hugging Face id, from a prepared cache, without a network; whatever is in the way is one error."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import chex
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from jaxbuf.models.language_model import load
from jaxbuf.models.loading.hub import download, parse_id

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests/fixtures/tied/checkpoint"
COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "fedcba9876543210" * 2 + "fedcba98"


def put_in_cache(cache, repository, commit, revision, generation_config):
    """Lays a model out as huggingface-hub does: blobs, links to them in a snapshot, and a name for the commit."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    contents = {file.name: file.read_bytes() for file in CHECKPOINT.iterdir()}
    contents["generation_config.json"] = json.dumps(generation_config).encode()
    for name, content in contents.items():
        blob = folder / "blobs" / f"{commit[:8]}-{name}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache that huggingface-hub looks into, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    "source, parsed",
    [
        ("Qwen/Qwen3.5-0.8B", ("Qwen/Qwen3.5-0.8B", None)),
        ("org/name@v1.0", ("org/name", "v1.0")),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3")),
        ("name", None),
        ("./org/name", None),
        ("../name", None),
        ("~/name", None),
        ("/org/name", None),
        ("org/name/", None),
        ("org/name/more", None),
        ("org/name@", None),
        ("org/na me", None),
        ("", None),
    ],
)
def test_what_is_an_id(source, parsed):
    assert parse_id(source) == parsed


def test_weights_that_are_there_twice_are_taken_once(monkeypatch):
    """As in Mistral's repositories, which have them in transformers' layout and in their own."""
    files = ["config.json", "consolidated.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"]
    files += ["model.safetensors.index.json", "tokenizer.json", "README.md"]

    def snapshot(repository, *, revision, allow_patterns, ignore_patterns):
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return "/" + " ".join(kept)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    kept = "config.json model-00001-of-00002.safetensors model.safetensors.index.json tokenizer.json"
    assert str(download("org/name")) == "/" + kept


def test_an_id_in_the_cache_is_its_directory(cache):
    snapshot = put_in_cache(cache, "org/name", COMMIT, "main", {"top_k": 7})
    lm, expected = load("org/name"), load(CHECKPOINT)
    assert lm.name == "org/name" and lm.directory == snapshot and lm.generation_config == {"top_k": 7}
    assert lm.config == expected.config
    chex.assert_trees_all_equal(lm.model, expected.model)


def test_a_revision_is_a_branch_or_a_commit(cache):
    put_in_cache(cache, "org/name", COMMIT, "main", {"top_k": 1})
    put_in_cache(cache, "org/name", OTHER, "v2", {"top_k": 2})
    found = {
        source: load(source).generation_config["top_k"]
        for source in ("org/name", "org/name@main", "org/name@v2", f"org/name@{COMMIT}", f"org/name@{OTHER}")
    }
    assert list(found.values()) == [1, 1, 2, 1, 2]
    assert load("org/name@v2").name == "org/name@v2"


@pytest.mark.slow
def test_the_environment_says_where_the_cache_is(tmp_path):
    put_in_cache(tmp_path / "home" / "hub", "org/name", COMMIT, "main", {"top_k": 9})
    code = "import jaxbuf; print(jaxbuf.load('org/name').generation_config)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "{'top_k': 9}", done.stderr


def test_a_directory_comes_before_an_id(cache, tmp_path):
    put_in_cache(cache, "org/name", COMMIT, "main", {"top_k": 1})
    shutil.copytree(CHECKPOINT, tmp_path / "org" / "name")
    lm = load("org/name")
    assert lm.directory == tmp_path / "org" / "name" and lm.name == "name" and lm.generation_config == {}
    (tmp_path / "org" / "name" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"name has no config\.json"):
        load("org/name")


def test_what_is_saved_from_the_cache_is_files_of_its_own(cache, tmp_path):
    put_in_cache(cache, "org/name", COMMIT, "main", {"top_k": 7})
    load("org/name").save(tmp_path / "copy")
    shutil.rmtree(cache)
    assert load(tmp_path / "copy").generation_config == {"top_k": 7}


@pytest.mark.parametrize("source", ["org/absent", "org/name@absent"])
def test_offline_and_not_in_the_cache(cache, source):
    put_in_cache(cache, "org/name", COMMIT, "main", {})
    expected = (
        f"no model '{source}': no such directory, and not to be had from Hugging Face: it is not complete in the cache "
        f'{cache}, and HF_HUB_OFFLINE is set; expected "demo", a directory with a config.json, or a Hugging Face id '
        '"org/name" or "org/name@revision"'
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(expected)}$"):
        load(source)


def test_in_the_cache_without_its_weights(cache):
    snapshot = put_in_cache(cache, "org/name", COMMIT, "main", {})
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        load("org/name")


@pytest.mark.parametrize("source", [Path("org/name"), "name", "./org/name", "org/name/more"])
def test_what_is_no_id_is_never_looked_for(cache, source):
    put_in_cache(cache, "org/name", COMMIT, "main", {})
    with pytest.raises(FileNotFoundError, match=r'^no model .*: expected "demo", a directory with a config') as error:
        load(source)
    assert "had from" not in str(error.value) and repr(str(source)) in str(error.value)


def test_an_id_that_cannot_be_one(cache):
    with pytest.raises(FileNotFoundError, match=r"no model 'org/a--b': .* Cannot have -- or \.\. in repo_id.*expected"):
        load("org/a--b")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as Hugging Face does for models that one can't have."""

    ANSWERS = {  # noqa: RUF012
        "gated": (403, "GatedRepo"),
        "absent": (404, "RepoNotFound"),
        "old": (404, "RevisionNotFound"),
        "secret": (401, ""),
        "broken": (500, ""),
    }

    def do_GET(self):
        status, code = self.ANSWERS[self.path.split("/")[4]]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(cache, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "source, reason",
    [
        ("org/gated", "it is gated: accept its terms on its page, and set HF_TOKEN"),
        ("org/absent", "there is no such model, or it is private and HF_TOKEN may not read it"),
        ("org/old@v3", "the model is there, but has no revision 'v3'"),
        ("org/secret", "the Hub answered: .*401"),
        ("org/broken", "it is not complete in the cache .*, and the Hub is out of reach \\(.*500"),
    ],
)
def test_no_access(hub, source, reason):
    with pytest.raises(
        FileNotFoundError, match=f"^no model '{source}': .*: {reason}.*; expected \"demo\", a directory"
    ):
        load(source)


def test_the_cache_serves_when_the_hub_does_not(hub, cache):
    put_in_cache(cache, "org/broken", COMMIT, "main", {"top_k": 4})
    assert load("org/broken").generation_config == {"top_k": 4}
