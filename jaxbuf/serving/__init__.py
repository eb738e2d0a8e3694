"""Generation: sampling, the jitted loop, and the functions over it that take and give text."""

from jaxbuf.serving.beams import Beam, beam_search
from jaxbuf.serving.generate import generate
from jaxbuf.serving.loop import Carry, generate_tokens, start
from jaxbuf.serving.result import Event, GenerationResult
from jaxbuf.serving.sampling import SamplingParams
from jaxbuf.serving.stats import Stats

__all__ = [
    "Beam",
    "Carry",
    "Event",
    "GenerationResult",
    "SamplingParams",
    "Stats",
    "beam_search",
    "generate",
    "generate_tokens",
    "start",
]
