"""The open files of a checkpoint: its tensors by name, of which parts are read without reading the rest."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxbuf.models.loading.fields import CheckpointError, is_there, read_fields
from jaxbuf.shown import shown

FLOAT8 = "F8_E4M3"
STORED_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", FLOAT8: "float8_e4m3fn"}
INDEX = "model.safetensors.index.json"
TORCH = ("*.bin", "*.pt", "*.pth")
LISTED = 20  # names of tensors that an error gives of each kind


class Stored(Protocol):
    """A tensor in an open file. Safetensors' slices are some."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str:
        """As the file names it, see `STORED_DTYPES`."""
        ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
        """The part of a slice for each axis; of a float8 tensor, which numpy can't hold, its bytes."""
        ...


GATES = "jaxbuf"  # in the metadata of files of gates, which may lie beside the model that they were made for


class Float8Bytes:
    """The bytes of a float8 tensor, which safetensors does not give to numpy. A `Stored`."""

    def __init__(self, content: np.ndarray):
        self.content = content

    def get_shape(self) -> Sequence[int]:
        return self.content.shape

    def get_dtype(self) -> str:
        return FLOAT8

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.content[index]


@contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, Stored]]:
    """Opens every file of a checkpoint: the *.safetensors of a directory but for those of gates, or the shards that its
    index names.

    Raises:
      FileNotFoundError: There are none.
      CheckpointError: A file that cannot be read, or an index that does not fit its files.
    """
    index = directory / INDEX
    indexed = _read_index(index) if is_there(index) else {}
    files = [directory / name for name in sorted(set(indexed.values()))] or sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(_without_safetensors(directory))
    absent = [file.name for file in files if not is_there(file)]
    if absent:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(absent)}")
    tensors: dict[str, Stored] = {}
    holders: dict[str, Path] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                with file.open("rb"):  # says why a file may not be read; safetensors says that it is not there
                    opened = stack.enter_context(safe_open(file, framework="numpy"))
                if GATES in (opened.metadata() or {}):
                    continue
                found = _tensors_of(opened, file)
            except SafetensorError as error:
                raise CheckpointError(f"{file} cannot be read, it may be cut off: {error}") from error
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
            twice = sorted(tensors.keys() & found.keys())
            if twice:
                raise CheckpointError(f"{file} repeats tensors of another file: {', '.join(twice)}")
            tensors |= found
            holders |= dict.fromkeys(found, file)
        lost = sorted(set(indexed) - set(tensors))
        if lost:
            raise CheckpointError(f"{index} lists tensors that no file has: {', '.join(lost)}")
        moved = [name for name, file in indexed.items() if holders[name] != directory / file]
        if moved:
            found = ", ".join(f"{name} (in {holders[name].name}, not {indexed[name]})" for name in moved)
            raise CheckpointError(f"{index} lists tensors in files that do not hold them: {found}")
        yield tensors


def _without_safetensors(directory: Path) -> str:
    """Of a directory that has no safetensors, as those of mamba_ssm have none: what to do about it."""
    found = sorted(file.name for pattern in TORCH for file in directory.glob(pattern))
    torch = f"{', '.join(found[:LISTED])} of torch" if found else "torch's *.bin"
    file = Path(found[0] if found else "pytorch_model.bin")
    convert = (
        f"tensors = torch.load({file.name!r}, map_location='cpu', weights_only=True); safetensors.torch.save_file("
        f"{{name: tensor.clone() for name, tensor in tensors.items()}}, '{file.stem}.safetensors')"
    )
    nothing = f"{directory} has no *.safetensors and no {INDEX}"
    return f"{nothing}; {torch} cannot be read. A program with torch converts a file: {convert}"


def _tensors_of(opened: Any, file: Path) -> dict[str, Stored]:
    names = opened.keys()
    found: dict[str, Stored] = {name: opened.get_slice(name) for name in names}
    in_float8 = [name for name, stored in found.items() if stored.get_dtype() == FLOAT8]
    return found | (_map_bytes(file, in_float8) if in_float8 else {})


def _map_bytes(file: Path, names: Sequence[str]) -> dict[str, Float8Bytes]:
    """Float8 tensors of a file that safetensors opened, which has checked its header and its length.

    Source: the safetensors format: the length of the header, uint64; the header, JSON; the tensors' bytes.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    # One map for all: a process may have 65,530, and experts are more tensors than that.
    content = np.asarray(np.memmap(file, np.uint8, "r"))[8 + size :]
    return {
        name: Float8Bytes(content[slice(*header[name]["data_offsets"])].reshape(header[name]["shape"]))
        for name in names
    }


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> the file in the index's directory that holds it.

    The name decides, not where a link of that name leads: huggingface-hub's cache is made of links to its blobs.
    """
    weight_map = read_fields(path).nested("weight_map")
    files = {tensor: weight_map.text(tensor) for tensor in weight_map.values}
    if not files:
        raise weight_map.error("weight_map must name the file of each tensor, got none")
    for tensor, file in files.items():
        # Either system's way to write a path: no file of a checkpoint has a colon or a backslash in its name.
        kinds = PurePosixPath(file), PureWindowsPath(file)
        escapes = any(".." in name.parts or name.anchor for name in kinds)
        if escapes or not file.isprintable() or not file.strip("./\\ "):
            raise weight_map.error(
                f"weight_map must name files in the directory of the index, got {shown(file)} for {shown(tensor)}"
            )
    return files


def listed(problems: dict[str, list[str]]) -> str:
    """Names of tensors by what is wrong with them, in one line; empty if there are none."""
    return "; ".join(f"{problem}: {_some(names)}" for problem, names in problems.items() if names)


def _some(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
