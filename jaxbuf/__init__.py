"""Serve linear-attention and hybrid language models from JAX by moving fewer bytes.

import jaxbuf
lm = jaxbuf.load("demo")
results = jaxbuf.generate(lm, ["The buffer is"], max_new_tokens=64)
"""

import importlib
from typing import TYPE_CHECKING

import jaxbuf.imported  # noqa: F401  # first: it takes the time
from jaxbuf.version import __version__

if TYPE_CHECKING:
    from jaxbuf.compilation import cache_compilations
    from jaxbuf.exported import ExportedModel, load_exported
    from jaxbuf.models.language_model import LanguageModel, load
    from jaxbuf.models.loading.checkpoint import CheckpointError
    from jaxbuf.models.scoring import sequence_logprobs
    from jaxbuf.planning.memory_plan import plan
    from jaxbuf.serving import Beam, Event, GenerationResult, SamplingParams, beam_search, generate
    from jaxbuf.serving.export import export

__all__ = [
    "Beam",
    "CheckpointError",
    "Event",
    "ExportedModel",
    "GenerationResult",
    "LanguageModel",
    "SamplingParams",
    "__version__",
    "beam_search",
    "cache_compilations",
    "export",
    "generate",
    "load",
    "load_exported",
    "plan",
    "sequence_logprobs",
]

# JAX takes a second to import, which `jaxbuf --help` need not wait for.
_HOME = {
    "CheckpointError": "jaxbuf.models.loading.checkpoint",
    "LanguageModel": "jaxbuf.models.language_model",
    "ExportedModel": "jaxbuf.exported",
    "cache_compilations": "jaxbuf.compilation",
    "export": "jaxbuf.serving.export",
    "load_exported": "jaxbuf.exported",
    "load": "jaxbuf.models.language_model",
    "plan": "jaxbuf.planning.memory_plan",
    "sequence_logprobs": "jaxbuf.models.scoring",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'jaxbuf' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "jaxbuf.serving")), name)
