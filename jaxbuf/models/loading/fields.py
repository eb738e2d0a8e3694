"""Reading a checkpoint's files: each value is checked as it is read, and an error names the file and the field.

`read_fields` parses a JSON file. A family's configuration is then a list of reads of the `Fields` it returns:

    fields = read_fields(directory / "config.json")
    fields.require("hidden_size", "num_hidden_layers")
    Config(hidden_size=fields.size("hidden_size"), rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0))

A field that is absent takes the default of its read. One that is null is not absent: it has the wrong type, unless
`has` was asked first. JSON's true is no number, and 64.0 is no whole number.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxbuf.shown import shown

SIZE = 2**31 - 1  # the most of one dimension: XLA's indices are int32
REQUIRED: Any = object()

# So that nothing overflows when a program is made for sizes that nobody means.
MOST_LAYERS, MOST_ROWS, MOST_ELEMENTS = 1024, 2**28, 2**40


class CheckpointError(Exception):
    """A checkpoint does not fit its configuration, or a file of it cannot be read. The message names what."""


def check_arrays(values: Mapping[str, Any], arrays: Iterable[tuple[str, ...]]) -> None:
    """Raises a ValueError for arrays that nobody could hold.

    Args:
      values: Of the fields, all of them sizes.
      arrays: For each array the fields that are multiplied to its first dimension, and last that of its last one.
    """
    for names in arrays:
        sizes = [values[name] for name in names]
        if math.prod(sizes[:-1]) > MOST_ROWS or math.prod(sizes) > MOST_ELEMENTS:
            product = " times ".join(f"{name} ({size})" for name, size in zip(names, sizes, strict=True))
            raise ValueError(f"{product} must be at most 2**40 elements in at most 2**28 rows")


def is_there(path: Path) -> bool:
    """Whether a checkpoint has this file.

    Raises:
      CheckpointError: Something other than a file has the name, or a link that leads to none; or nobody may look.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is a link to a file that is not there ({os.readlink(path)})") from None
    except OSError as error:  # also links in a circle
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    if not stat.S_ISREG(mode):  # a pipe would be waited for
        raise CheckpointError(f"{path} must be a file, got {'a directory' if stat.S_ISDIR(mode) else 'a special file'}")
    return True


