"""A directory with every file that a checkpoint may have, tiny, and ways to change its files."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest

from jaxbuf.models.families.qwen3_5 import Config
from jaxbuf.models.language_model import load
from jaxbuf.models.loading.checkpoint import CheckpointError, save
from tests.serving.conftest import byte_tokenizer
from tests.tiny import random_model

VOCAB, EOS = 264, 256  # embeddings are padded past the tokenizer's 257 ids
INDEX = "model.safetensors.index.json"
CONFIG = Config(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=("linear_attention", "full_attention"),
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_ids=(EOS,),
).model()
GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "eos_token_id": [EOS, 0],
}
TOKENIZER_CONFIG = {
    "eos_token": "<|endoftext|>",
    "pad_token": {"content": "<|endoftext|>", "lstrip": False},
    "chat_template": [
        {"name": "default", "template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"},
        {"name": "tool_use", "template": "tools"},
    ],
}


def write_model(directory: Path) -> Path:
    """Writes a random model in several shards, with a tokenizer, a chat template and sampling settings."""
    save(random_model(CONFIG, seed=5), CONFIG, directory, dtype="float32", shard_bytes=5000)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    put(directory, "generation_config.json", GENERATION)
    put(directory, "tokenizer_config.json", TOKENIZER_CONFIG)
    return directory


def put(directory: Path, name: str, data: object) -> None:
    (directory / name).write_text(json.dumps(data))


def change(directory: Path, name: str, **fields: object) -> None:
    """Gives fields of a JSON file other values; "a__b" is b within a."""
    data = json.loads((directory / name).read_text())
    for field, value in fields.items():
        *outer, last = field.split("__")
        place = data
        for key in outer:
            place = place[key]
        place[last] = value
    put(directory, name, data)


def nest(flat: dict) -> dict:
    """A flat configuration as a vision-language model has it."""
    text = copy.deepcopy(flat)
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "vision_config": {"depth": 1, "hidden_size": 16, "rope_parameters": {"rope_type": "axial"}},
    }


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
