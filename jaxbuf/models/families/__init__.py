"""Model families, one module each: how config.json describes a model, and under which names its tensors are stored.

A family is a module of this folder; nothing else names it. It has

    MODEL_TYPES                      the values of config.json's model_type that are its
    UNTYPED                          (optional) a field that only its config.json have of those without a model_type
    SERVED                           what of them is served, for people
    IGNORED                          patterns (fnmatch) of the names of tensors that are not read; {layers} in them is
                                     how many layers there are
    read_config(fields)              Fields -> ModelConfig; errors as `Fields` gives them
    config_json(config)              ModelConfig -> the config.json that `read_config` reads back
    as_stored(config, names)         the ModelConfig as the names of the tensors have it
    tensors(config, names=())        path of a parameter -> Source; names: of the tensors that are there, if there are

A ModelConfig's `family` is the name of its module, and `source` what config.json said, with a method `model()` that
makes the ModelConfig again. `jaxbuf.models.loading.common_fields` has what several families read in the same way.
docs/adding_a_family.rst shows how to add one.
"""

import functools
import importlib
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.loading.block_scaled import read_block
from jaxbuf.models.loading.fields import Fields
from jaxbuf.models.loading.source import Rows as Rows
from jaxbuf.models.loading.source import Source as Source
from jaxbuf.shown import shown


class Family(Protocol):
    """A module of this folder; the package's docstring says what its functions do."""

    MODEL_TYPES: tuple[str, ...]
    SERVED: str
    IGNORED: tuple[str, ...]

    def read_config(self, fields: Fields) -> ModelConfig: ...
    def config_json(self, config: ModelConfig) -> dict[str, Any]: ...
    def as_stored(self, config: ModelConfig, names: Collection[str]) -> ModelConfig: ...
    def tensors(self, config: ModelConfig, names: Collection[str] = ()) -> Mapping[str, Source]: ...


@functools.cache
def families() -> dict[str, Family]:
    """All families, by the name of their module."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: cast(Family, importlib.import_module(f"{__name__}.{name}")) for name in names}


def family_of(config: ModelConfig) -> Family:
    """The family that made a configuration."""
    return families()[config.family]


def read_config(fields: Fields) -> ModelConfig:
    """The configuration that the fields of a config.json describe; where they are those of a file, errors name it.

    Raises:
      CheckpointError: A field of the file is missing, of another type or out of range.
      ValueError: The architecture, a setting or the quantization is not served; or, where no file is known, any of the
        above.
    """
    read_block(fields)
    found = families().values()
    if "model_type" not in fields.values:
        untyped = [family for family in found if getattr(family, "UNTYPED", None) in fields.values]
        if untyped:
            return untyped[0].read_config(fields)
    served = {kind: family for family in found for kind in family.MODEL_TYPES}
    words = ", ".join(family.SERVED for family in found)
    return served[fields.serve("model_type", *served, words=f" (jaxbuf serves {words})")].read_config(fields)


def config_from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """As `read_config`, for what config.json holds.

    Args:
      data: Its names and values.

    Raises:
      ValueError: As `read_config`, or it is no mapping.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a configuration must be a mapping of names to values, got {shown(data)}")
    return read_config(Fields(data))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a checkpoint; `config_from_dict` reads it back.

    Args:
      config: Of any family.
    """
    return family_of(config).config_json(config)