def read_text(path: Path) -> str:
    """Reads a file of a checkpoint as UTF-8.

    Raises:
      FileNotFoundError: There is no such file.
      CheckpointError: It is no file, it may not be read, or it is not valid UTF-8.
    """
    if not is_there(path):
        raise FileNotFoundError(f"{path} is not there")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid UTF-8: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. NaN and Infinity are taken, for released configurations have them.

    Raises:
      FileNotFoundError: There is no such file.
      CheckpointError: The file cannot be read, or it is not a JSON object whose keys all differ.
    """
    text = read_text(path)
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise CheckpointError(f"{path} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError is one, and so is Python's error about thousands of digits
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def read_fields(path: Path) -> "Fields":
    """As `read_json`, for reading field by field."""
    return Fields(read_json(path), path)


class Fields:
    """A JSON object whose values are checked as they are read.

    Every read raises an error that names file, field, what came and what is expected: a CheckpointError, or a
    ValueError where no file is known.
    """

    def __init__(self, values: Mapping[str, Any], file: Path | None = None, path: str = ""):
        """`path` stands before the names of the fields: where in the file the object is, with a dot at its end."""
        self.values = values
        self.file = file
        self.path = path

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def require(self, *names: str | tuple[str, ...]) -> None:
        """Raises an error that names all fields that are absent. Of a tuple of names, one is enough."""
        groups = [(name,) if isinstance(name, str) else name for name in names]
        absent = [group for group in groups if not any(name in self.values for name in group)]
        if absent:
            named = ", ".join(" or ".join(self.path + name for name in group) for group in absent)
            raise self._error(f"{self.file or 'the configuration'} lacks {named}")

    def integer(self, name: str, default: int = REQUIRED, *, least: int | None = None, most: int | None = None) -> int:
        """A whole number between the bounds, both included."""
        value = self._value(name, default)
        fits = _is_integer(value) and (least is None or value >= least) and (most is None or value <= most)
        return value if fits else self.fail(name, f"a whole number{_range(least, most)}")

    def size(self, name: str, default: int = REQUIRED) -> int:
        """A dimension of an array, or how many there are of something: a whole number from 1 to 2**31 - 1."""
        return self.integer(name, default, least=1, most=SIZE)

    def number(
        self,
        name: str,
        default: float = REQUIRED,
        *,
        above: float | None = None,
        least: float | None = None,
        most: float | None = None,
    ) -> float:
        """A finite number within the bounds, once it is rounded to float32, which is what programs compute with."""
        value = self._value(name, default)
        rounded = _float32(value) if _is_integer(value) or isinstance(value, float | np.floating) else math.nan
        fits = math.isfinite(rounded) and (above is None or rounded > above)
        if fits and (least is None or rounded >= least) and (most is None or rounded <= most):
            return float(value)
        self.fail(name, f"a finite number{_range(least, most, above)}")

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of finite numbers, as many as its default has."""
        value = self._value(name, default)
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        numbers = [each for each in value if _is_integer(each) or isinstance(each, float)] if fits else []
        if not fits or len(numbers) < len(value) or not all(math.isfinite(_float32(each)) for each in numbers):
            self.fail(name, f"a list of {len(default)} finite numbers")
        return tuple(float(each) for each in value)

    def integers(self, name: str, default: tuple[int, ...], *, most: int) -> tuple[int, ...]:
        """A list of whole numbers from 0 to `most`."""
        value = self._value(name, default)
        fits = isinstance(value, list | tuple) and all(_is_integer(each) and 0 <= each <= most for each in value)
        return tuple(value) if fits else self.fail(name, f"a list of whole numbers in [0, {most}]")

    def flag(self, name: str, default: bool = REQUIRED) -> bool:
        """true or false."""
        value = self._value(name, default)
        return value if isinstance(value, bool) else self.fail(name, "true or false")

    def text(self, name: str, default: str = REQUIRED) -> str:
        """A text, which may be empty."""
        value = self._value(name, default)
        return value if isinstance(value, str) else self.fail(name, "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self._value(name, REQUIRED)
        fits = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        return tuple(value) if fits else self.fail(name, "a list of texts")

    def token_ids(self, name: str, *, vocab_size: int) -> tuple[int, ...]:
        """Token ids that may be one number, a list of numbers, or null or absent."""
        value = self.values.get(name)
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(_is_integer(each) and 0 <= each < vocab_size for each in ids):
            self.fail(name, f"a token id in [0, {vocab_size}) or a list of them")
        return tuple(ids)

    def nested(self, name: str) -> "Fields":
        """An object within this one."""
        value = self._value(name, REQUIRED)
        return self._within(name, value) if isinstance(value, Mapping) else self.fail(name, "an object")

    def items(self, name: str) -> "list[Fields]":
        """A list of objects."""
        value = self._value(name, REQUIRED)
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            self.fail(name, "a list of objects")
        return [self._within(f"{name}[{i}]", each) for i, each in enumerate(value)]

    def serve(self, name: str, *served: Any, default: Any = None, words: str = "") -> Any:
        """A field that decides what is computed, of which only some values are: those `served`.

        `words` say it once more, for people.

        Raises:
          ValueError: It is another one. The checkpoint may be right, but it is not served.
        """
        value = self.values.get(name, default)
        if any(type(value) is type(each) and value == each for each in served):
            return value
        expected = repr(served[0]) if len(served) == 1 else f"one of {served}"
        place = "" if self.file is None else f"{self.file}: "
        raise ValueError(f"{place}{self.path}{name} must be {expected}{words}, got {shown(value)}")

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raises the error of a field that is not as expected."""
        if name not in self.values:
            self.require(name)
        raise self.error(f"{self.path}{name} must be {expected}, got {shown(self.values[name])}")

    def error(self, message: str) -> Exception:
        """An error that names the file, for what several fields have to do with each other."""
        return self._error(message if self.file is None else f"{self.file}: {message}")

    def _error(self, message: str) -> Exception:
        return ValueError(message) if self.file is None else CheckpointError(message)

    def _value(self, name: str, default: Any) -> Any:
        if name not in self.values and default is REQUIRED:
            self.require(name)
        return self.values.get(name, default)

    def _within(self, name: str, values: Mapping[str, Any]) -> "Fields":
        return Fields(values, self.file, f"{self.path}{name}.")


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _float32(value: Any) -> float:
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf


def _range(least: float | None, most: float | None, above: float | None = None) -> str:
    if least is not None and most is not None:
        return f" in [{least}, {most}]"
    bounds = {"above": above, "of at least": least, "of at most" if above is None else "and at most": most}
    return "".join(f" {words} {bound}" for words, bound in bounds.items() if bound is not None)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
