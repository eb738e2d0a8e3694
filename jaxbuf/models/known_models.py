"""Published models that are known by name, without a download: what their config.json says, in known.json.

A model is an entry of that file, from which everything else is made: its ModelConfig, the count of its parameters, the
sizes of its memory, and a random model like it. An entry has

    config       the fields of config.json that sizes and programs depend on; multipliers (muP) are left out, for they
                 change no size
    published    how many parameters the published model has
    counted      which count that is, in words
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jaxbuf.models.config import ModelConfig
from jaxbuf.models.families import config_from_dict


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A published model.

    Attributes:
      name: As its publishers write it, without the organisation.
      published: Its parameters.
      counted: Which count of them that is.
      fields: Of config.json.
    """

    name: str
    published: int
    counted: str
    fields: Mapping[str, Any]

    @functools.cached_property
    def config(self) -> ModelConfig:
        """What the decoder is built from."""
        return config_from_dict(self.fields)


@functools.cache
def known_models() -> Mapping[str, KnownModel]:
    """All of them by name, in the order of the file."""
    entries = json.loads((resources.files("jaxbuf.models") / "known.json").read_text())
    return {
        name: KnownModel(name, entry["published"], entry["counted"], entry["config"]) for name, entry in entries.items()
    }


def find_known(name: str) -> KnownModel | None:
    """The model of that name, in whatever case and with whatever hyphens; None: none is known."""
    return {plain(known): model for known, model in known_models().items()}.get(plain(name))


def plain(name: str) -> str:
    """A name in lower case, without what is written in more than one way: "Mamba-2 2.7B" and "mamba2-2.7b" are one."""
    return name.lower().translate(dict.fromkeys(map(ord, "-_ ")))
