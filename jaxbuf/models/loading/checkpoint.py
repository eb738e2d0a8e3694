"""Checkpoints in Hugging Face's format, read and written without torch: config.json and safetensors."""

import bisect
import dataclasses
import functools
import itertools
import json
import logging
import math
import numbers
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_json, family_of
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.loading.block_scaled import Block, with_scales
from jaxbuf.models.loading.fields import CheckpointError as CheckpointError
from jaxbuf.models.loading.fields import Fields, read_fields
from jaxbuf.models.loading.hub import COMPANIONS, WEIGHTS
from jaxbuf.models.loading.replacing import replacing
from jaxbuf.models.loading.sharding import (
    check_mesh,
    held_ranges,
    parameter_sharding,
    spread_shape,
    stored_order,
    stored_shape,
)
from jaxbuf.models.loading.source import Piece, Source, stored_shapes
from jaxbuf.models.loading.stored_tensors import FLOAT8, INDEX, STORED_DTYPES, Stored, listed, open_tensors
from jaxbuf.models.tensor_parallel import automatic
from jaxbuf.shown import shown

logger = logging.getLogger("jaxbuf")

DTYPES = ("float32", "bfloat16", "float16")
CONFIG = "config.json"
SINGLE = "model.safetensors"
PIECE = 1 << 24  # bytes of a tensor that are converted at a time
ALIGNMENT = 64  # XLA takes a host buffer aligned like this as an array of the CPU, without a copy

type Progress = Callable[[int, int], None]


def read_description(directory: Path) -> Fields:
    """The fields of a model's config.json.

    Raises:
      FileNotFoundError: There is none.
      CheckpointError: It cannot be read, or is not a JSON object.
    """
    try:
        return read_fields(directory / CONFIG)
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} has no {CONFIG}; expected a model in Hugging Face's format") from None


