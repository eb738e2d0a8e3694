"""Qwen3.5 checkpoints in Hugging Face's format, read and written without torch: config.json and safetensors."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.qwen3_5 import Qwen3_5
from jaxbuf.models.qwen3_5_config import Config
from jaxbuf.models.sharding import parameter_sharding

logger = logging.getLogger("jaxbuf")

DTYPES = ("float32", "bfloat16", "float16")
STORED_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
IGNORED = "model.visual."


class CheckpointError(Exception):
    """A checkpoint does not fit its configuration, or a file of it cannot be read. The message names what."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      FileNotFoundError: There is no such file.
      CheckpointError: The file is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def compute_dtype(dtype: str | jnp.dtype | None) -> jnp.dtype | None:
    """Checks the name of a compute dtype; None stays None.

    Raises:
      ValueError: It is none of float32, bfloat16, float16.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")
    return found


def load_model(
    directory: Path, config: Config, *, dtype: jnp.dtype | None = None, mesh: jax.sharding.Mesh | None = None
) -> tuple[Qwen3_5, Config]:
    """Reads the parameters, one tensor at a time, each straight to where it belongs.

    Args:
      directory: Holds *.safetensors, or the shards that a model.safetensors.index.json names.
      config: From the directory's config.json.
      dtype: The parameters' dtype. None: float32 on a CPU (bf16 is slower there), else the checkpoint's own.
      mesh: With an axis "tensor", see `parameter_sharding`; None: the default device.

    Returns:
      The model, and the configuration as the tensors have it: a head or an MTP layer that is there counts, whatever the
      configuration says. One that is not there while the configuration asks for it is missing.

    Raises:
      FileNotFoundError: There are no safetensors.
      CheckpointError: Missing, unexpected or misshapen tensors (all are listed), or a file that is cut off.
      ValueError: The mesh does not fit.
    """
    with _open_tensors(directory) as tensors:
        config = _what_tensors_say(config, tensors)
        prefix = "model.language_model." if any(n.startswith("model.language_model.") for n in tensors) else "model."
        abstract = jax.eval_shape(lambda: Qwen3_5(config, rngs=nnx.Rngs(0)))
        parameters = {tensor_name(path, prefix): param for path, param in named_parameters(abstract).items()}
        _check(
            directory, tensors, {name: _stored_shape(name, p.get_raw_value().shape) for name, p in parameters.items()}
        )
        if dtype is None:
            platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
            embedding = tensors[prefix + "embed_tokens.weight"].get_slice(prefix + "embed_tokens.weight")
            dtype = jnp.dtype(jnp.float32 if platform == "cpu" else STORED_DTYPES[embedding.get_dtype()])
        values = []
        for name, param in parameters.items():
            array = tensors[name].get_tensor(name).reshape(param.get_raw_value().shape)
            array = array.astype(jnp.float32 if param.keep_float32 else dtype)
            values.append(jax.device_put(array, parameter_sharding(param, config, mesh)))
    return replace_parameters(abstract, values), config


def save(
    model: Qwen3_5,
    config: Config,
    directory: Path | str,
    *,
    dtype: jnp.dtype = jnp.bfloat16,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and the parameters under Hugging Face's names, so that transformers and `load` read them.

    Args:
      model: The parameters; the gates' A_log and dt_bias are written in float32, whatever dtype says.
      config: As `model` was built with.
      directory: Made if it is not there.
      dtype: Of the tensors written.
      shard_bytes: A file holds at most this many bytes of tensors; more make several files and an index.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    sizes = [0]
    for path, param in named_parameters(model).items():
        name = tensor_name(path, "model.")
        array = np.asarray(param[...].astype(jnp.float32 if param.keep_float32 else dtype))
        array = np.ascontiguousarray(array.reshape(_stored_shape(name, array.shape)))
        if shards[-1] and sizes[-1] + array.nbytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = array
        sizes[-1] += array.nbytes
    _write_shards(directory, shards, sum(sizes))
    data = config.to_dict() | {"dtype": jnp.dtype(dtype).name}
    (directory / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def tensor_name(path: str, prefix: str) -> str:
    """A parameter's name in a checkpoint, from its dotted path in the module; `prefix` goes before the main model's."""
    suffix = "" if path.endswith(("A_log", "dt_bias")) else ".weight"
    return f"{'' if path.startswith(('mtp.', 'lm_head')) else prefix}{path}{suffix}"


def _stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Depthwise convolutions are stored as [channels, 1, width]."""
    return (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") else tuple(shape)


def _what_tensors_say(config: Config, names: Mapping[str, Any]) -> Config:
    return dataclasses.replace(
        config,
        tie_word_embeddings=config.tie_word_embeddings and "lm_head.weight" not in names,
        mtp_num_hidden_layers=1 if any(name.startswith("mtp.") for name in names) else config.mtp_num_hidden_layers,
    )


@contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """Opens every file of a checkpoint: tensor name -> the open file that holds it."""
    indexed: dict[str, str] = {}
    if (directory / INDEX).exists():
        indexed = read_json(directory / INDEX).get("weight_map", {})
        files = [directory / file for file in sorted(set(indexed.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors and no {INDEX}")
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{directory / INDEX} names files that are not there: {', '.join(absent)}")
    tensors: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="numpy"))
            except SafetensorError as error:
                raise CheckpointError(f"{file} cannot be read, it may be cut off: {error}") from error
            twice = sorted(tensors.keys() & set(opened.keys()))
            if twice:
                raise CheckpointError(f"{file} repeats tensors of another file: {', '.join(twice)}")
            tensors |= dict.fromkeys(opened.keys(), opened)
        lost = sorted(set(indexed) - set(tensors))
        if lost:
            raise CheckpointError(f"{directory / INDEX} lists tensors that no file has: {', '.join(lost)}")
        yield tensors


def _check(directory: Path, tensors: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a CheckpointError that lists every tensor that is missing, unexpected, misshapen or not of floats."""
    skipped = [name for name in tensors if name.startswith(IGNORED)]
    if skipped:
        logger.info("skipping %d tensors of the vision tower (%s*) in %s", len(skipped), IGNORED, directory)
    wrong = {
        "missing": sorted(set(expected) - set(tensors)),
        "unexpected": sorted(set(tensors) - set(expected) - set(skipped)),
        "misshapen": [],
        "not floating point": [],
    }
    for name in sorted(expected.keys() & tensors.keys()):
        stored = tensors[name].get_slice(name)
        if tuple(stored.get_shape()) != expected[name]:
            found = list(stored.get_shape())
            wrong["misshapen"].append(f"{name} (found {found}, expected {list(expected[name])})")
        if stored.get_dtype() not in STORED_DTYPES:
            wrong["not floating point"].append(f"{name} (found {stored.get_dtype()})")
    found = [f"{problem}: {', '.join(names)}" for problem, names in wrong.items() if names]
    if found:
        raise CheckpointError(f"the tensors in {directory} do not fit its config.json; " + "; ".join(found))


def _write_shards(directory: Path, shards: list[dict[str, np.ndarray]], total: int) -> None:
    for old in (directory / INDEX, *directory.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    metadata = {"format": "pt"}  # transformers refuses files that do not say how they were laid out
    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE, metadata=metadata)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
