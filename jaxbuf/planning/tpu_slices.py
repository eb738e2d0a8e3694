"""The chips that a plan may be for: how much memory each has, and how fast it reads it, as their makers say."""

import dataclasses
import re

from jaxbuf.target import CHIPS, Target

GIB, MOST_CHIPS = 2**30, 9216


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
      memory_bytes: Of its high-bandwidth memory.
      bandwidth: Bytes a second at which it reads that memory, at the most.
      devices: What JAX calls devices, of which each has its share of both.
    """

    memory_bytes: int
    bandwidth: float
    devices: int = 1


# Google Cloud's pages on TPU v4, v5e, v5p, v6e and TPU7x ("System architecture", docs.cloud.google.com/tpu/docs), read
# in November 2026. Where a page says GB of a memory that is sold in powers of two, those are GiB.
CHIPS_OF_TPUS = {
    "v4": Chip(32 * GIB, 1228e9),
    "v5e": Chip(16 * GIB, 819e9),
    "v5p": Chip(95 * GIB, 2765e9),
    "v6e": Chip(32 * GIB, 1638e9),
    "tpu7x": Chip(192 * GIB, 7380e9, devices=2),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one kind over which a model is spread by its heads.

    Attributes:
      name: As it was asked for.
      generation: Of the chips.
      chips: How many.
      devices: How many there are to JAX.
      memory_bytes: Of each device.
      bandwidth: Bytes a second of each device.
    """

    name: str
    generation: str
    chips: int
    devices: int
    memory_bytes: int
    bandwidth: float

    @property
    def target(self) -> Target:
        """What programs for it are compiled for."""
        return Target("tpu", self.generation)


def find_slice(name: str) -> Slice:
    """The slice of a name such as "v6e-4": a generation of TPUs and a number of chips, of which it has one if none is
    named.

    Raises:
      ValueError: It is no such name.
    """
    found = re.fullmatch(r"([a-z0-9]+)(?:-(\d+))?", name.strip().lower()) if isinstance(name, str) else None
    chips = int(found[2] or 1) if found else 0
    if not found or found[1] not in CHIPS_OF_TPUS or not 1 <= chips <= MOST_CHIPS:
        raise ValueError(
            f"device must be one of {', '.join(CHIPS_OF_TPUS)}, with the number of its chips as in v6e-4 "
            f"(at most {MOST_CHIPS}), got {name!r}"
        )
    chip, devices = CHIPS_OF_TPUS[found[1]], chips * CHIPS_OF_TPUS[found[1]].devices
    each = chip.memory_bytes // chip.devices, chip.bandwidth / chip.devices
    return Slice(name, CHIPS[found[1]].generation, chips, devices, *each)
