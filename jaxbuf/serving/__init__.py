"""Generation: sampling, the jitted loop, and the functions over it that take and give text."""

from jaxbuf.serving.admit import admit, init_carry, release
from jaxbuf.serving.arrivals import Arrivals, Beginning
from jaxbuf.serving.beams import Beam, beam_search
from jaxbuf.serving.carry import Carry, CarrySizes
from jaxbuf.serving.generation import generate
from jaxbuf.serving.loop import generate_tokens
from jaxbuf.serving.result import Event, GenerationResult
from jaxbuf.serving.room import make_room
from jaxbuf.serving.sampling import SamplingParams
from jaxbuf.serving.stats import Stats

__all__ = [
    "Arrivals",
    "Beam",
    "Beginning",
    "Carry",
    "CarrySizes",
    "Event",
    "GenerationResult",
    "SamplingParams",
    "Stats",
    "admit",
    "beam_search",
    "generate",
    "generate_tokens",
    "init_carry",
    "make_room",
    "release",
]