def compute_dtype(dtype: str | jnp.dtype | None) -> jnp.dtype | None:
    """Checks the name of a compute dtype; None stays None.

    Raises:
      ValueError: It is none of float32, bfloat16, float16.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except Exception:  # numpy raises several kinds, and parses texts as descriptions of records
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {shown(dtype)}")
    return found


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    block: Block | None = None,
    dtype: jnp.dtype | None = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: Progress | None = None,
) -> tuple[Decoder, ModelConfig]:
    """Reads the parameters, one at a time, each straight to where it belongs.

    Beside the parameters, the host holds the one that is on its way at most. Weights in float8 are multiplied with
    their scales on the way.

    Args:
      directory: Holds *.safetensors, or the shards that a model.safetensors.index.json names.
      config: From the directory's config.json.
      block: Rows and columns for which float8 weights have a scale, from there, too; None: no weight is in float8.
      dtype: The parameters' dtype. None: float32 on a CPU (bf16 is slower there), else that of the checkpoint's
        embedding, and bfloat16 if that is in float8.
      mesh: With an axis "tensor" or "expert", see `jaxbuf.models.tensor_parallel`; None: the default device.
      progress: Called with the bytes of the checkpoint that are done and how many there are, before the first tensor
        and after each one.

    Returns:
      The model, and the configuration as the tensors have it: a head or an MTP layer that is there counts, whatever the
      configuration says. One that is not there while the configuration asks for it is missing.

    Raises:
      FileNotFoundError: There are no safetensors.
      CheckpointError: Missing, unexpected or misshapen tensors (the first of each kind are listed), float8 weights that
        do not fit their scales, or a file that is cut off.
      ValueError: The mesh does not fit.
    """
    check_mesh(mesh)
    with open_tensors(directory) as stored:
        family = family_of(config)
        ignored = [pattern.format(layers=len(config.layers)) for pattern in family.IGNORED]
        skipped = {name for name in stored if any(fnmatch(name, pattern) for pattern in ignored)}
        if skipped:
            logger.info("skipping %d tensors (%s) in %s", len(skipped), ", ".join(ignored), directory)
        tensors = with_scales(directory, stored, block, skipped)
        config = family.as_stored(config, tensors.keys())
        if len(config.layers) > len(tensors):  # before a program is traced for so many
            layers, count = len(config.layers), len(tensors)
            raise CheckpointError(f"{directory / CONFIG} has {layers} layers, and the files there have {count} tensors")
        if mesh is not None:
            config = dataclasses.replace(config, mesh=automatic(mesh))
            _ = config.on_device  # raises an error if its heads or experts can't be shared
        abstract, sources = _abstract(config), family.tensors(config, tensors.keys())
        parameters = named_parameters(abstract)
        shapes = {path: param.get_raw_value().shape for path, param in parameters.items()}
        expected = stored_shapes(sources, shapes)
        _check(directory, tensors, expected, skipped)
        if dtype is None:
            platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
            own = tensors[sources["embed_tokens"].first].get_dtype()
            own = "bfloat16" if own == FLOAT8 else STORED_DTYPES[own]
            dtype = jnp.dtype("float32" if platform == "cpu" else own)
        sizes = {name: _stored_bytes(tensors[name]) for name in expected}
        done, total, values = 0, sum(sizes.values()), []
        if progress is not None:
            progress(0, total)
        for path, param in parameters.items():
            source = sources[path]
            wanted = jnp.dtype(jnp.float32) if param.keep_float32 else dtype
            values.append(_read(tensors, source, param, wanted, config.mesh))
            pieces = source.pieces(shapes[path])
            done += sum(sizes[piece.name] // expected[piece.name][0] * piece.size for piece in pieces)
            if progress is not None:
                progress(done, total)
    return replace_parameters(abstract, values), config


@functools.lru_cache(maxsize=4)
def _abstract(config: ModelConfig) -> Decoder:
    """The model in shapes; nobody changes it."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def save(
    model: Decoder,
    config: ModelConfig,
    directory: Path | str,
    *,
    dtype: str | jnp.dtype = jnp.bfloat16,
    shard_bytes: int = 5_000_000_000,
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Writes config.json and the parameters under Hugging Face's names, so that transformers and `load` read them.

    All of it is written beside the name and takes it at the end: a process that dies on the way leaves what was there,
    and its leftovers go with the next `save` to that name. Beside the parameters, the host holds one shard at most, and
    those that tensors of the shard share.

    Args:
      model: The parameters; the gates' A_log and dt_bias, and the biases by which experts are chosen, are written in
        float32, whatever dtype says.
      config: As `model` was built with.
      directory: Made if it is not there. Of a checkpoint that is, the configuration and all safetensors are replaced
        and other files stay.
      dtype: Of the tensors written.
      shard_bytes: A file holds at most this many bytes of tensors, or one tensor; more make several files and an index.
      companions: Name and content of the tokenizer's files, generation_config.json and chat_template.jinja. They
        replace all those of a checkpoint that is there; None: its own stay.

    Raises:
      FileExistsError: The directory holds files, but none of a checkpoint.
      NotADirectoryError: The name is that of a file.
      ValueError: An unknown dtype, shard_bytes that is no whole number of at least 1, or a directory that is no name.
    """
    chosen = compute_dtype(dtype)
    if chosen is None:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} to save in, got None")
    if not isinstance(shard_bytes, numbers.Integral) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise ValueError(f"shard_bytes must be a whole number of at least 1, got {shown(shard_bytes)}")
    name = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:  # Path("") would be the current directory
        raise ValueError(f"directory must be the name of one, got {shown(directory)}")
    directory = Path(name)
    if directory.is_dir():
        found = [entry.name for entry in directory.iterdir()]
        if found and not any(fnmatch(name, pattern) for name in found for pattern in (*WEIGHTS, *COMPANIONS)):
            raise FileExistsError(f"{directory} holds files, but none of a checkpoint ({found[0]}, ...); expected one")
    dropped = WEIGHTS if companions is None else (*WEIGHTS, *COMPANIONS)
    with replacing(directory, dropped=dropped) as new:
        sources = family_of(config).tensors(config)
        _write_shards(new, named_parameters(model), sources, chosen, shard_bytes, config.mesh)
        for name, content in (companions or {}).items():
            (new / name).write_bytes(content)
        data = config_json(config) | {"dtype": chosen.name}
        (new / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _check(
    directory: Path, tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], skipped: set[str]
) -> None:
    """Raises a CheckpointError that lists tensors that are missing, unexpected, misshapen or not of floats."""
    wrong = {
        "missing": sorted(set(expected) - set(tensors)),
        "unexpected": sorted(set(tensors) - set(expected) - skipped),
        "misshapen": [],
        "not floating point": [],
    }
    for name in sorted(expected.keys() & tensors.keys()):
        stored = tensors[name]
        if tuple(stored.get_shape()) != expected[name]:
            found = list(stored.get_shape())
            wrong["misshapen"].append(f"{name} (found {found}, expected {list(expected[name])})")
        if stored.get_dtype() not in STORED_DTYPES:
            wrong["not floating point"].append(f"{name} (found {stored.get_dtype()})")
    if message := listed(wrong):
        raise CheckpointError(f"the tensors in {directory} do not fit its config.json; {message}")


def _stored_bytes(stored: Stored) -> int:
    return math.prod(stored.get_shape()) * jnp.dtype(STORED_DTYPES[stored.get_dtype()]).itemsize


def _read(
    tensors: Mapping[str, Stored], source: Source, param: nnx.Param, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """A parameter from open files on its devices. Each device's part is read and converted on its own."""
    shape, sharding = spread_shape(param, mesh), parameter_sharding(param, mesh)
    whole = param.get_raw_value().shape
    pieces = list(source.pieces(whole))
    starts = [piece.here for piece in pieces]

    def ranges(index: slice, size: int, stored: int, parts: Any) -> list[tuple[int, int]]:
        """What of a stored axis lies on a device that has `index` of the parameter's."""
        start, stop, _ = index.indices(size)
        if parts is None or stop - start == size:
            return [(0, stored)]
        return held_ranges(parts, start // (stop - start), size // (stop - start))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        held = list(map(ranges, index or (slice(None),) * len(shape), shape, whole, param.axes))
        lengths = [sum(stop - start for start, stop in each) for each in held]
        target = _aligned(tuple(lengths), dtype)
        flat, (rows, *inner) = target.reshape(source.flat(lengths)), held
        if source.stacked:
            within = inner.pop(0)
            experts = [expert for start, stop in rows for expert in range(start, stop)]
            rows = [
                (whole[1] * expert + start, whole[1] * expert + stop) for expert in experts for start, stop in within
            ]
        blocks = list(zip(itertools.product(*inner), itertools.product(*map(_places, inner)), strict=True))
        most, place = max(1, PIECE * flat.shape[0] // max(1, flat.nbytes)), 0
        for start, stop in rows:
            while start < stop:
                name, there, here, size = pieces[bisect.bisect_right(starts, start) - 1]
                end = min(start + most, stop, here + size)
                first = slice(there + start - here, there + end - here)
                for taken, put in blocks:
                    index = (first, *([slice(0, 1)] if source.depthwise else []), *itertools.starmap(slice, taken))
                    target = flat[(slice(place, place + end - start), *itertools.starmap(slice, put))]
                    target[...] = tensors[name][index].reshape(target.shape)
                place += end - start
                start = end
        return flat.reshape(lengths)

    array = jax.device_put(part(None)) if sharding is None else jax.make_array_from_callback(shape, sharding, part)
    return array.block_until_ready()  # so that no more than one parameter is on its way


def _places(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where ranges lie once they are put one behind the other."""
    ends = list(itertools.accumulate(stop - start for start, stop in ranges))
    return list(itertools.pairwise([0, *ends]))


def _aligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _write_shards(
    directory: Path,
    parameters: Mapping[str, nnx.Param],
    sources: Mapping[str, Source],
    dtype: jnp.dtype,
    shard_bytes: int,
    mesh: jax.sharding.Mesh | None,
) -> None:
    shapes = {path: stored_shape(param) for path, param in parameters.items()}
    dtypes = {path: jnp.dtype(jnp.float32) if p.keep_float32 else dtype for path, p in parameters.items()}
    stored = stored_shapes(sources, shapes)
    pieces: dict[str, list[tuple[str, Piece]]] = {name: [] for name in stored}
    for path, shape in shapes.items():
        for piece in sources[path].pieces(shape):
            pieces[piece.name].append((path, piece))
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, shape in stored.items():
        size = math.prod(shape) * dtypes[pieces[name][0][0]].itemsize
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    weight_map, held = {}, {}

    def on_host(path: str) -> np.ndarray:
        array = stored_order(np.asarray(parameters[path][...].astype(dtypes[path])), parameters[path], mesh)
        return array.reshape(sources[path].flat(array.shape))

    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            # A parameter that several tensors share is brought once: these follow one another.
            held = {path: held[path] if path in held else on_host(path) for path, _ in pieces[name]}
            if len(pieces[name]) == 1:
                ((path, piece),) = pieces[name]
                tensor = held[path][piece.here : piece.here + piece.size]
            else:
                tensor = np.empty((stored[name][0], *held[pieces[name][0][0]].shape[1:]), dtypes[pieces[name][0][0]])
                for path, piece in pieces[name]:
                    tensor[piece.there : piece.there + piece.size] = held[path][piece.here : piece.here + piece.size]
            tensors[name] = np.ascontiguousarray(tensor.reshape(stored[name]))
        # transformers refuses files that do not say how they were laid out
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # safetensors lets nobody else read it
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
