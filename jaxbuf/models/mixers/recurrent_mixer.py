"""What all recurrent mixers have in common: their sizes, and their memory."""

import dataclasses
from typing import ClassVar

from jaxbuf.models.config import RECURRENCE
from jaxbuf.recurrence.recurrent_memory import RecurrentCache, RecurrentShared, init_recurrent
from jaxbuf.recurrence.spec import RecurrenceSpec


@dataclasses.dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with a recurrence, and a short convolution over q, k and v in front of it.

    Attributes:
      spec: The recurrence.
      width: Taps of the convolution.
      eps: Of the norm behind the recurrence.
    """

    spec: RecurrenceSpec
    width: int
    eps: float

    kind: ClassVar = RECURRENCE

    @property
    def kv_numbers(self) -> int:
        return 0

    @property
    def axes(self) -> dict[str, int]:
        return {"heads": self.spec.heads, "key_heads": self.spec.key_heads}

    @property
    def channels(self) -> int:
        return self.spec.channels

    def memory(self, shared: RecurrentShared, dtypes) -> RecurrentCache:
        given = {name: getattr(dtypes, name) for name in ("dtype", "entry_dtype", "state_dtype")}
        return init_recurrent(self.spec, shared.cursor, channels=self.channels, width=self.width, **given)
